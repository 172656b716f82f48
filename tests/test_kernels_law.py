"""The law kernel against the NumPy reference, on every instruction set that this machine has.

The kernel is plain C++: it is compiled here, and called through a C function; and through the
extension, where that is built.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from mtplx.distribution import SparseDistribution
from mtplx.fast_sampling import _host_sparse_distribution
from mtplx.sampler_config import SamplerConfig
from mtplx.sampling import distribution_from_logits, softmax

SOURCES = Path(__file__).parent.parent / "kernels" / "src"
COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
if COMPILER is None or not SOURCES.is_dir():
    pytest.skip("no C++ compiler, or no sources", allow_module_level=True)

INF, NAN = float("inf"), float("nan")
NEAR = 2e-6
ISAS = {"portable": 0, "avx2": 1, "avx512": 2}
WRAPPER = """
#include <algorithm>
#include <exception>
#include "law.cpp"
using namespace mtplx;
extern "C" int has(int isa) { return law_isa_available(static_cast<LawIsa>(isa)); }
extern "C" int best() { return static_cast<int>(law_isa_best()); }
extern "C" long law(const float* row, std::size_t size, double t, double top_p, double min_p,
                    long long top_k, int isa, std::uint32_t* ids, float* values, double* mass,
                    std::uint64_t* broken) {
  static LawScratch scratch;
  static LawRow out;
  try {
    law_row(row, size, {t, top_p, min_p, top_k}, static_cast<LawIsa>(isa), scratch, out);
  } catch (const std::exception&) {
    return -1;
  }
  std::copy(out.ids.begin(), out.ids.end(), ids);
  std::copy(out.values.begin(), out.values.end(), values);
  *mass = out.mass;
  broken[0] = out.nan;
  broken[1] = out.inf;
  return static_cast<long>(out.ids.size());
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("law")
    source, target = folder / "wrapper.cpp", folder / "law.so"
    source.write_text(WRAPPER)
    flags = ["-std=c++20", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run(
        [str(COMPILER), *flags, f"-I{SOURCES}", str(source), "-o", str(target)], check=True
    )
    found = ctypes.CDLL(str(target))
    found.law.restype = ctypes.c_long
    return found


@pytest.fixture(scope="module", params=list(ISAS))
def kernel(request, library):
    """A function of a row and a config, on one instruction set."""
    isa = ISAS[request.param]
    if not library.has(isa):
        pytest.skip(f"no {request.param} here")
    return lambda row, config: call(library, row, config, isa)


@dataclass
class Found:
    """What the kernel gives for a row."""

    ids: np.ndarray
    values: np.ndarray
    mass: float
    nan: int
    inf: int


def call(library, row: np.ndarray, config: SamplerConfig, isa: int) -> Found:
    row = np.ascontiguousarray(row, dtype=np.float32)
    ids, values = np.empty(row.size, np.uint32), np.empty(row.size, np.float32)
    mass, broken = ctypes.c_double(), np.zeros(2, np.uint64)
    count = library.law(
        row.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(row.size),
        ctypes.c_double(config.temperature), ctypes.c_double(config.top_p),
        ctypes.c_double(config.min_p), ctypes.c_longlong(config.top_k), isa,
        ids.ctypes.data_as(ctypes.c_void_p), values.ctypes.data_as(ctypes.c_void_p),
        ctypes.byref(mass), broken.ctypes.data_as(ctypes.c_void_p),
    )  # fmt: skip
    if count < 0:
        raise ValueError("refused")
    return Found(ids[:count], values[:count], mass.value, int(broken[0]), int(broken[1]))


def filtered(config: SamplerConfig) -> bool:
    return config.temperature > 0 and (config.top_p < 1 or config.min_p > 0)


def finished(found: Found, config: SamplerConfig, size: int) -> SparseDistribution:
    """The law by NumPy from what the kernel has found."""
    return _host_sparse_distribution(
        found.values, config, token_ids=found.ids, vocab_size=size,
        mass=found.mass if filtered(config) else None,
    )  # fmt: skip


def near_tie(row: np.ndarray, config: SamplerConfig) -> bool:
    """Whether a token's place in or out of the support is within ``NEAR`` of a threshold."""
    probs = softmax(row, config.temperature)
    ranked = probs[np.argsort(-row, kind="stable")]
    before = np.cumsum(ranked)[:-1]
    edges = [np.abs(before - config.top_p)] if config.top_p < 1 else []
    if config.min_p > 0:
        edges.append(np.abs(ranked - config.min_p * ranked[0]))
    return any(edge.size and edge.min() < NEAR for edge in edges)


def check(kernel, row: np.ndarray, config: SamplerConfig) -> int:
    """Order, mass and law of one row; how many candidates there were."""
    row = np.asarray(row, dtype=np.float32)
    wide = row.astype(np.float64)
    found = kernel(row, config)
    assert (found.nan, found.inf) == (0, 0)
    order = np.argsort(-wide, kind="stable")[: found.ids.size]
    np.testing.assert_array_equal(found.ids, order)
    np.testing.assert_array_equal(found.values, row[order])
    if filtered(config):
        with np.errstate(over="ignore"):
            weights = np.exp((wide - wide.max()) / config.temperature)
        assert found.mass == pytest.approx(weights.sum(), rel=2e-7)
    law = finished(found, config, row.size)
    expected = distribution_from_logits(row, config)
    if filtered(config) and near_tie(wide, config):
        return found.ids.size
    np.testing.assert_array_equal(law.token_ids, np.flatnonzero(expected))
    np.testing.assert_allclose(law.to_dense(), expected, rtol=1e-12, atol=0)
    return found.ids.size


SIZES = (1, 2, 15, 16, 17, 63, 64, 65, 127, 640, 4096, 4101, 8193, 49152)
CONFIGS = (
    SamplerConfig(),
    SamplerConfig(temperature=0.0),
    SamplerConfig(temperature=-1.0, top_p=0.5),
    SamplerConfig(top_p=1.0, top_k=1),
    SamplerConfig(top_p=1.0, top_k=3, min_p=0.2),
    SamplerConfig(temperature=1.3, top_k=100),
    SamplerConfig(top_k=0, top_p=0.9),
    SamplerConfig(top_k=0, top_p=0.999, temperature=1.5),
    SamplerConfig(top_k=0, top_p=1e-9),
    SamplerConfig(top_k=0, top_p=1.0, min_p=0.05),
    SamplerConfig(top_k=0, top_p=0.8, min_p=0.01),
    SamplerConfig(top_k=0, top_p=1.0, min_p=1.0),
    SamplerConfig(top_k=0, top_p=1.0, min_p=0.0),
    SamplerConfig(top_k=10**9, top_p=0.7),
)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_rows_of_all_sizes(kernel, config):
    rng = np.random.default_rng(0)
    for size in SIZES:
        check(kernel, rng.normal(size=size) * 3, config)
        check(kernel, rng.normal(size=size) * 0.01, config)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_ties_zeros_and_banned_tokens(kernel, config):
    rng = np.random.default_rng(1)
    for size in (3, 64, 700, 8193):
        row = rng.integers(-3, 3, size=size).astype(np.float32)
        row[rng.random(size) < 0.3] = -INF
        row[rng.random(size) < 0.2] = -0.0
        row[size // 2] = 2.0
        check(kernel, row, config)
        check(kernel, np.zeros(size), config)
        one = np.full(size, -INF, dtype=np.float32)
        one[size - 1] = -5.0
        check(kernel, one, config)


@pytest.mark.parametrize("temperature", [1e-300, 1e-31, 1e-29, 1e-8, 0.01, 50.0, 1e20, 1e29, 1e300])
@pytest.mark.parametrize("top_k", [0, 20])
def test_extreme_temperatures(kernel, temperature, top_k):
    rng = np.random.default_rng(2)
    for scale in (1e-6, 3.0, 1e30):
        row = (rng.normal(size=3000) * scale).astype(np.float32)
        check(kernel, row, SamplerConfig(temperature=temperature, top_k=top_k, top_p=0.9))


def test_largest_and_smallest_floats(kernel):
    high, tiny = np.finfo(np.float32).max, np.float32(1e-45)
    row = np.array([high, -high, high, 0.0, -0.0, tiny, -tiny, -INF] * 20, dtype=np.float32)
    for config in CONFIGS:
        check(kernel, row, config)


@pytest.mark.parametrize("temperature", [0.05, 0.6, 1.0, 7.3])
def test_a_weight_is_within_float32_rounding(kernel, temperature):
    """The mass of two tokens less the first's 1 is the second's weight."""
    config = SamplerConfig(temperature=temperature, top_k=0, top_p=0.5)
    worst = 0.0
    for gap in np.linspace(0.0, 16.0 * temperature, 3001).astype(np.float32):
        mass = kernel(np.array([0.0, -gap]), config).mass
        exact = np.exp(-np.float64(gap) / temperature)
        worst = max(worst, abs((mass - 1.0) / exact - 1.0))
    assert worst < 1e-6  # without fused multiply-adds the exponent's rounding is in it


def test_fused_instructions_give_weights_as_good_as_float32(library):
    isa = library.best()
    if isa == 0:
        pytest.skip("only the portable form here")
    config, worst = SamplerConfig(top_k=0, top_p=0.5), 0.0
    for gap in np.linspace(0.0, 48.0, 5001).astype(np.float32):
        mass = call(library, np.array([0.0, -gap] + [-gap] * 62), config, isa).mass
        worst = max(worst, abs((mass - 1.0) / (63 * np.exp(-np.float64(gap) / 0.6)) - 1.0))
        if mass - 1.0 < 1e-8:  # 1e-16 of it is rounding of the sum itself
            break
    assert worst < 1.2e-7


@pytest.mark.parametrize(("nan", "inf"), [(1, 0), (0, 1), (3, 2), (64, 64)])
def test_rows_that_are_not_logits_have_counts_and_no_candidates(kernel, nan, inf):
    rng = np.random.default_rng(3)
    for size in (129, 4200):
        row = rng.normal(size=size).astype(np.float32)
        places = rng.permutation(size)[: nan + inf]
        row[places[:nan]] = NAN
        row[places[nan:]] = INF
        for config in CONFIGS:
            found = kernel(row, config)
            assert (found.nan, found.inf, found.ids.size) == (nan, inf, 0)


def test_a_bad_logit_is_seen_wherever_it_stands(kernel):
    for size in (1, 16, 65, 130):
        for place in range(size):
            row = np.zeros(size, dtype=np.float32)
            row[place] = NAN
            assert kernel(row, SamplerConfig()).nan == 1
            row[place] = INF
            assert kernel(row, SamplerConfig()).inf == 1
            row[place] = -NAN
            assert kernel(row, SamplerConfig(temperature=0.0)).nan == 1


def test_a_row_without_an_allowed_token_has_no_candidates(kernel):
    for size in (1, 64, 100):
        found = kernel(np.full(size, -INF), SamplerConfig())
        assert (found.ids.size, found.nan, found.inf) == (0, 0, 0)


def test_top_p_alone_does_not_sort_the_vocabulary(kernel):
    row = np.random.default_rng(4).normal(size=49152) * 3
    config = SamplerConfig(temperature=0.6, top_p=0.9, top_k=0)
    kept = np.count_nonzero(distribution_from_logits(row.astype(np.float32), config))
    assert check(kernel, row, config) < 1.5 * kept + 64


def test_a_result_does_not_depend_on_the_row_before(kernel):
    rng = np.random.default_rng(5)
    rows = [rng.normal(size=size).astype(np.float32) for size in (5000, 100, 64, 5000)]
    rows.insert(1, np.full(300, NAN, dtype=np.float32))
    for config in CONFIGS:
        first = [kernel(row, config) for row in rows]
        again = [kernel(row, config) for row in reversed(rows)][::-1]
        for a, b in zip(first, again, strict=True):
            np.testing.assert_array_equal(a.ids, b.ids)
            assert (a.mass, a.nan, a.inf) == (b.mass, b.nan, b.inf)


LOGITS = st.one_of(
    st.floats(-30, 30, width=32), st.sampled_from([-INF, 0.0, -0.0, 1.0, 1.0, 3e38, -3e38])
)


@settings(max_examples=300, deadline=None)
@example(row=[0.0, -0.0], temperature=0.6, top_p=0.5, top_k=0, min_p=0.0)
@given(
    row=st.lists(LOGITS, min_size=1, max_size=150),
    temperature=st.sampled_from([0.0, 0.1, 0.6, 1.0, 3.0]),
    top_p=st.floats(1e-6, 1.0),
    top_k=st.integers(0, 200),
    min_p=st.sampled_from([0.0, 0.0, 0.01, 0.5, 1.0]),
)
def test_any_row(library, row, temperature, top_p, top_k, min_p):
    assume(max(row) > -INF)
    config = SamplerConfig(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    for isa in ISAS.values():
        if library.has(isa):
            check(lambda r, c, isa=isa: call(library, r, c, isa), np.array(row), config)


def test_what_is_out_of_range_is_refused(library):
    wrong = [
        (0, 0.6, 0.9, 0.0, 1), (4, NAN, 0.9, 0.0, 1), (4, INF, 0.9, 0.0, 1), (4, 0.6, 0.0, 0.0, 1),
        (4, 0.6, 1.5, 0.0, 1), (4, 0.6, NAN, 0.0, 1), (4, 0.6, 0.9, -0.1, 1), (4, 0.6, 0.9, 1.1, 1),
        (4, 0.6, 0.9, 0.0, -1),
    ]  # fmt: skip
    for size, temperature, top_p, min_p, top_k in wrong:
        config = SamplerConfig()
        for name, value in (("temperature", temperature), ("top_p", top_p), ("min_p", min_p)):
            object.__setattr__(config, name, value)
        object.__setattr__(config, "top_k", top_k)
        with pytest.raises(ValueError, match="refused"):
            call(library, np.zeros(size), config, library.best())


# --- through the extension ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def native():
    kernels = pytest.importorskip("mtplx_kernels")
    try:
        return kernels.native()
    except (ImportError, OSError, AttributeError) as why:
        pytest.skip(f"the extension is not there: {why}")


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_the_extension_gives_the_same_for_all_rows(native, library, config):
    rows = (np.random.default_rng(6).normal(size=(5, 1000)) * 3).astype(np.float32)
    rows[3, 10] = NAN
    request = (config.temperature, config.top_p, config.min_p, config.top_k)
    for level in native.levels():
        found = native.law(rows, *request, level)
        assert len(found) == 5
        for row, (ids, probs, mass, nan, inf) in zip(rows, found, strict=True):
            expected = call(library, row, config, ISAS.get(level.removesuffix("vnni"), 0))
            law = finished(expected, config, row.size) if expected.ids.size else None
            np.testing.assert_array_equal(ids, [] if law is None else law.token_ids)
            np.testing.assert_allclose(probs, [] if law is None else law.probs, rtol=1e-15, atol=0)
            assert (ids.dtype, probs.dtype) == (np.int64, np.float64)
            assert mass == pytest.approx(expected.mass, rel=2e-7)
            assert (nan, inf) == (expected.nan, expected.inf)


def test_the_extension_uses_the_level_in_force(native):
    rows = np.random.default_rng(7).normal(size=(1, 5000)).astype(np.float32)
    in_force = native.isa()
    try:
        for level in native.levels():
            native.choose(level)
            by_name = native.law(rows, 0.6, 0.9, 0.0, 0, level)[0][2]
            assert native.law(rows, 0.6, 0.9, 0.0, 0)[0][2] == by_name
    finally:
        native.choose(in_force)


def test_the_extension_refuses_what_is_wrong(native):
    rows = np.zeros((2, 4), dtype=np.float32)
    assert native.law(rows[:0], 0.6, 0.9, 0.0, 0) == []
    for arguments in (
        (rows[:, :0], 0.6, 0.9, 0.0, 0), (rows, NAN, 0.9, 0.0, 0), (rows, 0.6, 0.0, 0.0, 0),
        (rows, 0.6, 0.9, 2.0, 0), (rows, 0.6, 0.9, 0.0, -1), (rows, 0.6, 0.9, 0.0, 0, "sse9"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"must|no kernels"):
            native.law(*arguments)
    for wrong in (rows[0], rows.astype(np.float64), np.zeros((4, 4), np.float32)[:, ::2], None):
        with pytest.raises(TypeError):
            native.law(wrong, 0.6, 0.9, 0.0, 0)


def test_the_extension_gives_memory_back(native):
    """10,000 calls leave no more than what the first 1,000 left."""
    rows = np.zeros((2, 512), dtype=np.float32)

    def resident() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmRSS")).split()[1])

    if not Path("/proc/self/status").exists():
        pytest.skip("no /proc here")
    for _ in range(1000):
        native.law(rows, 1.0, 1.0, 0.0, 0)
    before = resident()
    for _ in range(10_000):
        native.law(rows, 1.0, 1.0, 0.0, 0)
    assert resident() - before < 1024
