"""Step-3.5 (``model.layers.{N + i}``, norms stored as w - 1): a chain of dense blocks.

From vLLM's ``step3p5.py`` and ``step3p5_mtp.py`` and NeMo's ``step3p7/mtp.py``.
"""

from __future__ import annotations

import numpy as np

from .common import attend, rms_norm, rotate, sigmoid, silu


def entry(values, place, default):
    return values[place] if isinstance(values, list) else values or default


def block(x, w, config, place):
    """Layer ``place``, by its entries in the configuration's lists."""
    at, size, rows = f"model.layers.{place}", config["head_dim"], len(x)

    def norm(y, name):
        return rms_norm(y, 1 + w[f"{at}.{name}.weight"], config["rms_norm_eps"])

    def linear(y, name):
        return y @ w[f"{at}.{name}.weight"].T

    y = norm(x, "input_layernorm")
    q, k, v = (linear(y, f"self_attn.{part}_proj").reshape(rows, -1, size) for part in "qkv")
    q, k = norm(q, "self_attn.q_norm"), norm(k, "self_attn.k_norm")
    theta = entry(config["rope_theta"], place, 10000.0)
    dims = int(size * entry(config["partial_rotary_factors"], place, 1.0))
    q, k = (rotate(part, theta, dims) for part in (q, k))
    sliding = config["layer_types"][place] == "sliding_attention"
    out = attend(q, k, v, size**-0.5, config["sliding_window"] if sliding else None)
    out = out * sigmoid(linear(y, "self_attn.g_proj"))[..., None]  # one gate a head
    x = x + linear(out.reshape(rows, -1), "self_attn.o_proj")
    y = norm(x, "post_attention_layernorm")
    gate, up = silu(linear(y, "mlp.gate_proj")), linear(y, "mlp.up_proj")
    limit = entry(config["swiglu_limits_shared"], place, 0.0)
    if limit:
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return x + linear(gate * up, "mlp.down_proj")


def head_hidden(index):
    """What head ``index`` gives and the next one reads; hidden is that of the one before it."""

    def hidden_states(w, config, hidden, tokens):
        place, eps = config["num_hidden_layers"] + index, config["rms_norm_eps"]
        at = f"model.layers.{place}"
        e = rms_norm(w["model.embed_tokens.weight"][tokens], 1 + w[f"{at}.enorm.weight"], eps)
        h = rms_norm(hidden, 1 + w[f"{at}.hnorm.weight"], eps)
        return block(np.concatenate([e, h], -1) @ w[f"{at}.eh_proj.weight"].T, w, config, place)

    return hidden_states


def head_logits(index):
    """The logits of head ``index``."""

    def logits(w, config, hidden, tokens):
        x = head_hidden(index)(w, config, hidden, tokens)
        own = f"model.layers.{config['num_hidden_layers'] + index}.transformer.shared_head"
        x = rms_norm(x, 1 + w[f"{own}.norm.weight"], config["rms_norm_eps"])
        return x @ w[f"{own}.output.weight"].T

    return logits
