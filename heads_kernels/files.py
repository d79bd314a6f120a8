"""Files that are written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Write a temporary file beside `path`, with the same ending, then rename it: an error leaves no partial file.

    Its permissions are those of any new file, even if `write` changes them.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}{path.suffix}")
    try:
        beside.touch()
        mode = beside.stat().st_mode
        write(beside)
        beside.chmod(mode)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
