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
    """

    model: str
    head_masks: tuple[str, ...] = _SELF
    pruning: bool = True


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
    "layoutlmv3": Tested("LayoutLMv3Model", pruning=False),
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
    "swin": Tested("SwinModel", pruning=False),
    "swinv2": Tested("Swinv2Model", pruning=False),
    "switch_transformers": Tested("SwitchTransformersModel", head_masks=_SEQ2SEQ),
    "t5": Tested("T5Model", head_masks=_SEQ2SEQ),
    "t5gemma": Tested("T5GemmaModel", head_masks=_SEQ2SEQ),
    "umt5": Tested("UMT5Model", head_masks=_SEQ2SEQ, pruning=False),
    "vaultgemma": Tested("VaultGemmaForCausalLM"),
    "vit": Tested("ViTModel"),
    "afmoe": Tested("AfmoeForCausalLM"),
    "bailing_hybrid": Tested("BailingHybridForCausalLM", pruning=False),
    "beam": Tested("BeamForCausalLM"),
    "hrm_text": Tested("HrmTextForCausalLM"),
    "laguna": Tested("LagunaForCausalLM"),
    "lfm3": Tested("Lfm3ForCausalLM"),
    "muse_glimmer_text": Tested("MuseGlimmerTextModel"),
    "qwen3_5_moe_text": Tested("Qwen3_5MoeForCausalLM"),
    "qwen3_5_text": Tested("Qwen3_5ForCausalLM"),
    "qwen3_next": Tested("Qwen3NextForCausalLM"),
    "step3p7_text": Tested("Step3p7TextModel"),
    "muse_spark_text": Tested("MuseSparkTextModel", pruning=False),
    "neomme": Tested("NeoMMEModel", pruning=False),
}
