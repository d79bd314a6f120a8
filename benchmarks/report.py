"""Tables for a person, readable at 100 columns."""

from __future__ import annotations

import sys
from collections.abc import Callable
from statistics import median
from typing import IO, Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from benchmarks.measure import MOST_SPREAD, Speed
from benchmarks.results import Outcome, Results

#: The workload of the line that a run ends with.
_HEADLINE: Final = "gated_closed_50"
_WIDTH = 100  # where the width of the output is not known: a file, a pipe


def make_console(file: IO[str] | None = None) -> Console:
    stream = sys.stdout if file is None else file
    width = None if stream.isatty() else _WIDTH
    return Console(file=stream, width=width, highlight=False, emoji=False)


class Report:
    """Prints each part of `results` once: when it is finished, or at the end if it never was."""

    def __init__(self, results: Results, console: Console) -> None:
        self.results, self.console = results, console
        self._printed: set[str] = set()

    def head(self) -> None:
        m = self.results.machine
        self.console.print(f"[bold]heads_kernels {m.version}[/] on {escape(m.processor)}")
        commit = f", commit {m.commit}" if m.commit else ""
        self.console.print(
            f"{m.threads} of {m.cores} cores, level {escape(m.level)}, torch {m.torch}, "
            f"Python {m.python}, {self.results.dtype}{commit}"
        )
        for line in self.results.backends:
            self.console.print(f"[dim]{escape(line)}[/]")
        if self.results.busy:
            self.console.print(
                f"[bold yellow]busy machine[/]: load average {self.results.load:.1f} in the last minute, on {m.cores} "
                f"cores of which this run takes {m.threads}. Stop what else runs, or wait, or times will scatter."
            )

    def checks(self) -> None:
        rows = self.results.checks
        if not rows or self._done("checks"):
            return
        table = _table("Accuracy and FLOPs, before anything is timed", "workload",
            "worst error", "of bound", "counted", "executed", "share", "")  # fmt: skip
        for row in rows:
            verdict = Text("FAIL", "bold red") if row.failures else Text("ok", "green")
            table.add_row(row.workload, row.worst, f"{row.ratio:.2f}",
                f"{row.counted * 1e-9:.2f}", f"{row.executed * 1e-9:.2f}",
                f"{row.executed / max(row.counted, 1):.0%}", verdict)  # fmt: skip
        self._print(table)
        self._note(
            "Errors of out, lse and all gradients (where pairs are many, of some heads and batches) "
            "against eager in float64, as a part of what the accuracy rule allows. GFLOP of the "
            "forward pass: counted by FlopCounterMode, the same for our operator, plain PyTorch and "
            "the closed formula; executed is what masks, closed heads and empty mixing chunks leave."
        )
        errors = [row.model_error for row in rows if row.model_error is not None]
        if errors:
            self._note(
                f"MiniLM: the outputs equal the model's own attention to {max(errors):.1e} on "
                "every real token of every layer."
            )

    def speed(self, table_name: str) -> None:
        """Times of one table of workloads."""
        rows = [row for row in self.results.speed if row.table == table_name]
        if not rows or self._done(table_name):
            return
        columns = [(head, cell) for head, cell in _SPEED if any(map(cell, rows))]
        table = _table(table_name, "median ms", "", *(head for head, _ in columns))
        several = len({row.threads for row in rows}) > 1
        previous: Speed | None = None
        for row in rows:
            label = f"{row.label}, {row.threads} thr" if several else row.label
            again = previous is not None and (previous.label, previous.threads) == (
                row.label, row.threads)  # fmt: skip
            table.add_row(
                "" if again else label, row.direction, *(cell(row) for _, cell in columns)
            )
            previous = row
        self._print(table)

    def memory(self) -> None:
        if not self.results.memory or self._done("memory"):
            return
        for case in dict.fromkeys(row.case for row in self.results.memory):
            table = _table("Peak memory beyond inputs and results", case, "pass", "MiB", "")
            for row in self.results.memory:
                if row.case != case:
                    continue
                mib = "-" if row.extra is None else f"{row.extra / 2**20:,.1f}"
                name = {"sdpa": "SDPA*gate"}.get(row.candidate, row.candidate)
                what = "forward" if row.direction == "forward" else "forward and backward"
                table.add_row(name, what, mib, row.how if row.extra is None else "")
            self._print(table)

    def overhead(self) -> None:
        if not self.results.overhead or self._done("overhead"):
            return
        table = _table("Overhead of a call without gradients", "B1 H2 T4 D8", "microseconds")
        for row in self.results.overhead:
            table.add_row(row.call, f"{row.us:.1f}")
        self._print(table)

    def decoding(self) -> None:
        rows = self.results.decoding
        if not rows or self._done("decoding"):
            return
        table = _table("Decoding: one query row against a cache", "", "", "thr", "bytes a token", "ms",
            "x SDPA", "GB/s", "of memory", "spread")  # fmt: skip
        previous = ""
        for row in rows:
            table.add_row("" if row.case == previous else row.case, row.candidate, str(row.threads),
                f"{row.token_bytes:,}", f"{row.ms:.3f}", _ratio(row.times_sdpa), f"{row.gbytes:.1f}",
                f"{row.gbytes / row.memory_gbytes:.0%}",
                f"{row.spread:.1f}x" if row.spread > MOST_SPREAD else "")  # fmt: skip
            previous = row.case
        self._print(table)
        self._note("x SDPA: the faster SDPA of the case by this. of memory: by the rate of PyTorch's "
            "fastest reduction of as many bytes.")  # fmt: skip

    def finish(self) -> None:
        """What was not printed yet, notes, goals, and the failures last."""
        self.checks()
        for name in dict.fromkeys(row.table for row in self.results.speed):
            self.speed(name)
        self.memory()
        self.overhead()
        self.decoding()
        for note in self.results.notes:
            self._note(note)
        self._rates()
        self._goals()
        for failure in self.results.failures:
            self.console.print(f"[bold red]FAIL[/] {escape(failure)}")

    def summary(self, options: str) -> None:
        """One line to repeat, of closed heads where they were timed; `options` are those of the run."""
        rows = [] if self.results.form == "smoke" else self.results.speed
        row = next((row for row in rows if row.workload == _HEADLINE), rows[0] if rows else None)
        if row is None:
            return
        against, ratio = "SDPA times the gate", row.ratio("sdpa")
        if ratio is None:
            against, ratio = "eager PyTorch", row.ratio("eager")
        disturbed = " (disturbed)" if row.disturbed or self.results.busy else ""
        self.console.print(
            f"{row.label}, {row.direction}: {ratio:.1f} times as fast as {against}{disturbed}. "
            f"Repeat it: python -m benchmarks --only {row.workload}{options}",
            soft_wrap=True,
        )

    def _rates(self) -> None:
        """What the floors were reckoned with."""
        for threads in sorted({row.threads for row in self.results.speed}, reverse=True):
            floors = [row.floor for row in self.results.speed if row.threads == threads]
            known = [floor for floor in floors if floor is not None]
            if not known:
                continue
            products = "; ".join(
                f"{name} {max(floor.gflops for floor in known if floor.product == name):.0f} GFLOP/s"
                for name in sorted({floor.product for floor in known})
            )
            sgemm = median(floor.sgemm for floor in known)
            gbytes = [floor.gbytes for floor in known]
            self._note(
                f"Floors on {threads} thr: products at {products} at most, "
                f"{max(floor.gexps for floor in known):.1f}e9 exp/s, copies at {min(gbytes):.0f} to "
                f"{max(gbytes):.0f} GB/s by size; b: bytes are the bound. "
                f"torch.mm: {sgemm:.0f} GFLOP/s (median)."
            )

    def _goals(self) -> None:
        """A line a goal, its outcomes side by side, one a number of threads."""
        outcomes = self.results.goals()
        if not outcomes:
            return
        numbers: list[int | None] = [
            *sorted({o.threads for o in outcomes if o.threads}, reverse=True)
        ]
        numbers = numbers or [None]
        heads = [head for n in numbers for head in ("goal", f"{n} thr" if n else "got", "")]
        table = _table("Goals", "", "against", *heads)
        lines: dict[tuple[str, str], dict[int | None, Outcome]] = {}
        for outcome in outcomes:
            threads = outcome.threads or numbers[0]
            lines.setdefault((outcome.goal, outcome.against), {})[threads] = outcome
        for words, found in lines.items():
            cells: list[str | Text] = []
            for threads in numbers:
                one = found.get(threads)
                cells += [one.wanted, one.got, _verdict(one.met)] if one else ["", "", ""]
            table.add_row(*words, *cells)
        self._print(table)
        self.console.print(f"{sum(o.met for o in outcomes)} of {len(outcomes)} goals met")

    def _done(self, part: str) -> bool:
        done = part in self._printed
        self._printed.add(part)
        return done

    def _print(self, table: Table) -> None:
        self.console.print()
        self.console.print(table)

    def _note(self, text: str) -> None:
        self.console.print(f"[dim]{escape(text)}[/]")


