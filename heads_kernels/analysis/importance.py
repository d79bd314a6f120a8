"""Importance of heads: by gradients of their outputs, also towards those of another run, and by leaving heads out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final, Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn

from heads_kernels.analysis.head_scores import HeadScores, scores_of
from heads_kernels.analysis.observe import each_batch, evaluation
from heads_kernels.call import compute_dtype
from heads_kernels.checks import check_choice, refuse, refuse_type
from heads_kernels.heads.layers import AttentionLayer, attention_layers, choose_layers, gates_of
from heads_kernels.heads.observers import observed
from heads_kernels.heads.patching import edited, outputs
from heads_kernels.nn.attention_call import AttentionCall

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
    and row t only. One backward pass computes it for all layers, without a map `[T, S]`.

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
    check_choice("method", method, get_args(Method))
    check_choice("reduce", reduce, get_args(Reduce))
    if reduce != "example" and method != "gradient":
        refuse("reduce", f"is {reduce!r}, but the method is {method!r}", "leave it out")
    if not callable(loss):
        refuse_type("loss", loss, "pass a function loss(model, batch) -> Tensor")
    chosen = choose_layers(attention_layers(model), layers)
    scored = [layer for layer in chosen if layer.num_heads]
    if not scored:
        was = f"has no heads left in its {len(chosen)} attention layer(s)"
        refuse("model", was, "score heads before all of them are pruned")
    if method != "leave_one_out" and any(weight.is_inference() for weight in model.parameters()):
        was = "has weights of inference mode, through which no gradient goes"
        refuse("model", was, "load it outside of torch.inference_mode, or use 'leave_one_out'")
    estimate = _ESTIMATORS.get(reduce if method == "gradient" else method)
    signs = torch.Generator().manual_seed(0)
    sums = {layer.index: torch.zeros(layer.num_heads).double() for layer in chosen}
    examples = 0
    with evaluation(model):
        for batch in each_batch(data):
            if estimate is None:
                B, terms = _by_leaving_out(model, scored, loss, batch)
            else:
                B, found = _by_slopes(model, scored, loss, batch, method == "patching", signs)
                terms = {index: estimate(torch.cat(each, 1)) for index, each in found.items()}
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


# ---------------------------------------------------------------------- by gradients
#: The contribution of examples to the score of a head, from terms `[B, T, H]`, by the method or its `reduce`.
_ESTIMATORS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "token": lambda terms: terms.abs().sum((0, 1)),
    "example": lambda terms: terms.sum(1).abs().sum(0),
    "batch": lambda terms: terms.sum((0, 1)).abs(),
    "fisher": lambda terms: terms.sum(1).square().sum(0),
    "patching": lambda terms: terms.sum((0, 1)),
}


def _by_slopes(
    model: nn.Module, layers: list[AttentionLayer], loss: Loss, batch: Any, patching: bool, signs: torch.Generator
) -> tuple[int, dict[int, list[Tensor]]]:
    """B, and of each run of the layers, by index, terms `[B, T, H]`: `z . dL/dz` of the outputs z of each head and row,
    which is the derivative of L by a factor of 1 on them; with `patching`, `(z_clean - z) . dL/dz`."""
    clean: dict[int, list[Tensor]] = {}
    if patching:
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            was = f"has a {type(batch).__name__} for a batch"
            refuse("data", was, "pass pairs of batches: (clean, corrupted)", TypeError)
        with torch.no_grad(), outputs(model, [layer.name for layer in layers]) as clean:
            loss(model, batch[0])
        batch = batch[1]
    runs: list[tuple[AttentionLayer, Tensor, Tensor]] = []  # real rows [B, T], outputs of heads [B, T, H, Dv]

    def record(layer: AttentionLayer, call: AttentionCall, heads: Tensor) -> Tensor:
        runs.append((layer, call.real_queries, heads))
        return heads

    # Checkpointed layers run again in the backward pass, on a GPU on another thread.
    with observed(model, layers, lambda *_: _differentiable, every_thread=True), torch.enable_grad():
        with edited(model, {layer: partial(record, layer) for layer in layers}):
            value = loss(model, batch)
        B = _check_value(value, [len(heads) for *_, heads in runs])
        if patching and value.dim() > 1:
            was = f"gave outputs {list(value.shape)}, whose change has no sign"
            refuse("loss", was, "return losses [B] or their sum for 'patching'")
        heads = [each for *_, each in runs]
        ways = [_target(layer, clean[layer.index], z) - z if patching else z for layer, _, z in runs]
        slopes = _slopes(value, heads, signs)
    terms: dict[int, list[Tensor]] = {}
    for (layer, real, _), way, slope in zip(runs, ways, slopes, strict=True):
        dtype = compute_dtype(slope.dtype)
        each = torch.einsum("bthd,bthd->bth", way.detach().to(dtype), slope.to(dtype))
        terms.setdefault(layer.index, []).append(torch.where(real[..., None], each, 0))
    return B, terms


def _differentiable(heads: Tensor) -> Tensor:
    """Outputs of heads that are in the graph, also those of the first layer, on which no weight has a gradient."""
    if heads.requires_grad or not torch.is_grad_enabled():
        return heads
    return heads.detach().requires_grad_().clone()  # no leaf: the model may change it in place


def _target(layer: AttentionLayer, clean: list[Tensor], own: Tensor) -> Tensor:
    """The next of the layer's clean outputs, of the size of its own ones."""
    target = clean.pop(0) if clean else None
    if target is None or target.shape != own.shape:
        found = "no output" if target is None else f"outputs {list(target.shape)}"
        was = f"gives {layer} {found} for the clean batch, but {list(own.shape)} for the corrupted one"
        refuse("data", was, "pass pairs of equal sizes")
    return target


