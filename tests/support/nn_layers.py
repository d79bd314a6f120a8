"""Attention modules for tests, with biases that are not 0 and sharp attention, and their formula in float64."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

import heads_kernels as hk
from heads_kernels.parse import parse
from tests.support.plain import plain

B, T, S, E, H = 2, 5, 7, 24, 4
PADDED = torch.tensor([[False] * 7, [False] * 4 + [True] * 3])  # [B, S]: the keys that are hidden
CAUSAL = torch.ones(S, S, dtype=torch.bool).triu(1)

Module = TypeVar("Module", bound=nn.Module)


def random(*sizes: int) -> Tensor:
    return torch.randn(sizes, dtype=torch.float64)


def spread(made: Module) -> Module:
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.4)
    return made.eval()


def torch_encoder(layers: int = 2, width: int = E) -> nn.TransformerEncoder:
    """In evaluation mode, which runs its layers one by one."""
    layer = nn.TransformerEncoderLayer(width, H, 16, batch_first=True)
    return spread(nn.TransformerEncoder(layer, layers, enable_nested_tensor=False))


def layer_of(**options: Any) -> hk.nn.GatedMultiheadAttention:
    sizes = {"embed_dim": E, "num_heads": H, "dtype": torch.float64}
    return spread(hk.nn.GatedMultiheadAttention(**{**sizes, **options}))


def shared_layer_of(**options: Any) -> hk.nn.CollaborativeMultiheadAttention:
    sizes = {"embed_dim": E, "num_heads": H, "shared_dim": E, "dtype": torch.float64}
    return spread(hk.nn.CollaborativeMultiheadAttention(**{**sizes, **options}))


def gradients(out: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
    """Under a loss that weighs each number of `out` differently."""
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return torch.autograd.grad((out * weight).sum(), leaves)


def backward(model: nn.Module, out: Tensor) -> dict[str, Tensor]:
    """What a model gave, and the gradient of every parameter that has one, under a loss as that of `gradients`."""
    model.zero_grad(set_to_none=True)
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    (out * weight).sum().backward()
    return {"outputs": out.detach(), **{n: p.grad for n, p in model.named_parameters() if p.grad is not None}}


def assert_as_accurate_as(out: Tensor, plain: Tensor, exact: Tensor) -> None:
    """The accuracy rule: an error of at most twice that of the plain formula, and the rounding of `out` itself."""
    rounding = torch.finfo(out.dtype).eps / 2 * exact.abs().max()
    error, bound = ((each.double() - exact).abs().max() for each in (out, plain))
    assert error <= 2 * bound + rounding


def formula(
    layer: Any,
    x: Tensor,
    y: Tensor,
    visible: Tensor | None = None,
    gates: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """The layer by its weights, output gate included; `visible` `[B, H, T, S]`, `gates` of any shape that broadcasts to
    `[B, H, T, Dv]`, `bias` of any that broadcasts to `visible`."""
    terms = {"attn_mask": visible, "bias": bias, "scale": layer.scale}
    query, key = layer.q_proj(x), layer.k_proj(y)
    if isinstance(layer, hk.nn.CollaborativeMultiheadAttention):
        terms |= {"mixing": layer.mixing}
        if layer.content_proj is not None:
            terms |= {"content_bias": layer.content_proj(y).mT}
    else:
        query, key = by_head(query, layer.head_dim), by_head(key, layer.head_dim)
        terms |= {} if layer.alpha is None else {"alpha": layer.alpha}
    operands = query, key, by_head(layer.v_proj(y), layer.value_dim)
    heads = plain(parse(layer.operator.__name__, *operands, **terms)[0]).out
    if isinstance(layer, hk.nn.MergedAttention):
        heads = heads + averages(layer, x, visible.any(3)[:, 0])
    heads = heads * output_gate(layer, x)
    heads = heads if gates is None else heads * gates
    out: Tensor = layer.out_proj(heads.transpose(1, 2).flatten(2))
    return out


def averages(layer: hk.nn.MergedAttention, x: Tensor, real: Tensor) -> Tensor:
    """What the average gives each head, `[B, H, T, Dv]`; row by row."""
    heads = torch.zeros(B, H, T, layer.value_dim, dtype=x.dtype)
    for b in range(B):
        for t in range(T):
            if real[b, t]:
                mean = x[b, : t + 1][real[b, : t + 1]].mean(0)
                value = layer.v_proj(mean).unflatten(0, (layer.num_key_heads, layer.value_dim))
                heads[b, :, t] = value.repeat_interleave(H // layer.num_key_heads, 0)
    return heads


def output_gate(layer: Any, x: Tensor) -> Tensor:
    """Of each head, `[B, H, T, 1]` or `[B, H, T, Dv]`; a 1 of a layer without."""
    if layer.gate_proj is None:
        return x.new_ones(())
    return by_head(layer.gate_proj(x), 1 if layer.output_gate == "head" else layer.value_dim).sigmoid()


def by_head(rows: Tensor, width: int) -> Tensor:
    """`[B, L, heads * width]` as `[B, heads, L, width]`."""
    return rows.unflatten(2, (-1, width)).transpose(1, 2)


class Layers(nn.Module):
    """Attention layers of the package one after the other, with residuals; `padding` `[B, T]` is True where hidden."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, padding: Tensor | None = None, **options: Any) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, key_padding_mask=padding, **options)[0]
        return x


