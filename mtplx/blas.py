"""Chooses the BLAS that MLX's CPU build multiplies with.

The wheel of MLX for Linux CPUs comes with the reference BLAS, which is an order of magnitude
slower than OpenBLAS. MLX finds its three products by name through the dynamic linker, so a library
that exports those names, opened globally before MLX, replaces them. ``mtplx-kernels`` has that
library and PyPI's ``scipy-openblas32`` the OpenBLAS behind it; without either, MLX keeps its own.

Nothing happens at import. Call `activate` before the first ``import mlx.core`` of the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import importlib.util
import math
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from mtplx.errors import BlasError

__all__ = ["BlasStatus", "Choice", "activate", "counters", "describe", "status", "thread_count"]

Choice = Literal["auto", "openblas", "reference"]

_ABI = 1
_MOST_THREADS = 256
_INIT_ERRORS = {
    1: "bad argument",
    2: "OpenBLAS cannot be opened",
    3: "this OpenBLAS lacks a function",
    4: "this OpenBLAS has the wrong integer size",
    5: "already initialised by someone else in this process",
    6: "its threads cannot be started",
}


@dataclass(frozen=True)
class BlasStatus:
    """Which BLAS answers MLX's CPU products in this process, and why.

    Attributes:
        name: ``openblas``, ``reference`` (what MLX brought along) or ``not applicable`` (MLX on a
            GPU or on macOS: its products do not go through this).
        library: path of the OpenBLAS, None for another name.
        config: version and build options as OpenBLAS reports them, with the processor kind it
            chose; empty for another name.
        threads: threads a large product uses; None where unknown.
        small_threshold: cost below which a product uses one thread: multiply-adds / 16 plus the
            elements of both factors; None for another name than ``openblas``.
        reason: one line for people: why this one.
        openblas_env: the OPENBLAS_* variables of the process.
    """

    name: str
    reason: str
    library: str | None = None
    config: str = ""
    threads: int | None = None
    small_threshold: int | None = None
    openblas_env: dict[str, str] = field(default_factory=dict)


class _UnavailableError(Exception):
    """OpenBLAS cannot take over; the text is the reason."""


@dataclass
class _Process:
    """What `activate` has decided for this process; libraries stay open until it ends."""

    choice: Choice | None = None
    decided: BlasStatus | None = None
    library: ctypes.CDLL | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


_process = _Process()


def activate(choice: Choice = "auto") -> BlasStatus:
    """Decide the BLAS of this process; to be called before ``mlx.core`` is imported.

    Repeated calls return the first decision. ``auto`` takes OpenBLAS where it can and says in the
    status why not where it cannot.

    Args:
        choice: ``auto``, ``openblas`` or ``reference``.

    Returns:
        The status, also to be had from `status`.

    Raises:
        BlasError: ``openblas`` was asked for and cannot be had, a call before decided otherwise, or
            MTPLX_THREADS is not a positive integer.
        ValueError: another choice than the three.
    """
    if choice not in get_args(Choice):
        raise ValueError(f"choice must be one of {', '.join(get_args(Choice))}, not {choice!r}")
    with _process.lock:
        if _process.decided is None:
            _process.decided = _decide(choice)
            _process.choice = choice
        _check_conflict(choice, _process.decided)
    return status()


def status() -> BlasStatus:
    """Return the BLAS now in force, with the OPENBLAS_* variables as they stand now."""
    env = {k: v for k, v in sorted(os.environ.items()) if k.startswith("OPENBLAS_")}
    now = _process.decided
    if now is None:
        now = _stock("not activated: call mtplx.blas.activate() before mlx.core is imported")
    return BlasStatus(**{**now.__dict__, "openblas_env": env})


def describe(now: BlasStatus | None = None) -> str:
    """Return one line for reports: the BLAS, its threads, the OPENBLAS_* variables."""
    now = now or status()
    parts = [f"BLAS {now.name}"]
    if now.name == "openblas":
        parts += [now.config, f"{now.threads} thread{'' if now.threads == 1 else 's'}"]
    else:
        parts.append(now.reason)
    parts += [f"{key}={value}" for key, value in now.openblas_env.items()]
    return "; ".join(parts)


def counters() -> dict[str, int]:
    """Return how many products OpenBLAS has answered so far in this process.

    Returns:
        Counts ``sgemm``, ``dgemm``, ``cgemm`` and, of all these, ``shared`` between threads; all 0
        while OpenBLAS is not active.
    """
    values = (ctypes.c_uint64 * 4)()
    if _process.library is not None:
        _process.library.mtplx_blas_counters(values)
    return dict(zip(("sgemm", "dgemm", "cgemm", "shared"), map(int, values), strict=True))


def thread_count(root: Path = Path("/")) -> int:
    """Return how many threads a product may use.

    MTPLX_THREADS, if set; else the least of the CPUs this process may run on, the CPU quota of its
    control groups rounded up, and OPENBLAS_NUM_THREADS, if that is a positive integer.

    Args:
        root: where ``proc`` and ``sys`` are looked up.

    Raises:
        BlasError: MTPLX_THREADS is set and not a positive integer.
    """
    asked = os.environ.get("MTPLX_THREADS")
    if asked:
        threads = _positive(asked)
        if threads is None or threads > _MOST_THREADS:
            raise BlasError(
                f"MTPLX_THREADS must be a positive integer up to {_MOST_THREADS}, not {asked!r}"
            )
        return threads
    affinity = getattr(os, "sched_getaffinity", None)
    limits = [len(affinity(0)) if affinity is not None else os.cpu_count() or 1]
    quota = cpu_quota(root)
    if quota is not None:
        limits.append(math.ceil(quota))
    user = _positive(os.environ.get("OPENBLAS_NUM_THREADS", ""))
    if user is not None:
        limits.append(user)
    return max(1, min(limits))


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Return the CPUs that the control groups of this process grant it, None where unlimited.

    Both versions of control groups are read, and every group from the process's own up to the top.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    quotas = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "cpu" not in controllers.split(","):
            continue
        tops = ("cpu", controllers) if controllers else ("", "unified")
        for top in tops:
            base = root / "sys/fs/cgroup" / top
            own = base / path.lstrip("/")
            groups = [own, *own.parents[: len(own.parts) - len(base.parts)]]
            quotas += [q for group in groups if (q := _group_quota(group)) is not None]
    return min(quotas, default=None)


def _group_quota(group: Path) -> float | None:
    """CPUs one control group grants; None where it sets no limit or is not there."""
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
        if (group / "cpu.max").is_file():
            limit, period = (group / "cpu.max").read_text().split()
            return None if limit == "max" else int(limit) / int(period)
        limit = (group / "cpu.cfs_quota_us").read_text()
        period = (group / "cpu.cfs_period_us").read_text()
        return int(limit) / int(period) if int(limit) > 0 else None
    return None


def _positive(text: str) -> int | None:
    text = text.strip()
    return int(text) if text.isascii() and text.isdigit() and int(text) > 0 else None


def _stock(reason: str) -> BlasStatus:
    return BlasStatus(name="reference", reason=reason)


def _decide(choice: Choice) -> BlasStatus:
    if choice != "reference":
        thread_count()  # a wrong MTPLX_THREADS is told even where OpenBLAS cannot be had
    inapplicable = _inapplicable()
    if inapplicable is not None:
        if choice == "openblas":
            raise BlasError(f"OpenBLAS cannot be used: {inapplicable}")
        return BlasStatus(name="not applicable", reason=inapplicable)
    if choice == "reference":
        return _stock("asked for")
    try:
        return _open(choice)
    except _UnavailableError as why:
        if choice == "openblas":
            raise BlasError(f"OpenBLAS cannot be used: {why}") from why
        return _stock(f"slower than need be: {why}")


def _check_conflict(choice: Choice, decided: BlasStatus) -> None:
    """A later explicit choice must be what is in force; a library cannot be taken out again."""
    if choice == "auto" or choice == decided.name:
        return
    if choice == "reference" and decided.name == "not applicable":
        return
    raise BlasError(
        f"{choice} was asked for, but this process already uses {decided.name} ({decided.reason})"
    )


def _inapplicable() -> str | None:
    """Why the products of the MLX installed here do not go through a replaceable BLAS."""
    if not sys.platform.startswith("linux"):
        return f"MLX on {sys.platform} does not use OpenBLAS"
    for gpu in ("mlx-cuda-13", "mlx-cuda-12"):
        if _installed(gpu):
            return f"MLX's GPU build ({gpu}) is installed"
    return None


def _installed(distribution: str) -> bool:
    try:
        importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _open(choice: Choice) -> BlasStatus:
    if "mlx.core" in sys.modules:
        raise _UnavailableError("MLX was imported first, and has found its own BLAS")
    if not _installed("mlx-cpu"):
        raise _UnavailableError("MLX's CPU build (mlx-cpu) is not installed")
    openblas = _openblas_path()
    library = _shim(_shim_path())
    threads = thread_count()
    with _single_threaded_openblas():
        code = library.mtplx_blas_init(os.fsencode(openblas), threads, 0)
    if code != 0:
        text = library.mtplx_blas_error().decode(errors="replace")
        raise _UnavailableError(f"{_INIT_ERRORS.get(code, f'code {code}')} ({text})")
    # Only now, when it can answer, is it made visible to the libraries opened after it.
    _process.library = ctypes.CDLL(library._name, mode=ctypes.RTLD_GLOBAL)
    _declare(_process.library)
    config = library.mtplx_blas_config().decode(errors="replace").strip()
    core = library.mtplx_blas_core().decode(errors="replace")
    return BlasStatus(
        name="openblas",
        library=str(openblas),
        config=config if core in config.split() else f"{config} {core}",
        threads=library.mtplx_blas_threads(),
        small_threshold=library.mtplx_blas_small(),
        reason="asked for" if choice == "openblas" else "faster than the one MLX brings along",
    )


def _openblas_path() -> Path:
    """Find the library without importing its package, which would open it for everyone."""
    spec = importlib.util.find_spec("scipy_openblas32")
    for folder in (spec and spec.submodule_search_locations) or ():
        for path in sorted(Path(folder, "lib").glob("libscipy_openblas.so*")):
            return path
    raise _UnavailableError("the package scipy-openblas32 is not installed")


def _shim_path() -> Path:
    if importlib.util.find_spec("mtplx_kernels") is None:
        raise _UnavailableError("the package mtplx-kernels is not installed")
    import mtplx_kernels

    try:
        return mtplx_kernels.blas_library()
    except FileNotFoundError as why:
        raise _UnavailableError(str(why)) from why


def _shim(path: Path) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(path), mode=ctypes.RTLD_LOCAL)
        _declare(library)
    except (OSError, AttributeError) as why:
        raise _UnavailableError(f"mtplx-kernels cannot be opened ({why})") from why
    found = library.mtplx_blas_abi()
    if found != _ABI:
        raise _UnavailableError(
            f"mtplx-kernels has interface {found}, not {_ABI}: install the one of this mtplx"
        )
    return library


def _declare(library: ctypes.CDLL) -> None:
    library.mtplx_blas_init.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_int64]
    library.mtplx_blas_small.restype = ctypes.c_int64
    for name in ("error", "config", "core"):
        getattr(library, f"mtplx_blas_{name}").restype = ctypes.c_char_p
    library.mtplx_blas_counters.argtypes = [ctypes.POINTER(ctypes.c_uint64)]
    library.mtplx_blas_counters.restype = None


@contextlib.contextmanager
def _single_threaded_openblas() -> Iterator[None]:
    """Keep OpenBLAS from starting threads as it is opened: the shim has its own."""
    before = os.environ.get("OPENBLAS_NUM_THREADS")
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["OPENBLAS_NUM_THREADS"]
        else:
            os.environ["OPENBLAS_NUM_THREADS"] = before
