"""What every test starts from: device, threads, level, seeds, order, hypothesis; what `make test` leaves out.

`pytest tests/ops --device cuda -n 4` runs the operators' tests on a GPU: those with a `backend` that serves CUDA
tensors, and those with the mark `gpu`. Tests make tensors on PyTorch's default device, which is this one; `Case.make`
draws the same numbers for every device. A worker that crashes, or whose kernel breaks the CUDA context, loses one test:
pytest-xdist starts another one. pytest-timeout ends a worker whose kernel hangs.

Without a GPU these tests run on CPU tensors, where the process was started for it: with TRITON_INTERPRET=1 Triton's
interpreter, corrected, runs the kernels of `triton`, with HEADS_KERNELS_EMULATE_CUDA=1 the emulator those of `cuda`, in
the order HK_SCHEDULE (the module in the folder HK_EMULATED, where that is set). They have the backend's name as a mark.
Of the cases, and of tests that `make test` leaves out, `make check` runs one of seven in the interpreter and one of six
in the emulator, and on other backends one of four of float16's; the rest has the mark `release`. `make test` runs the
mark `tiny`: tiny cases in float32.
"""

import gc
import os
import random
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

from tests.support.examples import module_at

# Both before the package, which reads them once: the order of the table, and the module for the emulator.
os.environ.pop("HEADS_KERNELS_BACKENDS", None)
if folder := os.environ.get("HK_EMULATED"):
    (found,) = Path(folder).glob("_cuda_emulated.*.so")
    module_at(found, "heads_kernels._cuda_emulated")

import hypothesis
import pytest
import torch

from heads_kernels import backends
from heads_kernels.backends import CPU_MISSING, CUDA_EMULATED, TRITON_INTERPRETED
from heads_kernels.testing import Case

if TRITON_INTERPRETED:
    from tests.support import interpreter

    interpreter.correct()

if CUDA_EMULATED:
    from heads_kernels import _cuda_emulated

    assert not backends._CUDA_MISSING, backends._CUDA_MISSING  # or all tests would be skipped
    _cuda_emulated.use_schedule(os.environ.get("HK_SCHEDULE", "round_robin"))

