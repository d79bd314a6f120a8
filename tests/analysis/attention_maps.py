"""What readings of heads are held to: attention maps in memory, from stock eager attention, and plain sums of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import heads_kernels as hk
from tests.support.alike import assert_alike
from tests.support.nn_layers import Layers, spread


@dataclass(frozen=True, eq=False)
class Maps:
    """Of the layers of one kind: `[L, B, H, T, S]`, bool `[B, T]` and `[B, S]`."""

    maps: Tensor
    rows: Tensor
    keys: Tensor

    @property
    def offsets(self) -> Tensor:
        """`[B, T, S]`: places from row to key, each counted from the first real one."""
        places = [
            torch.arange(real.shape[1])[None]
            - torch.tensor([[row.tolist().index(True)] for row in real])
            for real in (self.rows, self.keys)
        ]
        return places[1][:, None, :] - places[0][:, :, None]

    def mean(self, values: Tensor) -> Tensor:
        """Of `[L, B, H, T]` over the real rows, `[L, H]`."""
        return values.permute(0, 2, 1, 3)[:, :, self.rows].mean(2)

    def share(self, pairs: Tensor) -> Tensor:
        """Mean probability of the pairs, `[B, T, S]`, by which they are weighted, `[L, H]`."""
        return self.mean((self.maps * pairs[None, :, None]).sum(-1))

    def measures(self) -> dict[str, Tensor]:
        """The means that `hk.analysis.statistics` gives, `[L, H]` each."""
        logs = self.maps.clamp(min=1e-300).log()
        return {
            "confidence": self.mean(self.maps.amax(-1)),
            "entropy": self.mean(-(self.maps * logs).sum(-1)),
            "distance": self.share(self.offsets.abs().double()),
            "to_self": self.share(self.offsets == 0),
            "to_previous": self.share(self.offsets == -1),
            "to_next": self.share(self.offsets == 1),
        }

    def divergences(self) -> Tensor:
        """`[L H, L H]`: mean Jensen-Shannon divergence of all pairs of heads, by its definition."""
        rows = self.maps.permute(0, 2, 1, 3, 4).flatten(0, 1)[:, self.rows]  # [L H, rows, S]
        matrix = [[_divergence(p, q) for q in rows] for p in rows]
        return torch.tensor(matrix, dtype=torch.float64)


def _divergence(p: Tensor, q: Tensor) -> float:
    middle = (p + q) / 2
    kl = [torch.where(x > 0, x * (x / middle).log(), 0.0).sum(-1) for x in (p, q)]
    return float((kl[0] + kl[1]).mean() / 2)


def stock_maps(model: Any, arguments: dict[str, Tensor]) -> dict[str, Maps]:
    """By kind of layer, from a transformers model of eager attention."""
    with torch.no_grad():
        out = model(**arguments, output_attentions=True)
    rows = {
        "encoder": arguments.get("attention_mask"),
        "decoder": arguments.get("decoder_attention_mask"),
    }
    if not model.config.is_encoder_decoder:
        maps = torch.stack([each for each in out.attentions if each is not None])
        mask = rows["encoder"]
        real = torch.ones(maps.shape[1], maps.shape[3]) if mask is None else mask
        real = real.bool()
        kinds = [layer.kind for layer in hk.heads.attention_layers(model)]
        return {kinds[0]: Maps(maps, real, real)}
    found = {}
    for kind, queries, keys in (
        ("encoder", "encoder", "encoder"),
        ("decoder", "decoder", "decoder"),
        ("cross", "decoder", "encoder"),
    ):
        maps = torch.stack(out[f"{kind}_attentions"])
        found[kind] = Maps(maps, rows[queries].bool(), rows[keys].bool())
    return found


def layers(**options: Any) -> Layers:
    torch.manual_seed(0)
    makes = hk.nn.GatedMultiheadAttention, hk.nn.CollaborativeMultiheadAttention
    return Layers(
        spread(makes[0](16, 4, dtype=torch.float64, **options)),
        spread(makes[1](16, 4, 12, dtype=torch.float64)),
    )


def maps_of_layers(model: Layers, x: Tensor, visible: Tensor) -> Maps:
    """Of a model of `Layers`, from its weights: `visible` is `[B, T, S]`; a row is real that sees itself."""
    maps = []
    for layer in model.layers:
        query, key = layer.q_proj(x), layer.k_proj(x)
        if isinstance(layer, hk.nn.CollaborativeMultiheadAttention):
            scores = torch.einsum("btd,hd,bsd->bhts", query, layer.mixing, key)
            if layer.content_proj is not None:
                scores = scores + layer.content_proj(x).transpose(1, 2)[:, :, None]
        else:
            H, Hk = layer.num_heads, layer.num_key_heads
            query, key = query.unflatten(2, (H, -1)), key.unflatten(2, (Hk, -1))
            scores = torch.einsum("bthd,bshd->bhts", query, key.repeat_interleave(H // Hk, 2))
        scores = (layer.scale * scores).masked_fill(~visible[:, None], -torch.inf)
        p = scores.softmax(-1).nan_to_num(0.0)
        value = layer.v_proj(x).unflatten(2, (-1, layer.value_dim))
        value = value.repeat_interleave(layer.num_heads // value.shape[2], 2)
        x = x + layer.out_proj(torch.einsum("bhts,bshd->bthd", p, value).flatten(2))
        maps.append(p)
    real = visible.diagonal(0, 1, 2)
    return Maps(torch.stack(maps), real, real)


def padded_layers(left: bool, causal: bool) -> tuple[Layers, dict[str, Any], Maps]:
    """`layers`, a batch for them of a whole and a padded example, and its `maps_of_layers`."""
    model, x = layers(num_key_heads=2), torch.randn(2, 9, 16, dtype=torch.float64)
    real = torch.tensor([[True] * 9, [True] * 6 + [False] * 3])
    real = real.flip(1) if left else real
    visible = real[:, None] & real[:, :, None]
    visible = visible.tril() if causal else visible
    with torch.no_grad():
        maps = maps_of_layers(model, x, visible)
    return model, {"x": x, "padding": ~real, "is_causal": causal}, maps


def of_kind(scores: hk.analysis.HeadScores, kind: str) -> Tensor:
    chosen = [i for i, each in enumerate(scores.kinds) if each == kind]
    return torch.stack([scores.scores[i] for i in chosen])


def assert_reads(found: hk.analysis.HeadStatistics, maps: Maps, kind: str = "encoder") -> None:
    for name, expected in maps.measures().items():
        got = of_kind(getattr(found, name), kind)
        assert got.dtype == torch.float64
        if len(got) < len(expected):  # one layer that runs several times
            expected = expected.mean(0, keepdim=True)
        assert_alike(got, expected, dtype=torch.float32, name=name)
    kinds = found.confidence.kinds
    runs = len(maps.maps) // kinds.count(kind)
    rows = [n for n, each in zip(found.rows, kinds, strict=True) if each == kind]
    assert rows == [int(maps.rows.sum()) * runs] * len(rows)
    best = maps.maps[:runs].argmax(-1)  # of the first layer, [runs, B, H, T]
    offsets = maps.offsets[:, None].expand(*best.shape, -1).gather(-1, best[..., None])[..., 0]
    counts = found.offsets[kinds.index(kind)]
    N = counts.shape[1] // 2
    for of_head, own in zip(offsets.unbind(2), counts, strict=True):
        chosen = of_head[:, maps.rows].flatten() + N
        assert torch.equal(own, torch.bincount(chosen, minlength=2 * N + 1))


def assert_received(
    found: hk.analysis.HeadReceived, maps: Maps, kind: str, last_rows: int | None = None
) -> None:
    """Means over the real rows, or the last of them; of a layer that runs several times over its runs too."""
    of_kind = [each for each, name in zip(found.examples, found.kinds, strict=True) if name == kind]
    runs = len(maps.maps) // len(of_kind)
    for examples, of_layer in zip(of_kind, maps.maps.unflatten(0, (-1, runs)).mean(1), strict=True):
        assert len(examples) == len(maps.rows)
        for b, example in enumerate(examples):
            rows = maps.rows[b].nonzero()[:, 0]
            rows = rows if last_rows is None else rows[-last_rows:]
            expected = of_layer[b][:, rows].mean(1)[:, maps.keys[b]]
            assert_alike(example, expected, dtype=torch.float32)  # as rotary angles are
            assert_alike(example.sum(1), torch.ones(len(example), dtype=example.dtype))
