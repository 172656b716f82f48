"""Text to token ids and back, over the Rust ``tokenizers`` library.

Sources: the metadata of a GGUF file, or a directory with ``tokenizer.json``. Chat templates are
rendered by ``mtplx.chat``, streams are decoded by ``mtplx.detokenizer``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors

from mtplx.detokenizer import StreamDetokenizer, TokenTable
from mtplx.errors import ModelError, ModelFileError, RequestError

if TYPE_CHECKING:
    from mtplx.chat import ChatTemplate
    from mtplx.gguf import GgufFile

_CONTROL, _USER_DEFINED = 3, 4  # GGUF token types
_UNKNOWN = 2
_GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Tokenizer:
    """One model's vocabulary, chat template and end-of-sequence ids.

    ``vocab_size`` is the number of ids the *model* knows, which may exceed the tokenizer's own
    (padded embeddings): such ids are valid and have no text. Every method that takes ids raises
    ``ValueError`` for an id outside of [0, vocab_size).
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_ids: Iterable[int] = (),
        chat_template: str | None = None,
        template_variables: Mapping[str, Any] | None = None,
        vocab_size: int | None = None,
    ):
        self._backend = backend
        backend.no_padding()
        backend.no_truncation()
        known = backend.get_vocab_size(with_added_tokens=True)
        self.vocab_size: int = known if vocab_size is None else vocab_size
        self.eos_ids: frozenset[int] = frozenset(eos_ids)
        self._template_source = chat_template
        self._template_variables = dict(template_variables or {})
        for token_id in self.eos_ids:
            self._check(token_id)

    def _check(self, token_id: int) -> int:
        if isinstance(token_id, bool) or not 0 <= token_id < self.vocab_size:
            raise ValueError(f"token id {token_id} is outside of [0, {self.vocab_size})")
        return token_id

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``. Special tokens spelled out in the text become their ids.

        ``add_special_tokens`` adds what the model's post-processor adds (a BOS, often nothing).
        Raises ``RequestError`` for a lone surrogate, which is no text.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise RequestError("the text is not valid Unicode: it holds half a character") from None
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        if ids and max(ids) >= self.vocab_size:
            self._check(max(ids))
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids``, special tokens left out; invalid UTF-8 becomes U+FFFD."""
        return self._backend.decode([self._check(i) for i in ids], skip_special_tokens=True)

    def token_text(self, token_id: int) -> str:
        """The vocabulary's own spelling of one id (byte-level spelling, special tokens shown)."""
        return self._backend.id_to_token(self._check(token_id)) or ""

    def to_json(self) -> str:
        """The whole tokenizer in the form of ``tokenizer.json``."""
        return self._backend.to_str()

    def detokenizer(self) -> StreamDetokenizer:
        """A new decoder for one stream of ids; its pieces add up to ``decode`` of them all."""
        return StreamDetokenizer(self._table, self.vocab_size)

    @cached_property
    def _table(self) -> TokenTable:
        return TokenTable(self._backend)

    @property
    def has_chat_template(self) -> bool:
        """Whether ``apply_chat_template`` can work."""
        return self._template_source is not None

    @cached_property
    def _chat(self) -> ChatTemplate:
        from mtplx.chat import ChatTemplate

        if self._template_source is None:
            raise ModelError("this model has no chat template: give it the prompt raw")
        return ChatTemplate(self._template_source, self._template_variables)

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> str:
        """The text of a conversation; see ``apply_chat_template``."""
        return self._chat.render(messages, add_generation_prompt)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> list[int]:
        """Token ids of a conversation: ``messages`` are mappings with ``role`` and ``content``.

        ``ModelError`` if the model has no template or a broken one, ``RequestError`` (a
        ``ValueError``) if the template refuses these messages.
        """
        return self.encode(self.render_chat(messages, add_generation_prompt), False)


def from_gguf(file: GgufFile, vocab_size: int | None = None) -> Tokenizer:
    """Builds the tokenizer that a GGUF file's ``tokenizer.*`` metadata describes.

    Byte-level BPE ("gpt2") only. Raises ``ModelFileError`` naming the key that is missing, wrong
    or not supported.
    """
    meta = file.metadata
    backend, tokens = _bpe(file, vocab_size)
    types = meta.get(_KEY + "token_type", ())
    if len(types) not in (0, len(tokens)):
        raise _bad(file, "token_type and tokens differ in length")
    _add_tokens(backend, tokens, types)
    ids: dict[str, int] = {}
    for name in ("bos", "eos", "eot", "eom"):
        value = meta.get(f"{_KEY}{name}_token_id")
        if value is None:
            continue
        if type(value) is not int or not 0 <= value < len(tokens):
            raise _bad(file, f"{name}_token_id is {value!r}: no such token")
        ids[name] = value
    if "bos" in ids and meta.get(_KEY + "add_bos_token", False):
        bos = tokens[ids["bos"]]
        backend.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], special_tokens=[(bos, ids["bos"])]
        )
    template = meta.get("tokenizer.chat_template")
    return Tokenizer(
        backend,
        eos_ids=[ids[n] for n in ("eos", "eot", "eom") if n in ids],
        chat_template=template if isinstance(template, str) else None,
        template_variables={f"{n}_token": tokens[ids[n]] for n in ("bos", "eos") if n in ids},
        vocab_size=vocab_size,
    )


def _bad(file: GgufFile, message: str) -> ModelFileError:
    return ModelFileError(f"{file.path}: metadata {_KEY}{message}", path=file.path)


