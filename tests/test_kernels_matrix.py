"""Matrices in the kernels' layout, against MLX's own operations, at every level of instructions."""

from __future__ import annotations

import os
import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtplx.native import status

native = status().native
pytestmark = pytest.mark.skipif(native is None, reason="the CPU kernels are not installed")
LEVELS = native.levels() if native else []
FLOATS = (mx.float32, mx.float16, mx.bfloat16)


@pytest.fixture(params=LEVELS)
def level(request):
    before = native.isa()
    native.choose(request.param)
    yield request.param
    native.choose(before)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def quantised(n, k, group, bits, dtype=mx.float32):
    """The arrays of MLX's packing, and what they stand for in float64."""
    w, scales, biases = mx.quantize(mx.array(normal(n, k)), group_size=group, bits=bits)
    scales, biases = scales.astype(dtype), biases.astype(dtype)
    wide = [part.astype(mx.float32) for part in (scales, biases)]
    plain = mx.dequantize(w, *wide, group_size=group, bits=bits)
    return (w, scales, biases, group, bits), np.array(plain).astype(np.float64)


def rounded(x, group):
    """What quantised weights are multiplied by: whole numbers of 16 bits times a unit a group."""
    parts = x.reshape(*x.shape[:-1], -1, group)
    most = np.abs(parts).max(axis=-1, keepdims=True)
    whole = np.rint(parts * (np.float32(32767) / np.where(most == 0, np.float32(1), most)))
    unit = most / np.float32(32767)
    assert (np.abs(parts - whole.astype(np.float64) * unit) <= 0.51 * unit).all()
    return (whole.astype(np.float64) * unit).reshape(x.shape)


def close(found, x, plain):
    """Within float32's rounding of sums of K products."""
    size = np.abs(x).astype(np.float64) @ np.abs(plain).T
    error = np.abs(np.array(found) - x.astype(np.float64) @ plain.T)
    return bool((error <= 3e-6 * size + 1e-6).all())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("dtype", FLOATS)
def test_quantised_product_is_mlx_s(level, bits, group, dtype):
    parts, plain = quantised(200, 256, group, bits, dtype)
    matrix = native.Matrix.quantized(*parts)
    for rows in (1, 2, 3, 4, 5, 8, 9, 33):
        x = normal(rows, 256, seed=rows)
        found = matrix(mx.array(x))
        assert close(found, rounded(x, group), plain)
        assert np.array_equal(np.array(matrix.now(mx.array(x))), np.array(found))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (7, 33), (130, 95), (64, 64), (65, 576)])
def test_float_product_is_exact_to_float32_sums(level, dtype, n, k):
    w = mx.array(normal(n, k)).astype(dtype)
    plain = np.array(w.astype(mx.float32)).astype(np.float64)
    matrix = native.Matrix.dense(w)
    x = normal(5, k, seed=1)
    assert close(matrix(mx.array(x)), x, plain)
    assert np.array_equal(np.array(matrix.rows(mx.arange(n))), plain)


def test_rows_are_dequantised_as_mlx_does(level):
    parts, plain = quantised(300, 128, 32, 4)
    rows = native.Matrix.quantized(*parts).rows(mx.array([[0, 299], [17, 0]]))
    assert rows.shape == (2, 2, 128)
    assert np.abs(np.array(rows) - plain[[[0, 299], [17, 0]]]).max() < 1e-6


def test_an_id_out_of_range_gives_nan_not_foreign_memory(level):
    rows = native.Matrix.dense(mx.ones((4, 8))).rows(mx.array([-1, 4, 2**30, 3]))
    assert np.isnan(np.array(rows)[:3]).all()
    assert (np.array(rows)[3] == 1).all()


def test_a_bias_is_added_to_outputs_not_to_rows(level):
    w, bias = normal(40, 32), normal(40, seed=2)
    matrix = native.Matrix.dense(mx.array(w), mx.array(bias))
    x = normal(3, 32, seed=3)
    assert np.abs(np.array(matrix(mx.array(x))) - (x @ w.T + bias)).max() < 1e-4
    assert np.array_equal(np.array(matrix.rows(mx.arange(40))), w)


def test_a_large_vocabulary():
    parts, plain = quantised(49152, 64, 32, 8, mx.float16)
    x = normal(2, 64, seed=5)
    assert close(native.Matrix.quantized(*parts)(mx.array(x)), rounded(x, 32), plain)


def test_nothing_in_nothing_out(level):
    matrix = native.Matrix.dense(mx.ones((4, 8)))
    assert matrix(mx.zeros((0, 8))).shape == (0, 4)
    assert matrix(mx.zeros((2, 0, 8))).shape == (2, 0, 4)
    assert matrix.rows(mx.zeros((0,), mx.int32)).shape == (0, 8)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_stays_in_its_row(level, value):
    parts, plain = quantised(70, 64, 32, 4)
    x = normal(6, 64)
    x[2, 5] = value
    out = np.array(native.Matrix.quantized(*parts)(mx.array(x)))
    assert not np.isfinite(out[2]).any()
    kept = [0, 1, 3, 4, 5]
    assert close(mx.array(out[kept]), rounded(x[kept], 32), plain)


