"""Relevance rules of PyTorch functions, by name: which of their arguments receive relevance, and by which rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NoReturn, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from heads_kernels.analysis.lrp import rules
from heads_kernels.call import Call
from heads_kernels.checks import refuse
from heads_kernels.nn.attention_call import blocks
from heads_kernels.ops import eager, scores
from heads_kernels.ops import gate as gates

#: Computes the relevance of a function's inputs from that of its output.
Back: TypeAlias = Callable[[Tensor], Sequence[Tensor]]
#: The inputs of a function that may receive relevance, and what computes it.
Step: TypeAlias = tuple[Sequence[Any], Back]

#: Each output element depends on one input element, which receives its relevance unchanged.
_ELEMENTWISE: Final = (
    "celu", "clamp", "clamp_max", "clamp_min", "dropout", "elu", "gelu", "hardsigmoid", "hardswish",
    "hardtanh", "leaky_relu", "mish", "neg", "negative", "prelu", "relu", "relu6", "selu", "sigmoid", "silu",
    "softplus", "tanh",
)  # fmt: skip
#: Endings of the names of modules that divide by the root mean square.
_NORMS: Final = ("RMSNorm", "T5LayerNorm")


def carries(thing: object) -> bool:
    """Whether a tensor carries relevance: it was computed from heads, for of nothing else is the graph recorded."""
    return (
        isinstance(thing, Tensor)
        and thing.grad_fn is not None
        and thing.is_floating_point()
        and thing.numel() > 0  # else of a layer without heads
    )


def refusing(name: str, why: str) -> Callable[[Tensor], NoReturn]:
    """For a function without a rule: raises once relevance arrives there, and not before."""

    def back(given: Tensor) -> NoReturn:
        known = "linear maps, layer norms, sums and products of tensors, activations, reshaping and the operators"
        was = f"computes {name}, {why}, between its heads and the output"
        refuse("model", was, f"there are rules for {known}; this includes what `output` computes")

    return back


# ---------------------------------------------------------------------- steps
def module_step(module: nn.Module, input: Tensor, output: Tensor) -> Step | None:
    """The step of a module of transformers that counts as one function: an activation or an RMS norm."""
    if type(module).__name__.endswith(_NORMS):
        found = [getattr(module, name, None) for name in ("variance_epsilon", "eps", "epsilon")]
        eps = next((each for each in found if each is not None), torch.finfo(input.dtype).eps)
        plain = output.detach()
        return [input], lambda given: [rules.rms_norm(input, plain, eps, given)]
    return _identity(input) if type(module).__module__ == "transformers.activations" else None


@torch.enable_grad()
def gate_step(heads: Tensor, gate: Tensor, activation: str) -> Step:
    """The step of heads times gates: like any product, it gives equal parts to the factors that carry relevance."""
    gate = gates.as_4d(gate).expand_as(heads)
    is_open = gate != 0 if activation == "identity" else 1
    factors = [heads, gate] if carries(gate) else [heads]
    return factors, lambda given: [given * is_open / len(factors)] * len(factors)


@torch.enable_grad()
def attention_step(call: Call, full: bool) -> Step:
    """The step of attention before its gate; unless `full`, probabilities are constants."""
    B, H, T, S = call.sizes

    def per_head(x: Tensor) -> Tensor:
        """`[B, H, ...]`: heads that share x each get a copy, whose relevance autograd adds up."""
        x = x if x.dim() == 4 else x[:, None]
        copies = H // max(x.shape[1], 1)
        return x[:, :, None].expand(-1, -1, copies, -1, -1).flatten(1, 2)

    def probabilities(rows: slice) -> Tensor:
        return eager.row_probabilities(scores.of_rows(call, rows.start, rows.stop))

    value = per_head(call.value)
    if not full:
        rows = blocks(T, B * H * S)
        return [value], lambda R: [rules.attention_values(probabilities, value, R, rows)]
    inputs = [per_head(call.query), per_head(call.key), value]
    if call.content_bias is not None:
        inputs.append(call.content_bias)

    def to_all(relevance: Tensor) -> Sequence[Tensor]:
        query, key = inputs[0].to(relevance.dtype), inputs[1]
        if call.mixing is not None:
            query = query * call.mixing[:, None]
        if call.content_bias is not None:  # as one more feature, which is 1 in every query
            query = functional.pad(query, (0, 1), value=1.0)
            key = torch.cat((key, call.content_bias[..., None]), -1)
        rows = blocks(T, B * H * S * call.Dv)
        features = blocks(call.Dv, B * H * S * rows[0].stop)
        operands = query * call.scale, key, value
        found = rules.attention(probabilities, *operands, relevance, rows, features)
        of_query, of_key, of_value = found
        parts = [of_query[..., : call.D], of_key[..., : call.D], of_value]
        return parts if call.content_bias is None else [*parts, of_key[..., call.D]]

    return inputs, to_all


# ---------------------------------------------------------------------- the table
def _identity(input: Tensor, *rest: Any, **options: Any) -> Step:
    return [input], lambda given: [given]


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Step:
    if type(weight) not in (
        Tensor,
        nn.Parameter,
    ):  # of torchao, which computes with few of its bits
        return [input], refusing("linear", f"whose weight is quantised ({type(weight).__name__})")
    return [input], lambda given: [rules.linear(input, weight, bias, given)]


def _addmm(input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Step:
    """Used by transformers' `Conv1D`."""
    if (beta, alpha) != (1, 1) or input.dim() != 1:
        return [mat1], refusing("addmm", "with factors, or with a bias that is not a vector")
    return [mat1], lambda given: [rules.linear(mat1, mat2.T, input, given)]


