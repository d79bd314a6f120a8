"""`attention_statistics` on a backend, held to the accuracy rule."""

from __future__ import annotations

import functools
import inspect
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from heads_kernels.functional import attention_statistics
from heads_kernels.ops import eager
from heads_kernels.parse import parse
from heads_kernels.testing.accuracy import Quantity, Reference, Report
from heads_kernels.testing.case import Inputs
from heads_kernels.testing.rounding import Rounding, floors

_NAMES: Final = inspect.signature(attention_statistics).parameters
_MEASURED: Final = ("lse", "max_score", "max_prob", "entropy", "received")


def statistics_arguments(inputs: Inputs) -> dict[str, Any]:
    """The arguments of `attention_statistics` for a call."""
    return {name: value for name, value in inputs.arguments().items() if name in _NAMES}


def check_statistics(inputs: Inputs, backend: Any) -> Report:
    """Check `backend` on the scores of a call."""
    return compare_statistics(statistics_reference(inputs), backend)


def statistics_reference(inputs: Inputs) -> Reference:
    """Oracle, eager and floors, which backends share."""
    want, of_eager = (_measure(each, "eager") for each in (inputs.to(torch.float64), inputs))
    oracle, found = ({name: getattr(each, name) for name in _MEASURED} for each in (want, of_eager))
    floor = floors(inputs.dout.dtype, oracle, functools.partial(_simulate, inputs))
    return Reference(inputs, oracle, found, floor)


def compare_statistics(reference: Reference, backend: Any) -> Report:
    """Check `backend`. "argmax" is the true probability of the key that it names."""
    inputs, wide = reference.inputs, reference.inputs.to(torch.float64)
    got = _measure(inputs, backend)
    quantities = [reference.judge(name, getattr(got, name)) for name in _MEASURED]
    none = got.argmax < 0
    if torch.equal(none, reference.oracle["max_score"] == -torch.inf):
        p = eager.row_probabilities(parse("attention_statistics", **statistics_arguments(wide))[0])
        named = p.gather(-1, got.argmax.clamp(min=0)[..., None])[..., 0].masked_fill(none, 0.0)
        # If two keys are within rounding of each other, either may be the maximum.
        chosen = reference.judge("max_prob", named.to(reference.eager["max_prob"].dtype))
        quantities.append(replace(chosen, name="argmax"))
    else:
        quantities.append(Quantity("argmax", wrong="another row sees no key"))
    return Report("inputs", "attention_statistics", backend or "default", inputs.dout.dtype, tuple(quantities))


def row_weights(inputs: Inputs) -> Tensor:
    """Weights `[*batch, H, T]` of the rows of a call, some of them 0 and negative, float32."""
    sizes = inputs.dout.shape[:-1]
    weights = torch.arange(sizes.numel(), device=inputs.dout.device) % 7 - 2
    return weights.reshape(sizes) / 4


def _measure(inputs: Inputs, backend: Any) -> Any:
    given = statistics_arguments(inputs)
    return attention_statistics(**given, received=row_weights(inputs), backend=backend)


def _simulate(inputs: Inputs, simulated: Rounding) -> dict[str, Tensor]:
    given = statistics_arguments(inputs.to(simulated.wide))
    call, _ = parse("attention_statistics", **given, received=row_weights(inputs))
    with torch.no_grad(), simulated:
        found = eager.row_statistics(call)
        # A second pass may compute `received`, from lse.
        noise = torch.where(found.lse.isfinite(), simulated.summed(found.lse, found.lse.abs()) - found.lse, 0.0)
        weights: Any = call.row_weights
        second = eager.row_statistics(call._replace(row_weights=weights * noise.exp()))
    found = found._replace(received=second.received)
    return {name: simulated.rounded(getattr(found, name), torch.float32) for name in _MEASURED}
