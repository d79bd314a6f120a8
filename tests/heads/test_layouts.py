"""Attention layers are found, and their heads where the table of layouts says. A layout is used only where a closed
head computes what the pruned head computes; to compare them leaves the model as it is.
"""

import copy
import importlib
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import heads_kernels as hk
from heads_kernels.heads import HeadLayout, projected
from heads_kernels.heads.layers import find_layers
from heads_kernels.heads.layouts import LAYOUTS
from tests.support.alike import assert_alike
from tests.support.model_state import state
from tests.support.nn_layers import HOUSE, House
from tests.support.refusals import assert_refused
from tests.support.tiny_models import TINY, WITH_HEADS, build, small

NEOX = HeadLayout("NeoX", *["query_key_value"] * 3, "dense", head_dim="head_size")
PERSIMMON = HeadLayout("Persimmon", *["query_key_value"] * 3, "dense")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of its own for each test, and nothing known of any class."""
    monkeypatch.setattr("heads_kernels.heads.layouts.LAYOUTS", dict(LAYOUTS))
    monkeypatch.setattr(projected, "_FOUND", {})


# ---------------------------------------------------------------------- layers and the table
def test_every_class_of_the_table_has_a_model() -> None:
    own = {"GatedMultiheadAttention", "CollaborativeMultiheadAttention"}
    assert set(LAYOUTS) <= own | {TINY[name].attention for name in WITH_HEADS}


def test_kinds_of_a_bert_decoder() -> None:
    model = build("bert", model="BertLMHeadModel", is_decoder=True, add_cross_attention=True)
    layers = hk.heads.attention_layers(model)
    assert [layer.kind for layer in layers] == ["decoder", "cross"] * 2
    assert layers[1].name == "bert.encoder.layer.0.crossattention.self"


def test_layers_of_the_packages_own_modules() -> None:
    decoder = {
        "self_attn": hk.nn.CollaborativeMultiheadAttention(32, 4, 12),
        "multihead_attn": hk.nn.GatedMultiheadAttention(32, 4, output_gate="head"),
    }
    encoder = hk.nn.GatedMultiheadAttention(32, 4, num_key_heads=2, value_dim=3)
    model = nn.ModuleDict({"encoder": encoder, "decoder": nn.ModuleDict(decoder)})
    gated, collaborative, cross = layers = hk.heads.projected_layers(model)
    assert [layer.kind for layer in layers] == ["encoder", "decoder", "cross"]
    assert (gated.num_heads, gated.num_key_heads, gated.head_dim, gated.value_dim) == (4, 2, 8, 3)
    assert (collaborative.num_heads, collaborative.head_dim, collaborative.value_dim) == (4, 12, 8)
    assert collaborative.query.heads == collaborative.key.heads == 1
    assert [beside.linear for beside in collaborative.beside] == [collaborative.module.content_proj]
    assert [beside.width for beside in cross.beside] == [1]


def test_attention_that_is_not_that_of_the_table_is_refused() -> None:
    class OddAttention(nn.Module):
        pass

    class BartAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj = nn.Linear(8, 8)

    bert, find = build("bert"), hk.heads.attention_layers
    bert.encoder.layer[1].attention.output.dense = nn.Sequential(nn.Linear(32, 32))
    hidden = r"module 'encoder.layer.1.attention' is projected by a Sequential at 'output.dense'"
    another = r"module '0' is a BartAttention without 'k_proj' of the layout 'q_proj'; register"
    assert_refused(
        (lambda: find(nn.Sequential(OddAttention())), r"but OddAttention; known are .* hk.nn, .*register_layout adds"),
        (lambda: find(nn.Linear(2, 2)), "no attention layer that is known, but others; known"),
        (lambda: find(nn.Sequential(BartAttention())), another),
        (lambda: hk.heads.projected_layers(bert), hidden),
    )
    assert find_layers(nn.Linear(2, 2)) == []


# ---------------------------------------------------------------------- layouts that a user gives
@pytest.mark.parametrize("H", [1, 5])
def test_a_layout_that_fits_is_registered(H: int) -> None:
    hk.heads.register_layout("House", HOUSE)
    (layer,) = hk.heads.projected_layers(nn.Sequential(House(H)))
    assert (layer.name, layer.num_heads, layer.layout.name) == ("0", H, "house")


class Manor(House):
    """With an argument of its own."""

    def forward(self, x: Tensor, times: Tensor) -> Tensor:
        return super().forward(x * times.exp())


class Scaled(House):
    """A factor per head, which pruning leaves: with 2 heads it makes 2 of the one that is left."""

    def __init__(self, H: int) -> None:
        super().__init__(H)
        self.factors = nn.Parameter(torch.rand(H, 1, 1))

    def split(self, x: Tensor) -> Tensor:
        return super().split(x) * self.factors


class Normed(House):
    """With a norm over each head, or over all of them."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(size)

    def split(self, x: Tensor) -> Tensor:
        if self.norm.normalized_shape[0] == self.width:
            return self.norm(super().split(x))
        return super().split(self.norm(x))


