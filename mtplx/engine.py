"""The round: draft, verify, accept, roll back, emit.

Plain decoding is the same round without drafts: the trunk runs over the last token alone, and the
next one is drawn from the only row. ``Engine(..., on_round=f)`` calls f with a ``Round`` after
each, for whoever measures the running engine: logits, laws and verdict, which are not kept
otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Sequence_
from dataclasses import dataclass
from functools import cache
from time import perf_counter

import mlx.core as mx

from .device import rows_of
from .distribution import SparseDistribution
from .drafters import Draft, Proposal
from .errors import StateError
from .sequence import Sequence
from .verify import Verdict, verify


@dataclass(frozen=True)
class Round:
    """What one round saw and decided; the sequence is committed already.

    start: absolute position of the first emitted token.  draft: x1..xK and its q rows.  logits:
    (K + 1, vocab) of the trunk, before the law.  p_rows: K + 1 laws; row i follows x1..xi, and is
    the law of emitted[i].  emitted: tokens appended; the sequence's end may have cut the verdict's.
    """

    sequence: Sequence
    start: int
    draft: Draft
    logits: mx.array
    p_rows: Sequence_[SparseDistribution]
    verdict: Verdict
    emitted: list[int]


class Engine:
    """Advances sequences by rounds. It holds nothing of them: everything is in ``Sequence``.

    on_round: called with every round; what it raises goes to the caller of ``step``.
    """

    def __init__(self, vocab_size: int, on_round: Callable[[Round], None] | None = None):
        self.vocab_size = vocab_size
        self.on_round = on_round

    def step(self, sequences: Sequence_[Sequence]) -> None:
        """One round of every sequence that is not finished; each emits at least one token.

        A sequence's output does not depend on which others are in the list. If drafting, the
        forward, the verification or the rollback is interrupted or fails, the sequence is as it
        was before. If that happens while tokens are being committed, it is not, and going on with
        it is refused with ``StateError``. An error of one sequence is kept in its ``error`` and
        raised, the first one if there are more, when all others have had their round.
        """
        errors = []
        for sequence in sequences:
            if sequence.finish_reason is None:
                sequence.error = None
                try:
                    _check_whole(sequence)
                    self._prefill(sequence)
                    self._round(sequence)
                except Exception as e:
                    sequence.error = e
                    errors.append(e)
        if errors:
            raise errors[0]

    def _prefill(self, sequence: Sequence) -> None:
        missing = sequence.tokens[sequence.state.length : -1]
        if not missing:
            return
        begin = perf_counter()
        for hidden in sequence.state.prefill(missing):
            sequence.drafter.observe([], hidden if sequence.drafter.needs_hidden else None)
        sequence.stats.prefill_seconds += perf_counter() - begin

    def _round(self, sequence: Sequence) -> None:
        stats, state, start = sequence.stats, sequence.state, len(sequence.tokens)
        begin = perf_counter()
        draft = self._draft(sequence, min(sequence.depth, sequence.remaining - 1))
        mark = state.mark(len(draft.tokens) + 1)
        drafted = perf_counter()
        try:
            hidden, logits = state.forward([sequence.tokens[-1], *draft.tokens])
            mx.async_eval(logits, [] if hidden is None else hidden)
            if sequence.depth == 0 and sequence.remaining > 1:
                self._run_ahead(sequence, logits)
            mx.eval(logits)
            ran = perf_counter()
            with mx.stream(_law_stream(str(mx.default_device()))):
                p_rows = sequence.history.laws(logits, draft.tokens)
            block = p_rows, draft.q_rows, draft.tokens, sequence.draws
            verdict = verify(sequence.rule, *block, start=start, eos_ids=sequence.eos_ids)
            following = [] if verdict.next_token is None else [verdict.next_token]
            emitted = draft.tokens[: verdict.accepted] + following
            state.rollback(mark, [sequence.tokens[-1], *emitted[:-1]])
        except BaseException:
            state.restore(mark)
            raise
        sequence.committing = True
        taken = sequence.commit(emitted, verdict.accepted)
        if taken < len(emitted):
            state.rollback(mark, sequence.tokens[start - 1 : start - 1 + taken])
        known = hidden if sequence.drafter.needs_hidden else None
        if known is not None and taken < len(known):
            known = rows_of(known, 0, taken)
        sequence.drafter.observe(emitted[:taken], known)
        sequence.note(emitted[:taken], p_rows)
        shown = sequence.output.kept_tokens() - (start - sequence.prompt_length)
        accepted = max(0, min(verdict.accepted, taken, shown))
        source = (draft.source or sequence.drafter.name) if draft.tokens else "none"
        stats.count_round(len(draft.tokens), accepted, taken, source)
        stats.draft_seconds += drafted - begin
        stats.forward_seconds += ran - drafted
        stats.other_seconds += perf_counter() - ran
        if sequence.finish_reason is not None:
            state.drop_ahead()
        sequence.committing = False
        if self.on_round is not None:
            self.on_round(Round(sequence, start, draft, logits, p_rows, verdict, emitted[:taken]))

    def _run_ahead(self, sequence: Sequence, logits: mx.array) -> None:
        """Start the next round's forward where the device can tell the next token by itself."""
        likely = sequence.history.greedy_on_device(logits)
        if likely is not None:
            sequence.state.run_ahead(likely)

    def _draft(self, sequence: Sequence, depth: int) -> Draft:
        """A draft block that ends at its first end of sequence, or where constraints end it."""
        start = len(sequence.tokens)

        def draw(offset: int, q: SparseDistribution) -> int:
            if sequence.rule == "coupled":
                return sequence.draws.race(start + offset, q)
            return sequence.draws.draft(start, offset, q)

        proposal = Proposal(sequence.history.draft_law, draw, self.vocab_size)
        draft = sequence.drafter.propose(depth, proposal)
        length = len(draft.tokens)
        for i, token in enumerate(draft.tokens):
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"drafted id {token} is outside of [0, {self.vocab_size})")
            if token in sequence.eos_ids:
                length = i + 1
                break
        block = draft.tokens[:length], draft.q_rows[:length]
        usable = sequence.history.constraints.usable(*block)
        return Draft(block[0][:usable], block[1][:usable], draft.source)


@cache
def _law_stream(device: str) -> mx.ThreadLocalStream:
    """A stream of the default device for the law: it need not wait for a forward started ahead.

    device: its name, by which there is one stream each: a ``mx.Device`` has no hash of its value,
    and a stream is a thread.
    """
    return mx.new_thread_local_stream(mx.default_device())


def _check_whole(sequence: Sequence) -> None:
    """A sequence whose last commit was cut short would go on with wrong positions."""
    if sequence.committing:
        raise StateError("the sequence was interrupted while tokens were committed: start it anew")
