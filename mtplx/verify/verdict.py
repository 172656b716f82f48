"""What a rule is given to decide with, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ..distribution import Distribution


@dataclass(frozen=True)
class Verdict:
    """The outcome of one block.

    accepted: how many drafts are kept.  next_token: the recovered or bonus token that follows
    them, None if the last kept token ends the sequence.  probabilities: min(1, p/q) of each
    judged draft, the kept ones and the first rejected one: a diagnostic under the coupled rule.
    Under the block rule h_i of every draft up to the first end of sequence: with it 1..i passes.
    """

    accepted: int
    next_token: int | None
    probabilities: tuple[float, ...]


class Randomness(Protocol):
    """The draws a rule may ask for; ``rng.Draws`` is the real one."""

    def race(self, position: int, law: Distribution) -> int:
        """A token by the noise shared with plain decoding."""

    def accept(self, start: int, offset: int) -> float:
        """A uniform in [0, 1)."""

    def residual(self, position: int, law: Distribution) -> int:
        """The recovered token."""

    def bonus(self, position: int, law: Distribution) -> int:
        """The token after a fully kept block."""
