"""The accuracy rule of the package.

The oracle is the `eager` backend in float64 on the same quantised inputs. Three kinds of errors of the output, lse and
every gradient may each be at most

    2 * (that error of the eager backend in the same dtype) + chance * (rounding floor, see `rounding`)

    the root mean square error
    the root mean square error of every row, so that small heads and rows count as much as large ones
    the mean of error times reference, which reveals a factor of 1.003, less than one rounding of bfloat16

The floor is measured on simulated kernels. `chance` is the factor above it that the error of another kernel exceeds
once in a million quantities. It is 4 or more: few simulations say less about one row, or about a mean, than about many
rows.

NaN and infinities must be exactly where the oracle has them. In float64 eager is the oracle: its own error cannot be
measured. It is taken to be the floor, and in a single row the largest that a kernel may have by chance.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Final

import torch
from torch import Tensor

from heads_kernels.backends import select
from heads_kernels.ops import eager
from heads_kernels.ops.attention import attention_op
from heads_kernels.ops.philox import draw_seed
from heads_kernels.testing import rounding
from heads_kernels.testing.case import Case, Inputs
from heads_kernels.testing.rounding import MEASURED, SAMPLES, Floor, finite, floors, of_rows

#: Factor of the error of eager in the same dtype, as in FlashAttention's tests.
FACTOR: Final = 2.0

#: Least factor of the floor, for orders of sums and places of roundings that no simulation has. Heuristic: with 2, the
#: largest error of the CPU kernels, of all levels and cases, was 0.8 of its bound. Means reveal what is wrong by 0.3 %.
_LEAST: Final = 4.0

#: Mean errors that float32 arithmetic may have, all with one sign, which simulations don't show: a thousand
#: roundings, and 2 % of the fault that the mean is to reveal. Heuristic.
_ONE_SIGN: Final = 2.0**-14


@dataclass(frozen=True)
class Quantity:
    """Errors of one output or gradient against the oracle; `wrong` describes a wrong shape, dtype, NaN or infinity.

    `row` is the largest ratio of the error of a row to its bound. Mean errors are relative to the mean square of the
    reference: 0.003 is the error of a factor of 1.003.
    """

    name: str
    error: float = 0.0
    bound: float = 0.0
    row: float = 0.0
    mean_error: float = 0.0
    mean_bound: float = 0.0
    wrong: str = ""

    @property
    def ratio(self) -> float:
        """The largest error divided by its bound; at most 1 is accurate."""
        if self.wrong:
            return math.inf
        of_mean = _ratio(abs(self.mean_error), self.mean_bound)
        return max(_ratio(self.error, self.bound), self.row, of_mean)

    @property
    def ok(self) -> bool:
        return self.ratio <= 1.0

    def __str__(self) -> str:
        verdict = self.wrong or (
            f"rms {self.error:.2e} of {self.bound:.2e}, rows {self.row:.2f} of 1, "
            f"mean {self.mean_error:+.2e} of {self.mean_bound:.2e}"
        )
        return f"{'ok  ' if self.ok else 'FAIL'} {self.name:14} {verdict}"


@dataclass(frozen=True)
class Report:
    """The result of `check`; printable."""

    name: str
    operator: str
    backend: str
    dtype: torch.dtype
    quantities: tuple[Quantity, ...]

    @property
    def ok(self) -> bool:
        return all(quantity.ok for quantity in self.quantities)

    @property
    def ratio(self) -> float:
        """The largest error divided by its bound."""
        return max((quantity.ratio for quantity in self.quantities), default=0.0)

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        head = f"{self.operator} {self.name} {dtype} on {self.backend}: {self.ratio:.2f} of the bound"
        return "\n".join([head, *(f"  {quantity}" for quantity in self.quantities)])


@dataclass(frozen=True, eq=False)
class Reference:
    """The references for given inputs: the oracle, eager in the same dtype, and the rounding floors."""

    inputs: Inputs
    oracle: dict[str, Tensor]
    eager: dict[str, Tensor]
    floors: dict[str, Floor]

    def judge(self, name: str, got: Tensor) -> Quantity:
        """Compare a result with its references, by the rule above."""
        oracle, eager, floor = self.oracle[name], self.eager[name], self.floors[name]
        wrong = ""
        if got.shape != oracle.shape:
            wrong = f"shape is {list(got.shape)}, not {list(oracle.shape)}"
        elif got.dtype != eager.dtype:
            wrong = f"dtype is {got.dtype}, not {eager.dtype}"
        elif not torch.equal(got.isnan(), oracle.isnan()):
            wrong = f"{int((got.isnan() != oracle.isnan()).sum())} elements differ in being NaN"
        elif not torch.equal(_infinite(got), _infinite(oracle)):
            wrong = f"{int((_infinite(got) != _infinite(oracle)).sum())} elements differ in being inf"
        if wrong:
            return Quantity(name, wrong=wrong)
        exact = finite(oracle, oracle)
        error = finite(got.double() - oracle, oracle)
        # Where only eager is not finite (a float16 that overflows there), its error is not used.
        of_eager = finite(eager.double() - oracle, oracle).nan_to_num(0.0, 0.0, 0.0)
        rows, eager_rows = of_rows(error), of_rows(of_eager)
        mean, eager_mean = (float((each * exact).sum()) for each in (error, of_eager))
        by_chance = _chance(1.0, rows.numel()) * floor.rows
        in_a_row = FACTOR * eager_rows + by_chance
        if eager.dtype == oracle.dtype and not of_eager.any():
            eager_rows, eager_mean = floor.rows, floor.mean
            in_a_row = (FACTOR + 1) * by_chance
        size = float(exact.square().sum()) or 1.0
        squares = floor.rows.square()
        # How many rows have a share in the floor of all: 1 if it is that of one row.
        count = float(squares.sum().square() / squares.square().sum()) if squares.any() else 1.0
        in_all = FACTOR * _rms(eager_rows) + _chance(count) * _rms(floor.rows)
        in_mean = FACTOR * abs(eager_mean) + _chance(1.0) * floor.mean
        return Quantity(
            name,
            error=_rms(rows),
            bound=in_all,
            row=float(torch.where(rows > 0, rows / in_a_row, 0.0).max()) if rows.numel() else 0.0,
            mean_error=mean / size,
            mean_bound=in_mean / size + _ONE_SIGN,
        )


def check(
    case: Case,
    dtype: torch.dtype = torch.float32,
    backend: str | None = None,
    *,
    device: torch.device | str | None = None,
    seed: int = 0,
    backward: bool = True,
) -> Report:
    """Check `backend` on a named case: forward, and backward unless `backward` is False.

    On PyTorch's default device if `device` is None.
    """
    device = device or torch.get_default_device()
    return compare(_case_reference(case, dtype, str(device), seed, backward), backend, case.name)


def compare(reference: Reference, backend: str | None, name: str = "inputs") -> Report:
    """Check `backend` on any inputs; see `reference`."""
    inputs = reference.inputs
    measured = run(inputs, backend, backward="dquery" in reference.oracle)
    quantities = tuple(reference.judge(what, got) for what, got in measured.items())
    dtype = inputs.dout.dtype
    return Report(name, inputs.operator, backend or "default", dtype, quantities)


def reference(inputs: Inputs, backward: bool = True) -> Reference:
    """Oracle, eager and floors for `inputs`; the `[T, S]` matrices of all heads are in memory."""
    oracle = run(inputs.to(torch.float64), "eager", backward)
    if inputs.operator == "attention_statistics":
        simulate = functools.partial(rounding.statistics, inputs)
    else:
        simulate = functools.partial(rounding.attention, inputs, _seed(inputs), backward)
    floor = floors(inputs.dout.dtype, oracle, simulate)
    return Reference(inputs, oracle, run(inputs, "eager", backward), floor)


@functools.lru_cache(maxsize=2)
def _case_reference(case: Case, dtype: torch.dtype, device: str, seed: int, backward: bool) -> Reference:
    """The reference of a case, cached for the backends that are checked one after the other."""
    return reference(case.make(dtype, device, seed), backward)


def run(inputs: Inputs, backend: str | None, backward: bool = True) -> dict[str, Tensor]:
    """The results by name: out, lse, and with `backward` dquery, dkey, ...; or statistics."""
    if inputs.operator == "attention_statistics":
        return _statistics(inputs, backend)
    if backward:
        out, grads = inputs.backward(backend)
    else:
        out, grads = inputs.call(backend), {}
    lse = _lse(inputs, backend)
    return {"out": out, "lse": lse, **{f"d{name}": grad for name, grad in grads.items()}}


def _statistics(inputs: Inputs, backend: str | None) -> dict[str, Tensor]:
    """Those measured, and as "argmax" the true probability of the key that it names, -inf for none.

    If two keys are within rounding of each other, either may be the maximum.
    """
    found: Any = inputs.call(backend)
    p = eager.row_probabilities(inputs.to(torch.float64).parsed())
    named = p.gather(-1, found.argmax.clamp(min=0)[..., None])[..., 0].to(found.max_prob.dtype)
    results = {name: getattr(found, name) for name in MEASURED}
    return {**results, "argmax": named.masked_fill(found.argmax < 0, -torch.inf)}


def _lse(inputs: Inputs, backend: str | None) -> Tensor:
    call = inputs.parsed()._replace(seed=_seed(inputs), gate=None, gate_activation="identity")
    with torch.no_grad():
        lse: Tensor = attention_op(*call, True, select(call, backend))[2]
    return lse if call.alpha is None else lse.sum(0)


def _seed(inputs: Inputs) -> Tensor | None:
    """The seed that `Inputs.call` makes the operator draw."""
    if not inputs.options.get("dropout_p"):
        return None
    torch.manual_seed(inputs.seed)
    return draw_seed(inputs.tensors["query"].device)


def _chance(count: float, tests: int = 1) -> float:
    """How far the error of `count` rows may be above its floor by chance, once in a million quantities.

    All numbers of a row count as one, since their errors may have one cause. The square of the ratio of two root mean
    squares, that of the floor over `SAMPLES` times as many rows, has the F distribution (its quantile: Wilson,
    Hilferty 1931, for both). With `tests`, the factor is for the largest of that many ratios.
    """
    tests = min(max(tests, 1), 1_000_000)  # beyond, there is no such quantile
    z = NormalDist().inv_cdf(1 - 1e-6 / tests)
    a, b = 2 / (9 * count), 2 / (9 * count * SAMPLES)
    square, product = (1 - b) ** 2 - z**2 * b, (1 - a) * (1 - b)
    root = math.sqrt(product**2 - square * ((1 - a) ** 2 - z**2 * a))
    quantile: float = ((product + root) / square) ** 1.5
    return max(_LEAST, quantile)


def _infinite(tensor: Tensor) -> Tensor:
    """1 at +inf, -1 at -inf, else 0."""
    return tensor.isposinf().int() - tensor.isneginf().int()


def _ratio(error: float, bound: float) -> float:
    if error == 0.0:
        return 0.0
    return error / bound if bound > 0.0 else math.inf


def _rms(rows: Tensor) -> float:
    return float(rows.square().mean().sqrt()) if rows.numel() else 0.0
