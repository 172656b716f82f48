"""LongCat-Flash: with the head's own embedding, without, and with latents as mlx-lm stores them."""

from __future__ import annotations

from references import longcat

from .case import Case, swiglu

D, V, HEADS, MLP, Q_RANK = 32, 320, 4, 64, 24
ROPE, VALUE = 4, 8
EXPERTS, NONE, MOE, LAYERS = 4, 2, 16, 2

_CONFIG = {
    "model_type": "longcat_flash", "attention_method": "MLA", "zero_expert_type": "identity",
    "hidden_size": D, "ffn_hidden_size": MLP, "moe_topk": 2, "expert_ffn_hidden_size": MOE,
    "n_routed_experts": EXPERTS, "zero_expert_num": NONE, "num_layers": LAYERS, "vocab_size": V,
    "max_position_embeddings": 512, "num_attention_heads": HEADS,
    "q_lora_rank": Q_RANK, "qk_rope_head_dim": ROPE, "v_head_dim": VALUE,
    "routed_scaling_factor": 6.0, "rms_norm_eps": 1e-5, "rope_theta": 1e7,
    "mla_scale_q_lora": True, "mla_scale_kv_lora": True, "attention_bias": False,
}  # fmt: skip


def _attention(at, rank, nope, joined=True):
    out = {
        f"{at}.q_a_proj.weight": (Q_RANK, D), f"{at}.q_a_layernorm.weight": (Q_RANK,),
        f"{at}.q_b_proj.weight": (HEADS * (nope + ROPE), Q_RANK),
        f"{at}.kv_a_proj_with_mqa.weight": (rank + ROPE, D),
        f"{at}.kv_a_layernorm.weight": (rank,),
        f"{at}.o_proj.weight": (D, HEADS * VALUE),
    }  # fmt: skip
    if joined:
        return out | {f"{at}.kv_b_proj.weight": (HEADS * (nope + VALUE), rank)}
    out[f"{at}.embed_q.weight"] = (HEADS, rank, nope)
    return out | {f"{at}.unembed_out.weight": (HEADS, VALUE, rank)}


def _layer(at, rank, nope):
    out = {}
    for i in range(2):
        norms = ("input_layernorm", "post_attention_layernorm")
        out |= {f"{at}.{name}.{i}.weight": (D,) for name in norms}
        out |= _attention(f"{at}.self_attn.{i}", rank, nope) | swiglu(f"{at}.mlps.{i}", MLP)
    out[f"{at}.mlp.router.classifier.weight"] = (EXPERTS + NONE, D)
    out[f"{at}.mlp.router.e_score_correction_bias"] = (EXPERTS + NONE,)
    for expert in range(EXPERTS):
        out |= swiglu(f"{at}.mlp.experts.{expert}", MOE)
    return out


def _shapes(own_embedding, joined, rank, nope):
    out = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
    for i in range(LAYERS):
        out |= _layer(f"model.layers.{i}", rank, nope)
    at = "model.mtp.layers.0"
    names = ("enorm.m", "hnorm.m", "input_layernorm", "post_attention_layernorm")
    out |= {f"{at}.{name}.weight": (D,) for name in names}
    out |= {f"{at}.eh_proj.weight": (D, 2 * D), "model.mtp.norm.weight": (D,)}
    out |= _attention(f"{at}.self_attn", rank, nope, joined)
    out |= swiglu(f"{at}.transformer_layer.mlp", MLP)
    if own_embedding:
        out["model.mtp.embed_tokens.weight"] = (V, D)
    return out | {"lm_head.weight": (V, D)}


def _case(name, *, own=True, joined=True, rank=24, nope=8):
    return Case(
        name, _CONFIG | {"kv_lora_rank": rank, "qk_nope_head_dim": nope},
        _shapes(own, joined, rank, nope), longcat.head_logits,
        is_head=lambda stored: stored.startswith("model.mtp."),
    )  # fmt: skip


LONGCAT = (
    _case("longcat_flash"),
    _case("longcat_flash_shared", own=False),
    _case("longcat_flash_mlx", joined=False, rank=32, nope=32),
)
