"""The tile sizes of kernels.

`heads_kernels/tuned/<gpu>.json`, written by `python -m benchmarks.tune`, has tiles measured on that GPU. For all other
GPUs there is a table for each kind. Every row of it is a heuristic: the largest tiles of a usual shape with which the
kernel, compiled for that kind, keeps its sums in registers and its tiles in shared memory
(`python -m benchmarks.static.ahead_of_time` shows both). The reasons behind the rows:

- 8 warps share tiles of 128 rows: with 64 rows on sm_90, each of two groups of 4 warps would have a copy of the tile.
- If 128 registers per thread are enough, two programs share a multiprocessor: one multiplies during the softmax of the
  other.
- In the passes over keys, scores are transposed: query rows are the columns of a tile and take a register each. So
  tiles have few query rows and 128 keys.
- In the backward passes of collaborative attention with up to 256 features, tiles have 16 rows and 128 keys, or 16 keys
  and 128 rows: 32 spill in the loop over keys, and in the loop over rows ptxas would serialize their products.
- A tile of keys that is loaded through a descriptor takes no registers for addresses, so a step over full tiles has two
  of them. Heads of 64 features use no descriptors: two tiles need more than 128 registers, one saves hardly any
  instructions (3 %).
- With a wide shared query, a slice of 256 features of a gradient (128 if values have more than 64 features) is summed
  at a time, and up to 512 other features of the scores stay in shared memory beside it (`block_rest`). Chunk by chunk,
  every tile would read the features of both operands again, once for each slice. Tiles of 64 rows or keys and 4 warps
  leave room for a second program with up to 512 features in all; some loop bounds and addresses are spilled.
- float32 is multiplied without tensor cores, with an operand in registers, so tiles are small.
- "other" fits into 64 KiB of shared memory: AMD's GPUs, and NVIDIA's small ones (sm_86, sm_89, sm_120).
"""

from __future__ import annotations

import functools
import json
import re
from dataclasses import KW_ONLY, dataclass, fields, replace
from importlib import resources
from typing import Final, NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import driver

from heads_kernels.backends import TRITON_INTERPRETED
from heads_kernels.build_info import PACKAGE
from heads_kernels.call import Call
from heads_kernels.ops.buffers import SHORT_QUERY
from heads_kernels.ops.gate import is_elementwise


