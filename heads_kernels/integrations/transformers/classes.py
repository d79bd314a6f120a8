"""The classes of transformers that the package replaces, what replaces them, and the patches for models made later."""

from __future__ import annotations

import importlib
import sys
from functools import cache
from typing import Any, Final

from torch import nn
from transformers.monkey_patching import (
    get_patch_mapping,
    register_patch_mapping,
    unregister_patch_mapping,
)

from heads_kernels.checks import refuse
from heads_kernels.heads.layouts import class_calls_interface
from heads_kernels.integrations.transformers.biased import BIASED
from heads_kernels.integrations.transformers.head_masks import RowsOfHeadMask
from heads_kernels.integrations.transformers.output_gated import WAYS
from heads_kernels.integrations.transformers.replacement import Replacement, Replacing

#: Stock class -> what stands before it, and its folder or file in transformers.models.
_REPLACED: Final[dict[str, tuple[type[Replacement], str]]] = {
    **WAYS,
    **BIASED,
    "AlbertTransformer": (RowsOfHeadMask, "albert"),
}


def replacement(stock: Any) -> Any:
    """The class that replaces the class `stock`, the same every time; None where there is none.

    A stock class that calls the attention function stays, where its forward has arguments that the repeated one does
    not know, or where it is replaced only because other releases compute attention themselves.
    """
    if stock.__name__ not in _REPLACED or not stock.__module__.startswith("transformers."):
        return None
    made = _made(stock)
    stays = class_calls_interface(stock) and (made.calls_operator or made.unknown_arguments())
    return None if stays else made


def replace_classes(model: nn.Module) -> None:
    """Replace the classes of a model's modules; with another attention function they run as stock modules."""
    for module in model.modules():
        if (made := replacement(type(module))) is not None:
            module.__class__ = made


def serves(model_class: type) -> bool:
    """Whether the file of a model has attention of its own that is replaced: `use` serves it, its name does not."""
    own = vars(sys.modules[model_class.__module__])
    replaced = (replacement(own[name]) for name in _REPLACED if name in own)
    return any(made is not None and made.calls_operator for made in replaced)


def replacement_of(name: str) -> Any:
    """The class that replaces the stock class of this name; None where the installed transformers has it not."""
    file = _REPLACED[name][1]
    file = file if "." in file else f"{file}.modeling_{file}"
    try:
        source = importlib.import_module(f"transformers.models.{file}")
    except ModuleNotFoundError:
        return None
    stock = getattr(source, name, None)
    return None if stock is None else replacement(stock)


@cache
def _made(stock: Any) -> Any:
    before, _ = _REPLACED[stock.__name__]
    members = {"stock": stock, "__module__": __name__, "__doc__": before.__doc__}
    return Replacing(f"{before.prefix}{stock.__name__}", (before, stock), members)


def __getattr__(name: str) -> Any:
    """`FusedAfmoeAttention` and the like, which pickles of whole models name."""
    for stock, (before, _) in _REPLACED.items():
        if name == f"{before.prefix}{stock}" and (made := replacement_of(stock)) is not None:
            return made
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


#: Stock class -> its pattern. Patterns are searched for anywhere in a name, so these have their ends.
_PATTERNS: Final = {name: f"^{name}$" for name in WAYS}


def register_patches() -> None:
    """Give models created later by `from_pretrained` and `from_config` fused layers, by transformers' patch mapping.

    The layers run fused if the model's attention implementation is "heads_kernels", otherwise as stock layers. Existing
    models are not changed: call `use` for them.

    Raises:
        ValueError: the patches are registered already.
    """
    if any(pattern in get_patch_mapping() for pattern in _PATTERNS.values()):
        was = "come from register_patches already"
        refuse("patches", was, "call it once, and unregister_patches() to undo it")
    fused = {pattern: replacement_of(name) for name, pattern in _PATTERNS.items()}
    register_patch_mapping({pattern: made for pattern, made in fused.items() if made is not None})


def unregister_patches() -> None:
    """Undo `register_patches`; models created in between keep their classes.

    Raises:
        ValueError: the patches are not registered.
    """
    known = get_patch_mapping()
    patterns = [pattern for pattern in _PATTERNS.values() if pattern in known]
    if not patterns:
        refuse("patches", "are not registered", "call register_patches() first")
    unregister_patch_mapping(patterns)
