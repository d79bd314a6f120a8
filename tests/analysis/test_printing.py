"""What scores, statistics, schedules and caches print."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import heads_kernels as hk


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = hk.nn.GatedMultiheadAttention(12, 3)
        self.decoder = hk.nn.GatedMultiheadAttention(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x)[0], is_causal=True)[0]


def scores(*sizes: int, name: str = "layers.{}") -> hk.analysis.HeadScores:
    layers = tuple(name.format(number) for number in range(len(sizes)))
    values = tuple(torch.arange(size, dtype=torch.float64) / 3 for size in sizes)
    return hk.analysis.HeadScores(layers, ("encoder",) * len(sizes), values, "some")


def test_scores_are_a_grid() -> None:
    assert str(scores(3, 0, 1)) == (
        "HeadScores: some\n"
        "layer     kind     head 0      1      2\n"
        "layers.0  encoder       0  0.333  0.667\n"
        "layers.1  encoder\n"
        "layers.2  encoder       0"
    )
    assert str(hk.analysis.HeadScores((), (), (), "none")).startswith("HeadScores: none\nlayer")


def test_long_grids_are_elided() -> None:
    lines = str(scores(*[40] * 100, name="a" * 60 + ".{}")).splitlines()
    assert len(lines) == 2 + 25
    assert {len(line.split()) for line in lines[1:]} <= {2 + 17, 2 + 17 + 1}
    assert "..." in lines[1]
    assert lines[2].split()[0] == "..." + "a" * 35 + ".0"
    assert lines[-1].split()[0].endswith(".99")


def test_statistics_are_grids_with_units() -> None:
    x = torch.randn(2, 5, 12)
    found = hk.analysis.statistics(Layers(), [x], token_sets={"first": lambda batch: first(x)})
    text = str(found)
    assert text.startswith("HeadStatistics: means over 10 query rows of a layer\n")
    titles = [block.split("\n")[0] for block in text.split("\n\n")[1:]]
    probabilities = ["to_self", "to_previous", "to_next", "to_first"]
    assert titles == [
        "confidence (probability)",
        "entropy (nats)",
        "distance (tokens)",
        *(f"{name} (probability)" for name in probabilities),
    ]
    assert f"{found.entropy.scores[1][1]:.3g}" in text


def first(x: Tensor) -> dict[str, Tensor]:
    member = torch.zeros(x.shape[:2], dtype=torch.bool)
    member[:, 0] = True
    return {"encoder": member, "decoder": member}


def test_schedules_say_what_they_drive() -> None:
    model = Layers()
    hk.heads.gate(model, hk.nn.HardConcrete)
    schedule = hk.heads.GateSchedule(model, open_heads={"decoder": 1, "encoder": 2}, steps=10)
    schedule.step()
    assert repr(schedule) == (
        "GateSchedule(open heads: decoder: 1 of 2, encoder: 2 of 3; steps: 1 of 10, "
        "warmup=0.5, rate=0.01, keep_at_least=0)"
    )
    whole = hk.heads.GateSchedule(model, open_heads=4, steps=10)
    assert "open heads: model: 4 of 5; steps: 0 of 10" in repr(whole)


@torch.no_grad()
def test_caches_say_what_they_hold() -> None:
    cache = hk.nn.KeyValueCache(8)
    assert repr(cache) == "KeyValueCache(empty, max_length=8)"
    layer, x = hk.nn.GatedMultiheadAttention(12, 3), torch.randn(2, 5, 12)
    layer(x, is_causal=True, cache=cache)
    assert repr(cache) == (
        "KeyValueCache(length=5 of 8, self-attention, float32[2, S, 3, 4] and float32[2, S, 3, 4])"
    )
    cross = hk.nn.KeyValueCache()
    layer(x, torch.randn(2, 7, 12), cache=cross)
    assert "length=7, encoder-decoder attention" in repr(cross)
