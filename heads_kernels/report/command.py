"""`python -m heads_kernels report`, from its options to the page."""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from heads_kernels.report.folder import Folder
from heads_kernels.report.page import write_page
from heads_kernels.report.reading import BadOption, Reading, load
from heads_kernels.report.stages import STAGES


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Make the report; the exit status is 0, or 130 where it was interrupted. A bad option exits with status 2."""
    _check_extras(parser)
    from rich.console import Console

    console = Console()
    bar = Bar(console)
    if options.threads:
        torch.set_num_threads(options.threads)
    try:
        reading = load(options)
        folder = Folder(options.out)
        with bar:
            fill(folder, reading, options.only or list(STAGES), bar)
            bar.reached = "the pictures"
            write_page(folder, prints(reading), options.heads)
    except BadOption as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        console.print(f"[bold yellow]interrupted[/] in {bar.reached}; the same command goes on")
        return 130
    console.print(f"{options.out / 'index.html'}", markup=False, soft_wrap=True)
    return 0


def fill(folder: Folder, reading: Reading, stages: list[str], bar: Bar) -> None:
    """Compute those of `stages` that the folder lacks."""
    for name, stage in STAGES.items():
        if name not in {"model", *stages}:
            continue
        if folder.read(name, prints(reading)[name]):
            bar.skip(name)
            continue
        passes = stage.passes(reading) * len(reading.batches)
        with bar.stage(name, passes) as advance:
            hook = reading.model.register_forward_hook(lambda *_, advance=advance: advance())
            try:
                found = stage.compute(reading)
            finally:
                hook.remove()
            folder.write(name, found, prints(reading)[name])


def prints(reading: Reading) -> dict[str, str]:
    """The fingerprint of each stage."""
    sentence = f"{reading.fingerprint} {reading.sentence}"
    maps = hashlib.sha256(sentence.encode()).hexdigest()[:32]
    return {name: maps if name == "maps" else reading.fingerprint for name in STAGES}


def _check_extras(parser: argparse.ArgumentParser) -> None:
    missing = [
        name
        for name in ("transformers", "tokenizers", "rich", "matplotlib")
        if importlib.util.find_spec(name) is None
    ]
    if missing:
        how = "pip install 'heads_kernels[report]'"
        parser.error(f"{', '.join(missing)} missing; {how}")


class Bar:
    """A progress bar for each stage, or a line where the output is no terminal.

    Attributes:
        reached: the last stage in words.
    """

    def __init__(self, console: Any) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self.console = console
        self.reached = "the start"
        self.progress = Progress(
            TextColumn("{task.description:12}"), BarColumn(24), TimeElapsedColumn(),
            TextColumn("[dim]{task.fields[note]}"),
            console=console, refresh_per_second=4, disable=not console.is_terminal,
        )  # fmt: skip

    def __enter__(self) -> Bar:
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()

    @contextmanager
    def stage(self, name: str, passes: int) -> Iterator[Callable[[], None]]:
        """Gives what to call after each of the passes of a batch through the model."""
        self.reached = name
        started, done = time.perf_counter(), 0
        row = self.progress.add_task(name, total=passes or None, note="")

        def advance() -> None:
            nonlocal done
            done += 1
            self.reached = f"{name}, pass {done} of about {passes}" if passes else name
            self.progress.update(row, completed=done)

        yield advance
        self.progress.update(row, total=1, completed=1)
        self._say(name, f"{time.perf_counter() - started:.1f} s")

    def skip(self, name: str) -> None:
        """The stage's file is there."""
        self.progress.add_task(name, total=1, completed=1, note="was there")
        self._say(name, "was there")

    def _say(self, name: str, what: str) -> None:
        if self.progress.disable:
            self.console.print(f"{name:12} {what}")
