"""The contract of every family: what its checkpoint carries is found, read, and drafts exactly."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from family_cases import CASES
from mlx.utils import tree_flatten
from mlx_lm.models.cache import CacheList

import mtplx
from mtplx.drafters import MTPDrafter, Proposal
from mtplx.errors import ModelFileError
from mtplx.inspection import inspect
from mtplx.sequence import History
from mtplx.state import State

PROMPT = [5, 40, 9, 33, 17, 60, 2, 8, 71]

each = pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))


@pytest.fixture(scope="module")
def bundles(tmp_path_factory):
    """Every case's checkpoint, loaded once."""
    made = {}

    def get(case):
        if case.name not in made:
            path = case.write(tmp_path_factory.mktemp(case.name))
            made[case.name] = mtplx.load(path, weights="float32")
        return made[case.name]

    return get


def hidden_of(bundle, tokens):
    (hidden,) = State(bundle.attached.family).prefill(tokens)
    return hidden


@each
def test_the_head_is_found(case, bundles):
    bundle = bundles(case)
    assert bundle.head_source == "model"
    assert len(bundle.head.heads) == case.head_count


@each
def test_logits_of_the_first_head_are_the_references(case, bundles):
    bundle = bundles(case)
    attached, hidden = bundle.attached, hidden_of(bundle, PROMPT)[:-1]
    out = attached.forward(hidden, mx.array(PROMPT[1:]), attached.new_cache())
    want = case.reference(
        case.numpy_weights(case.weights()), case.text_config,
        np.asarray(hidden, np.float64), PROMPT[1:],
    )  # fmt: skip
    np.testing.assert_allclose(np.asarray(attached.logits(out)), want, rtol=0, atol=1e-4)


@each
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_change_nothing(case, bundles, temperature):
    options = {
        "sampling": mtplx.SamplerConfig(temperature=temperature), "seed": 3, "max_tokens": 24,
    }  # fmt: skip
    plain = mtplx.generate(bundles(case), PROMPT, draft="none", **options)
    drafted = mtplx.generate(bundles(case), PROMPT, draft="mtp", depth=4, **options)
    assert drafted.token_ids == plain.token_ids
    assert sum(drafted.stats.drafted) > 0


def proposal_for(bundle):
    """Draws the likeliest token of whatever logits come."""
    law = History(mtplx.SamplerConfig(), PROMPT).draft_law
    size = bundle.attached.family.vocab_size
    return Proposal(law, lambda offset, q: int(q.token_ids[q.probs.argmax()]), size)


def run_chain(bundle, hidden, tokens):
    """Every head over all rows at once: hidden (L, D) and the tokens from the first row's on.

    Head by head, what it reads (n, D), its outputs (n, D) and its cache; head k reads the tokens
    k + 1 behind its rows, as far as they are known.
    """
    runs = []
    for k, head in enumerate((bundle.attached, *bundle.attached.further)):
        follow = tokens[k + 1 : k + 1 + len(hidden)]
        # Of the trunk where its makers say so, else of the head before it.
        trunks = k == 0 or getattr(head.head, "reads_trunk", False)
        read = (hidden if trunks else runs[-1][1])[: len(follow)]
        cache = head.new_cache()
        runs.append((read, head.forward(read, mx.array(follow), cache), cache))
    return runs


@pytest.mark.parametrize("case", [c for c in CASES.values() if c.further], ids=lambda c: c.name)
def test_logits_of_deeper_heads_are_the_references(case, bundles):
    bundle = bundles(case)
    runs = run_chain(bundle, hidden_of(bundle, PROMPT)[:-1], PROMPT)
    weights = case.numpy_weights(case.weights())
    assert len(case.further) == case.head_count - 1
    for k, (head, reference) in enumerate(zip(bundle.attached.further, case.further, strict=True)):
        read, out, _ = runs[k + 1]
        assert len(out) == len(PROMPT) - 2 - k
        want = reference(
            weights, case.text_config, np.asarray(read, np.float64), PROMPT[k + 2 :]
        )  # fmt: skip
        np.testing.assert_allclose(np.asarray(head.logits(out)), want, rtol=0, atol=1e-4)


def leaves_of(cache):
    return list(cache.caches) if isinstance(cache, CacheList) else [cache]


def rows_of(cache, count):
    """The first rows of every array in a cache."""
    leaves = [leaf for _, leaf in tree_flatten(cache.state) if isinstance(leaf, mx.array)]
    return [np.asarray(leaf[..., :count, :]) for leaf in leaves]


def assert_drafted_as_a_whole(bundle, drafter, tokens, drafts):
    """Drafts and caches are those of heads that are run over all rows at once."""
    known = len(tokens) - 1
    runs = run_chain(bundle, hidden_of(bundle, tokens[:-1]), [*tokens, *drafts])
    for k, (cache, (_, _, whole)) in enumerate(zip(drafter.caches, runs, strict=True)):
        rows = max(0, known - k)
        assert [leaf.offset for leaf in leaves_of(cache)] == [rows] * len(leaves_of(cache))
        if rows:
            for left, right in zip(rows_of(cache, rows), rows_of(whole, rows), strict=True):
                np.testing.assert_allclose(left, right, rtol=0, atol=1e-4)
    heads = (bundle.attached, *bundle.attached.further)
    for k, token in enumerate(drafts):
        if k < len(heads):
            head, last, cache = heads[k], runs[k][1][-1:], runs[k][2]
        else:  # the last head again
            last = head.forward(last, mx.array(drafts[k - 1 : k]), cache)
        assert token == int(mx.argmax(head.logits(last)))


