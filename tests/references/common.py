"""Parts that several heads have in common. Shapes: L rows, D hidden, H heads, d their size."""

from __future__ import annotations

import numpy as np


def rms_norm(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def silu(x):
    return x / (1 + np.exp(-x))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def rotate(x, theta, dims, *, start=0, interleaved=False):
    """Rotary embedding of the first ``dims`` numbers of x (L, H, d), at positions from start on.

    Pairs are (i, i + dims / 2), or (2 i, 2 i + 1) if interleaved.
    """
    half = dims // 2
    angle = np.arange(start, start + len(x))[:, None] * theta ** (-np.arange(half) * 2.0 / dims)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    out = x.copy()
    first, second = (slice(0, dims, 2), slice(1, dims, 2)) if interleaved else (
        slice(0, half), slice(half, dims)
    )  # fmt: skip
    a, b = x[..., first], x[..., second]
    out[..., first], out[..., second] = a * cos - b * sin, b * cos + a * sin
    return out


def attend(q, k, v, scale, window=None, sinks=None):
    """Causal attention of q (L, H, d) over k, v (L, G, d): H / G query heads share one of G.

    sinks: (H,), the score of a further row that has no value.
    """
    rows, heads, _ = q.shape
    k, v = (np.repeat(x, heads // x.shape[1], axis=1) for x in (k, v))
    scores = np.einsum("ihd,jhd->hij", q, k) * scale
    at = np.arange(rows)
    seen = at[:, None] >= at[None]
    if window is not None:
        seen &= at[:, None] < at[None] + window
    scores = np.where(seen, scores, -np.inf)
    if sinks is not None:
        added = np.broadcast_to(sinks[:, None, None], (heads, rows, 1))
        scores = np.concatenate([scores, added], -1)
    return np.einsum("hij,jhd->ihd", softmax(scores)[..., :rows], v)


def swiglu(x, weights, prefix):
    gate, up, down = (weights[f"{prefix}.{part}_proj.weight"] for part in ("gate", "up", "down"))
    return (silu(x @ gate.T) * (x @ up.T)) @ down.T
