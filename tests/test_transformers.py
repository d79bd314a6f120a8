"""transformers models on the operators: outputs, gradients, head masks, gates, caches, compile; taken back exactly."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers", reason="needs the extra [transformers]")

import transformers
from transformers.masking_utils import eager_mask

import heads_kernels as hk
from heads_kernels.integrations.transformers import FAMILIES, attention, families, release, use
from tests.tiny_models import (
    TINY,
    assert_alike,
    batch,
    build,
    is_seq2seq,
    outputs,
    with_gradients,
)

DOCUMENT = Path(__file__).parent.parent / "docs" / "transformers.md"

transformers.logging.set_verbosity_error()


# ---------------------------------------------------------------------- every family
def test_every_family_has_a_tiny_model() -> None:
    assert TINY.keys() == FAMILIES.keys()
    for name, family in FAMILIES.items():
        assert TINY[name].model == family.model


@pytest.mark.parametrize("name", FAMILIES)
def test_family_equals_stock(name: str) -> None:
    """Outputs of real tokens, gradients of all weights; after `release`, the bits of before."""
    model = build(name)
    arguments, real = batch(name)
    expected = with_gradients(model, arguments, real)
    assert use(model) is model
    found = with_gradients(model, arguments, real)
    assert_alike(found[0], expected[0])
    assert_alike(found[1], expected[1])
    release(model)
    assert torch.equal(outputs(model, arguments, real), expected[0])


def test_table_of_the_documentation_is_generated() -> None:
    """`python -c "from heads_kernels.integrations.transformers import families as f; print(f.table())"` makes it."""
    assert families.table() in DOCUMENT.read_text(encoding="utf-8")


def test_example_of_the_documentation_runs() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(example, str(DOCUMENT), "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("name", FAMILIES)
def test_statistics_stand_in_for_maps(name: str) -> None:
    model = use(build(name))
    arguments, _ = batch(name)
    family = FAMILIES[name]
    if family.bias:
        with pytest.raises(ValueError, match=r"output_attentions is True, but M?T5Attention"):
            model(**arguments, output_attentions=True)
        return
    found = model(**arguments, output_attentions=True)
    rows = found.decoder_attentions if is_seq2seq(name) else found.attentions
    assert bool(rows) == family.statistics
    for layer in rows:
        if layer is not None:
            assert isinstance(layer, hk.AttentionStatistics)
            assert layer.entropy.shape[1] == 4


def test_statistics_are_those_of_the_maps() -> None:
    model = build("bert")
    arguments, real = batch("bert")
    maps = model(**arguments, output_attentions=True).attentions
    use(model)
    for expected, found in zip(
        maps, model(**arguments, output_attentions=True).attentions, strict=True
    ):
        rows = real[:, None].expand(expected.shape[:3])
        torch.testing.assert_close(found.max_prob[rows], expected.amax(-1)[rows])
        assert torch.equal(found.argmax[rows], expected.argmax(-1)[rows])


# ---------------------------------------------------------------------- head masks
MASKED = ("albert", "bert", "deit", "distilbert", "gpt2", "llama", "qwen3", "roberta", "t5", "vit", "bart")  # fmt: skip
KINDS = ("head_mask", "decoder_head_mask", "cross_attn_head_mask")


class Reference:
    """Eager attention in plain PyTorch, its probabilities times a head mask: layers take turns as they are called."""

    def __init__(self, masks: dict[str, Tensor]) -> None:
        self.masks = masks
        self.calls = dict.fromkeys(KINDS, 0)

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        position_bias: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        groups = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
        scores = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        for bias in (attention_mask, position_bias):
            scores = scores if bias is None else scores + bias
        kind = self.kind(module, query.shape[2], key.shape[2])
        probabilities = scores.softmax(-1)
        if kind in self.masks:
            mask = self.masks[kind]
            row = mask if mask.dim() == 1 else mask[self.calls[kind]]
            probabilities = probabilities * row[:, None, None]
        self.calls[kind] += 1
        return (probabilities @ value).transpose(1, 2).contiguous(), None

    @staticmethod
    def kind(module: nn.Module, T: int, S: int) -> str:
        """By what the tiny batches are: the encoder reads 9 tokens, the decoder 5."""
        if T == S == 5 and S != 9:
            return "decoder_head_mask"
        return "head_mask" if T == S else "cross_attn_head_mask"


@pytest.fixture
def reference() -> Iterator[Reference]:
    """The reference as an attention implementation of transformers, "reference"."""
    function = Reference({})
    transformers.AttentionInterface.register("reference", function)
    transformers.AttentionMaskInterface.register("reference", eager_mask)
    yield function
    for table in (transformers.AttentionInterface, transformers.AttentionMaskInterface):
        del table._global_mapping["reference"]


@pytest.mark.parametrize("rows", [False, True], ids=["H", "LH"])
@pytest.mark.parametrize("name", MASKED)
def test_head_mask_is_honoured(name: str, rows: bool, reference: Reference) -> None:
    model = build(name)
    arguments, real = batch(name)
    shape = (2, 4) if rows else (4,)
    kinds = FAMILIES[name].head_masks
    masks = {kind: torch.rand(shape).round(decimals=1) for kind in kinds}
    for mask in masks.values():
        mask[..., 1] = 0.0
        mask.requires_grad_()
    reference.masks = masks
    model.set_attn_implementation("reference")
    expected = with_gradients(model, arguments, real)
    expected_masks = {kind: mask.grad for kind, mask in masks.items()}
    for mask in masks.values():
        mask.grad = None
    model.set_attn_implementation("eager")
    use(model)
    found = with_gradients(model, arguments | masks, real)
    assert_alike(found[0], expected[0])
    assert_alike(found[1], expected[1])
    assert_alike({kind: mask.grad for kind, mask in masks.items()}, expected_masks)
    assert not torch.equal(found[0], outputs(model, arguments, real))


def test_head_mask_and_gate_multiply() -> None:
    model = use(build("llama"))
    arguments, real = batch("llama")
    layer = model.model.layers[1].self_attn
    layer.head_gate = hk.nn.FixedGate(torch.tensor([0.0, 1.0, 0.5, 1.0]))
    mask = torch.tensor([[1.0, 1.0, 1.0, 1.0], [1.0, 0.0, 1.0, 0.5]])
    found = outputs(model, arguments | {"head_mask": mask}, real)
    del layer.head_gate
    both = mask * torch.tensor([[1.0] * 4, [0.0, 1.0, 0.5, 1.0]])
    assert_alike(found, outputs(model, arguments | {"head_mask": both}, real))


def test_integer_head_mask() -> None:
    model = use(build("bert"))
    arguments, real = batch("bert")
    mask = torch.tensor([1, 0, 1, 1])
    expected = outputs(model, arguments | {"head_mask": mask.float()}, real)
    assert torch.equal(outputs(model, arguments | {"head_mask": mask}, real), expected)


# ---------------------------------------------------------------------- gates
def test_gates_of_examples_and_their_gradient() -> None:
    """`head_gate` may give `[B, H]`; a closed head's gradient is left out where the gate says so."""

    class PerExample(hk.nn.HeadGate):
        closed_grad = False

        def __init__(self) -> None:
            super().__init__()
            self.num_heads = 4
            self.gates = nn.Parameter(torch.tensor([[1.0, 0.0, 0.5, 1.0]] * 3))

        def forward(self, batch_size: int) -> Tensor:
            assert batch_size == 3
            return self.gates

        def export(self) -> Tensor:
            return self.gates[0].detach()

        def keep(self, heads: Any) -> None:
            raise AssertionError("not pruned here")

    model = build("bert")
    arguments, real = batch("bert")
    use(model)
    gate = PerExample()
    model.encoder.layer[0].attention.self.head_gate = gate
    _, gradients = with_gradients(model, arguments, real)
    gradient = gradients["encoder.layer.0.attention.self.head_gate.gates"]
    assert gradient[:, 1].eq(0).all()
    assert gradient[:, [0, 2, 3]].ne(0).all()


