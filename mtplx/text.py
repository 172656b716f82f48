"""From token ids to text that may be shown: whole characters, and never part of a stop string."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class Detokenizer(Protocol):
    """Turns ids into text as they come; ``tokenizer.StreamDetokenizer`` is the real one."""

    def add(self, token_id: int) -> str:
        """Text that has become final with this token; may be empty."""

    def flush(self) -> str:
        """Whatever is left at the end."""


@dataclass(frozen=True)
class Segment:
    """A piece of output text, and whether the token that completed it came from a draft.

    What the end of the output releases counts to the last token with text.
    """

    text: str
    from_draft: bool


class TextOutput:
    """The text of one output, released as soon as it cannot become part of a stop string.

    stopped: whether a stop string has appeared; the text ends just before it.
    """

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str] = ()):
        self._detokenizer = detokenizer
        self._stops = [stop for stop in stops if stop]
        self._held: list[Segment] = []
        self._released = 0
        self._ends: list[int] = []
        self._from_draft = False
        self.stopped = False

    def add(self, token_id: int, from_draft: bool) -> list[Segment]:
        """Take one token; returns what may be shown now."""
        self._from_draft = from_draft
        out = self._take(self._detokenizer.add(token_id), from_draft)
        self._ends.append(self._released + self._held_length())
        return out

    def skip(self) -> None:
        """Take a token without text, such as the end of sequence."""
        self._ends.append(self._released + self._held_length())

    def finish(self) -> list[Segment]:
        """Release everything that is left; the end may still complete a stop string."""
        out = [] if self.stopped else self._take(self._detokenizer.flush(), self._from_draft)
        if not self.stopped:
            out += self._release(self._held_length())
        return out

    def kept_tokens(self) -> int:
        """How many tokens the shown text needs: all, or as many as reach up to the stop string.

        Text that only the flush brought needs them all.
        """
        return self.shown_tokens() if self.stopped else len(self._ends)

    def shown_tokens(self) -> int:
        """How many tokens the text shown so far needs: no stop string can take them back."""
        if self._released == 0:
            return 0
        return min(bisect_left(self._ends, self._released) + 1, len(self._ends))

    def _held_length(self) -> int:
        return sum(len(segment.text) for segment in self._held)

    def _take(self, text: str, from_draft: bool) -> list[Segment]:
        if not self._stops:  # then nothing is ever held
            self._released += len(text)
            return [Segment(text, from_draft)] if text else []
        if text:
            self._held.append(Segment(text, from_draft))
        held = "".join(segment.text for segment in self._held)
        found = [at for at in (held.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self.stopped = True
            return self._release(min(found))
        return self._release(len(held) - self._undecided(held))

    def _undecided(self, held: str) -> int:
        """The length of the longest end of ``held`` that a stop string begins with."""
        most = len(held) + 1
        starts = (stop[:n] for stop in self._stops for n in range(1, min(len(stop), most)))
        return max((len(start) for start in starts if held.endswith(start)), default=0)

    def _release(self, length: int) -> list[Segment]:
        """The first ``length`` held characters, cut from the held segments."""
        self._released += length
        out = []
        while length > 0:
            first = self._held.pop(0)
            if len(first.text) > length:
                self._held.insert(0, Segment(first.text[length:], first.from_draft))
                first = Segment(first.text[:length], first.from_draft)
            length -= len(first.text)
            out.append(first)
        return out
