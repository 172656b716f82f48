"""float32 products of 1024 x 1024: OpenBLAS against what MLX brought along, in two processes.

A BLAS is chosen once a process, so each side has its own; they take turns, one product each.
"""

from __future__ import annotations

import subprocess
import sys
from statistics import median

from ..errors import BlasError
from .report import Report

_ROUNDS = 7
_WORKER = """
import sys
from time import perf_counter
from mtplx.blas import activate, describe
activate(sys.argv[1])
import mlx.core as mx
a, b = mx.random.normal((1024, 1024)), mx.random.normal((1024, 1024))
mx.eval(a, b)
mx.eval(a @ b)
print("ready", describe(), flush=True)
for _ in sys.stdin:
    begin = perf_counter()
    mx.eval(a @ b)
    print(perf_counter() - begin, flush=True)
"""


def _start(choice: str) -> tuple[subprocess.Popen[str], str]:
    """A process that multiplies with the BLAS of that name, and that BLAS in its own words."""
    worker = subprocess.Popen(
        [sys.executable, "-c", _WORKER, choice],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    word, _, described = _read(worker).partition(" ")
    if word != "ready":
        assert worker.stderr is not None
        why = worker.stderr.read().strip().splitlines()[-1:] or ["no reason given"]
        raise BlasError(f"no process with BLAS {choice!r}: {why[0]}")
    return worker, described


def _read(worker: subprocess.Popen[str]) -> str:
    assert worker.stdout is not None
    return worker.stdout.readline().strip()


def _product(worker: subprocess.Popen[str]) -> float:
    assert worker.stdin is not None
    worker.stdin.write("\n")
    worker.stdin.flush()
    return float(_read(worker))


def run() -> Report:
    """Seconds of a product on both sides, and their ratio; ``BlasError`` without OpenBLAS."""
    started = [_start("reference"), _start("openblas")]
    workers = [worker for worker, _ in started]
    try:
        times = [[_product(worker) for worker in workers] for _ in range(_ROUNDS)]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    stock, fast = (median(column) for column in zip(*times, strict=True))
    flops = 2 * 1024**3
    figures: dict[str, float | None] = {
        "matmul_vs_stock": stock / fast,
        "stock_gflops": flops / stock / 1e9,
        "gflops": flops / fast / 1e9,
    }
    report = Report("blas", figures)
    report.machine["blas"] = started[1][1]
    return report
