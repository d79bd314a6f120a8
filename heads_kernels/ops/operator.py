"""Declares an operator, and derives its torch ops and gradient from the declaration.

`Operator("gated_attention", ("query", "key", "value", "gate?", ...), BACKENDS)` is all that an operator's own file
contains. From it and `OPTIONS` this module derives the schemas of the forward and backward op, their fakes and FLOP
counts, the conversion of a `Problem` to the arguments of an op and of these to a `Call`, and the `autograd.Function`. A
backend's module fills the buffers that are allocated here:

    forward(call: Call, results: Results) -> None
    backward(call: Call, saved: Saved, closed_grad: bool, gradients: Gradients) -> None
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from heads_kernels.dispatch import Backend
from heads_kernels.flops import backward_flops, forward_flops
from heads_kernels.mask import Intervals
from heads_kernels.ops import gate as gates
from heads_kernels.ops.autograd import first_order_only, is_recorded
from heads_kernels.ops.buffers import compute_dtype, empty_gradient, empty_heads
from heads_kernels.ops.library import define_op, load
from heads_kernels.ops.validation import check_operands
from heads_kernels.problem import Problem

#: Operands of operators, which may get a gradient, in the order of ops and of `Call`.
OPERANDS: Final = (
    "query",
    "key",
    "value",
    "mixing",
    "content_bias",
    "gate",
    "bias",
    "offset_bias",
    "sinks",
    "alpha",
)
#: Arguments of an op after the operands: the fields of `Intervals`, then (`OPTIONS`) the rest of a `Call`.
_MASK: Final = {
    "band_lo": "SymInt",
    "band_hi": "SymInt",
    "k_lo": "Tensor?",
    "k_hi": "Tensor?",
    "key_visible": "Tensor?",
    "dense_mask": "Tensor?",
}
OPTIONS: Final = {
    "scale": "float",
    "softcap": "float",
    "seed": "Tensor?",
    "gate_activation": "str",
    "dropout_p": "float",
}


class Call(NamedTuple):
    """What a backend is asked to compute; operands that the operator does not have are None."""

    query: Tensor
    key: Tensor
    value: Tensor
    mixing: Any  # Tensor; None for gated attention
    content_bias: Tensor | None
    gate: Tensor | None
    bias: Tensor | None  # [B1, B2, H, T, S]: `batch.flatten_bias`
    offset_bias: Tensor | None  # [H or 1, T + S - 1]
    sinks: Tensor | None  # [H]
    alpha: Any  # Tensor [H] in the compute dtype; None for softmax
    intervals: Intervals
    scale: float
    softcap: float = 0.0  # 0: none
    seed: Tensor | None = None
    gate_activation: str = "identity"
    dropout_p: float = 0.0

    @property
    def sizes(self) -> tuple[int, int, int, int, int, int]:
        """B, H, T, S, the width of scores (D or Ds) and Dv."""
        return *self.scores, self.query.shape[-1], self.value.shape[-1]

    @property
    def scores(self) -> tuple[int, int, int, int]:
        """B, H, T, S."""
        B, *heads, T, _ = self.query.shape
        return B, heads[0] if heads else self.mixing.shape[0], T, self.key.shape[-2]


class Results(NamedTuple):
    """Outputs of a forward pass; `attended` (out before the gate) and `lse` are empty unless they are saved."""

    out: Tensor  # [B, H, T, Dv] in the memory order of the query, or of the value where the query is shared
    attended: Tensor  # also empty without a gate
    #: [B, H, T] in the compute dtype. Of entmax attention [2, B, H, T], the largest score of each row and how far its
    #: threshold is above it: their sum would lose the second in large scores.
    lse: Tensor


class Saved(NamedTuple):
    """What a backward pass reads besides the call."""

    dout: Tensor
    attended: Tensor
    lse: Tensor
    dlse: Tensor | None  # [B, H, T]; None: 0. Comes without a gate that closes heads


class Gradients(NamedTuple):
    """What a backward pass fills: empty where not requested, None where the operator lacks the operand.

    Fields after `dvalue` are partial sums in the compute dtype, which `finish` turns into gradients.
    """

    dquery: Tensor
    dkey: Tensor
    dvalue: Tensor
    dmixing: Any  # Tensor [B, H, Ds]; None for gated attention
    dcontent_bias: Any  # Tensor [B, H, S]; None for gated attention
    dgate: Tensor  # dout * attended, [B, H, T] summed over Dv, or [B, H, T, Dv]
    dbias: Any  # Tensor, as bias, summed over what it was broadcast along
    doffset_bias: Any  # Tensor [B, H, T + S - 1]
    dsinks: Any  # Tensor [B, H, T]
    dalpha: Any  # Tensor [B, H, T]


class Signature:
    """The arguments of an operator's ops, and their conversion from a `Problem` and to a `Call`.

    `operands` are names of `OPERANDS` in their order, with a question mark where they may be None; `options` those of
    `OPTIONS` that the operator has.
    """

    def __init__(
        self,
        name: str,
        operands: tuple[str, ...],
        backends: tuple[Backend, ...],
        options: Iterable[str] = OPTIONS,
    ) -> None:
        self.name = name
        self.operands = tuple(operand.removesuffix("?") for operand in operands)
        self.required = tuple(operand for operand in operands if not operand.endswith("?"))
        self.options = tuple(options)
        self.backends = backends
        self.types = {
            operand.removesuffix("?"): "Tensor?" if operand.endswith("?") else "Tensor"
            for operand in operands
        }
        self.types |= {**_MASK, **{option: OPTIONS[option] for option in self.options}}
        #: Which arguments of an op are tensors, and so are saved for the backward pass.
        self.tensors = tuple(type.startswith("Tensor") for type in self.types.values())
        #: The index of each of `OPERANDS` among the operator's own, or None.
        self._places = [
            self.operands.index(name) if name in self.operands else None for name in OPERANDS
        ]

    @property
    def schema(self) -> str:
        """The arguments as a torch schema."""
        return ", ".join(f"{type} {name}" for name, type in self.types.items())

    def pack(
        self, problem: Problem, seed: Tensor | None = None, *, every_head: bool = False
    ) -> tuple[Any, ...]:
        """The arguments of an op for this problem; with `every_head` it computes closed heads too."""
        p = problem
        operands = [getattr(p, name) for name in self.operands]
        linear = every_head and p.gate is not None and p.gate_activation == "identity"
        activation = gates.LINEAR if linear else p.gate_activation
        options = p.scale, p.softcap, seed, activation, p.dropout_p
        return *operands, *p.intervals, *options[: len(self.options)]

    def unpack(self, arguments: Any) -> Call:
        """The call that `pack` packed."""
        operands: Any = [None if at is None else arguments[at] for at in self._places]
        count = len(self.operands)
        mask = count + len(_MASK)
        intervals = Intervals(*arguments[count:mask])
        return Call(*operands, intervals, *arguments[mask:])  # type: ignore[call-arg]

    def check(self, backend: str | None, call: Call, **others: Any) -> None:
        """Refuse tensors of a call that do not fit each other; `backend` is None in a fake."""
        check_operands(backend, self.required, call, **others)


class Operator(Signature):
    """An operator with a gradient: its signature, its two ops and its `autograd.Function`."""

    def __init__(self, name: str, operands: tuple[str, ...], backends: tuple[Backend, ...]) -> None:
        super().__init__(name, operands, backends)
        self.forward_op, self.backward_op = _define(self)
        # Created here: torch.compile cannot trace its creation at the first call.
        self.function = _function(self)

    def __call__(self, problem: Problem, backend: str, seed: Tensor | None) -> Tensor:
        """Run a valid problem on `backend`; gradients are recorded where an operand requires one."""
        arguments = self.pack(problem, seed)
        if is_recorded(self.name, arguments[: len(self.operands)]):
            return self.function.apply(problem.closed_grad, backend, False, *arguments)  # type: ignore[no-untyped-call, no-any-return]
        return self.forward_op(*arguments, False, backend)[0]  # type: ignore[no-any-return]

    def with_lse(
        self, problem: Problem, backend: str, seed: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The same with `lse` `[B, H, T]`, which is that of the scores: closed heads are computed for it.

        Of entmax attention it is the thresholds, which have no gradient.
        """
        arguments = self.pack(problem, seed, every_head=True)
        if is_recorded(self.name, arguments[: len(self.operands)]):
            return self.function.apply(problem.closed_grad, backend, True, *arguments)  # type: ignore[no-untyped-call, no-any-return]
        out, _, lse = self.forward_op(*arguments, True, backend)
        call = self.unpack(arguments)
        if call.alpha is not None:
            lse = lse.sum(0)
        return gates.without_closed_heads(out, call.gate, call.gate_activation), lse


