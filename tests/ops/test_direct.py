"""Calls that go straight to the extension: which do, that they give what the op gives, and that nothing is skipped that
acts on ops."""

import contextlib
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import BaseTorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

import heads_kernels as hk
from heads_kernels import backends
from heads_kernels.ops import direct
from tests.conftest import on_a_gpu
from tests.ops.calls import OPERATORS, B, D, Dv, H, S, T, tensors
from tests.support.dispatched import Ops

pytestmark = pytest.mark.skipif(backends.CPU_MISSING != "", reason=backends.CPU_MISSING)

NAME = "heads_kernels::attention"
ON_GPUS = ("triton", "cuda")
BACKENDS = ("cpu", *ON_GPUS)


@pytest.fixture
def ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """For every pass the way that it took, "direct" or "op"; calls of a test with a `backend` run on it."""
    taken: list[str] = []

    def watch(name: str, ways_of: Callable[[Any], list[str]]) -> None:
        function = getattr(direct, name)

        def watched(*arguments: Any) -> Any:
            found = function(*arguments)
            taken.extend(ways_of(found))
            return found

        monkeypatch.setattr(direct, name, watched)

    for name in ("attend", "backward"):  # of the CPU
        watch(name, lambda found: [] if found is None else ["direct"])
    watch("runs_without_op", lambda found: ["direct" if found else "op"])
    if on_a_gpu(request.config):  # the default device of tests is a mode, of this thread
        modes = direct._len_torch_function_stack
        monkeypatch.setattr(direct, "_len_torch_function_stack", lambda: max(modes() - 1, 0))
    if "backend" in request.fixturenames:
        monkeypatch.setattr(backends, "_NAMED", backends._read(request.getfixturevalue("backend")))
    return taken


def assert_same_as_op(run: Callable[[], list[Tensor]]) -> list[str]:
    """What `run` gives has the bits and the memory order of the same calls as ops, whose names are returned."""
    results = run()
    with Ops() as seen:
        expected = run()
    torch.testing.assert_close(results, expected, rtol=0.0, atol=0.0, check_stride=True)
    return seen.names


# ---------------------------------------------------------------------- which calls
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "gate": {"gate": torch.tensor([0.0, 2.0, -1.0, 0.5])[:H]},
    "logits": {"gate": torch.randn(B, H, T), "gate_activation": "sigmoid"},
    "elements": {"gate": torch.randn(B, H, T, Dv).to(torch.float16)},
    "key mask": {"attn_mask": hk.Mask(key_mask=torch.rand(B, S) < 0.6)},
    "band": {"attn_mask": hk.Mask(causal="lower_right", window=(3, -1))},
    "both": {"attn_mask": hk.Mask(key_lengths=[2] * B), "is_causal": True},
    "bool mask": {"attn_mask": torch.rand(B, 1, 1, S) < 0.6},
    "dense mask": {"attn_mask": torch.rand(T, S) < 0.6},
    "float mask": {"attn_mask": torch.randn(T, S)},
    "bias": {"bias": torch.randn(B, 1, T, S).to(torch.float16)},
    "offsets": {"bias": hk.OffsetBias(torch.randn(H, 3, requires_grad=True)), "is_causal": True},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": torch.randn(H)},
    "backend": {"backend": "cpu"},
}


DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
ROWS = [
    *product((*OPERATORS, "entmax_attention"), CALLS, DTYPES, ("cpu",)),
    *(("gated_attention", "gate", torch.float32, name) for name in ON_GPUS),
]


@pytest.mark.parametrize(
    ("operator", "name", "dtype", "backend"), [row for row in ROWS if row[:2] != ("entmax_attention", "sinks")]
)
def test_same_bits_as_the_op(operator: str, name: str, dtype: torch.dtype, backend: str, ways: list[str]) -> None:
    """Of the output, and of the gradients of all tensors."""
    given = {
        each: value.detach().requires_grad_()
        for each, value in {**tensors(operator, dtype=dtype), **CALLS[name]}.items()
        if isinstance(value, Tensor) and value.is_floating_point()
    }
    options = {each: value for each, value in CALLS[name].items() if each not in given}

    def run() -> list[Tensor]:
        out = getattr(hk, operator)(**given, **options)
        grads = torch.autograd.grad(out, list(given.values()), torch.ones_like(out))
        with torch.no_grad():
            return [out, *grads, getattr(hk, operator)(**given, **options)]

    names = assert_same_as_op(run)
    assert ways == ["direct"] * 3 + ["op"] * 3
    assert names.count(NAME) == 2
    assert names.count(f"{NAME}_backward") == 1


#: Query, key and value.
VIEWS: dict[str, Callable[[], Tensor]] = {
    "tokens first": lambda: torch.randn(B, T, 3, H, D).permute(2, 0, 3, 1, 4),
    "overlapping rows": lambda: torch.randn(999).as_strided((3, B, H, T, D), (99, 20, 9, 1, 1)),
    "width 1": lambda: torch.randn(3, B, T, H, 1).transpose(2, 3),
    "one batch for all": lambda: torch.randn(3, 1, H, T, D).expand(3, B, H, T, D),
    "no batch": lambda: torch.randn(3, H, T, D),
}


@pytest.mark.parametrize("view", VIEWS)
def test_memory_order_is_that_of_the_op(view: str, ways: list[str]) -> None:
    operands = [each.requires_grad_() for each in VIEWS[view]().unbind()]

    def run() -> list[Tensor]:
        out = hk.gated_attention(*operands)
        return [out, *torch.autograd.grad(out.sum(), operands)]

    assert_same_as_op(run)
    assert ways[0] == "direct"


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_parameters_without_gradients(mode: Callable[[], Any], ways: list[str]) -> None:
    arguments = tensors("gated_attention", dtype=torch.float32)
    gate = torch.nn.Parameter(torch.ones(H))
    with mode():
        out = hk.gated_attention(**arguments, gate=gate)
    assert ways == ["direct"]
    assert out.is_inference() == (mode is torch.inference_mode)
    assert hk.gated_attention(**arguments, gate=gate).requires_grad
    assert ways == ["direct", "direct"]


