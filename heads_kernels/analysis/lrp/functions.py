"""Relevance rules of PyTorch functions, by name: which of their arguments receive relevance, and by which rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NoReturn, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from heads_kernels.analysis.lrp import rules
from heads_kernels.checks import refuse
from heads_kernels.nn.attention_call import AttentionCall, blocks
from heads_kernels.ops import formula
from heads_kernels.ops import gate as gates

#: Computes the relevance of a function's inputs from that of its outputs.
Back: TypeAlias = Callable[[Sequence[Tensor]], Sequence[Tensor]]
#: The inputs of a function that may receive relevance, and what computes it.
Step: TypeAlias = tuple[Sequence[Any], Back]
#: Whether a tensor carries relevance.
Carries: TypeAlias = Callable[[object], bool]

#: Elements of the output are copies of input elements, or constants: relevance flows as gradients do.
MOVING: Final = {
    "T", "H", "mT", "mH", "__getitem__", "cat", "chunk", "clone", "concat", "contiguous", "expand",
    "expand_as", "flatten", "flip", "gather", "hstack", "index_select", "masked_fill", "movedim",
    "moveaxis", "narrow", "pad", "permute", "repeat", "repeat_interleave", "reshape", "roll",
    "select", "split", "split_with_sizes", "squeeze", "stack", "swapaxes", "t", "take_along_dim",
    "tensor_split", "tile", "transpose", "unbind", "unflatten", "unsqueeze", "view", "view_as",
    "vstack", "where", "to", "type", "type_as", "bfloat16", "half", "float", "double",
}  # fmt: skip
#: Each output element depends on one input element, which receives its relevance unchanged.
_ELEMENTWISE: Final = (
    "celu", "clamp", "clamp_max", "clamp_min", "dropout", "elu", "gelu", "hardsigmoid", "hardswish",
    "hardtanh", "leaky_relu", "mish", "neg", "negative", "prelu", "relu", "relu6", "selu", "sigmoid", "silu",
    "softplus", "tanh",
)  # fmt: skip
#: Endings of the names of modules that divide by the root mean square.
_NORMS: Final = ("RMSNorm", "T5LayerNorm")
_SDPA: Final = ("query", "key", "value")


def name_of(function: Any) -> str:
    """`add` for all of its forms; `T` for the getter of `Tensor.T`; `namespace::op` for an op."""
    if isinstance(function, torch._ops.OpOverload):
        return function._schema.name
    name: str = function.__name__
    return str(function.__self__.__name__) if name == "__get__" else name


def operands(function: Any, args: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    """The arguments of an attention function, by name."""
    names: Sequence[str] = _SDPA
    if isinstance(function, torch._ops.OpOverload):
        names = [argument.name for argument in function._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **options}


def refusing(name: str, why: str) -> Back:
    """For a function without a rule: raises once relevance arrives there, and not before."""

    def back(given: Sequence[Tensor]) -> NoReturn:
        known = "linear maps, layer norms, sums and products of tensors, activations, reshaping and the operators"
        was = f"computes {name}, {why}, between its heads and the output"
        refuse("model", was, f"there are rules for {known}; this includes what `output` computes")

    return back


def is_differentiable(
    function: Any, args: tuple[Any, ...], options: dict[str, Any], carried: Sequence[Tensor]
) -> bool:
    """Whether a result depends on these tensors by more than their shapes or their order."""
    _, result = _by_leaves(function, args, options, carried)
    return any(isinstance(x, Tensor) and x.requires_grad for x in tree_leaves(result))


def _by_leaves(
    function: Any,
    args: tuple[Any, ...],
    options: dict[str, Any],
    carried: Sequence[Tensor],
    dtype: torch.dtype | None = None,
) -> tuple[list[Tensor], Any]:
    """Copies of these tensors that require gradients, and the function's result for the copies."""
    leaves = {id(x): x.detach().to(dtype or x.dtype).requires_grad_() for x in carried}
    with torch.enable_grad():
        args, options = tree_map(lambda x: leaves.get(id(x), x), (args, options))
        return list(leaves.values()), function(*args, **options)


# ---------------------------------------------------------------------- steps
def moving_step(
    function: Any, args: tuple[Any, ...], options: dict[str, Any], carried: Sequence[Tensor]
) -> Step:
    """The step of a function in `MOVING`, which is run again and transposed by autograd."""
    inputs = list({id(x): x for x in carried}.values())

    def back(given: Sequence[Tensor]) -> Sequence[Tensor]:
        leaves, result = _by_leaves(function, args, options, inputs, given[0].dtype)
        outputs = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        moved = [x.to(out.dtype) for x, out in zip(given, outputs, strict=True)]
        return torch.autograd.grad(outputs, leaves, moved, materialize_grads=True)

    return inputs, back


def is_one_function(module: nn.Module) -> bool:
    """Whether the functions inside a module of transformers count as one: activations and RMS norms."""
    activation = type(module).__module__ == "transformers.activations"
    return activation or type(module).__name__.endswith(_NORMS)


def module_step(module: nn.Module, input: Tensor, output: Tensor) -> Step:
    """The step of a module for which `is_one_function` holds."""
    if not type(module).__name__.endswith(_NORMS):
        return _identity(bool, input)
    found = [getattr(module, name, None) for name in ("variance_epsilon", "eps", "epsilon")]
    eps = next((each for each in found if each is not None), torch.finfo(input.dtype).eps)
    return [input], lambda given: [rules.rms_norm(input, output, eps, given[0])]


