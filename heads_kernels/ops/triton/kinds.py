"""The tiles of each kind of GPU: numbers with their reasons, for GPUs on which nothing was measured yet.

Every row is a heuristic: the largest tiles of a usual shape whose kernel, compiled for that kind, keeps its sums in
registers and its tiles in shared memory (`python -m benchmarks.ahead_of_time` shows both). What they have in common:

- 8 warps share tiles of 128 rows: of 64 rows each of two groups of 4 warps would hold a copy on sm_90.
- In the passes over keys scores lie transposed: numbers of query rows stand in columns of a tile and take a register a
  column. So tiles have few query rows and 128 keys.
- float32 is multiplied without tensor cores; an operand then lies in registers, and tiles are small.
- "other" fits into 64 KiB of shared memory: AMD's, and NVIDIA's small parts (sm_86, sm_89, sm_120) with room to spare.
"""

from __future__ import annotations

from typing import Final

#: block_m, block_n, block_d, block_slice, num_warps, num_stages
Numbers = tuple[int, int, int, int, int, int]

#: kernel -> widest head (padded; of collaborative attention the value's) -> numbers. 16-bit operands.
_HALF: Final[dict[str, dict[str, dict[int, Numbers]]]] = {
    "sm_90": {
        "gated_attention.forward": {128: (128, 64, 0, 0, 8, 3), 256: (128, 32, 0, 0, 8, 2)},
        "gated_attention.keys": {64: (64, 128, 0, 0, 8, 2), 256: (32, 128, 0, 0, 8, 2)},
        "gated_attention.queries": {
            64: (128, 64, 0, 0, 8, 3),
            128: (128, 64, 0, 0, 8, 2),
            256: (128, 32, 0, 0, 8, 2),
        },
        "collaborative_attention.forward": {256: (128, 64, 64, 0, 8, 3)},
        "collaborative_attention.keys": {
            64: (32, 128, 64, 128, 8, 2),
            256: (32, 128, 64, 64, 8, 2),
        },
        "collaborative_attention.queries": {256: (128, 32, 64, 128, 8, 2)},
        "gated_attention.biases": {64: (64, 64, 0, 0, 4, 2), 256: (64, 64, 0, 0, 8, 1)},
        "collaborative_attention.biases": {256: (64, 64, 64, 0, 8, 2)},
        "attention_statistics": {256: (128, 64, 64, 0, 8, 3)},
        "backward.rows": {256: (64, 0, 0, 0, 4, 1)},
    },
    "sm_80": {
        "gated_attention.forward": {
            64: (128, 64, 0, 0, 8, 3),
            128: (128, 32, 0, 0, 8, 2),
            256: (64, 32, 0, 0, 8, 2),
        },
        "gated_attention.keys": {
            64: (32, 128, 0, 0, 8, 2),
            128: (32, 64, 0, 0, 8, 2),
            256: (32, 64, 0, 0, 8, 1),
        },
        "gated_attention.queries": {128: (64, 64, 0, 0, 8, 2), 256: (64, 32, 0, 0, 8, 1)},
        "collaborative_attention.forward": {256: (128, 64, 64, 0, 8, 2)},
        "collaborative_attention.keys": {256: (32, 64, 64, 128, 8, 2)},
        "collaborative_attention.queries": {256: (64, 32, 64, 128, 8, 2)},
        "gated_attention.forward, terms": {64: (128, 32, 0, 0, 8, 3)},
        "gated_attention.queries, terms": {64: (64, 32, 0, 0, 4, 2)},
        "gated_attention.biases": {64: (64, 64, 0, 0, 8, 2), 256: (32, 32, 0, 0, 4, 1)},
        "collaborative_attention.biases": {256: (64, 64, 64, 0, 8, 2)},
        "attention_statistics": {256: (128, 64, 64, 0, 8, 2)},
        "backward.rows": {256: (64, 0, 0, 0, 4, 1)},
    },
    "other": {
        "gated_attention.forward": {128: (64, 32, 0, 0, 4, 1), 256: (32, 32, 0, 0, 4, 1)},
        "gated_attention.keys": {128: (32, 32, 0, 0, 4, 1), 256: (16, 16, 0, 0, 4, 1)},
        "gated_attention.queries": {128: (32, 32, 0, 0, 4, 1), 256: (16, 16, 0, 0, 4, 1)},
        "collaborative_attention.forward": {256: (64, 32, 32, 0, 4, 1)},
        "collaborative_attention.keys": {256: (32, 32, 32, 64, 4, 1)},
        "collaborative_attention.queries": {256: (32, 32, 32, 64, 4, 1)},
        "gated_attention.biases": {128: (32, 32, 0, 0, 4, 1), 256: (16, 16, 0, 0, 4, 1)},
        "collaborative_attention.biases": {256: (32, 32, 32, 0, 4, 1)},
        "attention_statistics": {256: (64, 32, 32, 0, 4, 1)},
        "backward.rows": {256: (32, 0, 0, 0, 4, 1)},
    },
}

#: The same for float32 on every kind.
_FLOAT: Final[dict[str, dict[int, Numbers]]] = {
    "gated_attention.forward": {64: (32, 32, 0, 0, 8, 2), 256: (32, 16, 0, 0, 8, 1)},
    "gated_attention.keys": {64: (32, 32, 0, 0, 8, 1), 256: (16, 16, 0, 0, 8, 1)},
    "gated_attention.queries": {
        64: (32, 32, 0, 0, 8, 1),
        128: (32, 16, 0, 0, 8, 1),
        256: (16, 16, 0, 0, 8, 1),
    },
    "collaborative_attention.forward": {256: (32, 32, 32, 0, 8, 1)},
    "collaborative_attention.keys": {256: (32, 32, 32, 64, 8, 1)},
    "collaborative_attention.queries": {256: (32, 32, 32, 64, 8, 1)},
    "gated_attention.biases": {64: (32, 32, 0, 0, 8, 1), 256: (16, 16, 0, 0, 8, 1)},
    "collaborative_attention.biases": {256: (32, 32, 32, 0, 8, 1)},
    "attention_statistics": {256: (32, 32, 32, 0, 8, 1)},
    "backward.rows": {256: (32, 0, 0, 0, 4, 1)},
}


def numbers_of_kind(kind: str, kernel: str, half: bool, width: int, terms: bool = False) -> Numbers:
    """The row of `kernel` for heads of `width` features (padded) and operands of 16 (`half`) or 32 bits.

    `terms`: the kernel reads a bias, a cap or a dense mask, for which some have rows of their own.
    """
    kernel = "attention_statistics" if kernel.startswith("attention_statistics") else kernel
    table = _HALF[kind] if half else _FLOAT
    rows = table[kernel] | (table.get(f"{kernel}, terms", {}) if terms else {})
    return next(numbers for widest, numbers in sorted(rows.items()) if width <= widest)


def kind_of(capability: tuple[int, int] | None) -> str:
    """The kind of an NVIDIA GPU by its compute capability; None: any other GPU.

    sm_100 takes the tiles of sm_90. Parts with less than 128 KiB of shared memory (sm_86, sm_89, sm_120) and older
    ones are "other".
    """
    if capability is None:
        return "other"
    if capability[0] in (9, 10):
        return "sm_90"
    return "sm_80" if capability in ((8, 0), (8, 7)) else "other"
