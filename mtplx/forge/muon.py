"""Muon (Jordan 2024, https://kellerjordan.github.io/posts/muon/): the optimiser of matrices.

A matrix moves along U V^T, where U S V^T is its momentum. Found by a fixed number of steps
X <- (a + b G + c G^2) X, G = X X^T, whose coefficients bring the singular values of X near 1 in as
few steps as can be (Amsel et al., The Polar Express, arXiv 2505.16932, algorithm 1; without its
deflation, which is for 16 bits).
"""

from __future__ import annotations

import mlx.core as mx
import mlx.optimizers as optimizers

# Singular values from 1e-3 to 1 come to 0.88 to 1.12, smaller ones nearer to 1 than they were.
_STEPS = (
    (8.2872, -23.5959, 17.3004),
    (4.1071, -2.9478, 0.5448),
    (3.9487, -2.9089, 0.5518),
    (3.3184, -2.4885, 0.5100),
    (2.3007, -1.6689, 0.4188),
)
# The first step's bound: no singular value above 1, whatever is lost to rounding.
_MARGIN = 1.01


def orthogonal(matrix: mx.array) -> mx.array:
    """About U V^T of a matrix (m, n) = U S V^T.

    What the steps multiply X by are polynomials of the first G, min(m, n) wide. For a matrix twice
    as long as wide or longer their product is built there, and X is only read at both ends: of
    1:2.7 it takes 0.7 of the work, of 1:5 half of it.
    """
    rows, columns = matrix.shape
    x = matrix if rows <= columns else matrix.T
    x = x / mx.maximum(_MARGIN * mx.linalg.norm(x), 1e-30)
    if x.shape[1] < 2 * x.shape[0]:
        for a, b, c in _STEPS:
            gram = x @ x.T
            x = a * x + mx.addmm(b * gram, gram, gram, alpha=c) @ x
    else:
        x = _product(x @ x.T) @ x
    return x if rows <= columns else x.T


def _product(gram: mx.array) -> mx.array:
    """The matrices that the steps multiply X by, multiplied: all are symmetric and commute."""
    out = None
    identity = mx.eye(gram.shape[0])
    for left, (a, b, c) in enumerate(_STEPS, 1 - len(_STEPS)):
        factor = mx.addmm(a * identity + b * gram, gram, gram, alpha=c)
        out = factor if out is None else factor @ out
        if left:
            gram = factor @ (factor @ gram)
    assert out is not None
    return out


class Muon(optimizers.Muon):
    """MLX's, with these steps in the place of its own."""

    def __init__(self, learning_rate: float, momentum: float = 0.95):
        super().__init__(learning_rate, momentum=momentum, weight_decay=0.0)

    def _zeropower_via_newtonschulz5(self, X: mx.array, steps: int) -> mx.array:
        return orthogonal(X)
