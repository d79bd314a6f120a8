"""Ring attention (Liu, Zaharia, Abbeel 2023): keys and values pass from process to process, and none has them all.

The forward pass merges the results of the blocks (`merge_attention`) and saves what a single call would. The backward
pass sends the blocks round again, with the sums of their gradients, which arrive at the process that has the block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, distributed

from heads_kernels.call import OPERANDS, Call, closed_heads, compute_dtype
from heads_kernels.merge import merge_attention
from heads_kernels.ops import gate as gates
from heads_kernels.ops.attention import Saved, attention_op, backward_op, finish

#: The operands of keys, which pass round, with their dimension of keys.
OF_KEYS: Final = {"key": -2, "value": -2, "content_bias": -1}
_NEG_INF: Final = float("-inf")

Tensors = dict[str, Tensor]


class Ring(NamedTuple):
    """The processes of a group, and the positions of the keys of each in the sequence: int64, ascending."""

    group: Any
    positions: Sequence[Tensor]

    def positions_at(self, step: int) -> Tensor:
        """The positions of the keys that this process has at `step`: its own at first, then those of the one before."""
        return self.positions[(distributed.get_rank(self.group) - step) % len(self.positions)]

    def shift(self, tensors: Tensors) -> Callable[[], Tensors]:
        """Begin to send `tensors`, of the keys of one step, on; returns a function that waits for those of the next."""
        W, rank = len(self.positions), distributed.get_rank(self.group)
        after, before = (distributed.get_global_rank(self.group, (rank + n) % W) for n in (1, -1))
        sent = {name: tensor.contiguous() for name, tensor in tensors.items()}
        received = {name: torch.empty_like(tensor) for name, tensor in sent.items()}
        transfers = [
            distributed.P2POp(operation, tensor, peer, self.group)
            for operation, parts, peer in ((distributed.isend, sent, after), (distributed.irecv, received, before))
            for tensor in parts.values()
            if tensor.numel()
        ]
        works = distributed.batch_isend_irecv(transfers) if transfers else []

        def wait() -> Tensors:
            for work in works:
                work.wait()
            sent.clear()  # the transfer needs them until now
            return received

        return wait


class RingCall(NamedTuple):
    """A call on the rows of this process and the keys of all.

    `call` has the keys of this process. Its mask, and the columns of its table of offsets, are those of its rows and
    all keys; its seed is that of dropout at its first row.
    """

    backend: str
    call: Call
    ring: Ring

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # transfers between two processes have no graph
    def attend(self) -> Tensor:
        """The output `[B, H, T, Dv]`.

        Blocks are computed without gate and sinks, which belong to the result. A closed head costs no work unless the
        gradient of its gate is asked for.
        """
        call, skipped = self.call, None
        gate, sinks = call.gate, call.sinks
        closed = closed_heads(gate, call.gate_activation)
        if gate is not None and closed is not None:
            asked = call.closed_grad and gate.requires_grad and torch.is_grad_enabled()
            skipped = None if asked else (~closed).to(compute_dtype(call.query.dtype))
        bare = call._replace(gate=skipped, gate_activation="identity", sinks=None)
        operands = [getattr(call, name) for name in _NAMES]
        attended: Tensor
        lse: Tensor
        attended, lse = _Blocks.apply(self._replace(call=bare), *operands)  # type: ignore[no-untyped-call]
        hidden = lse.detach() == _NEG_INF
        if sinks is not None:
            sink = sinks.to(lse.dtype)[:, None].expand_as(lse)
            attended, _ = merge_attention([attended, torch.zeros_like(attended)], [lse, sink])
        return attended if gate is None else gates.multiply(attended, call, hidden)

    def block(self, step: int, keys: Tensors) -> Call:
        call, positions = self.call, self.ring.positions_at(step)
        table, seed = call.offset_bias, call.seed
        if table is not None:
            table = table.narrow(1, *self.columns(step))
        if seed is not None:
            first = int(positions[0]) if len(positions) else 0
            seed = seed + seed.new_tensor([0, 0, 0, 0, first])
        operands: dict[str, Any] = {**keys, "offset_bias": table, "seed": seed}
        return call._replace(**operands).under(call.intervals.at_keys(call.T, positions))

    def columns(self, step: int) -> tuple[int, int]:
        """The first column and the number of columns of the table of offsets that the keys at `step` use."""
        positions = self.ring.positions_at(step)
        # Without rows nothing reads the table, which may end before these keys.
        first = int(positions[0]) if len(positions) and self.call.T else 0
        return first, max(self.call.T + len(positions) - 1, 1)

    def add(self, sums: Tensors, name: str, found: Tensor, step: int) -> None:
        """Add what `found`, a gradient of the operand `name` from the keys at `step`, is to its sum."""
        call = self.call
        if name not in sums:
            of_all = call.offset_bias.shape[1:] if call.offset_bias is not None else ()
            shape = found.shape if name != "offset_bias" else (*found.shape[:2], *of_all)
            sums[name] = found.new_zeros(shape, dtype=compute_dtype(call.query.dtype))
        total = sums[name]
        if name == "offset_bias":
            total = total.narrow(2, *self.columns(step))
        total.add_(found)


#: The operands of blocks.
_NAMES: Final = tuple(name for name in OPERANDS if name not in ("gate", "sinks", "alpha"))


class _Blocks(torch.autograd.Function):
    """The output and `lse` of a `RingCall` without gate and sinks, as a function of its operands."""

    @staticmethod
    def forward(ctx: Any, of: RingCall, *operands: Tensor | None) -> tuple[Tensor, Tensor]:
        ring, call = of.ring, of.call
        dtype = compute_dtype(call.query.dtype)
        W, keys = len(ring.positions), _keys(call)
        outs: list[Tensor] = []
        lses: list[Tensor] = []
        for step in range(W):
            arrived = ring.shift(keys) if step + 1 < W else None
            out, _, lse = attention_op(*of.block(step, keys), True, of.backend)
            both = merge_attention([*outs, out.to(dtype)], [*lses, lse])
            outs, lses = [both[0]], [both[1]]
            keys = {} if arrived is None else arrived()
        attended, lse = outs[0].to(call.query.dtype), lses[0]
        no_operands: dict[str, Any] = dict.fromkeys(_NAMES)
        ctx.of = of._replace(call=call._replace(**no_operands))
        ctx.needs = ctx.needs_input_grad[1:]
        ctx.save_for_backward(attended, lse, *operands)
        return attended, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> Any:
        attended, lse, *operands = ctx.saved_tensors
        call: Call = ctx.of.call._replace(**dict(zip(_NAMES, operands, strict=True)))
        of: RingCall = ctx.of._replace(call=call)
        ring = of.ring
        dtype = compute_dtype(call.query.dtype)
        saved = Saved(dout, attended, lse, dlse.contiguous())
        needed = {name for name, need in zip(_NAMES, ctx.needs, strict=True) if need}
        keys = _keys(call)
        # All processes pass on the gradients of all operands of keys: another one may need them.
        needs = [name in needed or name in keys for name in OPERANDS]
        names = [name for name, need in zip(OPERANDS, needs, strict=True) if need]
        sums: Tensors = {}
        W, own, received = len(ring.positions), {}, None
        for step in range(W):
            arrived = ring.shift(keys) if step + 1 < W else None
            parts = backward_op(*saved, *of.block(step, keys), needs, of.backend)
            found = dict(zip(names, parts, strict=True))
            for name in needed - keys.keys():
                of.add(sums, name, found[name], step)
            of_keys = {name: found[name].to(dtype) for name in keys}
            if received is not None:  # those of the processes that have had these keys
                of_keys = {name: sum_ + of_keys[name] for name, sum_ in received().items()}
            if step == 0:
                own = of_keys
            else:
                received = ring.shift(of_keys)
            keys = {} if arrived is None else arrived()
        if received is not None:
            own = {name: sum_ + own[name] for name, sum_ in received().items()}
        sums |= own
        return None, *(
            finish(name, sums[name], call).to(operand.dtype) if name in needed else None
            for name, operand in zip(_NAMES, operands, strict=True)
        )


def _keys(call: Call) -> Tensors:
    operands = {name: getattr(call, name) for name in OF_KEYS}
    return {name: operand for name, operand in operands.items() if operand is not None}
