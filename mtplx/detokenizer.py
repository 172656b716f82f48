"""Streams of token ids to text: the pieces add up to ``decode`` of all ids, exactly.

``tokenizers.decoders.DecodeStream`` is not used: it has no flush, so it loses an incomplete last
character, and it raises on byte-fallback runs that turn out to be invalid.

Three kinds of decoder are told apart:
- ByteLevel: tokens are byte strings; an incremental UTF-8 decoder holds back at most 3 bytes.
- Piecewise (SentencePiece-like: Replace, ByteFallback, Fuse, a leading Strip; Metaspace): each
  token decodes alone, but a run of byte tokens only as a whole, since one invalid byte turns the
  whole run into U+FFFD. A run is held back until it ends.
- Anything else is held back until ``flush``: exact, though it does not stream.
"""

from __future__ import annotations

import codecs
import json
import re
from typing import Any

import tokenizers
from tokenizers import decoders

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>\Z")


def _byte_alphabet() -> dict[str, int]:
    """The characters in which byte-level vocabularies spell the 256 bytes (GPT-2's table)."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [b for b in range(256) if b not in shown]
    return {chr(b): b for b in shown} | {chr(256 + i): b for i, b in enumerate(hidden)}


class TokenTable:
    """What a tokenizer's streams share: its decoder taken apart, and its special tokens."""

    def __init__(self, backend: tokenizers.Tokenizer):
        self.backend = backend
        self.special = {i for i, t in backend.get_added_tokens_decoder().items() if t.special}
        spec = json.loads(backend.to_str())["decoder"] if backend.decoder is not None else None
        self.kind, self.decoder, self.strip = _classify(spec)
        self.alphabet = _byte_alphabet() if self.kind == "bytes" else {}
        self._bytes: dict[int, bytes] = {}

    def token(self, token_id: int) -> str | None:
        """The token's spelling; None for a special token or an id without one."""
        return None if token_id in self.special else self.backend.id_to_token(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """ByteLevel: the bytes a token stands for; one outside the alphabet is its own text."""
        found = self._bytes.get(token_id)
        if found is None:
            token = self.token(token_id) or ""
            try:
                found = bytes([self.alphabet[c] for c in token])
            except KeyError:
                found = token.encode("utf-8")
            self._bytes[token_id] = found
        return found


def _classify(spec: dict[str, Any] | None) -> tuple[str, Any, tuple[str, int]]:
    """(kind, a decoder for one piece, (character, count) stripped from the start of the text)."""
    opaque = ("opaque", None, ("", 0))
    if spec is None:
        return opaque
    if spec["type"] == "ByteLevel":
        return "bytes", None, ("", 0)
    if spec["type"] == "Metaspace":
        return "metaspace", decoders.Metaspace(spec["replacement"], spec["prepend_scheme"]), ("", 0)
    if spec["type"] != "Sequence":
        return opaque
    strip, parts = ("", 0), list(spec["decoders"])
    if parts and parts[-1]["type"] == "Strip" and "Fuse" in [p["type"] for p in parts]:
        last = parts.pop()
        if last["stop"]:
            return opaque
        strip = (last["content"], last["start"])
    chain: list[Any] = []
    for part in parts:
        pattern = part.get("pattern", {}).get("String", "")
        if part["type"] == "Replace" and len(pattern) == 1:
            chain.append(decoders.Replace(pattern, part["content"]))
        elif part["type"] == "ByteFallback":
            chain.append(decoders.ByteFallback())
        elif part["type"] == "Fuse":
            chain.append(decoders.Fuse())
        else:
            return opaque
    return "pieces", decoders.Sequence(chain), strip


class StreamDetokenizer:
    """Decodes one stream. Mutable, not shared between streams; linear time in the ids."""

    def __init__(self, table: TokenTable, vocab_size: int):
        self._table, self._vocab_size = table, vocab_size
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._held: list[str] = []  # tokens of a byte run, or everything for an opaque decoder
        self._held_ids: list[int] = []
        self._to_strip = table.strip[1]
        self._first = True  # Metaspace treats the stream's first token apart

    def add(self, token_id: int) -> str:
        """Takes the next id; returns the text that became final, possibly "".

        ``ValueError`` for an id outside of the vocabulary; the state is then unchanged.
        """
        if isinstance(token_id, bool) or not 0 <= token_id < self._vocab_size:
            raise ValueError(f"token id {token_id} is outside of [0, {self._vocab_size})")
        table = self._table
        if table.kind == "opaque":
            self._held_ids.append(token_id)
            return ""
        if table.kind == "bytes":
            return self._utf8.decode(table.token_bytes(token_id))
        token = table.token(token_id)
        if token is None:
            return ""
        if table.kind == "metaspace":
            pieces = [token] if self._first else ["x", token]
            text = table.decoder.decode(pieces)
            text, self._first = text if self._first else text[1:], False
            return text
        if _BYTE_TOKEN.match(token):
            self._held.append(token)
            return ""
        return self._release() + self._strip(table.decoder.decode([token]))

    def flush(self) -> str:
        """Ends the stream: the text still held back (an incomplete character is U+FFFD)."""
        if self._table.kind == "opaque":
            ids, self._held_ids = self._held_ids, []
            return self._table.backend.decode(ids, skip_special_tokens=True)
        if self._table.kind == "bytes":
            return self._utf8.decode(b"", final=True)
        return self._release()

    def _release(self) -> str:
        if not self._held:
            return ""
        held, self._held = self._held, []
        return self._strip(self._table.decoder.decode(held))

    def _strip(self, text: str) -> str:
        """Drops the leading characters that the decoder's Strip drops from the whole text."""
        while self._to_strip and text:
            if text[0] != self._table.strip[0]:
                self._to_strip = 0
                break
            text, self._to_strip = text[1:], self._to_strip - 1
        return text
