"""Layer-wise relevance propagation: how one function distributes the relevance of its outputs over its inputs.

For a function f with n inputs x, input i contributes to output j

    z_ji = df_j/dx_i * x_i + f(0)_j / n

and the relevance R of the outputs is distributed in proportion to positive and to negative z separately:

    R_i = c sum_j R_j * (z+_ji / (sum_i z+_ji + epsilon) + z-_ji / (sum_i z-_ji - epsilon)), c so that
    sum_i R_i = sum_j R_j

These are the rules of the code of Voita et al. 2019 ("Analyzing Multi-Head Self-Attention", corrected in 2021), after
Ding et al. 2017 and Bach et al. 2015 (eq. 60 with both factors 1/2, which cancel): epsilon 1e-5, the sum kept for every
token, in attention for every example and head. The scaling has no epsilon, so that it keeps even very small sums.
Relevance is never negative; that of a tensor that is used several times is the sum over its uses.

A rule takes the arguments of its function and returns the inputs that may receive relevance, and what computes theirs
from that of the output: in the shape of the inputs and the dtype of the relevance, with its sum over each row kept; in
attention over each example and head, of all operands together. No Jacobian is stored: z is computed in tiles, or summed
in closed form where its signs allow it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NoReturn, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_map_only

from heads_kernels.backends import select
from heads_kernels.call import Call
from heads_kernels.checks import refuse
from heads_kernels.nn.attention_call import blocks
from heads_kernels.ops import eager
from heads_kernels.ops import gate as gates
from heads_kernels.ops.attention import attend

#: Computes the relevance of a function's inputs from that of its output.
Back: TypeAlias = Callable[[Tensor], Sequence[Tensor]]
#: The inputs of a function that may receive relevance, and what computes it.
Step: TypeAlias = tuple[Sequence[Any], Back]
#: `tile(rows, columns, z)` writes z of these rows and outputs, `[rows, columns, n]`.
Tile: TypeAlias = Callable[[slice, slice, Tensor], object]

#: Keeps sums of z away from 0.
EPSILON: Final = 1e-5
#: Elements in a tile of z, by type of device. On a CPU a tile of 1 MiB stays in the L2 cache: 4 times more or fewer
#: elements were measured to cost a third more.
TILES: Final = {"cpu": 1 << 18}
TILE: Final = 1 << 24  # on every other device; heuristic: 64 MiB
SIGNS: Final = (1, -1)
#: Each output element depends on one element of the first argument, which receives its relevance unchanged.
_ELEMENTWISE: Final = (
    "celu", "clamp", "clamp_max", "clamp_min", "div", "dropout", "elu", "gelu", "hardsigmoid", "hardswish",
    "hardtanh", "leaky_relu", "mish", "neg", "negative", "prelu", "relu", "relu6", "selu", "sigmoid", "silu",
    "softplus", "tanh",
)  # fmt: skip
#: Endings of the names of modules that divide by the root mean square.
_NORMS: Final = ("RMSNorm", "T5LayerNorm")


def carries(thing: object) -> bool:
    """Whether a tensor carries relevance: it was computed from heads, for of nothing else is the graph recorded."""
    return (
        isinstance(thing, Tensor)
        and thing.grad_fn is not None
        and thing.is_floating_point()
        and thing.numel() > 0  # else of a layer without heads
    )


def refusing(name: str, why: str) -> Callable[[Tensor], NoReturn]:
    """For a function without a rule: raises once relevance arrives there, and not before."""

    def back(given: Tensor) -> NoReturn:
        known = "linear maps, layer norms, sums and products of tensors, activations, reshaping and the operators"
        was = f"computes {name}, {why}, between its heads and the output"
        refuse("model", was, f"there are rules for {known}; this includes what `output` computes")

    return back


# ---------------------------------------------------------------------- functions of rows
def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Step:
    """`input @ weight.T + bias`; the bias counts for all inputs equally.

    Outputs without relevance are skipped: of many logits only those with relevance cost anything.
    """
    if type(weight) not in (Tensor, nn.Parameter):  # torchao's quantised weights compute with few of their bits
        return [input], refusing("linear", f"whose weight is quantised ({type(weight).__name__})")

    def back(relevance: Tensor) -> Sequence[Tensor]:
        columns = relevance.reshape(-1, relevance.shape[-1]).any(0)
        w = weight[columns].to(relevance.dtype)
        constant = w.new_zeros(len(w)) if bias is None else bias[columns].to(w.dtype) / w.shape[1]

        def tile_of(x: Tensor) -> Tile:
            return lambda r, c, z: torch.addcmul(constant[c, None], w[c], x[r, None], out=z)

        return [_by_rows(input, relevance[..., columns], tile_of)]

    return [input], back


def _addmm(input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Step:
    """Used by transformers' `Conv1D`."""
    if (beta, alpha) != (1, 1) or input.dim() != 1:
        return [mat1], refusing("addmm", "with factors, or with a bias that is not a vector")
    return linear(mat1, mat2.detach().T, input)


