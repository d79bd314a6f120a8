"""What the GPU backends say that they cannot serve; refusals of the other backends are in test_bad_input."""

import contextlib
import runpy
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any, get_args
from unittest import mock

import pytest
import torch
from torch._subclasses import FakeTensorMode

import heads_kernels as hk
from benchmarks import tune
from heads_kernels import backends
from heads_kernels.call import Call
from heads_kernels.ops import buffers
from tests.ops.calls import DIFFERENTIABLE, assert_same_bits, call, parsed, tensors

Unsupported = Callable[[Call], list[str]]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both backends are there, and not simulated."""
    for name in ("TRITON_INTERPRETED", "CUDA_EMULATED"):
        monkeypatch.setattr(backends, name, False)
    for name in ("_TRITON_MISSING", "_CUDA_MISSING"):
        monkeypatch.setattr(backends, name, "")
    monkeypatch.setattr(backends, "_CAPABLE", set())


@pytest.fixture
def simulated(installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """They serve CPU tensors."""
    for name in ("TRITON_INTERPRETED", "CUDA_EMULATED"):
        monkeypatch.setattr(backends, name, True)


def serving(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """From here on the named backends serve every call, and the others none."""
    for row in backends.BACKENDS:
        refusal = [] if row.name in names else ["a test refuses it"]
        # Rows are frozen.
        monkeypatch.setitem(vars(row), "unsupported", lambda _, words=refusal: words)


BACKENDS = {"triton": backends.triton, "cuda": backends.cuda}


def gated(**changes: Any) -> Call:
    given = {**tensors("gated_attention", dtype=torch.float32), **changes}
    return parsed("gated_attention", **given)


def wide(D: int, Dv: int) -> Call:
    return gated(**tensors("gated_attention", D=D, Dv=Dv, dtype=torch.bfloat16))


REFUSED = {
    "float64": (lambda: gated(**tensors("gated_attention")), "tensors are float64"),
    "stride": (lambda: gated(value=torch.randn(2, 2, 7, 12)[..., ::2]), "value has stride 2"),
    "wide query": (lambda: wide(257, 8), "query and key are 257 wide; it serves widths up to 256"),
    "wide value": (lambda: wide(8, 300), "value is 300 wide; it serves widths up to 256"),
    "wide shared query": (
        lambda: parsed("collaborative_attention", **tensors("collaborative_attention", D=1025)),
        "query and key are 1025 wide; it serves widths up to 1024",
    ),
    "another device": (
        lambda: gated(**{name: t.to("meta") for name, t in tensors("gated_attention").items()}),
        "tensors are on meta; ",
    ),
    "more programs than a grid has": (
        lambda: gate_free(2**16, 2**14, 17),
        "B = 65536, H = 16384, T = 17 and S = 1 may need 3221225472 programs",
    ),
}


def gate_free(B: int, H: int, T: int) -> Call:
    """By stride 0."""
    one = torch.zeros(1, 1, 1, 8)
    return parsed("gated_attention", one.expand(B, H, T, 8), *(one.expand(B, H, 1, 8),) * 2)


@pytest.mark.usefixtures("simulated")
def test_rows_that_32_bits_do_not_reach() -> None:
    far = torch.empty_strided((1, 2, 3, 8), (8, 8, 2**23, 1), device="meta")
    problem = parsed("gated_attention", far, far[:, :, :, :], far)
    assert sum("8388608 elements apart" in reason for reason in backends.triton(problem)) == 3
    many = torch.zeros(1, 1, 1, 256).expand(1, 2**15, 1, 256)  # of the output: 2**15 heads of 256
    (reason,) = backends.triton(parsed("gated_attention", many, many, many))
    assert reason.startswith("rows of the output are 8388608 elements apart")
    assert buffers.contiguous_rows(far).stride() == (48, 24, 8, 1)
    assert buffers.contiguous_rows(many) is many
    largest = max(tune._BLOCKS)
    assert (largest - 1) * (buffers.FARTHEST_ROW - 1) + backends._WIDEST_SHARED <= 2**31


@pytest.mark.parametrize(("operator", "backend"), DIFFERENTIABLE)
def test_rows_of_dout_may_be_anywhere(operator: str, backend: str) -> None:
    """It is not there yet when a backend is chosen, so none is refused for it."""
    given = tensors(operator, T=2, dtype=torch.float32, grad=True)
    out = call(operator, backend, **given)
    dout = torch.randn(out.shape)
    far = torch.zeros(buffers.FARTHEST_ROW + 100).as_strided(out.shape, (48, 6, buffers.FARTHEST_ROW, 1))
    far.copy_(dout)
    found, expected = (torch.autograd.grad(out, list(given.values()), d, retain_graph=True) for d in (far, dout))
    assert_same_bits(backend, found, expected)


def on_gpu(index: int, dtype: torch.dtype = torch.float32) -> Call:
    """A call of tensors that are there by name only."""
    with FakeTensorMode():
        return gated(**{name: t.to(f"cuda:{index}", dtype) for name, t in tensors("gated_attention").items()})


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("unsupported", BACKENDS.values(), ids=BACKENDS)
def test_refusals(unsupported: Unsupported, case: str) -> None:
    make, reason = REFUSED[case]
    assert any(found.startswith(reason) for found in unsupported(make()))


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize("unsupported", BACKENDS.values(), ids=BACKENDS)
def test_what_is_served(unsupported: Unsupported) -> None:
    assert unsupported(wide(256, 256)) == []
    shared = tensors("collaborative_attention", D=1024, Dv=256, dtype=torch.float16)
    assert unsupported(parsed("collaborative_attention", **shared)) == []
    query, key = torch.randn(2, 1, 2, 5, 256)
    assert unsupported(parsed("attention_statistics", query, key)) == []
    assert unsupported(gate_free(2**16, 2**14, 8)) == []
    assert unsupported(gated(attn_mask=hk.Mask(window=(3, 0), key_lengths=[2, 7]))) == []
    terms = {"bias": torch.zeros(4, 5, 7), "softcap": 2.0, "sinks": torch.zeros(4)}
    assert unsupported(gated(attn_mask=torch.rand(5, 7) < 0.5, **terms)) == []


@pytest.mark.usefixtures("installed")
def test_cpu_tensors_need_the_interpreter() -> None:
    (reason,) = backends.triton(gated())
    assert "TRITON_INTERPRET=1" in reason
    assert backends.cuda(gated()) == ["tensors are on cpu; it serves CUDA tensors"]


@pytest.mark.usefixtures("installed")
def test_a_gpu_that_cuda_can_not_run_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The extension is asked, and no more once it has said that it can."""
    extension = mock.Mock()
    extension.unsupported_device.side_effect = lambda index: "" if index else "GPU 0 is too old"
    monkeypatch.setitem(sys.modules, "heads_kernels._cuda", extension)
    for _ in range(2):
        assert backends.cuda(on_gpu(0)) == ["GPU 0 is too old"]
        assert backends.cuda(on_gpu(1)) == []
    assert extension.unsupported_device.mock_calls == [mock.call(0), mock.call(1), mock.call(0)]


