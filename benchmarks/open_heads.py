"""The figure of README: attention time over the number of open heads, drawn from the newest kept full run.

python -m benchmarks.open_heads  # needs matplotlib; measures nothing
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks import figures
from benchmarks.measure import MOST_SPREAD
from benchmarks.plot import conditions, forward_rows, newest

_ROOT: Final = Path(__file__).parents[1]
KEPT: Final = _ROOT / "benchmarks" / "results" / "intel-r-xeon-r-processor-2-cores.jsonl"
FIGURE: Final = _ROOT / "docs" / "figures" / "open_heads.svg"
#: Open heads of 12, and the workload that measures them.
_WORKLOADS: Final = {
    12: "gated_dense",
    9: "gated_closed_25",
    6: "gated_closed_50",
    3: "gated_closed_75",
    0: "gated_closed_100",
}


def draw(run: dict[str, Any]) -> Figure:
    """Forward times of one run, on all its threads: ours, and SDPA times the gate."""
    rows = forward_rows(run)
    shown = {heads: rows[name] for heads, name in _WORKLOADS.items() if _steady(rows[name])}
    most, least = max(shown), min(shown)
    drawn = Figure(figsize=(7.2, 3.4), layout="constrained")
    axes = drawn.subplots()
    for key, name, color in (
        ("sdpa_ms", "SDPA, output times gate", figures.BLUE),
        ("ms", "heads_kernels, gate in the kernel", figures.ORANGE),
    ):
        times = [row[key] for row in shown.values()]
        axes.plot(list(shown), times, "o-", color=color, markersize=5)
        axes.annotate(name, (least, times[-1]), (8, -16), textcoords="offset points", color=color)
    figures.message(
        axes,
        f"Attention time falls with the open heads: {shown[most]['ms']:.1f} ms with {most}, "
        f"{shown[least]['ms']:.1f} ms with {least}",
    )
    axes.set(
        xlabel="open heads of 12",
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


def _steady(row: dict[str, Any]) -> bool:
    """Whether our time was not disturbed."""
    return bool(row["ms"] < MOST_SPREAD * row["fastest_ms"])


def main() -> None:
    FIGURE.parent.mkdir(exist_ok=True)
    with mpl.rc_context(figures.STYLE):
        figures.save(draw(newest(KEPT)), FIGURE)
    print(f"drawn: {FIGURE}")


if __name__ == "__main__":
    main()
