"""Every named case on every backend and dtype, held to the one accuracy rule.

Operators and backends come from the tables, cases from `heads_kernels.testing`: a new row of any of
them is tested here without an edit.
"""

import functools
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from importlib import import_module
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from heads_kernels.ops.philox import draw_seed, keep_mask
from heads_kernels.testing import CASES, Case, CollaborativeCase, GatedCase, compare, reference
from heads_kernels.testing.accuracy import Reference
from heads_kernels.testing.masks import Sizes
from tests.ops.calls import NAMES, QUICK, at_level, inputs_of, with_dlse
from tests.support.alike import assert_alike
from tests.support.plain import plain

#: Part of its bound that eager's own error may be. It is bounded by twice itself and four times the floor, so that 0.4
#: says: at most eight times the floor.
EAGER_PART = 0.4


def of_a_model(case: Case) -> Case:
    """Fewer heads and sequences, which are computed alike, and at most 512 query rows."""
    if isinstance(case, GatedCase) and (case.H, case.Hk) == (32, 8):
        causal = {"T": 512, "S": 512} if case.is_causal else {}
        return replace(case, B=min(case.B, 2), H=8, Hk=2, **causal)
    if case.H == 12:
        case = replace(case, H=4)
    return replace(case, B=1) if (case.B, case.T) == (2, 512) and case.mask is None else case


#: One of each kind of mask and of grouping; the others differ in what smaller cases have too.
IN_CI = {
    "bert_base_128_padded", "transformer_base_decoder", "gqa_language_model", "bert_base_256_padded",
    "minilm_192_ragged",
}  # fmt: skip
SLOW = [of_a_model(case) for case in CASES if "model" in case.tags and "long" not in case.tags]


def rows(
    cases: list[Case], dtypes: tuple[torch.dtype, ...], but: tuple[str, ...] = ()
) -> list[tuple[Case, torch.dtype, str]]:
    """Case x dtype x backend, backends innermost: they share the oracle of `check`, which is eager in float64."""
    return [
        (case, dtype, name)
        for case, dtype, name in product(cases, dtypes, NAMES)
        if dtype in case.dtypes and name not in but and (name, dtype) != ("eager", torch.float64)
    ]


@functools.lru_cache(maxsize=2)
def expected(case: Case, dtype: torch.dtype, device: torch.device) -> Reference:
    """Shared by the backends, which are checked one after the other; in float32 with a gradient of lse."""
    inputs = case.make(dtype, device)
    return reference(with_dlse(inputs) if dtype == torch.float32 else inputs)


def hold(case: Case, dtype: torch.dtype, backend: str) -> None:
    inputs_of(case, backend, dtype)
    wanted = expected(case, dtype, torch.get_default_device())
    levels: list[str] = [""]
    if (case.operator, backend) == ("entmax_attention", "cpu"):  # `make selftest` has the others on every level
        levels = import_module("heads_kernels._cpu").available_levels()
    for level in levels:
        # Tensors on the CPU, as in most programs: the package asks its operands for the device.
        with torch.device("cpu"), at_level(level) if level else nullcontext():
            report = compare(wanted, backend, case.name)
        assert report.ok, f"{level} {report}"
        assert backend != "eager" or report.ratio <= EAGER_PART, str(report)


ALL = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def of_both(name: str, *sizes: int, **changes: Any) -> Iterator[Case]:
    options: Any = {"Dv": 24, "dtypes": (torch.float32,), **changes}
    yield GatedCase(name, *sizes, D=16, **options)
    yield CollaborativeCase(name, *sizes, Ds=32, content_bias=True, **options)


