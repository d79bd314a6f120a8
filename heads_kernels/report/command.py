"""`python -m heads_kernels report`: its options, and the run from loading to the page."""

from __future__ import annotations

import argparse
import importlib.util
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from heads_kernels.report import page
from heads_kernels.report.inputs import BadOption, Inputs, load
from heads_kernels.report.results import Folder, Found
from heads_kernels.report.stages import LEFT_OUT, STAGES

DESCRIPTION = """\
What the heads of a transformers model do on a text: which of them matter, what they attend to, how alike they are,
how many dimensions they use, and how many can be closed. DIR/index.html is a page that needs no other file; all
numbers are saved beside it as CSV and JSON.

Each result is saved as soon as it is computed; after an interruption, run the same command to continue. Results of
another model or text are replaced or removed.
"""


# ---------------------------------------------------------------------- options
def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `report`."""
    add = parser.add_argument
    add("--model", type=model_folder, required=True, metavar="PATH",
        help="folder of a transformers checkpoint and its tokenizer: encoder or decoder, pruned or not")  # fmt: skip
    add("--text", type=lines, required=True, metavar="FILE",
        help="UTF-8, a sentence or passage on each line")  # fmt: skip
    add("--out", type=output_folder, required=True, metavar="DIR", help="folder of the report")
    add("--fast", action="store_true", help=f"fewer passes over the text: {LEFT_OUT}")
    add("--limit", type=positive, default=200, metavar="N",
        help="use the first N lines, default %(default)s")  # fmt: skip
    add("--tokens", type=positive, default=128, metavar="N",
        help="truncate lines to N tokens, default %(default)s")  # fmt: skip
    add("--batch", type=positive, default=16, metavar="N",
        help="lines in a batch, default %(default)s")  # fmt: skip
    add("--threads", type=positive, metavar="N", help="default: as PyTorch chooses")
    stages = [name for name in STAGES if name != "model"]
    add("--only", nargs="+", choices=stages, metavar="STAGE",
        help=f"compute only these: {', '.join(stages)}")  # fmt: skip
    add("--sentence", metavar="TEXT",
        help="the sentence whose attention maps are drawn, default the first line")  # fmt: skip
    add("--heads", nargs="+", type=head, metavar="LAYER:HEAD",
        help="draw large maps of these heads, counted from 0: 0:3 2:7; default the sharpest of each layer")  # fmt: skip


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"is {text!r}; pass a whole number, 1 or more")
    return int(text)


def head(text: str) -> tuple[int, int]:
    layer, _, number = text.partition(":")
    if not (layer.isdecimal() and number.isdecimal()):
        raise argparse.ArgumentTypeError(f"is {text!r}; pass LAYER:HEAD, such as 0:3")
    return int(layer), int(number)


def model_folder(text: str) -> Path:
    if not (Path(text) / "config.json").is_file():
        was = f"is {text!r}, which has no config.json"
        raise argparse.ArgumentTypeError(f"{was}; pass the folder of a transformers checkpoint")
    return Path(text)


def lines(text: str) -> list[str]:
    """The lines of a file that are not blank."""
    try:
        content = Path(text).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise argparse.ArgumentTypeError(f"is {text!r}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        was = f"is {text!r}, which is not UTF-8 (byte {error.start})"
        raise argparse.ArgumentTypeError(f"{was}; convert it first") from error
    found = [line.strip() for line in content.splitlines() if line.strip()]
    if not found:
        was = f"is {text!r}, which has no text"
        raise argparse.ArgumentTypeError(f"{was}; pass a file with a sentence on each line")
    return found


def output_folder(text: str) -> Path:
    """The folder, created if missing."""
    path = Path(text)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"is {text!r}: {error.strerror}") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise argparse.ArgumentTypeError(f"is {text!r}, which cannot be written to")
    return path


# ---------------------------------------------------------------------- the run
def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Make the report; returns 0, or 130 after an interruption. A bad option exits with status 2."""
    _check_extras(parser)
    from rich.console import Console

    console = Console()
    progress = Progress(console)
    if options.threads:
        torch.set_num_threads(options.threads)
    try:
        inputs = load(options)
        folder = Folder(options.out)
        with progress:
            compute(folder, inputs, options.only or list(STAGES), progress)
            progress.reached = "the page"
            found = {name: each for name in STAGES if (each := saved(folder, inputs, name))}
            made = page.html(found, options.heads, str(options.model))
            folder.write_whole("index.html", made.encode())
            for name in folder.remove_stale(inputs.fingerprint, list(STAGES)):
                progress.say(name, "removed: made from another model, text or sentence")
    except BadOption as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        console.print(
            f"[bold yellow]interrupted[/] in {progress.reached}; the same command continues"
        )
        return 130
    console.print(f"{options.out / 'index.html'}", markup=False, soft_wrap=True)
    return 0


