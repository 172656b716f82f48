"""mtplx.blas: each case in a process of its own, because a BLAS is chosen once per process."""

import importlib.util
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from mtplx import blas
from mtplx.errors import BlasError

ROOT = Path(__file__).resolve().parent.parent


def run(code: str, **env: str) -> dict:
    """Run code in a fresh process; it leaves its answer in `out`, a dict that JSON can hold."""
    code = "import json\nout = {}\n" + textwrap.dedent(code) + "\nprint(json.dumps(out))"
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("OPENBLAS_", "MTPLX_"))}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**clean, "PYTHONPATH": str(ROOT), **env},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def available() -> str:
    """What keeps OpenBLAS from being used here; empty where nothing does."""
    if not sys.platform.startswith("linux"):
        return "not Linux"
    if any(map(blas._installed, ("mlx-cuda-12", "mlx-cuda-13"))):
        return "MLX's GPU build"
    missing = [m for m in ("mtplx_kernels", "scipy_openblas32") if not importlib.util.find_spec(m)]
    return f"not installed: {', '.join(missing)}" if missing else ""


@pytest.mark.skipif("MTPLX_REQUIRE_KERNELS" not in os.environ, reason="kernels are optional")
def test_the_kernels_are_there_where_they_must_be():
    assert available() == ""


needs_openblas = pytest.mark.skipif(bool(available()), reason=available() or "available")

PRODUCTS = """
    import numpy as np
    from mtplx import blas
    out["status"] = blas.activate({choice!r}).__dict__
    import mlx.core as mx
    rng = np.random.default_rng(3)
    worst = 0.0
    shapes = [(1, 576, 1536), (2, 1536, 576), (4, 576, 4915), (7, 33, 129), (129, 577, 31),
              (1, 1, 1), (513, 3, 1025), (1030, 64, 9), (600, 700, 800)]
    for m, k, n in shapes:
        for left in (False, True):
            for right in (False, True):
                a = rng.standard_normal((k, m) if left else (m, k), dtype=np.float32)
                b = rng.standard_normal((n, k) if right else (k, n), dtype=np.float32)
                x, y = mx.array(a), mx.array(b)
                got = np.array((x.T if left else x) @ (y.T if right else y))
                want = (a.T if left else a).astype(float) @ (b.T if right else b).astype(float)
                worst = max(worst, float(np.abs(got - want).max() / np.abs(want).max()))
    out["worst"] = worst
    empty = [(0, 4, 3), (4, 0, 3), (4, 3, 0)]
    out["empty"] = [list((mx.zeros((m, k)) @ mx.ones((k, n))).shape) for m, k, n in empty]
    out["zero"] = float(mx.abs(mx.ones((4, 0)) @ mx.ones((0, 3))).sum())
    c = mx.array((rng.standard_normal((70, 50)) + 1j).astype(np.complex64))
    d = np.array(c)
    out["complex"] = float(np.abs(np.array(c @ c.T) - d @ d.T).max() / np.abs(d @ d.T).max())
    out["counters"] = blas.counters()
"""


@pytest.mark.parametrize("threads", ["1", "2", "5"])
@needs_openblas
def test_products_equal_numpy(threads):
    out = run(PRODUCTS.format(choice="openblas"), MTPLX_THREADS=threads)
    assert out["status"]["name"] == "openblas"
    assert out["status"]["threads"] == int(threads)
    assert out["worst"] < 1e-5
    assert out["empty"] == [[0, 3], [4, 3], [4, 0]]
    assert out["zero"] == 0
    assert out["complex"] < 1e-5
    assert out["counters"]["sgemm"] >= 36
    assert out["counters"]["cgemm"] >= 1
    assert (out["counters"]["shared"] > 0) == (threads != "1")


@needs_openblas
def test_a_large_matmul_runs_on_openblas():
    out = run(
        """
        from mtplx import blas
        now = blas.activate()
        import mlx.core as mx
        a = mx.random.normal((1024, 1024))
        mx.eval(a @ a)
        with open("/proc/self/maps") as maps:
            out["mapped"] = now.library in maps.read()
        out["status"] = now.__dict__
        out["counters"] = blas.counters()
        out["line"] = blas.describe()
        """,
        MTPLX_THREADS="2",
    )
    assert out["mapped"]
    assert out["counters"] == {"sgemm": 1, "dgemm": 0, "cgemm": 0, "shared": 1}
    assert out["status"]["config"].startswith("OpenBLAS 0.")
    assert out["status"]["small_threshold"] > 0
    assert "BLAS openblas; OpenBLAS 0." in out["line"]
    assert "2 threads" in out["line"]


