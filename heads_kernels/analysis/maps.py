"""Attention maps of one example: as tensors, as a figure, for BertViz."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from heads_kernels.analysis.observe import reading, run
from heads_kernels.checks import check_rows, check_size, refuse
from heads_kernels.heads.layers import AttentionLayer, HeadsByLayer, attention_layers, heads_of_layers
from heads_kernels.nn.attention_call import AttentionCall

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False)
class HeadMaps:
    """Attention maps of some heads of one layer.

    Attributes:
        layer, kind: name and kind of the layer.
        heads: their numbers.
        maps: `[heads, T, S]`, the probabilities of the real rows and keys; of a whole batch `[B, heads, T, S]` with
            zeros for padding. On the CPU.
    """

    layer: str
    kind: str
    heads: tuple[int, ...]
    maps: Tensor


def maps(
    model: nn.Module,
    batch: Any,
    heads: HeadsByLayer | None = None,
    *,
    example: int | None = 0,
    rows: slice = slice(None),
) -> list[HeadMaps]:
    """The attention maps of one example of a batch, without its padding, or of the whole batch.

    All other heads and rows run without maps. During `generate` or in a loop of your own, `observe` the model and call
    `call.probabilities(rows, heads)`.

    Args:
        model, batch: as in `statistics`; a single batch.
        heads: `{layer: [heads]}`, layers by index or name, heads by their current number; default all.
        example: its index in the batch; None for the whole batch.
        rows: a slice of the query rows of the batch, padding included, without a step; default all.

    Returns:
        One `HeadMaps` for each run of a layer with some of the heads, in the order in which the layers ran.

    Raises:
        TypeError, ValueError: as `statistics`; also if a head or the example does not exist, or the example is only
            padding.
    """
    layers = attention_layers(model)
    every = {layer.index: range(layer.num_heads) for layer in layers}
    asked = heads_of_layers(layers, every if heads is None else heads)
    chosen = {layer.index: tuple(numbers) for layer, numbers in asked if numbers}
    if example is not None:
        check_size("example", example, 0)
    check_rows(rows)
    if isinstance(batch, list) and batch and all(isinstance(each, Mapping) for each in batch):
        refuse("batch", f"is a list of {len(batch)} batches", "pass one of them", TypeError)
    found: list[HeadMaps] = []

    def look(layer: AttentionLayer, call: AttentionCall) -> None:
        if example is not None and example >= call.B:
            refuse("example", f"is {example}", f"this batch has 0 to {call.B - 1}")
        real, keys = call.real_queries[:, rows], call.real_keys
        if example is not None and not bool(call.real_queries[example].any()):
            refuse("example", f"is {example}, which is padding alone", "choose one with tokens")
        if numbers := chosen.get(layer.index):
            whole = call.probabilities(rows, numbers)
            if example is None:
                own = whole.masked_fill(~(real[:, None, :, None] & keys[:, None, None]), 0.0)
            else:
                own = whole[example][:, real[example]][..., keys[example]]
            found.append(HeadMaps(layer.name, layer.kind, numbers, own.cpu()))

    with reading(model, look, layers):
        run(model, batch)
    return found


def bertviz(
    found: Sequence[HeadMaps], tokens: Sequence[str], decoder_tokens: Sequence[str] | None = None
) -> dict[str, Any]:
    """The keyword arguments of BertViz's `head_view` and `model_view` (Vig 2019).

        head_view(**hk.analysis.bertviz(hk.analysis.maps(model, batch), tokens))

    Args:
        found: the result of `maps`.
        tokens: the tokens of the example without padding; of the encoder in an encoder-decoder model.
        decoder_tokens: of the decoder in an encoder-decoder model.

    Returns:
        "attention", a list with `[1, H, T, S]` per layer, and "tokens"; for a model with several kinds of layers,
        "encoder_attention", "decoder_attention" and "cross_attention" with "encoder_tokens" and "decoder_tokens".
        BertViz needs equal numbers of heads: layers with fewer heads are padded with maps of zeros. Layers without
        heads are left out.

    Raises:
        ValueError: there are no maps, or the numbers of tokens do not match their rows and keys.
    """
    _check_found(found)
    kinds = dict.fromkeys(each.kind for each in found)
    several = len(kinds) > 1
    decoder = decoder_tokens if several and decoder_tokens is not None else tokens
    for each in found:
        rows = tokens if each.kind == "encoder" else decoder
        keys = decoder if each.kind == "decoder" else tokens
        _check_tokens(each, rows, keys)
    most = max(len(each.heads) for each in found)
    attention = {
        kind: [
            torch.nn.functional.pad(each.maps, (0, 0, 0, 0, 0, most - len(each.maps)))[None]
            for each in found
            if each.kind == kind
        ]
        for kind in kinds
    }
    if not several:
        return {"attention": attention[next(iter(kinds))], "tokens": list(tokens)}
    lists = {f"{kind}_attention": layers for kind, layers in attention.items()}
    return {**lists, "encoder_tokens": list(tokens), "decoder_tokens": list(decoder)}


def _check_found(found: Sequence[HeadMaps]) -> None:
    if not found:
        refuse("found", "has no maps", "pass what hk.analysis.maps gave")
    if any(each.maps.dim() == 4 for each in found):
        refuse("found", "has maps of a whole batch", "pass those of one example: maps(..., example=0)")


def _check_tokens(each: HeadMaps, rows: Sequence[str] | None, keys: Sequence[str] | None) -> None:
    """As many as the map has, where they are given."""
    _, T, S = each.maps.shape
    for what, words, number in (("rows", rows, T), ("keys", keys, S)):
        if words is not None and len(words) != number:
            instead = f"{each.layer!r} has {T} rows and {S} keys without padding"
            refuse("tokens", f"are {len(words)} for {what}", instead)


def plot_maps(
    found: Sequence[HeadMaps], tokens: Sequence[str] | None = None, key_tokens: Sequence[str] | None = None
) -> Figure:
    """A figure of maps, one line per layer and one panel per head; a row of a panel shows where one token attends.

    Args:
        found: the result of `maps`.
        tokens: labels of the rows, without padding; None draws no labels.
        key_tokens: labels of the keys; default those of the rows.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: there are no maps, or the numbers of tokens do not match their rows and keys.
    """
    _check_found(found)
    key_tokens = tokens if key_tokens is None else key_tokens
    for each in found:
        _check_tokens(each, tokens, key_tokens)
    rows, keys = tokens or (), key_tokens or ()
    from matplotlib.figure import Figure

    across = max(len(each.heads) for each in found)
    size = 2.0 + 0.12 * max(found[0].maps.shape[1:])
    figure = Figure(figsize=(size * across, size * len(found)), layout="constrained")
    panels = figure.subplots(len(found), across, squeeze=False)
    for line, each in zip(panels, found, strict=True):
        for axes in line[len(each.heads) :]:
            axes.set_axis_off()
        for axes, head, picture in zip(line, each.heads, each.maps, strict=False):
            axes.imshow(picture.numpy(), cmap="Blues", vmin=0, vmax=1)
            axes.set_title(f"{each.layer}, head {head}", fontsize=8)
            axes.set_xticks(range(len(keys)), keys, rotation=90, fontsize=7, parse_math=False)
            axes.set_yticks(range(len(rows)), rows, fontsize=7, parse_math=False)
    return figure
