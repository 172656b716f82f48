"""The MLX twin against the reference on 100,000 rows of the default model's own logits.

Run on demand: ``scripts/test -m long -s -k real_rows``. A token may differ only at a near-tie.
"""

from __future__ import annotations

import pydoc_data.topics
from collections import Counter
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from test_fast_sampling import host, near_tie

import mtplx
from mtplx import heldout, native
from mtplx.api import encode_prompt
from mtplx.families import family_of
from mtplx.fast_sampling import sparse_distributions_from_mlx_logits
from mtplx.penalties import processed_logits
from mtplx.sampler_config import SamplerConfig
from mtplx.sampling import distribution_from_logits, inverse_cdf
from mtplx.state import State

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(7200)]

ROWS, CONTEXT, ALIKE = 100_000, 512, 8  # ALIKE rows share their parameters
ANSWERS, ANSWER = 32, 192
REMEMBERED = 64  # tokens before a row that count as emitted, where there are penalties


def contexts(bundle: Any) -> Iterator[list[int]]:
    """Held-out texts, text of the trunk's own at T = 1, and then the manual of Python."""
    encode = bundle.tokenizer.encode
    texts = [text for name in heldout.SOURCES for text in heldout.texts(name)]
    ids = encode("\n\n".join(texts))
    hot = SamplerConfig(temperature=1.0, top_p=1.0, top_k=0)
    options = {"sampling": hot, "draft": "none", "max_tokens": ANSWER}
    for seed, text in enumerate(heldout.spread(texts, ANSWERS)):
        ids += encode_prompt(bundle, text)
        ids += mtplx.generate(bundle, text, seed=seed, **options).token_ids
    print(f"\n  {len(ids)} tokens of held-out text and of the trunk's own")
    ids += encode("\n\n".join(pydoc_data.topics.topics.values()))
    for start in range(0, ROWS, CONTEXT):
        yield ids[start : min(start + CONTEXT, ROWS)]


def random_config(generator: np.random.Generator) -> SamplerConfig:
    """Every parameter is off or anywhere in its range; penalties in a quarter of the cases."""

    def either(off: float, on: float, chance: float = 0.5) -> float:
        return on if generator.random() < chance else off

    penalised = 0.5 * (generator.random() < 0.5)
    return SamplerConfig(
        temperature=either(0.0, np.exp(generator.uniform(np.log(0.3), np.log(2.0))), 0.95),
        top_p=either(1.0, generator.uniform(0.05, 1.0), 0.6),
        top_k=int(either(0, np.exp(generator.uniform(0.0, np.log(49152.0))))),
        min_p=either(0.0, 10 ** generator.uniform(-4.0, -0.3), 0.3),
        presence_penalty=either(0.0, generator.normal(), penalised),
        frequency_penalty=either(0.0, generator.normal(), penalised),
        repetition_penalty=either(1.0, generator.uniform(0.7, 1.5), penalised),
    )


def compare(logits: mx.array, ids: list[int], at: int, generator: Any, found: Counter) -> None:
    """Rows after ``ids[at]``, ``ids[at + 1]``, ...; a difference that is no near-tie fails."""
    config = random_config(generator)
    penalties = config.presence_penalty, config.frequency_penalty, config.repetition_penalty
    counts: list[dict[int, int] | None] = [None] * len(logits)
    if penalties != (0.0, 0.0, 1.0):
        counts = [
            dict(Counter(ids[max(0, at + i + 1 - REMEMBERED) : at + i + 1]))
            for i in range(len(logits))
        ]
        found["with penalties"] += len(logits)
    prompt = ids[: max(0, at + 1 - REMEMBERED)]
    laws = sparse_distributions_from_mlx_logits(
        logits, config, token_counts=counts, prompt_ids=prompt
    )
    uniforms = generator.random(len(logits))
    for row, law, uniform, emitted in zip(host(logits), laws, uniforms, counts, strict=True):
        reference = distribution_from_logits(row, config, token_counts=emitted, prompt_ids=prompt)
        token, expected = inverse_cdf(law, uniform), inverse_cdf(reference, uniform)
        found["rows"] += 1
        if token != expected:
            after = processed_logits(row, config, emitted, None, prompt)
            assert near_tie(after, config, uniform, reference), (
                f"row {found['rows']}: {token} instead of {expected}, no near-tie, {config},"
                f" u = {uniform!r}"
            )
            found["near-ties"] += 1


def test_twin_and_reference_draw_the_same_tokens_from_real_rows(default_model_path):
    if native.status().native is None:
        pytest.skip("without the CPU kernels, the rows alone take hours")
    bundle = mtplx.load(default_model_path)
    generator, found = np.random.default_rng(5), Counter()
    for ids in contexts(bundle):
        _, logits = State(family_of(bundle.trunk)).forward(ids)
        for at in range(0, len(ids), ALIKE):
            compare(logits[at : at + ALIKE], ids, at, generator, found)
        if found["rows"] % (20 * CONTEXT) == 0:
            print(f"  {dict(found)}", flush=True)
    print(f"  twin and reference on real rows: {dict(found)}, near-ties: {found['near-ties']}")
    assert found["rows"] == ROWS
    assert found["near-ties"] <= 1e-4 * ROWS
