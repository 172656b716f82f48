"""Drafters: n-grams against brute force, the MTP head against NumPy and a fresh prefill."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from doubles import PLAIN, new_sequence, randomise, run, tiny_llama

from mtplx.draft_vocabulary import DraftVocabulary
from mtplx.drafters import MTPDrafter, NgramDrafter, Proposal
from mtplx.errors import ModelError
from mtplx.families import family_of
from mtplx.fast_sampling import sparse_distribution_from_mlx_logits
from mtplx.mtp_patch import attach_head, new_head
from mtplx.state import State

VOCAB = 64
COPY_BONUS = (0.5, 2.5, 4.0)


def forbidden(*_args):
    raise AssertionError("an n-gram drafter draws nothing")


COPY = Proposal(forbidden, forbidden, VOCAB)


def ngram(tokens, **settings_):
    drafter = NgramDrafter(**settings_)
    drafter.observe(tokens, None)
    return drafter


# --- the MTP head -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trunk():
    return tiny_llama(1)


def head_of(trunk, *, embedding_first=True, seed=2):
    head = new_head(trunk, embedding_first=embedding_first)
    randomise(head, seed)
    head.copy_bonus = COPY_BONUS
    return head


def proposal(config=PLAIN, seen=None):
    """A proposal that records each (offset, q) and draws the likeliest token but one."""

    def law(logits, drafts, vocabulary=None):
        return sparse_distribution_from_mlx_logits(logits, config)

    def draw(offset, q):
        order = np.argsort(-q.probs, kind="stable")
        token = int(q.token_ids[order[min(1, order.size - 1)]])
        if seen is not None:
            seen.append((offset, q, token))
        return token

    return Proposal(law, draw, VOCAB)


def numpy_norm(x, weight, eps=1e-5):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def numpy_rope(x, base=10000.0):
    """(heads, L, d), positions 0..L-1; the halves of a head form the pairs, as in Llama."""
    half = x.shape[-1] // 2
    angle = np.arange(x.shape[1])[:, None] * base ** (-np.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate(
        [a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)], -1
    )


def numpy_layer(x, w):
    """One Llama decoder layer in float64 on (L, D): 4 heads of 8, 2 KV heads, causal."""
    rows = x.shape[0]
    y = numpy_norm(x, w["layer.input_layernorm.weight"])

    def heads(name, count):
        out = y @ w[f"layer.self_attn.{name}.weight"].T
        return out.reshape(rows, count, 8).transpose(1, 0, 2)

    q, k, v = numpy_rope(heads("q_proj", 4)), numpy_rope(heads("k_proj", 2)), heads("v_proj", 2)
    k, v = np.repeat(k, 2, axis=0), np.repeat(v, 2, axis=0)
    scores = q @ k.transpose(0, 2, 1) / np.sqrt(8)
    scores = np.where(np.tril(np.ones((rows, rows), bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = (weights / weights.sum(-1, keepdims=True)) @ v
    x = x + mixed.transpose(1, 0, 2).reshape(rows, -1) @ w["layer.self_attn.o_proj.weight"].T
    y = numpy_norm(x, w["layer.post_attention_layernorm.weight"])
    gate, up = (y @ w[f"layer.mlp.{n}_proj.weight"].T for n in ("gate", "up"))
    return x + (gate / (1 + np.exp(-gate)) * up) @ w["layer.mlp.down_proj.weight"].T


def flat(module):
    from mlx.utils import tree_flatten

    return {n: np.asarray(v, dtype=np.float64) for n, v in tree_flatten(module.parameters())}


@pytest.mark.parametrize("embedding_first", [True, False])
def test_the_head_computes_what_its_definition_says(trunk, embedding_first):
    attached = attach_head(trunk, head_of(trunk, embedding_first=embedding_first))
    w = flat(attached.head)
    embedding = np.asarray(trunk.model.embed_tokens.weight, dtype=np.float64)
    tokens = [5, 9, 33, 9, 60, 2]
    hidden = np.random.default_rng(0).standard_normal((6, 32))
    e = numpy_norm(embedding[tokens], w["enorm.weight"])
    h = numpy_norm(hidden, w["hnorm.weight"])
    pair = [e, h] if embedding_first else [h, e]
    want = numpy_norm(numpy_layer(np.concatenate(pair, -1) @ w["fc.weight"].T, w), w["norm.weight"])
    cache = attached.new_cache()
    rows = mx.array(hidden.astype(np.float32))
    parts = [attached.forward(rows[a:b], mx.array(tokens[a:b]), cache) for a, b in ((0, 4), (4, 6))]
    got = mx.concatenate(parts)
    np.testing.assert_allclose(np.asarray(got), want, rtol=0, atol=1e-4)
    np.testing.assert_allclose(
        np.asarray(attached.logits(got)), want @ embedding.T, rtol=0, atol=1e-4 * 8
    )


def test_a_head_with_levels_and_a_draft_vocabulary(trunk):
    """A committed row reads the trunk's layers too; a deeper step has only the head's own state."""
    vocabulary = DraftVocabulary([1, 4, 9, 60], VOCAB)
    head = new_head(trunk, levels=(1,), vocabulary=vocabulary)
    randomise(head, 7)
    attached, w = attach_head(trunk, head), flat(head)
    embedding = np.asarray(trunk.model.embed_tokens.weight, dtype=np.float64)
    tokens = [5, 9, 33, 9]
    features, _ = attached.family.forward(mx.array([tokens]), [None] * 2)
    final, level = np.split(np.asarray(features[0], dtype=np.float64), 2, axis=-1)
    np.testing.assert_allclose(np.sqrt((level**2).mean(-1)), 1, atol=1e-4)
    np.testing.assert_allclose(
        final, np.asarray(trunk.model(mx.array([tokens]))[0]), rtol=0, atol=1e-5
    )

    def combined(token, hidden, level):
        e = numpy_norm(embedding[token], w["enorm.weight"])
        h = numpy_norm(hidden, w["hnorm.weight"])
        return np.concatenate([e, h, level], -1) @ w["fc.weight"].T

    rows = [combined(t, h, x) for t, h, x in zip([9, 33, 9], final[:3], level[:3], strict=True)]
    first = numpy_norm(numpy_layer(np.stack(rows), w), w["norm.weight"])[-1]
    rows.append(combined(4, first, np.zeros_like(first)))
    second = numpy_norm(numpy_layer(np.stack(rows), w), w["norm.weight"])[-1]
    cache = attached.new_cache()
    one = attached.forward(features[0, :3], mx.array([9, 33, 9]), cache)[-1:]
    two = attached.forward(one, mx.array([4]), cache)
    for got, want in ((one, first), (two, second)):
        np.testing.assert_allclose(np.asarray(got[0]), want, rtol=0, atol=1e-4)
        found = np.asarray(attached.logits(got)[0])
        np.testing.assert_allclose(found, embedding[[1, 4, 9, 60]] @ want, rtol=0, atol=1e-3)


def test_a_level_that_the_trunk_lacks_is_refused(trunk):
    with pytest.raises(ModelError, match=r"\[3\].*2"):
        new_head(trunk, levels=(3,))


def test_a_draft_vocabulary_of_another_trunk_is_refused(trunk):
    head = new_head(trunk, vocabulary=DraftVocabulary([1, 2], VOCAB + 1))
    with pytest.raises(ModelError, match=str(VOCAB + 1)):
        attach_head(trunk, head)


def test_the_order_of_the_halves_matters(trunk):
    first, second = (
        attach_head(trunk, head_of(trunk, embedding_first=order)) for order in (True, False)
    )
    hidden, tokens = mx.random.normal((3, 32)), mx.array([1, 2, 3])
    one = first.forward(hidden, tokens, first.new_cache())
    two = second.forward(hidden, tokens, second.new_cache())
    assert np.abs(np.asarray(one) - np.asarray(two)).max() > 0.1


def test_an_untied_output_head_is_the_trunks():
    untied = tiny_llama(5, tie_word_embeddings=False)
    attached = attach_head(untied, head_of(untied))
    hidden = mx.random.normal((2, 32))
    want = np.asarray(hidden) @ np.asarray(untied.lm_head.weight).T
    np.testing.assert_allclose(np.asarray(attached.logits(hidden)), want, atol=1e-4)


def test_attaching_changes_nothing_of_the_trunk(trunk):
    before = {n: v.copy() for n, v in flat(trunk).items()}
    call = type(trunk).__call__
    attach_head(trunk, head_of(trunk))
    after = flat(trunk)
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[n], after[n]) for n in before)
    assert type(trunk).__call__ is call
    assert not hasattr(trunk, "mtp")


def test_a_head_of_another_size_is_refused(trunk):
    other = tiny_llama(0, hidden_size=48, head_dim=12)
    with pytest.raises(ModelError, match=r"48.*32"):
        attach_head(trunk, new_head(other))


def test_an_unknown_family_has_no_head(trunk):
    class Strange:
        model_type = "mamba2"

    with pytest.raises(ModelError, match="mamba2"):
        new_head(Strange())
    with pytest.raises(ModelError, match="mamba2"):
        attach_head(Strange(), head_of(trunk))


# --- the head's cache ---------------------------------------------------------------------------


def held(cache):
    """(keys, values) of the rows that count, by value."""
    if cache.keys is None:
        return None
    return [np.array(x[..., : cache.offset, :]) for x in (cache.keys, cache.values)]


def assert_committed_rows(drafter, trunk, tokens, rows):
    """The cache holds row i = (trunk hidden i, token i + 1) for i < rows, as computed at once."""
    assert drafter.rows == rows
    assert drafter.tokens == tokens
    state = State(family_of(trunk))
    (hidden,) = state.prefill(tokens)
    fresh = drafter.attached.new_cache()
    drafter.attached.forward(hidden[:rows], mx.array(tokens[1 : rows + 1]), fresh)
    for got, want in zip(held(drafter.cache), held(fresh), strict=True):
        assert got.shape == want.shape
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 5])
def test_each_committed_row_stands_once_after_rejections_at_every_position(trunk, depth):
    drafter = MTPDrafter(attach_head(trunk, head_of(trunk)))
    state = State(family_of(trunk))
    tokens = [3, 17, 5, 29, 11]
    drafter.observe(tokens, None)
    for hidden in state.prefill(tokens[:-1], chunk=3):
        drafter.observe([], hidden)
    for keep in [*range(depth + 1), depth, 0]:
        draft = drafter.propose(depth, proposal())
        assert len(draft.tokens) == len(draft.q_rows) == depth
        assert_committed_rows(drafter, trunk, tokens, len(tokens) - 1)
        mark = state.mark(depth + 1)
        hidden, _ = state.forward([tokens[-1], *draft.tokens])
        state.rollback(mark, [tokens[-1], *draft.tokens[:keep]])
        emitted = [*draft.tokens[:keep], (draft.tokens[min(keep, depth - 1)] + 1) % VOCAB]
        tokens = tokens + emitted
        drafter.observe(emitted, hidden[: len(emitted)])
    drafter.propose(1, proposal())
    assert_committed_rows(drafter, trunk, tokens, len(tokens) - 1)


@pytest.mark.parametrize("rule", ["token", "coupled"])
@pytest.mark.parametrize("depth", [1, 3, 5])
def test_the_engine_feeds_each_row_once(trunk, rule, depth):
    drafter = MTPDrafter(attach_head(trunk, head_of(trunk)))
    sequence = new_sequence(
        trunk, [9, 4, 4, 31], drafter, rule=rule, depth=depth, seed=depth, max_tokens=20
    )
    run(sequence)
    drafter.propose(1, proposal())
    assert_committed_rows(drafter, trunk, sequence.tokens, len(sequence.tokens) - 1)


def test_a_long_prompt_is_fed_in_chunks(trunk, monkeypatch):
    monkeypatch.setattr("mtplx.drafters.mtp._CHUNK", 4)
    drafter = MTPDrafter(attach_head(trunk, head_of(trunk)))
    tokens = [(7 * i + 3) % VOCAB for i in range(15)]
    drafter.observe(tokens, None)
    for hidden in State(family_of(trunk)).prefill(tokens[:-1], chunk=5):
        drafter.observe([], hidden)
    drafter.propose(2, proposal())
    assert_committed_rows(drafter, trunk, tokens, 14)


class Raising:
    """A proposal's draw that raises at one offset."""

    def __init__(self, at, error):
        self.at, self.error = at, error

    def __call__(self, offset, q):
        if offset == self.at:
            raise self.error
        return int(q.token_ids[0])


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()])
def test_deeper_rows_are_dropped_when_proposing_raises(trunk, at, error):
    drafter = MTPDrafter(attach_head(trunk, head_of(trunk)))
    tokens = [3, 17, 5, 29]
    drafter.observe(tokens, None)
    for hidden in State(family_of(trunk)).prefill(tokens[:-1]):
        drafter.observe([], hidden)
    broken = Proposal(proposal().law, Raising(at, error), VOCAB)
    with pytest.raises(type(error)):
        drafter.propose(3, broken)
    assert_committed_rows(drafter, trunk, tokens, 3)
    fresh = MTPDrafter(attach_head(trunk, drafter.attached.head))
    fresh.observe(tokens, None)
    for hidden in State(family_of(trunk)).prefill(tokens[:-1]):
        fresh.observe([], hidden)
    assert drafter.propose(3, proposal()) == fresh.propose(3, proposal()), "as if never asked"


def test_asking_twice_gives_the_same_draft(trunk):
    drafter = MTPDrafter(attach_head(trunk, head_of(trunk)))
    drafter.observe([3, 17, 5], None)
    for hidden in State(family_of(trunk)).prefill([3, 17]):
        drafter.observe([], hidden)
    first = drafter.propose(3, proposal())
    assert first.tokens
    assert drafter.propose(3, proposal()) == first
    assert drafter.propose(0, proposal()).tokens == []
    assert drafter.propose(2, proposal()).tokens == first.tokens[:2]


def test_nothing_is_drafted_before_a_hidden_state_is_known(trunk):
    drafter = MTPDrafter(attach_head(trunk, head_of(trunk)))
    drafter.observe([3], None)
    assert drafter.propose(3, proposal()).tokens == []
