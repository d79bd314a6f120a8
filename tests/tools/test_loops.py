"""Loops in machine code, and those of today's kernels against the kept numbers."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest

import heads_kernels as hk
from heads_kernels.backends import TRITON_INTERPRETED

pytest.importorskip("triton", reason="pip install 'heads_kernels[triton]'")
if TRITON_INTERPRETED:
    pytest.skip("kernels are interpreted (TRITON_INTERPRET)", allow_module_level=True)

from benchmarks.static import cuda_resources, loops, sass


def sass_of(body: str) -> sass.Code:
    """A kernel of these lines: labels end in a colon."""
    lines = [".text.kernel:"]
    for i, line in enumerate(body.split("\n")):
        line = line.strip()
        if line:
            lines.append(line if line.endswith(":") else f"        /*{16 * i:04x}*/  {line} ;")
    return sass.parse("\n".join(lines))["kernel"]


#: A loop over tiles. Unaligned rows are copied without LDGSTS, partial tiles take more arithmetic, and a block that was
#: moved behind EXIT belongs to the loop; the copies are a loop of their own, which begins and ends inside.
TILES = """
    MOV R0, RZ
.L_x_0:
    BSSY B0, `(.L_x_3)
    @P0 BRA `(.L_x_5)
.L_x_1:
    LDGSTS.E.BYPASS.128 [R1], desc[UR4][R2.64]
    ISETP.GE.AND P1, PT, R3, 0x80, PT
    @!P1 BRA `(.L_x_1)
.L_x_2:
    BSYNC B0
.L_x_3:
    HMMA.16816.F32.BF16 R4, R8, R12, R4
    @!P2 BRA `(.L_x_4)
    FSEL R4, R4, -INF , P3
    STL [R1], R4
.L_x_4:
    MUFU.EX2 R4, R4
    ISETP.NE.AND P4, PT, R0, R5, PT
    @P4 BRA `(.L_x_0)
    EXIT
.L_x_5:
    LDG.E.U16 R6, desc[UR4][R2.64]
    STS.U16 [R1], R6
    BRA `(.L_x_2)
.L_x_6:
    BRA `(.L_x_6)
"""


def test_the_hot_path_is_a_full_tile_with_aligned_copies() -> None:
    (loop,) = sass.loops(sass_of(TILES))
    assert [each.name for each in loop.hot] == [
        "BSSY", "BRA", "LDGSTS", "ISETP", "BRA", "BSYNC", "HMMA", "BRA", "MUFU", "ISETP", "BRA",
    ]  # fmt: skip
    assert loop.instructions == 16
    assert loop.spills == 0


#: Specialized warps wait in a loop for the number of their partition, which a table of jumps leads to.
PARTITIONS = """
    @P0 BRA `(.L_x_1)
.L_x_0:
    HGMMA.64x64x16.F32.BF16 R88, gdesc[UR12], RZ
    @P1 BRA `(.L_x_0)
    EXIT
.L_x_1:
    BAR.SYNC 0x1
    BRX R2 -0x10
.L_x_2:
    USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xe8
    @!P0 BRA `(.L_x_2)
.L_x_3:
    HGMMA.64x64x16.F32.BF16 R88, gdesc[UR12], RZ
    STL [R1], R4
    @P1 BRA `(.L_x_3)
    BRA `(.L_x_1)
.L_x_4:
    BRA `(.L_x_4)
"""


def test_loops_of_every_partition() -> None:
    own, other = sass.loops(sass_of(PARTITIONS))
    assert [own.instructions, other.instructions] == [2, 3]
    assert [own.spills, other.spills] == [0, 1]


def loop_of(*words: str) -> sass.Loop:
    lines = [word.partition(" ") for word in words]
    hot = tuple(sass.Instruction(name, rest, False, None) for name, _, rest in lines)
    return sass.Loop(len(hot), hot)


WAIT = "WARPGROUP.DEPBAR.LE gsb0, "
PRODUCTS = ("HGMMA.64x128x16.F32", "HGMMA.64x64x16.F32")


def test_exponentials_under_a_product() -> None:
    loop = loop_of(*PRODUCTS, f"{WAIT}0x1", "MUFU.EX2", "MUFU.EX2", f"{WAIT}0x0", "MUFU.EX2")
    assert loop.overlap == (2, 3)
    assert loop_of(*PRODUCTS, f"{WAIT}0x0", "MUFU.EX2", "MUFU.RCP").overlap == (0, 2)
    assert loop_of("MUFU.EX2", f"{WAIT}0x1", "FADD").overlap == (0, 1)


def test_products_of_instructions() -> None:
    """Of one warp, which has a quarter of a warpgroup's; those of sm_100 do not say."""
    found = [loop_of(name).products for name in ("HMMA.16816.F32.BF16", *PRODUCTS, "UTCHMMA")]
    assert found == [16 * 8 * 16, 64 * 128 * 16 // 4, 64 * 64 * 16 // 4, None]


def test_what_is_heavier_for_a_product() -> None:
    about = {"target": "sm_90", "kernel": "gated_attention.forward", "work": "x", "variant": 0}
    (row,) = loops.rows_of(sass.loops(sass_of(TILES)), backend="triton", **about)

    def words(now: loops.Row) -> str:
        return "\n".join(loops.heavier([now], [asdict(row)]))

    assert row.products == 16 * 8 * 16
    assert words(row) == ""
    assert "12 instructions, of 11" in words(replace(row, hot=12))
    assert "17 instructions in all ways round it, of 16" in words(replace(row, instructions=17))
    assert "1 instructions for spilled registers, of 0" in words(replace(row, spills=1))
    # Twice the tile may take twice as much.
    twice = replace(row, products=2 * row.products, hot=2 * row.hot)
    assert words(twice) == ""
    assert "23 instructions, of 22" in words(replace(twice, hot=23))
    assert words(replace(row, work="not kept", hot=100)) == ""
    assert "2 loops in place of 1" in loops.heavier([row, row], [asdict(row)])[0]


# ---------------------------------------------------------------------- the kernels
def hold(backend: str, module: Path | None, rows: list[loops.Row], targets: tuple[str, ...]) -> None:
    """Every kept loop still exists and takes no more than it did."""
    kept = loops.kept()[backend]
    if (compiler := loops.compiler_of(backend, module)["compiler"]) != kept["compiler"]:
        pytest.skip(f"kept numbers are those of {kept['compiler']}, not {compiler}")
    before = [row for row in kept["rows"] if row["target"] in targets]
    assert loops.heavier(rows, before) == []
    assert len(rows) == len(before)


@pytest.mark.release
def test_no_triton_loop_is_heavier_than_kept(kernel_cache: Path) -> None:
    targets = loops.TARGETS["triton"]
    rows = loops.of_triton(targets, loops.WORKS, cache=kernel_cache, processes=1)
    hold("triton", None, rows, targets)


@pytest.mark.release
def test_no_cuda_loop_is_heavier_than_kept() -> None:
    module, tool = cuda_resources.module(), cuda_resources.cuobjdump()
    if module is None or tool is None:
        pytest.skip("heads_kernels._cuda is not built, or there is no cuobjdump")
    built = hk.build_info()["cuda"]["architectures"]
    targets = tuple(target for target in loops.TARGETS["cuda"] if target in built)
    if not targets:
        pytest.skip(f"the kept parts are not among those that were built: {built}")
    hold("cuda", module, loops.of_cuda(module, tool, targets), targets)
