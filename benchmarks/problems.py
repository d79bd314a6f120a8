"""What is measured: workloads, and the goals that they are held up to.

A workload states its FLOPs by a closed formula of its own sizes, apart from `Problem.flops`, so
that the two can be held against each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Literal

import torch
from torch import Tensor

from heads_kernels.testing import Case, CollaborativeCase, GatedCase, Inputs, find
from heads_kernels.testing.masks import half_padded, lower_right, padded

Direction = Literal["forward", "backward"]
DIRECTIONS: Final[tuple[Direction, ...]] = ("forward", "backward")
Versus = Literal["eager", "sdpa", "best", "dense"]


@dataclass(frozen=True, eq=False)
class Workload:
    """One row of the benchmark: calls of one operator that are timed together.

    name            what `--only` picks by
    table           heading of the table that it stands in; `label` is its first column
    make            the calls, in a dtype; the same numbers every time
    pairs           pairs of a query row and a key that it sees, summed over the batch: with n_b real
                    rows and m_b real keys, sum of n_b m_b; causal about half
    score_features  features that the scores run over, summed over the open heads: H D;
                    collaborative H Ds; ragged mixing Ds
    value_features  open heads times Dv
    calls           number of calls that `make` gives, each with these pairs and features
    dense           name of the workload whose time on our own kernel this one is compared with
    expected        what the model that the inputs come from computed itself, `[B, H, T, Dv]`
    """

    name: str
    table: str
    label: str
    make: Callable[[torch.dtype], tuple[Inputs, ...]]
    pairs: int
    score_features: int
    value_features: int
    calls: int = 1
    dense: str | None = None
    expected: tuple[Tensor, ...] = ()

    def flops(self, direction: Direction) -> int:
        """Matrix-product FLOPs that have to be done, 2 per multiply-add.

        Forward: scores and P V. Backward: scores again, dQ, dK; dP, dV.
        """
        scores, values = (1, 1) if direction == "forward" else (3, 2)
        features = scores * self.score_features + values * self.value_features
        return 2 * self.calls * self.pairs * features


@dataclass(frozen=True)
class Goal:
    """A ratio of times that a workload should reach. Goals are reported and never asserted."""

    workload: str
    direction: Direction
    versus: Versus
    ratio: float


GOALS: Final = (
    Goal("gated_dense", "forward", "eager", 1.5),
    Goal("gated_causal", "forward", "eager", 2.5),
    Goal("gated_dense", "backward", "eager", 1.3),
    Goal("gated_causal", "backward", "eager", 1.3),
    Goal("gated_closed_50", "forward", "dense", 1.8),
    Goal("gated_closed_50", "backward", "dense", 1.8),
    Goal("gated_half_padded", "forward", "dense", 3.0),
    Goal("gated_half_padded", "backward", "dense", 3.0),
    Goal("collaborative_dense", "forward", "best", 2.0),
    Goal("collaborative_ragged", "forward", "dense", 3.0),
)
MEMORY_GOAL_MIB: Final = 64.0
OVERHEAD_GOAL_US: Final = 40.0

#: Lengths of eight sentences in a batch, as a share of the longest: a guess at everyday batches.
_SHARES: Final = (1.0, 0.86, 0.74, 0.6, 0.47, 0.37, 0.26, 0.12)


def break_even(D_in: int, D_k: int, Ds: int, H: int) -> int:
    """Below this T dense collaborative self-attention has fewer FLOPs than ordinary attention.

    It saves projections, 4 T D_in (D_k - Ds), and pays scores, 2 T^2 (H Ds - D_k).
    """
    return round(2 * D_in * (D_k - Ds) / (H * Ds - D_k))


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

    def make(dtype: torch.dtype) -> tuple[Inputs, ...]:
        inputs = case.make(dtype)
        return (replace(inputs, options={**inputs.options, "closed_grad": not skips}),)

    return Workload(name, table, label, make, pairs, scores, is_open * case.Dv, dense=dense)


def _variants(prefix: str, table: str, case: Case) -> list[Workload]:
    """The same call dense, causal, with closed heads and half padded; `case` is the dense one."""
    B, T, dense = case.B, case.T, f"{prefix}_dense"
    pairs = B * T * T
    half, more = case.H // 2, case.H * 3 // 4
    case = replace(case, gate="H")
    causal, padding = replace(case, is_causal=True), replace(case, mask=half_padded)
    return [
        workload(dense, table, "dense, all heads open", case, pairs),
        workload(f"{prefix}_causal", table, "causal", causal, B * causal_pairs(T), dense=dense),
        workload(f"{prefix}_closed_50", table, "50 % of the heads closed",
            replace(case, closed=0.5), pairs, dense=dense, closed_heads=half),
        workload(f"{prefix}_closed_75", table, "75 % of the heads closed",
            replace(case, closed=0.75), pairs, dense=dense, closed_heads=more),
        workload(f"{prefix}_half_padded", table, "half of every sequence padded",
            padding, B * (T // 2) ** 2, dense=dense),
    ]  # fmt: skip


def standard(T: int = 512) -> list[Workload]:
    """Both operators in BERT-base's shape, and an output-gated language model with grouped heads."""
    gated = replace(find("gated_attention", "bert_base_512"), T=T, S=T)
    shared = replace(find("collaborative_attention", "bert_base_256"), T=T, S=T)
    ragged = replace(find("collaborative_attention", "bert_base_256_ragged"), T=T, S=T)
    model = GatedCase("language_model", 1, 16, T, T, D=128, Dv=128, Hk=4, is_causal=True,
        gate="BHT", gate_activation="sigmoid", layout="transposed")  # fmt: skip
    table = f"collaborative attention, B2 H12 T{T} Ds256 Dv64 (BERT-base)"
    return [
        *_variants("gated", f"gated attention, B2 H12 T{T} D64 (BERT-base)", gated),
        *_variants("collaborative", table, shared),
        workload("collaborative_ragged", table, "ragged mixing, the same Ds", ragged,
            2 * T * T, dense="collaborative_dense"),
        workload("language_model", f"gated attention, B1 H16 Hk4 T{T} D128 (a language model)",
            "causal, sigmoid gate per token", model, causal_pairs(T)),
    ]  # fmt: skip


