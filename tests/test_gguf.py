from __future__ import annotations

import contextlib
import struct
from pathlib import Path

import numpy as np
import pytest
import tiny
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mtplx import gguf, gguf_llama
from mtplx.errors import ModelFileError

F32 = tiny.TYPE_NUMBERS["F32"]
META = {"general.architecture": "llama", "list": ["a", "bc"], "ids": [1, 2, 3], "flag": True}


def vector(name: str = "t", n: int = 8) -> tuple[str, tuple[int, ...], int, bytes]:
    return name, (n,), F32, np.arange(n, dtype="<f4").tobytes()


def read(tmp_path: Path, data: bytes) -> gguf.GgufFile:
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    return gguf.read_header(path)


def refused(tmp_path: Path, data: bytes, match: str, tensor: str | None = None) -> None:
    with pytest.raises(ModelFileError, match=match) as e:
        read(tmp_path, data)
    assert e.value.path == tmp_path / "x.gguf"
    assert str(e.value.path) in str(e.value)
    assert e.value.tensor == tensor
    if tensor:
        assert tensor in str(e.value)


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("align", [32, 64])
def test_header_is_read(tmp_path: Path, version: int, align: int) -> None:
    meta = META | ({"general.alignment": align} if align != 32 else {})
    file = read(
        tmp_path, tiny.gguf_bytes(meta, [vector("a"), vector("b")], version=version, align=align)
    )
    assert file.version == version
    assert file.metadata["list"] == ["a", "bc"]
    assert file.metadata["ids"].tolist() == [1, 2, 3]
    assert file.metadata["flag"] is True
    assert list(file.tensors) == ["a", "b"]
    raw = gguf.read_raw(file, file.tensors["b"])
    assert gguf.decode(file, file.tensors["b"], raw, "float32")["weight"].tolist() == list(range(8))


def test_every_truncation_is_an_error(tmp_path: Path) -> None:
    data = tiny.gguf_bytes(META, [vector("a"), vector("b")])
    assert read(tmp_path, data)
    for n in range(len(data)):
        with pytest.raises(ModelFileError):
            read(tmp_path, data[:n])


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(at=st.integers(0, 10_000), word=st.sampled_from([0, 1, 0xFF, 2**31, 2**32 - 1, 2**63]))
def test_no_corruption_crashes(tmp_path: Path, at: int, word: int) -> None:
    data = bytearray(tiny.gguf_bytes(META, [vector("a"), vector("b")]))
    at %= len(data) - 8
    data[at : at + 8] = struct.pack("<Q", word)
    with contextlib.suppress(ModelFileError):  # or a value of no consequence was hit
        read(tmp_path, bytes(data))


def test_bad_magic(tmp_path: Path) -> None:
    refused(tmp_path, b"GGML" + tiny.gguf_bytes(META, [vector()])[4:], "not a GGUF file")
    refused(tmp_path, b"", "not a GGUF file")


@pytest.mark.parametrize("version", [0, 1, 4, 0x03000000])
def test_bad_version(tmp_path: Path, version: int) -> None:
    refused(tmp_path, tiny.gguf_bytes(META, [vector()], version=version), "version")


@pytest.mark.parametrize("field", [8, 16])
@pytest.mark.parametrize("count", [1_000_000, 2**40, 2**64 - 1])
def test_absurd_counts(tmp_path: Path, field: int, count: int) -> None:
    data = bytearray(tiny.gguf_bytes(META, [vector()]))
    data[field : field + 8] = struct.pack("<Q", count)
    refused(tmp_path, bytes(data), "cannot fit")


@pytest.mark.parametrize("kind", [4, 7, 8, 12])
def test_absurd_array_length(tmp_path: Path, kind: int) -> None:
    data = tiny.gguf_bytes({"ids": [1, 2, 3]}, [vector()])
    good = struct.pack("<IIQ", 9, 5, 3)
    assert good in data
    bad = data.replace(good, struct.pack("<IIQ", 9, kind, 2**61))
    refused(tmp_path, bad, "truncated or corrupt")


