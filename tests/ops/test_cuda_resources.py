"""What the built CUDA kernels take of a GPU: every kernel for every part, within its stated bounds."""

from __future__ import annotations

from pathlib import Path

import pytest

import heads_kernels as hk
from benchmarks.static import cuda_resources
from benchmarks.static.cuda_resources import MOST_STACK, Kernel

pytestmark = pytest.mark.check

TEXT = """
Fatbin elf code:
================
arch = sm_80

Resource usage:
 Common:
  GLOBAL:0
 Function _ZN2hk4cuda5entryINS0_9GatedKeysINS0_4bf16ELi256ELb1ELNS0_4SumsE2EEEEEvNT_6ParamsE:
  REG:255 STACK:120 SHARED:0 LOCAL:0 CONSTANT[0]:1344
 Function _ZN2hk4cuda5entryINS0_13AttentionRowsIfLb0EEEEEvNT_6ParamsE:
  REG:52 STACK:0 SHARED:0 LOCAL:0
 Function _ZN2hk4cuda5entryINS0_12_GLOBAL__N_15ShuffleEEEvNT_6ParamsE:
  REG:8 STACK:1000 SHARED:0 LOCAL:0
"""


def test_reads_what_cuobjdump_prints() -> None:
    keys, rows = cuda_resources.parse(TEXT)
    assert keys == Kernel("GatedKeys", "bf16", (256, 1, 2), "sm_80", 255, 120)
    assert rows == Kernel("AttentionRows", "float", (0,), "sm_80", 52, 0)
    assert keys.broken() == [f"120 bytes of stack, of {MOST_STACK['bf16']}"]
    assert rows.broken() == []
    assert str(keys) == "GatedKeys<bf16, 256, 1, 2> on sm_80"
    last = cuda_resources.table([keys, rows])[-1].split()
    assert last == ["GatedKeys", "bf16", "256", "1", "2", "255", "+120", "B"]


def test_exit_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cuda_resources.main([str(tmp_path / "nothing.so")]) == 2
    assert "no module" in capsys.readouterr().out


@pytest.fixture(scope="module")
def kernels() -> list[Kernel]:
    path, tool = cuda_resources.module(), cuda_resources.cuobjdump()
    if path is None:
        pytest.skip(f"heads_kernels._cuda is not built: {hk.build_info().get('cuda')}")
    if tool is None:
        pytest.skip("no cuobjdump: pip install triton")
    return cuda_resources.read(path, tool)


def test_every_kernel_keeps_to_its_bounds(kernels: list[Kernel]) -> None:
    broken = [f"{kernel}: {'; '.join(kernel.broken())}" for kernel in kernels if kernel.broken()]
    assert not broken, "\n".join(broken)


def test_every_part_has_every_kernel(kernels: list[Kernel]) -> None:
    by_part: dict[str, set[tuple[object, ...]]] = {}
    for kernel in kernels:
        by_part.setdefault(kernel.part, set()).add((kernel.name, kernel.dtype, kernel.numbers))
    stated = hk.build_info()["cuda"]["architectures"]
    assert sorted(by_part) == sorted(part for part in stated if part.startswith("sm_"))
    assert len(set(map(frozenset, by_part.values()))) == 1
    names = {name for name, _, _ in next(iter(by_part.values()))}
    passes = ("Forward", "Keys", "Queries")
    assert names == {f"{op}{one}" for op in ("Gated", "Collaborative") for one in passes} | {
        "AttentionCombine",
        "AttentionRows",
        "BiasGradient",
        "GatedDecode",
        "Received",
        "Statistics",
    }
