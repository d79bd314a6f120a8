"""Importance of heads: by gradients of their gates, by attribution patching, by leaving heads out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import copy
from functools import partial
from typing import Any, Final, Literal, TypeAlias
from weakref import WeakSet

import torch
from torch import Tensor, nn

from heads_kernels.analysis.head_scores import HeadScores, scores_of
from heads_kernels.analysis.observe import each_batch, evaluation, observe, of_this_thread
from heads_kernels.checks import check_choice, refuse, refuse_type
from heads_kernels.heads.layers import AttentionLayer, attention_layers, choose_layers, gates_of
from heads_kernels.heads.patching import Edit, edited, outputs
from heads_kernels.nn.attention_call import AttentionCall
from heads_kernels.nn.gates import FixedGate

#: `loss(model, batch)`: a scalar, losses of examples `[B]`, or outputs `[B, ...]`.
Loss: TypeAlias = Callable[[Any, Any], Tensor]
Method = Literal["gradient", "fisher", "patching", "leave_one_out"]
Reduce = Literal["token", "example", "batch"]


@torch.inference_mode(False)
def importance(
    model: nn.Module,
    data: Iterable[Any],
    loss: Loss,
    *,
    layers: Iterable[int | str] | None = None,
    method: Method = "gradient",
    reduce: Reduce = "example",
) -> HeadScores:
    """How much each head of a model matters, from a pass over data; padded rows do not count.

    Let L be the loss, g_h a factor of 1 on head h, and a_{h,x,t} the derivative of L by that factor for example x
    and row t only. The backward pass of the operator computes it for all layers at once, without a map `[T, S]`.

    ==================  ==========================================  =============================================
    method              score of a head                             source
    ==================  ==========================================  =============================================
    "gradient", with    mean over examples of
    reduce="token"      `sum_t |a_{h,x,t}|`                         code of Michel et al. 2019, for BERT and NMT
    reduce="example"    `|sum_t a_{h,x,t}| = |dL_x/dg_h|`           Michel et al. 2019, eq. 4
    reduce="batch"      `|sum_{x,t} a_{h,x,t}| / B` of a batch      `head_mask.grad` of transformers' run_bertology
    "fisher"            mean over examples of `(dL_x/dg_h)^2`       diagonal of the Fisher information of gates
    "patching"          mean over examples of `sum_t (z_clean -     attribution patching (Nanda 2023; Syed et al.
                        z_x) . dL_x/dz_x`, z the head's outputs     2023)
    "leave_one_out"     mean over examples of L_x without the       Michel et al. 2019, section 3.2
                        head minus L_x with it
    ==================  ==========================================  =============================================

    `statistics` has the confidence of heads, and `relevance` their share in an output.

    Scores are means over examples, so they do not depend on the division into batches, except with reduce="batch".
    The sources of "token" and "batch" divide by tokens instead of examples; in an encoder or a decoder alone this is
    one factor for all heads. Michel et al. normalise per layer (`HeadScores.normalised`).

    Without labels, `loss` returns outputs e of the model, `[B, ...]`, such as sentence embeddings. Gradient methods
    then use `L_x = sum(z_x * e_x)` with random signs z, the same in every call ("fisher": its mean is
    `|de_x/dg_h|^2`), and "leave_one_out" the squared change `|e_x without the head - e_x|^2`.

    "patching" estimates the change of the loss of a corrupted input x if the head has the output of the clean one, as
    `hk.heads.patch` gives it: a batch is a pair of batches (clean, corrupted) of equal sizes, and `loss` is called with
    each: it returns losses, not outputs. It takes two passes forward and one backward for all heads.

    Existing gates stay in effect: a closed head scores 0. Heads have their current numbers. For a layer that runs
    several times in a pass (ALBERT), derivatives are summed over its runs, and a head is left out of all of them. A
    layer that no pass reaches scores 0. The model runs in evaluation mode with frozen weights and is restored.

    Args:
        model: as in `statistics`.
        data: an iterable of batches, for "patching" of pairs of batches.
        loss: `loss(model, batch)` returns a scalar, the SUM over the examples of the batch (a mean times B), the losses
            of the examples `[B]`, or outputs `[B, ...]`.
        layers: indices or names of the layers whose heads are scored; default all. If the towers of a model run on
            batches of different sizes, name the layers of one.
        method: see the table.
        reduce: where "gradient" takes the absolute value.

    Returns:
        `HeadScores`. "leave_one_out" takes a pass for every open head and batch, the others one per batch.

    Raises:
        TypeError, ValueError: as `statistics`; also if the model has no heads, or the loss is not a floating tensor of
            these shapes, is not finite, has a gradient that is not finite, or does not depend on the heads.
    """
    check_choice("method", method, tuple(_METHODS))
    check_choice("reduce", reduce, ("token", "example", "batch"))
    if reduce != "example" and method != "gradient":
        refuse("reduce", f"is {reduce!r}, but the method is {method!r}", "leave it out")
    if not callable(loss):
        refuse_type("loss", loss, "pass a function loss(model, batch) -> Tensor")
    every = attention_layers(model)
    chosen = choose_layers(every, layers)
    if not any(layer.num_heads for layer in chosen):
        was = f"has no heads left in its {len(chosen)} attention layer(s)"
        refuse("model", was, "score heads before all of them are pruned")
    if method != "leave_one_out" and any(weight.is_inference() for weight in model.parameters()):
        was = "has weights of inference mode, through which no gradient goes"
        refuse("model", was, "load it outside of torch.inference_mode, or use 'leave_one_out'")
    task = _Task(model, every, chosen, loss, reduce if method == "gradient" else method)
    sums = {layer.index: torch.zeros(layer.num_heads).double() for layer in chosen}
    examples = 0
    with evaluation(model):
        for batch in each_batch(data):
            B, terms = _METHODS[method](task, batch)
            examples += B
            for index, each in terms.items():
                sums[index] += each.double().cpu()
    for layer in chosen:
        if not bool(sums[layer.index].isfinite().all()):
            was = f"is not finite without a head of {layer}, or its gradient there is not"
            refuse("loss", was, "look for a logarithm or a square root of 0 in it")
    is_open = any(bool(gates_of(layer).any()) for layer in chosen)
    if method == "leave_one_out" and is_open and not any(each.any() for each in sums.values()):
        refuse("loss", "is the same whichever head is left out", _FROM_MODEL)
    name = f"gradient by {reduce}" if method == "gradient" else method
    return scores_of(chosen, (each / examples for each in sums.values()), name)


class _Task:
    """What a method reads: the layers that are scored, the loss, and how the terms of a batch are summed."""

    def __init__(
        self, model: nn.Module, every: list[AttentionLayer], layers: list[AttentionLayer], loss: Loss, estimator: str
    ) -> None:
        self.model, self.every, self.loss, self.estimator = model, every, loss, estimator
        self.layers = [layer for layer in layers if layer.num_heads]
        self.names = [layer.name for layer in layers]
        self.signs = torch.Generator().manual_seed(0)

    def slopes(self, value: Tensor, factors: list[Tensor]) -> Iterator[Tensor]:
        """The derivatives of losses, or of outputs under random signs, by the factors."""
        if value.dim() > 1:
            signs = torch.randint(2, value.shape, generator=self.signs)
            value = value * (signs.to(value) * 2 - 1)
        found: tuple[Tensor | None, ...] = ()
        if value.requires_grad:
            found = torch.autograd.grad(value.sum(), factors, allow_unused=True)
        if all(slope is None for slope in found):
            refuse("loss", "does not depend on the heads of the model", _FROM_MODEL)
        for slope, factor in zip(found, factors, strict=True):
            yield torch.zeros_like(factor) if slope is None else slope


#: The number of examples in a batch, and their contribution to the score of each head, by index of the layer.
_Terms: TypeAlias = tuple[int, Mapping[int, Tensor]]

# ---------------------------------------------------------------------- by gradients
#: The contribution of examples to the score of a head, from their derivatives `[B, H, T]`.
_ESTIMATORS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "token": lambda terms: terms.abs().sum((0, 2)),
    "example": lambda terms: terms.sum(2).abs().sum(0),
    "batch": lambda terms: terms.sum((0, 2)).abs(),
    "fisher": lambda terms: terms.sum(2).square().sum(0),
}


def _by_gradients(task: _Task, batch: Any) -> _Terms:
    """By factors of 1 on the gates of every head and row; the operator's backward has all their derivatives."""
    ones: list[tuple[int, Tensor]] = []  # of each run the index of its layer, and factors [B, H, T]
    real: list[Tensor] = []  # of each run [B, T]
    own_thread, is_over = threading.get_ident(), False  # checkpointed layers run again, on a GPU on another thread

    def look(layer: AttentionLayer, call: AttentionCall) -> None:
        if not is_over:
            real.append(call.real_queries)

    def multiply(index: int, gates: Tensor, B: int, T: int) -> Tensor | None:
        if not is_over and threading.get_ident() != own_thread:
            return None
        gates = gates[None] if gates.dim() == 1 else gates
        gates = gates[..., None] if gates.dim() == 2 else gates
        size = (B, gates.shape[1], T)
        factor = torch.ones(size, dtype=gates.dtype, device=gates.device, requires_grad=True)
        if not is_over:
            ones.append((index, factor))
        return factor * gates

    terms: dict[int, list[Tensor]] = {}
    with ExitStack() as block:
        block.enter_context(observe(task.model, look, task.names))
        for layer in task.layers:
            block.enter_context(_gates(task.every, layer, partial(multiply, layer.index)))
        block.enter_context(torch.enable_grad())
        value = task.loss(task.model, batch)
        is_over = True
        factors = [factor for _, factor in ones]
        B = _check_value(value, [len(factor) for factor in factors])
        for (index, _), rows, slope in zip(ones, real, task.slopes(value, factors), strict=True):
            terms.setdefault(index, []).append(torch.where(rows[:, None], slope, 0))
    estimate = _ESTIMATORS[task.estimator]
    return B, {index: estimate(torch.cat(each, 2)) for index, each in terms.items()}