def test_nested_arrays_and_unknown_value_types(tmp_path: Path) -> None:
    data = tiny.gguf_bytes({"ids": [1, 2, 3]}, [vector()])
    good = struct.pack("<IIQ", 9, 5, 3)
    refused(tmp_path, data.replace(good, struct.pack("<IIQ", 9, 9, 3)), "value type 9")
    refused(tmp_path, data.replace(good, struct.pack("<IIQ", 77, 5, 3)), "unknown value type 77")


def test_bool_that_is_none(tmp_path: Path) -> None:
    data = tiny.gguf_bytes({"flag": True}, [vector()])
    refused(tmp_path, data.replace(b"flag\7\0\0\0\1", b"flag\7\0\0\0\2"), "bool with the value 2")


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    data = tiny.gguf_bytes({"s": "abcd", "l": ["wxyz"]}, [vector()])
    refused(tmp_path, data.replace(b"abcd", b"ab\xff\xff"), "s is not UTF-8")
    refused(tmp_path, data.replace(b"wxyz", b"wx\xff\xff"), "string 0 of l is not UTF-8")


def test_duplicate_names(tmp_path: Path) -> None:
    refused(tmp_path, tiny.gguf_bytes(META, [vector("a"), vector("a")]), "occurs twice", "a")
    data = tiny.gguf_bytes({"k1": 1, "k2": 2}, [vector()])
    refused(tmp_path, data.replace(b"k2", b"k1"), "'k1' occurs twice")


def test_overlapping_tensors(tmp_path: Path) -> None:
    tensors = [vector("a", 16), vector("b", 16)]
    refused(tmp_path, tiny.gguf_bytes(META, tensors, offsets=[0, 32]), "'a' and 'b' overlap", "b")
    refused(tmp_path, tiny.gguf_bytes(META, tensors, offsets=[0, 0]), "overlap", "b")


@pytest.mark.parametrize("offset", [64, 2**40, 2**64 - 32])
def test_offset_outside_of_the_file(tmp_path: Path, offset: int) -> None:
    data = tiny.gguf_bytes(META, [vector("a"), vector("b")], offsets=[0, offset])
    refused(tmp_path, data, "truncated or corrupt", "b")


def test_unaligned_offset_and_bad_alignment(tmp_path: Path) -> None:
    data = tiny.gguf_bytes(META, [vector("a"), vector("b")], offsets=[0, 33])
    refused(tmp_path, data, "not a multiple of 32", "b")
    for value in (0, 24, "x", 2**31):
        meta = META | {"general.alignment": value}
        refused(tmp_path, tiny.gguf_bytes(meta, [vector()]), "alignment")


def test_bytes_after_the_last_tensor(tmp_path: Path) -> None:
    data = tiny.gguf_bytes(META, [vector()])
    read(tmp_path, data + b"\0" * 31)  # padding
    refused(tmp_path, data + b"\0" * 32, "32 bytes follow the last tensor")


@pytest.mark.parametrize(("kind", "name"), [(12, "Q4_K"), (6, "Q5_0"), (24, "I8"), (999, "999")])
def test_unsupported_tensor_type(tmp_path: Path, kind: int, name: str) -> None:
    data = tiny.gguf_bytes(META, [("a", (8,), kind, b"\0" * 32)])
    refused(tmp_path, data, f"{name}.*supported are F32, F16, Q4_0, Q4_1, Q8_0, BF16", "a")


def test_impossible_shapes(tmp_path: Path) -> None:
    def one(shape: tuple[int, ...], kind: int = F32) -> bytes:
        return tiny.gguf_bytes(META, [("a", shape, kind, b"\0" * 64)])

    refused(tmp_path, one((0, 4)), "dimension of 0", "a")
    refused(tmp_path, one((1, 1, 1, 1, 1)), "5 dimensions", "a")
    refused(tmp_path, one(()), "0 dimensions", "a")
    refused(tmp_path, one((2**62, 2**62)), "truncated or corrupt", "a")
    refused(tmp_path, one((2, 48), tiny.TYPE_NUMBERS["Q4_1"]), "do not divide", "a")


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path / "none.gguf", tmp_path):
        with pytest.raises(ModelFileError, match="cannot be read"):
            gguf.read_header(path)


