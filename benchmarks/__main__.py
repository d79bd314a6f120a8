"""`python -m benchmarks`: accuracy first, then speed, memory and overhead.

With `--device cuda` on a GPU: against each kernel of SDPA, FlexAttention and flash-attn. Where there is no GPU,
`--device cuda --smoke` shows that all of it runs, on simulated kernels (TRITON_INTERPRET=1,
HEADS_KERNELS_EMULATE_CUDA=1).

The file of `--json` is written after every measurement. The same command goes on where one ended that was interrupted
or crashed, with parts from their start; what it was running when it crashed is a failure.

Exit status: 0; 1 where a check failed or nothing can be plotted; 2 for a bad option; 3 where a kernel broke the CUDA
context (the same command goes on after it); 130 where it was interrupted, after the report of what was measured.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

try:
    from rich.markup import escape
except ImportError:
    sys.exit("python -m benchmarks needs rich: pip install 'heads_kernels[bench]', or make bench")

from benchmarks import figures, run
from benchmarks.report import Report, make_console
from benchmarks.results import Results, keep, this_machine
from benchmarks.settings import Form, Settings, on_threads, word
from benchmarks.workloads import Workload
from heads_kernels.backends import CUDA_EMULATED, TRITON_INTERPRETED

_DTYPES = {word(dtype): dtype for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=(__doc__ or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--smoke", action="store_true", help="tiny sizes: does everything run?")
    form.add_argument("--full", action="store_true",
        help="all lengths, widths, paddings and models, on all threads and on one, and how far goals "
            "are met (40 minutes on 2 cores)")  # fmt: skip
    form.add_argument("--plot", action="store_true",
        help="measure nothing: draw the figure of README from the kept full run")  # fmt: skip
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", metavar="PATTERN",
        help=f"workloads whose name has this in it (* and ? allowed); also {', '.join(run.PARTS)}; and, measured only "
            f"where they are named, {', '.join(run.ON_REQUEST)}")  # fmt: skip
    parser.add_argument("--floor", action="store_true",
        help="beside every time the least that this machine allows (--full has it always)")  # fmt: skip
    parser.add_argument("--threads", type=int, choices=range(1, (os.cpu_count() or 1) + 1),
        metavar="N", help="default: as torch has it")  # fmt: skip
    parser.add_argument("--dtype", choices=_DTYPES, help="default: float32, on a GPU bfloat16")
    parser.add_argument("--json", type=_json_path, metavar="PATH", help="write all numbers here")
    parser.add_argument("--keep", action="store_true", help="add this run to benchmarks/results/<machine>.jsonl")
    return parser


def _json_path(text: str) -> Path:
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder; name a file")
    if not os.access(path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"the folder of {text!r} is not there or not writable")
    return path


def _settings(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Settings:
    """What the options ask for; exits where this machine cannot do it."""
    form: Form = "smoke" if options.smoke else "full" if options.full else "quick"
    dtype, simulated = "float32", TRITON_INTERPRETED or CUDA_EMULATED
    if options.device == "cuda":
        if torch.cuda.is_available():
            dtype = "bfloat16"
        elif not (options.smoke and simulated):
            parser.error("--device cuda: there is no CUDA device; without one it takes --smoke, and "
                "TRITON_INTERPRET=1 or HEADS_KERNELS_EMULATE_CUDA=1")  # fmt: skip
    if options.keep and (options.smoke or (options.only and options.only not in run.ON_REQUEST)):
        parser.error("--keep is for whole runs; leave out --smoke and --only")
    floor = options.floor or options.full
    return Settings(form, options.device, _DTYPES[options.dtype or dtype], options.only, floor)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.plot:
        if vars(options) != vars(parser.parse_args(["--plot"])):
            parser.error("--plot measures nothing; leave out the other options")
        return _plot()
    settings = _settings(parser, options)
    try:
        chosen = run.choose(settings)
    except run.NothingToDo as error:
        parser.error(str(error))
    with on_threads(options.threads):
        try:
            machine, backends = this_machine(settings.device), run.backends(settings)
            return _run(chosen, Results(machine, settings, backends, path=options.json), options)
        except KeyboardInterrupt:  # before anything was measured
            return 130


def _plot() -> int:
    console = make_console()
    try:
        console.print(f"drawn: {figures.draw()}")
    except figures.CannotPlot as error:
        console.print(f"[bold red]no plot[/]: {escape(str(error))}")
        return 1
    return 0


def _run(chosen: list[Workload], results: Results, options: argparse.Namespace) -> int:
    """Measure, report and write."""
    console = make_console(options.device)
    report = Report(results, console)
    report.head()
    status = 0
    if results.resume():
        console.print(f"[bold]goes on with {options.json}[/]")
    try:
        run.run(chosen, report)
    except KeyboardInterrupt:
        status, results.running = 130, None
        console.print("[bold yellow]interrupted[/]: the rest was not measured")
    except run.ContextLost as error:
        status = 3
        console.print(f"[bold red]the CUDA context is lost[/]: {escape(str(error))}")
    results.write()
    report.finish(
        (f" --device {options.device}" if options.device != "cpu" else "")
        + (f" --threads {options.threads}" if options.threads else "")
        + (f" --dtype {options.dtype}" if options.dtype else "")
    )
    if options.json:
        console.print(f"[dim]numbers in {options.json}[/]")
    if options.keep:
        if not results.complete or results.failures:
            console.print("[yellow]not kept[/]: only whole runs without failures are")
        else:
            console.print(f"[dim]kept in {keep(results)}[/]")
    return status or int(bool(results.failures))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a time limit from outside: report what is there
    sys.exit(main())
