"""A transformers model put on the operators with one line, and taken off again."""

from __future__ import annotations

from typing import Final, TypeVar

from torch import nn
from transformers import PreTrainedModel

from heads_kernels.errors import refuse
from heads_kernels.heads.layers import NAME
from heads_kernels.heads.record import own_config
from heads_kernels.integrations.transformers.classes import replacement
from heads_kernels.integrations.transformers.passes import unwatch, watch
from heads_kernels.integrations.transformers.replacement import Replacement
from heads_kernels.integrations.transformers.support import (
    calls_interface,
    check_model,
    configs_of,
)
from heads_kernels.integrations.transformers.tested import TESTED

Model = TypeVar("Model", bound=nn.Module)

#: The attribute of every module in use that holds configs: what their attention implementations were.
_BEFORE: Final = "_attn_implementations_before"


def use(model: Model) -> Model:
    """Run the attention of a transformers model on `hk.gated_attention`, in place; `release` takes it back.

    All sub-configs get `attn_implementation="heads_kernels"`. Layers that gate their output run gate and attention as
    one op (`TESTED`). Every attention layer learns which row of `head_mask=` (and of `decoder_head_mask=` and
    `cross_attn_head_mask=`) is its own, so that `model(..., head_mask=...)` works again: `[H]`, or `[L, H]` with a row
    for each layer of the stack, 0 where a head is closed. The model gets configs of its own, copies of those that it
    was made from. Parts of it that are in use already become parts of the whole.

    Args:
        model: a `PreTrainedModel`, in train or eval mode.

    Returns:
        The model itself.

    Raises:
        TypeError: it is no `PreTrainedModel`.
        ValueError: it is in use already, or transformers does not let other functions compute its attention.
    """
    if not isinstance(model, PreTrainedModel):
        was, instead = f"is a {type(model).__name__}", "pass a transformers PreTrainedModel"
        refuse("model", was, f"{instead}; tested families: {', '.join(TESTED)}", TypeError)
    if _BEFORE in vars(model):
        refuse("model", f"({type(model).__name__}) is in use already", "call release(model) first")
    check_model(model)
    own_config(model)
    before = {
        module: [config._attn_implementation_internal for config in configs]
        for module in model.modules()
        if (configs := configs_of(module))
    }
    for module, implementations in before.items():
        vars(module).setdefault(_BEFORE, implementations)
        for config in configs_of(module):
            config._attn_implementation_internal = NAME
    watch(model)
    for module in model.modules():
        if (made := replacement(type(module))) is not None:
            module.__class__ = made
    return model


def release(model: Model) -> Model:
    """Take back everything that `use` did to a model or to a part of one, which is stock then.

    Layers that came fused by `register_patches` are stock layers then too. A part that is released of a model in use
    ignores head masks, as stock layers do.

    Args:
        model: in use, by itself or as a part or a copy of what is.

    Raises:
        ValueError: the model is not in use; heads of it have gates, which stock attention would ignore; layers were
            converted, whose shared queries and keys stock attention can not read; or heads of a family with position
            biases were pruned, which stock attention would add for all heads.
    """
    if _BEFORE not in vars(model):
        refuse("model", f"({type(model).__name__}) is not in use", "call use(model) first")
    _check_stock_would_do(model)
    own_config(model)
    for module in model.modules():
        before = vars(module).pop(_BEFORE, [])
        for config, implementation in zip(configs_of(module), before, strict=False):
            config._attn_implementation_internal = implementation
        if isinstance(module, Replacement):
            module.__class__ = module.stock  # type: ignore[assignment]
    unwatch(model)
    return model


def _check_stock_would_do(model: nn.Module) -> None:
    """Nothing of the model is left that stock attention would not know of."""
    for name, module in model.named_modules():
        if calls_interface(module) and getattr(module, "head_gate", None) is not None:
            was = f"has gates on the heads of {name!r}, which stock attention ignores"
            refuse("model", was, "call hk.heads.reopen, ungate or prune first")
        if calls_interface(module) and getattr(module, "mixing", None) is not None:
            was = f"has heads that share queries and keys in {name!r}, which stock attention can not read"
            refuse("model", was, "keep it in use")
        if hasattr(module, "kept_heads") and hasattr(module, "has_relative_attention_bias"):  # T5
            was = f"has fewer heads in {name!r} than the position bias that stock attention adds"
            refuse("model", was, "keep it in use")
