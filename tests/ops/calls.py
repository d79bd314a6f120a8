"""How tests call an operator on each backend, skipping those that cannot serve it.

Tensors are made on PyTorch's default device, which `pytest --device` sets.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import heads_kernels as hk
from heads_kernels import functional
from heads_kernels.backends import BACKENDS
from heads_kernels.call import Call, compute_dtype
from heads_kernels.parse import parse
from heads_kernels.testing import CASES, ENTMAX, Case, CollaborativeCase, EntmaxCase, GatedCase, Inputs
from heads_kernels.testing.accuracy import Report
from tests.support.alike import assert_alike
from tests.support.poison import hide

#: Sizes of `tensors` by default.
B, H, T, S, D, Dv = 2, 4, 5, 7, 8, 6

#: The operators with softmax, by name; tests/ops/test_entmax.py has what is particular to entmax.
OPERATORS = ("gated_attention", "collaborative_attention")

NAMES = [row.name for row in BACKENDS]

#: Every (operator, backend) of them: their results have a gradient.
DIFFERENTIABLE = [(operator, name) for operator in OPERATORS for name in NAMES]

#: Those of entmax too.
ATTENTION = [*DIFFERENTIABLE, *(("entmax_attention", name) for name in NAMES)]

#: Those with a fused kernel. A traced graph has the same op for every backend, so that eager is compiled and exported
#: with one operator only.
FUSED = [row for row in DIFFERENTIABLE if row[1] != "eager"]

#: All of them, and statistics of rows.
EVERY = [*DIFFERENTIABLE, *(("attention_statistics", name) for name in NAMES)]

#: Named cases for which every run has time.
QUICK = [case for case in (*CASES, *ENTMAX) if "model" not in case.tags]


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


@contextmanager
def at_level(level: str) -> Iterator[None]:
    """The CPU kernels are those of this instruction-set level."""
    kernels = import_module("heads_kernels._cpu")
    before = kernels.level()
    kernels.use_level(level)
    try:
        yield
    finally:
        kernels.use_level(before)


@contextmanager
def on_kind_of_gpu(kind: str) -> Iterator[None]:
    """Triton's tiles are those of this kind of GPU, in its interpreter too."""
    tiles = import_module("heads_kernels.ops.triton.tiles")
    with (
        mock.patch.object(tiles, "TRITON_INTERPRETED", False),
        mock.patch.object(tiles, "_kind_of_target", return_value=kind),
    ):
        yield


def parsed(operator: str, *arguments: Any, **options: Any) -> Call:
    return parse(operator, *arguments, **options)[0]


def case_of(operator: str, *sizes: int, D: int, **options: Any) -> Case:
    """A case of these sizes B, H, T, S; one of the collaborative operator has a content bias."""
    if operator == "collaborative_attention":
        return CollaborativeCase(operator, *sizes, Ds=D, content_bias=True, **options)
    if operator == "entmax_attention":
        return EntmaxCase(operator, *sizes, D=D, **options)
    return GatedCase(operator, *sizes, D=D, **options)


def inputs_of(case: Case, backend: str, dtype: torch.dtype = torch.float32) -> Inputs:
    """The tensors of a case; skips the test where `backend` cannot serve it."""
    inputs = case.make(dtype)
    serve(case.operator, backend, **inputs.arguments())
    return inputs


def with_dlse(inputs: Inputs) -> Inputs:
    """Started from a gradient of `lse` too, which ops return of calls without a gate."""
    return inputs if inputs.operator == "entmax_attention" or "gate" in inputs.tensors else drawn_dlse(inputs)


def drawn_dlse(inputs: Inputs) -> Inputs:
    """Started from a gradient of `lse` too."""
    drawn = torch.Generator("cpu").manual_seed(inputs.seed)
    dlse = torch.randn(inputs.dout.shape[:3], generator=drawn, device="cpu")
    return replace(inputs, dlse=dlse.to(inputs.dout.device, compute_dtype(inputs.dout.dtype)))


