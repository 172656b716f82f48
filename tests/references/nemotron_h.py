"""Nemotron-H (``mtp.layers.{0, 1}``): attention without positions, then squared-ReLU experts.

From vLLM's ``nemotron_h_mtp.py``, NeMo's ``common/mtp`` and the parameters of mlx-lm's layers.
"""

from __future__ import annotations

import numpy as np

from .common import attend, rms_norm, sigmoid


def mlp(x, w, prefix):
    return np.maximum(x @ w[f"{prefix}.up_proj.weight"].T, 0) ** 2 @ w[
        f"{prefix}.down_proj.weight"
    ].T  # fmt: skip


def attention(x, w, prefix, config):
    size, rows = config["head_dim"], len(x)
    q, k, v = ((x @ w[f"{prefix}.{part}_proj.weight"].T).reshape(rows, -1, size) for part in "qkv")
    return attend(q, k, v, size**-0.5).reshape(rows, -1) @ w[f"{prefix}.o_proj.weight"].T


def experts(x, w, prefix, config):
    """Sigmoid scores; their correction only chooses; all in a smaller space if there is one."""
    scores = sigmoid(x @ w[f"{prefix}.gate.weight"].T)
    chosen = scores + w[f"{prefix}.gate.e_score_correction_bias"]
    latent = f"{prefix}.fc1_latent_proj.weight" in w
    read = x @ w[f"{prefix}.fc1_latent_proj.weight"].T if latent else x
    out = np.zeros_like(read)
    for row in range(len(x)):
        best = np.argsort(-chosen[row])[: config["num_experts_per_tok"]]
        share = scores[row, best] / scores[row, best].sum() * config["routed_scaling_factor"]
        for expert, part in zip(best, share, strict=True):
            out[row] += part * mlp(read[row : row + 1], w, f"{prefix}.experts.{expert}")[0]
    if latent:
        out = out @ w[f"{prefix}.fc2_latent_proj.weight"].T
    return out + mlp(x, w, f"{prefix}.shared_experts")


def head_logits(w, config, hidden, tokens):
    """(L, V) of every row; hidden (L, D) of the trunk, tokens (L,) the one after each."""
    eps, first, last = config["layer_norm_epsilon"], "mtp.layers.0", "mtp.layers.1"
    e = rms_norm(w["backbone.embeddings.weight"][tokens], w[f"{first}.enorm.weight"], eps)
    h = rms_norm(hidden, w[f"{first}.hnorm.weight"], eps)
    x = np.concatenate([e, h], -1) @ w[f"{first}.eh_proj.weight"].T
    x = x + attention(rms_norm(x, w[f"{first}.norm.weight"], eps), w, f"{first}.mixer", config)
    x = x + experts(rms_norm(x, w[f"{last}.norm.weight"], eps), w, f"{last}.mixer", config)
    return rms_norm(x, w[f"{last}.final_layernorm.weight"], eps) @ w["lm_head.weight"].T
