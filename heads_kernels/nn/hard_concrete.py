"""Hard Concrete gates: learned gates of heads, and their L0 penalty."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

import torch
from torch import Tensor, nn

from heads_kernels.checks import check_choice, check_size, is_real, refuse
from heads_kernels.dtensor import distributed_as, of_first, whole
from heads_kernels.nn.gates import HeadGate

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Evaluate = Literal["mean", "binary"]
Reduce = Literal["sum", "mean_layers"]
EVALUATE: Final = ("mean", "binary")
REDUCE: Final = ("sum", "mean_layers")


class HardConcrete(HeadGate):
    r"""Gates that are exactly 0 or exactly 1 with differentiable probabilities.

    In training a gate is a sample (Louizos et al. 2018, eq. 10 and 11; Voita et al. 2019, section 4):

    .. math:: s = \sigma((\ln u - \ln(1 - u) + log\_alpha) / temperature), \quad u \sim U(eps, 1 - eps)
    .. math:: gate = \min(1, \max(0, s \cdot (high - low) + low)), \quad (low, high) = stretch

    and with `c = temperature * ln(-low / high)` and `d = temperature * ln((1 - low) / (high - 1))`

    .. math:: P(gate \ne 0) = \sigma(log\_alpha - c), \quad P(gate = 1) = \sigma(log\_alpha - d)

    A sample of exactly 0 or 1 is clamped, and its gradient for `log_alpha` is 0: the operator may skip closed heads
    in the backward pass too (`closed_grad=False`). At inference gates are not sampled, but follow one of two rules:

    mean      `clip(sigmoid(log_alpha) * (high - low) + low, 0, 1)`, the rule of Louizos et al. (eq. 13) and of the
              code of Voita et al.; gates may be between 0 and 1, and pruning folds them into the output projection
    binary    1 where `P(gate = 1) > P(gate = 0)`, otherwise 0 (Voita et al. 2019, footnote 7)

    The rules may disagree on which heads are open (by default, those with `log_alpha` in (-2.398, 0]). A
    `UserWarning` names these heads once, when the module enters evaluation mode or is exported.

    The noise is drawn on the CPU by PyTorch's generator and moved, so that a seed gives the same gates on every device
    and `torch.utils.checkpoint` replays them; code compiled by Inductor uses Inductor's generator.

    Args:
        num_heads: H, at least 1.
        temperature: above 0. 0.33 as in Voita et al.; `louizos` has 2/3.
        stretch: (low, high), low < 0 and high > 1.
        eps: in (0, 0.5): keeps `u`, and `P(gate != 0)` of the penalty, away from 0 and 1, where it is constant.
        log_alpha: the initial value of the parameter. The default 2.0 (94% of the samples are open, gate 0.957 at
            inference) hardly changes a trained model. "voita" draws from U(-sqrt(3 / H), sqrt(3 / H)), as the code
            of the paper does: its gates start half open.
        openness: initial `P(gate != 0)`, in [eps, 1 - eps]; instead of `log_alpha`.
        per_sample: sample for every example of the batch, gates `[B, H]`; otherwise the batch shares a sample, `[H]`.
        evaluate: the rule at inference, "mean" or "binary".
        straight_through: gates are 1 where the formula gives more than 0.5 and 0 elsewhere, in training and in the rule
            "mean"; the gradient is that of the formula. Closed heads then have a gradient (`closed_grad=True`).
        generator: a CPU generator to use instead of PyTorch's own. `torch.utils.checkpoint` does not replay it,
            and `torch.compile(fullgraph=True)` cannot trace it.
        device: of `log_alpha`.

    Attributes:
        log_alpha: parameter `[H]`. Gates are computed in float32, or in float64 if it is float64. Where it is sharded
            (FSDP2), everything but `forward` gathers it: every process of its mesh must call.
        meshes: every `DeviceMesh` whose processes share the noise of its first one: those of tensor or context
            parallelism, which compute parts of one batch. Empty: every process draws its own.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it, its value and what would work.
    """

    def __init__(
        self,
        num_heads: int,
        *,
        temperature: float = 0.33,
        stretch: tuple[float, float] = (-0.1, 1.1),
        eps: float = 1e-6,
        log_alpha: float | Literal["voita"] | None = None,
        openness: float | None = None,
        per_sample: bool = False,
        evaluate: Evaluate = "mean",
        straight_through: bool = False,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        check_size("num_heads", num_heads)
        if not is_real(temperature) or temperature <= 0:
            refuse("temperature", f"is {temperature!r}", "pass a float above 0, such as 0.33")
        if not _is_pair(stretch) or not stretch[0] < 0 < 1 < stretch[1]:
            refuse("stretch", f"is {stretch!r}", "pass (low, high) with low < 0 and high > 1")
        if not is_real(eps) or not 0 < eps < 0.5:
            refuse("eps", f"is {eps!r}", "pass a float in (0, 0.5), such as 1e-6")
        check_choice("evaluate", evaluate, EVALUATE)
        if generator is not None and (
            not isinstance(generator, torch.Generator) or generator.device.type != "cpu"
        ):
            was = f"is {generator!r} on {getattr(generator, 'device', 'no device')}"
            refuse("generator", was, "pass a CPU generator: the noise is drawn on the CPU")
        self.temperature = temperature
        self.stretch = stretch
        self.eps = eps
        self.per_sample = per_sample
        self.evaluate = evaluate
        self.straight_through = straight_through
        self.closed_grad = straight_through
        self.generator = generator
        self.meshes: tuple[DeviceMesh, ...] = ()
        self._warned = False
        initial = self._initial(num_heads, log_alpha, openness)
        self.log_alpha = nn.Parameter(initial.to(device or torch.get_default_device()))

    @classmethod
    def louizos(cls, num_heads: int, *, temperature: float = 2 / 3, **options: Any) -> HardConcrete:
        """Gates with the temperature of Louizos et al. 2018; the stretch is the same."""
        return cls(num_heads, temperature=temperature, **options)

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
        uniform = torch.rand(shape, generator=self.generator, dtype=wide.dtype, device="cpu")
        noise = torch.logit(self.eps + (1 - 2 * self.eps) * uniform)
        noise = noise.to(wide.device, non_blocking=True)
        for mesh in self.meshes:
            noise = of_first(noise, mesh)
        return self._clipped((noise + wide) / self.temperature)

    # ------------------------------------------------------------------ probabilities, closed form
    def probability_open(self) -> Tensor:
        """`P(gate != 0)`, `[H]`, clipped to [eps, 1 - eps]; with gradient."""
        return torch.sigmoid(self._wide() - self._offset_zero).clamp(self.eps, 1 - self.eps)

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

        Args:
            values: `[H, ...]`, for example the columns of the output projection of each head.

        Returns:
            `sum(P(gate != 0) * values**2) / 2`, a scalar with gradients for the gates and `values`.

        Raises:
            ValueError: the first dimension of `values` is not H.
        """
        if values.dim() < 1 or values.shape[0] != self.num_heads:
            refuse("values", f"has shape {list(values.shape)}", f"pass [{self.num_heads}, ...]")
        return (self.probability_open() * values.square().flatten(1).sum(1)).sum() / 2

    # ------------------------------------------------------------------ inference
    @property
    def sparsity(self) -> Tensor:
        """Share of the heads that are open at inference, a scalar; "sparsity" in the code of Voita et al."""
        return (self._evaluated() != 0).to(torch.float32).mean()

    def export(self) -> Tensor:
        self._warn_once()
        return self._evaluated().detach().clone()

    def rank(self) -> Tensor:
        return whole(self.log_alpha.detach())

    def keep(self, heads: Sequence[int]) -> None:
        index = torch.tensor(heads, dtype=torch.int64, device=self.log_alpha.device)
        kept = self.log_alpha.detach()[index]
        self.log_alpha = nn.Parameter(kept, requires_grad=self.log_alpha.requires_grad)

    def settle(self, is_open: Tensor) -> None:
        """Open some heads fully and close the others, permanently.

        Sets `log_alpha` so that every sample, and either rule, gives exactly 1 or 0, and stops its training.

        Args:
            is_open: bool `[H]`.

        Raises:
            ValueError: `is_open` has another dtype or shape.
        """
        if is_open.dtype != torch.bool or is_open.shape != self.log_alpha.shape:
            was = f"is {is_open.dtype} of shape {list(is_open.shape)}"
            refuse("is_open", was, f"pass a bool tensor [{self.num_heads}]")
        # The noise is at most logit(1 - eps); a logit beyond `bound` is clamped on either side.
        low, high = self.stretch
        bound = max(math.log(-high / low), math.log((1 - low) / (high - 1)))
        far = math.log1p(-self.eps) - math.log(self.eps) + max(1.0, self.temperature) * bound + 1
        self.log_alpha.requires_grad_(False)
        self.log_alpha.grad = None
        settled = torch.where(is_open.to(self.log_alpha.device), far, -far)
        self.log_alpha.copy_(distributed_as(settled.to(self.log_alpha.dtype), self.log_alpha))

    def train(self, mode: bool = True) -> HardConcrete:
        super().train(mode)
        if not mode:
            self._warn_once()
        return self

    def extra_repr(self) -> str:
        return (
            f"num_heads={self.num_heads}, temperature={self.temperature:.3g}, "
            f"stretch={self.stretch}, evaluate={self.evaluate!r}, per_sample={self.per_sample}, "
            f"straight_through={self.straight_through}"
        )

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

    def _binary(self) -> Tensor:
        # P(1) > P(0) as a bound of log_alpha; rounded, so that it is exactly 0 for a symmetric stretch.
        threshold = round((self._offset_one + self._offset_zero) / 2, 12)
        return (self._wide() > threshold).to(self._wide().dtype)

    def _evaluated(self) -> Tensor:
        return self._binary() if self.evaluate == "binary" else self._clipped(self._wide())

    def _initial(
        self, num_heads: int, log_alpha: float | str | None, openness: float | None
    ) -> Tensor:
        plain: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
        if openness is not None:
            if log_alpha is not None:
                refuse("openness", f"comes with log_alpha = {log_alpha!r}", "pass one of the two")
            if not is_real(openness) or not self.eps <= openness <= 1 - self.eps:
                refuse("openness", f"is {openness!r}", "pass a probability in [eps, 1 - eps]")
            logit = math.log(openness) - math.log1p(-openness)
            return torch.full((num_heads,), logit + self._offset_zero, **plain)
        if log_alpha == "voita":
            limit = math.sqrt(3 / num_heads)
            uniform = torch.rand(num_heads, generator=self.generator, **plain)
            return (2 * uniform - 1) * limit
        if log_alpha is not None and not is_real(log_alpha):
            refuse("log_alpha", f"is {log_alpha!r}", "pass a finite float or 'voita'")
        start = 2.0 if log_alpha is None else float(log_alpha)
        return torch.full((num_heads,), start, **plain)

    def _warn_once(self) -> None:
        if self._warned or self.log_alpha.is_meta:
            return
        with torch.no_grad():
            mean, binary = self._clipped(self._wide()) != 0, self._binary() != 0
        if heads := (mean != binary).nonzero().flatten().tolist():
            self._warned = True
            is_open, other = ("binary", "mean") if bool(binary[heads[0]]) else ("mean", "binary")
            warnings.warn(
                f"The rules of HardConcrete disagree on heads {heads} of {self.num_heads}: open by "
                f"{is_open!r}, closed by {other!r}. This module uses evaluate={self.evaluate!r}.",
                stacklevel=3,
            )


