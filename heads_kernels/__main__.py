"""`python -m heads_kernels`, or `heads-kernels`: commands; without one, versions and how the package was built."""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch

import heads_kernels as hk
from heads_kernels.report import command

_SCRIPT: Final = "heads-kernels"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog=_SCRIPT if Path(sys.argv[0]).name == _SCRIPT else "python -m heads_kernels",
        description=(hk.__doc__ or "").partition("\n")[0],
        epilog=installed(),
        formatter_class=raw,
    )
    parser.add_argument("--version", action="version", version=f"heads_kernels {hk.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    report = commands.add_parser(
        "report",
        help="what the heads of a transformers model do on a text, in one folder",
        description=command.DESCRIPTION,
        formatter_class=raw,
    )
    command.add_options(report)
    chosen = parser.parse_args(arguments)
    if chosen.command is None:
        parser.print_help()
        return 0
    return command.run(chosen, report)


def installed() -> str:
    """Versions and the targets of the kernels."""
    built = hk.build_info()
    cpu = ", ".join(built.get("cpu", {}).get("levels", [])) or "none built"
    cuda = built.get("cuda", {})
    lines = {
        "heads_kernels": f"{hk.__version__} {(built.get('commit') or '')[:12]}".strip(),
        "PyTorch": torch.__version__,
        "Python": platform.python_version(),
        "CPU kernels": cpu,
        "CUDA kernels": ", ".join(cuda.get("architectures", []))
        or cuda.get("missing", "none built"),
    }
    return "\n".join(f"{name:14} {value}" for name, value in lines.items())


if __name__ == "__main__":
    sys.exit(main())
