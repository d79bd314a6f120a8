"""The protocol of head gates, and fixed gates.

Closing, Hard Concrete gates, importance, pruning and saving use this protocol, so that they do not depend on the model,
and models do not depend on the kind of gate.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from heads_kernels.checks import check_tensor


class HeadGate(nn.Module, ABC):
    """One gate per head of an attention layer, which holds it as its submodule `head_gate`.

    In every forward pass the layer calls it with the batch size B and the number T of query rows, and passes the
    result and `closed_grad` to the operator.

    Attributes:
        num_heads: H.
        closed_grad: the operator's argument: False if the gradient of a gate of exactly 0 is 0 anyway.
    """

    num_heads: int
    closed_grad: bool = True

    @abstractmethod
    def forward(self, batch_size: int, length: int) -> Tensor:
        """The gates of this pass: `[H]`, `[B, H]` per example, or `[B, H, T]` per row."""

    @abstractmethod
    def export(self) -> Tensor:
        """The gates at inference, `[H]`, without gradient, which pruning folds into the weights."""

    @abstractmethod
    def keep(self, heads: Sequence[int]) -> None:
        """Keep the gates of these heads, in this order; the layer has lost the others."""


class FixedGate(HeadGate):
    """Constant gates, to close heads temporarily; they are not parameters and not in the state dict.

    Args:
        gates: floating `[H]`; 0 closes a head, 1 leaves it unchanged.
    """

    gates: Tensor

    def __init__(self, gates: Tensor) -> None:
        super().__init__()
        check_tensor("gates", gates, "pass a floating tensor [H], one gate for each head", (1,))
        self.register_buffer("gates", gates.detach().clone(), persistent=False)

    @property
    def num_heads(self) -> int:  # type: ignore[override]
        """H."""
        return self.gates.shape[0]

    def forward(self, batch_size: int, length: int) -> Tensor:
        return self.gates

    def export(self) -> Tensor:
        return self.gates.clone()

    def keep(self, heads: Sequence[int]) -> None:
        self.gates = self.gates[torch.tensor(heads, dtype=torch.int64, device=self.gates.device)]

    def extra_repr(self) -> str:
        closed = (self.gates == 0).nonzero().flatten().tolist()
        return f"num_heads={self.num_heads}, closed={closed}"
