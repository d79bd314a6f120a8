"""The classes of transformers whose forwards the package replaces, and by what."""

from __future__ import annotations

from typing import Any, Final

from torch import nn

from heads_kernels.heads.layouts import class_calls_interface
from heads_kernels.integrations.transformers.biased import BIASED
from heads_kernels.integrations.transformers.head_masks import RowsOfHeadMask
from heads_kernels.integrations.transformers.output_gated import OUTPUT_GATED
from heads_kernels.integrations.transformers.replacement import Replacement

#: By the name of the class.
_REPLACED: Final[dict[str, type[Replacement]]] = {
    **OUTPUT_GATED,
    **BIASED,
    "AlbertTransformer": RowsOfHeadMask,
}


def replacement(stock: Any) -> type[Replacement] | None:
    """What replaces the forward of a class; None where it stays.

    A class that calls the attention function stays, where its forward has arguments that the repeated one does not
    know, or where it is replaced only because other releases compute attention themselves.
    """
    kind = _REPLACED.get(stock.__name__)
    if kind is None or not stock.__module__.startswith("transformers."):
        return None
    stays = class_calls_interface(stock) and (kind.calls_operator or kind.unknown_arguments(stock))
    return None if stays else kind


def replace_forwards(model: nn.Module) -> None:
    """Replace forwards of a model's modules; with another attention function they run the stock forward.

    A module whose forward somebody else replaced keeps that one.
    """
    for module in model.modules():
        if "forward" not in vars(module) and (kind := replacement(type(module))) is not None:
            forward = kind(module)
            for name in kind.beside:
                setattr(module, name, getattr(forward, name))
            module.forward = forward


def restore_forward(module: nn.Module) -> None:
    """Undo `replace_forwards` for one module."""
    if isinstance(forward := vars(module).get("forward"), Replacement):
        for name in ("forward", *forward.beside):
            delattr(module, name)
