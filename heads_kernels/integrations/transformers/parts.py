"""transformers models that are given a part of every sequence: their attention runs under a `ContextParallel`.

What a model computes of a part alone must be what it computes of whole sequences, so a model is tried when it gets its
context, and its calls are checked.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any, Final

import torch
from transformers import Cache, PreTrainedModel

from heads_kernels.checks import refuse
from heads_kernels.dtensor import is_sharded
from heads_kernels.heads.interface import NAME, calls_interface
from heads_kernels.integrations.transformers.head_masks import PLACE
from heads_kernels.integrations.transformers.packed_check import differ, outputs_of, uncached
from heads_kernels.integrations.transformers.support import family
from heads_kernels.integrations.transformers.unpadding import UNPADDED
from heads_kernels.nn.multihead import Context
from heads_kernels.snapshot import undone

#: Tokens of a process in the trial of `split_attention`: enough for positions to matter.
_TRIAL: Final = 8


def split_attention(model: PreTrainedModel, context: Context) -> list[Any]:
    """The attention modules of a model that `context` may be given to; checks the calls of the model from now on.

    The model is tried: its outputs for parts must be those for whole sequences, else it is refused and left as it was.
    """
    attention = _attention(model)
    if context.mesh.ndim != 1 or any(map(is_sharded, model.parameters())):
        was = f"is a {family(model)} with DTensors, or mesh has two dimensions"
        refuse("module", was, "pass mesh['cp'], without tensor parallelism and before fully_shard")
    with undone(model, partial(_give, attention, context)):
        _try(model, attention, context)
    model.register_forward_pre_hook(_check_call, with_kwargs=True)
    return attention


def _attention(model: PreTrainedModel) -> list[Any]:
    """The attention modules of a model that may be given parts."""
    name = family(model)
    if model.config.is_encoder_decoder:
        refuse("module", f"is a {name}, an encoder-decoder", "split a decoder or an encoder alone")
    if any(hasattr(module, UNPADDED) for module in model.modules()):
        refuse("module", f"is a {name} in use with unpad=True", "call use(model, unpad=False) first")
    attention = [module for module in model.modules() if hasattr(module, PLACE)]
    if not attention or model.config._attn_implementation != NAME:
        was = f"is a {name} whose attention is not that of heads_kernels"
        refuse("module", was, "call hk.integrations.transformers.use(model) first")
    missing = {"input_ids", "position_ids"} - inspect.signature(model.forward).parameters.keys()
    if missing:
        was = f"is a {name}, which takes no {' and no '.join(sorted(missing))}"
        refuse("module", was, "use a model whose tokens and positions are arguments")
    return attention


def _give(attention: list[Any], context: Context | None) -> None:
    for module in attention:
        module.context = context


def _try(model: PreTrainedModel, attention: list[Any], context: Context) -> None:
    """Compare what a model gives for parts with what it gives for whole sequences, and refuse it if they differ."""
    mesh, device = context.mesh, model.device
    T = _TRIAL * mesh.size()
    positions = torch.arange(T, device=device)[None]
    embeddings: Any = model.get_input_embeddings()
    whole = {
        "input_ids": (7 * positions + 3) % embeddings.num_embeddings,
        "position_ids": positions,
        "attention_mask": torch.ones_like(positions),
    }
    part = {name: context.split(each, 1) for name, each in whole.items()}
    with undone(model, partial(_give, attention, None)):
        (expected,) = outputs_of(model, device, ((), uncached(model, whole)))
    (found,) = outputs_of(model, device, ((), uncached(model, part)))
    expected = [context.split(e, 1) if e.shape[:2] == (1, T) else e for e in expected]
    is_same, worst = differ(model, expected, found, (1, _TRIAL), T)
    failed = torch.tensor(float(not is_same), device=device)
    torch.distributed.all_reduce(failed, group=mesh.get_group())
    if failed:
        was = f"is a {family(model)}, whose outputs for parts are not those for whole sequences"
        was += f" (relative difference {worst:.1e}), or not one for each token"
        refuse("module", was, "use a model that works token by token outside of attention")


def _check_call(
    model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Refuse what a model cannot compute from a part."""
    attention = [module for module in model.modules() if calls_interface(module)]
    contexts: list[Context | None] = [getattr(module, "context", None) for module in attention]
    context = next((each for each in contexts if each is not None), None)
    if context is None:
        return None
    if None in contexts:  # a layer that was added since
        was = f"is a {family(model)}, in which a {type(attention[contexts.index(None)]).__name__} has no context"
        refuse("module", was, "set context of every attention layer, or None in all of them to undo")
    given = inspect.signature(model.forward).bind(*args, **kwargs).arguments | kwargs
    given = {name: each for name, each in given.items() if each is not None}
    tokens = given.get("input_ids", given.get("inputs_embeds"))
    if tokens is not None:
        context.whole_length(tokens.shape[1])
    for name, instead in (
        ("labels", "compute the loss of the logits with labels that were shifted before they were split"),
        ("use_cache", "decode without context parallelism"),
    ):  # fmt: skip
        if given.get(name, False) is not False:
            refuse(name, "is given with a part of a sequence", instead)
    for name, each in given.items():
        if isinstance(each, Cache):
            refuse(name, f"is a {type(each).__name__}, with a part of a sequence", "decode without context parallelism")
    if "position_ids" not in given:
        instead = "pass context.split(positions, 1) of the positions [1, T] of whole sequences"
        refuse("position_ids", "is not given", instead)
    mask = given.get("attention_mask")
    if tokens is not None and mask is not None and mask.shape != tokens.shape[:2]:
        was = f"has shape {list(mask.shape)}, but this process has tokens {list(tokens.shape[:2])}"
        refuse("attention_mask", was, "pass context.split(attention_mask, 1)")
    return args, uncached(model, kwargs)
