"""EXAONE-MoE with a dense head as published, and with experts and full attention in it."""

from __future__ import annotations

from references import exaone

from .case import Case, swiglu

D, V, HEADS, KV, SIZE, MLP = 32, 320, 4, 2, 8, 64
EXPERTS, MOE = 4, 32

_CONFIG = {
    "model_type": "exaone_moe", "hidden_size": D, "intermediate_size": MLP, "vocab_size": V,
    "moe_intermediate_size": MOE, "num_hidden_layers": 3, "num_attention_heads": HEADS,
    "num_key_value_heads": KV, "head_dim": SIZE, "num_experts": EXPERTS,
    "num_experts_per_tok": 2, "num_shared_experts": 1, "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0, "max_position_embeddings": 512, "sliding_window": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "is_moe_layer": [False, True, True], "routed_scaling_factor": 2.5, "norm_topk_prob": True,
    "n_group": 1, "topk_group": 1, "tie_word_embeddings": False,
}  # fmt: skip


def _layer(at, moe):
    out = {f"{at}.{name}_layernorm.weight": (D,) for name in ("input", "post_attention")}
    for part, count in (("q", HEADS), ("k", KV), ("v", KV)):
        out[f"{at}.self_attn.{part}_proj.weight"] = (count * SIZE, D)
    out[f"{at}.self_attn.o_proj.weight"] = (D, HEADS * SIZE)
    out |= {f"{at}.self_attn.{part}_norm.weight": (SIZE,) for part in "qk"}
    if not moe:
        return out | swiglu(f"{at}.mlp", MLP)
    out[f"{at}.mlp.gate.weight"] = (EXPERTS, D)
    out[f"{at}.mlp.e_score_correction_bias"] = (EXPERTS,)
    for expert in range(EXPERTS):
        out |= swiglu(f"{at}.mlp.experts.{expert}", MOE)
    return out | swiglu(f"{at}.mlp.shared_experts", MOE)


def _case(name, config, moe):
    shapes = {
        "model.embed_tokens.weight": (V, D), "model.norm.weight": (D,), "lm_head.weight": (V, D),
    }  # fmt: skip
    for i, experts in enumerate(config["is_moe_layer"]):
        shapes |= _layer(f"model.layers.{i}", experts)
    names = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    shapes |= {f"mtp.{part}.weight": (D,) for part in names} | {"mtp.fc.weight": (D, 2 * D)}
    return Case(
        name, config, shapes | _layer("mtp.layers.0", moe), exaone.head_logits,
        is_head=lambda stored: stored.startswith("mtp."),
    )  # fmt: skip


_COUNTED = _CONFIG | {"num_nextn_predict_layers": 1}
EXAONE = (
    _case("exaone_moe", _CONFIG, False),
    _case("exaone_moe_experts", _COUNTED | {"mtp_layer_types": ["full_attention"]}, True),
)
