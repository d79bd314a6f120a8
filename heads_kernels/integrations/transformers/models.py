"""Ways of a transformers model to the operators: by `use`, which `release` undoes, or from a checkpoint of a pruned or
converted model."""

from __future__ import annotations

import os
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from heads_kernels.checks import check_flag, refuse, refuse_type
from heads_kernels.heads.interface import NAME, calls_interface, own_configs
from heads_kernels.heads.reshape import adds_bias_of_all_heads
from heads_kernels.heads.saving import RECORD, number_heads, record_in_config, restore_shape
from heads_kernels.integrations.transformers.head_masks import PLACE
from heads_kernels.integrations.transformers.passes import BEFORE, PASS, watch
from heads_kernels.integrations.transformers.support import check_model, configs_of, replace_forwards, restore_forward
from heads_kernels.integrations.transformers.unpadding import UNPADDED, unpad_layers, unpaddable_layers
from heads_kernels.snapshot import kept_on_error

Model = TypeVar("Model", bound=nn.Module)


def use(model: Model, *, unpad: bool = False) -> Model:
    """Run the attention of a transformers model on `hk.gated_attention`, in place; returns it. `release` undoes it.

    All sub-configs get `attn_implementation="heads_kernels"`. Layers that gate their output run gate and attention as
    one op. `model(..., head_mask=...)` works again, and `decoder_head_mask=` and `cross_attn_head_mask=`:
    `[H]`, or `[L, H]` with a row per layer of the stack, 0 to close a head. The model gets its own copies of its
    configs. Submodels that are in use already become parts of the whole.

    Call it again after layers were moved, removed or added: rows of head masks are those of the layers that it found.
    `save_pretrained` records pruned heads by the layers that the model has then, except in a model that had no pruned
    layer before, in a part of a model taken out or copied alone, and in a loaded pickle: there too, call it again.

    Args:
        model: a `PreTrainedModel`, in train or eval mode. If it is wrapped (`PeftModel`, `SentenceTransformer`, a
            pipeline, `torch.compile(model)`, `DistributedDataParallel`), pass the inner model.
        unpad: whether layers compute only the real tokens of a batch with a padding mask, packed into one row. Layers
            then give zeros for padding, and the same as before for real tokens. The first packed call of each layer is
            compared with a padded one. Under `torch.compile` the graph breaks around each layer, except where rows have
            one token, as in decoding. Call `use` again to switch it.

    Raises:
        TypeError: `model` is not a `PreTrainedModel`; the message names those that it contains. `unpad` is not a bool.
        ValueError: the model has no attention, or computes attention, or with masks, in its own code; with `unpad`, its
            layers get no padding mask. In a forward pass: a layer does not work token by token. On an error, and on
            Ctrl-C, the model is unchanged.
    """
    if not isinstance(model, PreTrainedModel):
        refuse_type("model", model, _instead_of(model))
    check_flag("unpad", unpad)
    check_model(model)
    layers = unpaddable_layers(model) if unpad else {}
    with kept_on_error(model):  # with the old configs, which are not written to
        own_configs(model)
        replace_forwards(model)
        before = {
            module: [config._attn_implementation for config in configs]
            for module in model.modules()
            if (configs := configs_of(module))
        }
        for module, implementations in before.items():
            vars(module).setdefault(BEFORE, implementations)
            for config in configs_of(module):
                config._attn_implementation = NAME
        _unhook(model)
        watch(model)
        unpad_layers(model, layers)
        record_in_config(model)
    return model


