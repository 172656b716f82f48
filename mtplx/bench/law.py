"""Logits to the law of a token: ours against mlx-lm's sampler, on one row of 151,936 logits."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from mlx_lm.sample_utils import make_sampler

from ..fast_sampling import sparse_distribution_from_mlx_logits
from ..sampler_config import SamplerConfig
from ..sampling import distribution_from_logits
from .report import Report, alternate

VOCABULARY = 151_936
_REPEATS = 60


def run() -> Report:
    """Time both at T 0.6, top-p 0.95, top-k 20, and check ours against the reference.

    mlx-lm's sampler is given log-probabilities, as its own decoding does, which costs it a
    log-sum-exp; ours takes the logits.
    """
    config = SamplerConfig(temperature=0.6, top_p=0.95, top_k=20)
    host = (np.random.default_rng(0).normal(size=(1, VOCABULARY)) * 3).astype(np.float32)
    logits = mx.array(host)
    mx.eval(logits)
    sampler = make_sampler(temp=0.6, top_p=0.95, top_k=20)

    def theirs() -> None:
        mx.eval(sampler(logits - mx.logsumexp(logits, axis=-1, keepdims=True)))

    def theirs_bare() -> None:
        mx.eval(sampler(logits))

    def ours() -> None:
        sparse_distribution_from_mlx_logits(logits, config)

    full, bare, own = alternate([theirs, theirs_bare, ours], _REPEATS)
    law = sparse_distribution_from_mlx_logits(logits, config).to_dense()
    error = np.abs(law - distribution_from_logits(host[0], config)).max()
    figures: dict[str, float | None] = {
        "law_vs_mlx_lm": full / own,
        "law_vs_mlx_lm_sampler_alone": bare / own,
        "law_milliseconds": own * 1e3,
        "largest_error_in_p": float(error),
    }
    return Report("law", figures)
