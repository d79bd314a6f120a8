"""`GateSchedule`: training that ends with a given number of open heads."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from heads_kernels.checks import check_size, is_int, is_real, refuse
from heads_kernels.dtensor import whole
from heads_kernels.heads.layers import AttentionLayer, attention_layers
from heads_kernels.nn.gates import HardConcrete, hard_concrete_gates, sum_of_penalties


class GateSchedule(nn.Module):
    """Trains the `HardConcrete` gates of a model to exactly k open heads, instead of with a fixed lambda.

    With n the expected number of open heads (`hk.nn.expected_open`), the penalty is the augmented Lagrangian of Wang,
    Wohlwend and Lei 2020 ("Structured Pruning of Large Language Models"), counted in heads:

        lambda_1 * (n - target) + lambda_2 * (n - target)^2

    `target` falls linearly from all heads to k over the warm-up. The multipliers start at 0 and after every step grow
    by `rate * (n - target) / heads` and `rate * ((n - target) / heads)^2`, so that lambda_1 approaches the weight of an
    L0 penalty that leaves k heads. Since n is only an expectation, `finish` opens the k heads with the largest
    `log_alpha` fully and closes the others, similar to the hard count of Li, Cotterell and Sachan 2021 (differentiable
    subset pruning). Then gates are 0 or 1, in training and by both rules of evaluation, and no longer trained.

        schedule = hk.heads.GateSchedule(model, open_heads=12, steps=2000)
        for batch in batches:  # 2000 of them
            (loss(batch) + schedule.penalty()).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        schedule.finish()
        hk.heads.prune(model, hk.heads.closed(model))

    Use a separate learning rate for the gates, about 0.05 with Adam for a few hundred steps, and no weight decay:
    between open and closed, `log_alpha` changes by 4 or more. Only `finish` waits for a GPU. `state_dict()` has what
    resuming needs besides the model: the multipliers and the number of steps.

    Args:
        model: has `HardConcrete` gates (`hk.heads.gate`) and is on its final device.
        open_heads: k for the whole model, or k per kind of attention, such as `{"encoder": 8, "cross": 10}`, with
            separate multipliers. Kinds that are not given are not changed. Layers of a kind that is given may not share
            a gate with layers of another.
        steps: planned optimiser steps until `finish`, at least 1; the actual number may differ.
        warmup: share of the steps in which the target falls, in [0, 1].
        rate: learning rate of the multipliers, above 0, proportional to the scale of the loss. For a few hundred steps,
            4 / steps and a warm-up of 0.7 leave the gates time to follow.

    Attributes:
        lambda_1, lambda_2: the multipliers, a float32 tensor with one entry per count.
        steps_done: number of calls of `step`.
    """

    lambda_1: Tensor
    lambda_2: Tensor

    def __init__(
        self,
        model: nn.Module,
        *,
        open_heads: int | Mapping[str, int],
        steps: int,
        warmup: float = 0.5,
        rate: float = 0.01,
    ) -> None:
        super().__init__()
        check_size("steps", steps)
        if not is_real(warmup) or not 0 <= warmup <= 1:
            refuse("warmup", f"is {warmup!r}", "pass a share of the steps, in [0, 1]")
        if not is_real(rate) or rate <= 0:
            refuse("rate", f"is {rate!r}", "pass a float above 0, such as 0.01")
        self._counts = _counts(model, open_heads)
        heads = [sum(gate.num_heads for gate in gates) for gates, _ in self._counts]
        for (_, k), most in zip(self._counts, heads, strict=True):
            if not is_int(k) or not 0 <= k <= most:
                refuse("open_heads", f"is {k!r}", f"pass an int from 0 to {most}")
        self.open_heads = open_heads
        self.steps = steps
        self.warmup = warmup
        self.rate = rate
        self.steps_done = 0
        device = self._counts[0][0][0].log_alpha.device
        self._heads = torch.tensor(heads, dtype=torch.float32, device=device)
        asked = torch.tensor([k for _, k in self._counts], dtype=torch.float32, device=device)
        self._surplus = self._heads - asked
        self.register_buffer("lambda_1", torch.zeros_like(self._heads))
        self.register_buffer("lambda_2", torch.zeros_like(self._heads))

    def extra_repr(self) -> str:
        return (
            f"open_heads={self.open_heads}, steps={self.steps_done} of {self.steps}, "
            f"warmup={self.warmup}, rate={self.rate}"
        )

    @property
    def target(self) -> Tensor:
        """The target of the expected number of open heads in this step, one entry per count."""
        ramp = self.warmup * self.steps
        done = min(1.0, self.steps_done / ramp) if ramp else 1.0
        return self._heads - done * self._surplus

    def penalty(self) -> Tensor:
        """The term to add to the loss: a scalar, with gradient for the gates."""
        excess = self._excess()
        return (self.lambda_1 * excess + self.lambda_2 * excess.square()).sum()

    @torch.no_grad()
    def step(self) -> None:
        """Update multipliers and target; call it after every step of the optimiser."""
        share = self._excess() / self._heads
        self.lambda_1 = self.lambda_1 + self.rate * share  # a state dict holds the old tensor
        self.lambda_2 = self.lambda_2 + self.rate * share.square()
        self.steps_done += 1

    def finish(self) -> None:
        """Open exactly the k heads with the largest `log_alpha` fully and close all others permanently.

        Ties go to the earlier layer and head.
        """
        for gates, k in self._counts:
            flat = torch.cat([whole(gate.log_alpha.detach()).double().cpu() for gate in gates])
            is_open = torch.zeros_like(flat, dtype=torch.bool)
            is_open[flat.argsort(descending=True, stable=True)[:k]] = True
            sizes = [gate.num_heads for gate in gates]
            for gate, mine in zip(gates, torch.split(is_open, sizes), strict=True):
                gate.settle(mine)

    def get_extra_state(self) -> int:
        """The part of the state dict that is no tensor."""
        return self.steps_done

    def set_extra_state(self, state: int) -> None:
        self.steps_done = state

    def _excess(self) -> Tensor:
        expected = [sum_of_penalties(gates).to(self._heads.device) for gates, _ in self._counts]
        return torch.stack(expected) - self.target


def _counts(model: nn.Module, open_heads: int | Mapping[str, int]) -> list[tuple[list[HardConcrete], int]]:
    """The gates that are counted together, and the number of their heads to keep open."""
    if not isinstance(open_heads, Mapping):
        return [(hard_concrete_gates(model), open_heads)]
    kinds: dict[str, dict[HardConcrete, None]] = {}  # each once, in order
    first: dict[HardConcrete, AttentionLayer] = {}
    for layer in attention_layers(model):
        if not isinstance(layer.gate, HardConcrete):
            continue
        other = first.setdefault(layer.gate, layer)
        if layer.kind != other.kind and {layer.kind, other.kind} & set(open_heads):
            was = f"counts kinds, but {other} and {layer}, of the kinds {other.kind!r} and {layer.kind!r}, share a gate"
            refuse("open_heads", was, "pass an int, or give each layer a gate of its own")
        kinds.setdefault(layer.kind, {})[layer.gate] = None
    if not open_heads or not set(open_heads) <= set(kinds):
        refuse("open_heads", f"is {dict(open_heads)!r}", f"the kinds with HardConcrete gates are {sorted(kinds)}")
    return [(list(kinds[kind]), k) for kind, k in open_heads.items()]
