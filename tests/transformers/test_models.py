"""How transformers models are run on the operators: modes, dtypes, masks, compilation, a pretrained model."""

from __future__ import annotations

import pytest
import torch

from tests.support.alike import assert_alike

pytest.importorskip("transformers", reason="needs the extra [transformers]")

from heads_kernels.integrations.transformers import release, use
from tests.support.tiny_models import build, outputs, with_gradients


@pytest.mark.check
def test_compiles_whole_without_a_mask() -> None:
    """fullgraph: nothing in the attention or the masks breaks the graph; positions tell of packing."""
    model = use(build("llama", num_hidden_layers=1))
    changes = {"use_cache": False, "attention_mask": None}
    expected = outputs(model, **changes)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert_alike(outputs(compiled, **changes), expected)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("name", ["llama", "t5", "qwen3_next"])
def test_gradient_checkpointing(name: str, use_reentrant: bool) -> None:
    """With the gradient of the embedding of T5's bias, which a layer that runs again looks up again."""
    model = build(name, **{"dropout_rate": 0.0} if name == "t5" else {}).train()
    expected = with_gradients(model, use_cache=False)
    use(model).gradient_checkpointing_enable({"use_reentrant": use_reentrant})
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


@pytest.mark.parametrize("name", ["bert", "bloom", "mpnet"])
def test_dropout_reaches_the_operator(name: str) -> None:
    none = {"hidden_dropout": 0.0, "hidden_dropout_prob": 0.0}
    some = {"attention_dropout": 0.5, "attention_probs_dropout_prob": 0.5}
    model = use(build(name, **none, **some))
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


@pytest.mark.parametrize(("name", "model"), [("bert", ""), ("t5", "T5EncoderModel")])
def test_float_mask_of_the_caller(name: str, model: str) -> None:
    """A prepared `[B, 1, T, S]` mask to be added, beside relative positions too."""
    stock = build(name, model=model)
    mask = torch.randn(3, 1, 9, 9)
    expected = with_gradients(stock, attention_mask=mask)
    assert_alike(with_gradients(use(stock), attention_mask=mask), expected)


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
