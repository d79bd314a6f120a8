"""Packed calls checked: layers that do not work token by token, and models that read padding, are refused."""

from __future__ import annotations

import inspect
from contextvars import Context, ContextVar
from itertools import chain
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import pad
from torch.utils._pytree import tree_leaves, tree_map
from transformers import PreTrainedModel

from heads_kernels.checks import refuse
from heads_kernels.nn.unpadding import Packing
from heads_kernels.snapshot import evaluating

#: Arguments of a call, by position and by name.
Arguments = tuple[tuple[Any, ...], dict[str, Any]]

#: Roundings of a layer beside those of its longest sum, relative to its output. Heuristic: the tests of the package
#: see at most 137 in whole models.
_ROUNDINGS: Final = 512
_HALF: Final = (torch.float16, torch.bfloat16)
#: Roundings by which the outputs of two equal passes may differ, where sums are not always in one order. Heuristic.
_EQUAL: Final = 8


class Filling:
    """What packed layers give for padding, instead of zeros, while the outputs of their model are checked."""

    def __init__(self, scale: float) -> None:
        self.scale = scale  # of numbers from -1 to 1 along the features
        #: By the sizes (B, T) of sequences, which of their tokens are real in all of them.
        self.real: dict[tuple[int, int], Tensor] = {}

    def fill(self, padded: Tensor, packing: Packing) -> Tensor:
        B, T = packing.sizes
        real = torch.zeros(B * T, dtype=torch.bool, device=padded.device)
        real = real.index_fill(0, packing.index, True).view(B, T)
        self.real[B, T] = real & self.real.get((B, T), real)
        if not padded.is_floating_point():
            return padded
        ramp = torch.linspace(-self.scale, self.scale, padded.shape[-1], device=padded.device)
        keep = real[(..., *(None,) * (padded.dim() - 2))]
        return torch.where(keep, padded, ramp.to(padded.dtype))


#: The `Filling` of the pass that runs; None outside of checks.
filling: ContextVar[Filling | None] = ContextVar("filling", default=None)


def check_packed(layer: nn.Module, name: str, rows: Packing, padded: Arguments, packed: Arguments) -> None:
    """Refuse a layer whose outputs for packed arguments differ from those for padded ones, on real tokens.

    Both are computed in evaluation mode without gradients, in float32 or better. The numbers of a token may
    differ by (512 + K) eps of their norm, K the longest sum in the layer.
    """
    expected, found = outputs_of(layer, rows.index.device, padded, packed)
    expected = [rows.pack(each) if each.shape[:2] == rows.sizes else each for each in expected]
    is_same, worst = differ(layer, expected, found, (1, len(rows.index)), rows.sizes[1])
    if not is_same:
        was = f"is True, but on real tokens alone {name!r}, a {type(layer).__name__}, computes something else"
        was += f" than on the padded batch (relative difference {worst:.1e})"
        refuse("unpad", was, "call use(model, unpad=False)")


def check_outputs(model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a model whose outputs for real tokens depend on what its layers give for padding.

    Padded tokens are 0 after packed layers, and something else in a padded pass: an output pooled at one of them, or a
    loss of it, would differ. Two passes with other numbers there are compared.
    """
    kwargs = uncached(model, kwargs)
    found: list[list[Tensor]] = []
    for scale in (0.0, 1.0):
        own = Filling(scale)
        # In an empty context: models around this one do not collect its outputs a second time.
        output = Context().run(_filled, model, own, args, kwargs)
        outputs = [each for each in tree_leaves(output) if isinstance(each, Tensor)]
        found.append([_of_tokens(each, own) for each in outputs if each.is_floating_point()])
    if not all(map(_is_same, *found)):
        was = f"is True, but outputs of {type(model).__name__} depend on padded tokens, which are not computed: "
        was += "they are pooled at one, or are a loss of one"
        instead = "pad on the other side, make the model without its pooler, give padding and the token after it "
        instead += "labels of -100, "
        refuse("unpad", was, f"{instead}or call use(model, unpad=False)")


def uncached(model: PreTrainedModel, arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a model, so that it makes no cache."""
    takes = inspect.signature(model.forward).parameters
    return {**arguments, "use_cache": False} if "use_cache" in takes else arguments


def _filled(model: PreTrainedModel, own: Filling, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    filling.set(own)
    given = (each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor))
    first = next(chain(model.parameters(), given))  # a replica of nn.DataParallel has no parameters
    with torch.no_grad(), evaluating(model), _forked(first.device):
        return model.forward(*args, **kwargs)


def _of_tokens(output: Tensor, own: Filling) -> Tensor:
    """The entries of an output that are not those of padded tokens.

    A model may give several numbers for each token of its layers, `[B, n T or more, features]` (SEW).
    """
    if output.dim() < 2:
        return output
    B, length = output.shape[:2]
    real = own.real.get((B, length))
    if real is None and output.dim() > 2:
        shorter = (each for each in own.real.values() if len(each) == B and each.shape[1] < length)
        if (each := next(shorter, None)) is not None:
            several = each.repeat_interleave(length // each.shape[1], 1)
            real = pad(several, (0, length - several.shape[1]))
    return output if real is None else output[real]


def _is_same(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    error, scale = (each.float().norm() for each in _error_and_scale(one, other))
    return bool(error <= _EQUAL * torch.finfo(one.dtype).eps * scale)


def _error_and_scale(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Their difference, and `one` where it is finite; equal infinities do not differ, nor do two NaNs."""
    is_same = (one == other) | (one.isnan() & other.isnan())
    return (one - other).masked_fill(is_same, 0), one.masked_fill(~one.isfinite(), 0)


def _forked(device: torch.device) -> Any:
    """The state of random generators is kept; the CPU's with any device."""
    on_cpu = device.type == "cpu"
    return torch.random.fork_rng([] if on_cpu else [device], device_type="cuda" if on_cpu else device.type)


class _WithoutHooks(nn.Module):
    """The forward of a layer alone."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.layer.forward(*args, **kwargs)


def outputs_of(layer: nn.Module, device: torch.device, *calls: Arguments) -> list[list[Tensor]]:
    """The tensors that a layer gives for each of some arguments, in evaluation mode and without gradients.

    Weights and arguments in half precision are converted to float32. The state of random generators is restored.
    """
    shell = _WithoutHooks(layer)
    weights = {
        name: tensor.float()
        for name, tensor in (*shell.named_parameters(), *shell.named_buffers())
        if tensor.dtype in _HALF
    }
    found = []
    with torch.no_grad(), torch.autocast(device.type, enabled=False), evaluating(layer):
        for arguments in calls:
            args, kwargs = tree_map(_widened, arguments)
            with _forked(device):
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
        error, scale = (each.flatten(2).norm(dim=-1) for each in _error_and_scale(one, other))
        bound = (_ROUNDINGS + K) * torch.finfo(one.dtype).eps * scale
        is_same &= bool((error <= bound).all())
        worst = max(worst, float((error / scale).masked_fill(error == 0, 0).nan_to_num(torch.inf, torch.inf).max()))
    return is_same, worst


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in _HALF else value
