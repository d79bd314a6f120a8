"""Layers of transformers models on the real tokens of a padded batch alone, packed into one row.

A hook before the forward of a layer packs its arguments, one after it pads its output: everything outside of layers
(embeddings, poolers, heads, losses, `output_hidden_states`) sees `[B, T, ...]`. Where the real tokens are is found
once for a pass and kept with the mask that its layers share, so that hooks have no state.
"""

from __future__ import annotations

import inspect
import warnings
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel

from heads_kernels.checks import refuse
from heads_kernels.dtensor import is_sharded
from heads_kernels.heads.interface import calls_interface, stock_arguments
from heads_kernels.integrations.transformers.biased import OwnRelativePositions, RelativePositions
from heads_kernels.integrations.transformers.packed_calls import (
    PackedMask,
    RunsPadded,
    UnpaddedLayer,
    packed_call,
    without_cache,
)
from heads_kernels.integrations.transformers.packed_check import Arguments, check_outputs, check_packed, filling
from heads_kernels.integrations.transformers.passes import PASS, Pass
from heads_kernels.integrations.transformers.support import family, inmost_model, replacement

#: The attribute of every layer with the hooks that holds its `UnpaddedLayer`.
UNPADDED: Final = "_heads_kernels_unpadded"
#: Arguments of a model that have its tokens, a row for each example.
_TOKENS: Final = ("input_ids", "inputs_embeds", "decoder_input_ids", "decoder_inputs_embeds")


# ---------------------------------------------------------------------- hooks on and off
def unpaddable_layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The layers of a model that a padding mask reaches, by name; a model without any is refused.

    They are modules in lists that take hidden states and have attention: those that transformers checkpoints, or the
    inmost ones.
    """
    # Its module imports `PreTrainedModel`, at whose import this module is imported.
    from transformers.modeling_layers import GradientCheckpointingLayer

    found = {
        f"{name}.{number}": layer
        for name, modules in model.named_modules()
        if isinstance(modules, nn.ModuleList)
        for number, layer in modules.named_children()
        if any(calls_interface(each) or replacement(type(each)) for each in layer.modules())
        and _names(layer)[:1] == ("hidden_states",)
    }
    layers: dict[str, nn.Module] = {}
    for name, layer in found.items():
        owner = inmost_model(model, name)
        if "attention_mask" not in inspect.signature(owner.forward).parameters:
            continue  # images have no padding
        if any(hasattr(module, "expert_capacity") for module in layer.modules()):
            continue  # which tokens an expert drops depends on the row
        outside = [each for each in found if name.startswith(f"{each}.")]
        inside = [each for each in found if each.startswith(f"{name}.")]
        if any(isinstance(found[each], GradientCheckpointingLayer) for each in outside):
            continue
        if isinstance(layer, GradientCheckpointingLayer) or not inside:
            layers[name] = layer
    if not layers:
        was = f"is True for a {family(model)}, none of whose layers takes a mask of padded tokens"
        refuse("unpad", was, "call use(model) without it")
    return layers


def unpad_layers(model: nn.Module, layers: dict[str, nn.Module]) -> None:
    """Add hooks that let layers run on real tokens alone, and hooks that check the outputs of their models."""
    for name, layer in layers.items():
        modules = list(layer.modules())
        biased = [each for each in modules if isinstance(each, OwnRelativePositions)]
        own = UnpaddedLayer(
            name,
            attention=[each for each in modules if calls_interface(each)],
            distances=bool(biased),
            adds_zeros=any(not isinstance(each, RelativePositions) for each in biased),
            by_batch=any(map(_reads_batch, modules)),
        )
        own.handles = [
            layer.register_forward_pre_hook(_pack, with_kwargs=True),
            # Before the hooks of transformers, which collect hidden states.
            layer.register_forward_hook(_pad_back, with_kwargs=True, prepend=True),
        ]
        setattr(layer, UNPADDED, own)
    for part in model.modules():
        inside = [vars(each)[UNPADDED] for each in part.modules() if UNPADDED in vars(each)]
        if inside and isinstance(part, PreTrainedModel):
            watched: Pass = vars(part)[PASS]
            watched.unpadded = inside
            # Before the hooks of `passes`, which end the pass that hands head masks on.
            watched.handles.append(part.register_forward_hook(_check, with_kwargs=True, prepend=True))


def _names(layer: Any) -> tuple[str, ...]:
    """The names of the arguments of a layer that can come by position; none where any number can."""
    parameters = stock_arguments(type(layer)).values()
    if any(each.kind is each.VAR_POSITIONAL for each in parameters):
        return ()
    return tuple(each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD)


def _has_tokens(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 1


def _reads_batch(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._BatchNorm) or any(
        word in type(module).__name__ for word in ("DropPath", "StochasticDepth")
    )


# ---------------------------------------------------------------------- the hooks
def _pack(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
    states = args[0] if args else kwargs["hidden_states"]
    if states.shape[1] == 1:  # a step of decoding, which is compiled as a whole
        return None
    packed: Arguments | None = _packed(layer, args, kwargs)
    return packed


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _packed(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
    names = _names(layer)
    if len(args) > len(names):
        return None
    own: UnpaddedLayer = getattr(layer, UNPADDED)
    try:
        call = packed_call(layer, own, dict(zip(names, args, strict=False)) | kwargs)
    except RunsPadded as reason:
        if reason.args:
            warnings.warn(f"{type(layer).__name__} runs with its padding: {reason}", stacklevel=2)
        return None
    packed = tuple(call.arguments.pop(name) for name in names[: len(args)])
    if call.kind not in own.probed:
        both = tree_map(without_cache, ((args, kwargs), (packed, call.arguments)))
        check_packed(layer, own.name, call.mask.rows, *both)
        own.probed.add(call.kind)
    return packed, call.arguments


def _pad_back(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    masks = [each for each in (*args, *kwargs.values()) if isinstance(each, PackedMask)]
    return _padded(masks[0], output) if masks else output


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _padded(mask: PackedMask, output: Any) -> Any:
    rows, own = mask.rows, filling.get()

    def pad_back(each: Any) -> Any:
        if not _has_tokens(each) or each.shape[:2] != (1, mask.sizes[3]):
            return each
        padded = rows.pad_back(each)
        return padded if own is None else own.fill(padded, rows)

    return tree_map(pad_back, output)


def _check(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    found = getattr(output, "hidden_states", None) or ()
    if len({len(each) for each in found if isinstance(each, Tensor)}) > 1:
        was = f"is asked for, but layers of {type(model).__name__} give their own from within, of packed rows"
        refuse("output_hidden_states", was, "call use(model, unpad=False)")
    given = [*args[:1], *(kwargs.get(name) for name in _TOKENS)]
    lengths = [each.shape[1] for each in given if _has_tokens(each)]
    if not lengths or max(lengths) > 1:  # a step of decoding is compiled as a whole
        _checked(model, args, kwargs)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _checked(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    own: Pass = getattr(model, PASS)
    probed = sum(len(layer.probed) for layer in own.unpadded)
    if probed == own.checked or filling.get() is not None:
        return
    own.checked = probed
    if any(map(is_sharded, model.parameters())):  # its processes need not all come here
        was = "are not checked where weights are sharded: outputs pooled at padded tokens differ"
        warnings.warn(f"outputs of {type(model).__name__} {was}", stacklevel=2)
        return
    try:
        check_outputs(model, *tree_map(without_cache, (args, kwargs)))
    except BaseException:
        own.checked = 0
        raise