def models() -> list[Workload]:
    """Shapes of further models, for the full form."""
    table = "shapes of models"

    def named(operator: str, name: str, pairs: int) -> Workload:
        short = "gated" if operator == "gated_attention" else "collaborative"
        return workload(f"{short}_{name}", table, name, find(operator, name), pairs)

    def padded_to(T: int, operator: str, name: str, *, keys_only: bool = False) -> Workload:
        lengths = [max(1, round(T * share)) for share in _SHARES]
        case = find(operator, name)
        if keys_only:
            pairs = case.T * sum(lengths)
        elif case.is_causal:
            pairs = sum(causal_pairs(n) for n in lengths)
        else:
            pairs = sum(n * n for n in lengths)
        case = replace(case, mask=padded(*lengths, queries=not keys_only))
        short = "gated" if operator == "gated_attention" else "collaborative"
        return workload(f"{short}_{name}", table, name, case, pairs)

    gated, collaborative = "gated_attention", "collaborative_attention"
    decoder = replace(find(gated, "transformer_base_decoder"), is_causal=True)
    lengths = [max(1, round(72 * share)) for share in _SHARES]
    return [
        padded_to(128, gated, "minilm_128"),
        padded_to(128, gated, "bert_base_128_padded"),
        padded_to(64, gated, "transformer_base_encoder"),
        padded_to(64, gated, "transformer_base_cross", keys_only=True),
        workload("gated_transformer_base_decoder", table, "transformer_base_decoder",
            replace(decoder, mask=padded(*lengths)), sum(causal_pairs(n) for n in lengths)),
        named(gated, "deit_197", 4 * 197 * 197),
        named(gated, "gqa_language_model", causal_pairs(1024)),
        workload("gated_gqa_language_model_decode", table, "gqa_language_model_decode",
            replace(find(gated, "gqa_language_model_decode"), mask=lower_right), 4 * 2048),
        padded_to(128, collaborative, "minilm_192"),
        padded_to(128, collaborative, "minilm_192_ragged"),
        named(collaborative, "bert_base_384", 2 * 512 * 512),
        named(collaborative, "bert_base_384_ragged", 2 * 512 * 512),
    ]  # fmt: skip


def lengths() -> list[Workload]:
    """T 128, 512, 2048 by D 64, 128, about as many tokens each, for the full form."""
    result = []
    for B, T in ((8, 128), (2, 512), (1, 2048)):
        for D in (64, 128):
            table = f"gated attention by length, B{B} H12 T{T} D{D}"
            name = f"gated_T{T}_D{D}"
            case = GatedCase(name, B, 12, T, T, D=D, Dv=D, gate="H")
            causal = replace(case, is_causal=True)
            result += [
                workload(f"{name}_dense", table, "dense", case, B * T * T),
                workload(f"{name}_causal", table, "causal", causal, B * causal_pairs(T)),
            ]
    return result


def memory_case(T: int = 8192) -> Case:
    """B1 H8 D64: eager's scores alone take 2 GiB at T 8192."""
    return replace(find("gated_attention", "long_8192"), T=T, S=T)
