"""Projections that surgery can read and cut: a weight and a bias, with or without plain LoRA.

This is the only place that decides it; all others are refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any, Final

from torch import nn

from heads_kernels.checks import refuse
from heads_kernels.dtensor import is_sharded
from heads_kernels.heads.shared import SharedProjection
from heads_kernels.heads.weights import ProjectedLayer, is_transposed

#: The result of `_unlike_dense`: what is wrong with a projection, and what to do about it.
_Reason = tuple[str, str]

_MERGE: Final = "merge the adapter first: model = model.merge_and_unload()"
_LORA: Final = ("base_layer", "lora_A", "lora_B")


def check_projections(layer: ProjectedLayer, verb: str, *, adapters: bool) -> None:
    """Refuse a layer with projections that are more than a weight and a bias.

    Args:
        layer: all its projections are checked.
        verb: "prune" or "convert", for the message.
        adapters: whether queries and keys may have LoRA adapters; values and outputs may.

    Raises:
        ValueError: a projection is not an `nn.Linear`, `Conv1D` or LoRA of one, is quantised, parametrised, sharded or
            offloaded, or has forward hooks. The message names it and says what to do.
    """
    roles = {"query": layer.query, "key": layer.key, "value": layer.value, "output": layer.output}
    beside = {f"gate or bias {number}": each for number, each in enumerate(layer.beside)}
    scores = (layer.query.linear, layer.key.linear)
    for role, projection in {**roles, **beside}.items():
        linear = projection.linear
        if reason := _unlike_dense(linear, adapters or linear not in scores):
            was, instead = reason
            refuse(f"{layer}: its {role} projection", was, instead.format(verb=verb))


def is_lora(linear: Any) -> bool:
    """Whether it is a layer of peft's LoRA: `base_layer(x) + scaling * lora_B[name](lora_A[name](x))`."""
    factors = (getattr(linear, name, None) for name in ("lora_A", "lora_B"))
    return hasattr(linear, "base_layer") and all(isinstance(x, nn.ModuleDict) for x in factors)


def dense_parts(linear: Any) -> list[tuple[nn.Module, tuple[int, ...]]]:
    """The dense projections in a projection; each with the sides that it shares: inputs (0), outputs (1) or both."""
    if not is_lora(linear):
        return [(linear, (0, 1))]
    first = [(part, (0,)) for part in linear.lora_A.values()]
    second = [(part, (1,)) for part in linear.lora_B.values()]
    return [(linear.base_layer, (0, 1)), *first, *second]


# ---------------------------------------------------------------------- refusals
def _unlike_dense(linear: Any, adapters: bool) -> _Reason | None:
    if hasattr(linear, "base_layer"):
        more = _beside_lora(linear) if is_lora(linear) else []
        if not adapters or not is_lora(linear) or more:
            kind = f" with {', '.join(more)}" if more else ""
            return f"has an adapter, {_class(linear)}{kind}", _MERGE
    reasons = chain.from_iterable(_reasons(part) for part, _ in dense_parts(linear))
    return next(reasons, None)


def _beside_lora(linear: Any) -> list[str]:
    """What an adapter has beyond plain LoRA, such as DoRA's magnitudes."""
    owners = {name.split(".")[0] for name, _ in linear.named_parameters()}
    variants = {type(each).__name__ for each in getattr(linear, "lora_variant", {}).values()}
    return sorted(owners.difference(_LORA) | variants)


def _reasons(linear: Any) -> Iterator[_Reason]:
    """Why a module is more than a product with its weight and a bias, in order of how much a reason explains."""
    if nn.utils.parametrize.is_parametrized(linear):
        instead = "make it permanent: torch.nn.utils.parametrize.remove_parametrizations"
        yield "is parametrised", instead
    own = type(linear).forward
    known = (nn.Linear.forward, SharedProjection.forward)
    if own not in known and not is_transposed(linear):
        yield (
            f"is a {_class(linear)}",
            "{verb} a model of nn.Linear or Conv1D, before it is quantised or wrapped",
        )
    tensors = {*linear._parameters, *linear._buffers} - {"weight", "bias", "places"}
    if tensors:
        was = f"has {', '.join(sorted(tensors))} beside its weight"
        yield was, "fold them into the weight, or {verb} the model before it gets them"
    weight = linear.weight
    if is_sharded(weight):
        yield "is sharded over processes (DTensor)", "{verb} the model before it is sharded"
    if type(weight) is not nn.Parameter or not weight.is_floating_point():
        was = f"has a {type(weight).__name__} of dtype {weight.dtype} as its weight"
        yield was, "{verb} the model before it is quantised"
    if getattr(vars(linear).get("_hf_hook"), "offload", False):
        yield "is offloaded", "load the model whole, without offloading"
    if "forward" in vars(linear) and "_hf_hook" not in vars(linear):
        yield "has a replaced forward", "restore its forward, or {verb} the model before"
    if linear._forward_hooks or linear._forward_pre_hooks:
        yield "has forward hooks", "remove them first: handle.remove()"


def _class(linear: Any) -> str:
    kind = type(linear)
    return f"{kind.__module__}.{kind.__qualname__}"
