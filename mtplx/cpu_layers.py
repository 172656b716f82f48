"""Puts the CPU kernels of ``mtplx-kernels`` under a loaded trunk: the one place that knows them.

``fuse`` swaps the modules of a trunk *instance* of the Llama kind (``SERVED``): every matrix goes
into the kernels' layout, as it is stored, and a run over ordinary KV caches becomes one operation:
of one sequence, or of several in lockstep. A row's result is then bitwise the same in any company:
1 row or 8, alone or beside other sequences, any threads, any room in the cache. What the operation
does not do (other caches or masks) goes mlx-lm's own way over the same matrices, decided by the
shapes of each call.

The kernels give float32 and keep float32 caches; over quantised weights they round activations to
whole numbers of 16 bits a group. They have no gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten
from mlx_lm.models import llama, qwen2, qwen3
from mlx_lm.models.cache import KVCache
from mlx_lm.models.rope_utils import Llama3RoPE

from .cpu_cache import Bank, BankedCache, bank_of
from .device import on_cpu
from .native import status

__all__ = ["SERVED", "fuse", "is_fused", "plain_weights", "serves", "takes"]

SERVED = ("llama", "mistral", "qwen2", "qwen3")
_BLOCKS = (llama.TransformerBlock, qwen2.TransformerBlock, qwen3.TransformerBlock)
# Rows that are run at once; with more, what MLX needs around them does not count.
_STEP_ROWS = 32
_MODELS = (llama.LlamaModel, qwen2.Qwen2Model, qwen3.Qwen3Model)


def serves(model_type: str | None) -> bool:
    """Whether ``fuse`` is for this ``model_type`` on the default device, with what there is."""
    return on_cpu() and model_type in SERVED and status().native is not None


class PackedRows:
    """A packed matrix in the place of a module's ``weight``: ``rows[ids]`` are float32 rows."""

    def __init__(self, matrix: Any):
        self.matrix = matrix

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return self.matrix.shape

    def __getitem__(self, ids: mx.array) -> mx.array:
        return self.matrix.rows(ids)


class _Packed(nn.Module):
    """What ``PackedLinear`` and ``PackedEmbedding`` share; copies share the matrix."""

    def __init__(self, matrix: Any, bias: mx.array | None = None):
        super().__init__()
        self.matrix, self._bias = matrix, bias
        self.weight = PackedRows(matrix)

    def __deepcopy__(self, memo: Any) -> _Packed:
        return type(self)(self.matrix, self._bias)

    def _all_rows(self) -> mx.array:
        return self.matrix.rows(mx.arange(self.matrix.shape[0]))


class PackedLinear(_Packed):
    """A linear layer over a packed matrix: x (..., K) -> (..., N) float32."""

    def __call__(self, x: mx.array) -> mx.array:
        return self.matrix(x)

    def to_plain(self) -> nn.Linear:
        """The same layer in float32, as MLX has it."""
        n, k = self.matrix.shape
        plain = nn.Linear(k, n, bias=self._bias is not None)
        plain.weight = self._all_rows()
        if self._bias is not None:
            plain.bias = self._bias.astype(mx.float32)
        return plain


class PackedEmbedding(_Packed):
    """An embedding over a packed matrix: ids (...) -> (..., K) float32."""

    def __call__(self, ids: mx.array) -> mx.array:
        return self.matrix.rows(ids)

    def as_linear(self, x: mx.array) -> mx.array:
        """The tied output head: x (..., K) -> (..., N) float32."""
        return self.matrix(x)

    def to_plain(self) -> nn.Embedding:
        """The same embedding in float32, as MLX has it."""
        plain = nn.Embedding(*self.matrix.shape)
        plain.weight = self._all_rows()
        return plain


