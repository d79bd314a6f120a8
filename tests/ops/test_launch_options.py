"""What Triton is asked for when a kernel is launched, beside its arguments, how the kernels of a step are compiled, and
how many programs share its work."""

import inspect
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="pip install 'heads_kernels[triton]'")

from triton import AsyncCompileMode
from triton.runtime import _async_compile

from heads_kernels.backends import TRITON_INTERPRETED
from heads_kernels.ops import buffers
from heads_kernels.ops.triton import launch as launching
from heads_kernels.ops.triton import tiles
from heads_kernels.ops.triton.launch import compiled_together, launch
from heads_kernels.ops.triton.operands import Bias, Rows, Terms
from heads_kernels.ops.triton.tiles import Tiles, tiles_for
from tests.ops.calls import on_kind_of_gpu


def test_compiled_kernel_is_kept_for_arguments_like_its_own() -> None:
    """Whatever Triton may compile for asks it again: dtypes, alignment, None, numbers, constants and options."""
    names = ("rows", "terms", "flags", "size", "factor", "BLOCK", "KIND")
    kernel = mock.MagicMock(arg_names=names)
    search = kernel.__getitem__.return_value  # Triton looks for the compiled kernel
    launched = search.return_value.__getitem__.return_value
    memory = torch.zeros(64, dtype=torch.int32)
    words, bias = memory.view(2, 2, 4, 4), Bias(memory, 1, 0, 0, 8, 4, 1)
    tiles, terms = Tiles(32, 32, num_warps=4, num_stages=1), Terms(bias, None, 0.5, memory, None)
    rows = Rows(words, 32, 16, 4)
    base: dict[str, Any] = {"rows": rows, "terms": terms, "flags": memory, "size": 16, "factor": 0.5,
        "BLOCK": 32, "KIND": "rows", "tiles": tiles}  # fmt: skip
    odd = memory[1:]  # 4 bytes on: not a multiple of 16
    changes: list[dict[str, Any]] = [
        {},
        {"rows": rows._replace(ptr=words.view(torch.float32))},
        {"rows": rows._replace(ptr=odd)},
        {"rows": rows._replace(stride_l=1)},
        {"rows": None},
        {"terms": terms._replace(bias=None)},
        {"terms": terms._replace(bias=bias._replace(ptr=odd))},
        {"terms": terms._replace(bias=bias._replace(stride_s=0))},
        {"terms": terms._replace(far_bias=1)},
        {"terms": terms._replace(softcap=None)},
        {"terms": terms._replace(sinks=None, alpha=memory)},
        {"terms": terms._replace(sinks=odd)},
        {"flags": memory.view(torch.uint8)},
        {"flags": odd},
        {"flags": None},
        {"size": 1},
        {"size": 17},
        {"factor": None},
        {"BLOCK": 64},
        {"KIND": "heads"},
        {"tiles": replace(tiles, num_warps=8)},
        {"tiles": replace(tiles, num_stages=2)},
        {"tiles": replace(tiles, maxnreg=128)},
    ]
    for again in (False, True):
        for change in changes:
            own = base | change
            constants = {name: own[name] for name in ("BLOCK", "KIND")}
            args = [own[name] for name in names if name not in constants]
            launch(kernel, 1, memory, own["tiles"], *args, **constants)
        assert (search.call_count, launched.call_count) == (len(changes), len(changes) * again)
    assert len(launched.call_args.args) == len(names)


@pytest.mark.parametrize("maxnreg", [0, 128])
def test_options_of_the_compiler(maxnreg: int) -> None:
    """AMD's refuses a limit of registers, so there is none where tiles have none. Triton 3.10 fuses multiply-adds only
    where it is asked to; 3.9 warns of it where it is not."""
    kernel = mock.MagicMock(arg_names=())
    launch(kernel, 1, torch.empty(0), Tiles(32, 32, num_warps=4, num_stages=1, maxnreg=maxnreg))
    options = kernel.__getitem__.return_value.call_args.kwargs
    assert options["enable_fp_fusion"] is True
    assert options.get("maxnreg", 0) == maxnreg


#: What Triton submits of a kernel; since 3.9 also what undoes a failed compilation.
_SUBMITTED = len(inspect.signature(_async_compile.AsyncCompileMode.submit).parameters) - 1


