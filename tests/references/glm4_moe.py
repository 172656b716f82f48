"""GLM-4.5, 4.6 and 4.7: grouped-query attention that rotates a part, experts as DeepSeek's.

From the GLM-4.5 report (arXiv 2508.06471) and transformers' modeling code.
"""

from __future__ import annotations

from .common import attend, rms_norm, rotate
from .deepseek import head, published


def attention(x, w, prefix, config):
    """With biases on q, k and v, and norms on q and k in the large model."""
    size, eps = config["head_dim"], config["rms_norm_eps"]
    q, k, v = (
        (x @ w[f"{prefix}.{part}_proj.weight"].T + w.get(f"{prefix}.{part}_proj.bias", 0.0))
        .reshape(len(x), -1, size)
        for part in "qkv"
    )  # fmt: skip
    if config["use_qk_norm"]:
        q = rms_norm(q, w[f"{prefix}.q_norm.weight"], eps)
        k = rms_norm(k, w[f"{prefix}.k_norm.weight"], eps)
    dims = int(size * config["partial_rotary_factor"])
    q, k = (rotate(part, config["rope_theta"], dims) for part in (q, k))
    out = attend(q, k, v, size**-0.5).reshape(len(x), -1)
    return out @ w[f"{prefix}.o_proj.weight"].T


def head_logits(weights, config, hidden, tokens, index=0):
    """(L, V) of every row; hidden (L, D) of the trunk or of the head before, tokens (L,)."""
    w, at = published(weights, config), config["num_hidden_layers"] + index
    prefix = f"model.layers.{at}.self_attn"
    return head(w, config, hidden, tokens, index, lambda x: attention(x, w, prefix, config))
