"""Modules of the package in models of `torch.nn`, put in by `hk.nn.replace_attention_` or by hand."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import heads_kernels as hk
from heads_kernels.convert import collaborate
from heads_kernels.nn.attention import split_projections
from tests.support.alike import assert_alike
from tests.support.nn_layers import CAUSAL, PADDED, B, E, H, S, T, backward, layer_of, spread
from tests.support.refusals import assert_refused

LAYER: dict[str, Any] = {"d_model": E, "nhead": H, "dim_feedforward": 16, "dropout": 0.0}
DECODER_PADDED = PADDED[:, :T] & False
DECODER_PADDED[1, -2:] = True
HIDDEN = torch.zeros(S, S, dtype=torch.float64).masked_fill(CAUSAL, -torch.inf)


class Residual(nn.Module):
    """Attention of the rows to another sequence, of other widths."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(E, H, kdim=10, vdim=12, batch_first=True)

    def forward(self, x: Tensor, key: Tensor, value: Tensor, **masks: Tensor) -> Tensor:
        return x + self.attention(x, key, value, need_weights=False, **masks)[0]


def models() -> dict[str, tuple[nn.Module, dict[str, Any]]]:
    """Models in float64 and what they are called with.

    The encoder has no biases, the whole transformer has the batch second.
    """
    x, y, key, value = (torch.randn(B, *sizes, dtype=torch.float64) for sizes in ((S, E), (T, E), (S, 10), (S, 12)))
    encoder = nn.TransformerEncoderLayer(**LAYER, batch_first=True, bias=False)
    whole = nn.Transformer(E, H, num_encoder_layers=1, num_decoder_layers=1, dim_feedforward=16, dropout=0.0)
    encoder = nn.TransformerEncoder(encoder, 2, enable_nested_tensor=False)
    # No memory mask: the decoder reads what the encoder made of padded rows.
    both = {"src": x.transpose(0, 1), "tgt": y.transpose(0, 1), "tgt_mask": CAUSAL[:T, :T]}
    both |= {"src_key_padding_mask": PADDED, "tgt_key_padding_mask": DECODER_PADDED}
    source = {"key": key, "value": value, "key_padding_mask": PADDED}
    made = {
        "causal encoder": (encoder, {"src": x, "mask": HIDDEN, "is_causal": True}),
        "transformer": (whole, both),
        "attention": (Residual(), {"x": y, **source}),
    }
    return {name: (spread(model.double()), arguments) for name, (model, arguments) in made.items()}


def results(model: nn.Module, arguments: dict[str, Any]) -> dict[str, Tensor]:
    """Outputs and gradients, those of packed projections part by part under the names of separate ones."""
    found = backward(model, model(**arguments))
    assert found.keys() >= {name for name, _ in model.named_parameters()}
    for name in list(found):
        split_projections(found, name.rpartition(".")[0] + "." if "." in name else "")
    return found


# ---------------------------------------------------------------------- replaced in a model
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", models())
def test_outputs_and_gradients_stay(name: str, training: bool) -> None:
    """Stock state dicts load afterwards, too."""
    model, arguments = models()[name]
    stock = copy.deepcopy(model.train(training))
    assert hk.nn.replace_attention_(model) is model
    assert model.training == training
    assert not any(isinstance(part, nn.MultiheadAttention) for part in model.modules())
    names = set(state := stock.state_dict())
    spread(model).train(training).load_state_dict(state)
    assert set(state) == names
    assert_alike(results(model, arguments), results(stock, arguments))


def test_heads_and_conversion_take_it_then() -> None:
    model, arguments = models()["transformer"]
    words = r"call hk\.nn\.replace_attention_\(model\) first"
    assert_refused(
        (lambda: hk.heads.attention_layers(model), words),
        (lambda: hk.heads.gate(model, hk.nn.HardConcrete), words),
        (lambda: hk.heads.prune(model, {0: [1]}), words),
        (lambda: collaborate(model, 8), words),
        unchanged=[model],
    )
    before = model(**arguments)
    hk.nn.replace_attention_(model)
    hk.heads.gate(model, hk.nn.HardConcrete)
    model.train()(**arguments).sum().backward()
    layers = hk.heads.attention_layers(model)
    assert all(layer.gate.log_alpha.grad is not None for layer in layers)
    hk.heads.ungate(model)
    model.eval()
    collaborate(model, E, progress=False)
    assert_alike(model(**arguments), before, dtype=torch.float32)
    hk.heads.close(model, {0: [1, 2]})
    closed = model(**arguments)
    hk.heads.prune(model, hk.heads.closed(model))
    assert_alike(model(**arguments), closed)


