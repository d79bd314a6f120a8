"""Attention as torch ops, the same for every operator, and its gradient.

`heads_kernels::attention` and `attention_backward` take the fields of a `Call`, from which their schemas, fakes and
FLOP counts follow. A backend's module fills the buffers that are allocated here:

    forward(call: Call, results: Results) -> None
    backward(call: Call, saved: Saved, gradients: Gradients) -> None

Gradients are recorded by an `autograd.Function` around the plain op, which is skipped if nothing requires one. Per call
this costs about half as much as a `custom_op` with registered autograd.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from heads_kernels.call import OPERANDS, SCHEMA, Call, backward_flops, compute_dtype, forward_flops
from heads_kernels.ops import derivatives, direct
from heads_kernels.ops import gate as gates
from heads_kernels.ops.buffers import empty_gradient, empty_heads
from heads_kernels.ops.library import FIELDS, check_arguments, define_op, dense_sizes, load


class Results(NamedTuple):
    """Outputs of a forward pass; `attended` (out before the gate) and `lse` are empty unless they are saved.

    `attended` is saved because `dgate` is `rowsum(dout * attended)`, and `attended` cannot be recovered from `out` if a
    gate is 0.
    """

    out: Tensor  # [B, H, T, Dv] in the memory order of the query, or of the value if the query is shared
    attended: Tensor  # also empty without a gate
    #: [B, H, T] in the compute dtype. For entmax [2, B, H, T]: the largest score of each row, and the distance of the
    #: threshold above it. In their sum, rounding of a large score would lose the distance.
    lse: Tensor


class Saved(NamedTuple):
    """The tensors that a backward pass reads besides the call."""

    dout: Tensor
    attended: Tensor
    lse: Tensor
    dlse: Tensor | None  # [B, H, T]; None: 0. Only in calls without a gate


class Gradients(NamedTuple):
    """Buffers that a backward pass fills, one for each of `OPERANDS`; empty if it is not requested.

    Fields after `dvalue` are partial sums in the compute dtype, which `finish` turns into gradients.
    """

    dquery: Tensor
    dkey: Tensor
    dvalue: Tensor
    dmixing: Tensor  # [B, H, Ds]
    dcontent_bias: Tensor  # [B, H, S]
    dgate: Tensor  # dout * attended, [B, H, T] summed over Dv, or [B, H, T, Dv] of an elementwise gate
    dbias: Tensor  # as bias, summed over what it was broadcast along
    doffset_bias: Tensor  # [B, H, T + S - 1]
    dsinks: Tensor  # [B, H, T]
    dalpha: Tensor  # [B, H, T]


# ---------------------------------------------------------------------- running a call
def attend(call: Call, backend: str) -> Tensor:
    """`out` of a valid call; gradients are recorded where an operand requires one."""
    if _needs_formula(call, backend):
        return derivatives.attend(call)[0]
    if _is_recorded(call):
        return record(call, backend)  # type: ignore[no-any-return]
    return _run(call, False, backend)[0]  # type: ignore[no-any-return]


def attend_with_lse(call: Call, backend: str) -> tuple[Tensor, Tensor]:
    """`out` and `lse` `[B, H, T]` of a valid call.

    `lse` does not depend on the gate, so the op runs without a gate and computes closed heads too; the gate multiplies
    the result. A gate of 0 then gets its true gradient when partial results are merged.
    """
    if _needs_formula(call, backend):
        return derivatives.attend(call)
    bare = call._replace(gate=None, gate_activation="identity")
    if _is_recorded(call):
        out, lse = record(bare, backend, return_lse=True)
    else:
        out, _, lse = _run(bare, True, backend)
    if call.gate is None:
        return out, lse
    hidden = lse.detach() == float("-inf")
    if call.sinks is not None:
        # The lse of a row that sees no key is its sink; with a large sink, that of other rows may be too.
        alone = lse.detach() == call.sinks.detach().to(lse.dtype)[:, None]
        hidden = alone & (out.detach() == 0).all(-1)
    return gates.multiply(out, call, hidden), lse


def _run(call: Call, save: bool, backend: str) -> Any:
    """What `attention_op` returns for a valid call."""
    tensors: Any = call[:_TENSORS]
    if not direct.runs_without_op(backend, tensors):
        return attention_op(*call, save, backend)
    results = _allocate(call, save)
    load(backend).forward(call, results)
    return results


def _is_recorded(call: Call) -> bool:
    """Whether an operand of the call requires a gradient."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in call.operands)


