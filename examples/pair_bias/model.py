"""A small stack of the modules: from an alignment and some distances of a chain to all of its distances."""

from __future__ import annotations

import torch
from chains import BORDERS, CLASSES, LETTERS, Batch
from modules import AttentionWithPairBias, MSARowAttention, TriangleAttention
from torch import Tensor, nn
from torch.nn.functional import cross_entropy


def transition(width: int) -> nn.Sequential:
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))


class Block(nn.Module):
    """The alignment attends with the bias of pairs and adds to them; pairs attend along triangles."""

    def __init__(self, c_m: int, c_z: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.rows = MSARowAttention(c_m, c_z, heads, head_dim)
        self.to_pairs = nn.Sequential(nn.LayerNorm(c_m), nn.Linear(c_m, 2 * c_z))
        self.starting = TriangleAttention(c_z, heads, head_dim)
        self.ending = TriangleAttention(c_z, heads, head_dim, ending=True)
        self.of_rows, self.of_pairs = transition(c_m), transition(c_z)

    def forward(self, m: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        m = m + self.rows(m, z)
        m = m + self.of_rows(m)
        left, right = self.to_pairs(m).mean(-3).chunk(2, -1)
        z = z + left[..., :, None, :] + right[..., None, :, :]
        z = z + self.starting(z)
        z = z + self.ending(z)
        return m, z + self.of_pairs(z)


class Stack(nn.Module):
    """Logits of classes of distance `[B, N, N, CLASSES]`, and the number of residues near each, `[B, N]`."""

    def __init__(self, c_m: int = 32, c_z: int = 32, heads: int = 4, head_dim: int = 8, blocks: int = 2) -> None:
        super().__init__()
        self.letters = nn.Embedding(LETTERS, c_m)
        self.distances = nn.Linear(len(BORDERS) + 1, c_z)
        self.blocks = nn.ModuleList(Block(c_m, c_z, heads, head_dim) for _ in range(blocks))
        self.tokens = AttentionWithPairBias(c_m, c_z, c_s=c_m, heads=heads, head_dim=head_dim)
        self.classes = nn.Sequential(nn.LayerNorm(c_z), nn.Linear(c_z, CLASSES))
        self.near = nn.Sequential(nn.LayerNorm(c_m), nn.Linear(c_m, 1))

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        around = torch.exp(-(((batch.distances[..., None] - BORDERS) / 2) ** 2))
        given = torch.cat((around, torch.ones_like(around[..., :1])), -1) * batch.known[..., None]
        m, z = self.letters(batch.letters), self.distances(given)
        for block in self.blocks:
            m, z = block(m, z)
        a = m.mean(-3)
        a = a + self.tokens(a, z, s=a)
        logits = self.classes(z)
        return logits + logits.transpose(1, 2), self.near(a).squeeze(-1)


def losses(model: Stack, batch: Batch) -> tuple[Tensor, Tensor]:
    """Nats of the class of a distance that is not given; squared error of the standardised count of near residues."""
    logits, near = model(batch)
    asked = batch.asked
    count = (batch.distances < 10.0).sum(-1).float()
    return (
        cross_entropy(logits[asked], batch.classes[asked]),
        (near - (count - count.mean()) / count.std()).square().mean(),
    )


def without_pair_bias_(model: nn.Module) -> nn.Module:
    """Set every pair bias to 0, also during training."""
    for module in model.modules():
        if isinstance(module, (MSARowAttention, TriangleAttention, AttentionWithPairBias)):
            nn.init.zeros_(module.bias.weight).requires_grad_(False)
    return model
