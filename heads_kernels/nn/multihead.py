"""The base class of attention modules: projections around one operator call, masks, cache, gates, dropout."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from heads_kernels.batch import Batch, unflatten
from heads_kernels.checks import check_choice, check_dropout, check_flag, check_size, refuse, refuse_type
from heads_kernels.dtensor import is_sharded, replicated
from heads_kernels.functional import entmax_attention
from heads_kernels.mask import Mask
from heads_kernels.nn.attention_call import AttentionCall
from heads_kernels.nn.cache import KeyValueCache
from heads_kernels.nn.gates import HeadGate, check_one_noise
from heads_kernels.nn.masks import mask_and_bias
from heads_kernels.offset_bias import OffsetBias
from heads_kernels.ops.gate import activate, as_4d

#: Takes the outputs of the heads `[B, T, H, Dv]`, after their gates, and returns what the output projection takes.
Change: TypeAlias = Callable[[Tensor], Tensor]
#: Called with a call before its operator runs; returns a change of the outputs, or None.
CallObserver: TypeAlias = Callable[[AttentionCall], Change | None]


class _OwnForward:
    """Stands for packed weights, so that `nn.TransformerEncoder` does not take its fused path, which calls no module
    and refuses arguments with a `__torch_function__`."""

    @classmethod
    def __torch_function__(cls, *call: object) -> object:
        return NotImplemented


class Context(Protocol):
    """A `ContextParallel` of `hk.integrations.distributed`."""

    mesh: Any

    def __call__(self, operator: Callable[..., Tensor], **arguments: Any) -> Tensor: ...

    def whole_length(self, part: int) -> int: ...

    def split(self, sequence: Tensor, dim: int) -> Tensor: ...

    def join(self, part: Tensor, dim: int) -> Tensor: ...


class Multihead(nn.Module, ABC):
    """An attention module: four projections, one operator call.

    Subclasses define `operator`, `source` and `operands`, and may define `beside`.

    Attributes:
        q_proj, k_proj, v_proj, out_proj: `nn.Linear`; the heads are contiguous rows of `v_proj` and columns of
            `out_proj`.
        gate_proj: `nn.Linear` from the query's input to the logits of the output gate, or None.
        head_gate: a `HeadGate`, or None.
        observer: called with an `AttentionCall` before every operator call, or None. What it returns, unless that is
            None, is called with the outputs of the heads `[B, T, H, Dv]`, after their gates, and returns what the
            output projection takes. `hk.analysis.observe` and `hk.heads.patch` set it.
        context: a `ContextParallel`, through which the operator is called, or None; `context_parallel` of
            `hk.integrations.distributed` sets it.
        num_heads, value_dim, scale, dropout: read in every call; pruning changes `num_heads` and the weights.
        computes_padded_rows: whether `key_padding_mask` hides only keys in self-attention, as in
            `torch.nn.MultiheadAttention`. By default it hides rows as well.
    """

    operator: Callable[..., Tensor]
    gate_proj: nn.Linear | None
    head_gate: HeadGate | None
    observer: CallObserver | None = None
    context: Context | None = None
    computes_padded_rows: bool = False
    #: Read by the layers of `torch.nn`.
    _qkv_same_embed_dim = True
    in_proj_weight = in_proj_bias = _OwnForward()

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        rows: tuple[int, int, int],
        *,
        value_dim: int,
        scale: float,
        qk_bias: bool | None = None,
        kdim: int | None = None,
        vdim: int | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        output_gate: str | None = None,
        batch_first: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_flag("batch_first", batch_first)
        check_choice("output_gate", output_gate, (None, "head", "element"))
        check_flag("bias", bias)
        self.embed_dim = embed_dim
        self.kdim = embed_dim if kdim is None else check_size("kdim", kdim)
        self.vdim = embed_dim if vdim is None else check_size("vdim", vdim)
        self.batch_first = batch_first
        self.num_heads = num_heads
        self.value_dim = value_dim
        self.dropout = check_dropout(dropout, "dropout")
        self.scale = scale
        linear = partial(nn.Linear, device=device, dtype=dtype)
        qk_bias = bias if qk_bias is None else qk_bias
        self.q_proj = linear(embed_dim, rows[0], bias=qk_bias)
        self.k_proj = linear(self.kdim, rows[1], bias=qk_bias)
        self.v_proj = linear(self.vdim, rows[2], bias=bias)
        self.out_proj = linear(num_heads * value_dim, embed_dim, bias=bias)
        gates = {"head": num_heads, "element": num_heads * value_dim}
        self.output_gate = output_gate
        self.gate_proj = linear(embed_dim, gates[output_gate], bias=bias) if output_gate else None
        self.register_module("head_gate", None)

    def reset_parameters(self) -> None:
        """Xavier uniform weights, biases of 0."""
        for part in self.children():
            if isinstance(part, nn.Linear):
                nn.init.xavier_uniform_(part.weight)
                if part.bias is not None:
                    nn.init.zeros_(part.bias)

    # ------------------------------------------------------------------ the kind of attention
    @abstractmethod
    def source(self, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """The projected keys and values, each `[B, S, ...]`, as a cache holds them."""

    @abstractmethod
    def operands(self, query: Tensor, source: tuple[Tensor, ...]) -> dict[str, Tensor | None]:
        """The tensor arguments of the operator."""

    def beside(self, query: Tensor, mask: Mask, cache: KeyValueCache | None) -> Tensor | None:
        """What is added to the heads before their gates, `[B, H, T, Dv]`."""
        return None

    @property
    def closed_grad(self) -> bool:
        """The operator's argument `closed_grad`."""
        return self.head_gate is None or self.head_gate.closed_grad

    # ------------------------------------------------------------------ a call
    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        mask: Mask | None = None,
        bias: Tensor | OffsetBias | None = None,
        cache: KeyValueCache | None = None,
    ) -> tuple[Tensor, None]:
        """Attention of `query` to `key` and `value`, with the argument order of `torch.nn.MultiheadAttention`.

        Without `key`, or if `key` is the same tensor as `query`, this is self-attention: rows and keys are one
        sequence, and `key_padding_mask` hides rows as well as keys (but see `computes_padded_rows`).

        Args:
            query: `[..., T, embed_dim]` with at least one batch dimension; B is their product. With
                `batch_first=False` all inputs and the output are `[T, B, embed_dim]`.
            key: `[..., S, kdim]`; default `query`.
            value: `[..., S, vdim]`; default `key`.
            key_padding_mask: `[..., S]` (including cached keys), bool with True = hidden, or floating with 0 =
                visible and -inf = hidden.
            need_weights: must be False: the `[T, S]` weights are never stored.
            attn_mask: `[T, S]` or `[B * H, T, S]`: bool with True = hidden, or floating, added to the scores as a
                bias. Prefer `mask` to hide keys. Not read with `is_causal`, as in `torch.nn.MultiheadAttention`.
            average_attn_weights: no effect.
            is_causal: no row sees a later key. With a cache the last row is aligned with the last key.
            mask: a native mask, True = visible, which the layers of a model can share; its `query_mask` hides padded
                rows of encoder-decoder attention.
            bias: added to the scaled scores: a float tensor broadcastable to `[..., H, T, S]`, with the batch
                dimensions of the inputs, H the remaining heads of a pruned layer and S including cached keys; or an
                `OffsetBias`. -inf hides. Its gradient is summed over broadcast dimensions; it is not expanded in
                memory. In self-attention the last row of an `OffsetBias` is aligned with the last key; with a cache
                of encoder-decoder attention pass `bias.starting_at(row)`.
            cache: keys and values of earlier calls; see `KeyValueCache`.

        Returns:
            The output `[..., T, embed_dim]`, and None in the place of weights. Rows that see no key, and layers without
            heads, give the bias of `out_proj`.
        """
        if need_weights:
            instead = "hk.analysis.observe gives statistics of each row, and probabilities of chosen ones"
            refuse("need_weights", "is True, but the weights are never stored", instead)
        check_flag("is_causal", is_causal)
        alone = key is None or key is query
        if key is None:
            if value is not None:
                refuse("value", "is given without key", "pass key too")
            key = query
        value = key if value is None else value
        self._check(query, key, value)
        batch = tuple(query.shape[:-2]) if query.dim() > 3 else None
        rows = self._in_order(query)
        keys = rows if alone else self._in_order(key)
        values = keys if value is key else self._in_order(value)
        T, S = rows.shape[1], keys.shape[1]
        if self.context is not None:
            self._check_context(cache)
            T, S = self.context.whole_length(T), self.context.whole_length(S)
        if cache is not None:
            if not isinstance(cache, KeyValueCache):
                refuse("cache", f"is a {type(cache).__name__}", "pass a hk.nn.KeyValueCache", TypeError)
            S = cache.length_after(S, alone)
        visible, bias = mask_and_bias(
            query,
            (*(rows.shape[:1] if batch is None else batch), self.num_heads, T, S),
            mask=mask,
            key_padding_mask=key_padding_mask,
            attn_mask=attn_mask,
            is_causal=is_causal,
            bias=bias,
            self_attention=alone,
            hides_rows=not self.computes_padded_rows,
            kept_heads=getattr(self, "kept_heads", None),
        )
        with nullcontext() if cache is None else cache.kept_on_error():
            operands = self.operands(rows, self._source(keys, values, cache, alone))
            # The operator gets the unflattened batch dimensions, so that a bias that broadcasts is not expanded.
            arguments: dict[str, Any] = {
                name: each if each is None or name in ("mixing", "alpha") else unflatten(each, batch)
                for name, each in operands.items()
            }
            arguments |= {"attn_mask": visible, "bias": bias, "scale": self.scale}
            change, observer = None, self.observer  # read once: a block of another thread may end
            if observer is not None:
                change = observer(AttentionCall.of(self.operator, self_attention=alone, **arguments))
            heads = self._attend(rows, arguments, batch, self.beside(rows, visible, cache))
            heads = heads.transpose(1, 2)
            if change is not None:
                heads = change(heads)
            output = unflatten(self.out_proj(heads.flatten(2)), batch)
        return output if self.batch_first else output.transpose(0, 1), None

    def _source(self, key: Tensor, value: Tensor, cache: KeyValueCache | None, alone: bool) -> tuple[Tensor, ...]:
        """`source`, including cached keys and values."""
        if cache is None:
            return self.source(key, value)
        count = getattr(self, "num_key_heads", getattr(self, "num_value_heads", 0))
        heads = getattr(self, "kept_key_heads", [*range(count)])
        shared = [] if hasattr(self, "num_key_heads") else ["a shared key"]
        biases = [] if getattr(self, "content_proj", None) is None else [f"{self.num_heads} biases"]
        cache.hold(", ".join((*shared, *biases, f"values of heads {heads}")))
        if alone:
            return cache.append(*self.source(key, value))
        source = cache.once(partial(self.source, key, value))
        if source[0].shape[0] != key.shape[0]:
            was = f"holds batch {source[0].shape[0]}, but query has batch {key.shape[0]}"
            refuse("cache", was, "call reorder(beams) or reset() first")
        return source

    def _attend(self, query: Tensor, arguments: dict[str, Any], batch: Batch, beside: Tensor | None) -> Tensor:
        """Call the operator, whose `arguments` have batch dimensions `batch`, with the gates: `[B, H, T, Dv]`."""
        gate, activation = None, "identity"
        if self.head_gate is not None:
            if is_sharded(getattr(self.out_proj, "weight", None)):
                check_one_noise(self.head_gate)
            gate = self.head_gate(*query.shape[:2])
        elif self.gate_proj is not None:
            gate, activation = self._logits(query), "sigmoid"
        if beside is not None and gate is not None:
            factor = as_4d(gate)
            if is_sharded(beside) and not is_sharded(factor):
                factor = replicated(factor, beside.device_mesh)  # type: ignore[attr-defined]
            beside = beside * activate(_of_rows(factor, beside), activation)
        if batch is not None and gate is not None and gate.dim() > 1:
            gate = unflatten(gate.expand(len(query), *gate.shape[1:]), batch)
        operator = self.operator if self.context is None else partial(self.context, self.operator)
        heads = operator(
            **arguments,
            gate=gate,
            gate_activation=activation,
            closed_grad=self.closed_grad,
            dropout_p=self.dropout if self.training else 0.0,
        )
        if batch is not None:
            heads = heads.flatten(0, len(batch) - 1)
        if beside is not None:
            heads = heads + beside
        if self.head_gate is not None and self.gate_proj is not None:
            heads = heads * _of_rows(self._logits(query), heads).sigmoid()
        return heads

    def _in_order(self, inputs: Tensor) -> Tensor:
        """`inputs` as `[B, L, width]`."""
        return inputs.flatten(0, -3) if self.batch_first else inputs.transpose(0, 1)

    def _check_context(self, cache: KeyValueCache | None) -> None:
        """Refuse what reads the keys of whole sequences, of which this process has a part."""
        if self.operator is entmax_attention:
            was = "is set, but entmax needs the scores of whole rows"
            refuse("context", was, "leave the layer out of context_parallel")
        for name, given in (("cache", cache), ("observer", self.observer)):
            if given is not None:
                was = "is given, but the layer is under context parallelism"
                refuse(name, was, "set its context to None, and pass whole sequences")

    def _logits(self, query: Tensor) -> Tensor:
        """Logits of the output gate, `[B, H, T, 1 or Dv]`."""
        width = self.value_dim if self.output_gate == "element" else 1
        return self.by_head("gate_proj", query, self.num_heads, width).transpose(1, 2)

    def by_head(self, projection: str, inputs: Tensor, heads: int, width: int) -> Tensor:
        """`inputs` `[B, L, ...]` projected, `[B, L, heads, width]`."""
        projected: Tensor = self.get_submodule(projection)(inputs)
        if projected.shape[-1] != heads * width:
            was = f"gives {projected.shape[-1]} features, but {heads} heads have {heads * width}"
            refuse(projection, was, "for tensor parallelism use hk.integrations.distributed.tensor_parallel_plan")
        return projected.view(*projected.shape[:-1], heads, width)

    def _check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        widths = {"query": self.embed_dim, "key": self.kdim, "value": self.vdim}
        for (name, width), tensor in zip(widths.items(), (query, key, value), strict=True):
            length = "T" if name == "query" else "S"
            layout = f"[B, {length}, {width}]" if self.batch_first else f"[{length}, B, {width}]"
            if not isinstance(tensor, Tensor):
                refuse_type(name, tensor, f"pass a tensor {layout}")
            if tensor.is_nested:
                instead = "and masks (enable_nested_tensor=False in a TransformerEncoder)"
                refuse(name, "is nested", f"pass {layout} {instead}")
            fits = tensor.dim() == 3 or (tensor.dim() > 3 and self.batch_first)
            if not fits or tensor.shape[-1] != width:
                refuse(name, f"has shape {list(tensor.shape)}", f"pass {layout}, with batch_first={self.batch_first}")
        # Batch dimensions are those before the length, or the second.
        found, wanted = (each.shape[:-2] if self.batch_first else each.shape[1:2] for each in (key, query))
        if found != wanted:
            refuse("key", f"has batch {list(found)}, but query has batch {list(wanted)}", "make them equal")
        if value.shape[:-1] != key.shape[:-1]:
            was = f"has shape {list(value.shape)}, but key has {list(key.shape)}"
            refuse("value", was, "make batch and length equal")

    def extra_repr(self) -> str:
        return (
            f"num_heads={self.num_heads}, value_dim={self.value_dim}, scale={self.scale:.4g}, dropout={self.dropout}, "
            f"batch_first={self.batch_first}, output_gate={self.output_gate!r}"
        )


def _of_rows(gates: Tensor, heads: Tensor) -> Tensor:
    """Gates, or logits before their slope, without the NaN of padded rows, whose `heads` are 0."""
    return gates.where(~(gates.isnan() & (heads == 0).all(-1, keepdim=True)), 0.0)


def head_width(argument: str, embed_dim: int, num_heads: int, width: int | None) -> int:
    """The width of a head: `width`, or an equal share of `embed_dim`."""
    if width is not None:
        return check_size(argument, width)
    if embed_dim % num_heads:
        instead = f"pass a multiple of num_heads, or {argument}"
        refuse("embed_dim", f"is {embed_dim}, but num_heads is {num_heads}", instead)
    return embed_dim // num_heads