class Kernel:
    """A kernel as Triton has it: compiled at its first launch, or by the mode that is active then."""

    arg_names: tuple[str, ...] = ()

    def __init__(self, compile: Callable[[], object] = mock.MagicMock) -> None:
        self.compile = compile
        self.compiled: object = None
        self.launches = 0

    def run(self, *, grid: tuple[int, ...], warmup: bool, **options: Any) -> object:
        if self.compiled is None:
            mode: Any = _async_compile.active_mode.get()
            if mode is not None:
                job = id(self), lambda: mock.MagicMock(made=self.compile()), self.keep, lambda failed: None
                mode.submit(*job[:_SUBMITTED])
                return None
            self.keep(self.compile())
        self.launches += not warmup
        return self.compiled

    def keep(self, compiled: object) -> None:
        self.compiled = compiled

    def warmup(self, *, grid: tuple[int, ...], **options: Any) -> object:
        return self.run(grid=grid, warmup=True, **options)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return partial(self.run, grid=grid, warmup=False)


class Outputs(NamedTuple):
    sums: torch.Tensor


NO_OUTPUT = Outputs(torch.empty(0))


@pytest.mark.usefixtures("nothing_kept")
class TestKernelsOfAStep:
    """They are compiled at the same time, at the first launch that needs one."""

    @pytest.fixture
    def nothing_kept(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(launching, "_KEPT", {})
        monkeypatch.setattr(launching, "driver", mock.Mock())

    @staticmethod
    def launch(kernel: Kernel, like: Any = None) -> None:
        tiles = Tiles(32, 32, num_warps=4, num_stages=1)
        launch(kernel, 1, torch.empty(0) if like is None else like, tiles)

    def test_with_those_that_follow(self) -> None:
        together = threading.Barrier(3, timeout=60)  # of which each waits for the others
        kernels = [Kernel(together.wait) for _ in range(3)]
        runs = []

        def step(_: object) -> None:
            for kernel in kernels[:2]:
                self.launch(kernel)
                runs.append([each.launches for each in kernels])

        compiled_together(step, NO_OUTPUT, lambda: self.launch(kernels[2]))
        # Once to collect them, while the first launch waits; then as without that.
        assert runs == [[0, 0, 0], [0, 0, 0], [1, 0, 0], [1, 1, 0]]
        assert all(each.compiled is not None for each in kernels)
        assert launching.driver.active.launcher_cls.call_count == 3

    def test_a_compiled_kernel_is_launched_at_once(self) -> None:
        kernel = Kernel()
        kernel.compiled = object()
        follow = mock.Mock()
        compiled_together(lambda _: self.launch(kernel), NO_OUTPUT, follow)
        assert (kernel.launches, follow.call_count) == (1, 0)

    def test_outputs_stay_as_launched_kernels_have_filled_them(self) -> None:
        compiled, not_compiled = Kernel(), Kernel()
        compiled.compiled = object()

        def step(outputs: Outputs) -> None:
            outputs.sums.zero_()
            launches = compiled.launches
            self.launch(compiled)
            outputs.sums.add_(compiled.launches - launches)  # as the kernel would
            self.launch(not_compiled)

        outputs = Outputs(torch.empty(3))
        compiled_together(step, outputs)
        assert not_compiled.compiled is not None
        assert outputs.sums.tolist() == [1, 1, 1]

    def test_an_error_is_raised_where_the_kernel_is_launched(self) -> None:
        good, bad, not_launched = kernels = Kernel(), Kernel(), Kernel()
        bad.compile = not_launched.compile = mock.Mock(side_effect=ValueError("no register left"))
        launches = [partial(self.launch, each) for each in kernels]
        for _ in range(2):
            with pytest.raises(ValueError, match="no register left"):
                compiled_together(lambda _: [run() for run in launches[:2]], NO_OUTPUT, launches[2])
        assert good.launches == 1

    def test_there_may_be_no_memory_for_what_follows(self) -> None:
        kernel = Kernel()
        follow = mock.Mock(side_effect=torch.OutOfMemoryError)
        compiled_together(lambda _: self.launch(kernel), NO_OUTPUT, follow)
        assert (kernel.launches, follow.call_count) == (1, 1)

    @pytest.mark.parametrize("captured", [False, True])
    def test_a_captured_step_runs_once(self, captured: bool, monkeypatch: Any) -> None:
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captured)
        like = mock.Mock(is_cuda=True, device=torch.device("cuda", 0))
        kernel, step = Kernel(), mock.Mock()
        step.side_effect = lambda _: self.launch(kernel, like)
        compiled_together(step, NO_OUTPUT)
        assert (kernel.launches, step.call_count) == (1, 1 if captured else 2)

    def test_a_mode_of_the_user_compiles_as_it_likes(self) -> None:
        mode = mock.Mock(spec=AsyncCompileMode)
        token = _async_compile.active_mode.set(mode)
        try:
            compiled_together(lambda _: self.launch(Kernel()), NO_OUTPUT)
        finally:
            _async_compile.active_mode.reset(token)
        assert mode.submit.call_count == 1

    @pytest.mark.parametrize("silent", [0.0, 60.0])
    def test_a_line_is_logged_if_it_takes_long(self, silent: float, monkeypatch: Any) -> None:
        monkeypatch.setattr(launching, "_SILENT", silent)
        logged = threading.Event()
        monkeypatch.setattr(launching._LOGGER, "warning", lambda *words: logged.set())
        kernel = Kernel(lambda: silent or logged.wait(60))
        compiled_together(lambda _: self.launch(kernel), NO_OUTPUT)
        assert logged.is_set() == (silent == 0.0)


