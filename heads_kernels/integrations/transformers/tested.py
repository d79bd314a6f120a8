"""The tested families of transformers models; `docs/transformers.md` has a row for each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_SELF: Final = ("head_mask",)
_SEQ2SEQ: Final = ("head_mask", "decoder_head_mask", "cross_attn_head_mask")


@dataclass(frozen=True)
class Tested:
    """What `use` supports for a family of models.

    Attributes:
        model: the class of the tiny random model in the tests.
        head_masks: supported arguments of `model(...)`.
        pruning: whether its heads are known in its weights, so that they can be pruned: a pruned head gives the same
            outputs as a closed one.
        output_gate: how the family gates the output of attention, or "".
        fused: whether that gate and attention run as one op.
    """

    model: str
    head_masks: tuple[str, ...] = _SELF
    pruning: bool = True
    output_gate: str = ""
    fused: bool = True


_ELEMENT: Final = "sigmoid, per element"
_HEAD: Final = "sigmoid, per token and head"

#: By the `model_type` of the config.
TESTED: Final[dict[str, Tested]] = {
    "albert": Tested("AlbertModel"),
    "bart": Tested("BartModel", head_masks=_SEQ2SEQ),
    "beit": Tested("BeitModel"),
    "bert": Tested("BertModel"),
    "bloom": Tested("BloomForCausalLM", pruning=False),
    "deit": Tested("DeiTModel"),
    "distilbert": Tested("DistilBertModel"),
    "electra": Tested("ElectraModel"),
    "flint": Tested("FlintForCausalLM"),
    "gemma2": Tested("Gemma2ForCausalLM"),
    "gemma3_text": Tested("Gemma3ForCausalLM"),
    "gemma3n_text": Tested("Gemma3nForCausalLM"),
    "gpt2": Tested("GPT2LMHeadModel"),
    "gpt_oss": Tested("GptOssForCausalLM"),
    "granite_swa": Tested("GraniteSWAForCausalLM"),
    "granitemoe_swa": Tested("GraniteMoeSWAForCausalLM"),
    "layoutlmv3": Tested("LayoutLMv3Model"),
    "llama": Tested("LlamaForCausalLM"),
    "longt5": Tested("LongT5Model", head_masks=_SEQ2SEQ[1:], pruning=False),
    "marian": Tested("MarianModel", head_masks=_SEQ2SEQ),
    "mimo_v2_flash": Tested("MiMoV2FlashForCausalLM"),
    "mistral": Tested("MistralForCausalLM"),
    "modernbert": Tested("ModernBertModel"),
    "mpnet": Tested("MPNetModel", pruning=False),
    "mpt": Tested("MptForCausalLM", pruning=False),
    "mt5": Tested("MT5Model", head_masks=_SEQ2SEQ),
    "openai_privacy_filter": Tested("OpenAIPrivacyFilterModel"),
    "qwen2": Tested("Qwen2ForCausalLM"),
    "qwen3": Tested("Qwen3ForCausalLM"),
    "roberta": Tested("RobertaModel"),
    "swin": Tested("SwinModel"),
    "swinv2": Tested("Swinv2Model", pruning=False),
    "switch_transformers": Tested("SwitchTransformersModel", head_masks=_SEQ2SEQ),
    "t5": Tested("T5Model", head_masks=_SEQ2SEQ),
    "t5gemma": Tested("T5GemmaModel", head_masks=_SEQ2SEQ),
    "umt5": Tested("UMT5Model", head_masks=_SEQ2SEQ, pruning=False),
    "vaultgemma": Tested("VaultGemmaForCausalLM"),
    "vit": Tested("ViTModel"),
    "afmoe": Tested("AfmoeForCausalLM", output_gate=_ELEMENT),
    "bailing_hybrid": Tested("BailingHybridForCausalLM", pruning=False, output_gate=_HEAD),
    "beam": Tested("BeamForCausalLM", output_gate=_ELEMENT),
    "hrm_text": Tested("HrmTextForCausalLM", output_gate=_ELEMENT),
    "laguna": Tested("LagunaForCausalLM", output_gate="softplus, per token and head"),
    "lfm3": Tested("Lfm3ForCausalLM", output_gate=_HEAD),
    "muse_glimmer_text": Tested("MuseGlimmerTextModel", output_gate=_ELEMENT),
    "qwen3_5_moe_text": Tested("Qwen3_5MoeForCausalLM", output_gate=_ELEMENT),
    "qwen3_5_text": Tested("Qwen3_5ForCausalLM", output_gate=_ELEMENT),
    "qwen3_next": Tested("Qwen3NextForCausalLM", output_gate=_ELEMENT),
    "step3p7_text": Tested("Step3p7TextModel", output_gate=_HEAD),
    "muse_spark_text": Tested(
        "MuseSparkTextModel", pruning=False, output_gate=_ELEMENT, fused=False
    ),
    "neomme": Tested("NeoMMEModel", pruning=False, output_gate=_ELEMENT, fused=False),
}
