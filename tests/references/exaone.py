"""EXAONE-MoE (``mtp.*``, plain norms), after vLLM's description: no rotation with full attention
in a model that has a sliding window elsewhere.
"""

from __future__ import annotations

import numpy as np

from .common import attend, rms_norm, rotate, sigmoid, swiglu


def attention(x, w, prefix, config, kind):
    size, eps = config["head_dim"], config["rms_norm_eps"]
    q, k, v = (
        (x @ w[f"{prefix}.{part}_proj.weight"].T).reshape(len(x), -1, size) for part in "qkv"
    )
    q, k = rms_norm(q, w[f"{prefix}.q_norm.weight"], eps), rms_norm(
        k, w[f"{prefix}.k_norm.weight"], eps
    )  # fmt: skip
    sliding = kind == "sliding_attention"
    if sliding or "sliding_attention" not in config["layer_types"]:
        q, k = (rotate(part, config["rope_theta"], size) for part in (q, k))
    mixed = attend(q, k, v, size**-0.5, window=config["sliding_window"] if sliding else None)
    return mixed.reshape(len(x), -1) @ w[f"{prefix}.o_proj.weight"].T


def experts(x, w, prefix, config):
    """The best k by sigmoid plus bias, weighted by the sigmoid alone, and a shared one."""
    scores = sigmoid(x @ w[f"{prefix}.gate.weight"].T)
    out = swiglu(x, w, f"{prefix}.shared_experts")
    for row, score in enumerate(scores):
        biased = score + w[f"{prefix}.e_score_correction_bias"]
        best = np.argsort(-biased)[: config["num_experts_per_tok"]]
        for expert in best:
            part = config["routed_scaling_factor"] * score[expert] / score[best].sum()
            out[row] += part * swiglu(x[row : row + 1], w, f"{prefix}.experts.{expert}")[0]
    return out


def head_logits(weights, config, hidden, tokens):
    """(L, V) of every row; hidden (L, D) after the trunk's final norm."""
    w, eps, at = weights, config["rms_norm_eps"], "mtp.layers.0"
    kind = config.get("mtp_layer_types", config["layer_types"])[0]
    embedded = w["model.embed_tokens.weight"][tokens]
    e = rms_norm(embedded, w["mtp.pre_fc_norm_embedding.weight"], eps)
    h = rms_norm(hidden, w["mtp.pre_fc_norm_hidden.weight"], eps)
    x = np.concatenate([e, h], -1) @ w["mtp.fc.weight"].T
    normed = rms_norm(x, w[f"{at}.input_layernorm.weight"], eps)
    x = x + attention(normed, w, f"{at}.self_attn", config, kind)
    normed = rms_norm(x, w[f"{at}.post_attention_layernorm.weight"], eps)
    moe = f"{at}.mlp.gate.weight" in w
    x = x + (experts(normed, w, f"{at}.mlp", config) if moe else swiglu(normed, w, f"{at}.mlp"))
    return rms_norm(x, w["mtp.norm.weight"], eps) @ w["lm_head.weight"].T
