"""How many tokens to draft: what a round costs, how often drafts are kept, what follows from both.

A round of K drafts emits 1 + S_1 + ... + S_K tokens on average, S_k the chance that its first k
drafts are kept, and costs c(K). What is to be as high as possible is the rate r of all rounds
together, tokens over cost. By the renewal-reward theorem (Ross, "Applied probability models with
optimization applications", 1970) the rule that attains the highest r is, in each round, to draft on
while the tokens that can still be gained exceed r times the cost that is added. Estimates stand in
for S, and for r the highest rate of a fixed K that they predict.

A depth is exact if it depends on committed history, on drafts already placed in the block, on their
q and on earlier rounds (rejected drafts of these and their q among them), never on a token of this
round that is then thrown away. Nothing here reads a clock: with
equal costs and an equal seed, depths are equal.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import NamedTuple

# Of a head that is not known yet: the first draft, and a later one against the one before it.
FIRST, LATER = 0.6, 0.92
# Acceptance is told apart by position up to this one; the last stands for all that follow.
POSITIONS = 4
# Copies after a match of 1, 2, ... tokens, the last for all longer ones: a little below what
# SmolLM2-135M shows on texts that copy nothing in particular.
COPY_PRIORS = (0.2, 0.4, 0.55, 0.6, 0.7, 0.75, 0.85, 0.9)
# Drafts are told apart by their own probability, in bins between these.
EDGES = (0.2, 0.4, 0.6, 0.8, 0.95)
PRIOR_WEIGHT = 4.0
FADING = 0.99
PROBE_EVERY = 32
HEAD_LIMIT, COPY_LIMIT = 8, 12


@dataclass(frozen=True)
class Costs:
    """What a round costs, in any unit: only ratios matter.

    forward: a round that verifies 1, 2, ... rows, but for making the drafts; beyond its end, on
    along the line from the first to the last.  draft: one step of the head, its law and the draw; 0
    without a head.  start: what the first draft of a round costs more: committed rows to feed, and
    the head's weights, which the trunk's have driven out of the caches.
    """

    forward: tuple[float, ...]
    draft: float = 0.0
    start: float = 0.0

    def __post_init__(self) -> None:
        """Check that these are costs."""
        if not self.forward or not all(isfinite(c) and c > 0 for c in self.forward):
            raise ValueError(f"costs of a forward are positive numbers, not {self.forward}")
        for cost in (self.draft, self.start):
            if not (isfinite(cost) and cost >= 0):
                raise ValueError(f"the cost of a draft is a number >= 0, not {cost}")

    def relative(self) -> Costs:
        """The same in units of a round without drafts, to four decimals."""
        forward, *rest = self.forward, self.draft, self.start
        one = forward[0]
        return Costs(tuple(round(c / one, 4) for c in forward), *(round(c / one, 4) for c in rest))

    def copying(self, drafts: int) -> float:
        """A round that verifies so many drafts which cost nothing to make."""
        last = len(self.forward) - 1
        slope = max(self.forward[last] - self.forward[0], 0.0) / max(last, 1)
        return self.forward[min(drafts, last)] + slope * max(drafts - last, 0)

    def drafting(self, drafts: int) -> float:
        """A round of so many drafts of the head."""
        return self.copying(drafts) + drafts * self.draft + (self.start if drafts else 0.0)


# Where nothing has been measured: what `mtplx tune` found for SmolLM2-135M in float32 and its head
# on 2 cores of a Zen 3 with OpenBLAS, to whose kernels an even number of rows suits best.
DEFAULT_COSTS = Costs(
    (1.0, 1.02, 1.25, 1.02, 1.27, 1.28, 1.49, 1.37, 1.6, 1.65, 1.71, 1.76, 1.81), 0.11
)
# The same model, machine and head on the CPU kernels, where each row more is arithmetic.
KERNEL_COSTS = Costs(
    (1.0, 1.17, 1.43, 1.66, 1.96, 2.32, 2.65, 2.94, 3.36, 3.68, 4.0, 4.33, 4.65), 0.075, 0.08
)
# And at the level "avx512vnni", on 2 cores of a Zen 4.
VNNI_COSTS = Costs(
    (1.0, 1.04, 1.09, 1.21, 1.35, 1.48, 1.78, 1.96, 2.17, 2.38, 2.58, 2.78, 2.98), 0.05, 0.07
)


class Choice(NamedTuple):
    """A depth, and the tokens per cost that it is expected to bring."""

    rate: float
    depth: int


def best(acceptance: Iterable[float], cost: Callable[[int], float]) -> Choice:
    """The depth of the highest rate; the lowest of several.

    acceptance: by position, given that all drafts before it were kept.  cost: of a round, by depth.
    """
    choice = Choice(1.0 / cost(0), 0)
    survival = tokens = 1.0
    for depth, share in enumerate(acceptance, 1):
        survival *= share
        tokens += survival
        if tokens / cost(depth) > choice.rate:
            choice = Choice(tokens / cost(depth), depth)
    return choice


class Acceptance:
    """How often drafts of each of some classes were kept; what is long ago counts less."""

    def __init__(self, classes: int):
        self._tried = [0.0] * classes
        self._kept = [0.0] * classes

    def rate(self, which: int, prior: float) -> float:
        """The share kept, as if ``PRIOR_WEIGHT`` more had been seen, kept as ``prior`` says."""
        kept = self._kept[which] + PRIOR_WEIGHT * prior
        return kept / (self._tried[which] + PRIOR_WEIGHT)

    def count(self, which: int, kept: bool) -> None:
        """Note one draft that was judged."""
        self._tried[which] += 1.0
        self._kept[which] += kept

    def fade(self) -> None:
        """A round has passed."""
        self._tried = [FADING * count for count in self._tried]
        self._kept = [FADING * count for count in self._kept]


class AdaptiveDepth:
    """How far a head drafts in each round of one sequence.

    The chance of a draft to be kept is estimated by its position and its own probability; before
    it is drawn, by the position alone. What is never drafted is never learnt: every 32nd round
    drafts one token more than pays, so that depth 0 is not for ever either.
    """

    def __init__(self, costs: Costs, limit: int = HEAD_LIMIT):
        self.limit = limit
        self.rounds = 0
        self._spent = [costs.drafting(drafts) for drafts in range(limit + 1)]
        self._outlook: tuple[list[float], float] | None = None  # for the round that is to come
        # By position, then by position and own probability.
        self._seen = Acceptance(POSITIONS + POSITIONS * (len(EDGES) + 1))

    def best(self, limit: int) -> Choice:
        """What the averages by position promise for at most ``limit`` drafts."""
        return best(self._expected()[0][:limit], self._spent.__getitem__)

    def more(self, confidences: Sequence[float]) -> bool:
        """Whether to draft one more token.

        confidences: q(x) of each draft placed in this block so far.
        """
        if len(confidences) >= self.limit:
            return False
        if self._pays(confidences):
            return True
        probing = self.rounds % PROBE_EVERY == PROBE_EVERY - 1
        return probing and (not confidences or self._pays(confidences[:-1]))

    def observe(self, confidences: Sequence[float], accepted: int) -> None:
        """A round has passed, in which the head drafted these and the first ``accepted`` were kept.

        Drafts behind the first rejection have not been judged and are not counted.
        """
        self.rounds += 1
        self._outlook = None
        if confidences:  # else the little that rare probes tell would be forgotten between them
            self._seen.fade()
        for i, confidence in enumerate(confidences[: accepted + 1]):
            self._seen.count(_place(i), i < accepted)
            self._seen.count(_cell(i, confidence), i < accepted)

    def _pays(self, confidences: Sequence[float]) -> bool:
        """Whether some number of further drafts brings more than its cost at the best rate."""
        averages, rate = self._expected()
        placed = len(confidences)
        survival, gain = 1.0, 0.0
        for i, confidence in enumerate(confidences):
            survival *= self._seen.rate(_cell(i, confidence), averages[i])
        for i in range(placed, self.limit):
            survival *= averages[i]
            gain += survival
            if gain > rate * (self._spent[i + 1] - self._spent[placed]):
                return True
        return False

    def _expected(self) -> tuple[list[float], float]:
        """Acceptance by position, each leaning on the one before it, and the best rate by it."""
        if self._outlook is None:
            shares = [self._seen.rate(0, FIRST)]
            for place in range(1, POSITIONS):
                shares.append(self._seen.rate(place, LATER * shares[-1]))
            averages = [shares[_place(i)] for i in range(self.limit)]
            self._outlook = averages, best(averages, self._spent.__getitem__).rate
        return self._outlook


def _place(position: int) -> int:
    return min(position, POSITIONS - 1)


def _cell(position: int, confidence: float) -> int:
    return POSITIONS + _place(position) * (len(EDGES) + 1) + bisect(EDGES, confidence)


class CopyDepth:
    """How far to copy on from a match.

    Where draft i of a match of n tokens is judged, all before it were kept, and it follows n + i
    tokens that agree: it counts as a copy after a match of that length.
    """

    def __init__(self, costs: Costs):
        self.costs = costs
        self._lengths = Acceptance(len(COPY_PRIORS))

    def best(self, length: int, limit: int) -> Choice:
        """What at most ``limit`` drafts after a match of ``length`` tokens promise."""
        lengths = range(length, length + min(limit, COPY_LIMIT))
        return best(map(self._rate, lengths), self.costs.copying)

    def observe(self, length: int, copied: Sequence[int], emitted: Sequence[int]) -> None:
        """A round has passed that began at a match; ``length`` is 0 if there was none.

        copied: what followed the match, drafted or not.  A token that p gave agrees with a copy as
        often as p would have kept the copy, so every round tells, whatever was drafted.
        """
        self._lengths.fade()
        for i, (copy, token) in enumerate(zip(copied, emitted, strict=False)):
            self._lengths.count(self._class(length + i), copy == token)
            if copy != token:
                return

    def _class(self, length: int) -> int:
        return min(length, len(COPY_PRIORS)) - 1

    def _rate(self, length: int) -> float:
        return self._lengths.rate(self._class(length), COPY_PRIORS[self._class(length)])
