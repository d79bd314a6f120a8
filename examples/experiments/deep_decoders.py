"""Decoders of 12 layers, trained from the first step at the full learning rate: initialisation and merged attention.

After Zhang, Titov and Sennrich 2019. In a Transformer with norms after the residual sums, the gradient shrinks from
layer to layer on its way down, and deep decoders do not train. With depth-scaled initialisation (DS-Init), the terms
that deeper layers add to the sums are small at first; merged attention replaces two parts of each layer by one. The
control for both is Xavier initialisation, with and without warm-up; everything else is the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from lab import Lab, Run
from matplotlib.figure import Figure
from plots import legend, line
from tables import by_seed, each, markdown, quality_cells
from torch import Tensor, nn
from training import learn
from transformer import Cache, Translator, feed_forward
from translators import Settings, corpus_of, new_model, quality, sentence_losses
from translators import settings_of as translation_of

import heads_kernels as hk
from benchmarks.figures import BLUE, GREY, ORANGE, message

NAME = "deep_decoders"
#: Initialisation, and whether the learning rate rises first.
STARTS: Final = {
    "Xavier": ("xavier", False),
    "Xavier, warm-up": ("xavier", True),
    "DS-Init": ("ds", False),
}
COLORS: Final = {"Xavier": ORANGE, "Xavier, warm-up": GREY, "DS-Init": BLUE}
#: The attention of a decoder layer.
KINDS: Final = ("self and cross", "merged")
CURVE: Final = 16  # points of a curve of losses


@dataclass(frozen=True)
class DeepSettings:
    """Sizes.

    Attributes:
        translation: of language, batches and encoder.
        decoder: layers of the decoder.
        steps: of training.
    """

    translation: Settings
    decoder: int = 12
    steps: int = 800


def settings_of(lab: Lab) -> DeepSettings:
    translation = translation_of(lab)
    return DeepSettings(translation, 2, 4) if lab.quick else DeepSettings(translation)


# ---------------------------------------------------------------------- the decoders
class NormAfter(nn.Module):
    """A part of a layer, added to its input, and a norm after the sum."""

    def __init__(self, width: int, part: nn.Module) -> None:
        super().__init__()
        self.part = part
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, *inputs: Tensor, **options: Any) -> Tensor:
        found = self.part(x, *inputs, **options)
        out: Tensor = self.norm(x + (found[0] if isinstance(found, tuple) else found))
        return out


class DecoderLayer(nn.Module):
    """As in `transformer.py`, with norms after the sums; `merged`: one `hk.nn.MergedAttention` for both kinds."""

    def __init__(self, width: int, heads: int, merged: bool) -> None:
        super().__init__()
        kind = hk.nn.MergedAttention if merged else hk.nn.GatedMultiheadAttention
        attention = None if merged else hk.nn.GatedMultiheadAttention(width, heads)
        self.attention = NormAfter(width, attention) if attention else None
        self.cross = NormAfter(width, kind(width, heads))
        self.feed_forward = NormAfter(width, feed_forward(width)[1:])  # without a norm before it

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        mask: hk.Mask,
        cross_mask: hk.Mask,
        cache: Cache = None,
        cross_cache: Cache = None,
    ) -> Tensor:
        if self.attention is not None:
            x = self.attention(x, mask=mask, cache=cache)
        x = self.cross(x, memory, mask=cross_mask, cache=cross_cache)
        out: Tensor = self.feed_forward(x)
        return out


def deep_model(settings: DeepSettings, seed: int, merged: bool, scaled: bool) -> Translator:
    """The encoder and words of the seed, with a deep decoder; `scaled`: by DS-Init instead of Xavier initialisation."""
    of = settings.translation
    model = new_model(of, seed)
    layers = [DecoderLayer(of.width, of.heads, merged) for _ in range(settings.decoder)]
    for depth, layer in enumerate(layers, 1):
        hk.nn.ds_init_(layer, depth if scaled else 1)  # at depth 1 it is Xavier's
    model.decoder = nn.ModuleList(layers)
    return model


# ---------------------------------------------------------------------- the runs
def run(lab: Lab) -> None:
    """Every kind of decoder from every start, for all seeds."""
    settings = settings_of(lab)
    results = lab.results(NAME, settings)
    for seed in lab.seeds:
        for kind in KINDS:
            for start in STARTS:
                name = f"{label(kind, start)}, seed {seed}"
                results.run(name, partial(train_one, lab, name, kind, start, seed))


def label(kind: str, start: str) -> str:
    return f"{kind}, {start}"


def train_one(lab: Lab, name: str, kind: str, start: str, seed: int) -> Run:
    """Gradients before the first step, losses during training, and the final quality."""
    settings = settings_of(lab)
    of, (rule, warmup) = settings.translation, STARTS[start]
    corpus = corpus_of(of, seed)
    model = deep_model(settings, seed, kind == "merged", rule == "ds")
    gradients = gradients_of(model, corpus.batches(of.batch, seed))
    losses: list[float] = []
    learning = learn(model, corpus.batches(of.batch, seed), settings.steps, warmup=warmup)
    lab.bar.follow(name, settings.steps, seen(learning, losses))
    piece = max(1, len(losses) // CURVE)
    pieces = [losses[at : at + piece] for at in range(0, len(losses), piece)]
    curve = [sum(part) / len(part) for part in pieces]
    parameters = sum(weight.numel() for weight in model.decoder.parameters())
    return {
        **quality(model, corpus),
        "parameters": parameters,
        "gradients": gradients,
        "losses": curve,
    }


def seen(learning: Any, losses: list[float]) -> Any:
    """`learning`, step by step; its losses are appended to `losses`."""
    for step, loss in learning:
        losses.append(loss)
        yield step, loss


def gradients_of(model: Translator, batches: Any) -> list[float]:
    """The norm of the gradient of the loss by the output of each decoder layer, the first layer first."""
    outputs: list[Tensor] = []
    hooks = [layer.register_forward_hook(lambda _, __, output: outputs.append(output)) for layer in model.decoder]
    loss = sentence_losses(model, next(batches)).mean()
    for hook in hooks:
        hook.remove()
    return [gradient.norm().item() for gradient in torch.autograd.grad(loss, outputs)]


# ---------------------------------------------------------------------- report
def tables(settings: Mapping[str, Any], runs: Mapping[str, Any]) -> dict[str, str]:
    """Quality, a number for each seed, and the share of the gradient that reaches the first layer."""
    header = ("decoder", "words, %", "sentences, %", "nats a word", "gradient, first : last layer",
        "parameters")  # fmt: skip
    rows = []
    for kind in KINDS:
        for start in STARTS:
            found = by_seed(runs, label(kind, start))
            reached = each((m["gradients"][0] / m["gradients"][-1] for m in found), ".2g")
            size = format(found[0]["parameters"], ",d")
            rows.append([label(kind, start), *quality_cells(found), reached, size])
    return {NAME: markdown(header, rows)}


def draw(settings: Mapping[str, Any], runs: Mapping[str, Any]) -> Figure:
    """Losses over the steps, for both kinds."""
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    for axes, kind in zip(figure.subplots(1, 2, sharey=True), KINDS, strict=True):
        last = []
        for start, color in COLORS.items():
            losses = [m["losses"] for m in by_seed(runs, label(kind, start))]
            steps = [settings["steps"] * (at + 0.5) / len(losses[0]) for at in range(len(losses[0]))]
            values = list(zip(*losses, strict=True))
            line(axes, steps, values, color, start)
            last.append(f"{sum(values[-1]) / len(values[-1]):.1f} {start}")
        message(axes, f"{kind[0].upper()}{kind[1:]}, last loss: {'; '.join(last)}")
        axes.set(xlabel="step", ylabel="training loss, nats a word")
        axes.grid()
        legend(axes)
    return figure
