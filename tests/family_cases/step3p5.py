"""Step-3.5: three heads, of both kinds of layers; the trunk mixes windows and experts."""

from __future__ import annotations

from references import step3p5

from .case import Case, swiglu

D, V, SIZE, KV, MLP = 32, 320, 8, 2, 48
HEADS = {"full_attention": 4, "sliding_attention": 6}
EXPERTS, MOE = 4, 16
LAYERS, CHAIN = 3, 3
KINDS = [
    "full_attention", "sliding_attention", "sliding_attention",  # the trunk's
    "sliding_attention", "full_attention", "sliding_attention",  # the heads'
]  # fmt: skip

_CONFIG = {
    "model_type": "step3p5", "hidden_size": D, "vocab_size": V, "intermediate_size": MLP,
    "num_hidden_layers": LAYERS, "num_nextn_predict_layers": CHAIN, "head_dim": SIZE,
    "num_attention_heads": HEADS["full_attention"], "num_attention_groups": KV,
    "attention_other_setting": {
        "attention_type": "sliding_attention", "head_dim": SIZE,
        "num_attention_heads": HEADS["sliding_attention"], "num_attention_groups": KV,
    },
    "layer_types": KINDS, "sliding_window": 4, "rms_norm_eps": 1e-5,
    "rope_theta": [5e6 if kind == "full_attention" else 1e4 for kind in KINDS],
    "partial_rotary_factors": [0.5 if kind == "full_attention" else 1.0 for kind in KINDS],
    "max_position_embeddings": 512, "use_head_wise_attn_gate": True,
    "moe_layers_enum": "1,2", "moe_num_experts": EXPERTS, "moe_top_k": 2,
    "moe_intermediate_size": MOE, "share_expert_dim": MOE, "moe_router_scaling_factor": 3.0,
    "swiglu_limits": [0.0, 0.0, 7.0, 0.0, 0.0, 0.0],
    "swiglu_limits_shared": [0.0, 0.0, 16.0, 0.0, 0.5, 0.0], "tie_word_embeddings": False,
}  # fmt: skip


def _layer(place):
    at, heads = f"model.layers.{place}", HEADS[KINDS[place]]
    out = {f"{at}.{name}.weight": (D,) for name in ("input_layernorm", "post_attention_layernorm")}
    rows = {"q": heads * SIZE, "k": KV * SIZE, "v": KV * SIZE, "g": heads}
    out |= {f"{at}.self_attn.{part}_proj.weight": (n, D) for part, n in rows.items()}
    out[f"{at}.self_attn.o_proj.weight"] = (D, heads * SIZE)
    out |= {f"{at}.self_attn.{part}_norm.weight": (SIZE,) for part in "qk"}
    if str(place) not in _CONFIG["moe_layers_enum"].split(","):
        return out | swiglu(f"{at}.mlp", MLP)
    out |= {f"{at}.moe.gate.weight": (EXPERTS, D), f"{at}.moe.router_bias": (EXPERTS,)}
    return out | swiglu(f"{at}.moe", MOE, (EXPERTS,)) | swiglu(f"{at}.share_expert", MOE)


def _shapes():
    out = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
    for place in range(LAYERS + CHAIN):
        out |= _layer(place)
    for place in range(LAYERS, LAYERS + CHAIN):
        at = f"model.layers.{place}"
        out |= {f"{at}.{name}.weight": (D,) for name in ("enorm", "hnorm")}
        out[f"{at}.eh_proj.weight"] = (D, 2 * D)
        out[f"{at}.transformer.shared_head.norm.weight"] = (D,)
        out[f"{at}.transformer.shared_head.output.weight"] = (V, D)
    return out | {"lm_head.weight": (V, D)}


_BEHIND = tuple(f"model.layers.{place}." for place in range(LAYERS, LAYERS + CHAIN))
STEP3P5 = (
    Case(
        "step3p5", _CONFIG, _shapes(), step3p5.head_logits(0),
        is_head=lambda name: name.startswith(_BEHIND),
        zero_centred=True, head_count=CHAIN,
        further=tuple(step3p5.head_logits(i) for i in range(1, CHAIN)),
    ),
)  # fmt: skip
