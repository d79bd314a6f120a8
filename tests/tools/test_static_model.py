"""The static model: loops in machine code, cycles of pipes, and today's kernels against the kept numbers."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

import pytest

import heads_kernels as hk
from heads_kernels.backends import TRITON_INTERPRETED

pytest.importorskip("triton", reason="pip install 'heads_kernels[triton]'")
if TRITON_INTERPRETED:
    pytest.skip("kernels are interpreted (TRITON_INTERPRET)", allow_module_level=True)

from benchmarks.static import cuda_resources, model, pipes, sass


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
    assert loop.inner == 1
    assert loop.spills == 0
    kinds = Counter(map(pipes.kind, loop.hot))
    assert kinds == {"control": 6, "alu": 2, "shared": 1, "tensor": 1, "mufu": 1}


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
    return sass.Loop(len(hot), hot, 0)


WAIT = "WARPGROUP.DEPBAR.LE gsb0, "
PRODUCTS = ("HGMMA.64x128x16.F32", "HGMMA.64x64x16.F32")


def test_exponentials_under_a_product() -> None:
    loop = loop_of(
        *PRODUCTS, f"{WAIT}0x1", "MUFU.EX2", "MUFU.EX2", f"{WAIT}0x0", "MUFU.EX2"
    )  # fmt: skip
    assert loop.overlap == (2, 3)
    assert loop_of(*PRODUCTS, f"{WAIT}0x0", "MUFU.EX2", "MUFU.RCP").overlap == (0, 2)
    assert loop_of("MUFU.EX2", f"{WAIT}0x1", "FADD").overlap == (0, 1)


def test_instructions_while_no_product_is_under_way() -> None:
    def alone(*words: str) -> list[str] | None:
        found = loop_of(*words).alone
        return None if found is None else [each.name for each in found]

    first, second = PRODUCTS
    done, one_left = f"{WAIT}0x0", f"{WAIT}0x1"
    # Between both products, and around the loop.
    words = alone("IADD3", first, "LDS", done, "MUFU.EX2", second, done, "FADD")
    assert words == ["IADD3", "MUFU", "FADD"]
    # The second product runs under what follows, also in the next round.
    assert alone("IADD3", first, one_left, "FMUL", done, "MUFU.EX2", second, "FADD") == ["MUFU"]
    assert alone("HMMA.16816.F32.BF16", "MUFU.EX2") is None


def test_products_and_what_runs_alone_are_added() -> None:
    loop = loop_of(
        f"{PRODUCTS[0]}.BF16 R24, R120, gdesc[UR12].tnspB, R24, gsb0",
        f"{WAIT}0x0",
        "MUFU.EX2",
        "MUFU.EX2",
    )
    (row,) = model._rows([loop], 4, "sm_90", backend="triton", kernel="x", work="x", variant=0)
    assert (row.alone, row.serial) == (2, 64 + 16)
    assert max(row.cycles.values()) == 64


def test_geforce_multiplies_at_half_the_rate() -> None:
    line = sass_of("HMMA.16816.F32.BF16 R4, R8, R12, R4").instructions
    taken = [
        pipes.cycles(line, pipes.PARTS[name], 4)["tensor"]
        for name in ("sm_89", "rtx_3090", "rtx_4090")
    ]
    assert taken == [16, 32, 32]


def test_cycles_of_instructions() -> None:
    def cycles(line: str, target: str = "sm_90", warps: int = 4) -> dict[str, int]:
        taken = pipes.cycles(sass_of(line).instructions, pipes.PARTS[target], warps)
        return {pipe: count for pipe, count in taken.items() if count and pipe != "issue"}

    product = "HMMA.16816.F32.BF16 R4, R8, R12, R4"
    assert cycles(product, "sm_80") == {"tensor": 8}
    assert cycles(product) == {"tensor": 7}  # 6.36
    # wgmma: the left operand in shared memory, then in registers.
    shared = "HGMMA.64x64x16.F32.BF16 R88, gdesc[UR12], RZ, !UPT"
    assert cycles(shared) == {"tensor": 32, "shared": 32}
    registers = "HGMMA.64x128x16.F32.BF16 R24, R120, gdesc[UR12].tnspB, R24, gsb0"
    assert cycles(registers) == {"tensor": 64, "shared": 32}
    assert cycles("LDGSTS.E.BYPASS.128.ZFILL [R1], desc[UR4][R2.64], P0") == {"shared": 16}
    assert cycles("MUFU.EX2 R4, R4") == {"mufu": 8}
    assert cycles("FFMA R4, R4, R5, R6", "sm_80") == {"fma": 2}
    assert cycles("LOP3.LUT R4, R4, 0xe0, RZ, 0xc0, !PT") == {"alu": 2}
    assert cycles("UIADD3 UR4, UR5, 0x1, URZ") == {}
    assert pipes.products(sass_of("UTCHMMA gdesc[UR8], gdesc[UR10]").instructions) is None


@pytest.fixture
def row() -> model.Row:
    (loop,) = sass.loops(sass_of(TILES))
    (made,) = model._rows(
        [loop], 4, "sm_90", backend="triton", kernel="gated_attention.forward", work="x", variant=0,
    )  # fmt: skip
    return made


def test_what_is_heavier_for_a_product(row: model.Row) -> None:
    def words(now: model.Row) -> str:
        return "\n".join(model.heavier([now], [asdict(row)]))

    assert row.products == 4 * 16 * 8 * 16
    assert words(row) == ""
    assert "12 instructions, of 11" in words(replace(row, hot=12))
    assert "17 instructions in all ways round it, of 16" in words(replace(row, instructions=17))
    assert "9 cycles (mufu), of 8" in words(replace(row, cycles=row.cycles | {"mufu": 9}))
    assert "1 instructions for spilled registers, of 0" in words(replace(row, spills=1))
    # Twice the tile may take twice as much.
    twice = replace(row, products=2 * row.products, hot=2 * row.hot)
    assert words(twice) == ""
    assert "23 instructions, of 22" in words(replace(twice, hot=23))
    assert words(replace(row, work="not kept", hot=100)) == ""
    assert "2 loops in place of 1" in model.heavier([row, row], [asdict(row)])[0]


# ---------------------------------------------------------------------- the kernels
def hold(
    backend: str, module: Path | None, rows: list[model.Row], targets: tuple[str, ...]
) -> None:
    """Every kept loop still exists and takes no more than it did."""
    kept = model.kept()[backend]
    if (compiler := model.compiler_of(backend, module)["compiler"]) != kept["compiler"]:
        pytest.skip(f"kept numbers are those of {kept['compiler']}, not {compiler}")
    before = [row for row in kept["rows"] if row["target"] in targets]
    assert model.heavier(rows, before) == []
    assert len(rows) == len(before)


@pytest.mark.release
def test_no_triton_loop_is_heavier_than_kept(kernel_cache: Path) -> None:
    targets = model.TARGETS["triton"]
    rows = model.of_triton(targets, model.WORKS, cache=kernel_cache, processes=1)
    hold("triton", None, rows, targets)


@pytest.mark.release
def test_no_cuda_loop_is_heavier_than_kept() -> None:
    module, tool = cuda_resources.module(), cuda_resources.cuobjdump()
    if module is None or tool is None:
        pytest.skip("heads_kernels._cuda is not built, or there is no cuobjdump")
    built = hk.build_info()["cuda"]["architectures"]
    targets = tuple(target for target in model.TARGETS["cuda"] if target in built)
    if not targets:
        pytest.skip(f"the kept parts are not among those that were built: {built}")
    hold("cuda", module, model.of_cuda(module, tool, targets), targets)
