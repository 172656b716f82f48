"""ERNIE-4.5 with experts, after FastDeploy's description: the trunk's final norm ends the head."""

from __future__ import annotations

import numpy as np

from .common import attend, rms_norm, rotate, silu


def _linear(x, w, name):
    return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)


def head_logits(weights, config, hidden, tokens, index=0):
    """(L, V) of every row; hidden (L, D) after the trunk's final norm."""
    w, eps, at = weights, config["rms_norm_eps"], f"model.mtp_block.{index}"
    count, size = config["num_attention_heads"], config["head_dim"]
    embedding = w["model.embed_tokens.weight"]
    e = rms_norm(embedding[tokens], w[f"model.mtp_emb_norm.{index}.weight"], eps)
    h = rms_norm(hidden, w[f"model.mtp_hidden_norm.{index}.weight"], eps)
    x = _linear(np.concatenate([e, h], -1), w, f"model.mtp_linear_proj.{index}")

    normed = rms_norm(x, w[f"{at}.input_layernorm.weight"], eps)
    q, k, v = (
        _linear(normed, w, f"{at}.self_attn.{part}_proj").reshape(len(x), -1, size)
        for part in "qkv"
    )
    q, k = (rotate(part, config["rope_theta"], size, interleaved=True) for part in (q, k))
    mixed = attend(q, k, v, size**-0.5).reshape(len(x), count * size)
    x = x + _linear(mixed, w, f"{at}.self_attn.o_proj")

    normed = rms_norm(x, w[f"{at}.post_attention_layernorm.weight"], eps)
    gate, up = (_linear(normed, w, f"{at}.mlp.{part}_proj") for part in ("gate", "up"))
    x = x + _linear(silu(gate) * up, w, f"{at}.mlp.down_proj")
    output = embedding if config["tie_word_embeddings"] else w["lm_head.weight"]
    return rms_norm(x, w["model.norm.weight"], eps) @ output.T
