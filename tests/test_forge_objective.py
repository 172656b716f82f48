"""The training objective: what is unrolled is what drafting does, and the loss is what it says."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import llama
from tiny import tiny_config

from mtplx.draft_vocabulary import DraftVocabulary
from mtplx.families import family_of
from mtplx.forge.fit import LONGEST, highest_of_the_best
from mtplx.forge.objective import Objective, _exp, losses, rollout
from mtplx.mtp_patch import attach_head, new_head

LEVELS = (1,)
DEPTH = 4


@pytest.fixture(scope="module")
def attached():
    mx.random.seed(3)
    trunk = llama.Model(llama.ModelArgs.from_dict(tiny_config()))
    mx.eval(trunk.parameters())
    vocabulary = DraftVocabulary(np.arange(0, 320, 2), 320)
    return attach_head(trunk, new_head(trunk, levels=LEVELS, vocabulary=vocabulary))


def windows(attached, rows=9, batch=2):
    tokens = mx.array(np.random.default_rng(0).integers(0, 320, (batch, rows + DEPTH)))
    family = family_of(attached.family.trunk, LEVELS)
    features, _ = family.forward(tokens, [None] * len(family.layers))
    return features, tokens


def test_unrolling_is_drafting_from_every_row(attached):
    features, tokens = windows(attached)
    rows = features.shape[1] - DEPTH
    unrolled = rollout(attached, features[:, :rows], tokens, DEPTH)
    for sequence in range(2):
        for row in range(rows):
            cache = attached.new_cache()
            state = attached.forward(
                features[sequence, : row + 1], tokens[sequence, 1 : row + 2], cache
            )[-1:]
            for depth in range(1, DEPTH + 1):
                found = np.asarray(unrolled[depth - 1][sequence, row])
                np.testing.assert_allclose(found, np.asarray(state[0]), atol=2e-5)
                at = row + depth + 1
                if depth < DEPTH:
                    state = attached.forward(state, tokens[sequence, at : at + 1], cache)


def test_exp_is_close_where_it_counts():
    x = np.linspace(-12, 0, 4001, dtype=np.float32)
    found = np.asarray(_exp(mx.array(x)))
    np.testing.assert_allclose(found, np.exp(x.astype(np.float64)), rtol=2e-3)
    far = np.asarray(_exp(mx.array([-1e30, -31.0, -20.0])))
    assert (far >= 0).all()
    assert (far < 1e-8).all()


def softmax(x):
    weights = np.exp(x - x.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


@pytest.mark.parametrize(("temperature", "share"), [(1.0, 0.0), (0.7, 0.0), (0.7, 2.0)])
def test_the_loss_its_gradient_and_the_acceptance(temperature, share):
    random = np.random.default_rng(1)
    z, t = 2 * random.standard_normal((2, 2, 3, 11))
    q, p = softmax(z / temperature), softmax(t / temperature)
    student, teacher = mx.array(z.astype(np.float32)), mx.array(t.astype(np.float32))
    compare = Objective(temperature, share)
    law = compare.law(teacher)
    np.testing.assert_allclose(np.asarray(law), p, rtol=4e-3)
    loss, _, acceptance = compare(student, law)
    kept = np.minimum(p, q).sum(-1)
    want = -(p * np.log(q)).sum(-1) + share * (1 - kept)
    np.testing.assert_allclose(np.asarray(loss), want, rtol=4e-3)
    np.testing.assert_allclose(np.asarray(acceptance), kept, atol=3e-3)

    def plain(s):
        q = mx.softmax(s / temperature, axis=-1)
        kept = mx.minimum(mx.array(p.astype(np.float32)), q).sum(-1)
        entropy = -(mx.array(p.astype(np.float32)) * mx.log(q)).sum(-1)
        return ((entropy + share * (1 - kept)) * mx.array(weights)).sum()

    weights = random.random((2, 3)).astype(np.float32)
    gradient = mx.grad(lambda s: (compare(s, law)[0] * mx.array(weights)).sum())(student)
    np.testing.assert_allclose(np.asarray(gradient), np.asarray(mx.grad(plain)(student)), atol=4e-3)


def test_a_perfect_student_has_acceptance_one_and_no_gradient():
    logits = mx.array(np.random.default_rng(2).standard_normal((1, 4, 7)).astype(np.float32))
    compare = Objective(0.7, 2.0)
    _, gradient, acceptance = compare(logits, compare.law(logits))
    np.testing.assert_allclose(np.asarray(acceptance), 1.0, atol=1e-6)
    np.testing.assert_allclose(np.asarray(gradient), 0.0, atol=1e-6)


def test_each_depth_is_compared_with_the_law_of_its_own_position(attached):
    """Losses of a student replaced by the trunk's own states of the right rows would be minimal."""
    features, tokens = windows(attached)
    size = attached.family.hidden_size
    rows = features.shape[1] - DEPTH
    output = attached.family.output_rows(attached.vocabulary.ids)
    weights = mx.zeros(tokens.shape)
    weights[:, 2] = 1.0  # only the law at position 2: depth j predicts it from row 2 - j
    total, accepted, mass = losses(
        attached, features, tokens, weights, (output, output), DEPTH, Objective()
    )
    assert np.asarray(mass).tolist() == [2.0, 2.0, 0.0, 0.0]
    states = rollout(attached, features[:, :rows], tokens, DEPTH)
    teacher = softmax(np.asarray(features[:, 2, :size] @ output.T, dtype=np.float64))
    expected = 0.0
    for depth in (1, 2):
        student = softmax(np.asarray(states[depth - 1][:, 2 - depth] @ output.T, dtype=np.float64))
        expected -= (teacher * np.log(student)).sum()
        near = np.minimum(teacher, student).sum()
        assert float(accepted[depth - 1]) == pytest.approx(near, abs=5e-3)
    assert float(total) == pytest.approx(expected, rel=5e-3)


# --- the copy bonus ---------------------------------------------------------------------------


def test_of_bonuses_that_keep_nearly_as_much_the_highest_is_taken():
    grid = np.arange(0.0, 8.01, 0.5)
    kept = np.zeros((LONGEST, len(grid)))
    kept[0] = 100 - 3 * np.abs(grid - 1)  # falls by 1.5 a place
    kept[1] = 100 - 0.9 * np.abs(grid - 2)
    kept[2] = 100
    kept[4, 0] = 1
    # Nothing matched 4 tokens, nor 6 and more.
    assert highest_of_the_best(kept) == (1.0, 3.0, 8.0, 8.0, 0.0, 0.0, 0.0, 0.0)