def test_heads_are_split_into_several_waves(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many programs as multiprocessors leave most of them idle while a second wave of a few runs."""
    monkeypatch.setattr(buffers, "programs_wanted", lambda device: 3 * 132)
    like = torch.empty(0)
    assert buffers.splits_of(32, 150, like) == 3  # 450 programs, not 150
    assert buffers.splits_of(32, 400, like) == 1
    assert buffers.splits_of(2, 10, like) == 2


def test_kinds_of_gpus() -> None:
    kinds = {"sm_80": [(8, 0), (8, 7)], "sm_90": [(9, 0)], "sm_100": [(10, 0), (10, 3)]}
    others = {"other": [(7, 5), (8, 6), (8, 9), (12, 0), None]}
    for kind, capabilities in (kinds | others).items():
        assert {tiles._kind_of(each) for each in capabilities} == {kind}


@pytest.mark.parametrize("kind", ["sm_100", "sm_90", "sm_80", "other"])
@pytest.mark.parametrize("kernel", ["gated_attention.forward", "collaborative_attention.queries"])
def test_short_queries_have_short_tiles(kernel: str, kind: str) -> None:
    short, longer = (torch.empty(1, 1, T, 64, dtype=torch.bfloat16) for T in (16, 17))
    with on_kind_of_gpu(kind):
        assert tiles_for(kernel, short[:, :, :1], 64, 64).block_m == 16
        assert tiles_for(kernel, short, 64, 64).block_m == 16
        assert tiles_for(kernel, longer, 64, 64).block_m > 16


class Tools:
    """Triton's, with a ptxas of that release beside one that is sound."""

    def __init__(self, release: str, newer: str = "12.9") -> None:
        self.bundled = mock.Mock(path="old", version=release)
        self.ptxas_blackwell = mock.Mock(path="new", version=newer)

    @property
    def ptxas(self) -> Any:
        return self.ptxas_blackwell if vars(self).get("ptxas") == "new" else self.bundled


@pytest.mark.skipif(TRITON_INTERPRETED, reason="nothing is compiled")
@pytest.mark.parametrize(("release", "path"), [("12.8", "new"), ("12.9", "old"), ("13.0", "old")])
def test_no_kernel_is_compiled_by_a_ptxas_that_miscompiles(release: str, path: str) -> None:
    """That of Triton 3.6 and 3.7. Another thread that compiles does not find the newer one only to lose it."""
    tools = Tools(release)
    seen = []
    with mock.patch.object(launching, "knobs", mock.Mock(nvidia=tools)):
        with launching._sound_ptxas():
            other = threading.Thread(target=lambda: seen.append(compiling(tools)))
            other.start()
            other.join(0.05)
            seen.append(tools.ptxas.path)
        other.join()
    assert seen == [path, path]
    assert tools.ptxas.path == "old"


@pytest.mark.skipif(TRITON_INTERPRETED, reason="nothing is compiled")
def test_without_a_ptxas_that_is_right_nothing_is_compiled_for_hopper() -> None:
    tools, gpu = Tools("12.8", newer="12.8"), mock.Mock()
    target = gpu.active.get_current_target.return_value
    with mock.patch.multiple(launching, knobs=mock.Mock(nvidia=tools), driver=gpu):
        target.arch = 80
        assert compiling(tools) == "old"
        target.arch = 90
        with pytest.raises(RuntimeError, match="TRITON_PTXAS_PATH"):
            compiling(tools)


def compiling(tools: Tools) -> str:
    with launching._sound_ptxas():
        path: str = tools.ptxas.path
    return path
