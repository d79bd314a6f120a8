"""Replace or record outputs of heads while a model runs: activation patching (Vig et al. 2020, Meng et al. 2022)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from heads_kernels.checks import check_rows, refuse, refuse_type
from heads_kernels.heads.layers import AttentionLayer, attention_layers, choose_layers, find_layer, heads_of_layers
from heads_kernels.heads.observers import observed
from heads_kernels.nn.attention_call import AttentionCall

#: What takes the place of a head's output.
Replacement: TypeAlias = Tensor | Literal["mean", "zero"]
#: `{layer: {head: replacement}}`, layers by index or by name.
ReplacementsByLayer: TypeAlias = Mapping[int, Mapping[int, Replacement]] | Mapping[str, Mapping[int, Replacement]]
#: Takes a call and the outputs of its heads `[B, T, H, Dv]`, after their gates; returns what goes on.
Edit: TypeAlias = Callable[[AttentionCall, Tensor], Tensor]


@contextmanager
def patch(model: nn.Module, heads: ReplacementsByLayer, rows: slice | Tensor | None = None) -> Iterator[None]:
    """In this block, outputs of heads are replaced before the output projection, after their gates.

        with torch.no_grad(), hk.heads.outputs(model) as clean:
            model(clean_ids)
        with hk.heads.patch(model, {5: {1: clean[5][0][:, :, 1]}}):
            logits = model(corrupted_ids)

    All other heads compute their own outputs, and gradients pass through the patched ones' replacements. Blocks may be
    nested, and the inner one sees what the outer one gives; a block acts on the thread that entered it alone. Under
    `torch.compile` the block breaks the graph. Do not checkpoint activations: what the backward pass computes again,
    perhaps on another thread, is not replaced.

    Args:
        model: as in `gate`.
        heads: `{layer: {head: replacement}}`, layers by index or name, heads by their current number. A replacement is
            a tensor that broadcasts to `[B, T, Dv]`, such as the output of another run (`outputs`); "mean", the mean of
            the head's own output over the real rows of the batch; or "zero".
        rows: the rows that are replaced: a slice without a step, or a bool tensor `[T]` or `[B, T]`. Default all.

    Raises:
        TypeError, ValueError: a layer or head does not exist; a replacement does not fit the output; the attention
            function of a transformers model is not this package's, or it checkpoints activations; a layer runs without
            calling its observer or changing the outputs of its heads, or did not run.
    """
    is_flags = isinstance(rows, Tensor) and rows.dtype == torch.bool and rows.dim() in (1, 2)
    if isinstance(rows, slice):
        check_rows(rows)
    elif rows is not None and not is_flags:
        refuse_type("rows", rows, "pass a slice, or a bool tensor [T] or [B, T]")
    there = attention_layers(model)
    _check_computed_once(model)
    heads_of_layers(there, heads)  # refuses what does not exist
    by_layer: dict[int, dict[int, Replacement]] = {}  # one named by index and by name has both
    for key, chosen in heads.items():
        layer = find_layer(there, key, "heads")
        if not isinstance(chosen, Mapping):
            refuse_type(f"heads[{key!r}]", chosen, "pass {head: replacement}")
        for head, replacement in chosen.items():
            _check_replacement(f"heads[{key!r}][{head!r}]", replacement)
        if chosen:
            by_layer.setdefault(layer.index, {}).update(chosen)
    ran: set[int] = set()  # indices of layers
    edits = {there[index]: _replacing(there[index], chosen, rows, ran) for index, chosen in by_layer.items()}
    with edited(model, edits):
        yield
    for layer in edits:
        if layer.index not in ran:
            refuse(str(layer), "did not run in the block", "run the model there, or leave it out")


@contextmanager
def outputs(model: nn.Module, layers: Iterable[int | str] | None = None) -> Iterator[dict[int, list[Tensor]]]:
    """In this block, the outputs of heads are recorded: `{index of the layer: [output of each run]}`.

    An output is `[B, T, H, Dv]`, after gates and patches and before the output projection (TransformerLens: `hook_z`),
    with its graph unless the model runs under `torch.no_grad()`. They are not copied. Errors are those of `patch`.

    Args:
        model: as in `gate`.
        layers: a list of indices or names of layers; default all that have heads.
    """
    asked = [layer for layer in choose_layers(attention_layers(model), layers) if layer.num_heads]
    _check_computed_once(model)
    found: dict[int, list[Tensor]] = {layer.index: [] for layer in asked}

    def record(runs: list[Tensor], call: AttentionCall, heads: Tensor) -> Tensor:
        runs.append(heads)
        return heads

    with edited(model, {layer: partial(record, found[layer.index]) for layer in asked}):
        yield found


def _check_computed_once(model: nn.Module) -> None:
    """Refuse a model of transformers whose layers are computed again in the backward pass, outside of the block."""
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False) and module.training:
            kind = type(module).__name__
            was = f"checkpoints activations ({kind}): the backward pass computes them without the block"
            refuse("model", was, "call gradient_checkpointing_disable(), or eval()")


@contextmanager
def edited(model: nn.Module, edits: Mapping[AttentionLayer, Edit]) -> Iterator[None]:
    """In this block, the outputs of these layers go through edits."""
    with observed(model, edits.keys(), lambda layer, call: partial(edits[layer], call)):
        yield


# ---------------------------------------------------------------------- replacements
def _replacing(
    layer: AttentionLayer, chosen: dict[int, Replacement], rows: slice | Tensor | None, ran: set[int]
) -> Edit:
    """The edit of a layer, which adds its index to `ran`."""

    def replace(call: AttentionCall, heads: Tensor) -> Tensor:
        ran.add(layer.index)
        changed = heads.clone()
        for head, replacement in chosen.items():
            changed[:, :, head] = _values(f"{layer}: head {head}", replacement, heads[:, :, head], call)
        if rows is None:
            return changed
        inside = _inside(rows, heads.shape[0], heads.shape[1], heads.device)
        return torch.where(inside[..., None, None], changed, heads)

    return replace


def _values(name: str, replacement: Replacement, own: Tensor, call: AttentionCall) -> Tensor:
    """What replaces the output `own` `[B, T, Dv]`; broadcasts to it."""
    if isinstance(replacement, Tensor):
        if replacement.device != own.device:
            refuse(name, f"is replaced by a tensor on {replacement.device}", f"move it to {own.device}")
        sizes = zip(reversed(replacement.shape), reversed(own.shape), strict=False)
        if any(got not in (1, size) for got, size in sizes):
            was = f"is replaced by a tensor of shape {list(replacement.shape)}"
            refuse(name, was, f"pass one that broadcasts to its output, {list(own.shape)}")
        return replacement.to(own.dtype)
    if replacement == "zero":
        return own.new_zeros(())
    real = call.real_queries[..., None]
    wide = torch.where(real, own, 0.0).to(torch.promote_types(own.dtype, torch.float32))
    return (wide.sum((0, 1)) / real.sum().clamp(min=1)).to(own.dtype)


def _inside(rows: slice | Tensor, B: int, T: int, device: torch.device) -> Tensor:
    """bool `[B or 1, T]`."""
    if isinstance(rows, slice):
        inside = torch.zeros(1, T, dtype=torch.bool, device=device)
        inside[:, rows] = True
        return inside
    inside = rows if rows.dim() == 2 else rows[None]
    if inside.shape[1] != T or inside.shape[0] not in (1, B):
        refuse("rows", f"has shape {list(rows.shape)}", f"pass [{T}] or [{B}, {T}], a flag for each row of the pass")
    return inside.to(device)


def _check_replacement(name: str, replacement: Any) -> None:
    is_short = isinstance(replacement, (str, int, float))
    was = f"is {replacement!r}" if is_short else f"is a {type(replacement).__name__}"
    fits = isinstance(replacement, str) and replacement in ("mean", "zero")
    if isinstance(replacement, Tensor):
        was = f"is a tensor of {replacement.dtype} with {replacement.dim()} dimensions"
        fits = replacement.is_floating_point() and replacement.dim() <= 3
    if not fits:
        refuse(name, was, 'pass a floating tensor that broadcasts to [B, T, Dv], "mean" or "zero"', TypeError)
