"""The llama architecture in a GGUF file: its configuration and tensors under mlx-lm's names."""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Any

import numpy as np

from mtplx.errors import ModelFileError
from mtplx.gguf import GgufFile, GgufTensor, decode, read_raw

ARCHITECTURE = "llama"
# Keys under "llama." that are read below, or change nothing in the forward pass. Any other key may
# change it, so it is refused by name.
_READ = {
    "block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size",
    "attention.head_count", "attention.head_count_kv", "attention.layer_norm_rms_epsilon",
    "attention.key_length", "attention.value_length", "rope.dimension_count", "rope.freq_base",
    "rope.scaling.type", "rope.scaling.factor", "rope.scale_linear",
}  # fmt: skip
_IDLE = {"rope.scaling.original_context_length", "rope.scaling.finetuned", "expert_used_count"}
_ONLY = {"expert_count": 0, "attention.causal": True}  # accepted with this value
_LAYER_NAMES = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
ROPE_FACTORS = "rope_freqs.weight"


def _fail(file: GgufFile, message: str, tensor: str | None = None) -> ModelFileError:
    return ModelFileError(f"{file.path}: {message}", path=file.path, tensor=tensor)


def _number(file: GgufFile, key: str, default: Any = None, kind: type = int) -> Any:
    """A positive number of the metadata; ``default`` None makes the key compulsory."""
    value = file.metadata.get(f"{ARCHITECTURE}.{key}", default)
    if value is None:
        raise _fail(file, f"metadata {ARCHITECTURE}.{key} is missing")
    numeric = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not numeric or (kind is int and not isinstance(value, int)) or not 0 < value < 1 << 48:
        raise _fail(
            file,
            f"metadata {ARCHITECTURE}.{key} is {_short(value)}, not a positive {kind.__name__}",
        )
    return kind(value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def check_architecture(file: GgufFile) -> None:
    """Raises ``ModelFileError`` for another architecture, a part of a split, or an unknown key."""
    name = file.metadata.get("general.architecture")
    if name != ARCHITECTURE:
        raise _fail(
            file, f"the architecture is {_short(name)}; only {ARCHITECTURE!r} is supported in GGUF"
        )
    if file.metadata.get("split.count", 1) not in (0, 1):
        raise _fail(file, "one part of a split GGUF (split.count); merge the parts first")
    prefix = ARCHITECTURE + "."
    for full, value in file.metadata.items():
        key = full.removeprefix(prefix)
        if key == full or key in _READ or key in _IDLE:
            continue
        if key not in _ONLY or value != _ONLY[key]:
            raise _fail(file, f"metadata {full} = {_short(value)} is not supported")


def _rope_scaling(file: GgufFile) -> dict[str, Any] | None:
    kind = file.metadata.get("llama.rope.scaling.type", "none")
    factor = file.metadata.get(
        "llama.rope.scaling.factor", file.metadata.get("llama.rope.scale_linear")
    )
    if kind not in ("none", "linear"):
        raise _fail(file, f"metadata llama.rope.scaling.type = {_short(kind)} is not supported")
    if (kind == "none" and "llama.rope.scaling.type" in file.metadata) or factor in (None, 0, 1):
        return None
    if not isinstance(factor, (int, float)) or not 0 < factor < 1 << 20:
        raise _fail(file, f"metadata llama.rope.scaling.factor = {_short(factor)} is not usable")
    return {"type": "linear", "factor": float(factor)}


def config(file: GgufFile) -> dict[str, Any]:
    """The model's configuration in mlx-lm's words (``mlx_lm.models.llama.ModelArgs``)."""
    check_architecture(file)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise _fail(
            file, "tensor 'token_embd.weight' is missing or not a matrix", "token_embd.weight"
        )
    hidden, heads = _number(file, "embedding_length"), _number(file, "attention.head_count")
    layers, kv_heads = _number(file, "block_count"), _number(file, "attention.head_count_kv", heads)
    if layers > len(file.tensors):
        raise _fail(file, f"metadata llama.block_count is {layers}, more than there are tensors")
    if heads % kv_heads or ("llama.attention.key_length" not in file.metadata and hidden % heads):
        raise _fail(file, f"{hidden} dimensions, {heads} heads, {kv_heads} KV heads do not divide")
    head_dim = _number(file, "attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if _number(file, key, head_dim) != head_dim:
            raise _fail(
                file, f"metadata llama.{key} differs from the head size {head_dim}: not supported"
            )
    if head_dim % 2:
        raise _fail(file, f"the head size {head_dim} is odd")
    vocab = _number(file, "vocab_size", embedding.shape[0])
    if vocab != embedding.shape[0]:
        raise _fail(
            file, f"tensor 'token_embd.weight' has {embedding.shape[0]} rows, llama.vocab_size is "
            f"{vocab}", "token_embd.weight",
        )  # fmt: skip
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": _number(file, "feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": _number(file, "attention.layer_norm_rms_epsilon", kind=float),
        "vocab_size": vocab,
        "max_position_embeddings": _number(file, "context_length"),
        "rope_theta": _number(file, "rope.freq_base", 10000.0, kind=float),
        "rope_traditional": False,
        "rope_scaling": _rope_scaling(file),
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }


def mlx_name(file: GgufFile, tensor: GgufTensor) -> str:
    """A tensor's name under mlx-lm, e.g. ``model.layers.0.mlp.up_proj.weight``.

    Raises ``ModelFileError`` for a tensor that llama does not have.
    """
    stem, _, kind = tensor.name.rpartition(".")
    if kind in ("weight", "bias"):
        if stem in _TOP_NAMES:
            return f"{_TOP_NAMES[stem]}.{kind}"
        parts = stem.split(".")
        known = len(parts) == 3 and parts[0] == "blk" and parts[2] in _LAYER_NAMES
        if known and re.fullmatch(r"0|[1-9][0-9]{0,8}", parts[1]):
            return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{kind}"
    raise _fail(file, f"tensor {tensor.name!r} is not part of a llama model", tensor.name)


def expected_shapes(cfg: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every parameter of a llama model by mlx-lm name, with its unpacked shape."""
    hidden, mlp = cfg["hidden_size"], cfg["intermediate_size"]
    q = cfg["num_attention_heads"] * cfg["head_dim"]
    kv = cfg["num_key_value_heads"] * cfg["head_dim"]
    linear = {
        "self_attn.q_proj": (q, hidden), "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden), "self_attn.o_proj": (hidden, q),
        "mlp.gate_proj": (mlp, hidden), "mlp.up_proj": (mlp, hidden),
        "mlp.down_proj": (hidden, mlp),
    }  # fmt: skip
    out = {"model.embed_tokens.weight": (cfg["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    if not cfg["tie_word_embeddings"]:
        out["lm_head.weight"] = (cfg["vocab_size"], hidden)
    for i in range(cfg["num_hidden_layers"]):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            out[f"model.layers.{i}.{norm}.weight"] = (hidden,)
        for name, shape in linear.items():
            out[f"model.layers.{i}.{name}.weight"] = shape
            if cfg["attention_bias" if name.startswith("self_attn") else "mlp_bias"]:
                out[f"model.layers.{i}.{name}.bias"] = shape[:1]
    return out


def name_tensors(file: GgufFile, cfg: dict[str, Any]) -> dict[str, GgufTensor]:
    """mlx-lm name -> tensor, with the table complete, nothing extra and every shape right."""
    expected = expected_shapes(cfg)
    gguf_names = {v: k for k, v in (_LAYER_NAMES | _TOP_NAMES).items()}
    out: dict[str, GgufTensor] = {}
    for tensor in file.tensors.values():
        if tensor.name == ROPE_FACTORS:
            continue
        name = mlx_name(file, tensor)
        if name not in expected:
            raise _fail(
                file,
                f"tensor {tensor.name!r} is extra: the configuration has no such part",
                tensor.name,
            )
        if tensor.shape != expected[name]:
            raise _fail(
                file, f"tensor {tensor.name!r} has the shape {tensor.shape}, "
                f"expected {expected[name]}", tensor.name,
            )  # fmt: skip
        if len(tensor.shape) == 1 and tensor.encoding.block != 1:
            raise _fail(
                file, f"tensor {tensor.name!r}: a {tensor.encoding.name} vector", tensor.name
            )
        out[name] = tensor
    for name in expected.keys() - out.keys():
        stem, _, kind = name.rpartition(".")
        layer = stem.split(".", 3) if stem.startswith("model.layers.") else None
        stored = (
            f"blk.{layer[2]}.{gguf_names[layer[3]]}.{kind}"
            if layer
            else f"{gguf_names[stem]}.{kind}"
        )
        raise _fail(file, f"tensor {stored!r} is missing", stored)
    return out


def _unpermute(raw: np.ndarray, heads: int) -> np.ndarray:
    """Undoes llama.cpp's row order of q and k (pairs interleaved): a move of whole rows, so exact.

    ``raw`` is (heads * head_dim, bytes a row), or for a bias (1, bytes).
    """
    return raw.reshape(heads, -1, 2, raw.shape[1]).swapaxes(1, 2).reshape(raw.shape)


def load_arrays(
    file: GgufFile, cfg: dict[str, Any], weights: str
) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    """Yields (mlx-lm module path and kind, arrays by suffix) for every tensor.

    ``weights``: "float32" or "packed". Decoding runs on up to four threads, a few tensors ahead.
    """
    named = name_tensors(file, cfg)

    def one(name: str) -> dict[str, np.ndarray]:
        tensor = named[name]
        raw = read_raw(file, tensor)
        for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if f".{part}." in name:
                width = tensor.nbytes // tensor.shape[0]
                raw = _unpermute(raw.reshape(-1, width), cfg[heads]).reshape(raw.shape)
        return decode(file, tensor, raw, weights)

    threads = min(4, os.cpu_count() or 1)
    names, ahead = iter(named), deque[tuple[str, Future[dict[str, np.ndarray]]]]()
    with ThreadPoolExecutor(threads) as pool:
        while True:
            ahead.extend((n, pool.submit(one, n)) for n in islice(names, 2 * threads - len(ahead)))
            if not ahead:
                return
            name, result = ahead.popleft()
            yield name, result.result()


def rope_factors(file: GgufFile, cfg: dict[str, Any]) -> np.ndarray | None:
    """The per-frequency factors (head_dim / 2) float32 that Llama 3 files carry, or None."""
    tensor = file.tensors.get(ROPE_FACTORS)
    if tensor is None:
        return None
    if tensor.shape != (cfg["head_dim"] // 2,) or tensor.encoding.name != "F32":
        raise _fail(
            file, f"tensor {ROPE_FACTORS!r} is {tensor.encoding.name} {tensor.shape}, expected "
            f"F32 ({cfg['head_dim'] // 2},)", ROPE_FACTORS,
        )  # fmt: skip
    factors = decode(file, tensor, read_raw(file, tensor), "float32")["weight"]
    if not (np.isfinite(factors).all() and (factors > 0).all()):
        raise _fail(
            file, f"tensor {ROPE_FACTORS!r} holds a value that is not positive", ROPE_FACTORS
        )
    if cfg["rope_scaling"] is not None:
        raise _fail(
            file, f"tensor {ROPE_FACTORS!r} together with linear rope scaling", ROPE_FACTORS
        )
    return factors


def quantisation(file: GgufFile) -> dict[str, str]:
    """Stored types by group of tensors, e.g. {"layers": "Q4_1", "embedding": "Q8_0", ...}."""
    groups: dict[str, set[str]] = {}
    for tensor in file.tensors.values():
        if len(tensor.shape) == 1:
            group = "norms" if "norm" in tensor.name else "vectors"
        else:
            group = {"token_embd.weight": "embedding", "output.weight": "output"}.get(
                tensor.name, "layers"
            )
        groups.setdefault(group, set()).add(tensor.encoding.name)
    order = ("layers", "embedding", "output", "norms", "vectors")
    return {g: "/".join(sorted(groups[g])) for g in order if g in groups}


def describe(file: GgufFile) -> str:
    """``quantisation`` in one line: "Q4_1 layers, Q8_0 embedding, F32 norms"."""
    return ", ".join(f"{kind} {group}" for group, kind in quantisation(file).items())
