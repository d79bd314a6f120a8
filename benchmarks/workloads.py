"""What a workload is, and those of BERT-base; `shapes` has the others, `goals` what they should reach.

A workload states its FLOPs by a closed formula of its own sizes, apart from `Problem.flops`, so
that the two can be held against each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Literal

import torch
from torch import Tensor

from benchmarks.settings import word
from heads_kernels.mask import Mask
from heads_kernels.testing import Case, CollaborativeCase, GatedCase, Inputs, find
from heads_kernels.testing.masks import Sizes

Direction = Literal["forward", "backward"]
DIRECTIONS: Final[tuple[Direction, ...]] = ("forward", "backward")


@dataclass(frozen=True, eq=False)
class Workload:
    """One row of the benchmark: calls of one operator that are timed together.

    name            what `--only` picks by
    table           heading of the table that it stands in; `label` is its first column
    make            the calls, in a dtype on a device; the same numbers every time
    pairs           pairs of a query row and a key that it sees, summed over the batch: with n_b real
                    rows and m_b real keys, sum of n_b m_b; causal about half
    score_features  features that the scores run over, summed over the open heads: H D;
                    collaborative H Ds; ragged mixing Ds
    value_features  open heads times Dv
    open_heads      heads whose gate is not exactly 0
    calls           number of calls that `make` gives, each with these pairs, features and heads
    dense           name of the workload whose time on our own kernel this one is compared with
    expected        what the model that the inputs come from computed itself, `[B, H, T, Dv]`
    directions      those that are timed; both are checked
    flex            whether FlexAttention is compiled for it on a GPU, which takes many seconds
    """

    name: str
    table: str
    label: str
    make: Callable[[torch.dtype, torch.device], tuple[Inputs, ...]]
    pairs: int
    score_features: int
    value_features: int
    open_heads: int
    calls: int = 1
    dense: str | None = None
    expected: tuple[Tensor, ...] = ()
    directions: tuple[Direction, ...] = DIRECTIONS
    flex: bool = False

    def flops(self, direction: Direction) -> int:
        """Matrix-product FLOPs that have to be done, 2 per multiply-add.

        Forward: scores and P V. Backward: scores again, dQ, dK; dP, dV.
        """
        scores, values = (1, 1) if direction == "forward" else (3, 2)
        features = scores * self.score_features + values * self.value_features
        return 2 * self.calls * self.pairs * features

    def exps(self) -> int:
        """Exponentials of a pass in either direction: one a visible pair of an open head."""
        return self.calls * self.pairs * self.open_heads


def causal_pairs(n: int) -> int:
    return n * (n + 1) // 2


def workload(
    name: str,
    table: str,
    label: str,
    case: Case,
    pairs: int,
    *,
    dense: str | None = None,
    closed_heads: int = 0,
    directions: tuple[Direction, ...] = DIRECTIONS,
) -> Workload:
    """A workload of one synthetic case, of which `closed_heads` heads are closed.

    Where heads are closed or mixing has zeros, gradients are taken with `closed_grad=False`.
    """
    is_open = case.H - closed_heads
    skips = closed_heads > 0
    if isinstance(case, CollaborativeCase):
        disjoint = case.mixing in ("ragged", "blocks")  # the heads share Ds out among themselves
        scores, skips = case.Ds if disjoint else is_open * case.Ds, skips or disjoint
    else:
        assert isinstance(case, GatedCase)
        scores = is_open * case.D

    def make(dtype: torch.dtype, device: torch.device) -> tuple[Inputs, ...]:
        inputs = case.make(dtype, device, drawn_on=device)
        return (replace(inputs, options={**inputs.options, "closed_grad": not skips}),)

    return Workload(name, table, label, make, pairs, scores, is_open * case.Dv, is_open,
        dense=dense, directions=directions)  # fmt: skip


def half_padded(sizes: Sizes, device: torch.device) -> Mask:
    """Half of every sequence is padding, rows and keys; the lengths are on the device."""
    half = torch.full((sizes.B,), sizes.S // 2, device=device)
    return Mask(key_lengths=half, query_lengths=half)


def variants(prefix: str, table: str, case: Case, closed: tuple[int, ...]) -> list[Workload]:
    """The same call dense, causal, half padded and with parts of the heads closed; `case` is the dense one."""
    B, T, dense = case.B, case.T, f"{prefix}_dense"
    pairs = B * T * T
    case = replace(case, gate="H")
    causal, padding = replace(case, is_causal=True), replace(case, mask=half_padded)
    return [
        workload(dense, table, "dense, all heads open", case, pairs),
        workload(f"{prefix}_causal", table, "causal", causal, B * causal_pairs(T), dense=dense),
        *(
            workload(f"{prefix}_closed_{percent}", table, f"{percent} % of the heads closed",
                replace(case, closed=percent / 100), pairs, dense=dense,
                closed_heads=case.H * percent // 100)
            for percent in closed
        ),
        workload(f"{prefix}_half_padded", table, "half of every sequence padded",
            padding, B * (T // 2) ** 2, dense=dense),
    ]  # fmt: skip


#: Percent of the heads that are closed: in every form, and for the time over the share of open heads.
CLOSED: Final = (50, 75)
CLOSED_SERIES: Final = (25, 50, 75, 100)


def standard(T: int = 512, closed: tuple[int, ...] = CLOSED) -> list[Workload]:
    """Both operators in BERT-base's shape, and an output-gated language model with grouped heads.

    `closed` are the percentages of gated attention.
    """
    gated = replace(find("gated_attention", "bert_base_512"), T=T, S=T)
    shared = replace(find("collaborative_attention", "bert_base_256"), T=T, S=T)
    ragged = replace(find("collaborative_attention", "bert_base_256_ragged"), T=T, S=T)
    model = GatedCase("language_model", 1, 16, T, T, D=128, Dv=128, Hk=4, is_causal=True,
        gate="BHT", gate_activation="sigmoid", layout="transposed")  # fmt: skip
    table = f"collaborative attention, B2 H12 T{T} Ds256 Dv64 (BERT-base)"
    return [
        *variants("gated", f"gated attention, B2 H12 T{T} D64 (BERT-base)", gated, closed),
        *variants("collaborative", table, shared, CLOSED),
        workload("collaborative_ragged", table, "ragged mixing, the same Ds", ragged,
            2 * T * T, dense="collaborative_dense"),
        workload("language_model", f"gated attention, B1 H16 Hk4 T{T} D128 (a language model)",
            "causal, sigmoid gate per token", model, causal_pairs(T)),
    ]  # fmt: skip


def in_dtype(base: Workload, dtype: torch.dtype, table: str) -> Workload:
    """A workload in this dtype, whatever that of the run is."""
    return replace(base, name=f"{base.name}_{word(dtype)}", table=table, label=base.name, dense=None,
        make=lambda _, device: base.make(dtype, device))  # fmt: skip