@needs_openblas
def test_bits_depend_on_the_shape_only():
    code = """
        import hashlib
        import numpy as np
        from mtplx import blas
        blas.activate("openblas")
        import mlx.core as mx
        rng = np.random.default_rng(0)
        digest = hashlib.sha256()
        for m, k, n in [(1, 576, 1536), (4, 576, 49152), (300, 300, 300), (1025, 70, 33)]:
            a = mx.array(rng.standard_normal((m, k), dtype=np.float32))
            b = mx.array(rng.standard_normal((n, k), dtype=np.float32))
            for _ in range(3):
                digest.update(np.array(a @ b.T).tobytes())
        out["digest"] = digest.hexdigest()
        """
    digests = {run(code, MTPLX_THREADS=t)["digest"] for t in ("1", "2", "3")}
    assert len(digests) == 1


@needs_openblas
def test_products_of_two_streams_at_once():
    out = run(
        """
        import threading
        import numpy as np
        from mtplx import blas
        blas.activate("openblas")
        import mlx.core as mx
        rng = np.random.default_rng(0)
        a = rng.standard_normal((96, 640), dtype=np.float32)
        b = rng.standard_normal((640, 2000), dtype=np.float32)
        want = a @ b
        bad = []
        def work():
            stream = mx.new_stream(mx.cpu)
            x, y = mx.array(a), mx.array(b)
            for _ in range(40):
                with mx.stream(stream):
                    z = np.array(mx.matmul(x, y))
                if np.abs(z - want).max() > 1e-3:
                    bad.append(1)
        threads = [threading.Thread(target=work) for _ in range(3)]
        [t.start() for t in threads]
        [t.join() for t in threads]
        out["bad"] = len(bad)
        """,
        MTPLX_THREADS="3",
    )
    assert out["bad"] == 0


def test_reference_leaves_what_mlx_brought():
    out = run(PRODUCTS.format(choice="reference"))
    assert out["status"]["name"] in ("reference", "not applicable")
    assert out["worst"] < 1e-4
    assert out["counters"] == {"sgemm": 0, "dgemm": 0, "cgemm": 0, "shared": 0}


@needs_openblas
def test_too_late_says_so():
    out = run(
        """
        import mlx.core
        from mtplx import blas
        from mtplx.errors import BlasError
        out["auto"] = blas.activate().__dict__
        try:
            blas.activate("openblas")
        except BlasError as error:
            out["error"] = str(error)
        """
    )
    assert out["auto"]["name"] == "reference"
    assert "MLX was imported first" in out["auto"]["reason"]
    assert "MLX was imported first" in out["error"]


@needs_openblas
def test_repeated_and_conflicting_choices():
    out = run(
        """
        from mtplx import blas
        from mtplx.errors import BlasError
        out["before"] = blas.status().reason
        out["same"] = blas.activate("openblas") == blas.activate() == blas.activate("openblas")
        try:
            blas.activate("reference")
        except BlasError as error:
            out["error"] = str(error)
        """
    )
    assert "not activated" in out["before"]
    assert out["same"]
    assert (
        out["error"]
        == "reference was asked for, but this process already uses openblas (asked for)"
    )


@pytest.mark.parametrize("missing", ["mtplx_kernels", "scipy_openblas32"])
@needs_openblas
def test_a_missing_package_is_named(missing):
    out = run(
        f"""
        import importlib.util
        find = importlib.util.find_spec
        importlib.util.find_spec = lambda n, *a: None if n == {missing!r} else find(n, *a)
        from mtplx import blas
        from mtplx.errors import BlasError
        try:
            blas.activate("openblas")
        except BlasError as error:
            out["error"] = str(error)
        out["auto"] = blas.activate().__dict__
        """
    )
    name = missing.replace("_", "-")
    assert name in out["error"]
    assert out["auto"]["name"] == "reference"
    assert name in out["auto"]["reason"]


@needs_openblas
def test_a_broken_openblas_is_reported(tmp_path):
    (tmp_path / "scipy_openblas32" / "lib").mkdir(parents=True)
    (tmp_path / "scipy_openblas32" / "__init__.py").touch()
    (tmp_path / "scipy_openblas32" / "lib" / "libscipy_openblas.so").write_bytes(b"no library")
    out = run(
        f"""
        import sys
        sys.path.insert(0, {str(tmp_path)!r})
        from mtplx import blas
        out["auto"] = blas.activate().__dict__
        import mlx.core as mx
        out["sum"] = float((mx.ones((3, 3)) @ mx.ones((3, 3))).sum())
        """
    )
    assert out["auto"]["name"] == "reference"
    assert "OpenBLAS cannot be opened" in out["auto"]["reason"]
    assert out["sum"] == 27


