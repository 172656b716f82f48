"""What is done another way on a CPU comes to the same."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mtplx import device

TYPES = [mx.float32, mx.float16, mx.bfloat16]


@pytest.fixture(params=[True, False], ids=["cpu", "gpu"])
def place(request, monkeypatch):
    monkeypatch.setattr(device, "on_cpu", lambda: request.param)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.usefixtures("place")
def test_rows_are_rows(dtype):
    whole = mx.arange(12).reshape(4, 3).astype(dtype)
    for rows in (slice(2), slice(-1, None), slice(1, 3), slice(0)):
        found = device.rows_of(whole, rows)
        assert found.dtype == dtype
        assert mx.array_equal(found, whole[rows])


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.usefixtures("place")
def test_one_place_is_raised_and_the_array_stays_as_it_is(dtype):
    rows = mx.arange(8).reshape(2, 4).astype(dtype)
    found = device.raised(rows, 3, 0.5)
    assert found.dtype == dtype
    assert found.tolist() == [[0, 1, 2, 3.5], [4, 5, 6, 7.5]]
    assert rows.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_the_default_device_is_asked_for():
    assert device.on_cpu() == (mx.default_device() == mx.cpu)
    assert np.asarray(device.rows_of(mx.zeros((2, 2)), slice(1))).shape == (1, 2)
