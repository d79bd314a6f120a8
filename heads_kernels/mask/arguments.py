"""The arguments of `Mask`: their types, ranks and, where they can be read, their values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from heads_kernels.checks import MAX_LENGTH, check_tensor, is_any_int, is_int, refuse, shown
from heads_kernels.dtensor import is_sharded
from heads_kernels.mask.intervals import UNBOUNDED
from heads_kernels.mask.kept import readable
from heads_kernels.mask.terms import Alignment, Documents, HeadWindows, Term, Window

#: Dtypes of integers.
INTEGERS: Final = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def parse_tensor(
    argument: str,
    tensor: object,
    dtypes: Sequence[torch.dtype],
    ranks: Sequence[int],
    instead: str,
) -> Tensor:
    if is_sharded(tensor):
        whole = "pass full_tensor(): masks are those of the whole call"
        refuse(argument, "is a DTensor", whole, TypeError)
    return check_tensor(argument, tensor, instead, ranks, dtypes)


def parse_causal(causal: object) -> Alignment | None:
    if causal is True or causal == "upper_left":
        return "upper_left"
    if causal == "lower_right":
        return "lower_right"
    if causal is not False:
        refuse("causal", f"is {causal!r}", "use False, True (= 'upper_left') or 'lower_right'")
    return None


def parse_window(window: object) -> tuple[int, int]:
    instead = "pass (left, right), inclusive counts of keys on either side, -1 = unlimited,"
    instead += " or one for each head: a list of H such pairs or an integer tensor [H, 2]"
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        refuse("window", f"is {window!r}", instead)
    if not all(map(is_any_int, window)):
        refuse("window", f"is {window!r}", instead, TypeError)
    left, right = window
    if left < -1 or right < -1:
        refuse("window", f"is {window!r}", instead)
    return (-1 if left >= UNBOUNDED else left), (-1 if right >= UNBOUNDED else right)


def parse_windows(window: object, first_keys: object, align: Alignment) -> Term:
    sides: Tensor | tuple[tuple[int, int], ...]
    if isinstance(window, Tensor):
        layout = "pass (left, right), or one for each head as an integer tensor [H, 2]"
        sides = parse_tensor("window", window, INTEGERS, (2,), layout)
        if sides.shape[1] != 2:
            refuse("window", f"has shape {list(sides.shape)}", layout)
        if readable(sides) and sides.numel() and int(sides.min()) < -1:
            refuse("window", f"has {int(sides.min())}", "-1 is unlimited")
    elif isinstance(window, (tuple, list)) and any(map(_is_pair, window)):
        sides = tuple(map(parse_window, window))
    elif first_keys is None:
        return Window(parse_window(window), align)
    else:
        sides = (parse_window(window),)
    return HeadWindows(sides, parse_first_keys(first_keys), align)


def _is_pair(value: object) -> bool:
    return isinstance(value, (tuple, list))


def parse_first_keys(first_keys: object) -> Tensor | tuple[int, ...] | None:
    if first_keys is None:
        return None
    instead = "pass an int, or one for each head: a list of H ints or an integer tensor [H]"
    if isinstance(first_keys, Tensor):
        first_keys = parse_tensor("first_keys", first_keys, INTEGERS, (1,), instead)
        if readable(first_keys) and first_keys.numel() and int(first_keys.min()) < 0:
            refuse("first_keys", f"has {int(first_keys.min())}", instead)
        return first_keys
    counts = tuple(first_keys) if isinstance(first_keys, (tuple, list)) else (first_keys,)
    if not all(map(is_any_int, counts)):
        refuse("first_keys", f"is {first_keys!r}", instead, TypeError)
    if any(is_int(count) and not 0 <= count <= UNBOUNDED for count in counts):
        refuse("first_keys", f"is {first_keys!r}", "counts go from 0 to S")
    return counts


def parse_lengths(argument: str, lengths: object) -> Tensor | tuple[int, ...]:
    instead = "pass an integer tensor [B] or a list of B ints"
    if not isinstance(lengths, (tuple, list)):
        return parse_tensor(argument, lengths, INTEGERS, (1,), instead)
    if not all(map(is_any_int, lengths)):
        refuse(argument, f"is {lengths!r}", instead, TypeError)
    for length in lengths:
        if is_int(length) and abs(length) > MAX_LENGTH:
            instead = f"lengths go from 0 to T or S, at most {MAX_LENGTH}"
            refuse(argument, f"has {shown(length)}", instead)
    return tuple(lengths)


def parse_documents(document_ids: object) -> Documents:
    instead = "pass an integer tensor [S] or [B, S], or a pair (query_ids, key_ids)"
    given = document_ids if isinstance(document_ids, (tuple, list)) else (document_ids,)
    if isinstance(document_ids, (tuple, list)) and len(given) != 2:
        refuse("document_ids", f"has {len(given)} parts", instead)
    ids = [parse_tensor("document_ids", each, INTEGERS, (1, 2), instead) for each in given]
    keys = ids[-1]
    if readable(keys) and not bool((keys[..., 1:] >= keys[..., :-1]).all()):
        instead = "number the documents in the order of their keys"
        refuse("document_ids", "does not ascend along the keys", instead)
    return Documents(ids[0], ids[1] if len(ids) == 2 else None)
