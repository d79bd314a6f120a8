"""Layer-wise relevance propagation from the output of a model to the heads of every layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._pytree import tree_map_only

from heads_kernels.analysis.batches import each_batch, evaluation, run
from heads_kernels.analysis.head_scores import HeadScores
from heads_kernels.analysis.lrp.functions import carries
from heads_kernels.analysis.lrp.tape import RelevanceTape, rule_of_module
from heads_kernels.analysis.observe import observe
from heads_kernels.call import compute_dtype
from heads_kernels.checks import refuse
from heads_kernels.heads.layers import attention_layers, choose_layers

#: `output(model, batch)`: scores `[B, C]` or `[B, T, C]`, or such a tensor and the initial relevance of its elements.
Output: TypeAlias = Callable[[Any, Any], Any]


@torch.inference_mode(False)
def relevance(
    model: nn.Module,
    data: Iterable[Any],
    output: Output | None = None,
    *,
    layers: Iterable[int | str] | None = None,
    attention: Literal["constant", "full"] = "constant",
    progress: bool = False,
) -> HeadScores:
    r"""The share of each head in a model's output, by layer-wise relevance propagation (Voita et al. 2019).

    Relevance starts at an output, by default with 1 at its largest score (the top-1 logit), and is propagated function
    by function with the rules of `rules`: linear maps, layer norms by their full Jacobian, sums of tensors by their
    signs; activations and factors pass it on unchanged. A head's relevance is the sum over rows and features of its
    output, after its gate: a closed head has exactly 0. It is divided by that of all heads of the layer and averaged
    over examples, or over examples and positions if the output has positions: each position is a separate pass, like
    the generation steps of the paper.

    No Jacobian and no map `[T, S]` is stored: a batch needs memory for its activations and for tiles of fixed size. A
    linear map from n to m features costs m * n multiplications per token; padded rows cost nothing, with relevance 0.

    Args:
        model: with attention layers that `hk.heads.attention_layers` finds; a transformers model after
            `hk.integrations.transformers.use(model)`. It runs in evaluation mode, and its mode is restored.
        data: an iterable of batches; without `output` a batch is what the model takes: keyword arguments in a mapping,
            arguments in a tuple or list, or one argument.
        output: `output(model, batch)` returns scores `[B, C]`, or `[B, T, C]` for all positions; examples and positions
            of padding, according to the masks of attention over T rows, do not count. Or it returns a pair: such a
            tensor, and the initial relevance of its elements, of the same shape and >= 0; examples and positions where
            it is 0 do not count. Use `(e, e.abs())` for an embedding e. Default: the model's output, or its `logits`.
        layers: indices or names of the layers whose heads get scores; default all.
        attention: "constant" treats probabilities as constants, so that relevance goes from a head to its values;
            "full" goes through the softmax to queries and keys as well, as the code of the paper does by default.
        progress: whether to show a bar of batches on a terminal, where rich is installed.

    Returns:
        `HeadScores`; those of a layer sum to 1, or to less if for some examples no relevance reaches its heads.

    Raises:
        TypeError, ValueError: an argument is invalid; data has no batches, or nothing in it counts; the output depends
            on no head; there is no rule for a function between heads and output, which the message names; a
            transformers model does not use this package's attention function.
    """
    if attention not in ("constant", "full"):
        refuse("attention", f"is {attention!r}", "use 'constant' or 'full'")
    if output is not None and not callable(output):
        was = f"is a {type(output).__name__}"
        refuse("output", was, "pass a function of model and batch", TypeError)
    chosen = choose_layers(attention_layers(model), layers)
    sums = {layer.index: torch.zeros(layer.num_heads, dtype=torch.float64) for layer in chosen}
    count = 0
    with evaluation(model), torch.no_grad():
        for batch in each_batch(data, "relevance", progress):
            batch = tree_map_only(Tensor, Tensor.detach, batch)  # the graph is the tape
            tape = RelevanceTape(attention == "full")
            of_modules = register_module_forward_hook(rule_of_module)  # type: ignore[arg-type]
            with of_modules, observe(model, tape.see), tape:
                found = _logits(run(model, batch)) if output is None else output(model, batch)
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
    return HeadScores(
        layers=tuple(layer.name for layer in chosen),
        kinds=tuple(layer.kind for layer in chosen),
        scores=tuple(each / count for each in sums.values()),
        method="lrp" if attention == "constant" else "lrp, full attention",
    )


def _logits(found: Any) -> Any:
    return getattr(found, "logits", found)


def _starts(found: Any, tape: RelevanceTape) -> Iterator[tuple[Tensor, Tensor]]:
    """The output and its initial relevance: once, or for each position that counts."""
    scores, start = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
    layout = "scores [B, C] or [B, T, C], or a pair of those and their relevance"
    instead = f"pass output(model, batch) that returns {layout}"
    if not isinstance(scores, Tensor):
        refuse("output", f"gave a {type(scores).__name__}", instead, TypeError)
    if scores.dim() not in (2, 3) or not scores.is_floating_point():
        refuse("output", f"gave {scores.dtype} {list(scores.shape)}", instead)
    if not carries(scores):
        refuse("output", "depends on no head of the model", "compute it from what the model gives")
    if start is None:
        start = _largest(scores, tape)
    else:
        _check_start(start, scores)
    start = start.to(compute_dtype(scores.dtype))
    if scores.dim() == 2:
        yield scores, start
        return
    for position in start.any(2).any(0).nonzero().flatten().tolist():
        alone = torch.zeros_like(start)
        alone[:, position] = start[:, position]
        yield scores, alone


def _largest(scores: Tensor, tape: RelevanceTape) -> Tensor:
    """1 at the largest score of every example that has a token, or of every position that is a token."""
    start = torch.zeros_like(scores, dtype=compute_dtype(scores.dtype))
    start.scatter_(-1, scores.argmax(-1, keepdim=True), 1.0)
    if scores.dim() == 3:
        rows = tape.rows.get((scores.shape[0], scores.shape[1]))
        return start if rows is None else start * rows[..., None]
    real = [rows.any(1) for (B, _), rows in tape.rows.items() if len(scores) == B]
    return start * torch.stack(real).any(0)[:, None] if real else start


def _check_start(start: Any, scores: Tensor) -> None:
    instead = f"pass a floating tensor {list(scores.shape)} of numbers >= 0"
    if not isinstance(start, Tensor) or not start.is_floating_point():
        was = f"is {start.dtype}" if isinstance(start, Tensor) else f"is a {type(start).__name__}"
        refuse("relevance of the output", was, instead, TypeError)
    if start.shape != scores.shape:
        refuse("relevance of the output", f"has shape {list(start.shape)}", instead)
    if not bool(((start >= 0) & start.isfinite()).all()):
        refuse("relevance of the output", "has numbers that are negative or not finite", instead)
