"""The rounding floor: the error that rounding alone explains, for the output and every gradient.

An error below twice that of `eager` is not always possible: eager may be exact by chance if few
numbers are compared, and a kernel may round where eager does not (probabilities and dS are operands
of tensor cores in the working dtype, the saved output is in the working dtype). So the rounding
errors of an ideal kernel are propagated through the formula, in float64, one head at a time:

    every rounding       an error of at most u |x|, independent of the others; u is the unit
                         roundoff of the working dtype (u_w) for operands and results, of the
                         compute dtype (u_c) for arithmetic. The squares of the errors of the terms
                         of a sum add up; the few errors of a single number add up linearly
    a sum of n terms     u_c times the sum of absolute terms: for terms of similar size and random
                         sign, n roundings of partial sums stay near that. Sums in blocks do too;
                         adding thousands of terms one by one to a large partial sum does not
    a score              its sum of absolute terms times u_c, and u_c times its own size for scale and exponent; on
                         tensor cores, which align terms to the largest and truncate, also 2 u_c times that one for
                         every term, which add up linearly in lse: a heuristic above what an H100 is off by (5.6e-6
                         with 4,096 keys, where 2.9e-6 was the limit without it); a shared query is also rounded
                         after mixing, once for all keys, so that its errors in lse are independent by feature,
                         not by score
    a probability        relative error = absolute error of its score, and its rounding as operand; with entmax
                         the slope of p times the absolute error of its score
    the cap of a score   its slope times the error of the score, and roundings of division, tanh and product
    delta, dgate         the saved output is rounded by u_w, and so is rowsum(dout * out); an error of
                         delta is common to its row and changes dS by u * P. The gradient of lse is
                         subtracted from delta. With entmax delta is the mean of dP weighted by the slopes
    dalpha               errors of p, ln p and dP through the sum of absolute terms of its closed form
    subnormals           half the smallest subnormal number, wherever something is rounded

The result is one number per element. Nothing here depends on a kernel or is tuned to one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from heads_kernels.batch import bias_batches, expand_bias
from heads_kernels.call import Call
from heads_kernels.offset_bias import diagonals
from heads_kernels.ops import entmax
from heads_kernels.ops.gate import activate, as_4d
from heads_kernels.ops.philox import keep_mask
from heads_kernels.testing import mean_error
from heads_kernels.testing.inputs import Inputs

_SIGMOID_CALLS = 4  # roundings of exp, add, divide and multiply in an activation or its slope


class _Units(NamedTuple):
    """Unit roundoff of the working and the compute dtype, and the error of subnormal numbers."""

    working: float
    compute: float
    tiny: float
    flushed: (
        float  # probabilities below it may be 0: the smallest normal number of the compute dtype
    )
    mixed: float  # of a mixed query
    aligned: float  # of a term of a product on tensor cores, relative to the largest term


class _Head(NamedTuple):
    """One head, float64: `q` `[T, D]`, `k` `[S, D]`, `v` `[S, Dv]`, `gate` and `dout` `[T, Dv]`."""

    q: Tensor
    k: Tensor
    v: Tensor
    content_bias: Tensor | None  # [S]
    bias: Tensor | None  # [T, S]
    sink: Tensor | None
    visible: Tensor
    kept: Tensor | None
    gate: Tensor
    dout: Tensor
    dlse: Tensor  # [T]
    order: Tensor | None  # alpha - 1 of entmax


class _Weights(NamedTuple):
    """Probabilities `[T, S]`, their slopes by the score with lse (or threshold) held, and the errors of both."""

    lse: Tensor  # [T, 1]
    p: Tensor
    p_error: Tensor
    slope: Tensor
    slope_error: Tensor


class _Floor(NamedTuple):
    """Values and floors of one head, before sums over heads and batches."""

    attended: Tensor
    out: Tensor
    lse: Tensor
    dq: Tensor
    dq_value: Tensor
    dk: Tensor
    dv: Tensor
    dcontent_bias: Tensor
    dscores: tuple[Tensor, Tensor, Tensor]  # [T, S]: independent floor, floor common to a row, size
    dsink: tuple[Tensor, Tensor]  # [T]: floor, size
    dgate: Tensor
    dalpha: tuple[Tensor, Tensor]  # floor, size
    parts: mean_error.Head


class Limits(NamedTuple):
    """Limits of a quantity: the floor of every element, and the square of the change of its mean error by roundings."""

    floor: Tensor
    mean_square: Tensor


def unit(dtype: torch.dtype) -> float:
    """Unit roundoff: the largest relative error of rounding to nearest."""
    return torch.finfo(dtype).eps / 2


def mixed_unit(dtype: torch.dtype, backend: str | None) -> float:
    """The relative error of a mixed query: `cpu` multiplies the remainder of rounding to bfloat16 too, also rounded."""
    return min(unit(dtype), unit(torch.bfloat16) ** 2) if backend == "cpu" else unit(dtype)


def aligned_unit(inputs: Inputs) -> float:
    """The error of a term on tensor cores, relative to the largest term: of operands of 16 bits on a GPU."""
    on_tensor_cores = inputs.dout.is_cuda and inputs.dout.dtype.itemsize == 2
    return 2 * unit(torch.float32) if on_tensor_cores else 0.0


def limits(
    inputs: Inputs,
    values: dict[str, Tensor],
    seed: Tensor | None,
    mixed: float,
    aligned: float,
    working: float | None = None,
) -> dict[str, Limits]:
    """The limits of "out", "lse", "dquery", ...; `values` are the oracle's.

    `inputs` are in the working dtype; `seed` is that of dropout; `mixed` is the `mixed_unit` of the backend, `aligned`
    its `aligned_unit`. With `working` 0 the errors are those of float32 arithmetic alone.
    """
    dtype = inputs.tensors["query"].dtype
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    info = torch.finfo(dtype)
    working = unit(dtype) if working is None else working
    u = _Units(
        working,
        unit(compute),
        info.smallest_normal * info.eps / 2,
        torch.finfo(compute).smallest_normal,
        mixed,
        aligned,
    )
    p = inputs.to(torch.float64).parsed()
    assert p.value is not None
    wide = inputs.dout.double()
    B, H, T, S = p.B, p.H, p.T, p.S
    visible = p.intervals.to_dense(T, S, wide.device).expand(B, H, T, S)
    bias = None if p.bias is None else expand_bias(p.bias, B).expand(B, H, T, S)
    if p.offset_bias is not None:
        bias = diagonals(p.offset_bias, T, S).expand(B, H, T, S)
    if bias is not None:
        visible = visible & (bias > -torch.inf)
    kept = None
    if seed is not None:
        kept = keep_mask(seed, p.dropout_p, B, H, T, S, wide.device) / (1 - p.dropout_p)
    gate = _activated(p.gate, p.gate_activation, wide)

    squares = {f"d{name}": torch.zeros_like(t.double()) for name, t in inputs.tensors.items()}
    sizes = {name: torch.zeros_like(square) for name, square in squares.items()}
    result = {"out": torch.zeros_like(wide), "lse": wide.new_zeros(B, H, T)}
    mean_squares = {name: wide.new_zeros(()) for name in ("out", "lse", *squares)}
    weigh = _Weigh(inputs, values, p, wide)
    rows = torch.zeros_like(wide), torch.zeros_like(wide)  # square of the floor, and |dout * O|
    for b in range(B):
        for h in range(H):
            group = h * p.value.shape[1] // H
            shared = p.mixing is not None
            query = p.query[b] if shared else p.query[b, h]
            mixing = p.mixing[h] if p.mixing is not None else None
            content_bias = None if p.content_bias is None else p.content_bias[b, h]
            head = _Head(
                query if mixing is None else query * mixing,
                p.key[b] if shared else p.key[b, group],
                p.value[b, group],
                content_bias,
                None if bias is None else bias[b, h],
                None if p.sinks is None else p.sinks[h],
                visible[b, h],
                None if kept is None else kept[b, h],
                gate[b, h],
                wide[b, h],
                wide.new_zeros(T) if inputs.dlse is None else inputs.dlse[b, h].double(),
                None if p.alpha is None else p.alpha[h] - 1,
            )
            floor = _head_floor(head, p.scale, p.softcap, u, shared)
            for name, square in mean_error.squares(floor.parts, weigh(b, h, head), B * H).items():
                mean_squares[name] += square
            result["out"][b, h], result["lse"][b, h] = floor.out, floor.lse
            squares["dvalue"][b, group] += floor.dv**2
            if mixing is None:
                squares["dquery"][b, h] += floor.dq**2
                squares["dkey"][b, group] += floor.dk**2
            else:
                squares["dquery"][b] += (mixing * floor.dq) ** 2
                squares["dkey"][b] += floor.dk**2
                products = query.abs() * (floor.dq + u.compute * floor.dq_value.abs())
                squares["dmixing"][h] += (products**2).sum(0)
            if content_bias is not None:
                squares["dcontent_bias"][b, h] += floor.dcontent_bias**2
            if p.bias is not None:
                _add_bias_floor(floor.dscores, p.bias, (B, b, h), squares["dbias"], sizes["dbias"])
            if p.offset_bias is not None:
                columns = _table_columns(inputs.tensors["offset_table"], T, S)
                own, common, size = floor.dscores
                for total, part in (
                    (squares["doffset_table"], own**2 + common**2),
                    (sizes["doffset_table"], size),
                ):
                    total[h].index_add_(0, columns.flatten(), part.flatten())
            if p.sinks is not None:
                squares["dsinks"][h] += (floor.dsink[0] ** 2).sum()
                sizes["dsinks"][h] += floor.dsink[1].sum()
            if p.alpha is not None:
                squares["dalpha"][h] += floor.dalpha[0] ** 2
                sizes["dalpha"][h] += floor.dalpha[1]
            rows[0][b, h], rows[1][b, h] = floor.dgate**2, (head.dout * floor.attended).abs()
    if p.gate is not None:
        squares["dgate"] = _gate_floor(p.gate, p.gate_activation, rows, u) ** 2
    for name in ("dsinks", "dalpha"):
        if name in squares:
            mean_squares[name] = (squares[name] * values[name].square()).sum()
    roundoffs = {"out": u.working, "lse": 0.0}
    for name, square in squares.items():
        result_dtype = inputs.tensors[name[1:]].dtype
        roundoffs[name] = u.working if result_dtype == dtype else unit(result_dtype)
        roundoff = roundoffs[name] + 2 * u.compute  # 2: scale, sum over heads
        floor_of = square.sqrt() + u.compute * sizes[name] + roundoff * values[name].abs()
        result[name] = floor_of + u.tiny
    for name, roundoff in roundoffs.items():
        finite = values[name].nan_to_num(0.0, 0.0, 0.0)
        same = mean_error.equal(finite.float())
        mean_squares[name] += mean_error.add_equal(same, roundoff * finite.square())
    return {name: Limits(floor, mean_squares[name]) for name, floor in result.items()}


class _Weigh:
    """Computes the `Weights` of the numbers of one head; see `mean_error`."""

    def __init__(self, inputs: Inputs, values: dict[str, Tensor], p: Call, dout: Tensor) -> None:
        self.p, self.dout = p, dout
        self.values = {name: value.nan_to_num(0.0, 0.0, 0.0) for name, value in values.items()}
        self.table = inputs.tensors.get("offset_table")
        self.dgate = None
        if p.gate is not None:
            slope = _gate_slope(p.gate, p.gate_activation)
            weight = as_4d(self.values["dgate"] * slope).expand(dout.shape)
            self.dgate = weight * dout

    def __call__(self, b: int, h: int, head: _Head) -> mean_error.Weights:
        p, values = self.p, self.values
        assert p.value is not None
        group = h * p.value.shape[1] // p.H
        attended = {"out": head.gate * values["out"][b, h]}
        if self.dgate is not None:
            attended["dgate"] = self.dgate[b, h]
        if p.mixing is None:
            raw = {
                "dquery": values["dquery"][b, h] @ head.k.T,
                "dkey": head.q @ values["dkey"][b, group].T,
            }
        else:
            raw = {
                "dquery": (values["dquery"][b] * p.mixing[h]) @ head.k.T,
                "dkey": head.q @ values["dkey"][b].T,
                "dmixing": (p.query[b] * values["dmixing"][h]) @ head.k.T,
            }
        if p.content_bias is not None:
            raw["dcontent_bias"] = values["dcontent_bias"][b, h].expand(p.T, p.S)
        finished = {}
        if p.bias is not None:
            index = _of_batch(p.bias, (p.B, b, h))
            finished["dbias"] = values["dbias"].reshape(p.bias.shape)[index].expand(p.T, p.S)
        if self.table is not None:
            columns = _table_columns(self.table, p.T, p.S)
            finished["doffset_table"] = values["doffset_table"][h][columns]
        return mean_error.Weights(
            attended,
            values["lse"][b, h],
            values["dvalue"][b, group],
            {name: p.scale * weight for name, weight in raw.items()},
            finished,
        )


def _of_batch(bias: Tensor, at: tuple[int, int, int]) -> tuple[int, ...]:
    """The index of head h of batch b in a bias `[B1, B2, H, T, S]`; `at` is B, b, h."""
    B, b, h = at
    inner = bias_batches(bias, B)[1]
    place = [b // inner, b % inner, h]
    return tuple(min(n, last - 1) for n, last in zip(place, bias.shape[:3], strict=True))


def _add_bias_floor(
    dscores: tuple[Tensor, Tensor, Tensor],
    bias: Tensor,
    at: tuple[int, int, int],
    square: Tensor,
    size: Tensor,
) -> None:
    """Add the part of head h of batch b (`at` is B, b, h) to the floors of a bias `[B1, B2, H, T, S]`.

    `square` and `size` have the shape of the bias as passed. In a sum over keys an error common to a row adds linearly.
    """
    index = _of_batch(bias, at)
    own, common, total = dscores
    if bias.shape[4] == 1:
        own, common = (own**2).sum(1, keepdim=True).sqrt(), common.sum(1, keepdim=True)
    square.view(bias.shape)[index] += (own**2 + common**2).sum_to_size(
        bias.shape[3:] if bias.shape[4] != 1 else (bias.shape[3], 1)
    )
    size.view(bias.shape)[index] += total.sum_to_size(bias.shape[3:])


def _table_columns(table: Tensor, T: int, S: int) -> Tensor:
    """`[T, S]`: the column of the table that each pair reads."""
    n = table.shape[1]
    rows = torch.arange(T, device=table.device)[:, None]
    return (torch.arange(S, device=table.device) - rows + n // 2).clamp(0, n - 1)


def _head_floor(head: _Head, scale: float, softcap: float, u: _Units, shared: bool) -> _Floor:
    q, k, v, content_bias, bias, sink, visible, kept, gate, dout, dlse, order = head
    # The forward pass. [T, S]
    score = q @ k.T
    size = q.abs() @ k.abs().T
    if content_bias is not None:
        score, size = score + content_bias, size + content_bias.abs()
    score, size = scale * score, abs(scale) * size
    alone = u.compute * (size + score.abs())  # independent in every score
    aligned = torch.zeros_like(alone)
    if u.aligned and q.shape[1]:
        term = q.abs().amax(1)[:, None] * k.abs().amax(1)  # no term is larger
        aligned = u.aligned * q.shape[1] * abs(scale) * term
    mixing_error = torch.zeros_like(alone)
    if shared:  # the mixed query is rounded
        mixing_error = u.mixed * abs(scale) * (q**2 @ (k**2).T).sqrt()
    slope, slope_error = torch.ones_like(score), torch.zeros_like(score)
    slope_change = torch.zeros_like(score)
    if softcap:
        share = torch.tanh(score / softcap)
        score, slope = softcap * share, 1 - share**2
        slope_change = -2 * share * slope / softcap
        of_share = slope * (alone + mixing_error) / softcap + 3 * u.compute * share.abs()
        slope_error = 2 * share.abs() * of_share + u.compute
        alone = slope * alone + 3 * u.compute * score.abs()
        mixing_error = slope * mixing_error
    if bias is not None:
        finite = bias.masked_fill(~visible, 0.0)
        score = score + finite
        alone = alone + u.compute * (finite.abs() + score.abs())
    error = alone + mixing_error
    score = score.masked_fill(~visible, -torch.inf)
    weights = (_softmax if order is None else _entmax)(head, score, error, u)
    lse, P, P_error, W, W_error = weights
    P_error, W_error = P_error + u.flushed * visible, W_error + u.flushed * visible
    PZ, PZ_error, WZ = (each if kept is None else each * kept for each in (P, P_error, W))
    attended = PZ @ v
    total = W.sum(-1, keepdim=True).clamp(min=torch.finfo(W.dtype).tiny)  # [T, 1]
    moved = WZ @ v / total  # the derivative of the output by lse
    PZ_error = PZ_error + u.tiny * visible  # absolute error of an operand of P V
    attended_error = (
        (PZ_error**2 @ v**2 + P_error.square().sum(-1, keepdim=True) * moved**2).sqrt()
        + u.compute * (PZ @ v.abs())
        + u.tiny
    )
    out = (gate * attended).abs()
    out = gate.abs() * attended_error + (2 * u.compute + u.working) * out + u.tiny
    saved_error = attended_error + u.working * attended.abs()
    largest = torch.zeros_like(lse[:, 0])
    if score.shape[-1]:
        largest = torch.where(visible, score.abs(), 0.0).amax(-1)
    lse_error = (W / total * alone).square().sum(-1).sqrt() + u.compute * (
        lse[:, 0].abs() + largest + 2
    )
    lse_error = lse_error + (W / total * slope * aligned).sum(-1)
    if shared:
        lse_error = lse_error + u.mixed * abs(scale) * (q * (P @ k)).square().sum(-1).sqrt()

    # The backward pass.
    dO = gate * dout  # [T, Dv]
    dP = dO @ v.T
    dP_sum = u.working * (dO**2 @ (v**2).T).sqrt() + u.compute * (dO.abs() @ v.abs().T)
    if kept is not None:
        dP, dP_sum = dP * kept, dP_sum * kept
    if order is None:
        delta = (dO * attended).sum(-1, keepdim=True) - dlse[:, None]  # [T, 1]
        delta_error = (dO * saved_error).square().sum(-1, keepdim=True).sqrt()
        delta_error = delta_error + u.compute * (
            (dO * attended).abs().sum(-1, keepdim=True) + dlse.abs()[:, None]
        )
    else:
        delta = (W * dP).sum(-1, keepdim=True) / total
        delta_error = ((W * dP_sum) ** 2 + (W_error * (dP - delta)) ** 2).sum(-1, keepdim=True)
        delta_error = (
            delta_error.sqrt() + u.compute * (W * dP).abs().sum(-1, keepdim=True)
        ) / total
    dS = W * (dP - delta)
    # First the errors that are independent in every element, then that of delta, common to a row.
    own = W_error * (dP - delta).abs() + W * dP_sum + u.tiny * visible
    common = W * delta_error
    of_finished = own, common, dS.abs()
    parts = mean_error.Head(
        query=q,
        key=k,
        value=v,
        mixed=u.mixed * abs(scale) if shared else 0.0,
        working=u.working,
        p=P,
        attended_p=PZ,
        attended_p_error=PZ_error,
        row_error=P_error.square().sum(-1).sqrt(),
        moved=moved,
        attended=attended,
        dattended=dO,
        dp_weight=W if kept is None else W * kept,
        dscores=dS,
        p_part=W_error * (dP - delta),
        own=W * dP_sum + u.tiny * visible,
        common=common,
        slope=slope,
        slope_change=slope_change,
        slope_error=slope_error,
    )
    own, common = own * slope + dS.abs() * slope_error, common * slope
    dS = dS * slope  # of the raw scores
    dq_value = scale * (dS @ k)
    dq = (own**2 @ k**2).sqrt() + (common @ k).abs() + u.compute * (dS.abs() @ k.abs())
    dk = ((own**2 + common**2).T @ q**2).sqrt() + u.compute * (dS.abs().T @ q.abs())
    dv = ((PZ_error + u.working * PZ) ** 2).T @ dO**2
    dcontent_bias = (own**2 + common**2).sum(0).sqrt() + u.compute * dS.abs().sum(0)
    share = torch.zeros_like(lse) if sink is None else (sink - lse).exp()  # [T, 1] of the sink
    of_share = delta.abs() * (u.compute * (3 + lse.abs()) + lse_error[:, None])
    return _Floor(
        attended=attended,
        out=out,
        lse=lse_error,
        dq=abs(scale) * dq + u.compute * lse.abs() * dq_value.abs(),
        dq_value=dq_value,
        dk=abs(scale) * dk,
        dv=dv.sqrt() + u.compute * (PZ.T @ dO.abs()),
        dcontent_bias=abs(scale) * dcontent_bias,
        dscores=of_finished,
        dsink=((share * (delta_error + of_share))[:, 0], (share * delta.abs())[:, 0]),
        dgate=dout.abs() * saved_error + u.compute * (dout * attended).abs(),
        dalpha=_alpha_floor(weights, order, dP - delta, dP_sum, u),
        parts=parts,
    )


def _softmax(head: _Head, score: Tensor, error: Tensor, u: _Units) -> _Weights:
    """The weights of a head from its scores `[T, S]`, -inf where hidden, whose absolute error is `error`."""
    lse = score.logsumexp(-1) if score.shape[-1] else score.new_full(score.shape[:-1], -torch.inf)
    if head.sink is not None:
        lse = torch.logaddexp(lse, head.sink)
    lse = torch.where(lse == -torch.inf, 0.0, lse)[:, None]  # [T, 1]
    P = (score - lse).exp()  # 0 where hidden
    P_error = P * (u.working + u.compute * (3 + lse.abs()) + error)
    return _Weights(lse, P, P_error, P, P_error)


def _entmax(head: _Head, score: Tensor, error: Tensor, u: _Units) -> _Weights:
    """The same with entmax: a probability u^(1/order) has the slope u^(1/order - 1)."""
    assert head.order is not None
    order = head.order[None, None, None]
    lse = entmax.threshold(score[None, None], None, order).sum(0)[0, 0, :, None]  # [T, 1]
    lse = torch.where(lse == -torch.inf, 0.0, lse)
    order = head.order
    base = (1 + order * (score - lse)).clamp(min=0.0)
    P = base ** (1 / order)
    W = torch.where(base > 0, base ** (1 / order - 1), 0.0)
    moved = order * (error + u.compute * (lse.abs() + torch.where(W > 0, score.abs(), 0.0)))
    # At the threshold the slope itself moves, for alpha = 2 from 0 to 1.
    W_error = (base + moved) ** (1 / order - 1) - torch.where(
        base > moved, (base - moved).clamp(min=0.0) ** (1 / order - 1), 0.0
    )
    W_error = torch.where(1 + order * (score - lse) > -moved, W_error.abs(), 0.0)
    logs = P.log().nan_to_num(0.0, 0.0, 0.0).abs()
    P_error = P * (u.working + u.compute * (3 + logs)) + W * moved / order
    return _Weights(lse, P, P_error, W, W_error + W * (u.working + u.compute * (4 + logs)))


def _alpha_floor(
    weights: _Weights, order: Tensor | None, difference: Tensor, dP_sum: Tensor, u: _Units
) -> tuple[Tensor, Tensor]:
    """Floor and size of the gradient of alpha of a head, a sum over its rows and keys."""
    if order is None:
        return difference.new_zeros(()), difference.new_zeros(())
    P, W = weights.p, weights.slope
    logs = P.log().nan_to_num(0.0, 0.0, 0.0)
    first = torch.where(P > 0, torch.expm1(-order * logs) / order, 0.0)
    second = torch.where(P > 0, (torch.expm1(-order * logs) + order * logs) / order**2, 0.0)
    entropy, mean_first, mean_second = (
        (P * each).sum(-1, keepdim=True) for each in (-logs, first, second)
    )
    terms = mean_second + second - logs * mean_first + first * entropy
    terms = P * terms / (1 + order * mean_first)
    moved = weights.slope_error * terms / torch.where(W > 0, W, 1.0)  # of p, ln p and the powers
    size = difference.abs() * terms
    floor = ((difference * moved) ** 2 + (terms * dP_sum) ** 2).sum().sqrt()
    return floor + 8 * u.compute * size.square().sum().sqrt(), size.sum()


def _activated(gate: Tensor | None, activation: str, like: Tensor) -> Tensor:
    """The gate's values, broadcast to `like` `[B, H, T, Dv]`."""
    if gate is None:
        return torch.ones_like(like)
    return as_4d(activate(gate, activation)).expand(like.shape)


def _gate_floor(gate: Tensor, activation: str, rows: tuple[Tensor, Tensor], u: _Units) -> Tensor:
    """Sums over what the gate was broadcast along, times the slope of its activation."""
    square, size = rows
    shape = as_4d(gate).shape
    along = [d for d in range(4) if shape[d] == 1]
    if along:
        square, size = square.sum(along, keepdim=True), size.sum(along, keepdim=True)
    floor = (square.sqrt() + u.compute * size).reshape(gate.shape)
    if activation == "identity":
        return floor
    return _gate_slope(gate, activation) * (
        floor + _SIGMOID_CALLS * u.compute * size.reshape(gate.shape)
    )


def _gate_slope(gate: Tensor, activation: str) -> Tensor:
    if activation == "identity":
        return torch.ones_like(gate)
    opened = torch.sigmoid(gate)
    return opened * (1 - opened) if activation == "sigmoid" else opened
