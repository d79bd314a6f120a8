"""The tensors and options of one call, as `Case.make` draws them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from heads_kernels import functional
from heads_kernels.call import Call, compute_dtype
from heads_kernels.offset_bias import OffsetBias
from heads_kernels.parse import parse


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

    def to(self, dtype: torch.dtype) -> Inputs:
        """The same values in `dtype`; the oracle reads quantised inputs in float64."""
        tensors = {name: t.detach().to(dtype) for name, t in self.tensors.items()}
        dlse = None if self.dlse is None else self.dlse.to(compute_dtype(dtype))
        return replace(self, tensors=tensors, dout=self.dout.to(dtype), dlse=dlse)

    def requires_grad(self, *names: str) -> Inputs:
        """The same memory as leaves; those named, or all, require a gradient."""
        tensors = {name: t.detach().requires_grad_(not names or name in names) for name, t in self.tensors.items()}
        return replace(self, tensors=tensors)