@pytest.mark.parametrize("name", ["bert", "t5", "llama"])
def test_layer_without_heads_adds_the_bias_of_its_projection(name: str) -> None:
    model = use(build(name))
    arguments, real = batch(name)
    heads = next(m for m in model.modules() if hasattr(m, attention.PLACE))
    closed = torch.ones(2, 4)
    closed[0] = 0.0
    expected = outputs(model, arguments | {"head_mask": closed}, real)
    for name_of, linear in heads.named_children():
        if isinstance(linear, nn.Linear) and name_of not in ("o", "o_proj"):
            linear.weight = nn.Parameter(linear.weight[:0])
            linear.bias = None if linear.bias is None else nn.Parameter(linear.bias[:0])
    out = {"bert": "encoder.layer.0.attention.output.dense", "t5": "o", "llama": "o_proj"}[name]
    projection = (model if "." in out else heads).get_submodule(out)
    projection.weight = nn.Parameter(projection.weight[:, :0])
    assert_alike(outputs(model, arguments, real), expected)


def test_pruned_layer_reads_its_part_of_the_bias() -> None:
    """`kept_heads`: position biases and head masks are numbered as before the pruning."""
    model = use(build("t5"))
    arguments, real = batch("t5")
    mask = torch.tensor([[1.0, 1.0, 1.0, 1.0], [0.5, 0.0, 1.0, 0.0]])
    expected = outputs(model, arguments | {"head_mask": mask}, real)
    layer = model.encoder.block[1].layer[0].SelfAttention
    rows = torch.arange(32).view(4, 8)[[0, 2]].flatten()
    for linear in (layer.q, layer.k, layer.v):
        linear.weight = nn.Parameter(linear.weight[rows])
    layer.o.weight = nn.Parameter(layer.o.weight[:, rows])
    layer.register_buffer("kept_heads", torch.tensor([0, 2]), persistent=False)
    assert_alike(outputs(model, arguments | {"head_mask": mask}, real), expected)


