"""`python -m benchmarks.conversion`: a pretrained model made collaborative: accuracy, FLOPs and speed.

MiniLM is converted with one half of the sentences as calibration and measured on the other half: its sentence
embeddings against those of the stock model, and the goals. Then the decomposition of one layer is compared with
tensorly's, which the paper's code uses, and the whole model with stock SDPA at three lengths.

Exit status: 0; 1 if the exact conversion differs from the stock model; 2 if the model is not available.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import heads_kernels as hk
from benchmarks import minilm
from benchmarks.models import TOLERANCE
from benchmarks.report import make_console
from benchmarks.results import this_machine, write_whole
from heads_kernels.testing import time_in_turn

Model = Any
Calibration = Mapping[str, hk.convert.Moments | hk.convert.RotaryMoments]

#: Cosine, Spearman and top-1 agreement that activation-aware decompositions with the same number of features in every
#: layer reach: shared features by alternating least squares, heads with features of their own.
GOALS: Final = {
    "cp": {256: (0.9982, 0.9974, 0.915), 192: (0.9949, 0.9921, 0.852),
           128: (0.9860, 0.9766, 0.775), 96: (0.9778, 0.9624, 0.712)},
    "ragged": {256: (0.9974, 0.996, 0.905), 192: (0.9913, 0.9856, 0.812),
               128: (0.9776, 0.962, 0.705), 96: (0.9668, 0.9448, 0.642)},
}  # fmt: skip
LENGTHS: Final = (32, 128, 512)
#: Tokens of a batch that whole models are timed with.
TOKENS: Final = 2048


# ---------------------------------------------------------------------- accuracy
@dataclass(frozen=True)
class Quality:
    """Sentence embeddings of a converted model compared with the stock model's, and the goal."""

    method: str
    dim: int
    dims: tuple[int, ...]
    seconds_a_layer: float
    weight_error: float  # the mean of the layers'
    score_error: float  # of all layers together
    parameters: int
    cosine: float
    spearman: float
    top1: float
    goal: tuple[float, float, float] | None

    @property
    def met(self) -> bool:
        got = (self.cosine, self.spearman, self.top1)
        return self.goal is None or all(a >= b for a, b in zip(got, self.goal, strict=True))


@torch.no_grad()
def embeddings(model: Model, sentences: Sequence[dict[str, Tensor]]) -> Tensor:
    """`[sentences, width]`: the mean of the hidden states of real tokens, normalised."""
    parts = []
    for batch in sentences:
        hidden = model(**batch).last_hidden_state
        real = batch["attention_mask"][..., None]
        parts.append((hidden * real).sum(1) / real.sum(1))
    return torch.nn.functional.normalize(torch.cat(parts).double(), dim=1)


def agreement(found: Tensor, stock: Tensor) -> tuple[float, float, float]:
    """Mean cosine, Spearman of the similarities of all pairs, share of sentences with the same nearest neighbour."""
    pairs = torch.triu_indices(len(stock), len(stock), 1)
    like = [embedded @ embedded.T for embedded in (found, stock)]
    ranks = [one[pairs[0], pairs[1]].argsort().argsort().double() for one in like]
    nearest = [one.fill_diagonal_(-2).argmax(1) for one in like]
    spearman = torch.corrcoef(torch.stack(ranks))[0, 1]
    same = (nearest[0] == nearest[1]).double().mean()
    return float((found * stock).sum(1).mean()), float(spearman), float(same)


@dataclass(frozen=True)
class Converted:
    """A model that a method gave `dim` features on average."""

    method: str
    dim: int
    model: Model
    conversion: Any
    seconds_a_layer: float


def converted(stock: Model, calibration: Calibration, most: int) -> Iterator[Converted]:
    """Both methods at every number of features up to `most`."""
    layers = len(hk.heads.attention_layers(stock))
    for method, goals in GOALS.items():
        for dim in goals:
            if dim > most:
                continue
            model = copy.deepcopy(stock)
            start = time.perf_counter()
            conversion = hk.convert.collaborate(
                model, dim, method=method, calibration=calibration, progress=False
            )
            seconds = (time.perf_counter() - start) / layers
            yield Converted(method, dim, model, conversion, seconds)