def _matmul(input: Tensor, other: Tensor) -> Step:
    if other.dim() != 2:
        return [input, other], refusing("matmul", "whose second factor is not a weight matrix")
    return linear(input, other.detach().mT)


def _layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *rest: Any,
) -> Step:
    """By its full Jacobian: `z_ji = gain_j (delta_ji - (1 + normed_j normed_i) / n) x_i + bias_j / n`."""
    if len(normalized_shape) != 1:
        return [input], refusing("layer_norm", f"over {len(normalized_shape)} dimensions")

    def tile_of(x: Tensor) -> Tile:
        n = x.shape[1]
        centred = x - x.mean(-1, keepdim=True)
        slope = (centred.square().mean(-1, keepdim=True) + eps).rsqrt()  # [rows, 1]
        normed = centred * slope
        gain = (slope if weight is None else slope * weight.to(x.dtype)).expand_as(x)
        constant = x.new_zeros(n) if bias is None else bias.to(x.dtype) / n
        shares, skewed, weighted = gain / -n, gain * normed / -n, x * normed

        def tile(r: slice, c: slice, z: Tensor) -> None:
            torch.addcmul(constant[c, None], shares[r, c, None], x[r, None], out=z)
            z.addcmul_(skewed[r, c, None], weighted[r, None])
            z.diagonal(c.start, 1, 2).add_(gain[r, c] * x[r, c])

        return tile

    return [input], lambda given: [_by_rows(input, given, tile_of)]


