"""`Call`: the one form of an operator call below the public functions.

`parse` (parse.py) builds it from the arguments of a user. `tuple(call)` are the arguments of the package's torch ops,
whose schemas follow from its fields.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, NamedTuple, get_origin, get_type_hints

import torch
from torch import Tensor

from heads_kernels.mask.intervals import UNBOUNDED, Intervals, by_identity

#: Features of one mixing chunk: the smallest K step of a tensor core, and one vector of 16 float32 lanes. Chunks of a
#: head's mixing vector that are all zero are skipped.
MIXING_CHUNK: Final = 16
#: An op's `seed` is int64 `[5]`: the number drawn from PyTorch's generator, then the index (b, h, i, j) of the first
#: element in the whole call, which is not 0 if a process computes a part of the batch, the heads or the rows. j must be
#: a multiple of 4, the number of elements per Philox counter (ops/philox.py).
SEED_LENGTH: Final = 5


@by_identity
class Call(NamedTuple):
    """All tensors and numbers of one call of an operator (sizes as in the documentation: B, T, S, H, Hk, D, Dv).

    Batch dimensions are flattened: B is their product. Collaborative attention has `mixing`, entmax attention has
    `alpha`, and `attention_statistics` has no `value`. The words beside a type are the dimensions of the tensor, of
    each rank that it may have: "H|1" is H, or 1 where it broadcasts. A tensor that only some operators take has type
    `Any`; `check` verifies which.
    """

    query: Annotated[Tensor, "B H T D", "B T D"]  # the second with mixing, where D is Ds
    key: Annotated[Tensor, "B Hk S D", "B S D"]
    value: Annotated[Any, "B Hv S Dv"] = None
    mixing: Annotated[Any, "H D"] = None
    content_bias: Annotated[Tensor | None, "B H S"] = None
    gate: Annotated[Tensor | None, "H|1", "B|1 H|1", "B|1 H|1 T|1", "B|1 H|1 T|1 Dv|1"] = None
    bias: Annotated[Tensor | None, "B1|1 B2|1 H|1 T|1 S|1"] = None  # `batch.flatten_bias`
    offset_bias: Annotated[Tensor | None, "H|1 T+S-1"] = None  # offsets j - i from -(T - 1)
    sinks: Annotated[Tensor | None, "H"] = None
    alpha: Annotated[Any, "H"] = None  # in the compute dtype
    k_lo: Annotated[Tensor | None, "B|1 H|1 T"] = None  # from here to dense_mask, and the band: `Intervals`
    k_hi: Annotated[Tensor | None, "B|1 H|1 T"] = None
    first_keys: Annotated[Tensor | None, "H|1"] = None
    key_visible: Annotated[Tensor | None, "B|1 S"] = None
    dense_mask: Annotated[Tensor | None, "B|1 H|1 T|1 S|1"] = None
    exclude_keys: Annotated[Tensor | None, "B|1 S"] = None  # bool; of statistics
    row_weights: Annotated[Tensor | None, "B|1 H|1 T|1"] = None  # in the compute dtype; of statistics
    seed: Tensor | None = None  # int64 [SEED_LENGTH]
    band_lo: int = -UNBOUNDED
    band_hi: int = UNBOUNDED
    scale: float = 1.0
    softcap: float = 0.0  # 0: none
    dropout_p: float = 0.0
    gate_activation: str = "identity"
    closed_grad: bool = True

    # ------------------------------------------------------------------ sizes
    @property
    def B(self) -> int:
        return self.query.shape[0]

    @property
    def H(self) -> int:
        return self.query.shape[1] if self.mixing is None else self.mixing.shape[0]

    @property
    def Hk(self) -> int:
        """Heads of the key: `H` or fewer, 1 (shared) with mixing."""
        return self.key.shape[1] if self.mixing is None else 1

    @property
    def Hv(self) -> int:
        """Heads of the value, which divide `H`; `H` without a value."""
        return self.H if self.value is None else self.value.shape[1]

    @property
    def T(self) -> int:
        return self.query.shape[-2]

    @property
    def S(self) -> int:
        return self.key.shape[-2]

    @property
    def D(self) -> int:
        """Width of query and key: `D` of a head, or the shared `Ds`."""
        return self.query.shape[-1]

    @property
    def Dv(self) -> int:
        return 0 if self.value is None else self.value.shape[-1]

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """B, H, T, S."""
        return self.B, self.H, self.T, self.S

    # ------------------------------------------------------------------ parts
    @property
    def operands(self) -> tuple[Tensor | None, ...]:
        """The values of the fields that may have a gradient, `OPERANDS`."""
        operands: Any = self[: len(OPERANDS)]
        return operands  # type: ignore[no-any-return]

    @property
    def operator(self) -> str:
        """The name of the public function."""
        if self.value is None:
            return "attention_statistics"
        if self.mixing is not None:
            return "collaborative_attention"
        return "gated_attention" if self.alpha is None else "entmax_attention"

    @property
    def intervals(self) -> Intervals:
        """The mask."""
        return Intervals(
            self.band_lo, self.band_hi, self.k_lo, self.k_hi, self.first_keys, self.key_visible, self.dense_mask
        )

    def under(self, mask: Intervals) -> Call:
        """The same call with another mask."""
        return self._replace(**mask._asdict())

    def named_sizes(self) -> dict[str, int]:
        """The sizes of the dimensions that the layouts of several fields have."""
        B, H, T, S = self.sizes
        return {"B": B, "H": H, "Hk": self.Hk, "Hv": self.Hv, "T": T, "S": S, "D": self.D, "Dv": self.Dv}

    def dimensions(self) -> dict[str, list[str]]:
        """The dimensions of every tensor that is given, by the name of its field; the seed left out."""
        given = {name: getattr(self, name) for name in LAYOUTS}
        return {
            name: [dimension.name for dimension in LAYOUTS[name][tensor.dim()]]
            for name, tensor in given.items()
            if tensor is not None
        }

    def along(self, dimension: str) -> dict[str, int]:
        """The tensors that have this dimension: its position in the tensor, by the name of the field.

        Those that broadcast along it are left out.
        """
        size = getattr(self, dimension)
        found = {n: each.index(dimension) for n, each in self.dimensions().items() if dimension in each}
        return {name: dim for name, dim in found.items() if getattr(self, name).shape[dim] == size}

    def of_rows(self, start: int, stop: int) -> Call:
        """The call of only the query rows `start` to `stop - 1`."""
        count = len(range(start, min(stop, self.T)))
        own = {name: getattr(self, name).narrow(dim, start, count) for name, dim in self.along("T").items()}
        if self.offset_bias is not None:  # its first offset is 1 - count - start
            first = self.T - (start + count)
            own["offset_bias"] = self.offset_bias[:, first : first + max(count + self.S - 1, 1)]
        return self.under(self.intervals.from_row(start))._replace(**own)

    def of_heads(self, heads: Sequence[int]) -> Call:
        """The call of only these query heads, without a value."""
        call = self._replace(value=None, gate=None)
        index = torch.tensor(list(heads), dtype=torch.int64, device=call.query.device)
        own = {name: getattr(call, name).index_select(dim, index) for name, dim in call.along("H").items()}
        if call.mixing is None:
            own["key"] = call.key[:, index // max(call.H // max(call.Hk, 1), 1)]
        return call._replace(**own)

    # ------------------------------------------------------------------ work counts
    def open_heads(self) -> Tensor:
        """`[B, H]` bool: False where an identity gate closes a whole head."""
        closed = closed_heads(self.gate, self.gate_activation)
        if closed is None:
            return torch.ones(self.B, self.H, dtype=torch.bool, device=self.query.device)
        return ~closed.expand(self.B, self.H)

    def visible_pairs(self) -> Tensor:
        """`[B, H]` int64: number of visible (query row, key) pairs."""
        return self.intervals.visible_pairs(self.B, self.T, self.S).expand(self.B, self.H)

    def flops(self, backward: bool = False, dense: bool = False) -> int:
        """Matrix-product FLOPs (2 per multiply-add) of the forward pass, or of the backward pass only.

        Counts visible pairs of open heads, over the features of each head's active mixing chunks; `dense=True` counts
        every pair, head and feature, as `torch.utils.flop_counter` does. Tiles at the border of a mask compute more.
        Statistics compute scores a second time for `received`.
        The backward pass counts the gradients of query, key and value. If mixing requires a gradient, it counts `dS K`
        at full width `Ds`; if the gate does, one forward pass over the closed heads (neither with `closed_grad=False`).
        Reads the values of mask, gate and mixing, which synchronises with a GPU.
        """
        if backward and self.value is None:
            raise ValueError(f"backward is True, but {self.operator} has no backward pass.")
        times = 1 if self.row_weights is None else 2
        if dense:
            count = backward_flops if backward else forward_flops
            return times * count(self.B * self.H * self.T * self.S, self.D, self.Dv)
        is_open = self.open_heads()
        pairs = self.visible_pairs().to(is_open.device)
        widths = [self.D] * self.H if self.mixing is None else active_widths(self.mixing).tolist()
        open_pairs = list(zip((pairs * is_open).sum(0).tolist(), widths, strict=True))
        closed_pairs = zip((pairs * ~is_open).sum(0).tolist(), widths, strict=True)
        if not backward:
            return times * sum(forward_flops(n, D, self.Dv) for n, D in open_pairs)
        all_features = self.closed_grad and self.mixing is not None and self.mixing.requires_grad
        wide = self.D if all_features else None
        total = sum(backward_flops(n, D, self.Dv, wide) for n, D in open_pairs)
        if self.closed_grad and self.gate is not None and self.gate.requires_grad:
            total += sum(forward_flops(n, D, self.Dv) for n, D in closed_pairs)
        return total


_TYPES: Final[dict[Any, str]] = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    Any: "Tensor?",
    int: "SymInt",
    float: "float",
    str: "str",
    bool: "bool",
}
#: The type of every field of `Call` in the schemas of ops.
SCHEMA: Final = {name: _TYPES[hint] for name, hint in get_type_hints(Call).items()}


class Dimension(NamedTuple):
    """A dimension of a tensor: its name, and whether it may be 1, to broadcast."""

    name: str
    may_be_1: bool


#: The dimensions of a tensor, for each rank that it may have.
Layouts = dict[int, tuple[Dimension, ...]]


def layouts_of(*forms: str) -> Layouts:
    """Layouts from text as in the fields of `Call`."""
    layouts = [
        tuple(Dimension(name.removesuffix("|1"), name.endswith("|1")) for name in form.split()) for form in forms
    ]
    return {len(layout): layout for layout in layouts}


#: The layouts of the tensors of a call, but the seed, by field.
LAYOUTS: Final = {
    name: layouts_of(*hint.__metadata__)
    for name, hint in get_type_hints(Call, include_extras=True).items()
    if get_origin(hint) is Annotated
}
#: The fields that may have a gradient, in field order.
OPERANDS: Final = Call._fields[: Call._fields.index("k_lo")]


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of scores, lse and accumulators."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def closed_heads(gate: Tensor | None, activation: str) -> Tensor | None:
    """`[B or 1, H or 1]` bool, True where an identity gate closes a whole head; None where no gate can."""
    if gate is None or not can_close(gate, activation):
        return None
    heads = gate[None] if gate.dim() == 1 else gate
    return heads.reshape(heads.shape[:2]) == 0


def can_close(gate: Tensor, activation: str) -> bool:
    """Whether a head can be closed: by an identity gate with one value for all its rows."""
    return activation == "identity" and all(size == 1 for size in gate.shape[2:])


def active_widths(mixing: Tensor) -> Tensor:
    """`[H]` int64: features that each head of `mixing` `[H, Ds]` uses, without chunks that are all zero."""
    Ds = mixing.shape[1]
    borders = torch.arange(0, Ds, MIXING_CHUNK, device=mixing.device)
    sizes = (Ds - borders).clamp(max=MIXING_CHUNK)  # [chunks]
    padded = torch.nn.functional.pad(mixing, (0, -Ds % MIXING_CHUNK))
    active = (padded != 0).reshape(len(mixing), sizes.numel(), MIXING_CHUNK).any(2)  # [H, chunks]
    widths: Tensor = (active * sizes).sum(1)
    return widths


# ---------------------------------------------------------------------- FLOPs of matrix products
# 2 per multiply-add; softmax, masks, mixing and gates do not count, as in `torch.utils.flop_counter`. `pairs` is the
# number of (query row, key) pairs that are computed. A backward pass counts the scores again, then dP, dV, dQ and dK.
def forward_flops(pairs: int, D: int, Dv: int) -> int:
    """Scores `Q K^T` of width D, then `P V` of width Dv: `2 * pairs * (D + Dv)` (Cordonnier et al. 2020: D = Ds)."""
    return 2 * pairs * (D + Dv)


def backward_flops(pairs: int, D: int, Dv: int, dquery_width: int | None = None) -> int:
    """Scores, dQ and dK of width D, dP and dV of width Dv: `2 * pairs * (3 D + 2 Dv)`.

    `dquery_width` is the width of dQ if it differs from D: the gradient of a mixing vector needs all Ds features of
    `dS K`, including those that the scores of the head skip.
    """
    return 2 * pairs * (2 * D + (D if dquery_width is None else dquery_width) + 2 * Dv)
