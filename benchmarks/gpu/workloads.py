"""What is timed: calls at the sizes of real models, the most telling ones first.

Every length has 16384 tokens in all and 2048 features over the heads (collaborative: 12 heads of 64
values, as BERT-base), the convention of FlashAttention's charts. Tensors have the layout of projections.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import torch

from benchmarks.problems import DIRECTIONS, Direction
from heads_kernels.mask import Mask
from heads_kernels.testing import Case, CollaborativeCase, GatedCase, Inputs, masks

TOKENS: Final = 16384
WIDTH: Final = 2048

Kind = Literal["dense", "causal", "closed_50", "closed_75", "half_padded", "sigmoid", "ragged"]


@dataclass(frozen=True)
class Workload:
    """One call; `kind` is what sets it apart, `flex` whether FlexAttention is compiled for it too.

    Where heads are closed or mixing has zeros, gradients are taken with `closed_grad=False`.
    """

    name: str
    kind: Kind
    case: Case
    dtype: torch.dtype
    directions: tuple[Direction, ...] = DIRECTIONS
    flex: bool = False

    @property
    def width(self) -> int:
        return self.case.Ds if isinstance(self.case, CollaborativeCase) else _gated(self.case).D

    def make(self, device: str, case: Case | None = None) -> Inputs:
        """The call; `case` replaces that of the workload. Padded rows have no gradient to start from:
        the baselines compute such rows as any other, and would have other gradients."""
        drawn = (case or self.case).make(self.dtype, device, drawn_on=device)
        skips = self.kind in ("closed_50", "closed_75", "ragged")
        inputs = replace(drawn, options={**drawn.options, "closed_grad": not skips})
        if self.kind == "half_padded":
            p = inputs.problem()
            real = p.intervals.to_dense(p.T, p.S, p.query.device).any(-1, keepdim=True)
            inputs = replace(inputs, dout=inputs.dout.masked_fill(~real, 0.0))
        return inputs.requires_grad()

    def whole(self, device: str) -> Inputs | None:
        """The same call with all heads open, or with dense mixing; None where this one is that."""
        if self.kind in ("closed_50", "closed_75"):
            return self.make(device, replace(self.case, closed=0.0))
        if self.kind == "ragged" and isinstance(self.case, CollaborativeCase):
            return self.make(device, replace(self.case, mixing="dense"))
        return None

    def sizes(self) -> dict[str, Any]:
        case = self.case
        gated = isinstance(case, GatedCase)
        return {
            "operator": case.operator, "kind": self.kind, "dtype": str(self.dtype).split(".")[1],
            "B": case.B, "H": case.H, "Hk": (case.Hk or case.H) if isinstance(case, GatedCase) else 1,
            "T": case.T, "S": case.S, "D" if gated else "Ds": self.width, "Dv": case.Dv,
            "is_causal": case.is_causal, "gate": case.gate,
        }  # fmt: skip


def tiny(case: Case, H: int, T: int) -> Case:
    """The same call at toy sizes, for a machine without a GPU."""
    narrow: dict[str, Any] = {"Ds": 32}
    if isinstance(case, GatedCase):
        narrow = {"D": 16, "Hk": H // 4 if case.Hk else 0}
    return replace(case, B=1, H=H, T=T, S=T, Dv=16, **narrow)


def workloads(toy: bool = False) -> list[Workload]:
    """In the order of what would be missed most if time ran out; `toy` is one of every kind."""
    every = sorted([*_gated_workloads(), *_shared_workloads()], key=_rank)
    return [_toy(w) for w in every if w.dtype == torch.bfloat16 and _like(w)] if toy else every


def _like(workload: Workload) -> bool:
    return (workload.width, workload.case.T) in ((128, 8192), (256, 4096))


def _toy(workload: Workload) -> Workload:
    name = f"tiny_{workload.case.operator}_{workload.kind}"
    return replace(workload, name=name, case=tiny(workload.case, H=4, T=32), dtype=torch.float32)


def _rank(workload: Workload) -> tuple[int, int]:
    """bf16 before fp16; 4k and 8k, which the goals speak of most, then 16k, then the rest."""
    lengths = {8192: 0, 4096: 1, 16384: 2, 2048: 3}
    return workload.dtype != torch.bfloat16, lengths.get(workload.case.T, 4)


def _half_padded(sizes: masks.Sizes, device: torch.device) -> Mask:
    """Half of every sequence is padding, rows and keys; the lengths are on the device."""
    half = torch.full((sizes.B,), sizes.S // 2, device=device)
    return Mask(key_lengths=half, query_lengths=half)


def _gated_workloads() -> Iterator[Workload]:
    dtype, half = torch.bfloat16, torch.float16
    for D in (64, 128):
        for T in (1024, 4096, 8192, 16384):
            case = GatedCase(f"gated_D{D}_T{T}", TOKENS // T, WIDTH // D, T, T, D=D, Dv=D, gate="H",
                layout="transposed")  # fmt: skip
            causal = replace(case, is_causal=True)
            flex = T == 8192 and D == 128  # each compiles for many seconds
            yield _workload("dense", case, dtype, flex=flex)
            yield _workload("causal", causal, dtype, flex=flex)
            if T in (4096, 8192):
                yield _workload("closed_50", replace(case, closed=0.5), dtype, flex=flex)
                yield _workload("closed_75", replace(case, closed=0.75), dtype)
                yield _workload("half_padded", replace(case, mask=_half_padded), dtype, flex=flex)
            if T == 8192:
                yield _workload("dense", case, half)
                yield _workload("causal", causal, half)
    for T in (4096, 8192):
        case = GatedCase(f"gated_D128_gqa_T{T}", TOKENS // T, 32, T, T, D=128, Dv=128, Hk=8,
            gate="BHTD", gate_activation="sigmoid", is_causal=True, layout="transposed")  # fmt: skip
        yield _workload("sigmoid", case, dtype)


def _shared_workloads() -> Iterator[Workload]:
    dtype = torch.bfloat16
    for Ds in (256, 512, 768):
        for T in (2048, 4096, 8192):
            case = CollaborativeCase(f"collaborative_Ds{Ds}_T{T}", TOKENS // T, 12, T, T, Ds=Ds, Dv=64,
                layout="transposed")  # fmt: skip
            if Ds < 768:
                yield _workload("dense", case, dtype)
            elif T == 4096:
                yield _workload("dense", case, dtype, directions=("forward",))
            if Ds < 768 and T == 4096:
                yield _workload("causal", replace(case, is_causal=True), dtype)
                yield _workload("ragged", replace(case, mixing="ragged"), dtype)


def _workload(kind: Kind, case: Case, dtype: torch.dtype, **more: Any) -> Workload:
    half = "_fp16" if dtype == torch.float16 else ""
    return Workload(f"{case.name}_{kind}{half}", kind, case, dtype, **more)


def _gated(case: Case) -> GatedCase:
    assert isinstance(case, GatedCase)
    return case
