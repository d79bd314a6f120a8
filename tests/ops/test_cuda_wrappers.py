"""Every wrapper of csrc/cuda/hardware.h against what the PTX ISA says of its instruction.

One tiny kernel each (csrc/selftest/wrapper_checks.cu), by the emulator under all of its schedules, and on a GPU by a
build with HEADS_KERNELS_CUDA_CHECKS=1. Words of 32 bits go in and come out.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

pytestmark = pytest.mark.check

Words = npt.NDArray[np.uint32]
Floats = npt.NDArray[np.float32]
Run = Callable[..., Words]

WARP, BLOCK = 32, 128
SCHEDULES = ("round_robin", "greedy", "reversed")


@pytest.fixture(params=[*SCHEDULES, pytest.param("gpu", marks=pytest.mark.gpu)])
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    """`run(wrapper, words, *inputs)`: the result, so many words a thread, of inputs a row a thread."""
    emulated = request.param != "gpu"
    name = "_cuda_emulated" if emulated else "_cuda"
    module = pytest.importorskip(f"heads_kernels.{name}", reason=f"heads_kernels.{name} is not built")
    if not hasattr(module, "check_wrapper"):
        pytest.skip("built without HEADS_KERNELS_CUDA_CHECKS=1")
    device = torch.device("cpu" if emulated else "cuda")
    stream = 0 if emulated else torch.cuda.current_stream().cuda_stream
    if emulated:
        module.use_schedule(request.param)

    def run(wrapper: str, words: int, *inputs: npt.NDArray[Any], threads: int = 0) -> Words:
        tensors = [torch.from_numpy(np.array(values).view(np.float32)).to(device).flatten() for values in inputs]
        threads = threads or len(inputs[0])
        result = torch.full((threads * words,), torch.nan, device=device)
        module.check_wrapper(wrapper, [*tensors, result], (device.index or 0, stream))
        return result.cpu().numpy().view(np.uint32).reshape(threads, words)

    yield run
    if emulated:
        module.use_schedule(SCHEDULES[0])


@pytest.fixture
def random() -> np.random.Generator:
    return np.random.default_rng(2024)


def test_every_wrapper_has_a_test() -> None:
    module = pytest.importorskip("heads_kernels._cuda_emulated", reason="python setup.py emulator")
    assert module.schedule_names() == list(SCHEDULES)
    tests = Path(__file__).read_text()
    for name in module.wrapper_names():
        wrapper = name.partition("<")[0]
        assert f'"{wrapper}"' in tests or f'"{wrapper}<' in tests, name


def bits(values: npt.NDArray[Any]) -> Words:
    return np.asarray(values, np.float32).view(np.uint32)


def floats(words: Words) -> Floats:
    return words.view(np.float32)


def in_blocks(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """With zeros behind, so that the rows fill whole blocks of threads."""
    rest = np.zeros((-len(values) % BLOCK, *values.shape[1:]), values.dtype)
    return np.concatenate([values, rest])


# ---------------------------------------------------------------------- threads
def test_index(run: Run) -> None:
    got = run("index", 2, threads=3 * BLOCK)
    np.testing.assert_array_equal(got[:, 0], np.tile(np.arange(BLOCK), 3))
    np.testing.assert_array_equal(got[:, 1], np.repeat(np.arange(3), BLOCK))


@pytest.mark.parametrize(("wrapper", "group"), [("sync_block", BLOCK), ("sync_warp", WARP)])
def test_barriers(run: Run, random: np.random.Generator, wrapper: str, group: int) -> None:
    values = random.integers(2**32, size=2 * BLOCK, dtype=np.uint32)
    got = run(wrapper, 1, values)
    np.testing.assert_array_equal(got.reshape(-1, group), values.reshape(-1, group)[:, ::-1])


@pytest.mark.parametrize(("wrapper", "group"), [("any_in_block", BLOCK), ("any_in_warp", WARP)])
def test_votes(run: Run, wrapper: str, group: int) -> None:
    votes = np.zeros((8, BLOCK), np.uint32)
    for block, thread in enumerate((0, 31, 32, 127)):
        votes[block, thread] = 1
    votes[5] = 1
    got = run(wrapper, 1, votes.reshape(-1))
    expected = np.repeat(votes.reshape(-1, group).any(1), group)
    np.testing.assert_array_equal(got[:, 0], expected)


@pytest.mark.parametrize("V", ["int", "uint32_t", "float"])
def test_shuffle(run: Run, random: np.random.Generator, V: str) -> None:
    """Each lane with a mask of its own, of which the lowest five bits count."""
    values = random.integers(2**32, size=4 * BLOCK, dtype=np.uint32)
    other = random.integers(64, size=4 * BLOCK, dtype=np.uint32)
    other[:BLOCK] = 3  # one for all
    got = run(f"shuffle_xor<{V}>", 1, values, other)
    lanes = np.arange(len(values), dtype=np.uint32) % WARP
    source = (lanes ^ other) % WARP
    np.testing.assert_array_equal(got[:, 0], values[np.arange(len(values)) - lanes + source])


# ---------------------------------------------------------------------- tiles
@pytest.mark.parametrize("wrapper", ["load_matrices", "load_matrices_transposed"])
def test_matrices(run: Run, random: np.random.Generator, wrapper: str) -> None:
    """Threads 0 to 7 name the rows of the first matrix, 8 to 15 those of the second, and so on."""
    memory = random.integers(2**16, size=(5, 32, 8), dtype=np.uint16)
    rows = np.stack([random.permutation(32) for _ in memory]).astype(np.uint32)
    rows[0] = np.arange(32)
    rows[1] = 7  # one row for all
    got = run(wrapper, 4, memory.view(np.uint32).reshape(-1, 4), rows.reshape(-1))
    for tile, numbers, words in zip(memory, rows, got.reshape(5, 32, 4), strict=True):
        matrices = tile[numbers].reshape(4, 8, 8)
        if wrapper == "load_matrices_transposed":
            matrices = matrices.transpose(0, 2, 1)
        for thread in range(32):
            row, column = thread // 4, 2 * (thread % 4)
            expected = np.ascontiguousarray(matrices[:, row, column : column + 2])
            np.testing.assert_array_equal(words[thread], expected.view(np.uint32)[:, 0])


def place(tile: str, depth: int, thread: int, i: int) -> tuple[int, int]:
    """Row and column of element i of a fragment, in the words of the PTX ISA."""
    group, of_group = thread >> 2, thread % 4
    if tile == "C":  # c0 .. c3
        return (group if i < 2 else group + 8), of_group * 2 + (i & 1)
    if depth == 8:  # m16n8k8 of tf32: a0 .. a3, b0 and b1
        if tile == "A":
            return (group if i in (0, 2) else group + 8), (of_group if i < 2 else of_group + 4)
        return (of_group if i == 0 else of_group + 4), group
    if tile == "A":  # m16n8k16 of 16 bits: a0 .. a7, b0 .. b3
        row = group if i < 2 or 4 <= i < 6 else group + 8
        return row, of_group * 2 + (i & 1) + (0 if i < 4 else 8)
    return of_group * 2 + (i & 1) + (0 if i < 2 else 8), group


def fragment(tile: str, depth: int, matrix: npt.NDArray[Any]) -> Words:
    """Words of the threads of a warp, which hold [row, column] as `place` says."""
    count = {"A": depth // 2, "B": depth // 4, "C": 4}[tile]
    places = [place(tile, depth, thread, i) for thread in range(32) for i in range(count)]
    elements = np.array([matrix[at] for at in places], matrix.dtype)
    return elements.view(np.uint32).reshape(32, -1)


def narrowed(T: str, x: Floats) -> npt.NDArray[np.uint16]:
    if T == "bf16":
        return torch.from_numpy(x).to(torch.bfloat16).view(torch.uint16).numpy()
    with np.errstate(over="ignore"):
        return x.astype(np.float16).view(np.uint16)


def rounded(T: str, values: npt.NDArray[np.float64]) -> npt.NDArray[Any]:
    """Elements of fragments: for bf16 and fp16 of 16 bits, for tf32 floats with a short fraction."""
    return bits(values) & np.uint32(0xFFFFE000) if T == "tf32" else narrowed(T, values.astype(np.float32))


def numbers(T: str, elements: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    if T != "fp16":
        elements = elements.astype(np.uint32) << (16 if T == "bf16" else 0)
    with np.errstate(invalid="ignore"):  # signalling NaN
        return elements.view(np.float16 if T == "fp16" else np.float32).astype(np.float64)


@pytest.mark.parametrize("kind", ["exact", "any", "one sign", "special"])
@pytest.mark.parametrize("T", ["bf16", "fp16", "tf32"])
def test_multiply_add(run: Run, random: np.random.Generator, T: str, kind: str) -> None:
    depth, tiles = (8 if T == "tf32" else 16), 6
    if kind == "exact":  # integers whose sums a float holds: every order of adding gives these bits
        a = random.integers(-128, 129, (tiles, 16, depth)).astype(np.float64)
        b = random.integers(-128, 129, (tiles, depth, 8)).astype(np.float64)
        c = random.integers(-(2**20), 2**20, (tiles, 16, 8)).astype(np.float64)
    else:
        a, b = random.normal(size=(tiles, 16, depth)), random.normal(size=(tiles, depth, 8))
        c = random.normal(size=(tiles, 16, 8))
    if kind == "one sign":  # of all terms of a tile
        a, b, c = abs(a), abs(b), abs(c)
        a[::2], c[::2] = -a[::2], -c[::2]
    if kind == "special":
        a[0, 3, 5], a[1, 12, 0], b[2, 7, 6], c[3, 1, 1] = np.inf, np.nan, -np.inf, np.nan
        a[4, 2], b[4, :, 3], c[4, 2, 3] = 0, np.inf, 1  # 0 * inf is nan
        c[5, 15, 7] = np.inf
    a, b, c = rounded(T, a), rounded(T, b), c.astype(np.float32)
    given = {"A": a, "B": b, "C": c}
    if T == "tf32" and kind == "any":  # what a float has beyond a tf32 counts for nothing
        for name in ("A", "B"):
            low = random.integers(1 << 13, size=given[name].shape, dtype=np.uint32)
            given[name] = given[name] | low
    fragments = (
        np.concatenate([fragment(name, depth, matrix) for matrix in matrices]) for name, matrices in given.items()
    )
    got = run(f"multiply_add<{T}>", 4, *fragments)
    with np.errstate(invalid="ignore"):
        expected = numbers(T, a) @ numbers(T, b) + c
        bound = np.abs(numbers(T, a)) @ np.abs(numbers(T, b)) + np.abs(c)
    # Tensor cores cut terms off at the largest one's last bits; exact where nothing is cut off.
    bound = np.zeros_like(bound) if kind == "exact" else bound * 2.0**-21
    for tile in range(tiles):
        places = [place("C", depth, thread, i) for thread in range(32) for i in range(4)]
        at = tuple(np.array(places).T)
        result = floats(got[32 * tile : 32 * tile + 32]).reshape(-1).astype(np.float64)
        want, limit = expected[tile][at], bound[tile][at]
        finite = np.isfinite(want)
        np.testing.assert_array_equal(result[~finite], want[~finite])
        assert np.all(np.abs(result[finite] - want[finite]) <= limit[finite])
        if kind == "one sign":  # sums are rounded toward zero, never to a nearest number beyond
            assert np.all(np.abs(result) <= np.abs(want))


def test_copy_async(run: Run, random: np.random.Generator) -> None:
    data = random.integers(1, 256, size=(BLOCK, 16), dtype=np.uint8)
    count = np.arange(BLOCK, dtype=np.uint32) % 17
    got = run("copy_async", 4, data.view(np.uint32), count).view(np.uint8)
    expected = np.where(np.arange(16) < count[:, None], data, 0)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(("wrapper", "words"), [("wait_copies", 12), ("store_words", 4)])
def test_words_arrive(run: Run, random: np.random.Generator, wrapper: str, words: int) -> None:
    data = random.integers(2**32, size=(2 * BLOCK, words), dtype=np.uint32)
    np.testing.assert_array_equal(run(wrapper, words, data), data)


# ---------------------------------------------------------------------- numbers
#: Floats by their bits: zeros, subnormal, the least and the largest normal, infinite, NaN.
SIZES = np.array([0, 1, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FFFFFFF], np.uint32)
SPECIAL = np.concatenate([SIZES, SIZES | np.uint32(1 << 31)])
#: Every number of 16 bits.
HALVES = np.arange(1 << 16, dtype=np.uint32)


def flushed(values: Floats) -> Floats:
    small = np.abs(values) < np.finfo(np.float32).tiny
    return np.where(small, np.copysign(np.float32(0), values), values)


def singles(*parts: npt.ArrayLike) -> Floats:
    """As floats, and the special ones."""
    given = [np.asarray(part, np.float32) for part in parts]
    return in_blocks(np.concatenate([*given, floats(SPECIAL)]))


def test_exp2_approx(run: Run, random: np.random.Generator) -> None:
    x = singles(random.uniform(-130, 130, 4096), random.uniform(-1, 1, 4096), np.arange(-160, 140))
    got = floats(run("exp2_approx", 1, bits(x))[:, 0])
    with np.errstate(over="ignore", invalid="ignore"):
        expected = np.exp2(flushed(x).astype(np.float64))
    zero, infinite = expected < np.finfo(np.float32).tiny, expected >= 2.0**128
    near = ~(zero | infinite | np.isnan(x))
    last_place = np.spacing(expected[near].astype(np.float32)).astype(np.float64)
    assert np.all(np.abs(got[near] - expected[near]) <= 2 * last_place)
    assert np.all(got[zero] == 0)
    assert np.all(got[infinite] == np.inf)
    assert np.all(got[flushed(x) == 0] == 1)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(x))


@pytest.mark.parametrize("T", ["bf16", "fp16"])
def test_widening(run: Run, T: str) -> None:
    expected = numbers(T, HALVES.astype(np.uint16))
    nan = np.isnan(expected)
    got = floats(run(f"to_float<{T}>", 1, HALVES)[:, 0])
    pairs = floats(run(f"unpack<{T}>", 2, HALVES << 16 | HALVES[::-1]))
    for values in (got, pairs[::-1, 0], pairs[:, 1]):
        np.testing.assert_array_equal(values, expected)
        np.testing.assert_array_equal(np.signbit(values)[~nan], np.signbit(expected)[~nan])


def to_be_narrowed(T: str) -> Floats:
    """Every number of T, the ties between neighbours, and floats just beside both."""
    if T == "bf16":
        low = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
        return floats((HALVES[:, None] << np.uint32(16) | low).reshape(-1))
    half = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    upper = np.append(half[1:], np.float32(65536))
    ties = (half + upper) / 2
    around = [half, ties, np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(1e9))]
    values = np.concatenate([*around, np.array([65536, 1e30, 2**-26, 2**-30], np.float32)])
    return np.concatenate([values, -values, floats(SPECIAL)])


@pytest.mark.parametrize("T", ["bf16", "fp16"])
def test_narrowing(run: Run, T: str) -> None:
    """To the nearest, ties to even, subnormal numbers too; one too large becomes infinite."""
    x = in_blocks(to_be_narrowed(T))
    expected, nan = narrowed(T, x), np.isnan(x)
    got = run(f"from_float<{T}>", 1, bits(x))[:, 0]
    assert np.all(got < 1 << 16)
    np.testing.assert_array_equal(got[~nan], expected[~nan])
    assert np.all(np.isnan(numbers(T, got[nan].astype(np.uint16))))
    pairs = np.stack([x, x[::-1]], 1)  # the first into the low half
    halves = run(f"pack<{T}>", 1, bits(pairs)).view(np.uint16)
    np.testing.assert_array_equal(halves[~nan, 0], expected[~nan])
    np.testing.assert_array_equal(halves[::-1][~nan, 1], expected[~nan])
    assert np.all(np.isnan(numbers(T, halves[nan, 0])))
