"""What is refused by name: tables of calls and of the words in their errors."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import nn

from tests.support.model_state import state


def assert_refused(
    *rows: tuple[Any, ...], of: Callable[..., Any] | None = None, unchanged: Iterable[nn.Module] = ()
) -> None:
    """Each row is a call, or arguments of `of` (a dict of named ones), then perhaps its error, then words of it.

    The error is a ValueError, if not said otherwise. That of arguments begins with the words. Modules that are
    `unchanged` are what they were after each call.
    """
    before = list(map(state, unchanged))
    for given, *kinds, words in rows:
        call = given
        if of is not None:
            call = partial(of, **given) if isinstance(given, dict) else partial(of, *given)
        error = _error_of(call)
        assert isinstance(error, tuple(kinds) or ValueError), f"{words!r}: {error!r}"
        assert re.search(words if of is None else f"^{words}", str(error)), f"{words!r}: {error!r}"
        assert list(map(state, unchanged)) == before, words


def _error_of(call: Callable[[], object]) -> Exception | None:
    try:
        call()
    except (TypeError, ValueError) as error:
        return error
    return None
