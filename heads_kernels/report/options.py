"""The command line of the report."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from heads_kernels.report.stages import STAGES

DESCRIPTION = """\
What the heads of a transformers model do on a text: which of them matter, what they look at, how alike they are,
how many dimensions they use, and how many can be closed. A page with pictures, and all numbers as CSV and JSON.

Each reading is kept as soon as it is done: the same command goes on where it was stopped.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `report`."""
    add = parser.add_argument
    add("--model", type=folder, required=True, metavar="PATH",
        help="folder of a transformers checkpoint and its tokenizer: encoder or decoder, pruned or not")  # fmt: skip
    add("--text", type=lines, required=True, metavar="FILE",
        help="UTF-8, a sentence or passage in each line")  # fmt: skip
    add("--out", type=made, required=True, metavar="DIR", help="where the report goes")
    add("--limit", type=positive, default=200, metavar="N",
        help="read the first N lines, default %(default)s")  # fmt: skip
    add("--tokens", type=positive, default=128, metavar="N",
        help="cut lines at N tokens, default %(default)s")  # fmt: skip
    add("--batch", type=positive, default=16, metavar="N",
        help="lines in a batch, default %(default)s")  # fmt: skip
    add("--threads", type=positive, metavar="N", help="default: as PyTorch chooses")
    stages = [name for name in STAGES if name != "model"]
    add("--only", nargs="+", choices=stages, metavar="STAGE",
        help=f"some readings alone: {', '.join(stages)}")  # fmt: skip
    add("--sentence", metavar="TEXT", help="whose attention maps are drawn, default the first line")
    add("--heads", nargs="+", type=head, metavar="LAYER:HEAD",
        help="whose maps are drawn large, such as 0:3 2:7; default the sharpest of each layer")  # fmt: skip


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"is {text!r}; pass a whole number, 1 or more")
    return int(text)


def head(text: str) -> tuple[int, int]:
    layer, _, number = text.partition(":")
    if not (layer.isdecimal() and number.isdecimal()):
        raise argparse.ArgumentTypeError(f"is {text!r}; pass LAYER:HEAD, such as 0:3")
    return int(layer), int(number)


def folder(text: str) -> Path:
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
        raise argparse.ArgumentTypeError(f"{was}; pass a file with a sentence in each line")
    return found


def made(text: str) -> Path:
    """The folder, which is there afterwards."""
    path = Path(text)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"is {text!r}: {error.strerror}") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise argparse.ArgumentTypeError(f"is {text!r}, which can not be written to")
    return path
