"""The public API, pinned: a change here is a change for users."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import mtplx

PUBLIC = {
    "Bundle": "(trunk: 'nn.Module', head: 'MTPHead | MTPChain | None', "
    "tokenizer: 'tokenizer.Tokenizer', provenance: 'Provenance', "
    "head_source: 'str | None' = None, head_note: 'str' = '') -> None",
    "Generation": "(text: 'str', token_ids: 'list[int]', finish_reason: 'str', seed: 'int', "
    "stats: 'Stats', logprobs: 'list[TokenLogprob] | None' = None) -> None",
    "Options": "(sampling: 'SamplerConfig' = <factory>, max_tokens: 'int' = 256, "
    "seed: 'int | None' = None, stop: 'Sequence[str]' = (), draft: 'DraftSource' = 'auto', "
    "depth: 'Depth' = 'auto', verify: 'RuleName | None' = None, chat: 'bool' = True, "
    "min_tokens: 'int' = 0, json_schema: 'str | Mapping[str, Any] | bool | None' = None, "
    "regex: 'str | None' = None, logprobs: 'bool' = False, top_logprobs: 'int' = 0, "
    "draft_model: 'object' = None) -> None",
    "SamplerConfig": "(temperature: 'float' = 0.6, top_p: 'float' = 0.95, top_k: 'int' = 20, "
    "presence_penalty: 'float' = 0.0, frequency_penalty: 'float' = 0.0, min_p: 'float' = 0.0, "
    "repetition_penalty: 'float' = 1.0, logit_bias: 'Mapping[int, float] | None' = None, "
    "banned_ids: 'Sequence[int]' = ()) -> None",
    "convert": "(model: 'str | Path', out: 'str | Path', *, bits: 'int | None' = None, "
    "group_size: 'int' = 64, head_bits: 'int | None' = None, dtype: 'str | None' = None, "
    "on_progress: 'Callable[[int, int], None] | None' = None) -> 'Conversion'",
    "generate": "(bundle: 'Bundle', prompt: 'Prompt', **options: 'Any') -> 'Generation'",
    "load": "(model: 'str | Path' = 'smollm2-135m-instruct', *, weights: 'str' = 'auto', "
    "head: 'str | Path | MTPHead | MTPChain | None' = 'auto', any_trunk: 'bool' = False) "
    "-> 'Bundle'",
    "pull": "(model: 'str | Path' = 'smollm2-135m-instruct', *, "
    "on_progress: 'Progress | None' = None, verify: 'bool' = False) -> 'Path'",
    "stream": "(bundle: 'Bundle', prompt: 'Prompt', **options: 'Any') -> 'Stream'",
    "use_blas": "(choice: 'Choice' = 'auto') -> 'BlasStatus'",
}

SAMPLING = {
    "acceptance_probability": "(target_p: 'Distribution', draft_q: 'Distribution', "
    "token_id: 'int') -> 'float'",
    "apply_penalties": "(logits: 'ArrayLike', token_counts: 'Mapping[int, int] | None', "
    "presence_penalty: 'float' = 0.0, frequency_penalty: 'float' = 0.0, "
    "penalty_overlay: 'Mapping[int, float] | None' = None) -> 'ArrayLike'",
    "apply_top_k_top_p": "(probs: 'ArrayLike', top_k: 'int' = 0, top_p: 'float' = 1.0) -> 'Floats'",
    "apply_top_p_top_k": "(probs: 'ArrayLike', top_p: 'float' = 1.0, top_k: 'int' = 0) -> 'Floats'",
    "deterministic_top_k_order": "(values: 'ArrayLike', top_k: 'int') -> 'Ids'",
    "distribution_from_logits": "(logits: 'ArrayLike', config: 'SamplerConfig', *, "
    "token_counts: 'Mapping[int, int] | None' = None, "
    "penalty_overlay: 'Mapping[int, float] | None' = None, "
    "prompt_ids: 'Iterable[int] | None' = None) -> 'Floats'",
    "residual_distribution": "(target_p: 'Distribution', draft_q: 'Distribution') "
    "-> 'Distribution'",
    "sample_from_distribution": "(probs: 'Distribution', "
    "rng: 'np.random.Generator | None' = None) -> 'int'",
    "softmax": "(logits: 'ArrayLike', temperature: 'float' = 1.0) -> 'Floats'",
    "speculative_output_marginal": "(target_p: 'Distribution', draft_q: 'Distribution') "
    "-> 'Floats'",
    "verify_one_token": "(target_p: 'Distribution', draft_q: 'Distribution', draft_token: 'int', "
    "rng: 'np.random.Generator | None' = None) -> 'SpeculativeDecision'",
}

FAST = {
    "apply_penalties_mlx": "(logits: 'mx.array', token_counts: 'Counts | None', "
    "presence_penalty: 'float' = 0.0, frequency_penalty: 'float' = 0.0, "
    "penalty_overlay: 'Mapping[int, float] | None' = None) -> 'mx.array'",
    "sample_token_ids_from_mlx_logits": "(logits: 'mx.array', config: 'SamplerConfig', *, "
    "uniforms: 'ArrayLike | None' = None) -> 'mx.array'",
    "sparse_distribution_from_mlx_logits": "(logits: 'mx.array', config: 'SamplerConfig', *, "
    "token_counts: 'Counts | None' = None, "
    "penalty_overlay: 'Mapping[int, float] | None' = None, "
    "prompt_ids: 'Iterable[int] | None' = None) -> 'SparseDistribution'",
}


def _signatures(module, names):
    return {name: str(inspect.signature(getattr(module, name))) for name in names}


def test_the_names_of_the_package():
    assert mtplx.__all__ == [
        "Bundle",
        "Chunk",
        "Generation",
        "MtplxError",
        "Options",
        "SamplerConfig",
        "Stream",
        "__version__",
        "convert",
        "generate",
        "load",
        "pull",
        "stream",
        "use_blas",
    ]
    for name in mtplx.__all__:
        assert getattr(mtplx, name) is not None


def test_signatures_of_the_package():
    assert _signatures(mtplx, PUBLIC) == PUBLIC


def test_signatures_of_the_reference():
    import mtplx.sampling

    assert _signatures(mtplx.sampling, SAMPLING) == SAMPLING
    assert set(SAMPLING) | {
        "Distribution",
        "NonFiniteLogitsError",
        "SamplerConfig",
        "SparseDistribution",
        "SpeculativeDecision",
    } == set(mtplx.sampling.__all__)


def test_signatures_of_the_twin():
    import mtplx.fast_sampling

    assert _signatures(mtplx.fast_sampling, FAST) == FAST


def test_importing_the_package_imports_neither_mlx_nor_a_blas():
    code = (
        "import sys, mtplx, mtplx.options, mtplx.cli; "
        "assert not [m for m in sys.modules if m.split('.')[0] in ('mlx', 'mlx_lm')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="nothing"):
        mtplx.nothing  # noqa: B018
