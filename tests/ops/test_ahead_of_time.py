"""Triton kernels compiled without a GPU: they fit into shared memory, use tensor cores and keep their bounds on spills,
and Triton's launcher passes them every argument.

A part of `python -m benchmarks.static.ahead_of_time`, in processes where kernels are not interpreted. They compile in
this process: other tests keep the other cores busy.
"""

import importlib
import os
import pkgutil
import shlex
import shutil
import subprocess
import sysconfig
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

import heads_kernels.ops
from heads_kernels.backends import TRITON_INTERPRETED
from tests.support.commands import ROOT, python

triton = pytest.importorskip("triton", reason="pip install 'heads_kernels[triton]'")
if TRITON_INTERPRETED:
    pytest.skip("kernels are interpreted (TRITON_INTERPRET)", allow_module_level=True)

from triton.runtime.jit import JITFunction  # noqa: E402 (needs triton)

from benchmarks.static import ahead_of_time  # noqa: E402 (needs triton)
from heads_kernels.ops.triton.backend import HAS_BACKWARD  # noqa: E402 (needs triton)

PINNED = triton.__version__.startswith(ahead_of_time.RELEASE)


def works(*ends: str, features: str = "*") -> list[ahead_of_time.Work]:
    """Those whose name ends so, with these features."""
    return [
        work for work in ahead_of_time.WORKS if work.name.endswith(ends) and fnmatchcase(work.name, f"*: {features}*")
    ]


#: Every operator and pass, with a bias too. Of the two groupings of collaborative attention's value heads the general
#: one: where each head has its own, the same kernels are compiled with a constant in the place of the group.
PASSES = works(", D 64", "grouped heads, Ds 256", features="causal, gate")
PASSES += works("bias, gate of elements, D 64", "bias, softcap, sinks, D 64", ": Ds 256")
PASSES += works(": decoding, D 128", ": decoding, Ds 256")
#: Every feature and grouping too, where registers are scarcest.
FEATURES = works(", D 64", "heads, Ds 256", "elements, Ds 256", "causal, Ds 256")
FEATURES = list(dict.fromkeys([*PASSES, *FEATURES]))
#: A forward and a backward pass of each kernel file.
ONE = works("heads, D 64", "grouped heads, Ds 256", "bias, gate of elements, D 64")
ONE += works(": D 64", features="D")
SMALL_PARTS = works("heads, D 128", "decoding, D 128")
#: CI has every pass for one part, and both vendors; whether another Triton knows the language does not depend on the
#: target.
COMPILED = [("sm_90", PASSES, "bfloat16")]
RELEASED = [("sm_90", works("heads, D 64"), "float32")]
if PINNED:
    COMPILED += [("gfx942", ONE, "bfloat16")]
    RELEASED += [(target, ONE, "bfloat16") for target in ("sm_80", "sm_100")]
    RELEASED += [(target, SMALL_PARTS, "bfloat16") for target in ("sm_89", "sm_120")]
    RELEASED += [("sm_90", more, "bfloat16") for more in (FEATURES, works("heads, D 128", "Ds 768"))]


@pytest.mark.check
@pytest.mark.parametrize(
    ("target", "works", "dtype"), [*COMPILED, *(pytest.param(*each, marks=pytest.mark.release) for each in RELEASED)]
)
def test_kernels_compile_within_their_bounds(
    target: str, works: list[ahead_of_time.Work], dtype: str, kernel_cache: Path
) -> None:
    found = ahead_of_time.compile_all([target], works, [dtype], kernel_cache, processes=1)
    assert {one.kernel.target for one in found} == {target}
    broken = [f"{one}: {words}" for one in found for words in one.broken()]
    assert not broken, "\n".join(broken)


#: One work of each operator in CI; every width and feature before a release.
IN_GLUON = works("gate of heads, D 128")[:1] + works("gate of heads, Ds 256")
OTHERS_IN_GLUON = works(
    "gate of heads, D 64", "gate of heads, D 96", "gate of heads, D 256", "softcap, sinks, D 128",
    "softcap, sinks, D 64", ": plain, D 128", "gate of rows, sinks, D 128", "elements, D 128", "dense mask, D 128",
    "gate of heads, Ds 64", "gate of heads, Ds 512", "Dv 128, Ds 256", "softcap, sinks, Ds 256",
    "gate of rows, sinks, Ds 256", "holes, gate of elements, Ds 256", "dense mask, Ds 256",
)  # fmt: skip


