"""The rounding floor: the errors that rounding alone explains, of the output, lse and every gradient.

An error below twice that of `eager` is not always possible: eager may be exact by chance if few numbers are compared,
and a kernel rounds where eager does not. So an ideal kernel is simulated several times (Monte Carlo arithmetic, Parker
1997): the formula in float64, or float32 for calls in 16 bits, in which

    operands of products    are rounded to the dtype of the call: probabilities, dscores, dout * gate, mixed queries
    the saved output        is rounded to it, too, and results are rounded to their own dtype
    products and sums       are off by up to u times the sum of their absolute terms: for terms of similar size and
                            random sign, roundings of partial sums stay near that, in any order of blocks
    other arithmetic        is rounded to float32, whose unit roundoff is u; results that it holds as subnormal numbers
                            are 0, as on GPUs

Each simulation multiplies numbers by another `scale` before it rounds them, and divides afterwards. So errors differ
between simulations, as they differ between kernels. Within one simulation, equal numbers have equal errors. Equal sums
have equal errors only if one operation computes them: two passes may add up scores in different orders.
Nothing here depends on a kernel or is tuned to one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from heads_kernels.call import OPERANDS, Call
from heads_kernels.ops import eager
from heads_kernels.ops.attention import Saved, allocate_gradients, finish
from heads_kernels.testing.case import Inputs

#: Simulated kernels. The mean error of a call is one number: with 24 of them its bound is below a fault of 0.3 % in
#: bfloat16, and with 16 just at it. The bound of one row of 10,000 is 12 times its floor. Heuristic.
SAMPLES: Final = 24

#: The fields of `attention_statistics` that are compared. Of `argmax` it is the probability of the key.
MEASURED: Final = ("lse", "max_score", "max_prob", "entropy", "received")

#: Functions of torch by name, without the underscores of methods.
_ARITHMETIC: Final = {
    "add", "radd", "sub", "rsub", "mul", "rmul", "div", "truediv", "square", "pow", "exp", "expm1", "log", "log1p",
    "tanh", "sigmoid", "softplus", "softmax",
}  # fmt: skip
_SUMS: Final = {"sum", "sum_to_size"}
_UNIT: Final = torch.finfo(torch.float32).eps / 2
_LARGEST_SUBNORMAL: Final = torch.finfo(torch.float32).smallest_normal * (1 - torch.finfo(torch.float32).eps)
#: Times bits of a number: the upper bits of the product are as random as those of its error (Knuth, 6.4).
_HASH: Final = -1640531535


class Floor(NamedTuple):
    """Errors of a quantity, root mean squares over the simulations."""

    rows: Tensor  # of every row
    mean: float  # of the sum of error times reference


def floors(
    dtype: torch.dtype, oracle: dict[str, Tensor], simulate: Callable[[Rounding], dict[str, Tensor]]
) -> dict[str, Floor]:
    """The floor of every quantity in `oracle`, of calls in `dtype`, from what `simulate` returns under roundings.

    For float64, rounding to float32 is simulated, and its errors are scaled to those of float64.
    """
    working = at_most_float32(dtype)
    wide = torch.float64 if working == torch.float32 else torch.float32
    size = torch.finfo(dtype).eps / torch.finfo(working).eps
    rows = {name: torch.zeros_like(of_rows(exact)) for name, exact in oracle.items()}
    means = dict.fromkeys(oracle, 0.0)
    for n in range(SAMPLES):
        found = simulate(Rounding(wide, working, 2.0 ** -((n + 0.5) / SAMPLES)))
        for name, exact in oracle.items():
            error = finite(size * (found[name].double() - exact), exact)
            rows[name] += of_rows(error).square() / SAMPLES
            means[name] += float((error * finite(exact, exact)).sum()) ** 2 / SAMPLES
    return {name: Floor(rows[name].sqrt(), means[name] ** 0.5) for name in oracle}


def of_rows(error: Tensor) -> Tensor:
    """The root mean square of each row, along the last dimension."""
    return error.square().sum(-1).div(max(error.shape[-1], 1)).sqrt()


def finite(tensor: Tensor, exact: Tensor) -> Tensor:
    """`tensor`, 0 where the reference is not finite."""
    return tensor.where(exact.isfinite(), 0.0)


def attention(inputs: Inputs, seed: Tensor | None, backward: bool, simulated: Rounding) -> dict[str, Tensor]:
    """The results of a simulated kernel; `inputs` are in the dtype of the call, `seed` is that of dropout."""
    leaves = inputs.to(simulated.wide).requires_grad()
    recorded = leaves.parsed()._replace(seed=seed)
    call = Call._make(t.detach() if isinstance(t, Tensor) else t for t in recorded)
    with torch.no_grad(), simulated:
        out, attended, lse = eager.attend(call)
    found = {"out": out, "lse": lse if call.alpha is None else lse.sum(0)}
    if backward:
        saved = Saved(leaves.dout, simulated.rounded(attended, simulated.working), lse, leaves.dlse)
        needs = [operand is not None for operand in call.operands]
        gradients = allocate_gradients(call, needs)
        with torch.no_grad(), simulated:
            eager.backward(call, saved, gradients)
            of_operands = [
                finish(name, sums, call) for name, sums, need in zip(OPERANDS, gradients, needs, strict=True) if need
            ]
        operands = [operand for operand in recorded.operands if operand is not None]
        of_tensors = torch.autograd.grad(operands, list(leaves.tensors.values()), of_operands)
        found |= {f"d{name}": grad for name, grad in zip(leaves.tensors, of_tensors, strict=True)}
    dtypes = {f"d{name}": tensor.dtype for name, tensor in inputs.tensors.items()}
    dtypes |= {"out": simulated.working, "lse": torch.float32}
    return {name: simulated.rounded(result, at_most_float32(dtypes[name])) for name, result in found.items()}


def statistics(inputs: Inputs, simulated: Rounding) -> dict[str, Tensor]:
    """The same of a kernel of `attention_statistics`."""
    call = inputs.to(simulated.wide).parsed()
    with torch.no_grad(), simulated:
        found = eager.row_statistics(call)
        # A second pass may compute `received`, from lse.
        noise = torch.where(found.lse.isfinite(), simulated.summed(found.lse, found.lse.abs()) - found.lse, 0.0)
        weights: Any = call.row_weights
        second = eager.row_statistics(call._replace(row_weights=weights * noise.exp()))
    found = found._replace(received=second.received)
    results = {name: simulated.rounded(getattr(found, name), torch.float32) for name in MEASURED}
    return {**results, "argmax": results["max_prob"]}


def at_most_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype == torch.float64 else dtype


class Rounding(TorchFunctionMode):
    """Rounds arithmetic in the dtype `wide` as described above."""

    def __init__(self, wide: torch.dtype, working: torch.dtype, scale: float) -> None:
        super().__init__()
        self.wide, self.working, self.scale = wide, working, scale
        self.sums = 0

    def __torch_function__(self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, options = function.__name__.strip("_"), kwargs or {}
        if name == "matmul":
            a, b = map(self._operand, args)
            if not b.any():  # exact: so `formula.product` finds that there is no NaN
                return a @ b
            return self.summed(a @ b, a.float().abs() @ b.float().abs())
        result = function(*args, **options)
        if name in _ARITHMETIC and self._is_computed(result):
            return self.rounded(result, torch.float32)
        if name == "logsumexp" and args[0].numel():  # the sum of the largest term and of a logarithm
            largest = args[0].amax(-1)
            return self.summed(result, (largest.abs() + (result - largest).abs()).nan_to_num(0.0, 0.0).float())
        if name in _SUMS and self._is_computed(result):
            return self.summed(result, function(args[0].float().abs(), *args[1:], **options))
        return result

    def rounded(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        # In place after the first step: more large new tensors would take longer than the arithmetic.
        found = self.scale * tensor
        if dtype != tensor.dtype:
            found.copy_(found.to(dtype))
        # By a tensor: PyTorch divides by a Python number on CUDA by multiplying with its reciprocal, and numbers
        # that are rounded already would change.
        found.div_(found.new_full((), self.scale))
        return torch.hardshrink(found, _LARGEST_SUBNORMAL, out=found)

    def _operand(self, tensor: Tensor) -> Tensor:
        """Rounded, unless it is an argument of the call; results of arithmetic are float32 already."""
        if self.working == torch.float32 or torch.equal(tensor, tensor.to(self.working).to(tensor.dtype)):
            return tensor
        return self.rounded(tensor, self.working)

    def summed(self, total: Tensor, size: Tensor) -> Tensor:
        self.sums += 1
        bits = (self.scale * total).float().view(torch.int32).add_(self.sums).mul_(_HASH)
        return total + bits.float().mul_(_UNIT / 2**31).mul_(size)

    def _is_computed(self, result: Any) -> bool:
        return isinstance(result, Tensor) and result.dtype == self.wide
