"""Pruned models come back from disk as they were, and what doesn't fit is named."""

import copy
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import heads_kernels as hk
from heads_kernels.heads.layers import find_layers
from tests.support.alike import assert_alike
from tests.support.refusals import assert_refused
from tests.support.tiny_models import assert_same, assert_same_states, build, outputs, transformers

pytest.importorskip("safetensors", reason="what models are saved as")


def pruned(name: str, **changes: Any) -> Any:
    """A model of which the first layer has lost all heads, the second two."""
    model = build(name, "heads_kernels", **changes)
    H = hk.heads.attention_layers(model)[0].num_heads
    hk.heads.prune(model, {0: range(H), 1: [1, 3]})
    return model


def reload(path: Path, cls: Any = None, **options: Any) -> Any:
    named = {"attn_implementation": "heads_kernels", "experts_implementation": "eager"}
    return hk.integrations.transformers.from_pretrained(path, cls, **{**named, **options})


# ---------------------------------------------------------------------- save_pretrained, from_pretrained
OWN, SHARED = "use_relative_position_bias", "use_shared_relative_position_bias"
#: Families with position biases: what is changed in their configs, and whether stock attention runs fewer heads.
BIASES: list[tuple[str, dict[str, Any], bool]] = [
    ("beit", {OWN: True}, False),
    ("beit", {OWN: False, SHARED: True}, False),
    ("layoutlmv3", {f"has_{each}_attention_bias": False for each in ("relative", "spatial")}, True),
    ("swin", {}, False),
    ("t5", {}, False),
]


@pytest.mark.parametrize(("name", "changes", "runs"), BIASES)
def test_position_biases(name: str, changes: dict[str, Any], runs: bool, tmp_path: Path) -> None:
    """Heads of families that compute attention themselves are found once `use` has replaced their classes."""
    use, stock = hk.integrations.transformers.use, build(name, **changes)
    model = use(build(name, **changes))
    hk.heads.prune(model, {layer.index: [1] for layer in hk.heads.attention_layers(model)})
    model.save_pretrained(tmp_path)
    loaded = reload(tmp_path, type(model), attn_implementation="eager")
    if runs:
        assert_alike(outputs(loaded), outputs(model))
    else:
        assert_refused((lambda: outputs(loaded), r"'eager' in a .* with 3 of 4 heads, .* call hk"))
    assert_same(use(loaded), model)
    if not find_layers(stock):
        shapes, words = hk.heads.shapes(model), r"is a \w+, whose heads are unknown; call .*use\(model"
        assert_refused((lambda: hk.heads.apply_shapes(stock, shapes), words), unchanged=[stock])


def test_the_config_of_another_model_is_left_alone() -> None:
    config = build("bert").config
    pruned, _ = models = [transformers.BertForMaskedLM(config) for _ in range(2)]
    hk.heads.prune(pruned, {0: [1]})
    assert [hasattr(model.config, "heads_kernels") for model in models] == [True, False]
    assert pruned.config is pruned.bert.config is pruned.bert.encoder.layer[0].attention.self.config


@pytest.mark.parametrize(("order", "kept"), [([1, 0], [[0, 1, 2], [1, 2, 3]]), ([1], [[0, 1, 2]])])
def test_a_record_is_that_of_the_layers_when_it_is_saved(
    order: list[int], kept: list[list[int]], tmp_path: Path
) -> None:
    """Of copies whose layers moved or left: as many heads of each are left, but not the same. A pickle needs `use`."""
    use = hk.integrations.transformers.use
    model = use(build("bert"))
    hk.heads.prune(model, {0: [0], 1: [3]})
    assert pickle.loads(pickle.dumps(model.config)).heads_kernels == model.config.heads_kernels
    copied, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for each in (copied, pickled):
        each.encoder.layer = nn.ModuleList(each.encoder.layer[index] for index in order)
        each.config.num_hidden_layers = len(order)
    for each in (copied, use(pickled)):
        each.save_pretrained(tmp_path)
        loaded = reload(tmp_path, type(model))
        assert_same(loaded, each)
        assert [layer.module.kept_heads.tolist() for layer in hk.heads.attention_layers(loaded)] == kept


def test_a_config_can_be_printed_and_pickled() -> None:
    """Where a layer no longer fits its layout, it keeps the last record; a pickle has that of the present layers."""
    model = hk.integrations.transformers.use(build("bert"))
    hk.heads.prune(model, {1: [0]})
    whole = copy.deepcopy(model)
    model.encoder.layer[1].attention.output.dense = nn.Identity()
    assert "encoder.layer.1.attention" in repr(model.config)
    copied = copy.deepcopy(model.config)
    copied.heads_kernels["pruned"].clear()
    assert model.config.heads_kernels["pruned"]
    del whole.encoder.layer[0]
    (name,) = pickle.loads(pickle.dumps(whole.config)).heads_kernels["pruned"]
    assert name.startswith("encoder.layer.0.")


