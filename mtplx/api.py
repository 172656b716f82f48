"""The Python API: ``load`` a model, then ``generate`` or ``stream``."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import costs, drafters, engine
from .depth import COPY_LIMIT, HEAD_LIMIT, Costs
from .errors import RequestError
from .families import family_of
from .grammar import compile_grammar
from .load import Bundle
from .logprobs import TokenLogprob
from .metrics import Stats
from .options import Options
from .rng import Draws
from .sequence import History
from .sequence import Sequence as EngineSequence
from .state import State
from .text import Segment, TextOutput

OnRound = Callable[[engine.Round], None] | None
Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]

# JSON readers that know only doubles keep integers below 2^53 exact.
_SEED_BITS = 53


@dataclass(frozen=True)
class Chunk:
    """What one round brought: text that is final, in pieces, and its ids.

    The texts and ids of all chunks are those of the result: what may still become part of a stop
    string is held back, ids included, so a chunk may be empty.
    finish_reason: None until the last chunk, then "stop" or "length".  logprobs: one for each id,
    if they were asked for.
    """

    segments: tuple[Segment, ...]
    token_ids: tuple[int, ...]
    finish_reason: str | None
    logprobs: tuple[TokenLogprob, ...] | None = None

    @property
    def text(self) -> str:
        """The pieces as one string."""
        return "".join(segment.text for segment in self.segments)


@dataclass(frozen=True)
class Generation:
    """A finished output.

    token_ids: without the prompt; a final end-of-sequence token is among them; cut where the text
    is cut. finish_reason: "stop" (end of sequence or stop string) or "length". logprobs: one for
    each id, None if they were not asked for.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    seed: int
    stats: Stats
    logprobs: list[TokenLogprob] | None = None


class Stream:
    """An output in the making: iterate for chunks, one a round; ``result()`` runs to the end.

    Stopping early is safe: between rounds the sequence is always a committed one.
    """

    def __init__(self, sequence: EngineSequence, vocab_size: int, on_round: OnRound = None):
        self.sequence = sequence
        self._engine = engine.Engine(vocab_size, on_round)
        self._texts: list[str] = []

    def __iter__(self) -> Iterator[Chunk]:
        """Run round after round."""
        sequence = self.sequence
        while sequence.finish_reason is None:
            self._engine.step([sequence])
            taken, noted = sequence.ids_taken, sequence.logprobs
            ids = tuple(sequence.take_ids())
            chunk = Chunk(
                tuple(sequence.take_segments()),
                ids,
                sequence.finish_reason,
                None if noted is None else tuple(noted[taken : taken + len(ids)]),
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
            sequence.logprobs,
        )


def encode_prompt(bundle: Bundle, prompt: Prompt, *, chat: bool = True) -> list[int]:
    """Token ids of a prompt: a string (through the chat template if ``chat`` and the model has
    one), chat messages, or ids, which are range-checked.
    """
    tokenizer = bundle.tokenizer
    if isinstance(prompt, str):
        if not prompt.strip() and (chat or not prompt):
            raise RequestError("the prompt is empty")
        if chat and tokenizer.has_chat_template:
            return tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
        return tokenizer.encode(prompt)
    if isinstance(prompt, (bytes, bytearray)):
        raise RequestError("the prompt is bytes: decode it to a string, or give token ids")
    if not isinstance(prompt, Iterable):
        raise RequestError(f"the prompt must be a string, messages or token ids, not {prompt!r}")
    items: list[Any] = list(prompt)
    if items and all(isinstance(item, Mapping) for item in items):
        return tokenizer.apply_chat_template(items)
    if any(isinstance(item, Mapping) for item in items):
        raise RequestError(
            "the prompt has chat messages and other things: give messages, or token ids"
        )
    vocab = vocab_size(bundle)
    for item in items:
        whole = isinstance(item, (int, np.integer)) and not isinstance(item, bool)
        if not whole or not 0 <= item < vocab:
            raise RequestError(f"the prompt has {item!r}, which is no token id in [0, {vocab})")
    return [int(item) for item in items]


def vocab_size(bundle: Bundle) -> int:
    """How many logits the trunk has."""
    return int(_configured(bundle, "vocab_size"))


def _configured(bundle: Bundle, name: str) -> Any:
    """An entry of config.json, which some families keep under ``text_config``; None if absent."""
    config = bundle.provenance.config
    return config.get(name, (config.get("text_config") or {}).get(name))


