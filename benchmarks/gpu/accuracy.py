"""Every named case on every GPU backend and dtype, held to the one accuracy rule of the package.

So are larger cases of real sizes, whose oracle, float64 with the `[T, S]` matrix of every head in
memory, still fits beside that of the other workers.
"""

from __future__ import annotations

from functools import partial
from typing import Final

import torch

from benchmarks.gpu.settings import (
    DIFFERENTIABLE,
    FAILED,
    PASSED,
    Items,
    Row,
    Settings,
    must_serve,
    word,
)
from heads_kernels.mask import Mask
from heads_kernels.testing import (
    CASES,
    ENTMAX,
    Case,
    CollaborativeCase,
    EntmaxCase,
    GatedCase,
    check,
    masks,
)

#: At most 8 heads of 2048 x 2048 or 4 of 4096 x 4096: 0.5 GiB of float64 a matrix, about ten at once.
REAL: Final[tuple[Case, ...]] = (
    GatedCase("real_dense_64", 1, 8, 2048, 2048, D=64, Dv=64, gate="H", layout="transposed"),
    GatedCase("real_causal_128", 1, 8, 2048, 2048, D=128, Dv=128, gate="H", is_causal=True,
        layout="transposed"),
    GatedCase("real_grouped_causal_64", 1, 8, 2048, 2048, D=64, Dv=64, Hk=2, gate="BHT",
        gate_activation="sigmoid", is_causal=True, layout="transposed"),
    GatedCase("real_elements_128", 1, 4, 4096, 4096, D=128, Dv=128, Hk=2, gate="BHTD",
        gate_activation="sigmoid", is_causal=True, layout="transposed"),
    GatedCase("real_closed_64", 1, 8, 2048, 2048, D=64, Dv=64, gate="BH", closed=0.5),
    GatedCase("real_padded_64", 2, 2, 4096, 4096, D=64, Dv=64, gate="H",
        mask=masks.padded(4096, 1777)),
    GatedCase("real_padded_causal_128", 2, 2, 4001, 4001, D=128, Dv=128, gate="H",
        mask=masks.padded(4001, 2500, causal=True)),
    GatedCase("real_window_128", 1, 4, 4096, 4096, D=128, Dv=128,
        mask=masks.fixed(Mask(causal=True, window=(511, 0)))),
    GatedCase("real_outliers_64", 1, 4, 2048, 2048, D=64, Dv=64, gate="H", outlier=40.0),
    CollaborativeCase("real_256", 1, 6, 2048, 2048, Ds=256, Dv=64, gate="H", content_bias=True),
    CollaborativeCase("real_256_causal", 1, 4, 4096, 4096, Ds=256, Dv=64, is_causal=True),
    CollaborativeCase("real_512", 1, 6, 2048, 2048, Ds=512, Dv=64, content_bias=True),
    CollaborativeCase("real_512_ragged", 1, 6, 2048, 2048, Ds=512, Dv=64, mixing="ragged",
        gate="H", closed=0.34),
    CollaborativeCase("real_512_padded", 2, 3, 2048, 2048, Ds=512, Dv=64,
        mask=masks.padded(2048, 1111)),
    EntmaxCase("real_entmax_64", 1, 6, 2048, 2048, D=64, Dv=64, gate="H", closed=0.34),
    EntmaxCase("real_entmax_128", 1, 4, 2048, 2048, D=128, Dv=128, alpha=(1.1, 2.0),
        is_causal=True),
    CollaborativeCase("real_768", 1, 4, 2048, 2048, Ds=768, Dv=64, is_causal=True),
)  # fmt: skip


def cases(settings: Settings) -> list[Case]:
    """Real sizes first: they are what people run; the long case has no oracle that fits."""
    if settings.tiny:
        return [
            case
            for case in (*CASES, *ENTMAX)
            if "tiny" in case.tags and case.B * case.H * case.T <= 24
        ]
    return [*REAL, *(case for case in (*CASES, *ENTMAX) if "long" not in case.tags)]


def items(settings: Settings) -> Items:
    return {
        f"{case.operator}/{case}/{word(dtype)}/{backend}": partial(
            _check, settings, case, dtype, backend
        )
        for dtype in settings.dtypes()
        for case in cases(settings)
        if dtype in case.dtypes
        for backend in settings.backends(case.operator)
    }


def _check(settings: Settings, case: Case, dtype: torch.dtype, backend: str) -> Row:
    must_serve(case.make(dtype, settings.device), backend)
    report = check(case, dtype, backend, device=settings.device)
    wrong = [str(quantity) for quantity in report.quantities if not quantity.ok]
    worst = max(report.quantities, key=lambda quantity: quantity.ratio)
    return {
        "verdict": PASSED if report.ok else FAILED,
        "ratio": round(worst.ratio, 4) if worst.ratio < float("inf") else None,
        "worst": worst.name,
        "detail": "; ".join(wrong),
    }


assert {case.operator for case in REAL} == set(DIFFERENTIABLE)
