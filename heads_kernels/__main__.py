"""`python -m heads_kernels`, or `heads-kernels`: commands; without one, versions and how the package was built."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import heads_kernels as hk
from heads_kernels.doctor import command as doctor
from heads_kernels.report import command

_SCRIPT: Final = "heads-kernels"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog=_SCRIPT if Path(sys.argv[0]).name == _SCRIPT else "python -m heads_kernels",
        description=(hk.__doc__ or "").partition("\n")[0],
        epilog="\n".join(f"{name:14} {value}" for name, value in doctor.installed().items()),
        formatter_class=raw,
    )
    parser.add_argument("--version", action="version", version=f"heads_kernels {hk.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    report = commands.add_parser(
        "report",
        help="what the heads of a transformers model do on a text, as one page",
        description=command.DESCRIPTION,
        formatter_class=raw,
    )
    command.add_options(report)
    doctor_parser = commands.add_parser(
        "doctor",
        help="checks every backend on this machine, and times it against PyTorch's SDPA",
        description=doctor.DESCRIPTION,
        formatter_class=raw,
    )
    doctor.add_options(doctor_parser)
    chosen = parser.parse_args(arguments)
    if chosen.command is None:
        parser.print_help()
        return 0
    return doctor.run(chosen) if chosen.command == "doctor" else command.run(chosen, report)


if __name__ == "__main__":
    sys.exit(main())
