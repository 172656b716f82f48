"""ERNIE-4.5 with experts, as published (tied, no biases), and with every bias it can have."""

from __future__ import annotations

from references import ernie

from .case import Case

D, V, HEADS, KV, SIZE, MLP = 32, 320, 4, 2, 8, 64
EXPERTS, MOE, SHARED = 4, 32, 2

_CONFIG = {
    "model_type": "ernie4_5_moe", "hidden_size": D, "intermediate_size": MLP, "vocab_size": V,
    "num_hidden_layers": 2, "num_attention_heads": HEADS, "num_key_value_heads": KV,
    "head_dim": SIZE, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "max_position_embeddings": 512, "use_bias": False, "tie_word_embeddings": True,
    "moe_num_experts": EXPERTS, "moe_intermediate_size": MOE, "moe_k": 2,
    "moe_num_shared_experts": SHARED, "moe_layer_start_index": 1, "moe_layer_end_index": 1,
    "moe_layer_interval": 1, "num_nextn_predict_layers": 1,
}  # fmt: skip


def _linear(name, rows, columns, bias):
    out = {f"{name}.weight": (rows, columns)}
    return out | {f"{name}.bias": (rows,)} if bias else out


def _mlp(prefix, inner, bias):
    out = _linear(f"{prefix}.gate_proj", inner, D, bias)
    out |= _linear(f"{prefix}.up_proj", inner, D, bias)
    return out | _linear(f"{prefix}.down_proj", D, inner, bias)


def _layer(at, bias, moe=False):
    out = {f"{at}.{name}_layernorm.weight": (D,) for name in ("input", "post_attention")}
    for part, count in (("q", HEADS), ("k", KV), ("v", KV)):
        out |= _linear(f"{at}.self_attn.{part}_proj", count * SIZE, D, bias)
    out |= _linear(f"{at}.self_attn.o_proj", D, HEADS * SIZE, bias)
    if not moe:
        return out | _mlp(f"{at}.mlp", MLP, bias)
    out[f"{at}.mlp.gate.weight"] = (EXPERTS, D)
    out[f"{at}.mlp.moe_statics.e_score_correction_bias"] = (1, EXPERTS)
    for expert in range(EXPERTS):
        out |= _mlp(f"{at}.mlp.experts.{expert}", MOE, bias)
    return out | _mlp(f"{at}.mlp.shared_experts", SHARED * MOE, bias)


def _shapes(bias, moe):
    out = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
    out |= _layer("model.layers.0", bias) | _layer("model.layers.1", bias, moe)
    out |= {f"model.mtp_{name}_norm.0.weight": (D,) for name in ("emb", "hidden")}
    out |= _linear("model.mtp_linear_proj.0", D, 2 * D, bias)
    return out | _layer("model.mtp_block.0", bias)


def _case(name, config, shapes):
    return Case(
        name, config, shapes, ernie.head_logits,
        is_head=lambda stored: stored.startswith("model.mtp_"),
    )  # fmt: skip


# mlx-lm reads no biases of experts: the layer with experts has none here.
_BIASED = _CONFIG | {"use_bias": True, "tie_word_embeddings": False, "moe_layer_start_index": 2}
ERNIE = (
    _case("ernie4_5_moe", _CONFIG, _shapes(False, True)),
    _case("ernie4_5_moe_biased", _BIASED, _shapes(True, False) | {"lm_head.weight": (V, D)}),
)
