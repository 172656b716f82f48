"""The law on the device: MLX logits to small supports on the host, or to token ids.

The twin of ``sampling``. The vocabulary is never sorted: a row is cut into blocks, and the k
highest tokens lie in the k blocks with the highest maxima. Only candidates, one partial sum per
4,096 tokens and a flag reach the host, where the law is finished in float64. With no filter at
all, or none that cuts much of a flat row, the float32 row goes to the host whole. On a CPU all of
it is done by mtplx's own kernel, or without it by NumPy in the same way.

Logits of any float type are taken as float32. Bias and penalties are applied there in float32, and
the mass of the vocabulary, which only top-p and min-p thresholds see, is summed in float32 in three
levels, or on a CPU in float64 of float32 terms: with the same uniform the token is the reference's,
save for near-ties within 2e-6 of a cumulative threshold, and save for tokens at the top-k cut-off
whose logits bias or penalties have made equal up to float32 rounding.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import ArrayLike, NDArray

from .device import on_cpu as _on_cpu
from .distribution import Floats, SparseDistribution, inverse_cdf
from .native import status as native_status
from .penalties import bias_amounts, penalty_amounts, repeated_ids
from .sampler_config import SamplerConfig
from .sampling import kept_in_order, law_of_processed, require_finite_row, tempered_weights

__all__ = [
    "apply_penalties_mlx",
    "sample_token_ids_from_mlx_logits",
    "sparse_distribution_from_mlx_logits",
    "sparse_distributions_from_mlx_logits",
]

_BLOCK = 64
# How many candidates are tried first where top-p or min-p alone decide, and how they grow.
_FIRST_CANDIDATES, _GROWTH = 256, 8
# A support that may be a larger part of the vocabulary than 1/4 is found on the host, at half the
# cost: such a row is flat, and goes there whole.
_LARGE_PART = 4
# Outside this range float32 cannot hold every logit / temperature: such rows go to the host whole.
_DEVICE_TEMPERATURES = (1e-20, 1e30)
_FLOAT32_MAX = float(np.finfo(np.float32).max)

Counts = Mapping[int, int]


# --- device half ------------------------------------------------------------------------------


def _blocks(rows: mx.array, fill: float) -> mx.array:
    """(R, n) as (R, ceil(n / 64), 64), padded with ``fill``."""
    count, size = rows.shape
    if size % _BLOCK:
        rows = mx.pad(rows, [(0, 0), (0, -size % _BLOCK)], constant_values=fill)
    return rows.reshape(count, -1, _BLOCK)


def _rank_keys(values: mx.array, ids: mx.array) -> mx.array:
    """uint64 keys that ascend as float32 values descend, ties as ids ascend.

    The bits of a float, with the sign bit flipped (all bits, if negative), order as the floats
    do. Adding 0 makes -0.0 the equal of 0.0.
    """
    bits = (values + 0.0).view(mx.uint32)
    ascending = mx.where(bits >> 31, ~bits, bits | 0x80000000)
    return ((~ascending).astype(mx.uint64) << 32) | ids.astype(mx.uint64)


def _lowest_keys(keys: mx.array, count: int) -> mx.array:
    if count < keys.shape[-1]:
        keys = mx.partition(keys, count - 1, axis=-1)[..., :count]
    return mx.sort(keys, axis=-1)


def _key_ids(keys: mx.array) -> mx.array:
    return (keys & 0xFFFFFFFF).astype(mx.uint32)


def _deterministic_mlx_top_k_support(logits: mx.array, top_k: int) -> tuple[mx.array, mx.array]:
    """The ``top_k`` highest tokens of each row: value descending, then id ascending.

    logits: (..., vocab) float32 without NaN, 1 <= top_k <= vocab. Returns ids (..., top_k) uint32
    and their values. A token that beats all but k - 1 others lies in a block whose maximum beats
    those of all but k - 1 other blocks (under the same order, ties included), so k blocks do.
    """
    rows = logits.reshape(-1, logits.shape[-1])
    shape = (*logits.shape[:-1], top_k)
    vocab = rows.shape[1]
    if top_k * _BLOCK * 2 >= vocab:
        keys = _rank_keys(rows, mx.arange(vocab, dtype=mx.uint32)[None])
    else:
        blocks = _blocks(rows, -float("inf"))
        highest = _rank_keys(blocks.max(axis=-1), mx.arange(blocks.shape[1], dtype=mx.uint32)[None])
        chosen = _key_ids(_lowest_keys(highest, top_k))
        values = mx.take_along_axis(blocks, chosen[..., None], axis=1)
        ids = chosen[..., None] * _BLOCK + mx.arange(_BLOCK, dtype=mx.uint32)
        keys = _rank_keys(values, ids).reshape(rows.shape[0], -1)
    top_ids = _key_ids(_lowest_keys(keys, top_k))
    return top_ids.reshape(shape), mx.take_along_axis(rows, top_ids, axis=-1).reshape(shape)


def _tempered_mass(rows: mx.array, highest: mx.array, temperature: float) -> mx.array:
    """Partial sums of exp((row - highest) / temperature): (R, n), added up on the host."""
    weights = mx.exp((rows - highest) / temperature)
    return _blocks(_blocks(weights, 0.0).sum(axis=-1), 0.0).sum(axis=-1)


def _device_amounts(amounts: Floats) -> mx.array:
    """Amounts to add to logits, as float32: a finite one stays finite, -inf stays -inf."""
    finite = np.clip(amounts, -_FLOAT32_MAX, _FLOAT32_MAX)
    return mx.array(np.where(np.isinf(amounts), amounts, finite).astype(np.float32))


def _broken_rows(rows: mx.array) -> mx.array:
    """(R,) true where a row holds NaN or +inf; -inf alone is legitimate."""
    return mx.any(mx.logical_not(rows < float("inf")), axis=-1)


# --- host half --------------------------------------------------------------------------------


def _host_sparse_distribution(
    logits: ArrayLike,
    config: SamplerConfig,
    *,
    token_ids: NDArray[np.integer] | None = None,
    vocab_size: int | None = None,
    mass: float | None = None,
) -> SparseDistribution:
    """The law in float64, on a whole row or on the support that the device has found.

    logits: (n,) float32, bias and penalties applied. Without ``token_ids`` it is the whole row.
    With them: the n highest in exact order, of a vocabulary of ``vocab_size`` whose tempered
    weights, relative to the highest, add up to ``mass``. Ids come out ascending.
    """
    values = np.asarray(logits, dtype=np.float32).astype(np.float64).reshape(-1)
    if token_ids is None:
        probs = law_of_processed(values, config)
        ids = np.flatnonzero(probs)
        return SparseDistribution.unchecked(ids, probs[ids], values.size)
    if config.temperature <= 0:
        return SparseDistribution.one_hot(int(token_ids[0]), int(vocab_size or 0))
    weights = tempered_weights(values, values[0], config.temperature)
    total = weights.sum() if mass is None else mass
    keep = kept_in_order(weights / total, config.top_p, config.min_p) & (weights > 0)
    return SparseDistribution(token_ids[keep].astype(np.int64), weights[keep], int(vocab_size or 0))


def _kernels() -> Any:
    """The module with the CPU kernels, None where there is none or the device is another."""
    return native_status().native if _on_cpu() else None


def _host_mass(row: NDArray[np.float32], highest: np.float32, temperature: float) -> float:
    """The sum of exp((row - highest) / temperature) where the device is a CPU.

    NumPy's float32 exp takes 1 ns a number there, MLX's 17.
    """
    with np.errstate(over="ignore"):  # a bias of -1e38 may become -inf: its weight is 0 either way
        weights = (row - highest) / np.float32(temperature)
    return float(np.exp(weights, out=weights).sum(dtype=np.float64))


def _raise_if_broken(rows: mx.array, broken: NDArray[np.bool_], highest: Floats) -> None:
    for index in np.flatnonzero(broken | np.isneginf(highest)):
        require_finite_row(np.asarray(rows[int(index)]), f"logits row {int(index)}")


# --- public -----------------------------------------------------------------------------------


def apply_penalties_mlx(
    logits: mx.array,
    token_counts: Counts | None,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    penalty_overlay: Mapping[int, float] | None = None,
) -> mx.array:
    """``sampling.apply_penalties`` on the device.

    logits: (..., vocab), all rows with one history. Inactive, it returns ``logits`` itself, else
    a float32 array. Ids are checked before they reach the device: ``ValueError`` for one outside
    the vocabulary.
    """
    found = penalty_amounts(
        token_counts, presence_penalty, frequency_penalty, penalty_overlay, logits.shape[-1]
    )
    if found is None:
        return logits
    ids, amounts = found
    row = logits.astype(mx.float32)
    return row.at[..., mx.array(ids)].subtract(_device_amounts(amounts))


def _processed_rows(
    rows: mx.array,
    config: SamplerConfig,
    counts: Sequence[Counts | None],
    overlay: Mapping[int, float] | None,
    prompt_ids: Iterable[int] | None,
) -> mx.array:
    """Steps 2 and 3 of the law on (R, vocab) float32, each row with its own history."""
    vocab = rows.shape[1]
    bias = bias_amounts(config, vocab)
    if bias is not None:
        rows = rows.at[:, mx.array(bias[0])].add(_device_amounts(bias[1]))
    prompt = None if prompt_ids is None else list(prompt_ids)  # an iterator serves every row
    repeats = [repeated_ids(config, c, prompt, vocab) for c in counts]
    if any(r is not None for r in repeats):
        pairs = [(i, r) for i, r in enumerate(repeats) if r is not None]
        where = mx.array(np.concatenate([np.full(r.size, i) for i, r in pairs]))
        ids = mx.array(np.concatenate([r for _, r in pairs]))
        penalty = config.repetition_penalty
        factor = mx.where(rows[where, ids] > 0, 1.0 / penalty, penalty)
        rows = rows.at[where, ids].multiply(factor)
    presence, frequency = config.presence_penalty, config.frequency_penalty
    if overlay or ((presence or frequency) and any(counts)):
        done = [
            apply_penalties_mlx(rows[i], c, presence, frequency, overlay)
            for i, c in enumerate(counts)
        ]
        rows = mx.stack(done)
    return rows


def sparse_distributions_from_mlx_logits(
    logits: mx.array,
    config: SamplerConfig,
    *,
    token_counts: Sequence[Counts | None] | None = None,
    penalty_overlay: Mapping[int, float] | None = None,
    prompt_ids: Iterable[int] | None = None,
) -> list[SparseDistribution]:
    """The law of each row of ``logits``, (rows, vocab): the one function that turns logits into p.

    token_counts: one history a row (output token id -> times emitted), or None. The rest as in
    ``sampling.distribution_from_logits``, with the same errors. Ids come out ascending.
    """
    if logits.ndim != 2 or 0 in logits.shape:
        raise ValueError(f"logits must be (rows, vocab), not {tuple(logits.shape)}")
    vocab = logits.shape[1]
    native = _kernels()
    history = (token_counts, prompt_ids, penalty_overlay, config.logit_bias)
    if native is not None and all(part is None for part in history):
        return _laws_by_kernel(native, logits, config)
    counts = [None] * logits.shape[0] if token_counts is None else list(token_counts)
    if len(counts) != logits.shape[0]:
        raise ValueError(f"{logits.shape[0]} rows of logits but {len(counts)} token_counts")
    rows = _processed_rows(logits.astype(mx.float32), config, counts, penalty_overlay, prompt_ids)
    if native is not None:
        return _laws_by_kernel(native, rows, config)
    if config.temperature <= 0:
        return _distributions(rows, config, 1, needs_mass=False)
    nucleus = config.top_p < 1.0 or config.min_p > 0.0
    on_device = _DEVICE_TEMPERATURES[0] <= config.temperature <= _DEVICE_TEMPERATURES[1]
    if 0 < config.top_k < vocab and (on_device or not nucleus):
        return _distributions(rows, config, config.top_k, needs_mass=nucleus)
    if nucleus and on_device:
        return _distributions(rows, config, min(_FIRST_CANDIDATES, vocab), needs_mass=True)
    whole = np.asarray(rows)
    return [_host_sparse_distribution(row, config) for row in whole]


def _laws_by_kernel(native: Any, rows: mx.array, config: SamplerConfig) -> list[SparseDistribution]:
    vocab, limits = rows.shape[1], (config.temperature, config.top_p, config.min_p, config.top_k)
    if config.temperature <= 0 or limits[1:3] != (1.0, 0.0) or 0 < config.top_k < vocab:
        found = [law[:2] for law in native.law(rows, *limits)]
    else:
        found = [_supported(*law) for law in native.whole_law(rows, config.temperature)]
    for i, (ids, _) in enumerate(found):
        if not ids.size:
            require_finite_row(np.asarray(rows[i].astype(mx.float32)), f"logits row {i}")
    return [SparseDistribution.unchecked(ids, probs, vocab) for ids, probs in found]


def _supported(probs: Floats, positive: int) -> tuple[NDArray[np.int64], Floats]:
    """Ids and probabilities of a whole law, of which so many are positive."""
    whole = positive == probs.size
    return (_all_ids(positive), probs) if whole else (np.flatnonzero(probs), probs[probs > 0])


@lru_cache(maxsize=4)
def _all_ids(count: int) -> NDArray[np.int64]:
    ids = np.arange(count)
    ids.setflags(write=False)  # many laws hold it
    return ids


def _distributions(
    rows: mx.array, config: SamplerConfig, candidates: int, *, needs_mass: bool
) -> list[SparseDistribution]:
    find = _candidates_on_host if _on_cpu() else _candidates_on_device
    ids, values, masses = find(rows, candidates, config.temperature if needs_mass else None)
    vocab = rows.shape[1]
    out = []
    for i in range(rows.shape[0]):
        law = _host_sparse_distribution(
            values[i], config, token_ids=ids[i], vocab_size=vocab, mass=masses[i]
        )
        # Without top-k, a support that fills all candidates may go on behind them.
        limited = 0 < config.top_k < vocab
        if needs_mass and not limited and law.token_ids.size == candidates < vocab:
            more = candidates * _GROWTH
            if more * _LARGE_PART > vocab:
                law = _host_sparse_distribution(np.asarray(rows[i]), config)
            else:
                law = _distributions(rows[i : i + 1], config, more, needs_mass=True)[0]
        out.append(law)
    return out


def _candidates_on_device(
    rows: mx.array, count: int, temperature: float | None
) -> tuple[NDArray[np.uint32], NDArray[np.float32], list[float | None]]:
    """Of each row the ``count`` highest ids and their values, and the mass at a temperature."""
    ids, values = _deterministic_mlx_top_k_support(rows, count)
    late = [_broken_rows(rows)]
    if temperature is not None:
        late.append(_tempered_mass(rows, values[:, :1], temperature))
    mx.eval(ids, values, rows, *late)
    host_values = np.asarray(values)
    _raise_if_broken(rows, np.asarray(late[0]), host_values[:, 0])
    masses: list[float | None] = [None] * rows.shape[0]
    if temperature is not None:
        masses = np.asarray(late[1]).sum(axis=1, dtype=np.float64).tolist()
    return np.asarray(ids), host_values, masses


def _candidates_on_host(
    rows: mx.array, count: int, temperature: float | None
) -> tuple[list[NDArray[np.int64]], list[NDArray[np.float32]], list[float | None]]:
    """The same where the device is a CPU, which shares its memory: NumPy is faster there."""
    ids, values, masses = [], [], []
    for i, row in enumerate(np.asarray(rows)):
        if not (row < np.inf).all() or np.isneginf(row).all():
            require_finite_row(row, f"logits row {i}")
        found = _highest_on_host(row, count)
        ids.append(found)
        values.append(row[found])
        highest = row[found[0]]
        masses.append(None if temperature is None else _host_mass(row, highest, temperature))
    return ids, values, masses


def _highest_on_host(row: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """The ids of the ``count`` highest values, value descending, then id ascending.

    All of them reach the ``count``-th highest of the blocks' maxima.
    """
    maxima = row
    if count * _BLOCK * 2 < row.size:
        maxima = row[: row.size // _BLOCK * _BLOCK].reshape(-1, _BLOCK).max(axis=1)
    lowest = np.partition(maxima, maxima.size - count)[maxima.size - count]
    ids = np.flatnonzero(row >= lowest)
    return ids[np.lexsort((ids, -row[ids]))[:count]]


def sparse_distribution_from_mlx_logits(
    logits: mx.array,
    config: SamplerConfig,
    *,
    token_counts: Counts | None = None,
    penalty_overlay: Mapping[int, float] | None = None,
    prompt_ids: Iterable[int] | None = None,
) -> SparseDistribution:
    """The law of one row, (vocab,) or (1, vocab); see ``sparse_distributions_from_mlx_logits``."""
    row = logits[None] if logits.ndim == 1 else logits
    if row.ndim != 2 or row.shape[0] != 1:
        raise ValueError(f"logits must be (vocab,) or (1, vocab), not {tuple(logits.shape)}")
    return sparse_distributions_from_mlx_logits(
        row,
        config,
        token_counts=[token_counts],
        penalty_overlay=penalty_overlay,
        prompt_ids=prompt_ids,
    )[0]


def sample_token_ids_from_mlx_logits(
    logits: mx.array, config: SamplerConfig, *, uniforms: ArrayLike | None = None
) -> mx.array:
    """One token id a row, (rows,) uint32, from (rows, vocab) logits, by any ``config``.

    uniforms: (rows,) in [0, 1), one a row, inverse CDF in ascending id order as in
    ``sampling.sample_from_distribution``; by default from the operating system's entropy.
    """
    laws = sparse_distributions_from_mlx_logits(logits, config)
    if uniforms is None:
        draws = np.random.default_rng().random(len(laws))
    else:
        draws = np.asarray(uniforms, dtype=np.float64)
    if draws.shape != (len(laws),) or not ((draws >= 0) & (draws < 1)).all():
        raise ValueError(f"uniforms must be ({len(laws)},) values in [0, 1)")
    return mx.array([inverse_cdf(p, float(u)) for p, u in zip(laws, draws, strict=True)], mx.uint32)
