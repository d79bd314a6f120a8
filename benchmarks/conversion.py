"""A pretrained model made collaborative: accuracy, FLOPs and speed.

MiniLM is converted with one half of the sentences as calibration and measured on the other half: its sentence
embeddings against those of the stock model, and the goals. Then the whole model is timed beside stock SDPA at three
lengths.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

import heads_kernels as hk
from benchmarks import minilm
from benchmarks.measure import Found, Row
from benchmarks.models import WHOLE, Batch, Model, timed
from benchmarks.settings import Settings

Calibration = Mapping[str, Any]

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
            conversion = hk.convert.collaborate(model, dim, method=method, calibration=calibration, progress=False)
            seconds = (time.perf_counter() - start) / layers
            yield Converted(method, dim, model, conversion, seconds)


def quality(one: Converted, expected: Tensor, held_out: list[dict[str, Tensor]]) -> Row:
    """The accuracy of a converted model: embeddings of sentences compared with the stock model's."""
    got = agreement(embeddings(one.model, held_out), expected)
    goal = GOALS[one.method][one.dim]
    return {
        "method": one.method,
        "dim": one.dim,
        "dims": one.conversion.dims,
        "seconds_a_layer": one.seconds_a_layer,
        "score_error": one.conversion.error,  # of all layers together
        "parameters": one.conversion.parameters,
        **dict(zip(("cosine", "spearman", "top1"), got, strict=True)),
        "goal": goal,
        "met": all(a >= b for a, b in zip(got, goal, strict=True)),
    }


# ---------------------------------------------------------------------- speed
def candidates(stock: Model, models: Sequence[Converted], dims: Sequence[int]) -> dict[str, Model]:
    """The stock model, the same on our operators, and those with `dims` features."""
    ours = hk.integrations.transformers.use(copy.deepcopy(stock))
    chosen = {f"{one.method} {one.dim}": one.model for one in models if one.dim in dims}
    return {WHOLE[0]: stock, "ours": ours, **chosen}


def speeds(models: dict[str, Model], tokens: int, budget_s: float, least: int) -> Iterator[Row]:
    """Every candidate in turn, at every length, on batches of so many tokens."""
    for T in LENGTHS:
        B = tokens // T
        ids = torch.randint(1000, 20_000, (B, T), generator=torch.Generator().manual_seed(T))
        calls: dict[str, Callable[[], object]] = {
            name: torch.inference_mode()(partial(model, input_ids=ids)) for name, model in models.items()
        }
        yield from ({"T": T, "B": B, **row} for row in timed(calls, budget_s, least))


def measure(settings: Settings) -> Iterator[Found]:
    """Smoke: two layers, few sentences."""
    smoke = settings.form == "smoke"
    shortened = {"num_hidden_layers": 2} if smoke else {}
    stock = minilm.load(attn_implementation="sdpa", **shortened)
    parts = (torch.split(part, 100) for part in minilm.tokens(200 if smoke else 1200))
    everything = [Batch.cut("", ids, lengths).inputs(stock) for ids, lengths in zip(*parts, strict=True)]
    held_out = everything[1::2]
    found = Found("conversion", "MiniLM converted, sentences that it was not calibrated on", {
        "": "{method}",
        "Ds": "{dim}",
        "s a layer": "{seconds_a_layer:.2f}",
        "score error": "{score_error:.3f}",
        "cosine / Spearman / top-1": "{cosine:.4f} / {spearman:.4f} / {top1:.3f}",
        "goal": lambda row: " / ".join(map(str, row["goal"])),
        "met": lambda row: "met" if row["met"] else "short",
    })  # fmt: skip
    calibration = hk.convert.calibrate(copy.deepcopy(stock), everything[::2], progress=False)
    models = list(converted(stock, calibration, 96 if smoke else 256))
    expected = embeddings(stock, held_out)
    found.rows = [quality(one, expected, held_out) for one in models]
    yield found
    timed = candidates(stock, models, (96,) if smoke else (256, 128))
    size = (512, 0.1, 1) if smoke else (TOKENS, 40.0, 7)
    yield Found("conversion_speed", f"Whole model, {size[0]} tokens a batch", {
        "T": "{T}",
        "candidate": "{candidate}",
        "ms a batch": "{ms:.1f}",
        "x stock": "{times_stock:.2f}",
    }, [*speeds(timed, *size)])  # fmt: skip
