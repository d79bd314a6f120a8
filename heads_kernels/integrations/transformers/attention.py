"""The attention function that transformers' models call: gates, head masks, padding and biases in the operator."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeGuard

import torch
from torch import Tensor, nn
from transformers.utils.generic import TransformersKwargs

from heads_kernels.checks import GateActivation, refuse
from heads_kernels.dtensor import is_sharded, local_part, summed_gradient
from heads_kernels.functional import attention_statistics, collaborative_attention, gated_attention
from heads_kernels.heads.shared import rotary_places, split_rotary, split_shared
from heads_kernels.integrations.transformers.head_masks import given_head_mask, head_mask_row, requests_statistics
from heads_kernels.integrations.transformers.masks import PreparedMask, RelativeBias, computes_with_masks, whole_mask
from heads_kernels.mask import Mask
from heads_kernels.nn import HeadGate
from heads_kernels.nn.attention_call import AttentionCall
from heads_kernels.nn.gates import check_one_noise
from heads_kernels.offset_bias import OffsetBias
from heads_kernels.ops.gate import activate, as_4d
from heads_kernels.ops.statistics import AttentionStatistics

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

#: Arguments that the operator does not need: of packed sequences, which the mask describes too, and of models.
_UNREAD: Final = {*TransformersKwargs.__annotations__, "deterministic", "return_dict", "use_cache"}


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: PreparedMask | Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    position_bias: RelativeBias | Tensor | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    output_attentions: bool | None = None,
    output_gate: Tensor | None = None,
    gate_activation: GateActivation = "identity",
    **kwargs: Any,
) -> tuple[Tensor, AttentionStatistics | None]:
    """The operators as an attention function of transformers (`AttentionInterface`).

    A converted layer, with `module.mixing` and query and key from `SharedProjection`s, runs `collaborative_attention`;
    others run `gated_attention`. With `module.ragged` zeros of mixing stay zero.

    The gate of a head is the product of `module.head_gate` (`hk.nn.HeadGate`), if the module has one, and of the head
    mask passed to the model: `head_mask`, `decoder_head_mask` or `cross_attn_head_mask`, `[H]` or `[L, H]`, of any
    floating or integer dtype, with gradient. Closed heads cost nothing. In a layer converted to ragged heads the
    gradient of a gate is 0 where the gate is 0: the operator has one flag (`closed_grad`) for gates and mixing.

    In a pruned layer, which has the buffer `kept_heads`, biases, sinks and head masks may cover the original heads.

    Args:
        module: the calling layer.
        query: `[B, H, T, D]`; `key`, `value`: `[B, Hk, S, D]` and `[B, Hk, S, Dv]`. In a converted layer query and key
            are the inputs of `split_shared`.
        attention_mask: the result of `prepare_mask`; a bool tensor, True = may attend; or a float tensor to add.
        is_causal, sliding_window: used only without a mask; `is_causal=None` means `module.is_causal`.
        position_bias: added to the scores; a tensor that broadcasts to `[B, H, T, S]`.
        softcap, s_aux: `softcap` and `sinks` of the operators.
        output_gate: logits `[B, H, T]` or `[B, H, T, Dv]` of an output-gated layer, under `gate_activation`.

    Returns:
        `[B, T, H, Dv]`, contiguous; and with `output_attentions=True`, in the place of the `[B, H, T, S]` map of
        probabilities, the `hk.AttentionStatistics` of the layer.

    Raises:
        ValueError: an argument that nothing reads, such as sinks by row, sparse indices, a paged cache; a mask of
            another length than the keys; a head mask that does not fit, or that is given to a model not in use.
    """
    _check_served(module, kwargs)
    output_attentions = output_attentions or requests_statistics(module)
    B, T, D = query.shape[0], *query.shape[2:]
    scale = D**-0.5 if scaling is None else scaling
    operands = _operands(module, query, key, value)
    is_shared = "mixing" in operands
    H = len(operands["mixing"]) if is_shared else query.shape[1]
    gate, closed_grad = _head_gate(module, (B, H, T), kwargs)
    if is_shared:
        closed_grad = not module.ragged
    activation = "identity"
    if gate is None and output_gate is not None:
        gate, activation, output_gate = output_gate, gate_activation, None

    S = operands["key"].shape[-2]
    context = getattr(module, "context", None)
    if context is None or attention_mask is None:
        sizes = (T, S) if context is None else (context.whole_length(T), context.whole_length(S))
        mask = _mask(module, sizes, attention_mask, is_causal, sliding_window)
    else:
        mask = whole_mask(module, context, attention_mask)
    scores: dict[str, Any] = {
        "bias": _bias(module, (H, T, S), attention_mask, position_bias, query.device),
        "softcap": softcap,
        "sinks": None if s_aux is None else _of_kept_heads(module, H, s_aux, 0),
        "scale": scale,
    }
    operator: Any = collaborative_attention if is_shared else gated_attention
    observer, change = getattr(module, "observer", None), None
    if context is not None and (observer is not None or output_attentions):
        name = "output_attentions" if observer is None else "observe or patch"
        refuse(name, "is asked of parts of sequences", "set context to None, and pass whole ones")
    if observer is not None:
        first = attention_mask.first if isinstance(attention_mask, PreparedMask) else None
        call = AttentionCall.of(operator, **operands, **scores, attn_mask=mask, first=first)
        change = observer(call.up_to_last_seen() if isinstance(attention_mask, Tensor) else call)
    if context is not None:
        operator = partial(context, operator)
    heads = operator(
        **operands,
        **scores,
        gate=gate,
        attn_mask=mask,
        gate_activation=activation,
        closed_grad=closed_grad,
        dropout_p=dropout,
    )
    out = heads.transpose(1, 2).contiguous()
    statistics = None
    if output_attentions:
        del operands["value"]
        statistics = attention_statistics(**operands, **scores, attn_mask=mask)
    if output_gate is not None:  # the operator's gate is the head gate
        wide = output_gate.to(torch.promote_types(output_gate.dtype, torch.float32))
        out = out * as_4d(activate(wide, gate_activation)).transpose(1, 2).to(out.dtype)
    if change is not None:
        out = change(out)
    return out, statistics


def _check_served(module: nn.Module, arguments: dict[str, Any]) -> None:
    """Refuse arguments that nothing reads, such as sinks by row and keys chosen by index, and masks that are lost."""
    if (what := computes_with_masks(type(module))) is not None:
        was = f"is given to {type(module).__name__}, which {what}"
        refuse("attention_mask", was, "load the model with attn_implementation='eager' or 'sdpa'")
    for name, each in arguments.items():
        if each is None or name in _UNREAD or name.endswith("head_mask"):
            continue
        was = f"is given to the attention of {type(module).__name__} and is not supported"
        instead = "leave it out, or use attn_implementation='sdpa' or 'eager'"
        if name == "cache":  # another implementation would ignore gates and head masks
            instead = "call generate, which keeps gates and head masks"
        refuse(name, was, instead)


def _operands(module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> dict[str, Any]:
    """The operands of the operator: with `mixing` and `content_bias`, of collaborative attention."""
    mixing: Tensor | None = getattr(module, "mixing", None)
    if mixing is not None:
        content_bias = None
        if (places := rotary_places(module)) is not None:
            query, key, mixing = split_rotary(query, key, mixing, places)
        else:
            query, key, content_bias = split_shared(query, key, mixing)
        Hv: int = module.num_value_heads  # type: ignore[assignment]
        group = len(mixing) // max(Hv, 1)
        if value.shape[1] < Hv and (mesh := _mesh(module)) is not None:
            query, key = (summed_gradient(each, mesh) for each in (query, key))
            mixing = local_part(mixing, 0, mesh)
            content_bias = None if content_bias is None else local_part(content_bias, 1, mesh)
            if value.shape[1] * group != len(mixing):
                was = f"has {value.shape[1]} heads of values in a process that mixes {len(mixing)}"
                refuse(type(module).__name__, was, "keep a number of heads that the processes share evenly")
        value = value[:, :Hv]  # fused projections pad it
        operands = {"query": query, "key": key, "value": value, "mixing": mixing}
        return operands if content_bias is None else {**operands, "content_bias": content_bias}
    if query.shape[1] == 0:  # every head is pruned; keys may be left for a cache to count
        key, value = key[:, :0], value[:, :0]
    return {"query": query, "key": key, "value": value}


def _mesh(module: nn.Module) -> DeviceMesh | None:
    """The processes of tensor parallelism, each with a part of the heads; None without it."""
    return next((p.device_mesh for p in module.parameters() if is_sharded(p)), None)  # type: ignore[attr-defined]


# ---------------------------------------------------------------------- masks and biases
def _is_added(attention_mask: PreparedMask | Tensor | None) -> TypeGuard[Tensor]:
    return isinstance(attention_mask, Tensor) and attention_mask.is_floating_point()


def _mask(
    module: nn.Module,
    sizes: tuple[int, int],
    attention_mask: PreparedMask | Tensor | None,
    is_causal: bool | None,
    sliding_window: int | None,
) -> Mask | Tensor | None:
    """The operator's mask. Without one a single row sees every key, as in stock SDPA."""
    T, S = sizes
    if isinstance(attention_mask, PreparedMask):
        if attention_mask.sizes[3] != S:  # the model added keys
            was = f"covers {attention_mask.sizes[3]} keys, but {type(module).__name__} has {S}"
            refuse("attention_mask", was, "use attn_implementation='eager' or 'sdpa'")
        return attention_mask.mask
    if attention_mask is not None:
        return None if _is_added(attention_mask) else attention_mask
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = T > 1 and bool(causal)
    if sliding_window is None or T == 1:
        return Mask(causal=causal)
    return Mask(causal=causal, window=(sliding_window - 1, 0 if causal else sliding_window - 1))


