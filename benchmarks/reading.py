"""`python -m benchmarks.reading`: reading heads against the way by maps, time and peak memory, on the CPU.

The model is a BERT with random weights. The way by maps is stock eager attention with `output_attentions=True` and the
same numbers from its maps in plain PyTorch; what ours finds is held to it first. Times and memory are those of the
whole reading, the model's own forward pass among them; memory is the peak beyond weights and input, and stock SDPA
without any reading stands beside both.

Exit status: 0; 1 where the two ways find different numbers.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, Final

import torch
from rich.table import Table
from torch import Tensor

import heads_kernels as hk
from benchmarks.report import make_console
from benchmarks.results import this_machine, write_whole
from heads_kernels.testing import peak_memory, time_in_turn

#: Of shares and nats in float32, and of the largest number where that is above 1.
TOLERANCE: Final = 1e-5
#: A token that stands at every tenth place.
MARK: Final = 1

Model = Any
Reading = dict[str, Tensor]


@dataclass(frozen=True)
class Row:
    """One way of one reading; `mib` is the peak beyond weights and input."""

    reading: str
    T: int
    way: str
    ms: float
    mib: float


def bert(layers: int, width: int, heads: int, longest: int) -> Model:
    """Random weights that make attention neither even nor a single key."""
    import transformers

    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=1000,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        max_position_embeddings=longest,
        initializer_range=0.07,
    )
    model: Model = transformers.BertModel(config, add_pooling_layer=False)
    return model.eval()


def tokens(B: int, T: int) -> Tensor:
    ids = torch.randint(2, 1000, (B, T), generator=torch.Generator().manual_seed(T))
    ids[:, ::10] = MARK
    return ids


# ---------------------------------------------------------------------- statistics
def statistics(model: Model, ids: Tensor) -> Reading:
    """By the package."""
    found = hk.analysis.statistics(model, [{"input_ids": ids}], token_sets={"mark": [MARK]})
    return {name: scores.table() for name, scores in found.measures.items()}


@torch.no_grad()
def statistics_of_maps(model: Model, ids: Tensor) -> Reading:
    maps = model(input_ids=ids, output_attentions=True).attentions
    found = [_measures(p, ids) for p in maps]
    return {name: torch.stack([each[name] for each in found]) for name in found[0]}


def _measures(p: Tensor, ids: Tensor) -> Reading:
    """Of the maps of a layer, `[B, H, T, T]`."""
    i = torch.arange(p.shape[-1])
    away = (i - i[:, None]).abs().to(p.dtype)
    mark = (ids == MARK).to(p.dtype)
    rows = {
        "confidence": p.amax(-1),
        "entropy": -(p * p.clamp(min=1e-30).log()).sum(-1),
        "distance": torch.einsum("bhts,ts->bht", p, away),
        "to_self": p.diagonal(0, 2, 3),
        "to_mark": torch.einsum("bhts,bs->bht", p, mark),
    }
    means = {name: each.mean((0, 2)) for name, each in rows.items()}
    offsets = p.argmax(-1) - i
    counts = [torch.bincount(o.flatten() + len(i), minlength=2 * len(i)) for o in offsets.unbind(1)]
    means["offsets"] = torch.stack(counts)
    for name, step in (("to_previous", -1), ("to_next", 1)):
        means[name] = p.diagonal(step, 2, 3).sum((0, 2)) / (len(p) * len(i))
    return means


# ---------------------------------------------------------------------- distance
def distance(model: Model, ids: Tensor) -> Reading:
    """By the package."""
    return {"distance": hk.analysis.distance(model, [{"input_ids": ids}]).matrix}


@torch.no_grad()
def distance_of_maps(model: Model, ids: Tensor) -> Reading:
    """With the entropies of single heads taken once, and those of the means pair by pair."""
    maps = model(input_ids=ids, output_attentions=True).attentions
    heads = [layer[:, head] for layer in maps for head in range(layer.shape[1])]
    entropy = [_entropy(p) for p in heads]
    matrix = torch.zeros(len(heads), len(heads))
    for a, b in combinations(range(len(heads)), 2):
        mean = _entropy((heads[a] + heads[b]) / 2)
        matrix[a, b] = matrix[b, a] = mean - (entropy[a] + entropy[b]) / 2
    return {"distance": matrix}


def _entropy(p: Tensor) -> Tensor:
    """The mean over rows."""
    return -(p * p.clamp(min=1e-30).log()).sum(-1).mean()


# ---------------------------------------------------------------------- measuring
READINGS: Final[dict[str, tuple[Callable[..., Reading], Callable[..., Reading]]]] = {
    "statistics": (statistics, statistics_of_maps),
    "distance": (distance, distance_of_maps),
}


def differences(found: Reading, expected: Reading) -> Iterator[str]:
    """What is not the same."""
    for name, tensor in found.items():
        error, largest = ((x.abs().max()) for x in (tensor - expected[name], expected[name]))
        if not error <= TOLERANCE * max(1.0, float(largest)):
            yield f"{name} differs by {float(error):.1e}, of {float(largest):.1e}"


def measure(stock: Model, ids: Tensor, budget_s: float) -> Iterator[tuple[list[Row], list[str]]]:
    """The rows of each reading, and what differs."""
    eager, ours = copy.deepcopy(stock), hk.integrations.transformers.use(copy.deepcopy(stock))
    eager.set_attn_implementation("eager")
    stock.set_attn_implementation("sdpa")

    @torch.no_grad()
    def forward() -> object:
        return stock(input_ids=ids).last_hidden_state

    for name, (reading, of_maps) in READINGS.items():
        calls: dict[str, Callable[[], object]] = {
            "no reading, stock SDPA": forward,
            "by maps": lambda of_maps=of_maps: of_maps(eager, ids),  # type: ignore[misc]
            "ours": lambda reading=reading: reading(ours, ids),  # type: ignore[misc]
        }
        failures = list(differences(reading(ours, ids), of_maps(eager, ids)))
        mib = {way: peak_memory(call).extra / 2**20 for way, call in calls.items()}
        times = time_in_turn(calls, budget_s=budget_s, warmup=0, least=1, most=20)
        T = ids.shape[1]
        rows = [Row(name, T, way, times[way].median * 1e3, mib[way]) for way in calls]
        yield rows, [f"{name}, T {T}: {failure}" for failure in failures]


def table(rows: Sequence[Row], title: str) -> Table:
    """Three ways a reading; how many times better ours is stands beside the way by maps."""
    result = Table(title=title, title_justify="left", box=None)
    for head in ("", "T", "way", "ms", "x ours", "MiB", "x ours"):
        result.add_column(head, justify="left" if head in ("", "way") else "right")
    for row in rows:
        ours = next(r for r in rows if (r.reading, r.T, r.way) == (row.reading, row.T, "ours"))
        ratios = ["", ""]
        if row.way == "by maps":
            ratios = [f"{row.ms / ours.ms:.1f}", f"{row.mib / max(ours.mib, 0.1):.1f}"]
        cells = (
            row.reading,
            f"{row.T}",
            row.way,
            f"{row.ms:,.0f}",
            ratios[0],
            f"{row.mib:,.1f}",
            ratios[1],
        )
        result.add_row(*cells)
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reading", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    add = parser.add_argument
    add("--smoke", action="store_true", help="a tiny model on short input: does it run?")
    add("--lengths", type=int, nargs="+", default=[512, 4096], help="T (default: 512 4096)")
    add("--batch", type=int, default=1, help="B (default: 1)")
    add("--out", type=Path, metavar="PATH", help="write all numbers here, as JSON")
    options = parser.parse_args(arguments)
    layers, width, heads = (2, 32, 4) if options.smoke else (2, 384, 12)
    lengths = [24] if options.smoke else options.lengths
    console = make_console()
    rows: list[Row] = []
    for T in lengths:
        stock = bert(layers, width, heads, T)
        budget = 0.1 if options.smoke else 15.0
        for found, failures in measure(stock, tokens(options.batch, T), budget):
            for failure in failures:
                console.print(f"FAIL {failure}")
            if failures:
                return 1
            rows += found
    title = f"{layers} layers, {heads} heads, width {width}, B {options.batch}, float32, "
    console.print(table(rows, title + f"{torch.get_num_threads()} threads"))
    if options.out:
        numbers = {
            "machine": asdict(this_machine()),
            "model": {"layers": layers, "heads": heads, "width": width, "batch": options.batch},
            "rows": [asdict(row) for row in rows],
        }
        write_whole(options.out, json.dumps(numbers, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
