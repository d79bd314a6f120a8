"""Hooks around models' forward passes that hand head masks and `output_attentions` to the attention layers.

Models of transformers 5 ignore head masks, and many do not pass `output_attentions` on to their layers. The hooks
store both in the `HeadMaskPlace`s of the layers, where the attention function reads them, and check afterwards that
they had an effect.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from heads_kernels.checks import refuse
from heads_kernels.heads.configs import NAME
from heads_kernels.integrations.transformers.head_masks import (
    PLACE,
    HeadMaskPlace,
    is_pair,
    places,
)
from heads_kernels.integrations.transformers.support import (
    INSTEAD,
    ITSELF,
    computes_itself,
    family,
)
from heads_kernels.ops.attention_statistics import AttentionStatistics

#: The attribute of every model, and of every model in it, that holds its `Pass`.
PASS: Final = "_heads_kernels_pass"

#: A place and what it holds: its head mask, and whether statistics are requested.
Held = tuple[HeadMaskPlace, Tensor | None, bool]


@dataclass(eq=False)
class Pass:
    """State of a model's hooks and of its current forward pass.

    Attributes:
        arguments: for the name of each head mask, the places of the layers that it applies to.
        is_one_stack: for each of these names, and "" for all layers, whether the layers form one stack. An image
            tower and a text tower are two stacks: the submodels that receive the mask set it for their own.
        takes_any: whether the model's forward takes arguments of any name.
        computes_itself: whether the model has attention, but none that goes through the attention function.
        within: the passes of the models that contain this one.
        handles: of the hooks.
        is_running: whether a pass with head masks or requested statistics is in progress.
        masks: the names of the head masks of the pass.
        asks: whether statistics are requested.
        before: what places held before the pass.
        checkpointing: modules with their original function for gradient checkpointing.
    """

    arguments: dict[str, list[HeadMaskPlace]]
    is_one_stack: dict[str, bool]
    takes_any: bool
    computes_itself: bool
    within: list[Pass] = field(default_factory=list)
    handles: list[Any] = field(default_factory=list)
    is_running: bool = False
    masks: tuple[str, ...] = ()
    asks: bool = False
    before: list[Held] = field(default_factory=list)
    checkpointing: list[tuple[Any, Any]] = field(default_factory=list)

    @property
    def places(self) -> list[HeadMaskPlace]:
        return [place for each in self.arguments.values() for place in each]

    @property
    def is_outermost(self) -> bool:
        return not any(outer.is_running for outer in self.within)


# ---------------------------------------------------------------------- hooks on and off
def watch(model: nn.Module) -> None:
    """Install the hooks on a model and on every model inside it."""
    unwatch(model)
    for module, place in places(model):
        setattr(module, PLACE, place)
    passes: dict[str, Pass] = {}
    for name, part in model.named_modules():
        if isinstance(part, PreTrainedModel):
            own = _pass_of(part)
            own.within = [
                each for outer, each in passes.items() if not outer or name.startswith(f"{outer}.")
            ]
            passes[name] = own
            own.handles = [
                part.register_forward_pre_hook(_begin, with_kwargs=True),
                part.register_forward_hook(_end, always_call=True),
            ]
            setattr(part, PASS, own)


def unwatch(model: nn.Module) -> None:
    """Remove what `watch` installed."""
    for module in model.modules():
        vars(module).pop(PLACE, None)
        for handle in getattr(vars(module).pop(PASS, None), "handles", ()):
            handle.remove()


def _pass_of(model: PreTrainedModel) -> Pass:
    modules = _by_argument(model)
    stacks = {  # of modules without a config the classes are compared
        name: {type(getattr(each, "config", each)) for each in found}
        for name, found in modules.items()
    }
    stacks[""] = set().union(*stacks.values())
    parameters = inspect.signature(model.forward).parameters.values()
    return Pass(
        arguments={
            name: [getattr(each, PLACE) for each in found] for name, found in modules.items()
        },
        is_one_stack={name: len(kinds) == 1 for name, kinds in stacks.items()},
        takes_any=any(each.kind is each.VAR_KEYWORD for each in parameters),
        computes_itself=computes_itself(model),
    )


def _by_argument(model: Any) -> dict[str, list[Any]]:
    """The attention modules of a model, by the name of the argument with their head mask."""
    if is_pair(model):
        decoder = _by_argument(model.decoder)
        return _by_argument(model.encoder) | {
            f"decoder_{name}": each for name, each in decoder.items()
        }
    found: dict[str, list[Any]] = {}
    for module in model.modules():
        if (place := getattr(module, PLACE, None)) is not None:
            found.setdefault(place.argument, []).append(module)
    return found


# ---------------------------------------------------------------------- the hooks
def _begin(
    model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    own: Pass = getattr(model, PASS)
    if own.is_running:  # the last pass was interrupted
        _restore(own)
    if own.computes_itself and not own.within and model.config._attn_implementation == NAME:
        refuse("attn_implementation", f"is {NAME!r} for a {family(model)}, which {ITSELF}", INSTEAD)
    masks = {
        name: mask
        for name, mask in kwargs.items()
        if name.endswith("head_mask") and mask is not None
    }
    asks = kwargs.get("output_attentions")
    own.asks = bool(getattr(model.config, "output_attentions", False) if asks is None else asks)
    own.masks = tuple(masks)
    if not (masks or own.asks) or not _names_package(model.config):
        return None
    own.is_running = True
    if own.is_outermost:
        for name, mask in masks.items():
            _check(model, own, name, mask)
        # A compiled layer under gradient checkpointing cannot record that it read its mask.
        is_read = model.training and torch.compiler.is_compiling()
        for place in own.places:
            place.is_read = is_read
    for name, mask in masks.items():
        if own.is_one_stack.get(name, False):
            own.before += _put([(place, mask, place.statistics) for place in own.arguments[name]])
    if own.asks and own.is_one_stack[""]:
        own.before += _put([(place, place.given, True) for place in own.places])
    if model.training and own.is_outermost and not torch.compiler.is_compiling():
        _keep_for_checkpoints(model, own)
    if own.takes_any:
        return None
    return args, {name: value for name, value in kwargs.items() if name not in masks}


def _names_package(config: Any) -> bool:
    """Whether a config, or one nested in it, selects the package's attention function."""
    inner = (getattr(config, name, None) for name in config.sub_configs)
    if config._attn_implementation == NAME:
        return True
    return any(_names_package(each) for each in inner if each is not None)


