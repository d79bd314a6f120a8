"""transformers models on the operators: outputs, gradients, statistics, caches, compile."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.alike import assert_alike

pytest.importorskip("transformers", reason="needs the extra [transformers]")

import transformers

import heads_kernels as hk
from heads_kernels.integrations.transformers import TESTED, release, tested, use
from tests.support.tiny_models import TINY, batch, build, outputs, with_gradients

DOCUMENT = Path(__file__).parents[2] / "docs" / "transformers.md"


# ---------------------------------------------------------------------- every family
def test_every_family_has_a_tiny_model() -> None:
    for name, family in TESTED.items():
        assert TINY[name].model == family.model


@pytest.mark.parametrize("name", TESTED)
def test_family_equals_stock(name: str) -> None:
    """Outputs of real tokens, gradients of all weights; after `release`, the bits of before."""
    model = build(name)
    expected = with_gradients(model)
    assert use(model) is model
    assert_alike(with_gradients(model), expected)
    release(model)
    assert_alike(outputs(model), expected["outputs"])


def test_table_of_the_documentation_is_generated() -> None:
    """`python -c "from heads_kernels.integrations.transformers import tested; print(tested.table())"` makes it."""
    document = DOCUMENT.read_text(encoding="utf-8")
    assert tested.table() in document
    assert tested.of_a_form() in document


def test_table_says_whose_heads_are_known() -> None:
    for line in tested.table().splitlines()[2:]:
        cells = line.split("|")
        assert cells[7].strip() == ("yes" if TINY[cells[1].strip(" `")].attention else "no")


@pytest.mark.parametrize("name", TESTED)
def test_statistics_stand_in_for_maps(name: str) -> None:
    model = use(build(name))
    family = TESTED[name]
    found = model(**batch(model), output_attentions=True)
    rows = found.decoder_attentions if model.config.is_encoder_decoder else found.attentions
    assert bool(rows) == family.statistics
    for layer in rows:
        if layer is not None:
            assert isinstance(layer, hk.AttentionStatistics)
            heads = model.config.get_text_config().num_attention_heads  # of Swin, by stage
            assert layer.entropy.shape[1] in (heads if isinstance(heads, list) else [heads])


def test_statistics_are_those_of_the_maps() -> None:
    model = build("bert")
    real = batch(model)["attention_mask"].bool()
    maps, statistics = (
        m(**batch(m), output_attentions=True).attentions for m in (model, use(build("bert")))
    )
    for expected, found in zip(maps, statistics, strict=True):
        rows = real[:, None].expand(expected.shape[:3])
        assert_alike(found.max_prob[rows], expected.amax(-1)[rows])
        assert torch.equal(found.argmax[rows], expected.argmax(-1)[rows])


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


@pytest.mark.parametrize("in_use", [False, True])
@pytest.mark.parametrize("cache", ["static", "sliding_window"])
def test_cache_made_for_all_heads_is_refused_by_a_pruned_model(cache: str, in_use: bool) -> None:
    """`prefill_chunk_size` makes a static cache by the config, before there are keys."""
    model = use(build("llama")) if in_use else build("llama")
    arguments = {
        "input_ids": torch.randint(3, 40, (2, 9)), "do_sample": False, "max_new_tokens": 3,
        "cache_implementation": cache, "pad_token_id": 0,
    }  # fmt: skip
    chunks = model.generate(**arguments, prefill_chunk_size=4)
    assert torch.equal(chunks, model.generate(**arguments))
    filled = transformers.DynamicCache(config=model.config)
    model(input_ids=arguments["input_ids"], past_key_values=filled)
    hk.heads.prune(model, {0: [0, 1, 2, 3]})
    refusal = r"has keys of 2 heads for layer 0, of which pruning left 1; .*prefill_chunk_size"
    with pytest.raises(ValueError, match=refusal):
        model.generate(**arguments, prefill_chunk_size=4)
    with pytest.raises(ValueError, match=refusal):
        model(input_ids=arguments["input_ids"], past_key_values=filled)
    expected = model.generate(**arguments | {"cache_implementation": "dynamic"})
    assert torch.equal(model.generate(**arguments), expected)


def test_static_cache_filled_by_the_prompt() -> None:
    """The mask of a prefill as `generate` prepares it: it goes through the model as it is."""
    model = build("llama")
    prepared = []
    for implementation in ("eager", "heads_kernels"):
        model.set_attn_implementation(implementation)
        inputs = model.prepare_inputs_for_generation(
            **batch(model),
            past_key_values=transformers.StaticCache(config=model.config, max_cache_len=9),
            next_sequence_length=None,
            is_first_iteration=True,
        )
        with torch.no_grad():
            prepared.append(model(**inputs).logits)
    real = batch(model)["attention_mask"].bool()
    assert_alike(prepared[1][real], prepared[0][real])


@pytest.mark.check
@pytest.mark.parametrize("padded", [True, False])
def test_compiles_whole(padded: bool) -> None:
    """fullgraph: nothing in the attention or the masks breaks the graph. Without a mask, positions tell of packing."""
    model = use(build("llama", num_hidden_layers=1))
    changes = {"use_cache": False} | ({} if padded else {"attention_mask": None})
    expected = outputs(model, **changes)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert_alike(outputs(compiled, **changes), expected)


@pytest.mark.check
def test_compiles_with_head_mask_and_gradients() -> None:
    model = use(build("bert", num_hidden_layers=1))
    mask = torch.rand(4)
    expected = with_gradients(model, head_mask=mask)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    found = with_gradients(compiled, head_mask=mask)
    found = {name.removeprefix("_orig_mod."): tensor for name, tensor in found.items()}
    assert_alike({name: found[name] for name in expected}, expected)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
@pytest.mark.parametrize("name", ["llama", "t5", "qwen3_next"])
def test_gradient_checkpointing(name: str) -> None:
    model = use(build(name)).train()
    expected = with_gradients(model, use_cache=False)
    model.gradient_checkpointing_enable()
    assert_alike(with_gradients(model, use_cache=False), expected)


@pytest.mark.parametrize("name", ["bert", "llama", "t5", "afmoe"])
def test_bfloat16(name: str) -> None:
    """No further from the model in float32 than twice what stock bfloat16 is."""
    model = build(name).to(torch.bfloat16)
    with torch.no_grad():
        stock = outputs(model).float()
        used = outputs(use(model))
        assert used.dtype == torch.bfloat16
        exact = outputs(release(model).float())
    assert (used.float() - exact).square().mean() < 4 * (stock - exact).square().mean() + 1e-6


def test_dropout_reaches_the_operator() -> None:
    model = use(build("bert", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.5))
    whole = outputs(model)
    assert_alike(outputs(model), whole)
    assert not torch.equal(outputs(model.train()), whole)


def test_packed_sequences_by_position() -> None:
    model = build("llama")
    packed = {
        "input_ids": torch.randint(3, 40, (1, 9)), "attention_mask": None, "use_cache": False,
        "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0, 1]]),
    }  # fmt: skip
    expected = outputs(model, **packed)
    assert_alike(outputs(use(model), **packed), expected)


def test_float_mask_of_the_caller() -> None:
    """A prepared `[B, 1, T, S]` mask to be added: SDPA adds it, gates come after."""
    model = build("bert")
    mask = torch.randn(3, 1, 9, 9)
    expected = outputs(model, attention_mask=mask)
    assert_alike(outputs(use(model), attention_mask=mask), expected)


def test_from_config_by_name() -> None:
    config = transformers.LlamaConfig(**TINY["llama"].arguments)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="heads_kernels"
    )
    assert model.config._attn_implementation == "heads_kernels"
    found = outputs(model.eval())
    model.set_attn_implementation("eager")
    assert_alike(found, outputs(model))


# ---------------------------------------------------------------------- a pretrained model
@pytest.mark.check
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
    expected = with_gradients(model, **arguments)
    found = with_gradients(use(model), **arguments)
    assert_alike(found["outputs"], expected["outputs"])
    assert_alike(found, expected, dtype=torch.float32)
