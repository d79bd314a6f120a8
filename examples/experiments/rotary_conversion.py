"""A language model with rotary positions made collaborative, against simpler ways to a cache of that size.

The model is a small Llama that is trained here, so that the experiment needs no download. Its queries and keys are
converted to fewer features (`hk.convert.collaborate`), which are distributed over the layers by the error of their
scores, or the same in each layer ("equal layers"). The controls have as few key features: each head keeps its strongest
pairs; groups of heads share the mean of their keys; and in grouped-query attention they share the mean of their values
too (Ainslie et al. 2023). All of them, and the model itself, are measured at once and after the same further training.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from math import sqrt
from statistics import mean
from typing import Any, Final

import torch
from lab import Lab, Run
from matplotlib.figure import Figure
from plots import legend, line
from rotary_models import RATE_AFTER, Settings, held_out_loss, learn, more_batches, read_batches, settings_of, trained
from tables import by_seed, each, markdown
from torch import Tensor, nn

import heads_kernels as hk
from benchmarks.figures import BLUE, GREEN, GREY, ORANGE, PURPLE, message

NAME = "rotary_conversion"
#: Average key features per layer, as shares of those of all heads.
SHARES: Final = (0.75, 0.5, 0.25)
PAIRS, KEYS, GQA = "pairs of each head", "mean keys", "mean keys and values (GQA)"
CP, RAGGED, EQUAL = "cp", "ragged", "equal layers"
#: Colours and lines.
CHOICES: Final = {
    CP: (BLUE, "--"),
    f"{CP}, {EQUAL}": (BLUE, "-"),
    RAGGED: (GREEN, "--"),
    f"{RAGGED}, {EQUAL}": (GREEN, "-"),
    PAIRS: (PURPLE, "-"),
    KEYS: (ORANGE, "-"),
    GQA: (GREY, "-"),
}
BYTES: Final = 2  # of a number in a cache of 16 bits
MLA: Final = "MLA, by formula"


# ---------------------------------------------------------------------- the runs
def run(lab: Lab) -> None:
    """All models for all seeds; those that are converted first."""
    settings = settings_of(lab)
    results = lab.results(NAME, settings)
    for seed in lab.seeds:
        results.run(f"dense, seed {seed}", partial(dense, lab, seed))
    for choice in CHOICES:
        for share in SHARES:
            for seed in lab.seeds:
                name = f"{label(choice, share)}, seed {seed}"
                results.run(name, partial(changed, lab, name, choice, share, seed))


def label(choice: str, share: float) -> str:
    return f"{choice}, {share:.0%}"


def dense(lab: Lab, seed: int) -> Run:
    """The results of the trained model: at once, and after further training."""
    settings = settings_of(lab)
    return measured(lab, f"dense, seed {seed}", trained(lab, seed), seed) | {
        "cache": cache_bytes(settings, settings.width, settings.width)
    }


def changed(lab: Lab, name: str, choice: str, share: float, seed: int) -> Run:
    """The results of the trained model with a share of its key features: at once, and after further training."""
    settings = settings_of(lab)
    model = trained(lab, seed)
    data = read_batches(settings, seed)
    change = converted if choice.startswith((CP, RAGGED)) else reduced
    return change(settings, model, data, choice, share) | measured(lab, name, model, seed)


def measured(lab: Lab, name: str, model: Any, seed: int) -> Run:
    """The loss at once and after further training; the number of weights that are not 0."""
    settings = settings_of(lab)
    weights = sum(int(weight.count_nonzero()) for weight in model.parameters())
    at_once = held_out_loss(model, settings)
    learning = learn(model, more_batches(settings, seed), settings.more_steps, RATE_AFTER)
    lab.bar.follow(name, settings.more_steps, learning)
    return {"weights": weights, "at_once": at_once, "after": held_out_loss(model, settings)}


def cache_bytes(settings: Settings, key: float, value: float) -> int:
    """Bytes per token if keys and values of a layer have these average widths."""
    return round(BYTES * settings.layers * (key + value))


def mla_bytes(settings: Settings) -> int:
    """Bytes per token of multi-head latent attention (DeepSeek-AI 2024): a latent of `4 D`, rotary keys of `D / 2`."""
    return cache_bytes(settings, settings.head_dim / 2, 4 * settings.head_dim)


# ---------------------------------------------------------------------- conversion
def converted(settings: Settings, model: Any, data: Any, choice: str, share: float) -> Run:
    """`hk.convert.collaborate`; `bounds` are the smallest errors that such features can have."""
    dim = round(share * settings.width)
    conversion = hk.convert.collaborate(
        model,
        [dim] * settings.layers if EQUAL in choice else dim,
        method=choice.partition(",")[0],
        calibration=data,
        length=settings.length,
        progress=False,
    )
    bounds = [float(errors[dim]) for errors, dim in zip(conversion.curves.errors, conversion.dims, strict=True)]
    return {
        "dims": conversion.dims,
        "errors": conversion.errors,
        "error": conversion.error,
        "bounds": bounds,
        "bound": together(conversion.curves.squares, bounds),
        "cache": cache_bytes(settings, mean(conversion.dims), settings.width),
    }


def together(squares: Iterable[float], errors: Iterable[float]) -> float:
    """The relative error of all layers, whose scores have these mean squares."""
    squares = list(squares)
    cut = sum(square * error**2 for square, error in zip(squares, errors, strict=True))
    return sqrt(cut / sum(squares))


# ---------------------------------------------------------------------- controls
class Grouped(nn.Module):
    """Replaces a projection by one in which each group of heads shares the mean of its heads.

    Args:
        linear: the projection of all heads.
        group: int64 `[H]`, the group of each head.
    """

    group: Tensor

    def __init__(self, linear: nn.Linear, group: Tensor) -> None:
        super().__init__()
        self.register_buffer("group", group)
        rows = linear.weight.detach().unflatten(0, (len(group), -1))
        self.weight = nn.Parameter(torch.einsum("gh,hde->gde", means(group), rows))

    def forward(self, inputs: Tensor) -> Tensor:
        found = torch.einsum("...e,gde->...gd", inputs, self.weight)
        return found[..., self.group, :].flatten(-2)


def means(group: Tensor) -> Tensor:
    """`[groups, H]`: the weights of the mean of each group."""
    members = nn.functional.one_hot(group).T.float()
    return members / members.sum(1, keepdim=True)


def reduced(settings: Settings, model: Any, data: Any, choice: str, share: float) -> Run:
    """Apply one of the controls, in place; its errors are those that a conversion would report."""
    moments = list(hk.convert.calibrate(model, data, progress=False).values())
    kept = [
        strongest(settings, layer.self_attn, of_layer, share)
        if choice == PAIRS
        else pooled(settings, layer.self_attn, share, values=choice == GQA)
        for layer, of_layer in zip(model.model.layers, moments, strict=True)
    ]
    errors = [score_error(*each) for each in zip(moments, kept, strict=True)]
    squares = [float(of_layer.squares.sum()) for of_layer in moments]
    return {
        "errors": errors,
        "error": together(squares, errors),
        "cache": cache_bytes(settings, share * settings.width, (share if choice == GQA else 1) * settings.width),
    }


def strongest(settings: Settings, attention: Any, moments: Any, share: float) -> Tensor:
    """Each head keeps the share of its pairs that add most to its scores: the query and key weights of the others
    become 0, and so do their gradients. Returns the kept part of the keys, as `score_error` takes it."""
    count = round(share * settings.head_dim / 2)
    best = moments.squares.topk(count, dim=0).indices  # [count, H]
    kept = torch.zeros_like(moments.squares).scatter(0, best, 1.0)  # [F, H]
    rows = kept.repeat(2, 1).T.reshape(-1, 1)  # features f and f + D/2 are a pair
    with torch.no_grad():
        for linear in (attention.q_proj, attention.k_proj):
            linear.weight.mul_(rows)
    return torch.diag_embed(kept)


def pooled(settings: Settings, attention: Any, share: float, *, values: bool) -> Tensor:
    """Groups of heads share the mean of their keys, and with `values` also that of their values."""
    H = settings.heads
    group = torch.arange(H) * round(share * H) // H
    attention.k_proj = Grouped(attention.k_proj, group)
    if values:
        attention.v_proj = Grouped(attention.v_proj, group)
    return means(group)[group].double()


def score_error(moments: Any, kept: Tensor) -> float:
    """The relative error of the scores if keys are replaced by their products with `kept`, `[..., H, H]`."""
    missing = torch.eye(kept.shape[-1], dtype=kept.dtype) - kept
    missing = missing.to(moments.key_outer.dtype)
    key = missing @ moments.key_outer @ missing.mT
    lost = (moments.query_outer * key.conj()).real.diagonal(dim1=1, dim2=2).sum()
    return sqrt(float(lost / (2 * moments.count**2) / moments.squares.sum()))


# ---------------------------------------------------------------------- report
def tables(settings: Mapping[str, Any], runs: Mapping[str, Any]) -> dict[str, str]:
    """Loss, cache and weights of every model; errors by layer. A number for each seed if they differ."""
    return {
        f"{NAME}-loss": loss_table(settings, runs),
        f"{NAME}-layers": layer_table(settings, runs),
    }


def loss_table(settings: Mapping[str, Any], runs: Mapping[str, Any]) -> str:
    whole = by_seed(runs, "dense")
    header = ("", "bytes a token", "weights", "error of the scores", "nats at once", "more, %",
        "nats trained on", "more, %")  # fmt: skip
    names = [label(choice, share) for choice in CHOICES for share in SHARES]
    rows = [row(name, by_seed(runs, name), whole) for name in ("dense", *names)]
    rows.append([MLA, format(mla_bytes(Settings(**settings)), ",d"), *[""] * 6])
    return markdown(header, rows)


def row(name: str, models: list[Run], whole: list[Run]) -> list[str]:
    found = [
        name,
        one_or_each([m["cache"] for m in models]),
        one_or_each([m["weights"] for m in models]),
        each((m["error"] for m in models if "error" in m), ".3f"),
    ]
    for when in ("at_once", "after"):
        found.append(each((m[when] for m in models), ".3f"))
        found.append("" if name == "dense" else each(more(models, whole, when)))
    return found


def one_or_each(values: list[int]) -> str:
    return each(values if len(set(values)) > 1 else values[:1], ",d")


def more(models: list[Run], whole: list[Run], when: str) -> list[float]:
    """The increase of the loss over the dense model that was trained as long, for each seed."""
    return [m[when] / of[when] - 1 for m, of in zip(models, whole, strict=False)]


def layer_table(settings: Mapping[str, Any], runs: Mapping[str, Any]) -> str:
    places = range(settings["layers"])
    rows = []
    for choice in CHOICES:
        if choice == GQA:  # its scores are those of mean keys
            continue
        for share in SHARES:
            models = by_seed(runs, label(choice, share))
            errors = (each((m["errors"][n] for m in models), ".3f") for n in places)
            dims = "; ".join(" ".join(map(str, m["dims"])) for m in models if "dims" in m)
            # Without shared features the conversion reaches its bound.
            bound = each((m["bound"] for m in models), ".3f") if choice.startswith(CP) else ""
            rows.append([label(choice, share), *errors, bound, dims])
    return markdown(["", *(f"layer {n}" for n in places), "bound", "features a layer"], rows)


def draw(settings: Mapping[str, Any], runs: Mapping[str, Any]) -> Figure:
    """The increase of the loss over the dense model, over bytes of the cache."""
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    titles = {"at_once": "At once", "after": "Trained on"}
    panels = zip(titles, figure.subplots(1, 2), strict=True)
    whole = by_seed(runs, "dense")
    for when, axes in panels:
        half = {}
        for choice, (color, style) in CHOICES.items():
            models = [by_seed(runs, label(choice, share)) for share in SHARES]
            x = [mean(m["cache"] for m in of_seeds) for of_seeds in models]
            values = [[100 * each for each in more(m, whole, when)] for m in models]
            line(axes, x, values, color, choice, ls=style)
            half[choice] = f"{mean(values[1]):.2g} % by {choice}"
        words = ", ".join(half[choice] for choice in (f"{CP}, {EQUAL}", PAIRS, KEYS))
        message(axes, f"{titles[when]}, with half of the key features, more loss: {words}")
        axes.set(xlabel="bytes of the cache a token", ylabel="more loss than dense, %")
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.grid()
        if when == "at_once":
            legend(axes, loc="lower left")
    return figure