def compute(folder: Folder, inputs: Inputs, stages: list[str], progress: Progress) -> None:
    """Compute those of `stages` that the folder lacks."""
    chosen = [name for name in STAGES if name in {"model", *stages}]
    missing = [name for name in chosen if not saved(folder, inputs, name, inputs.fast)]
    passes = {name: STAGES[name].passes(inputs) for name in missing}
    progress.plan(inputs, sum(passes.values()))
    for name in chosen:
        if name not in missing:
            progress.skip(name)
            continue
        with progress.stage(name, passes[name], len(inputs.batches)) as advance:
            hook = inputs.model.register_forward_hook(lambda *_, advance=advance: advance())
            try:
                found = STAGES[name].compute(inputs)
            finally:
                hook.remove()
            folder.write(name, found, inputs.fingerprint(name))


def saved(folder: Folder, inputs: Inputs, stage: str, fast: bool = True) -> Found | None:
    """The saved result of a stage; unless `fast`, not one that was made with --fast."""
    found = folder.read(stage, inputs.fingerprint(stage))
    return None if found and found.get("fast") and not fast else found


def _check_extras(parser: argparse.ArgumentParser) -> None:
    missing = [
        name
        for name in ("transformers", "tokenizers", "rich", "matplotlib")
        if importlib.util.find_spec(name) is None
    ]
    if missing:
        how = "pip install 'heads_kernels[report]'"
        parser.error(f"{', '.join(missing)} missing; {how}")


# ---------------------------------------------------------------------- progress
class Progress:
    """Progress bars of the stages on a terminal; elsewhere lines with forecasts of their time.

    Attributes:
        reached: the current stage, for messages.
    """

    def __init__(self, console: Any) -> None:
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as Bars

        self.console = console
        self.reached = "loading"
        self.seconds = 0.0  # of a pass over the text; 0 is unknown
        self.bars = Bars(
            TextColumn("{task.description:12}"), BarColumn(24), TimeElapsedColumn(), TimeRemainingColumn(),
            TextColumn("[dim]{task.fields[note]}"),
            console=console, refresh_per_second=4, disable=not console.is_terminal,
        )  # fmt: skip

    def __enter__(self) -> Progress:
        self.bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bars.stop()

    def plan(self, inputs: Inputs, passes: int) -> None:
        """Measure a pass and print a forecast for all passes, unless there are none or bars are shown."""
        if not self.bars.disable or not passes:
            return
        self.seconds = seconds_of_a_pass(inputs)
        each, whole = duration(self.seconds), duration(passes * self.seconds)
        self.console.print(f"about {whole}: {passes} passes over the text, {each} each")

    @contextmanager
    def stage(self, name: str, passes: int, batches: int) -> Iterator[Callable[[], None]]:
        """Yields a function to call after each batch that goes through the model."""
        self.reached = name
        started, done, total = time.perf_counter(), 0, passes * batches
        row = self.bars.add_task(name, total=total or None, note="")
        if passes:
            self.say(name, f"about {duration(passes * self.seconds)} ...")

        def advance() -> None:
            nonlocal done
            done += 1
            self.reached = f"{name}, batch {done} of about {total}" if total else name
            self.bars.update(row, completed=done)

        yield advance
        seconds = time.perf_counter() - started
        self.bars.update(row, total=1, completed=1)
        self.say(name, f"done in {duration(seconds)}")
        self.seconds = seconds / passes if passes else self.seconds  # for the next forecast

    def skip(self, name: str) -> None:
        """Report that a stage was computed before."""
        self.bars.add_task(name, total=1, completed=1, note="saved before")
        self.say(name, "saved before")

    def say(self, name: str, what: str) -> None:
        """Print a line about a stage, unless bars are shown."""
        if self.bars.disable:
            self.console.print(f"{name:12} {what}", highlight=False)


@torch.no_grad()
def seconds_of_a_pass(inputs: Inputs) -> float:
    """Time of a forward pass over the whole text, extrapolated from the second of two passes of the longest batch."""
    batch = inputs.batches[-1]
    inputs.model(**batch)
    started = time.perf_counter()
    inputs.model(**batch)
    tokens = sum(each["input_ids"].numel() for each in inputs.batches)
    return (time.perf_counter() - started) * tokens / batch["input_ids"].numel()


def duration(seconds: float) -> str:
    """A time in a readable unit."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