# ---------------------------------------------------------------------- the ops
def _define(operator: Operator) -> tuple[Any, Any]:
    """Register `heads_kernels::name` and `heads_kernels::name_backward`."""
    rows = ", ".join(f"Tensor d{name}" for name in operator.operands)
    saved = "Tensor dout, Tensor attended, Tensor lse, Tensor? dlse"
    first, count = len(Saved._fields), len(operator.operands)

    def prepare(backend: str | None, *arguments: Any) -> tuple[Call, Results]:
        *packed, save = arguments
        call = operator.unpack(packed)
        operator.check(backend, call)
        return call, _allocate(call, save)

    def prepare_backward(
        backend: str | None, *arguments: Any
    ) -> tuple[Call, Saved, bool, Gradients]:
        *packed, closed_grad, needs = arguments[first:]
        call, read = operator.unpack(packed), Saved(*arguments[:first])
        operator.check(backend, call, saved=read._asdict())
        return call, read, closed_grad, _allocate_gradients(operator, call, needs)

    def forward(*arguments: Any) -> Results:
        *rest, backend = arguments
        call, results = prepare(backend, *rest)
        load(operator.backends, backend).forward(call, results)
        return results

    def backward(*arguments: Any) -> tuple[Tensor, ...]:
        *rest, backend = arguments
        call, read, closed_grad, gradients = prepare_backward(backend, *rest)
        load(operator.backends, backend).backward(call, read, closed_grad, gradients)
        return _present(gradients)

    def forward_fake(*arguments: Any) -> Results:
        return prepare(None, *arguments[:-1])[1]

    def backward_fake(*arguments: Any) -> tuple[Tensor, ...]:
        return _present(prepare_backward(None, *arguments[:-1])[3])

    return define_op(
        operator.name,
        f"({operator.schema}, bool save, str backend) -> (Tensor out, Tensor attended, Tensor lse)",
        forward,
        forward_fake,
        lambda *shapes, **_: forward_flops(*_dense_sizes(operator, shapes)),
    ), define_op(
        f"{operator.name}_backward",
        f"({saved}, {operator.schema}, bool closed_grad, bool[{count}] needs, str backend) -> ({rows})",
        backward,
        backward_fake,
        lambda *shapes, **_: backward_flops(*_dense_sizes(operator, shapes[first:])),
    )


