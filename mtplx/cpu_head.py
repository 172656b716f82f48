"""An attached MTP head on the CPU kernels: a draft step is two calls over packed weights.

Both have computed what they return: waiting for MLX's thread would take as long as the work.

The head's matrices are rounded to ``BITS`` bits when it is attached. That changes what it proposes,
a little, and nothing else: a draft carries the law that it was drawn from, whatever gave it.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from .cpu_layers import PackedEmbedding, Stack, fit, native_layer
from .mtp_patch import AttachedHead, MTPHead
from .native import status

# Drafts are kept as often as with 8 bits (57 % of the first ones, 120 prompts, SmolLM2); in groups
# of 64 fewer seemed to be (24 prompts).
BITS, GROUP_SIZE = 4, 32


class FusedHead(AttachedHead):
    """``AttachedHead`` over packed copies of the head's weights; the head itself stays as it is.

    What is not one sequence over its own ordinary cache goes the ordinary way, in full precision.
    """

    def __init__(self, attached: AttachedHead, combine: Any, stack: Stack, rows: Any):
        vars(self).update(vars(attached))
        self._rows = None  # the packed ones are in their place
        self._combine, self._stack, self._packed_rows = combine, stack, rows

    def forward(self, state: mx.array, tokens: mx.array, cache: Any) -> mx.array:
        """See ``AttachedHead.forward``."""
        if state.ndim != 2 or not state.size or not fit(1, [cache]):
            return super().forward(state, tokens, cache)
        return self._stack.head_step(self._combine, state, tokens, cache)

    def logits(self, hidden: mx.array) -> mx.array:
        """See ``AttachedHead.logits``."""
        if self._packed_rows is None:
            return super().logits(hidden)
        return self._packed_rows.now(hidden) if hidden.ndim == 2 else self._packed_rows(hidden)

    def joined(self, logits: mx.array, hidden: mx.array, token: int) -> mx.array:
        """See ``AttachedHead.joined``."""
        return self.family.output.matrix.joined(logits, hidden, token)


def fuse(attached: AttachedHead) -> AttachedHead:
    """The same head on the CPU kernels if its trunk is on them, else ``attached`` itself."""
    family, head = attached.family, attached.head
    embedding = getattr(getattr(family.trunk, "model", None), "embed_tokens", None)
    if not isinstance(embedding, PackedEmbedding):
        return attached
    layer = native_layer(head.layer, pack=_pack_linear)
    if layer is None or head.enorm.eps != head.hnorm.eps or not _is_plain(head):
        return attached
    size = family.hidden_size
    blocks = [head.fc.weight[:, i : i + size] for i in range(0, head.fc.weight.shape[1], size)]
    if not head.embedding_first:
        blocks[:2] = blocks[1::-1]
    combine = status().native.Combine(
        embedding.matrix,
        [_pack(block) for block in blocks],
        head.enorm.weight,
        head.hnorm.weight,
        head.enorm.eps,
    )
    stack = Stack([layer], head.norm.eps, head.norm.weight)
    rows = None
    if head.vocabulary is not None:
        rows = _pack(family.output_rows(np.asarray(head.vocabulary.ids)))
    return FusedHead(attached, combine, stack, rows)


def _is_plain(head: MTPHead) -> bool:
    """Whether a head has only what the kernels' step computes."""
    own = {"embedding", "output"} & head.keys()
    return (
        head.normed and "norm" in head and not own and head.window is None and "bias" not in head.fc
    )


def rounded(weight: mx.array) -> mx.array:
    """What the packed copy of a matrix (N, K) holds, but for the 16 bits of its scales."""
    if weight.shape[1] % GROUP_SIZE:
        return weight
    packed = mx.quantize(weight.astype(mx.float32), group_size=GROUP_SIZE, bits=BITS)
    return mx.dequantize(*packed, group_size=GROUP_SIZE, bits=BITS)


def _pack(weight: mx.array, bias: mx.array | None = None) -> Any:
    """A float matrix (N, K) in the kernels' layout: ``BITS`` bits if the group size divides K."""
    native, weight = status().native, weight.astype(mx.float32)
    if weight.shape[1] % GROUP_SIZE:
        return native.Matrix.dense(weight, bias)
    packed, scales, biases = mx.quantize(weight, group_size=GROUP_SIZE, bits=BITS)
    halves = [part.astype(mx.float16) for part in (scales, biases)]
    return native.Matrix.quantized(packed, *halves, GROUP_SIZE, BITS, bias)


def _pack_linear(module: nn.Linear) -> Any:
    return _pack(module.weight, module.bias if "bias" in module else None)
