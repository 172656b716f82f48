"""DeepSeek-V3, V3.2, GLM-5 and GLM-4.7-Flash: latent attention, its indexer, noaux_tc experts.

From the DeepSeek-V2 and V3 reports (arXiv 2405.04434, 2412.19437), DeepSeek's published modeling
code and, for the indexer, the report and code of DeepSeek-V3.2-Exp.
"""

from __future__ import annotations

import math

import numpy as np

from .common import attend, rms_norm, sigmoid, softmax, swiglu

LATENT_EPS = 1e-6  # of the norms of the latents, whatever the model's own


def yarn(theta, dims, scaling):
    """Angle of a pair per position, (dims / 2,), and the factor of the attention's scale."""
    inverse = theta ** (-np.arange(0, dims, 2) / dims)
    if "factor" not in scaling:
        return inverse, 1.0
    turns = [
        dims * math.log(scaling["original_max_position_embeddings"] / (2 * math.pi * scaling[key]))
        / (2 * math.log(theta))
        for key in ("beta_fast", "beta_slow")
    ]  # fmt: skip
    low, high = max(math.floor(turns[0]), 0), min(math.ceil(turns[1]), dims - 1)
    slow = np.clip((np.arange(dims // 2) - low) / (high - low), 0, 1)
    mscale = 0.1 * scaling["mscale_all_dim"] * math.log(scaling["factor"]) + 1
    return inverse * (1 - slow) + inverse / scaling["factor"] * slow, mscale**2


def turn(x, inverse, *, interleaved=True):
    """Rotary embedding of x (L, H, 2 n): pairs (2 i, 2 i + 1), or (i, i + n)."""
    angle = np.arange(len(x))[:, None, None] * inverse
    cos, sin = np.cos(angle), np.sin(angle)
    half = x.shape[-1] // 2
    even, odd = (x[..., ::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    return np.concatenate([even * cos - odd * sin, odd * cos + even * sin], -1)


def indexed(x, latent, w, prefix, config):
    """Which rows each row sees, (L, L): the index_topk best of those before it and itself."""
    rows, size, dims = len(x), config["index_head_dim"], config["qk_rope_head_dim"]
    q = (latent @ w[f"{prefix}.wq_b.weight"].T).reshape(rows, -1, size)
    k = x @ w[f"{prefix}.wk.weight"].T
    k = (k - k.mean(-1, keepdims=True)) / np.sqrt(k.var(-1, keepdims=True) + 1e-6)
    k = (k * w[f"{prefix}.k_norm.weight"] + w[f"{prefix}.k_norm.bias"])[:, None]
    inverse, _ = yarn(config["theta"], dims, config["scaling"])
    form = {"interleaved": config["model_type"] == "glm_moe_dsa"}
    q, k = (
        np.concatenate([turn(part[..., :dims], inverse, **form), part[..., dims:]], -1)
        for part in (q, k)
    )
    share = x @ w[f"{prefix}.weights_proj.weight"].T
    scores = np.einsum("ihd,jd->hij", q, k[:, 0])
    scores = np.einsum("ih,hij->ij", share, np.maximum(scores, 0))
    scores = np.where(np.tri(rows, dtype=bool), scores, -np.inf)
    best = np.argsort(-scores, axis=-1)[:, : config["index_topk"]]
    seen = np.zeros((rows, rows), bool)
    np.put_along_axis(seen, best, True, axis=-1)
    return seen & np.tri(rows, dtype=bool)


def attention(x, w, prefix, config, eps):
    """Keys and values of every head come from one latent; one rotated key is for all heads."""
    rows, rank = len(x), config["kv_lora_rank"]
    nope, rope = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    if config["q_lora_rank"] is None:
        q = x @ w[f"{prefix}.q_proj.weight"].T
    else:
        latent = x @ w[f"{prefix}.q_a_proj.weight"].T
        latent = rms_norm(latent, w[f"{prefix}.q_a_layernorm.weight"], eps)
        q = latent @ w[f"{prefix}.q_b_proj.weight"].T
    q = q.reshape(rows, -1, nope + rope)
    both = x @ w[f"{prefix}.kv_a_proj_with_mqa.weight"].T
    kv = rms_norm(both[:, :rank], w[f"{prefix}.kv_a_layernorm.weight"], eps)
    kv = (kv @ w[f"{prefix}.kv_b_proj.weight"].T).reshape(rows, q.shape[1], -1)
    inverse, factor = yarn(config["theta"], rope, config["scaling"])
    shared = np.broadcast_to(turn(both[:, None, rank:], inverse), (*kv.shape[:2], rope))
    q = np.concatenate([q[..., :nope], turn(q[..., nope:], inverse)], -1)
    k, v = np.concatenate([kv[..., :nope], shared], -1), kv[..., nope:]
    scale = (nope + rope) ** -0.5 * factor
    if f"{prefix}.indexer.wk.weight" in w:
        seen = indexed(x, latent, w, f"{prefix}.indexer", config)
        scores = np.where(seen, np.einsum("ihd,jhd->hij", q, k) * scale, -np.inf)
        out = np.einsum("hij,jhd->ihd", softmax(scores), v)
    else:
        out = attend(q, k, v, scale)
    return out.reshape(rows, -1) @ w[f"{prefix}.o_proj.weight"].T


def experts(x, w, prefix, config):
    """Sigmoid scores; a bias helps to choose, among the best groups, but is no part of the sum."""
    scores = sigmoid(x @ w[f"{prefix}.gate.weight"].T)
    out = swiglu(x, w, f"{prefix}.shared_experts")
    for row, score in enumerate(scores):
        groups = np.split(score + w[f"{prefix}.gate.e_score_correction_bias"], config["n_group"])
        value = [np.sort(group)[-2:].sum() for group in groups]
        kept = np.argsort(value)[-config["topk_group"] :]
        choice = np.concatenate(
            [group if i in kept else np.full_like(group, -np.inf) for i, group in enumerate(groups)]
        )
        best = np.argsort(-choice)[: config["num_experts_per_tok"]]
        share = score[best] / score[best].sum() * config["routed_scaling_factor"]
        for expert, part in zip(best, share, strict=True):
            out[row] += part * swiglu(x[row : row + 1], w, f"{prefix}.experts.{expert}")[0]
    return out


def head(w, config, hidden, tokens, index, attention, *, own=False):
    """Logits (L, V) of head ``index``; what it shares with the trunk is the trunk's unless own."""
    eps, at = config["rms_norm_eps"], f"model.layers.{config['num_hidden_layers'] + index}"
    embedding = w[f"{at}.embed_tokens.weight" if own else "model.embed_tokens.weight"]
    e = rms_norm(embedding[tokens], w[f"{at}.enorm.weight"], eps)
    h = rms_norm(hidden, w[f"{at}.hnorm.weight"], eps)
    x = np.concatenate([e, h], -1) @ w[f"{at}.eh_proj.weight"].T
    x = x + attention(rms_norm(x, w[f"{at}.input_layernorm.weight"], eps))
    normed = rms_norm(x, w[f"{at}.post_attention_layernorm.weight"], eps)
    x = x + experts(normed, w, f"{at}.mlp", config)
    out = w[f"{at}.shared_head.head.weight" if own else "lm_head.weight"]
    return rms_norm(x, w[f"{at}.shared_head.norm.weight"], eps) @ out.T


def head_logits(weights, config, hidden, tokens, index=0, *, own=False):
    """(L, V) of every row; hidden (L, D) of the trunk or of the head before, tokens (L,)."""
    w = published(weights, config)
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = scaling.get("rope_theta") or config["rope_theta"]
    config = {**config, "theta": theta, "scaling": scaling}
    at = f"model.layers.{config['num_hidden_layers'] + index}.self_attn"
    eps = config["rms_norm_eps"] if config["model_type"] == "glm4_moe_lite" else LATENT_EPS
    return head(
        w, config, hidden, tokens, index, lambda x: attention(x, w, at, config, eps), own=own
    )


def published(weights, config):
    """What mlx-lm's conversion has put together, apart again."""
    out = {}
    for name, value in weights.items():
        stem, found, rest = name.partition(".switch_mlp.")
        if found:
            out |= {f"{stem}.experts.{i}.{rest}": part for i, part in enumerate(value)}
        elif name.endswith(".embed_q.weight"):
            stem = name.removesuffix(".embed_q.weight")
            both = [value.swapaxes(1, 2), weights[f"{stem}.unembed_out.weight"]]
            out[f"{stem}.kv_b_proj.weight"] = np.concatenate(both, 1).reshape(-1, value.shape[1])
        else:
            out[name] = value
    return out
