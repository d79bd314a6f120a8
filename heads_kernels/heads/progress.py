"""A bar of what is done, on terminals and in notebooks that can show one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def length(data: Any) -> int | None:
    """How many there are; None where `data` doesn't know, such as a loader of an iterable data set."""
    try:
        return len(data)
    except TypeError:
        return None


@contextmanager
def bar(text: str, total: int | None, shown: bool) -> Iterator[Callable[[], None]]:
    """Gives what to call after each step; it shows a bar where rich is installed and someone looks.

    Args:
        text: what is done.
        total: how many steps there are; None where it is not known.
        shown: False shows nothing.
    """
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        shown = False
    if shown:
        console = Console(stderr=True)
        if console.is_terminal or console.is_jupyter:
            with Progress(console=console, transient=True) as progress:
                task = progress.add_task(text, total=total)
                yield lambda: progress.advance(task)
            return
    yield lambda: None