def qualities(
    stock: Model, models: Sequence[Converted], held_out: list[dict[str, Tensor]]
) -> Iterator[Quality]:
    """The accuracy of every converted model."""
    expected = embeddings(stock, held_out)
    for one in models:
        reports = one.conversion.reports
        yield Quality(
            one.method,
            one.dim,
            one.conversion.dims,
            one.seconds_a_layer,
            sum(report.weight_error for report in reports) / len(reports),
            one.conversion.error,
            one.conversion.parameters,
            *agreement(embeddings(one.model, held_out), expected),
            GOALS[one.method][one.dim],
        )


# ---------------------------------------------------------------------- against the reference's library
@dataclass(frozen=True)
class Library:
    """One layer decomposed by tensorly as the paper's code asks for it, and by `hk.convert.cp`, weights alone."""

    dim: int
    tensorly_s: float
    tensorly_error: float
    ours_s: float
    ours_error: float


def against_tensorly(layer: hk.heads.AttentionLayer, dim: int) -> Library:
    """Random start, 100 iterations at most, tolerance 1e-6 (Cordonnier et al.'s code), on PyTorch's threads."""
    import tensorly
    from tensorly.decomposition import parafac

    tensorly.set_backend("pytorch")
    heads = hk.convert.read_heads(layer)
    assert isinstance(heads, hk.convert.Heads)
    product = torch.einsum("hdq,hdk->qhk", heads.query.float(), heads.key.float())
    start = time.perf_counter()
    _, (query, mixing, key) = parafac(product, dim, init="random", tol=1e-6, random_state=0)
    theirs = time.perf_counter() - start
    difference = product - torch.einsum("qr,hr,kr->qhk", query, mixing, key)
    start = time.perf_counter()
    factors = hk.convert.cp(heads, dim)
    ours = time.perf_counter() - start
    error = float(difference.norm() / product.norm())
    return Library(dim, theirs, error, ours, hk.convert.weight_error(heads, factors))


# ---------------------------------------------------------------------- speed
@dataclass(frozen=True)
class Speed:
    """A whole model at inference, no padding; `flops` are those of all attention layers for one sentence."""

    T: int
    B: int
    candidate: str
    flops: int
    ms: float
    times_stock: float


def candidates(
    stock: Model, models: Sequence[Converted], dims: Sequence[int]
) -> dict[str, tuple[Model, Any]]:
    """The stock model, the same on our operators, and those with `dims` features with their conversions."""
    found: dict[str, tuple[Model, Any]] = {"stock SDPA": (stock, None)}
    found["ours"] = (hk.integrations.transformers.use(copy.deepcopy(stock)), None)
    for one in models:
        if one.dim in dims:
            found[f"{one.method} {one.dim}"] = (one.model, one.conversion)
    return found


def attention_flops(stock: Model, conversion: Any, T: int) -> int:
    """Of all layers, for one sentence of T tokens."""
    total = 0
    for index, layer in enumerate(hk.heads.attention_layers(stock)):
        heads = hk.convert.read_heads(layer)
        sizes: tuple[int, ...] = (heads.D_in, heads.D_k, heads.H)
        features = None
        if conversion is not None:
            sizes = (*sizes, conversion.reports[index].dim)
            features = conversion.reports[index].executed_features
        total += hk.convert.count_flops(T, T, *sizes, executed_features=features).total
    return total


def speeds(
    models: dict[str, tuple[Model, Any]], tokens: int, budget_s: float, least: int
) -> Iterator[Speed]:
    """Every candidate in turn, at every length, on batches of so many tokens."""
    stock = models["stock SDPA"][0]
    for T in LENGTHS:
        B = tokens // T
        ids = torch.randint(1000, 20_000, (B, T), generator=torch.Generator().manual_seed(T))
        calls = {name: _inference(model, ids) for name, (model, _) in models.items()}
        times = time_in_turn(calls, budget_s=budget_s, least=least, warmup=1)
        for name, (_, conversion) in models.items():
            ms, flops = times[name].median * 1e3, attention_flops(stock, conversion, T)
            yield Speed(T, B, name, flops, ms, times["stock SDPA"].median * 1e3 / ms)


def _inference(model: Model, ids: Tensor) -> Callable[[], object]:
    @torch.inference_mode()
    def call() -> object:
        return model(input_ids=ids)

    return call


