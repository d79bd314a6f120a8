"""Relevance as the gradient of autograd: its graph is the tape, and the rules are the backward passes.

While a model runs, gradients are off, and a mode sees its functions. From the first attention on it calls functions of
what carries relevance so that autograd records them:

- A function with a rule becomes one node, whose backward pass takes the relevance of its output for the relevance of
  its inputs. Attention is such a node, with another one for its gate, and so are whole modules for which there is a
  rule. What a rule needs is closed over, so that no Jacobian is stored.
- Views, and functions that copy elements, keep the backward pass of autograd: a copy hands its relevance back to its
  original, a constant's is lost, and that of a tensor used several times adds up.
- Of any other function only the result is watched: an error names the function if relevance arrives there.

The gradient with respect to heads is then their relevance. As every gradient it has the dtype of its tensor; rules
compute in float32, or float64 for float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from heads_kernels.analysis.lrp.functions import (
    RULES,
    Back,
    attention_step,
    carries,
    gate_step,
    module_step,
    refusing,
)
from heads_kernels.call import compute_dtype
from heads_kernels.heads.layers import AttentionLayer
from heads_kernels.nn.attention_call import AttentionCall

#: Output elements are copies of input elements, or constants. The same holds for views, which need no name.
_COPYING: Final = {
    "__getitem__", "bfloat16", "cat", "clone", "concat", "contiguous", "double", "flatten", "flip", "float", "gather",
    "half", "hstack", "index_select", "masked_fill", "pad", "repeat", "repeat_interleave", "reshape", "roll", "stack",
    "take_along_dim", "tile", "to", "type", "type_as", "vstack", "where",
}  # fmt: skip
#: Functions that compute a layer's attention, after `RelevanceTape.see` has announced the layer.
_ATTENTION: Final = ("heads_kernels::attention", "scaled_dot_product_attention")
#: Arguments that add to scores; relevance does not pass through them.
_ADDED: Final = ("bias", "offset_bias", "sinks")
#: The relevance of an example at the output. Shares do not depend on it; in float16 this keeps small parts above 0.
_TOTAL: Final = 2.0**14


class _Rule(torch.autograd.Function):
    """The output of a function, with `back` for its backward pass."""

    @staticmethod
    def forward(ctx: Any, back: Back, output: Tensor, *inputs: Tensor) -> Tensor:
        ctx.back = back
        return output

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> Any:
        return None, None, *ctx.back(given.to(compute_dtype(given.dtype)))


def _ruled(output: Tensor, inputs: Sequence[Any], back: Back) -> Tensor:
    """`output`, whose relevance `back` takes to `inputs`."""
    with torch.enable_grad():
        ruled: Tensor = _Rule.apply(back, output.detach(), *inputs)  # type: ignore[no-untyped-call]
    return ruled


def _refuse(output: Tensor, name: str, why: str) -> None:
    """Raise an error if relevance arrives at this output."""
    output.register_hook(refusing(name, why))  # type: ignore[no-untyped-call]


def rule_of_module(module: nn.Module, args: tuple[Any, ...], output: Any) -> Tensor | None:
    """A forward hook of all modules: what those of `module_step` compute inside is replaced by their rule."""
    if not args or not carries(args[0]):
        return None
    step = module_step(module, args[0], output)
    return None if step is None else _ruled(output, *step)


class RelevanceTape(TorchFunctionMode):
    """Context manager in which autograd records what a model computes from its heads to its output, by the rules.

    Gradients must be off: operators are visible only where autograd does not record them.

    Args:
        full: whether relevance goes through probabilities to query and key; else they are constants.

    Attributes:
        rows: bool `[B, T]` by (B, T): the real tokens in the last attention of these sizes.
    """

    def __init__(self, full: bool) -> None:
        super().__init__()
        self.full = full
        self.rows: dict[tuple[int, int], Tensor] = {}
        self._heads: list[tuple[int, Tensor]] = []  # index of the layer, and `[B, H, T, Dv]`
        self._call: tuple[AttentionLayer, AttentionCall] | None = None

    def see(self, layer: AttentionLayer, call: AttentionCall) -> None:
        """An observer: the next attention is that of `layer`."""
        call.check_softmax("relevance")
        self._call = layer, call
        self.rows[call.B, call.T] = call.real_queries

    def heads(self, output: Tensor, relevance: Tensor) -> dict[int, Tensor]:
        """The relevance of each head, `{index of the layer: [B, H]}`, up to a factor of each example.

        For a layer that runs several times it is the sum.
        """
        total = relevance.sum(tuple(range(1, relevance.dim())), keepdim=True)
        start = torch.where(total > 0, relevance / total * _TOTAL, 0.0).to(output.dtype)
        heads = [each for _, each in self._heads]
        parts = torch.autograd.grad(output, heads, start, retain_graph=True, materialize_grads=True)
        found = dict[int, Tensor]()
        for (index, _), part in zip(self._heads, parts, strict=True):
            found[index] = found.get(index, 0) + part.to(relevance.dtype).sum((2, 3))
        return found

    # ------------------------------------------------------------------ recording
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        options = kwargs or {}
        name = _name_of(func)
        if name in _ATTENTION and self._call is not None:
            return self._attend(_operands(func, args, options), func(*args, **options))
        carried = [x for x in tree_leaves((args, options)) if carries(x)]
        if not carried:
            return func(*args, **options)
        if name == "__setitem__" or (name.endswith("_") and name[-2] != "_"):
            refusing(name, "which changes a tensor in place")(carried[0])
        if name in RULES:
            inputs, back = RULES[name](*args, **options)
            if len(carried) > sum(map(carries, inputs)):
                inputs, back = carried, refusing(name, "with another argument depending on heads")
            return _ruled(func(*args, **options), inputs, back)
        with torch.enable_grad():
            result = func(*args, **options)
        if name not in _COPYING:
            storages = {x.untyped_storage().data_ptr() for x in carried}
            for x in filter(carries, tree_leaves(result)):
                if x.untyped_storage().data_ptr() not in storages:
                    _refuse(x, name, "which has no rule")
        return result

    def _attend(self, given: dict[str, Any], result: Any) -> Any:
        """Record the attention of the announced layer, and its gate as a separate function."""
        assert self._call is not None
        (layer, call), self._call = self._call, None
        out = result if isinstance(result, Tensor) else result[0]
        inputs, back = attention_step(call, given, self.full)
        # Inputs that depend on no heads are leaves of the graph, so that it has the first attention as well.
        inputs = [x if carries(x) else x.detach().requires_grad_() for x in inputs]
        heads = ruled = _ruled(out, inputs, back)
        self._heads.append((layer.index, heads))
        if self.full and any(map(carries, map(given.get, _ADDED))):
            _refuse(heads, "attention", "whose bias depends on heads")
        if given.get("gate") is not None:
            ruled = _ruled(out, *gate_step(heads, given["gate"], given["gate_activation"]))
        return ruled if out is result else (ruled, *result[1:])


def _name_of(function: Any) -> str:
    """`add` for all of its forms; `T` for the getter of `Tensor.T`; `namespace::op` for an op."""
    if isinstance(function, torch._ops.OpOverload):
        return function._schema.name
    name: str = function.__name__
    return str(function.__self__.__name__) if name == "__get__" else name


def _operands(function: Any, args: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    """The arguments of an attention function, by name."""
    names: Sequence[str] = ("query", "key", "value")
    if isinstance(function, torch._ops.OpOverload):
        names = [argument.name for argument in function._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **options}
