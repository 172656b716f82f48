"""What several families do to the stored tensors of a head. Names are those in an ``MTPChain``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from ..checkpoint import BITS, GROUP_SIZES, UNREADABLE, StoredTensor
from ..errors import ModelError

__all__ = [
    "BITS",
    "GROUP_SIZES",
    "UnfitError",
    "centre_norms",
    "check_formats",
    "latent_projections",
    "plain_formats",
    "split_gate_up",
    "stack_experts",
]

_FP8_BLOCK = 128  # rows and columns that share a scale (DeepSeek-V3 report, section 3.3.2)
# Ends of names that tell of other formats: NVFP4's (ModelOpt, compressed-tensors), static FP8's.
_OTHER = (
    "weight_scale", "weight_scale_2", "weight_packed", "weight_global_scale", "input_scale",
    "input_global_scale",
)  # fmt: skip


class UnfitError(Exception):
    """A tensor, by its name in a chain, and what is wrong with it."""


def check_formats(stored: Mapping[str, StoredTensor]) -> None:
    """``ModelError`` for a head, by its stored names, in a format that is not read."""
    for name, tensor in stored.items():
        if name.rpartition(".")[2] in _OTHER or tensor.dtype in UNREADABLE:
            raise ModelError(
                f"{tensor.file}: the MTP head is stored as NVFP4, or as FP8 without scales for"
                f" blocks ({name}, {tensor.dtype}), which mtplx does not read; `--head none` goes"
                " without it"
            )


def plain_formats(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """FP8 with a scale for every 128 x 128 weights becomes bfloat16.

    Raises ``UnfitError`` for scales of another shape.
    """
    out = dict(weights)
    for name in weights:
        if name.endswith(".weight_scale_inv"):
            target, scale = name.removesuffix("_scale_inv"), out.pop(name)
            if target in out:
                blocks = tuple(-(-size // _FP8_BLOCK) for size in out[target].shape)
                if scale.shape != blocks:
                    raise UnfitError(name, f"has the shape {scale.shape}, expected {blocks}")
                out[target] = _from_fp8(out[target], scale)
    return out


def _from_fp8(weight: mx.array, scale: mx.array) -> mx.array:
    """W (N, K), as bytes, times scale (ceil(N / 128), ceil(K / 128)), spread over the blocks."""
    rows, columns = weight.shape
    values = mx.from_fp8(weight, dtype=mx.bfloat16)
    spread = mx.repeat(mx.repeat(scale, _FP8_BLOCK, axis=0), _FP8_BLOCK, axis=1)
    return (values * spread[:rows, :columns]).astype(mx.bfloat16)


def is_norm(name: str) -> bool:
    """Whether a weight is that of an RMS norm."""
    return name.endswith("norm.weight")


def centre_norms(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Norms stored as w - 1 become w, all of them or none.

    Decided by the norms of the decoder layer, whose w is near 1: the others' may be anything (those
    of Qwen's embedding are near 0.5), and no conversion changes only a part of them.
    """
    layers = [w for name, w in weights.items() if ".layer." in name and is_norm(name)]
    if not layers:
        return weights
    mean = sum(float(w.astype(mx.float32).mean()) for w in layers) / len(layers)
    if mean > 0.5:
        return weights
    return {name: w + 1 if is_norm(name) else w for name, w in weights.items()}


def stack_experts(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """``experts.E.NAME`` for every E become one tensor ``switch_mlp.NAME``, experts first.

    Raises ``UnfitError`` for one that is missing or unlike the others.
    """
    count: dict[tuple[str, str], int] = {}
    out = dict(weights)
    for name in weights:
        match = re.fullmatch(r"(.*\.)experts\.\d+\.(.+)", name)
        if match:
            count[match[1], match[2]] = count.get((match[1], match[2]), 0) + 1
    for (stem, rest), experts in count.items():
        names = [f"{stem}experts.{number}.{rest}" for number in range(experts)]
        for name in names:
            if name not in out:
                raise UnfitError(name, "is missing")
            if out[name].shape != out[names[0]].shape:
                expected = out[names[0]].shape
                raise UnfitError(name, f"has the shape {out[name].shape}, expected {expected}")
        out[f"{stem}switch_mlp.{rest}"] = mx.stack([out.pop(name) for name in names])
    return out


def latent_projections(weights: dict[str, mx.array], args: Any) -> dict[str, mx.array]:
    """``kv_b_proj`` of latent attention in full precision: mlx-lm would pack its two parts anew.

    Raises ``UnfitError`` for one of another size.  args: the trunk's.
    """
    rows = args.num_attention_heads * (args.qk_nope_head_dim + args.v_head_dim)
    out = dict(weights)
    for name, value in weights.items():
        if not name.endswith(".kv_b_proj.weight"):
            continue
        if value.ndim != 2 or value.shape[0] != rows:
            raise UnfitError(name, f"has the shape {value.shape}, expected {rows} rows")
        stem, columns = name.removesuffix("weight"), args.kv_lora_rank
        scales, biases = (out.pop(stem + part, None) for part in ("scales", "biases"))
        if scales is not None:
            bits, size = value.shape[1] * 32 // columns, columns // max(1, scales.shape[-1])
            out[name] = mx.dequantize(value, scales, biases, bits=bits, group_size=size)
    return out


def split_gate_up(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """``experts.gate_up_proj`` (E, 2 M, D) and ``experts.down_proj`` become ``switch_mlp``'s."""
    out = {}
    for name, value in weights.items():
        stem, found, rest = name.partition(".experts.")
        if found and rest.removesuffix(".weight") == "gate_up_proj":
            for part, half in zip(("gate", "up"), mx.split(value, 2, axis=-2), strict=True):
                out[f"{stem}.switch_mlp.{part}_proj.weight"] = half
        elif found and rest.removesuffix(".weight") == "down_proj":
            out[f"{stem}.switch_mlp.down_proj.weight"] = value
        else:
            out[name] = value
    return out
