"""`python -m benchmarks`: accuracy and FLOPs first, then speed, memory, overhead and decoding.

Exit status: 0; 1 where a check failed or nothing can be plotted; 2 for a bad option; 130 where it was
interrupted, after the report of what was measured by then.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

try:
    from rich.markup import escape
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
except ImportError:
    sys.exit("python -m benchmarks needs rich: pip install 'heads_kernels[bench]', or make bench")

from benchmarks import plot, run
from benchmarks.problems import Workload
from benchmarks.report import Report, make_console
from benchmarks.results import Results, keep, kept_file, this_machine, write_json

_DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16,
    "float16": torch.float16}  # fmt: skip


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=(__doc__ or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--smoke", action="store_true", help="tiny sizes: does everything run?")
    form.add_argument("--full", action="store_true",
        help="all lengths, widths, paddings and models, on all threads and on one, and how far goals "
            "are met (17 minutes on 2 cores)")  # fmt: skip
    form.add_argument("--plot", action="store_true",
        help="measure nothing: draw benchmarks/results/<machine>.svg from the newest full run kept")  # fmt: skip
    parser.add_argument("--only", metavar="PATTERN",
        help="workloads whose name has this in it (* and ? allowed); also memory, overhead, decoding")  # fmt: skip
    parser.add_argument("--floor", action="store_true",
        help="beside every time the least that this machine's cores allow (--full has it always)")  # fmt: skip
    parser.add_argument("--threads", type=_threads, metavar="N", help="default: as torch has it")
    parser.add_argument("--dtype", choices=_DTYPES, default="float32")
    parser.add_argument("--json", type=_json_path, metavar="PATH", help="write all numbers here")
    parser.add_argument("--keep", action="store_true",
        help="add this run to benchmarks/results/<machine>.jsonl")  # fmt: skip
    return parser


def _threads(text: str) -> int:
    most = os.cpu_count() or 1
    if not text.isdecimal() or not 1 <= int(text) <= most:
        raise argparse.ArgumentTypeError(f"is {text!r}; pass a number from 1 to {most}, the cores")
    return int(text)


def _json_path(text: str) -> Path:
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder; name a file")
    if not os.access(path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"the folder of {text!r} is not there or not writable")
    return path


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    form = "smoke" if options.smoke else "full" if options.full else "quick"
    if options.keep and (options.smoke or options.only):
        parser.error("--keep is for whole runs; leave out --smoke and --only")
    if options.plot:
        if vars(options) != vars(parser.parse_args(["--plot"])):
            parser.error("--plot measures nothing; leave out the other options")
        return _plot()
    settings = run.Settings(
        form, _DTYPES[options.dtype], options.only, options.floor or options.full
    )
    try:
        chosen = run.choose(settings)
    except run.NothingToDo as error:
        parser.error(str(error))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(options.threads or threads)
        results = Results(this_machine(), form, options.dtype, run.backends(settings))
        interrupted = _run(settings, chosen, results, options)
    except KeyboardInterrupt:  # before anything was measured
        return 130
    finally:
        torch.set_num_threads(threads)
    return 130 if interrupted else int(bool(results.failures))


def _plot() -> int:
    console = make_console()
    try:
        console.print(f"drawn: {plot.draw(kept_file(this_machine()))}")
    except plot.CannotPlot as error:
        console.print(f"[bold red]no plot[/]: {escape(str(error))}")
        return 1
    return 0


def _run(
    settings: run.Settings,
    chosen: list[Workload],
    results: Results,
    options: argparse.Namespace,
) -> bool:
    """Measure, report and write; returns whether it was interrupted."""
    console = make_console()
    report = Report(results, console)
    report.head()
    interrupted = False
    columns = BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    quiet = not console.is_terminal
    try:
        # No refresh by itself: its thread would take a core away from what is being timed.
        with Progress(
            *columns, console=console, transient=True, auto_refresh=False, disable=quiet
        ) as progress:
            task = progress.add_task("", total=run.steps(settings, chosen))

            def step(name: str) -> None:
                progress.update(task, advance=1, description=name, refresh=True)

            run.run(settings, chosen, report, step)
    except KeyboardInterrupt:
        interrupted = True
    report.finish()
    if interrupted:
        console.print("[bold yellow]interrupted[/]: the rest was not measured")
    if options.json:
        write_json(results, options.json)
        console.print(f"[dim]numbers in {options.json}[/]")
    if options.keep:
        if interrupted or results.failures:
            console.print("[yellow]not kept[/]: only whole runs without failures are")
        else:
            console.print(f"[dim]kept in {keep(results)}[/]")
    report.summary(
        (f" --threads {options.threads}" if options.threads else "")
        + (f" --dtype {options.dtype}" if options.dtype != "float32" else "")
    )
    return interrupted


if __name__ == "__main__":
    sys.exit(main())