def _by_patching(task: _Task, pair: Any) -> _Terms:
    """By factors of 0 times the way from the outputs of the corrupted batch to those of the clean one."""
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        was = f"has a {type(pair).__name__} for a batch"
        refuse("data", was, "pass pairs of batches: (clean, corrupted)", TypeError)
    clean, corrupted = pair
    with torch.no_grad(), outputs(task.model, task.names) as heads:
        task.loss(task.model, clean)
    steps: list[tuple[int, Tensor]] = []  # index of the layer, factor [B, T, H] of each run
    edits = {layer: _towards(layer, heads[layer.index], steps) for layer in task.layers}
    with edited(task.model, edits), torch.enable_grad():
        value = task.loss(task.model, corrupted)
    B = _check_value(value, [len(factor) for _, factor in steps])
    if value.dim() > 1:
        was = f"gave outputs {list(value.shape)}, whose change has no sign"
        refuse("loss", was, "return losses [B] or their sum for 'patching'")
    slopes = task.slopes(value, [factor for _, factor in steps])
    terms = {layer.index: torch.zeros(layer.num_heads).double() for layer in task.layers}
    for (index, _), slope in zip(steps, slopes, strict=True):
        terms[index] += slope.sum((0, 1)).double().cpu()
    return B, terms


def _towards(layer: AttentionLayer, clean: list[Tensor], steps: list[tuple[int, Tensor]]) -> Edit:
    """An edit that adds factors of 0 times the way to the clean outputs of each run; they are added to `steps`."""
    runs = iter(clean)

    def edit(call: AttentionCall, heads: Tensor) -> Tensor:
        target = next(runs, None)
        if target is None or target.shape != heads.shape:
            found = "no output" if target is None else f"outputs {list(target.shape)}"
            was = f"gives {layer} {found} for the clean batch, but {list(heads.shape)} for the corrupted one"
            refuse("data", was, "pass pairs of equal sizes")
        way = torch.where(call.real_queries[..., None, None], target - heads.detach(), 0.0)
        factor = heads.new_zeros(heads.shape[:3], requires_grad=True)
        steps.append((layer.index, factor))
        return heads + factor[..., None] * way

    return edit