class Stack:
    """Layers as one operation. A deep copy is None: the copied layers' weights may change."""

    def __init__(self, layers: Sequence[Any], eps: float, norm: mx.array | None = None):
        self.layers, self.eps, self.norm = [layer for layer, _ in layers], eps, norm
        self._cache_shape = layers[0][1]
        self._by_levels: dict[tuple[int, ...], Any] = {}

    def __deepcopy__(self, memo: Any) -> None:
        return None

    def __call__(
        self, x: mx.array, caches: Sequence[KVCache], levels: tuple[int, ...] = ()
    ) -> mx.array:
        """Rows (B, R, D) -> (B, R, (1 + len(levels)) D); the caches take R rows a sequence."""
        (batch, rows, _), offset = x.shape, caches[0].offset
        bank = self._bank(caches, batch, rows)
        out, bank.array = self._run(levels)(x, offset, bank.array)
        for cache in caches:
            cache.offset = offset + rows
        return out

    def head_step(
        self, combine: Any, state: mx.array, tokens: mx.array, cache: KVCache
    ) -> mx.array:
        """An MTP head's rows through its one layer: state (R, F), tokens (R,) -> (R, D)."""
        bank = self._bank([cache], 1, len(tokens))
        call = self._run(()), state, tokens.tolist(), cache.offset, bank.array
        out, bank.array = combine.step(*call)
        cache.offset += len(tokens)
        return out

    def trunk_step(
        self,
        embedding: Any,
        output: Any,
        tokens: Sequence[int],
        caches: Sequence[KVCache],
        levels: tuple[int, ...],
    ) -> tuple[mx.array, mx.array]:
        """Tokens (R,) of one sequence -> features (R, F) and logits (R, V), both computed."""
        offset, rows = caches[0].offset, len(tokens)
        bank = self._bank(caches, 1, rows)
        call = embedding, output, tokens, offset, bank.array
        features, logits, bank.array = self._run(levels).step(*call)
        for cache in caches:
            cache.offset = offset + rows
        return features, logits

    def _run(self, levels: tuple[int, ...]) -> Any:
        run = self._by_levels.get(levels)
        if run is None:
            native = status().native
            run = native.Layers(self.layers, self.eps, self.norm, levels)
            self._by_levels[levels] = run
        return run

    def _bank(self, caches: Sequence[KVCache], batch: int, rows: int) -> Bank:
        bank = bank_of(caches, batch, *self._cache_shape)
        bank.make_room(caches[0].offset, rows)
        return bank


def _holds(cache: Any, batch: int) -> bool:
    if type(cache) is BankedCache:
        return cache.bank.batch == batch
    if type(cache) is not KVCache:
        return False
    return cache.keys is None or (cache.keys.dtype == mx.float32 and len(cache.keys) == batch)


def fit(batch: int, caches: Sequence[Any]) -> bool:
    """Whether these are ordinary float32 caches of so many sequences, all of one length."""
    return all(_holds(cache, batch) and cache.offset == caches[0].offset for cache in caches)


def takes(x: mx.array, caches: Sequence[Any]) -> bool:
    """Whether ``Stack`` runs x (B, R, D) over these caches."""
    return x.ndim == 3 and x.size > 0 and fit(len(x), caches)


class _FusedBlock:
    """A decoder layer that is one operation where ``Stack`` can run it, else what it was."""

    stack: Stack | None = None

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        causal = (mask is None and x.shape[1] == 1) or (isinstance(mask, str) and mask == "causal")
        if self.stack is not None and causal and takes(x, [cache]):
            return self.stack(x, [cache])
        return super().__call__(x, mask, cache)  # type: ignore[misc]


class _FusedModel:
    """Embedding, layers and final norm, with the layers as one operation where that can be."""

    stack: Stack | None = None
    embed_tokens: Any

    def __call__(
        self, inputs: mx.array, cache: Any = None, input_embeddings: mx.array | None = None
    ) -> mx.array:
        if input_embeddings is None:
            out = self.run_levels(inputs, cache, ())
            if out is not None:
                return out
        return super().__call__(inputs, cache, input_embeddings)  # type: ignore[misc]

    def run_levels(self, tokens: mx.array, cache: Any, levels: tuple[int, ...]) -> mx.array | None:
        """Tokens (B, L) -> the normed output and the layers ``levels``, each by its rms: features.

        (B, L, (1 + len(levels)) D); None where it has to go the ordinary way.
        """
        stack = self._stack_for(len(tokens), cache) if tokens.ndim == 2 and tokens.size else None
        return None if stack is None else stack(self.embed_tokens(tokens), cache, levels)

    def step(
        self, tokens: Sequence[int], cache: Any, levels: tuple[int, ...], output: Any
    ) -> tuple[mx.array, mx.array] | None:
        """A few tokens of one sequence -> features (L, F) and logits (L, V), computed at once.

        MLX's way to its thread and back takes a tenth of such a forward. output: the module of the
        output head. None where it has to go another way.
        """
        packed = isinstance(self.embed_tokens, _Packed) and isinstance(output, _Packed)
        few = packed and 0 < len(tokens) <= _STEP_ROWS
        stack = self._stack_for(1, cache) if few else None
        if stack is None:
            return None
        return stack.trunk_step(self.embed_tokens.matrix, output.matrix, tokens, cache, levels)

    def _stack_for(self, batch: int, cache: Any) -> Stack | None:
        """The layers as one operation, where it can run over these caches."""
        if self.stack is None or not cache or len(cache) != len(self.stack.layers):
            return None
        return self.stack if fit(batch, cache) else None


@functools.cache
def _fused_class(mixin: type, cls: type) -> type:
    """A subclass for single instances; made anew, e.g. by a head, it is what ``cls`` is."""
    return type(cls.__name__, (mixin, cls), {})


