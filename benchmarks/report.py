"""Tables for a person, readable at 100 columns."""

from __future__ import annotations

import sys
from typing import IO

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from benchmarks.measure import Speed
from benchmarks.results import Results

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
            "Errors of out, lse and all gradients against eager in float64, as a part of what the "
            "accuracy rule allows. GFLOP of the forward pass: counted by FlopCounterMode, the same "
            "for our operator, plain PyTorch and the closed formula; executed is what masks, "
            "closed heads and empty mixing chunks leave."
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
        table = _table(table_name, "median ms", "", "ours", "GFLOP/s", "eager", "x", "SDPA*gate",
            "x", "x dense")  # fmt: skip
        several = len({row.threads for row in rows}) > 1
        previous: Speed | None = None
        for row in rows:
            label = f"{row.label}, {row.threads} thr" if several else row.label
            again = previous is not None and (previous.label, previous.threads) == (
                row.label, row.threads)  # fmt: skip
            table.add_row("" if again else label, row.direction, _ms(row.ms), f"{row.gflops:.1f}",
                _ms(row.eager_ms), _ratio(row.ratio("eager")), _ms(row.sdpa_ms),
                _ratio(row.ratio("sdpa")), _ratio(row.ratio("dense")))  # fmt: skip
            previous = row
        self._print(table)

    def memory(self) -> None:
        if not self.results.memory or self._done("memory"):
            return
        rows = self.results.memory
        table = _table("Peak memory beyond inputs and results", rows[0].case, "pass", "MiB", "")
        for row in rows:
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

    def finish(self) -> None:
        """What was not printed yet, notes, goals, and the failures last."""
        self.checks()
        for name in dict.fromkeys(row.table for row in self.results.speed):
            self.speed(name)
        self.memory()
        self.overhead()
        for note in self.results.notes:
            self._note(note)
        goals = [] if self.results.form == "smoke" else self.results.goals()
        if goals:
            table = _table("Goals", "", "against", "goal", "got", "")
            for outcome in goals:
                verdict = Text("pass", "green") if outcome.met else Text("short", "bold yellow")
                table.add_row(outcome.goal, outcome.against, outcome.wanted, outcome.got, verdict)
            self._print(table)
        for failure in self.results.failures:
            self.console.print(f"[bold red]FAIL[/] {escape(failure)}")

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


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:.1f}" if milliseconds >= 10 else f"{milliseconds:.2f}"


def _ratio(ratio: float | None) -> Text:
    """How many times faster ours is; red where it is slower."""
    if ratio is None:
        return Text("")
    return Text(f"{ratio:.2f}x", "green" if ratio >= 1 else "red")
