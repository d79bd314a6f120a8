"""Fused layers for models that are made later, through transformers' own patch mapping."""

from __future__ import annotations

from typing import Final

from transformers.monkey_patching import (
    get_patch_mapping,
    register_patch_mapping,
    unregister_patch_mapping,
)

from heads_kernels.errors import refuse
from heads_kernels.integrations.transformers.classes import replacement_of
from heads_kernels.integrations.transformers.output_gated import WAYS

#: Stock class -> its pattern. Patterns are searched for anywhere in a name, so these have their ends.
_PATTERNS: Final = {name: f"^{name}$" for name in WAYS}


def register_patches() -> None:
    """Let models that are made from now on by `from_pretrained` and `from_config` have fused layers.

    It goes through transformers' own patch mapping. The layers run fused where the model's attention implementation is
    "heads_kernels", and as stock layers elsewhere. Models that are there already are not touched: `use` is for them.

    Raises:
        ValueError: the patches are registered already.
    """
    if any(pattern in get_patch_mapping() for pattern in _PATTERNS.values()):
        was = "come from register_patches already"
        refuse("patches", was, "call it once, and unregister_patches() to undo it")
    fused = {pattern: replacement_of(name) for name, pattern in _PATTERNS.items()}
    register_patch_mapping({pattern: made for pattern, made in fused.items() if made is not None})


def unregister_patches() -> None:
    """Undo `register_patches`; models that were made in between keep their classes.

    Raises:
        ValueError: the patches are not registered.
    """
    known = get_patch_mapping()
    patterns = [pattern for pattern in _PATTERNS.values() if pattern in known]
    if not patterns:
        refuse("patches", "are not registered", "call register_patches() first")
    unregister_patch_mapping(patterns)
