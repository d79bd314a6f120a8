"""Hooks around models' forward passes that hand head masks and `output_attentions` to the attention layers.

Models of transformers 5 ignore head masks, and many do not pass `output_attentions` on. The hooks store both in the
`PassState` of the pass, where the attention function reads them, check before it that the layers which have gates or
get masks run the attention function of this package, and afterwards that they had an effect.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from heads_kernels.checks import refuse, refuse_type
from heads_kernels.heads.gating import refuse_ignored_gates
from heads_kernels.heads.interface import NAME
from heads_kernels.heads.layouts import at_path
from heads_kernels.integrations.transformers.head_masks import (
    PLACE,
    HeadMaskPlace,
    PassState,
    is_pair,
    masks_among,
    pass_state,
    places,
    set_pass_state,
    stacks_of,
)
from heads_kernels.ops.statistics import AttentionStatistics

#: The attribute of every model, and of every model in it, that holds its `Pass`.
PASS: Final = "_heads_kernels_pass"
#: The attribute of every module in use that holds configs: what their attention implementations were.
BEFORE: Final = "_attn_implementations_before"


@dataclass(eq=False)
class Pass:
    """The hooks of a model."""

    arguments: dict[str, list[HeadMaskPlace]]  # for the name of each head mask, the layers that it applies to
    layers: dict[str, HeadMaskPlace]  # all of these layers, by the name of their module in the model
    stacks: dict[str, int]  # the number of modules of each list that has such layers, by its name
    #: By the name of a head mask, and "" for all layers, whether its layers form one stack. An image tower and a text
    #: tower are two stacks: the submodels that receive the mask set it for their own.
    is_one_stack: dict[str, bool]
    takes_any: bool  # whether the model's forward takes arguments of any name
    parts: list[Pass] = field(default_factory=list)  # the hooks of the models that this one contains
    handles: list[Any] = field(default_factory=list)
    unpadded: list[Any] = field(default_factory=list)  # the `UnpaddedLayer`s of its layers whose calls are packed
    checked: int = 0  # the number of kinds of their calls in passes whose outputs were checked


# ---------------------------------------------------------------------- hooks on and off
def watch(model: nn.Module) -> None:
    """Install the hooks on a model and on every model inside it."""
    for place in places(model):
        setattr(place.module, PLACE, place)
    passes: dict[str, Pass] = {}
    for name, part in model.named_modules():
        if isinstance(part, PreTrainedModel):
            own = _pass_of(part)
            for outer, each in passes.items():
                if not outer or name.startswith(f"{outer}."):
                    each.parts.append(own)
            passes[name] = own
            own.handles = [
                part.register_forward_pre_hook(_begin, with_kwargs=True),
                part.register_forward_hook(_end, always_call=True),
            ]
            setattr(part, PASS, own)


def _pass_of(model: PreTrainedModel) -> Pass:
    layers = {n: vars(each)[PLACE] for n, each in model.named_modules() if PLACE in vars(each)}
    stacks = {stack for name in layers for stack in stacks_of(name)}
    arguments: dict[str, list[HeadMaskPlace]] = {}
    for name, place in layers.items():
        is_decoders = is_pair(model) and name.startswith("decoder.")
        argument = f"decoder_{place.argument}" if is_decoders else place.argument
        arguments.setdefault(argument, []).append(place)
    kinds = {name: {type(each.module.config) for each in found} for name, found in arguments.items()}
    kinds[""] = set().union(*kinds.values())
    parameters = inspect.signature(model.forward).parameters.values()
    return Pass(
        arguments=arguments,
        layers=layers,
        stacks=_sizes(model, stacks),
        is_one_stack={name: len(found) == 1 for name, found in kinds.items()},
        takes_any=any(each.kind is each.VAR_KEYWORD for each in parameters),
    )


def _sizes(model: nn.Module, stacks: Iterable[str]) -> dict[str, int]:
    return {stack: len(list(model.get_submodule(stack).children())) for stack in stacks}


# ---------------------------------------------------------------------- the hooks
def _begin(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    own: Pass = getattr(model, PASS)
    outer = pass_state()
    if (interrupted := _state_of(own, outer)) is not None:
        outer = interrupted.outer
        set_pass_state(outer)
    is_outermost = outer is None or own not in outer.owner.parts
    if is_outermost:
        for layer in own.layers.values():
            if layer.runs != NAME and getattr(layer.module, "head_gate", None) is not None:
                refuse_ignored_gates(f"a {type(layer.module).__name__}", layer.runs)
    masks = masks_among(kwargs)
    collects = _collected(model, kwargs)
    asks = "output_attentions" in collects
    if is_outermost:
        for name, mask in masks.items():
            _check(model, own, name, mask)
        if masks or asks:
            _check_order(model, own, next(iter(masks), "output_attentions"))
    _check_runs(model, own, masks, asks)
    asks = asks and any(layer.runs == NAME for layer in own.layers.values())
    if torch.compiler.is_compiling() and not (masks or collects):
        return None
    state = PassState(own, outer, tuple(masks), asks, collects)
    if outer is not None and not is_outermost:
        state.given, state.statistics = dict(outer.given), dict(outer.statistics)
        state.read = outer.read
    elif model.training and torch.compiler.is_compiling():
        # A compiled layer under gradient checkpointing cannot record that it read its mask.
        state.read = dict.fromkeys(own.layers.values(), True)
    for name, mask in masks.items():
        if own.is_one_stack.get(name, False):
            for layer in own.arguments[name]:
                state.given[layer] = mask
    if asks and own.is_one_stack[""]:
        for layer in own.layers.values():
            state.statistics[layer] = True
    if state.given and model.training and torch.is_grad_enabled():
        state.runs_again = not torch.compiler.is_compiling() and _is_checkpointing(model)
    set_pass_state(state)
    if own.takes_any or not masks:
        return None
    return args, {name: value for name, value in kwargs.items() if name not in masks}


def _is_checkpointing(model: Any) -> bool:
    """Whether layers run again in the backward pass; transformers 5.24 renamed the property."""
    renamed = hasattr(type(model), "is_activation_checkpointing")
    return bool(model.is_activation_checkpointing if renamed else model.is_gradient_checkpointing)


def _collected(model: Any, arguments: dict[str, Any]) -> frozenset[str]:
    """The outputs that a pass is asked for, by an argument or else by the config: `output_attentions` and the like."""
    of_config = ("output_attentions", "output_hidden_states", "output_router_logits")
    names = {*of_config, *(name for name in arguments if name.startswith("output_"))}
    asked = set()
    for name in names:
        value = arguments.get(name)
        value = getattr(model.config, name, False) if value is None else value
        if value is not None and value is not False:
            asked.add(name)
    return frozenset(asked)


def _state_of(own: Pass, state: PassState | None) -> PassState | None:
    """The state of a pass of this model among a pass and those around it."""
    while state is not None and state.owner is not own:
        state = state.outer
    return state


def _check(model: Any, own: Pass, name: str, mask: Any) -> None:
    """Refuse a value that is not a head mask, and a name that no layer of the model reads."""
    instead = "pass a tensor [H], or [L, H] with one row for each layer of the stack"
    if name not in own.arguments:
        was = f"is given to a {type(model).__name__}, which has no use for it"
        refuse(name, was, f"pass {', '.join(own.arguments) or 'none'}")
    if not isinstance(mask, Tensor):
        refuse_type(name, mask, instead)
    if mask.dim() not in (1, 2):
        refuse(name, f"has shape {list(mask.shape)}", instead)
    if mask.is_complex():
        refuse(name, f"is {mask.dtype}", "pass floats, integers or bools")


def _check_order(model: Any, own: Pass, name: str) -> None:
    """Refuse a model whose layers are not those of `use`, in their order, which the rows of a mask have."""
    found = [(at_path(model, path), place) for path, place in own.layers.items()]
    # A replica of nn.DataParallel has other modules, with the same places; a released part has none.
    is_same = all(each is p.module or getattr(each, PLACE, None) is p for each, p in found)
    if not is_same or _sizes(model, own.stacks) != own.stacks:
        was = f"is given to a {type(model).__name__}, whose layers were moved, removed or added since `use`"
        refuse(name, was, "call heads_kernels.integrations.transformers.use(model) again")


def _check_runs(model: Any, own: Pass, masks: dict[str, Any], asks: bool) -> None:
    """Refuse head masks for layers that run another attention function, and statistics in a model in use."""
    use = "call heads_kernels.integrations.transformers.use(model)"
    for name in masks:
        functions = [layer.runs for layer in own.arguments.get(name, [])]
        others = [each for each in functions if each != NAME]
        if others and (own.is_one_stack[name] or NAME not in functions):
            was = f"is given to a {type(model).__name__}, whose layers run the attention function {others[0]!r}"
            refuse(name, f"{was}, which ignores it", use)
    functions = [layer.runs for layer in own.layers.values()]
    if asks and functions and hasattr(model, BEFORE) and NAME not in functions:
        was = f"is True, but the layers of the {type(model).__name__} in use run the attention function"
        refuse("output_attentions", f"{was} {functions[0]!r}", f"{use}, or release(model) for maps")


def _end(model: Any, args: tuple[Any, ...], output: Any) -> None:
    own: Pass = getattr(model, PASS)
    state = _state_of(own, pass_state())
    if state is None:
        return
    outer = state.outer
    set_pass_state(outer)
    is_outermost = outer is None or own not in outer.owner.parts
    if output is None or not is_outermost:  # None: the pass failed
        return
    for name in state.masks:
        if not any(layer in state.read for layer in own.arguments[name]):
            was = f"was read by no layer of the {type(model).__name__}"
            refuse(name, was, "pass it to the part of the model that has attention, or call hk.heads.close")
    if state.asks and not _has_statistics(output):
        was = f"is True, but a {type(model).__name__} does not return statistics of its layers"
        refuse("output_attentions", was, "call hk.analysis.statistics, or use attn_implementation='eager' for maps")


def _has_statistics(output: Any) -> bool:
    if isinstance(output, AttentionStatistics):
        return True
    if isinstance(output, dict):
        return any(map(_has_statistics, output.values()))
    return isinstance(output, (tuple, list)) and any(map(_has_statistics, output))
