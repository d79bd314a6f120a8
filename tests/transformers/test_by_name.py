"""`attn_implementation="heads_kernels"`: registered by either import, refused where it can't be served."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra [transformers]")

import transformers
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.bert import modeling_bert
from transformers.models.pp_formulanet import modeling_pp_formulanet

from heads_kernels.after_import import after_import
from heads_kernels.heads.configs import NAME
from heads_kernels.integrations.transformers import use
from heads_kernels.integrations.transformers.support import KNOWN
from tests.support.alike import assert_alike
from tests.support.tiny_models import PLAIN, SEQ2SEQ, TINY, build, outputs

ROOT = Path(__file__).parents[2]

BLOOM = {"vocab_size": 40, "hidden_size": 32, "n_layer": 2, "n_head": 4}
#: Models that compute attention themselves and are served after `use`, and arguments of their configs.
BY_USE: dict[str, dict[str, Any]] = {
    "MPNetModel": PLAIN,
    "BloomModel": BLOOM,
    "MptModel": {"vocab_size": 40, "d_model": 32, "n_layers": 2, "n_heads": 4, "expansion_ratio": 1},
}  # fmt: skip
#: Those that are not.
ITSELF: dict[str, dict[str, Any]] = {
    "XGLMModel": {"vocab_size": 40, "d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 24},
    "RoFormerModel": PLAIN,
    "LongformerModel": PLAIN | {"attention_window": 4},
    "BigBirdModel": PLAIN | {"attention_type": "original_full"},
}  # fmt: skip
#: Those that look their attention classes up by the name of the attention function.
BY_TABLE: dict[str, dict[str, Any]] = {
    "FalconModel": {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    "GPTNeoModel": {
        "vocab_size": 40, "hidden_size": 32, "num_layers": 2, "num_heads": 4,
        "attention_types": [[["global", "local"], 1]],
    },
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32, "patch_size": 8,
    "mlp_dim": 24, "output_channels": 8, "window_size": 2, "global_attn_indexes": [1],
}  # fmt: skip
IDS = torch.arange(3, 21).view(2, 9)
REAL = torch.tensor([[1] * 9, [1] * 6 + [0] * 3])


def make(name: str, arguments: dict[str, Any], attention: str) -> Any:
    model_class = getattr(transformers, name)
    config = model_class.config_class(**arguments)
    torch.manual_seed(0)
    return transformers.AutoModel.from_config(config, attn_implementation=attention).eval()


# ---------------------------------------------------------------------- what is refused
#: Why they are not made with the name, and what to do instead.
NOT_MADE = {
    **dict.fromkeys((*ITSELF, *BY_TABLE), "which computes its attention itself; use 'eager'"),
    **dict.fromkeys(BY_USE, "attention itself; create it with 'eager' or 'sdpa' and call .*use"),
    "SamVisionModel": r"looks up its layers .*SAM_VISION.*; create it with 'eager'",
    "DogeModel": "handles masks of flex attention",  # which it takes apart
}


@pytest.mark.parametrize("name", NOT_MADE)
def test_models_that_cannot_be_made(name: str) -> None:
    others = {"SamVisionModel": VISION, "DogeModel": TINY["llama"].arguments}
    arguments = {**ITSELF, **BY_TABLE, **BY_USE, **others}[name]
    model_class = getattr(transformers, name)
    refusal = rf"attn_implementation is 'heads_kernels' for a {name} .*{NOT_MADE[name]}"
    with pytest.raises(ValueError, match=refusal):
        model_class._from_config(model_class.config_class(**arguments), attn_implementation=NAME)


def test_other_ways_to_a_name(tmp_path: Path) -> None:
    """From a checkpoint it is refused; `set_attn_implementation` of transformers leaves the model as it is."""
    model = make("MPNetModel", BY_USE["MPNetModel"], "eager")
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"'heads_kernels' for a MPNetModel \(family 'mpnet'\)"):
        transformers.AutoModel.from_pretrained(tmp_path, attn_implementation=NAME)
    model.set_attn_implementation(NAME)  # transformers logs a warning
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("name", [*ITSELF, *BY_USE])
def test_mask_is_refused_where_nothing_else_was(name: str) -> None:
    """A config that was changed behind transformers' back: the first pass with a mask is refused."""
    model = make(name, {**ITSELF, **BY_USE}[name], "eager")
    model.config._attn_implementation = NAME
    with pytest.raises(ValueError, match=r"attention_mask of .* is computed with \("):
        model(IDS, attention_mask=REAL)


def test_part_that_computes_attention_itself() -> None:
    """The encoder of BigBird-Pegasus does, its decoder does not: refused once the encoder gets its mask."""
    model = make("BigBirdPegasusModel", SEQ2SEQ | {"attention_type": "original_full"}, NAME)
    with pytest.raises(ValueError, match=r"is computed with \(add\)"):
        model(IDS, attention_mask=REAL, decoder_input_ids=IDS)


