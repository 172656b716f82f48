"""DeepSeek-V3 and V3.2, GLM-5, and the GLM-4.5 line: heads stored behind the trunk's layers."""

from __future__ import annotations

from functools import partial

from references import deepseek, glm4_moe

from .case import Case, swiglu

# Rows of every matrix can be packed in groups of 32, and q_b_proj has more than one block of fp8.
D, V, HEADS, MLP, MOE, EXPERTS, LAYERS = 32, 320, 4, 64, 32, 8, 2
NOPE, ROPE, VALUE, Q_RANK, KV_RANK = 32, 4, 8, 32, 32
INDEX_HEADS, INDEX = 12, 8  # so many that no two rows are at 0 under all of them, a tie
KV, SIZE = 2, 8

_MOE = {
    "hidden_size": D, "intermediate_size": MLP, "num_hidden_layers": LAYERS, "vocab_size": V,
    "num_attention_heads": HEADS, "moe_intermediate_size": MOE, "n_routed_experts": EXPERTS,
    "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
    "norm_topk_prob": True, "routed_scaling_factor": 2.5, "first_k_dense_replace": 1,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "topk_method": "noaux_tc", "scoring_func": "sigmoid", "num_nextn_predict_layers": 1,
}  # fmt: skip
_LATENT = {
    "num_key_value_heads": HEADS, "q_lora_rank": Q_RANK, "kv_lora_rank": KV_RANK,
    "qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE, "v_head_dim": VALUE, "moe_layer_freq": 1,
    "attention_bias": False,
}  # fmt: skip
_YARN = {
    "rope_theta": 10000.0,
    "rope_scaling": {
        "type": "yarn", "factor": 40, "original_max_position_embeddings": 64, "beta_fast": 32,
        "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
    },
}  # fmt: skip
_INDEXER = {"index_head_dim": INDEX, "index_n_heads": INDEX_HEADS, "index_topk": 4}
_GROUPED = {
    "num_key_value_heads": KV, "head_dim": SIZE, "attention_bias": True, "use_qk_norm": True,
    "partial_rotary_factor": 0.5, "rope_theta": 10000.0, "rope_scaling": None,
}  # fmt: skip


def _latent(prefix, *, mlx, indexer):
    out = {
        f"{prefix}.q_a_proj.weight": (Q_RANK, D), f"{prefix}.q_a_layernorm.weight": (Q_RANK,),
        f"{prefix}.q_b_proj.weight": (HEADS * (NOPE + ROPE), Q_RANK),
        f"{prefix}.kv_a_proj_with_mqa.weight": (KV_RANK + ROPE, D),
        f"{prefix}.kv_a_layernorm.weight": (KV_RANK,),
        f"{prefix}.o_proj.weight": (D, HEADS * VALUE),
    }  # fmt: skip
    if mlx:
        out[f"{prefix}.embed_q.weight"] = (HEADS, KV_RANK, NOPE)
        out[f"{prefix}.unembed_out.weight"] = (HEADS, VALUE, KV_RANK)
    else:
        out[f"{prefix}.kv_b_proj.weight"] = (HEADS * (NOPE + VALUE), KV_RANK)
    if indexer:
        out[f"{prefix}.indexer.wq_b.weight"] = (INDEX_HEADS * INDEX, Q_RANK)
        out[f"{prefix}.indexer.wk.weight"] = (INDEX, D)
        out |= {f"{prefix}.indexer.k_norm.{part}": (INDEX,) for part in ("weight", "bias")}
        out[f"{prefix}.indexer.weights_proj.weight"] = (INDEX_HEADS, D)
    return out


def _grouped(prefix, *, mlx, indexer):
    sizes = {"q": HEADS * SIZE, "k": KV * SIZE, "v": KV * SIZE}
    out = {f"{prefix}.{part}_proj.weight": (rows, D) for part, rows in sizes.items()}
    out |= {f"{prefix}.{part}_proj.bias": (rows,) for part, rows in sizes.items()}
    out |= {f"{prefix}.{part}_norm.weight": (SIZE,) for part in "qk"}
    return out | {f"{prefix}.o_proj.weight": (D, HEADS * SIZE)}


