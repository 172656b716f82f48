"""What downloads share: a lock between processes, and what to do about a disk that refuses."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from mtplx.errors import FetchError

Progress = Callable[[int, int], None]  # (bytes done, bytes in all)
ROOM = 16 << 20  # bytes left free besides a download


@contextlib.contextmanager
def lock(path: Path) -> Iterator[IO[bytes]]:
    """Holds an exclusive lock, which ends with the process whatever ends it."""
    with path.open("ab") as f:
        while True:
            try:
                fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.2)
        yield f


def no_room(root: Path, free: int, need: int, variable: str) -> FetchError:
    """Too little room for a download, in bytes; ``variable`` chooses another folder."""
    return FetchError(
        f"{root} has {free >> 20} MiB free, {need >> 20} MiB are needed: make room, or set "
        f"{variable} to another folder"
    )


def os_failure(e: OSError, root: Path, variable: str) -> FetchError:
    """An error of the disk under ``root``; ``variable`` chooses another folder."""
    if e.errno in (errno.ENOSPC, errno.EDQUOT):
        what = f"the disk is full: make room, or set {variable} to a folder on another disk"
    elif e.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        what = f"it cannot be written: set {variable} to a folder of your own"
    else:
        what = f"{e.strerror or e}; {variable} chooses another folder"
    return FetchError(f"nothing can be stored under {root}: {what}")
