"""Where a checkpoint may hold its head: shards, sidecars, other conversions; and never twice."""

from __future__ import annotations

import json
import re

import mlx.core as mx
import numpy as np
import pytest
from family_cases import CASES
from family_cases.case import write_rest
from mlx.utils import tree_flatten
from safetensors.numpy import save_file
from test_families import PROMPT, bundles, each, hidden_of  # noqa: F401 (a fixture)

import mtplx
from mtplx.errors import ModelError, ModelFileError
from mtplx.inspection import BROKEN, inspect

INDEX = "model.safetensors.index.json"
QWEN = pytest.mark.parametrize(
    "case", [case for name, case in CASES.items() if name.startswith("qwen")], ids=lambda c: c.name
)


def write(case, path, files, index=None):
    """A directory with these files {name: arrays}; index: those that it lists, None for none."""
    path.mkdir()
    for name, arrays in files.items():
        plain = {tensor: np.ascontiguousarray(value) for tensor, value in arrays.items()}
        save_file(plain, path / name, {"format": "pt"})
    if index is not None:
        listed = {tensor: name for name in index for tensor in files[name]}
        (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": listed}))
    write_rest(path, case.config)
    return path


def parted(case):
    """The trunk's tensors and the head's."""
    weights = case.weights()
    head = {name: value for name, value in weights.items() if case.is_head(name)}
    return {name: value for name, value in weights.items() if name not in head}, head


def arrays_of(module):
    return {name: np.asarray(value) for name, value in tree_flatten(module.parameters())}


def assert_same_head(path, expected):
    bundle = mtplx.load(path, weights="float32")
    assert bundle.head_source == "model"
    found, wanted = arrays_of(bundle.head), arrays_of(expected.head)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-6, err_msg=name)
    return bundle


@each
@pytest.mark.parametrize(
    "sidecar", ["mtp.safetensors", "model-mtp.safetensors", "model_mtp.safetensors"]
)
def test_a_head_in_a_file_of_its_own(case, bundles, tmp_path, sidecar):  # noqa: F811
    trunk, head = parted(case)
    files = {"model.safetensors": trunk, sidecar: head}
    for i, index in enumerate((None, ["model.safetensors"], list(files))):
        assert_same_head(write(case, tmp_path / str(i), files, index), bundles(case))


@each
def test_a_head_spread_over_shards(case, bundles, tmp_path):  # noqa: F811
    shards = {f"model-0000{i}-of-00003.safetensors": {} for i in (1, 2, 3)}
    for i, (name, value) in enumerate(case.weights().items()):
        list(shards.values())[i % 3][name] = value
    assert_same_head(write(case, tmp_path / "m", shards, list(shards)), bundles(case))


@each
@pytest.mark.parametrize("sidecar", ["mtp.safetensors", "model-mtp.safetensors"])
def test_a_tensor_in_two_files_is_named(case, tmp_path, sidecar):
    weights = case.weights()
    name = next(stored for stored in weights if case.is_head(stored))
    files = {"model.safetensors": weights, sidecar: {name: weights[name]}}
    with pytest.raises(ModelFileError) as caught:
        mtplx.load(write(case, tmp_path / "m", files), weights="float32")
    assert caught.value.tensor == name


@each
@pytest.mark.parametrize("sidecar", ["model.safetensors", "mtp.safetensors"])
def test_a_tensor_under_two_names_is_named(case, tmp_path, sidecar):
    weights = case.weights()
    name = next(stored for stored in weights if case.is_head(stored))
    again = f"language_model.{name}"
    files = {"model.safetensors": dict(weights)}
    files.setdefault(sidecar, {})[again] = weights[name]
    with pytest.raises(ModelFileError, match="again") as caught:
        mtplx.load(write(case, tmp_path / "m", files), weights="float32")
    assert caught.value.tensor in (name, again)


@each
def test_a_raw_head_beside_a_trunk_in_mlx_layout(case, bundles, tmp_path):  # noqa: F811
    trunk, head = arrays_of(bundles(case).trunk), parted(case)[1]
    files = {"model.safetensors": trunk, "mtp.safetensors": head}
    found = assert_same_head(write(case, tmp_path / "m", files), bundles(case))
    left, right = (hidden_of(bundle, PROMPT) for bundle in (found, bundles(case)))
    np.testing.assert_allclose(np.asarray(left), np.asarray(right), rtol=0, atol=1e-5)


