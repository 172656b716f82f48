"""How the trunk writes its own data: conversations, token by token, of seeds and samples.

A user turn starts from nothing but its header, or from a seed (a whole prompt, or a stem that the
trunk completes); the answer is always the trunk's. When an answer ends, the next user turn follows
in the same row, so every row is full.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from math import isfinite
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..errors import NonFiniteLogitsError, RequestError
from ..tokenizer import Tokenizer

_GAP = "\ue000"  # a private-use character: no template has it


class Kind(IntEnum):
    """What a token of the data is."""

    TEMPLATE = 0  # put there by the chat template
    SEED = 1  # of a given prompt or stem
    USER = 2  # of a user turn, sampled
    ANSWER = 3  # of an answer, sampled


@dataclass(frozen=True)
class Seed:
    """The start of a user turn; a stem is completed by the trunk, anything else is whole."""

    text: str
    stem: bool = False


@dataclass(frozen=True)
class Style:
    """How a conversation is sampled.

    A token is drawn at its temperature among those with p >= min_p * max p.  bare: share of user
    turns that start from nothing.  user_limit, answer_limit: most tokens sampled for a turn.
    """

    user_temperature: float = 1.0
    answer_temperatures: tuple[float, ...] = (0.4, 0.7, 1.0)
    min_p: float = 0.02
    bare: float = 0.2
    user_limit: int = 96
    answer_limit: int = 144


@dataclass(frozen=True)
class Layout:
    """Token ids that the chat template puts before, between and after the turns."""

    start: tuple[int, ...]
    after_user: tuple[int, ...]
    after_answer: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Layout:
        """The layout of a tokenizer's chat template; without one, texts between end tokens."""
        if not tokenizer.has_chat_template:
            if not tokenizer.eos_ids:
                raise RequestError("the model has neither a chat template nor an end token")
            end = (min(tokenizer.eos_ids),)
            return cls(tuple(tokenizer.encode("")) or end, (), end)
        turns = [{"role": role, "content": _GAP} for role in ("user", "assistant", "user")]
        parts = tokenizer.render_chat(turns).split(_GAP)
        if len(parts) != 4:
            raise RequestError("the model's chat template does not show its messages as they are")
        ids = [tuple(tokenizer.encode(p, add_special_tokens=False)) for p in parts]
        return cls(ids[0], ids[1], ids[2])


def read_seeds(path: Path) -> list[Seed]:
    """Seeds of a file: a ``.jsonl`` of {"prompt": text, "stem": true or absent}, else one a line.

    Raises ``RequestError`` naming the line that is wrong.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise RequestError(f"{path}: cannot be read as text ({e})") from None
    if path.suffix != ".jsonl":
        return [Seed(line.strip()) for line in lines if line.strip()]
    seeds = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError as e:
            raise RequestError(f"{path}, line {number}: not JSON ({e})") from None
        known = isinstance(entry, dict) and entry.keys() <= {"prompt", "stem"}
        if not known or not isinstance(entry.get("prompt"), str) or not entry["prompt"].strip():
            raise RequestError(f'{path}, line {number}: not {{"prompt": text, "stem": true}}')
        if not isinstance(entry.get("stem", False), bool):
            raise RequestError(f"{path}, line {number}: stem is {entry['stem']!r}, not true")
        seeds.append(Seed(entry["prompt"], entry.get("stem", False)))
    return seeds


class Row:
    """One row of conversations in the making."""

    def __init__(
        self,
        layout: Layout,
        seeds: Sequence[tuple[tuple[int, ...], bool]],
        style: Style,
        eos_ids: frozenset[int],
        random: np.random.Generator,
    ):
        self._layout, self._seeds, self._style = layout, seeds, style
        self._eos_ids, self._random = eos_ids, random
        self._queue: deque[tuple[int, Kind]] = deque()
        self._force(layout.start)
        self._start_user()

    @property
    def given(self) -> bool:
        """Whether the next token is of a template or a seed: it is not sampled."""
        return bool(self._queue)

    def next(self, logits: NDArray[np.float32] | None) -> tuple[int, Kind]:
        """The next token and its kind; ``logits``, (vocab,), follow the last, None if ``given``."""
        if logits is None:
            return self._queue.popleft()
        kind = self._kind
        token = self._sample(logits)
        self._left -= 1
        ended = token in self._eos_ids
        if ended or self._left == 0:
            self._end_turn(token if ended else None)
        return token, kind

    def _force(self, ids: Sequence[int], kind: Kind = Kind.TEMPLATE) -> None:
        self._queue.extend((token, kind) for token in ids)

    def _start_user(self) -> None:
        self._kind, self._left = Kind.USER, self._style.user_limit
        self._temperature = self._style.user_temperature
        if not self._seeds or self._random.random() < self._style.bare:
            return
        ids, stem = self._seeds[int(self._random.integers(len(self._seeds)))]
        self._force(ids, Kind.SEED)
        if not stem:
            self._end_turn(None)

    def _end_turn(self, sampled_end: int | None) -> None:
        """Put the template's part after the turn; an end token that was sampled is its first."""
        user = self._kind is Kind.USER
        part = self._layout.after_user if user else self._layout.after_answer
        self._force(part[1:] if part and part[0] == sampled_end else part)
        if user:
            temperatures = self._style.answer_temperatures
            self._kind, self._left = Kind.ANSWER, self._style.answer_limit
            self._temperature = temperatures[int(self._random.integers(len(temperatures)))]
        else:
            self._start_user()

    def _sample(self, logits: NDArray[np.float32]) -> int:
        highest = float(logits.max())
        if not isfinite(highest):
            raise NonFiniteLogitsError(f"the trunk gives logits whose highest is {highest}")
        lowest = highest + self._temperature * np.log(self._style.min_p)
        ids = np.flatnonzero(logits >= lowest)
        weights = np.exp((logits[ids].astype(np.float64) - highest) / self._temperature)
        total = np.cumsum(weights)
        drawn = np.searchsorted(total, self._random.random() * total[-1], side="right")
        return int(ids[min(drawn, len(ids) - 1)])