# ---------------------------------------------------------------------- the command
def show(console: Console, title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(title=title, title_justify="left", box=None)
    for head in heads:
        table.add_column(head, justify="right")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def show_qualities(console: Console, rows: Sequence[Quality]) -> None:
    cells = [
        (
            row.method,
            str(row.dim),
            " ".join(map(str, row.dims)),
            f"{row.seconds_a_layer:.2f}",
            f"{row.weight_error:.3f}",
            f"{row.score_error:.3f}",
            f"{row.cosine:.4f} / {row.spearman:.4f} / {row.top1:.3f}",
            " / ".join(map(str, row.goal or ())),
            "met" if row.met else "MISSED",
        )
        for row in rows
    ]
    heads = (
        "method", "Ds", "by layer", "s a layer", "weight error", "score error",
        "cosine / Spearman / top-1", "goal", "",
    )  # fmt: skip
    show(console, "MiniLM converted, sentences that it was not calibrated on", heads, cells)


def show_library(console: Console, rows: Sequence[Library]) -> None:
    cells = [
        (
            str(row.dim),
            f"{row.tensorly_s:.1f}",
            f"{row.tensorly_error:.3f}",
            f"{row.ours_s:.2f}",
            f"{row.ours_error:.3f}",
            f"{row.tensorly_s / row.ours_s:.0f}",
        )
        for row in rows
    ]
    heads = ("Ds", "tensorly s", "error", "ours s", "error", "times faster")
    show(console, "Layer 0, weights alone", heads, cells)


def show_speeds(console: Console, rows: Sequence[Speed]) -> None:
    cells = [
        (
            str(row.T),
            row.candidate,
            f"{row.flops / 1e6:.0f}",
            f"{row.ms:.1f}",
            f"{row.times_stock:.2f}",
        )
        for row in rows
    ]
    heads = ("T", "", "attention MFLOP a sentence", "ms a batch", "x stock")
    show(console, f"Whole model, {rows[0].B * rows[0].T} tokens a batch", heads, cells)


def exact(stock: Model, sentences: dict[str, Tensor]) -> float:
    """The largest difference of hidden states that a conversion with all features makes."""
    model = copy.deepcopy(stock)
    hk.convert.collaborate(model, stock.config.hidden_size, method="ragged", progress=False)
    with torch.no_grad():
        hidden = [one(**sentences).last_hidden_state for one in (stock, model)]
    return float(((hidden[0] - hidden[1]) * sentences["attention_mask"][..., None]).abs().max())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.conversion", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument(
        "--smoke", action="store_true", help="two layers, few sentences: does it run?"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all numbers here")
    options = parser.parse_args(arguments)
    console = make_console()
    try:
        shortened = {"num_hidden_layers": 2} if options.smoke else {}
        stock = minilm.load(attn_implementation="sdpa", **shortened)
        everything = minilm.batches(200 if options.smoke else 1200, size=100)
    except minilm.Unavailable as error:
        console.print(f"no model: {error}")
        return 2
    held_out = everything[1::2]
    difference = exact(stock, held_out[0])
    if not difference <= TOLERANCE:
        console.print(f"FAIL with all features hidden states differ by {difference:.1e}")
        return 1
    calibration = hk.convert.calibrate(copy.deepcopy(stock), everything[::2], progress=False)
    models = list(converted(stock, calibration, 96 if options.smoke else 256))
    quality = list(qualities(stock, models, held_out))
    show_qualities(console, quality)
    library = []
    if not options.smoke:
        layer = hk.heads.attention_layers(stock)[0]
        library = [against_tensorly(layer, dim) for dim in GOALS["cp"]]
        show_library(console, library)
    timed = candidates(stock, models, (96,) if options.smoke else (256, 128))
    speed = list(speeds(timed, *((512, 0.1, 1) if options.smoke else (TOKENS, 40.0, 7))))
    show_speeds(console, speed)
    if options.json:
        numbers: dict[str, Any] = {"machine": asdict(this_machine())}
        parts: dict[str, Sequence[Any]] = {"quality": quality, "library": library, "speed": speed}
        numbers |= {name: [asdict(row) for row in rows] for name, rows in parts.items()}
        write_whole(options.json, json.dumps(numbers, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