def converted(head):
    """A Qwen head as conversions leave it: norms as they are used, experts in one tensor."""
    out, experts = {}, {}
    for name, value in head.items():
        stem, found, rest = name.partition(".experts.")
        if found:
            number, _, part = rest.partition(".")
            experts.setdefault(f"{stem}.switch_mlp.{part}", {})[int(number)] = value
        else:
            out[name] = value + 1 if value.ndim == 1 else value
    return out | {name: np.stack([e[i] for i in sorted(e)]) for name, e in experts.items()}


@QWEN
@pytest.mark.parametrize("sidecar", ["model.safetensors", "mtp.safetensors"])
def test_a_head_whose_norms_were_converted(case, bundles, tmp_path, sidecar):  # noqa: F811
    prefix = "language_model." if "text_config" in case.config else ""
    head = {prefix + name: value for name, value in converted(parted(case)[1]).items()}
    files = {"model.safetensors": arrays_of(bundles(case).trunk)}
    files.setdefault(sidecar, {}).update(head)
    assert_same_head(write(case, tmp_path / "m", files), bundles(case))


@QWEN
@pytest.mark.parametrize("prefix", ["language_model.", "model.language_model."])
def test_a_raw_head_under_the_language_models_prefix(case, bundles, tmp_path, prefix):  # noqa: F811
    trunk, head = parted(case)
    head = {prefix + name: value for name, value in head.items()}
    files = {"model.safetensors": trunk, "mtp.safetensors": head}
    assert_same_head(write(case, tmp_path / "m", files), bundles(case))


@each
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_seeded_text_is_the_same_at_every_depth(case, bundles, seed):  # noqa: F811
    options = {
        "sampling": mtplx.SamplerConfig(temperature=0.9, top_p=0.95), "seed": seed,
        "verify": "coupled", "max_tokens": 16,
    }  # fmt: skip
    plain = mtplx.generate(bundles(case), PROMPT, draft="none", **options)
    for depth in range(1, 7):
        drafted = mtplx.generate(bundles(case), PROMPT, draft="mtp", depth=depth, **options)
        assert drafted.token_ids == plain.token_ids, depth
        assert drafted.stats.drafted


# Whose heads read the trunk's hidden state before its final norm (docs/families.md).
BEFORE_NORM = {"mimo", "mimo_v2_flash", "step3p5"}


@each
def test_a_head_reads_the_trunks_state_before_or_after_its_norm(case, bundles):  # noqa: F811
    bundle = bundles(case)
    family, hidden = bundle.attached.family, hidden_of(bundle, PROMPT)
    if case.config["model_type"] in BEFORE_NORM:
        hidden = family.body.norm(hidden)
    got, want = family.logits(hidden), bundle.trunk(mx.array([PROMPT]))[0]
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=0, atol=1e-4)


def test_without_the_head_a_stray_tensor_beside_the_model_is_no_error(tmp_path):
    trunk, head = parted(CASES["qwen3_5"])
    files = {"model.safetensors": trunk, "mtp.safetensors": head | {"strange.weight": np.ones(3)}}
    path = write(CASES["qwen3_5"], tmp_path / "m", files)
    with pytest.raises(ModelFileError, match=r"'strange\.weight' belongs to no head"):
        mtplx.load(path, weights="float32")
    assert mtplx.load(path, weights="float32", head="none").head is None


@pytest.mark.parametrize(
    ("name", "config", "match"),
    [
        ("mimo_1", {"num_nextn_predict_layers": 10**7}, "num_nextn_predict_layers is 10000000"),
        ("mimo_1", {"num_nextn_predict_layers": -1}, "num_nextn_predict_layers is -1"),
        ("mimo_1", {"num_nextn_predict_layers": "one"}, "num_nextn_predict_layers is 'one'"),
        ("step3p5", {"num_hidden_layers": None}, "cannot be built"),
        ("nemotron_h", {"mtp_hybrid_override_pattern": 3}, "cannot be built"),
    ],
)
def test_a_configuration_that_describes_no_head_is_an_error(name, config, match, tmp_path):
    path = CASES[name].write(tmp_path, **config)
    with pytest.raises(ModelError, match=match):
        mtplx.load(path, weights="float32")
    found = inspect(path)
    assert found.verdict == BROKEN
    assert re.search(match, found.why)
