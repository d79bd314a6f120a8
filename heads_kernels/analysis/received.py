"""The attention that the tokens of each example receive, by layer and head, without a map."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from heads_kernels.analysis.batches import each_batch, reading, run
from heads_kernels.checks import check_size, refuse
from heads_kernels.heads.layers import AttentionLayer, attention_layers
from heads_kernels.nn.attention_call import AttentionCall


@dataclass(frozen=True, eq=False)
class HeadReceived:
    """The mean attention that the tokens of each example receive from its query rows.

    Attributes:
        layers: names of the layers, in the order of `attention_layers`.
        kinds: "encoder", "decoder" or "cross" of each.
        examples: of each layer and each example `[H, S]`, float, on the CPU: a number for each head and each of the
            example's keys that is a token. Without sinks they sum to 1 over the keys. A layer without heads has no
            examples.
    """

    layers: tuple[str, ...]
    kinds: tuple[str, ...]
    examples: tuple[tuple[Tensor, ...], ...]


def received(
    model: nn.Module,
    data: Iterable[Any],
    *,
    last_rows: int | None = None,
) -> HeadReceived:
    """The mean attention that each token of each example receives, computed while the model runs without storing maps.

        r_j = sum_i p_ij / n

    over the n query rows i of the example, for each layer and head, by `hk.attention_statistics(..., received=)`. Such
    scores choose the tokens that a cache keeps, by all rows (H2O: Zhang et al. 2023; FastV: Chen et al. 2024) or by the
    last ones (SnapKV: Li et al. 2024). Padding counts neither as a row nor as a key. For a layer that runs several
    times in a pass (ALBERT) the mean is over its runs. Heads have their current numbers. The model runs in evaluation
    mode.

    Args:
        model, data: as in `statistics`.
        last_rows: the number of each example's last query rows that count; None: all rows.

    Raises:
        TypeError, ValueError: an argument is invalid; data has no batches; a layer has entmax in the place of softmax,
            or runs on different tokens in one pass; the attention function of a transformers model is not this
            package's.
    """
    if last_rows is not None:
        check_size("last_rows", last_rows)
    layers = attention_layers(model)
    examples: dict[int, list[Tensor]] = {layer.index: [] for layer in layers}
    #: Of each run of a layer in this batch what the tokens of each example receive, [H, S].
    runs: dict[int, list[list[Tensor]]] = {layer.index: [] for layer in layers}

    def look(layer: AttentionLayer, call: AttentionCall) -> None:
        rows = call.real_queries  # [B, T]
        if last_rows is not None:
            behind = rows.flip(1).long().cumsum(1).flip(1)  # real rows from here on
            rows = rows & (behind <= last_rows)
        weights = rows.double() / rows.sum(1, keepdim=True).clamp(min=1)
        sums = call.statistics(received=weights[:, None]).received
        assert sums is not None
        runs[layer.index].append(
            [each[:, real] for each, real in zip(sums, call.real_keys, strict=True)]
        )

    with reading(model, look, layers):
        for batch in each_batch(data):
            run(model, batch)
            for layer in layers:
                examples[layer.index] += _means(layer, runs[layer.index])
                runs[layer.index].clear()
    return HeadReceived(
        tuple(layer.name for layer in layers),
        tuple(layer.kind for layer in layers),
        tuple(tuple(examples[layer.index]) for layer in layers),
    )


def _means(layer: AttentionLayer, runs: list[list[Tensor]]) -> list[Tensor]:
    """The mean over the runs of a layer, for each example."""
    if any([each.shape for each in found] != [each.shape for each in runs[0]] for found in runs):
        instead = "pass whole sequences in one forward pass, without a cache"
        refuse("data", f"has a pass in which {layer} runs on different tokens", instead)
    return [torch.stack(each).mean(0).cpu() for each in zip(*runs, strict=True)]
