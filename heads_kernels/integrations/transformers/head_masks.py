"""Head masks of `model(...)`, which transformers 5 ignores: which row of which argument belongs to which layer, and
what the forward pass in progress gives to its layers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from torch import Tensor, nn

from heads_kernels.checks import refuse
from heads_kernels.heads.interface import attention_function, calls_interface


@dataclass(eq=False)
class HeadMaskPlace:
    """An attention module of a model, and which head mask belongs to it."""

    module: Any
    argument: str  # of `model(...)` that is its head mask
    known: tuple[str, ...]  # the names of all head masks that its model uses
    layer: int = 0  # its row of a mask [L, H]
    layers: int = 0  # L; 0 in ALBERT, whose layers run several times

    @property
    def runs(self) -> str:
        """The name of its attention function; released, a module without a config computes attention itself."""
        return attention_function(self.module) if hasattr(self.module, "config") else "eager"


#: The attribute of an attention module that holds its `HeadMaskPlace`.
PLACE: Final = "_head_mask_place"

#: Names of submodules of a decoder that attend to the encoder.
_CROSS: Final = {"crossattention", "cross_attn", "cross_attention", "encoder_attn", "EncDecAttention"}


# ---------------------------------------------------------------------- the pass in progress
@dataclass(eq=False)
class PassState:
    """What one forward pass of a model gives to its attention modules."""

    owner: Any  # the hooks of the model whose pass it is
    outer: PassState | None = None  # the pass within which it runs
    masks: tuple[str, ...] = ()  # the names of its head masks
    asks: bool = False  # for statistics
    collects: frozenset[str] = frozenset()  # the outputs that it is asked for, such as `output_hidden_states`
    #: The head masks; one that a module is called with takes precedence.
    given: dict[HeadMaskPlace, Tensor] = field(default_factory=dict)
    #: The modules that return statistics.
    statistics: dict[HeadMaskPlace, bool] = field(default_factory=dict)
    #: The modules whose head mask was read; passes within a pass share it.
    read: dict[HeadMaskPlace, bool] = field(default_factory=dict)
    runs_again: bool = False  # gradient checkpointing runs its layers again, when the pass is over
    has_begun: bool = False  # a layer that can be packed has run


#: Its `state` is the pass in progress in a thread. `torch.compile` traces it, but no context variable.
_THREAD: Final = threading.local()


def pass_state() -> PassState | None:
    """The pass in progress in this thread."""
    return getattr(_THREAD, "state", None)


def set_pass_state(state: PassState | None) -> None:
    _THREAD.state = state


def requests_statistics(module: nn.Module) -> bool:
    """Whether the pass requests the statistics of this attention module."""
    place = getattr(module, PLACE, None)
    state = None if place is None else pass_state()
    return state is not None and place in state.statistics


def masks_among(arguments: dict[str, Any]) -> dict[str, Any]:
    return {n: e for n, e in arguments.items() if n.endswith("head_mask") and e is not None}


def given_head_mask(module: nn.Module, arguments: dict[str, Any]) -> Tensor | None:
    """The head mask of the model's pass that reaches this attention module, or None.

    It is taken from the `arguments` of the attention function, or else from the pass in progress. Masks that the model
    does not use, or that a layer would lose when it runs again, are refused.
    """
    masks = masks_among(arguments)
    place: HeadMaskPlace | None = getattr(module, PLACE, None)
    if place is None:
        if masks:
            instead = "call heads_kernels.integrations.transformers.use(model) first"
            refuse(next(iter(masks)), f"is given to a {type(module).__name__} not in use", instead)
        return None
    for name in masks:
        if name not in place.known:
            was = f"reaches a {type(module).__name__}, whose model has no use for it"
            refuse(name, was, f"pass {', '.join(place.known)}")
    if place.argument in masks or (state := pass_state()) is None:
        return masks.get(place.argument)
    given = state.given.get(place)
    if given is not None and state.runs_again:
        was = f"reaches no {type(module).__name__} as an argument, and gradient checkpointing runs layers without it"
        instead = "call model.gradient_checkpointing_disable(), or set gates: hk.heads.gate, hk.heads.close"
        refuse(place.argument, was, instead)
    return given


def head_mask_row(module: nn.Module, H: int, given: Tensor) -> Tensor:
    """The gates `[H]` that a head mask has for an attention module of H heads, which has a place."""
    place: HeadMaskPlace = getattr(module, PLACE)
    state = pass_state()
    if state is not None and place not in state.read:
        state.read[place] = True
    row = given[place.layer] if given.dim() == 2 and len(given) == place.layers else given
    if row.shape == (getattr(module, "heads_before", None),):
        kept: Any = module.kept_heads
        row = row[kept]
    if row.shape != (H,):
        was = f"has shape {list(given.shape)} for {type(module).__name__}"
        layer, instead = "", f"pass [H] = [{H}]"
        if place.layers:
            layer = f", layer {place.layer} of {place.layers}"
            instead += f", or [L, H] = [{place.layers}, {H}] with one row for each layer of the stack"
        refuse(place.argument, f"{was}{layer}, which has {H} heads", instead)
    return row if row.is_floating_point() else row.float()


# ---------------------------------------------------------------------- places
def is_pair(model: Any) -> bool:
    """Whether a model wraps an encoder and a decoder model, and strips `decoder_` from the decoder's arguments."""
    return bool(model.config.model_type.endswith("encoder-decoder"))


def places(model: Any) -> Iterator[HeadMaskPlace]:
    """Every attention module that head masks of a model can reach."""
    if is_pair(model):
        yield from places(model.encoder)
        yield from places(model.decoder)
        return
    found = {
        name: (module, _argument(model, name)) for name, module in model.named_modules() if calls_interface(module)
    }
    known = tuple(dict.fromkeys(argument for _, argument in found.values()))
    for name, (module, argument) in found.items():
        yield HeadMaskPlace(module, argument, known, *_row(model, name))


def _argument(model: Any, name: str) -> str:
    """The argument with the head mask of the module of this name."""
    parts = name.split(".")
    if _CROSS & set(parts):
        return "cross_attn_head_mask"
    if "decoder" in parts and model.config.is_encoder_decoder:
        return "decoder_head_mask"
    return "head_mask"


def _row(model: Any, name: str) -> tuple[int, int]:
    """The row of this module in a mask `[L, H]`, and L: its place in the outermost list of layers."""
    if "albert_layer_groups" in name.split("."):
        return 0, 0
    stacks = stacks_of(name)
    if not stacks:
        return 0, 1
    layers = [child for child, _ in model.get_submodule(stacks[0]).named_children()]
    index = name.removeprefix(f"{stacks[0]}.").partition(".")[0]
    return int(index), sum(map(str.isdigit, layers))


def stacks_of(name: str) -> list[str]:
    """The names of the lists that a module of this name is in, outermost first: a number follows them."""
    parts = name.split(".")
    return [".".join(parts[:place]) for place, part in enumerate(parts) if part.isdigit()]
