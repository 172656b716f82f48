"""An independent small law in plain Python, and what the reference's tests share."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from mtplx.fast_sampling import sparse_distribution_from_mlx_logits
from mtplx.sampling import (
    SamplerConfig,
    SparseDistribution,
    distribution_from_logits,
)

INF = float("inf")
NAN = float("nan")
NEUTRAL = SamplerConfig(temperature=1.0, top_p=1.0, top_k=0)
PATHS = ("numpy", "mlx")
FORMS = ("dense", "sparse", "mlx")


def checked(examples: int):
    return settings(max_examples=examples, deadline=None, derandomize=True)


# --- helpers ----------------------------------------------------------------------------------


def dense(law) -> np.ndarray:
    return law.to_dense() if isinstance(law, SparseDistribution) else np.asarray(law)


def build(path: str, logits, config: SamplerConfig, **history) -> np.ndarray:
    """p of one row, dense, by the reference or by the twin."""
    if path == "numpy":
        return distribution_from_logits(np.asarray(logits, np.float32), config, **history)
    row = mx.array(np.asarray(logits, np.float32))
    return sparse_distribution_from_mlx_logits(row, config, **history).to_dense()


def law(form: str, probs):
    """A distribution with these probabilities; through float32 logits for the twin."""
    probs = np.asarray(probs, dtype=np.float64)
    if form == "dense":
        return probs / probs.sum()
    if form == "sparse":
        ids = np.flatnonzero(probs)
        return SparseDistribution(ids, probs[ids], probs.size)
    with np.errstate(divide="ignore"):
        logits = np.log(probs).astype(np.float32)
    return sparse_distribution_from_mlx_logits(mx.array(logits), NEUTRAL)


class Uniforms:
    """Stands in for a generator: gives the uniforms it was made with, in order."""

    def __init__(self, *values: float):
        self.values = list(values)

    def random(self) -> float:
        return self.values.pop(0)


# --- the oracle -------------------------------------------------------------------------------


def oracle_logits(logits, config, counts, overlay, prompt):
    row = [float(x) for x in logits]
    for token, amount in (config.logit_bias or {}).items():
        row[token] += amount
    output = {t for t, n in (counts or {}).items() if n > 0}
    for token in output | set(prompt or ()):
        penalty = config.repetition_penalty
        row[token] = row[token] / penalty if row[token] > 0 else row[token] * penalty
    for token, n in (counts or {}).items():
        presence = min(2.0, max(-2.0, config.presence_penalty))
        frequency = min(2.0, max(-2.0, config.frequency_penalty))
        row[token] -= frequency * n + (presence if n > 0 else 0.0)
    for token, amount in (overlay or {}).items():
        row[token] -= amount
    return row


def oracle(logits, config, counts=None, overlay=None, prompt=None):
    """(probabilities, margin): margin is how near a filter came to deciding otherwise."""
    row = oracle_logits(logits, config, counts, overlay, prompt)
    top = max(row)
    if config.temperature <= 0:
        return [1.0 if i == row.index(top) else 0.0 for i in range(len(row))], INF
    weights = [math.exp((x - top) / config.temperature) for x in row]
    total = math.fsum(weights)
    probs = [w / total for w in weights]
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))
    highest, margin, kept = probs[order[0]], INF, []
    for rank, token in enumerate(order):
        before = math.fsum(probs[t] for t in order[:rank])
        if rank and config.top_p < 1.0:
            margin = min(margin, abs(before - config.top_p))
        if rank and config.min_p > 0.0 and probs[token] > 0.0:
            margin = min(margin, abs(probs[token] - config.min_p * highest) / highest)
        in_p = rank == 0 or config.top_p == 1.0 or before < config.top_p
        in_k = config.top_k == 0 or rank < config.top_k
        if in_p and in_k and probs[token] >= config.min_p * highest:
            kept.append(token)
    mass = math.fsum(probs[t] for t in kept)
    return [probs[i] / mass if i in kept else 0.0 for i in range(len(row))], margin


f32 = st.floats(-60, 60, width=32)
rows = st.lists(f32, min_size=1, max_size=24)
configs = st.builds(
    SamplerConfig,
    temperature=st.sampled_from([0.0, -1.0, 0.3, 0.6, 1.0, 1.7, 5.0]),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.999)),
    top_k=st.integers(0, 30),
    min_p=st.one_of(st.just(0.0), st.floats(0.001, 1.0)),
    presence_penalty=st.sampled_from([0.0, 0.5, -1.0, 3.5]),
    frequency_penalty=st.sampled_from([0.0, 0.25, -0.5, -7.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.5]),
)


@st.composite
def cases(draw):
    row = draw(rows)
    token = st.integers(0, len(row) - 1)
    return (
        row,
        draw(configs),
        draw(st.dictionaries(token, st.integers(0, 4), max_size=4)),
        draw(st.dictionaries(token, st.floats(-3, 3), max_size=3)),
        draw(st.lists(token, max_size=4)),
    )


@st.composite
def dyadic(draw):
    """Integer weights that add up to a power of two: every sum below is exact in float64."""
    weights = draw(st.lists(st.integers(0, 64), min_size=1, max_size=20))
    total = 1 << max(sum(weights), 1).bit_length()
    weights[draw(st.integers(0, len(weights) - 1))] += total - sum(weights)
    return weights, total, draw(st.integers(1, total)), draw(st.integers(0, 22))


weights = st.lists(
    st.one_of(st.just(0.0), st.floats(1e-12, 1.0), st.sampled_from([1e-300, 1.0, 0.5])),
    min_size=1, max_size=12,
)  # fmt: skip