def test_configs_inside_configs_stay_those_of_the_parts() -> None:
    parts = [build("bert", model="BertLMHeadModel", **d).config for d in ({}, {"is_decoder": True})]
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(*parts)
    model = transformers.EncoderDecoderModel(config)
    before = model.config
    hk.heads.prune(model, {0: [1]})
    assert model.config is not before
    assert model.config.encoder is model.encoder.config
    assert model.config.decoder is model.decoder.config
    assert not hasattr(before.encoder, "heads_kernels")


def test_models_with_and_without_their_task_head(tmp_path: Path) -> None:
    """Of layers that are pruned, converted, or both."""
    model = pruned("bert", model="BertForSequenceClassification", num_hidden_layers=3)
    hk.convert.collaborate(model, 12, layers=[1, 2], progress=False)
    model.save_pretrained(tmp_path)
    classify = reload(tmp_path, transformers.AutoModelForSequenceClassification)
    assert type(classify) is type(model)
    assert_same(classify, model)
    base = reload(tmp_path)
    assert type(base) is transformers.BertModel
    assert_same_states(base, model.base_model, ignoring="pooler")
    masked = reload(tmp_path, transformers.AutoModelForMaskedLM)  # a head that the file has not
    assert torch.isfinite(outputs(masked)).all()
    base.save_pretrained(tmp_path / "base")
    again = reload(tmp_path / "base", type(model))
    assert_same_states(again.base_model, model.base_model, ignoring="pooler")


