"""What became of a layer: errors, parameters, FLOPs."""

from __future__ import annotations

from dataclasses import dataclass

from heads_kernels.convert.counts import break_even, count_flops, count_parameters
from heads_kernels.convert.error import score_error, weight_error
from heads_kernels.convert.factors import Factors
from heads_kernels.convert.heads import Heads
from heads_kernels.convert.moments import Moments


@dataclass(frozen=True)
class Report:
    """One layer before and after.

    Attributes:
        dim: Ds.
        features: how many of them each head uses.
        executed_features: that the scores of all heads run over, in whole chunks; before it was `H D`.
        weight_error, score_error: as the functions of these names say; `score_error` is None without moments.
        parameters_before, parameters: of queries and keys, as `count_parameters` says. Values that were shared, which
            are repeated, are not in it.
        length: of the sentence that FLOPs are counted for.
        flops_before, flops: of its self-attention, as `count_flops` says, with values as wide as keys.
        break_even: the length below which there are fewer FLOPs than before, as `break_even` says.
    """

    dim: int
    features: tuple[int, ...]
    executed_features: int
    weight_error: float
    score_error: float | None
    parameters_before: int
    parameters: int
    length: int
    flops_before: int
    flops: int
    break_even: float

    @classmethod
    def of(
        cls,
        heads: Heads,
        factors: Factors,
        moments: Moments | None = None,
        *,
        Hk: int | None = None,
        length: int = 128,
    ) -> Report:
        """Of `factors` that were made from `heads`, their errors under `moments`; of Hk key heads, None means H."""
        D_in, D_k, H, D_in_k = heads.D_in, heads.D_k, heads.H, heads.D_in_k
        Ds, used = factors.dim, factors.executed_features
        bias = heads.query_bias is not None
        before = count_flops(length, length, D_in, D_k, H, D_in_k=D_in_k, Hk=Hk)
        after = count_flops(length, length, D_in, D_k, H, Ds, D_in_k=D_in_k, executed_features=used)
        return cls(
            dim=Ds,
            features=tuple(factors.features),
            executed_features=used,
            weight_error=weight_error(heads, factors),
            score_error=None if moments is None else score_error(heads, factors, moments),
            parameters_before=count_parameters(D_in, D_k, H, D_in_k=D_in_k, Hk=Hk, bias=bias),
            parameters=count_parameters(D_in, D_k, H, Ds, D_in_k=D_in_k),
            length=length,
            flops_before=before.total,
            flops=after.total,
            break_even=break_even(D_in, D_k, Ds, H, Hk=Hk, executed_features=used),
        )
