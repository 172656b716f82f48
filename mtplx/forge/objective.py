"""What training minimises: cross-entropy to the trunk's own distribution, at every draft depth.

The head is unrolled as it will be used: at depth 1 row t reads the trunk's features of token t and
the embedding of token t + 1; at depth j > 1 it reads its own output of depth j - 1 and the
embedding of token t + j, and attends to the committed rows up to t and to the rows of its own draft
(the "training-time test" of EAGLE-3, arXiv 2503.01840, section 3.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx

from ..mtp_patch import AttachedHead

# Of a softmax argument: below it, exp is 0 for all that training can tell.
_LOWEST = -30.0


class Unrolled:
    """The cache of one training window: depth 1's rows, then those of every further depth.

    Row t of depth j stands at position t + j - 1 and sees depth 1's rows up to t, and of depths 2
    to j its own row t.
    """

    def __init__(self, rows: int):
        self.rows = rows
        self.offset = -1
        self._keys: list[mx.array] = []
        self._values: list[mx.array] = []

    def next_depth(self) -> mx.array:
        """Move on by a depth; the mask of it, (rows, rows * depth), true where a row is seen."""
        self.offset += 1
        at = mx.arange(self.rows)
        own = at[:, None] == at[None]
        return mx.concatenate([at[:, None] >= at[None], *[own] * self.offset], axis=1)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """What a layer's attention calls: keys and values, (B, heads, rows, d), so far."""
        self._keys.append(keys)
        self._values.append(values)
        return mx.concatenate(self._keys, axis=2), mx.concatenate(self._values, axis=2)


def rollout(
    attached: AttachedHead, features: mx.array, tokens: mx.array, depth: int
) -> list[mx.array]:
    """The head's hidden states of each depth, (B, R, D).

    features: (B, R, F), the trunk's, of R tokens.  tokens: (B, R + depth), those and what follows.
    """
    rows = features.shape[1]
    cache = Unrolled(rows)
    state, out = features, []
    for j in range(1, depth + 1):
        mask = cache.next_depth()
        state = attached.run(state, tokens[:, j : j + rows], cache, mask)
        out.append(state)
    return out


def _exp(x: mx.array) -> mx.array:
    """Exp for x <= 0, to 2e-3 of itself where it counts: (exp(x / 64))^64 by a polynomial.

    MLX's own takes 17 ns a number on a CPU, and training would mostly wait for it; this takes 6.
    """
    y = mx.maximum(x, _LOWEST) * (1 / 64)
    out = 1 + y * (1 + y * (1 / 2 + y * (1 / 6 + y * (1 / 24))))
    for _ in range(6):
        out = mx.square(out)
    return out


def _softmax(logits: mx.array) -> tuple[mx.array, mx.array]:
    """Probabilities, and the logarithm of what they were divided by."""
    highest = logits.max(axis=-1, keepdims=True)
    weights = _exp(logits - highest)
    total = weights.sum(axis=-1, keepdims=True)
    return weights * (1 / total), (highest + mx.log(total))[..., 0]


@cache
def _compared(temperature: float, acceptance: float) -> Any:
    @mx.custom_function
    def loss(student: mx.array, p: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        z = student * (1 / temperature)
        q, log_total = _softmax(z)
        entropy = log_total - (p * z).sum(axis=-1)
        kept = mx.minimum(p, q).sum(axis=-1)
        if not acceptance:
            return entropy, (q - p) * (1 / temperature), kept
        # dA/dz = q (s - sum q s), s = 1 where q < p
        rising = q * (q < p)
        slope = rising - q * rising.sum(axis=-1, keepdims=True)
        gradient = (q - p - acceptance * slope) * (1 / temperature)
        return entropy + acceptance * (1 - kept), gradient, kept

    @loss.vjp
    def _vjp(primals: Any, cotangents: Any, outputs: Any) -> tuple[mx.array, mx.array]:
        return cotangents[0][..., None] * outputs[1], mx.zeros_like(primals[1])

    return loss


@dataclass(frozen=True)
class Objective:
    """A loss of the student's logits and the teacher's law, with a gradient of its own.

    temperature: of both laws.  acceptance: how much 1 - A counts beside the cross-entropy.
    """

    temperature: float = 1.0
    acceptance: float = 0.0

    def law(self, logits: mx.array) -> mx.array:
        """The teacher's p, (..., V), of its logits; no gradient goes through it."""
        return mx.stop_gradient(_softmax(logits * (1 / self.temperature))[0])

    def __call__(self, student: mx.array, p: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """Of logits (B, R, V) and p (B, R, V), for each row: loss, gradient and A.

        The loss, (B, R), is the cross-entropy of the student's law q to p, plus ``acceptance``
        times 1 - A; the gradient is (B, R, V); and A = sum_v min(p, q), (B, R), 1 minus the total
        variation, is how often a draft from q is kept. To raise A itself serves a head too small
        to meet p everywhere. The teacher gets no gradient.
        """
        found: Any = _compared(self.temperature, self.acceptance)(student, p)
        return found


def losses(
    attached: AttachedHead,
    features: mx.array,
    tokens: mx.array,
    weights: mx.array,
    outputs: tuple[mx.array, mx.array],
    depth: int,
    compare: Objective,
) -> tuple[mx.array, mx.array, mx.array]:
    """Summed loss, and by depth the weighted acceptance (depth,) and the weight (depth,).

    features: (B, R + depth, F), tokens: (B, R + depth).  weights: (B, R + depth), of the trunk's
    law at each position, which depth j of row t is to predict at t + j.  outputs: the rows (V, D)
    of the output head for the ids that the laws are taken on, the trunk's and the head's.
    """
    rows = features.shape[1] - depth
    states = rollout(attached, features[:, :rows], tokens, depth)
    target, drafting = outputs
    final = features[:, 1:, : states[0].shape[-1]].astype(target.dtype)
    laws = compare.law(final @ target.T)
    total, accepted, mass = mx.zeros(()), [], []
    for j, state in enumerate(states, 1):
        loss, _, acceptance = compare(state @ drafting.T, laws[:, j - 1 : j - 1 + rows])
        weight = weights[:, j : j + rows]
        total = total + (loss * weight).sum()
        accepted.append((acceptance * weight).sum())
        mass.append(weight.sum())
    return total, mx.stop_gradient(mx.stack(accepted)), mx.stack(mass)