# ---------------------------------------------------------------------- how models are run
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral", "afmoe"])
def test_generate_equals_stock(name: str, cache: str) -> None:
    model = build(name)
    real = torch.ones(3, 6, dtype=torch.long)
    real[1, :2] = 0
    arguments = {
        "input_ids": torch.randint(3, 40, (3, 6)), "attention_mask": real, "do_sample": False,
        "max_new_tokens": 6, "cache_implementation": cache, "pad_token_id": 0,
    }  # fmt: skip
    expected = model.generate(**arguments)
    assert torch.equal(use(model).generate(**arguments), expected)


def test_static_cache_filled_by_the_prompt() -> None:
    """The mask of a prefill as `generate` prepares it: it goes through the model as it is."""
    model = build("llama")
    arguments, _ = batch("llama", T=8)
    prepared = []
    for implementation in ("eager", attention.NAME):
        model.set_attn_implementation(implementation)
        cache = transformers.StaticCache(config=model.config, max_cache_len=8)
        with torch.no_grad():
            inputs = model.prepare_inputs_for_generation(
                **arguments,
                past_key_values=cache,
                next_sequence_length=None,
                is_first_iteration=True,
            )
            prepared.append(model(**inputs).logits)
    valid = arguments["attention_mask"].bool()
    assert_alike(prepared[1][valid], prepared[0][valid])


@pytest.mark.parametrize("padded", [True, False])
def test_compiles_whole(padded: bool) -> None:
    """fullgraph: nothing in the attention or the masks breaks the graph. Without a mask, positions tell of packing."""
    model = use(build("llama"))
    arguments, real = batch("llama")
    if not padded:
        del arguments["attention_mask"]
        real = torch.ones_like(real)
    arguments["use_cache"] = False
    expected = outputs(model, arguments, real)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert_alike(outputs(compiled, arguments, real), expected)


def test_compiles_with_head_mask_and_gradients() -> None:
    model = use(build("bert"))
    arguments, real = batch("bert")
    arguments["head_mask"] = torch.rand(2, 4)
    expected = with_gradients(model, arguments, real)
    torch.compiler.reset()
    found = with_gradients(
        torch.compile(model, fullgraph=True, backend="aot_eager"), arguments, real
    )
    assert_alike(found[0], expected[0])
    gradients = {name.removeprefix("_orig_mod."): tensor for name, tensor in found[1].items()}
    assert_alike({name: gradients[name] for name in expected[1]}, expected[1])


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
@pytest.mark.parametrize("name", ["llama", "t5", "qwen3_next"])
def test_gradient_checkpointing(name: str) -> None:
    model = use(build(name)).train()
    arguments, real = batch(name)
    arguments["use_cache"] = False
    expected = with_gradients(model, arguments, real)
    model.gradient_checkpointing_enable()
    found = with_gradients(model, arguments, real)
    assert_alike(found[0], expected[0])
    assert_alike(found[1], expected[1])


@pytest.mark.parametrize("name", ["bert", "llama", "t5", "afmoe"])
def test_bfloat16(name: str) -> None:
    """No further from the model in float32 than twice what stock bfloat16 is."""
    model = build(name).to(torch.bfloat16)
    arguments, real = batch(name)
    with torch.no_grad():
        stock = outputs(model, arguments, real).float()
        used = outputs(use(model), arguments, real)
        assert used.dtype == torch.bfloat16
        release(model)
        exact = outputs(model.float(), arguments, real)
    assert (used.float() - exact).square().mean() < 4 * (stock - exact).square().mean() + 1e-6


def test_dropout_reaches_the_operator() -> None:
    model = use(build("bert", attention_probs_dropout_prob=0.5))
    arguments, real = batch("bert")
    first = outputs(model.train(), arguments, real)
    assert not torch.equal(first, outputs(model, arguments, real))
    assert torch.equal(outputs(model.eval(), arguments, real), outputs(model, arguments, real))


def test_packed_sequences_by_position() -> None:
    model = build("llama")
    position_ids = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0, 1]])
    arguments = {"input_ids": torch.randint(3, 40, (1, 9)), "position_ids": position_ids}
    real = torch.ones(1, 9, dtype=torch.bool)
    expected = outputs(model, arguments | {"use_cache": False}, real)
    assert_alike(outputs(use(model), arguments | {"use_cache": False}, real), expected)


