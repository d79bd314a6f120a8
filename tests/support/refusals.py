"""What is refused by name: tables of calls and of the words in their errors."""

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn

from tests.support.model_state import state


def assert_refused(
    *rows: tuple[Any, ...], of: Callable[..., Any] | None = None, unchanged: Sequence[nn.Module] = ()
) -> None:
    """A row is a call, or arguments of `of` (a dict of named ones), then its error if not ValueError, then a pattern.

    With `of`, the message begins with the pattern. Each call leaves the modules in `unchanged` as they were.
    """
    assert rows
    before = list(map(_state, unchanged))
    for given, *kinds, words in rows:
        assert words
        call = given
        if of is not None:
            call = partial(of, **given) if isinstance(given, dict) else partial(of, *given)
        error = _error_of(call)
        assert isinstance(error, tuple(kinds) or ValueError), f"{words!r}: {error!r}"
        assert re.search(words if of is None else f"^(?:{words})", str(error)), f"{words!r}: {error!r}"
        assert list(map(_state, unchanged)) == before, words


def _state(model: nn.Module) -> list[Any]:
    """With the versions of its tensors, which writing in place increments."""
    return [state(model), [tensor._version for tensor in (*model.parameters(), *model.buffers())]]


def _error_of(call: Callable[[], object]) -> Exception | None:
    try:
        call()
    except (TypeError, ValueError) as error:
        return error
    return None
