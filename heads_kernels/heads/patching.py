"""Replace or record outputs of heads while a model runs: activation patching (Vig et al. 2020, Meng et al. 2022)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Final, Literal, TypeAlias

import torch
from torch import Tensor, nn

from heads_kernels.checks import refuse
from heads_kernels.heads.gating import check_runs_operators
from heads_kernels.heads.layers import (
    AttentionLayer,
    attention_layers,
    choose_layers,
    find_layer,
    heads_of_layers,
)
from heads_kernels.nn.attention_call import AttentionCall

#: What takes the place of a head's output.
Replacement: TypeAlias = Tensor | Literal["mean", "zero"]
#: `{layer: {head: replacement}}`, layers by index or by name.
ReplacementsByLayer: TypeAlias = (
    Mapping[int, Mapping[int, Replacement]] | Mapping[str, Mapping[int, Replacement]]
)
#: Takes the outputs of a layer's heads `[B, T, H, Dv]`, after their gates, and the call; returns what goes on.
Edit: TypeAlias = Callable[[Tensor, AttentionCall], Tensor]

#: The edits of this thread, in the order of their blocks.
_ACTIVE: Final[ContextVar[tuple[tuple[nn.Module, Edit], ...]]] = ContextVar("edits", default=())
_LOCK: Final = threading.Lock()


@contextmanager
def patch(
    model: nn.Module, heads: ReplacementsByLayer, rows: slice | Tensor | None = None
) -> Iterator[None]:
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
        model: with attention layers (`attention_layers`); a transformers model after
            `hk.integrations.transformers.use(model)`.
        heads: `{layer: {head: replacement}}`, layers by index or name, heads by their current number. A replacement is
            a tensor that broadcasts to `[B, T, Dv]`, such as the output of another run (`outputs`); "mean", the mean of
            the head's own output over the real rows of the batch; or "zero".
        rows: the rows that are replaced: a slice, or a bool tensor `[T]` or `[B, T]`. Default all.

    Raises:
        TypeError, ValueError: a layer or head does not exist; a replacement does not fit the output; the attention
            function of a transformers model is not this package's, or it checkpoints activations; a layer runs without
            calling `edit_heads`, or did not run.
    """
    is_flags = isinstance(rows, Tensor) and rows.dtype == torch.bool and rows.dim() in (1, 2)
    if rows is not None and not isinstance(rows, slice) and not is_flags:
        instead = "pass a slice, or a bool tensor [T] or [B, T]"
        refuse("rows", f"is a {type(rows).__name__}", instead, TypeError)
    there = attention_layers(model)
    _check_computed_once(model)
    heads_of_layers(there, heads)  # refuses what does not exist
    edits = []
    ran: set[int] = set()  # indices of layers
    for key, chosen in heads.items():
        layer = find_layer(there, key, "heads")
        if not isinstance(chosen, Mapping):
            was = f"is a {type(chosen).__name__}"
            refuse(f"heads[{key!r}]", was, "pass {head: replacement}", TypeError)
        for head, replacement in chosen.items():
            _check_replacement(f"heads[{key!r}][{head!r}]", replacement)
        if chosen:
            edits.append((layer, _replacing(layer, dict(chosen), rows, ran)))
    with edited(edits):
        yield
    for layer, _ in edits:
        if layer.index not in ran:
            refuse(str(layer), "did not run in the block", "run the model there, or leave it out")


@contextmanager
def outputs(
    model: nn.Module, layers: Iterable[int | str] | None = None
) -> Iterator[dict[int, list[Tensor]]]:
    """In this block, the outputs of heads are recorded: `{index of the layer: [output of each run]}`.

    An output is `[B, T, H, Dv]`, after gates and patches and before the output projection (TransformerLens: `hook_z`),
    with its graph unless the model runs under `torch.no_grad()`. The outputs are not copied.

    Args:
        model: as in `patch`.
        layers: a list of indices or names of layers; default all that have heads.

    Raises:
        TypeError, ValueError: as in `patch`.
    """
    chosen = choose_layers(attention_layers(model), layers)
    _check_computed_once(model)
    asked = [layer for layer in chosen if layer.num_heads]
    found: dict[int, list[Tensor]] = {layer.index: [] for layer in asked}

    def record(runs: list[Tensor], heads: Tensor, call: AttentionCall) -> Tensor:
        runs.append(heads)
        return heads

    with edited([(layer, partial(record, found[layer.index])) for layer in asked]):
        yield found


