from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models

from mtplx import gguf, tokenizer
from mtplx.errors import ModelError, ModelFileError, RequestError
from mtplx.tokenizer import Tokenizer, from_directory, from_gguf

TEXTS = [
    "", " ", "  leading", "trailing ", "the land and 12345", "naïve café", "你好，世界",
    "日本語テキスト",
    "👩‍👩‍👧‍👦 family 🇫🇷", "a\n\n\tb", "\u0000\u007f\u0080",
    "é", "ह्न्दी", "<|im_start|>user\nhi<|im_end|>",
]  # fmt: skip


def byte_level() -> Tokenizer:
    backend = tiny.tiny_tokenizer()
    backend.add_tokens(["<tool call>", "<think>", "Ġodd é"])  # not special: they stay in the text
    return Tokenizer(backend, eos_ids=[tiny.EOS], vocab_size=320)


def _sentence_piece(decoder: Any) -> Tokenizer:
    pieces = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)]
    pieces += ["▁", "a", "b", "▁a", "▁the", "▁▁", "▁▁▁", "é", "你", "x▁y", "<0xZZ>", "<0x>", ">"]
    backend = tokenizers.Tokenizer(
        models.BPE({p: i for i, p in enumerate(pieces)}, [], byte_fallback=True, unk_token="<unk>")
    )
    backend.decoder = decoder
    backend.add_special_tokens([AddedToken(t, special=True) for t in pieces[:3]])
    backend.add_tokens(["<tool call>", "  two"])
    return Tokenizer(backend, vocab_size=300)


def _llama_decoder() -> Any:
    return decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )


def _gemma_decoder() -> Any:
    return decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])


def _strip_two() -> Any:
    return decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(content=" ", left=2, right=0)]
    )


def _no_decoder() -> Tokenizer:
    return Tokenizer(tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1}, [])), vocab_size=300)


MAKERS: dict[str, Callable[[], Tokenizer]] = {
    "byte level": byte_level,
    "llama": lambda: _sentence_piece(_llama_decoder()),
    "gemma": lambda: _sentence_piece(_gemma_decoder()),
    "strip two": lambda: _sentence_piece(_strip_two()),
    "suffix": lambda: _sentence_piece(decoders.BPEDecoder(suffix="▁")),
    "metaspace": lambda: _sentence_piece(decoders.Metaspace()),
    "metaspace never": lambda: _sentence_piece(decoders.Metaspace(prepend_scheme="never")),
    "word piece": lambda: _sentence_piece(decoders.WordPiece()),
    "none": _no_decoder,
}


TOKENIZERS = {name: make() for name, make in MAKERS.items()}


def streamed(tok: Tokenizer, ids: list[int]) -> str:
    stream = tok.detokenizer()
    return "".join(map(stream.add, ids)) + stream.flush()


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_stream_adds_up_to_decode(kind: str, data: st.DataObject) -> None:
    tok = TOKENIZERS[kind]
    ids = data.draw(st.lists(st.integers(0, tok.vocab_size - 1), max_size=24))
    assert streamed(tok, ids) == tok.decode(ids)


@pytest.mark.parametrize("kind", ["llama", "gemma", "byte level"])
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_stream_of_bytes(kind: str, data: st.DataObject) -> None:
    """Runs of byte tokens, valid and not, between ordinary and special tokens."""
    tok = TOKENIZERS[kind]
    alphabet = tok._table.alphabet
    ids: list[int] = []
    for _ in range(data.draw(st.integers(0, 5))):
        raw = data.draw(st.text(max_size=3)).encode("utf-8", "surrogatepass")
        raw = data.draw(st.sampled_from([raw, raw[:-1], raw[1:], b"\xf0\x9f" + raw]))
        if kind == "byte level":
            spell = {b: c for c, b in alphabet.items()}
            ids += [tok._backend.token_to_id(spell[b]) for b in raw]
        else:
            ids += [3 + b for b in raw]
        ids += data.draw(st.lists(st.integers(0, tok.vocab_size - 1), max_size=2))
    assert streamed(tok, ids) == tok.decode(ids)


@pytest.mark.parametrize("text", TEXTS)
def test_byte_level_streams_whole_characters(text: str) -> None:
    tok = TOKENIZERS["byte level"]
    ids = tok.encode(text)
    stream = tok.detokenizer()
    so_far = ""
    for i in ids:
        so_far += stream.add(i)
        assert "\ufffd" not in so_far
        assert tok.decode(ids).startswith(so_far)
    assert so_far + stream.flush() == tok.decode(ids)
    assert stream.flush() == ""


def test_an_incomplete_character_is_shown_once_at_the_end() -> None:
    tok = TOKENIZERS["byte level"]
    ids = tok.encode("a你")
    stream = tok.detokenizer()
    assert [stream.add(i) for i in ids[:-1]] == ["a", "", ""]
    assert stream.flush() == "\ufffd" == tok.decode(ids[:-1])[1:]


