"""Conversions: mtplx finds the head again, stock mlx-lm does not stumble over it."""

from __future__ import annotations

import json
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import heads
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import tiny
from family_cases import CASES
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model
from typer.testing import CliRunner

import mtplx
from mtplx import convert, fetch
from mtplx.cli import app
from mtplx.errors import ModelError, ModelFileError, RequestError
from mtplx.inspection import inspect

PROMPT = [5, 40, 9, 33, 17, 60, 2, 8, 71]

each = pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(source, converted) of a case and of the options of a conversion, made once."""
    done = {}

    def get(case, **how):
        how = {name: value for name, value in how.items() if value is not None}
        key = (case.name, *sorted(how.items()))
        if key not in done:
            root = tmp_path_factory.mktemp(case.name)
            source = case.write(root / "source")
            done[key] = source, convert(source, root / "out", **how).path
        return done[key]

    return get


def bundle_of(path, weights="float32"):
    return mtplx.load(path, weights=weights)


def head_logits(bundle):
    """Of every head in the chain, over hidden states that are given."""
    size = bundle.attached.family.hidden_size
    rows = np.random.default_rng(1).standard_normal((len(PROMPT), size))
    state, out = mx.array(rows.astype(np.float32)), []
    for head in (bundle.attached, *bundle.attached.further):
        state = head.forward(state, mx.array(PROMPT), head.new_cache())
        out.append(np.array(head.logits(state).astype(mx.float32)))
    return out


def tensors(path):
    return {
        (file.name, name): value
        for file in sorted(path.glob("*.safetensors")) for name, value in mx.load(str(file)).items()
    }  # fmt: skip


def assert_same_tensors(one, other):
    mine, its = tensors(one), tensors(other)
    assert mine.keys() == its.keys()
    for name, value in mine.items():
        assert value.dtype == its[name].dtype
        assert mx.array_equal(value, its[name]).item(), name


def stock_tokens(path, count=12):
    """What mlx-lm itself generates greedily, its weights checked strictly."""
    trunk, _ = load_model(path, strict=True)
    return [int(t) for t, _ in generate_step(mx.array(PROMPT), trunk, max_tokens=count)]


def own_tokens(path, draft):
    options = {"sampling": mtplx.SamplerConfig(temperature=0.0), "max_tokens": 12, "seed": 0}
    return mtplx.generate(bundle_of(path, "packed"), PROMPT, draft=draft, **options).token_ids


def packed_modules(module):
    return {path: m for path, m in module.named_modules() if hasattr(m, "bits")}


@each
def test_the_heads_logits_are_the_sources(case, made):
    source, out = map(bundle_of, made(case, group_size=32))
    assert out.head_source == "model"
    for mine, its in zip(head_logits(out), head_logits(source), strict=True):
        np.testing.assert_array_equal(mine, its)


@each
def test_it_is_a_native_model_with_its_head_in_a_file_of_its_own(case, made):
    _, out = made(case, group_size=32)
    info = inspect(out)
    assert (info.verdict, info.mtp_files) == ("native MTP", ("mtp.safetensors",))
    assert info.mtp_heads == case.head_count
    assert info.tensors["ignored"] == 0
    about = mx.load(str(out / "mtp.safetensors"), return_metadata=True)[1]
    assert about == {"format": "mlx", "mtplx": mtplx.__version__}


@each
@pytest.mark.parametrize("bits", [None, 4])
def test_stock_mlx_lm_loads_it_and_says_the_same(case, made, bits):
    _, out = made(case, bits=bits, group_size=32)
    want = stock_tokens(out)
    for draft in ("none", "mtp"):
        mine = own_tokens(out, draft)
        assert mine == want[: len(mine)]
        assert len(mine) == 12 or mine[-1] == tiny.EOS


@each
@pytest.mark.parametrize("bits", [None, 4])
def test_converted_again_it_is_the_same(case, made, bits, tmp_path):
    _, out = made(case, bits=bits, group_size=32)
    again = convert(out, tmp_path / "again").path
    assert_same_tensors(out, again)
    assert json.loads((again / "config.json").read_text()) == json.loads(
        (out / "config.json").read_text()
    )


@each
@pytest.mark.parametrize(("bits", "head_bits"), [(4, None), (8, None), (4, 8), (None, 8)])
def test_trunk_and_head_are_packed_each_in_its_own_way(case, made, bits, head_bits):
    source, out = made(case, bits=bits, head_bits=head_bits, group_size=32)
    plain, packed = bundle_of(source), bundle_of(out, "packed")
    routers = {"bits": 8, "group_size": 32}  # as mlx-lm has it, whatever the others'
    for part, told in ((packed.trunk, bits), (packed.head, head_bits or bits)):
        found = packed_modules(part)
        assert bool(found) == bool(told)
        assert {m.bits for m in found.values()} <= {told, routers["bits"]}
        assert {m.group_size for m in found.values()} <= {32}
    fc, bits = plain.head.heads[0].fc.weight, head_bits or bits
    words = mx.quantize(fc, group_size=32, bits=bits)
    want = mx.dequantize(*words, group_size=32, bits=bits)
    assert mx.array_equal(bundle_of(out).head.heads[0].fc.weight, want)


@each
def test_without_its_heads_tensors_it_is_converted_all_the_same(case, tmp_path):
    weights = {name: w for name, w in case.weights().items() if not case.is_head(name)}
    source = case.write(tmp_path / "source", weights)
    found = convert(source, tmp_path / "out")
    assert found.heads == 0
    assert "no MTP head" in found.note or "mtplx convert" in found.note
    assert not (found.path / "mtp.safetensors").exists()
    assert stock_tokens(found.path)
    assert inspect(found.path).verdict == "AR only"


CASE = CASES["qwen3_5"]


def test_types(tmp_path):
    source = CASE.write(tmp_path / "source", torch_dtype="float32")
    out = convert(source, tmp_path / "half", dtype="bfloat16").path
    kinds = {value.dtype for (_, name), value in tensors(out).items() if "A_log" not in name}
    assert kinds == {mx.bfloat16}
    assert json.loads((out / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert_same_tensors(out, convert(out, tmp_path / "again").path)
    # As config.json says, where nothing is asked for.
    source = CASE.write(tmp_path / "other", dtype="float16")
    out = convert(source, tmp_path / "told").path
    assert mx.float16 in {value.dtype for value in tensors(out).values()}


def test_a_plain_llama_and_its_tokenizer(tmp_path):
    source = tiny.write_directory(tmp_path / "source", shards=2)
    (source / "tokenization_x.py").write_text("")
    (source / "hf_quant_config.json").write_text("{}")
    seen = []
    found = convert(source, tmp_path / "a" / "out", on_progress=lambda *sizes: seen.append(sizes))
    assert found.note == "the checkpoint has no MTP head"
    assert {file.name for file in found.path.iterdir()} == {
        "config.json", "generation_config.json", "model.safetensors", "tokenization_x.py",
        "model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    one, other = mtplx.load(source), mtplx.load(found.path)
    assert other.tokenizer.encode("the and") == one.tokenizer.encode("the and")
    assert mx.array_equal(one.trunk(mx.array([PROMPT])), other.trunk(mx.array([PROMPT])))
    stored = sum(value.nbytes for value in tensors(found.path).values())
    assert seen[-1] == (stored, stored)
    assert all(0 <= done <= total == stored for done, total in seen)


def test_a_head_that_mtplx_trained_stays_behind_and_is_told_of(tmp_path, monkeypatch):
    monkeypatch.setenv("MTPLX_CACHE", str(tmp_path / "cache"))
    source = tiny.write_directory(tmp_path / "source")
    heads.write(source, mtplx.load(source))
    found = convert(source, tmp_path / "out")
    assert found.heads == 0
    assert f"--head {source} --any-trunk" in found.note
    assert mtplx.load(found.path).head is None
    assert mtplx.load(found.path, head=source, any_trunk=True).head is not None


def test_modes_of_packing_are_found_again(tmp_path):
    """A trunk of one mode with a head of another; mlx-lm reads one of them, mtplx both."""
    source = CASE.write(tmp_path / "source")
    plain = convert(source, tmp_path / "plain").path
    trunk, _ = load_model(plain)
    nn.quantize(
        trunk, 32, 4, mode="mxfp4",
        class_predicate=lambda _, m: hasattr(m, "to_quantized") and m.weight.shape[-1] % 32 == 0,
    )  # fmt: skip
    mx.save_safetensors(
        str(plain / "model.safetensors"), dict(tree_flatten(trunk.parameters())), {"format": "mlx"}
    )
    (plain / "model.safetensors.index.json").unlink()
    config = json.loads((plain / "config.json").read_text())
    config["quantization"] = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
    (plain / "config.json").write_text(json.dumps(config))
    out = convert(plain, tmp_path / "out", head_bits=8, group_size=32).path
    bundle = bundle_of(out, "packed")
    assert {m.mode for m in packed_modules(bundle.trunk).values()} == {"mxfp4"}
    assert {m.mode for m in packed_modules(bundle.head).values()} == {"affine"}
    assert stock_tokens(out) == stock_tokens(plain)
    with pytest.raises(RequestError, match="model is packed already"):
        convert(plain, tmp_path / "no", bits=4)
    with pytest.raises(RequestError, match="head is packed already"):
        convert(out, tmp_path / "no", head_bits=4)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"bits": 7}, "bits must be one of 2, 3, 4, 5, 6, 8, not 7"),
        ({"head_bits": 1}, "head_bits must be"),
        ({"group_size": 16}, "group_size must be one of 32, 64, 128"),
        ({"dtype": "int8"}, "dtype must be one of float16, bfloat16, float32"),
    ],
)
def test_packing_that_cannot_be_is_refused_before_anything_is_read(how, words, tmp_path):
    with pytest.raises(RequestError, match=words):
        convert(tmp_path / "nothing", tmp_path / "out", **how)


def test_what_is_there_is_not_overwritten(tmp_path):
    source = tiny.write_directory(tmp_path / "source")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    (tmp_path / "empty").mkdir()
    for name, words in (("file", "no directory"), ("full", "not empty"), ("source", "not empty")):
        with pytest.raises(RequestError, match=words):
            convert(source, tmp_path / name)
    assert (tmp_path / "full" / "mine").read_text() == "mine"
    assert inspect(convert(source, tmp_path / "empty").path).verdict == "AR only"


def test_other_models_and_broken_ones(tmp_path):
    with pytest.raises(RequestError, match=r"no \.gguf"):
        convert(tiny.write_gguf(tmp_path / "x.gguf"), tmp_path / "out")
    weights = CASE.weights()
    name = next(n for n in weights if case_norm(n))
    source = CASE.write(tmp_path / "source", weights | {name: weights[name][:-1]})
    with pytest.raises(ModelFileError) as caught:
        convert(source, tmp_path / "out")
    assert caught.value.tensor
    assert not (tmp_path / "out").exists()


def case_norm(name):
    return CASE.is_head(name) and name.endswith("norm.weight")


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_an_end_before_the_end_leaves_nothing(error, tmp_path, monkeypatch):
    source = CASE.write(tmp_path / "source")
    before = set(tmp_path.iterdir())

    def save_config(config, path, **_):
        # A process that is killed leaves this much: no model.
        assert (path.parent / "mtp.safetensors").exists()
        with pytest.raises(ModelFileError, match=r"config\.json is missing"):
            mtplx.load(path.parent)
        raise error

    monkeypatch.setattr("mlx_lm.utils.save_config", save_config)
    with pytest.raises(error if isinstance(error, type) else type(error)):
        convert(source, tmp_path / "out")
    assert set(tmp_path.iterdir()) == before


def test_a_disk_without_room(tmp_path, monkeypatch):
    source = CASE.write(tmp_path / "source")
    free = SimpleNamespace(total=0, used=0, free=10_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    with pytest.raises(ModelError, match=r"0\.00 GB would be written, and 0\.00 GB are free"):
        convert(source, tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"source"}


def run(*args):
    return CliRunner().invoke(app, ["convert", *map(str, args)], env={"COLUMNS": "200"})


def test_the_command(tmp_path):
    source, out = CASE.write(tmp_path / "source"), tmp_path / "out"
    found = run(source, "--out", out, "-q", 4, "--group-size", 32, "--head-bits", 8)
    assert (found.exit_code, found.stdout) == (0, f"{out}\n"), found.stderr
    assert packed_modules(bundle_of(out, "packed").head)
    again = run(source, "--out", out)
    assert (again.exit_code, again.stdout) == (2, "")
    assert "not empty" in again.stderr
    plain = run(tiny.write_directory(tmp_path / "llama"), "--out", tmp_path / "c")
    assert plain.exit_code == 0
    assert "no MTP head" in plain.stderr


def test_a_file_that_cannot_be_written_to_its_end(tmp_path):
    source = CASE.write(tmp_path / "source")

    def limited():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    code = "import sys; sys.argv[0] = 'mtplx'; from mtplx.cli import main; main()"
    full = subprocess.run(
        [sys.executable, "-c", code, "convert", str(source), "--out", str(tmp_path / "out")],
        capture_output=True, text=True, timeout=240, check=False, preexec_fn=limited,
    )  # fmt: skip
    assert (full.returncode, full.stdout) == (1, "")
    assert "cannot be written" in full.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"source"}


def test_a_known_name_is_no_directory(tmp_path, monkeypatch):
    monkeypatch.setattr(fetch, "resolve", lambda model: Path(tmp_path / "x.gguf"))
    with pytest.raises(RequestError, match="directory"):
        convert("smollm2-135m-instruct", tmp_path / "out")


def test_a_model_without_a_tokenizer_is_refused_before_anything_is_written(tmp_path):
    source = CASE.write(tmp_path / "source")
    (source / "tokenizer.json").unlink()
    with pytest.raises(ModelFileError, match=r"tokenizer\.json is missing"):
        convert(source, tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"source"}
