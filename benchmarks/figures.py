"""Figures: their style, and those of kept full runs, beside each file in `benchmarks/results/`, and the one of README.

A message is the title of each panel, dark text on a background of its own. A kept run shows time over length, dense and
causal, and over the number of open heads. An SVG is the same file for the same numbers.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks import results
from benchmarks.goals import milliseconds, ratio
from benchmarks.measure import MOST_SPREAD, Row
from benchmarks.workloads import CLOSED_SERIES, GPU_LENGTHS, LENGTHS, WIDTHS, by_length

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
    results.write_whole(path, text.getvalue().replace("</style>", f"\n{_DARK}</style>", 1))


def message(axes: Any, text: str) -> None:
    """The title of a panel, in lines as wide as the panel."""
    columns = axes.get_subplotspec().get_gridspec().ncols
    letters = int(
        axes.get_figure().get_figwidth() / columns / 0.097
    )  # inches of a letter, and of the margins
    axes.set_title(textwrap.fill(text.replace(" %", "\N{NO-BREAK SPACE}%"), letters))


# ---------------------------------------------------------------------- kept runs
KEPT: Final = Path(__file__).parent / "results"
#: The run that README's figure shows.
README_RUN: Final = KEPT / "intel-r-xeon-r-processor-2-cores.jsonl"
README_FIGURE: Final = Path(__file__).parents[1] / "docs" / "figures" / "open_heads.svg"
#: Candidates of a CPU and of a GPU: what the legend calls each, color.
_LOOKS: Final = {
    "ours": ("heads_kernels", ORANGE),
    "sdpa": ("SDPA, output times gate", BLUE),
    "cudnn": ("cuDNN, output times gate", BLUE),
    "eager": ("eager PyTorch", GREY),
}


class CannotPlot(Exception):
    """There is nothing to draw or nothing to draw with; the message says what would do."""


def draw(
    kept: Path = KEPT, readme_run: Path = README_RUN, readme: Path = README_FIGURE
) -> list[Path]:
    """Draw the newest whole full run of every file, and README's figure; returns the files."""
    runs = {path: run for path in sorted(kept.glob("*.jsonl")) if (run := newest(path))}
    if not runs:
        raise CannotPlot(f"{kept} has no full run; python -m benchmarks --full --keep makes one")
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise CannotPlot("matplotlib is missing: pip install 'heads_kernels[bench]'") from error
    drawn = []
    with mpl.rc_context(STYLE):
        for path, run in runs.items():
            try:
                drawing = figure(run)
            except KeyError as error:
                raise CannotPlot(
                    f"the newest full run in {path} has no {error}; keep a new one"
                ) from error
            drawn.append(path.with_suffix(".svg"))
            save(drawing, drawn[-1])
        if readme_run in runs:
            drawn.append(readme)
            save(open_heads(runs[readme_run]), readme)
    return drawn


def newest(kept: Path) -> Row | None:
    """The newest whole full run, of a CPU in float32.

    Of those on the most threads, for fewer tell another story.
    """
    runs = [
        run
        for run in results.kept(kept)
        if run.get("form") == "full" and run.get("complete") and run.get("speed")
        and (run["device"] == "cuda" or run["dtype"] == "float32")
    ]  # fmt: skip
    return max(reversed(runs), key=lambda run: int(run["machine"]["threads"]), default=None)


def figure(run: Row) -> Any:
    """Three panels; forward, all threads of the run."""
    from matplotlib.figure import Figure

    rows = forward_rows(run)
    drawn = Figure(figsize=(10.5, 4.3), layout="constrained")
    dense, causal, closed = drawn.subplots(1, 3)
    for axes, kind in ((dense, "dense"), (causal, "causal")):
        _over_length(axes, kind, run, rows)
    _over_heads(closed, run, rows)
    dense.legend(loc="upper left")
    version = f"heads_kernels {run['machine']['version']} {run['machine']['commit'] or ''}"
    what = f"Forward pass, {max(_heads(run))} heads, {run['dtype']}"
    drawn.supxlabel(f"{what}; {conditions(run)}; {version}", fontsize=7.5)
    return drawn


def forward_rows(run: Row) -> dict[str, Row]:
    """Rows of the forward pass on all threads of the run, by workload."""
    threads = None if run["device"] == "cuda" else run["machine"]["threads"]
    return {
        row["workload"]: row
        for row in run["speed"]
        if (row["direction"], row["threads"]) == ("forward", threads)
    }