def test_special_tokens_leave_no_trace() -> None:
    tok = TOKENIZERS["byte level"]
    first, last = tok.encode("你")[:1], tok.encode("你")[1:]
    assert streamed(tok, [*first, tiny.EOS, *last]) == "你"
    assert tok.decode([0, 1, 2]) == ""


def test_streaming_is_linear() -> None:
    tok = TOKENIZERS["byte level"]

    def seconds(n: int) -> float:
        ids = [5 + i % 250 for i in range(n)]
        start = time.perf_counter()
        streamed(tok, ids)
        return time.perf_counter() - start

    seconds(100)
    assert seconds(20_000) < 40 * max(seconds(2_000), 1e-3)


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("bad", [-1, 10**6, True])
def test_invalid_ids(kind: str, bad: int) -> None:
    tok = TOKENIZERS[kind]
    stream = tok.detokenizer()
    for call in (stream.add, tok.token_text, lambda i: tok.decode([i])):
        with pytest.raises(ValueError, match=r"outside of \[0, 3\d0\)"):
            call(bad)


def test_ids_of_padded_embeddings_have_no_text() -> None:
    tok = TOKENIZERS["byte level"]
    assert tok.vocab_size == 320
    assert tok.decode([319]) == tok.token_text(319) == streamed(tok, [319]) == ""


@pytest.mark.parametrize("text", [t for t in TEXTS if "<|" not in t])
def test_round_trip(text: str) -> None:
    tok = TOKENIZERS["byte level"]
    assert tok.decode(tok.encode(text)) == text


def test_encode_refuses_ids_that_the_model_lacks() -> None:
    tok = Tokenizer(tiny.tiny_tokenizer(), vocab_size=100)
    with pytest.raises(ValueError, match="outside of"):
        tok.encode("é")
    with pytest.raises(ValueError, match="outside of"):
        Tokenizer(tiny.tiny_tokenizer(), eos_ids=[500])


# From GGUF metadata


def read(tmp_path: Path, **metadata: Any) -> Tokenizer:
    names = {k.replace("__", "."): v for k, v in metadata.items()}
    path = tiny.write_gguf(tmp_path / "x.gguf", metadata=names)
    return from_gguf(gguf.read_header(path), 320)


@pytest.mark.parametrize("text", TEXTS)
def test_gguf_equals_tokenizer_json(tmp_path: Path, text: str) -> None:
    ids = read(tmp_path).encode(text)
    assert ids == tiny.tiny_tokenizer().encode(text).ids


