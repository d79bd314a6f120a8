"""Statistics of heads against those of attention maps, time and peak memory, on the CPU.

The model is a BERT with random weights. The way by maps is stock eager attention with `output_attentions=True` and the
same numbers from its maps in plain PyTorch; what ours finds is held to it first. Times and memory are those of the
whole reading, the model's own forward pass among them; memory is the peak beyond weights and input, and stock SDPA
without any reading stands beside both.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

import torch
from torch import Tensor

import heads_kernels as hk
from benchmarks.measure import Found
from benchmarks.models import Model, bert
from benchmarks.peak import peak_memory
from benchmarks.settings import Settings
from heads_kernels.testing import time_in_turn

#: Of shares and nats in float32, and of the largest number where that is above 1.
TOLERANCE: Final = 1e-5
#: A token that stands at every tenth place.
MARK: Final = 1

Reading = dict[str, Tensor]


def tokens(B: int, T: int) -> Tensor:
    ids = torch.randint(2, 1000, (B, T), generator=torch.Generator().manual_seed(T))
    ids[:, ::10] = MARK
    return ids


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


def differences(found: Reading, expected: Reading) -> Iterator[str]:
    """What is not the same."""
    for name, tensor in found.items():
        error, largest = ((x.abs().max()) for x in (tensor - expected[name], expected[name]))
        if not error <= TOLERANCE * max(1.0, float(largest)):
            yield f"{name} differs by {float(error):.1e}, of {float(largest):.1e}"


def measure(settings: Settings) -> Iterator[Found]:
    """Three ways at every length; how many times better ours is stands beside the way by maps."""
    smoke = settings.form == "smoke"
    layers, width, heads = (2, 32, 4) if smoke else (2, 384, 12)
    for T in (24,) if smoke else (512, 4096):
        title = f"Statistics of heads: {layers} layers, {heads} heads, width {width}, B1 T{T}, float32"
        found = Found("reading", title, {
            "": "{way}",
            "ms": "{ms:,.0f}",
            "x ours": "{x_ms:.1f}",
            "MiB": "{mib:,.1f}",
            "x our MiB": "{x_mib:.1f}",
        })  # fmt: skip
        stock = bert(
            vocab_size=1000, hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
            intermediate_size=4 * width, max_position_embeddings=T,
            initializer_range=0.07,  # attention is neither even nor a single key
        )  # fmt: skip
        _measure(stock, tokens(1, T), 0.1 if smoke else 15.0, found)
        yield found


def _measure(stock: Model, ids: Tensor, budget_s: float, found: Found) -> None:
    """A row of each way, unless ours finds other numbers than the maps."""
    eager, ours = copy.deepcopy(stock), hk.integrations.transformers.use(copy.deepcopy(stock))
    eager.set_attn_implementation("eager")
    T = ids.shape[1]
    wrong = differences(statistics(ours, ids), statistics_of_maps(eager, ids))
    found.failures = [f"statistics, T {T}: {text}" for text in wrong]
    if found.failures:
        return

    @torch.no_grad()
    def forward() -> object:
        return stock(input_ids=ids).last_hidden_state

    calls: dict[str, Callable[[], object]] = {
        "no reading, stock SDPA": forward,
        "by maps": partial(statistics_of_maps, eager, ids),
        "ours": partial(statistics, ours, ids),
    }
    mib = {way: peak_memory(call).extra / 2**20 for way, call in calls.items()}
    times = time_in_turn(calls, budget_s=budget_s, warmup=0, least=1, most=20)
    ms = {way: timing.median * 1e3 for way, timing in times.items()}
    found.rows = [
        {"reading": "statistics", "T": T, "way": way, "ms": ms[way], "mib": mib[way],
         "x_ms": ms[way] / ms["ours"], "x_mib": mib[way] / max(mib["ours"], 0.1)}
        for way in calls
    ]  # fmt: skip