def _dense_sizes(operator: Operator, shapes: Any) -> tuple[int, int, int]:
    """Number of pairs over all heads, width of scores and width of values, from the shapes of an op's arguments."""
    shape = dict(zip(operator.operands, shapes, strict=False))
    B, *heads, T, width = shape["query"]
    H = heads[0] if heads else shape["mixing"][0]
    return B * H * T * shape["key"][-2], width, shape["value"][-1]


def _allocate(call: Call, save: bool) -> Results:
    B, H, T, _, _, Dv = call.sizes
    like = call.query if call.mixing is None else call.value
    keep = save and call.gate is not None
    rows = (B, H, T) if call.alpha is None else (2, B, H, T)
    lse = like.new_empty(rows if save else 0, dtype=compute_dtype(like.dtype))
    out = empty_heads(like, B, H, T, Dv)
    return Results(out, empty_heads(like, B, H, T, Dv) if keep else like.new_empty(0), lse)


def _allocate_gradients(operator: Operator, call: Call, needs: list[bool]) -> Gradients:
    B, H, T, S, width, Dv = call.sizes
    wanted = dict(zip(operator.operands, needs, strict=True))
    dtype = compute_dtype(call.query.dtype)

    def sums(name: str, there: object, *shape: int) -> Tensor | None:
        if name not in wanted:
            return None
        return call.query.new_empty(shape if wanted[name] and there is not None else 0, dtype=dtype)

    return Gradients(
        empty_gradient(call.query, wanted["query"]),
        empty_gradient(call.key, wanted["key"]),
        empty_gradient(call.value, wanted["value"]),
        sums("mixing", call.mixing, B, H, width),
        sums("content_bias", call.content_bias, B, H, S),
        gates.empty_rows(call.gate, wanted["gate"], call.query, B, H, T, Dv),
        sums("bias", call.bias, *(() if call.bias is None else call.bias.shape)),
        sums("offset_bias", call.offset_bias, B, H, max(T + S - 1, 1)),
        sums("sinks", call.sinks, B, H, T),
        sums("alpha", call.alpha, B, H, T),
    )