def check_one_noise(head_gate: HeadGate) -> None:
    """Refuse gates that would differ between the processes of tensor parallelism, which all have them."""
    if isinstance(head_gate, HardConcrete) and head_gate.training and not head_gate.meshes:
        was = "draws noise of its own in each process of tensor parallelism"
        instead = "put their mesh into head_gate.meshes: head_gate.meshes = (mesh,)"
        refuse("head_gate", was, instead)


def l0_penalty(model: nn.Module, reduce: Reduce = "sum") -> Tensor:
    """The L0 penalty of all `HardConcrete` gates of a model, with gradient: add `lambda` times it to the loss.

    Args:
        model: contains at least one `HardConcrete`; one that several layers share counts once.
        reduce: "sum", the expected number of open heads of the model (L_C of Voita et al. 2019); "mean_layers",
            that number divided by the number of gated layers, as in the code of the paper.

    Returns:
        A scalar, on the device of the first gate.

    Raises:
        ValueError: the model has no `HardConcrete`; `reduce` is unknown.
    """
    check_choice("reduce", reduce, REDUCE)
    gates = [module for module in model.modules() if isinstance(module, HardConcrete)]
    if not gates:
        was = f"is a {type(model).__name__} without HardConcrete gates"
        refuse("model", was, "attach some: hk.heads.gate(model, hk.nn.HardConcrete)")
    device = gates[0].log_alpha.device
    total = torch.stack([gate.penalty().to(device) for gate in gates]).sum()
    return total / len(gates) if reduce == "mean_layers" else total


def expected_open(model: nn.Module) -> Tensor:
    """The expected number of open heads of a model with `HardConcrete` gates: a scalar without gradient.

    Raises:
        ValueError: the model has no `HardConcrete`.
    """
    return l0_penalty(model).detach()


def _is_pair(value: object) -> bool:
    return isinstance(value, (tuple, list)) and len(value) == 2 and all(map(is_real, value))
