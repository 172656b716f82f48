"""Qwen3-Next and Qwen3.5, dense and with experts."""

from __future__ import annotations

from references import qwen

from .case import Case, swiglu

D, V, HEADS, KV, SIZE, MLP = 32, 320, 4, 2, 8, 48
K_HEADS, V_HEADS, K_SIZE, V_SIZE, CONV = 2, 4, 8, 8, 4
EXPERTS, MOE = 4, 16

_TEXT = {
    "hidden_size": D, "intermediate_size": MLP, "num_hidden_layers": 4, "vocab_size": V,
    "num_attention_heads": HEADS, "num_key_value_heads": KV, "head_dim": SIZE,
    "rms_norm_eps": 1e-6, "max_position_embeddings": 512, "full_attention_interval": 2,
    "linear_num_value_heads": V_HEADS, "linear_num_key_heads": K_HEADS,
    "linear_key_head_dim": K_SIZE, "linear_value_head_dim": V_SIZE,
    "linear_conv_kernel_dim": CONV, "tie_word_embeddings": False,
}  # fmt: skip
_ROPE = {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}
_MOE = {
    "num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": MOE,
    "shared_expert_intermediate_size": MOE, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}  # fmt: skip


def _mlp(prefix, moe, fused):
    if not moe:
        return swiglu(prefix, MLP)
    out = {f"{prefix}.gate.weight": (EXPERTS, D), f"{prefix}.shared_expert_gate.weight": (1, D)}
    out |= swiglu(f"{prefix}.shared_expert", MOE)
    if fused:
        out[f"{prefix}.experts.gate_up_proj"] = (EXPERTS, 2 * MOE, D)
        out[f"{prefix}.experts.down_proj"] = (EXPERTS, D, MOE)
    else:
        for expert in range(EXPERTS):
            out |= swiglu(f"{prefix}.experts.{expert}", MOE)
    return out


def _attention(prefix):
    return {
        f"{prefix}.q_proj.weight": (2 * HEADS * SIZE, D), f"{prefix}.k_proj.weight": (KV * SIZE, D),
        f"{prefix}.v_proj.weight": (KV * SIZE, D), f"{prefix}.o_proj.weight": (D, HEADS * SIZE),
        f"{prefix}.q_norm.weight": (SIZE,), f"{prefix}.k_norm.weight": (SIZE,),
    }  # fmt: skip


def _delta_net(prefix, joint):
    keys, values = K_HEADS * K_SIZE, V_HEADS * V_SIZE
    out = {
        f"{prefix}.conv1d.weight": (2 * keys + values, 1, CONV), f"{prefix}.dt_bias": (V_HEADS,),
        f"{prefix}.A_log": (V_HEADS,), f"{prefix}.norm.weight": (V_SIZE,),
        f"{prefix}.out_proj.weight": (D, values),
    }  # fmt: skip
    if joint:
        out[f"{prefix}.in_proj_qkvz.weight"] = (2 * keys + 2 * values, D)
        out[f"{prefix}.in_proj_ba.weight"] = (2 * V_HEADS, D)
    else:
        out[f"{prefix}.in_proj_qkv.weight"] = (2 * keys + values, D)
        out[f"{prefix}.in_proj_z.weight"] = (values, D)
        out |= {f"{prefix}.in_proj_{part}.weight": (V_HEADS, D) for part in "ab"}
    return out


def _layer(prefix, linear, *, moe, joint, fused):
    norms = ("input_layernorm", "post_attention_layernorm")
    out = {f"{prefix}.{name}.weight": (D,) for name in norms}
    mixer = _delta_net(f"{prefix}.linear_attn", joint) if linear else _attention(
        f"{prefix}.self_attn"
    )  # fmt: skip
    return out | mixer | _mlp(f"{prefix}.mlp", moe, fused)


def _shapes(model, *, moe=False, joint=False, fused=False):
    form = {"moe": moe, "joint": joint}
    out = {f"{model}.embed_tokens.weight": (V, D), f"{model}.norm.weight": (D,)}
    for i in range(4):
        out |= _layer(f"{model}.layers.{i}", i % 2 == 0, fused=fused, **form)
    out["lm_head.weight"] = (V, D)
    out |= {f"mtp.{name}.weight": (D,) for name in ("norm",)}
    out |= {f"mtp.pre_fc_norm_{name}.weight": (D,) for name in ("embedding", "hidden")}
    out["mtp.fc.weight"] = (D, 2 * D)
    return out | _layer("mtp.layers.0", False, fused=False, **form)


# The delta net's own norm is a plain one in these families.
_VALUES = {
    "linear_attn.norm.weight": lambda rng, shape: 1 + 0.1 * rng.standard_normal(shape),
    "A_log": lambda rng, shape: rng.uniform(0.0, 1.0, shape),
}


def _case(name, config, shapes):
    return Case(
        name, config, shapes, qwen.head_logits,
        is_head=lambda stored: stored.startswith("mtp."),
        plain=lambda stored: stored.replace("model.language_model.", "model."),
        zero_centred=True, values=_VALUES,
    )  # fmt: skip


_ROPE_35 = {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 0], **_ROPE}}
_DENSE = _TEXT | _ROPE_35 | {"model_type": "qwen3_5_text", "mtp_num_hidden_layers": 1}
QWEN = (
    _case(
        "qwen3_5",
        {"model_type": "qwen3_5", "text_config": _DENSE},
        _shapes("model.language_model"),
    ),
    _case(
        "qwen3_5_moe",
        {"model_type": "qwen3_5_moe", "text_config": _DENSE | _MOE},
        _shapes("model.language_model", moe=True, fused=True),
    ),
    _case(
        "qwen3_next",
        {"model_type": "qwen3_next", **_TEXT, **_ROPE, **_MOE},
        _shapes("model", moe=True, joint=True),
    ),
)