def test_models_that_never_ask_for_a_mask() -> None:
    """A file in which other models call attention functions."""
    config = transformers.PPFormulaNetVisionConfig(**VISION)
    model_class = modeling_pp_formulanet.PPFormulaNetVisionModel
    model = model_class._from_config(config, attn_implementation=NAME)
    with pytest.raises(ValueError, match=r"for a PPFormulaNetVision.*computes its attention itsel"):
        model(torch.randn(1, 3, 32, 32))
    with pytest.raises(ValueError, match=r"model is a PPFormulaNetVision.* its attention itself"):
        use(model_class._from_config(config, attn_implementation="eager"))


@pytest.mark.parametrize("how", ["made", "set", "used"])
def test_arguments_that_are_not_known(how: str) -> None:
    """Of an attention function, in code that is newer than the package."""

    class Newer(modeling_bert.BertSelfAttention):
        def forward(self, hidden_states: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
            query = self.query(hidden_states).unflatten(-1, (4, -1)).transpose(1, 2)
            interface = ALL_ATTENTION_FUNCTIONS["sdpa"]
            out, _ = interface(
                self, query, query, query, attention_mask, scaling=1.0, temperature=2.0, **kwargs
            )
            return out.flatten(2), None

    class NewerModel(transformers.BertModel):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.encoder.layer[1].attention.self.__class__ = Newer
            self.post_init()

    refusal = r"temperature is passed .* by 'encoder.layer.1.attention.self', a Newer, and is not supported; use 'e"
    config = build("bert").config

    def put_to_use() -> None:
        config._attn_implementation = NAME if how == "made" else "eager"
        model = NewerModel(config)
        use(model) if how == "used" else model.set_attn_implementation(NAME)

    with pytest.raises(ValueError, match=refusal):
        put_to_use()


def arguments_of_calls(source: str, function: str) -> Iterator[str | None]:
    """The keywords of every call of a function; only the calls are parsed, the sources are 20 MB."""
    for call in re.finditer(rf"(?<!def )\b{function}\(", source):
        for closing in re.finditer(r"\)", source[call.end() :]):
            try:
                tree = ast.parse(source[call.start() : call.end() + closing.end()], mode="eval")
            except SyntaxError:  # an inner parenthesis
                continue
            assert isinstance(tree.body, ast.Call)
            yield from (each.arg for each in tree.body.keywords)
            break


@pytest.mark.check
def test_arguments_of_all_attention_classes_are_known() -> None:
    """Read off the sources of transformers."""
    names: set[str | None] = set()
    for path in Path(transformers.__file__).parent.glob("models/*/modeling_*.py"):
        source = path.read_text(encoding="utf-8")
        for function in ("attention_interface", "attention_fn"):
            names |= set(arguments_of_calls(source, function))
    assert "scaling" in names
    assert names - {None, "indices", "sinks"} <= KNOWN  # those two are refused


# ---------------------------------------------------------------------- what is served
def test_head_masks_and_statistics_without_use() -> None:
    """Of models that were made with the name, and of those that were set to it."""
    made, model = build("bert", NAME), build("bert")
    model.set_attn_implementation(NAME)
    mask = torch.tensor([0.0, 1.0, 0.5, 1.0])
    expected = outputs(use(build("bert")), head_mask=mask)
    for each in (made, model):
        assert_alike(outputs(each, head_mask=mask), expected)
        assert len(each(IDS, output_attentions=True).attentions) == 2
    model.set_attn_implementation("eager")
    assert_alike(outputs(model), outputs(build("bert")))
    with pytest.raises(
        ValueError, match=r"head_mask is given to a BertModel, whose layers run .*eag"
    ):
        outputs(model, head_mask=mask)


SAME = {
    "SplinterModel": PLAIN,
    "NllbMoeModel": SEQ2SEQ,  # routers of sparse layers compute with the mask, which they take for one to be added
    "PegasusXModel": SEQ2SEQ | {"block_size": 4, "num_global_tokens": 2},
}  # fmt: skip


@pytest.mark.parametrize("name", SAME)
def test_models_that_say_that_sdpa_does_not_serve_them(name: str) -> None:
    """The scores of some are plain all the same."""
    model: PreTrainedModel = make(name, SAME[name], "eager")
    assert not model._supports_sdpa
    arguments = {"input_ids": IDS, "attention_mask": REAL}
    if model.config.is_encoder_decoder:
        arguments["decoder_input_ids"] = IDS
    expected = model(**arguments)[0]
    found = use(model)(**arguments)[0]
    real = slice(None) if model.config.is_encoder_decoder else REAL.bool()
    assert_alike(found[real], expected[real])


# ---------------------------------------------------------------------- registered by either import
PARTS = ("modeling_layers", "masking_utils", "models.bert.modeling_bert")


@pytest.mark.parametrize(
    "first", ["", *(pytest.param(part, marks=pytest.mark.check) for part in PARTS)]
)
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
