"""What every test starts from: threads, level, seeds, order, hypothesis; what `make test` leaves out; where `gpu` runs.

What a test asks of a GPU backend runs on CPU tensors, where the process was started for it: with
TRITON_INTERPRET=1 Triton's interpreter, corrected, runs the kernels of `triton`, with
HEADS_KERNELS_EMULATE_CUDA=1 the emulator those of `cuda`, in the order HK_SCHEDULE (the module in the
folder HK_EMULATED, where that is set). Such tests bear the backend's name as a mark.
"""

from __future__ import annotations

import gc
import importlib.util
import math
import os
import random
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

os.environ["HEADS_KERNELS_DOCTOR"] = "0"  # before the package: no record of whoever runs the tests

import hypothesis
import pytest
import torch

from heads_kernels.ops.support import CUDA_EMULATED, TRITON_INTERPRETED
from heads_kernels.testing import Case

if TRITON_INTERPRETED:
    from tests.support import interpreter

    interpreter.correct()

if CUDA_EMULATED:
    if folder := os.environ.get("HK_EMULATED"):  # before anything imports the package's own
        name = "heads_kernels._cuda_emulated"
        (found,) = Path(folder).glob("_cuda_emulated.*.so")
        spec = importlib.util.spec_from_file_location(name, found)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    from heads_kernels import _cuda_emulated

    _cuda_emulated.use_schedule(os.environ.get("HK_SCHEDULE", "round_robin"))

# No deadline: the first example of a shape may compile. 25 examples a property: heuristic.
hypothesis.settings.register_profile("local", deadline=None, max_examples=25)
# `pytest tests/ops/test_properties.py -k "any_call_is_accurate and cpu" --hypothesis-profile=long` holds 20,000 calls
# of each dtype to the accuracy rule, in about twenty minutes an operator.
hypothesis.settings.register_profile("long", deadline=None, max_examples=40_000)
hypothesis.settings.register_profile("ci", deadline=None, max_examples=25, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--threads", type=int, help="of PyTorch and the CPU kernels")
    parser.addoption("--level", help="instruction-set level of the CPU kernels: avx2, ...")
    parser.addoption(
        "--seed", type=int, default=0, help="other random numbers, in another order of tests"
    )


def pytest_configure(config: pytest.Config) -> None:
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


def pytest_unconfigure() -> None:
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _seed(request: pytest.FixtureRequest) -> None:
    """Every test draws the same numbers in every run, alone or beside others, until --seed asks for others."""
    own = zlib.crc32(request.node.nodeid.encode())
    torch.manual_seed(own + request.config.getoption("seed"))


@pytest.fixture(scope="session")
def kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Triton kernels that were compiled ahead of time: one folder for all processes of a run."""
    folder = tmp_path_factory.getbasetemp()
    return (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "kernels"


#: Of backends that serve CPU tensors only in processes that were started for it: whether this one was, and how.
STARTED_FOR = {
    "triton": (TRITON_INTERPRETED, "TRITON_INTERPRET=1"),
    "cuda": (CUDA_EMULATED, "HEADS_KERNELS_EMULATE_CUDA=1"),
}

#: Single tests of this module take minutes; if one began last, the other processes would wait for it.
LONGEST = "test_ahead_of_time"
#: Tests that launch too much for both: long sequences, and checks of the op that every backend shares, which
#: run it many times over.
LONG = {
    "test_compile_dynamic",
    "test_decoding_with_grouped_heads",
    "test_long_rows_are_streamed",
    "test_memory_is_linear_in_length",
    "test_opcheck",
    "test_opcheck_statistics",
}
#: Every case or argument once more.
AGAIN = {
    "test_any_gradients_that_are_asked_for",
    "test_any_strides",
    "test_nothing_beside_an_input_is_read",
    "test_the_same_bits_from_dirty_memory",
}
#: For the emulator: `make selftest-cuda` holds every read to the bounds of its memory.
LONG_EMULATED = LONG | {"test_nothing_beside_an_input_is_read"}
#: For Triton's interpreter, which takes about 10 ms a tile, five times what the emulator takes.
LONG_INTERPRETED = LONG | AGAIN | {"test_any_call_is_accurate"}
#: Cases that hide keys as another one does: the interpreter runs them, but hides NaN in the other alone.
HIDES_AS_ANOTHER = {
    "small_causal", "multi_query", "sliced_causal", "causal_more_keys",  # length_65_causal
    "small_bias",  # ragged_bias
    "padded", "padded_causal", "padded_tensor",  # padded_left, transposed_grouped, dropout_everything
    "lower_right", "decode",  # lower_right_blind_rows, offsets_decode
    "window_causal", "packed", "dense_rows",  # window, packed_causal, dense_heads
    "bias_keys", "sinks",  # softcap_bias, sinks_all
}  # fmt: skip


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if seed := config.getoption("seed"):
        random.Random(seed).shuffle(items)  # the same in every worker of xdist
    items.sort(key=lambda item: item.path.stem != LONGEST)
    no_gpu = pytest.mark.skip(reason="no CUDA device: torch.cuda.is_available() is False")
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(no_gpu)
        arguments: dict[str, object] = getattr(getattr(item, "callspec", None), "params", {})
        backend = arguments.get("backend")
        if backend not in STARTED_FOR:
            if is_left_out(item, arguments):
                item.add_marker("check")
            continue
        if item.path.parent.name not in ("ops", "tools"):
            raise pytest.UsageError(
                f"{item.nodeid}: `make check` looks in GPU_TESTS of the Makefile"
            )
        item.add_marker(backend)
        started, how = STARTED_FOR[backend]
        if not started:
            reason = f"the {backend} backend serves CPU tensors in processes with {how}"
            item.add_marker(pytest.mark.skip(reason=reason))
        else:
            long = LONG_INTERPRETED if backend == "triton" else LONG_EMULATED
            name = getattr(item, "originalname", "")
            alike = backend == "triton" and str(arguments.get("case")) in HIDES_AS_ANOTHER
            alike &= name == "test_hidden_values_reach_nothing"
            if name in long or alike or is_long(**arguments):
                item.add_marker("slow")
            if backend == "triton" and is_one_of_many(item, arguments):
                item.add_marker("release")


def is_one_of_many(item: pytest.Item, arguments: dict[str, object]) -> bool:
    """Whether only a release runs it in Triton's interpreter: two of three cases of bfloat16."""
    many = arguments.get("dtype") == torch.bfloat16 and "case" in arguments
    return many and zlib.crc32(item.name.encode()) % 3 != 0


def is_left_out(item: pytest.Item, arguments: dict[str, object]) -> bool:
    """By `make test`: tests of tools; of operators what takes long; families of models that are like another one."""
    if item.path.parent.name == "tools":
        return True
    if getattr(item, "originalname", "") in LONG | AGAIN or is_long(**arguments):
        return True
    models = sys.modules.get("tests.support.tiny_models")  # imported by tests of models
    return models is not None and arguments.get("name") in models.TINY.keys() - models.FEW


def is_long(
    case: object = None, dtype: object = None, bad: float = math.nan, **rest: object
) -> bool:
    """More pairs than a few hundred tiles; the same once more, in float16 or with an infinity for NaN.

    float16 goes the way of bfloat16: its tiny cases are enough.
    """
    if not isinstance(case, Case):
        return math.isinf(bad)
    again = math.isinf(bad) or (dtype == torch.float16 and "tiny" not in case.tags)
    return again or case.B * case.H * case.T * case.S > 1 << 18