@pytest.mark.parametrize(
    ("example", "why"),
    [
        (House(heads_first=False), "computes something else with a head pruned"),
        (House(gated=False), "computes something else with gates than with gates folded"),
        (Manor(), r"cannot be run on random input \(Attrib"),
        (Scaled(2), "cannot run with a head pruned"),
        (Scaled(3), "cannot run with a head pruned"),
        (Normed(32), "cannot run with a head pruned"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(example: House, why: str) -> None:
    name = type(example).__name__
    hk.heads.register_layout(name, HOUSE)
    model, words = nn.Sequential(example), f"module '0' is a {name}, .* 'house': it {why}"
    # A gate that the layer ignores would close nothing.
    assert_refused(*((partial(change, model, {0: [0]}), words) for change in (hk.heads.prune, hk.heads.close)))


def test_a_norm_of_another_size_is_another_shape() -> None:
    hk.heads.register_layout("Normed", HOUSE)
    assert hk.heads.projected_layers(nn.Sequential(Normed(8)))
    assert_refused((lambda: hk.heads.projected_layers(nn.Sequential(Normed(32))), "it cannot run with a head pruned"))


@pytest.mark.parametrize(
    ("name", "family", "layout"),
    [("gpt_neox", "GPTNeoX", NEOX), ("persimmon", "Persimmon", PERSIMMON), ("olmo2", "Olmo2", HeadLayout("O"))],
)
def test_families_that_do_not_fit(name: str, family: str, layout: HeadLayout) -> None:
    """Fused with the roles of a head side by side; a norm over all heads. Without a layout: test_families.py."""
    model = small(name)
    hk.heads.register_layout(f"{family}Attention", layout)
    words = rf"module .* is a {family}Attention, which does not have"
    assert_refused((partial(hk.heads.prune, model, {0: [1]}), words), unchanged=[model])


# ---------------------------------------------------------------------- the model stays as it is
def test_it_happens_once_for_a_class_and_a_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    compare = projected._compare
    monkeypatch.setattr(projected, "_compare", lambda *given: compared.append(1) or compare(*given))
    model = nn.Sequential(House(4), House(4), House(2), House(4))
    hk.heads.register_layout("House", HOUSE)
    for _ in range(2):
        hk.heads.projected_layers(model)
    assert len(compared) == 2
    hk.heads.prune(model, {0: [1]})
    hk.heads.close(model, {1: [0], 0: [0]})
    hk.heads.reopen(model)
    assert len(compared) == 2


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_the_model_and_random_numbers_are_left_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(name).train()
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: pytest.fail("seeds GPUs"))
    ran: list[Any] = []
    for module in model.modules():
        module.register_forward_hook(lambda *args: ran.append(args))
    weights, before, random = copy.deepcopy(model.state_dict()), state(model), torch.get_rng_state()
    assert hk.heads.projected_layers(model)
    assert torch.equal(torch.get_rng_state(), random)
    assert not ran
    assert state(model) == before
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("how", ["meta", "packed", "wrapped", "half", "other dtype", "context"])
def test_only_the_structure_of_a_model_is_read(how: str) -> None:
    """On the meta device, quantised, with a wrapped forward, or in another mode, it is compared all the same."""
    with torch.device("meta" if how == "meta" else "cpu"):
        model = build("llama", "heads_kernels" if how == "context" else "eager")
    for layer in model.model.layers:
        if how == "context":
            layer.self_attn.context = object()  # that of `context_parallel` calls other processes
        if how == "wrapped":
            layer.self_attn.forward = None  # what offloading puts there, say
        for linear in layer.self_attn.children() if how == "packed" else ():
            bytes_ = torch.zeros(linear.weight.numel() // 2, 1, dtype=torch.uint8)
            linear.weight = nn.Parameter(bytes_, requires_grad=False)  # 4 bits, two to a byte
            linear.forward = None
    try:
        torch.set_default_dtype(torch.bfloat16 if how == "other dtype" else torch.float32)
        with torch.inference_mode(how == "half"), torch.autocast("cpu", enabled=how == "half"):
            layers = hk.heads.projected_layers(model)
    finally:
        torch.set_default_dtype(torch.float32)
    assert [(layer.num_heads, layer.num_key_heads) for layer in layers] == [(8, 2)] * 2
    assert list(projected._FOUND.values()) == [None]


T = 5
#: By family: the attention, its config and what that takes, the sizes of an input and the other arguments.
PARTS: dict[str, tuple[str, str, dict[str, Any], tuple[int, ...], dict[str, Any]]] = {
    "qwen2_vl": (
        "VisionAttention", "Qwen2VLVisionConfig", {"embed_dim": 32, "num_heads": 4}, (T, 32),
        {"cu_seqlens": torch.tensor([0, T], dtype=torch.int32),
         "position_embeddings": (torch.randn(T, 8).cos(), torch.randn(T, 8).sin())},
    ),
    "seamless_m4t": (
        "SeamlessM4TConformerSelfAttention", "SeamlessM4TConfig",
        {"hidden_size": 32, "position_embeddings_type": "none", "speech_encoder_attention_heads": 4}, (1, T, 32), {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", PARTS)
@torch.no_grad()
def test_parts_of_models_prune(family: str) -> None:
    attention, config, arguments, shape, options = PARTS[family]
    source = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    module = getattr(source, attention)(getattr(source, config)(**arguments))
    module.config._attn_implementation = "eager"
    x = torch.randn(shape)

    def run() -> Tensor:
        out = module(x, **options)
        return out[0] if isinstance(out, tuple) else out

    model = nn.Sequential(module)
    (layer,) = hk.heads.projected_layers(model)
    assert (layer.num_heads, layer.head_dim) == (4, 8)
    stock = run()
    layer.output.linear.weight[:, layer.output.features([1])] = 0.0
    closed = run()
    assert (closed - stock).abs().max() > 1e-3
    hk.heads.prune(model, {0: [1]})
    assert_alike(run(), closed)