def gate_step(carries: Carries, heads: Tensor, gate: Tensor, activation: str) -> Step:
    """The step of heads times gates: like any product, it gives equal parts to the factors that carry relevance."""
    inputs = [heads, gate] if carries(gate) else [heads]
    is_open = gate != 0 if activation == "identity" else torch.ones_like(gate, dtype=torch.bool)
    is_open = gates.as_4d(is_open)

    def back(given: Sequence[Tensor]) -> Sequence[Tensor]:
        part = given[0] * is_open / len(inputs)
        return [part, part.sum_to_size(is_open.shape).reshape(gate.shape)][: len(inputs)]

    return inputs, back


def attention_step(call: AttentionCall, given: dict[str, Any], full: bool) -> Step:
    """The step of attention before its gate; `given` are the arguments of the attention function, by name."""
    query, key, value = (given[name] for name in _SDPA)
    content_bias = given.get("content_bias")
    B, H, T, S = call.B, call.H, call.T, call.S

    def per_head(grouped: Tensor) -> Tensor:
        return grouped.repeat_interleave(H // max(grouped.shape[1], 1), 1)

    def to_values(outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        rows = blocks(T, B * H * S)
        found = rules.attention_values(call.probabilities, per_head(value), outputs[0], rows)
        return [formula.per_group(found, value)]

    def to_all(outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        mixed, keys = query, key if key.dim() == 4 else key[:, None]
        if call.mixing is not None:
            mixed = formula.mixed_query(query, call.mixing)
        if content_bias is not None:  # as one more feature, which is 1 in every query
            mixed = torch.nn.functional.pad(mixed, (0, 1), value=1.0)
            keys = torch.cat((keys.expand(-1, H, -1, -1), content_bias[..., None]), -1)
        rows = blocks(T, B * H * S * value.shape[-1])
        found = rules.attention(
            call.probabilities,
            mixed * call.scale,
            per_head(keys),
            per_head(value),
            outputs[0],
            rows,
            blocks(value.shape[-1], B * H * S * rows[0].stop),
        )
        of_query, of_key = (x[..., : query.shape[-1]] for x in found[:2])
        if call.mixing is not None:
            of_query, of_key = of_query.sum(1), of_key.sum(1)
        else:
            of_key = formula.per_group(of_key, key)
        parts = [of_query, of_key, formula.per_group(found[2], value)]
        return parts if content_bias is None else [*parts, found[1][..., -1]]

    if not full:
        return [value], to_values
    inputs = [query, key, value]
    return (inputs if content_bias is None else [*inputs, content_bias]), to_all


# ---------------------------------------------------------------------- the table
def _identity(carries: Carries, input: Tensor, *rest: Any, **options: Any) -> Step:
    return [input], lambda given: given


def _linear(carries: Carries, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Step:
    if type(weight) not in (
        Tensor,
        nn.Parameter,
    ):  # of torchao, which computes with few of its bits
        return [input], refusing("linear", f"whose weight is quantised ({type(weight).__name__})")
    return [input], lambda given: [rules.linear(input, weight, bias, given[0])]


def _addmm(
    carries: Carries,
    input: Tensor,
    mat1: Tensor,
    mat2: Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> Step:
    """Used by transformers' `Conv1D`."""
    if (beta, alpha) != (1, 1) or input.dim() != 1:
        return [mat1], refusing("addmm", "with factors, or with a bias that is not a vector")
    return [mat1], lambda given: [rules.linear(mat1, mat2.T, input, given[0])]


def _layer_norm(
    carries: Carries,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *rest: Any,
) -> Step:
    if len(normalized_shape) != 1:
        return [input], refusing("layer_norm", f"over {len(normalized_shape)} dimensions")
    return [input], lambda given: [rules.norm(input, weight, bias, eps, given[0])]


def _add(carries: Carries, input: Any, other: Any, *, alpha: float = 1) -> Step:
    """Tensors get a share even if they carry no relevance; numbers get none."""
    terms = [(x, factor) for x, factor in ((input, 1), (other, alpha)) if isinstance(x, Tensor)]
    inputs = [x for x, _ in terms]
    if len(terms) == 1:
        return inputs, lambda given: given
    return inputs, lambda given: rules.add([x * factor for x, factor in terms], given[0])


def _sub(carries: Carries, input: Any, other: Any, *, alpha: float = 1) -> Step:
    """In either order: the rules treat both signs alike."""
    return _add(carries, input, other, alpha=-alpha)


def _matmul(carries: Carries, input: Tensor, other: Tensor) -> Step:
    if carries(other) or other.dim() != 2:
        return [input, other], refusing("matmul", "whose second factor is not a weight matrix")
    return [input], lambda given: [rules.linear(input, other.mT, None, given[0])]


def _mul(carries: Carries, input: Any, other: Any) -> Step:
    """Each factor contributes the whole product, so those that carry relevance get equal parts."""
    factors = [(x, beside) for x, beside in ((input, other), (other, input)) if carries(x)]

    def back(given: Sequence[Tensor]) -> Sequence[Tensor]:
        part = given[0] / len(factors)
        return [(part * (beside != 0)).sum_to_size(x.shape) for x, beside in factors]

    return [x for x, _ in factors], back


def _div(carries: Carries, input: Any, other: Any) -> Step:
    if carries(other):
        return [input, other], refusing("div", "by a tensor that depends on heads")
    return [input], lambda given: [given[0].sum_to_size(input.shape)]


def _weighted(function: Any, carries: Carries, input: Tensor, *rest: Any, **options: Any) -> Step:
    def over(x: Tensor) -> Tensor:
        result: Tensor = function(x, *rest, **options)
        return result

    if over(input).shape[:1] != input.shape[:1]:
        return [input], refusing(function.__name__, "over the examples")
    return [input], lambda given: [rules.weighted(over, input, given[0])]


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
