"""Stand-ins for the engine's tests: an exact trunk, drafters of every kind, tiny mlx_lm models."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import llama

from mtplx.certify.engine_play import ExactFamily as ExactFamily
from mtplx.certify.engine_play import Logits
from mtplx.certify.engine_play import hashed_logits as hashed_logits
from mtplx.distribution import SparseDistribution
from mtplx.drafters import Draft, Drafter, NoDrafter, Proposal
from mtplx.engine import Engine
from mtplx.families import Family, family_of
from mtplx.metrics import Stats
from mtplx.rng import Draws
from mtplx.sampler_config import SamplerConfig
from mtplx.sampling import distribution_from_logits
from mtplx.sequence import History
from mtplx.sequence import Sequence as EngineSequence
from mtplx.state import State
from mtplx.text import TextOutput

PLAIN = SamplerConfig(temperature=1.0, top_p=1.0, top_k=0)
GREEDY = SamplerConfig(temperature=0.0)

# Total variation that a wrong law must show.
WRONG = 1e-3


# --- trunks -----------------------------------------------------------------------------------


def scripted_logits(tokens: Sequence[int], prompt_length: int, vocab_size: int) -> Logits:
    """Certainty: after the prompt come ``tokens``, whatever the ids before were."""

    def logits(prefix: tuple[int, ...]) -> np.ndarray:
        row = np.zeros(vocab_size)
        row[tokens[min(len(prefix) - prompt_length, len(tokens) - 1)]] = 50.0
        return row

    return logits


def tiny_llama(seed: int = 0, **changes: Any) -> llama.Model:
    """A random 2-layer llama: vocabulary 64, hidden 32, logits of a standard deviation near 3."""
    config = {
        "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-5,
        "vocab_size": 64, "tie_word_embeddings": True,
    } | changes  # fmt: skip
    model = llama.Model(llama.ModelArgs.from_dict(config))
    randomise(model, seed)
    return model


def randomise(module: nn.Module, seed: int, scale: float = 1.0) -> None:
    """Random float32 weights: matrices of unit gain, vectors near 1; the embedding a bit larger."""
    rng = np.random.default_rng(seed)

    def fresh(path: str, old: mx.array) -> mx.array:
        noise = rng.standard_normal(old.shape)
        if old.ndim < 2:
            return mx.array((1 + 0.1 * noise).astype(np.float32))
        std = 0.5 if "embed" in path else scale * old.shape[-1] ** -0.5
        return mx.array((noise * std).astype(np.float32))

    flat = nn.utils.tree_flatten(module.parameters())
    module.load_weights([(name, fresh(name, value)) for name, value in flat])
    mx.eval(module.parameters())


# --- drafters ---------------------------------------------------------------------------------


class Remembering:
    """The part that drafters share: what has been committed."""

    needs_hidden = False

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def observe(self, tokens: Sequence[int], hidden: mx.array | None) -> None:
        self.tokens.extend(tokens)


class RandomDrafter(Remembering):
    """Draws from a law of its own that has nothing to do with the trunk's."""

    name = "random"

    def __init__(self, seed: int = 0, scale: float = 1.5):
        super().__init__()
        self.seed, self.scale = seed, scale

    @staticmethod
    @cache
    def _row(key: tuple[int, ...], vocab_size: int) -> mx.array:
        return mx.array(np.random.default_rng(key).standard_normal(vocab_size), mx.float32)

    def propose(self, depth: int, proposal: Proposal) -> Draft:
        tokens: list[int] = []
        q_rows = []
        for i in range(depth):
            row = self._row((self.seed, 7, *self.tokens[-2:], i), proposal.vocab_size)
            q_rows.append(proposal.law(row * self.scale, tokens, None))
            tokens.append(proposal.draw(i, q_rows[-1]))
        return Draft(tokens, q_rows)


class KnowingDrafter(Remembering):
    """Copies a given continuation: an oracle, or with ``shift`` one that is always wrong."""

    name = "knowing"

    def __init__(self, prompt_length: int, continuation: Sequence[int], shift: int = 0):
        super().__init__()
        self.start, self.known, self.shift = prompt_length, list(continuation), shift

    def propose(self, depth: int, proposal: Proposal) -> Draft:
        at = len(self.tokens) - self.start
        vocab = proposal.vocab_size
        tokens = [(t + self.shift) % vocab for t in self.known[at : at + depth]]
        return Draft(tokens, [SparseDistribution.one_hot(t, vocab) for t in tokens])


class BlockDrafter(Remembering):
    """Proposes given blocks, one a round, whatever depth is asked for."""

    name = "blocks"

    def __init__(self, blocks: Sequence[Sequence[int]]):
        super().__init__()
        self.blocks = [list(block) for block in blocks]
        self.asked: list[int] = []

    def propose(self, depth: int, proposal: Proposal) -> Draft:
        self.asked.append(depth)
        tokens = self.blocks.pop(0)[:depth] if self.blocks else []
        rows = [SparseDistribution.one_hot(t, proposal.vocab_size) for t in tokens]
        return Draft(tokens, rows)


# --- sequences --------------------------------------------------------------------------------


