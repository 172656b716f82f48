"""The benchmark of decoding on a CPU, on a tiny model: every figure, and what it is a ratio of."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
import tiny
from test_measure import bundle

from mtplx import bench, heldout, load
from mtplx.bench import cpu, law, peers, same
from mtplx.errors import MtplxError, RequestError
from mtplx.state import State

__all__ = ["bundle"]

# llama_cpp.Llama, as far as it is used: every token takes 3 ms, every eval 2 ms and 1 ms a row.
FAKE = """
import time
__version__ = "0.fake"
class Llama:
    def __init__(self, model, *, verbose, logits_all=False, n_ctx, n_batch, **threads):
        assert model.endswith(".gguf") and not verbose
        assert set(threads) == {"n_threads", "n_threads_batch"}
        self.n_tokens = 0
    def reset(self):
        self.n_tokens = 0
    def eval(self, tokens):
        self.n_tokens += len(tokens)
        time.sleep(0.002 + 0.001 * len(tokens))
    def generate(self, tokens, *, temp, top_k, top_p, min_p, repeat_penalty):
        assert (top_k, top_p, min_p, repeat_penalty) == (20, 0.95, 0.0, 1.0)
        while True:
            time.sleep(0.003)
            yield 7
"""


@pytest.fixture
def short(monkeypatch):
    """Few prompts, few tokens, small reads, nothing fetched."""
    texts = {"mt-bench": ["one a b", "two", "three"], "humaneval": ["def f", "def g"]}
    monkeypatch.setattr(heldout, "prompts", lambda name: texts[name])
    values = {
        "_AR_REPEATS": 1, "_AR_TOKENS": 4, "_MLX_LM_TOKENS": 3, "_ROW_REPEATS": 1, "_CONTEXT": 16,
        "_PREFILL": 40, "_PREFILL_REPEATS": 1, "_PROMPTS": 2, "_TOKENS": 8, "_OVERHEAD_PROMPTS": 1,
        "_OVERHEAD_TOKENS": 8, "_READ_BYTES": 2**20,
    }  # fmt: skip
    for name, value in values.items():
        monkeypatch.setattr(cpu, name, value)
    monkeypatch.setattr(cpu.costs, "PASSES", 3)
    monkeypatch.setattr(law, "VOCABULARY", 4096)
    monkeypatch.setattr(law, "_REPEATS", 2)
    for name, value in {"_CONTEXTS": (1, 2, 5, 40), "_FEW": 1, "_TOKENS": 8}.items():
        monkeypatch.setattr(same, name, value)


@pytest.fixture
def no_llama(monkeypatch):
    def absent(model):
        raise MtplxError("llama-cpp-python is not installed")

    monkeypatch.setattr(peers, "llama_cpp", absent)


@pytest.fixture
def fake_llama(monkeypatch, tmp_path):
    (tmp_path / "llama_cpp.py").write_text(FAKE)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.syspath_prepend(str(tmp_path))


def run(bundle, **options) -> cpu.CpuReport:
    return bench.run("cpu", open_model=lambda *_: bundle, **options)


@pytest.mark.usefixtures("short", "no_llama")
def test_all_figures_without_llama_cpp(bundle):
    report = run(bundle)
    figures = json.loads(json.dumps(report.to_dict()))["figures"]
    missing = {name for name, value in figures.items() if value is None}
    assert missing == {
        "ar_vs_llamacpp", "default_vs_llamacpp", "prefill_vs_llamacpp", "peak_memory_mb",
    }  # fmt: skip
    assert any("llama-cpp-python is not installed" in note for note in report.notes)
    assert any("head is not from a file" in note for note in report.notes)
    assert list(figures)[: len(cpu.GOALS)] == list(cpu.GOALS)
    assert all(np.isfinite(value) and value >= 0 for value in figures.values() if value is not None)
    assert figures["coupled_identical"] == 1.0
    # 4 contexts, depths 1 to 8: 2 to 9 rows each.
    assert figures["verify_positions"] == 4 * sum(range(2, 10))
    assert report.command == "mtplx bench cpu --json"
    assert "kernels" in report.machine["kernels"]
    assert report.machine["weights"] == bundle.provenance.runs
    assert report.table().splitlines()[0] == "| figure | value | goal | aim |"
    assert "| ar_vs_mlx_lm |" in report.table()


@pytest.mark.usefixtures("short", "fake_llama")
def test_llama_cpp_is_asked_in_its_own_process(bundle):
    report = run(bundle, full=False)
    figures = report.figures
    assert report.versions["llama-cpp-python"] == "0.fake"
    # It sleeps so long, or longer on a busy machine.
    assert figures["llamacpp_tokens_per_second"] <= 1000 / 3
    assert figures["llamacpp_forward_milliseconds"] >= 3
    assert figures["llamacpp_rows8"] > 1
    own = figures["ar_tokens_per_second"] / figures["llamacpp_tokens_per_second"]
    assert figures["ar_vs_llamacpp"] == pytest.approx(own)
    stock = figures["ar_tokens_per_second"] / figures["mlx_lm_tokens_per_second"]
    assert figures["ar_vs_mlx_lm"] == pytest.approx(stock)
    for name in ("default_vs_llamacpp", "prefill_vs_llamacpp", "ar_vs_llamacpp_t0"):
        assert figures[name] > 0, name


def test_ratios_are_of_the_right_sides(bundle, monkeypatch):
    """Twice the tokens/s of plain decoding, four times llama.cpp's; 10 GB/s of 20."""
    monkeypatch.setattr(heldout, "chosen", lambda name, count: ["a", "b"])
    seconds = {"auto": 1.0, "none": 2.0}

    def start(way, *_, **__):
        stats = SimpleNamespace(tokens=10, decode_seconds=seconds[way.draft])
        return SimpleNamespace(result=lambda: SimpleNamespace(stats=stats))

    monkeypatch.setattr(cpu.Way, "start", start)
    llama = SimpleNamespace(ask=lambda do, **_: {"tokens": 5, "seconds": 2.0})
    found = cpu._Run(bundle, False, lambda _: None, llama)
    cpu._default(found)
    assert found.figures["default_vs_ar"] == pytest.approx(2.0)
    assert found.figures["default_vs_llamacpp"] == pytest.approx(4.0)
    monkeypatch.setattr(cpu, "_read_ceiling", lambda threads: 20e9)
    found.figures["forward_milliseconds"] = cpu._weight_bytes(bundle) / 10e9 * 1e3
    cpu._bandwidth(found)
    assert found.figures["bandwidth"] == pytest.approx(0.5)