def _bpe(file: GgufFile, vocab_size: int | None) -> tuple[tokenizers.Tokenizer, list[str]]:
    """The bare byte-level BPE model with its splitter and decoder, and the tokens by id."""
    meta = file.metadata
    if (kind := meta.get(_KEY + "model")) != "gpt2":
        raise _bad(file, f"model is {kind!r}; only 'gpt2' (byte-level BPE) is supported")
    tokens, merges = meta.get(_KEY + "tokens"), meta.get(_KEY + "merges", [])
    if not isinstance(tokens, list) or not tokens:
        raise _bad(file, "tokens is missing, empty or not a list of strings")
    if vocab_size is not None and len(tokens) > vocab_size:
        raise _bad(file, f"tokens: {len(tokens)}, but the model has {vocab_size} embeddings")
    pairs: Any = [tuple(m.split(" ")) for m in merges] if isinstance(merges, list) else [()]
    if any(len(p) != 2 for p in pairs):
        raise _bad(file, "merges is not a list of pairs of tokens")
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise _bad(file, "tokens holds a token twice")
    pre = meta.get(_KEY + "pre", "default")
    splitter = _pre_tokenizer(pre)
    if splitter is None:
        raise _bad(file, f"pre is {pre!r}; supported are smollm, gpt-2, {', '.join(_LLAMA3_NAMES)}")
    try:
        model = models.BPE(vocab, pairs, ignore_merges=pre in _LLAMA3_NAMES)
    except Exception as e:  # the library raises plain Exception: a merge of unknown tokens
        raise _bad(file, f"merges does not fit the tokens ({e})") from None
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer, backend.decoder = splitter, decoders.ByteLevel()
    return backend, tokens


_KEY = "tokenizer.ggml."
_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")


def _pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer | None:
    """The splitter that llama.cpp's name stands for, or None."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if name == "smollm":
        parts = [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    elif name == "gpt-2":
        parts = [pre_tokenizers.Split(Regex(_GPT2_SPLIT), "isolated"), byte_level]
    elif name in _LLAMA3_NAMES:
        parts = [pre_tokenizers.Split(Regex(_LLAMA3_SPLIT), "isolated"), byte_level]
    else:
        return None
    return pre_tokenizers.Sequence(parts)


def _add_tokens(backend: tokenizers.Tokenizer, tokens: list[str], types: Sequence[int]) -> None:
    def of(*kinds: int) -> list[AddedToken]:
        return [
            AddedToken(tokens[i], special=kinds[0] == _CONTROL, normalized=False)
            for i, t in enumerate(types)
            if t in kinds
        ]

    backend.add_special_tokens(of(_CONTROL, _UNKNOWN))
    backend.add_tokens(of(_USER_DEFINED))


def from_directory(path: str | Path, config: Mapping[str, Any]) -> Tokenizer:
    """Builds the tokenizer of a model directory.

    Reads ``tokenizer.json`` (required), ``tokenizer_config.json``, ``chat_template.jinja`` and
    ``generation_config.json``; ``config`` is the parsed ``config.json``. End-of-sequence ids are
    those of ``generation_config.json``, else of ``config``, and the tokenizer's own EOS token.
    """
    path = Path(path)
    source = path / "tokenizer.json"
    if not source.is_file():
        raise ModelFileError(
            f"{source} is missing: mtplx needs this form of tokenizer", path=source
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(source))
    except Exception as e:  # the library raises plain Exception
        raise ModelFileError(f"{source}: not a usable tokenizer ({e})", path=source) from None
    settings = read_json(path / "tokenizer_config.json", default={})
    generation = read_json(path / "generation_config.json", default={})
    special = {k: _token_text(v) for k, v in settings.items() if k.endswith("_token")}
    variables = {k: v for k, v in special.items() if v is not None}
    text_config = config.get("text_config") or {}
    declared = generation.get("eos_token_id")
    if declared is None:
        declared = config.get("eos_token_id", text_config.get("eos_token_id"))
    vocab_size = config.get("vocab_size", text_config.get("vocab_size"))
    listed = declared if isinstance(declared, list) else [] if declared is None else [declared]
    if not all(type(i) is int and 0 <= i < (vocab_size or 1 << 31) for i in listed):
        raise ModelFileError(f"{path}: eos_token_id {declared!r} is not a list of ids", path=path)
    eos = set(listed)
    if "eos_token" in variables and (i := backend.token_to_id(variables["eos_token"])) is not None:
        eos.add(i)
    return Tokenizer(
        backend,
        eos_ids=eos,
        chat_template=_template(path, settings),
        template_variables=variables,
        vocab_size=vocab_size,
    )


def _token_text(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _template(path: Path, settings: Mapping[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as e:
            raise ModelFileError(f"{file}: cannot be read ({e})", path=file) from None
    template = settings.get("chat_template")
    if isinstance(template, list):  # several named templates
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def read_json(path: Path, default: dict[str, Any] | None = None) -> dict[str, Any]:
    """A JSON object from a file; ``default`` (if given) where there is no such file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if default is not None:
            return default
        raise ModelFileError(f"{path} is missing", path=path) from None
    except (OSError, ValueError, RecursionError) as e:
        raise ModelFileError(f"{path}: not readable as JSON ({e})", path=path) from None
    if not isinstance(value, dict):
        raise ModelFileError(f"{path}: holds no JSON object", path=path)
    return value
