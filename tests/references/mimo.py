"""MiMo and MiMo-V2-Flash, after the descriptions in vLLM and SGLang (see ``mtplx.families.mimo``).

Only the projection's input differs: [hidden; embedding] in MiMo, [embedding; hidden] in V2.
"""

from __future__ import annotations

import numpy as np

from .common import attend, rms_norm, rotate, swiglu


def _split(x, w, prefix, heads, sizes):
    """Query, key, value (L, heads, size) of x (L, D), with biases where there are some."""
    for part, count, size in zip("qkv", heads, sizes, strict=True):
        bias = w.get(f"{prefix}.{part}_proj.bias", 0.0)
        yield (x @ w[f"{prefix}.{part}_proj.weight"].T + bias).reshape(len(x), count, size)


def _block(x, w, at, attention, second_norm, eps):
    """A decoder layer: attention, then a dense MLP, each behind a norm and with what it read."""
    normed = rms_norm(x, w[f"{at}.input_layernorm.weight"], eps)
    mixed = attention(normed, w, f"{at}.self_attn")
    x = x + mixed.reshape(len(x), -1) @ w[f"{at}.self_attn.o_proj.weight"].T
    return x + swiglu(rms_norm(x, w[f"{at}.{second_norm}.weight"], eps), w, f"{at}.mlp")


def mimo_logits(weights, config, hidden, tokens, index=0):
    """(L, V) of every row; hidden (L, D) before the trunk's final norm."""
    w, eps, at = weights, config["rms_norm_eps"], f"model.mtp_layers.{index}"
    count, kv = config["num_attention_heads"], config["num_key_value_heads"]
    size = config["hidden_size"] // count

    def attention(x, w, prefix):
        q, k, v = _split(x, w, prefix, (count, kv, kv), (size, size, size))
        q, k = (rotate(part, config["rope_theta"], size) for part in (q, k))
        return attend(q, k, v, size**-0.5)

    e = rms_norm(w["model.embed_tokens.weight"][tokens], w[f"{at}.token_layernorm.weight"], eps)
    h = rms_norm(hidden, w[f"{at}.hidden_layernorm.weight"], eps)
    x = np.concatenate([h, e], -1) @ w[f"{at}.input_proj.weight"].T
    x = _block(x, w, at, attention, "post_attention_layernorm", eps)
    return rms_norm(x, w[f"{at}.final_layernorm.weight"], eps) @ w["lm_head.weight"].T


def mimo_v2_logits(weights, config, hidden, tokens, index=0):
    """(L, V) of every row; hidden (L, D) before the trunk's final norm, for every head."""
    w, eps, at = weights, config["layernorm_epsilon"], f"model.mtp.layers.{index}"
    count, kv = config["swa_num_attention_heads"], config["swa_num_key_value_heads"]
    size, value_size = config["swa_head_dim"], config["swa_v_head_dim"]
    rotated = int(config["partial_rotary_factor"] * size)

    def attention(x, w, prefix):
        q, k, v = _split(x, w, prefix, (count, kv, kv), (size, size, value_size))
        q, k = (rotate(part, config["swa_rope_theta"], rotated) for part in (q, k))
        return attend(
            q, k, config["attention_value_scale"] * v, size**-0.5,
            window=config["sliding_window_size"], sinks=w[f"{prefix}.attention_sink_bias"],
        )  # fmt: skip

    e = rms_norm(w["model.embed_tokens.weight"][tokens], w[f"{at}.enorm.weight"], eps)
    h = rms_norm(hidden, w[f"{at}.hnorm.weight"], eps)
    x = np.concatenate([e, h], -1) @ w[f"{at}.eh_proj.weight"].T
    x = _block(x, w, at, attention, "pre_mlp_layernorm", eps)
    return rms_norm(x, w[f"{at}.final_layernorm.weight"], eps) @ w["lm_head.weight"].T
