"""The style of all figures: a message as the title of each panel, dark text on a background of their own.

An SVG is the same file for the same numbers.
"""

from __future__ import annotations

import io
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks.results import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Colors that color-blind readers tell apart; they and the grey have a contrast of 3 or more on white.
BLUE, ORANGE, PURPLE, GREEN, GREY = "#2f6fc4", "#c9520f", "#a83279", "#1b8a5e", "#5a6572"
_INK: Final = "#1c2733"

#: For `matplotlib.rc_context`.
STYLE: Final[dict[Any, Any]] = {
    "font.size": 9,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "heads_kernels",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.axisbelow": True,
    "axes.edgecolor": GREY,
    "grid.color": "#e3e7ec",
    "legend.frameon": False,
    "legend.fontsize": 8,
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), _INK),
}
#: A figure has its own background, so that it is readable on any page; a dark one where that is preferred.
_DARK: Final = (
    "@media (prefers-color-scheme: dark) { svg { filter: invert(.9) hue-rotate(180deg) } }"
)


def save(figure: Figure, path: Path) -> None:
    """Write a figure, drawn in `STYLE`, into an SVG file: whole or not at all."""
    text = io.StringIO()
    figure.savefig(text, format="svg", facecolor="white", metadata={"Date": None})
    write_whole(path, text.getvalue().replace("</style>", f"\n{_DARK}</style>", 1))


def message(axes: Any, text: str) -> None:
    """The title of a panel, in lines as wide as the panel."""
    columns = axes.get_subplotspec().get_gridspec().ncols
    letters = int(
        axes.get_figure().get_figwidth() / columns / 0.097
    )  # inches of a letter, and of the margins
    axes.set_title(textwrap.fill(text.replace(" %", "\N{NO-BREAK SPACE}%"), letters))