def _experts(prefix, mlx):
    out = {f"{prefix}.gate.weight": (EXPERTS, D)}
    out[f"{prefix}.gate.e_score_correction_bias"] = (EXPERTS,)
    out |= swiglu(f"{prefix}.shared_experts", MOE)
    if mlx:
        return out | swiglu(f"{prefix}.switch_mlp", MOE, (EXPERTS,))
    for expert in range(EXPERTS):
        out |= swiglu(f"{prefix}.experts.{expert}", MOE)
    return out


def _shapes(attention, *, mlx=False, indexer=False, heads=1, copies=True):
    out = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,), "lm_head.weight": (V, D)}
    for i in range(LAYERS + heads):
        at = f"model.layers.{i}"
        out |= attention(f"{at}.self_attn", mlx=mlx, indexer=indexer)
        out |= _experts(f"{at}.mlp", mlx) if i else swiglu(f"{at}.mlp", MLP)
        norms = ["input_layernorm", "post_attention_layernorm"]
        if i >= LAYERS:
            norms += ["enorm", "hnorm", "shared_head.norm"]
            out[f"{at}.eh_proj.weight"] = (D, 2 * D)
            if copies:
                out[f"{at}.embed_tokens.weight"] = out[f"{at}.shared_head.head.weight"] = (V, D)
        out |= {f"{at}.{name}.weight": (D,) for name in norms}
    return out


# The copies differ from the trunk's here, so that it shows which of them is used.
_VALUES = {"shared_head.head.weight": lambda rng, shape: 0.5 * rng.standard_normal(shape)}


def _is_head(stored):
    return stored.startswith(tuple(f"model.layers.{LAYERS + i}." for i in range(4)))


def _case(name, config, shapes, reference=deepseek.head_logits, **more):
    return Case(name, config, shapes, reference, is_head=_is_head, values=_VALUES, **more)


_V3 = {"model_type": "deepseek_v3", **_MOE, **_LATENT, **_YARN}
_GLM5 = {
    "model_type": "glm_moe_dsa", **_MOE, **_LATENT, **_INDEXER, "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
}  # fmt: skip
_GLM4 = {"model_type": "glm4_moe", **_MOE, **_GROUPED}
_LITE = {
    "model_type": "glm4_moe_lite", **_MOE, **_LATENT, "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0, "rope_scaling": None, "n_group": 1,
}  # fmt: skip
_TWO = {"num_nextn_predict_layers": 2}

DEEPSEEK = (
    _case("deepseek_v3", _V3, _shapes(_latent)),
    _case(
        "deepseek_v3_two_heads_mlx",
        _V3 | _TWO,
        _shapes(_latent, mlx=True, heads=2, copies=False),
        head_count=2,
        further=(partial(deepseek.head_logits, index=1),),
    ),
    _case(
        "deepseek_v32",
        {**_V3, **_INDEXER, "model_type": "deepseek_v32"},
        _shapes(_latent, indexer=True),
    ),
    _case("glm_moe_dsa", _GLM5, _shapes(_latent, indexer=True, copies=False)),
    _case("glm_moe_dsa_mlx", _GLM5, _shapes(_latent, mlx=True, indexer=True)),
    _case("glm4_moe", _GLM4, _shapes(_grouped), glm4_moe.head_logits),
    _case(
        "glm4_moe_two_heads_mlx",
        _GLM4 | _TWO,
        _shapes(_grouped, mlx=True, heads=2, copies=False),
        glm4_moe.head_logits,
        head_count=2,
        further=(partial(glm4_moe.head_logits, index=1),),
    ),
    _case("glm4_moe_lite", _LITE, _shapes(_latent), partial(deepseek.head_logits, own=True)),
    _case("glm4_moe_lite_mlx", _LITE, _shapes(_latent, mlx=True, copies=False)),
)