@pytest.mark.parametrize(("outlier", "finer"), [(1, 8), (1000, 2)])
def test_rounding_is_finer_than_float16(level, outlier, finer):
    parts, plain = quantised(256, 576, 32, 4, mx.float16)
    x = normal(8, 576)
    x[:, 100] *= outlier  # costs the others of its group precision
    exact = x.astype(np.float64) @ plain.T
    error = np.array(native.Matrix.quantized(*parts)(mx.array(x))) - exact
    halves = x.astype(np.float16).astype(np.float64) @ plain.T - exact
    assert np.sqrt((error**2).mean()) < np.sqrt((halves**2).mean()) / finer


@pytest.mark.parametrize("size", [1e-38, 1e-29, 1e-6, 1e30, 1e36])
def test_any_size_of_inputs(level, size):
    parts, plain = quantised(70, 64, 32, 8)
    x = normal(3, 64).clip(-1, 1)
    x[1, 32:] = 0
    found = np.array(native.Matrix.quantized(*parts)(mx.array(x * np.float32(size))))
    if size < 1e-30:
        assert (found == 0).all()  # as the documentation of the products says
    else:
        assert np.abs(found / size - x @ plain.T).max() < 1e-2


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 40),
    n=st.integers(1, 200),
    groups=st.integers(1, 6),
    bits=st.sampled_from([4, 8]),
    seed=st.integers(0, 2**16),
)
def test_a_row_has_the_same_bits_in_any_company(rows, n, groups, bits, seed):
    rng = np.random.default_rng(seed)
    w = mx.array(rng.standard_normal((n, groups * 32)).astype(np.float32))
    matrix = native.Matrix.quantized(*mx.quantize(w, group_size=32, bits=bits), 32, bits)
    x = rng.standard_normal((rows, groups * 32)).astype(np.float32)
    together = np.array(matrix(mx.array(x)))
    r = int(rng.integers(rows))
    assert np.array_equal(np.array(matrix(mx.array(x[r : r + 1])))[0], together[r])
    native.set_threads(1)
    alone = np.array(matrix(mx.array(x)))
    native.set_threads(status().threads)
    assert np.array_equal(alone, together)


def test_strided_and_16_bit_inputs():
    w = normal(24, 32)
    matrix = native.Matrix.dense(mx.array(w))
    x = normal(32, 6)
    found = np.array(matrix(mx.array(x).T))
    assert np.abs(found - x.T @ w.T).max() < 1e-4
    half = mx.array(x.T).astype(mx.bfloat16)
    exact = np.array(half.astype(mx.float32)) @ w.T
    assert np.abs(np.array(matrix(half)) - exact).max() < 1e-4


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m: m.dense(mx.ones((4,))), "matrix"),
        (lambda m: m.dense(mx.ones((4, 4), mx.int32)), "float"),
        (lambda m: m.dense(mx.ones((0, 4))), "without rows"),
        (lambda m: m.dense(mx.array([[np.inf]]).astype(mx.float16)), "finite"),
        (lambda m: m.dense(mx.ones((4, 4)), mx.ones((3,))), "bias"),
        (lambda m: m.quantized(mx.zeros((4, 4), mx.uint32), *[mx.ones((4, 1))] * 2, 32, 3), "bits"),
        (lambda m: m.quantized(mx.zeros((4, 4), mx.uint32), *[mx.ones((4, 2))] * 2, 16, 4), "32"),
        (
            lambda m: m.quantized(mx.zeros((4, 4), mx.uint32), *[mx.ones((4, 2))] * 2, 32, 4),
            "group",
        ),
        (lambda m: m.dense(mx.ones((4, 8)))(mx.ones((2, 4))), "8"),
        (lambda m: m.dense(mx.ones((4, 8))).rows(mx.ones((2,))), "integers"),
    ],
)
def test_what_does_not_fit_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make(native.Matrix)


def in_new_process(isa):
    code = "from mtplx.native import status; s = status(); print(s.isa, '|', s.reason)"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "MTPLX_ISA": isa},
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    return done.stdout.strip()


def test_the_level_can_be_forced_by_the_environment():
    assert in_new_process("portable").startswith("portable |")


def test_an_unknown_level_is_an_error_that_names_the_known():
    found = in_new_process("sse9")
    assert found.startswith("| MTPLX_ISA: no kernels for 'sse9'")
    assert "portable" in found


def test_memory_is_given_back():
    def rss():
        with open("/proc/self/statm") as f:
            return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    if not os.path.exists("/proc/self/statm"):
        pytest.skip("no /proc")
    parts, _ = quantised(64, 64, 32, 4)
    matrix = native.Matrix.quantized(*parts)
    x = mx.array(normal(4, 64))

    def calls(n):
        for _ in range(n):
            mx.eval(matrix(x), matrix.rows(mx.array([1, 2])))

    calls(500)
    before = rss()
    calls(10_000)
    assert rss() - before < 4 << 20


def test_vnni_changes_no_bit():
    pair = ["avx512vnni", "avx512"]
    if not set(pair) <= set(LEVELS):
        pytest.skip("no AVX-512 VNNI on this machine")
    matrices = [native.Matrix.quantized(*quantised(200, 256, 32, bits)[0]) for bits in (4, 8)]
    x, logits = mx.array(normal(13, 256)), mx.array(normal(2, 5000))
    before, found = native.isa(), []
    try:
        for level in pair:
            native.choose(level)
            found.append([np.array(m.now(x[:rows])) for m in matrices for rows in range(1, 14)])
            for laws in (native.law(logits, 0.6, 0.95, 0.0, 20), native.whole_law(logits, 0.6)):
                found[-1] += [np.asarray(part) for law in laws for part in law]
    finally:
        native.choose(before)
    assert all(np.array_equal(one, two) for one, two in zip(*found, strict=True))
