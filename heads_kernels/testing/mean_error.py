"""How far random roundings move the sum of error times reference, for the output and every gradient.

Random errors cancel in that sum; the error of a factor that is too large by 0.3 % does not. The sum is a linear
function of the result, so every rounding changes it by its error times a derivative. Roundings are independent, up to
u |x| and of either sign, so their squares add up. If one rounding changes the sum in several places, these add up
before they are squared:

    a mixed query     each of its features changes all scores of the row, and with them lse and delta
    dout * gate       each of its elements changes all dP of the row
    delta             is common to its row
    equal numbers     have equal roundings, such as the probabilities and results of a query that is 0

Errors of a processor's float32 arithmetic may all have one sign: `accuracy` adds them up without cancelling.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Head(NamedTuple):
    """What the backward pass of one head computes, and its errors, in float64; `[T, S]` unless stated otherwise."""

    query: Tensor  # [T, D], mixed
    key: Tensor  # [S, D]
    value: Tensor  # [S, Dv]
    mixed: float  # relative error of the mixed query in a score
    working: float
    p: Tensor
    attended_p: Tensor  # after dropout
    attended_p_error: Tensor
    row_error: Tensor  # [T]
    moved: Tensor  # [T, Dv]: the derivative of the output by `row_error`
    attended: Tensor  # [T, Dv]
    dattended: Tensor  # [T, Dv]
    dp_weight: Tensor  # the derivative of dscores by dattended value^T
    dscores: Tensor  # finished
    p_part: Tensor  # error of dscores from that of p, with the sign of their derivative
    own: Tensor  # errors of dscores that are independent
    common: Tensor  # error of dscores from that of delta
    slope: Tensor  # of the cap
    slope_change: Tensor  # its derivative by the raw score
    slope_error: Tensor


class Weights(NamedTuple):
    """The factors with which errors of the numbers of one head enter the sums: by name, or one tensor."""

    attended: dict[str, Tensor]  # [T, Dv]: of out and dgate, by the output before the gate
    lse: Tensor  # [T]
    dvalue: Tensor  # [S, Dv]
    raw: dict[str, Tensor]  # [T, S]: by the gradient of raw scores
    finished: dict[str, Tensor]  # [T, S]: by dscores


class Equal(NamedTuple):
    """Groups of equal numbers."""

    number: Tensor  # of each number among the distinct ones
    heads: Tensor  # in how many heads each distinct one may be


def equal(numbers: Tensor, heads: int = 1) -> Equal:
    """Equal numbers of one of `heads` heads; a number that occurs twice, or is 1, may occur in all heads."""
    distinct, index, counts = torch.unique(numbers, return_inverse=True, return_counts=True)
    return Equal(index, ((counts > 1) | (distinct == 1.0)).double() * (heads - 1) + 1.0)


def squares(head: Head, weights: Weights, heads: int) -> dict[str, Tensor]:
    """The square of the bound by name, for one of `heads` heads."""
    # Numbers that round to 1 count as equal: dropout's factor rounds them alike.
    same = equal(torch.where(head.p > 1 - head.working, 1.0, head.p).float(), heads)
    u, result = head.working, {}
    for name, weight in weights.attended.items():
        of_p = weight @ head.value.T
        result[name] = (
            add_equal(same, of_p * head.attended_p_error)
            + (head.row_error * (weight * head.moved).sum(-1)).square().sum()
            + _mixed(head, _centered(head, head.attended_p * of_p))
        )
        if name == "dgate":  # of the saved output
            result[name] += (u * head.attended * weight).square().sum()
    result["lse"] = _mixed(head, weights.lse[:, None] * head.p)
    of_p = head.dattended @ weights.dvalue.T
    result["dvalue"] = (
        add_equal(same, of_p * (head.attended_p_error + u * head.attended_p))
        + (u * head.dattended * (head.attended_p @ weights.dvalue)).square().sum()
        + _mixed(head, _centered(head, head.attended_p * of_p))
    )
    for name, weight in weights.raw.items():
        result[name] = _of_dscores(head, weight * head.slope, same)
        result[name] += (weight * head.dscores * head.slope_error).square().sum()
        result[name] += _mixed(
            head, _moved(head, weight * head.slope), weight * head.slope_change * head.dscores
        )
    for name, weight in weights.finished.items():
        result[name] = _of_dscores(head, weight, same) + _mixed(head, _moved(head, weight))
    return result


def add_equal(same: Equal, weights: Tensor) -> Tensor:
    """The sum of squares of the sums over equal numbers; of N heads (a + ..)^2 is at most N (a^2 + ..)."""
    sums = weights.new_zeros(same.heads.shape)
    sums.index_add_(0, same.number.flatten(), weights.flatten())
    return (sums.square() * same.heads).sum()


def _of_dscores(head: Head, weight: Tensor, same: Equal) -> Tensor:
    of_dattended = (weight * head.dp_weight) @ head.value
    return (
        add_equal(same, weight * head.p_part)
        + (weight * head.own).square().sum()
        + (weight * head.common).sum(-1).square().sum()
        + (head.working * head.dattended * of_dattended).square().sum()
    )


def _centered(head: Head, by_score: Tensor) -> Tensor:
    """A derivative by scores where lse follows them."""
    return by_score - head.p * by_score.sum(-1, keepdim=True)


def _moved(head: Head, weight: Tensor) -> Tensor:
    """The derivative by scores of dscores with these weights: delta follows them, too."""
    by_delta = (weight * head.p).sum(-1, keepdim=True)
    return _centered(head, weight * head.dscores) - by_delta * head.dscores


def _mixed(head: Head, by_score: Tensor, by_slope: Tensor | float = 0.0) -> Tensor:
    """From the roundings of the mixed query: derivatives by finished scores, and through the slope of the cap."""
    by_raw = by_score * head.slope + by_slope
    return (head.mixed * head.query * (by_raw @ head.key)).square().sum()
