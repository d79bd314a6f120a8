"""The layers whose heads are known in the weights of a model: those that pruning, conversion and files can change.

Names of projections are not enough: OLMo 2 has those of Llama, and a norm over all heads. So a layout is verified: a
closed head of a random copy must compute the same as the pruned head.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from itertools import product
from math import prod
from typing import Any, Final

import torch
from torch import Tensor, nn

from heads_kernels.checks import is_int, refuse
from heads_kernels.heads.interface import (
    NAME,
    SOURCES,
    attention_function,
    names_attention_function,
    stock_arguments,
    with_attention_function,
)
from heads_kernels.heads.layers import AttentionLayer, attention_layers, calls_operators
from heads_kernels.heads.layouts import HeadLayout, at_path, check_has_parts, form_of, is_projection, layout_of
from heads_kernels.heads.reshape import read_key_heads, shrink
from heads_kernels.heads.weights import ProjectedLayer, Projection, as_converted, existing, layer_of
from heads_kernels.nn.gates import FixedGate

#: Tokens of the random input: several rows that see different keys under a causal mask.
_TOKENS: Final = 4
#: The most tokens of a window. Heuristic: Swin's have up to 24 x 24.
_LARGEST_WINDOW: Final = 1024
#: Features of the input that a projection of the copy reads, and of the output that it writes. Heuristic: enough for
#: heads to differ, and few enough for a wide layer to take milliseconds.
_FEATURES: Final = 8
#: The gate of the heads that are open; its products are exact.
_GATE: Final = 0.5

#: The factor of a random bias of keys, so that softcap shows. Heuristic: scores of a hundred, where caps are 20 to 50.
_SHIFT: Final = 64.0

#: Results by structure of the module: None, or why its layout does not fit.
_FOUND: dict[Any, str | None] = {}


def projected_layers(model: nn.Module) -> list[ProjectedLayer]:
    """Those of `attention_layers(model)` whose heads are known in their weights; indices and names are the same.

    They are modules of the classes in `LAYOUTS` (heads/layouts.py), to which `register_layout` adds, and transformers'
    modules whose projections have the names of one of `FORMS`. If a pruned head of a class does not compute the same as
    a closed head, a class in `LAYOUTS` raises an error and one found by `FORMS` is left out.

    Raises:
        ValueError: what `attention_layers` refuses; a layout does not fit its class.
    """
    found = _projected(model, attention_layers(model))
    return [layer for layer in found if isinstance(layer, ProjectedLayer)]


def with_projections(model: nn.Module, layers: Iterable[AttentionLayer]) -> list[ProjectedLayer]:
    """These attention layers of a model with their projections; refuses those whose heads are not known in them."""
    layers = list(layers)
    found = []
    for layer, made in zip(layers, _projected(model, layers), strict=True):
        if isinstance(made, str):
            was = f"is a {type(layer.module).__name__}, {made}"
            instead = "close heads instead (hk.heads.close), or register its layout (hk.heads.register_layout)"
            refuse(str(layer), was, instead)
        found.append(made)
    return found


def _projected(model: nn.Module, layers: Iterable[AttentionLayer]) -> list[ProjectedLayer | str]:
    """For each layer its projections, or why they are not known, in words that follow the name of its class."""
    holders = holders_of(model)
    return [
        _verified(layer, *holders[layer.module])
        if layer.module in holders
        else "whose projections have no names that are known"
        for layer in layers
    ]


def holders_of(model: nn.Module) -> dict[nn.Module, tuple[str, nn.Module, HeadLayout]]:
    """For each attention module name, module and layout of what holds its projections, not verified."""
    found: dict[nn.Module, tuple[str, nn.Module, HeadLayout]] = {}
    for name, holder in model.named_modules():
        if (layout := layout_of(holder) or form_of(holder)) is not None:
            found.setdefault(at_path(holder, layout.inner), (name, holder, layout))
    return found


def _verified(layer: AttentionLayer, name: str, holder: nn.Module, layout: HeadLayout) -> ProjectedLayer | str:
    named, converted = f"module {name!r}", as_converted(holder, layout)
    is_of_class = layout_of(holder) is not None
    if converted is not layout or is_of_class:
        check_has_parts(named, holder, converted)
    if converted is layout and (why := _misfit(holder, layout)) is not None:
        if not is_of_class:
            return f"which {why}"
        was = f"is a {type(holder).__name__}, which does not have the layout {layout.name!r}: it {why}"
        refuse(named, was, "register a layout that fits (hk.heads.register_layout)")
    return layer_of(holder, converted, layer.index, layer.name)


# ---------------------------------------------------------------------- whether a layout fits
def _misfit(holder: nn.Module, layout: HeadLayout) -> str | None:
    """Why `layout` does not describe a module, as a phrase that follows its name; None if it does.

    A copy of the module with small random weights runs on random input on the CPU, in float32, with a head closed (its
    columns of W_O are 0) and with that head pruned; where the module calls the operators, also with gates, and with
    these gates folded into W_O. The outputs of each pair must be equal up to rounding. Only the structure of the module
    is read: its weights may be anywhere, of any dtype, sharded or quantised. Results are cached per class and shape;
    pruned layers were compared before.
    """
    inner = at_path(holder, layout.inner)
    if hasattr(inner, "kept_heads"):
        return None
    kind = layout, attention_function(inner), *_structure(holder)
    if kind not in _FOUND:
        _FOUND[kind] = _compare(holder, layout, attention_function(inner))
    return _FOUND[kind]


def _structure(holder: nn.Module) -> Iterator[Any]:
    """What a forward pass depends on besides the values of weights: classes, sizes, switches."""
    for name, part in holder.named_modules():
        if "head_gate" not in name.split("."):
            settings = {
                key: value
                for key, value in vars(part).items()
                if isinstance(value, (bool, int, str)) and key not in ("training", "layer_idx")
            }
            sizes = [each.shape for each in part.parameters(recurse=False)]
            yield name, type(part), *settings.items(), *sizes


@contextmanager
def _apart() -> Iterator[None]:
    """In this block tensors are created in float32 on the CPU, without changing the state of random generators."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.autocast("cpu", enabled=False):
            torch.default_generator.manual_seed(0)  # `torch.manual_seed` would seed GPUs too
            yield
    finally:
        torch.set_default_dtype(dtype)


