"""MiMo with one head and with two, and MiMo-V2-Flash with three."""

from __future__ import annotations

from functools import partial

from references import mimo

from .case import Case, swiglu

D, V, HEADS, KV, MLP = 32, 320, 4, 2, 64
EXPERTS, MOE = 4, 32
SWA_HEADS, SWA_KV, K_SIZE, V_SIZE = 4, 2, 16, 8  # of layers with a window

_MIMO = {
    "model_type": "mimo", "hidden_size": D, "intermediate_size": MLP, "num_hidden_layers": 2,
    "num_attention_heads": HEADS, "num_key_value_heads": KV, "vocab_size": V,
    "rms_norm_eps": 1e-5, "rope_theta": 640000, "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}  # fmt: skip
_V2 = {
    "model_type": "mimo_v2_flash", "hidden_size": D, "intermediate_size": MLP, "vocab_size": V,
    "num_hidden_layers": 3, "hybrid_layer_pattern": [0, 1, 1], "moe_layer_freq": [0, 1, 1],
    "add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False,
    "sliding_window_size": 6, "num_attention_heads": HEADS, "num_key_value_heads": 1,
    "head_dim": K_SIZE, "v_head_dim": V_SIZE, "swa_num_attention_heads": SWA_HEADS,
    "swa_num_key_value_heads": SWA_KV, "swa_head_dim": K_SIZE, "swa_v_head_dim": V_SIZE,
    "rope_theta": 5000000, "swa_rope_theta": 10000, "partial_rotary_factor": 0.5,
    "attention_value_scale": 0.707, "layernorm_epsilon": 1e-5, "max_position_embeddings": 512,
    "moe_intermediate_size": MOE, "n_routed_experts": EXPERTS, "n_shared_experts": None,
    "num_experts_per_tok": 2, "routed_scaling_factor": None, "topk_method": "noaux_tc",
    "scoring_func": "sigmoid", "norm_topk_prob": True, "n_group": 1, "topk_group": 1,
}  # fmt: skip


def _norms(prefix, *names):
    return {f"{prefix}.{name}.weight": (D,) for name in names}


def _attention(prefix, heads, kv, k_size, v_size, *, bias=False):
    rows = {"q": heads * k_size, "k": kv * k_size, "v": kv * v_size}
    out = {f"{prefix}.{part}_proj.weight": (count, D) for part, count in rows.items()}
    if bias:
        out |= {f"{prefix}.{part}_proj.bias": (count,) for part, count in rows.items()}
    return out | {f"{prefix}.o_proj.weight": (D, heads * v_size)}


def _ends():
    return {
        "model.embed_tokens.weight": (V, D), "model.norm.weight": (D,), "lm_head.weight": (V, D),
    }  # fmt: skip


def _mimo_layer(at):
    size = D // HEADS
    out = _norms(at, "input_layernorm", "post_attention_layernorm")
    out |= _attention(f"{at}.self_attn", HEADS, KV, size, size, bias=True)
    return out | swiglu(f"{at}.mlp", MLP)


def _mimo_shapes(count):
    out = _ends()
    for i in range(_MIMO["num_hidden_layers"]):
        out |= _mimo_layer(f"model.layers.{i}")
    for i in range(count):
        at = f"model.mtp_layers.{i}"
        out |= _norms(at, "token_layernorm", "hidden_layernorm", "final_layernorm")
        out |= {f"{at}.input_proj.weight": (D, 2 * D)} | _mimo_layer(at)
    return out


def _v2_attention(prefix, sliding):
    if not sliding:
        return _attention(prefix, HEADS, 1, K_SIZE, V_SIZE)
    out = _attention(prefix, SWA_HEADS, SWA_KV, K_SIZE, V_SIZE)
    return out | {f"{prefix}.attention_sink_bias": (SWA_HEADS,)}


def _v2_experts(prefix):
    out = {f"{prefix}.gate.weight": (EXPERTS, D)}
    out[f"{prefix}.gate.e_score_correction_bias"] = (EXPERTS,)
    for expert in range(EXPERTS):
        out |= swiglu(f"{prefix}.experts.{expert}", MOE)
    return out


def _v2_shapes(count):
    out = _ends()
    for i, (sliding, moe) in enumerate(
        zip(_V2["hybrid_layer_pattern"], _V2["moe_layer_freq"], strict=True)
    ):
        at = f"model.layers.{i}"
        out |= _norms(at, "input_layernorm", "post_attention_layernorm")
        out |= _v2_attention(f"{at}.self_attn", sliding)
        out |= _v2_experts(f"{at}.mlp") if moe else swiglu(f"{at}.mlp", MLP)
    for i in range(count):
        at = f"model.mtp.layers.{i}"
        names = ("enorm", "hnorm", "final_layernorm", "input_layernorm", "pre_mlp_layernorm")
        out |= _norms(at, *names) | {f"{at}.eh_proj.weight": (D, 2 * D)}
        out |= _v2_attention(f"{at}.self_attn", True) | swiglu(f"{at}.mlp", MLP)
    return out


def _case(name, config, shapes, logits, count):
    return Case(
        name, config, shapes, logits, is_head=lambda stored: stored.startswith("model.mtp"),
        head_count=count, further=tuple(partial(logits, index=i) for i in range(1, count)),
    )  # fmt: skip


MIMO = (
    *(
        _case(
            f"mimo_{count}",
            _MIMO | {"num_nextn_predict_layers": count},
            _mimo_shapes(count),
            mimo.mimo_logits,
            count,
        )
        for count in (1, 2)
    ),
    _case("mimo_v2_flash", _V2, _v2_shapes(3), mimo.mimo_v2_logits, 3),
)
