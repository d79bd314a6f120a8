"""Convert a pretrained model to collaborative attention, calibrate it, or read its error curves; no training."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from heads_kernels.checks import check_choice, check_flag, check_size, refuse
from heads_kernels.convert.budget import Dim, check_target, dims_of
from heads_kernels.convert.calibration import gathered, moments_of, tracked
from heads_kernels.convert.conversion import Conversion, Curves, Report
from heads_kernels.convert.features import METHODS
from heads_kernels.convert.heads import Heads
from heads_kernels.convert.rotary import AnyFactors, AnyHeads, AnyMoments, RotaryFactors, RotaryHeads
from heads_kernels.heads.layers import AttentionLayer, attention_layers, choose_layers
from heads_kernels.heads.projected import why_not_shared, with_projections
from heads_kernels.heads.reshape import check_can_share, check_has_products, share
from heads_kernels.heads.saving import record_in_config
from heads_kernels.heads.weights import ProjectedLayer, Projection
from heads_kernels.nn import GatedMultiheadAttention
from heads_kernels.snapshot import kept_on_error, undone

#: Ragged features that a head gets at once. On MiniLM at Ds 96 to 256 groups of 4 take 12 to 16 % off the features that
#: scores run over (below those of ordinary attention at Ds 256 too) and at most 0.003 off the cosine of sentences;
#: groups of 8 take 25 to 35 % and up to 0.008, groups of 16 cost up to 0.02.
_GROUP: Final = 4
#: The stack level of the caller of `collaborate`, from a function that it calls through two decorators.
_CALLER: Final = 5


@torch.inference_mode(False)
@torch.no_grad()
def collaborate(
    model: nn.Module,
    dim: Dim | None = None,
    *,
    error: float | None = None,
    method: str = "cp",
    calibration: Iterable[Any] | Mapping[str, AnyMoments] | None = None,
    layers: Iterable[int | str] | None = None,
    length: int = 128,
    progress: bool = True,
) -> Conversion:
    """Let the heads of each attention layer share one query and one key, in place (Cordonnier et al. 2020, section 4).

        conversion = hk.convert.collaborate(model, 192, calibration=batches)
        print(conversion)

    The scores of each layer are approximated with `Ds` features, computed from its weights in float64 (`Heads.fit`).
    The scale does not change. The key bias, which does not affect the softmax, is dropped (where it does, with
    softcap or sinks, the layer is refused), and the query bias becomes a content bias per head and key. With
    `calibration`, the features minimise the error of the scores on those inputs instead of that of the weights; on
    MiniLM this reduces the error of the output by nine tenths. From the rank of all heads on, at most `H D`, the result
    is exact, and a layer gets no more features than that.

    In a layer with rotary positions, heads share pairs of features of the same frequency, which rotate as the heads'
    own do. Biases then stay, there is no content bias, and `Ds` is even.

    Layers of transformers models keep their forward, and the model is prepared with `hk.integrations.transformers.use`.
    A `GatedMultiheadAttention` is replaced by a `CollaborativeMultiheadAttention` (for `torch.nn.MultiheadAttention`,
    call `hk.nn.replace_attention_(model)` first). Gates, values, outputs, dropout and attributes set on a module are
    kept; heads that shared values still share them. The parameters of queries and keys are new: create the optimiser
    afterwards. Convert the whole model, not a part of it, so that `save_pretrained` can save it. Dense mixing (`cp`)
    pays off only in parameters, in the cache and for short inputs: each report has the length below which it takes
    fewer FLOPs.

    Everything is checked and computed before anything is changed; an error or Ctrl-C leaves the model unchanged.

    Args:
        model: a model with attention layers (`hk.heads.attention_layers`).
        dim: average number of features per layer, distributed over the layers so that the error of all
            scores together is smallest with as many parameters, above 8 in multiples of 8; or a list with one number
            for each of `layers`, such as `[192] * L`.
        error: instead of `dim`, the maximum relative error of the scores of all layers together.
        method: "cp", every head mixes all features; or "ragged", every head has separate features, which needs no
            iteration and has a larger error. Its scores use whole chunks of 16 features, which can be more than before
            if `Ds` is near `H D` (`Report.executed_features`). For `dim` a head gets features in groups of 4, so that
            a layer may have up to 3 fewer than possible.
        calibration: batches, as in `calibrate`, or its result; None weights all weights equally.
        layers: indices or names; default all that have heads.
        length: input length for which reports count FLOPs. A warning names the layers whose FLOPs rise at this length.
        progress: whether to show progress bars on a terminal, if rich is installed.

    Returns:
        A `Conversion`: errors, parameters and FLOPs of each layer, and of all together.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it, its value and what would work. Also if a
            layer is collaborative already, has norms before its scores or rotary positions of an unknown form, an
            adapter on its queries or keys (merge it first), quantised or sharded projections, forward hooks on them, or
            weights that are not finite; or calibration data has no tokens, another width, or NaN.
    """
    check_target(dim, error)
    check_choice("method", method, METHODS)
    check_size("length", length)
    check_flag("progress", progress)
    with kept_on_error(model):
        chosen = prepare(model, layers)
        heads = [read_heads(layer) for layer in chosen]
        moments = moments_of(model, chosen, calibration, progress)
        spectra = [each.spectrum(own, method) for each, own in zip(heads, moments, strict=True)]
        sizes = [replace(each.sizes, Hk=layer.num_key_heads) for each, layer in zip(heads, chosen, strict=True)]
        factors: list[AnyFactors] = []
        dims = dims_of(sizes, spectra, dim, error)
        for n, Ds in enumerate(tracked(dims, "Conversion", progress)):
            options: dict[str, Any] = {}
            if isinstance(heads[n], Heads):  # rotary pairs come one by one
                options["multiple"] = min(_GROUP, Ds) if error is None else 1
                options["spectrum"] = spectra[n]
            factors.append(heads[n].fit(Ds, moments[n], method=method, **options))
        reports = tuple(Report.of(each, made, length) for each, made in zip(sizes, factors, strict=True))
        _warn_of_flops(reports, method)
        found = Curves.of([layer.name for layer in chosen], heads, spectra)
        parameters_before = _parameters(model)
        for layer, made in zip(chosen, factors, strict=True):
            install(model, layer, made, ragged=method == "ragged")
        record_in_config(model)
        return Conversion(
            method=method,
            layers=found.layers,
            reports=reports,
            curves=found,
            parameters_before=parameters_before,
            parameters=_parameters(model),
        )


def _warn_of_flops(reports: Sequence[Report], method: str) -> None:
    """Warn if attention takes more FLOPs than before, at the length of the reports."""
    rising = [report for report in reports if report.flops > report.flops_before]
    if not rising:
        return
    before = sum(report.flops_before for report in reports) / 1e6
    after = sum(report.flops for report in reports) / 1e6
    instead = "a smaller dim"
    if method == "cp":
        instead += ", or method='ragged', whose heads have separate features"
    border = min(report.break_even for report in rising)
    warnings.warn(
        f"At T = {reports[0].length} {len(rising)} of {len(reports)} converted layers have more "
        f"FLOPs than before (all layers: {before:.3g} -> {after:.3g} MFLOPs); they have fewer below "
        f"about T = {border:.0f}. For longer inputs use {instead}; pass length= for yours.",
        stacklevel=_CALLER,
    )


def _parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@torch.inference_mode(False)
@torch.no_grad()
def curves(
    model: nn.Module,
    calibration: Iterable[Any] | Mapping[str, AnyMoments] | None = None,
    layers: Iterable[int | str] | None = None,
    *,
    progress: bool = True,
) -> Curves:
    """The error of each layer of a model for every `dim`, without changing the model; `plot` draws it.

    `model`, `calibration`, `layers` and `progress` are those of `collaborate`, and so are errors.
    """
    check_flag("progress", progress)
    with undone(model, lambda: prepare(model, layers)) as chosen:
        heads = [read_heads(layer) for layer in chosen]
        moments = moments_of(model, chosen, calibration, progress)
        spectra = [each.spectrum(own) for each, own in zip(heads, moments, strict=True)]
    return Curves.of([layer.name for layer in chosen], heads, spectra)


@torch.inference_mode(False)
def calibrate(
    model: nn.Module,
    data: Iterable[Any],
    layers: Iterable[int | str] | None = None,
    *,
    progress: bool = True,
) -> dict[str, AnyMoments]:
    """Moments of the inputs of queries and keys of each layer, over all batches of `data`.

    The model runs in evaluation mode and is restored afterwards, except for state that its own forward changes. Padding
    on either side does not count. In a causal layer, the keys of a row are those up to its own position; windows and
    documents are ignored. Memory is that of one batch and of float64 sums `[D_in, D_in]` per layer; for a layer that
    runs several times (ALBERT) the runs are summed. Use several times `D_in` tokens, since moments are covariances: on
    MiniLM (384), 2,400 tokens (100 sentences) are as good as 10,000.

    Args:
        model: as in `collaborate`.
        data: as in `hk.analysis.statistics`, on the device of the model.
        layers, progress: as in `collaborate`.

    Returns:
        `{layer name: Moments}`, which `collaborate` takes as its `calibration`, any number of times.

    Raises:
        TypeError: `data` is not an iterable of batches.
        ValueError: `data` is empty; no token reaches a layer, or its keys never vary; inputs are NaN or infinite; keys
            come from a cache, so that their inputs are missing. The message names the layer and the batch.
    """
    check_flag("progress", progress)
    with undone(model, lambda: prepare(model, layers)) as chosen:
        return gathered(model, chosen, data, progress)


# ---------------------------------------------------------------------- the layers of a model
def prepare(model: nn.Module, layers: Iterable[int | str] | None) -> list[ProjectedLayer]:
    """The layers to convert, in the given order; all that have heads for None, none that cannot be converted.

    transformers models that contain them run on the operators afterwards.
    """
    named = choose_layers(attention_layers(model), layers)
    _use(model, named)
    chosen = with_projections(model, named)
    if layers is None:
        chosen = [layer for layer in chosen if layer.num_heads]
    if not chosen:
        refuse("model", "has no heads left", "convert it before all of them are pruned")
    for layer in chosen:
        check_can_share(model, layer)
        is_ours = isinstance(layer.module, GatedMultiheadAttention)
        # A subclass may do more than its layout says.
        if not is_ours and (why := why_not_shared(layer.holder, layer.layout)) is not None:
            refuse(str(layer), f"is a {type(layer.module).__name__}, {why}", "leave it out")
    return chosen


def _use(model: nn.Module, layers: Iterable[AttentionLayer]) -> None:
    """Put the models of transformers that hold chosen layers in use, where they run another attention function."""
    if "transformers" not in sys.modules:
        return
    from transformers import PreTrainedModel

    from heads_kernels.integrations.transformers import use

    stock = {layer.module for layer in layers if not layer.runs_operators}
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and stock & set(part.modules()):
            stock -= set(part.modules())
            use(part)


def read_heads(layer: ProjectedLayer) -> AnyHeads:
    """The query and key projections of a layer that has products, float64, on the device of its weights.

    Projections may be `nn.Linear`, transformers' `Conv1D`, or fused. Keys that several heads share are repeated.
    """
    check_has_products(layer)
    assert layer.scale is not None
    group = layer.num_heads // layer.num_key_heads
    query, query_bias = _by_head(layer.query)
    key, key_bias = _by_head(layer.key, group)
    try:
        if layer.layout.rotary:
            return RotaryHeads.of(query, key, layer.scale, query_bias, key_bias)
        return Heads(query, key, layer.scale, query_bias)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{layer}: {error}") from None


def _by_head(projection: Projection, repeats: int = 1) -> tuple[Tensor, Tensor | None]:
    """Weight `[heads, width, D_in]` and bias `[heads, width]`, each head so many times."""
    weight, bias = projection.rows()

    def split(rows: Tensor) -> Tensor:
        return rows.view(projection.heads, -1, *rows.shape[1:]).repeat_interleave(repeats, 0)

    return split(weight), None if bias is None else split(bias)


def install(model: nn.Module, layer: ProjectedLayer, factors: AnyFactors, *, ragged: bool) -> None:
    """Make a layer of `prepare` compute with factors of its heads, in place (`share`), without the record in configs.

    With `ragged`, entries of mixing that are 0 stay 0 in training, and cost nothing.
    """
    if isinstance(factors, RotaryFactors):
        places, slots = factors.places(layer.head_dim // 2)
        values = {"mixing": factors.mixing, "query_places": places, "key_places": places}
        for role, rows in (("query", factors.query), ("key", factors.key)):
            values |= {role: rows[:, :-1], f"{role}_bias": rows[:, -1]}
        made = share(model, layer, factors.dim, ragged=ragged, slots=slots)
    else:
        made = share(model, layer, factors.dim, ragged=ragged)
        values = {name: getattr(factors, name) for name in made}
    for name, tensor in made.items():
        tensor.copy_(values[name])
