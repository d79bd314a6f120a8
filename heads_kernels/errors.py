"""How the package refuses an argument: its name, what it was, and what would do."""

from __future__ import annotations

from typing import NoReturn


def refuse(argument: str, was: str, instead: str, kind: type[Exception] = ValueError) -> NoReturn:
    """Raise `kind` with the message "`argument` `was`; `instead`."."""
    raise kind(f"{argument} {was}; {instead}.")