def test_weights_are_counted_in_bytes_of_one_step(tmp_path):
    tied = load(tiny.write_gguf(tmp_path / "tied.gguf"), head="none", weights="float32")
    params = 320 * 64 + 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 128 + 2 * 64) + 64
    assert cpu._weight_bytes(tied) == 4 * params
    path = tiny.write_gguf(tmp_path / "own.gguf", tie_word_embeddings=False)
    assert cpu._weight_bytes(load(path, head="none", weights="float32")) == 4 * params


def test_weights_in_the_layout_of_the_kernels_are_counted(bundle):
    layer = SimpleNamespace(matrix=SimpleNamespace(nbytes=100))
    trunk = SimpleNamespace(
        parameters=lambda: {"norm": mx.zeros(5)}, named_modules=lambda: [("x", layer), ("", None)]
    )
    assert cpu._weight_bytes(replace(bundle, trunk=trunk)) == 120


def test_turns_are_taken(bundle):
    seen: list[str] = []
    found = cpu._Run(bundle, False, lambda _: None)

    def call(name: str, value: float):
        return lambda: seen.append(name) or value

    assert found.turns({"a": call("a", 1.0), "b": call("b", 3.0)}, 2) == {"a": 1.0, "b": 3.0}
    assert "".join(seen) == "ab" + "ab" + "ba"


@pytest.mark.usefixtures("short")
def test_logits_that_differ_in_one_bit_are_counted(bundle, monkeypatch):
    """The last row of every forward over more than one is off by one unit in the last place."""
    real = State.forward

    def off(self, tokens):
        hidden, logits = real(self, tokens)
        if len(tokens) > 1:
            rows = np.array(logits)
            rows[-1, 3] = np.nextafter(rows[-1, 3], np.float32(np.inf))
            logits = mx.array(rows)
        return hidden, logits

    monkeypatch.setattr(State, "forward", off)
    found = same.bitwise(bundle, full=False, before=lambda _: None)
    assert found.positions == 4 * 44
    assert found.equal <= found.positions - 4 * 8
    assert 0 < found.largest < 1e-3


