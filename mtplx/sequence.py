"""A request, and the sequence that grows out of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from collections.abc import Sequence as Sequence_
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

import mlx.core as mx
import numpy as np

from .constraints import Constraints, Walker
from .distribution import SparseDistribution
from .draft_vocabulary import DraftVocabulary
from .drafters import Drafter
from .errors import NonFiniteLogitsError
from .fast_sampling import sparse_distributions_from_mlx_logits
from .logprobs import TokenLogprob, token_logprob
from .metrics import Stats
from .rng import Draws
from .sampler_config import SamplerConfig
from .state import State
from .text import Segment, TextOutput


class History:
    """What the law of the next token depends on besides the logits: prompt and output so far."""

    def __init__(
        self,
        config: SamplerConfig,
        prompt: Sequence_[int],
        *,
        eos_ids: Collection[int] = (),
        min_tokens: int = 0,
        grammar: Walker | None = None,
    ):
        self.config = config
        banned = [t for t, amount in (config.logit_bias or {}).items() if amount == -inf]
        self.constraints = Constraints(
            eos_ids=eos_ids, min_tokens=min_tokens, grammar=grammar, banned=banned
        )
        # Only the repetition penalty sees the prompt, and only which ids are in it.
        self.prompt = sorted(set(prompt)) if config.repetition_penalty != 1.0 else None
        self.counts: Counter[int] = Counter()
        self._depends = bool(config.presence_penalty or config.frequency_penalty) or (
            config.repetition_penalty != 1.0
        )

    def append(self, token: int) -> None:
        """Take note of an emitted token."""
        self.counts[token] += 1
        self.constraints.append(token)

    def laws(self, logits: mx.array, drafts: Sequence_[int]) -> Sequence_[SparseDistribution]:
        """The law of each row of ``logits`` (len(drafts) + 1, vocab); row i follows i drafts.

        drafts: no more than ``constraints.usable``. Where constraints leave nothing to follow them
        all, the last row is an error that says so, raised if and when it is looked at.
        """
        prefixes = [drafts[:i] for i in range(len(drafts) + 1)]
        dead_end = self.constraints.dead_end(drafts, logits.shape[-1])
        if dead_end is None:
            return self._laws(logits, prefixes)
        laws = self._laws(logits[:-1], prefixes[:-1]) if drafts else []
        return _WithoutLast(laws, dead_end)

    def law_after(self, logits: mx.array, drafts: Sequence_[int]) -> SparseDistribution:
        """The law of one row, (vocab,), that follows all of ``drafts``."""
        dead_end = self.constraints.dead_end(drafts, logits.shape[-1])
        if dead_end is not None:
            raise dead_end
        return self._laws(logits[None], [drafts])[0]

    def draft_law(
        self, logits: mx.array, drafts: Sequence_[int], vocabulary: DraftVocabulary | None
    ) -> SparseDistribution | None:
        """``law_after`` of a row that has the ids of a draft vocabulary only: 0 elsewhere.

        logits: (V,) or (1, V). None where none of them is allowed.
        """
        logits = logits if logits.ndim == 2 else logits[None]
        vocab_size = logits.shape[-1] if vocabulary is None else vocabulary.vocab_size
        mask = self.constraints.mask(drafts, vocab_size)
        if mask is not None:
            mask = mask if vocabulary is None else mask[vocabulary.ids]
            if not mask.any():
                return None
        if vocabulary is None:
            return self._laws(logits, [drafts])[0]
        if mask is not None:
            logits = mx.where(mx.array(mask), logits, -inf)
        config = self._draft_config(vocabulary)
        if config is None:
            return None
        counts = [vocabulary.counts(self.counts + Counter(drafts))] if self._depends else None
        law = sparse_distributions_from_mlx_logits(
            logits,
            config,
            token_counts=counts,
            prompt_ids=None if self.prompt is None else vocabulary.indices(self.prompt),
        )[0]
        return vocabulary.widen(law)

    def _draft_config(self, vocabulary: DraftVocabulary) -> SamplerConfig | None:
        """The parameters by index; None where they ban every index."""
        if self.config.logit_bias is None:
            return self.config
        bias = vocabulary.bias(self.config.logit_bias) or {}
        if sum(amount == -inf for amount in bias.values()) == len(vocabulary.ids):
            return None
        return replace(self.config, logit_bias=bias or None, banned_ids=())

    def _laws(
        self, logits: mx.array, prefixes: Sequence_[Sequence_[int]]
    ) -> list[SparseDistribution]:
        counts = [self.counts + Counter(p) for p in prefixes] if self._depends else None
        masks = [self.constraints.mask(p, logits.shape[-1]) for p in prefixes]
        if any(mask is not None for mask in masks):
            free = np.ones(logits.shape[-1], dtype=bool)
            allowed = np.stack([free if m is None else m for m in masks])
            logits = mx.where(mx.array(allowed), logits, -inf)
        return sparse_distributions_from_mlx_logits(
            logits, self.config, token_counts=counts, prompt_ids=self.prompt
        )

    def greedy_on_device(self, logits: mx.array) -> mx.array | None:
        """The next token, (1, 1), of greedy decoding without steps 1 to 3 of the law; else None.

        logits: (1, vocab). It is not read: the law on the host decides, and comes to the same.
        """
        changed = self._depends or self.config.logit_bias or self.constraints.active
        if self.config.temperature > 0 or changed:
            return None
        return mx.argmax(logits, axis=-1, keepdims=True).astype(mx.int32)


class _WithoutLast(Sequence_[SparseDistribution]):
    """Laws, and one more that does not exist."""

    def __init__(self, laws: Sequence_[SparseDistribution], error: NonFiniteLogitsError):
        self._laws, self._error = laws, error

    def __len__(self) -> int:
        return len(self._laws) + 1

    def __getitem__(self, index: Any) -> Any:
        if index == len(self._laws):
            raise self._error
        return self._laws[index]


@dataclass
class Sequence:
    """One sequence in the engine.

    tokens: prompt and output, in order; the state holds all of them but the last.
    finish_reason: None while it runs, then "stop" or "length".  error: what its last round raised.
    top_logprobs: how many of the likeliest tokens to note beside log p; None: no note at all.
    """

    tokens: list[int]
    prompt_length: int
    max_tokens: int
    state: State
    drafter: Drafter
    history: History
    draws: Draws
    rule: str
    depth: int
    eos_ids: frozenset[int]
    output: TextOutput
    stats: Stats
    finish_reason: str | None = None
    segments: list[Segment] = field(default_factory=list)
    ids_taken: int = 0
    committing: bool = False
    top_logprobs: int | None = None
    error: Exception | None = None
    noted: list[TokenLogprob] = field(default_factory=list)

    @property
    def remaining(self) -> int:
        """How many tokens may still be emitted."""
        return self.max_tokens - (len(self.tokens) - self.prompt_length)

    @property
    def token_ids(self) -> list[int]:
        """The output: cut where its text is cut."""
        return self.tokens[self.prompt_length :][: self.output.kept_tokens()]

    @property
    def logprobs(self) -> list[TokenLogprob] | None:
        """One for each of ``token_ids``; None if they were not asked for."""
        return None if self.top_logprobs is None else self.noted[: self.output.kept_tokens()]

    def note(self, emitted: Sequence_[int], laws: Sequence_[SparseDistribution]) -> None:
        """Note log p of committed tokens, if asked for; laws[i] is that of emitted[i]."""
        if self.top_logprobs is not None:
            top = self.top_logprobs
            self.noted += [token_logprob(laws[i], t, top) for i, t in enumerate(emitted)]

    def commit(self, emitted: Sequence_[int], accepted: int) -> int:
        """Append tokens until one ends the sequence; how many were taken.

        The first ``accepted`` of them came from a draft. The earliest of end-of-sequence token,
        stop string and ``max_tokens`` ends it; what comes after is not taken.
        """
        for i, token in enumerate(emitted):
            self._append(token, from_draft=i < accepted)
            if self.finish_reason is not None:
                return i + 1
        return len(emitted)

    def take_segments(self) -> list[Segment]:
        """Text that may be shown and has not been taken yet."""
        taken, self.segments = self.segments, []
        return taken

    def take_ids(self) -> list[int]:
        """Ids of the text taken so far that have not been taken yet; at the end, all that is left.

        Ids are held back as long as their text is: a stop string may still cut both.
        """
        running = self.finish_reason is None
        upto = self.output.shown_tokens() if running else self.output.kept_tokens()
        output = self.tokens[self.prompt_length :]
        taken, self.ids_taken = output[self.ids_taken : upto], upto
        return taken

    def _append(self, token: int, *, from_draft: bool) -> None:
        self.tokens.append(token)
        self.history.append(token)
        if token in self.eos_ids:
            self.output.skip()
            self.finish_reason = "stop"
        else:
            self.segments += self.output.add(token, from_draft)
            if self.output.stopped:
                self.finish_reason = "stop"
            elif self.remaining == 0:
                self.finish_reason = "length"
        if self.finish_reason is not None:
            self.segments += self.output.finish()
            if self.output.stopped:
                self.finish_reason = "stop"
            self.stats.tokens = len(self.token_ids)
        else:
            self.stats.tokens += 1
