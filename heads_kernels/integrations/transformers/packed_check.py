"""A packed call of a layer compared with a padded one: layers that do not work token by token are refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map

from heads_kernels.checks import refuse
from heads_kernels.nn.unpadding import Packing

#: Arguments of a call, by position and by name.
Arguments = tuple[tuple[Any, ...], dict[str, Any]]

#: Roundings of a layer beside those of its longest sum, relative to its output. Heuristic: the tests of the package
#: see at most 137 in whole models.
_ROUNDINGS: Final = 512
_HALF: Final = (torch.float16, torch.bfloat16)


def check_packed(
    layer: nn.Module, name: str, rows: Packing, padded: Arguments, packed: Arguments
) -> None:
    """Compare the outputs of a layer for packed arguments with those for padded ones, on real tokens.

    Both are computed in evaluation mode without gradients, in float32 or better. The numbers of a token may
    differ by (512 + K) eps of their norm, K the longest sum in the layer.

    Raises:
        ValueError: they differ by more.
    """
    expected, found = outputs_of(layer, rows.index.device, padded, packed)
    expected = [rows.pack(each) if each.shape[:2] == rows.sizes else each for each in expected]
    is_same, worst = differ(layer, expected, found, (1, len(rows.index)), rows.sizes[1])
    if not is_same:
        was = f"is True, but on real tokens alone {name!r}, a {type(layer).__name__}, computes something else"
        was += f" than on the padded batch (relative difference {worst:.1e})"
        refuse("unpad", was, "call use(model, unpad=False)")


@contextmanager
def _evaluating(layer: nn.Module) -> Iterator[None]:
    """In evaluation mode; afterwards every module is in the mode that it was in."""
    before = [(module, module.training) for module in layer.modules()]
    layer.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


class _WithoutHooks(nn.Module):
    """The forward of a layer alone."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.layer.forward(*args, **kwargs)


def outputs_of(layer: nn.Module, device: torch.device, *calls: Arguments) -> list[list[Tensor]]:
    """The tensors that a layer gives for each of some arguments, in evaluation mode and without gradients.

    Weights and arguments of half precision are computed with as float32. Random numbers that the layer draws are drawn
    again by what comes after.
    """
    shell = _WithoutHooks(layer)
    weights = {
        name: tensor.float()
        for name, tensor in (*shell.named_parameters(), *shell.named_buffers())
        if tensor.dtype in _HALF
    }
    on_cpu = device.type == "cpu"
    kind = "cuda" if on_cpu else device.type  # the CPU's generator is forked with any
    found = []
    with torch.no_grad(), torch.autocast(device.type, enabled=False), _evaluating(layer):
        for arguments in calls:
            args, kwargs = tree_map(_widened, arguments)
            with torch.random.fork_rng([] if on_cpu else [device], device_type=kind):
                output = functional_call(shell, weights, args, kwargs)
            found.append([each for each in tree_leaves(output) if isinstance(each, Tensor)])
    return found


def differ(
    layer: nn.Module, expected: list[Tensor], found: list[Tensor], tokens: tuple[int, int], T: int
) -> tuple[bool, float]:
    """Whether outputs of a layer are the same numbers for each of `tokens`, and their largest relative difference.

    `tokens` are the first two sizes of all outputs; sequences have T. For the bound see `check_packed`.
    """
    K = max((max(p.shape) for p in layer.parameters() if p.dim() > 1), default=0)
    K = max(K, T)
    is_same = len(expected) == len(found)
    worst = 0.0
    for one, other in zip(expected, found, strict=False):
        if one.shape[:2] != tokens or other.shape[:2] != tokens:
            is_same = False  # not a number for each token
            continue
        one, other = one.flatten(2), other.flatten(2)
        both_nan = one.isnan() & other.isnan()
        error = (one - other).masked_fill(both_nan, 0).norm(dim=-1)
        scale = one.masked_fill(both_nan, 0).norm(dim=-1)
        bound = (_ROUNDINGS + K) * torch.finfo(one.dtype).eps * scale
        is_same &= bool((error <= bound).all())
        worst = max(worst, float((error / scale).max()))
    return is_same, worst


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in _HALF else value
