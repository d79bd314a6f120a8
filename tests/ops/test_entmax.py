"""What is particular to entmax: its limits, its support, `alpha`; its cases are in test_cases.py."""

import functools

import pytest
import torch
from torch.overrides import TorchFunctionMode

import heads_kernels as hk
from heads_kernels.ops import entmax
from tests.ops.calls import NAMES, run, tensors
from tests.support.alike import assert_alike

B, H, T, S, D, DV = 2, 4, 7, 9, 5, 6


def operands(dtype=torch.float64):
    sizes = {"B": B, "H": H, "Hk": H, "T": T, "S": S, "D": D, "Dv": DV}
    return {name: 1.5 * t for name, t in tensors("entmax_attention", **sizes, dtype=dtype).items()}


@pytest.fixture(params=["cpu", "eager"])
def attend(request):
    """The operator on a backend that serves float64."""
    return functools.partial(hk.entmax_attention, backend=request.param)


def sparsemax(scores):
    """By sorting (Martins and Astudillo 2016)."""
    ordered = scores.sort(-1, descending=True).values
    sums = ordered.cumsum(-1) - 1
    counts = torch.arange(1, scores.shape[-1] + 1)
    size = (ordered * counts > sums).sum(-1, keepdim=True)
    return (scores - sums.gather(-1, size - 1) / size).clamp(min=0)


def scores_of(given):
    return given["query"] @ given["key"].mT * D**-0.5


def test_alpha_2_is_sparsemax_and_near_1_softmax(attend):
    given = operands()
    scores = scores_of(given)
    assert_alike(attend(**given, alpha=2), sparsemax(scores) @ given["value"])
    near = attend(**given, alpha=1 + 1e-12)  # off by order ln^2 p
    torch.testing.assert_close(near, scores.softmax(-1) @ given["value"])


def test_gradient_of_alpha_is_exact_near_1(attend):
    """In the limit it is `p / 2 * (sum p ln^2 p - ln^2 p)`, which the paper's form loses to cancellation."""
    given = operands()
    alpha = torch.full((H,), 1 + 1e-11, dtype=torch.float64, requires_grad=True)
    attend(**given, alpha=alpha).sum().backward()
    p = scores_of(given).softmax(-1)
    squares = p.log().square()
    change = p / 2 * ((p * squares).sum(-1, keepdim=True) - squares)
    torch.testing.assert_close(alpha.grad, (change @ given["value"]).sum((0, 2, 3)))


def test_gradient_of_alpha_is_that_of_the_paper():
    """Where the form of the paper is exact too; terms on both sides of the switch to a series."""
    order = torch.tensor(1e-3, dtype=torch.float64)
    logs = torch.randn(1, 1, 8, 9, dtype=torch.float64).log_softmax(-1)
    p, entropy = logs.exp(), -(logs.exp() * logs).sum(-1, keepdim=True)
    share = (p ** (1 - order)) / (p ** (1 - order)).sum(-1, keepdim=True)
    want = (p - share) / order**2 - (p * logs + share * entropy) / order
    torch.testing.assert_close(entmax.alpha_derivative(logs, order), want)


@pytest.mark.parametrize("backend", NAMES)
def test_values_outside_of_the_support_reach_nothing(backend):
    given = operands(torch.float32)
    unused = (sparsemax(scores_of(given)) == 0).all(2)  # [B, H, S]
    assert unused.any()
    poisoned = given | {"value": given["value"].masked_fill(unused[..., None], torch.nan)}
    clean, dirty = (run("entmax_attention", backend, **each, alpha=2.0) for each in (given, poisoned))
    torch.testing.assert_close(dirty, clean, rtol=0.0, atol=0.0)


class Upward(TorchFunctionMode):
    """Every sum is the next larger number."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        return result.nextafter(result + torch.inf) if function.__name__ == "add" else result


def test_a_threshold_is_found_where_rounding_moves_it_up_again_and_again():
    """On CUDA, where PyTorch divides by a number by multiplying with its reciprocal, simulated rounding did that."""
    scores, order = torch.randn(2, 3, 5, 40), torch.full((3, 1, 1), 0.5)
    wanted = entmax.threshold(scores, None, order)
    with Upward():
        found = entmax.threshold(scores, None, order)
    most = 2 * entmax._MOST_STEPS * torch.finfo(torch.float32).eps
    torch.testing.assert_close(found, wanted, rtol=most, atol=most)


def test_values_of_alpha_out_of_range(attend):
    """A tensor's are judged by the backend; tests/ops/test_bad_input.py has all else that is refused."""
    for value in (1.0, float("nan")):
        with pytest.raises(ValueError, match="alpha"):
            attend(**operands(), alpha=torch.full((H,), value))


def test_distributed_tensors_are_refused(attend):
    DTensor = type("DTensor", (torch.Tensor,), {})
    gate = torch.ones(H, dtype=torch.float64).as_subclass(DTensor)
    with pytest.raises(ValueError, match="gate is a DTensor"):
        attend(**operands(), gate=gate)
