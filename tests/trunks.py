"""Tiny random trunks with every kind of cache that a state takes back."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from doubles import randomise, tiny_llama
from mlx.utils import tree_flatten
from mlx_lm.models import (
    deepseek_v32,
    falcon_h1,
    gemma3_text,
    llama4,
    mamba2,
    mimo_v2_flash,
    nemotron_h,
    qwen3_5,
    qwen3_next,
    recurrent_gemma,
    step3p5,
)
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

VOCAB = 40
WINDOW = 8


def _qwen() -> Any:
    text = {
        "model_type": "qwen3_5_text", "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
        "vocab_size": VOCAB, "linear_num_value_heads": 2, "linear_num_key_heads": 1,
        "linear_key_head_dim": 32, "linear_value_head_dim": 16,
    }  # fmt: skip
    return qwen3_5.Model(qwen3_5.ModelArgs(model_type="qwen3_5", text_config=text))


def _mamba() -> Any:
    return mamba2.Model(
        mamba2.ModelArgs(
            model_type="mamba2",
            num_heads=2,
            head_dim=16,
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=32,
            state_size=8,
            num_hidden_layers=2,
            layer_norm_epsilon=1e-5,
            conv_kernel=4,
            n_groups=1,
            use_bias=False,
            use_conv_bias=True,
            tie_word_embeddings=True,
            time_step_limit=(0.0, 100.0),
            time_step_rank="auto",
        )
    )


def _gemma() -> Any:
    return recurrent_gemma.Model(
        recurrent_gemma.ModelArgs(
            model_type="recurrent_gemma",
            attention_bias=False,
            conv1d_width=4,
            hidden_size=32,
            intermediate_size=64,
            logits_soft_cap=30.0,
            num_attention_heads=2,
            num_hidden_layers=3,
            num_key_value_heads=1,
            rms_norm_eps=1e-5,
            rope_theta=1e4,
            attention_window_size=WINDOW,
            vocab_size=VOCAB,
            block_types=["recurrent", "recurrent", "attention"],
        )
    )


def _llama4() -> Any:
    text = {
        "attention_bias": False, "attention_chunk_size": WINDOW, "head_dim": 16,
        "hidden_size": 32, "interleave_moe_layer_step": 8, "intermediate_size": 48,
        "intermediate_size_mlp": 48, "max_position_embeddings": 512, "model_type": "llama4_text",
        "num_attention_heads": 2, "num_experts_per_tok": 1, "num_hidden_layers": 4,
        "num_key_value_heads": 1, "num_local_experts": 1, "rms_norm_eps": 1e-5,
        "rope_scaling": None, "rope_theta": 1e4, "use_qk_norm": False, "vocab_size": VOCAB,
    }  # fmt: skip
    return llama4.Model(llama4.ModelArgs(model_type="llama4", text_config=text))


def _falcon() -> Any:
    return falcon_h1.Model(
        falcon_h1.ModelArgs(
            hidden_size=32,
            head_dim=16,
            intermediate_size=48,
            mamba_d_head=16,
            mamba_d_ssm=32,
            mamba_d_state=8,
            mamba_n_heads=2,
            num_attention_heads=2,
            num_hidden_layers=2,
            num_key_value_heads=1,
            vocab_size=VOCAB,
            rope_theta=1e4,
            lm_head_multiplier=1.0,
        )
    )


def _sliding() -> Any:
    kinds = ["sliding_attention", "full_attention"]
    return tiny_llama(3, vocab_size=VOCAB, layer_types=kinds, sliding_window=WINDOW)


def _qwen_next() -> Any:
    return qwen3_next.Model(
        qwen3_next.ModelArgs(
            model_type="qwen3_next",
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=4,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            vocab_size=VOCAB,
            linear_num_value_heads=4,
            linear_num_key_heads=2,
            linear_key_head_dim=16,
            linear_value_head_dim=8,
            linear_conv_kernel_dim=4,
            num_experts=4,
            num_experts_per_tok=2,
            decoder_sparse_step=2,
            shared_expert_intermediate_size=16,
            moe_intermediate_size=16,
            mlp_only_layers=[],
            rms_norm_eps=1e-6,
            rope_theta=1e4,
            partial_rotary_factor=0.5,
            max_position_embeddings=512,
        )
    )


def _nemotron() -> Any:
    return nemotron_h.Model(
        nemotron_h.ModelArgs(
            model_type="nemotron_h",
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=48,
            max_position_embeddings=512,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            attention_bias=False,
            mamba_num_heads=4,
            mamba_head_dim=8,
            mamba_proj_bias=False,
            ssm_state_size=8,
            conv_kernel=4,
            n_groups=2,
            mlp_bias=False,
            layer_norm_epsilon=1e-5,
            use_bias=False,
            use_conv_bias=True,
            hybrid_override_pattern=list("M-M*-M"),
        )
    )


def _gemma3() -> Any:
    return gemma3_text.Model(
        gemma3_text.ModelArgs(
            model_type="gemma3_text",
            hidden_size=32,
            num_hidden_layers=3,
            intermediate_size=48,
            num_attention_heads=2,
            head_dim=16,
            vocab_size=VOCAB,
            query_pre_attn_scalar=16,
            sliding_window=WINDOW,
            sliding_window_pattern=3,
        )
    )


def _mimo() -> Any:
    return mimo_v2_flash.Model(
        mimo_v2_flash.ModelArgs(
            model_type="mimo_v2_flash",
            num_experts_per_tok=2,
            hybrid_layer_pattern=[0, 1, 1],
            moe_layer_freq=[0, 0, 1],
            add_swa_attention_sink_bias=True,
            add_full_attention_sink_bias=False,
            sliding_window_size=WINDOW,
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=48,
            moe_intermediate_size=16,
            num_hidden_layers=3,
            num_attention_heads=2,
            num_key_value_heads=1,
            n_shared_experts=None,
            n_routed_experts=4,
            routed_scaling_factor=None,
            topk_method="noaux_tc",
            scoring_func="sigmoid",
            norm_topk_prob=True,
            n_group=1,
            topk_group=1,
            max_position_embeddings=512,
            layernorm_epsilon=1e-5,
            rope_theta=1e4,
            swa_rope_theta=1e3,
            swa_num_attention_heads=2,
            swa_num_key_value_heads=1,
            head_dim=16,
            v_head_dim=8,
            swa_head_dim=16,
            swa_v_head_dim=8,
            partial_rotary_factor=0.5,
        )
    )


def _step() -> Any:
    return step3p5.Model(
        step3p5.ModelArgs(
            model_type="step3p5",
            hidden_size=32,
            num_hidden_layers=3,
            vocab_size=VOCAB,
            num_attention_heads=2,
            num_attention_groups=1,
            head_dim=16,
            intermediate_size=48,
            sliding_window=WINDOW,
            layer_types=["full_attention", "sliding_attention", "sliding_attention"],
            moe_num_experts=4,
            moe_top_k=2,
            moe_intermediate_size=16,
            share_expert_dim=16,
            moe_layers_enum="2",
        )
    )


def _deepseek() -> Any:
    return deepseek_v32.Model(
        deepseek_v32.ModelArgs(
            vocab_size=VOCAB,
            hidden_size=32,
            index_head_dim=16,
            index_n_heads=4,
            index_topk=4,
            intermediate_size=48,
            moe_intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            kv_lora_rank=16,
            q_lora_rank=16,
            qk_rope_head_dim=8,
            v_head_dim=16,
            qk_nope_head_dim=8,
            max_position_embeddings=512,
        )
    )


# kind -> (trunk, the kinds of cache it must have); the models' own make_cache builds them.
MODELS = {
    "plain": (lambda: tiny_llama(3, vocab_size=VOCAB), {KVCache}),
    "quantised": (lambda: tiny_llama(3, vocab_size=VOCAB, head_dim=32), {QuantizedKVCache}),
    "rotating": (_sliding, {RotatingKVCache, KVCache}),
    "recurrent": (_mamba, {ArraysCache}),
    "gated delta + attention": (_qwen, {ArraysCache, KVCache}),
    "recurrent + rotating": (_gemma, {ArraysCache, RotatingKVCache}),
    "gated delta + experts": (_qwen_next, {ArraysCache, KVCache}),
    "mamba + attention": (_nemotron, {ArraysCache, KVCache}),
    "rotating, gemma": (_gemma3, {RotatingKVCache, KVCache}),
    "rotating, mimo": (_mimo, {RotatingKVCache, KVCache}),
    "rotating, step": (_step, {RotatingKVCache, KVCache}),
    "indexer": (_deepseek, {CacheList}),
    "chunked": (_llama4, {ChunkedKVCache, KVCache}),
    "cache list": (_falcon, {CacheList}),
}
HYBRIDS = ("gated delta + attention", "gated delta + experts", "mamba + attention")
_built: dict[str, Any] = {}


def trunk_of(kind: str) -> Any:
    """The one trunk of a kind: built when it is first asked for."""
    if kind not in _built:
        mx.random.seed(1)
        _built[kind] = MODELS[kind][0]()
        if kind not in ("plain", "quantised", "rotating", "recurrent"):
            randomise_matrices(_built[kind])
    return _built[kind]


def randomise_matrices(trunk: Any) -> None:
    """Louder weights than a model's initialisation, so that a wrong state is seen in the logits."""
    mx.eval(trunk.parameters())
    keep = {n: v for n, v in tree_flatten(trunk.parameters()) if v.ndim < 2}
    randomise(trunk, 5)
    trunk.load_weights(list(keep.items()), strict=False)