def test_dtype_shards_and_training_go_on(tmp_path: Path) -> None:
    model = pruned("llama")
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    half = reload(tmp_path, transformers.AutoModelForCausalLM, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
    loaded, info = reload(tmp_path, type(model), output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    for each in (loaded, loaded, model, model):  # one by one, which leaves a key head to each
        hk.heads.prune(each, {1: [4]})
    assert model.model.layers[1].self_attn.num_key_value_groups == 1
    loaded.save_pretrained(tmp_path / "again")
    assert_same(reload(tmp_path / "again", type(model)), model)


def test_checkpoints_that_do_not_fit(tmp_path: Path) -> None:
    """With learned gates, and with a config of fewer heads."""
    gated, fewer = hk.integrations.transformers.use(build("bert")), pruned("bert")
    hk.heads.gate(gated, hk.nn.HardConcrete)
    fewer.config.num_attention_heads = 2
    gated.save_pretrained(tmp_path / "gated")
    fewer.save_pretrained(tmp_path / "fewer")
    words = r"was saved with \{.*'heads': \[\], .*; the model has \{'heads': \[0, 1\]"
    assert_refused(
        (lambda: reload(tmp_path / "gated"), r"learned gates, encoder.*head_gate.log_alpha.*prune"),
        (lambda: reload(tmp_path / "fewer"), words),
    )


# ---------------------------------------------------------------------- models outside transformers
class Translator(nn.Module):
    """The three uses of attention, and a weight that two modules share."""

    def __init__(self, heads: int = 4, words: int = 9) -> None:
        super().__init__()
        width = 24
        self.encoder = hk.nn.GatedMultiheadAttention(width, heads, num_key_heads=heads // 2)
        self.decoder = hk.nn.CollaborativeMultiheadAttention(width, heads, 10)
        self.cross = hk.nn.GatedMultiheadAttention(width, heads, output_gate="head")
        self.embed = nn.Embedding(words, width)
        self.logits = nn.Linear(width, words, bias=False)
        self.logits.weight = self.embed.weight

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, x = self.embed(source), self.embed(target)
        memory = memory + self.encoder(memory)[0]
        x = x + self.decoder(x, is_causal=True)[0]
        return self.logits(x + self.cross(x, memory)[0])


def translator(seed: int = 0) -> Translator:
    torch.manual_seed(seed)
    model = Translator()
    for parameter in model.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def translation(model: Translator) -> Tensor:
    tokens = torch.arange(12).view(2, 6) % 9
    return model(tokens, tokens[:, :4])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


def test_save_and_load(path: Path) -> None:
    model = translator()
    hk.heads.prune(model, {"encoder": [1, 2, 3], "decoder": [0, 2], "cross": [0, 1, 2, 3]})
    before = os.umask(0o027)
    try:
        hk.heads.save(model, path)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o640  # safetensors alone makes it its owner's
    assert os.listdir(path.parent) == [path.name]
    loaded = translator(seed=1)
    hk.heads.load(loaded, path)
    assert_alike(translation(loaded), translation(model))
    assert loaded.logits.weight is loaded.embed.weight
    assert loaded.encoder.kept_heads.tolist() == [0]
    hk.heads.load(loaded, path)  # a model that has the shape already
    partly = translator(seed=1).double()
    hk.heads.prune(partly, {"encoder": [2], "decoder": [0]})
    hk.heads.load(partly, path)
    assert_alike(translation(partly).float(), translation(model))


def test_gates_are_restored_where_they_are_attached(path: Path) -> None:
    model = translator()
    hk.heads.prune(model, {"encoder": [1], "decoder": [0]})
    hk.heads.gate(model, hk.nn.HardConcrete)
    model.decoder.head_gate = model.encoder.head_gate
    model.encoder.head_gate.log_alpha.data.copy_(torch.tensor([-9.0, 0.5, 9.0]))
    hk.heads.save(model, path)
    fresh = translator(seed=1)
    words = r"which has cross\.head_gate\.log_alpha, .*hk.heads.gate"
    assert_refused((lambda: hk.heads.load(fresh, path), words), unchanged=[fresh])
    hk.heads.gate(fresh, hk.nn.HardConcrete)
    fresh.decoder.head_gate = fresh.encoder.head_gate
    hk.heads.load(fresh, path)
    assert torch.equal(fresh.encoder.head_gate.export(), model.encoder.head_gate.export())
    assert_alike(translation(fresh), translation(model))


def test_heads_in_another_order_are_refused() -> None:
    """They would read other key heads."""
    model = nn.Sequential(hk.nn.GatedMultiheadAttention(16, 4, num_key_heads=2))
    left = {"heads": [0, 2, 1, 3], "key_heads": 2, "head_dim": 4, "value_dim": 4}
    words = r"'0' was saved with \{'heads': \[0, 2, 1, 3\]"
    assert_refused((lambda: hk.heads.apply_shapes(model, {"pruned": {"0": left}}), words), unchanged=[model])


def remake(model: Translator, **sizes: int) -> None:
    """Makes it a translator of other sizes."""
    vars(model).update(vars(Translator(**sizes)))


#: What is done to a model that a file of a translator without head 0 of its encoder then does not fit.
MISFITS: list[tuple[Callable[[Translator], Any], str]] = [
    (lambda model: remake(model, heads=2), r"saved with \{'heads': \[1, 2, 3\], 'key_heads': 3"),
    (lambda model: remake(model, heads=8), r"'value_dim': 6\}; the model has \{'heads': \[0, 1, 2"),
    (lambda model: delattr(model, "cross"), "layer 'cross' does not exist in the model"),
    (lambda model: hk.heads.prune(model, {"encoder": [1]}), r"the model has \{'heads': \[0, 2, 3\]"),
    (lambda model: setattr(model, "another", nn.Linear(2, 2)), "which lacks another.bias, another.weight"),
    (lambda model: hk.heads.gate(model, hk.nn.HardConcrete), r"which lacks cross.head_gate.log_alpha, .*\.ungate"),
    (lambda model: delattr(model, "embed"), "which has embed.weight; the model has not"),
    (lambda model: remake(model, words=7), r"embed\.weight of shape .*; in the model it has \[7, 24\]"),
]


@pytest.mark.parametrize(("change", "refusal"), MISFITS)
def test_files_that_do_not_fit(change: Callable[[Any], Any], refusal: str, path: Path) -> None:
    model, other = translator(), translator()
    hk.heads.prune(model, {"encoder": [0]})
    hk.heads.save(model, path)
    change(other)
    values = [each.clone() for each in other.state_dict().values()]
    assert_refused((lambda: hk.heads.load(other, path), refusal), unchanged=[other])
    assert all(map(torch.equal, other.state_dict().values(), values))


def test_a_save_that_fails_leaves_what_was_there(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = translator()
    hk.heads.save(model, path)
    before = path.read_bytes()

    def interrupted(model: nn.Module, filename: str, **options: Any) -> None:
        Path(filename).write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr("safetensors.torch.save_model", interrupted)
    with pytest.raises(KeyboardInterrupt):
        hk.heads.save(model, path)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]
    assert_refused((lambda: hk.heads.save(model, path.parent / "no" / path.name), "its folder does not exist"))
