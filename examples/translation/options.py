"""The options of the example."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence
from pathlib import Path

from corpus import read_pairs
from languages import Pair


def parse(description: str | None, all_heads: int, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the options, and create the folder of `--out`; a bad option ends the program with status 2."""
    parser = argparse.ArgumentParser(
        prog="python examples/translation",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--out", type=Path, default=Path("build/translation"), metavar="DIR",
        help="default: %(default)s")  # fmt: skip
    add("--steps", type=positive, metavar="N", help="of training before gates, default 1200")
    add("--gated-steps", type=positive, metavar="N",
        help="with gates, and of the control, default 1000")  # fmt: skip
    end = parser.add_mutually_exclusive_group()
    end.add_argument("--heads", type=int, choices=range(all_heads + 1), default=16, metavar="K",
        help=f"how many heads are left, 0 to {all_heads}, default 16")  # fmt: skip
    end.add_argument("--penalty", type=weight, metavar="LAMBDA",
        help="a constant weight of the L0 penalty instead, such as 0.02")  # fmt: skip
    add("--pairs", type=sentence_pairs, metavar="FILE",
        help="translate these instead: source, tab, target in a line")  # fmt: skip
    add("--seed", type=int, default=0, metavar="S", help="of language, model and batches, default 0")
    add("--threads", type=positive, default=1, metavar="N",
        help="default 1: tensors this small gain little from more, and lose much on a busy machine")  # fmt: skip
    add("--quick", action="store_true", help="120 and 80 steps, half the batch")
    options = parser.parse_args(arguments)
    options.batch = 32 if options.quick else 64
    options.steps = options.steps or (120 if options.quick else 1200)
    options.gated_steps = options.gated_steps or (80 if options.quick else 1000)
    create(options.out, parser)
    return options


def create(folder: Path, parser: argparse.ArgumentParser) -> None:
    """Create the folder of `--out`; if that is not possible, the program ends with status 2."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"argument --out: {error}")
    if not os.access(folder, os.W_OK):
        parser.error(f"argument --out: {folder} is not writable")


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"is {text!r}; pass a whole number, 1 or more")
    return int(text)


def weight(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"is {text!r}; pass a number such as 0.02")
    return value


def sentence_pairs(text: str) -> list[Pair]:
    try:
        pairs = read_pairs(Path(text))
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if len(pairs) < 10:
        raise argparse.ArgumentTypeError(f"{text} has {len(pairs)} sentences; pass 10 or more")
    return pairs