def _table(title: str, first: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False,
        header_style="dim")  # fmt: skip
    table.add_column(first, overflow="fold")
    for column in columns:
        words = column in ("worst error", "pass", "against") or (
            column == "" and column is columns[0]
        )
        table.add_column(column, justify="left" if words else "right", no_wrap=True)
    return table


def _verdict(met: bool) -> Text:
    return Text("met", "green") if met else Text("short", "bold yellow")


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:.1f}" if milliseconds >= 10 else f"{milliseconds:.2f}"


def _ratio(ratio: float | None) -> Text:
    """How many times faster ours is; red where it is slower."""
    if ratio is None:
        return Text("")
    return Text(f"{ratio:.2f}x", "green" if ratio >= 1 else "red")


def _floor(row: Speed) -> str:
    if row.floor is None:
        return ""
    return _ms(row.floor.ms) + (" b" if row.floor.bound == "bytes" else "")


def _of_sgemm(row: Speed) -> str:
    ratio = row.ratio("sgemm")
    return "" if ratio is None else f"{ratio:.2f}"


def _gap(row: Speed) -> str:
    return "" if row.floor is None else f"{row.floor.gap:.2f}"


#: Columns of a table of times; one that is empty in all rows is left out.
_SPEED: Final[tuple[tuple[str, Callable[[Speed], str | Text]], ...]] = (
    ("ours", lambda row: _ms(row.ms)),
    ("GFLOP/s", lambda row: f"{row.gflops:.0f}"),
    ("eager", lambda row: _ms(row.eager_ms)),
    ("x", lambda row: _ratio(row.ratio("eager"))),
    ("SDPA*gate", lambda row: "" if row.sdpa_ms is None else _ms(row.sdpa_ms)),
    ("x", lambda row: _ratio(row.ratio("sdpa"))),
    ("x dense", lambda row: _ratio(row.ratio("dense"))),
    ("x f32", lambda row: _ratio(row.ratio("float32"))),
    ("x mm", _of_sgemm),
    ("floor", _floor),
    ("gap", _gap),
    ("spread", lambda row: f"{row.spread:.1f}x" if row.disturbed else ""),
)