# ---------------------------------------------------------------------- by leaving heads out
@torch.no_grad()
def _by_leaving_out(task: _Task, batch: Any) -> _Terms:
    sizes: list[int] = []  # B of every run of a layer
    with observe(task.model, lambda _, call: sizes.append(call.B), task.names):
        whole = task.loss(task.model, batch)
    B = _check_value(whole, sizes)
    terms = {}
    for layer in task.layers:
        terms[layer.index] = torch.zeros(layer.num_heads).double()
        for head in gates_of(layer).nonzero().flatten().tolist():
            closed = torch.tensor([head], device=layer.weight.device)

            def close(gates: Tensor, B: int, T: int, closed: Tensor = closed) -> Tensor:
                return gates.index_fill(min(1, gates.dim() - 1), closed, 0)

            with _gates(task.every, layer, of_this_thread(close)):
                change = task.loss(task.model, batch).double() - whole.double()
            change = change.square() if whole.dim() > 1 else change
            terms[layer.index][head] = change.sum().cpu()
    return B, terms


# ---------------------------------------------------------------------- gates
#: Gates that layers have while their heads are scored.
_TEMPORARY: Final = WeakSet[nn.Module]()


@contextmanager
def _gates(layers: list[AttentionLayer], layer: AttentionLayer, change: Callable[..., Tensor | None]) -> Iterator[None]:
    """In this block `change` replaces the gates of a layer, or ones, unless it returns None; it also gets B and T.

    `layers` are all of the model.
    """
    before = layer.gate
    if before in _TEMPORARY:
        refuse(str(layer), "is scored by another call of importance", "wait for its end")
    gate = FixedGate(gates_of(layer)) if before is None else before
    if sum(each.gate is gate for each in layers) > 1:  # a hook on it would change the gates of all of them
        gate = copy(gate)
        gate._forward_hooks = gate._forward_hooks.copy()
    if gate is not before:
        _TEMPORARY.add(gate)
    hook = gate.register_forward_hook(lambda _, sizes, gates: change(gates, *sizes))
    try:
        layer.module.head_gate = gate
        yield
    finally:
        hook.remove()
        if layer.gate is gate:
            layer.module.head_gate = before


