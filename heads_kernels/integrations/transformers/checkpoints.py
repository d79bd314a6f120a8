"""Pruned and converted models of transformers: `save_pretrained` writes their shape, `from_pretrained` reads it."""

from __future__ import annotations

import os
from typing import Any

import torch

from heads_kernels.checks import refuse
from heads_kernels.heads.configs import NAME
from heads_kernels.heads.saving import RECORD, number_heads, restore_shape
from heads_kernels.integrations.transformers.classes import replace_classes

#: Arguments that say where a checkpoint is, and so where its config is.
_PLACE = (
    "cache_dir", "code_revision", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token",
    "trust_remote_code",
)  # fmt: skip


def from_pretrained(path: str | os.PathLike[str], cls: Any = None, **kwargs: Any) -> Any:
    """`cls.from_pretrained(path, **kwargs)` for checkpoints whose heads may have been pruned or converted.

    `hk.heads.prune` and `hk.convert` record the remaining and converted heads in `model.config.heads_kernels`, which
    `model.save_pretrained` saves. The model is created in that shape before its weights are loaded, so dtypes, devices,
    shards and task heads work as in transformers. transformers' own `from_pretrained` refuses most such checkpoints for
    their sizes; one converted with Ds = H D loads there with a warning about new weights, but computes wrong results. A
    model with converted layers has `attn_implementation="heads_kernels"`.

    Args:
        path: folder or name of any checkpoint, pruned, converted or neither.
        cls: a model class, or one of transformers' `AutoModel...`; default `AutoModel`.
        **kwargs: those of `cls.from_pretrained`, such as `dtype` and `attn_implementation`.

    Returns:
        The model; with `output_loading_info` what transformers returns.

    Raises:
        ValueError: the recorded shape does not fit the model; another `attn_implementation` is given for converted
            layers; the checkpoint has learned gates (save them with `hk.heads.save`, or fold them into the weights
            with `hk.heads.prune`).
    """
    from transformers import AutoModel

    model_class = _model_class(path, AutoModel if cls is None else cls, kwargs)
    with_info = kwargs.pop("output_loading_info", False)
    model, info = _in_shape(model_class).from_pretrained(path, output_loading_info=True, **kwargs)
    model.__class__ = model_class
    if gates := sorted(key for key in info["unexpected_keys"] if ".head_gate." in key):
        instead = "keep such models by hk.heads.save and load, or fold the gates in first by hk.heads.prune"
        refuse("path", f"is a checkpoint with learned gates, {gates[0]} the first", instead)
    number_heads(model.base_model, getattr(model.config, RECORD, {}))
    return (model, info) if with_info else model


def _model_class(path: str | os.PathLike[str], cls: Any, kwargs: dict[str, Any]) -> Any:
    """The class of the model that `cls` makes of this checkpoint."""
    from transformers import AutoConfig

    if not hasattr(cls, "_model_mapping"):  # no `AutoModel...`
        return cls
    place = {name: kwargs[name] for name in _PLACE if name in kwargs}
    config = kwargs.get("config") or AutoConfig.from_pretrained(path, **place)
    trust = {name: place[name] for name in ("trust_remote_code",) if name in place}
    with torch.device("meta"):
        return type(cls.from_config(config, **trust))


def _in_shape(model_class: Any) -> Any:
    """A subclass whose models get, when they are made, the shape that their config says."""

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        record = getattr(config, RECORD, {})
        if "converted" in record and config._attn_implementation is None:
            config._attn_implementation = NAME
        model_class.__init__(self, config, *args, **kwargs)
        if record:
            replace_classes(self)  # heads of some families are known in their replacements alone
        restore_shape(self.base_model, record)

    members = {"__init__": __init__, "__module__": model_class.__module__}
    return type(model_class.__name__, (model_class,), members)
