"""The style of figures, and the one of README: forward times of a kept full run over the number of open heads.

A message is the title of each panel. An SVG is the same file for the same numbers.
"""

from __future__ import annotations

import io
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks import results
from benchmarks.measure import MOST_SPREAD, Row
from benchmarks.workloads import CLOSED_SERIES

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
_DARK: Final = "@media (prefers-color-scheme: dark) { svg { filter: invert(.9) hue-rotate(180deg) } }"


def save(figure: Figure, path: Path) -> None:
    """Write a figure, drawn in `STYLE`, into an SVG file: whole or not at all."""
    text = io.StringIO()
    figure.savefig(text, format="svg", facecolor="white", metadata={"Date": None})
    results.write_text(path, text.getvalue().replace("</style>", f"\n{_DARK}</style>", 1))


def message(axes: Any, text: str) -> None:
    """The title of a panel, in lines as wide as the panel."""
    columns = axes.get_subplotspec().get_gridspec().ncols
    letters = int(axes.get_figure().get_figwidth() / columns / 0.097)  # inches of a letter, and of the margins
    axes.set_title(textwrap.fill(text.replace(" %", "\N{NO-BREAK SPACE}%"), letters))


# ---------------------------------------------------------------------- kept runs
KEPT: Final = Path(__file__).parent / "results"
#: The run that README's figure shows.
README_RUN: Final = KEPT / "intel-r-xeon-r-processor-2-cores.jsonl"
README_FIGURE: Final = Path(__file__).parents[1] / "docs" / "figures" / "open_heads.svg"


class CannotPlot(Exception):
    """There is nothing to draw or nothing to draw with; the message says what would do."""


def draw(kept: Path = README_RUN, path: Path = README_FIGURE) -> Path:
    """Draw README's figure from the newest whole full run of a CPU in float32, of those on the most threads."""
    runs = [
        run
        for run in results.kept(kept)
        if run.get("form") == "full" and run.get("complete") and run.get("speed")
        and (run["device"], run["dtype"]) == ("cpu", "float32")
    ]  # fmt: skip
    if not runs:
        raise CannotPlot(f"{kept} has no full run; python -m benchmarks --full --keep makes one")
    run = max(reversed(runs), key=lambda run: int(run["machine"]["threads"]))
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise CannotPlot("matplotlib is missing: pip install 'heads_kernels[bench]'") from error
    with mpl.rc_context(STYLE):
        save(open_heads(run), path)
    return path


def open_heads(run: Row) -> Any:
    """Forward times over the number of open heads: ours where they were not disturbed, and SDPA times the gate."""
    from matplotlib.figure import Figure

    machine = run["machine"]
    rows = {
        row["workload"]: row["times"]
        for row in run["speed"]
        if (row["direction"], row["threads"]) == ("forward", machine["threads"])
    }
    names = {12 * (100 - percent) // 100: f"gated_closed_{percent}" for percent in CLOSED_SERIES}
    names = {12: "gated_dense"} | names
    timed = {heads: rows[name] for heads, name in names.items()}
    shown = {n: row for n, row in timed.items() if row["ours"]["ms"] < MOST_SPREAD * row["ours"]["fastest_ms"]}
    most, least = max(shown), min(shown)
    drawn = Figure(figsize=(7.2, 3.4), layout="constrained")
    axes = drawn.subplots()
    for key, name, color in (
        ("sdpa", "SDPA, output times gate", BLUE),
        ("ours", "heads_kernels, gate in the kernel", ORANGE),
    ):
        times = [row[key]["ms"] for row in shown.values()]
        axes.plot(list(shown), times, "o-", color=color, markersize=5)
        axes.annotate(name, (least, times[-1]), (8, -16), textcoords="offset points", color=color)
    message(
        axes,
        f"Attention time falls with the open heads: {shown[most]['ours']['ms']:.1f} ms with {most}, "
        f"{shown[least]['ours']['ms']:.1f} ms with {least}",
    )
    axes.set(
        xlabel=f"open heads of {most}",
        ylabel="forward pass, milliseconds",
        xticks=list(shown),
        xlim=(0, None),
        ylim=(0, None),
    )
    axes.grid()
    conditions = (
        f"2 sequences of 512 tokens, head width 64, float32; {machine['threads']} of {machine['cores']} cores, "
        f"{machine['processor']}, {machine['level']}; PyTorch {machine['torch']}"
    )
    drawn.supxlabel(conditions, fontsize=7.5)
    return drawn