@pytest.mark.parametrize("other", [{"dropout_p": 0.5}, {"backend": "eager"}], ids=str)
def test_other_calls_are_ops(other: dict[str, Any], ways: list[str]) -> None:
    hk.gated_attention(**tensors("gated_attention", dtype=torch.float32), **other)
    assert "direct" not in ways


def test_backward_passes_see_the_modes_that_are_active_then() -> None:
    query, key, value = operands()
    out = attend(query.requires_grad_(), key, value)
    with Ops() as seen:
        out.sum().backward()
    assert f"{NAME}_backward" in seen.names
    assert query.grad is not None


@pytest.mark.parametrize("backend", BACKENDS)
def test_signs_that_are_not_in_memory_are_read(backend: str, ways: list[str]) -> None:
    query, key, value = given = operands()
    query.requires_grad_()
    dout = torch.randn(B, H, T, Dv)
    out = attend(query, key, value)
    for index, each in enumerate(given):
        negated = torch._neg_view(-each.detach())
        assert torch.equal(attend(*given[:index], negated, *given[index + 1 :]), out)
    assert ways == ["direct", "op", "op", "op"]
    (expected,) = torch.autograd.grad(out, query, dout)
    (grad,) = torch.autograd.grad(attend(query, key, value), query, torch._neg_view(-dout))
    assert torch.equal(grad, expected)


def test_saved_tensors_go_through_hooks() -> None:
    """As in activation offloading: nothing of a call stays in memory beside what is packed."""
    query, key, value = operands()
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> int:
        packed.append(tensor.clone())
        return len(packed) - 1

    query.requires_grad_()
    (expected,) = torch.autograd.grad(attend(query, key, value).sum(), query)
    with torch.autograd.graph.saved_tensors_hooks(pack, packed.__getitem__):
        out = attend(query, key, value)
    with torch.no_grad():
        key.fill_(torch.nan)
    assert torch.equal(torch.autograd.grad(out.sum(), query)[0], expected)


def test_a_tensor_without_memory_is_refused_as_by_the_op() -> None:
    zero, key = torch._efficientzerotensor((B, H, T, D)), torch.randn(B, H, T, D)
    with pytest.raises(ValueError, match="query"):
        hk.gated_attention(zero, key, key)


@pytest.mark.parametrize(("value", "way"), [("cuda,triton,cpu", "direct"), ("eager,cpu", "op"), ("eager", "op")])
def test_the_order_of_backends(value: str, way: str, ways: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Backends of GPUs before `cpu` take nothing from it."""
    if backends.SIMULATED:
        pytest.skip("a backend of GPUs serves CPU tensors in this process")
    monkeypatch.setattr(backends, "_NAMED", backends._read(value))
    arguments = tensors("gated_attention", dtype=torch.float64)
    hk.gated_attention(**arguments)
    hk.gated_attention(**arguments, backend="cpu")
    assert ways == [way, "direct"]


# ---------------------------------------------------------------------- what acts on ops
def attend(*operands: Tensor) -> Tensor:
    return hk.gated_attention(*operands)


def operands() -> tuple[Tensor, ...]:
    return tuple(tensors("gated_attention", dtype=torch.float32).values())


class Wrapped(Tensor):
    """A subclass, which sees what is called with it."""


class Module(torch.nn.Module):
    def forward(self, *operands: Tensor) -> Tensor:
        return attend(*operands)


def within(mode: Any) -> Any:
    with mode:
        return attend(*operands())


def of_fake_tensors() -> Any:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        attend(*operands())
        return attend(*map(mode.from_tensor, operands()))


def by_vmap() -> Any:
    """One element is not read for all."""
    query, key, value = operands()
    return torch.vmap(lambda q: attend(q, key, value))(torch.stack([query, 2 * query]))


def of_functional_tensors() -> Any:
    functional = torch._to_functional_tensor(operands()[0])
    return attend(functional, functional, functional)


#: What sees or replaces ops, or runs none. Some have no rule for the op: they raise then, and compute nothing wrong.
ACTING: dict[str, Callable[[], Any]] = {
    "a dispatch mode": lambda: within(Ops()),
    "a function mode": lambda: within(BaseTorchFunctionMode()),
    "a subclass": lambda: attend(*(x.as_subclass(Wrapped) for x in operands())),
    "the FLOP counter": lambda: within(FlopCounterMode(display=False)),
    "the profiler": lambda: within(torch.profiler.profile()),
    "fake tensors": of_fake_tensors,
    "make_fx": lambda: make_fx(attend)(*operands()),
    "export": lambda: torch.export.export(Module(), operands(), strict=False),
    "compile": lambda: torch.compile(attend, backend="eager", fullgraph=True)(*operands()),
    "jit.trace": lambda: torch.jit.trace(attend, operands(), check_trace=False),
    "vmap": by_vmap,
    "functionalize": lambda: torch.func.functionalize(attend)(*operands()),
    "functional tensors": of_functional_tensors,
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("acting", ACTING)
def test_what_acts_on_ops_sees_the_op(acting: str, backend: str, ways: list[str]) -> None:
    attend(*operands())
    with contextlib.suppress(RuntimeError, SystemError, ValueError):
        ACTING[acting]()
    assert ways.pop(0) == "direct"
    assert "direct" not in ways
