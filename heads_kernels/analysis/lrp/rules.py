r"""Layer-wise relevance propagation: how one function distributes the relevance of its outputs over its inputs.

For a function f with n inputs x, input i contributes to output j

.. math:: z_{ji} = \partial f_j / \partial x_i \cdot x_i + f(0)_j / n

and the relevance R of the outputs is distributed in proportion to positive and to negative z separately:

.. math:: R_i \propto \sum_j R_j \left(\frac{z^+_{ji}}{\sum_i z^+_{ji} + \epsilon}
    + \frac{z^-_{ji}}{\sum_i z^-_{ji} - \epsilon}\right), \qquad \sum_i R_i = \sum_j R_j

These are the rules of the code of Voita et al. 2019 ("Analyzing Multi-Head Self-Attention", corrected in 2021), after
Ding et al. 2017 and Bach et al. 2015 (eq. 60 with both factors 1/2, which cancel): epsilon 1e-5, the sum kept for every
token, in attention for every example and head. The scaling has no epsilon, so that it keeps even very small sums.
Relevance is never negative; that of a tensor that is used several times is the sum over its uses.

Functions take the relevance of outputs and return that of their inputs, in the shape of the inputs and the dtype of
`relevance`. They keep its sum over each row; in attention over each example and head, of all operands together.

No Jacobian is stored: z is computed in tiles, or summed in closed form where its signs allow it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

#: Keeps sums of z away from 0.
EPSILON: Final = 1e-5
#: Elements in a tile of z, by type of device. On a CPU a tile of 1 MiB stays in the L2 cache: 4 times more or fewer
#: elements were measured to cost a third more.
TILES: Final = {"cpu": 1 << 18}
TILE: Final = 1 << 24  # on every other device; heuristic: 64 MiB
SIGNS: Final = (1, -1)

#: `tile(rows, columns, z)` writes z of these rows and outputs, `[rows, columns, n]`.
Tile = Callable[[slice, slice, Tensor], object]
#: `probabilities(rows)`, `[B, H, rows, S]`.
Probabilities = Callable[[slice], Tensor]


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None, relevance: Tensor) -> Tensor:
    """Relevance of the inputs of `inputs @ weight.T + bias`; the bias counts for all inputs equally.

    Rows and outputs without relevance are skipped: of many logits only those with relevance cost anything.

    Args:
        inputs: `[..., n]`.
        weight: `[m, n]`; `bias`: `[m]` or None.
        relevance: `[..., m]`.
    """
    n = inputs.shape[-1]
    flat = relevance.reshape(-1, relevance.shape[-1])
    rows, columns = flat.any(1), flat.any(0)
    some = flat[rows][:, columns]
    x = inputs.reshape(-1, n)[rows].to(flat.dtype)
    w = weight[columns].to(flat.dtype)
    constant = w.new_zeros(len(w)) if bias is None else bias[columns].to(flat.dtype) / n

    def tile(r: slice, c: slice, z: Tensor) -> None:
        torch.addcmul(constant[c, None], w[c], x[r, None], out=z)

    found = flat.new_zeros(len(flat), n)
    found[rows] = _kept(_by_tiles(tile, some, n), some)
    return found.view(inputs.shape)


def norm(
    inputs: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, relevance: Tensor
) -> Tensor:
    """Relevance of the inputs of layer normalisation over the last dimension, by its full Jacobian.

    Args:
        inputs: `[..., n]`; `relevance` likewise.
        weight, bias: `[n]`, or None.
        eps: what is added to the variance.
    """
    n = inputs.shape[-1]
    flat = relevance.reshape(-1, n)
    rows = flat.any(1)
    some, x = flat[rows], inputs.reshape(-1, n)[rows].to(flat.dtype)
    centred = x - x.mean(-1, keepdim=True)
    slope = (centred.square().mean(-1, keepdim=True) + eps).rsqrt()  # [rows, 1]
    normed = centred * slope
    gain = slope if weight is None else slope * weight.to(flat.dtype)
    gain = gain.expand_as(x)  # z = gain_j (delta_ji - (1 + normed_j normed_i) / n) x_i + bias_j / n
    constant = x.new_zeros(n) if bias is None else bias.to(flat.dtype) / n
    shares, skewed = gain / -n, gain * normed / -n

    weighted = x * normed

    def tile(r: slice, c: slice, z: Tensor) -> None:
        torch.addcmul(constant[c, None], shares[r, c, None], x[r, None], out=z)
        z.addcmul_(skewed[r, c, None], weighted[r, None])
        z.diagonal(c.start, 1, 2).add_(gain[r, c] * x[r, c])

    found = torch.zeros_like(flat)
    found[rows] = _kept(_by_tiles(tile, some, n), some)
    return found.view(inputs.shape)


def rms_norm(inputs: Tensor, outputs: Tensor, eps: float, relevance: Tensor) -> Tensor:
    r"""Relevance of the inputs of an RMS norm over the last dimension, by its full Jacobian.

    With :math:`w_i = x_i^2 / (\sum x^2 + n \cdot eps)` it has :math:`z_{ji} = f_j (\delta_{ji} - w_i)` for any weights:
    z has the sign of :math:`f_j` for i = j, and the opposite sign for all other inputs.

    Args:
        inputs, outputs: `[..., n]`; `relevance` likewise.
        eps: what is added to the mean square.
    """
    squares, size = inputs.to(relevance.dtype).square(), outputs.to(relevance.dtype).abs()
    w = squares / (squares.sum(-1, keepdim=True) + squares.shape[-1] * eps)
    own, others = size * (1 - w), size * (w.sum(-1, keepdim=True) - w)
    shared = relevance * size / (others + EPSILON)
    found = relevance * own / (own + EPSILON) + w * (shared.sum(-1, keepdim=True) - shared)
    return _kept(found, relevance)


def add(terms: Sequence[Tensor], relevance: Tensor) -> list[Tensor]:
    """Relevance of each term of a sum with broadcasting, in the shape of the term.

    The sum over the last dimension is kept, over all terms together.
    """
    found = [torch.zeros_like(relevance) for _ in terms]
    for sign in SIGNS:
        parts = [(sign * term.to(relevance.dtype)).clamp(min=0) for term in terms]
        share = relevance / (sum(parts) + EPSILON)
        found = [each.addcmul(part, share) for each, part in zip(found, parts, strict=True)]
    total = sum(found).sum(-1, keepdim=True)  # type: ignore[union-attr]
    factor = _factor(total, relevance.sum(-1, keepdim=True))
    return [
        (each * factor).sum_to_size(term.shape) for each, term in zip(found, terms, strict=True)
    ]


def weighted(function: Callable[[Tensor], Tensor], inputs: Tensor, relevance: Tensor) -> Tensor:
    """Relevance of the inputs of a linear function with weights >= 0, such as a mean; the sum of each example is kept.

    Args:
        function: takes a tensor like `inputs`; autograd transposes it.
        inputs: `[B, ...]`.
        relevance: `[B, ...]`, of the result of `function`.
    """
    found = torch.zeros_like(inputs, dtype=relevance.dtype)
    for sign in SIGNS:
        part = (sign * inputs.detach().to(relevance.dtype)).clamp(min=0).requires_grad_()
        with torch.enable_grad():
            total = function(part)
        share = relevance / (total.detach() + EPSILON)
        found.addcmul_(part.detach(), torch.autograd.grad(total, part, share)[0])
    examples = relevance.flatten(1).sum(1), found.flatten(1).sum(1)
    return found * _factor(examples[1], examples[0]).view(-1, *[1] * (found.dim() - 1))


# ---------------------------------------------------------------------- attention
def attention_values(
    probabilities: Probabilities, value: Tensor, relevance: Tensor, blocks: Sequence[slice]
) -> Tensor:
    """Relevance of the values in `probabilities @ value`: z of row t, key s and feature d is `p_ts v_sd`.

    Args:
        probabilities: gives a block of rows.
        value: `[B, H, S, Dv]`.
        relevance: `[B, H, T, Dv]`.
        blocks: slices that make up the rows 0 to T - 1.
    """
    both = torch.cat((value, -value), -1).to(relevance.dtype).clamp(min=0)  # [B, H, S, 2 Dv]
    moved = torch.zeros_like(both)
    for rows in blocks:
        p = probabilities(rows).to(relevance.dtype)
        share = relevance[:, :, rows].repeat(1, 1, 1, 2) / (p @ both + EPSILON)
        moved += p.mT @ share
    positive, negative = (both * moved).chunk(2, -1)
    return _kept(positive + negative, relevance, (2, 3))


def attention(
    probabilities: Probabilities,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    relevance: Tensor,
    blocks: Sequence[slice],
    features: Sequence[slice],
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Relevance of query, key and value in attention, by its full Jacobian.

    With :math:`u_{tsd} = p_{ts} (v_{sd} - out_{td})`, z of output td is
    :math:`q_{te} \sum_s u_{tsd} k_{se}` for feature e of query t and :math:`u_{tsd} q_{te} k_{se}` for that of key s.
    The sign of the latter is that of u times that of :math:`q k`, so that sums over e are matrix products. The largest
    tensor is u, which is computed in tiles.

    Args:
        query: `[B, H, T, D]`, times the scale of the scores; other terms of the scores are not inputs.
        key: `[B, H, S, D]`.
        value, relevance, probabilities, blocks: as in `attention_values`.
        features: slices that make up the features 0 to Dv - 1: a tile is `[B, H, rows, S, features]`.
    """
    q, k, v = (x.to(relevance.dtype) for x in (query, key, value))
    found = q_found, k_found, v_found = tuple(map(torch.zeros_like, (q, k, v)))
    k_up, k_down = k.clamp(min=0), (-k).clamp(min=0)
    for rows in blocks:
        p = probabilities(rows).to(v.dtype)
        q_up, q_down = q[:, :, rows].clamp(min=0), (-q[:, :, rows]).clamp(min=0)
        scores_up = q_up @ k_up.mT + q_down @ k_down.mT  # positive part of q k, [B, H, rows, S]
        scores_down = q_up @ k_down.mT + q_down @ k_up.mT
        for d in features:
            values, R = v[..., d], relevance[:, :, rows, d]
            u = p[..., None] * (values[:, :, None] - (p @ values)[..., None, :])
            of_query = q[:, :, rows, None] * (u.mT @ k[:, :, None])  # [B, H, rows, d, D]
            for sign in SIGNS:
                up, down = (sign * u).clamp(min=0), (-sign * u).clamp(min=0)
                of_value, of_row = (sign * values).clamp(min=0), (sign * of_query).clamp(min=0)
                of_keys = (up * scores_up[..., None] + down * scores_down[..., None]).sum(-2)
                share = R / (p @ of_value + of_row.sum(-1) + of_keys + EPSILON)
                v_found[..., d] += of_value * (p.mT @ share)
                q_found[:, :, rows] += (share[..., None, :] @ of_row)[..., 0, :]
                by_up, by_down = ((x @ share[..., None])[..., 0].mT for x in (up, down))
                k_found += k_up * (by_up @ q_up + by_down @ q_down)
                k_found += k_down * (by_up @ q_down + by_down @ q_up)
    total = torch.stack([each.sum((2, 3), keepdim=True) for each in found]).sum(0)
    factor = _factor(total, relevance.sum((2, 3), keepdim=True))
    return q_found * factor, k_found * factor, v_found * factor


