"""LongCat-Flash (``model.mtp``): latent attention whose two low ranks are scaled, then SwiGLU.

From vLLM's ``longcat_flash_mtp.py`` and SGLang's ``longcat_flash_nextn.py``: q by sqrt(D / q
rank), the latent by sqrt(D / kv rank), both behind their norms; rotary pairs are (2 i, 2 i + 1).
"""

from __future__ import annotations

import numpy as np

from .common import attend, rms_norm, rotate, swiglu


def keys_and_values(latent, w, prefix, heads, nope):
    """From one matrix as published, or from two for every head as mlx-lm stores it."""
    if f"{prefix}.kv_b_proj.weight" in w:
        both = (latent @ w[f"{prefix}.kv_b_proj.weight"].T).reshape(len(latent), heads, -1)
        return both[..., :nope], both[..., nope:]
    return (
        np.einsum("lr,hrn->lhn", latent, w[f"{prefix}.embed_q.weight"]),
        np.einsum("lr,hvr->lhv", latent, w[f"{prefix}.unembed_out.weight"]),
    )


def attention(x, w, prefix, config):
    """Every head's key is its own part of the latent and one rotary part that all share."""
    rows, eps = len(x), config["rms_norm_eps"]
    heads, rank, rope = (
        config[key] for key in ("num_attention_heads", "kv_lora_rank", "qk_rope_head_dim")
    )
    nope = config["qk_nope_head_dim"]
    low = rms_norm(x @ w[f"{prefix}.q_a_proj.weight"].T, w[f"{prefix}.q_a_layernorm.weight"], eps)
    low = low * (config["hidden_size"] / config["q_lora_rank"]) ** 0.5
    q = (low @ w[f"{prefix}.q_b_proj.weight"].T).reshape(rows, heads, nope + rope)
    both = x @ w[f"{prefix}.kv_a_proj_with_mqa.weight"].T
    latent = rms_norm(both[:, :rank], w[f"{prefix}.kv_a_layernorm.weight"], eps)
    latent = latent * (config["hidden_size"] / rank) ** 0.5
    keys, values = keys_and_values(latent, w, prefix, heads, nope)
    turned = rotate(q[..., nope:], config["rope_theta"], rope, interleaved=True)
    shared = rotate(both[:, None, rank:], config["rope_theta"], rope, interleaved=True)
    q = np.concatenate([q[..., :nope], turned], -1)
    k = np.concatenate([keys, np.repeat(shared, heads, 1)], -1)
    out = attend(q, k, values, (nope + rope) ** -0.5)
    return out.reshape(rows, -1) @ w[f"{prefix}.o_proj.weight"].T


def head_logits(w, config, hidden, tokens):
    """(L, V) of every row; hidden (L, D) of the trunk, tokens (L,) the one after each."""
    eps, at = config["rms_norm_eps"], "model.mtp.layers.0"
    own = w.get("model.mtp.embed_tokens.weight")
    embedding = w["model.embed_tokens.weight"] if own is None else own
    e = rms_norm(embedding[tokens], w[f"{at}.enorm.m.weight"], eps)
    h = rms_norm(hidden, w[f"{at}.hnorm.m.weight"], eps)
    x = np.concatenate([e, h], -1) @ w[f"{at}.eh_proj.weight"].T
    normed = rms_norm(x, w[f"{at}.input_layernorm.weight"], eps)
    x = x + attention(normed, w, f"{at}.self_attn", config)
    normed = rms_norm(x, w[f"{at}.post_attention_layernorm.weight"], eps)
    x = x + swiglu(normed, w, f"{at}.transformer_layer.mlp")
    return rms_norm(x, w["model.mtp.norm.weight"], eps) @ w["lm_head.weight"].T
