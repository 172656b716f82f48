"""Checkpoints' matrices in the formats they are published in."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import mlx.core as mx
import numpy as np
from safetensors.numpy import save

BLOCK = 128


def packed(weights, chosen, bits, group=32):
    """MLX's affine format: (the stored tensors, what they stand for)."""
    stored, plain = dict(weights), dict(weights)
    for name in filter(chosen, weights):
        parts = mx.quantize(mx.array(weights[name]), group_size=group, bits=bits)
        stem = name.removesuffix(".weight")
        for kind, value in zip(("weight", "scales", "biases"), parts, strict=True):
            stored[f"{stem}.{kind}"] = np.asarray(value)
        plain[name] = np.asarray(mx.dequantize(*parts, group_size=group, bits=bits))
    return stored, plain


def fp8(weights, chosen):
    """FP8 with a scale a block of 128 x 128: (bytes by name, other tensors, what they stand for).

    What they stand for is rounded to bfloat16, in which they are computed with.
    """
    codes, others, plain = {}, dict(weights), dict(weights)
    for name in filter(chosen, weights):
        value = others.pop(name)
        rows, columns = (-(-size // BLOCK) for size in value.shape)
        scales = np.empty((rows, columns), np.float32)
        spread = np.empty_like(value)
        for i in range(rows):
            for j in range(columns):
                at = np.s_[i * BLOCK : (i + 1) * BLOCK, j * BLOCK : (j + 1) * BLOCK]
                spread[at] = scales[i, j] = np.abs(value[at]).max() / 448
        codes[name] = np.asarray(mx.to_fp8(mx.array(value / spread)))
        others[f"{name}_scale_inv"] = scales
        exact = mx.from_fp8(mx.array(codes[name]), dtype=mx.float32) * mx.array(spread)
        plain[name] = np.asarray(exact.astype(mx.bfloat16).astype(mx.float32))
    return codes, others, plain


def write_fp8(file: Path, codes, others) -> None:
    """A safetensors file; the library's NumPy side has no name for FP8."""
    data = save({**others, **codes}, {"format": "pt"})
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    for name in codes:
        header[name]["dtype"] = "F8_E4M3"
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])
