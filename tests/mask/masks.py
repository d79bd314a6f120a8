"""What a mask means, pair by pair; tensors of masks, and one mask with every kind of term."""

import itertools
from typing import Any

import torch
from torch import Tensor

from heads_kernels.mask import Mask

Arguments = dict[str, Any]  # what Mask takes, or with nested lists for tensors
#: What may differ by head, and how many heads there are then.
BY_HEAD, HEADS = ("window", "first_keys"), 3


def longs(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def all_real(*shape: int, device: str = "cpu") -> Tensor:
    return torch.ones(shape, dtype=torch.bool, device=device)


def every_kind() -> Mask:
    """One mask with a term of every kind that a kernel serves, for B 2, T = S = 5."""
    return Mask(
        causal="lower_right",
        window=(3, 0),
        key_lengths=longs(4, 5),
        query_lengths=[5, 3],
        key_mask=torch.tensor([[0, 1, 1, 0, 1], [1, 1, 0, 1, 1]]).bool(),
        query_mask=torch.tensor([[1, 1, 1, 1, 0]]).bool(),
        document_ids=longs(0, 0, 0, 1, 1),
    ) & Mask(causal=True, prefix_lengths=longs(2, 3))


def sees(arguments: Arguments, T: int, S: int, b: int, h: int, i: int, j: int) -> bool:
    """Whether row i of batch b and head h sees key j, from the docstring of Mask."""

    def of_head(numbers: Any) -> Any:
        return numbers[h if len(numbers) > 1 else 0]

    def of_batch(rows: list[Any]) -> Any:
        return rows[b if len(rows) > 1 else 0]

    causal = arguments.get("causal", False)
    at = i + S - T if causal == "lower_right" else i
    if causal is not False and j > at:
        prefix = of_batch(arguments["prefix_lengths"]) if "prefix_lengths" in arguments else 0
        if j >= prefix:
            return False
    if "window" in arguments:
        left, right = of_head(arguments["window"])
        stays = "first_keys" in arguments and j < of_head(arguments["first_keys"])
        if (left != -1 and j < at - left and not stays) or (right != -1 and j > at + right):
            return False
    if "key_lengths" in arguments and j >= of_batch(arguments["key_lengths"]):
        return False
    if "query_lengths" in arguments and i >= of_batch(arguments["query_lengths"]):
        return False
    if "key_mask" in arguments and not of_batch(arguments["key_mask"])[j]:
        return False
    if "query_mask" in arguments and not of_batch(arguments["query_mask"])[i]:
        return False
    if "document_ids" in arguments:
        query_ids, key_ids = arguments["document_ids"]
        return bool(of_batch(query_ids)[i] == of_batch(key_ids)[j])
    return True


def oracle(arguments: Arguments, B: int, T: int, S: int) -> Tensor:
    """`[B, H, T, S]`; H is 1 if all heads see the same."""
    H = HEADS if any(len(arguments.get(name, [0])) > 1 for name in BY_HEAD) else 1
    visible = torch.zeros(B, H, T, S, dtype=torch.bool)
    for b, h, i, j in itertools.product(range(B), range(H), range(T), range(S)):
        visible[b, h, i, j] = sees(arguments, T, S, b, h, i, j)
    return visible