def conditions(run: Row) -> str:
    """What a run was measured on."""
    machine = run["machine"]
    if run["device"] == "cuda":
        return f"{machine['gpu']['name']}; PyTorch {machine['torch']}"
    return (
        f"{machine['threads']} of {machine['cores']} cores, {machine['processor']}, "
        f"{machine['level']}; PyTorch {machine['torch']}"
    )


def _lengths(run: Row, kind: str) -> dict[int, str]:
    """The workloads of the series over length."""
    if run["device"] == "cuda":
        return {T: f"gated_D128_T{T}_{kind}" for T in sorted(GPU_LENGTHS)}
    return {T: f"{by_length(T, WIDTHS[0])}_{kind}" for T in LENGTHS}


def _heads(run: Row) -> dict[int, str]:
    """The workloads of the series over open heads."""
    if run["device"] == "cuda":
        return {
            16: "gated_D128_T8192_dense",
            8: "gated_D128_T8192_closed_50",
            4: "gated_D128_T8192_closed_75",
        }
    return {12: "gated_dense"} | {
        12 * (100 - percent) // 100: f"gated_closed_{percent}" for percent in CLOSED_SERIES
    }


def _over_length(axes: Any, kind: str, run: Row, rows: dict[str, Row]) -> None:
    points = {T: rows[name] for T, name in _lengths(run, kind).items()}
    tokens = {T: 16384 if run["device"] == "cuda" else LENGTHS[T] * T for T in points}
    for key, (name, color) in _LOOKS.items():
        times = {
            T: ms / tokens[T] * 1e3 for T, row in points.items() if (ms := milliseconds(row, key))
        }
        if times:
            axes.plot([*times], [*times.values()], "o-", color=color, label=name, markersize=4)
    rates = [found for row in points.values() if (found := ratio(row, "sdpa"))]
    message(
        axes,
        f"{kind.capitalize()}: {min(rates):.1f} to {max(rates):.1f} times the speed of SDPA times gate",
    )
    few = min(tokens.values())
    axes.set(
        xlabel=f"tokens in a sequence ({few if few == max(tokens.values()) else 'about 1000'} in a call)",
        ylabel="microseconds per token",
        xscale="log",
        yscale="log",
    )
    _ticks(axes.xaxis, points)
    lowest, highest = axes.get_ylim()
    steps = (n * 10**e for e in range(-3, 3) for n in (1, 2, 5))
    _ticks(axes.yaxis, (n for n in steps if lowest < n < highest))
    axes.grid()


def _over_heads(axes: Any, run: Row, rows: dict[str, Row]) -> None:
    names = _heads(run)
    for key, (name, color) in [*_LOOKS.items()][:3]:
        times = {heads: ms for heads, of in names.items() if (ms := milliseconds(rows[of], key))}
        if times:
            axes.plot([*times], [*times.values()], "o-", color=color, label=name, markersize=4)
    most, fewest = max(names), min(names)
    every, least = (milliseconds(rows[names[heads]], "ours") for heads in (most, fewest))
    message(
        axes,
        f"Closed heads save time: {every:.1f} ms with {most} open, {least:.1f} ms with {fewest}",
    )
    axes.set(
        xlabel=f"open heads of {most} (2 sequences of {8192 if run['device'] == 'cuda' else 512} tokens)",
        ylabel="milliseconds",
        ylim=(0, None),
    )
    _ticks(axes.xaxis, names)
    axes.grid()


def open_heads(run: Row) -> Any:
    """Forward times over the number of open heads: ours where they were not disturbed, and SDPA times the gate."""
    from matplotlib.figure import Figure

    rows = forward_rows(run)
    shown = {
        heads: rows[name]["times"] for heads, name in _heads(run).items() if _steady(rows[name])
    }
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
    drawn.supxlabel(
        f"2 sequences of 512 tokens, head width 64, float32; {conditions(run)}", fontsize=7.5
    )
    return drawn


def _steady(row: Row) -> bool:
    """Whether our time was not disturbed."""
    ours = row["times"]["ours"]
    return bool(ours["ms"] < MOST_SPREAD * ours["fastest_ms"])


def _ticks(axis: Any, values: Iterable[float]) -> None:
    """These and no others, as plain numbers."""
    chosen = list(values)
    axis.set_ticks(chosen, [f"{value:g}" for value in chosen])
    axis.set_ticks([], minor=True)
