"""Counters of one request, each with its definition."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# A head that knows nothing does no better than the most frequent token said again and again, which
# is 4 to 6 % of text in BPE tokens. One that works has 40 % and more of its first drafts kept, 30 %
# after minutes of training; even one of 20 % would show as few as chance in one request of 1,000.
_CHANCE, _WORKING, _ALARM = 0.06, 0.2, 1e-3


@dataclass
class Stats:
    """What one request did.

    max_tokens: the most that could be emitted: what was asked for, or what the context left.
    prompt_tokens: tokens of the prompt.
    tokens: tokens emitted, the end-of-sequence token included, up to where the output was cut.
    rounds: forwards of the trunk after the prompt; each emits at least one token.
    emitted: tokens that the rounds emitted; a stop string may have cut some of them afterwards.
    drafted[i]: rounds in which at least i + 1 tokens were drafted.
    accepted[i]: rounds in which the first i + 1 drafts were kept and emitted. A stop string takes
    back drafts of the last round; where it reaches into earlier rounds, those stay counted.
    prefill_seconds: running the prompt, all but its last token.
    draft_seconds, forward_seconds, other_seconds: drafting, the verify forwards, and everything
    else of a round (law, verification, rollback, text).
    drafter, rule, depth: what was used; depth is the most tokens drafted in a round, or "auto".
    sources: by the drafter that drafted in a round, "none" where none did: how many rounds, and
    the tokens that these emitted.
    head_drafted, head_kept: rounds in which the MTP head drafted, and in which its first draft was
    kept.
    costs: what depths were chosen by, in rounds without drafts, and where that is from; with the
    same costs and seed a run repeats. None where the depth is fixed.
    """

    drafter: str
    rule: str
    depth: int | str
    max_tokens: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    rounds: int = 0
    emitted: int = 0
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    sources: dict[str, dict[str, int]] = field(default_factory=dict)
    head_drafted: int = 0
    head_kept: int = 0
    costs: dict[str, Any] | None = None
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    forward_seconds: float = 0.0
    other_seconds: float = 0.0

    def count_round(self, drafted: int, accepted: int, emitted: int, source: str) -> None:
        """Note a round: tokens drafted, how many of those were kept, tokens emitted, by whom."""
        self.rounds += 1
        self.emitted += emitted
        counter = self.sources.setdefault(source, {"rounds": 0, "emitted": 0})
        counter["rounds"] += 1
        counter["emitted"] += emitted
        if source == "mtp" and drafted:
            self.head_drafted += 1
            self.head_kept += accepted > 0
        for counts, upto in ((self.drafted, drafted), (self.accepted, accepted)):
            counts.extend([0] * (drafted - len(counts)))
            for i in range(upto):
                counts[i] += 1

    @property
    def decode_seconds(self) -> float:
        """All rounds: drafting, forwards and the rest; the prompt is not in it."""
        return self.draft_seconds + self.forward_seconds + self.other_seconds

    @property
    def tokens_per_second(self) -> float:
        """Tokens emitted per second of ``decode_seconds``."""
        return self.tokens / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def acceptance_length(self) -> float:
        """Tokens emitted per round, recovered or bonus token included; 1.0 is plain decoding."""
        return self.emitted / self.rounds if self.rounds else 0.0

    @property
    def acceptance_by_position(self) -> list[float]:
        """accepted[i] / drafted[i]: how often draft i + 1 was kept, of the rounds that had one."""
        return [a / d for a, d in zip(self.accepted, self.drafted, strict=True)]

    @property
    def head_doubt(self) -> str | None:
        """Why the head is likely not what its trunk needs; None if it is, or too few drafts tell.

        It takes 31 drafts of which none, 64 of which three were kept.
        """
        drafted, kept = self.head_drafted, self.head_kept
        if not drafted or kept > _CHANCE * drafted or _tail(drafted, kept) >= _ALARM:
            return None
        return (
            f"{kept} of {drafted} first drafts of the MTP head were kept, no more than guesses"
            " would be: its norm weights may be stored less 1, it may need another hidden state of"
            " the trunk (before the final norm, not after it), or be of another trunk"
        )

    def to_dict(self) -> dict[str, Any]:
        """Every counter and derived figure, ready for JSON."""
        derived = ("tokens_per_second", "acceptance_length", "acceptance_by_position", "head_doubt")
        return {**vars(self), **{name: getattr(self, name) for name in derived}}


def _tail(drafted: int, kept: int) -> float:
    """The chance that of so many drafts at most ``kept`` are kept, each with ``_WORKING``."""
    chance, total = (1.0 - _WORKING) ** drafted, 0.0
    for i in range(kept + 1):
        total += chance
        chance *= (drafted - i) / (i + 1) * _WORKING / (1.0 - _WORKING)
    return total
