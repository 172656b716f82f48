"""Nemotron-H with experts: as in Nemotron 3 Nano, and in a smaller space as in 3 Super."""

from __future__ import annotations

from references import nemotron_h

from .case import Case

D, V, HEADS, KV, SIZE, MLP = 32, 320, 4, 2, 8, 48
M_HEADS, M_SIZE, GROUPS, STATE, CONV = 4, 8, 2, 16, 4
EXPERTS, MOE, SHARED = 4, 24, 40

_CONFIG = {
    "model_type": "nemotron_h", "vocab_size": V, "hidden_size": D, "intermediate_size": MLP,
    "max_position_embeddings": 512, "num_attention_heads": HEADS, "num_key_value_heads": KV,
    "head_dim": SIZE, "attention_bias": False, "mamba_num_heads": M_HEADS, "mamba_head_dim": M_SIZE,
    "mamba_proj_bias": False, "ssm_state_size": STATE, "conv_kernel": CONV, "n_groups": GROUPS,
    "mlp_bias": False, "layer_norm_epsilon": 1e-5, "use_bias": False, "use_conv_bias": True,
    "moe_intermediate_size": MOE, "moe_shared_expert_intermediate_size": SHARED,
    "n_group": 1, "topk_group": 1, "n_routed_experts": EXPERTS, "n_shared_experts": 1,
    "num_experts_per_tok": 2, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 1, "tie_word_embeddings": False,
}  # fmt: skip


def _mlp(prefix, inner, size=D):
    return {f"{prefix}.up_proj.weight": (inner, size), f"{prefix}.down_proj.weight": (size, inner)}


def _mixer(at, kind, latent):
    if kind == "M":
        inner, conv = M_HEADS * M_SIZE, M_HEADS * M_SIZE + 2 * GROUPS * STATE
        return {
            f"{at}.in_proj.weight": (inner + conv + M_HEADS, D),
            f"{at}.out_proj.weight": (D, inner),
            f"{at}.conv1d.weight": (conv, 1, CONV), f"{at}.conv1d.bias": (conv,),
            f"{at}.A_log": (M_HEADS,), f"{at}.D": (M_HEADS,), f"{at}.dt_bias": (M_HEADS,),
            f"{at}.norm.weight": (inner,),
        }  # fmt: skip
    if kind == "*":
        rows = {"q": HEADS * SIZE, "k": KV * SIZE, "v": KV * SIZE}
        out = {f"{at}.{part}_proj.weight": (n, D) for part, n in rows.items()}
        return out | {f"{at}.o_proj.weight": (D, HEADS * SIZE)}
    if kind == "-":
        return _mlp(at, MLP)
    out = {f"{at}.gate.weight": (EXPERTS, D), f"{at}.gate.e_score_correction_bias": (EXPERTS,)}
    if latent:
        out |= {f"{at}.fc1_latent_proj.weight": (latent, D)}
        out |= {f"{at}.fc2_latent_proj.weight": (D, latent)}
    for expert in range(EXPERTS):
        out |= _mlp(f"{at}.experts.{expert}", MOE, latent or D)
    return out | _mlp(f"{at}.shared_experts", SHARED)


def _shapes(pattern, latent):
    out = {"backbone.embeddings.weight": (V, D), "backbone.norm_f.weight": (D,)}
    for where, kinds in (("backbone", pattern), ("mtp", "*E")):
        for i, kind in enumerate(kinds):
            out[f"{where}.layers.{i}.norm.weight"] = (D,)
            out |= _mixer(f"{where}.layers.{i}.mixer", kind, latent)
    out |= {f"mtp.layers.0.{name}.weight": (D,) for name in ("enorm", "hnorm")}
    out |= {"mtp.layers.0.eh_proj.weight": (D, 2 * D), "mtp.layers.1.final_layernorm.weight": (D,)}
    return out | {"lm_head.weight": (V, D)}


def _case(name, config, pattern, latent=None):
    return Case(
        name, _CONFIG | config, _shapes(pattern, latent), nemotron_h.head_logits,
        is_head=lambda stored: stored.startswith("mtp."),
        values={"A_log": lambda rng, shape: rng.uniform(0.0, 1.0, shape)},
    )  # fmt: skip


_KINDS = {"M": "mamba", "E": "moe", "*": "attention", "-": "mlp"}
NEMOTRON_H = (
    _case(
        "nemotron_h",
        {"hybrid_override_pattern": "ME*-M", "mtp_hybrid_override_pattern": "*E"},
        "ME*-M",
    ),
    _case(
        "nemotron_h_latent",
        {
            "layers_block_type": [_KINDS[kind] for kind in "M*E"],
            "mtp_layers_block_type": ["attention", "moe"], "moe_latent_size": 16,
        },
        "M*E", 16,
    ),
)  # fmt: skip
