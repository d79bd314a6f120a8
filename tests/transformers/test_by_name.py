"""`attn_implementation="heads_kernels"`: registered by either import, refused where it can't be served."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import heads_kernels as hk
from heads_kernels.after_import import after_import
from heads_kernels.heads.configs import NAME
from heads_kernels.integrations.transformers import use
from tests.support.alike import assert_alike
from tests.support.tiny_models import ALIBI, MPT, PLAIN, SEQ2SEQ, TINY, build, of_class, outputs

ROOT = Path(__file__).parents[2]

BIG_BIRD = {"attention_type": "original_full"}
#: Models that compute attention themselves, of which the first three are served after `use`, and the last in its
#: encoder; arguments of their configs.
ITSELF: dict[str, dict[str, Any]] = {
    "MPNetModel": PLAIN,
    "BloomModel": ALIBI,
    "MptModel": MPT,
    "XGLMModel": {"vocab_size": 40, "d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 24},
    "RoFormerModel": PLAIN,
    "LongformerModel": PLAIN | {"attention_window": 4},
    "BigBirdModel": PLAIN | BIG_BIRD,
    "BigBirdPegasusModel": SEQ2SEQ | BIG_BIRD,
}  # fmt: skip
IDS = torch.arange(3, 21).view(2, 9)
REAL = torch.tensor([[1] * 9, [1] * 6 + [0] * 3])


@pytest.mark.parametrize("name", ITSELF)
def test_models_that_compute_attention_themselves(name: str) -> None:
    """Their first pass with a mask is refused, which their code would add to its scores."""
    model = of_class(name, ITSELF[name], NAME)
    decoder = {"decoder_input_ids": IDS} if model.config.is_encoder_decoder else {}
    with pytest.raises(ValueError, match=r"attention_mask of .* is computed with \(\w+\)"):
        model(IDS, attention_mask=REAL, **decoder)


def test_model_that_drops_masks_of_flex_attention() -> None:
    model = of_class("DogeModel", TINY["llama"].arguments, NAME)
    with pytest.raises(ValueError, match="attention_mask is given to DogeAttention, which makes"):
        model(IDS)


@pytest.mark.parametrize("name", ["bert", "t5", "afmoe"])
def test_equals_a_model_in_use(name: str) -> None:
    made, set_ = build(name, NAME), build(name)
    set_.set_attn_implementation(NAME)
    expected = outputs(use(build(name)))
    for model in (made, set_):
        assert_alike(outputs(model), expected)
        hk.heads.close(model, {0: [1]})
        assert not torch.equal(outputs(model), expected)


PARTS = ("modeling_layers", "masking_utils", "models.bert.modeling_bert")


@pytest.mark.parametrize("first", ["", *(pytest.param(part, marks=pytest.mark.check) for part in PARTS)])
def test_package_before_transformers(first: str) -> None:
    """Parts import each other in an order that depends on which comes first."""
    code = f"""
import sys, heads_kernels
assert "transformers" not in sys.modules
import transformers{first and "." + first}
from transformers import AutoModel, BertConfig
config = BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
model = AutoModel.from_config(config, attn_implementation="heads_kernels")
from heads_kernels.after_import import _WAITING
assert "transformers.modeling_utils" not in _WAITING
"""
    command = [sys.executable, "-W", "error::RuntimeWarning", "-c", code]
    run = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert run.returncode == 0, run.stderr


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module that can be imported and has not been."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "watched_module", raising=False)
    (tmp_path / "watched_module.py").write_text("VALUE = 1\n")
    return "watched_module"


def test_after_import_that_fails(module: str) -> None:
    def register() -> None:
        raise RuntimeError("too old")

    after_import(module, register)
    with pytest.warns(RuntimeWarning, match=r"not registered with watched_module: .*too old"):
        importlib.import_module(module)
    assert "watched_module" in sys.modules