def release(model: Model) -> Model:
    """Undo `use` for a model or a part of one, which is then a stock model.

    A head mask for a released part of a model in use raises an error, since no layer reads it.

    Args:
        model: a model in use, or a part or copy of one.

    Raises:
        ValueError: the model is not in use; heads have gates, which stock attention would ignore; layers are converted,
            whose shared queries and keys stock attention cannot read; or heads were pruned in a family with position
            biases, which stock attention would add for all heads.
    """
    if BEFORE not in vars(model):
        refuse("model", f"({type(model).__name__}) is not in use", "call use(model) first")
    _check_stock_would_do(model)
    with kept_on_error(model):
        own_configs(model)
        for module in model.modules():
            before = vars(module).pop(BEFORE, [])
            for config, implementation in zip(configs_of(module), before, strict=False):
                if implementation != NAME:  # a layer that was added later shares a config in use
                    config._attn_implementation = {"": implementation}  # not of those nested in it
            restore_forward(module)
        _unhook(model)
    return model


def _unhook(model: nn.Module) -> None:
    """Undo `watch` and `unpad_layers`."""
    for module in model.modules():
        for name in (PLACE, PASS, UNPADDED):
            for handle in getattr(vars(module).pop(name, None), "handles", ()):
                handle.remove()


# ---------------------------------------------------------------------- from a checkpoint
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
    if gates := sorted(key for key in info["unexpected_keys"] if ".head_gate." in key):
        instead = "keep such models by hk.heads.save and load, or fold the gates in first by hk.heads.prune"
        refuse("path", f"is a checkpoint with learned gates, {gates[0]} the first", instead)
    number_heads(model.base_model, getattr(model.config, RECORD, {}))
    record_in_config(model)
    return (model, info) if with_info else model


def _model_class(path: str | os.PathLike[str], cls: Any, kwargs: dict[str, Any]) -> Any:
    """The class of the model that `cls` makes of this checkpoint."""
    from transformers import AutoConfig

    if not hasattr(cls, "from_config"):  # no `AutoModel...`
        return cls
    config = kwargs.get("config")
    if config is None:
        config, _ = AutoConfig.from_pretrained(path, return_unused_kwargs=True, **kwargs)
    trust = {name: kwargs[name] for name in ("trust_remote_code",) if name in kwargs}
    with torch.device("meta"):
        return type(cls.from_config(config, **trust))


def _in_shape(model_class: Any) -> Any:
    """What transformers makes a model of `model_class` by, in the shape that the config says."""

    def __new__(cls: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        record = getattr(config, RECORD, {})
        if "converted" in record and config._attn_implementation is None:
            config._attn_implementation = NAME
        model = model_class(config, *args, **kwargs)
        if record:
            replace_forwards(model)  # heads of some families are known by their replacements alone
        restore_shape(model.base_model, record, partly=True)
        return model

    members = {"__new__": __new__, "__module__": model_class.__module__}
    return type(model_class.__name__, (model_class,), members)


# ---------------------------------------------------------------------- what is refused
def _instead_of(holder: Any) -> str:
    """What to pass for an object that is no model of transformers, but may hold some."""
    held: list[str] = []
    for name, module in holder.named_modules() if isinstance(holder, nn.Module) else ():
        is_part = any(name.startswith(f"{outer}.") for outer in held)
        if isinstance(module, PreTrainedModel) and not is_part:
            held.append(name)
    if not held:
        return "pass a transformers PreTrainedModel; docs/transformers.md lists the tested families"
    calls = " and ".join(f"use(model.get_submodule({name!r}))" for name in held)
    return f"pass the model that it holds, {calls}: it is changed in place"


def _check_stock_would_do(model: nn.Module) -> None:
    """Nothing of the model is left that stock attention would not know of."""
    for name, module in model.named_modules():
        if calls_interface(module) and getattr(module, "head_gate", None) is not None:
            was = f"has gates on the heads of {name!r}, which stock attention ignores"
            refuse("model", was, "call hk.heads.reopen, ungate or prune first")
        if calls_interface(module) and getattr(module, "mixing", None) is not None:
            was = f"has heads that share queries and keys in {name!r}, which stock attention cannot read"
            refuse("model", was, "keep it in use")
        if hasattr(module, "kept_heads") and adds_bias_of_all_heads(module):
            was = f"has fewer heads in {name!r} than the position bias that stock attention adds"
            refuse("model", was, "keep it in use")
