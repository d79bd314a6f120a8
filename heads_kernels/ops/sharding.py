"""Operands that are `DTensor`s: the part of a call that this process computes.

Attention is independent along the batch, the heads and the query rows, so operands may be sharded along these
dimensions. Operands that the parts share are replicated, and their gradients are summed: a query or key of all heads,
and, if rows are split, keys and values, which are gathered if they are sharded along the sequence. Each part is a call
on local tensors. `redistribute`, `to_local` and `from_local` do all communication; they are differentiable, and
`torch.compile` traces them.

DTensors do not reach the ops: rules for DTensor's dispatcher would be private API, one for each op and direction, and
could not give dropout the index of the part's first element, which `seed` contains.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from heads_kernels.batch import expand_bias
from heads_kernels.call import Call
from heads_kernels.checks import refuse
from heads_kernels.dtensor import is_sharded, of_first, replicated
from heads_kernels.ops.statistics import AttentionStatistics

#: The dimensions that may be sharded, and the dimension of the call to which each belongs.
_SPLIT: Final = {"B": "B", "B2": "B", "H": "H", "Hk": "H", "Hv": "H", "T": "T"}

Span = tuple[int, int]  # first, count


def part_of(call: Call) -> Part | None:
    """The part that this process computes; None if no operand is a `DTensor`.

    Plain tensors in a call with DTensors count as replicated.

    Raises:
        ValueError: operands are sharded along other dimensions, or inconsistently, or heads that share a key or
            value head would be split. Every process of the mesh raises it.
    """
    call = _with_whole_bias(call)
    layouts = call.dimensions()
    sharded = [name for name in layouts if is_sharded(getattr(call, name))]
    if not sharded:
        return None
    mesh = getattr(call, sharded[0]).device_mesh
    for name in sharded:
        other = getattr(call, name).device_mesh
        if other != mesh:
            was = f"is on the mesh {other}, but {sharded[0]} is on {mesh}"
            refuse(name, was, "distribute both over one mesh")
    return Part(call, layouts, _splits(call, {name: layouts[name] for name in sharded}, mesh), mesh)


class Part:
    """One process's part of a call; `call` has its tensors, which are not DTensors."""

    def __init__(self, call: Call, layouts: dict[str, list[str]], splits: list[str], mesh: Any) -> None:
        self.mesh = mesh
        self._sizes = {"B": call.B, "H": call.H, "T": call.T}
        #: For each dimension of the mesh, the dimension in `_sizes` that it splits; "": its processes compute the same.
        self._splits = ["" if self._sizes.get(split) == 1 else split for split in splits]
        #: The shape of the mesh. Dynamo of PyTorch 2.11 cannot trace its `shape`.
        self._counts = [mesh.size(dim) for dim in range(mesh.ndim)]
        self._spans = {letter: self._all_spans(letter, n) for letter, n in self._sizes.items()}
        #: The same for heads of key or value that groups of query heads share.
        self._shared_spans = _shared_spans(call, self._spans["H"])
        self._at = mesh.get_coordinate()
        self.call = self._of(call, layouts)

    def whole(self, result: Tensor, layout: Sequence[str] = ("B", "H", "T", "Dv")) -> Tensor:
        """A result of the part, `[B, H, T, ...]` or of this layout, as a DTensor of the whole call.

        If rows are split and the layout has none, the DTensor is a partial sum of the processes.
        """
        letters = layout[: result.dim()]
        own = zip(letters, result.shape, strict=True)
        sizes = torch.Size([self._sizes.get(letter, size) for letter, size in own])
        placements = [
            Partial() if split == "T" and "T" not in letters else placement
            for split, placement in zip(self._splits, self._placements(letters, sizes), strict=True)
        ]
        strides = list(result.stride())
        for dim, (size, here) in enumerate(zip(sizes, result.shape, strict=True)):
            for d, stride in enumerate(strides):
                if d != dim and stride >= strides[dim]:  # it steps over dimension `dim`
                    strides[d] = stride // max(here, 1) * size
        return DTensor.from_local(result, self.mesh, placements, run_check=False, shape=sizes, stride=tuple(strides))

    def whole_statistics(self, found: AttentionStatistics) -> AttentionStatistics:
        """`whole` of all statistics of the part."""
        *of_rows, received = found
        rows = AttentionStatistics(*map(self.whole, of_rows))
        return rows if received is None else rows._replace(received=self.whole(received, ("B", "H", "S")))

    def seed(self, seed: Tensor) -> Tensor:
        """The seed of the first process of the mesh, at the first element of this part."""
        shared = of_first(seed, self.mesh)
        first = [self._span(letter)[0] for letter in self._sizes]
        return shared + shared.new_tensor([0, *first, 0])

    # ------------------------------------------------------------------ which part
    def _all_spans(self, letter: str, size: int) -> dict[tuple[int, ...], Span]:
        """The part of a dimension that the process at each place of the mesh has, as `Shard` splits it."""
        spans = {}
        for place in itertools.product(*map(range, self._counts)):
            first, count = 0, size
            for n, at, split in zip(self._counts, place, self._splits, strict=True):
                if split == letter:
                    step = -(-count // n)
                    skipped = min(at * step, count)
                    first, count = first + skipped, min(step, count - skipped)
            spans[place] = first, count
        return spans

    def _span(self, letter: str) -> Span:
        return self._spans[letter][tuple(self._at)]

    def _of(self, call: Call, layouts: dict[str, list[str]]) -> Call:
        parts: dict[str, Any] = {name: self._local(getattr(call, name), layout) for name, layout in layouts.items()}
        row, rows = self._span("T")
        if (table := parts.get("offset_bias")) is not None:
            # Offsets from -(T - 1): those of the last row come first.
            columns = max(table.shape[1] - call.T + rows, 1)
            parts["offset_bias"] = table.narrow(1, call.T - row - rows, columns)
        return call.under(call.intervals.from_row(row))._replace(**parts)

    # ------------------------------------------------------------------ tensors
    def _placements(self, layout: Sequence[str], shape: torch.Size) -> list[Placement]:
        """How a tensor of the call is split; sizes of 1 broadcast, so every process has them."""
        of_call = [_SPLIT.get(each) if n != 1 else None for each, n in zip(layout, shape, strict=True)]
        return [Shard(of_call.index(split)) if split in of_call else Replicate() for split in self._splits]

    def _local(self, tensor: Tensor, layout: Sequence[str]) -> Tensor:
        if not isinstance(tensor, DTensor):
            tensor = replicated(tensor, self.mesh)
        placements = self._placements(layout, tensor.shape)
        narrowed = None
        spans = self._shared_spans
        shared = "Hk" in layout or "Hv" in layout
        if shared and self._all_spans("H", tensor.shape[1]) != spans:
            # Query heads of several processes share one of its heads.
            placements = [Replicate() if p == Shard(1) else p for p in placements]
            narrowed = spans[tuple(self._at)]
        # The gradient of a replicated tensor is the sum of the gradients of all processes.
        terms = [
            Partial() if split and placement == Replicate() else placement
            for split, placement in zip(self._splits, placements, strict=True)
        ]
        grads = terms if tensor.is_floating_point() else None
        local = tensor.redistribute(placements=placements).to_local(grad_placements=grads)
        return local if narrowed is None else local.narrow(1, *narrowed)


def _with_whole_bias(call: Call) -> Call:
    """The call with a bias `[1, B or 1, H, T, S]`, with the batch dimension of the call."""
    bias = call.bias
    if bias is None or bias.shape[0] == 1:
        return call
    if bias.shape[1] == 1 and bias.shape[0] == call.B:
        return call._replace(bias=bias.transpose(0, 1))
    return call._replace(bias=expand_bias(bias, call.B)[None])


def _splits(call: Call, layouts: dict[str, list[str]], mesh: Any) -> list[str]:
    """For each dimension of the mesh, the dimension "B", "H" or "T" that these operands shard it along, or ""."""
    splits = [""] * mesh.ndim
    by = [""] * mesh.ndim
    for name, layout in layouts.items():
        for m, placement in enumerate(getattr(call, name).placements):
            if not isinstance(placement, Shard):
                continue
            letter = layout[placement.dim]
            if letter == "S":  # every row needs all keys, which are gathered
                continue
            split = _SPLIT.get(letter)
            if split is None:
                was = f"is sharded along {letter} ({placement})"
                instead = "redistribute it: operands are sharded along batch, heads or sequence"
                refuse(name, was, instead)
            if splits[m] not in ("", split):
                was = f"is sharded along {split}, but {by[m]} along {splits[m]}, over one dimension of the mesh"
                refuse(name, was, "redistribute one of them")
            splits[m], by[m] = split, name
    return splits


def _shared_spans(call: Call, heads: dict[tuple[int, ...], Span]) -> dict[tuple[int, ...], Span]:
    """The heads of key and value (of the value alone, with mixing) that the query heads of each process read."""
    shared, name = (call.Hk, "key") if call.mixing is None else (call.Hv, "value")
    group = call.H // max(shared, 1)
    spans = {}
    for place, (first, count) in heads.items():
        last = first + max(count, 1) - 1
        whole = first % group == 0 and count % group == 0
        if not whole and first // group != last // group:
            was = f"has {call.H} heads, of which one process would have {first} to {last}"
            instead = f"shard over a number of processes that splits no group of {group} that share a {name} head"
            refuse("query" if call.mixing is None else "mixing", was, instead)
        spans[place] = first // group, -(-count // group)
    return spans
