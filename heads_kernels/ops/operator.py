"""An operator, declared once, and what follows from the declaration.

`Operator("gated_attention", ("query", "key", "value", "gate"), BACKENDS)` is all that an operator's own file says. From
it and from `OPERANDS` and `OPTIONS` follow, by plain functions: the schemas of its forward and backward op, their fakes
and FLOPs, how a `Problem` becomes the arguments of an op and these the `Call` that a backend reads, and the
`autograd.Function`. A backend's module fills what is allocated here:

    forward(call: Call, results: Results) -> None
    backward(call: Call, saved: Saved, closed_grad: bool, gradients: Gradients) -> None
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from heads_kernels.dispatch import Backend
from heads_kernels.flops import backward_flops, forward_flops
from heads_kernels.mask import Intervals
from heads_kernels.ops import gate as gates
from heads_kernels.ops.autograd import first_order_only, is_recorded
from heads_kernels.ops.layout import compute_dtype, empty_gradient, empty_heads
from heads_kernels.ops.library import define_op, load
from heads_kernels.ops.validation import check_operands
from heads_kernels.problem import Problem

#: Tensors that get a gradient, in the order of ops, and how schemas have them.
OPERANDS: Final = {
    "query": "Tensor",
    "key": "Tensor",
    "value": "Tensor",
    "mixing": "Tensor",
    "content_bias": "Tensor?",
    "gate": "Tensor?",
}
#: What every operator takes behind its operands: the parts of `Intervals`, then the rest of a `Call`.
OPTIONS: Final = {
    "band_lo": "SymInt",
    "band_hi": "SymInt",
    "k_lo": "Tensor?",
    "k_hi": "Tensor?",
    "key_visible": "Tensor?",
    "dense_mask": "Tensor?",
    "seed": "Tensor?",
    "scale": "float",
    "gate_activation": "str",
    "dropout_p": "float",
}
_MASK_PARTS: Final = len(Intervals._fields)


class Call(NamedTuple):
    """What a backend is asked to compute; operands that the operator does not have are None."""

    query: Tensor
    key: Tensor
    value: Tensor
    mixing: Any  # Tensor; None for gated attention
    content_bias: Tensor | None
    gate: Tensor | None
    intervals: Intervals
    seed: Tensor | None
    scale: float
    gate_activation: str
    dropout_p: float

    @property
    def sizes(self) -> tuple[int, int, int, int, int, int]:
        """B, H, T, S, the width of scores (D or Ds) and Dv."""
        H = self.query.shape[1] if self.mixing is None else self.mixing.shape[0]
        T, width = self.query.shape[-2:]
        return self.query.shape[0], H, T, self.key.shape[-2], width, self.value.shape[-1]


class Results(NamedTuple):
    """Of a forward pass; for a backward pass also `attended` (out before the gate) and `lse`, else empty."""

    out: Tensor  # [B, H, T, Dv], in memory as the query, or the value where the query is shared
    attended: Tensor  # empty where there is no gate too
    lse: Tensor  # [B, H, T] in the compute dtype


class Saved(NamedTuple):
    """What a backward pass reads besides the call."""

    dout: Tensor
    attended: Tensor
    lse: Tensor


class Gradients(NamedTuple):
    """What a backward pass fills: those not asked for are empty, those the operator does not have None.

    The last three are what kernels sum: `finish` makes gradients of them.
    """

    dquery: Tensor
    dkey: Tensor
    dvalue: Tensor
    dmixing: Any  # Tensor [B, H, Ds] in the compute dtype; None for gated attention
    dcontent_bias: Any  # Tensor [B, H, S] in the compute dtype; None for gated attention
    dgate: (
        Tensor  # dout * attended, [B, H, T] summed over Dv, or [B, H, T, Dv], in the compute dtype
    )


class Operator:
    """An operator by its operands (names of `OPERANDS`, in their order) and its table of backends."""

    def __init__(self, name: str, operands: tuple[str, ...], backends: tuple[Backend, ...]) -> None:
        self.name = name
        self.operands = operands
        self.backends = backends
        self.types = {**{name: OPERANDS[name] for name in operands}, **OPTIONS}
        #: Which arguments of an op are tensors, and so are saved for the backward pass.
        self.tensors = tuple(type.startswith("Tensor") for type in self.types.values())
        #: Where each of `OPERANDS` is among the operator's own.
        self._places = [operands.index(name) if name in operands else None for name in OPERANDS]
        self.forward_op, self.backward_op = _define(self)

    @cached_property
    def function(self) -> Any:
        """The `autograd.Function` around the two ops."""
        return _function(self)

    def pack(self, problem: Problem, seed: Tensor | None) -> tuple[Any, ...]:
        """The arguments of both ops that say what is computed."""
        p = problem
        operands = [getattr(p, name) for name in self.operands]
        return *operands, *p.intervals, seed, p.scale, p.gate_activation, p.dropout_p

    def unpack(self, arguments: Any) -> Call:
        """The call that `pack` packed."""
        operands = [None if at is None else arguments[at] for at in self._places]
        count = len(self.operands)
        mask = count + _MASK_PARTS
        intervals = Intervals(*arguments[count:mask])
        return Call._make((*operands, intervals, *arguments[mask:]))

    def __call__(self, problem: Problem, backend: str, seed: Tensor | None) -> Tensor:
        """Run a valid problem on `backend`; gradients are recorded where an operand asks for one."""
        arguments = self.pack(problem, seed)
        if is_recorded(self.name, arguments[: len(self.operands)]):
            return self.function.apply(problem.closed_grad, backend, *arguments)  # type: ignore[no-any-return]
        return self.forward_op(*arguments, False, backend)[0]  # type: ignore[no-any-return]

    def with_lse(self, problem: Problem, backend: str, seed: Tensor | None = None) -> Results:
        """Run a valid problem without gradients, and give `lse` beside the output."""
        with torch.no_grad():
            return Results(*self.forward_op(*self.pack(problem, seed), True, backend))


# ---------------------------------------------------------------------- the ops
def _define(operator: Operator) -> tuple[Any, Any]:
    """Register `heads_kernels::name` and `heads_kernels::name_backward`."""
    call = ", ".join(f"{type} {name}" for name, type in operator.types.items())
    rows = ", ".join(f"Tensor d{name}" for name in operator.operands)
    saved = ", ".join(f"Tensor {name}" for name in Saved._fields)
    first, count = len(Saved._fields), len(operator.operands)

    def prepare(backend: str | None, *arguments: Any) -> tuple[Call, Results]:
        *packed, save = arguments
        call = operator.unpack(packed)
        _check(operator, backend, call)
        return call, _allocate(call, save)

    def prepare_backward(
        backend: str | None, *arguments: Any
    ) -> tuple[Call, Saved, bool, Gradients]:
        *packed, closed_grad, needs = arguments[first:]
        call, read = operator.unpack(packed), Saved(*arguments[:first])
        _check(operator, backend, call, read)
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
        f"({call}, bool save, str backend) -> (Tensor out, Tensor attended, Tensor lse)",
        forward,
        forward_fake,
        lambda *shapes, **_: forward_flops(*_dense_sizes(operator, shapes)),
    ), define_op(
        f"{operator.name}_backward",
        f"({saved}, {call}, bool closed_grad, bool[{count}] needs, str backend) -> ({rows})",
        backward,
        backward_fake,
        lambda *shapes, **_: backward_flops(*_dense_sizes(operator, shapes[first:])),
    )


def _check(operator: Operator, backend: str | None, call: Call, saved: Saved | None = None) -> None:
    """Refuse tensors that do not fit each other; `backend` is None in a fake."""
    needed = [name for name in operator.operands if OPERANDS[name] == "Tensor"]
    check_operands(
        backend,
        {name: getattr(call, name) for name in needed},
        call.intervals,
        content_bias=call.content_bias,
        gate=call.gate,
        gate_activation=call.gate_activation,
        seed=call.seed,
        saved={} if saved is None else saved._asdict(),
    )


def _dense_sizes(operator: Operator, shapes: Any) -> tuple[int, int, int]:
    """Pairs of all heads, the width of scores and that of values, from the shapes of an op's arguments."""
    shape = dict(zip(operator.operands, shapes, strict=False))
    B, *heads, T, width = shape["query"]
    H = heads[0] if heads else shape["mixing"][0]
    return B * H * T * shape["key"][-2], width, shape["value"][-1]


