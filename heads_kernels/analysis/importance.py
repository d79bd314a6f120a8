"""Importance of heads: by gradients of their gates, by leaving heads out, by confidence."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import torch
from torch import Tensor, nn

from heads_kernels.analysis.batches import (
    ExcludeKeys,
    bar,
    each_batch,
    evaluation,
    excluded_keys,
    length,
    run,
)
from heads_kernels.analysis.head_scores import HeadScores, Shares, scores_of
from heads_kernels.analysis.lrp.relevance import relevance
from heads_kernels.analysis.observe import observe
from heads_kernels.analysis.probes import open_gates, probed, without
from heads_kernels.checks import check_choice, refuse
from heads_kernels.heads.layers import AttentionLayer, attention_layers, choose_layers
from heads_kernels.heads.patching import edited, outputs
from heads_kernels.nn.attention_call import AttentionCall

#: `loss(model, batch)`: a scalar, losses of examples `[B]`, or outputs `[B, ...]`.
Loss: TypeAlias = Callable[[Any, Any], Tensor]
Method = Literal["gradient", "fisher", "patching", "leave_one_out", "confidence", "lrp"]
Reduce = Literal["token", "example", "batch"]
_Change: TypeAlias = tuple[AttentionLayer, int, Tensor]


@torch.inference_mode(False)
def importance(
    model: nn.Module,
    data: Iterable[Any],
    loss: Loss | None = None,
    *,
    layers: Iterable[int | str] | None = None,
    method: Method = "gradient",
    reduce: Reduce = "example",
    normalise: Literal["l2"] | None = None,
    exclude_keys: ExcludeKeys | None = None,
    progress: bool = False,
) -> HeadScores:
    r"""How much each head of a model matters, from a pass over data; padded rows do not count.

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
    "confidence"        mean over rows of the largest probability   Voita et al. 2019, section 4
    "lrp"               share of the layer's relevance for the      Voita et al. 2019, section 4; see `relevance`
                        largest output, mean over examples
    ==================  ==========================================  =============================================

    Scores are means over examples, so they do not depend on the division into batches, except with reduce="batch".
    The sources of "token" and "batch" divide by tokens instead of examples; in an encoder or a decoder alone this is
    one factor for all heads. Michel et al. normalise per layer, which hides that some layers matter less.

    Without labels, `loss` returns outputs e of the model, `[B, ...]`, such as sentence embeddings. Gradient methods
    then use `L_x = sum(z_x * e_x)` with random signs z, the same in every call ("fisher": its mean is
    `|de_x/dg_h|^2`), and "leave_one_out" the squared change `|e_x without the head - e_x|^2`.

    "patching" estimates the change of the loss of a corrupted input x if the head has the output of the clean one, as
    `hk.heads.patch` gives it: a batch is a pair of batches (clean, corrupted) of equal sizes, and `loss` is called with
    each: it returns losses, not outputs. It takes two passes forward and one backward for all heads.

    Existing gates stay in effect: a closed head scores 0 by every method except "confidence". Heads have their current
    numbers. For a layer that runs several times in a pass (ALBERT), derivatives are summed over its runs, and a head is
    left out of all of them. A layer that no pass reaches scores 0. The model runs in evaluation mode with frozen
    weights; mode, gates and `requires_grad` are restored at the end.

    Args:
        model: with attention layers (`hk.heads.attention_layers`); a transformers model after
            `hk.integrations.transformers.use(model)`.
        data: an iterable of batches, for "patching" of pairs of batches. Without `loss`, a batch is a mapping of
            keyword arguments, a tuple or list of arguments, or one argument of the model.
        loss: `loss(model, batch)` returns a scalar, the SUM over the examples of the batch (a mean times B), the losses
            of the examples `[B]`, or outputs `[B, ...]`. Optional for "confidence", for which it runs the model, and
            for "lrp", where it is the `output` of `relevance`.
        layers: indices or names of the layers whose heads are scored; default all. Those of a tower of a model may be
            named alone, for one whose towers run on batches of different sizes.
        method: see the table.
        reduce: where "gradient" takes the absolute value.
        normalise: "l2" divides the scores of each layer by their norm (`HeadScores.normalised`).
        exclude_keys: for "confidence": keys that may not be the maximum, such as EOS. Nothing is renormalised, and rows
            of these tokens count. Token ids, or a function of a batch, as in `statistics`.
        progress: whether to show a progress bar on a terminal, if rich is installed.

    Returns:
        `HeadScores`. "leave_one_out" takes a pass for every open head and batch, the others one per batch.

    Raises:
        TypeError, ValueError: an argument is invalid; the model has no heads; data has no batches; the loss is not a
            floating tensor of these shapes, is not finite, has a gradient that is not finite, or does not depend on the
            heads; the attention function of a transformers model is not this package's.
    """
    _check(loss, method, reduce, normalise, exclude_keys)
    there = attention_layers(model)
    chosen = choose_layers(there, layers)
    estimator = reduce if method == "gradient" else method
    task = _Task(model, there, chosen, data, loss, estimator, exclude_keys, progress)
    if not any(layer.num_heads for layer in chosen):
        was = f"has no heads left in its {len(chosen)} attention layer(s)"
        refuse("model", was, "score heads before all of them are pruned")
    scores = tuple(_METHODS[method](task))
    for layer, each in zip(chosen, scores, strict=True):
        if not bool(each.isfinite().all()):
            was = f"is not finite without a head of {layer}, or its gradient there is not"
            refuse("loss", was, "look for a logarithm or a square root of 0 in it")
    name = f"gradient by {reduce}" if method == "gradient" else method
    result = scores_of(chosen, scores, name)
    return result.normalised() if normalise else result


@dataclass(frozen=True, eq=False)
class _Task:
    """The validated arguments of `importance`; `there` are all layers of the model, `layers` those that are scored."""

    model: nn.Module
    there: list[AttentionLayer]
    layers: list[AttentionLayer]
    data: Iterable[Any]
    loss: Loss | None
    estimator: str
    exclude_keys: ExcludeKeys | None
    progress: bool

    @property
    def names(self) -> list[str]:
        return [layer.name for layer in self.layers]

    def zeros(self) -> dict[int, Tensor]:
        """By the index of the layer."""
        return {
            layer.index: torch.zeros(layer.num_heads, dtype=torch.float64) for layer in self.layers
        }

    def run(self, batch: Any) -> Any:
        return run(self.model, batch) if self.loss is None else self.loss(self.model, batch)


# ---------------------------------------------------------------------- by gradients
#: The contribution of examples to the score of a head, from their derivatives `[B, H, T]`.
_ESTIMATORS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "token": lambda terms: terms.abs().sum((0, 2)),
    "example": lambda terms: terms.sum(2).abs().sum(0),
    "batch": lambda terms: terms.sum((0, 2)).abs(),
    "fisher": lambda terms: terms.sum(2).square().sum(0),
}


def _by_gradients(task: _Task) -> list[Tensor]:
    _check_passes_gradients(task.model)
    sums, examples, signs = task.zeros(), 0, torch.Generator().manual_seed(0)
    with evaluation(task.model), torch.enable_grad():
        for batch in each_batch(task.data, "importance", task.progress):
            with probed(task.model, task.names) as probes:
                value = task.run(batch)
                ran = {index: probe for index, probe in probes.items() if probe.ones}
                ones = [factor for probe in ran.values() for factor in probe.ones]
                examples += _check_value(value, [len(factor) for factor in ones])
                slopes = iter(_slopes(value, ones, signs))
            for index, probe in ran.items():
                terms = [torch.where(real[:, None], next(slopes), 0) for real in probe.real]
                sums[index] += _ESTIMATORS[task.estimator](torch.cat(terms, 2)).cpu().double()
    return [each / examples for each in sums.values()]


def _slopes(value: Tensor, ones: list[Tensor], signs: torch.Generator) -> list[Tensor]:
    """The derivatives of losses, or of outputs under random signs, by the factors."""
    if value.dim() > 1:
        value = value * (torch.randint(2, value.shape, generator=signs).to(value) * 2 - 1)
    found: tuple[Tensor | None, ...] = ()
    if value.requires_grad:
        found = torch.autograd.grad(value.sum(), ones, allow_unused=True)
    if all(slope is None for slope in found):
        refuse("loss", "does not depend on the heads of the model", _FROM_MODEL)
    return [
        torch.zeros_like(factor) if slope is None else slope
        for slope, factor in zip(found, ones, strict=True)
    ]


def _check_passes_gradients(model: nn.Module) -> None:
    if any(parameter.is_inference() for parameter in model.parameters()):
        was = "has weights of inference mode, through which no gradient goes"
        refuse("model", was, "load it outside of torch.inference_mode, or use 'leave_one_out'")


def _by_patching(task: _Task) -> list[Tensor]:
    _check_passes_gradients(task.model)
    sums, examples, signs = task.zeros(), 0, torch.Generator().manual_seed(0)
    with evaluation(task.model):
        for pair in each_batch(task.data, "importance", task.progress):
            if not isinstance(pair, (tuple, list)) or len(pair) != 2:
                was = f"has a {type(pair).__name__} for a batch"
                refuse("data", was, "pass pairs of batches: (clean, corrupted)", TypeError)
            clean, corrupted = pair
            with torch.no_grad(), outputs(task.model, task.names) as heads:
                task.run(clean)
            steps: list[tuple[int, Tensor]] = []  # index of the layer, factor [B, T, H] of each run
            edits = [
                (layer, _towards(layer, heads[layer.index], steps))
                for layer in task.layers
                if layer.num_heads
            ]
            with edited(edits), torch.enable_grad():
                value = task.run(corrupted)
            examples += _check_value(value, [len(factor) for _, factor in steps])
            if value.dim() > 1:
                was = f"gave outputs {list(value.shape)}, whose change has no sign"
                refuse("loss", was, "return losses [B] or their sum for 'patching'")
            slopes = _slopes(value, [factor for _, factor in steps], signs)
            for (index, _), slope in zip(steps, slopes, strict=True):
                sums[index] += slope.sum((0, 1)).cpu().double()
    return [each / examples for each in sums.values()]


def _towards(
    layer: AttentionLayer, clean: list[Tensor], steps: list[tuple[int, Tensor]]
) -> Callable[[Tensor, AttentionCall], Tensor]:
    """An edit that adds factors of 0 times the way to the clean outputs of each run; they are added to `steps`."""
    runs = iter(clean)

    def edit(heads: Tensor, call: AttentionCall) -> Tensor:
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
def _by_leaving_out(task: _Task) -> list[Tensor]:
    sums, sizes = task.zeros(), [0]
    heads = [
        (layer, head)
        for layer in task.layers
        for head in open_gates(layer).nonzero().flatten().tolist()
    ]
    with evaluation(task.model), torch.no_grad():
        count = length(task.data)
        total = None if count is None else count * len(heads)
        with bar("importance", total, task.progress) as advance:
            for layer, head, change in _changes(task, heads, sizes):
                sums[layer.index][head] += change
                advance()
    if heads and not any(each.any() for each in sums.values()):
        refuse("loss", "is the same whichever head is left out", _FROM_MODEL)
    return [each / sum(sizes) for each in sums.values()]


def _changes(
    task: _Task, heads: list[tuple[AttentionLayer, int]], examples: list[int]
) -> Iterator[_Change]:
    """For every batch and head, the change of the loss without the head; adds B of each batch to `examples`."""
    for batch in each_batch(task.data, "importance", False):
        seen: list[int] = []  # B of every run of a layer
        look = lambda layer, call, seen=seen: seen.append(call.B)  # noqa: E731
        with observe(task.model, look, task.names):
            whole = task.run(batch)
        examples.append(_check_value(whole, seen))
        for layer, head in heads:
            with without(layer, head):
                change = task.run(batch).double() - whole.double()
            yield layer, head, (change.square() if whole.dim() > 1 else change).sum().cpu()


# ---------------------------------------------------------------------- by confidence and relevance
def _by_confidence(task: _Task) -> list[Tensor]:
    means = Shares(task.layers, 1)
    excluded: dict[str, Tensor] = {}

    def look(layer: AttentionLayer, call: AttentionCall) -> None:
        best = call.statistics(excluded.get(layer.kind)).max_prob  # [B, H, T]
        real = call.real_queries
        sums = torch.where(real[:, None], best, 0).sum((0, 2), dtype=torch.float64)
        means.add(layer, sums[None], real.sum()[None])

    with evaluation(task.model), torch.no_grad(), observe(task.model, look, task.names):
        for batch in each_batch(task.data, "importance", task.progress):
            excluded = excluded_keys(task.exclude_keys, batch, task.there)
            task.run(batch)
    if not any(bool(rows) for rows in means.rows.values()):
        refuse("data", "has no token that reaches a head", "pass batches with real ones")
    return list(means.scores(0, task.estimator).scores)


def _by_relevance(task: _Task) -> list[Tensor]:
    found = relevance(task.model, task.data, task.loss, layers=task.names, progress=task.progress)
    return list(found.scores)


#: The function for each `method`.
_METHODS: Final[dict[str, Callable[[_Task], list[Tensor]]]] = {
    "gradient": _by_gradients,
    "fisher": _by_gradients,
    "patching": _by_patching,
    "leave_one_out": _by_leaving_out,
    "confidence": _by_confidence,
    "lrp": _by_relevance,
}
#: Methods that need no loss.
_WITHOUT_LOSS: Final = ("confidence", "lrp")


# ---------------------------------------------------------------------- what is refused
_FROM_MODEL: Final = "compute it from the model's output, without detach or torch.no_grad"
_SHAPES: Final = "return a scalar that is the sum over examples, losses [B], or outputs [B, ...]"


def _check(
    loss: Loss | None, method: str, reduce: str, normalise: str | None, exclude_keys: object
) -> None:
    check_choice("method", method, tuple(_METHODS))
    check_choice("reduce", reduce, ("token", "example", "batch"))
    check_choice("normalise", normalise, (None, "l2"))
    if loss is None and method not in _WITHOUT_LOSS:
        was = f"is None, but {method!r} needs one"
        refuse("loss", was, "pass loss(model, batch) -> Tensor", TypeError)
    if loss is not None and not callable(loss):
        was = f"is a {type(loss).__name__}"
        refuse("loss", was, "pass a function loss(model, batch) -> Tensor", TypeError)
    if reduce != "example" and method != "gradient":
        refuse("reduce", f"is {reduce!r}, but the method is {method!r}", "leave it out")
    if exclude_keys is not None and method != "confidence":
        refuse("exclude_keys", f"is given, but the method is {method!r}", "leave it out")


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
        was = f"gave shape {list(value.shape)} for a batch of {batches[0]}"
        refuse("loss", was, _SHAPES)
    if not bool(value.isfinite().all()):
        refuse("loss", "gave NaN or infinity", "leave out the batch that makes it so")
    return batches[0]
