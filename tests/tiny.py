"""Writes tiny random llama models, as an mlx-lm directory and as a GGUF file, for the tests.

The same ``seed`` and configuration give the same weights in both forms.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS = 2
MERGES = (
    "t h", "th e", "Ġ the", "i n", "a n", "an d", "Ġ and", "Ġ a", "e r", "o n", "o r", "Ġ t",
)  # fmt: skip
TEMPLATE = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tiny_config(**overrides: Any) -> dict[str, Any]:
    """config.json of a 2-layer llama: vocabulary 320, hidden 64, 4 heads, 2 KV heads."""
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 320,
        "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 512,
        "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": EOS,
    }  # fmt: skip
    return config | overrides


def tiny_weights(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 weights under mlx-lm's names; logits have a standard deviation near 4."""
    rng = np.random.default_rng(seed)
    h, mlp, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    q = config["num_attention_heads"] * config["head_dim"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    shapes = {
        "self_attn.q_proj": (q, h), "self_attn.k_proj": (kv, h), "self_attn.v_proj": (kv, h),
        "self_attn.o_proj": (h, q), "mlp.gate_proj": (mlp, h), "mlp.up_proj": (mlp, h),
        "mlp.down_proj": (h, mlp),
    }  # fmt: skip

    def matrix(shape: tuple[int, int], std: float) -> np.ndarray:
        return (rng.standard_normal(shape) * std).astype(np.float32)

    def norm() -> np.ndarray:
        return (1 + 0.1 * rng.standard_normal(h)).astype(np.float32)

    out = {"model.embed_tokens.weight": matrix((vocab, h), 0.5)}
    for i in range(config["num_hidden_layers"]):
        out[f"model.layers.{i}.input_layernorm.weight"] = norm()
        out[f"model.layers.{i}.post_attention_layernorm.weight"] = norm()
        for name, shape in shapes.items():
            out[f"model.layers.{i}.{name}.weight"] = matrix(shape, shape[1] ** -0.5)
    out["model.norm.weight"] = norm()
    if not config["tie_word_embeddings"]:
        out["lm_head.weight"] = matrix((vocab, h), 0.5)
    return out


def tiny_vocab() -> list[str]:
    """3 special tokens, the 256 byte characters, and one token a merge: 271 in all."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return [*SPECIAL, *alphabet, *(m.replace(" ", "") for m in MERGES)]


def tiny_tokenizer() -> Tokenizer:
    """A byte-level BPE tokenizer over ``tiny_vocab``, in the way of SmolLM2's."""
    vocab = {t: i for i, t in enumerate(tiny_vocab())}
    tokenizer = Tokenizer(models.BPE(vocab, [tuple(m.split(" ")) for m in MERGES]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    return tokenizer


def write_directory(
    path: str | Path,
    *,
    seed: int = 0,
    dtype: str = "float32",
    shards: int = 1,
    quantise: dict[str, int] | None = None,
    weights: dict[str, np.ndarray] | None = None,
    **config: Any,
) -> Path:
    """Writes an mlx-lm directory. ``dtype`` float32, float16 or bfloat16; ``shards`` > 1 adds an
    index; ``quantise`` e.g. {"group_size": 32, "bits": 4} packs matrices as mlx-lm does."""
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    cfg = tiny_config(**config)
    arrays: dict[str, Any] = dict(weights) if weights is not None else tiny_weights(cfg, seed)
    if dtype != "float32" or quantise:
        arrays = _mlx_form(arrays, dtype, quantise)
    if quantise:
        cfg["quantization"] = dict(quantise)
    names = sorted(arrays)
    files = ["model.safetensors"]
    if shards > 1:
        files = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
        table = {n: files[i * shards // len(names)] for i, n in enumerate(names)}
        _json(path / "model.safetensors.index.json", {"metadata": {}, "weight_map": table})
    for i, file in enumerate(files):
        chosen = {n: arrays[n] for j, n in enumerate(names) if j * shards // len(names) == i}
        _save(chosen, path / file)
    _json(path / "config.json", cfg)
    _json(path / "generation_config.json", {"eos_token_id": EOS})
    settings = {"bos_token": SPECIAL[1], "eos_token": SPECIAL[2], "chat_template": TEMPLATE}
    _json(path / "tokenizer_config.json", settings)
    tiny_tokenizer().save(str(path / "tokenizer.json"))
    return path


def _json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def _save(arrays: dict[str, Any], file: Path) -> None:
    if all(isinstance(a, np.ndarray) for a in arrays.values()):
        save_file(arrays, str(file))
        return
    import mlx.core as mx

    mx.save_safetensors(str(file), arrays)


def _mlx_form(
    arrays: dict[str, np.ndarray], dtype: str, quantise: dict[str, int] | None
) -> dict[str, Any]:
    import mlx.core as mx

    out: dict[str, Any] = {}
    for name, array in arrays.items():
        value = mx.array(array).astype(getattr(mx, dtype))
        if quantise and value.ndim == 2:
            stem = name.removesuffix(".weight")
            out[name], out[f"{stem}.scales"], out[f"{stem}.biases"] = mx.quantize(value, **quantise)
        else:
            out[name] = value
    return out


# GGUF: value type numbers of the format, by Python or NumPy type.
_TYPES = {0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20),
          8: ("Q8_0", 32, 34), 30: ("BF16", 1, 2)}  # fmt: skip
TYPE_NUMBERS = {name: number for number, (name, _, _) in _TYPES.items()}


def gguf_string(text: str) -> bytes:
    raw = text.encode("utf-8")
    return struct.pack("<Q", len(raw)) + raw


def gguf_value(value: Any) -> bytes:
    """A metadata value with its type in front: bool, int (u32), float (f32), str, lists of them."""
    if isinstance(value, bool):
        return struct.pack("<IB", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + gguf_string(value)
    if value and isinstance(value[0], str):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(gguf_string, value))
    return struct.pack("<IIQ", 9, 5, len(value)) + np.asarray(value, "<i4").tobytes()


def encode_tensor(values: np.ndarray, encoding: str) -> bytes:
    """Stores float32 values in a ggml type, rounding to nearest within each block of 32."""
    if encoding == "F32":
        return values.astype("<f4").tobytes()
    if encoding == "F16":
        return values.astype("<f2").tobytes()
    if encoding == "BF16":
        return (values.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
    x = values.reshape(-1, 32).astype(np.float32)
    if encoding == "Q8_0":
        scale = (np.abs(x).max(1) / 127).astype("<f2")
        q = np.rint(x / np.maximum(scale, 1e-8)[:, None]).clip(-128, 127).astype(np.int8)
        return b"".join(s.tobytes() + r.tobytes() for s, r in zip(scale, q, strict=True))
    low = x.min(1) if encoding == "Q4_1" else -8 * np.abs(x).max(1) / 7
    scale = ((x.max(1) - low) / 15 if encoding == "Q4_1" else np.abs(x).max(1) / 7).astype("<f2")
    base = low.astype("<f2") if encoding == "Q4_1" else scale * np.float16(-8)
    q = np.rint((x - base[:, None]) / np.maximum(scale, 1e-8)[:, None]).clip(0, 15)
    packed = q[:, :16].astype(np.uint8) | (q[:, 16:].astype(np.uint8) << 4)
    heads = [s.tobytes() + (b.tobytes() if encoding == "Q4_1" else b"")
             for s, b in zip(scale, base, strict=True)]  # fmt: skip
    return b"".join(h + r.tobytes() for h, r in zip(heads, packed, strict=True))


def gguf_bytes(
    metadata: dict[str, Any],
    tensors: list[tuple[str, tuple[int, ...], int, bytes]],
    *,
    version: int = 3,
    align: int = 32,
    offsets: list[int] | None = None,
) -> bytes:
    """A GGUF file from (name, row-major shape, type number, data); ``offsets`` overrides places."""
    places, body = [], b""
    for _, _, _, data in tensors:
        body += b"\0" * (-len(body) % align)
        places.append(len(body))
        body += data
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    for key, value in metadata.items():
        head += gguf_string(key) + gguf_value(value)
    for (name, shape, kind, _), place in zip(tensors, offsets or places, strict=True):
        head += gguf_string(name) + struct.pack("<I", len(shape))
        head += struct.pack(f"<{len(shape)}Q", *reversed(shape)) + struct.pack("<IQ", kind, place)
    return head + b"\0" * (-len(head) % align) + body


_GGUF_NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "model.embed_tokens": "token_embd", "model.norm": "output_norm",
    "lm_head": "output",
}  # fmt: skip


def gguf_metadata(config: dict[str, Any]) -> dict[str, Any]:
    """The metadata of ``write_gguf``'s file: the llama keys and the tiny tokenizer."""
    vocab = tiny_vocab()
    return {
        "general.architecture": "llama",
        "llama.block_count": config["num_hidden_layers"],
        "llama.context_length": config["max_position_embeddings"],
        "llama.embedding_length": config["hidden_size"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": config["num_attention_heads"],
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "llama.attention.key_length": config["head_dim"],
        "llama.rope.freq_base": config["rope_theta"],
        "llama.rope.dimension_count": config["head_dim"],
        "llama.vocab_size": config["vocab_size"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": vocab,
        "tokenizer.ggml.token_type": [3 if t in SPECIAL else 1 for t in vocab],
        "tokenizer.ggml.merges": list(MERGES),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": EOS,
        "tokenizer.chat_template": TEMPLATE,
    }


def gguf_tensors(
    config: dict[str, Any], weights: dict[str, np.ndarray], encoding: str = "F32"
) -> list[tuple[str, tuple[int, ...], int, bytes]]:
    """The tensors of a llama GGUF: llama.cpp's names and q/k row order; vectors stay F32."""
    out = []
    for name, values in weights.items():
        stem, _, kind = name.rpartition(".")
        if stem.startswith("model.layers."):
            _, _, layer, part = stem.split(".", 3)
            stored = f"blk.{layer}.{_GGUF_NAMES[part]}.{kind}"
        else:
            stored = f"{_GGUF_NAMES[stem]}.{kind}"
        for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if part in name:
                split = values.reshape(config[heads], 2, -1, *values.shape[1:])
                values = np.ascontiguousarray(split.swapaxes(1, 2)).reshape(values.shape)
        form = encoding if values.ndim == 2 else "F32"
        out.append((stored, values.shape, TYPE_NUMBERS[form], encode_tensor(values, form)))
    return out


def write_gguf(
    path: str | Path,
    *,
    seed: int = 0,
    encoding: str = "F32",
    version: int = 3,
    align: int = 32,
    weights: dict[str, np.ndarray] | None = None,
    metadata: dict[str, Any] | None = None,
    **config: Any,
) -> Path:
    """Writes a llama .gguf. ``encoding`` F32, F16, BF16, Q4_0, Q4_1 or Q8_0 for the matrices;
    ``metadata`` adds keys, or with None as the value drops them."""
    path = Path(path)
    cfg = tiny_config(**config)
    meta = gguf_metadata(cfg) | (metadata or {})
    if align != 32:
        meta["general.alignment"] = align
    meta = {k: v for k, v in meta.items() if v is not None}
    tensors = gguf_tensors(
        cfg, weights if weights is not None else tiny_weights(cfg, seed), encoding
    )
    path.write_bytes(gguf_bytes(meta, tensors, version=version, align=align))
    return path