def _allocate(call: Call, save: bool) -> Results:
    B, H, T, _, _, Dv = call.sizes
    like = call.query if call.mixing is None else call.value
    keep = save and call.gate is not None
    lse = like.new_empty((B, H, T) if save else 0, dtype=compute_dtype(like.dtype))
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
    )


def _present(gradients: Gradients) -> tuple[Tensor, ...]:
    return tuple(gradient for gradient in gradients if gradient is not None)


# ---------------------------------------------------------------------- autograd
def _function(operator: Operator) -> type[torch.autograd.Function]:
    count = len(operator.operands)

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, closed_grad: bool, backend: str, *arguments: Any) -> Tensor:
            out, attended, lse = operator.forward_op(*arguments, True, backend)
            if operator.unpack(arguments).gate is None:
                attended = out
            pairs = list(zip(arguments, operator.tensors, strict=True))
            ctx.save_for_backward(attended, lse, *(a for a, tensor in pairs if tensor))
            ctx.constants = [a for a, tensor in pairs if not tensor]
            ctx.options = closed_grad, backend
            return out  # type: ignore[no-any-return]

        @staticmethod
        def backward(ctx: Any, dout: Tensor) -> Any:
            attended, lse, *saved = ctx.saved_tensors
            tensors, constants = iter(saved), iter(ctx.constants)
            arguments = [next(tensors if tensor else constants) for tensor in operator.tensors]
            closed_grad, backend = ctx.options
            needs = list(ctx.needs_input_grad[2 : 2 + count])
            rows = operator.backward_op(
                dout, attended, lse, *arguments, closed_grad, needs, backend
            )
            call = operator.unpack(arguments)
            grads = tuple(
                finish(name, row, call, closed_grad) if needed else None
                for name, row, needed in zip(operator.operands, rows, needs, strict=True)
            )
            grads = first_order_only(operator.name, grads, (dout, *arguments[:count]))
            return None, None, *grads, *([None] * (len(arguments) - count))

    Attention.__name__ = Attention.__qualname__ = operator.name
    return Attention


def finish(name: str, sums: Tensor, call: Call, closed_grad: bool) -> Tensor:
    """The gradient of an operand from what kernels give (see `Gradients`)."""
    if name == "mixing":
        grad = sums.sum(0)  # [H, Ds]
        if not closed_grad:
            grad = grad.masked_fill(call.mixing == 0, 0.0)
        return grad.to(call.mixing.dtype)
    if name == "content_bias" and call.content_bias is not None:
        return sums.to(call.content_bias.dtype)
    if name == "gate" and call.gate is not None:
        return gates.gate_gradient(sums, call.gate, call.gate_activation, closed_grad)
    return sums