def _requires_grad(tensor: Tensor | None) -> bool:
    """Whether a tensor, or one that transforms of `torch.func` have wrapped in it, requires a gradient."""
    if tensor is None:
        return False
    while not tensor.requires_grad:
        if not torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return False
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return True


def _is_batched(tensor: Tensor | None) -> bool:
    """Whether a tensor stands for several: under `torch.vmap`, or, as a gradient, with `is_grads_batched`."""
    functorch = torch._C._functorch
    return tensor is not None and (functorch.is_batchedtensor(tensor) or functorch.is_legacy_batchedtensor(tensor))


def _needs_formula(call: Call, backend: str) -> bool:
    """Whether the call needs derivatives that `derivatives` has and its op does not.

    Raises RuntimeError if `backend` is not "eager": the derivatives would silently be missing.
    """
    transformed = torch._C._are_functorch_transforms_active()
    forward_mode = forward_ad._current_level >= 0
    if torch.compiler.is_compiling():
        # Tensors show neither tangents nor that they require a gradient there: whatever is differentiated counts.
        forward_mode = forward_mode or (transformed and _is_differentiated())
        is_recorded = transformed and _is_recorded(call)
    else:
        given = call.operands if forward_mode else ()
        forward_mode = False
        # Not in a helper, which Dynamo would still compile where it falls back to Python for this function.
        for operand in given:
            if operand is not None and forward_ad.unpack_dual(operand).tangent is not None:  # type: ignore[no-untyped-call]
                forward_mode = True
        is_recorded = transformed and torch.is_grad_enabled() and any(map(_requires_grad, call.operands))
    if backend == "eager":
        return forward_mode or transformed
    if forward_mode or is_recorded:
        raise RuntimeError(
            f"{call.operator} has a reverse-mode derivative only, outside of torch.func, on backend {backend!r}; use "
            'torch.autograd.grad or backward(), or pass backend="eager" where jvp, grad or jacrev of torch.func are '
            "needed."
        )
    return False


def _is_differentiated() -> bool:
    """Whether a transform of `torch.func` differentiates here."""
    kinds = torch._C._functorch.TransformType
    stack = torch._C._functorch.get_interpreter_stack() or ()
    return any(each.key() in (kinds.Grad, kinds.Jvp) for each in stack)


#: As `torch.compiler.assume_constant_result` marks it, which would import Dynamo.
_is_differentiated._dynamo_marked_constant = True  # type: ignore[attr-defined]


# ---------------------------------------------------------------------- the ops
def _forward(runs: bool, *arguments: Any) -> Results:
    *fields, save, backend = arguments
    call = Call(*fields)
    check_arguments(backend if runs else None, call, True)
    results = _allocate(call, save)
    if runs:
        load(backend).forward(call, results)
    return results


def _backward(runs: bool, *arguments: Any) -> list[Tensor]:
    saved, (*fields, needs, backend) = Saved(*arguments[:_SAVED]), arguments[_SAVED:]
    call = Call(*fields)
    check_arguments(backend if runs else None, call, True, **saved._asdict())
    gradients = allocate_gradients(call, needs)
    if runs:
        load(backend).backward(call, saved, gradients)
    return [gradient for gradient, need in zip(gradients, needs, strict=True) if need]


