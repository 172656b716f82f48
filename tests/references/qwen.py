"""Qwen3-Next, Qwen3.5 (``mtp.*``, norms stored as w - 1): full attention with an output gate."""

from __future__ import annotations

import numpy as np

from .common import attend, rms_norm, rotate, sigmoid, softmax, swiglu


def attention(x, w, prefix, config, eps):
    """Each head of q_proj gives a query and, behind it, a gate of the same size."""
    size, rows = config["head_dim"], len(x)
    both = (x @ w[f"{prefix}.q_proj.weight"].T).reshape(rows, -1, 2 * size)
    q, gate = both[..., :size], both[..., size:]
    k, v = (
        (x @ w[f"{prefix}.{part}_proj.weight"].T).reshape(rows, -1, size) for part in ("k", "v")
    )
    q = rms_norm(q, 1 + w[f"{prefix}.q_norm.weight"], eps)
    k = rms_norm(k, 1 + w[f"{prefix}.k_norm.weight"], eps)
    rope = config.get("rope_parameters") or config
    dims = int(size * rope["partial_rotary_factor"])
    q, k = (rotate(part, rope["rope_theta"], dims) for part in (q, k))
    out = attend(q, k, v, size**-0.5) * sigmoid(gate)
    return out.reshape(rows, -1) @ w[f"{prefix}.o_proj.weight"].T


def experts(x, w, prefix, config):
    """Softmax over all experts, the best k renormalised, and a gated shared one."""
    law = softmax(x @ w[f"{prefix}.gate.weight"].T)
    out = np.zeros_like(x)
    for row, p in enumerate(law):
        best = np.argsort(-p)[: config["num_experts_per_tok"]]
        share = p[best] / (p[best].sum() if config.get("norm_topk_prob", True) else 1.0)
        for expert, part in zip(best, share, strict=True):
            out[row] += part * swiglu(x[row : row + 1], w, f"{prefix}.experts.{expert}")[0]
    shared = swiglu(x, w, f"{prefix}.shared_expert")
    return out + sigmoid(x @ w[f"{prefix}.shared_expert_gate.weight"].T) * shared


def head_logits(weights, config, hidden, tokens):
    """(L, V) of every row; hidden (L, D) of the trunk, tokens (L,) the one after each."""
    w, eps = weights, config["rms_norm_eps"]
    embedding = w["model.embed_tokens.weight"]
    e = rms_norm(embedding[tokens], 1 + w["mtp.pre_fc_norm_embedding.weight"], eps)
    h = rms_norm(hidden, 1 + w["mtp.pre_fc_norm_hidden.weight"], eps)
    x = np.concatenate([e, h], -1) @ w["mtp.fc.weight"].T
    at = "mtp.layers.0"
    normed = rms_norm(x, 1 + w[f"{at}.input_layernorm.weight"], eps)
    x = x + attention(normed, w, f"{at}.self_attn", config, eps)
    normed = rms_norm(x, 1 + w[f"{at}.post_attention_layernorm.weight"], eps)
    moe = f"{at}.mlp.gate.weight" in w
    x = x + (experts(normed, w, f"{at}.mlp", config) if moe else swiglu(normed, w, f"{at}.mlp"))
    return rms_norm(x, 1 + w["mtp.norm.weight"], eps) @ w["lm_head.weight"].T