def _check_computed_once(model: nn.Module) -> None:
    """Refuse a model of transformers whose layers are computed again in the backward pass, outside of the block."""
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False) and module.training:
            kind = type(module).__name__
            was = f"checkpoints activations ({kind}): the backward pass computes them without the block"
            refuse("model", was, "call gradient_checkpointing_disable(), or eval()")


@contextmanager
def edited(edits: Iterable[tuple[AttentionLayer, Edit]]) -> Iterator[None]:
    """In this block and thread, the outputs of each layer's heads go through its edit."""
    edits = list(edits)
    for layer, _ in edits:
        check_runs_operators(layer)
    slots = []
    token = None
    try:
        for layer, _ in edits:
            slots.append(_Slot.enter(layer))
        own = tuple((layer.module, edit) for layer, edit in edits)
        token = _ACTIVE.set((*_ACTIVE.get(), *own))
        yield
    finally:
        if token is not None:
            _ACTIVE.reset(token)
        for slot in slots:
            slot.leave()


class _Slot:
    """The attribute `edit_heads` of a module, there as long as a thread edits its heads."""

    def __init__(self, layer: AttentionLayer) -> None:
        self._layer, self._users, self._was_called = layer, 0, False
        self._hook = layer.module.register_forward_hook(self._check_called)

    @classmethod
    def enter(cls, layer: AttentionLayer) -> _Slot:
        with _LOCK:
            slot = vars(layer.module).get("edit_heads")
            if slot is None:
                slot = layer.module.edit_heads = cls(layer)
            slot._users += 1
            return slot  # type: ignore[no-any-return]

    def leave(self) -> None:
        with _LOCK:
            self._users -= 1
            if not self._users:
                del self._layer.module.edit_heads
                self._hook.remove()

    def __call__(self, heads: Tensor, call: AttentionCall) -> Tensor:
        self._was_called = True
        for module, edit in _ACTIVE.get():
            if module is self._layer.module:
                heads = edit(heads, call)
        return heads

    def _check_called(self, module: nn.Module, *_: object) -> None:
        """A forward hook of the layer."""
        if not self._was_called:
            was = f"is a {type(module).__name__}, which does not call its edit_heads"
            instead = "unless it is None, its forward must pass the outputs of the heads and the call to it"
            refuse(str(self._layer), was, instead)


# ---------------------------------------------------------------------- replacements
def _replacing(
    layer: AttentionLayer,
    chosen: dict[int, Replacement],
    rows: slice | Tensor | None,
    ran: set[int],
) -> Edit:
    """The edit of a layer, which adds its index to `ran`."""
    numbers = list(chosen)

    def replace(heads: Tensor, call: AttentionCall) -> Tensor:
        ran.add(layer.index)
        B, T, _, Dv = heads.shape
        made = []
        for head, replacement in chosen.items():
            new = _values(f"{layer}: head {head}", replacement, heads[:, :, head], call)
            made.append(new.expand(B, T, Dv))
        values = torch.stack(made, 2)
        if rows is not None:
            inside = _inside(rows, B, T, heads.device)
            values = torch.where(inside[..., None, None], values, heads[:, :, numbers])
        return heads.index_copy(2, torch.tensor(numbers, device=heads.device), values)

    return replace


def _values(name: str, replacement: Replacement, own: Tensor, call: AttentionCall) -> Tensor:
    """What replaces the output `own` `[B, T, Dv]`; broadcasts to it."""
    if isinstance(replacement, Tensor):
        if replacement.device != own.device:
            was = f"is replaced by a tensor on {replacement.device}"
            refuse(name, was, f"move it to {own.device}")
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
        was = f"has shape {list(rows.shape)}"
        refuse("rows", was, f"pass [{T}] or [{B}, {T}], a flag for each row of the pass")
    return inside.to(device)


def _check_replacement(name: str, replacement: Any) -> None:
    was = f"is {replacement!r}"
    fits = isinstance(replacement, str) and replacement in ("mean", "zero")
    if isinstance(replacement, Tensor):
        was = f"is a tensor of {replacement.dtype} with {replacement.dim()} dimensions"
        fits = replacement.is_floating_point() and replacement.dim() <= 3
    if not fits:
        instead = 'pass a floating tensor that broadcasts to [B, T, Dv], "mean" or "zero"'
        refuse(name, was, instead, TypeError)