def _slopes(value: Tensor, heads: list[Tensor], signs: torch.Generator) -> list[Tensor]:
    """The derivatives of losses, or of outputs under random signs, by outputs of heads."""
    if value.dim() > 1:
        drawn = torch.randint(2, value.shape, generator=signs)
        value = value * (drawn.to(value) * 2 - 1)
    found: tuple[Tensor | None, ...] = ()
    recorded = [each for each in heads if each.requires_grad]  # not those of passes without gradients
    if value.requires_grad and recorded:
        found = torch.autograd.grad(value.sum(), recorded, allow_unused=True)
    if all(slope is None for slope in found):
        refuse("loss", "does not depend on the heads of the model", _FROM_MODEL)
    slopes = {id(each): slope for each, slope in zip(recorded, found, strict=True) if slope is not None}
    return [slopes.get(id(each), torch.zeros_like(each)) for each in heads]


# ---------------------------------------------------------------------- by leaving heads out
@torch.no_grad()
def _by_leaving_out(
    model: nn.Module, layers: list[AttentionLayer], loss: Loss, batch: Any
) -> tuple[int, dict[int, Tensor]]:
    """B, and the sum over examples of the change of the loss without each head."""
    sizes: list[int] = []  # B of every run of a layer
    with observed(model, layers, lambda _, call: sizes.append(call.B)):
        whole = loss(model, batch)
    B = _check_value(whole, sizes)
    changes = {}

    def leave_out(head: int, call: AttentionCall, heads: Tensor) -> Tensor:
        return heads.index_fill(2, torch.tensor(head, device=heads.device), 0)

    for layer in layers:
        changes[layer.index] = torch.zeros(layer.num_heads).double()
        for head in gates_of(layer).nonzero().flatten().tolist():
            with edited(model, {layer: partial(leave_out, head)}):
                change = loss(model, batch).double() - whole.double()
            change = change.square() if whole.dim() > 1 else change
            changes[layer.index][head] = change.sum().cpu()
    return B, changes


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
