"""A `Mask` as a pytree, so that torch.export takes one as an input.

Leaves are its tensors. The rest is a tuple of strings and tuples, which survives JSON: per term its
name and fields, None in the place of each tensor.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.utils._pytree as pytree

from heads_kernels.mask.mask import Mask
from heads_kernels.mask.terms import Term


def _constant(value: object) -> bool:
    return isinstance(value, (str, tuple))


def _flatten(mask: Mask) -> tuple[list[Any], Any]:
    rows = [list(vars(term).values()) for term in mask.terms]
    return [value for row in rows for value in row if not _constant(value)], tuple(
        (type(term).__name__, tuple(value if _constant(value) else None for value in row))
        for term, row in zip(mask.terms, rows, strict=True)
    )


def _flatten_with_keys(mask: Mask) -> tuple[list[tuple[Any, Any]], Any]:
    leaves, context = _flatten(mask)
    return [(pytree.SequenceKey(n), leaf) for n, leaf in enumerate(leaves)], context


def _unflatten(leaves: Iterable[Any], context: Any) -> Mask:
    kinds = {kind.__name__: kind for kind in Term.__subclasses__()}
    rest = iter(leaves)
    return Mask.of(
        tuple(
            kinds[name](*(next(rest) if value is None else value for value in row))
            for name, row in context
        )
    )


def _from_json(context: Any) -> Any:
    """Tuples that JSON made lists, made tuples again."""
    return tuple(map(_from_json, context)) if isinstance(context, list) else context


def register() -> None:
    """Make `Mask` a pytree node, and known to torch.load(weights_only=True)."""
    pytree.register_pytree_node(
        Mask,
        _flatten,
        _unflatten,
        serialized_type_name="heads_kernels.Mask",
        to_dumpable_context=lambda context: context,
        from_dumpable_context=_from_json,
        flatten_with_keys_fn=_flatten_with_keys,
    )
    torch.serialization.add_safe_globals([Mask, *Term.__subclasses__()])