def _by_rows(input: Tensor, relevance: Tensor, tile_of: Callable[[Tensor], Tile]) -> Tensor:
    """The relevance of `input` `[..., n]` from that of a function of its rows, `[..., m]`; z is computed in tiles.

    Rows without relevance are skipped; `tile_of` takes the others, `[N, n]`.
    """
    n = input.shape[-1]
    flat = relevance.reshape(relevance.shape[:-1].numel(), relevance.shape[-1])
    rows = flat.any(1)
    some = flat[rows]  # [N, m]
    tile = tile_of(input.detach().reshape(-1, n)[rows].to(flat.dtype))
    N, m = some.shape
    elements = max(1, TILES.get(some.device.type, TILE) // max(1, n))
    height, width = max(1, min(N, elements // max(1, m))), max(1, min(m, elements))
    found, buffer = some.new_zeros(N, n), some.new_empty(height, 2, width, n)
    for top in range(0, N, height):
        r = slice(top, min(top + height, N))
        for left in range(0, m, width):
            c = slice(left, min(left + width, m))
            z = buffer[: r.stop - r.start, :, : c.stop - c.start]
            tile(r, c, z[:, 0])
            torch.neg(z[:, 0], out=z[:, 1])
            share = some[r, None, c] / (z.clamp_(min=0).sum(-1) + EPSILON)
            found[r] += (share.flatten(1)[:, None] @ z.flatten(1, 2))[:, 0]
    whole = flat.new_zeros(len(flat), n)
    [whole[rows]] = _kept([found], some, 1)
    return whole.view(input.shape)


def module_rule(module: nn.Module, input: Tensor, output: Tensor) -> Step | None:
    """The rule of a module of transformers that counts as one function: an activation or an RMS norm."""
    if type(module).__name__.endswith(_NORMS):
        found = [getattr(module, name, None) for name in ("variance_epsilon", "eps", "epsilon")]
        eps = next((each for each in found if each is not None), torch.finfo(input.dtype).eps)
        return rms_norm(input, output.detach(), eps)
    return _identity(input) if type(module).__module__ == "transformers.activations" else None


def rms_norm(input: Tensor, output: Tensor, eps: float) -> Step:
    """By its full Jacobian: with `w_i = x_i^2 / (sum x^2 + n * eps)` it has `z_ji = f_j * ((i == j) - w_i)` for any
    weights: z has the sign of `f_j` for i = j, and the opposite sign for all other inputs.
    """

    def back(relevance: Tensor) -> Sequence[Tensor]:
        squares, size = input.to(relevance.dtype).square(), output.to(relevance.dtype).abs()
        w = squares / (squares.sum(-1, keepdim=True) + squares.shape[-1] * eps)
        own, others = size * (1 - w), size * (w.sum(-1, keepdim=True) - w)
        shared = relevance * size / (others + EPSILON)
        found = relevance * own / (own + EPSILON) + w * (shared.sum(-1, keepdim=True) - shared)
        return _kept([found], relevance, found.dim() - 1)

    return [input], back


# ---------------------------------------------------------------------- sums and products
def _identity(input: Tensor, *rest: Any, **options: Any) -> Step:
    return [input], lambda given: [given.sum_to_size(input.shape)]


def _add(input: Any, other: Any, *, alpha: float = 1, sign: int = 1) -> Step:
    """A sum with broadcasting. Over a row, the relevance of both terms together is that of the output.

    Tensors get a share even if they carry no relevance; numbers get none.
    """
    both = ((input, 1), (other, sign * alpha))
    terms = [(x, factor) for x, factor in both if isinstance(x, Tensor)]
    inputs = [x for x, _ in terms]
    if len(terms) == 1:
        return inputs, lambda given: [given]

    def back(given: Tensor) -> Sequence[Tensor]:
        signed = [(factor * x.detach().to(given.dtype)).expand(given.shape) for x, factor in terms]
        found = _by_signs(torch.add, signed, given, given.dim() - 1)
        return [each.sum_to_size(x.shape) for each, x in zip(found, inputs, strict=True)]

    return inputs, back


def _mean(function: Any, input: Tensor, *rest: Any, **options: Any) -> Step:
    """A mean or a sum within each example, whose sum is kept."""
    # As many examples as no other dimension has.
    examples = sum(input.shape) + 1
    alike = torch.empty((examples, *input.shape[1:]), dtype=input.dtype, device="meta")
    if function(alike, *rest, **options).shape[:1] != (examples,):
        return [input], refusing(function.__name__, "over the examples")

    def back(given: Tensor) -> Sequence[Tensor]:
        return _by_signs(lambda part: function(part, *rest, **options), [input], given, 1)

    return [input], back


def _by_signs(function: Callable[..., Tensor], inputs: Sequence[Tensor], relevance: Tensor, dims: int) -> list[Tensor]:
    """The relevance of all inputs of a linear function with weights >= 0: z has the sign of its input."""
    found = [torch.zeros_like(x, dtype=relevance.dtype) for x in inputs]
    for sign in SIGNS:
        wide = [x.detach().to(relevance.dtype) for x in inputs]
        parts = [(sign * x).clamp(min=0).requires_grad_() for x in wide]
        with torch.enable_grad():
            total = function(*parts)
        weights = torch.autograd.grad(total, parts, relevance / (total.detach() + EPSILON))
        for each, part, weight in zip(found, parts, weights, strict=True):
            each.addcmul_(part.detach(), weight)
    return _kept(found, relevance, dims)


def _mul(input: Any, other: Any) -> Step:
    """Each factor contributes the whole product, so those that carry relevance get equal parts."""
    factors = [(x, beside) for x, beside in ((input, other), (other, input)) if carries(x)]

    def back(given: Tensor) -> Sequence[Tensor]:
        part = given / len(factors)
        return [(part * (beside != 0)).sum_to_size(x.shape) for x, beside in factors]

    return [x for x, _ in factors], back


def _kept(found: Sequence[Tensor], relevance: Tensor, dims: int) -> list[Tensor]:
    """`found`, scaled together to the sums of `relevance` at each index of the first `dims` dimensions; 0 where no
    input contributes."""

    def sums(x: Tensor) -> Tensor:
        return x[..., None].flatten(dims).sum(-1)

    total = torch.stack([sums(each) for each in found]).sum(0)
    factor = torch.where(total > torch.finfo(total.dtype).tiny, sums(relevance) / total, 0.0)
    return [each * factor.view(*factor.shape, *[1] * (each.dim() - dims)) for each in found]


#: The rules by the names of functions.
RULES: Final[dict[str, Callable[..., Step]]] = {
    "linear": linear,
    "addmm": _addmm,
    "matmul": _matmul,
    "layer_norm": _layer_norm,
    "add": _add,
    "sub": partial(_add, sign=-1),
    "__rsub__": partial(_add, sign=-1),  # the rule treats both signs alike
    "mul": _mul,
    "sum": partial(_mean, torch.sum),
    "mean": partial(_mean, torch.mean),
    **dict.fromkeys(_ELEMENTWISE, _identity),
}


# ---------------------------------------------------------------------- attention
@torch.enable_grad()
def gate_rule(heads: Tensor, gate: Tensor, activation: str) -> Step:
    """Heads times gates: like any product, it gives equal parts to the factors that carry relevance."""
    gate = gates.as_4d(gate).expand_as(heads)
    is_open = gate != 0 if activation == "identity" else 1
    factors = [heads, gate] if carries(gate) else [heads]
    return factors, lambda given: [given * is_open / len(factors)] * len(factors)


@torch.enable_grad()
def attention_rule(call: Call, full: bool) -> Step:
    """Attention before its gate; the sum of the relevance of each example and head is kept.

    Heads that share a key or a value each get a copy. Unless `full`, probabilities are constants: then the operator
    itself gives sums over keys, and its gradient sums over rows.
    """

    def per_head(x: Tensor) -> Tensor:
        x = x if x.dim() == 4 else x[:, None]
        return x.repeat_interleave(call.H // x.shape[1], 1)

    query, key, value = inputs = [per_head(x) for x in (call.query, call.key, call.value)]
    if not full:
        return [value], lambda given: _by_signs(partial(_attended, call), [value], given, 2)
    if call.content_bias is not None:
        inputs.append(call.content_bias)

    def back(given: Tensor) -> Sequence[Tensor]:
        q, k = query.to(given.dtype) * call.scale, key
        if call.mixing is not None:
            q = q * call.mixing[:, None]
        if call.content_bias is not None:  # as one more feature, which is the scale in every query
            q = functional.pad(q, (0, 1), value=call.scale)
            k = torch.cat((k, call.content_bias[..., None]), -1)
        q, k, v = _full_attention(call, q, k, value, given)
        parts = [q, k[..., : call.D], v]
        return parts if call.content_bias is None else [*parts, k[..., call.D]]

    return inputs, back


def _attended(call: Call, value: Tensor) -> Tensor:
    """The operator's output before its gate, for another value `[B, H, S, Dv]`, which alone has a gradient."""
    constant = tree_map_only(Tensor, Tensor.detach, call)
    query, key = (x.to(value.dtype) for x in (constant.query, constant.key))
    if call.mixing is None:
        key = key.repeat_interleave(value.shape[1] // key.shape[1], 1)
    bare = constant._replace(query=query, key=key, value=value, gate=None, gate_activation="identity", dropout_p=0.0)
    return attend(bare, select(bare))


def _full_attention(call: Call, query: Tensor, key: Tensor, value: Tensor, relevance: Tensor) -> list[Tensor]:
    """Relevance of query `[B, H, T, D]`, times the scale, key and value in attention, by its full Jacobian.

    With `u_tsd = p_ts * c_ts * (v_sd - out_td)`, where c is the slope of a cap or 1, z of output td is
    `q_te * sum_s u_tsd * k_se` for feature e of query t and `u_tsd * q_te * k_se` for that of key s. The sign of the
    latter is that of u times that of `q * k`, so that sums over e are matrix products. The largest tensor is u, which
    is computed in tiles. Other terms of the scores are not inputs, nor are features of the query beyond those of
    `call`, which gives the probabilities.
    """
    q, k, v = (x.to(relevance.dtype) for x in (query, key, value))
    (B, H, T, Dv), S, D = relevance.shape, *k.shape[2:]
    own = slice(call.D)
    q_signs, k_signs = (torch.cat((x, -x), -1).clamp(min=0) for x in (q, k))  # [..., 2 D]
    q_found, k_found, v_found = (torch.zeros_like(x) for x in (q[..., own], k_signs, v))
    row_blocks = blocks(T, B * H * S * Dv)
    features = blocks(Dv, B * H * S * row_blocks[0].stop)
    for rows in row_blocks:
        p = eager.row_probabilities(call.of_rows(rows.start, rows.stop)).to(v.dtype)
        alike = q_signs[:, :, rows]
        opposed = alike.roll(D, -1)
        scores_up = alike @ k_signs.mT  # positive part of q k, [B, H, rows, S]
        scores_down = opposed @ k_signs.mT
        slopes = p
        if call.softcap:
            slopes = p * (1 - torch.tanh((scores_up - scores_down) / call.softcap).square())
        for d in features:
            values, R = v[..., d], relevance[:, :, rows, d]
            u = slopes[..., None] * (values[:, :, None] - (p @ values)[..., None, :])
            of_query = q[:, :, rows, None, own] * (u.mT @ k[:, :, None, :, own])  # [B, H, rows, d, D]
            for sign in SIGNS:
                up, down = (sign * u).clamp(min=0), (-sign * u).clamp(min=0)
                of_value, of_row = (sign * values).clamp(min=0), (sign * of_query).clamp(min=0)
                of_keys = (up * scores_up[..., None] + down * scores_down[..., None]).sum(-2)
                share = R / (p @ of_value + of_row.sum(-1) + of_keys + EPSILON)
                v_found[..., d] += of_value * (p.mT @ share)
                q_found[:, :, rows] += (share[..., None, :] @ of_row)[..., 0, :]
                by_up, by_down = ((x @ share[..., None])[..., 0].mT for x in (up, down))
                k_found += k_signs * (by_up @ alike + by_down @ opposed)
    return _kept([q_found, k_found[..., :D] + k_found[..., D:], v_found], relevance, 2)