class Spelling:
    """A detokenizer that looks ids up in a table; ``left`` comes out when it is flushed."""

    def __init__(self, table: Sequence[str] | None = None, left: str = ""):
        self.table, self.left = table, left

    def add(self, token_id: int) -> str:
        if self.table is None:
            return f"<{token_id}>"
        return self.table[token_id]

    def flush(self) -> str:
        left, self.left = self.left, ""
        return left


def new_sequence(
    family: Any,
    prompt: Sequence[int],
    drafter: Drafter | None = None,
    *,
    rule: str = "coupled",
    depth: int = 0,
    seed: int = 0,
    config: SamplerConfig = PLAIN,
    max_tokens: int = 12,
    eos_ids: Sequence[int] = (),
    stops: Sequence[str] = (),
    detokenizer: Any = None,
    min_tokens: int = 0,
    grammar: Any = None,
    top_logprobs: int | None = None,
) -> EngineSequence:
    """A sequence without a bundle; ``family`` may be a bare mlx_lm trunk."""
    if not isinstance(family, Family):
        family = family_of(family)
    chosen = NoDrafter() if drafter is None else drafter
    chosen.observe(prompt, None)
    return EngineSequence(
        tokens=list(prompt),
        prompt_length=len(prompt),
        max_tokens=max_tokens,
        state=State(family),
        drafter=chosen,
        history=History(
            config, tuple(prompt), eos_ids=eos_ids, min_tokens=min_tokens, grammar=grammar
        ),
        draws=Draws(seed),
        rule=rule,
        depth=depth,
        eos_ids=frozenset(eos_ids),
        output=TextOutput(detokenizer or Spelling(), stops),
        stats=Stats(chosen.name, rule, depth, prompt_tokens=len(prompt)),
        top_logprobs=top_logprobs,
    )


def vocab_of(sequence: EngineSequence) -> int:
    trunk = sequence.state.family.trunk
    return trunk.vocab_size if isinstance(trunk, ExactFamily) else trunk.args.vocab_size


def run(sequence: EngineSequence) -> EngineSequence:
    """All rounds; after each, the state must hold every token but the last."""
    engine = Engine(vocab_of(sequence))
    while sequence.finish_reason is None:
        before = len(sequence.tokens)
        engine.step([sequence])
        assert len(sequence.tokens) > before
        check_state(sequence)
    return sequence


def check_state(sequence: EngineSequence) -> None:
    """Lengths, and with an ``ExactFamily`` the very ids, are those of the committed tokens."""
    state, committed = sequence.state, sequence.tokens[:-1]
    assert state.length == len(committed)
    assert [held.offset for held in state.caches] == [len(committed)] * len(state.caches)
    if isinstance(state.family, ExactFamily):
        held = np.asarray(state.caches[0].keys_and_values()[0]).reshape(-1)
        assert held.astype(int).tolist() == committed


def text_of(sequence: EngineSequence) -> str:
    return "".join(segment.text for segment in sequence.segments)


def row_logits(sequence: EngineSequence, tokens: Sequence[int]) -> np.ndarray:
    """The trunk's logits after ``tokens``, run one at a time as plain decoding does."""
    state = State(sequence.state.family)
    for token in tokens:
        _, logits = state.forward([token])
    return np.asarray(logits[0], dtype=np.float64)


def same_or_near_tie(
    plain: EngineSequence, other: EngineSequence, *, limit: float = 1e-3
) -> float | None:
    """Both outputs are equal (None), or their first difference is a near-tie: its margin, printed.

    The margin is that of the race (of the logits, when greedy): how much later, relatively, the
    other token would have come in. More than ``limit`` is a failure.
    """
    a, b = plain.tokens, other.tokens
    if a == b:
        return None
    at = next(i for i, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1])
    logits = row_logits(plain, a[:at])
    margin = race_margin(plain, logits, at, a[at], b[at])
    print(f"near-tie at position {at}: {a[at]} or {b[at]}, margin {margin:.2e}")
    assert margin < limit, f"tokens differ at position {at} by a margin of {margin:.2e}"
    return margin


def race_margin(sequence: EngineSequence, logits: np.ndarray, at: int, one: int, two: int) -> float:
    from mtplx.rng import Domain, derive_key, exponentials

    history = sequence.history
    if history.config.temperature <= 0:
        return float(abs(logits[one] - logits[two]))
    counts: dict[int, int] = {}
    for token in sequence.tokens[sequence.prompt_length : at]:
        counts[token] = counts.get(token, 0) + 1
    p = distribution_from_logits(
        logits, history.config, token_counts=counts, prompt_ids=history.prompt
    )
    ids = np.array([one, two])
    noise = exponentials(derive_key(Domain.RACE, sequence.draws.seed), at, ids)
    with np.errstate(divide="ignore"):
        times = noise / p[ids]
    return float(abs(times[0] - times[1]) / times.min())


def asked(stop: int) -> tuple[list[Any], Any, Any]:
    """What a drafter asked for, in order, and a ``draw`` and a ``more`` of so many drafts."""
    events: list[Any] = []

    def draw(offset, q):
        events.append(("draw", offset))
        return int(np.argsort(-q.probs)[offset])

    def more(confidences):
        events.append(("more", list(confidences)))
        return len(confidences) < stop

    return events, draw, more