@pytest.mark.check
@pytest.mark.parametrize("works", [IN_GLUON, pytest.param(OTHERS_IN_GLUON, marks=pytest.mark.release)])
def test_softmax_runs_under_products(works: list[ahead_of_time.Work], kernel_cache: Path) -> None:
    """Of specialized warps, in the loops over full and over partial tiles of each consumer.

    Forward, the first spills nothing, the second at most 5 instructions, of addresses beside the cells of a mask; gated
    attention's loops backward spill at most 1. With Triton 3.9 forward loops over full tiles spill 1 and backward loops
    7 of 456 instructions. Loops over chunks have no exponentials, and spill nothing.

    ptxas may put the softmax behind the product that it should run beside: then none of the exponentials would be under
    it. Of 66 for a tile of 128 keys two are those of a row's sums; the backward pass has no such sums, and with a cap
    one of 97 outside. In the backward pass of collaborative attention only parts of the exponentials are under the same
    consumer's products. Its loops over full tiles spill at most 1, over partial ones 15.
    """
    softmax = [work for work in works if not work.name.startswith("entmax")]
    found = ahead_of_time.compile_all(["sm_90"], softmax, ["bfloat16"], kernel_cache, processes=1, with_loops=True)
    multiply = [one for one in found if one.kernel.matrix]
    forward = [one for one in multiply if one.kernel.name == "triton.gluon_forward"]
    backward = [one for one in multiply if one.kernel.name == "triton.gluon_backward"]
    shared = [one for one in multiply if one.kernel.name == "triton.gluon_shared_backward"]
    for one in [*forward, *backward, *shared]:
        assert not one.broken()
        assert not one.kernel.serialized
        assert one.kernel.warps == 8
    assert bool(backward) == HAS_BACKWARD
    newest = triton.__version__.startswith("3.9")
    for one in backward:
        assert len(one.kernel.loops) == 2
        for loop in one.kernel.loops:
            under_way, every = loop.overlap
            assert loop.spills <= (7 if newest else 1)
            assert under_way * 33 >= every * 32
    for one in shared:
        full, partial = one.kernel.loops[::2], one.kernel.loops[1::2]
        assert len(full) == len(partial) == 2
        if not newest:
            assert all(loop.spills <= 1 for loop in full), one
            assert all(loop.spills <= 15 for loop in partial), one
    assert forward
    for one in forward:
        over_tiles = [loop for loop in one.kernel.loops if loop.overlap[1]]
        over_chunks = [loop for loop in one.kernel.loops if not loop.overlap[1]]
        for loop, most in zip(over_tiles, (1 if newest else 0, 5) * 2, strict=True):
            under_way, every = loop.overlap
            assert loop.spills <= most, one
            assert under_way * 66 >= every * 60, one
        # Those of the first tile, of full ones and of partial ones.
        assert len(over_chunks) == (6 if one.work.startswith("collaborative") else 0)
        assert not any(loop.spills for loop in over_chunks)


def test_what_breaks_a_bound_is_told() -> None:
    good = ahead_of_time.Kernel(
        "gated_attention.forward", "sm_90", "", registers=128, shared=1 << 15,
        matrix=(("wgmma.mma_async", 8),), narrow_products=True,
    )  # fmt: skip

    def broken(**changes: object) -> str:
        kernel = ahead_of_time.Kernel(**{**vars(good), **changes})
        compiled = ahead_of_time.Compiled(kernel, "bfloat16", "gated_attention: x")
        return "; ".join(compiled.broken(ahead_of_time.RELEASE))

    assert broken() == ""
    assert "1048576 bytes of shared memory, of 232448" in broken(shared=1 << 20)
    assert "bytes spilled, of" in broken(spilled=1 << 20)
    assert r"no wgmma\.mma_async instruction" in broken(matrix=(("mma.sync", 8),))
    assert broken(matrix=(), narrow_products=False) == ""
    assert "ptxas serializes 8 products" in broken(serialized=8)
    assert broken(error="PassManager::run failed").startswith("does not compile")


# ---------------------------------------------------------------------- launches
STUB = ROOT / "tests" / "support" / "stub_driver.c"

#: Together they launch every kernel, with every kind of operand.
WORKS = works(", D 64", features="causal") + works(", D 64", features="bias")
WORKS += works(", D 64", features="lengths") + works("offsets, causal, Ds 256", "grouped heads, Ds 256")
WORKS += works(": D 64", ": Ds 256") + works(": decoding, D 128", ": decoding, Ds 256")


def kernels() -> set[str]:
    """Those that the package's launchers start: every other function in Triton's language is called by one."""
    found: set[str] = set()
    for module in pkgutil.walk_packages(heads_kernels.ops.__path__, "heads_kernels.ops."):
        if "triton" in module.name:
            for name, value in vars(importlib.import_module(module.name)).items():
                if isinstance(value, JITFunction) and name.endswith("_kernel"):
                    found.add(f"{value.fn.__module__}.{name}")
    if not HAS_BACKWARD:  # without the backward kernel in Gluon, and what it alone needs
        alone = (".gluon_backward.", ".gluon_shared_backward.", ".visible._ranges_kernel")
        found = {name for name in found if not any(each in name for each in alone)}
    return found


@pytest.mark.check
def test_every_argument_arrives(tmp_path: Path, kernel_cache: Path) -> None:
    """At the parameter of a kernel's PTX that it is meant for: what compiling does not see are nested tuples of
    operands, arguments that are None or 1, and the sizes of a launch. The driver (STUB) records launches."""
    cc = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")  # as Triton finds it
    if cc is None:
        pytest.skip("no C compiler: gcc or clang in PATH, or CC")
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        pytest.skip("no Python.h, which Triton builds its part of the driver with")
    library = tmp_path / "libcuda.so.1"
    options = shlex.split("-O1 -fPIC -shared -Wall -Wextra -Wl,-soname,libcuda.so.1")
    subprocess.run([*shlex.split(cc), *options, "-o", str(library), str(STUB)], check=True)
    (tmp_path / "libcuda.so").symlink_to(library)
    # Another test may be compiling the same kernels, from the first work on: each finds what the other has done.
    names = [work.name for work in reversed(dict.fromkeys(WORKS))]
    folders = {"TRITON_LIBCUDA_PATH": str(tmp_path), "TRITON_CACHE_DIR": str(kernel_cache)}
    run = python("-m", "tests.support.launch_path", library, *names, **folders)
    assert set(run.stdout.split()) == kernels()
