"""The joint law of a whole request, by enumeration of the running engine.

The shipped engine runs, with the shipped MTP drafter, history, rule and rollback, on a trunk of a
few tokens that computes its logits from the ids its cache really holds. What it emits must follow
the reference law of plain decoding, computed apart in NumPy float64 (``sampling``).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np

from .. import engine
from ..distribution import Distribution, Floats
from ..draft_vocabulary import DraftVocabulary
from ..drafters import MTPDrafter
from ..families import Family
from ..metrics import Stats
from ..rng import Draws
from ..sampler_config import SamplerConfig
from ..sampling import distribution_from_logits
from ..sequence import History
from ..sequence import Sequence as EngineSequence
from ..state import State
from ..text import TextOutput
from ..verify import Verdict, verify
from .enumeration import FLIPS, Case, Law, Tokens, distance, product_law
from .forking import ImpossibleError, Noise, play_all, swapped

Logits = Callable[[Tokens], Floats]
_PROMPT: Tokens = (0, 1, 0)
_PLAIN = SamplerConfig(temperature=1.0, top_p=1.0, top_k=0)


def hashed_logits(vocab_size: int, *, order: int = 2, seed: int = 0, scale: float = 1.5) -> Logits:
    """Random logits that depend on the last ``order`` ids."""

    @cache
    def row(past: Tokens) -> Floats:
        key = [seed, *[t + 1 for t in past]]
        return np.random.default_rng(key).standard_normal(vocab_size) * scale

    return lambda prefix: row(prefix[-order:]).copy()


class ExactFamily(Family):
    """A trunk whose logits are a pure function of the ids that its cache really holds.

    The ids are stored as keys of a KVCache: what a wrong rollback leaves behind is seen at once.
    rows: how many rows each forward had.  features: whether it gives hidden states, the ids.
    """

    def __init__(self, logits: Logits, vocab_size: int, *, features: bool = False):
        super().__init__(self)
        self.layers = [None]
        self.vocab_size = vocab_size
        self._logits, self._features = logits, features
        self.rows: list[int] = []

    def _write(self, tokens: mx.array, cache: list[Any]) -> Tokens:
        keys = tokens.astype(mx.float32)[:, None, :, None]
        held, _ = cache[0].update_and_fetch(keys, keys)
        return tuple(int(x) for x in np.asarray(held).reshape(-1))

    def forward(self, tokens: mx.array, cache: list[Any]) -> tuple[mx.array | None, mx.array]:
        """See ``Family.forward``."""
        held, count = self._write(tokens, cache), tokens.shape[1]
        self.rows.append(count)
        ends = range(len(held) - count + 1, len(held) + 1)
        rows = np.stack([self._logits(held[:end]) for end in ends])
        return self._hidden(tokens), mx.array(rows.astype(np.float32))[None]

    def prefill(self, tokens: mx.array, cache: list[Any]) -> mx.array | None:
        """See ``Family.prefill``."""
        self._write(tokens, cache)
        return self._hidden(tokens)

    def _hidden(self, tokens: mx.array) -> mx.array | None:
        return tokens[..., None].astype(mx.float32) if self._features else None


class _Head:
    """What ``MTPDrafter`` runs: fixed logits by the latest token, of the draft ids only."""

    further = ()

    def __init__(self, case: Request):
        self.ids = list(range(case.vocab) if case.draft_ids is None else case.draft_ids)
        self.vocabulary = None if case.draft_ids is None else DraftVocabulary(self.ids, case.vocab)
        self.copy_bonus = case.copy_bonus
        rows = [hashed_logits(case.vocab, seed=1)((token,)) for token in range(case.vocab)]
        self.table = mx.array(np.array(rows, np.float32))

    def new_cache(self) -> Any:
        cache = SimpleNamespace(offset=0, state=[])
        cache.trim = lambda n: setattr(cache, "offset", cache.offset - n)
        return cache

    def forward(self, state: mx.array, tokens: mx.array, cache: Any) -> mx.array:
        cache.offset += state.shape[0]
        return tokens[:, None]

    def logits(self, hidden: mx.array) -> mx.array:
        return self.table[hidden[:, 0]][:, mx.array(self.ids)]

    def joined(self, logits: mx.array, hidden: mx.array, token: int) -> mx.array:
        return mx.concatenate([logits, self.table[hidden[:, 0], token][:, None]], axis=-1)


@dataclass
class _Alternating:
    """A toy grammar: never a 1 after a 1, an end of sequence only after a 0."""

    vocab: int
    eos: Tokens
    last: int | None = None
    name: str = "grammar"

    def advance(self, token: int) -> None:
        self.last = token

    def mask(self, drafts: Sequence[int]) -> Any:
        last = self.last
        for token in drafts:
            if not self._after(last)[token]:
                return None
            last = token
        return self._after(last)

    def _after(self, last: int | None) -> Any:
        mask = np.ones(self.vocab, bool)
        mask[list(self.eos)] = last == 0
        mask[1] &= last != 1
        return mask


@dataclass(frozen=True)
class Request:
    """A request to enumerate: its law, and how it is drafted.

    draft_ids: what the head drafts from, copies aside; None for all.
    """

    config: SamplerConfig = _PLAIN
    seed: int = 4
    vocab: int = 3
    depth: int = 2
    max_tokens: int = 3
    eos: Tokens = ()
    min_tokens: int = 0
    grammar: bool = False
    draft_ids: Tokens | None = None
    copy_bonus: tuple[float, ...] = ()

    def logits(self, prefix: Tokens) -> Floats:
        """In eighths, so that float32 adds bias and penalties exactly."""
        return _eighths(self.vocab, self.seed, prefix[-2:])

    def walker(self) -> _Alternating | None:
        """The grammar at its start."""
        return _Alternating(self.vocab, self.eos) if self.grammar else None

    def p(self, output: Tokens) -> Distribution:
        """The reference law of the token after ``output``."""
        return _reference(self, output)


@cache
def _eighths(vocab: int, seed: int, past: Tokens) -> Floats:
    return np.round(8 * hashed_logits(vocab, seed=seed, scale=1.0)(past)) / 8


def _reference(case: Request, output: Tokens) -> Distribution:
    row, walker = case.logits((*_PROMPT, *output)).copy(), case.walker()
    if walker is not None:
        for token in output:
            walker.advance(token)
        row[~walker.mask([])] = -np.inf
    if len(output) < case.min_tokens:
        row[list(case.eos)] = -np.inf
    counts = Counter(output)
    return distribution_from_logits(row, case.config, token_counts=counts, prompt_ids=_PROMPT)


def new_sequence(rule: str, case: Request) -> EngineSequence:
    """The request, about to start."""
    drafter = MTPDrafter(_Head(case))  # type: ignore[arg-type]
    drafter.observe(_PROMPT, None)
    history = History(
        case.config, _PROMPT, eos_ids=case.eos, min_tokens=case.min_tokens, grammar=case.walker()
    )
    return EngineSequence(
        tokens=list(_PROMPT),
        prompt_length=len(_PROMPT),
        max_tokens=case.max_tokens,
        state=State(ExactFamily(case.logits, case.vocab, features=True)),
        drafter=drafter,
        history=history,
        draws=Draws(1, 2),
        rule=rule,
        depth=case.depth,
        eos_ids=frozenset(case.eos),
        output=TextOutput(_Silent()),
        stats=Stats(drafter.name, rule, case.depth),
    )


class _Silent:
    def add(self, token_id: int) -> str:
        return " "

    def flush(self) -> str:
        return ""


def _announcing(noise: Noise) -> Callable[..., Verdict]:
    """``verify``, that tells the noise first where the coins of this block flip."""

    def judged(
        rule: str,
        p_rows: Sequence[Distribution],
        q_rows: Sequence[Distribution],
        draft: Sequence[int],
        draws: Draws,
        **how: Any,
    ) -> Verdict:
        noise.flips = FLIPS[rule](p_rows, q_rows, draft)
        return verify(rule, p_rows, q_rows, draft, draws, **how)

    return judged


def request_distance(rule: str, case: Request) -> float:
    """Total variation between what the engine emits and plain decoding's law; 1 if impossible."""

    def play(noise: Noise) -> Tokens:
        sequence, runner = new_sequence(rule, case), engine.Engine(case.vocab)
        with swapped(engine, verify=_announcing(noise)):
            while sequence.finish_reason is None:
                runner.step([sequence])
        return tuple(sequence.token_ids)

    played: Law = defaultdict(float)
    try:
        for weight, output in play_all(play):
            played[output] += weight
    except ImpossibleError:
        return 1.0
    plain = Case(cache(case.p), case.p, lambda *_: 0, case.vocab, eos=case.eos)
    return distance(played, product_law(plain, (), case.max_tokens))


_FILTERS = SamplerConfig(temperature=1.5, top_p=0.9, top_k=0, min_p=0.05)
_PENALTIES = SamplerConfig(1.0, 1.0, 0, 0.5, -0.25, 0.0, 2.0, {0: 1.5, 1: 0.5, 2: -0.75})

REQUESTS = {
    "plain": Request(),
    "two tokens, longer": Request(vocab=2, max_tokens=5, depth=3, seed=5),
    "filters": Request(_FILTERS, seed=6),
    "penalties": Request(_PENALTIES, seed=7),
    "penalties, two tokens": Request(
        SamplerConfig(1.0, 1.0, 0, 1.0, 0.5, 0.0, 2.0), vocab=2, max_tokens=5, seed=8
    ),
    "an end, not at once": Request(eos=(2,), min_tokens=1, seed=9),
    "grammar": Request(eos=(2,), grammar=True, min_tokens=1, seed=10),
    "drafts from two of three ids, copy bonus": Request(
        draft_ids=(0, 2), copy_bonus=(0.5, 2.5), seed=11
    ),
}