def _room(bundle: Bundle, prompt: Sequence[int], max_tokens: int) -> int:
    """``max_tokens``, or less where the model's context ends first."""
    if not prompt:
        raise RequestError("the prompt is empty")
    context = _configured(bundle, "max_position_embeddings")
    if not context:
        return max_tokens
    if len(prompt) >= context:
        raise RequestError(f"the prompt has {len(prompt)} tokens, the model's context {context}")
    return min(max_tokens, int(context) - len(prompt))


def _check_bias(bundle: Bundle, options: Options) -> None:
    vocab = vocab_size(bundle)
    for token in options.sampling.logit_bias or ():
        if token >= vocab:
            raise RequestError(
                f"logit_bias or banned_ids has token id {token}, outside [0, {vocab})"
            )


def _drafter(bundle: Bundle, options: Options, known: Costs | None) -> drafters.Drafter:
    """known: the costs by which depths are chosen, None if they are not."""
    draft = options.draft
    if draft == "none":
        return drafters.NoDrafter()
    model = _drawing(bundle, options)
    if known is None:
        return model or drafters.NgramDrafter()
    if draft in ("mtp", "model"):
        return drafters.AutoDrafter(model, None, known)
    shared = model.index if isinstance(model, drafters.MTPDrafter) else None
    return drafters.AutoDrafter(model, drafters.NgramDrafter(shared), known)


def _drawing(bundle: Bundle, options: Options) -> drafters.Drafter | None:
    """The drafter that draws from a law of its own, if there is to be one."""
    small = options.draft_model
    if isinstance(small, Bundle):
        shared = drafters.shared_vocabulary(bundle.tokenizer, small.tokenizer)
        context = _configured(small, "max_position_embeddings")
        return drafters.ModelDrafter(family_of(small.trunk), shared, context)
    head = bundle.attached if options.draft in ("auto", "mtp") else None
    if options.draft == "mtp" and head is None:
        raise RequestError("draft 'mtp' needs an MTP head, and this model has none")
    return None if head is None else drafters.MTPDrafter(head)


def _history(bundle: Bundle, ids: Sequence[int], options: Options) -> History:
    schema, eos_ids, grammar = options.json_schema, bundle.tokenizer.eos_ids, None
    if schema is not None or options.regex is not None:
        text = None if schema is None else str(schema)
        grammar = compile_grammar(bundle.tokenizer, json_schema=text, regex=options.regex)
    return History(
        options.sampling, ids, eos_ids=eos_ids, min_tokens=options.min_tokens, grammar=grammar
    )


def start(bundle: Bundle, prompt: Prompt, options: Options, on_round: OnRound = None) -> Stream:
    """A stream that has not run anything yet; see ``stream``.

    on_round: called with what each round saw and decided, an ``engine.Round``.
    """
    ids = encode_prompt(bundle, prompt, chat=options.chat)
    room = _room(bundle, ids, options.max_tokens)
    _check_bias(bundle, options)
    depth: int | str = 0 if options.draft == "none" else options.depth
    small = options.draft_model
    if not isinstance(small, Bundle | None):
        raise RequestError(f"draft_model must be a model that `mtplx.load` gave, not {small!r}")
    known, told = costs.in_force(bundle, small) if depth == "auto" else (None, None)
    drafter = _drafter(bundle, options, known)
    family = bundle.attached.family if bundle.attached and drafter.needs_hidden else None
    rule = options.verify or ("block" if options.seed is None else "coupled")
    seed = secrets.randbits(_SEED_BITS) if options.seed is None else options.seed
    drafter.observe(ids, None)
    sequence = EngineSequence(
        tokens=ids,
        prompt_length=len(ids),
        max_tokens=room,
        state=State(family or family_of(bundle.trunk)),
        drafter=drafter,
        history=_history(bundle, ids, options),
        draws=Draws(seed),
        rule=rule,
        depth=max(HEAD_LIMIT, COPY_LIMIT) if isinstance(depth, str) else depth,
        eos_ids=bundle.tokenizer.eos_ids,
        output=TextOutput(bundle.tokenizer.detokenizer(), tuple(options.stop)),
        stats=Stats(drafter.name, rule, depth, max_tokens=room, prompt_tokens=len(ids), costs=told),
        top_logprobs=options.top_logprobs if options.logprobs else None,
    )
    return Stream(sequence, vocab_size(bundle), on_round)


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