def started(bundle, tokens, chunk=512):
    """A drafter that has seen tokens, and the trunk's state of all but the last."""
    drafter, state = MTPDrafter(bundle.attached), State(bundle.attached.family)
    drafter.observe(tokens, None)
    for hidden in state.prefill(tokens[:-1], chunk=chunk):
        drafter.observe([], hidden)
    return drafter, state


@each
def test_caches_after_rejections_at_every_position_are_those_of_a_fresh_start(case, bundles):
    bundle, depth = bundles(case), max(3, case.head_count + 1)
    proposal, tokens = proposal_for(bundle), list(PROMPT)
    drafter, state = started(bundle, tokens, chunk=4)
    for keep in (*range(depth + 1), 0):
        draft = drafter.propose(depth, proposal)
        mark = state.mark(depth + 1)
        hidden, _ = state.forward([tokens[-1], *draft.tokens])
        state.rollback(mark, [tokens[-1], *draft.tokens[:keep]])
        emitted = [*draft.tokens[:keep], (draft.tokens[min(keep, depth - 1)] + 1) % 320]
        tokens += emitted
        drafter.observe(emitted, hidden[: len(emitted)])
    again = drafter.propose(depth, proposal)
    assert_drafted_as_a_whole(bundle, drafter, tokens, again.tokens)
    fresh, _ = started(bundle, tokens)
    assert fresh.propose(depth, proposal).tokens == again.tokens


@pytest.mark.parametrize("name", ["mimo_2", "mimo_v2_flash", "deepseek_v32"])
def test_a_proposal_interrupted_while_it_drops_its_drafts_leaves_none(name, bundles, monkeypatch):
    bundle, depth = bundles(CASES[name]), 4
    # The first head of a chain drafts from a committed row of its own.
    for place in range(1, CASES[name].head_count) or [0]:
        drafter, state = started(bundle, PROMPT)
        leaf = leaves_of(drafter.caches[place])[-1]
        with monkeypatch.context() as patch:
            patch.setattr(leaf, "trim", Interrupted(leaf.trim))
            with pytest.raises(KeyboardInterrupt):
                drafter.propose(depth, proposal_for(bundle))
        hidden, _ = state.forward(PROMPT[-1:])
        drafter.observe([44], hidden)
        drafts = drafter.propose(depth, proposal_for(bundle)).tokens
        assert_drafted_as_a_whole(bundle, drafter, [*PROMPT, 44], drafts)


class Interrupted:
    """A cache's ``trim`` that does nothing when there is something to drop."""

    def __init__(self, trim):
        self.trim = trim

    def __call__(self, count):
        if count > 0:
            raise KeyboardInterrupt
        return self.trim(count)


@each
def test_drafts_after_prompts_shorter_than_the_chain(case, bundles):
    bundle, depth = bundles(case), case.head_count + 2
    for length in range(2, case.head_count + 3):
        drafter, _ = started(bundle, PROMPT[:length])
        drafts = drafter.propose(depth, proposal_for(bundle)).tokens
        assert_drafted_as_a_whole(bundle, drafter, PROMPT[:length], drafts)


def without(weights, name):
    return {key: value for key, value in weights.items() if key != name}


@each
def test_a_tensor_that_is_missing_extra_or_of_another_shape_is_named(case, tmp_path):
    weights = case.weights()
    ends = ("k_proj.weight", "kv_a_proj_with_mqa.weight")
    name = next(n for n in weights if case.is_head(n) and n.endswith(ends))
    stem = name.rpartition(".")[0]
    changed = {
        "missing": without(weights, name),
        "extra": weights | {f"{stem}.strange": weights[name]},
        "shape": weights | {name: weights[name][:-1]},
    }
    for what, arrays in changed.items():
        path = case.write(tmp_path / what, arrays)
        with pytest.raises(ModelFileError) as caught:
            mtplx.load(path, weights="float32")
        assert stem.rpartition(".")[2] in str(caught.value.tensor), what
        assert mtplx.load(path, weights="float32", head="none").head is None


@each
def test_a_checkpoint_without_its_heads_tensors_drafts_from_n_grams_and_says_so(case, tmp_path):
    weights = {name: w for name, w in case.weights().items() if not case.is_head(name)}
    bundle = mtplx.load(case.write(tmp_path, weights), weights="float32")
    assert bundle.head is None
    told = case.text_config.keys() & {"num_nextn_predict_layers", "mtp_num_hidden_layers"}
    assert bool(bundle.head_note) == bool(told)
    assert mtplx.generate(bundle, PROMPT, max_tokens=4).stats.tokens >= 1


@pytest.mark.parametrize("told", [-1, 99, 10**30, 1.5, True, "one", [1], float("nan")], ids=repr)
@pytest.mark.parametrize("stored", [True, False])
def test_a_count_that_can_be_none_is_an_error_that_names_it(told, stored, tmp_path):
    """So many heads would be built: 10**30 of them fill the memory."""
    case = CASES["glm4_moe"]
    weights = {n: w for n, w in case.weights().items() if stored or not case.is_head(n)}
    path = case.write(tmp_path, weights, num_nextn_predict_layers=told)
    with pytest.raises(ModelFileError, match=r"_layers is .*, not a number of MTP heads"):
        mtplx.load(path, weights="float32")
    assert inspect(path).verdict == "broken"
    assert mtplx.load(path, weights="float32", head="none").head is None


def test_more_heads_than_a_family_can_have_are_an_error_that_names_the_count(tmp_path):
    case = CASES["qwen3_5"]
    text = dict(case.text_config) | {"mtp_num_hidden_layers": 2}
    path = case.write(tmp_path, text_config=text)
    with pytest.raises(ModelFileError, match="mtp_num_hidden_layers is 2, more MTP heads than"):
        mtplx.load(path, weights="float32")
