"""Named cases: the sizes and options of one call, how its tensors are drawn, and the call."""

from __future__ import annotations

import inspect
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from heads_kernels import functional
from heads_kernels.call import MIXING_CHUNK, Call, compute_dtype
from heads_kernels.checks import DTYPES, GateActivation
from heads_kernels.offset_bias import OffsetBias
from heads_kernels.parse import parse
from heads_kernels.testing.masks import MaskBuilder, Sizes

#: heads_first: contiguous `[B, H, L, W]`; transposed: a view of `[B, L, H, W]`, as projections give
#: it; sliced: a slice inside a storage full of NaN, the first element not aligned.
Layout = Literal["heads_first", "transposed", "sliced"]
Mixing = Literal["dense", "blocks", "ragged", "unaligned", "chunks", "zero_head"]


@dataclass(frozen=True, eq=False)
class Inputs:
    """A call of `operator`: `tensors` by argument name (they can get gradients), and its `options`.

    A backward pass starts from `dout`, the gradient of the output, and `dlse` `[B, H, T]`, that of `lse`; if `dlse` is
    None, the call does not return `lse`. PyTorch's generator is seeded with `seed` before the call, so that dropout
    draws the same mask every time.
    """

    operator: str
    tensors: dict[str, Tensor]
    options: dict[str, Any]
    dout: Tensor
    seed: int = 0
    dlse: Tensor | None = None

    def call(self, backend: str | None = None, **options: Any) -> Tensor:
        """Run the operator; `options` replace those of the case."""
        if self.options.get("dropout_p"):
            torch.manual_seed(self.seed)
        function: Callable[..., Tensor] = getattr(functional, self.operator)
        return function(**self.arguments(**options), backend=backend)

    def arguments(self, **options: Any) -> dict[str, Any]:
        """The arguments by name; an `offset_table` becomes an `OffsetBias`."""
        arguments = {**self.tensors, **self.options, **options}
        if "offset_table" in arguments:
            arguments["bias"] = OffsetBias(arguments.pop("offset_table"))
        return arguments

    def backward(self, backend: str | None = None, **options: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """The output, and by argument name the gradients of the tensors that require one.

        If none requires a gradient, all get one.
        """
        inputs = self
        if not any(tensor.requires_grad for tensor in self.tensors.values()):
            inputs = self.requires_grad()
        if self.dlse is None:
            out, starts = inputs.call(backend, **options), [self.dout]
            results = [out]
        else:
            results = list(inputs.call(backend, return_lse=True, **options))
            out, starts = results[0], [self.dout, self.dlse]
        leaves = {name: t for name, t in inputs.tensors.items() if t.requires_grad}
        grads = torch.autograd.grad(results, list(leaves.values()), starts)
        return out.detach(), dict(zip(leaves, grads, strict=True))

    def parsed(self, **options: Any) -> Call:
        """The `Call`, with one batch dimension."""
        return parse(self.operator, **self.arguments(**options))[0]

    def statistics(self, **options: Any) -> Inputs:
        """The call of `attention_statistics` on the same scores, whose keys receive by weights of rows: some 0, some
        negative. `options` replace or extend those of the case.
        """
        taken = {*inspect.signature(functional.attention_statistics).parameters, "offset_table"}
        tensors = {name: t for name, t in self.tensors.items() if name in taken}
        sizes = self.dout.shape[:-1]
        weights = (torch.arange(sizes.numel(), device=self.dout.device) % 7 - 2).reshape(sizes) / 4
        kept = {name: value for name, value in self.options.items() if name in taken}
        return replace(
            self, operator="attention_statistics", tensors=tensors, options={**kept, "received": weights, **options}
        )

    def to(self, dtype: torch.dtype) -> Inputs:
        """The same values in `dtype`; the oracle reads quantised inputs in float64."""
        tensors = {name: t.detach().to(dtype) for name, t in self.tensors.items()}
        dlse = None if self.dlse is None else self.dlse.to(compute_dtype(dtype))
        return replace(self, tensors=tensors, dout=self.dout.to(dtype), dlse=dlse)

    def requires_grad(self, *names: str) -> Inputs:
        """The same memory as leaves; those named, or all, require a gradient."""
        tensors = {name: t.detach().requires_grad_(not names or name in names) for name, t in self.tensors.items()}
        return replace(self, tensors=tensors)


@dataclass(frozen=True)
class Case(ABC):
    """A call of an operator.

    gate       sizes of the gate, one letter per dimension, "1" broadcasts: "H", "BH", "B1T", "BHTD"
               (here D is the width Dv)
    closed     share of the heads whose identity gate is exactly 0, spread evenly; a `[B, H]` gate
               closes other heads in every batch. In a gate per token or element, the share of its entries.
    bias       sizes of the dense bias, one letter per dimension of [B, H, T, S], "1" broadcasts; `bias_dtype` None is
               the dtype of the query, `bias_hides` makes every fifth entry -inf
    offsets    columns of the table of an `OffsetBias`, one row per head; 0: none
    outlier    factor of every seventh query row: with 40, scores reach a hundred, and a row attends to one key
    decline    factor between the values, and between the dout, of a head and the head before it
    mean       mean of the values and of dout, whose standard deviation is 1: delta is then as large as its square, so
               that an error of delta is larger than the roundings of dP
    """

    name: str
    B: int
    H: int
    T: int
    S: int
    _: KW_ONLY
    Dv: int
    gate: str | None = None
    gate_activation: GateActivation = "identity"
    gate_strided: bool = False
    gate_dtype: torch.dtype | None = torch.float32
    closed: float = 0.0
    bias: str | None = None
    bias_dtype: torch.dtype | None = torch.float32
    bias_hides: bool = False
    offsets: int = 0
    softcap: float | None = None
    sinks: bool = False
    mask: MaskBuilder | None = None
    is_causal: bool = False
    scale: float | None = None
    dropout_p: float = 0.0
    layout: Layout = "heads_first"
    outlier: float = 1.0
    decline: float = 1.0
    mean: float = 0.0
    dtypes: tuple[torch.dtype, ...] = DTYPES
    tags: tuple[str, ...] = ("nasty",)

    operator: ClassVar[str]

    def __str__(self) -> str:
        return self.name

    @abstractmethod
    def _operands(self, draw: _Draw) -> dict[str, Tensor]:
        """query, key, value and the other operands of the operator."""

    def make(
        self,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        seed: int = 0,
        requires_grad: bool = False,
        drawn_on: torch.device | str = "cpu",
    ) -> Inputs:
        """Draw the tensors of the call, on PyTorch's default device if `device` is None.

        The same seed gives the same numbers on every device, and in every dtype up to its rounding.
        If `drawn_on` is a GPU, large tensors are drawn there: other numbers, in a hundredth of the time.
        """
        device = torch.get_default_device() if device is None else torch.device(device)
        draw = _Draw(self, dtype, device, seed, torch.device(drawn_on))
        with torch.device("cpu"):
            tensors = self._operands(draw)
            tensors["query"][..., ::7, :] *= self.outlier
            if self.gate is not None:
                tensors["gate"] = self._draw_gate(draw)
            tensors |= self._draw_terms(draw)
        options: dict[str, Any] = {"is_causal": self.is_causal, "dropout_p": self.dropout_p}
        if self.mask is not None:
            options["attn_mask"] = self.mask(Sizes(self.B, self.H, self.T, self.S), device)
        if self.softcap is not None:
            options["softcap"] = self.softcap
        if self.scale is not None:
            options["scale"] = self.scale
        if self.gate_activation != "identity":
            options["gate_activation"] = self.gate_activation
        dout = draw.operand(self.H, self.T, self.Dv)
        for tensor in (tensors["value"], dout):
            tensor += self.mean
            for h in range(tensor.shape[1]) if self.decline != 1.0 else ():
                tensor[:, h] *= self.decline**h
        inputs = Inputs(self.operator, tensors, options, dout, seed)
        return inputs.requires_grad() if requires_grad else inputs

    def _draw_terms(self, draw: _Draw) -> dict[str, Tensor]:
        """Biases and sinks, of the size of scores."""
        terms = {}
        if self.bias is not None:
            sizes = {"B": self.B, "H": self.H, "T": self.T, "S": self.S, "1": 1}
            bias = draw.normal(*(sizes[letter] for letter in self.bias))
            if self.bias_hides:
                bias.reshape(-1)[2::5] = -torch.inf
            terms["bias"] = draw.companion(bias, self.bias_dtype)
        if self.offsets:
            terms["offset_table"] = draw.companion(draw.normal(self.H, self.offsets))
        if self.sinks:
            terms["sinks"] = draw.companion(draw.normal(self.H))
        return terms

    def _draw_gate(self, draw: _Draw) -> Tensor:
        """Around 0.8 (or logits around 0.8), some negative; exact zeros where `closed` says."""
        assert self.gate is not None
        sizes = {"B": self.B, "H": self.H, "T": self.T, "D": self.Dv, "1": 1}
        shape = [sizes[letter] for letter in self.gate]
        gate = draw.normal(*shape) * 0.5 + 0.8
        if self.closed:
            # Entry n is closed where n * closed passes an integer: evenly spread.
            entry = torch.arange(gate.numel()).reshape(shape)
            if self.gate.startswith("BH"):
                entry = entry + torch.arange(self.B).reshape(-1, *[1] * (len(shape) - 1))
            gate[torch.floor((entry + 1) * self.closed) > torch.floor(entry * self.closed)] = 0.0
        gate = draw.companion(gate, self.gate_dtype)
        if self.gate_strided:  # dimensions of memory in the opposite order, with gaps
            gate = gate.permute(*reversed(range(gate.dim()))).contiguous()
            gate = torch.stack([gate, gate], -1)[..., 0].permute(*reversed(range(gate.dim())))
        return gate


@dataclass(frozen=True)
class GatedCase(Case):
    """A call of `gated_attention`; `Hk` 0 means as many key heads as query heads."""

    D: int
    Hk: int = 0

    operator: ClassVar[str] = "gated_attention"

    def _operands(self, draw: _Draw) -> dict[str, Tensor]:
        Hk = self.Hk or self.H
        return {
            "query": draw.operand(self.H, self.T, self.D),
            "key": draw.operand(Hk, self.S, self.D),
            "value": draw.operand(Hk, self.S, self.Dv),
        }


@dataclass(frozen=True)
class EntmaxCase(GatedCase):
    """A call of `entmax_attention`: `alpha` of the first and of the last head, evenly spread between."""

    alpha: tuple[float, float] = (1.5, 1.5)

    operator: ClassVar[str] = "entmax_attention"

    def _operands(self, draw: _Draw) -> dict[str, Tensor]:
        alpha = torch.linspace(*self.alpha, self.H, dtype=torch.float64)
        return {**super()._operands(draw), "alpha": draw.companion(alpha)}


@dataclass(frozen=True)
class CollaborativeCase(Case):
    """A call of `collaborative_attention`; `Hv` 0 means a value head for every head of mixing.

    mixing    dense; blocks (disjoint supports of equal width); ragged (of unequal width, borders at
              chunks, a head may have no features); unaligned (the same, borders anywhere); chunks
              (dense, every third chunk of a head zero); zero_head (dense, head 0 all zero)
    """

    Ds: int
    mixing: Mixing = "dense"
    content_bias: bool = False
    Hv: int = 0

    operator: ClassVar[str] = "collaborative_attention"

    def _operands(self, draw: _Draw) -> dict[str, Tensor]:
        tensors = {
            "query": draw.operand(self.T, self.Ds),
            "key": draw.operand(self.S, self.Ds),
            "value": draw.operand(self.Hv or self.H, self.S, self.Dv),
            "mixing": draw.companion(draw.normal(self.H, self.Ds) * self.mixing_support()),
        }
        if self.content_bias:
            tensors["content_bias"] = draw.companion(draw.normal(self.B, self.H, self.S))
        return tensors

    def mixing_support(self) -> Tensor:
        """`[H, Ds]` of 0 and 1: the features that a head uses."""
        h = torch.arange(self.H)[:, None]  # [H, 1]
        d = torch.arange(self.Ds)  # [Ds]
        if self.mixing == "chunks":
            return ((d // MIXING_CHUNK + h) % 3 != 0).double()
        if self.mixing == "zero_head":
            return (h != 0).expand(-1, self.Ds).double()
        if self.mixing == "dense":
            return torch.ones(self.H, self.Ds, dtype=torch.float64)
        step = MIXING_CHUNK if self.mixing == "ragged" else 1
        power = 1.0 if self.mixing == "blocks" else 1.2  # 1.2: later heads keep more
        units = -(-self.Ds // step)
        borders = [step * round(units * (n / self.H) ** power) for n in range(self.H + 1)]
        lo, hi = torch.tensor(borders[:-1])[:, None], torch.tensor(borders[1:])[:, None]
        return ((d >= lo) & (d < hi)).double()


class _Draw:
    """Draws in float64 on the CPU, then rounds, moves and lays out: the same numbers everywhere."""

    def __init__(self, case: Case, dtype: torch.dtype, device: torch.device, seed: int, large: torch.device) -> None:
        self.case, self.dtype, self.device = case, dtype, device
        seed += zlib.crc32(case.name.encode())
        self._generator = torch.Generator("cpu").manual_seed(seed)
        self._large = torch.Generator(large).manual_seed(seed) if large.type != "cpu" else None

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator, dtype=torch.float64, device="cpu")

    def large(self, *shape: int) -> Tensor:
        if self._large is None:
            return self.normal(*shape).to(self.device, self.dtype)
        where = self._large.device
        drawn = torch.randn(shape, generator=self._large, dtype=torch.float32, device=where)
        return drawn.to(self.device, self.dtype)

    def companion(self, tensor: Tensor, dtype: torch.dtype | None = torch.float32) -> Tensor:
        """A tensor other than query, key and value, in `dtype`, or in theirs for None; float64 if they are."""
        wide = self.dtype == torch.float64
        return tensor.to(self.device, torch.float64 if wide else dtype or self.dtype)

    def operand(self, *sizes: int) -> Tensor:
        """`[B, H, L, W]` in the layout of the case; or `[B, L, W]`, shared by the heads."""
        tensor = self.large(self.case.B, *sizes)
        if self.case.layout == "transposed" and len(sizes) == 3:
            return tensor.transpose(1, 2).contiguous().transpose(1, 2)
        return surrounded(tensor) if self.case.layout == "sliced" else tensor


#: Guard rows before and after, and guard elements left and right of every row. Odd, so that the
#: first element of a row is not aligned to a vector, and wide enough that one vector too many (16
#: float32) still lands in NaN.
GUARD_ROWS = 1
GUARD_WIDTH = 17


def surrounded(tensor: Tensor) -> Tensor:
    """The same values as a slice of a larger storage full of NaN, which reveals reads out of bounds.

    The last dimension has stride 1; the tensor is the same in every other respect, and a leaf.
    """
    if tensor.dim() == 0:
        return tensor.detach().clone()
    rows = tensor.shape[-2] if tensor.dim() > 1 else 1
    width = tensor.shape[-1]
    shape = (*tensor.shape[:-2], rows + 2 * GUARD_ROWS, width + 2 * GUARD_WIDTH)
    storage = tensor.new_full(shape, float("nan"))
    inner = storage[..., GUARD_ROWS : GUARD_ROWS + rows, GUARD_WIDTH : GUARD_WIDTH + width]
    inner = inner if tensor.dim() > 1 else inner[0]
    inner.copy_(tensor.detach())
    return inner