@pytest.mark.parametrize("encoding", ["Q4_0", "Q4_1", "Q8_0"])
def test_packed_and_float32_hold_the_same_weights(tmp_path: Path, encoding: str) -> None:
    import mlx.core as mx

    values = np.random.default_rng(0).standard_normal((6, 96)).astype(np.float32)
    kind = tiny.TYPE_NUMBERS[encoding]
    data = tiny.gguf_bytes(META, [("a", (6, 96), kind, tiny.encode_tensor(values, encoding))])
    file = read(tmp_path, data)
    raw = gguf.read_raw(file, file.tensors["a"])
    plain = gguf.decode(file, file.tensors["a"], raw, "float32")["weight"]
    packed = gguf.decode(file, file.tensors["a"], raw, "packed")
    wide = [mx.array(packed[k].astype(np.float32)) for k in ("scales", "biases")]
    bits = 8 if encoding == "Q8_0" else 4
    unpacked = mx.dequantize(mx.array(packed["weight"]), *wide, group_size=32, bits=bits)
    np.testing.assert_array_equal(np.array(unpacked), plain)
    assert np.abs(plain - values).max() < {"Q8_0": 0.02, "Q4_1": 0.25, "Q4_0": 0.35}[encoding]


def test_known_blocks() -> None:
    """One block each, by hand: Q4 low nibbles are weights 0..15, high ones 16..31."""
    nibbles = bytes(range(16))  # low nibble i, high nibble 0
    scale, low = np.float16(0.5).tobytes(), np.float16(-1).tobytes()
    ramp = np.arange(16) * 0.5

    def floats(head: bytes, body: bytes, kind: str) -> np.ndarray:
        encoding = gguf.ENCODINGS[tiny.TYPE_NUMBERS[kind]]
        return gguf.to_float32(np.frombuffer(head + body, np.uint8)[None], encoding)[0]

    want = np.concatenate([ramp - 1, np.full(16, -1.0)])
    np.testing.assert_array_equal(floats(scale + low, nibbles, "Q4_1"), want)
    want = np.concatenate([ramp - 4, np.full(16, -4.0)])
    np.testing.assert_array_equal(floats(scale, nibbles, "Q4_0"), want)
    signed = np.arange(-16, 16, dtype=np.int8)
    np.testing.assert_array_equal(floats(scale, signed.tobytes(), "Q8_0"), signed * 0.5)


@pytest.mark.parametrize("weights", ["float32", "packed"])
@pytest.mark.parametrize("scale", [np.nan, np.inf, 60000.0])
def test_a_scale_that_is_not_finite_is_named(tmp_path: Path, weights: str, scale: float) -> None:
    block = np.float16(scale).tobytes() + b"\0" * 32
    file = read(tmp_path, tiny.gguf_bytes(META, [("a", (1, 32), 8, block)]))
    with pytest.raises(ModelFileError, match=r"'a'.*not finite") as e:
        gguf.decode(file, file.tensors["a"], gguf.read_raw(file, file.tensors["a"]), weights)
    assert e.value.tensor == "a"


def test_a_file_cut_after_its_header_was_read(tmp_path: Path) -> None:
    file = read(tmp_path, tiny.gguf_bytes(META, [vector("a"), vector("b")]))
    file.path.write_bytes(file.path.read_bytes()[:-8])
    with pytest.raises(ModelFileError, match="cut short"):
        gguf.read_raw(file, file.tensors["b"])


# The llama architecture


def llama(tmp_path: Path, **kw: object) -> gguf.GgufFile:
    return gguf.read_header(tiny.write_gguf(tmp_path / "x.gguf", **kw))  # type: ignore[arg-type]


def test_config_of_a_llama(tmp_path: Path) -> None:
    config = gguf_llama.config(llama(tmp_path))
    for key, value in tiny.tiny_config().items():
        if key in config:
            assert config[key] == pytest.approx(value)