def _allocate(call: Call, save: bool) -> Results:
    B, H, T, Dv = call.B, call.H, call.T, call.Dv
    like = call.query if call.mixing is None else call.value
    keep = save and call.gate is not None
    rows = (B, H, T) if call.alpha is None else (2, B, H, T)
    lse = like.new_empty(rows if save else 0, dtype=compute_dtype(like.dtype))
    out = empty_heads(like, B, H, T, Dv)
    return Results(out, empty_heads(like, B, H, T, Dv) if keep else like.new_empty(0), lse)


def allocate_gradients(call: Call, needs: Sequence[bool]) -> Gradients:
    """Buffers for the gradients of the operands that `needs` names."""
    query, dtype = call.query, compute_dtype(call.query.dtype)
    absent = query.new_empty(0)
    no_sums = absent if dtype == query.dtype else absent.to(dtype)
    gradients = [absent] * _OF_KERNELS + [no_sums] * (len(OPERANDS) - _OF_KERNELS)
    for at, need in enumerate(needs):
        operand: Any = call[at] if need else None
        if operand is None:
            continue
        if at < _OF_KERNELS:
            gradients[at] = empty_gradient(operand)
        else:
            gradients[at] = query.new_empty(_shape_of_sums(OPERANDS[at], call), dtype=dtype)
    return Gradients(*gradients)


def _shape_of_sums(name: str, call: Call) -> tuple[int, ...]:
    """The shape of the partial sums of an operand; see `Gradients`."""
    B, H, T, S = call.sizes
    if name == "mixing":
        return B, H, call.D
    if name == "content_bias":
        return B, H, S
    if name == "gate" and call.gate is not None and gates.is_elementwise(call.gate):
        return B, H, T, call.Dv
    if name == "bias" and call.bias is not None:
        return tuple(call.bias.shape)
    return (B, H, max(T + S - 1, 1)) if name == "offset_bias" else (B, H, T)


_SAVED = len(Saved._fields)

attention_op = define_op(
    "attention",
    f"({FIELDS}, bool save, str backend) -> (Tensor out, Tensor attended, Tensor lse)",
    _forward,
    lambda *shapes, **_: forward_flops(*dense_sizes(shapes)),
)
#: Returns the gradients, or partial sums of them, of the operands that `needs` names, in their order.
backward_op = define_op(
    "attention_backward",
    f"(Tensor dout, Tensor attended, Tensor lse, Tensor? dlse, {FIELDS}, bool[{len(OPERANDS)}] needs, str backend)"
    " -> Tensor[]",
    _backward,
    lambda *shapes, **_: backward_flops(*dense_sizes(shapes[_SAVED:])),
)


# ---------------------------------------------------------------------- autograd
#: How many operands have gradients that need no last step (`finish`): query, key and value.
_OF_KERNELS = 3
#: How many of the fields of a call are tensors, which come first.
_TENSORS = sum(type.startswith("Tensor") for type in SCHEMA.values())


def record(call: Call, backend: str, return_lse: bool = False, results: Any = None) -> Any:
    """`out`, or `out` and `lse`, of a call, with a gradient.

    `results` are those of the forward op if they have been computed without it (`direct.attend`).
    """
    operands: Any = call.operands
    if torch.compiler.is_dynamo_compiling():
        # Dynamo traces no autograd function that gets a tensor twice, as in self-attention without projections.
        operands = list(operands)
        for at, operand in enumerate(operands):
            if operand is not None and any(operand is other for other in operands[:at]):
                operands[at] = operand.view_as(operand)
    elif torch._C._get_tracing_state() is not None:
        # The trace would compute with the tensors of `call` whatever it is given.
        raise RuntimeError(f"{call.operator} has no gradient in torch.jit.trace; trace under torch.no_grad().")
    return _Attention.apply((call, backend, return_lse, results), *operands)  # type: ignore[no-untyped-call]


