"""Layer-wise relevance propagation from the output of a model to the heads of every layer.

Relevance is the gradient of autograd: its graph is the tape, and the rules are the backward passes.

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

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, Final, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from heads_kernels.analysis.head_scores import HeadScores, scores_of
from heads_kernels.analysis.observe import each_batch, evaluation, observe, of_this_thread, run
from heads_kernels.analysis.relevance_rules import (
    RULES,
    Back,
    attention_rule,
    carries,
    gate_rule,
    module_rule,
    refusing,
)
from heads_kernels.call import Call, compute_dtype
from heads_kernels.checks import check_choice, check_tensor, refuse, refuse_type
from heads_kernels.heads.layers import AttentionLayer, attention_layers, choose_layers
from heads_kernels.nn.attention_call import AttentionCall
from heads_kernels.nn.merged import MergedAttention
from heads_kernels.ops.attention import attention_op

#: `output(model, batch)`: scores `[B, C]` or `[B, T, C]`, or such a tensor and the initial relevance of its elements.
Output: TypeAlias = Callable[[Any, Any], Any]

#: Output elements are copies of input elements, or constants. The same holds for views, which need no name.
_COPYING: Final = {
    "__getitem__", "bfloat16", "cat", "clone", "concat", "contiguous", "double", "flatten", "flip", "float", "gather",
    "half", "hstack", "index_select", "masked_fill", "pad", "repeat", "repeat_interleave", "reshape", "roll", "stack",
    "take_along_dim", "tile", "to", "type", "type_as", "vstack", "where",
}  # fmt: skip
#: The relevance of an example at the output. Shares do not depend on it; in float16 this keeps small parts above 0.
_TOTAL: Final = 2.0**14


def _logits(model: Any, batch: Any) -> Any:
    found = run(model, batch)
    return getattr(found, "logits", found)


@torch.inference_mode(False)
def relevance(
    model: nn.Module,
    data: Iterable[Any],
    output: Output | None = None,
    *,
    layers: Iterable[int | str] | None = None,
    attention: Literal["constant", "full"] = "constant",
) -> HeadScores:
    """The share of each head in a model's output, by layer-wise relevance propagation (Voita et al. 2019).

    Relevance starts at an output, by default with 1 at its largest score (the top-1 logit), and is propagated function
    by function (`relevance_rules`): layer norms pass it on by their full Jacobian, sums of tensors by their signs,
    activations and factors unchanged. A head's relevance is the sum over rows and features of its output, after its
    gate: a closed head has exactly 0. It is divided by that of all heads of the layer and averaged over examples, or
    over examples and positions if the output has positions: each position is a separate pass, like the generation
    steps of the paper.

    No Jacobian and no map `[T, S]` is stored: a batch needs memory for its activations and for tiles of fixed size. A
    linear map from n to m features costs m * n multiplications per token; padded rows cost nothing, with relevance 0.

    Args:
        model, data: as in `statistics`; with `output` a batch is what that takes.
        output: `output(model, batch)` returns scores `[B, C]`, or `[B, T, C]` for all positions; examples and positions
            of padding, according to the masks of attention over T rows, do not count. Or it returns a pair: such a
            tensor, and the initial relevance of its elements, of the same shape and >= 0; examples and positions where
            it is 0 do not count. Use `(e, e.abs())` for an embedding e. Default: the model's output, or its `logits`.
        layers: indices or names of the layers whose heads get scores; default all.
        attention: "constant" treats probabilities as constants, so that relevance goes from a head to its values;
            "full" goes through the softmax to queries and keys as well, as the code of the paper does by default.

    Returns:
        `HeadScores`; those of a layer sum to 1, or to less if for some examples no relevance reaches its heads.

    Raises:
        TypeError, ValueError: as `statistics`; also if nothing in the data counts, the output depends on no head, or
            there is no rule for a function between heads and output, which the message names.
    """
    check_choice("attention", attention, ("constant", "full"))
    output = _logits if output is None else output
    if not callable(output):
        refuse_type("output", output, "pass a function of model and batch")
    chosen = choose_layers(attention_layers(model), layers)
    sums = {layer.index: torch.zeros(layer.num_heads, dtype=torch.float64) for layer in chosen}
    count = 0
    with evaluation(model), torch.no_grad():
        for batch in each_batch(data):
            batch = tree_map_only(Tensor, Tensor.detach, batch)  # the graph is the tape
            tape = _Tape(attention == "full", sums.keys())
            of_modules = register_module_forward_hook(of_this_thread(tape.leave))
            with of_modules, observe(model, tape.see), tape:
                found = output(model, batch)
            for scores, start in _starts(found, tape):
                found_heads = tape.heads(scores, start)
                for index in sums.keys() & found_heads:
                    heads = found_heads[index]
                    total = heads.sum(1, keepdim=True)
                    shares = torch.where(total > 0, heads / total, 0.0)
                    sums[index] += shares.double().sum(0).cpu()
                count += int(start.flatten(1).any(1).sum())
    if not count:
        refuse("data", "has no example that counts", "give some element of the output relevance")
    method = "lrp" if attention == "constant" else "lrp, full attention"
    return scores_of(chosen, (each / count for each in sums.values()), method)


def _starts(found: Any, tape: _Tape) -> Iterator[tuple[Tensor, Tensor]]:
    """The output and its initial relevance: once, or for each position that counts."""
    scores, start = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
    layout = "scores [B, C] or [B, T, C], or a pair of those and their relevance"
    check_tensor("output", scores, f"pass output(model, batch) that returns {layout}", (2, 3))
    if not carries(scores):
        refuse("output", "depends on no head of the model", "compute it from what the model gives")
    start = _largest(scores, tape) if start is None else start
    instead = f"pass a floating tensor {list(scores.shape)} of numbers >= 0"
    check_tensor("relevance of the output", start, instead, (scores.dim(),))
    if start.shape != scores.shape:
        refuse("relevance of the output", f"has shape {list(start.shape)}", instead)
    if not bool(((start >= 0) & start.isfinite()).all()):
        refuse("relevance of the output", "has numbers that are negative or not finite", instead)
    start = start.to(compute_dtype(scores.dtype))
    if scores.dim() == 2:
        yield scores, start
        return
    for position in start.any(2).any(0).nonzero().flatten().tolist():
        alone = torch.zeros_like(start)
        alone[:, position] = start[:, position]
        yield scores, alone


def _largest(scores: Tensor, tape: _Tape) -> Tensor:
    """1 at the largest score of every example that has a token, or of every position that is a token."""
    start = torch.zeros_like(scores, dtype=compute_dtype(scores.dtype))
    start.scatter_(-1, scores.argmax(-1, keepdim=True), 1.0)
    if scores.dim() == 3:
        rows = tape.rows.get((scores.shape[0], scores.shape[1]))
        return start if rows is None else start * rows[..., None]
    real = [rows.any(1) for (B, _), rows in tape.rows.items() if len(scores) == B]
    return start * torch.stack(real).any(0)[:, None] if real else start


# ---------------------------------------------------------------------- the tape
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


class _Tape(TorchFunctionMode):
    """Context manager in which autograd records what a model computes from its heads to its output, by the rules.

    Gradients must be off: operators are visible only where autograd does not record them.
    """

    def __init__(self, full: bool, scored: Collection[int]) -> None:
        super().__init__()
        self.scored = scored  # indices of the layers whose heads get scores
        self.full = full  # whether relevance goes through probabilities to query and key; else they are constants
        #: By (B, T), bool [B, T]: the real tokens in the last attention of these sizes.
        self.rows: dict[tuple[int, int], Tensor] = {}
        self._heads: list[tuple[int, Tensor]] = []  # index of the layer, and `[B, H, T, Dv]`
        self._layer: AttentionLayer | None = None  # whose attention is the next
        self._running: list[AttentionLayer] = []  # whose attention ran, and whose modules did not return yet

    def see(self, layer: AttentionLayer, call: AttentionCall) -> None:
        """An observer: the next attention is that of `layer`."""
        call.check_softmax("relevance")
        if isinstance(layer.module, MergedAttention):
            self._check_not_scored(layer, "adds an average of rows to its heads, for which relevance has no rule")
        self._layer = layer
        self.rows[call.B, call.T] = call.real_queries

    def leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Tensor | None:
        """A forward hook of all modules: a layer ends, and what those of `module_rule` compute follows their rule."""
        self._running = [layer for layer in self._running if layer.module is not module]
        if not args or not carries(args[0]):
            return None
        step = module_rule(module, args[0], output)
        return None if step is None else _ruled(output, *step)

    def _check_not_scored(self, layer: AttentionLayer, was: str) -> None:
        """Refuse a layer, if relevance goes through it to heads that get scores: its own, or of layers before it."""
        ran = {layer.index, *(index for index, _ in self._heads)}
        if not ran.isdisjoint(self.scored):
            refuse(str(layer), was, "score its heads by hk.analysis.importance")

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
    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if func is attention_op and self._layer is not None:
            call, (with_lse, _) = Call(*args[: len(Call._fields)]), args[len(Call._fields) :]
            if with_lse:
                self._check_not_scored(self._layer, "asks for the lse of its rows, for which relevance has no rule")
            out, *rest = func(*args)
            return self._attend(call, out), *rest
        if func is attention_op and self._running:
            was = "calls an operator again before it returns, for which relevance has no rule"
            self._check_not_scored(self._running[-1], was)
        name = _name_of(func)
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
                    x.register_hook(refusing(name, "which has no rule"))
        return result

    def _attend(self, call: Call, out: Tensor) -> Tensor:
        """Record the attention of the layer that was seen, and its gate as a separate function."""
        assert self._layer is not None
        inputs, back = attention_rule(call, self.full)
        # Inputs that depend on no heads are leaves of the graph, so that it has the first attention as well.
        inputs = [x if carries(x) else x.detach().requires_grad_() for x in inputs]
        heads = _ruled(out, inputs, back)
        self._heads.append((self._layer.index, heads))
        self._running.append(self._layer)
        self._layer = None
        if self.full and any(map(carries, (call.bias, call.offset_bias, call.sinks))):
            heads.register_hook(refusing("attention", "whose bias depends on heads"))  # type: ignore[no-untyped-call]
        if call.gate is None:
            return heads
        return _ruled(out, *gate_rule(heads, call.gate, call.gate_activation))


def _name_of(function: Any) -> str:
    """`add` for all of its forms; `T` for the getter of `Tensor.T`; `namespace::op` for an op."""
    if isinstance(function, torch._ops.OpOverload):
        return function._schema.name
    name: str = function.__name__
    return str(function.__self__.__name__) if name == "__get__" else name
