"""Where the heads of an attention layer are in its weights: the rows and columns of each in its projections."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from heads_kernels.checks import refuse
from heads_kernels.dtensor import is_sharded
from heads_kernels.heads.layers import AttentionLayer, kind_of
from heads_kernels.heads.layouts import HeadLayout, at_path, is_projection, size
from heads_kernels.heads.shared import FusedProjection, SharedProjection


@dataclass(frozen=True)
class Projection:
    """The features of a projection by head: head `h` has features `[start + h * width, start + (h + 1) * width)`.

    They are output features of `linear` (rows of the weight of an `nn.Linear`, columns of transformers' `Conv1D`), or,
    in the output projection, input features.

    Attributes:
        linear: an `nn.Linear`, or transformers' `Conv1D`, whose weight is transposed.
        heads: number of heads in it: H, Hk, or 1 if all heads share it.
        width: features per head. If logits of an output gate follow the query of each head, the query is the first
            `head_dim` features.
        start: the first feature of head 0; nonzero only in a fused projection.
    """

    linear: Any
    heads: int
    width: int
    start: int = 0

    @property
    def inputs(self) -> int:
        """Input features of `linear`."""
        return size(self.linear, 0)

    @property
    def outputs(self) -> int:
        """Output features of `linear`."""
        return size(self.linear, 1)

    def features(self, heads: Iterable[int]) -> Tensor:
        """The features of these heads, int64 on the device of the weight, head after head."""
        first = torch.tensor([self.start + h * self.width for h in heads], dtype=torch.int64)
        features = (first[:, None] + torch.arange(self.width)).flatten()
        return features.to(self.linear.weight.device)

    def rows(self) -> tuple[Tensor, Tensor | None]:
        """Copies of its weight `[heads * width, inputs]` and bias `[heads * width]`, head after head."""
        own, linear = self.features(range(self.heads)), self.linear
        weight = linear.weight.T if is_transposed(linear) else linear.weight
        return weight.detach()[own], None if linear.bias is None else linear.bias.detach()[own]


@dataclass(frozen=True)
class ProjectedLayer(AttentionLayer):
    """An attention layer with the projections of its heads, in uniform names.

    Attributes:
        query, key, value, output: its projections; the heads of `output` are in its input features.
        num_key_heads: Hk; 1 if `shared`, and `value.heads` the number of value heads.
        head_dim, value_dim: D (Ds if `shared`) and Dv.
        holder: the module in which `layout` says where the parts are; `module` is a part of it.
        layout: its `HeadLayout`; that of a converted layer describes it after conversion.
        scale: the factor of its scores; None if the layout's path does not exist.
        beside: other projections with rows for every query head: output gates, content biases.
    """

    query: Projection
    key: Projection
    value: Projection
    output: Projection
    num_key_heads: int
    head_dim: int
    value_dim: int
    holder: Any
    layout: HeadLayout
    scale: float | None
    beside: tuple[Projection, ...] = ()


# ---------------------------------------------------------------------- one layer from its layout
def layer_of(holder: nn.Module, layout: HeadLayout, index: int = 0, name: str = "") -> ProjectedLayer:
    """The layer of this index and name in `holder`."""
    module = at_path(holder, layout.inner)
    D = at_path(holder, layout.head_dim)
    Dv = at_path(holder, layout.value_dim) if layout.value_dim else D
    H = layout.heads(holder)
    query, key, value = _roles(holder, layout, H, (D, Dv))
    beside = (at_path(holder, path) for path in layout.beside)
    return ProjectedLayer(
        index=index,
        name=name,
        kind=kind_of(module, name),
        module=module,
        num_heads=H,
        query=query,
        key=key,
        value=value,
        output=Projection(at_path(holder, layout.output), H, Dv),
        num_key_heads=key.heads,
        head_dim=D,
        value_dim=Dv,
        holder=holder,
        layout=layout,
        scale=at_path(holder, layout.scale) if layout.scale else D**-0.5,
        beside=tuple(Projection(linear, H, size(linear) // max(H, 1)) for linear in beside if is_projection(linear)),
    )


def as_converted(holder: nn.Module, layout: HeadLayout) -> HeadLayout:
    """The layout of a module that was converted within its class, which then has `mixing`."""
    inner = at_path(holder, layout.inner)
    if layout.shared or getattr(inner, "mixing", None) is None:
        return layout
    paths: dict[str, Any] = {}
    for role in ("query", "key", "value"):
        path = existing(holder, getattr(layout, role))
        fused = isinstance(at_path(holder, path), FusedProjection)
        paths[role] = f"{path}.{role}" if fused else path
    return replace(
        layout,
        **paths,
        head_dim=f"{paths['query']}.shared_dim",
        value_dim=layout.value_dim or layout.head_dim,
        beside=(*layout.beside, f"{paths['key']}.content"),
        rows=(*layout.rows, "mixing"),
        shared=True,
    )


def _roles(
    holder: nn.Module, layout: HeadLayout, H: int, widths: tuple[int, int]
) -> tuple[Projection, Projection, Projection]:
    """Query, key and value: head by head in projections of their own or fused in this order, or shared by all heads."""
    D, Dv = widths
    paths = [existing(holder, path) for path in (layout.query, layout.key, layout.value)]
    query, key, value = (at_path(holder, path) for path in paths)
    if layout.shared:
        return (Projection(query, 1, D), Projection(key, 1, D), Projection(value, size(value) // Dv, Dv))
    has_query, has_value = paths[0] == paths[1], paths[1] == paths[2]
    start = H * D if has_query else 0
    key_features = (size(key) - start) // (2 if has_value else 1)
    Hk = key_features // D
    return (
        Projection(query, H, D if has_query or H == 0 else size(query) // H),
        Projection(key, Hk, D, start),
        Projection(value, Hk, Dv, start + key_features if has_value else 0),
    )


def is_transposed(linear: Any) -> bool:
    """True for transformers' `Conv1D`, whose weight is `[in, out]`."""
    return type(linear).__name__ == "Conv1D"


def existing(holder: Any, path: str) -> str:
    """Of alternatives `first|second` the first that exists."""
    return next(one for one in path.split("|") if at_path(holder, one) is not None)


# ---------------------------------------------------------------------- projections that can be cut
def check_projections(layer: ProjectedLayer, verb: str) -> None:
    """Refuse a layer with a projection that is more than a weight and a bias; `verb` is "prune" or "convert"."""
    roles = {"query": layer.query, "key": layer.key, "value": layer.value, "output": layer.output}
    beside = {f"gate or bias {number}": each for number, each in enumerate(layer.beside)}
    for role, projection in {**roles, **beside}.items():
        for was, instead in _more_than_dense(projection.linear):
            refuse(f"{layer}: its {role} projection", was, instead.format(verb=verb))


def _more_than_dense(linear: Any) -> Iterator[tuple[str, str]]:
    """What a module has beside a weight and a bias, and what to do about it; what explains most is first."""
    kind = f"{type(linear).__module__}.{type(linear).__qualname__}"
    if hasattr(linear, "base_layer"):
        instead = "merge it first: model = model.merge_and_unload()"
        yield f"has an adapter, {kind}", instead
    if nn.utils.parametrize.is_parametrized(linear):
        instead = "make it permanent: torch.nn.utils.parametrize.remove_parametrizations"
        yield "is parametrised", instead
    known = (nn.Linear.forward, SharedProjection.forward)
    if type(linear).forward not in known and not is_transposed(linear):
        instead = "{verb} a model of nn.Linear or Conv1D, before it is quantised or wrapped"
        yield f"is a {kind}", instead
    if tensors := {*linear._parameters, *linear._buffers} - {"weight", "bias", "places"}:
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
