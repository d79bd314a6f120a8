"""The progress and the results of an experiment: a progress bar, a table, a plot and the numbers."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import nn

import heads_kernels as hk

#: Kinds of attention, and colors that color-blind readers can tell apart too.
COLORS: Final = {"encoder": "#3b82d6", "decoder": "#e0961b", "cross": "#a83279"}

Counts = dict[str, int]


def heads_of(model: nn.Module) -> list[dict[str, Any]]:
    """For each attention layer: its name, its kind, its number of heads, and which of them are closed."""
    closed = hk.heads.closed(model)
    return [
        {
            "name": layer.name,
            "kind": layer.kind,
            "heads": layer.num_heads,
            "closed": closed.get(layer.name, []),
        }
        for layer in hk.heads.attention_layers(model)
    ]


def open_heads(model: nn.Module) -> Counts:
    """The number of open heads, by kind of attention."""
    counts = dict.fromkeys(COLORS, 0)
    for layer in heads_of(model):
        counts[layer["kind"]] += layer["heads"] - len(layer["closed"])
    return counts


def in_words(counts: Counts) -> str:
    """For example "encoder 12, decoder 12, cross 12"."""
    return ", ".join(f"{kind} {count}" for kind, count in counts.items())


@dataclass
class Row:
    """One model: open heads, shares of words and sentences that are right, weights, seconds per batch."""

    model: str
    open_heads: Counts
    words: float
    sentences: float
    parameters: int
    seconds: float | None = None


@dataclass
class Results:
    """All results so far.

    Attributes:
        settings: the options.
        rows: the models.
        history: (step, open heads by kind), from step 0 on, wherever they changed.
        layers: `heads_of` the gated model.
        checks: conditions that must hold, and whether they do.
        example: a sentence, its right translation and that of the pruned model.
    """

    settings: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    history: list[tuple[int, Counts]] = field(default_factory=list)
    layers: list[dict[str, Any]] = field(default_factory=list)
    checks: dict[str, bool] = field(default_factory=dict)
    example: dict[str, str] = field(default_factory=dict)


# ---------------------------------------------------------------------- on the terminal
class Bar:
    """A progress bar for each stage, or only its name if the output is not a terminal.

    Attributes:
        reached: the same in words.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.reached = "the start"
        # Without automatic refresh: its thread would take time from training.
        self.progress = Progress(
            TextColumn("{task.description:8}"), BarColumn(12), TaskProgressColumn(),
            TimeElapsedColumn(), TextColumn("[dim]{task.fields[note]}"),
            console=console, auto_refresh=False, disable=not console.is_terminal,
        )  # fmt: skip

    def __enter__(self) -> Bar:
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()

    def start(self, stage: str, steps: int) -> None:
        self.stage, self.steps, self.reached = stage, steps, stage
        self.task = self.progress.add_task(stage, total=steps, note="")
        if self.progress.disable:
            self.console.print(f"{stage}, {steps} steps")

    def follow(self, stage: str, steps: int, learning: Iterable[tuple[int, float]]) -> None:
        """Show a stage of training, which yields its steps and losses."""
        self.start(stage, steps)
        for step, loss in learning:
            self.step(step, f"loss {loss:.2f}")

    def step(self, step: int, note: str) -> None:
        self.reached = f"{self.stage}, step {step} of {self.steps}"
        refresh = step % 10 == 0 or step == self.steps
        self.progress.update(self.task, completed=step, note=note, refresh=refresh)


def table(results: Results) -> Table:
    """A table of the models, for the terminal."""
    made = Table("", *COLORS, "words", "sentences", "weights", "ms", box=SIMPLE,
        caption="open heads by kind; share of held-out words and sentences that are right;\n"
        "parameters; ms to translate a batch", caption_justify="left")  # fmt: skip
    for column in made.columns[1:]:
        column.justify = "right"
    for row in results.rows:
        made.add_row(
            row.model, *(str(row.open_heads[kind]) for kind in COLORS), f"{row.words:.1%}",
            f"{row.sentences:.1%}", f"{row.parameters:,}",
            "" if row.seconds is None else f"{row.seconds * 1e3:.0f}",
        )  # fmt: skip
    return made


# ---------------------------------------------------------------------- in files
def write(results: Results, folder: Path) -> None:
    """Write `open_heads.png` and `results.json`; an error leaves no partial file."""
    with beside(folder / "open_heads.png") as path:
        draw(results).savefig(path, format="png", dpi=150)
    with beside(folder / "results.json") as path:
        path.write_text(json.dumps(asdict(results), indent=1) + "\n", encoding="utf-8")


@contextmanager
def beside(path: Path) -> Iterator[Path]:
    """A temporary file, which replaces `path` unless the block raises."""
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
        new = Path(folder) / path.name
        yield new
        new.replace(path)


def draw(results: Results) -> Figure:
    """Open heads by kind over the steps with gates, and which heads are left."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    over_steps, left = figure.subplots(1, 2, width_ratios=(3, 2))
    _over_steps(over_steps, results)
    _left(left, results)
    return figure


def _over_steps(axes: Axes, results: Results) -> None:
    last = results.settings["gated_steps"]
    steps = [*(step for step, _ in results.history), last]
    for kind, color in COLORS.items():
        counts = [counts[kind] for _, counts in results.history]
        label = f"{kind}: {counts[-1]} of {counts[0]} left"
        axes.step(steps, [*counts, counts[-1]], where="post", color=color, lw=2, label=label)
    axes.set(title="Open heads by kind of attention", xlabel="steps with gates", xlim=(0, last))
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)


def _left(axes: Axes, results: Results) -> None:
    """A square for each head, a row for each layer; filled where the head is open."""
    rows = sorted(results.layers, key=lambda layer: list(COLORS).index(layer["kind"]))
    for y, layer in enumerate(rows):
        color, heads = COLORS[layer["kind"]], range(layer["heads"])
        faces = ["none" if head in layer["closed"] else color for head in heads]
        axes.scatter(heads, [y] * len(heads), s=160, c=faces, marker="s", edgecolors=color)
    axes.set_yticks(range(len(rows)), [layer["name"] for layer in rows])
    axes.set(title="Heads that are left", xticks=[])
    axes.margins(x=0.15, y=0.08)
    axes.invert_yaxis()
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