def _layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *rest: Any,
) -> Step:
    if len(normalized_shape) != 1:
        return [input], refusing("layer_norm", f"over {len(normalized_shape)} dimensions")
    return [input], lambda given: [rules.norm(input, weight, bias, eps, given)]


def _add(input: Any, other: Any, *, alpha: float = 1) -> Step:
    """Tensors get a share even if they carry no relevance; numbers get none."""
    terms = [(x, factor) for x, factor in ((input, 1), (other, alpha)) if isinstance(x, Tensor)]
    inputs = [x for x, _ in terms]
    if len(terms) == 1:
        return inputs, lambda given: [given]
    return inputs, lambda given: rules.add([x * factor for x, factor in terms], given)


def _sub(input: Any, other: Any, *, alpha: float = 1) -> Step:
    """In either order: the rules treat both signs alike."""
    return _add(input, other, alpha=-alpha)


def _matmul(input: Tensor, other: Tensor) -> Step:
    if carries(other) or other.dim() != 2:
        return [input, other], refusing("matmul", "whose second factor is not a weight matrix")
    return [input], lambda given: [rules.linear(input, other.mT, None, given)]


def _mul(input: Any, other: Any) -> Step:
    """Each factor contributes the whole product, so those that carry relevance get equal parts."""
    factors = [(x, beside) for x, beside in ((input, other), (other, input)) if carries(x)]

    def back(given: Tensor) -> Sequence[Tensor]:
        part = given / len(factors)
        return [(part * (beside != 0)).sum_to_size(x.shape) for x, beside in factors]

    return [x for x, _ in factors], back


def _div(input: Any, other: Any) -> Step:
    if carries(other):
        return [input, other], refusing("div", "by a tensor that depends on heads")
    return [input], lambda given: [given.sum_to_size(input.shape)]


def _weighted(function: Any, input: Tensor, *rest: Any, **options: Any) -> Step:
    def over(x: Tensor) -> Tensor:
        result: Tensor = function(x, *rest, **options)
        return result

    if over(input).shape[:1] != input.shape[:1]:
        return [input], refusing(function.__name__, "over the examples")
    return [input], lambda given: [rules.weighted(over, input, given)]


RULES: Final[dict[str, Callable[..., Step]]] = {
    "linear": _linear,
    "addmm": _addmm,
    "matmul": _matmul,
    "layer_norm": _layer_norm,
    "add": _add,
    "sub": _sub,
    "__rsub__": _sub,
    "mul": _mul,
    "div": _div,
    "sum": partial(_weighted, torch.sum),
    "mean": partial(_weighted, torch.mean),
    **dict.fromkeys(_ELEMENTWISE, _identity),
}