def serve(operator: str, backend: str, /, **arguments: Any) -> None:
    """Skip the test, with the reasons, where `backend` cannot serve this call."""
    choice = hk.explain(operator, backend=backend, **with_offsets(arguments))
    if choice.backend is None:
        pytest.skip(str(choice))


def call(operator: str, backend: str, /, **arguments: Any) -> Any:
    """The operator on `backend`; skips the test where it cannot serve the call."""
    serve(operator, backend, **arguments)
    return getattr(hk, operator)(backend=backend, **with_offsets(arguments))


def run(operator: str, backend: str, /, dout: Tensor | None = None, **arguments: Any) -> dict[str, Tensor]:
    """The output "out" and, by name, the gradients of all floating tensors of a call, each a leaf of its own.

    Elements of a row of `dout` differ if it is None. Of an `offset_table` an `OffsetBias` is made.
    """
    leaves = {
        name: value.detach().requires_grad_()
        for name, value in arguments.items()
        if isinstance(value, Tensor) and value.is_floating_point()
    }
    out = call(operator, backend, **arguments | leaves)
    dout = torch.ones_like(out).cumsum(-1) if dout is None else dout
    grads = torch.autograd.grad(out, list(leaves.values()), dout)
    return {"out": out.detach(), **dict(zip(leaves, grads, strict=True))}


def assert_ok(report: Report) -> None:
    """The accuracy rule holds, or the report says where not."""
    assert report.ok, str(report)


def assert_same_bits(backend: str, found: Any, expected: Any) -> None:
    """Tensors, or dicts and sequences of them, that a fused kernel has computed in one order of sums.

    `eager` computes with a BLAS library, which promises no order.
    """
    if backend == "eager":
        assert_alike(found, expected)
    else:
        torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)


def assert_hidden_reaches_nothing(inputs: Inputs, backend: str, bad: float) -> None:
    """What a mask or bias hides reaches nothing where it is `bad`, and has a gradient of 0."""
    poisoned, places = hide(inputs, bad)
    want, got = inputs.backward(backend), poisoned.backward(backend)
    assert_same_bits(backend, got, want)
    for name, place in places.items():
        assert not got[1][name][place].any(), f"d{name} of what is hidden"


def tensors(
    operator: str,
    *,
    B: int = B,
    H: int = H,
    Hk: int = 2,
    Hv: int | None = None,
    T: int = T,
    S: int = S,
    D: int = D,
    Dv: int = Dv,
    dtype: torch.dtype = torch.float64,
    grad: bool = False,
) -> dict[str, Tensor]:
    """Random tensor arguments of `operator` by name, without a gate; `Hv` is H by default."""
    if operator in ("gated_attention", "entmax_attention"):
        shapes = {"query": (B, H, T, D), "key": (B, Hk, S, D), "value": (B, Hk, S, Dv)}
    elif operator == "collaborative_attention":
        shapes = {
            "query": (B, T, D),
            "key": (B, S, D),
            "value": (B, H if Hv is None else Hv, S, Dv),
            "mixing": (H, D),
            "content_bias": (B, H, S),
        }
    else:
        shapes = {"query": (B, H, T, D), "key": (B, Hk, S, D)}
    return {name: torch.randn(s, dtype=dtype).requires_grad_(grad) for name, s in shapes.items()}


def function(operator: str, backend: str, names: list[str], **options: Any) -> Callable[..., Tensor]:
    """The operator as a function of the tensors `names`, in their order."""

    def run(*values: Tensor) -> Tensor:
        arguments = with_offsets(dict(zip(names, values, strict=True)))
        out: Tensor = getattr(hk, operator)(**arguments, backend=backend, **options)
        return out

    return run


def with_offsets(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a call: of an `offset_table` an `OffsetBias` is made."""
    given: dict[str, Any] = dict(arguments)
    if "offset_table" in given:
        given["bias"] = hk.OffsetBias(given.pop("offset_table"))
    return given


def counted(run: Callable[[], object]) -> int:
    """The FLOPs that PyTorch counts."""
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def fixed_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functional, "draw_seed", lambda device: torch.tensor([2**40 + 1, 1, 2, 3, 4]))
