"""Replacement of modules in a model: PyTorch's attention by that of this package."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NoReturn, TypeVar

from torch import Tensor, nn

from heads_kernels.checks import refuse
from heads_kernels.nn.attention import GatedMultiheadAttention
from heads_kernels.snapshot import kept_on_error

Model = TypeVar("Model", bound=nn.Module)


def replace_attention_(model: Model) -> Model:
    """Replace every `torch.nn.MultiheadAttention` of a model by a `GatedMultiheadAttention`, in place.

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

    Returns:
        The model itself.

    Raises:
        TypeError, ValueError: `model` contains none, is one, or has one that cannot be replaced, by name: with
            `add_bias_kv`, `add_zero_attn`, forward hooks, an adapter, parametrised, quantised or sharded weights, an
            overridden forward, or weights shared with other modules. The model is then unchanged.
    """
    if not isinstance(model, nn.Module):
        refuse("model", f"is a {type(model).__name__}", "pass a torch.nn.Module", TypeError)
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

    A `torch.nn.TransformerEncoder` checks only its first layer before it makes nested tensors of padded inputs, which
    only PyTorch's own attention takes; this is disabled in an encoder with a new module.
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
        instead = "make them permanent: torch.nn.utils.parametrize.remove_parametrizations"
        no("has parametrised weights", instead)
    parameters: dict[str, Tensor] = dict(module.named_parameters())
    before = "replace it before the model is quantised or sharded"
    if not isinstance(module.out_proj, nn.Linear):
        no(f"has a {type(module.out_proj).__name__} as its out_proj", before)
    for weight, parameter in parameters.items():
        if type(parameter) is not nn.Parameter:
            no(f"has a {type(parameter).__name__} as its {weight}", before)
        if holders[id(parameter)] > 1:
            no(f"shares its {weight} with another module", "give it a copy of its own")