def plain_weights(module: nn.Module, dtype: mx.Dtype = mx.float32) -> mx.array:
    """The weights of a linear layer or an embedding of whatever kind, (N, K)."""
    if isinstance(module, _Packed):
        return module.to_plain().weight
    if "scales" not in module:
        return module.weight.astype(dtype)
    affine = module.mode == "affine"  # other modes keep 8-bit scales of their own
    scales = module.scales.astype(dtype) if affine else module.scales
    biases = module.biases.astype(dtype) if affine else None
    weight = mx.dequantize(
        module.weight, scales, biases, group_size=module.group_size, bits=module.bits,
        mode=module.mode,
    )  # fmt: skip
    return weight.astype(dtype)


def _pack(module: nn.Module) -> Any:
    """A module's weights in the kernels' layout: as stored, or in float32 if they have no such."""
    bias = module.bias if "bias" in module else None
    matrix = status().native.Matrix
    if (
        "scales" in module
        and module.mode == "affine"
        and module.bits in (4, 8)
        and module.group_size in (32, 64, 128)
        and module.scales.dtype == module.biases.dtype
    ):
        return matrix.quantized(
            module.weight, module.scales, module.biases, module.group_size, module.bits, bias
        )
    weight = plain_weights(module) if "scales" in module else module.weight
    return matrix.dense(weight, bias)


def _frequencies(rope: Any) -> list[float] | None:
    """Radians a position of each rotated pair; None for a rotation that the kernels do not do."""
    if type(rope) is nn.RoPE and not rope.traditional:
        pairs = range(0, rope.dims, 2)
        return [rope.scale * float(rope.base) ** (-i / rope.dims) for i in pairs]
    if type(rope) is Llama3RoPE and not rope.traditional:
        return [1.0 / f for f in rope._freqs.astype(mx.float32).tolist()]
    return None


def native_layer(
    block: Any, window: int = 0, pack: Any = None
) -> tuple[Any, tuple[int, int]] | None:
    """A decoder layer for ``Stack``: the native layer and its cache's (heads, size), or None.

    pack: what makes a matrix of a linear module; by default the one a ``PackedLinear`` has.
    """
    attention, mlp = block.self_attn, block.mlp
    frequencies = _frequencies(attention.rope)
    if frequencies is None or not isinstance(block, _BLOCKS):
        return None
    take = pack or (lambda module: module.matrix)
    parts = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj,
             mlp.gate_proj, mlp.up_proj, mlp.down_proj]  # fmt: skip
    query_norm = getattr(attention, "q_norm", None)
    key_norm = getattr(attention, "k_norm", None)
    norms = [block.input_layernorm, block.post_attention_layernorm, query_norm, key_norm]
    eps = {norm.eps for norm in norms if norm is not None}
    if len(eps) != 1:
        return None
    layer = status().native.layer(
        [take(part) for part in parts],
        [None if norm is None else norm.weight for norm in norms],
        eps.pop(), attention.n_heads, attention.n_kv_heads, attention.scale, window, frequencies,
    )  # fmt: skip
    keys, _ = parts[1].weight.shape
    return layer, (attention.n_kv_heads, keys // attention.n_kv_heads)


def _swap_matrices(model: nn.Module) -> None:
    """Every linear layer and embedding becomes a packed one; its arrays are let go at once."""
    kinds: dict[Any, type[_Packed]] = {
        nn.Linear: PackedLinear, nn.QuantizedLinear: PackedLinear,
        nn.Embedding: PackedEmbedding, nn.QuantizedEmbedding: PackedEmbedding,
    }  # fmt: skip
    found = [(name, module) for name, module in model.named_modules() if type(module) in kinds]
    while found:
        name, module = found.pop()
        bias = module.bias if "bias" in module else None
        new = kinds[type(module)](_pack(module), bias)
        model.update_modules(tree_unflatten([(name, new)]))
        del module


def is_fused(trunk: Any) -> bool:
    """Whether a trunk's layers run as one operation of the kernels."""
    return isinstance(getattr(trunk, "model", None), _FusedModel)


def fuse(trunk: Any) -> bool:
    """Put a loaded trunk of a ``SERVED`` kind onto the kernels, in place.

    Returns whether its layers became one operation; its matrices are packed in any case. To be
    called only where ``serves`` says so.
    """
    model = trunk.model
    _swap_matrices(trunk)
    trunk.set_dtype(mx.float32)
    mx.eval(trunk)
    if not isinstance(model, _MODELS):
        return False
    size = getattr(model, "sliding_window", None) or 0
    made = [
        native_layer(layer, size if getattr(layer, "use_sliding", False) else 0)
        for layer in model.layers
    ]
    layers = [layer for layer in made if layer is not None]
    if len(layers) != len(made) or len({shape for _, shape in layers}) != 1:
        return False
    for layer, native in zip(model.layers, layers, strict=True):
        _become(layer, _FusedBlock, Stack([native], model.norm.eps))
    _become(model, _FusedModel, Stack(layers, model.norm.eps, model.norm.weight))
    return True


def _become(module: nn.Module, mixin: type, stack: Stack) -> None:
    """Change one instance's class, never a class."""
    object.__setattr__(module, "__class__", _fused_class(mixin, type(module)))
    module.stack = stack
