"""Training a head: distilled data, resumption, and that it learns."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from tiny import write_directory

from mtplx import heldout, load
from mtplx.cpu_layers import is_fused
from mtplx.errors import ModelFileError, MtplxError, RequestError
from mtplx.forge import run as forge_run
from mtplx.forge.card import write_card
from mtplx.forge.conversation import Kind, Layout, Seed, Style, read_seeds
from mtplx.forge.data import Data
from mtplx.forge.distil import DataPlan, distil, read_shard, shard_path
from mtplx.forge.fit import LONGEST, fit_copy_bonus
from mtplx.forge.objective import rollout
from mtplx.forge.run import PROMPTS, Clock, Paused, default_levels
from mtplx.forge.train import Trainer, TrainPlan, initial_head
from mtplx.head_file import read_head
from mtplx.native import status

SEEDS = [Seed("and the other"), Seed("on the ", stem=True)]
DATA = DataPlan(seed=5, shards=2, rows=12, length=40, levels=(1,), streams=2, style=Style(bare=0.3))
PLAN = TrainPlan(
    seed=5, steps=8, rows=6, window=24, depth=3, second=0.5, levels=(1,), vocabulary=160,
    core=64, drawn=48, check_every=4, warmup=2,
)  # fmt: skip


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trunk")
    write_directory(folder)
    return load(folder, weights="float32")


@pytest.fixture(scope="module")
def folder(bundle, tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    distil(bundle, SEEDS, DATA, folder)
    return folder


def data_of(folder, **options):
    return Data([shard_path(folder, n) for n in range(DATA.shards)], 320, held_out=4, **options)


def weights(head):
    return {name: np.asarray(value) for name, value in tree_flatten(head.trainable_parameters())}


# --- data ---------------------------------------------------------------------------------------


def test_the_shipped_prompts_can_be_read():
    for path in PROMPTS:
        seeds = read_seeds(path)
        assert len(seeds) > 100
        assert {seed.stem for seed in seeds} == {True, False}
        assert max(Counter(seed.text for seed in seeds).values()) == 1


@pytest.mark.parametrize(
    ("line", "named"),
    [("{", "line 2"), ('{"prompt": ""}', "line 2"), ('{"text": "x"}', "line 2"),
     ('{"prompt": "x", "stem": 1}', "stem")],
)  # fmt: skip
def test_a_bad_prompt_file_is_named(tmp_path, line, named):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line)
    with pytest.raises(RequestError, match=named):
        read_seeds(path)


def test_rows_are_conversations_in_the_models_own_template(bundle, folder):
    shard = read_shard(shard_path(folder, 0))
    layout = Layout.of(bundle.tokenizer)
    turns = [{"role": "user", "content": "A"}, {"role": "assistant", "content": "B"}]
    whole = bundle.tokenizer.encode(bundle.tokenizer.render_chat([*turns, turns[0]]))
    a, b = bundle.tokenizer.encode("A"), bundle.tokenizer.encode("B")
    parts = (layout.start, a, layout.after_user, b, layout.after_answer, a, layout.after_user)
    assert whole == [token for part in parts for token in part]
    for tokens, kinds in zip(shard.tokens.tolist(), shard.kinds.tolist(), strict=True):
        assert tuple(tokens[: len(layout.start)]) == layout.start
        assert set(kinds[: len(layout.start)]) == {Kind.TEMPLATE}
        for i in range(1, len(kinds)):
            after_template = kinds[i - 1] == Kind.TEMPLATE
            assert kinds[i] != Kind.ANSWER or kinds[i - 1] == Kind.ANSWER or after_template


def test_features_are_those_of_a_fresh_forward(bundle, folder):
    shard = read_shard(shard_path(folder, 1))
    family = forge_run.headed_family(bundle.trunk, DATA.levels)
    fresh, _ = family.forward(mx.array(shard.tokens), [None] * 2)
    np.testing.assert_allclose(shard.features, np.asarray(fresh), atol=4e-3)


def test_distilling_again_gives_the_same_and_goes_on_where_it_stopped(bundle, folder, tmp_path):
    told = []

    def stop_in_the_second(tokens):
        told.append(tokens)
        if sum(told) > DATA.tokens * 0.7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        distil(bundle, SEEDS, DATA, tmp_path, on_progress=stop_in_the_second)
    assert [path.name for path in tmp_path.iterdir()] == ["shard-00000.safetensors"]
    stamp = shard_path(tmp_path, 0).stat().st_mtime_ns
    distil(bundle, SEEDS, DATA, tmp_path)
    assert shard_path(tmp_path, 0).stat().st_mtime_ns == stamp
    for number in range(2):
        one, two = (read_shard(shard_path(where, number)) for where in (folder, tmp_path))
        for name in ("tokens", "kinds", "features"):
            np.testing.assert_array_equal(getattr(one, name), getattr(two, name))


@pytest.mark.skipif(status().native is None, reason="the CPU kernels are not installed")
def test_on_the_kernels_a_row_of_a_shard_is_the_same_in_any_company(tmp_path, monkeypatch):
    write_directory(tmp_path / "trunk")
    bundle = load(tmp_path / "trunk")
    assert is_fused(bundle.trunk)
    for parts in (1, 5):
        with monkeypatch.context() as patch:
            patch.setattr("mtplx.forge.distil.is_fused", lambda trunk: False)
            plan = replace(DATA, streams=parts, shards=1)
            distil(bundle, SEEDS, plan, tmp_path / str(parts))
    distil(bundle, SEEDS, replace(DATA, shards=1), tmp_path / "kernels")
    one, *others = (read_shard(shard_path(tmp_path / n, 0)) for n in ("kernels", "1", "5"))
    for other in others:
        for name, value in vars(one).items():
            np.testing.assert_array_equal(value, getattr(other, name))


def test_rows_that_hold_a_held_out_text_are_never_trained_on(folder):
    plain = data_of(folder)
    assert not len(plain.left_out)
    text = plain.tokens[3][10:30].tolist()
    data = data_of(folder, forbidden=[[7, 7, *text, 7]])
    assert 3 in data.left_out
    assert not set(data.left_out) & set(data.training)
    steps = [data.batch(6, 20, 0, step) for step in range(12)]
    starts = {tuple(row) for batch in steps for row in np.asarray(batch.tokens).tolist()}
    banned = data.tokens[3].tolist()
    assert not any(list(row) == banned[i : i + 20] for row in starts for i in range(21))


def test_batches_use_every_row_once_an_epoch(folder, monkeypatch):
    data, asked = data_of(folder), []
    with monkeypatch.context() as patch:
        patch.setattr(data, "_windows", lambda rows, starts, length: asked.extend(rows))
        for step in range(12):
            data.batch(5, 20, 1, step)
    assert len(data.training) == 20
    for epoch in range(3):
        assert sorted(asked[20 * epoch : 20 * (epoch + 1)]) == data.training.tolist()
    one, two = data.batch(5, 20, 1, 2), data.batch(5, 20, 1, 2)
    assert np.array_equal(one.tokens, two.tokens)


def test_broken_data_is_an_error(tmp_path):
    path = shard_path(tmp_path, 0)
    path.write_bytes(b"no")
    with pytest.raises(ModelFileError, match="training data"):
        Data([path], 320)


# --- training -----------------------------------------------------------------------------------


def test_training_lowers_the_loss_and_beats_a_fresh_head(bundle, folder):
    plan = TrainPlan(**{**vars(PLAN), "steps": 60, "check_every": 20, "matrix_rate": 0.1})
    trainer = Trainer(bundle, data_of(folder), plan)
    trainer._sums[:] = (1, 1)
    trainer._check()
    while not trainer.done:
        trainer.advance()
    fresh, last = trainer.log[0], trainer.log[-1]
    assert last["held_out_loss"] < fresh["held_out_loss"] - 0.1
    assert last["held_out_acceptance"][0] > fresh["held_out_acceptance"][0] + 0.02
    assert [entry["depth"] for entry in trainer.log[1:]] == [1, 3, 3]


def test_a_resumed_training_has_the_weights_of_an_uninterrupted_one(bundle, folder, tmp_path):
    whole = Trainer(bundle, data_of(folder), PLAN)
    while not whole.done:
        whole.advance()
    path = tmp_path / "checkpoint.safetensors"
    for stop in (3, 6, 8):
        trainer = Trainer(bundle, data_of(folder), PLAN)
        if path.exists():
            trainer.restore(path)
        while trainer.step < stop:
            trainer.advance()
        trainer.save(path)
    assert trainer.done
    assert list(tmp_path.iterdir()) == [path]
    for name, value in weights(whole.head).items():
        np.testing.assert_array_equal(value, weights(trainer.head)[name], err_msg=name)
    timeless = [[{**entry, "seconds": 0} for entry in t.log] for t in (whole, trainer)]
    assert timeless[0] == timeless[1]


def test_the_trunk_is_not_changed(bundle, folder):
    before = {k: np.array(v) for k, v in tree_flatten(bundle.trunk.parameters())}
    trainer = Trainer(bundle, data_of(folder), PLAN)
    trainer.advance()
    for name, value in tree_flatten(bundle.trunk.parameters()):
        np.testing.assert_array_equal(before[name], np.asarray(value), err_msg=name)


def test_a_fresh_head_gives_the_trunks_last_layer_on_its_own_hidden_state(bundle):
    head = initial_head(bundle, PLAN, None)
    hidden = mx.array(np.random.default_rng(0).standard_normal((1, 3, 64)).astype(np.float32))
    state = mx.concatenate([hidden, 0 * hidden], axis=-1)
    expected = bundle.trunk.model.layers[-1](head.hnorm(hidden), "causal", None)
    found = head.layer(head.combine(hidden, state), "causal", None)
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), atol=1e-5)


def test_a_checkpoint_of_another_plan_or_data_is_refused(bundle, folder, tmp_path):
    path = tmp_path / "c.safetensors"
    Trainer(bundle, data_of(folder), PLAN).save(path)
    other = Trainer(bundle, data_of(folder), TrainPlan(**{**vars(PLAN), "seed": 6}))
    with pytest.raises(RequestError, match="other seed"):
        other.restore(path)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ModelFileError, match="checkpoint"):
        Trainer(bundle, data_of(folder), PLAN).restore(path)


# --- the whole of it ----------------------------------------------------------------------------


@pytest.fixture
def no_download(monkeypatch):
    monkeypatch.setattr(heldout, "texts", lambda name: [f"{name}: a text that nobody wrote"])


ABOUT = {"command": "mtplx forge train x", "model": "x", "base_model": "y/x", "license": "mit"}


def forge(bundle, out, *, plan=PLAN, minutes=None, prompts=PROMPTS[:1]):
    clock = Clock(minutes)
    return forge_run.run(
        bundle, out, DATA, plan, prompts=prompts, draft_ids=120, about=ABOUT, clock=clock
    )


@pytest.mark.usefixtures("no_download")
def test_a_training_writes_a_head_and_says_how_it_was_made(bundle, tmp_path, monkeypatch):
    with pytest.raises(Paused):
        forge(bundle, tmp_path, minutes=0)
    assert not (tmp_path / "mtp.safetensors").exists()
    forge(bundle, tmp_path)
    head = read_head(tmp_path, bundle.trunk, bundle.provenance)
    assert head.levels == (1,)
    assert head.vocabulary.ids.size == 120  # the most frequent of the 160 that it was trained on
    assert bundle.tokenizer.eos_ids <= set(head.vocabulary.ids.tolist())
    training = json.loads((tmp_path / "training.json").read_text())
    assert training["plan"]["train"]["seed"] == 5
    assert training["plan"]["trunk"] == bundle.provenance.sha256
    assert training["data"]["tokens"] == DATA.tokens
    assert 0 < training["data"]["coverage"] <= 1
    assert training["log"][-1]["step"] == PLAN.steps
    before = (tmp_path / "mtp.safetensors").read_bytes()
    forge(bundle, tmp_path)  # nothing is left to do
    assert (tmp_path / "mtp.safetensors").read_bytes() == before
    monkeypatch.setattr(forge_run, "fit_sharpness", lambda *_: 2 * training["sharpness"])
    forge(bundle, tmp_path)
    sharper = read_head(tmp_path, bundle.trunk, bundle.provenance)
    assert mx.array_equal(sharper.norm.weight, 2 * head.norm.weight)


def test_two_trainings_in_one_place_are_refused(bundle, tmp_path):
    with forge_run._alone(tmp_path / "work"):
        with pytest.raises(RequestError, match="another training is running there"):
            forge(bundle, tmp_path)
        assert [path.name for path in tmp_path.rglob("*")] == ["work", "lock"]


@pytest.mark.usefixtures("no_download")
def test_another_plan_in_the_same_place_is_refused(bundle, tmp_path):
    with pytest.raises(Paused):
        forge(bundle, tmp_path, minutes=0)
    with pytest.raises(RequestError, match="another train seed"):
        forge(bundle, tmp_path, plan=TrainPlan(**{**vars(PLAN), "seed": 6}))
    with pytest.raises(RequestError, match="another prompts"):
        forge(bundle, tmp_path, prompts=PROMPTS)


def test_the_levels_are_quarters_of_the_depth(bundle):
    assert default_levels(bundle) == (1,)
    assert Path(PROMPTS[0]).name == "chat.jsonl"


def test_an_interrupted_step_is_no_part_of_the_checkpoint(
    bundle, tmp_path, no_download, monkeypatch
):
    """Wherever it is interrupted, going on gives the weights of an uninterrupted training."""
    forge(bundle, tmp_path / "whole")
    update, calls = Trainer._check, []

    def interrupted(trainer):
        calls.append(trainer.step)
        if len(calls) == 2:
            raise KeyboardInterrupt
        update(trainer)

    monkeypatch.setattr(Trainer, "_check", interrupted)
    with pytest.raises(KeyboardInterrupt):
        forge(bundle, tmp_path / "cut")
    forge(bundle, tmp_path / "cut")
    one, two = ((tmp_path / name / "mtp.safetensors").read_bytes() for name in ("whole", "cut"))
    assert one == two


def test_a_training_that_diverges_stops_and_keeps_the_last_checkpoint(bundle, folder, tmp_path):
    trainer = Trainer(bundle, data_of(folder), PLAN)
    trainer.save(tmp_path / "c.safetensors")
    trainer.head.norm.weight = mx.full((64,), float("nan"))
    with pytest.raises(MtplxError, match="step 0"):
        trainer.advance()
    trainer.restore(tmp_path / "c.safetensors")
    trainer.advance()


def test_a_shard_of_another_plan_is_refused(bundle, tmp_path):
    distil(bundle, SEEDS, DATA, tmp_path)
    other = DataPlan(**{**vars(DATA), "seed": 6})
    with pytest.raises(ModelFileError, match="shard-00000"):
        distil(bundle, SEEDS, other, tmp_path)
    assert distil(bundle, SEEDS, DataPlan(**{**vars(DATA), "streams": 1}), tmp_path) > 0


def test_the_copy_bonus_is_the_highest_of_the_best_by_brute_force(bundle, folder):
    data, trainer = data_of(folder), Trainer(bundle, data_of(folder), PLAN)
    found = fit_copy_bonus(trainer.attached, data, 2)
    attached, ids = trainer.attached, trainer.attached.vocabulary.ids.tolist()
    kept = Counter()
    rows = data.length - 2
    batch = data.check(data.length)
    states = rollout(attached, batch.features[:, :rows], batch.tokens, 2)
    for row, tokens in enumerate(np.asarray(batch.tokens).tolist()):
        for j, state in enumerate(states, 1):
            z = np.asarray(attached.logits(state[row]), dtype=np.float64) / 0.6
            final = batch.features[row, j : j + rows, :64].astype(mx.float32)
            t = np.asarray(attached.logits(final), dtype=np.float64) / 0.6
            for at in range(rows):
                known, whole = tokens[: at + 2], tokens[: at + 1 + j]
                match = latest_match(known, whole)
                if match is None or match[1] not in ids:
                    continue
                p = np.exp(t[at] - t[at].max()) / np.exp(t[at] - t[at].max()).sum()
                for bonus in np.arange(0.0, 8.01, 0.5):
                    raised = z[at].copy()
                    raised[ids.index(match[1])] += bonus / 0.6
                    q = np.exp(raised - raised.max()) / np.exp(raised - raised.max()).sum()
                    weight = float(batch.weights[row, at + j])
                    kept[match[0], bonus] += weight * np.minimum(p, q).sum()
    for n, bonus in enumerate(found, 1):
        enough = 0.99 * max(kept[n, b] for b in np.arange(0.0, 8.01, 0.5))
        assert kept[n, bonus] >= enough * (1 - 1e-4), n
        higher = [kept[n, b] for b in np.arange(bonus + 0.5, 8.01, 0.5)]
        assert all(k < enough * (1 + 1e-4) for k in higher) or not enough, n


def latest_match(known, whole):
    for n in range(LONGEST, 0, -1):
        for at in range(len(known) - 1, n - 1, -1):
            if len(whole) >= n and known[at - n : at] == whole[-n:]:
                return n, known[at]
    return None


def test_a_head_is_measured_and_its_card_is_about_these_very_weights(
    bundle, tmp_path, no_download, monkeypatch
):
    forge(bundle, tmp_path)
    monkeypatch.setattr(heldout, "chosen", lambda name, count: ["the and", "an other"][:count])
    head = read_head(tmp_path, bundle.trunk, bundle.provenance)
    assert len(head.copy_bonus) == LONGEST
    with_head = replace(bundle, head=head)
    forge_run.evaluate(with_head, tmp_path, each=1, tokens=6, command="mtplx forge eval x")
    card = (tmp_path / "README.md").read_text()
    assert "mtplx forge eval x" in card
    assert bundle.provenance.sha256.popitem()[1] in card
    measured = json.loads((tmp_path / "measurement.json").read_text())
    (tmp_path / "measurement.json").write_text(json.dumps(measured | {"head": "0" * 64}))
    with pytest.raises(ModelFileError, match="another head"):
        write_card(tmp_path)
