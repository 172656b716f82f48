"""What is done another way on a CPU comes to the same."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mtplx import device, native

TYPES = [mx.float32, mx.float16, mx.bfloat16]


@pytest.fixture(params=[True, False], ids=["kernels", "mlx"])
def place(request, monkeypatch):
    if request.param and native.status().native is None:
        pytest.skip("the CPU kernels are not installed")
    monkeypatch.setattr(device, "on_cpu", lambda: request.param)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.usefixtures("place")
def test_rows_are_rows(dtype):
    whole = mx.arange(12).reshape(4, 3).astype(dtype)
    for first, last in ((0, 2), (3, 4), (1, 3), (0, 0), (4, 4), (0, 4)):
        for array in (whole, whole.T[:, ::-1].T):
            found = device.rows_of(array, first, last)
            assert found.dtype == dtype
            assert found.tolist() == array[first:last].tolist()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("where", ["kernels", "cpu", "gpu"])
def test_one_place_is_raised_and_the_array_stays_as_it_is(dtype, where, monkeypatch):
    if where == "kernels" and native.status().native is None:
        pytest.skip("the CPU kernels are not installed")
    if where != "kernels":
        monkeypatch.setattr(native, "loaded", None)
    monkeypatch.setattr(device, "on_cpu", lambda: where != "gpu")
    rows = mx.arange(8).reshape(2, 4).astype(dtype)
    found = device.raised(rows, 3, 0.5)
    assert found.dtype == (dtype if where == "gpu" else mx.float32)
    assert found.tolist() == [[0, 1, 2, 3.5], [4, 5, 6, 7.5]]
    assert rows.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_the_kernels_refuse_what_is_not_there():
    kernels = native.status().native
    if kernels is None:
        pytest.skip("the CPU kernels are not installed")
    for first, last in ((-1, 1), (2, 1), (0, 3)):
        with pytest.raises(ValueError, match="no such rows"):
            kernels.rows(mx.zeros((2, 2)), first, last)
    for place in (-1, 2):
        with pytest.raises(ValueError, match="no such place"):
            kernels.raised(mx.zeros((2, 2)), place, 1.0)


def test_the_default_device_is_asked_for():
    assert device.on_cpu() == (mx.default_device() == mx.cpu)
