"""The public operators. Their docstrings are the specification of the package."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Literal, TypedDict, overload

from torch import Tensor

from heads_kernels.backends import BackendName, Choice, choose, select
from heads_kernels.batch import Batch, unflatten
from heads_kernels.call import Call
from heads_kernels.checks import GateActivation, check_flag
from heads_kernels.dtensor import is_sharded
from heads_kernels.mask import Mask
from heads_kernels.offset_bias import OffsetBias
from heads_kernels.ops import direct, statistics
from heads_kernels.ops.attention import attend, attend_with_lse, record
from heads_kernels.ops.philox import draw_seed
from heads_kernels.ops.statistics import AttentionStatistics
from heads_kernels.parse import check, form, parse

if TYPE_CHECKING:
    from typing import Unpack

    from heads_kernels.ops.sharding import Part


class _Options(TypedDict, total=False):
    """The keyword arguments that the overloads of the operators share."""

    gate: Tensor | None
    gate_activation: GateActivation
    closed_grad: bool
    bias: Tensor | OffsetBias | None
    softcap: float | None
    sinks: Tensor | None
    scale: float | None
    backend: BackendName | None


@overload
def gated_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Mask | Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    enable_gqa: bool = True,
    return_lse: Literal[False] = False,
    **options: Unpack[_Options],
) -> Tensor: ...


@overload
def gated_attention(*args: Any, return_lse: Literal[True], **options: Any) -> tuple[Tensor, Tensor]: ...


def gated_attention(  # type: ignore[misc]  # whose second signature is open
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Mask | Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    gate: Tensor | None = None,
    gate_activation: GateActivation = "identity",
    closed_grad: bool = True,
    bias: Tensor | OffsetBias | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    enable_gqa: bool = True,
    return_lse: bool = False,
    backend: BackendName | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Scaled dot product attention whose heads can be gated and closed, in one fused pass.

        out_h = act(gate_h) * P_h V_h
        P_hij = exp(s_hij) / (sum over visible k of exp(s_hik) + exp(sink_h))
        s_hij = softcap(scale * q_hi . k_hj) + bias_hij

    Without `sinks` the last term of the denominator is absent. Positional arguments are those of
    `torch.nn.functional.scaled_dot_product_attention`, in its order. Gates per head follow Voita et al. 2019 (eq. 5,
    Hard Concrete) and Michel et al. 2019 (eq. 3); gates per token or element are the output gates of current language
    models.

    Args:
        query: `[..., H, T, D]`; float32, bfloat16, float16 or float64; any strides with a contiguous last dimension.
            `...` is any number of batch dimensions, or none; those of query, key and value broadcast. `B` is their
            product, here and in a `Mask`.
        key: `[..., Hk, S, D]`, `H` a multiple of `Hk`: query head `h` reads key head `h // (H // Hk)`. Key and value
            have the dtype and device of `query`; under autocast all three are cast to the autocast dtype.
        value: `[..., Hk, S, Dv]`; `Dv` may differ from `D`.
        attn_mask: a `Mask`, or a bool tensor broadcastable to `[..., H, T, S]` with True = may attend. A tensor of two
            dimensions is `[T, S]`; padding is `Mask(key_mask=...)` or `[B, 1, 1, S]`. A float tensor is a `bias`.
        dropout_p: probability of dropping an attention probability, after the softmax. The dropout mask is computed by
            Philox4x32-10 from a seed, drawn from PyTorch's generator, and the index of the element, so it is the same
            on every backend.
        is_causal: row i sees keys 0 to i (upper-left aligned). For decoding use `Mask(causal="lower_right")`.
        gate: `[H]`, `[..., H]`, `[..., H, T]` or `[..., H, T, Dv]` with all batch dimensions; sizes of 1 broadcast; any
            strides and any floating dtype. A head (or batch-head) whose identity gate is exactly 0 outputs exact zeros
            and costs no attention work.
        gate_activation: "identity", or "sigmoid" / "softplus" if `gate` holds logits.
        closed_grad: False returns gradient 0 for entries of an identity gate that are exactly 0, and skips their work
            in the backward pass too (exact for Hard Concrete gates, whose clamp has slope 0 there).
        bias: added to the scaled and capped scores: a float tensor broadcastable to `[..., H, T, S]`, or an
            `OffsetBias`; any floating dtype and strides. -inf hides a pair as a mask does. Its gradient is summed over
            broadcast dimensions; it is not expanded in memory.
        softcap: replaces scores by `softcap * tanh(score / softcap)` before the bias (Gemma Team 2024); None: no cap.
        sinks: `[H]`, one extra score per head that belongs to no key (OpenAI 2025, gpt-oss): `exp(sinks[h])` is added
            to the denominator of the softmax. Differentiable.
        scale: factor of the scores; default `D ** -0.5`.
        enable_gqa: False requires as many heads of key and value as of query, or one that all share.
        return_lse: also return the natural log of the sum of exp(score) over visible keys and the sink, with its
            gradient. `merge_attention` uses it to combine results over disjoint keys. It does not depend on the gate,
            so closed heads are computed too.
        backend: one of the names that `explain` shows; None selects the first that can serve the call. "eager" has
            derivatives of any order, forward mode and `torch.func`; the others have first derivatives.

    Returns:
        `[..., H, T, Dv]` in the dtype of `query`. A row that sees no key is 0 (never NaN), and so are its gradients.
        Hidden keys and values reach no output, even if they are NaN. The same call gives the same bits. With
        `return_lse`, the pair `(out, lse)`: `lse` is `[..., H, T]` in float32 (float64 for float64 inputs), and -inf in
        rows that see neither a key nor a sink.

    Raises:
        ValueError, TypeError: an argument is invalid; the message names it, its value and what would work. Also raised
            with the reasons if `backend` is unknown or cannot serve the call.
    """
    call, batch = form(
        "gated_attention",
        query,
        key,
        value,
        attn_mask=attn_mask,
        dropout_p=dropout_p,
        is_causal=is_causal,
        gate=gate,
        gate_activation=gate_activation,
        closed_grad=closed_grad,
        bias=bias,
        softcap=softcap,
        sinks=sinks,
        scale=scale,
        enable_gqa=enable_gqa,
    )
    return _attend(call, batch, backend, return_lse)


