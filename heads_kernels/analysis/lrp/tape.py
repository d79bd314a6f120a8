"""Records what a model computes from its heads to its output, and propagates relevance back to the heads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from heads_kernels.analysis.lrp.functions import (
    MOVING,
    RULES,
    Back,
    attention_step,
    gate_step,
    is_differentiable,
    is_one_function,
    module_step,
    moving_step,
    name_of,
    operands,
    refusing,
)
from heads_kernels.heads.weights import AttentionLayer
from heads_kernels.nn.attention_call import AttentionCall

#: Functions that compute a layer's attention, after `RelevanceTape.see` has announced the layer.
_ATTENTION: Final = {
    "heads_kernels::attention",
    "scaled_dot_product_attention",
}
#: Arguments that add to scores; relevance does not pass through them.
_ADDED: Final = ("bias", "offset_bias", "sinks")


class _Step(NamedTuple):
    inputs: Sequence[Any]
    outputs: Sequence[Tensor]
    back: Back
    layer: AttentionLayer | None  # whose attention this step is


class RelevanceTape(TorchFunctionMode):
    """Context manager that records the functions between the heads of a model and its output.

    Tensors carry relevance from the first attention on; what comes before is not recorded and needs no rule. Gradients
    must be off: operators are visible only where autograd does not record them.

    Args:
        full: whether relevance goes through probabilities to query and key; else they are constants.

    Attributes:
        rows: bool `[B, T]` by (B, T): the real tokens in the last attention of these sizes.
    """

    def __init__(self, full: bool) -> None:
        super().__init__()
        self.full = full
        self.rows: dict[tuple[int, int], Tensor] = {}
        self._steps: list[_Step] = []
        self._carried: dict[int, Tensor] = {}  # by id; a reference to each, so that no id is reused
        self._call: tuple[AttentionLayer, AttentionCall] | None = None
        self._whole = 0  # depth of nested modules that count as one function

    def carries(self, thing: object) -> bool:
        return id(thing) in self._carried

    def see(self, layer: AttentionLayer, call: AttentionCall) -> None:
        """An observer: the next attention is that of `layer`."""
        call.check_softmax("relevance")
        self._call = layer, call
        self.rows[call.B, call.T] = call.real_queries

    def heads(self, output: Tensor, relevance: Tensor) -> dict[int, Tensor]:
        """The relevance of each head, `{index of the layer: [B, H]}`, given that of an output.

        Layers that it does not reach are left out; for a layer that runs several times it is the sum.
        """
        pending, found = {id(output): relevance}, dict[int, Tensor]()
        for step in reversed(self._steps):
            if not any(id(each) in pending for each in step.outputs):
                continue
            given = [
                torch.zeros_like(each, dtype=relevance.dtype) if had is None else had
                for each in step.outputs
                for had in [pending.pop(id(each), None)]
            ]
            if step.layer is not None:
                index, heads = step.layer.index, given[0].sum((2, 3))
                found[index] = found[index] + heads if index in found else heads
            for tensor, each in zip(step.inputs, step.back(given), strict=True):
                if self.carries(tensor):
                    had = pending.get(id(tensor))
                    pending[id(tensor)] = each if had is None else had + each
        return found

    # ------------------------------------------------------------------ recording
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        options = kwargs or {}
        result = func(*args, **options)
        name = name_of(func)
        if self._whole:
            return result
        if name in _ATTENTION and self._call is not None:
            self._attend(operands(func, args, options), result)
            return result
        carried = [x for x in tree_leaves((args, options)) if self.carries(x)]
        outputs = [x for x in tree_leaves(result) if _eligible(x) and not self.carries(x)]
        if carried and (name == "__setitem__" or (name.endswith("_") and name[-2] != "_")):
            refusing(name, "which changes a tensor in place")(outputs)
        if not carried or not outputs:
            return result
        if name in MOVING:
            self._record(*moving_step(func, args, options, carried), outputs)
        elif name in RULES:
            inputs, back = RULES[name](self.carries, *args, **options)
            if len(carried) > sum(map(self.carries, inputs)):
                inputs, back = carried, refusing(name, "with another argument depending on heads")
            self._record(inputs, back, outputs)
        elif is_differentiable(func, args, options, carried):
            self._record(carried, refusing(name, "which has no rule"), outputs)
        return result

    def _record(
        self,
        inputs: Sequence[Any],
        back: Back,
        outputs: Sequence[Tensor],
        layer: AttentionLayer | None = None,
    ) -> None:
        self._steps.append(_Step(inputs, outputs, back, layer))
        self._carried.update((id(x), x) for x in outputs)

    def _attend(self, given: dict[str, Any], result: Any) -> None:
        """Record the attention of the announced layer, and its gate as a separate function."""
        assert self._call is not None
        (layer, call), self._call = self._call, None
        out = result if isinstance(result, Tensor) else result[0]
        gate = given.get("gate")
        heads = out if gate is None else out.detach()
        inputs, back = attention_step(call, given, self.full)
        if self.full and any(map(self.carries, map(given.get, _ADDED))):
            back = refusing("attention", "whose bias depends on heads")
        if given.get("alpha") is not None:
            back = refusing("entmax_attention", "which has no rule")
        self._record(inputs, back, [heads], layer)
        if gate is not None:
            self._record(*gate_step(self.carries, heads, gate, given["gate_activation"]), [out])

    # ------------------------------------------------------------------ modules that count as one function
    @contextmanager
    def whole_modules(self, model: nn.Module) -> Iterator[None]:
        """In this block, modules for which `is_one_function` holds are recorded as one function."""
        with ExitStack() as stack:
            for module in filter(is_one_function, model.modules()):
                stack.callback(module.register_forward_pre_hook(self._enter).remove)
                stack.callback(module.register_forward_hook(self._leave).remove)
            yield

    def _enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._whole += 1

    def _leave(self, module: nn.Module, args: tuple[Any, ...], result: Tensor) -> None:
        self._whole -= 1
        if not self._whole and self.carries(args[0]) and not self.carries(result):
            self._record(*module_step(module, args[0], result), [result])


def _eligible(thing: object) -> bool:
    """Whether a result may carry relevance: floating tensors do, unless a layer has no heads and they are empty."""
    return isinstance(thing, Tensor) and thing.is_floating_point() and thing.numel() > 0
