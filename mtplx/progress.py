"""A progress bar on stderr, for what takes long."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


def progress() -> Progress:
    """A bar with the time that is left, and only on a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(
        *columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal
    )


@contextmanager
def steps(total: int) -> Iterator[Callable[[str], None]]:
    """A bar of so many steps; call what it gives before each, with what is running now."""
    done = count()
    with progress() as bar:
        task = bar.add_task("", total=total)
        yield lambda running: bar.update(task, completed=next(done), description=running)
        bar.update(task, completed=total)
