"""Whether verifying several rows changes anything: logits by their bits, texts by their tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from .. import heldout
from ..agreement import difference
from ..api import encode_prompt
from ..families import family_of
from ..load import Bundle
from ..measure import Way
from ..options import DraftSource
from ..sampler_config import SamplerConfig
from ..state import State

__all__ = ["Bits", "bitwise", "coupled", "steps", "text_ids"]

DEPTHS = range(1, 9)
_LAST = 2000
# Some at and around powers of two, where blocks of a cache or of a kernel begin.
_CONTEXTS = (
    *range(1, 10), 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 200, 255, 256, 257, 384, 511, 513,
    777, 1023, 1025, 1500, _LAST,
)  # fmt: skip
_TEMPERATURES = (0.0, 0.6, 1.0)
_FEW, _MANY = 3, 200
_FEW_DEPTHS, _ALL_DEPTHS = (1, 3, 5), (1, 2, 3, 4, 5)
_TOKENS = 32
_NAMED = 5


def steps(full: bool) -> int:
    """How often ``bitwise`` and ``coupled`` say where they are."""
    prompts, depths = (_MANY, _ALL_DEPTHS) if full else (_FEW, _FEW_DEPTHS)
    contexts = _LAST if full else len(_CONTEXTS)
    return contexts + prompts * len(_TEMPERATURES) * (1 + len(depths))


def text_ids(bundle: Bundle, count: int) -> list[int]:
    """``count`` tokens of MT-bench's questions, or what fits into the model's context."""
    config = bundle.provenance.config
    inner = config.get("text_config") or {}
    most = config.get("max_position_embeddings", inner.get("max_position_embeddings"))
    ids = bundle.tokenizer.encode("\n\n".join(heldout.prompts("mt-bench")))
    return (ids * (count // len(ids) + 1))[: min(count, most or count)]


# --- logits -------------------------------------------------------------------------------------


@dataclass
class Bits:
    """Rows of logits compared, how many were equal in every bit, and the largest difference."""

    positions: int = 0
    equal: int = 0
    largest: float = 0.0

    def add(self, rows: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
        """Compare (R, V) with (R, V)."""
        same = (rows.view(np.uint32) == expected.view(np.uint32)).all(axis=1)
        self.positions += len(same)
        self.equal += int(same.sum())
        if not same.all():
            gaps = np.abs(rows[~same] - expected[~same])
            self.largest = max(self.largest, float(gaps.max()))


def bitwise(bundle: Bundle, *, full: bool, before: Callable[[str], None]) -> Bits:
    """Logits of verify forwards over 2 to 9 rows against those of plain decoding, row by row.

    At each context one state runs one token at a time, the other the same tokens at once; the last
    rows that each wrote into its cache stay there for the contexts that follow at once, what is
    between far apart contexts is a prefill in both.
    """
    rows = DEPTHS[-1] + 1
    ids = text_ids(bundle, _LAST + rows)
    contexts = [c for c in (range(1, _LAST + 1) if full else _CONTEXTS) if c + rows <= len(ids)]
    plain, checked = (State(family_of(bundle.trunk)) for _ in range(2))
    found = Bits()
    for context, following in zip(contexts, [*contexts[1:], len(ids)], strict=True):
        before(f"logits, context {context}")
        for state in (plain, checked):
            for _ in state.prefill(ids[state.length : context]):
                pass
        kept = ids[context : min(following, context + rows)]
        expected = _one_by_one(plain, ids[context : context + rows], kept)
        for depth in DEPTHS:
            mark = checked.mark(depth + 1)
            _, logits = checked.forward(ids[context : context + depth + 1])
            found.add(_host(logits), expected[: depth + 1])
            checked.rollback(mark, kept if depth == DEPTHS[-1] else [])
    return found


def _one_by_one(state: State, tokens: Sequence[int], kept: Sequence[int]) -> NDArray[np.float32]:
    mark = state.mark(len(tokens))
    rows = [_host(state.forward([token])[1]) for token in tokens]
    state.rollback(mark, kept)
    return np.concatenate(rows)


def _host(logits: mx.array) -> NDArray[np.float32]:
    return np.array(logits.astype(mx.float32))


# --- texts --------------------------------------------------------------------------------------


def coupled(
    bundle: Bundle, *, full: bool, before: Callable[[str], None], notes: list[str]
) -> float:
    """The share of outputs with drafts that are plain decoding's, under one seed, coupled rule."""
    source: DraftSource = "ngram" if bundle.head is None else "mtp"
    texts = [text for name in heldout.SOURCES for text in heldout.prompts(name)]
    prompts = heldout.spread(texts, _MANY if full else _FEW)
    depths = _ALL_DEPTHS if full else _FEW_DEPTHS
    outputs = same = 0
    for t in _TEMPERATURES:
        sampling = SamplerConfig(temperature=t)
        for seed, prompt in enumerate(prompts):
            before(f"coupled, T = {t:g}")
            plain = _text(Way(bundle, "none", 0), prompt, sampling, seed)
            for depth in depths:
                before(f"coupled, T = {t:g}, depth {depth}")
                drafted = _text(Way(bundle, source, depth), prompt, sampling, seed)
                ids = encode_prompt(bundle, prompt)
                found = difference(bundle, ids, drafted, plain, sampling=sampling, seed=seed)
                outputs += 1
                same += found is None
                if found is not None and outputs - same <= _NAMED:
                    notes.append(f"prompt {seed + 1}, T = {t:g}, depth {depth}: {found}")
    return same / outputs


def _text(way: Way, prompt: str, sampling: SamplerConfig, seed: int) -> list[int]:
    stream = way.start(prompt, sampling, seed=seed, tokens=_TOKENS, rule="coupled")
    return stream.result().token_ids