def blocks(sizes: Sizes, device: torch.device) -> Tensor:
    """`[1, H, T, S]` of 64 by 64: of a head, blocks on one diagonal are visible; row 3 of each sees nothing."""
    lengths = (torch.arange(n, device=device) for n in (sizes.H, sizes.T, sizes.S))
    h, i, j = torch.meshgrid(*lengths, indexing="ij")
    return ((j // 64 - i // 64 == h) & (i % 64 != 3))[None]


def broadcast(*shape: int) -> Any:
    """A dense mask that has these sizes in memory."""

    def mask(sizes: Sizes, device: torch.device) -> Tensor:
        seeded = torch.Generator("cpu").manual_seed(0)
        drawn = torch.rand(shape[::-1], generator=seeded, device="cpu") < 0.7
        return drawn.to(device).permute(3, 2, 1, 0).expand(sizes)

    return mask


def combinations() -> Iterator[Case]:
    """Sizes and terms in combination, where kernels for GPUs branch."""
    for letters in product("B1", "H1", "T1", "S1"):  # every way a bias broadcasts
        bias = "".join(letters)
        yield from of_both(f"bias_{bias}", 3, 2, 70, 67, bias=bias, gate="BHT")
    for T, S in product((1, 63, 64, 65), (1, 64, 130)):  # diagonals at the borders of tiles
        sizes = 2, 2, T, S
        yield from of_both(f"offsets_{T}_{S}", *sizes, offsets=T + S - 1, gate="H", closed=0.5)
    for shape in ((2, 1, 40, 1), (1, 2, 1, 70), (2, 2, 40, 70)):
        options = {"mask": broadcast(*shape), "softcap": 1.0, "is_causal": True}
        yield from of_both(f"dense_{shape}", 2, 2, 40, 70, **options)
    for width in (24, 100, 200):  # a dense mask hides whole tiles
        yield GatedCase(f"gaps_{width}", 1, 2, 200, 260, D=16, Dv=width, mask=blocks)
        yield CollaborativeCase(f"gaps_{width}", 1, 2, 200, 260, Ds=144, Dv=width, mask=blocks)
    terms: Any = {"bias": "1HTS", "bias_hides": True, "softcap": 2.0, "sinks": True, "gate": "BHT"}
    for D in (100, 200):
        yield GatedCase(f"terms_{D}", 2, 2, 40, 70, D=D, Dv=D, **terms)
        yield CollaborativeCase(f"terms_{D}", 2, 2, 40, 70, Ds=3 * D, Dv=D, **terms)


@pytest.mark.parametrize(("case", "dtype", "backend"), rows(QUICK, ALL))
def test_case(case: Case, dtype: torch.dtype, backend: str) -> None:
    hold(case, dtype, backend)


@pytest.mark.check
@pytest.mark.parametrize(("case", "dtype", "backend"), rows(list(combinations()), ALL[1:3], ("eager",)))
def test_combinations(case: Case, dtype: torch.dtype, backend: str) -> None:
    """On the CPU beside any call of test_properties.py."""
    hold(case, dtype, backend)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "dtype", "backend"),
    [
        pytest.param(*row, marks=[] if row[0].name in IN_CI else pytest.mark.release)
        for row in rows(SLOW, (torch.float32,), ("eager",))
    ],
)
def test_model_case(case: Case, dtype: torch.dtype, backend: str) -> None:
    """Not of eager, which has no tiles: its errors at these sizes are part of the bound."""
    hold(case, dtype, backend)


@pytest.mark.parametrize("case", QUICK)
def test_oracle_against_autograd(case: Case) -> None:
    """The eager backend in float64 is what plain PyTorch and its own autograd give, from gradients of out and lse."""
    inputs = with_dlse(case.make(torch.float64, requires_grad=True))
    call, kept = inputs.parsed(), None
    if case.dropout_p:
        torch.manual_seed(inputs.seed)
        seed = draw_seed(inputs.dout.device)
        keep = keep_mask(seed, case.dropout_p, *call.sizes, seed.device)
        kept = keep.double() / (1 - case.dropout_p)
    naive = plain(call, kept)
    results, starts = [naive.out], [inputs.dout]
    if inputs.dlse is not None:
        results.append(naive.lse)
        starts.append(inputs.dlse)
    out, grads = inputs.backward("eager")
    assert_alike(out, naive.out.detach())
    leaves = list(inputs.tensors.values())
    wanted = torch.autograd.grad(results, leaves, starts, materialize_grads=True)
    assert_alike(grads, dict(zip(inputs.tensors, wanted, strict=True)))