def _present(gradients: Gradients) -> tuple[Tensor, ...]:
    return tuple(gradient for gradient in gradients if gradient is not None)


# ---------------------------------------------------------------------- autograd
def _function(operator: Operator) -> type[torch.autograd.Function]:
    count = len(operator.operands)

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: Any, closed_grad: bool, backend: str, return_lse: bool, *arguments: Any
        ) -> Tensor | tuple[Tensor, Tensor]:
            out, attended, lse = operator.forward_op(*arguments, True, backend)
            call = operator.unpack(arguments)
            if call.gate is None:
                attended = out
            elif return_lse:
                out = gates.without_closed_heads(out, call.gate, call.gate_activation)
            pairs = list(zip(arguments, operator.tensors, strict=True))
            ctx.save_for_backward(attended, lse, *(a for a, tensor in pairs if tensor))
            ctx.constants = [a for a, tensor in pairs if not tensor]
            ctx.options = closed_grad, backend
            return (out, lse) if return_lse else out

        @staticmethod
        def backward(ctx: Any, dout: Tensor, dlse: Tensor | None = None) -> Any:
            attended, lse, *kept = ctx.saved_tensors
            tensors, constants = iter(kept), iter(ctx.constants)
            arguments = [next(tensors if tensor else constants) for tensor in operator.tensors]
            closed_grad, backend = ctx.options
            needs = list(ctx.needs_input_grad[3 : 3 + count])
            saved = Saved(dout, attended, lse, None if dlse is None else dlse.contiguous())
            rows = operator.backward_op(*saved, *arguments, closed_grad, needs, backend)
            call = operator.unpack(arguments)
            grads = tuple(
                finish(name, row, call, closed_grad) if needed else None
                for name, row, needed in zip(operator.operands, rows, needs, strict=True)
            )
            grads = first_order_only(operator.name, grads, (dout, dlse, *arguments[:count]))
            return None, None, None, *grads, *([None] * (len(arguments) - count))

    Attention.__name__ = Attention.__qualname__ = operator.name
    return Attention


def finish(name: str, sums: Tensor, call: Call, closed_grad: bool) -> Tensor:
    """The gradient of an operand from the `sums` of kernels (see `Gradients`)."""
    if name == "mixing":
        grad = sums.sum(0)  # [H, Ds]
        if not closed_grad:
            grad = grad.masked_fill(call.mixing == 0, 0.0)
        return grad.to(call.mixing.dtype)
    if name == "content_bias" and call.content_bias is not None:
        return sums.to(call.content_bias.dtype)
    if name == "bias" and call.bias is not None:
        return sums.to(call.bias.dtype)
    if name == "offset_bias" and call.offset_bias is not None:
        shared = (0,) if call.offset_bias.shape[0] == sums.shape[1] else (0, 1)
        return sums.sum(shared).reshape(call.offset_bias.shape).to(call.offset_bias.dtype)
    if name == "sinks" and call.sinks is not None:
        return sums.sum((0, 2)).to(call.sinks.dtype)
    if name == "alpha":
        return sums.sum((0, 2))
    if name == "gate" and call.gate is not None:
        return gates.gate_gradient(sums, call.gate, call.gate_activation, closed_grad)
    return sums