def test_gguf_special_ids(tmp_path: Path) -> None:
    tok = read(tmp_path)
    assert tok.eos_ids == {tiny.EOS}
    assert tok.token_text(1) == "<|im_start|>"
    assert tok.decode([1, 2]) == ""
    eot = read(tmp_path, tokenizer__ggml__eot_token_id=0)
    assert eot.eos_ids == {0, 2}
    assert read(tmp_path, tokenizer__ggml__add_bos_token=False).encode("a") == tok.encode("a")
    bos = read(tmp_path, tokenizer__ggml__add_bos_token=True)
    assert bos.encode("a") == [1, *tok.encode("a")]
    assert bos.encode("a", add_special_tokens=False) == tok.encode("a")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model", "llama"), ("model", None), ("pre", "qwen2"), ("pre", None), ("tokens", None),
        ("tokens", "x"), ("tokens", ["a", "a"]), ("merges", ["t h", "q zz"]), ("merges", ["t"]),
        ("token_type", [1, 1]), ("eos_token_id", 271), ("eos_token_id", "2"),
        ("tokens", [f"t{i}" for i in range(321)]),
    ],
)  # fmt: skip
def test_gguf_metadata_that_is_refused(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(ModelFileError, match=rf"tokenizer\.ggml\.{key}") as e:
        read(tmp_path, **{f"tokenizer__ggml__{key}": value})
    assert e.value.path == tmp_path / "x.gguf"


# From a directory


def directory(tmp_path: Path, **files: Any) -> Tokenizer:
    path = tiny.write_directory(tmp_path / "d")
    for name, value in files.items():
        file = path / f"{name}.json"
        if value is None:
            file.unlink()
        else:
            file.write_text(json.dumps(json.loads(file.read_text()) | value))
    return from_directory(path, json.loads((path / "config.json").read_text()))


def test_end_ids(tmp_path: Path) -> None:
    assert directory(tmp_path).eos_ids == {2}
    assert directory(tmp_path, generation_config={"eos_token_id": [0, 5]}).eos_ids == {0, 2, 5}
    none = {"generation_config": None, "tokenizer_config": {"eos_token": None}}
    assert directory(tmp_path, **none, config={"eos_token_id": [7]}).eos_ids == {7}
    assert directory(tmp_path, **none, config={"eos_token_id": None}).eos_ids == frozenset()
    nested = {"eos_token_id": None, "text_config": {"eos_token_id": 9}}
    assert directory(tmp_path, **none, config=nested).eos_ids <= {9}
    written = {"tokenizer_config": {"eos_token": {"content": "<|endoftext|>"}}}
    assert directory(tmp_path, **written).eos_ids == {0, 2}
    for bad in (320, -1, "2", [2, None], 2.0, {}, [{}]):
        with pytest.raises(ModelFileError, match="eos_token_id"):
            directory(tmp_path, generation_config={"eos_token_id": bad})


def test_template_sources(tmp_path: Path) -> None:
    user = [{"role": "user", "content": "x"}]
    assert not directory(tmp_path, tokenizer_config={"chat_template": None}).has_chat_template
    named = [
        {"name": "tool_use", "template": "t"},
        {"name": "default", "template": "d{{bos_token}}"},
    ]
    tok = directory(tmp_path, tokenizer_config={"chat_template": named})
    assert tok.render_chat(user) == "d<|im_start|>"
    (tmp_path / "d" / "chat_template.jinja").write_text("file")
    assert directory(tmp_path).render_chat(user) == "file"


def test_unusable_tokenizer_files(tmp_path: Path) -> None:
    path = tiny.write_directory(tmp_path / "d")
    for text in ("", "{}", "[]"):
        (path / "tokenizer.json").write_text(text)
        with pytest.raises(ModelFileError, match=r"tokenizer\.json: not a usable") as e:
            from_directory(path, {})
        assert e.value.path == path / "tokenizer.json"
    (path / "tokenizer.json").unlink()
    with pytest.raises(ModelFileError, match=r"tokenizer\.json is missing"):
        from_directory(path, {})


def test_padding_and_truncation_of_the_file_are_off(tmp_path: Path) -> None:
    path = tiny.write_directory(tmp_path / "d")
    backend = tiny.tiny_tokenizer()
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    backend.save(str(path / "tokenizer.json"))
    assert len(from_directory(path, {}).encode("q w e")) == 5


# Chat templates


def chat(source: str, **variables: Any) -> Tokenizer:
    return Tokenizer(tiny.tiny_tokenizer(), chat_template=source, template_variables=variables)


USER = [{"role": "user", "content": "hi"}]


def test_chat_template(tmp_path: Path) -> None:
    tok = read(tmp_path)
    want = "<|im_start|>user\nhi<|im_end|>\n"
    assert tok.render_chat(USER, add_generation_prompt=False) == want
    ids = tok.apply_chat_template(USER)
    assert ids == tok.encode(want + "<|im_start|>assistant\n")
    assert ids[0] == 1
    with pytest.raises(ModelError, match="no chat template"):
        read(tmp_path, tokenizer__chat_template=None).apply_chat_template(USER)


def test_a_template_adds_the_bos_itself(tmp_path: Path) -> None:
    tok = read(tmp_path, tokenizer__ggml__add_bos_token=True)
    assert tok.apply_chat_template(USER).count(1) == 2  # one a message; none by the tokenizer


@pytest.mark.parametrize(
    ("source", "want"),
    [
        ("{% for m in [1] %}\n  {% if m %}\n{{ m }}\n  {% endif %}\n{% endfor %}", "1\n"),
        ("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}'),
        ("{% for m in [1, 2] %}{% if m == 2 %}{% break %}{% endif %}{{ m }}{% endfor %}", "1"),
        ("{% generation %}x{% endgeneration %}", "x"),
        ("{{ eos_token }}{{ missing }}", "E"),
        ("{{ strftime_now('%Y')[:1] }}", "2"),
    ],
)  # fmt: skip
def test_template_features(source: str, want: str) -> None:
    assert chat(source, eos_token="E").render_chat(USER) == want


def test_templates_that_refuse_or_fail() -> None:
    with pytest.raises(RequestError, match="refuses these messages: no system"):
        chat("{{ raise_exception('no system') }}").render_chat(USER)
    for source in ("{{ 1 / 'a' }}", "{{ nothing.at.all }}", "{{ messages.append(1) }}",
                   "{{ ''.__class__.__mro__[1].__subclasses__() }}"):  # fmt: skip
        with pytest.raises(RequestError, match="fails on these messages"):
            chat(source).render_chat(USER)
    with pytest.raises(ModelError, match="does not compile"):
        chat("{% if %}").render_chat(USER)


@pytest.mark.parametrize(
    "messages", [[], ["hi"], [{"content": "x"}], [{"role": "user"}], [{"role": 1, "content": "x"}]]
)
def test_malformed_messages(messages: Any) -> None:
    with pytest.raises(ValueError, match="messages"):
        chat("x").render_chat(messages)


# The default model


@pytest.mark.model
def test_default_tokenizer(default_model_path: Path) -> None:
    tok = from_gguf(gguf.read_header(default_model_path), 49152)
    assert tok.encode("The capital of France is") == [504, 3575, 282, 4649, 314]
    assert tok.eos_ids == {2}
    text = tok.render_chat(USER)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    for text in TEXTS:
        ids = tok.encode(text)
        assert streamed(tok, ids) == tok.decode(ids)
        if "<|" not in text:
            assert tok.decode(ids) == text


def test_module_has_one_reader_of_json(tmp_path: Path) -> None:
    assert tokenizer.read_json(tmp_path / "none.json", default={}) == {}
