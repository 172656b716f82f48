"""Grammars: which tokens may come next if the text is to match a JSON schema or a regex.

``llguidance`` compiles the grammar and walks it. A matcher stands where the committed tokens end:
masks of drafted positions are taken on the way and the way is taken back.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import RequestError
from .tokenizer import Tokenizer

# Without a bound a small model may go on with blanks for ever; "x-guidance" in a schema overrides.
_JSON_BLANKS = r"[ \n\t\r]{0,12}"


class Grammar:
    """One output's place in a grammar. Mutable; every sequence needs its own.

    name: the request's field that it comes from, for messages.
    """

    def __init__(self, name: str, matcher: Any, vocab_size: int, eos_ids: Collection[int]):
        self.name = name
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._eos = np.array(sorted(eos_ids), dtype=np.int64)

    def advance(self, token: int) -> None:
        """Commit a token that ``mask`` allows and that is not an end of sequence."""
        if not self._matcher.consume_token(token):
            raise RequestError(f"{self.name}: token {token} does not fit ({self._reason()})")

    def mask(self, drafts: Sequence[int]) -> NDArray[np.bool_] | None:
        """(vocab,) true for what may follow ``drafts``; None if these do not fit themselves.

        An end of sequence is allowed where the text so far matches, and only there.
        """
        walked = self._matcher.try_consume_tokens(list(drafts)) if drafts else 0
        try:
            if walked < len(drafts):
                return None
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            mask = np.unpackbits(bits, count=self._vocab_size, bitorder="little").astype(bool)
            mask[self._eos] = self._matcher.is_accepting()
        finally:
            if walked:
                self._matcher.rollback(walked)
        if self._matcher.is_error():
            raise RequestError(f"{self.name}: {self._reason()}")
        return mask

    def _reason(self) -> str:
        return _told(self._matcher.get_error()) or "the grammar has ended"


def compile_grammar(
    tokenizer: Tokenizer, *, json_schema: str | None = None, regex: str | None = None
) -> Grammar:
    """The grammar of a JSON schema, as JSON, or of a regex (Rust's syntax; all of the text).

    Raises ``RequestError`` that names the field for one that is not valid or that nothing matches,
    and for a tokenizer without an end of sequence or of a kind that llguidance cannot read.
    """
    from llguidance import LLMatcher

    name = "regex" if json_schema is None else "json_schema"
    if not tokenizer.eos_ids:
        raise RequestError(f"{name} needs a model with an end-of-sequence token")
    if json_schema is None:
        source = LLMatcher.grammar_from_regex(regex or "")
    else:
        try:
            blanks: Any = {"whitespace_pattern": _JSON_BLANKS}
            defaults = blanks if isinstance(json.loads(json_schema), dict) else None
            source = LLMatcher.grammar_from_json_schema(json_schema, defaults=defaults)
        except ValueError as e:
            raise RequestError(f"json_schema is not JSON: {e}") from None
    matcher = LLMatcher(_vocabulary(tokenizer), source, log_level=0)
    if matcher.is_error():
        raise RequestError(f"{name}: {_told(matcher.get_error())}")
    matcher.compute_bitmask()
    if matcher.is_stopped() and not matcher.is_accepting():
        raise RequestError(f"{name}: no text matches it")
    return Grammar(name, matcher, tokenizer.vocab_size, tokenizer.eos_ids)


@lru_cache(maxsize=2)
def _vocabulary(tokenizer: Tokenizer) -> Any:
    """What llguidance makes of a tokenizer; it takes about half a second."""
    from llguidance import LLTokenizer

    try:
        # One end of sequence is enough here: ``Grammar.mask`` says of all of them.
        eos = min(tokenizer.eos_ids)
        return LLTokenizer(tokenizer.to_json(), n_vocab=tokenizer.vocab_size, eos_token=eos)
    except Exception as e:  # the library raises what its parts raise
        raise RequestError(f"grammars cannot work with this tokenizer: {e}") from e


def _told(message: str) -> str:
    """The first line of a message, and what it calls the error."""
    first, *more = message.splitlines() or [""]
    return " ".join([first, *[line for line in more if line.startswith("error: ")][:1]])
