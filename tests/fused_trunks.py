"""Tiny trunks on the CPU kernels, and the plain ones that they stand for."""

from __future__ import annotations

from importlib import import_module

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from doubles import randomise
from mlx_lm.models.cache import make_prompt_cache

from mtplx.cpu_layers import fuse
from mtplx.load import to_float32

SIZES = {
    "vocab_size": 200, "hidden_size": 64, "num_hidden_layers": 3, "intermediate_size": 96,
    "num_attention_heads": 6, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096, "tie_word_embeddings": True, "rope_theta": 10000.0,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
KINDS = {
    "llama": {"model_type": "llama", "head_dim": 16},
    "llama3": {"model_type": "llama", "head_dim": 32, "rope_scaling": LLAMA3},
    "biases": {
        "model_type": "llama", "num_attention_heads": 4, "head_dim": 24, "attention_bias": True,
        "mlp_bias": True,
    },
    "untied": {"model_type": "llama", "head_dim": 16, "tie_word_embeddings": False},
    "qwen2": {"model_type": "qwen2", "num_attention_heads": 4},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "linear_rope": {
        "model_type": "llama", "head_dim": 16, "rope_scaling": {"type": "linear", "factor": 2.0},
    },
}  # fmt: skip
VOCAB = SIZES["vocab_size"]


def trunk_of(kind, bits=None, seed=0):
    """A plain float32 trunk, or a quantised one and the float32 trunk that it stands for."""
    config = SIZES | KINDS[kind]
    module = import_module(f"mlx_lm.models.{config['model_type']}")
    trunk = module.Model(module.ModelArgs.from_dict(config))
    randomise(trunk, seed)
    trunk.set_dtype(mx.float32)
    if bits is not None:
        nn.quantize(trunk, group_size=32, bits=bits)
    mx.eval(trunk.parameters())
    plain = module.Model(module.ModelArgs.from_dict(config))
    if bits is not None:
        nn.quantize(plain, group_size=32, bits=bits)
    plain.update(trunk.parameters())
    return trunk.eval(), to_float32(plain) if bits is not None else plain.eval()


def fused_of(kind, bits=None, seed=0):
    trunk, plain = trunk_of(kind, bits, seed)
    assert fuse(trunk)
    return trunk, plain


def ids_of(length, seed=0):
    return np.random.default_rng(seed).integers(0, VOCAB, length).astype(np.int32)


def logits(trunk, ids, cache):
    return np.array(trunk(mx.array(ids)[None], cache=cache)[0])


def by_steps(trunk, ids, sizes):
    """Logits of all ids, run in forwards of the given sizes (the last one repeats)."""
    cache, out, at = make_prompt_cache(trunk), [], 0
    sizes = list(sizes)
    while at < len(ids):
        size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
        out.append(logits(trunk, ids[at : at + size], cache))
        at += size
    return np.concatenate(out), cache
