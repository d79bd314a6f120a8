"""Gates of the heads of a layer: their protocol, fixed gates, and Hard Concrete gates, which are learned.

Closing, importance, pruning and saving use the protocol, so that they do not depend on the model, and models do not
depend on the kind of gate.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

import torch
from torch import Tensor, nn

from heads_kernels.checks import check_choice, check_flag, check_size, check_tensor, is_real, refuse
from heads_kernels.dtensor import distributed_as, of_first, whole

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Evaluate = Literal["mean", "binary"]
Reduce = Literal["sum", "mean_layers"]
#: Keeps the noise, and `P(gate != 0)`, away from 0 and 1 (Voita et al. 2019).
EPS: Final = 1e-6


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


# ---------------------------------------------------------------------- Hard Concrete
class HardConcrete(HeadGate):
    """Gates that are exactly 0 or exactly 1 with differentiable probabilities.

    In training a gate is a sample (Louizos et al. 2018, eq. 10 and 11; Voita et al. 2019, section 4):

        s = sigmoid((ln u - ln(1 - u) + log_alpha) / temperature), u from U(1e-6, 1 - 1e-6)
        gate = clip(s * (high - low) + low, 0, 1), (low, high) = stretch

    and with `c = temperature * ln(-low / high)` and `d = temperature * ln((1 - low) / (high - 1))`

        P(gate != 0) = sigmoid(log_alpha - c)
        P(gate = 1) = sigmoid(log_alpha - d)

    A sample of exactly 0 or 1 is clamped, and its gradient for `log_alpha` is 0: the operator may skip closed heads
    in the backward pass too (`closed_grad=False`). At inference gates are not sampled, but follow one of two rules:

    mean      `clip(sigmoid(log_alpha) * (high - low) + low, 0, 1)`, the rule of Louizos et al. (eq. 13) and of the
              code of Voita et al.; gates may be between 0 and 1, and pruning folds them into the output projection
    binary    1 where `P(gate = 1) > P(gate = 0)`, otherwise 0 (Voita et al. 2019, footnote 7)

    The rules may disagree on which heads are open (by default, those with `log_alpha` in (-2.398, 0]).

    The noise is drawn on the CPU by PyTorch's generator and moved, so that a seed gives the same gates on every device
    and `torch.utils.checkpoint` replays them; code compiled by Inductor uses Inductor's generator.

    Args:
        num_heads: H, at least 1.
        temperature: above 0. 0.33 as in Voita et al.; `louizos` has 2/3.
        stretch: (low, high), low < 0 and high > 1.
        log_alpha: the initial value of the parameter. The default 2.0 (94% of the samples are open, gate 0.957 at
            inference) hardly changes a trained model. "voita" draws from U(-sqrt(3 / H), sqrt(3 / H)), as the code
            of the paper does: its gates start half open.
        per_sample: sample for every example of the batch, gates `[B, H]`; otherwise the batch shares a sample, `[H]`.
        evaluate: the rule at inference, "mean" or "binary".
        straight_through: gates are 1 where the formula gives more than 0.5 and 0 elsewhere, in training and in the rule
            "mean"; the gradient is that of the formula. Closed heads then have a gradient (`closed_grad=True`).
        device: of `log_alpha`.

    Attributes:
        log_alpha: parameter `[H]`. Gates are computed in float32, or in float64 if it is float64. Where it is sharded
            (FSDP2), everything but `forward` gathers it: every process of its mesh must call.
        meshes: every `DeviceMesh` whose processes share the noise of its first one: those of tensor or context
            parallelism, which compute parts of one batch. Empty: every process draws its own.
    """

    def __init__(
        self,
        num_heads: int,
        *,
        temperature: float = 0.33,
        stretch: tuple[float, float] = (-0.1, 1.1),
        log_alpha: float | Literal["voita"] = 2.0,
        per_sample: bool = False,
        evaluate: Evaluate = "mean",
        straight_through: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        check_size("num_heads", num_heads)
        if not is_real(temperature) or temperature <= 0:
            refuse("temperature", f"is {temperature!r}", "pass a float above 0, such as 0.33")
        pair = isinstance(stretch, (tuple, list)) and len(stretch) == 2 and all(map(is_real, stretch))
        if not pair or not stretch[0] < 0 < 1 < stretch[1]:
            refuse("stretch", f"is {stretch!r}", "pass (low, high) with low < 0 and high > 1")
        check_choice("evaluate", evaluate, get_args(Evaluate))
        check_flag("per_sample", per_sample)
        check_flag("straight_through", straight_through)
        if log_alpha != "voita" and not is_real(log_alpha):
            refuse("log_alpha", f"is {log_alpha!r}", "pass a finite float or 'voita'")
        self.temperature = temperature
        self.stretch = stretch
        self.per_sample = per_sample
        self.evaluate = evaluate
        self.straight_through = straight_through
        self.closed_grad = straight_through
        self.meshes: tuple[DeviceMesh, ...] = ()
        initial = torch.empty(num_heads, dtype=torch.float32, device="cpu")
        if isinstance(log_alpha, str):
            initial.uniform_(-math.sqrt(3 / num_heads), math.sqrt(3 / num_heads))
        else:
            initial.fill_(log_alpha)
        self.log_alpha = nn.Parameter(initial.to(device or torch.get_default_device()))

    @classmethod
    def louizos(cls, num_heads: int, **options: Any) -> HardConcrete:
        """Gates with the temperature of Louizos et al. 2018, 2/3; the stretch is the same."""
        return cls(num_heads, temperature=2 / 3, **options)

    @property
    def num_heads(self) -> int:  # type: ignore[override]
        """H."""
        return self.log_alpha.shape[0]

    def forward(self, batch_size: int, length: int) -> Tensor:
        """In training a sample, `[H]` or `[B, H]`; otherwise the gates of `evaluate`, `[H]`."""
        if not self.training:
            return self._evaluated()
        shape = (batch_size, self.num_heads) if self.per_sample else (self.num_heads,)
        wide = self._wide()
        uniform = torch.rand(shape, dtype=wide.dtype, device="cpu")
        noise = torch.logit(EPS + (1 - 2 * EPS) * uniform).to(wide.device, non_blocking=True)
        for mesh in self.meshes:
            noise = of_first(noise, mesh)
        return self._clipped((noise + wide) / self.temperature)

    # ------------------------------------------------------------------ probabilities, closed form
    def probability_open(self) -> Tensor:
        """`P(gate != 0)`, `[H]`, clipped to [1e-6, 1 - 1e-6]; with gradient."""
        return torch.sigmoid(self._wide() - self._offset_zero).clamp(EPS, 1 - EPS)

    def probability_zero(self) -> Tensor:
        """`P(gate = 0) = 1 - P(gate != 0)`, `[H]`; with gradient."""
        return 1 - self.probability_open()

    def probability_one(self) -> Tensor:
        """`P(gate = 1)`, `[H]`; with gradient."""
        return torch.sigmoid(self._wide() - self._offset_one)

    def penalty(self) -> Tensor:
        """The L0 penalty of this layer: the expected number of open heads, a scalar with gradient."""
        return self.probability_open().sum()

    def l2_penalty(self, values: Tensor) -> Tensor:
        """Half the expected sum of squares of the gated values (Louizos et al. 2018: L0 combined with other norms).

        That is `sum(P(gate != 0) * values**2) / 2`, a scalar with gradients for the gates and `values`, which are
        `[H, ...]`, for example the columns of the output projection of each head.
        """
        if values.dim() < 1 or values.shape[0] != self.num_heads:
            refuse("values", f"has shape {list(values.shape)}", f"pass [{self.num_heads}, ...]")
        return (self.probability_open() * values.square().flatten(1).sum(1)).sum() / 2

    # ------------------------------------------------------------------ inference
    @property
    def sparsity(self) -> Tensor:
        """Share of the heads that are open at inference, a scalar; "sparsity" in the code of Voita et al."""
        return (self._evaluated() != 0).float().mean()

    def export(self) -> Tensor:
        return self._evaluated().detach().clone()

    def keep(self, heads: Sequence[int]) -> None:
        index = torch.tensor(heads, dtype=torch.int64, device=self.log_alpha.device)
        kept = self.log_alpha.detach()[index]
        self.log_alpha = nn.Parameter(kept, requires_grad=self.log_alpha.requires_grad)

    def settle(self, is_open: Tensor) -> None:
        """Open the heads of `is_open`, bool `[H]`, fully and close the others, permanently.

        Sets `log_alpha` so that every sample, and either rule, gives exactly 1 or 0, and stops its training.
        """
        if is_open.dtype != torch.bool or is_open.shape != self.log_alpha.shape:
            was = f"is {is_open.dtype} of shape {list(is_open.shape)}"
            refuse("is_open", was, f"pass a bool tensor [{self.num_heads}]")
        # The noise is at most logit(1 - EPS); a logit beyond `bound` is clamped on either side.
        bound = max(-self._offset_zero, self._offset_one)
        far = math.log1p(-EPS) - math.log(EPS) + bound * max(1.0, 1 / self.temperature) + 1
        self.log_alpha.requires_grad_(False)
        self.log_alpha.grad = None
        settled = torch.where(is_open.to(self.log_alpha.device), far, -far)
        self.log_alpha.copy_(distributed_as(settled.to(self.log_alpha.dtype), self.log_alpha))

    def extra_repr(self) -> str:
        names = "num_heads", "temperature", "stretch", "evaluate", "per_sample", "straight_through"
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names)

    # ------------------------------------------------------------------ the formulas
    @property
    def _offset_zero(self) -> float:
        low, high = self.stretch
        return self.temperature * math.log(-low / high)

    @property
    def _offset_one(self) -> float:
        low, high = self.stretch
        return self.temperature * math.log((1 - low) / (high - 1))

    def _wide(self) -> Tensor:
        return whole(self.log_alpha).to(torch.promote_types(self.log_alpha.dtype, torch.float32))

    def _clipped(self, logits: Tensor) -> Tensor:
        low, high = self.stretch
        gates = (torch.sigmoid(logits) * (high - low) + low).clamp(0, 1)
        if self.straight_through:
            gates = gates + ((gates > 0.5).to(gates.dtype) - gates).detach()
        return gates

    def _evaluated(self) -> Tensor:
        logits = self._wide()
        if self.evaluate == "mean":
            return self._clipped(logits)
        # P(1) > P(0) as a bound of log_alpha; rounded, so that it is exactly 0 for a symmetric stretch.
        threshold = round((self._offset_one + self._offset_zero) / 2, 12)
        return (logits > threshold).to(logits.dtype)


def check_one_noise(head_gate: HeadGate) -> None:
    """Refuse gates that would differ between the processes of tensor parallelism, which all have them."""
    if isinstance(head_gate, HardConcrete) and head_gate.training and not head_gate.meshes:
        was = "draws noise of its own in each process of tensor parallelism"
        refuse("head_gate", was, "put their mesh into head_gate.meshes: head_gate.meshes = (mesh,)")


def hard_concrete_gates(model: nn.Module) -> list[HardConcrete]:
    """The `HardConcrete` gates of a model, each once; a model without any is refused."""
    gates = [module for module in model.modules() if isinstance(module, HardConcrete)]
    if not gates:
        was = f"is a {type(model).__name__} without HardConcrete gates"
        refuse("model", was, "attach some: hk.heads.gate(model, hk.nn.HardConcrete)")
    return gates


def l0_penalty(model: nn.Module, reduce: Reduce = "sum") -> Tensor:
    """The L0 penalty of all `HardConcrete` gates of a model, a scalar with gradient: add `lambda` times it to the loss.

    Args:
        model: contains at least one `HardConcrete`, on whose device the penalty is; one that several layers share
            counts once.
        reduce: "sum", the expected number of open heads of the model (L_C of Voita et al. 2019); "mean_layers",
            that number divided by the number of gated layers, as in the code of the paper.
    """
    check_choice("reduce", reduce, get_args(Reduce))
    gates = hard_concrete_gates(model)
    total = sum_of_penalties(gates)
    return total / len(gates) if reduce == "mean_layers" else total


def sum_of_penalties(gates: Sequence[HardConcrete]) -> Tensor:
    """The expected number of open heads, on the device of the first gate."""
    device = gates[0].log_alpha.device
    return torch.stack([gate.penalty().to(device) for gate in gates]).sum()


def expected_open(model: nn.Module) -> Tensor:
    """The expected number of open heads of a model with `HardConcrete` gates: a scalar without gradient."""
    return l0_penalty(model).detach()