def test_float_mask_of_the_caller() -> None:
    """A prepared `[B, 1, T, S]` mask to be added: SDPA adds it, gates come after."""
    model = build("bert")
    arguments, real = batch("bert")
    arguments["attention_mask"] = torch.randn(3, 1, 9, 9)
    expected = outputs(model, arguments, real)
    assert_alike(outputs(use(model), arguments, real), expected)


def test_from_config_by_name() -> None:
    config = transformers.LlamaConfig(**TINY["llama"].arguments)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="heads_kernels"
    )
    assert model.config._attn_implementation == "heads_kernels"
    arguments, real = batch("llama")
    found = outputs(model.eval(), arguments, real)
    model.set_attn_implementation("eager")
    assert_alike(found, outputs(model, arguments, real))


# ---------------------------------------------------------------------- a pretrained model
def test_pretrained_model_on_padded_text() -> None:
    minilm = pytest.importorskip("benchmarks.minilm")
    try:
        model = minilm.load(attn_implementation="eager")
        ids, lengths = minilm.tokens(8)
    except minilm.Unavailable as reason:
        pytest.skip(str(reason))
    real = torch.arange(ids.shape[1]) < lengths[:, None]
    arguments = {"input_ids": ids, "attention_mask": real.long()}
    assert not real.all()
    expected = with_gradients(model, arguments, real)
    found = with_gradients(use(model), arguments, real)
    assert_alike(found[0], expected[0])
    assert_alike(found[1], expected[1], 1e-4)


# ---------------------------------------------------------------------- in use, and not
def test_release_takes_everything_back() -> None:
    model = build("qwen3_next")
    model.config._attn_implementation = "sdpa"
    modules = {name: (type(m), set(vars(m))) for name, m in model.named_modules()}
    use(model)
    assert any(type(m) is not modules[name][0] for name, m in model.named_modules())
    release(model)
    assert {name: (type(m), set(vars(m))) for name, m in model.named_modules()} == modules
    assert model.config._attn_implementation == "sdpa"


def test_every_part_of_a_composite_model_is_in_use() -> None:
    text = transformers.BertConfig(**TINY["bert"].arguments)
    config = transformers.VisionTextDualEncoderConfig.from_vision_text_configs(
        transformers.ViTConfig(**TINY["vit"].arguments), text
    )
    model = transformers.VisionTextDualEncoderModel(config)
    names = [model.config._attn_implementation, model.text_model.config._attn_implementation]
    use(model)
    for part in (model, model.text_model, model.vision_model):
        assert part.config._attn_implementation == "heads_kernels"
    release(model)
    assert [
        model.config._attn_implementation,
        model.text_model.config._attn_implementation,
    ] == names


def test_refusals() -> None:
    with pytest.raises(TypeError, match=r"model is a Linear; .*tested families: albert, bart"):
        use(nn.Linear(2, 2))
    model = build("bert")
    with pytest.raises(ValueError, match=r"model \(BertModel\) is not in use; call use"):
        release(model)
    with pytest.raises(ValueError, match=r"model \(BertModel\) is in use already; call release"):
        use(use(model))


def test_unsupported_families_are_named() -> None:
    plain = TINY["gpt2"].arguments
    gptj = transformers.GPTJModel(transformers.GPTJConfig(rotary_dim=4, **plain))
    with pytest.raises(ValueError, match=r"family 'gptj'\), which computes its attention itself"):
        use(gptj)
    sinks = {**TINY["llama"].arguments, "num_local_experts": 2}
    with pytest.raises(ValueError, match=r"GptOssModel .*more than plain attention .*tested fam"):
        use(transformers.GptOssModel(transformers.GptOssConfig(**sinks)))
    softcap = transformers.Gemma2Model(transformers.Gemma2Config(**TINY["llama"].arguments))
    softcap.set_attn_implementation("heads_kernels")
    with pytest.raises(ValueError, match=r"softcap is given by Gemma2Attention .* use attn_impl"):
        softcap(torch.ones(1, 3, dtype=torch.long))


def test_head_masks_that_do_not_fit() -> None:
    model = build("bert")
    arguments, _ = batch("bert")
    model.set_attn_implementation("heads_kernels")
    with pytest.raises(ValueError, match=r"head_mask is given to a BertSelfAttention not in use"):
        model(**arguments, head_mask=torch.ones(4))
    use(model)
    for shape in ((3,), (1, 4), (2, 3), (2, 1, 4)):
        with pytest.raises(ValueError, match=r"head_mask has shape .* which has 4 heads; pass \[H"):
            model(**arguments, head_mask=torch.ones(shape))
    with pytest.raises(ValueError, match=r"head_mask has shape \[3, 4\], but the layer runs 2 tim"):
        use(build("albert"))(**arguments, head_mask=torch.ones(3, 4))
