"""Distances between the heads of a model: the Jensen-Shannon divergence of their attention, for all pairs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import log
from typing import Any, Final

import torch
from torch import Tensor, nn

from heads_kernels.analysis.observe import each_batch, reading, run
from heads_kernels.checks import refuse
from heads_kernels.heads.layers import AttentionLayer, attention_layers, choose_layers
from heads_kernels.nn.attention_call import AttentionCall, blocks

#: Probabilities of all heads that are compared at a time, half a MiB of float32, so that sums and logarithms stay in
#: the second-level cache. Heuristic.
_PAIRS: Final = 1 << 17


@dataclass(frozen=True, eq=False)
class HeadDistance:
    """Distances between the heads of all layers of one kind.

    Attributes:
        kind: of the layers.
        layers: their names in the order in which they ran; a layer that runs several times in a pass (ALBERT) appears
            several times.
        heads: (index in `layers`, head) of each row and column of `matrix`, layer after layer.
        matrix: float64 `[N, N]`, symmetric: Jensen-Shannon divergence of each pair of the N heads in nats, 0 to ln 2,
            mean over rows.
        rows: number of real query rows.
    """

    kind: str
    layers: tuple[str, ...]
    heads: tuple[tuple[int, int], ...]
    matrix: Tensor
    rows: int

    def within(self) -> Tensor:
        """Mean distance between two heads of each layer, `[L]`; NaN in layers with fewer than two heads."""
        return torch.stack([each.mean() for each in self._to_others()])

    def odd(self) -> list[int | None]:
        """The head of each layer with the largest mean distance to the others; None if it has fewer than two."""
        return [int(each.argmax()) if len(each) > 1 else None for each in self._to_others()]

    def _to_others(self) -> list[Tensor]:
        """Of each layer, the mean distance of each head to the others, `[H]`."""
        blocks = [self.block(layer) for layer in range(len(self.layers))]
        return [block.sum(1) / (len(block) - 1) for block in blocks]

    def block(self, layer: int) -> Tensor:
        """`[H, H]`: distances within the layer at this index in `layers`."""
        own = [row for row, (place, _) in enumerate(self.heads) if place == layer]
        return self.matrix[own][:, own]

    def embedding(self, dims: int = 2) -> Tensor:
        """Points `[N, dims]` that approximate the distances of the heads: classical multidimensional scaling.

        The square root of the Jensen-Shannon divergence is a Euclidean distance (Fuglede, Topsoe 2004), and so is that
        of its mean over rows. The points are its principal coordinates; the largest entry of each column is positive.
        """
        centred = self.matrix - self.matrix.mean(0) - self.matrix.mean(1, keepdim=True)
        centred = centred + self.matrix.mean()
        values, vectors = torch.linalg.eigh(-centred / 2)
        order = values.argsort(descending=True)[:dims]
        points = vectors[:, order] * values[order].clamp(min=0).sqrt()
        largest = points.gather(0, points.abs().argmax(0, keepdim=True))
        signed: Tensor = points * torch.where(largest < 0, -1.0, 1.0)
        return signed


def distance(
    model: nn.Module,
    data: Iterable[Any],
    *,
    kind: str | None = None,
    layers: Iterable[int | str] | None = None,
) -> HeadDistance:
    """The Jensen-Shannon divergence between the attention of all pairs of heads, across layers.

        JS(p, q) = H((p + q) / 2) - (H(p) + H(q)) / 2
                 = ln 2 + sum_j (p_j ln p_j + q_j ln q_j - (p_j + q_j) ln(p_j + q_j)) / 2

    compares the probabilities of two heads in one row; the distance is its mean over all real rows of the data. The
    code of Clark et al. 2019 sums over all rows and mixes `0.001 / S` into the probabilities first.

    Queries and keys of the layers are held for one batch. Probabilities are computed by blocks of rows, 1 MiB for all
    heads together (or 8 rows); padding and keys hidden by causality are skipped. Layers with dense masks or biases need
    a byte for each pair and head besides.

    Args:
        model, data: as in `statistics`.
        kind: "encoder", "decoder" or "cross": the layers to compare; default the only kind of `layers`.
        layers: indices or names of the layers among which those of the kind are compared; default all.

    Raises:
        TypeError, ValueError: as `statistics`; also if T or S differ between layers of that kind, or layers
            have no heads.
    """
    chosen = _of_kind(choose_layers(attention_layers(model), layers), kind)
    ran: list[AttentionLayer] = []
    calls: list[AttentionCall] = []
    first: list[AttentionLayer] | None = None  # those that ran in the first batch
    sums = torch.zeros((), dtype=torch.float64)
    rows = 0

    def keep(layer: AttentionLayer, call: AttentionCall) -> None:
        ran.append(layer)
        calls.append(replace(call, call=call.call._replace(value=None)))  # not held

    with reading(model, keep, chosen):
        for batch in each_batch(data):
            run(model, batch)
            if not ran:
                refuse("data", f"reaches no layer of kind {chosen[0].kind!r}", "pass all that the model takes")
            first = first or ran.copy()
            if ran != first:
                refuse("data", "makes other layers run in one batch than in another", "pass batches alike")
            for layer, call in zip(ran, calls, strict=True):
                if (call.T, call.S) != (calls[0].T, calls[0].S):
                    was = f"has T {call.T} and S {call.S} in {layer}, but others in {ran[0]}"
                    refuse("model", was, "heads that see different tokens cannot be compared")
            sums = sums.to(calls[0].query.device) + _divergence(calls)
            rows += int(calls[0].real_queries.sum())
            ran.clear()
            calls.clear()
    assert first is not None
    if not rows:
        refuse("data", "has no real token", "pass batches with some")
    sums = sums.clamp(min=0)
    return HeadDistance(
        kind=first[0].kind,
        layers=tuple(layer.name for layer in first),
        heads=tuple((i, h) for i, layer in enumerate(first) for h in range(layer.num_heads)),
        matrix=((sums + sums.T) / rows).cpu(),
        rows=rows,
    )


def _of_kind(layers: list[AttentionLayer], kind: str | None) -> list[AttentionLayer]:
    """The layers of a kind that have heads."""
    kinds = list(dict.fromkeys(layer.kind for layer in layers))
    if kind is None and len(kinds) == 1:
        kind = kinds[0]
    if kind not in kinds:
        refuse("kind", f"is {kind!r}", f"pass one of {', '.join(map(repr, kinds))}, the kinds of these layers")
    chosen = [layer for layer in layers if layer.kind == kind and layer.num_heads]
    if not chosen:
        refuse("model", f"has no head left in its layers of kind {kind!r}", "pass one that has")
    return chosen


def _divergence(calls: list[AttentionCall]) -> Tensor:
    """The sum of JS(p, q) over the real rows of a batch for each pair of heads, above the diagonal of `[N, N]`."""
    first, N = calls[0], sum(call.H for call in calls)
    mass = torch.zeros(N, dtype=torch.float64, device=first.query.device)  # of p
    own = torch.zeros_like(mass)  # of p ln p
    pairs = mass.new_zeros(N, N)  # of (p + q) ln (p + q)
    real = first.real_queries
    # By some row in some layer.
    seen = torch.stack([replace(call, self_attention=False).real_keys for call in calls]).any(0)
    causal = all(call.is_causal for call in calls)
    for rows in blocks(first.T, first.B * N * first.S):
        p = torch.cat([call.probabilities(rows) for call in calls], 1)  # [B, N, rows, S]
        last = rows.stop + first.S - first.T if causal else first.S
        parts = [p[b][:, real[b, rows], :last][..., seen[b, :last]].flatten(1) for b in range(first.B)]
        p = torch.cat(parts, 1)  # [N, pairs of tokens]
        p += torch.finfo(p.dtype).tiny  # its x ln x is negligible
        for part in torch.split(p, max(1, _PAIRS // N), 1):
            mass += part.sum(1)
            own += _x_ln_x(part)
            for head in range(N - 1):
                pairs[head, head + 1 :] += _x_ln_x(part[head + 1 :] + part[head])
    of_both = own + log(2) * mass
    return (of_both[:, None] + of_both - pairs).triu(1) / 2


def _x_ln_x(x: Tensor) -> Tensor:
    """The sum of `x ln x` over the last dimension; `torch.xlogy` takes ten times as long on a CPU."""
    return x.log().mul_(x).sum(-1)