#: The function of a batch for each `method`.
_METHODS: Final[dict[str, Callable[[_Task, Any], _Terms]]] = {
    "gradient": _by_gradients,
    "fisher": _by_gradients,
    "patching": _by_patching,
    "leave_one_out": _by_leaving_out,
}


# ---------------------------------------------------------------------- what is refused
_FROM_MODEL: Final = "compute it from the model's output, without detach or torch.no_grad"
_SHAPES: Final = "return a scalar that is the sum over examples, losses [B], or outputs [B, ...]"


def _check_value(value: Any, batches: list[int]) -> int:
    """Check `value`, the loss of a pass whose layers ran on batches of these sizes; returns B."""
    if not isinstance(value, Tensor):
        refuse("loss", f"gave a {type(value).__name__}", _SHAPES, TypeError)
    if not value.is_floating_point():
        refuse("loss", f"gave a tensor of {value.dtype}", _SHAPES, TypeError)
    if not batches or not batches[0]:
        was = "ran no layer that has heads, or on no example"
        refuse("loss", was, "call the model in it, with a batch that is not empty")
    if len(set(batches)) > 1:
        was = f"runs layers on batches of {sorted(set(batches))} examples"
        refuse("loss", was, "make them equal: a row of the batch is an example")
    if value.dim() and len(value) != batches[0]:
        refuse("loss", f"gave shape {list(value.shape)} for a batch of {batches[0]}", _SHAPES)
    if not bool(value.isfinite().all()):
        refuse("loss", "gave NaN or infinity", "leave out the batch that makes it so")
    return batches[0]