@torch.inference_mode(False)
@torch.no_grad()
def why_not_shared(holder: nn.Module, layout: HeadLayout) -> str | None:
    """Why shared features would not compute what a module does, as a phrase that follows its name; None if they do.

    Its scores must be products of its queries and keys, with rotary positions by `layout.rotary`: in a random copy the
    features of queries are multiplied by large powers of two, so that a clamp shows, and those of keys divided by them.
    Without such positions the bias of the keys, which adds one number to a row of scores, must not matter: a larger one
    is left out. A module that does not run on random input passes.
    """
    with _apart():
        trial = _random_copy(holder, layout, NAME)
        layer = layer_of(trial, layout)
        H, Hk, D = layer.num_heads, layer.num_key_heads, layer.head_dim
        tried = ((inputs, _run(trial, inputs)) for inputs in _inputs(trial, layer))
        inputs, whole = next((each for each in tried if isinstance(each[1], Tensor)), ({}, ""))
        if isinstance(whole, str):
            return None
        factors = 2.0 ** (12 * torch.randint(-1, 2, (Hk, D // 2 if layout.rotary else D)))
        factors = factors.repeat(1, 2) if layout.rotary else factors
        of_queries = factors.repeat_interleave(H // Hk, 0)
        for projection, by in ((layer.query, of_queries), (layer.key, 1 / factors)):
            rows, linear = projection.features(range(projection.heads)), projection.linear
            linear.weight[rows] *= by.flatten()[:, None]
            if linear.bias is not None:
                linear.bias[rows] *= by.flatten()
        if _differ(_run(trial, inputs), whole, _rounding(layer, whole)):
            return "whose scores are not products of its queries and keys"
        bias, rows = layer.key.linear.bias, layer.key.features(range(layer.key.heads))
        if layout.rotary or bias is None:
            return None
        bias[rows] *= _SHIFT
        whole = _run(trial, inputs)
        bias[rows] = 0.0
        if isinstance(whole, str) or _differ(_run(trial, inputs), whole, _SHIFT * _rounding(layer, whole)):
            return "whose key bias, which would be dropped, changes its output (as with softcap or sinks)"
    return None


@torch.inference_mode(False)
@torch.no_grad()
def _compare(holder: nn.Module, layout: HeadLayout, function: str) -> str | None:
    with _apart():
        failed = []
        # The package's function serves stock modules too, T5's with fewer heads it alone, but not every argument.
        for runs in (NAME,) if function == NAME else (NAME, "eager"):
            trial = _random_copy(holder, layout, runs)
            layer = layer_of(trial, layout)
            if not layer.num_key_heads or layer.num_heads % layer.num_key_heads:
                return f"would have {layer.num_heads} heads and {layer.num_key_heads} key heads"
            for inputs in _inputs(trial, layer):
                whole = _run(trial, inputs)
                if isinstance(whole, Tensor):
                    return _difference(trial, layer, inputs, whole, gated=function == NAME)
                failed.append(whole)
    return f"cannot be run on random input ({failed[0]})"


def _difference(
    trial: Any, layer: ProjectedLayer, inputs: Mapping[str, Any], whole: Tensor, *, gated: bool
) -> str | None:
    """How the copy differs with a head closed and with that head pruned, in words."""
    H = layer.num_heads
    head = min(1, H - 1)
    left = [each for each in range(H) if each != head]
    tolerance = _rounding(layer, whole)
    by_gate: Tensor | str | None = None
    if gated:
        gates = torch.full((H,), _GATE).index_fill(0, torch.tensor([head]), 0.0)
        layer.module.head_gate = FixedGate(gates)
        by_gate = _run(trial, inputs)
        layer.module.head_gate = None
    weight = layer.output.linear.weight
    weight[:, layer.output.features([head])] = 0.0
    closed = _run(trial, inputs)
    weight *= _GATE
    folded = _run(trial, inputs)
    weight /= _GATE
    shrink(layer, left, read_key_heads(layer, left))
    pruned = _run(trial, inputs)
    if not _differ(closed, whole, tolerance):
        return "computes the same with a head closed"
    if isinstance(pruned, str):
        return f"cannot run with a head pruned ({pruned})"
    if _differ(pruned, closed, tolerance):
        return "computes something else with a head pruned than with that head closed"
    if isinstance(by_gate, str):
        return f"cannot run with a gate on its heads ({by_gate})"
    if by_gate is not None and _differ(by_gate, folded, tolerance):
        return "computes something else with gates than with gates folded into its output projection"
    return None


def _rounding(layer: ProjectedLayer, whole: Tensor) -> Tensor:
    """By how much two passes with outputs like `whole` may differ: one rounding per term of their sums."""
    terms = layer.output.inputs + layer.head_dim + _TOKENS + _FEATURES
    return torch.finfo(torch.float32).eps * terms * whole.abs().max()


def _differ(some: Tensor | str, other: Tensor | str, tolerance: Tensor) -> bool:
    if isinstance(some, str) or isinstance(other, str) or some.shape != other.shape:
        return True
    return not bool((some - other).abs().max() <= tolerance)


def _run(trial: nn.Module, inputs: Mapping[str, Any]) -> Tensor | str:
    """The output of a forward pass, or what went wrong."""
    try:
        out = trial(**inputs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    out = out[0] if isinstance(out, tuple) else out
    return out if isinstance(out, Tensor) else f"its forward gives a {type(out).__name__}"


# ---------------------------------------------------------------------- the copy
class _Narrow(nn.Linear):
    """A random projection of the sizes of another that uses only the first `reads` input features and the first
    `writes` output features. As the other, it takes no other number of features."""

    def __init__(self, like: Projection, reads: int, writes: int) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = like.inputs, like.outputs
        self.weight = nn.Parameter(torch.randn(writes, reads) * reads**-0.5)
        has_bias = getattr(like.linear, "bias", None) is not None
        self.register_parameter("bias", nn.Parameter(torch.randn(writes)) if has_bias else None)

    def forward(self, inputs: Tensor) -> Tensor:
        if inputs.shape[-1] != self.in_features:
            raise ValueError(f"{inputs.shape[-1]} features for a projection of {self.in_features}")
        out = nn.functional.linear(inputs[..., : self.weight.shape[1]], self.weight, self.bias)
        return nn.functional.pad(out, (0, self.out_features - out.shape[-1]))


def _random_copy(holder: nn.Module, layout: HeadLayout, function: str) -> Any:
    """A copy with random parameters in float32 on the CPU, in evaluation mode, without hooks and head gates."""
    layer = layer_of(holder, layout)
    projections = {layout.output: layer.output}
    projections |= {layout.query: layer.query, layout.key: layer.key, layout.value: layer.value}
    beside = [path for path in layout.beside if is_projection(at_path(holder, path))]
    projections |= zip(beside, layer.beside, strict=True)
    made: dict[int, Any] = {id(each.linear): nn.Identity() for each in projections.values()}
    trial = _copied(holder, made, function)
    for path, projection in projections.items():
        reads, writes = projection.inputs, projection.outputs
        if path == layout.output:
            writes = min(writes, _FEATURES)
        else:
            reads = min(reads, _FEATURES)
        parent, _, name = existing(holder, path).rpartition(".")
        setattr(trial.get_submodule(parent), name, _Narrow(projection, reads, writes))
    return trial


def _copied(module: nn.Module, made: dict[int, Any], function: str) -> Any:
    if id(module) in made:
        return made[id(module)]
    copied = made[id(module)] = object.__new__(type(module))
    for name, value in vars(module).items():
        if name in ("forward", "_compiled_call_impl"):  # what wraps it
            continue
        if name == "observer" or (name == "context" and calls_operators(module)):
            value = None  # the copy runs alone, on whole sequences
        if names_attention_function(value):
            value = with_attention_function(value, function)
        copied.__dict__[name] = copy(value) if isinstance(value, (dict, list, set)) else value
    copied.__dict__ |= vars(nn.Module()) | {"training": False}
    for name, parameter in module._parameters.items():
        random = None if parameter is None else nn.Parameter(torch.randn(parameter.shape))
        copied.register_parameter(name, random)
    for name, buffer in module._buffers.items():
        copied.register_buffer(name, None if buffer is None else _values(buffer))
    for name, child in module._modules.items():
        copied._modules[name] = None
        if child is not None and name != "head_gate":
            copied._modules[name] = _copied(child, made, function)
    return copied


def _values(buffer: Tensor) -> Tensor:
    """A copy of a buffer; ones if it has no values."""
    dtype = torch.float32 if buffer.is_floating_point() else buffer.dtype
    if buffer.is_meta:
        return torch.ones(buffer.shape, dtype=dtype)
    return buffer.detach().to("cpu", dtype, copy=True)


# ---------------------------------------------------------------------- its input
def _inputs(trial: Any, layer: ProjectedLayer) -> Iterator[Mapping[str, Any]]:
    """Candidate arguments of a forward pass, from the names of its parameters; the first that run are used."""
    arguments = stock_arguments(type(trial))
    names = list(arguments)
    needed = [n for n, each in arguments.items() if each.default is each.empty and each.kind < 2]
    for T in _lengths(trial):
        positions = [None]
        if "position_embeddings" in names:
            positions = list(_positions(trial, layer.head_dim, T))
        for batch, turns, cross in product(((1,), ()), positions, (False, True)):
            inputs: dict[str, Any] = dict.fromkeys(needed)
            inputs[names[0]] = torch.randn(*batch, T, layer.query.inputs)
            for name in SOURCES:
                width = (layer.value if name.startswith("value") else layer.key).inputs
                if name in names and (name in needed or cross or width != layer.query.inputs):
                    inputs[name] = torch.randn(*batch, T, width)
            if turns is not None:
                inputs["position_embeddings"] = turns
            if "position_ids" in needed:
                inputs["position_ids"] = torch.arange(T)[None]
            if "cu_seqlens" in needed:
                inputs["cu_seqlens"] = torch.tensor([0, T], dtype=torch.int32)
            yield inputs


def _lengths(trial: nn.Module) -> Iterator[int]:
    """Numbers of tokens; a bias for the pairs of a window needs all of its tokens."""
    yield _TOKENS
    for module in trial.modules():
        size: Any = getattr(module, "window_size", None)
        is_window = isinstance(size, tuple) and all(map(is_int, size))
        if is_window and _TOKENS < (tokens := prod(size)) <= _LARGEST_WINDOW:
            yield tokens


def _positions(trial: Any, D: int, T: int) -> Iterator[Any]:
    """Rotary positions as models pass them: cosine and sine of some features of a head, complex numbers, or none."""
    widths = dict.fromkeys((D, getattr(trial, "rotary_ndims", D), D // 2, D // 4, D * 3 // 4))
    for shape in ((1, T), (T,)):
        yield from (tuple(torch.randn(2, *shape, width).unbind()) for width in widths)
        yield torch.randn(*shape, D // 2, dtype=torch.complex64)
    yield None
