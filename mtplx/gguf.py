"""Reads GGUF files (version 2 and 3, little-endian) into NumPy arrays.

The container is checked whole before a tensor is touched: counts, names, types, offsets and
extents. MLX's own reader is not used: it opens the file for writing, maps it shared and writable,
and does not survive malformed input. Layout: the ggml project's GGUF specification.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mtplx.errors import ModelFileError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
_MAX_NAME = 64 * 1024  # longest key or tensor name; the specification's own limit for keys
_MAX_DIMS = 4
_FIRST_READ = 8 << 20  # header bytes read at first; headers are seldom longer


@dataclass(frozen=True)
class Encoding:
    """A ggml tensor type: ``block`` weights take ``block_bytes`` bytes."""

    name: str
    block: int
    block_bytes: int
    bits: int | None = None  # of the packed MLX form; None for plain floats


# By ggml type number. The packed four differ only in what a block's head holds (scale, minimum).
ENCODINGS = {
    0: Encoding("F32", 1, 4),
    1: Encoding("F16", 1, 2),
    2: Encoding("Q4_0", 32, 18, 4),
    3: Encoding("Q4_1", 32, 20, 4),
    8: Encoding("Q8_0", 32, 34, 8),
    30: Encoding("BF16", 1, 2),
}
GROUP_SIZE = 32
# Only for messages: what the other numbers mean.
_OTHER_TYPES = {
    6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K",
    15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL",
    21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip
_SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4",
    7: "?", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
_BOOL, _STRING, _ARRAY = 7, 8, 9


@dataclass(frozen=True)
class GgufTensor:
    """Where one tensor lies. ``shape`` is row-major (ggml's dimensions reversed)."""

    name: str
    encoding: Encoding
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file
    nbytes: int

    @property
    def count(self) -> int:
        """Number of weights."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class GgufFile:
    """A checked header. ``metadata`` values: str, int, float, bool, list[str], NumPy arrays."""

    path: Path
    version: int
    size: int
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


class _ShortError(Exception):
    """The bytes read so far end inside the header."""


class _Reader:
    """A cursor over the first bytes of a file of ``size`` bytes."""

    def __init__(self, path: Path, data: bytes, size: int):
        self.path, self.data, self.size, self.at = path, data, size, 0

    def fail(self, message: str, tensor: str | None = None) -> ModelFileError:
        return ModelFileError(f"{self.path}: {message}", path=self.path, tensor=tensor)

    def room(self, n: int, what: str) -> None:
        """``n`` more bytes must exist in the file, and be read already."""
        if n > self.size - self.at:
            raise self.fail(
                f"truncated or corrupt GGUF: {what} needs {n} bytes at byte {self.at}, "
                f"the file ends at {self.size}"
            )
        if n > len(self.data) - self.at:
            raise _ShortError

    def unpack(self, code: str, what: str) -> Any:
        width = struct.calcsize("<" + code)
        self.room(width, what)
        value = struct.unpack_from("<" + code, self.data, self.at)
        self.at += width
        return value[0] if len(value) == 1 else value

    def text(self, what: str, limit: int | None = None) -> str:
        n = self.unpack("Q", f"the length of {what}")
        if limit is not None and n > limit:
            raise self.fail(f"corrupt GGUF: {what} would be {n} bytes long (limit {limit})")
        self.room(n, what)
        raw = self.data[self.at : self.at + n]
        self.at += n
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self.fail(f"corrupt GGUF: {what} is not UTF-8") from None


def _texts(r: _Reader, count: int, what: str) -> list[str]:
    """``count`` strings; the one loop that runs for every token, so it keeps to local names."""
    data, at, end = r.data, r.at, len(r.data)
    length = struct.Struct("<Q").unpack_from
    out: list[str] = []
    try:
        for _ in range(count):
            start = at + 8
            at = start + length(data, at)[0]
            if at > end:
                break
            out.append(data[start:at].decode("utf-8"))
    except struct.error:
        at = end + 1
    except UnicodeDecodeError:
        raise r.fail(f"corrupt GGUF: string {len(out)} of {what} is not UTF-8") from None
    if at > end:
        if end < r.size:
            raise _ShortError
        raise r.fail(f"truncated or corrupt GGUF: string {len(out)} of {what} runs past the end")
    r.at = at
    return out


def _array(r: _Reader, what: str) -> Any:
    kind, count = r.unpack("IQ", f"the array {what}")
    if kind == _STRING:
        r.room(8 * count if count <= r.size else count, what)  # each string has a length at least
        return _texts(r, count, what)
    if kind not in _SCALARS:
        raise r.fail(f"metadata {what}: arrays of GGUF value type {kind} are not supported")
    dtype = np.dtype(_SCALARS[kind])
    r.room(count * dtype.itemsize, what)
    values = np.frombuffer(r.data, np.uint8 if kind == _BOOL else dtype, count, r.at)
    r.at += count * dtype.itemsize
    return values


def _value(r: _Reader, what: str) -> Any:
    kind = r.unpack("I", f"the type of {what}")
    if kind == _STRING:
        return r.text(what)
    if kind == _ARRAY:
        return _array(r, what)
    if kind not in _SCALARS:
        raise r.fail(f"corrupt GGUF: metadata {what} has the unknown value type {kind}")
    if kind == _BOOL:
        byte = r.unpack("B", what)
        if byte > 1:
            raise r.fail(f"corrupt GGUF: metadata {what} is a bool with the value {byte}")
        return bool(byte)
    dtype = np.dtype(_SCALARS[kind])
    r.room(dtype.itemsize, what)
    value = np.frombuffer(r.data, dtype, 1, r.at)[0].item()
    r.at += dtype.itemsize
    return value


def _tensor(r: _Reader, index: int) -> tuple[str, tuple[int, ...], int, int]:
    name = r.text(f"the name of tensor {index}", _MAX_NAME)
    n_dims = r.unpack("I", f"tensor {name}")
    if not 1 <= n_dims <= _MAX_DIMS:
        raise r.fail(
            f"tensor {name!r} has {n_dims} dimensions (1 to {_MAX_DIMS} are possible)", name
        )
    dims = [r.unpack("Q", f"the shape of tensor {name}") for _ in range(n_dims)]
    if 0 in dims:
        raise r.fail(f"tensor {name!r} has a dimension of 0", name)
    kind, offset = r.unpack("IQ", f"tensor {name}")
    return name, tuple(reversed(dims)), kind, offset


def _alignment(r: _Reader, metadata: Mapping[str, Any]) -> int:
    value = metadata.get("general.alignment", 32)
    if not isinstance(value, int) or value <= 0 or value & (value - 1) or value > 1 << 20:
        raise r.fail(f"corrupt GGUF: general.alignment is {value!r}, not a power of two")
    return value


def _place(
    r: _Reader, entries: list[tuple[str, tuple[int, ...], int, int]], align: int
) -> dict[str, GgufTensor]:
    """Checks names, types and extents; the data starts at the next multiple of ``align``."""
    start = -(-r.at // align) * align
    tensors: dict[str, GgufTensor] = {}
    for name, shape, kind, offset in entries:
        if name in tensors:
            raise r.fail(f"tensor {name!r} occurs twice", name)
        encoding = ENCODINGS.get(kind)
        if encoding is None:
            known = ", ".join(e.name for e in ENCODINGS.values())
            shown = _OTHER_TYPES.get(kind, f"number {kind}")
            raise r.fail(f"tensor {name!r} has the type {shown}; supported are {known}", name)
        if shape[-1] % encoding.block:
            raise r.fail(
                f"tensor {name!r}: rows of {shape[-1]} do not divide into {encoding.name} blocks "
                f"of {encoding.block}", name,
            )  # fmt: skip
        nbytes = math.prod(shape) // encoding.block * encoding.block_bytes
        if offset % align:
            raise r.fail(f"tensor {name!r}: offset {offset} is not a multiple of {align}", name)
        if start + offset + nbytes > r.size:
            raise r.fail(
                f"tensor {name!r} ends at byte {start + offset + nbytes}, the file at {r.size}: "
                "truncated or corrupt", name,
            )  # fmt: skip
        tensors[name] = GgufTensor(name, encoding, shape, start + offset, nbytes)
    end, last = start, ""
    for t in sorted(tensors.values(), key=lambda t: t.offset):
        if t.offset < end:
            raise r.fail(f"tensors {last!r} and {t.name!r} overlap", t.name)
        end, last = t.offset + t.nbytes, t.name
    if r.size - end >= align:
        raise r.fail(f"{r.size - end} bytes follow the last tensor: wrong or corrupt header")
    return tensors


def _parse(r: _Reader) -> GgufFile:
    if r.size < 24 or r.data[:4] != MAGIC:
        raise r.fail("not a GGUF file (it does not start with 'GGUF' and a header)")
    r.at = 4
    version = r.unpack("I", "the version")
    if version not in VERSIONS:
        hint = " (a big-endian file)" if version & 0xFFFF == 0 else ""
        raise r.fail(f"GGUF version {version}{hint}; little-endian versions 2 and 3 are supported")
    n_tensors, n_pairs = r.unpack("QQ", "the counts")
    # Each pair takes 13 bytes and each tensor 33 at least: absurd counts end here, not in a loop.
    if n_pairs * 13 + n_tensors * 33 > r.size:
        raise r.fail(f"corrupt GGUF: {n_tensors} tensors and {n_pairs} metadata pairs cannot fit")
    metadata: dict[str, Any] = {}
    for _ in range(n_pairs):
        key = r.text("a metadata key", _MAX_NAME)
        if key in metadata:
            raise r.fail(f"corrupt GGUF: metadata key {key!r} occurs twice")
        metadata[key] = _value(r, key)
    entries = [_tensor(r, i) for i in range(n_tensors)]
    tensors = _place(r, entries, _alignment(r, metadata))
    return GgufFile(r.path, version, r.size, metadata, tensors)


def read_header(path: str | Path) -> GgufFile:
    """Reads and checks metadata and the table of tensors; no tensor data is read.

    Raises ``ModelFileError`` naming the file, and the tensor where there is one.
    """
    path = Path(path)
    try:
        with path.open("rb") as f:
            size, data, want = os.fstat(f.fileno()).st_size, b"", _FIRST_READ
            while True:
                data += f.read(want - len(data))
                try:
                    return _parse(_Reader(path, data[:size], size))
                except _ShortError:
                    if len(data) < want:
                        raise ModelFileError(f"{path}: the file shrank", path=path) from None
                    want *= 8
    except OSError as e:
        raise ModelFileError(f"{path}: cannot be read ({e.strerror})", path=path) from e


def read_raw(file: GgufFile, tensor: GgufTensor) -> np.ndarray:
    """The stored bytes of a tensor as uint8, shape (rows, bytes a row); 1-D tensors are one row."""
    try:
        raw = np.fromfile(file.path, np.uint8, tensor.nbytes, offset=tensor.offset)
    except OSError as e:
        raise ModelFileError(
            f"{file.path}: cannot read tensor {tensor.name!r} ({e})", path=file.path,
            tensor=tensor.name,
        ) from e  # fmt: skip
    if raw.size != tensor.nbytes:
        raise ModelFileError(
            f"{file.path}: tensor {tensor.name!r} is cut short", path=file.path, tensor=tensor.name
        )
    return raw.reshape(-1 if len(tensor.shape) > 1 else 1, _row_bytes(tensor))


def _row_bytes(tensor: GgufTensor) -> int:
    return tensor.shape[-1] // tensor.encoding.block * tensor.encoding.block_bytes


def _blocks(raw: np.ndarray, encoding: Encoding) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(scales f16, minima f16, quants uint8 (blocks, 32)): weight = scale * quant + minimum."""
    blocks = raw.reshape(-1, encoding.block_bytes)
    head = encoding.block_bytes - GROUP_SIZE * (encoding.bits or 0) // 8
    halves = np.ascontiguousarray(blocks[:, :head]).view(np.float16)
    body, scales = blocks[:, head:], halves[:, 0]
    with np.errstate(over="ignore", invalid="ignore"):
        # MLX's groups are unsigned: q + 8 or q + 128, and the minimum takes it away again.
        minima = (
            halves[:, 1] if head == 4 else scales * np.float16(-128 if encoding.bits == 8 else -8)
        )
    if not (np.isfinite(scales).all() and np.isfinite(minima).all()):
        raise OverflowError("a block's scale or minimum is not finite")
    if encoding.bits == 8:
        return scales, minima, body ^ np.uint8(0x80)
    quants = np.empty((len(blocks), 2, 16), np.uint8)
    np.bitwise_and(body, 15, out=quants[:, 0])  # low nibbles: weights 0..15, high: 16..31
    np.right_shift(body, 4, out=quants[:, 1])
    return scales, minima, quants.reshape(-1, GROUP_SIZE)


def to_float32(raw: np.ndarray, encoding: Encoding) -> np.ndarray:
    """Decodes rows of stored bytes to float32 (rows, columns); exact but for one last rounding."""
    rows = len(raw)
    if encoding.name == "F32":
        return raw.view("<f4")
    if encoding.name == "F16":
        return raw.view("<f2").astype(np.float32)
    if encoding.name == "BF16":
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    scales, minima, quants = _blocks(raw, encoding)
    out = quants.astype(np.float32)
    out *= scales.astype(np.float32)[:, None]
    out += minima.astype(np.float32)[:, None]
    return out.reshape(rows, -1)


def to_packed(raw: np.ndarray, encoding: Encoding) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """MLX's affine form, without re-quantising: weight uint32, scales f16, biases f16.

    Shapes (rows, columns * bits / 32), (rows, columns / 32) twice.
    """
    rows = len(raw)
    scales, minima, quants = _blocks(raw, encoding)
    if encoding.bits == 4:
        quants = quants[:, 0::2] | (quants[:, 1::2] << 4)  # MLX: even weight in the low nibble
    packed = np.ascontiguousarray(quants).reshape(rows, -1).view("<u4")
    return packed, scales.reshape(rows, -1), minima.reshape(rows, -1)


def decode(
    file: GgufFile, tensor: GgufTensor, raw: np.ndarray, weights: str
) -> dict[str, np.ndarray]:
    """A tensor's arrays by suffix (``weight``; packed also ``scales``, ``biases``).

    ``raw`` is ``read_raw``'s result, rows reordered or not; ``weights`` is "float32" or "packed"
    (as stored). NumPy has no bfloat16: as stored, those words come as uint16.
    """
    encoding = tensor.encoding
    try:
        if weights == "packed" and encoding.bits:
            return dict(zip(("weight", "scales", "biases"), to_packed(raw, encoding), strict=True))
        if weights == "packed" and encoding.name in ("F16", "BF16"):
            values = raw.view("<f2" if encoding.name == "F16" else "<u2")
        else:
            values = to_float32(raw, encoding)
    except OverflowError as e:
        raise ModelFileError(
            f"{file.path}: tensor {tensor.name!r}: {e}", path=file.path, tensor=tensor.name
        ) from None
    return {"weight": values.reshape(tensor.shape)}