@pytest.mark.usefixtures("short")
def test_contexts_are_walked_one_by_one_in_full(bundle, monkeypatch):
    """With each context a token later, both states hold rows of forwards of their own kind only."""
    monkeypatch.setattr(same, "_LAST", 12)
    prefilled: list[int] = []
    real = State.prefill

    def prefill(self, tokens, **options):
        prefilled.append(len(tokens))
        return real(self, tokens, **options)

    monkeypatch.setattr(State, "prefill", prefill)
    lengths = []
    found = same.bitwise(bundle, full=True, before=lengths.append)
    assert len(lengths) == 12
    assert found.positions == 12 * 44
    assert [count for count in prefilled if count] == [1, 1]


@pytest.mark.usefixtures("short")
def test_a_text_that_differs_is_counted_and_named(bundle, monkeypatch):
    real = same._text

    def text(way, *arguments):
        ids = real(way, *arguments)
        return ids if way.depth != 3 else [*ids[:2], 7, 7]

    monkeypatch.setattr(same, "_text", text)
    notes: list[str] = []
    share = same.coupled(bundle, full=False, before=lambda _: None, notes=notes)
    assert share == pytest.approx(2 / 3)
    assert len(notes) == 3
    assert all("depth 3: first difference at token 3" in note for note in notes)


@pytest.mark.usefixtures("short", "no_llama")
def test_steps_are_as_many_as_announced(bundle, monkeypatch):
    called: list[str] = []

    class Counted:
        def __init__(self, total):
            self.total = total

        def __enter__(self):
            return called.append

        def __exit__(self, *_):
            assert len(called) == self.total

    monkeypatch.setattr(cpu, "steps", Counted)
    run(bundle)
    assert called


@pytest.mark.usefixtures("short", "no_llama")
def test_a_model_without_a_head_has_no_figures_of_one(bundle):
    report = run(replace(bundle, head=None))
    assert report.figures["head_step"] is None
    assert "round_overhead" not in report.figures
    assert report.figures["peak_memory_mb"] > report.figures["peak_memory_imports_mb"] > 0
    assert report.figures["default_vs_ar"] > 0
    assert sum("no MTP head" in note for note in report.notes) == 2


def test_mlx_lm_decodes_from_packed_weights(tmp_path):
    peer = peers.mlx_lm(tiny.write_gguf(tmp_path / "tiny.gguf", encoding="Q4_1"))
    try:
        assert peer.about == {"name": "mlx-lm", "packed": True}
        found = peer.ask("decode", prompt=[3, 4, 5], tokens=4, temperature=0.6)
    finally:
        peer.close()
    assert found["tokens"] == 3
    assert found["seconds"] > 0


def test_why_there_is_no_llama_cpp(monkeypatch, tmp_path):
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    with pytest.raises(MtplxError, match="not installed"):
        peers.llama_cpp(tmp_path / "x.gguf")
    monkeypatch.setattr(peers, "find_spec", lambda name: "found")
    with pytest.raises(MtplxError, match=r"reads \.gguf files"):
        peers.llama_cpp(tmp_path)


def test_a_process_that_ends_is_an_error_with_its_last_words(tmp_path):
    with pytest.raises(MtplxError, match=r"missing\.gguf"):
        peers.mlx_lm(tmp_path / "missing.gguf")


def test_a_gpu_is_not_a_cpu(bundle, monkeypatch):
    gpu = SimpleNamespace(type=mx.DeviceType.gpu)
    monkeypatch.setattr(cpu.mx, "default_device", lambda: gpu)
    with pytest.raises(MtplxError, match="another"):
        cpu.run(bundle)


def test_no_option_is_ignored(bundle):
    with pytest.raises(RequestError, match="--plot has no use in bench cpu"):
        run(bundle, plot="x.png")


@pytest.mark.usefixtures("short")
def test_the_text_fits_the_model(bundle):
    assert len(same.text_ids(bundle, 100)) == 100
    assert len(same.text_ids(bundle, 10**4)) == 512
