"""Multi-head attention with gated heads, and `replace_attention_`, which puts it in place of PyTorch's in a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from heads_kernels.call import compute_dtype
from heads_kernels.checks import check_flag, check_scale, check_size, refuse, refuse_type
from heads_kernels.functional import entmax_attention, gated_attention
from heads_kernels.nn.multihead import Multihead, head_width
from heads_kernels.snapshot import kept_on_error

Model = TypeVar("Model", bound=nn.Module)


class GatedMultiheadAttention(Multihead):
    """Multi-head attention (Vaswani et al. 2017) whose heads can be gated, closed and pruned.

        out = sum_h g_h * softmax(scale * X W_Q^h (Y W_K^h)^T + bias_h) Y W_V^h W_O^h + b_O

    It serves encoders (`layer(x, key_padding_mask=...)`), decoders (`layer(x, is_causal=True)`) and encoder-decoder
    attention (`layer(x, memory, key_padding_mask=...)`). `hk.nn.replace_attention_(model)` replaces all attention in
    PyTorch's own layers; to replace one:

        layer.self_attn = hk.nn.GatedMultiheadAttention.from_torch(layer.self_attn)

    It loads the state dict of a `torch.nn.MultiheadAttention` of the same sizes, which does not contain the number of
    heads.

    Args:
        embed_dim: width of the query's input and of the output.
        num_heads: H.
        num_key_heads: Hk, a divisor of H (grouped-query attention); default H.
        kdim, vdim: widths of the inputs of key and value; default `embed_dim`.
        head_dim: D, width of a head's query and key; default `embed_dim / num_heads`.
        value_dim: Dv, width of a head's value; default `head_dim`.
        bias: whether projections have biases.
        dropout: probability of dropping an attention probability, in training only.
        scale: factor of the scores; default `head_dim ** -0.5`.
        output_gate: gates from the query's input, `sigmoid(X W_g + b_g)` (`gate_proj`): one per token and head
            ("head"), per token and element of a head ("element"), or None.
        entmax: whether alpha-entmax takes the place of softmax, with an `alpha` per head that is learned (Correia,
            Niculae, Martins 2019); it starts at 1.5.
        batch_first: inputs and output are `[B, T, embed_dim]`, or `[T, B, embed_dim]` if False. Masks, caches and
            statistics have the batch first in both cases.
        device, dtype: of the parameters.

    Attributes:
        head_gate: a `HeadGate`, initially None. With an output gate as well, the operator takes the head gate, so
            that closed heads cost nothing, and the output gate is applied afterwards.
        alpha_logits: a parameter `[H]` with `alpha = 1 + sigmoid(alpha_logits)`; None without `entmax`.
    """

    operator: Callable[..., Tensor] = staticmethod(gated_attention)
    alpha_logits: nn.Parameter | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_key_heads: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        scale: float | None = None,
        entmax: bool = False,
        **options: Any,
    ) -> None:
        E, H = check_size("embed_dim", embed_dim), check_size("num_heads", num_heads)
        Hk = H if num_key_heads is None else check_size("num_key_heads", num_key_heads)
        if H % Hk:
            refuse("num_key_heads", f"is {Hk}, but num_heads is {H}", f"pass a divisor of {H}")
        D = head_width("head_dim", E, H, head_dim)
        Dv = D if value_dim is None else check_size("value_dim", value_dim)
        scale = check_scale(scale, D)
        super().__init__(E, H, (H * D, Hk * D, Hk * Dv), value_dim=Dv, scale=scale, **options)
        self.num_key_heads = Hk
        self.head_dim = D
        check_flag("entmax", entmax)
        logits = self.out_proj.weight.detach().new_zeros(H)
        self.register_parameter("alpha_logits", nn.Parameter(logits) if entmax else None)
        if entmax:
            self.operator = entmax_attention
        self.reset_parameters()
        self.register_load_state_dict_pre_hook(_load_torch_projections)  # type: ignore[no-untyped-call]

    @classmethod
    def from_torch(cls, attention: nn.MultiheadAttention) -> GatedMultiheadAttention:
        """The same attention with copies of the weights. Outputs agree for rows that see a key.

        `add_bias_kv` and `add_zero_attn` are refused.
        """
        if not isinstance(attention, nn.MultiheadAttention):
            refuse("attention", f"is a {type(attention).__name__}", "pass a torch.nn.MultiheadAttention", TypeError)
        if attention.add_zero_attn:
            refuse("attention", "has add_zero_attn", "use a module without it")
        made = cls(
            attention.embed_dim,
            attention.num_heads,
            kdim=attention.kdim,
            vdim=attention.vdim,
            bias=attention.in_proj_bias is not None,
            dropout=attention.dropout,
            batch_first=attention.batch_first,
            device=attention.out_proj.weight.device,
            dtype=attention.out_proj.weight.dtype,
        )
        made.load_state_dict(attention.state_dict())
        with torch.enable_grad():  # so that the parts of a weight inherit its requires_grad
            weights: dict[str, Tensor] = dict(attention.named_parameters())
            split_projections(weights)
        for name, weight in weights.items():
            made.get_parameter(name).requires_grad_(weight.requires_grad)
        return made.train(attention.training)

    @property
    def alpha(self) -> Tensor | None:
        """`[H]` in (1, 2], float32 or wider; None without `entmax`."""
        if self.alpha_logits is None:
            return None
        logits = self.alpha_logits.to(compute_dtype(self.alpha_logits.dtype))
        return 1.0 + logits.sigmoid().clamp(min=torch.finfo(logits.dtype).eps)

    def source(self, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        return (
            self.by_head("k_proj", key, self.num_key_heads, self.head_dim),
            self.by_head("v_proj", value, self.num_key_heads, self.value_dim),
        )

    def operands(self, query: Tensor, source: tuple[Tensor, ...]) -> dict[str, Tensor | None]:
        key, value = source  # [B, S, Hk, D], [B, S, Hk, Dv]
        query = self.by_head("q_proj", query, self.num_heads, self.head_dim)
        found: dict[str, Tensor | None] = {
            "query": query.transpose(1, 2),
            "key": key.transpose(1, 2),
            "value": value.transpose(1, 2),
        }
        return found if self.alpha_logits is None else {**found, "alpha": self.alpha}

    def extra_repr(self) -> str:
        heads = f"num_key_heads={self.num_key_heads}, head_dim={self.head_dim}"
        return f"{heads}, {super().extra_repr()}, entmax={self.alpha_logits is not None}"


# ---------------------------------------------------------------------- torch.nn.MultiheadAttention in models
def replace_attention_(model: Model) -> Model:
    """Replace every `torch.nn.MultiheadAttention` of a model by a `GatedMultiheadAttention`, in place; returns it.

        encoder = hk.nn.replace_attention_(nn.TransformerEncoder(layer, 6))
        hk.heads.gate(encoder, hk.nn.HardConcrete)

    `hk.heads`, `hk.convert` and head gates then work on models such as `nn.TransformerEncoder`,
    `nn.TransformerDecoder` and `nn.Transformer`. Outputs, gradients, `batch_first`, dropout, dtype, device, training
    mode and `requires_grad` do not change. The packed projections are copied into separate ones, so create the
    optimiser afterwards. State dicts of the stock model load.

    Three things differ. A row that sees no key gives the bias of the output projection, not NaN. Attention weights are
    never returned: `need_weights` is False by default. The layers of `torch.nn` call the module instead of their
    fused inference path, and an encoder makes no nested tensors. Padded rows of self-attention are computed, as in the
    stock module; set `computes_padded_rows = False` on modules whose padded rows are not used.

    Args:
        model: contains at least one `torch.nn.MultiheadAttention`; one that is used in several places stays shared.

    Raises:
        TypeError, ValueError: `model` contains none, is one, or has one that cannot be replaced, by name: with
            `add_bias_kv`, `add_zero_attn`, forward hooks, an adapter, parametrised, quantised or sharded weights, an
            overridden forward, or weights shared with other modules. The model is then unchanged.
    """
    if not isinstance(model, nn.Module):
        refuse_type("model", model, "pass a torch.nn.Module")
    if isinstance(model, nn.MultiheadAttention):
        instead = "use hk.nn.GatedMultiheadAttention.from_torch(model), or pass what holds it"
        refuse("model", "is a MultiheadAttention itself", instead, TypeError)
    holders = Counter(id(each) for part in model.modules() for each in part._parameters.values())
    made: dict[nn.Module, nn.Module] = {}
    for name, part in model.named_modules():
        if isinstance(part, nn.MultiheadAttention):
            _check_plain(name, part, holders)
            made[part] = new = GatedMultiheadAttention.from_torch(part)
            new.computes_padded_rows = True
    if not made:
        was = f"is a {type(model).__name__} without torch.nn.MultiheadAttention"
        refuse("model", was, "there is nothing to replace")
    with kept_on_error(model):
        put(model, made)
    return model


def put(model: nn.Module, made: Mapping[nn.Module, nn.Module]) -> None:
    """Replace modules (`{old: new}`) under every name that they have in the model.

    A `torch.nn.TransformerEncoder` looks only at its first layer before it makes nested tensors of padded inputs, which
    only PyTorch's own attention takes: with a new module it no longer does.
    """
    for part in list(model.modules()):
        for name, child in list(part._modules.items()):
            if child is not None and child in made:
                setattr(part, name, made[child])
    new = set(made.values())
    for part in model.modules():
        if isinstance(part, nn.TransformerEncoder) and not new.isdisjoint(part.modules()):
            part.use_nested_tensor = False


def _check_plain(name: str, module: nn.MultiheadAttention, holders: Mapping[int, int]) -> None:
    """Refuse modified attention, which a replacement would lose; `holders` counts the modules of each parameter."""

    def no(was: str, instead: str) -> NoReturn:
        refuse(f"module {name!r}", was, instead)

    if type(module).forward is not nn.MultiheadAttention.forward or "forward" in vars(module):
        no(f"is a {type(module).__name__} with an overridden forward", "replace it by hand")
    if module.bias_k is not None:
        no("has add_bias_kv", "make it without, or append that key and value to the source")
    if module.add_zero_attn:
        no("has add_zero_attn", "make it without")
    if name.rpartition(".")[2] == "base_layer" or hasattr(module.out_proj, "base_layer"):
        no("has an adapter", "merge it first: model = model.merge_and_unload()")
    parts = (module, module.out_proj)
    if any(part._forward_hooks or part._forward_pre_hooks for part in parts):
        no("has forward hooks, which would be lost", "remove them first: handle.remove()")
    if any(nn.utils.parametrize.is_parametrized(part) for part in parts):
        no("has parametrised weights", "make them permanent: torch.nn.utils.parametrize.remove_parametrizations")
    parameters: dict[str, Tensor] = dict(module.named_parameters())
    before = "replace it before the model is quantised or sharded"
    if not isinstance(module.out_proj, nn.Linear):
        no(f"has a {type(module.out_proj).__name__} as its out_proj", before)
    for weight, parameter in parameters.items():
        if type(parameter) is not nn.Parameter:
            no(f"has a {type(parameter).__name__} as its {weight}", before)
        if holders[id(parameter)] > 1:
            no(f"shares its {weight} with another module", "give it a copy of its own")


# ---------------------------------------------------------------------- state dicts of torch.nn.MultiheadAttention
def split_projections(state: dict[str, Tensor], prefix: str = "") -> None:
    """Rename the projections of a `torch.nn.MultiheadAttention` in `state`, in place; `add_bias_kv` is refused.

    `in_proj_weight` `[3 * E, E]`, or `q_proj_weight`, `k_proj_weight`, `v_proj_weight`, and `in_proj_bias` `[3 * E]`
    become `q_proj.weight`, `q_proj.bias` and so on, copies of the parts.
    """
    for name in ("bias_k", "bias_v"):
        if state.get(prefix + name) is not None:
            instead = "append that key and value to the source, or use a module without add_bias_kv"
            refuse(prefix + name, "is in the state dict", instead)
    for kind in ("weight", "bias"):
        packed = state.pop(f"{prefix}in_proj_{kind}", None)
        parts = (None,) * 3 if packed is None else [part.clone() for part in packed.tensor_split(3)]
        for letter, part in zip("qkv", parts, strict=True):
            part = state.pop(f"{prefix}{letter}_proj_{kind}", part)
            if part is not None:
                state[f"{prefix}{letter}_proj.{kind}"] = part


def _load_torch_projections(module: nn.Module, state: dict[str, Tensor], prefix: str, *rest: Any) -> None:
    """`split_projections` as a hook that runs before `load_state_dict`."""
    split_projections(state, prefix)
