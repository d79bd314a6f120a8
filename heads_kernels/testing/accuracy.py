"""The accuracy rule of the package.

The oracle is the `eager` backend in float64 on the same quantised inputs. Three kinds of errors of the output, lse and
every gradient may each be at most

    2 * (that error of the eager backend in the same dtype) + chance * (rounding floor, see `rounding`)

    the largest error, and the root mean square error
                        `chance` is 1; for fewer than 25 numbers it is larger, since few errors may all be large
    the root mean square error of every row, so that small heads and rows count as much as large ones
                        errors of a row may have one cause, so `chance` is that of one number, the largest of all rows
    the mean of error times reference, which reveals a factor of 1.003, less than one rounding of bfloat16
                        the floor is what random roundings leave of this mean (see `mean_error`), plus what roundings of
                        float32 arithmetic would add if all had one sign

NaN and infinities must be exactly where the oracle has them. In float64 eager is the oracle: its own error
cannot be measured and is taken to be the floor.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from heads_kernels.backends import select
from heads_kernels.ops.attention import attention_op
from heads_kernels.ops.philox import draw_seed
from heads_kernels.testing.case import Case
from heads_kernels.testing.inputs import Inputs
from heads_kernels.testing.rounding import Limits, aligned_unit, limits, mixed_unit, unit

#: Factor of the error of eager in the same dtype, as in FlashAttention's tests.
FACTOR = 2.0

#: Standard deviations that a normal variable exceeds once in a million.
_ONE_IN_A_MILLION: Final = 4.75


@dataclass(frozen=True)
class Quantity:
    """Errors of one output or gradient against the oracle; `wrong` describes a wrong shape, dtype, NaN or infinity.

    `row` is the largest ratio of the error of a row to its bound. Mean errors are relative to the mean square of the
    reference: 0.003 is the error of a factor of 1.003.
    """

    name: str
    max_error: float
    rms_error: float
    max_bound: float
    rms_bound: float
    row: float = 0.0
    mean_error: float = 0.0
    mean_bound: float = 0.0
    wrong: str = ""

    @property
    def ratio(self) -> float:
        """The larger error divided by its bound; at most 1 is accurate."""
        if self.wrong:
            return float("inf")
        return max(
            _ratio(self.max_error, self.max_bound),
            _ratio(self.rms_error, self.rms_bound),
            self.row,
            _ratio(abs(self.mean_error), self.mean_bound),
        )

    @property
    def ok(self) -> bool:
        return self.ratio <= 1.0

    def __str__(self) -> str:
        verdict = self.wrong or (
            f"max {self.max_error:.2e} of {self.max_bound:.2e}, "
            f"rms {self.rms_error:.2e} of {self.rms_bound:.2e}, "
            f"rows {self.row:.2f} of 1, mean {self.mean_error:+.2e} of {self.mean_bound:.2e}"
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
        head = (
            f"{self.operator} {self.name} {dtype} on {self.backend}: {self.ratio:.2f} of the bound"
        )
        return "\n".join([head, *(f"  {quantity}" for quantity in self.quantities)])


@dataclass(frozen=True, eq=False)
class Reference:
    """The references for given inputs: the oracle, eager in the same dtype, and the rounding limits."""

    inputs: Inputs
    oracle: dict[str, Tensor]
    eager: dict[str, Tensor]
    _found: dict[tuple[float, float | None], dict[str, Limits]] = field(default_factory=dict)

    def limits(self, backend: str | None) -> dict[str, Limits]:
        """The limits by quantity, for the roundings of `backend`."""
        shared = self.inputs.operator == "collaborative_attention"
        return self._of(mixed_unit(self.inputs.dout.dtype, backend) if shared else 0.0)

    def arithmetic(self) -> dict[str, Limits]:
        """The same for float32 arithmetic alone, where nothing is rounded to a narrower dtype."""
        return (
            self._of(0.0, 0.0)
            if unit(self.inputs.dout.dtype) > unit(torch.float32)
            else self.limits(None)
        )

    def _of(self, mixed: float, working: float | None = None) -> dict[str, Limits]:
        if (mixed, working) not in self._found:
            values = dict(self.oracle)
            for name, tensor in self.inputs.tensors.items():  # also without backward
                values.setdefault(f"d{name}", torch.zeros_like(tensor, dtype=torch.float64))
            aligned = aligned_unit(self.inputs)
            found = limits(self.inputs, values, _seed(self.inputs), mixed, aligned, working)
            self._found[mixed, working] = found
        return self._found[mixed, working]


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
    allowed, arithmetic = reference.limits(backend), reference.arithmetic()
    quantities = tuple(
        _judge(
            what,
            got,
            reference.oracle[what],
            reference.eager[what],
            allowed[what],
            arithmetic[what].floor,
        )
        for what, got in measured.items()
    )
    dtype = inputs.tensors["query"].dtype
    return Report(name, inputs.operator, backend or "default", dtype, quantities)


def reference(inputs: Inputs, backward: bool = True) -> Reference:
    """Oracle and eager for `inputs`; the `[T, S]` matrix of every head is in memory."""
    oracle = run(inputs.to(torch.float64), "eager", backward)
    return Reference(inputs, oracle, run(inputs, "eager", backward))


@functools.lru_cache(maxsize=2)
def _case_reference(
    case: Case, dtype: torch.dtype, device: str, seed: int, backward: bool
) -> Reference:
    """The reference of a case, cached for the backends that are checked one after the other."""
    return reference(case.make(dtype, device, seed), backward)


def run(inputs: Inputs, backend: str | None, backward: bool = True) -> dict[str, Tensor]:
    """The results by name: out, lse, and with `backward` dquery, dkey, ..."""
    if backward:
        out, grads = inputs.backward(backend)
    else:
        out, grads = inputs.call(backend), {}
    lse = _lse(inputs, backend)
    return {"out": out, "lse": lse, **{f"d{name}": grad for name, grad in grads.items()}}


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


def _judge(
    name: str, got: Tensor, oracle: Tensor, eager: Tensor, allowed: Limits, arithmetic: Tensor
) -> Quantity:
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
        return Quantity(name, 0.0, 0.0, 0.0, 0.0, wrong=wrong)
    finite = oracle.isfinite()
    exact, floor, arithmetic = (t.where(finite, 0.0) for t in (oracle, allowed.floor, arithmetic))
    error = (got.double() - oracle).where(finite, 0.0)
    # Where only eager is not finite (a float16 that overflows there), its error is not used.
    of_eager = (eager.double() - oracle).where(finite, 0.0).nan_to_num(0.0, 0.0, 0.0)
    if eager.dtype == oracle.dtype and not of_eager.any():
        of_eager = floor
    count = int(finite.sum())
    chance = _chance(count)
    return Quantity(
        name,
        _max(error),
        _rms(error, count),
        FACTOR * _max(of_eager) + chance * _max(floor),
        FACTOR * _rms(of_eager, count) + chance * _rms(floor, count),
        _row_ratio(error, of_eager, floor),
        *_mean(error, of_eager, exact, allowed.mean_square, arithmetic),
    )


def _row_ratio(error: Tensor, of_eager: Tensor, floor: Tensor) -> float:
    """The largest ratio of the error of a row, along the last dimension, to its bound."""
    if not error.numel():
        return 0.0
    of_rows = [each.square().sum(-1).sqrt() for each in (error, of_eager, floor)]
    bound = FACTOR * of_rows[1] + _deviations(of_rows[0].numel()) / math.sqrt(3) * of_rows[2]
    return float(torch.where(of_rows[0] > 0, of_rows[0] / bound, 0.0).max())


def _mean(
    error: Tensor, of_eager: Tensor, exact: Tensor, square: Tensor, arithmetic: Tensor
) -> tuple[float, float]:
    """The mean of error times reference and its bound, relative to the mean square of the reference."""
    size = float(exact.square().sum())
    if size == 0.0:
        return 0.0, 0.0
    random = _deviations(1) * math.sqrt(float(square) / 3)
    bound = FACTOR * abs(float((of_eager * exact).sum())) + random
    bound += float((arithmetic * exact.abs()).sum())
    return float((error * exact).sum()) / size, bound / size


def _deviations(count: int) -> float:
    """Standard deviations that the largest of `count` normal variables exceeds once in a million times."""
    chance = torch.tensor(1e-6 / (2 * count), dtype=torch.float64)
    return -float(torch.special.ndtri(chance))


def _chance(count: int) -> float:
    """How far above its floor the error of `count` numbers may be by chance, once in a million quantities.

    A floor adds up roundings of at most u |x|, whose variance is at most a third of that squared. The mean square of
    `count` such errors over their variance is chi-squared over `count` (its quantile: Wilson, Hilferty 1931).
    """
    if not count:
        return 1.0
    part = 2 / (9 * count)
    quantile = (1 - part + _ONE_IN_A_MILLION * part**0.5) ** 3
    return max(1.0, math.sqrt(quantile / 3))


def _infinite(tensor: Tensor) -> Tensor:
    """1 at +inf, -1 at -inf, else 0."""
    return tensor.isposinf().int() - tensor.isneginf().int()


def _ratio(error: float, bound: float) -> float:
    if error == 0.0:
        return 0.0
    return error / bound if bound > 0.0 else float("inf")


def _max(error: Tensor) -> float:
    return float(error.abs().max()) if error.numel() else 0.0


def _rms(error: Tensor, count: int) -> float:
    """The root mean square of `count` numbers; all others are 0."""
    return math.sqrt(float(error.square().sum()) / count) if count else 0.0