def _bias(
    module: nn.Module,
    sizes: tuple[int, int, int],
    attention_mask: PreparedMask | Tensor | None,
    position_bias: RelativeBias | Tensor | None,
    device: torch.device,
) -> Tensor | OffsetBias | None:
    """What a call of sizes (H, T, S) adds to its scores: a bias, a float mask, or both."""
    H, T, S = sizes
    bias: Tensor | OffsetBias | None
    if isinstance(position_bias, RelativeBias):
        kept: Tensor | None = getattr(module, "kept_heads", None)
        bias = position_bias.offsets(kept, (T, S), device)
    else:
        bias = None if position_bias is None else _of_kept_heads(module, H, position_bias, -3)
    if not _is_added(attention_mask):
        return bias
    added = _of_kept_heads(module, H, attention_mask, -3)
    if isinstance(bias, OffsetBias):
        bias = bias.to_dense(T, S)
    return added if bias is None else added + bias


def _of_kept_heads(module: nn.Module, H: int, tensor: Tensor, dim: int) -> Tensor:
    """The entries of the H remaining heads; `dim` is the dimension of `tensor` that indexes heads."""
    kept: Tensor | None = getattr(module, "kept_heads", None)
    if kept is None or tensor.dim() < abs(dim) or tensor.shape[dim] in (1, H):
        return tensor
    return tensor.index_select(dim, kept)


