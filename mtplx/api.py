"""The Python API: ``load`` a model, then ``generate`` or ``stream``."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import engine
from .drafters import Drafter, MTPDrafter, NgramDrafter, NoDrafter
from .errors import RequestError
from .families import family_of
from .load import Bundle
from .metrics import Stats
from .mtp_patch import attach_head
from .rng import Draws
from .sampler_config import SamplerConfig
from .sequence import History
from .sequence import Sequence as EngineSequence
from .state import State
from .text import Segment, TextOutput
from .verify import RULES

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]

DRAFTERS = ("auto", "mtp", "ngram", "none")
DEFAULT_DEPTH = {"mtp": 3, "ngram": 10, "none": 0}
# JSON readers that know only doubles keep integers below 2^53 exact.
_SEED_BITS = 53


@dataclass(frozen=True)
class Options:
    """How to generate; ``ValueError`` (``RequestError``) names a field that is wrong.

    sampling: the law.  max_tokens: at most so many tokens, >= 1; the end-of-sequence token counts.
    seed: in [0, 2^64); drawn and reported if None.  stop: strings that end the output and are
    not shown.  draft: where drafts come from, of ``DRAFTERS``; "auto" is the model's own MTP head
    if it has one, else n-grams.  depth: most tokens drafted a round; None is the drafter's default.
    verify: of ``verify.RULES``; None is "coupled" (the same text with and without drafts) where a
    seed is given, else "token".  chat: put a plain string through the model's chat template.
    """

    sampling: SamplerConfig = field(default_factory=SamplerConfig)
    max_tokens: int = 256
    seed: int | None = None
    stop: Sequence[str] = ()
    draft: str = "auto"
    depth: int | None = None
    verify: str | None = None
    chat: bool = True

    def __post_init__(self) -> None:
        """Check every field."""
        if not isinstance(self.sampling, SamplerConfig):
            raise RequestError(f"sampling must be a SamplerConfig, not {self.sampling!r}")
        _check_integer("max_tokens", self.max_tokens, 1)
        if self.seed is not None:
            _check_integer("seed", self.seed, 0, 2**64 - 1)
        if self.depth is not None:
            _check_integer("depth", self.depth, 0, 64)
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        if any(not isinstance(stop, str) or not stop for stop in self.stop):
            raise RequestError(f"stop must be non-empty strings, not {self.stop!r}")
        _check_choice("draft", self.draft, DRAFTERS)
        if self.verify is not None:
            _check_choice("verify", self.verify, sorted(RULES))


def _check_integer(name: str, value: Any, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be an integer, not {value!r}")
    if value < low or (high is not None and value > high):
        limit = f">= {low}" if high is None else f"in [{low}, {high}]"
        raise RequestError(f"{name} must be {limit}, not {value}")


def _check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise RequestError(f"{name} must be one of {', '.join(choices)}, not {value!r}")


@dataclass(frozen=True)
class Chunk:
    """What one round brought: text that is final, in pieces, and the ids it emitted.

    text: the concatenation of the pieces; the text of all chunks is the text of the result.
    finish_reason: None until the last chunk, then "stop" or "length".
    """

    segments: tuple[Segment, ...]
    token_ids: tuple[int, ...]
    finish_reason: str | None

    @property
    def text(self) -> str:
        """The pieces as one string."""
        return "".join(segment.text for segment in self.segments)


@dataclass(frozen=True)
class Generation:
    """A finished output.

    token_ids: without the prompt; a final end-of-sequence token is among them; cut where the text
    is cut. finish_reason: "stop" (end of sequence or stop string) or "length".
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    seed: int
    stats: Stats


class Stream:
    """An output in the making: iterate for chunks, one a round; ``result()`` runs to the end.

    Stopping early is safe: between rounds the sequence is always a committed one.
    """

    def __init__(self, sequence: EngineSequence, vocab_size: int):
        self.sequence = sequence
        self._engine = engine.Engine(vocab_size)
        self._texts: list[str] = []

    def __iter__(self) -> Iterator[Chunk]:
        """Run round after round."""
        sequence = self.sequence
        while sequence.finish_reason is None:
            before = len(sequence.tokens)
            self._engine.step([sequence])
            chunk = Chunk(
                tuple(sequence.take_segments()),
                tuple(sequence.tokens[before:]),
                sequence.finish_reason,
            )
            self._texts.append(chunk.text)
            yield chunk

    def result(self) -> Generation:
        """The whole output; runs the rounds that are left."""
        for _ in self:
            pass
        sequence = self.sequence
        return Generation(
            "".join(self._texts),
            sequence.token_ids,
            str(sequence.finish_reason),
            sequence.draws.seed,
            sequence.stats,
        )


