"""Context parallelism: every process has a part of each sequence."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final, Literal, TypeVar, get_args

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from heads_kernels.backends import select
from heads_kernels.batch import unflatten
from heads_kernels.call import Call
from heads_kernels.checks import check_choice, check_flag, refuse
from heads_kernels.dtensor import is_sharded, of_first
from heads_kernels.functional import collaborative_attention, gated_attention
from heads_kernels.integrations.distributed.ring import OF_KEYS, Ring, RingCall
from heads_kernels.mask import Mask, as_mask
from heads_kernels.nn import HardConcrete
from heads_kernels.nn.multihead import Multihead
from heads_kernels.ops.attention import attend
from heads_kernels.ops.philox import draw_seed
from heads_kernels.ops.sharding import part_of
from heads_kernels.parse import parse

Method = Literal["all_gather", "ring"]
METHODS: Final = get_args(Method)
_OPERATORS: Final = (gated_attention, collaborative_attention)
Module = TypeVar("Module", bound=nn.Module)


def context_parallel(
    module: Module,
    mesh: DeviceMesh,
    method: Method = "all_gather",
    *,
    balanced: bool = False,
) -> Module:
    """Let the attention of `module`, which it returns, attend to whole sequences: every process has a part of them.

    Inputs and outputs of modules of `hk.nn` are parts; masks are those of whole sequences. Everything else in a
    Transformer is computed token by token. Gradients of weights are those of this process's tokens: sum or average them
    over the mesh, as in data parallelism (`fully_shard` over the processes of both). `HardConcrete` gates draw one
    noise.

        context_parallel(model, mesh["cp"])  # mesh["tp", "cp"] after a tensor_parallel_plan
        part = model.attention.context.split(tokens, dim=1)

    A model of transformers takes `input_ids`, `attention_mask` and `position_ids`, of which every process passes its
    part (the positions are those in whole sequences), and returns what belongs to its tokens:

        context_parallel(hk.integrations.transformers.use(model), mesh, "ring")
        context = model.model.layers[0].self_attn.context
        logits = model(context.split(ids, 1), position_ids=context.split(positions, 1)).logits
        loss = cross_entropy(logits.flatten(0, 1), context.split(next_ids, 1).flatten())

    Args:
        module: contains attention of `hk.nn`, or is a model of transformers in use. Each layer gets the attribute
            `context`, a `ContextParallel`; set it to None to undo. A model of transformers is called twice with a few
            tokens: what it gives for parts must be what it gives for whole sequences.
        mesh, method, balanced: as in `ContextParallel`, with its errors.
    """
    context = ContextParallel(mesh, method, balanced=balanced)
    layers: list[Any] = [each for each in module.modules() if isinstance(each, Multihead)]
    transformers: Any = sys.modules.get("transformers")
    if transformers is not None and isinstance(module, transformers.PreTrainedModel):
        from heads_kernels.integrations.transformers.parts import split_attention

        layers = split_attention(module, context)
    elif not layers:
        refuse("module", f"is a {type(module).__name__} without attention of hk.nn", "pass the model that contains it")
    for layer in layers:
        layer.context = context
        head_gate: Any = getattr(layer, "head_gate", None)
        if isinstance(head_gate, HardConcrete):
            head_gate.meshes += (mesh,)
    return module


class ContextParallel:
    """How the processes of a mesh split sequences, and operator calls on the parts.

    Args:
        mesh: of one dimension, W processes. With tensor parallelism of two, such as `mesh["tp", "cp"]`: sequences are
            split over the last one, and operands may be DTensors that are sharded along the heads over the first.
        method: every process computes its rows of all heads. "all_gather": keys and values of the whole sequence are
            gathered; collaborative attention has one key for all heads. "ring" (Liu et al. 2023): keys and values pass
            from process to process, so that none has them all.
        balanced: a sequence is cut into 2 W blocks, of which process r has r and 2 W - 1 - r, so that all have the same
            work under a causal mask; not with dropout or bias. False: it is cut into W parts.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it, its value and what would work.
    """

    def __init__(self, mesh: DeviceMesh, method: Method = "all_gather", *, balanced: bool = False) -> None:
        names = mesh.mesh_dim_names
        if mesh.ndim > 2 or (mesh.ndim == 2 and names is None):
            instead = "pass mesh['cp'], or with tensor parallelism mesh['tp', 'cp']"
            refuse("mesh", f"has {mesh.ndim} dimensions, named {names}", instead)
        check_choice("method", method, METHODS)
        check_flag("balanced", balanced)
        self.mesh = mesh
        self.method = method
        self.balanced = balanced
        self._count = mesh.size(mesh.ndim - 1)  # W
        self._rank = mesh.get_local_rank(mesh.ndim - 1)
        self._heads = mesh[names[0]] if names is not None and mesh.ndim == 2 else None

    # ------------------------------------------------------------------ sequences
    def split(self, sequence: Tensor, dim: int) -> Tensor:
        """This process's part of what all processes have, such as tokens, labels or positions."""
        return sequence.index_select(dim, self.positions(sequence.shape[dim], sequence.device))

    def join(self, part: Tensor, dim: int) -> Tensor:
        """The whole sequence, of which every process has a part. Its gradients on all processes are summed."""
        length = self.whole_length(part.shape[dim])
        split: list[Placement] = [Replicate()] * (self.mesh.ndim - 1)
        if isinstance(part, DTensor):  # by tensor parallelism
            split = list(part.placements)
        local = (part.to_local() if isinstance(part, DTensor) else part).contiguous()
        shards = [*split, Shard(dim % part.dim())]
        sharded = DTensor.from_local(local, self.mesh, shards, run_check=False)
        whole = sharded.redistribute(placements=[*split, Replicate()])
        joined = whole.to_local(grad_placements=[*split, Partial()])
        if self.balanced:
            joined = joined.index_select(dim, self._by_rank(length, part.device).flatten().argsort())
        if not isinstance(part, DTensor):
            return joined
        return DTensor.from_local(joined, part.device_mesh, split, run_check=False)

    def positions(self, length: int, device: torch.device | str = "cpu") -> Tensor:
        """The positions of this process's tokens in a sequence of `length`: int64, in the order of its part."""
        return self._by_rank(length, device)[self._rank]

    def _by_rank(self, length: int, device: torch.device | str) -> Tensor:
        """The positions of each process's tokens, `[W, length / W]`."""
        blocks = 2 * self._count if self.balanced else self._count
        if length % blocks:
            was = f"has {length} tokens, which {self._count} processes cannot share evenly"
            refuse("sequence", was, f"pad it to a multiple of {blocks}")
        positions = torch.arange(length, device=device)
        if self.balanced:
            head, tail = positions.view(2, self._count, length // blocks)
            positions = torch.stack([head, tail.flip(0)], 1)
        return positions.view(self._count, length // self._count)

    def whole_length(self, part: int) -> int:
        """Tokens of a sequence of which this process has `part`."""
        length = part * self._count
        self._by_rank(length, "meta")  # refuses what cannot be shared
        return length

    # ------------------------------------------------------------------ operator calls
    def __call__(self, operator: Callable[..., Tensor], **arguments: Any) -> Tensor:
        """Call an operator on the rows and keys of this process's tokens; returns the output of its rows.

        Args:
            operator: `hk.gated_attention` or `hk.collaborative_attention`.
            **arguments: those of the operator. `query`, `key`, `value`, `content_bias` and the rows of a gate are
                parts; `attn_mask` and an `OffsetBias` are of whole sequences. The gradients of what all processes
                have, such as `mixing`, gates of heads and an `OffsetBias`, are those of this process's rows.
        """
        if operator not in _OPERATORS:
            was = f"is {getattr(operator, '__name__', operator)}"
            refuse("operator", was, "pass hk.gated_attention or hk.collaborative_attention")
        given = {name: each for name, each in arguments.items() if each is not None}
        self._check(given)
        if self.method == "all_gather":
            keys = {name: dim for name, dim in OF_KEYS.items() if name in given}
            given |= {name: self.join(given[name], dim) for name, dim in keys.items()}
        apart = ("attn_mask", "is_causal", "backend", "return_lse")
        call, batch = parse(operator.__name__, **{name: each for name, each in given.items() if name not in apart})
        B, H, T, S = call.sizes
        if self.method == "ring":
            S = self.whole_length(S)
        device, first = call.query.device, self._rank * T  # unless it is balanced
        rows = self.whole_length(T)
        mask = as_mask(given.get("attn_mask"), (B, H, rows, S))
        if given.get("is_causal", False):
            mask = mask & Mask(causal=True)
        mask = mask.rows(self.positions(rows, device), B, H, rows, S)
        call = call.under(mask.intervals(B, H, T, S, device))
        if (bias := given.get("bias")) is not None:
            call = call._replace(offset_bias=bias.starting_at(first).table(T, S))
        part = part_of(call)
        here = call if part is None else part.call
        if call.dropout_p:
            seed = of_first(draw_seed(device), self.mesh)
            if part is not None:
                seed = part.seed(seed)
            here = here._replace(seed=seed + seed.new_tensor([0, 0, 0, first, 0]))
        chosen = select(here, given.get("backend"))
        ring = self._ring(call, S) if self.method == "ring" else None
        out = attend(here, chosen) if ring is None else RingCall(chosen, here, ring).attend()
        return unflatten(out if part is None else part.whole(out), batch)

    def _check(self, given: dict[str, Any]) -> None:
        if isinstance(given.get("bias"), Tensor):
            refuse("bias", "is a tensor, which is not split", "pass an OffsetBias, or call the operator with DTensors")
        for name, each in given.items():
            if is_sharded(each) and each.device_mesh != self._heads:
                was = f"is a DTensor on the mesh {each.device_mesh}, but the context has {self.mesh}"
                refuse(name, was, "make the context with both dimensions: mesh['tp', 'cp']")
        if given.get("return_lse", False):
            refuse("return_lse", "is True", "leave it out: parts of calls are merged here")
        if self.balanced:
            for name in ("dropout_p", "bias"):
                if given.get(name):
                    refuse(name, f"is {given[name]!r}", "pass balanced=False")

    def _ring(self, call: Call, S: int) -> Ring:
        """The processes, and the positions of the keys of each among S."""
        positions = list(self._by_rank(S, call.query.device))
        if call.dropout_p and self._count > 1 and len(positions[0]) % 4:
            was = f"is {call.dropout_p}, and {self._count} processes have {len(positions[0])} tokens each"
            refuse("dropout_p", was, "pad sequences so that they have a multiple of 4")
        return Ring(self.mesh.get_group(self.mesh.ndim - 1), positions)