class _Attention(torch.autograd.Function):
    """Takes the arguments of `record`, and the operands of the call, since autograd does not see those in a tuple."""

    @staticmethod
    def forward(ctx: Any, arguments: Any, *operands: Tensor | None) -> Any:
        call, backend, return_lse, results = arguments
        out, attended, lse = results or _run(call, True, backend)
        if call.gate is None:
            attended = out
        ctx.save_for_backward(attended, lse, *call[:_TENSORS])
        ctx.constants = call[_TENSORS:]
        ctx.backend = backend
        return (out, lse) if return_lse else out

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dlse: Tensor | None = None) -> Any:
        attended, lse, *tensors = ctx.saved_tensors
        call = Call._make((*tensors, *ctx.constants))
        needs = ctx.needs_input_grad[1:]
        create_graph = torch.is_grad_enabled()
        batched = not torch.compiler.is_compiling() and any(map(_is_batched, (dout, dlse)))
        if ctx.backend == "eager" and (create_graph or batched):
            return None, *_gradients_of_formula(call, needs, dout, dlse)
        if batched:
            raise RuntimeError(
                f'{call.operator} has no batched gradients on backend {ctx.backend!r}: pass backend="eager", or compute'
                " them one after the other, without is_grads_batched, vectorize=True or torch.vmap."
            )
        saved = Saved(dout, attended, lse, None if dlse is None else dlse.contiguous())
        found = direct.backward(call, saved, needs) if ctx.backend == "cpu" else None
        if found is None and not create_graph and direct.runs_without_op(ctx.backend, (*tensors, *saved)):
            found = _backward(True, *saved, *call, needs, ctx.backend)  # checks what hooks of saved tensors give
        if found is None:
            found = backward_op(*saved, *call, needs, ctx.backend)
        sums = iter(found)
        grads = [finish(name, next(sums), call) if need else None for name, need in zip(OPERANDS, needs, strict=True)]
        if create_graph:
            inputs = dout, dlse, *call.operands
            grads = _FirstOrderOnly.apply(call.operator, len(grads), *grads, *inputs)  # type: ignore[no-untyped-call]
        return None, *grads


def _gradients_of_formula(call: Call, needs: Sequence[bool], dout: Tensor, dlse: Tensor | None) -> list[Tensor | None]:
    """Gradients of the operands that `needs` names by plain operations, None for the others.

    They are differentiable where gradients are enabled.
    """
    operands: Any = [each for each, need in zip(call.operands, needs, strict=True) if need]
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        results = derivatives.attend(call)[: 1 if dlse is None else 2]
    starts = (dout,) if dlse is None else (dout, dlse)
    grads = torch.autograd.grad(results, operands, starts, create_graph=create_graph, allow_unused=True)
    found = iter(grads)
    return [next(found) if need else None for need in needs]


class _FirstOrderOnly(torch.autograd.Function):
    """Passes the first `count` tensors, gradients, through and raises where they are differentiated again, by any."""

    @staticmethod
    def forward(ctx: Any, operator: str, count: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.operator = operator
        return tuple(tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError(
            f'{ctx.operator} has no second derivative: its backward pass is a fused kernel. Pass backend="eager" '
            "where gradients of gradients are needed, or leave out create_graph=True."
        )


def finish(name: str, sums: Tensor, call: Call) -> Tensor:
    """The gradient of an operand from the `sums` of kernels (see `Gradients`)."""
    if name in ("query", "key", "value"):
        return sums
    operand = getattr(call, name)
    if name == "gate":
        return gates.gate_gradient(sums, operand, call.gate_activation, call.closed_grad)
    if name == "mixing":
        sums = sums.sum(0)  # [H, Ds]
        if not call.closed_grad:
            sums = sums.masked_fill(operand == 0, 0.0)
    elif name == "offset_bias":
        shared = (0,) if operand.shape[0] == sums.shape[1] else (0, 1)
        sums = sums.sum(shared).reshape(operand.shape)
    elif name in ("sinks", "alpha"):
        sums = sums.sum((0, 2))
    return sums.to(operand.dtype)
