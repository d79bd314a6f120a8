"""Gates on the heads of a model: learned gates, and temporarily closed heads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from heads_kernels.checks import refuse
from heads_kernels.dtensor import is_fully_sharded, is_sharded
from heads_kernels.heads.interface import NAME, attention_function, names_attention_function
from heads_kernels.heads.layers import (
    AttentionLayer,
    HeadsByLayer,
    attention_layers,
    calls_operators,
    choose_layers,
    gates_of,
    heads_of_layers,
)
from heads_kernels.heads.layouts import HeadLayout, at_path, is_projection
from heads_kernels.heads.projected import holders_of, with_projections
from heads_kernels.nn.gates import FixedGate, HardConcrete, HeadGate
from heads_kernels.snapshot import kept_on_error


@torch.inference_mode(False)
def gate(model: nn.Module, make: Callable[[int], HeadGate], layers: Iterable[int | str] | None = None) -> None:
    """Attach gates to the heads of a model: `module.head_gate = make(num_heads)` in every attention layer.

    The gates are submodules: their parameters are parameters of the model (create the optimiser afterwards) and their
    state is in its state dict. Layers without heads get none.

    Voita et al. 2019 add gates to a trained model and train it further, which gave better results than gates from the
    start. With gates only on the encoder (`layers`) they freeze the decoder, so that it cannot take over the functions
    of closed heads.

    Args:
        model: with attention layers (`attention_layers`); a transformers model after
            `hk.integrations.transformers.use(model)`.
        make: creates the gate of a layer from its number of heads, for example `hk.nn.HardConcrete`.
        layers: a list of indices or names of layers; default all.

    Raises:
        TypeError, ValueError: a layer does not exist or has a gate already; gates that learn would get no gradient
            through quantised projections; the model is sharded by `fully_shard`; the attention function of a
            transformers model ignores gates; `make` does not return a new `HeadGate` of that many heads each time.
    """
    is_other_class = isinstance(make, type) and not issubclass(make, HeadGate)
    if isinstance(make, nn.Module) or is_other_class or not callable(make):
        was = f"is the class {make.__name__}" if isinstance(make, type) else f"is a {type(make).__name__}"
        refuse("make", was, "pass hk.nn.HardConcrete, or a function from a number of heads to a HeadGate", TypeError)
    chosen = choose_layers(attention_layers(model), layers)
    _check_reads_gates(model, chosen)
    if is_fully_sharded(model):
        refuse(str(chosen[0]), "is sharded over processes", "attach gates before fully_shard")
    holders = holders_of(model)
    made: dict[HeadGate, AttentionLayer] = {}
    for layer in chosen:
        if layer.gate is not None:
            refuse(str(layer), f"has a {type(layer.gate).__name__} already", "call hk.heads.ungate(model) first")
        if layer.num_heads:
            head_gate = _made(make, layer, made)
            if any(parameter.requires_grad for parameter in head_gate.parameters()):
                _check_passes_gradients(layer, holders.get(layer.module))
            made[head_gate] = layer
    _attach(model, {layer.module: head_gate for head_gate, layer in made.items()})


def ungate(model: nn.Module) -> None:
    """Remove all gates: all heads are open. `prune` folds gates into the weights instead."""
    gated = (layer for layer in attention_layers(model) if layer.gate is not None)
    _attach(model, {layer.module: None for layer in gated})


@torch.inference_mode(False)
def close(model: nn.Module, heads: HeadsByLayer) -> None:
    """Close heads: they output zeros and cost no attention work, until `reopen(model)`.

    Each layer gets a `FixedGate`; if it already has one, more of its heads are closed. Not saved with the model.

    Args:
        model: as in `gate`.
        heads: `{layer: [heads]}`, layers by index or name, heads by their current number.

    Raises:
        TypeError, ValueError: a layer or head does not exist; the attention function of a transformers model ignores
            gates; a layer has gates that are learned or fixed at values other than 0 and 1, which `reopen` could not
            restore.
    """
    asked = heads_of_layers(attention_layers(model), heads)
    _check_reads_gates(model, [layer for layer, _ in asked])
    made: dict[nn.Module, HeadGate] = {}
    for layer, chosen in asked:
        head_gate = layer.gate
        if head_gate is not None and not _only_closes(head_gate):
            was = f"has a {type(head_gate).__name__} that close would overwrite"
            refuse(str(layer), was, "remove the gates first: hk.heads.ungate(model)")
        if chosen:
            gates = gates_of(layer)
            gates[chosen] = 0.0
            made[layer.module] = FixedGate(gates)
    _attach(model, made)


def reopen(model: nn.Module) -> None:
    """Open the heads that `close` closed: removes gates that are fixed at 0 and 1, and no others."""
    closing = (layer for layer in attention_layers(model) if _only_closes(layer.gate))
    _attach(model, {layer.module: None for layer in closing})


def closed(model: nn.Module) -> dict[str, list[int]]:
    """The heads whose gate at inference is exactly 0: `{layer name: [heads]}` for all layers that have gates.

    `prune(model, closed(model))` removes them and folds the gates of the others into the weights.
    """
    return {
        layer.name: (head_gate.export() == 0).nonzero().flatten().tolist()
        for layer in attention_layers(model)
        if (head_gate := layer.gate) is not None
    }


def _attach(model: nn.Module, gates: Mapping[nn.Module, HeadGate | None]) -> None:
    """Set the gates of these modules, None to remove one; on an error or Ctrl-C none is changed."""
    with kept_on_error(model):
        for module, head_gate in gates.items():
            set_gate(module, head_gate)


def set_gate(module: Any, head_gate: HeadGate | None) -> None:
    """Set or remove the gate of a module; one of transformers then refuses to run without its gate."""
    module.head_gate = head_gate
    if (guard := vars(module).pop("_head_gate_guard", None)) is not None:
        guard.remove()
    if head_gate is not None and names_attention_function(getattr(module, "config", None)):
        module._head_gate_guard = module.register_forward_pre_hook(_check_runs_gate)


def _check_runs_gate(module: Any, args: tuple[Any, ...]) -> None:
    """Hook before the forward of a module of transformers with a gate."""
    if (runs := attention_function(module)) != NAME and module.head_gate is not None:
        refuse_ignored_gates(f"a {type(module).__name__}", runs)


def _only_closes(head_gate: HeadGate | None) -> bool:
    """Whether it is a gate as `close` makes it."""
    return isinstance(head_gate, FixedGate) and set(head_gate.gates.tolist()) <= {0.0, 1.0}


def _made(
    make: Callable[[int], HeadGate], layer: AttentionLayer, others: Mapping[HeadGate, AttentionLayer]
) -> HeadGate:
    head_gate = make(layer.num_heads)
    if not isinstance(head_gate, HeadGate):
        was = f"returned a {type(head_gate).__name__}"
        refuse("make", was, "pass a function that returns a hk.nn.HeadGate", TypeError)
    if head_gate.num_heads != layer.num_heads:
        was = f"returned {head_gate.num_heads} gates for {layer}"
        refuse("make", was, f"return one for each of its {layer.num_heads} heads")
    if head_gate in others:
        refuse("make", f"returned the same gate for {layer} as for {others[head_gate]}", "return a new one each time")
    sharded: Any = next(filter(is_sharded, layer.module.parameters()), None)
    if sharded is not None and isinstance(head_gate, HardConcrete):  # tensor parallelism
        head_gate.meshes += (sharded.device_mesh,)
    return head_gate.to(layer.weight.device).train(layer.module.training)


def _check_passes_gradients(layer: AttentionLayer, held: tuple[str, nn.Module, HeadLayout] | None) -> None:
    """Refuse a layer with projections that pass no gradient to their inputs: learned gates would not learn."""
    parts = dict(layer.module.named_modules())
    if held is not None:  # its output projection may be outside of its module
        _, holder, layout = held
        parts[layout.output] = at_path(holder, layout.output)
    for name, linear in parts.items():
        weight = getattr(linear, "weight", None)
        if is_projection(linear) and not _passes_gradients(weight):
            kind = type(weight if isinstance(weight, Tensor) else linear).__name__
            was = f"passes no gradient to its inputs (its weight is quantised: {kind})"
            instead = "train gates before the model is quantised, or quantise its weights alone"
            refuse(f"{layer}: its projection {name!r}", was, instead)


def _passes_gradients(weight: Any) -> bool:
    """False for weights that `torch.ao` has packed, and for torchao's with quantised activations."""
    if callable(weight):
        return False
    plain = weight is None or type(weight) in (Tensor, nn.Parameter) or is_sharded(weight)
    if plain or not weight.is_floating_point():
        return True
    with torch.enable_grad():
        x = torch.zeros(1, weight.shape[-1], dtype=weight.dtype, device=weight.device)
        x.requires_grad_()
        return nn.functional.linear(x, weight).requires_grad


def refuse_ignored_gates(where: str, runs: str) -> NoReturn:
    """Refuse the attention function `runs` of the module or layer `where`."""
    was = f"runs the attention function {runs!r} in {where}, which ignores its gates, pruning and observers"
    instead = "call hk.integrations.transformers.use(model) first"
    refuse("model", was, f"{instead}; hk.heads.prune, reopen and ungate remove gates")


def _check_reads_gates(model: nn.Module, layers: list[AttentionLayer]) -> None:
    """Refuse layers of a model that would ignore their gates: those of registered classes are compared first."""
    for layer in layers:
        check_runs_operators(layer)
    with_projections(model, [layer for layer in layers if not calls_operators(layer.module)])


def check_runs_operators(layer: AttentionLayer) -> None:
    """Refuse a module of transformers whose attention function is not the package's."""
    if not layer.runs_operators:
        refuse_ignored_gates(str(layer), attention_function(layer.module))