# ---------------------------------------------------------------------- tiles and sums
def _by_tiles(tile: Tile, relevance: Tensor, n: int) -> Tensor:
    """The relevance `[N, n]` of n inputs before scaling, from `relevance` `[N, m]` of the outputs; z in tiles."""
    N, m = relevance.shape
    elements = max(1, TILES.get(relevance.device.type, TILE) // max(1, n))
    height, width = max(1, min(N, elements // max(1, m))), max(1, min(m, elements))
    found, buffer = relevance.new_zeros(N, n), relevance.new_empty(height, 2, width, n)
    for top in range(0, N, height):
        r = slice(top, min(top + height, N))
        for left in range(0, m, width):
            c = slice(left, min(left + width, m))
            z = buffer[: r.stop - r.start, :, : c.stop - c.start]
            tile(r, c, z[:, 0])
            torch.neg(z[:, 0], out=z[:, 1])
            share = relevance[r, None, c] / (z.clamp_(min=0).sum(-1) + EPSILON)
            found[r] += (share.flatten(1)[:, None] @ z.flatten(1, 2))[:, 0]
    return found


def _kept(found: Tensor, relevance: Tensor, dims: int | tuple[int, ...] = -1) -> Tensor:
    """`found`, scaled to the sums of `relevance` over these dimensions."""
    total = found.sum(dims, keepdim=True)
    return found * _factor(total, relevance.sum(dims, keepdim=True))


def _factor(total: Tensor, wanted: Tensor) -> Tensor:
    """`wanted / total`, and 0 where no input contributes."""
    return torch.where(total > torch.finfo(total.dtype).tiny, wanted / total, 0.0)
