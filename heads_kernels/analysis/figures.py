"""Write matplotlib figures to paths that are checked before drawing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from heads_kernels.checks import refuse
from heads_kernels.files import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ENDINGS: Final = (".png", ".svg", ".pdf")


def check_figure_path(path: str | os.PathLike[str] | None) -> Path | None:
    """`path` as a Path, if a figure can be written there.

    Raises:
        ValueError: its folder does not exist, or it does not end with .png, .svg or .pdf.
    """
    if path is None:
        return None
    path = Path(path)
    if not path.parent.is_dir():
        refuse("path", f"is {str(path)!r}", "its folder does not exist: make it first")
    if path.suffix.lower() not in _ENDINGS:
        refuse("path", f"is {str(path)!r}", f"end it with {', '.join(_ENDINGS)}")
    return path


def write_figure(figure: Figure, path: Path) -> None:
    write_whole(path, lambda new: figure.savefig(new, dpi=150))
