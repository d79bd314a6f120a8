"""Moments of the inputs of a model's attention layers, gathered while it runs on data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from operator import length_hint
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from heads_kernels.analysis.observe import each_batch, of_this_thread, reading, run
from heads_kernels.checks import refuse
from heads_kernels.convert.moments import Moments, Sums
from heads_kernels.convert.rotary import AnyMoments, RotaryMoments
from heads_kernels.heads.layers import AttentionLayer, attention_layers
from heads_kernels.heads.weights import ProjectedLayer
from heads_kernels.nn.attention_call import AttentionCall

Item = TypeVar("Item")


def moments_of(
    model: nn.Module,
    layers: list[ProjectedLayer],
    calibration: Iterable[Any] | Mapping[str, AnyMoments] | None,
    progress: bool,
) -> list[Any]:
    """Moments of these layers: those that `calibrate` returned, or computed from batches; Nones without calibration."""
    if calibration is None:
        return [None] * len(layers)
    if isinstance(calibration, Mapping) and all(isinstance(each, Sums) for each in calibration.values()):
        return [_fitting(layer, calibration) for layer in layers]
    return list(gathered(model, layers, calibration, progress).values())


def gathered(
    model: nn.Module, layers: list[ProjectedLayer], data: Iterable[Any], progress: bool
) -> dict[str, AnyMoments]:
    """All layers are observed: the rows of cross-attention are those of the self-attention before it."""
    chosen = {layer.name: layer for layer in layers}
    sums: dict[str, Any] = {}
    inputs: dict[tuple[str, str], Tensor] = {}

    def look(layer: AttentionLayer, call: AttentionCall) -> None:
        if layer.name in chosen:
            query, key = (inputs.pop((layer.name, role), None) for role in ("query", "key"))
            found = _moments(chosen[layer.name], call, query, key)
            sums[layer.name] = sums[layer.name] + found if layer.name in sums else found

    there = [layer for layer in attention_layers(model) if layer.runs_operators]
    with reading(model, look, there), ExitStack() as block:
        for layer in layers:
            for role in ("query", "key"):
                hook = of_this_thread(lambda _, args, place=(layer.name, role): inputs.update({place: args[0]}))
                handle = getattr(layer, role).linear.register_forward_pre_hook(hook)
                block.callback(handle.remove)
        batches = each_batch(data, "calibration")
        total = length_hint(data) or None
        for number, batch in enumerate(tracked(batches, "Calibration", progress, total)):
            run(model, batch)
            inputs.clear()
            for name, moments in sums.items():
                if moments.count > 0:
                    moments.check(moments.widths, f"calibration of layer {name!r} in batch {number}")
    return {layer.name: _fitting(layer, sums) for layer in layers}


def tracked(items: Iterable[Item], title: str, shown: bool, total: int | None = None) -> Iterable[Item]:
    """`items`, with a bar on a terminal while they are taken, if `shown` and rich is installed."""
    try:
        from rich.console import Console
        from rich.progress import track
    except ImportError:
        return items
    console = Console(stderr=True)
    hidden = not (shown and (console.is_terminal or console.is_jupyter))
    return track(items, title, total, console=console, transient=True, disable=hidden)


def _moments(layer: ProjectedLayer, call: AttentionCall, query: Tensor | None, key: Tensor | None) -> AnyMoments:
    """Of one call, from the inputs of its projections, as far as those ran."""
    real_queries, real_keys = call.real_queries, call.real_keys
    for real, rows, what in ((real_queries, query, "queries"), (real_keys, key, "keys")):
        if rows is None or rows.shape[:-1] != real.shape:
            there = "no inputs" if rows is None else f"inputs {list(rows.shape)}"
            was = f"gives {layer} {list(real.shape)} {what} from {there}"
            refuse("calibration", was, "run the model without a cache, on whole sequences")
    assert query is not None
    assert key is not None
    if layer.layout.rotary:
        return RotaryMoments.of(
            call.query, call.key, query_mask=real_queries, key_mask=real_keys, is_causal=call.is_causal
        )
    is_same = key is query or (call.self_attention and torch.equal(key, query))
    return Moments.of(
        query,
        None if is_same else key,
        query_mask=real_queries,
        key_mask=real_keys,
        is_causal=is_same and call.is_causal,
    )


def _fitting(layer: ProjectedLayer, moments: Mapping[str, AnyMoments]) -> AnyMoments:
    if layer.name not in moments:
        instead = "calibrate this model with batches that bring tokens to it, or leave it out"
        refuse("calibration", f"has no moments of {layer}", instead)
    found = moments[layer.name]
    widths: tuple[int, ...] = (layer.query.inputs, layer.key.inputs)
    if layer.layout.rotary:
        widths = (layer.head_dim // 2, layer.num_heads, layer.num_heads)
    found.check(widths, f"calibration of {layer}")
    if not found.key_outer.any():
        was = f"has keys of {layer} that never vary within what a row sees"
        refuse("calibration", was, "add batches of longer sentences, or leave the layer out")
    return found