# No deadline: the first example of a shape may compile. 25 examples a property, and 5 in Triton's interpreter, which
# takes 10 ms a tile: heuristic.
EXAMPLES = 5 if TRITON_INTERPRETED else 25
hypothesis.settings.register_profile("local", deadline=None, max_examples=EXAMPLES)
# `pytest tests/ops/test_properties.py -k "any_call_is_accurate and cpu" --hypothesis-profile=long` holds 20,000 calls
# of each dtype to the accuracy rule, in about an hour and a half an operator.
hypothesis.settings.register_profile("long", deadline=None, max_examples=40_000)
hypothesis.settings.register_profile("ci", deadline=None, max_examples=EXAMPLES, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", help="where tests of operators run: cuda, or cpu")
    parser.addoption("--threads", type=int, help="of PyTorch and the CPU kernels")
    parser.addoption("--level", help="instruction-set level of the CPU kernels: avx2, ...")
    parser.addoption("--seed", type=int, default=0, help="other random numbers, in another order of tests")


def pytest_configure(config: pytest.Config) -> None:
    if device := config.getoption("device"):
        if on_a_gpu(config) and not torch.cuda.is_available():
            raise pytest.UsageError("--device: torch.cuda.is_available() is False")
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for deterministic algorithms
        torch.set_default_device(device)
    # Under xdist the workers share the cores: one thread each, or they wait for one another.
    alone = "PYTEST_XDIST_WORKER" not in os.environ
    if threads := config.getoption("threads") or (None if alone else 1):
        torch.set_num_threads(threads)
        os.environ["OMP_NUM_THREADS"] = str(threads)  # of processes that tests start
    if level := config.getoption("level"):
        from heads_kernels import _cpu

        _cpu.use_level(level)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """Thousands of tests and modules that stay: Python's garbage collector does not go through them again and again."""
    gc.disable()
    collected = yield
    gc.freeze()
    gc.enable()
    return collected


@pytest.hookimpl(trylast=True)  # behind the one that sends the report
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Nothing runs on the GPU any more in a process whose CUDA context is broken."""
    if not (report.failed and torch.cuda.is_available() and torch.cuda.is_initialized()):  # a test may replace the last
        return
    try:
        torch.cuda.synchronize()
    except Exception as error:
        if "PYTEST_XDIST_WORKER" in os.environ:
            os._exit(1)
        pytest.exit(f"a kernel broke the CUDA context: {error}", returncode=3)


def pytest_unconfigure() -> None:
    gc.unfreeze()


def pytest_make_parametrize_id(val: object) -> str | None:
    if isinstance(val, Case):
        return f"{val.operator}-{val}"
    return str(val).removeprefix("torch.") if isinstance(val, torch.dtype) else None


@pytest.fixture(autouse=True)
def _seed(request: pytest.FixtureRequest) -> None:
    """Every test draws the same numbers in every run, alone or beside others, until --seed asks for others.

    And nothing is compiled yet: with what other tests compiled, Dynamo takes another way.
    """
    own = zlib.crc32(request.node.nodeid.encode())
    torch.manual_seed(own + request.config.getoption("seed"))
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


@pytest.fixture(scope="session")
def kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Triton kernels that were compiled ahead of time: one folder for all processes of a run."""
    folder = tmp_path_factory.getbasetemp()
    return (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "kernels"


#: Of backends that serve CPU tensors only in processes that were started for it: whether this one was, how, and one of
#: how many cases `make check` runs there, by the hash of their names.
STARTED_FOR = {
    "triton": (TRITON_INTERPRETED, "TRITON_INTERPRET=1", 7),
    "cuda": (CUDA_EMULATED, "HEADS_KERNELS_EMULATE_CUDA=1", 6),
}

#: One of how many cases `make check` runs in float16 on the other backends, by the hash of their names.
FLOAT16 = 4

#: More pairs of a query row and a key than a few hundred tiles have, forward and backward.
LARGE = 1 << 18


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if seed := config.getoption("seed"):
        random.Random(seed).shuffle(items)  # the same in every worker of xdist
    # Single tests of this module take minutes: if one began last, the other processes would wait for it.
    items.sort(key=lambda item: item.path.stem != "test_ahead_of_time")
    on_gpu = on_a_gpu(config)
    if on_gpu:
        config.hook.pytest_deselected(items=[item for item in items if not asks_a_gpu(item)])
        items[:] = [item for item in items if asks_a_gpu(item)]
    no_gpu = pytest.mark.skip(reason="no CUDA device: torch.cuda.is_available() is False")
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(no_gpu)
        backend = parameters(item).get("backend")
        case = parameters(item).get("case")
        if isinstance(case, Case) and case.B * case.H * case.T * case.S > LARGE:
            item.add_marker("slow")
        if any(item.get_closest_marker(mark) for mark in ("slow", "release")) or is_left_out(item):
            item.add_marker("check")
        if backend == "cpu" and CPU_MISSING:
            item.add_marker(pytest.mark.skip(reason=CPU_MISSING))
        if backend in STARTED_FOR:
            simulate(item, str(backend), skip=not on_gpu)
        elif is_like_another(item, torch.float16) and zlib.crc32(str(case).encode()) % FLOAT16:
            item.add_marker("release")


def simulate(item: pytest.Item, backend: str, skip: bool) -> None:
    """Mark a test of a backend of GPUs: what of it runs on CPU tensors, and when."""
    if item.path.parent.name not in ("ops", "tools"):
        raise pytest.UsageError(f"{item.nodeid}: `make check` looks in tests/ops and tests/tools")
    item.add_marker(backend)
    started, how, share = STARTED_FOR[backend]
    case, dtype = (parameters(item).get(name) for name in ("case", "dtype"))
    many = case is not None or item.get_closest_marker("check") is not None
    if dtype == torch.float32 and "tiny" in getattr(case, "tags", ()):
        item.add_marker("tiny")
    elif many and zlib.crc32(item.name.encode()) % share:
        item.add_marker("release")
    if skip and not started:
        reason = f"the {backend} backend serves CPU tensors in processes with {how}"
        item.add_marker(pytest.mark.skip(reason=reason))


def parameters(item: pytest.Item) -> dict[str, object]:
    return getattr(getattr(item, "callspec", None), "params", {})


def on_a_gpu(config: pytest.Config) -> bool:
    return torch.device(config.getoption("device") or "cpu").type != "cpu"


def asks_a_gpu(item: pytest.Item) -> bool:
    """Of an operator on a backend that serves CUDA tensors, or marked so."""
    backend = parameters(item).get("backend")
    return backend in ("eager", *STARTED_FOR) or item.get_closest_marker("gpu") is not None


def is_left_out(item: pytest.Item) -> bool:
    """By `make test`: tests of tools; models that are like another one; float16 and float64, except in tiny cases: they
    take the code paths of bfloat16 and float32."""
    if item.path.parent.name == "tools":
        return parameters(item).get("backend") not in STARTED_FOR
    if is_like_another(item, torch.float16, torch.float64):
        return True
    models = sys.modules.get("tests.support.tiny_models")  # imported by tests of models
    return models is not None and parameters(item).get("name") in models.TINY.keys() - models.FEW


def is_like_another(item: pytest.Item, *dtypes: torch.dtype) -> bool:
    """Of a case that is not tiny, in one of these dtypes."""
    case, dtype = (parameters(item).get(name) for name in ("case", "dtype"))
    return isinstance(case, Case) and dtype in dtypes and "tiny" not in case.tags