@dataclass(frozen=True)
class Tiles:
    """Sizes of a kernel's tiles, 0 where it has none, and how it is compiled."""

    block_m: int  # query rows
    block_n: int  # keys
    _: KW_ONLY
    block_d: int = 0  # features of a step of collaborative attention
    block_slice: int = 0  # the most features of a head that stay on chip there
    block_rest: int = 0  # the most features beside these that scores keep on chip there
    num_warps: int = 8
    num_stages: int = 2  # of loops over full tiles; in Gluon, of the ring of values
    key_stages: int = 0  # of the ring of keys, of Gluon's forward kernel
    #: Of loops over partial tiles, whose mask takes registers that loads in flight need too.
    partial_stages: int = 1
    #: The most registers per thread, so that several programs share a multiprocessor; 0: any.
    maxnreg: int = 0
    #: Full tiles of keys that a step takes through descriptors; 0: one, through pointers.
    full_tiles: int = 0

    @property
    def launch_options(self) -> dict[str, int]:
        """Options of a launch; whether multiply-adds are fused is stated because Triton's default changes with 3.10."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        options["enable_fp_fusion"] = True
        if self.maxnreg:  # AMD's compiler knows no such option
            options["maxnreg"] = self.maxnreg
        return options


@dataclass(frozen=True, eq=False)  # `_constants` makes one for equal numbers
class TileConstants:
    """The compile-time constants of a kernel: the sizes of its tiles, the widths of heads, the kind of gate."""

    block_m: tl.constexpr  # query rows of a tile
    block_n: tl.constexpr  # keys of a tile
    block_d: tl.constexpr  # features of a step over queries and keys
    block_dv: tl.constexpr  # features of a tile of values
    d: tl.constexpr  # width of queries and keys; Ds with mixing
    dv: tl.constexpr  # width of values
    chunks: tl.constexpr  # steps that cover d, rounded up to a power of two; 0 without mixing
    resident: tl.constexpr  # the most features of a head that stay on chip, with mixing
    doublings: tl.constexpr  # number of widths of a tile of these: block_d, 2 block_d, ... up to resident
    rest: tl.constexpr  # those beside them that scores keep on chip; 0: none
    stages: tl.constexpr  # tiles in Gluon's ring of values (forward) or of rows (backward)
    key_stages: tl.constexpr  # tiles of the ring of keys, of Gluon's forward kernel
    partial_stages: tl.constexpr  # of loops over partial tiles
    gate: tl.constexpr  # its kind: `gate_kind`
    activation: tl.constexpr


def gate_kind(gate: Tensor | None) -> str:
    """What kernels compile for: no gate, one value for a head, for a row, or for an element."""
    if gate is None:
        return "none"
    if is_elementwise(gate):
        return "elements"
    return "rows" if gate.dim() > 2 and gate.shape[2] != 1 else "heads"


def tile_constants(call: Call, tiles: Tiles, width: int = 0) -> TileConstants:
    """The constants of kernels with these tiles; `width` is the width of all tiles if not 0."""
    kind, mixes = gate_kind(call.gate), call.mixing is not None
    return _constants(tiles, call.D, call.Dv, mixes, kind, call.gate_activation, width)


@functools.cache
def _constants(tiles: Tiles, D: int, Dv: int, mixes: bool, gate: str, activation: str, width: int) -> TileConstants:
    block_d = tiles.block_d if mixes else width or padded(D)
    chunks = 1 << (max(2, -(-D // block_d)) - 1).bit_length() if mixes and block_d else 0
    doublings = (tiles.block_slice // block_d).bit_length() if chunks else 0
    rest = _rest(tiles, D) if mixes and tiles.block_rest else 0
    numbers = (tiles.block_m, tiles.block_n, block_d, width or padded(Dv), D, Dv, chunks, tiles.block_slice, doublings,
        rest, tiles.num_stages, tiles.key_stages, tiles.partial_stages, gate, activation)  # fmt: skip
    return TileConstants(*map(tl.constexpr, numbers))


def _rest(tiles: Tiles, Ds: int) -> int:
    """The features (padded) beside a slice with which all scores of a head stay on chip; 0: none, or too many."""
    slices = -(-Ds // tiles.block_slice)
    rest = padded((slices - 1) * tiles.block_slice) if slices > 1 else 0
    return rest if rest <= tiles.block_rest else 0


def tiles_for(kernel: str, like: Tensor, D: int, Dv: int, terms: bool = False, descriptors: bool = False) -> Tiles:
    """The tiles of `kernel` on the GPU that holds `like`, for a call of these widths with the rows and dtype of `like`.

    D is the width of scores (`Ds` of collaborative attention), Dv that of values, 0 without values. `terms` is whether
    scores have a bias or a cap, the mask is dense, or there is dropout: tiles measured without them may not fit then.
    `descriptors` is whether tensor descriptors can describe the key and the value.
    """
    if TRITON_INTERPRETED:
        return _interpreted(like, D, descriptors)
    gpu, kind = _gpu_of(like)
    short = like.shape[-2] <= SHORT_QUERY and kernel.endswith((".forward", ".queries"))
    return _chosen(kernel, gpu, kind, like.dtype, D, Dv, terms, short, descriptors)


def tiles_of_pass(call: Call, part: str, descriptors: bool = False) -> Tiles:
    """The tiles of a pass of the operator, such as "keys"; `descriptors` as in `tiles_for`."""
    name = f"{call.operator}.{part}"
    return tiles_for(name, call.query, call.D, call.Dv, has_terms(call), descriptors)


def has_terms(call: Call) -> bool:
    """Whether the loops over tiles have a bias, a cap, a dense mask, dropout or entmax."""
    parts = call.bias, call.offset_bias, call.dense_mask, call.alpha
    return bool(call.softcap or call.dropout_p) or any(part is not None for part in parts)


def warp_tiles(kernel: str, like: Tensor, D: int, Dv: int) -> Tiles | None:
    """The tiles of the Gluon kernel that replaces `kernel` for a call of these widths; None if there is none.

    Its `num_warps` are those of a consumer.
    """
    if TRITON_INTERPRETED or like.dtype.itemsize != 2:
        return None
    if _gpu_of(like)[1] != "sm_90":
        return None
    rows = _rows_of("Gluon", kernel, "wide" if D > _MOST_RESIDENT else "")
    width = Dv if "collaborative" in kernel else max(D, Dv)
    return next((row.tiles for row in rows if width <= row.widest), None)


def padded(width: int) -> int:
    """`width` rounded up to a power of two, at least 16, the depth of a product on tensor cores."""
    return 1 << (max(width, 16) - 1).bit_length()


@functools.cache
def _chosen(
    kernel: str, gpu: str, kind: str, dtype: torch.dtype, D: int, Dv: int, terms: bool, short: bool,
    descriptors: bool,
) -> Tiles:  # fmt: skip
    name = str(dtype).removeprefix("torch.")
    tuned = _tuned(gpu).get((kernel, name, padded(D), padded(Dv)))
    usable = not (terms or short)  # measured without terms, on long queries
    if tuned is not None and usable and (descriptors or not tuned.full_tiles):
        return tuned
    shared = "collaborative" in kernel
    width = padded(Dv if shared else max(D, Dv))
    variant = "terms" if terms else "descriptors" if descriptors and not short else ""
    if shared and D > _MOST_RESIDENT:
        variant = "wide"
    table = kind if dtype.itemsize == 2 else "float32"
    own = "attention_statistics" if kernel.startswith("attention_statistics") else kernel
    # Passes of entmax without rows use those of gated attention, that for the centers those of the forward pass.
    names = own, kernel.replace("centers", "forward"), kernel.replace("entmax", "gated")
    rows = next(filter(None, (_rows_of(table, name, variant) for name in names)))
    tiles = next(row.tiles for row in rows if width <= row.widest)
    if short:  # larger tiles would multiply rows of padding
        tiles = replace(tiles, block_m=SHORT_QUERY, num_warps=4, maxnreg=0)
    if shared and kernel.endswith((".keys", ".queries")):
        tiles = replace(tiles, partial_stages=tiles.num_stages)
    return _within(tiles, D) if shared else tiles


def _within(tiles: Tiles, Ds: int) -> Tiles:
    """Tiles with steps no wider than `Ds` but wide enough for the list of chunks, and slices of whole steps."""
    step = max(min(tiles.block_d, padded(Ds)), padded(-(-Ds // MOST_CHUNKS)))
    return replace(tiles, block_d=step, block_slice=max(step, min(tiles.block_slice, padded(Ds))))


def _interpreted(like: Tensor, D: int, descriptors: bool) -> Tiles:
    """Small tiles, so that short sequences have several, and narrow queries several chunks; large ones if long."""
    T = like.shape[-2]
    block_m, block_n = (16, 64) if T <= 16 else (32, 32) if T <= 128 else (128, 128)
    step = padded(-(-D // 8))
    return Tiles(
        block_m, block_n, block_d=step, block_slice=max(step, min(64, padded(D))),
        block_rest=128,  # wider queries go chunk by chunk
        num_warps=4, num_stages=1, full_tiles=2 * descriptors,
    )  # fmt: skip


def _gpu_of(like: Tensor) -> tuple[str, str]:
    """`_named` of the GPU that holds `like`; elsewhere no name, and the kind that Triton compiles for."""
    return _named(like.device.index) if like.is_cuda else ("", _kind_of_target())


@functools.cache
def _named(index: int) -> tuple[str, str]:
    """The name of a GPU in the form of its file of tuned tiles, such as "nvidia-h200", and its kind."""
    name = torch.cuda.get_device_name(index).lower()
    capability = None if torch.version.hip else torch.cuda.get_device_capability(index)
    return re.sub(r"[^a-z0-9]+", "-", name).strip("-"), _kind_of(capability)


def _kind_of_target() -> str:
    """The kind of GPU that Triton compiles for ahead of time, when tensors are not on a GPU."""
    target = driver.active.get_current_target()
    return _kind_of(divmod(target.arch, 10) if target.backend == "cuda" else None)


@functools.cache
def _tuned(gpu: str) -> dict[tuple[str, str, int, int], Tiles]:
    """The tiles measured on a GPU, by kernel, dtype and padded widths; empty if nothing was measured."""
    path = resources.files(PACKAGE) / "tuned" / f"{gpu}.json"
    if not gpu or not path.is_file():
        return {}
    names = [field.name for field in fields(Tiles)]
    return {
        (row["kernel"], row["dtype"], row["D"], row["Dv"]): Tiles(**{name: row[name] for name in names})
        for row in json.loads(path.read_text(encoding="utf-8"))["tiles"]
    }


#: Chunks that fit into the list of `score_tiles`: 16 of 4 bits each in one int64.
MOST_CHUNKS: Final = 16
#: The widest query of collaborative attention of which all sums of a head stay on chip: 256 float32 sums of each of 128
#: rows take half of the registers.
_MOST_RESIDENT: Final = 256


# ---------------------------------------------------------------------- kinds of GPU
class Row(NamedTuple):
    """Tiles of kernels for heads of up to `widest` features (padded; with collaborative attention those of the value).

    `kernels` are names with spaces between them. Some kernels have separate rows for a variant: "terms", if loops have
    a bias, a cap, a dense mask or dropout; "descriptors", without these, if descriptors can describe the key and the
    value; "wide", if the shared query has more than 256 features.
    """

    kernels: str
    widest: int
    tiles: Tiles
    variant: str = ""


_SM_90: Final = (
    Row("gated_attention.forward", 64, Tiles(128, 64, num_stages=3, maxnreg=128)),
    Row("gated_attention.forward", 128, Tiles(128, 64, num_stages=3, partial_stages=3)),
    Row("gated_attention.forward gated_attention.queries", 256, Tiles(128, 32)),
    Row("gated_attention.keys", 64, Tiles(64, 128, num_stages=4)),
    Row("gated_attention.keys", 128, Tiles(32, 128)),
    Row("gated_attention.keys", 256, Tiles(32, 128, num_stages=3)),
    Row("gated_attention.queries", 64, Tiles(128, 64, num_stages=3)),
    Row("gated_attention.queries", 128, Tiles(128, 64)),
    Row("collaborative_attention.forward", 64, Tiles(128, 64, block_d=64, block_slice=256)),
    Row("collaborative_attention.forward", 256, Tiles(128, 32, block_d=64, block_slice=256)),
    Row("collaborative_attention.keys", 64, Tiles(16, 128, block_d=64, block_slice=256, num_stages=3)),
    Row("collaborative_attention.keys", 128, Tiles(16, 128, block_d=64, block_slice=128, num_stages=3)),
    Row("collaborative_attention.keys", 256, Tiles(32, 128, block_d=64, block_slice=64)),
    Row("collaborative_attention.queries", 256, Tiles(128, 16, block_d=64, block_slice=256, num_stages=3)),
    Row("gated_attention.biases", 64, Tiles(64, 64, num_warps=4)),
    Row("gated_attention.biases entmax_attention.biases", 256, Tiles(64, 64, num_stages=1)),
    Row("collaborative_attention.biases", 256, Tiles(64, 64, block_d=64)),
    Row("entmax_attention.forward entmax_attention.queries", 128, Tiles(128, 32)),
    Row("entmax_attention.forward", 256, Tiles(64, 32)),
    Row("entmax_attention.keys", 64, Tiles(32, 128)),
    Row("entmax_attention.keys", 128, Tiles(32, 64)),
    Row("entmax_attention.keys", 256, Tiles(16, 64)),
    Row("entmax_attention.queries", 256, Tiles(64, 16)),
    Row("attention_statistics", 256, Tiles(128, 64, block_d=64, block_slice=256, num_stages=3)),
    Row("backward.rows", 256, Tiles(64, 0, num_warps=4, num_stages=1)),
    Row("gated_attention.forward", 64, Tiles(128, 64, num_stages=3), "terms"),
    Row("gated_attention.keys", 256, Tiles(32, 128), "terms"),
    Row("gated_attention.forward", 128, Tiles(128, 64, partial_stages=3, full_tiles=2), "descriptors"),
    Row("gated_attention.forward", 256, Tiles(128, 32, full_tiles=2), "descriptors"),
    Row("collaborative_attention.keys", 64,
        Tiles(16, 64, block_d=64, block_slice=256, block_rest=512, num_warps=4), "wide"),
    Row("collaborative_attention.keys", 128,
        Tiles(16, 64, block_d=64, block_slice=128, block_rest=512, num_warps=4), "wide"),
    Row("collaborative_attention.queries", 256,
        Tiles(64, 16, block_d=64, block_slice=256, block_rest=512, num_warps=4), "wide"),
)  # fmt: skip
_SM_80: Final = (
    Row("gated_attention.forward", 64, Tiles(128, 64, num_stages=3)),
    Row("gated_attention.forward", 128, Tiles(128, 32)),
    Row("gated_attention.forward", 256, Tiles(64, 32)),
    Row("gated_attention.keys", 64, Tiles(32, 128)),
    Row("gated_attention.keys entmax_attention.keys", 128, Tiles(32, 64)),
    Row("gated_attention.keys entmax_attention.keys", 256, Tiles(32, 64, num_stages=1)),
    Row("gated_attention.queries", 128, Tiles(64, 64)),
    Row("gated_attention.queries entmax_attention.centers", 256, Tiles(64, 32, num_stages=1)),
    Row("collaborative_attention.forward collaborative_attention.queries", 256,
        Tiles(64, 32, block_d=64, block_slice=256)),
    Row("collaborative_attention.keys", 64, Tiles(32, 32, block_d=64, block_slice=256)),
    Row("collaborative_attention.keys", 256, Tiles(32, 64, block_d=64, block_slice=128)),
    Row("gated_attention.biases", 64, Tiles(64, 64)),
    Row("gated_attention.biases", 256, Tiles(32, 32, num_warps=4, num_stages=1)),
    Row("collaborative_attention.biases", 256, Tiles(64, 64, block_d=64)),
    Row("entmax_attention.forward entmax_attention.centers", 128, Tiles(64, 32)),
    Row("entmax_attention.forward", 256, Tiles(32, 32, num_stages=1)),
    Row("attention_statistics", 256, Tiles(128, 64, block_d=64, block_slice=256)),
    Row("backward.rows", 256, Tiles(64, 0, num_warps=4, num_stages=1)),
    Row("collaborative_attention.keys", 64, Tiles(32, 64, block_d=64, block_slice=128), "wide"),
    Row("collaborative_attention.queries", 256, Tiles(64, 32, block_d=64, block_slice=128), "wide"),
    Row("gated_attention.forward", 64, Tiles(128, 32, num_stages=3), "terms"),
    Row("gated_attention.queries", 64, Tiles(64, 32, num_warps=4), "terms"),
)  # fmt: skip
_OTHER: Final = (
    Row("gated_attention.forward", 64, Tiles(64, 32, num_warps=4, num_stages=1)),
    Row("gated_attention.forward", 128, Tiles(64, 16, num_warps=4, num_stages=1)),
    Row("gated_attention.forward", 256, Tiles(32, 32, num_warps=4, num_stages=1)),
    Row("gated_attention.keys gated_attention.queries gated_attention.biases entmax_attention.forward", 128,
        Tiles(32, 32, num_warps=4, num_stages=1)),
    Row("gated_attention.keys gated_attention.queries gated_attention.biases entmax_attention.forward", 256,
        Tiles(16, 16, num_warps=4, num_stages=1)),
    Row("collaborative_attention.forward attention_statistics", 256,
        Tiles(64, 32, block_d=32, block_slice=128, num_warps=4, num_stages=1)),
    Row("collaborative_attention.keys", 64, Tiles(32, 32, block_d=32, block_slice=128, num_warps=4, num_stages=1)),
    Row("collaborative_attention.keys collaborative_attention.queries", 256,
        Tiles(32, 32, block_d=32, block_slice=64, num_warps=4, num_stages=1)),
    Row("collaborative_attention.queries", 64, Tiles(32, 16, block_d=32, block_slice=256, num_warps=4, num_stages=1)),
    Row("collaborative_attention.biases", 256, Tiles(32, 32, block_d=32, num_warps=4, num_stages=1)),
    Row("backward.rows", 256, Tiles(32, 0, num_warps=4, num_stages=1)),
    Row("collaborative_attention.keys collaborative_attention.queries", 64,
        Tiles(32, 32, block_d=32, block_slice=64, num_warps=4, num_stages=1), "wide"),
)  # fmt: skip
#: For sm_100, an accumulator of 128 keys and 256 features compiles to a trap in the loops over widths, statistics spill
#: with rows of 256 features, and wide queries go chunk by chunk: `block_rest` was chosen for the registers of sm_90.
_SM_100: Final = (
    *(
        row
        for row in _SM_90
        if not {"collaborative_attention.keys", "attention_statistics"} & {*row.kernels.split()}
        and row.variant != "wide"
    ),
    Row("gated_attention.keys", 256, Tiles(32, 128)),
    Row("attention_statistics", 256, Tiles(128, 64, block_d=64, block_slice=128, num_stages=3)),
    Row("collaborative_attention.keys", 64, Tiles(16, 64, block_d=64, block_slice=256, num_warps=4)),
    Row("collaborative_attention.keys", 256, Tiles(32, 128, block_d=64, block_slice=64)),
    Row("collaborative_attention.keys", 64, Tiles(32, 128, block_d=64, block_slice=64), "wide"),
    Row("collaborative_attention.queries", 256, Tiles(128, 32, block_d=64, block_slice=128), "wide"),
)  # fmt: skip
#: The rows for float32, for every kind of GPU.
_FLOAT: Final = (
    Row("gated_attention.forward", 64, Tiles(32, 32)),
    Row("gated_attention.forward", 256, Tiles(32, 16, num_stages=1)),
    Row("gated_attention.keys gated_attention.queries gated_attention.biases entmax_attention.forward", 64,
        Tiles(32, 32, num_stages=1)),
    Row("gated_attention.keys gated_attention.queries gated_attention.biases entmax_attention.forward", 256,
        Tiles(16, 16, num_stages=1)),
    Row("gated_attention.queries", 128, Tiles(32, 16, num_stages=1)),
    Row("collaborative_attention.forward collaborative_attention.keys collaborative_attention.queries", 256,
        Tiles(32, 32, block_d=32, block_slice=64, num_stages=1)),
    Row("attention_statistics", 256, Tiles(32, 32, block_d=32, block_slice=64, num_stages=1)),
    Row("collaborative_attention.biases", 256, Tiles(32, 32, block_d=32, num_stages=1)),
    Row("backward.rows", 256, Tiles(32, 0, num_warps=4, num_stages=1)),
)  # fmt: skip

#: Gluon kernels that replace others on sm_90 (`gluon_forward` and others). Their rings fit into shared memory.
#: Without its row here, the kernel of the table above runs. A backward pass with 128 rows would spill.
#: In collaborative attention, a chunk of features is as wide as the value; the backward pass has no chunks, and the
#: numbers are those of its pass by keys.
_SPECIALIZED: Final = (
    Row("gated_attention.forward", 64, Tiles(128, 128, num_warps=4, num_stages=3, key_stages=3)),
    Row("gated_attention.forward", 128, Tiles(128, 128, num_warps=4, key_stages=2)),
    Row("gated_attention.forward", 256, Tiles(128, 64, num_warps=4, key_stages=2)),
    Row("collaborative_attention.forward", 64, Tiles(128, 128, block_d=64, num_warps=4, key_stages=6)),
    Row("collaborative_attention.forward", 128, Tiles(128, 128, block_d=128, num_warps=4, key_stages=2)),
    Row("collaborative_attention.forward", 64, Tiles(128, 128, block_d=64, num_warps=4, key_stages=3), "wide"),
    Row("collaborative_attention.forward", 128, Tiles(128, 64, block_d=128, num_warps=4, key_stages=3), "wide"),
    Row("gated_attention.backward", 64, Tiles(64, 128, num_stages=4)),
    Row("gated_attention.backward", 128, Tiles(64, 128)),
    Row("collaborative_attention.backward", 64, Tiles(64, 128, num_warps=4, num_stages=3)),
)  # fmt: skip

#: By kind of GPU for operands of 16 bits; for float32 and for kernels in Gluon.
_TABLES: Final = {
    "sm_80": _SM_80, "sm_90": _SM_90, "sm_100": _SM_100, "other": _OTHER, "float32": _FLOAT, "Gluon": _SPECIALIZED,
}  # fmt: skip


@functools.cache
def _rows_of(table: str, kernel: str, variant: str) -> tuple[Row, ...]:
    """The rows of a kernel, the narrowest first; rows of the variant replace plain ones."""
    of_kernel = [row for row in _TABLES[table] if kernel in row.kernels.split()]
    rows = {row.widest: row for row in of_kernel if not row.variant}
    rows |= {row.widest: row for row in of_kernel if row.variant == variant}
    return tuple(rows[widest] for widest in sorted(rows))


def _kind_of(capability: tuple[int, int] | None) -> str:
    """The kind of an NVIDIA GPU by its compute capability; None: any other GPU.

    GPUs with less than 128 KiB of shared memory (sm_86, sm_89, sm_120) and older ones are "other".
    """
    if capability is None:
        return "other"
    if capability[0] in (9, 10):
        return f"sm_{capability[0]}0"
    return "sm_80" if capability in ((8, 0), (8, 7)) else "other"