def calls_of(model: nn.Module, *args: Any, layers: list[int] | None = None, **kwargs: Any) -> list[tuple[Any, Any]]:
    """Attention layers and their calls that an observer sees in a forward pass."""
    seen: list[tuple[Any, Any]] = []
    with hk.analysis.observe(model, lambda *call: seen.append(call), layers):
        model(*args, **kwargs)
    return seen


def model_and_run() -> tuple[Any, Callable[[], Tensor]]:
    """A model of two layers of 4 heads, and a run of it."""
    model = Layers(*(hk.nn.GatedMultiheadAttention(16, 4) for _ in range(2)))
    x = torch.randn(2, 5, 16)
    return model, lambda: model(x)


class Gates(hk.nn.HeadGate):
    """Gates that learn, one for each head."""

    def __init__(self, gates: list[float]) -> None:
        super().__init__()
        self.num_heads = len(gates)
        self.gates = nn.Parameter(torch.tensor(gates))

    def forward(self, batch_size: int, length: int) -> Tensor:
        return self.gates

    def export(self) -> Tensor:
        return self.gates.detach()

    def keep(self, heads: Any) -> None:
        self.gates = nn.Parameter(self.gates[heads])


class House(nn.Module):
    """Attention of a user, on the operators."""

    def __init__(self, H: int = 4, *, heads_first: bool = True, gated: bool = True) -> None:
        super().__init__()
        self.width = 8
        self.heads_first, self.gated = heads_first, gated
        for name in ("q", "k", "v", "out"):
            setattr(self, name, nn.Linear(8 * H, 8 * H))

    def split(self, x: Tensor) -> Tensor:
        if self.heads_first:
            return x.unflatten(-1, (-1, self.width)).transpose(1, 2)
        return x.unflatten(-1, (self.width, -1)).permute(0, 3, 1, 2).contiguous()

    def operands(self, x: Tensor) -> list[Tensor]:
        return [self.split(getattr(self, name)(x)) for name in "qkv"]

    def forward(self, x: Tensor) -> Tensor:
        gate = getattr(self, "head_gate", None) if self.gated else None
        gates = None if gate is None else gate(len(x), x.shape[1])
        heads = hk.gated_attention(*self.operands(x), gate=gates)
        order = (0, 2, 1, 3) if self.heads_first else (0, 2, 3, 1)
        out: Tensor = self.out(heads.permute(order).flatten(2))
        return out


HOUSE = hk.heads.HeadLayout("house", "q", "k", "v", "out", head_dim="width")