# ---------------------------------------------------------------------- gates of heads
def _head_gate(module: nn.Module, sizes: tuple[int, int, int], arguments: dict[str, Any]) -> tuple[Tensor | None, bool]:
    """The gates of this pass of sizes (B, H, T): `[H]`, `[B, H]`, `[B, H, T]` or None; and `closed_grad`. Under tensor
    parallelism H is the number of heads of this process, and its gates are a part of the module's."""
    B, H, T = sizes
    head_gate: HeadGate | None = getattr(module, "head_gate", None)
    given = given_head_mask(module, arguments)
    if head_gate is None and given is None:
        return None, True
    mesh = _mesh(module)
    whole = H if mesh is None else H * mesh.size()
    row = None if given is None else head_mask_row(module, whole, given)
    gates, closed_grad = row, True
    if head_gate is not None:
        if head_gate.num_heads != whole:
            was = f"has {head_gate.num_heads} gates, but the {type(module).__name__} has {whole} heads"
            refuse("head_gate", was, "attach one for each (hk.heads.gate)")
        if mesh is not None:
            check_one_noise(head_gate)
        gates, closed_grad = head_gate(B, T), head_gate.closed_grad
        if row is not None:
            gates = gates * (row[:, None] if gates.dim() == 3 else row)
            closed_grad = closed_grad or row.requires_grad
    if gates is None or mesh is None:
        return gates, closed_grad
    return local_part(gates, 0 if gates.dim() == 1 else 1, mesh), closed_grad