def _check(model: Any, own: Pass, name: str, mask: Any) -> None:
    """Refuse a value that is not a head mask, and a name that no layer of the model reads."""
    instead = "pass a tensor [H], or [L, H] with one row for each layer of the stack"
    if name not in own.arguments:
        was = f"is given to a {type(model).__name__}, which has no use for it"
        refuse(name, was, f"pass {', '.join(own.arguments) or 'none'}")
    if not isinstance(mask, Tensor):
        refuse(name, f"is a {type(mask).__name__}", instead, TypeError)
    if mask.dim() not in (1, 2):
        refuse(name, f"has shape {list(mask.shape)}", instead)
    if mask.is_complex():
        refuse(name, f"is {mask.dtype}", "pass floats, integers or bools")


def _end(model: Any, args: tuple[Any, ...], output: Any) -> None:
    own: Pass = getattr(model, PASS)
    if not own.is_running:
        return
    _restore(own)
    if output is None or not own.is_outermost:  # None: the pass failed
        return
    for name in own.masks:
        if not any(place.is_read for place in own.arguments[name]):
            was = f"was read by no layer of the {type(model).__name__}"
            instead = "pass it to the part of the model that has attention, or call hk.heads.close"
            refuse(name, was, instead)
    if own.asks and not _has_statistics(output):
        was = f"is True, but a {type(model).__name__} does not return statistics of its layers"
        instead = "call hk.analysis.statistics, or use attn_implementation='eager' for maps"
        refuse("output_attentions", was, instead)


def _has_statistics(output: Any) -> bool:
    if isinstance(output, AttentionStatistics):
        return True
    if isinstance(output, dict):
        return any(map(_has_statistics, output.values()))
    return isinstance(output, (tuple, list)) and any(map(_has_statistics, output))


# ---------------------------------------------------------------------- what places hold
def _put(held: list[Held]) -> list[Held]:
    """Set what places hold; returns what they held before."""
    before = [(place, place.given, place.statistics) for place, _, _ in held]
    for place, given, statistics in held:
        place.given, place.statistics = given, statistics
    return before


def _restore(own: Pass) -> None:
    _put(own.before[::-1])
    for module, function in own.checkpointing:
        module._gradient_checkpointing_func = function
    own.before, own.checkpointing, own.is_running = [], [], False


def _keep_for_checkpoints(model: nn.Module, own: Pass) -> None:
    """Let layers that are recomputed in the backward pass see what their places hold now."""
    module: Any
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            function = module._gradient_checkpointing_func
            own.checkpointing.append((module, function))
            module._gradient_checkpointing_func = _checkpointed(function, own.places)


def _checkpointed(function: Callable[..., Any], among: list[HeadMaskPlace]) -> Callable[..., Any]:
    def checkpoint(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        held = [(place, place.given, place.statistics) for place in among]

        def run_with_masks(*args: Any, **kwargs: Any) -> Any:
            before = _put(held)
            try:
                return run(*args, **kwargs)
            finally:
                _put(before)

        return function(run_with_masks, *args, **kwargs)

    return checkpoint
