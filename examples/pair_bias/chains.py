"""Random folded chains: 3-D walks of helices, strands and loops, with a part of their distances known."""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import torch
from torch import Tensor

#: By kind of segment: least and most residues, bond and dihedral angle in degrees, and their variation. Helices and
#: strands have the angles of a trace of alpha carbons; loops have any.
SEGMENTS: Final = {
    "helix": (6, 12, 91.0, 50.0, 4.0, 6.0),
    "strand": (4, 7, 124.0, -170.0, 6.0, 12.0),
    "loop": (2, 4, 110.0, 0.0, 20.0, 180.0),
}
BOND: Final = 3.8  # Angstrom from one alpha carbon to the next
LETTERS: Final = 9  # three for each kind of segment
_NOISE: Final = 0.3  # share of the letters that mean nothing
_KNOWN: Final = 0.35  # share of the distances that are known, besides those of bonds
#: Borders of the classes of distance, Angstrom.
BORDERS: Final = torch.arange(5.0, 24.0, 2.0)
CLASSES: Final = len(BORDERS) + 1


class Batch(NamedTuple):
    """letters int64 `[B, S, N]`; distances `[B, N, N]`; known bool `[B, N, N]`, the pairs whose distance is given."""

    letters: Tensor
    distances: Tensor
    known: Tensor

    @property
    def asked(self) -> Tensor:
        """bool `[B, N, N]`: the pairs to predict."""
        return ~self.known & ~torch.eye(self.known.shape[-1], dtype=torch.bool)

    @property
    def classes(self) -> Tensor:
        """int64 `[B, N, N]`."""
        return torch.bucketize(self.distances, BORDERS)


def draw(batch: int, rows: int, length: int, generator: torch.Generator) -> Batch:
    """A `batch` of chains, with alignments of `rows` rows."""
    drawn = [_segments(length, generator) for _ in range(batch)]
    kinds, angles, dihedrals = (torch.stack(each) for each in zip(*drawn, strict=True))
    points = _walk(angles, dihedrals)
    shape = batch, rows, length
    third = torch.randint(3, shape, generator=generator)
    any_letter = torch.randint(LETTERS, shape, generator=generator)
    is_noise = torch.rand(shape, generator=generator) < _NOISE
    letters = torch.where(is_noise, any_letter, kinds[:, None] * 3 + third)
    chosen = torch.rand(batch, length, length, generator=generator).triu(1)
    n = torch.arange(length)
    known = (chosen + chosen.mT > 1 - _KNOWN) | ((n[:, None] - n).abs() == 1)
    return Batch(letters, torch.cdist(points, points), known)


def _segments(length: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """The kind of every residue, and the angle and the dihedral angle of its bond, `[N]` each."""
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    count, before = 0, 2
    while count < length:
        kind = int(torch.randint(2, (), generator=generator)) if before == 2 else 2
        least, most, angle, dihedral, some, more = list(SEGMENTS.values())[kind]
        size = int(torch.randint(least, most + 1, (), generator=generator))
        spread = torch.rand(2, size, generator=generator) * 2 - 1
        parts.append((torch.full((size,), kind), angle + some * spread[0], dihedral + more * spread[1]))
        count, before = count + size, kind
    kinds, angles, dihedrals = (torch.cat(each)[:length] for each in zip(*parts, strict=True))
    return kinds, angles, dihedrals


def _walk(angles: Tensor, dihedrals: Tensor) -> Tensor:
    """Points `[B, N, 3]`, each one bond after the last, at these angles in degrees to the previous bonds."""
    B, N = angles.shape
    angle, dihedral = (math.pi - angles * math.pi / 180), dihedrals * math.pi / 180
    axes = torch.eye(3).expand(B, 3, 3)  # rows: along the last bond, and two across
    points = [torch.zeros(B, 3)]
    for n in range(1, N):
        bend, turn = angle[:, n, None], dihedral[:, n, None]
        along, across, beside = axes.unbind(1)
        across, beside = (
            turn.cos() * across + turn.sin() * beside,
            turn.cos() * beside - turn.sin() * across,
        )
        along, across = (
            bend.cos() * along + bend.sin() * across,
            bend.cos() * across - bend.sin() * along,
        )
        axes = torch.stack((along, across, beside), 1)
        points.append(points[-1] + BOND * along)
    return torch.stack(points, 1)
