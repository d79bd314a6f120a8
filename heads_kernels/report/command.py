"""`python -m heads_kernels report`: its options, and the run from loading to the page."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from pathlib import Path

import heads_kernels as hk
from heads_kernels.files import write_whole
from heads_kernels.report.inputs import BadOption, Inputs, load
from heads_kernels.report.panels import LEFT_OUT, measure

DESCRIPTION = """\
What the heads of a transformers model do on a text: which of them matter, what they attend to, how alike they are,
how many dimensions they use, and how many can be closed. FILE is one self-contained page, which is written when it is
complete.
"""


# ---------------------------------------------------------------------- options
def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", type=model_folder, required=True, metavar="PATH",
        help="folder of a transformers checkpoint and its tokenizer: encoder or decoder, pruned or not")  # fmt: skip
    add("--text", type=lines, required=True, metavar="FILE",
        help="UTF-8, a sentence or passage on each line")  # fmt: skip
    add("--out", type=output_file, required=True, metavar="FILE",
        help="the page, such as report.html")  # fmt: skip
    add("--fast", action="store_true", help=f"fewer passes over the text: {LEFT_OUT}")
    add("--limit", type=positive, default=200, metavar="N",
        help="use the first N lines, default %(default)s")  # fmt: skip
    add("--tokens", type=positive, default=128, metavar="N",
        help="truncate lines to N tokens, default %(default)s")  # fmt: skip
    add("--sentence", metavar="TEXT",
        help="the sentence whose attention maps are drawn, default the first line")  # fmt: skip


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"is {text!r}; pass a whole number, 1 or more")
    return int(text)


def model_folder(text: str) -> Path:
    if not (Path(text) / "config.json").is_file():
        was = f"is {text!r}, which has no config.json"
        raise BadOption("model", was, "pass the folder of a transformers checkpoint")
    return Path(text)


def lines(text: str) -> list[str]:
    """The lines of a file that are not blank."""
    instead = "pass a UTF-8 file with a sentence on each line"
    try:
        content = Path(text).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise BadOption("text", f"is {text!r}: {error.strerror}", instead) from error
    except UnicodeDecodeError as error:
        raise BadOption("text", f"is {text!r}, which is not UTF-8 (byte {error.start})", instead) from error
    found = [line.strip() for line in content.splitlines() if line.strip()]
    if not found:
        raise BadOption("text", f"is {text!r}, which has no text", instead)
    return found


def output_file(text: str) -> Path:
    path = Path(text)
    if path.is_dir():
        raise BadOption("out", f"is {text!r}, which is a folder", f"pass a file, such as {path / 'report.html'}")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        was = f"is {text!r}, whose folder does not exist or cannot be written to"
        raise BadOption("out", was, "make the folder first, or pass another file")
    return path


# ---------------------------------------------------------------------- the run
def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Make the page; returns 0, or 130 after an interruption. A bad option exits with status 2."""
    _check_extras(parser)
    try:
        inputs = load(options)
        content = page(inputs)
        write_whole(options.out, lambda path: path.write_text(content, encoding="utf-8"))
    except BadOption as error:
        parser.error(f"argument --{error.option}: {error}")
    except KeyboardInterrupt:
        print(f"interrupted; {options.out} is as it was", file=sys.stderr)
        return 130
    print(options.out)
    return 0


def page(inputs: Inputs) -> str:
    """Measure what each panel shows; returns the HTML."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.j2").render(
        vars(inputs),
        name="/".join(inputs.path.resolve().parts[-2:]),
        left_out=LEFT_OUT,
        version=hk.__version__,
        **measure(inputs),
    )


def _check_extras(parser: argparse.ArgumentParser) -> None:
    names = ("transformers", "tokenizers", "jinja2", "matplotlib")
    if missing := [name for name in names if importlib.util.find_spec(name) is None]:
        parser.error(f"{', '.join(missing)} missing; pip install 'heads_kernels[report]'")
