"""The launch of a kernel, and the compilation of all kernels of a step at the first launch that needs one.

Triton takes 20 us to find the compiled kernel of a launch by its arguments, and 6 us to launch it. So compiled kernels
are cached here too, by everything that Triton may specialize on and more: the values of numbers, not only whether they
are 1 or a multiple of 16. Triton's compilation settings are those of the first launch.

Triton compiles a kernel at its launch, so the kernels of a step would be compiled one after the other, each in one
thread. `compiled_together` compiles them at the same time. More than half of the time of a collaborative kernel goes to
Triton's coalescing passes, which follow all uses of every load through the kernel, again for each copy of a pipelined
loop; Python's part of a kernel takes 0.1 to 0.3 s, LLVM and ptxas the rest. Fewer widths in the loops of
`score_tiles` would compile faster, but heads of two chunks would then multiply four.

Triton 3.6 and 3.7 come with ptxas of CUDA 12.8, which miscompiles products of sm_90 whose operands start at the same
address of shared memory: it adds the offset of an operand to the wrong register. They also come with a newer one, for
sm_100, which kernels are compiled with here.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

import torch
from torch import Tensor
from triton import AsyncCompileMode, knobs
from triton.runtime import driver

from heads_kernels.backends import TRITON_INTERPRETED
from heads_kernels.ops.triton.operands import POINTERS
from heads_kernels.ops.triton.tiles import Tiles

#: Key of a launch -> the compiled kernel, and the values of its constants in the order of its parameters; None where
#: Triton finds the kernel at every launch.
_KEPT: Final[dict[tuple[object, ...], tuple[Any, tuple[object, ...]] | None]] = {}
#: Entries of the cache; calls with other numbers of rows or keys have entries of their own. Heuristic.
_MOST_KEPT: Final = 4096
_PLAIN: Final = frozenset({type(None), int, float, bool})
_POINTERS: Final = frozenset(POINTERS)

#: A named tuple of tensors.
T = TypeVar("T", bound=NamedTuple)

_LOGGER: Final = logging.getLogger("heads_kernels")
#: Seconds of compilation after which a line is logged: most kernels of gated attention take less.
_SILENT: Final = 2.0

#: Held while another ptxas is set than Triton's own: the setting is that of the process.
_COMPILING: Final = threading.RLock()


class _Uncompiled(AsyncCompileMode):  # type: ignore[misc]
    """In this context Triton compiles nothing. A launch that needs it launches nothing either and returns None, and
    `jobs` has, by the hash of the kernel, the function that compiles it and the one that gives the result to Triton."""

    def __init__(self) -> None:
        super().__init__(None)
        self.jobs: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {}

    def submit(self, key: str, compile: Callable[[], Any], keep: Callable[[Any], None], *_: Any) -> None:
        """Called by Triton for a kernel that it has not compiled; 3.9 also passes what undoes a failed compilation."""
        self.jobs[key] = compile, keep


class _Step(threading.local):
    """What this thread runs."""

    #: They launch the kernels of the step that is running, and of those that will follow it; see `compiled_together`.
    launchers: Sequence[Callable[[], None]] = ()
    #: Not None: nothing is launched, kernels that are not compiled are collected here.
    uncompiled: _Uncompiled | None = None


_step: Final = _Step()


def compiled_together(fill: Callable[[T], None], outputs: T, *to_follow: Callable[[], None]) -> None:
    """`fill(outputs)`. If Triton has not compiled a kernel of it, all of its kernels that are not compiled, and all of
    those of `to_follow`, are compiled at the same time first.

    To find them, each function is called once while nothing is launched, `fill` with other outputs like the given ones.
    What kernels write has any content then, so the functions of `to_follow` may write to tensors of their own only.
    """

    def fill_others() -> None:
        fill(outputs._make(map(torch.empty_like, outputs)))

    _step.launchers = fill_others, *to_follow
    try:
        fill(outputs)
    finally:
        _step.launchers = ()


def launch(kernel: Any, programs: int, like: Tensor, tiles: Tiles, *args: Any, **constants: Any) -> None:
    """Run `programs` programs of `kernel` on the device and the current stream of `like`."""
    if programs == 0:
        return
    if like.is_cuda and like.device.index != torch.cuda.current_device():
        with torch.cuda.device(like.device):
            launch(kernel, programs, like, tiles, *args, **constants)
        return
    if (uncompiled := _step.uncompiled) is not None:
        with uncompiled:
            kernel.warmup(*args, grid=(programs,), **constants, **tiles.launch_options)
        return
    options = tiles.num_warps, tiles.num_stages, tiles.maxnreg
    facts: list[object] = [id(kernel), like.device, *options, *constants, *constants.values()]
    _collect_facts(args, facts)
    key = tuple(facts)
    if (kept := _KEPT.get(key)) is not None:
        compiled, values = kept
        compiled[programs, 1, 1](*args, *values)
        return
    start = partial(kernel[(programs,)], *args, **constants, **tiles.launch_options)
    with _sound_ptxas():
        compiled = start() if key in _KEPT else _start_with_others(start, like)
    if len(_KEPT) >= _MOST_KEPT:
        _KEPT.clear()
    _KEPT[key] = None
    # None: interpreted. On AMD, kernels are also specialized on the size of the memory behind a pointer.
    if compiled is not None and not torch.version.hip:
        _KEPT[key] = compiled, tuple(constants[name] for name in kernel.arg_names[len(args) :])


@contextlib.contextmanager
def _sound_ptxas() -> Iterator[None]:
    """In this block Triton runs a ptxas that compiles kernels right. Other threads wait to compile.

    Raises `RuntimeError` on sm_90 if Triton has none; other GPUs have none of the products that are miscompiled.
    """
    tools = knobs.nvidia
    with _COMPILING:  # not while another thread has set it
        sound = TRITON_INTERPRETED or torch.version.hip or is_sound(tools.ptxas.version)
    if sound:
        yield
        return
    # An assignment to the setting would write to the environment too, which other threads may be reading.
    settings = vars(tools)
    with _COMPILING:
        before = dict(settings)
        if (newer := _newer_ptxas()) is not None:
            settings["ptxas"] = newer
        elif driver.active.get_current_target().arch == 90:
            raise RuntimeError(
                f"Triton's ptxas is that of CUDA {tools.ptxas.version}, which miscompiles kernels for this GPU; let "
                "TRITON_PTXAS_PATH name one of CUDA 12.9 or newer, or pass backend='cuda'"
            )
        try:
            yield
        finally:
            settings.pop("ptxas", None)
            settings.update(before)


def _newer_ptxas() -> str | None:
    """The path of the ptxas that Triton has for sm_100, if it compiles kernels right."""
    with contextlib.suppress(RuntimeError):  # Triton was built without it
        tool = knobs.nvidia.ptxas_blackwell
        return str(tool.path) if is_sound(tool.version) else None
    return None


def is_sound(release: str) -> bool:
    """Whether ptxas of this CUDA release compiles all products of sm_90 right."""
    return tuple(map(int, release.split("."))) >= (12, 9)


def _start_with_others(start: Callable[[], Any], like: Tensor) -> Any:
    """`start()`, Triton's own launch; if the kernel is not compiled, the others of the step are compiled with it.

    Not while a CUDA graph is captured: it would record what `_collect` does between launches.
    """
    if not _step.launchers or (like.is_cuda and torch.cuda.is_current_stream_capturing()):
        return start()
    uncompiled = _Uncompiled()
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(RuntimeError):  # in a mode of the user's, Triton compiles
            stack.enter_context(uncompiled)
        compiled = start()
    if not uncompiled.jobs:
        return compiled
    _collect(uncompiled)
    _compile(uncompiled)
    return start()


def _collect(uncompiled: _Uncompiled) -> None:
    """Add the kernels of the step, and of those to follow, that are not compiled."""
    launchers, _step.launchers = _step.launchers, ()
    _step.uncompiled = uncompiled
    try:
        for run in launchers:
            # There may be no memory for the buffers; other errors are raised when it runs.
            with contextlib.suppress(Exception):
                run()
    finally:
        _step.launchers, _step.uncompiled = launchers, None


def _compile(uncompiled: _Uncompiled) -> None:
    """Compile in threads: MLIR, LLVM and ptxas, which take most of the time, run without Python's lock.

    The error of a kernel that does not compile is raised where it is launched.
    """
    with ThreadPoolExecutor(len(uncompiled.jobs)) as pool:
        futures = {pool.submit(_compile_one, compile): keep for compile, keep in uncompiled.jobs.values()}
        if wait(futures, _SILENT).not_done:
            text = "Triton compiles %d kernel(s) for a new kind of call; its cache keeps them"
            _LOGGER.warning(text, len(futures))
        for future, keep in futures.items():
            if future.exception() is None:
                keep(future.result())


def _compile_one(compile: Callable[[], Any]) -> Any:
    """A kernel, and the C function that launches it: Triton 3.6 compiles one for each, and keeps it in its cache."""
    compiled = compile()
    driver.active.launcher_cls(compiled.src, compiled.metadata)
    return compiled


def _collect_facts(values: tuple[Any, ...], facts: list[object]) -> None:
    """Append dtype and alignment of each tensor in nested tuples, the block of a descriptor, and each number."""
    for value in values:
        kind = type(value)
        if kind in _PLAIN:
            facts.append(value)
        elif kind in _POINTERS:
            ptr = value[0]
            facts += ptr.dtype, ptr.data_ptr() & 15, *value[1:]
        elif isinstance(value, tuple):
            _collect_facts(value, facts)
        elif isinstance(value, Tensor):
            facts += value.dtype, value.data_ptr() & 15
        else:  # a descriptor of Triton or Gluon
            facts += value.base.dtype, *value.block_shape