@pytest.fixture
def two_gpus(installed: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[mock.Mock]:
    """A T4 and an A100, which PyTorch uses and on which Triton is installed; its driver."""
    parts = [(7, 5), (8, 0)]
    for name, found in (("is_initialized", True), ("device_count", 2), ("device", contextlib.nullcontext())):
        monkeypatch.setattr(backends.torch.cuda, name, mock.Mock(return_value=found))
    monkeypatch.setattr(backends.torch.cuda, "get_device_capability", parts.__getitem__)
    driver = mock.Mock()
    monkeypatch.setitem(sys.modules, "triton.runtime", types.SimpleNamespace(driver=driver))
    backends._triton_start_error.cache_clear()
    yield driver
    backends._triton_start_error.cache_clear()


@pytest.mark.usefixtures("two_gpus")
def test_a_gpu_without_tensor_cores_for_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    assert backends.triton(on_gpu(0)) == ["GPU 0 has compute capability 7.5; it serves 8.0 and newer"]
    assert backends.triton(on_gpu(1)) == []
    monkeypatch.setattr(backends.torch.version, "hip", "7.0")
    assert backends.triton(on_gpu(0)) == []


def test_triton_without_a_compiler(two_gpus: mock.Mock) -> None:
    """It is asked once a process, and the reason is in words."""
    start = mock.PropertyMock(side_effect=RuntimeError("Failed to find C compiler"))
    type(two_gpus).active = start
    for _ in range(2):
        (reason,) = backends.triton(on_gpu(1))
    assert reason.startswith("Triton does not start: Failed to find C compiler; it needs a C ")
    assert start.call_count == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_float32_prefers_tensor_cores(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the variable names another order."""
    serving(monkeypatch, "triton", "cuda", "eager")
    problem = on_gpu(0, dtype)
    choice = backends.choose(problem)
    first, second = ("cuda", "triton") if dtype == torch.float32 else ("triton", "cuda")
    assert choice.backend == backends.select(problem) == first
    assert choice.refusals[second] == [f"could serve it too, but {first!r} comes first"]
    assert backends.select(problem, second) == second
    monkeypatch.setattr(backends, "_NAMED", backends._read("triton,cuda"))
    assert backends.select(problem) == "triton"


def test_the_order_of_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    serving(monkeypatch, "cuda", "triton", "eager")
    monkeypatch.setattr(backends, "_NAMED", backends._read("cpu, cuda,cuda,eager"))
    problem = gated()
    choice = backends.choose(problem)
    assert choice.backend == backends.select(problem) == "cuda"
    assert choice.refusals == {
        "cpu": ["a test refuses it"],
        "eager": ["could serve it too, but 'cuda' comes first"],
        "triton": ["HEADS_KERNELS_BACKENDS leaves it out"],
    }
    assert backends.select(problem, "triton") == "triton"
    monkeypatch.setattr(backends, "_NAMED", backends._read("cpu"))
    with pytest.raises(ValueError, match="HEADS_KERNELS_BACKENDS leaves it out"):
        backends.select(problem)


@pytest.mark.parametrize("value", ["cuda,tritn", "cuda,", " ", "cuda triton"])
def test_names_that_are_not_those_of_backends(value: str) -> None:
    words = f"{backends.VARIABLE} is {value!r}; name some of cpu, triton, cuda, eager"
    with pytest.raises(ValueError, match=words):
        backends._read(value)


def test_the_variable_is_read_at_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(backends.VARIABLE, "eager,cuda")
    named = runpy.run_path(backends.__file__)["_NAMED"]
    assert [row.name for row in named] == ["eager", "cuda"]


def test_compiled_calls_take_the_order_as_a_constant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_NAMED", backends._read("eager,cuda"))

    def run(x: torch.Tensor) -> torch.Tensor:
        operands = x, 2 * x, x - 1
        out = hk.gated_attention(*operands) + hk.gated_attention(*operands, backend="cpu")
        return out.sum() + hk.attention_statistics(x, 2 * x)[0].sum()

    x = torch.randn(1, 2, 3, 4, requires_grad=True)
    assert hk.explain("gated_attention", x, x, x).backend == "eager"
    torch.compile(run, fullgraph=True, backend="aot_eager")(x).backward()
    assert x.grad is not None


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("ask", ["_unsupported_by_cuda", "_unsupported_by_triton"])
def test_a_choice_traces(ask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    extension = types.SimpleNamespace(unsupported_device=lambda index: f"GPU {index} is too old")
    monkeypatch.setitem(sys.modules, "heads_kernels._cuda", extension)
    expected = len(getattr(backends, ask)(0))

    @torch.compile(fullgraph=True, backend="eager")
    def refused(query: torch.Tensor) -> torch.Tensor:
        return query + len(getattr(backends, ask)(0))

    assert refused(torch.zeros(1)).item() == expected > 0


@pytest.mark.usefixtures("installed")
def test_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the build wrote down is the reason."""
    monkeypatch.setattr(backends, "find_spec", lambda name: None)
    missing = {"cuda": {"missing": "there was no nvcc"}}
    monkeypatch.setattr(backends, "build_info", lambda: missing)
    assert backends._cuda_missing() == ("the extension heads_kernels._cuda was not built: there was no nvcc")
    monkeypatch.setattr(backends, "_CUDA_MISSING", backends._cuda_missing())
    assert backends.cuda(on_gpu(0)) == [backends._cuda_missing()]


@pytest.mark.parametrize(
    ("version", "words"),
    [("", "Triton is not installed"), ("3.5.1", "Triton is 3.5.1"), ("3.6.0", ""), ("3.10.0+git1", "")],
)
def test_no_triton_or_an_old_one(monkeypatch: pytest.MonkeyPatch, version: str, words: str) -> None:
    monkeypatch.setattr(backends, "find_spec", lambda name: version or None)
    monkeypatch.setattr(backends.metadata, "version", lambda name: version)
    said = backends._triton_missing()
    assert said.startswith(words)
    assert bool(said) == bool(words)
    monkeypatch.setattr(backends, "_TRITON_MISSING", said)
    assert not said or backends.triton(gated())[0] == said


def test_a_call_that_falls_to_the_formula_warns_once() -> None:
    """Where a fused backend exists but can't serve the call; silent where eager is asked for by name."""
    backends._warn_of_eager.cache_clear()
    key = torch.ones(1, 2, 3, 8)[..., ::2]  # rows that are not contiguous
    with pytest.warns(UserWarning, match=r"runs on 'eager'\n(.*\n)*  not 'cpu': .*key has stride 2") as found:
        hk.gated_attention(torch.ones(1, 2, 3, 4), key, key)
    assert found[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hk.gated_attention(torch.ones(1, 2, 3, 4), key, key)
        hk.gated_attention(torch.ones(1, 2, 2, 4), key, key, backend="eager")
        hk.gated_attention(torch.ones(1, 2, 3, 4).double(), key.double()[..., :], key.double())


def test_a_cpu_without_kernels_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the operators and dtypes of later calls are. `explain` has the same reason."""
    monkeypatch.setattr(backends, "find_spec", lambda name: None)
    monkeypatch.setattr(backends, "build_info", lambda: {"cpu": {"missing": "it was left out"}})
    missing = backends._cpu_missing()
    monkeypatch.setattr(backends, "CPU_MISSING", missing)
    backends._warn_of_eager.cache_clear()
    query = torch.ones(1, 2, 3, 4)
    with pytest.warns(UserWarning, match=r"on this CPU: .*_cpu was not built: it was left out \(with g\+\+: pip"):
        hk.gated_attention(query, query, query)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hk.entmax_attention(query.double(), query.double(), query.double())
    choice = hk.explain(hk.gated_attention, query, query, query)
    assert (choice.backend, choice.refusals["cpu"]) == ("eager", [missing])
    monkeypatch.setattr(backends.sys, "platform", "darwin")
    assert backends._cpu_missing().endswith("(it compiles on Linux only)")


def test_backend_names_are_those_of_the_table() -> None:
    assert {row.name for row in backends.BACKENDS} == {*get_args(backends.BackendName)}
