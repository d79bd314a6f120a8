"""Tables for a person, readable at 100 columns; those of a GPU, with more candidates, at 130."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from benchmarks.candidates import RIVALS
from benchmarks.goals import milliseconds, rate, ratio
from benchmarks.measure import Found, Row, disturbed
from benchmarks.results import Results
from benchmarks.settings import Device, word

Cell = str | Text
#: The workload of the line that a run ends with.
_HEADLINE: Final = "gated_closed_50"
#: Where the width of the output is not known: a file, a pipe.
_WIDTH: Final[dict[Device, int]] = {"cpu": 100, "cuda": 130}
_LEGEND: Final = (
    "ours: median ms. FLOP/s: executed FLOPs divided by our median. x: the time of that candidate divided by ours; "
    "eager, SDPA and its kernels, flex and flash_attn are times the gate. x dense: our own time for the dense workload "
    "of the table (all heads open, no mask, dense mixing). x f32: our own time for the same numbers in float32. x mm: "
    "our FLOP/s divided by those of torch.mm. gap: our time divided by the floor."
)
_DISTURBED: Final = (
    "spread: a median by the fastest sample, where something else ran meanwhile; measured twice. Do not quote these "
    "rows: they are not those of a quiet machine."
)


def make_console(device: Device = "cpu") -> Console:
    width = None if sys.stdout.isatty() else _WIDTH[device]
    return Console(width=width, highlight=False, emoji=False)


class Report:
    """Prints the parts of `results` as they are finished."""

    def __init__(self, results: Results, console: Console) -> None:
        self.results, self.console = results, console

    def head(self) -> None:
        m, settings = self.results.machine, self.results.settings
        self.console.print(f"[bold]heads_kernels {m.version}[/] on {escape(m.processor)}")
        commit = f", commit {m.commit}" if m.commit else ""
        self.console.print(
            f"{m.threads} of {m.cores} cores, level {escape(m.level)}, torch {m.torch}, "
            f"Python {m.python}, {word(settings.dtype)}{commit}"
        )
        if m.gpu:
            self.console.print(escape(", ".join(f"{key} {value}" for key, value in m.gpu.items())))
        for line in self.results.backends:
            self.console.print(f"[dim]{escape(line)}[/]")
        if self.results.busy:
            self.console.print(
                f"[bold yellow]busy machine[/]: load average {self.results.load:.1f} in the last minute, on {m.cores} "
                f"cores of which this run takes {m.threads}. Stop what else runs, or wait, or times will scatter."
            )

    def checks(self) -> None:
        rows = self.results.checks
        if not rows:
            return
        heads = ["workload", "worst error", "of bound", "dense", "executed", "share", ""]
        self._table("Accuracy, before anything is timed, and FLOPs", heads, [
            [row["workload"], row["worst"], f"{row['ratio']:.2f}",
             f"{row['dense'] * 1e-9:.2f}", f"{row['executed'] * 1e-9:.2f}",
             f"{row['executed'] / max(row['dense'], 1):.0%}",
             Text("FAIL", "bold red") if row["failures"] else Text("ok", "green")]
            for row in rows
        ])  # fmt: skip
        self._note(
            "Errors of out, lse and all gradients (where pairs are many, of some heads, batches and rows) "
            "against eager in float64, as a part of what the accuracy rule allows. GFLOP of the "
            "forward pass: dense are those of every pair, as FlopCounterMode counts them; executed is "
            "what masks, closed heads and empty mixing chunks leave."
        )
        errors = [row["model_error"] for row in rows if row["model_error"] is not None]
        if errors:
            self._note(
                f"MiniLM: the outputs equal the model's own attention to {max(errors):.1e} on "
                "every real token of every layer."
            )

    def speed(self, table_name: str) -> None:
        """Times of one table of workloads; a column that is empty in all rows is left out."""
        rows = [row for row in self.results.speed if row["table"] == table_name]
        columns = [(head, cell) for head, cell in _columns(rows) if any(map(cell, rows))]
        several = len({row["threads"] for row in rows}) > 1
        self._table(table_name, ["median ms", "", *(head for head, _ in columns)], [
            [f"{row['label']}, {row['threads']} thr" if several else row["label"], row["direction"],
             *(cell(row) for _, cell in columns)]
            for row in rows
        ])  # fmt: skip

    def part(self, found: Found) -> None:
        columns = found.columns.values()
        self._table(found.title, [*found.columns], [
            [column.format(**row) if isinstance(column, str) else column(row) for column in columns]
            for row in found.rows
        ])  # fmt: skip

    def finish(self, rerun: str) -> None:
        """Notes, goals, the failures, and last a line to repeat, of closed heads where they were timed."""
        if self.results.speed:
            self._note(_LEGEND)
        if any(map(disturbed, self.results.speed)):
            self._note(_DISTURBED)
        for note in self.results.notes:
            self._note(note)
        self._rates()
        self._goals()
        for failure in self.results.failures:
            self.console.print(f"[bold red]FAIL[/] {escape(failure)}")
        rows = [] if self.results.settings.form == "smoke" else self.results.speed
        row = next((row for row in rows if row["workload"] == _HEADLINE), rows[0] if rows else None)
        if row is None:
            return
        against, best = "SDPA times the gate", ratio(row, "sdpa")
        if best is None:
            against, best = "eager PyTorch", ratio(row, "eager")
        if best is None:
            return
        spread = " (disturbed)" if disturbed(row) or self.results.busy else ""
        self.console.print(
            f"{row['label']}, {row['direction']}: {best:.1f} times as fast as {against}{spread}. "
            f"Repeat it: python -m benchmarks --only {row['workload']}{rerun}",
            soft_wrap=True,
        )

    def _rates(self) -> None:
        """What the floors were computed with."""
        floors: dict[int | None, list[dict[str, Any]]] = {}
        for row in self.results.speed:
            if row.get("floor"):
                floors.setdefault(row["threads"], []).append(row["floor"])
        for threads, known in floors.items():
            products = "; ".join(
                f"{name} {max(floor['gflops'] for floor in known if floor['product'] == name):.0f} GFLOP/s"
                for name in sorted({floor["product"] for floor in known})
            )
            gexps = [floor["gexps"] for floor in known if floor["gexps"]]
            gbytes = [floor["gbytes"] for floor in known]
            self._note(
                f"Floors{f' on {threads} thr' if threads else ''}: products at {products} at most, "
                + (f"{max(gexps):.1f}e9 exp/s, " if gexps else "")
                + f"copies at {min(gbytes):.0f} to {max(gbytes):.0f} GB/s by size; b: bytes are the bound. "
                f"torch.mm: {median(floor['sgemm'] for floor in known):.0f} GFLOP/s (median)."
            )

    def _goals(self) -> None:
        """A line for each outcome; those of one goal on several numbers of threads follow each other."""
        outcomes = sorted(self.results.goals(), key=lambda outcome: (outcome.goal, outcome.against))
        if outcomes:
            self._table("Goals", ["", "against", "threads", "goal", "got", ""], [
                [outcome.goal, outcome.against, str(outcome.threads or ""), outcome.wanted, outcome.got,
                 Text("met", "green") if outcome.met else Text("short", "bold yellow")]
                for outcome in outcomes
            ])  # fmt: skip
            met = sum(outcome.met for outcome in outcomes)
            self.console.print(f"{met} of {len(outcomes)} goals met")

    def _table(self, title: str, heads: Sequence[str], rows: Sequence[list[Cell]]) -> None:
        """Words are left-aligned, numbers right-aligned; what repeats the first column of the row above is left out."""
        table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False,
            header_style="dim")  # fmt: skip
        for number, (head, *cells) in enumerate(zip(heads, *(map(str, row) for row in rows), strict=True)):
            words = number == 0 or all(cell[0].isalpha() for cell in cells if cell)
            table.add_column(head, justify="left" if words else "right", no_wrap=number > 0,
                overflow="fold" if number == 0 else "ellipsis")  # fmt: skip
        previous: Cell | None = None
        for first, *rest in rows:
            table.add_row("" if first == previous else first, *rest)
            previous = first
        self.console.print()
        self.console.print(table)

    def _note(self, text: str) -> None:
        self.console.print(f"[dim]{escape(text)}[/]")


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:.1f}" if milliseconds >= 10 else f"{milliseconds:.2f}"


def _times(value: float | None) -> Text:
    """How many times faster ours is; red where it is slower."""
    if value is None:
        return Text("")
    return Text(f"{value:.2f}x", "green" if value >= 1 else "red")


def _columns(rows: list[Row]) -> list[tuple[str, Callable[[Row], Cell]]]:
    """Of a table of times."""
    timed = {name for row in rows for name in row["times"]}
    rivals = [name for name in dict.fromkeys([*RIVALS["cpu"], *RIVALS["cuda"]]) if name in timed]
    others = sorted(timed.difference(rivals, ("ours", "dense", "float32")))
    on_gpu = any(row["threads"] is None for row in rows)
    unit, by = ("TFLOP/s", 1e-3) if on_gpu else ("GFLOP/s", 1)

    def versus(name: str) -> Callable[[Row], Cell]:
        return lambda row: _times(ratio(row, name))

    def floor(row: Row) -> str:
        found = None if on_gpu else row.get("floor")
        return _ms(found["ms"]) + (" b" if found["bound"] == "bytes" else "") if found else ""

    return [
        ("ours", lambda row: _ms(milliseconds(row, "ours") or 0.0)),
        (unit, lambda row: f"{(rate(row) or 0.0) * by:.0f}"),
        *((f"x {name}", versus(name)) for name in (*rivals, *others)),
        ("x dense", versus("dense")),
        ("x f32", versus("float32")),
        ("x mm", lambda row: f"{ratio(row, 'sgemm'):.2f}" if row.get("floor") else ""),
        ("floor", floor),
        ("gap", lambda row: f"{row['floor']['gap']:.2f}" if floor(row) else ""),
        ("spread", lambda row: f"{row['spread']:.1f}x" if disturbed(row) else ""),
    ]