@overload
def collaborative_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mixing: Tensor,
    content_bias: Tensor | None = None,
    attn_mask: Mask | Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[_Options],
) -> Tensor: ...


@overload
def collaborative_attention(*args: Any, return_lse: Literal[True], **options: Any) -> tuple[Tensor, Tensor]: ...


def collaborative_attention(  # type: ignore[misc]  # whose second signature is open
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mixing: Tensor,
    content_bias: Tensor | None = None,
    attn_mask: Mask | Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    gate: Tensor | None = None,
    gate_activation: GateActivation = "identity",
    closed_grad: bool = True,
    bias: Tensor | OffsetBias | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    backend: BackendName | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention whose heads share one query and one key, each with its own mixing vector.

        out_h = act(gate_h) * softmax(score_h) V_h
        score_hij = softcap(scale * ((q_i * mixing_h) . k_j + content_bias_hj)) + bias_hij

    (Cordonnier, Loukas, Jaggi 2020, eq. 7 and 12.) The softmax is that of `gated_attention`, with mask and sinks. The
    mixed query is computed tile by tile and never stored. With block-indicator mixing this is ordinary multi-head
    attention.

    Args:
        query: `[..., T, Ds]`, shared by all heads; any strides with a contiguous last dimension. Batch dimensions come
            first and broadcast, as in `gated_attention`.
        key: `[..., S, Ds]`, shared by all heads.
        value: `[..., Hv, S, Dv]`, `H` a multiple of `Hv`: head `h` reads value head `h // (H // Hv)`.
        mixing: `[H, Ds]`, any floating dtype. Chunks of 16 features of a head's vector that are all zero cost nothing.
        content_bias: `[..., H, S]` with all batch dimensions: added to the score of key s for every query, inside the
            scale.
        scale: default `(Ds / H) ** -0.5`. A converted layer passes the scale of its original model.
        closed_grad: False returns gradient 0 for entries of `gate` (identity) and `mixing` that are exactly 0, and
            skips their work in the backward pass too.
        attn_mask, dropout_p, is_causal, gate, gate_activation, bias, softcap, sinks, return_lse, backend: as in
            `gated_attention`.

    Returns:
        `[..., H, T, Dv]` in the dtype of `query`, and with `return_lse` the pair `(out, lse)`; masked rows are as in
        `gated_attention`.

    Raises:
        ValueError, TypeError: as in `gated_attention`.
    """
    call, batch = form(
        "collaborative_attention",
        query,
        key,
        value,
        mixing,
        content_bias,
        attn_mask=attn_mask,
        dropout_p=dropout_p,
        is_causal=is_causal,
        gate=gate,
        gate_activation=gate_activation,
        closed_grad=closed_grad,
        bias=bias,
        softcap=softcap,
        sinks=sinks,
        scale=scale,
    )
    return _attend(call, batch, backend, return_lse)


def entmax_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Mask | Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    alpha: float | Tensor = 1.5,
    gate: Tensor | None = None,
    gate_activation: GateActivation = "identity",
    closed_grad: bool = True,
    bias: Tensor | OffsetBias | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    enable_gqa: bool = True,
    backend: BackendName | None = None,
) -> Tensor:
    """Attention with alpha-entmax instead of softmax: probabilities can be exactly 0; each head can learn its alpha.

        out_h = act(gate_h) * entmax(score_h, alpha_h) V_h
        entmax(s, alpha)_j = max((alpha - 1) * s_j - tau, 0) ** (1 / (alpha - 1))

    (Correia, Niculae, Martins 2019.) The threshold `tau` of a row makes its probabilities add up to 1; `score_h` is
    that of `gated_attention`. The CPU kernels store the scores of 64 rows per thread, the eager backend stores all
    scores, and the Triton kernels recompute them in each pass over the keys.

    Args:
        alpha: a number, or `[H]` of any floating dtype with a gradient (proposition 1 of the paper), in (1, 2]: 2 is
            sparsemax, and the limit at 1 is softmax. The values of a CUDA tensor are not checked on the host: a head
            with a value outside of (1, 2] is NaN.
        query, key, value, attn_mask, dropout_p, is_causal: as in `gated_attention`. DTensors are refused.
        gate, gate_activation, closed_grad, bias, softcap, scale, enable_gqa, backend: as in `gated_attention`.

    Returns:
        `[..., H, T, Dv]` in the dtype of `query`; masked rows, hidden values and closed heads are as in
        `gated_attention`. Keys with probability 0 add nothing to the output either, even if their values are NaN.

    Raises:
        ValueError, TypeError: as in `gated_attention`, and if `alpha` is outside of (1, 2] (a number or a CPU tensor).
    """
    call, batch = form(
        "entmax_attention",
        query,
        key,
        value,
        attn_mask=attn_mask,
        dropout_p=dropout_p,
        is_causal=is_causal,
        alpha=alpha,
        gate=gate,
        gate_activation=gate_activation,
        closed_grad=closed_grad,
        bias=bias,
        softcap=softcap,
        scale=scale,
        enable_gqa=enable_gqa,
    )
    out = _attend(call, batch, backend)
    assert isinstance(out, Tensor)
    return out


def attention_statistics(
    query: Tensor,
    key: Tensor,
    *,
    mixing: Tensor | None = None,
    content_bias: Tensor | None = None,
    attn_mask: Mask | Tensor | None = None,
    is_causal: bool = False,
    bias: Tensor | OffsetBias | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    exclude_keys: Tensor | None = None,
    received: bool | Tensor | None = None,
    backend: BackendName | None = None,
) -> AttentionStatistics:
    """Statistics of the attention probabilities: of each query row, and what each key receives.

    Probabilities are those of `gated_attention` or `collaborative_attention`; no `[T, S]` matrix is stored.

    Args:
        query, key: as in `gated_attention`, or, with `mixing`, as in `collaborative_attention`.
        mixing, content_bias, attn_mask, is_causal, bias, softcap, sinks, scale, backend: as in those functions.
        exclude_keys: bool `[S]` or `[..., S]`, True for keys such as [CLS], [SEP] or EOS that may not be the maximum
            (Voita et al. 2019, footnote 2). They keep their share of the probability: nothing is renormalised.
        received: whether to compute `received`: True, or weights of query rows, a float tensor that broadcasts to
            `[..., H, T]`. A row of weight 0 is left out. Scores are computed a second time for it.

    Returns:
        An `AttentionStatistics`: a named tuple of `[..., H, T]` tensors, float32 (float64 for float64 inputs), `argmax`
        int64, without gradient:
        `lse`, natural log of the sum of exp(score) over visible keys and the sink (-inf without either);
        `max_score`, the largest score among visible keys that are not excluded, scaled, capped and with its bias (-inf
        if there is none); `max_prob`, its probability (0 if there is none), whose mean over rows is the confidence of a
        head; `argmax`, the first key with it (-1 if there is none);
        `entropy`, `-sum p ln p` over keys in nats (0 if a row sees no key). With a sink, the probabilities of the keys
        add up to less than 1;
        `received` `[..., H, S]`, `sum_i w_i p_ij` over query rows i for each key j and query head, with weights w of 1
        by default; None if it is not requested. Padded rows and rows that see no key add nothing.

    Raises:
        ValueError, TypeError: as in `gated_attention`.
    """
    call, batch = parse(
        "attention_statistics",
        query,
        key,
        mixing=mixing,
        content_bias=content_bias,
        attn_mask=attn_mask,
        is_causal=is_causal,
        bias=bias,
        softcap=softcap,
        sinks=sinks,
        scale=scale,
        exclude_keys=exclude_keys,
        received=received,
    )
    here, part = _here(call)
    found = statistics.measure(here, select(here, backend))
    if part is not None:
        found = part.whole_statistics(found)
    results = (None if result is None else unflatten(result, batch) for result in found)
    return AttentionStatistics(*results)  # type: ignore[arg-type]


def _attend(call: Call, batch: Batch, backend: str | None, return_lse: bool = False) -> Tensor | tuple[Tensor, Tensor]:
    """Run an unchecked call from `form`; if it has DTensors, the part of it that belongs to this process."""
    if return_lse is False:
        found = direct.attend(call, backend)
        if found is not None:
            out = record(call, "cpu", results=found) if isinstance(found, tuple) else found
            return unflatten(out, batch)
    check(call)
    check_flag("return_lse", return_lse)
    here, part = _here(call)
    chosen = select(here, backend)
    if here.dropout_p:
        seed = draw_seed(here.query.device)
        here = here._replace(seed=seed if part is None else part.seed(seed))

    def presented(result: Tensor) -> Tensor:
        return unflatten(result if part is None else part.whole(result), batch)

    if not return_lse:
        return presented(attend(here, chosen))
    out, lse = attend_with_lse(here, chosen)
    return presented(out), presented(lse)


def _here(call: Call) -> tuple[Call, Part | None]:
    """The call that this process runs, and where it belongs in a call with DTensors."""
    if not any(is_sharded(field) for field in call):
        return call, None
    # Not above: it imports torch.distributed.tensor, which is slow.
    from heads_kernels.ops.sharding import part_of

    part = part_of(call)
    return (call if part is None else part.call), part


# ---------------------------------------------------------------------- which backend, and why
_OPERATORS: Final = {
    each.__name__: each for each in (gated_attention, collaborative_attention, entmax_attention, attention_statistics)
}


def explain(operator: Callable[..., object] | str, *args: Any, **kwargs: Any) -> Choice:
    """Return which backend would run a call, and why the others would not. The call is not run.

    Args:
        operator: `gated_attention`, `collaborative_attention`, `entmax_attention` or `attention_statistics`, the
            function or its name.
        *args, **kwargs: the arguments of the call, including `backend`.

    Returns:
        A printable `Choice` with `backend` and `refusals`.

    Raises:
        ValueError, TypeError: as the call itself, except for a backend that cannot serve it.
    """
    name = operator if isinstance(operator, str) else getattr(operator, "__name__", None)
    if name not in _OPERATORS:
        was = repr(name) if name else f"a {type(operator).__name__}"
        raise ValueError(f"operator is {was}; use one of {', '.join(map(repr, _OPERATORS))}.")
    arguments = inspect.signature(_OPERATORS[name]).bind(*args, **kwargs)
    arguments.apply_defaults()  # of alpha
    given = arguments.arguments
    backend = given.pop("backend")
    check_flag("return_lse", given.pop("return_lse", False))
    call, _ = parse(name, **given)
    return choose(_here(call)[0], backend)
