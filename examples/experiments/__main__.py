"""Small versions of the papers' experiments: what the heads of a model do, and which of them are needed.

    python examples/experiments NAME [--out DIR] [--seeds N] [--quick]

runs one experiment; NAME is

    heads_of_minilm              claims about heads, tested on a pretrained model
    pruning_curves               quality over closed heads, by every measure of importance, random and reversed
    l0_by_kind                   heads that L0 gates leave open, by kind of attention
    collaborative_from_scratch   collaborative against ordinary attention at smaller key widths
    l0_or_importance             L0 gates against importance at equal numbers of heads
    conversion_recovered         a model made collaborative, at once and after further training
    deep_decoders                12 layers without warm-up: depth-scaled initialisation, merged attention
    rotary_conversion            a model with rotary positions made collaborative, against other ways to a smaller cache
    sparse_heads                 heads that learn how sparse they are (entmax), against softmax

and writes NAME.json and NAME.svg into DIR. NAME.json is written after every run: after an interruption, the same
command continues with the missing runs. With --quick everything is tiny and takes seconds; its results mean nothing.

    python examples/experiments keep [--out DIR]

copies the results in DIR to docs/experiments, draws them, and updates the tables of docs/experiments.md.

Exit status: 0; 2 for a bad option or if something is missing, with a message; 130 if it was interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch

ROOT: Final = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "examples" / "translation"), str(ROOT)]

try:
    import page
    import plots
    from lab import Lab, OtherSettings
    from options import create
    from report import Bar
    from rich.console import Console

    from benchmarks.minilm import Unavailable
except ModuleNotFoundError as error:
    sys.exit(f"{error}; the experiments need pip install 'heads_kernels[examples,bench]'")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the options, and create the folder of `--out`; a bad option ends the program with status 2."""
    parser = argparse.ArgumentParser(
        prog="python examples/experiments",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("name", choices=[*page.EXPERIMENTS, "keep"], metavar="NAME",
        help=f"{', '.join(page.EXPERIMENTS)} or keep")  # fmt: skip
    add("--out", type=Path, default=Path("build/experiments"), metavar="DIR",
        help="default: %(default)s")  # fmt: skip
    add("--seeds", type=int, choices=range(1, 11), default=2, metavar="N",
        help="how many seeds, 1 to 10, default 2")  # fmt: skip
    add("--quick", action="store_true", help="tiny sizes: does everything run?")
    options = parser.parse_args(arguments)
    create(options.out, parser)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run an experiment, or publish the results; returns the exit status."""
    options = parse(arguments)
    console = Console()
    torch.set_num_threads(1)  # small tensors gain little from more threads, and a seed reproduces its results
    try:
        if options.name == "keep":
            kept = page.keep(options.out)
            console.print(f"kept in {page.KEPT}: {', '.join(kept)}", markup=False)
        else:
            experiment(options, console)
    except KeyboardInterrupt:
        found = f"interrupted; {options.out} has the runs that were finished"
        console.print(found, markup=False, soft_wrap=True)
        return 130
    except (OtherSettings, Unavailable, page.NothingToKeep) as error:
        console.print(str(error), markup=False, soft_wrap=True)
        return 2
    return 0


def experiment(options: argparse.Namespace, console: Console) -> None:
    module: Any = importlib.import_module(options.name)
    with Bar(console) as bar:
        module.run(Lab(options.out, range(options.seeds), options.quick, bar))
    file = options.out / f"{options.name}.json"
    found = json.loads(file.read_text(encoding="utf-8"))
    for table in module.tables(**found).values():
        console.print(table, markup=False, soft_wrap=True)
    plots.save(module.draw, **found, path=file.with_suffix(".svg"))
    made = f"{file}, {file.with_suffix('.svg').name}"
    console.print(made, markup=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