def encode_prompt(bundle: Bundle, prompt: Prompt, *, chat: bool = True) -> list[int]:
    """Token ids of a prompt: a string (through the chat template if ``chat`` and the model has
    one), chat messages, or ids, which are range-checked.
    """
    tokenizer = bundle.tokenizer
    if isinstance(prompt, str):
        if chat and tokenizer.has_chat_template:
            return tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
        return tokenizer.encode(prompt)
    items = list(prompt)
    if items and all(isinstance(item, Mapping) for item in items):
        return tokenizer.apply_chat_template(items)
    vocab = vocab_size(bundle)
    for item in items:
        if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item < vocab:
            raise RequestError(f"the prompt has {item!r}, which is no token id in [0, {vocab})")
    return [int(item) for item in items]


def vocab_size(bundle: Bundle) -> int:
    """How many logits the trunk has."""
    return int(bundle.provenance.config["vocab_size"])


def _room(bundle: Bundle, prompt: Sequence[int], max_tokens: int) -> int:
    """``max_tokens``, or less where the model's context ends first."""
    if not prompt:
        raise RequestError("the prompt is empty")
    context = bundle.provenance.config.get("max_position_embeddings")
    if not context:
        return max_tokens
    if len(prompt) >= context:
        raise RequestError(f"the prompt has {len(prompt)} tokens, the model's context {context}")
    return min(max_tokens, int(context) - len(prompt))


def _drafter(bundle: Bundle, name: str) -> Drafter:
    if name == "auto":
        name = "ngram" if bundle.head is None else "mtp"
    if name == "mtp":
        if bundle.head is None:
            raise RequestError("draft 'mtp' needs an MTP head, and this model has none")
        return MTPDrafter(attach_head(bundle.trunk, bundle.head))
    return NgramDrafter() if name == "ngram" else NoDrafter()


def start(bundle: Bundle, prompt: Prompt, options: Options) -> Stream:
    """A stream that has not run anything yet; see ``stream``."""
    ids = encode_prompt(bundle, prompt, chat=options.chat)
    room = _room(bundle, ids, options.max_tokens)
    drafter = _drafter(bundle, options.draft)
    depth = DEFAULT_DEPTH[drafter.name] if options.depth is None else options.depth
    rule = options.verify or ("token" if options.seed is None else "coupled")
    seed = secrets.randbits(_SEED_BITS) if options.seed is None else options.seed
    drafter.observe(ids, None)
    sequence = EngineSequence(
        tokens=ids,
        prompt_length=len(ids),
        max_tokens=room,
        state=State(family_of(bundle.trunk)),
        drafter=drafter,
        history=History(options.sampling, tuple(ids)),
        draws=Draws(seed),
        rule=rule,
        depth=depth,
        eos_ids=bundle.tokenizer.eos_ids,
        output=TextOutput(bundle.tokenizer.detokenizer(), tuple(options.stop)),
        stats=Stats(drafter.name, rule, depth, prompt_tokens=len(ids)),
    )
    return Stream(sequence, vocab_size(bundle))


def stream(bundle: Bundle, prompt: Prompt, **options: Any) -> Stream:
    """Generate as an iterator of chunks, one a round.

    prompt: a string, chat messages ({"role", "content"}), or token ids. options: the fields of
    ``Options``; an unknown one is a ``TypeError``. Raises ``RequestError`` for what cannot be done
    (empty or too long a prompt, no MTP head) before anything runs.
    """
    return start(bundle, prompt, Options(**options))


def generate(bundle: Bundle, prompt: Prompt, **options: Any) -> Generation:
    """Generate to the end; arguments as in ``stream``."""
    return stream(bundle, prompt, **options).result()