def test_a_module_of_two_names_stays_one() -> None:
    model, _ = models()["attention"]
    shared = hk.nn.replace_attention_(nn.ModuleDict({"one": model, "other": model}))
    assert shared["one"].attention is shared["other"].attention
    assert isinstance(model.attention, hk.nn.GatedMultiheadAttention)


# ---------------------------------------------------------------------- put in by hand
@pytest.mark.parametrize("grad", [False, True])
def test_the_fused_path_of_an_encoder_is_not_taken(grad: bool) -> None:
    """It would not call the module, whenever that came in."""
    layer = spread(nn.TransformerEncoderLayer(**LAYER, batch_first=True))
    theirs = nn.TransformerEncoder(layer, 2).eval()
    after = nn.TransformerEncoder(copy.deepcopy(layer), 2)
    own = hk.nn.GatedMultiheadAttention.from_torch(layer.self_attn)
    for part in (*after.layers, layer):
        part.self_attn = copy.deepcopy(own)
    x = torch.randn(B, S, E)
    for ours in (after, nn.TransformerEncoder(layer, 2)):
        ours.eval().load_state_dict(theirs.state_dict())
        with torch.set_grad_enabled(grad):
            expected = theirs(x, src_key_padding_mask=PADDED)
            out = ours(x, src_key_padding_mask=PADDED)
        assert_alike(out[~PADDED], expected[~PADDED])
        calls: list[Any] = []
        ours.layers[1].self_attn.register_forward_hook(lambda *call, calls=calls: calls.append(call))
        with torch.set_grad_enabled(grad):
            ours(x, mask=HIDDEN.float())
        assert len(calls) == 1
    if not grad:
        with torch.no_grad():
            compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
            assert_alike(compiled(x, src_key_padding_mask=PADDED), out)


def test_nothing_is_copied_around_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads are views of the projections, and the output projection reads the heads in place."""
    layer, x = layer_of(num_key_heads=2), torch.randn(B, S, E).double()
    seen: dict[str, Tensor] = {}
    for name in ("q", "k", "v"):
        part = getattr(layer, f"{name}_proj")
        part.register_forward_hook(lambda _, args, out, name=name: seen.update({name: out}))
    operator: Any = type(layer).operator

    def watched(**arguments: Any) -> Tensor:
        for name in ("query", "key", "value"):
            assert arguments[name].data_ptr() == seen[name[0]].data_ptr()
        seen["heads"] = operator(**arguments)
        return seen["heads"]

    monkeypatch.setattr(type(layer), "operator", staticmethod(watched))
    layer.out_proj.register_forward_pre_hook(lambda _, args: seen.update({"read": args[0]}))
    layer(x)
    assert seen["read"].data_ptr() == seen["heads"].data_ptr()


class Own(nn.MultiheadAttention):
    def forward(self, *arguments: Any, **options: Any) -> Any:
        return super().forward(*arguments, **options)


def second(change: Any = None, **options: Any) -> nn.Module:
    """The second of two modules has something of its own."""
    pair = nn.ModuleList([nn.MultiheadAttention(E, H), nn.MultiheadAttention(E, H, **options)])
    if change is not None:
        change(pair[1])
    return pair


def tied() -> nn.Module:
    model = nn.ModuleList([*second(), nn.MultiheadAttention(E, H)])
    model[2].out_proj.weight = model[1].out_proj.weight
    return model


def test_what_can_not_be_replaced() -> None:
    attention = nn.MultiheadAttention(E, H)
    assert_refused(
        ((second(add_bias_kv=True),), "module '1' has add_bias_kv"),
        ((second(add_zero_attn=True),), "module '1' has add_zero_attn"),
        ((nn.Sequential(Own(E, H)),), "module '0' is a Own with an overridden forward"),
        ((tied(),), "module '1' shares its out_proj.weight with another module"),
        ((second(lambda part: part.register_forward_hook(print)),), r"module '1' has forward hooks, .*handle\.remove"),
        ((second(lambda part: weight_norm(part, "in_proj_weight")),), "module '1' has parametrised weights"),
        ((nn.ModuleDict({"base_layer": attention}),), ".*has an adapter; merge it"),
        ((attention,), TypeError, r".*from_torch\(model\)"),
        ((nn.Linear(2, 2),), r".*without torch\.nn\.MultiheadAttention"),
        (([],), TypeError, "model is a list"),
        of=hk.nn.replace_attention_,
    )
    assert_refused(
        ((nn.Linear(2, 2),), TypeError, "attention is a Linear; pass a torch.nn.MultiheadAttention"),
        ((nn.MultiheadAttention(E, H, add_zero_attn=True),), "attention has add_zero_attn"),
        ((nn.MultiheadAttention(E, H, add_bias_kv=True),), ".*bias_k is in the state"),
        of=hk.nn.GatedMultiheadAttention.from_torch,
    )