@needs_openblas
def test_the_environment_is_left_as_it_was():
    code = """
        import os
        from mtplx import blas
        now = blas.activate("openblas")
        out["env"] = now.openblas_env
        out["threads"] = now.threads
        out["same"] = now.openblas_env == {
            k: v for k, v in os.environ.items() if k.startswith("OPENBLAS_")}
        """
    out = run(code, OPENBLAS_NUM_THREADS="1", OPENBLAS_VERBOSE="0")
    assert out == {
        "env": {"OPENBLAS_NUM_THREADS": "1", "OPENBLAS_VERBOSE": "0"},
        "threads": 1,
        "same": True,
    }
    assert run(code)["env"] == {}


def test_importing_reads_nothing_and_imports_no_mlx():
    out = run(
        """
        import sys
        import mtplx.blas
        out["mlx"] = [m for m in sys.modules if m.split(".")[0] == "mlx"]
        """,
        MTPLX_THREADS="nonsense",
    )
    assert out["mlx"] == []


def test_other_systems_are_not_applicable(monkeypatch):
    monkeypatch.setattr(blas, "_process", blas._Process())
    monkeypatch.setattr(sys, "platform", "darwin")
    assert blas.activate().name == "not applicable"
    assert blas.activate("reference").name == "not applicable"
    with pytest.raises(BlasError, match="darwin"):
        blas.activate("openblas")


def test_gpu_builds_are_not_applicable(monkeypatch):
    monkeypatch.setattr(blas, "_process", blas._Process())
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(blas, "_installed", lambda name: name == "mlx-cuda-13")
    now = blas.activate()
    assert now.name == "not applicable"
    assert "mlx-cuda-13" in now.reason


def test_another_choice_is_refused():
    with pytest.raises(ValueError, match="auto, openblas, reference"):
        blas.activate("mkl")


@pytest.mark.parametrize("value", ["0", "-1", "two", "1.5", "²", "257"])
def test_bad_thread_counts_are_refused(monkeypatch, value):
    monkeypatch.setenv("MTPLX_THREADS", value)
    with pytest.raises(BlasError, match="MTPLX_THREADS must be a positive integer"):
        blas.thread_count()
    monkeypatch.setattr(blas, "_process", blas._Process())
    monkeypatch.setattr(sys, "platform", "linux")
    with pytest.raises(BlasError, match="MTPLX_THREADS"):
        blas.activate()


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A root directory with control groups: a function that writes one of its files."""
    monkeypatch.delenv("MTPLX_THREADS", raising=False)
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)

    def write(path: str, text: str) -> Path:
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return tmp_path

    return write


def test_no_quota(machine, monkeypatch, tmp_path):
    assert blas.cpu_quota(tmp_path) is None
    assert blas.thread_count(tmp_path) == 8
    monkeypatch.setenv("MTPLX_THREADS", "3")
    assert blas.thread_count(tmp_path) == 3
    monkeypatch.delenv("MTPLX_THREADS")
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "2")
    assert blas.thread_count(tmp_path) == 2
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "many")
    assert blas.thread_count(tmp_path) == 8


def test_quota_of_version_2(machine):
    machine("proc/self/cgroup", "0::/a/b\n")
    machine("sys/fs/cgroup/a/b/cpu.max", "max 100000\n")
    root = machine("sys/fs/cgroup/a/cpu.max", "250000 100000\n")
    assert blas.cpu_quota(root) == 2.5
    assert blas.thread_count(root) == 3
    machine("sys/fs/cgroup/a/b/cpu.max", "20000 100000\n")
    assert blas.thread_count(root) == 1
    machine("sys/fs/cgroup/a/b/cpu.max", "nonsense\n")
    assert blas.thread_count(root) == 3


def test_quota_inside_a_container(machine):
    """The group's own path is not visible there; the limit stands at the top."""
    machine("proc/self/cgroup", "0::/../elsewhere\n")
    root = machine("sys/fs/cgroup/cpu.max", "150000 100000\n")
    assert blas.cpu_quota(root) == 1.5


@pytest.mark.parametrize("top", ["cpu", "cpu,cpuacct"])
def test_quota_of_version_1(machine, top):
    machine("proc/self/cgroup", f"4:memory:/m\n3:{top}:/job\n0::/\n")
    machine(f"sys/fs/cgroup/{top}/job/cpu.cfs_quota_us", "400000\n")
    machine(f"sys/fs/cgroup/{top}/job/cpu.cfs_period_us", "100000\n")
    machine(f"sys/fs/cgroup/{top}/cpu.cfs_quota_us", "-1\n")
    root = machine(f"sys/fs/cgroup/{top}/cpu.cfs_period_us", "100000\n")
    assert blas.cpu_quota(root) == 4
    assert blas.thread_count(root) == 4