@pytest.mark.parametrize(
    ("metadata", "match"),
    [
        ({"general.architecture": "qwen2"}, "'qwen2'; only 'llama'"),
        ({"general.architecture": None}, "only 'llama'"),
        ({"split.count": 2}, "split"),
        ({"llama.expert_count": 8}, "llama.expert_count = 8"),
        ({"llama.rope.scaling.type": "yarn"}, "rope.scaling.type = 'yarn'"),
        ({"llama.attention.sliding_window": 64}, "sliding_window = 64"),
        ({"llama.logit_scale": 2.0}, "logit_scale"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count"),
        ({"llama.attention.value_length": 8}, "value_length"),
        ({"llama.attention.key_length": 15, "llama.rope.dimension_count": 15}, "odd"),
        ({"llama.attention.head_count": 3}, "do not divide"),
        ({"llama.block_count": 10**9}, "block_count is 1000000000"),
        ({"llama.block_count": None}, "block_count is missing"),
        ({"llama.embedding_length": "x"}, "embedding_length is 'x'"),
        ({"llama.embedding_length": 0}, "embedding_length is 0"),
        ({"llama.context_length": True}, "context_length is True"),
        ({"llama.vocab_size": 321}, "token_embd.weight"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "epsilon is nan"),
    ],
)
def test_unsupported_metadata_is_refused_by_name(
    tmp_path: Path, metadata: dict[str, object], match: str
) -> None:
    with pytest.raises(ModelFileError, match=match):
        gguf_llama.config(llama(tmp_path, metadata=metadata))


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"llama.rope.scaling.type": "none"}, None),
        ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}, None),
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
            {"type": "linear", "factor": 4.0},
        ),
        ({"llama.rope.scale_linear": 2.0}, {"type": "linear", "factor": 2.0}),
    ],
)
def test_rope_scaling(tmp_path: Path, metadata: dict[str, object], expected: object) -> None:
    assert gguf_llama.config(llama(tmp_path, metadata=metadata))["rope_scaling"] == expected


def tensors_of(tmp_path: Path, change: object) -> None:
    config = tiny.tiny_config()
    tensors = change(tiny.gguf_tensors(config, tiny.tiny_weights(config)))  # type: ignore[operator]
    path = tmp_path / "x.gguf"
    path.write_bytes(tiny.gguf_bytes(tiny.gguf_metadata(config), tensors))
    file = gguf.read_header(path)
    gguf_llama.name_tensors(file, gguf_llama.config(file))


def test_missing_extra_and_misshapen_tensors(tmp_path: Path) -> None:
    tensors_of(tmp_path, lambda ts: ts)
    name = "blk.1.ffn_up.weight"
    for change, match in (
        (lambda ts: [t for t in ts if t[0] != name], f"'{name}' is missing"),
        (lambda ts: [(t[0], t[1][::-1], *t[2:]) if t[0] == name else t for t in ts], "shape"),
    ):
        with pytest.raises(ModelFileError, match=match) as e:
            tensors_of(tmp_path, change)
        assert e.value.tensor == name
    for extra in ("blk.2.ffn_up.weight", "blk.01.ffn_up.weight", "v.weight", "output.bias"):
        with pytest.raises(ModelFileError) as e:
            tensors_of(tmp_path, lambda ts, extra=extra: [*ts, vector(extra)])
        assert e.value.tensor == extra


def test_a_quantised_vector_is_refused(tmp_path: Path) -> None:
    def change(ts: list[tuple]) -> list[tuple]:
        return [(t[0], t[1], 8, b"\0" * 68) if t[0] == "output_norm.weight" else t for t in ts]

    with pytest.raises(ModelFileError, match="a Q8_0 vector"):
        tensors_of(tmp_path, change)


def test_quantisation_by_group(tmp_path: Path) -> None:
    file = llama(tmp_path, encoding="Q4_1", tie_word_embeddings=False)
    assert gguf_llama.describe(file) == "Q4_1 layers, Q4_1 embedding, Q4_1 output, F32 norms"
