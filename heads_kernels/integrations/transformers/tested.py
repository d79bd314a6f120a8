"""The tested families of transformers models, and what each supports."""

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
        scores: score terms besides products of queries and keys, or "".
        output_gate: how the family gates the output of attention, or "".
        fused: whether that gate and attention run as one op.
        head_masks: supported arguments of `model(...)`.
        statistics: whether `output_attentions=True` returns `hk.AttentionStatistics`.
        pruning: whether its heads are known in its weights, so that they can be pruned: a pruned head gives the same
            outputs as a closed one.
        note: anything else.
    """

    model: str
    scores: str = ""
    output_gate: str = ""
    fused: bool = False
    head_masks: tuple[str, ...] = _SELF
    statistics: bool = True
    pruning: bool = True
    note: str = ""


_ELEMENT: Final = "sigmoid, per element"
_HEAD: Final = "sigmoid, per token and head"
_HYBRID: Final = "linear attention layers are unchanged"
_OFFSETS: Final = "offset bias"
_KEYS: Final = "ALiBi by key position"
_DENSE: Final = "2-D bias"
_BY_USE: Final = "requires `use`"
_STAGES: Final = (
    "rows of a head mask `[L, H]` are stages, which have different numbers of heads by default"
)
_CAP: Final = "softcap"
_SINKS: Final = "sinks"
_STOCK_LAYERS: Final = "the local attention of the encoder is unchanged"

#: By the `model_type` of the config.
TESTED: Final[dict[str, Tested]] = {
    "albert": Tested("AlbertModel", note="`[L, H]`: a row for each run of the shared layer"),
    "bart": Tested("BartModel", head_masks=_SEQ2SEQ),
    "beit": Tested("BeitModel", scores=_DENSE),
    "bert": Tested("BertModel"),
    "bloom": Tested("BloomForCausalLM", scores=_KEYS, pruning=False, note=_BY_USE),
    "data2vec-vision": Tested("Data2VecVisionModel", scores=_DENSE, pruning=False, note=_BY_USE),
    "deit": Tested("DeiTModel"),
    "distilbert": Tested("DistilBertModel"),
    "electra": Tested("ElectraModel"),
    "flint": Tested("FlintForCausalLM", scores=_SINKS),
    "gemma2": Tested("Gemma2ForCausalLM", scores=_CAP),
    "gemma3_text": Tested("Gemma3ForCausalLM"),
    "gemma3n_text": Tested("Gemma3nForCausalLM"),
    "gpt2": Tested("GPT2LMHeadModel"),
    "gpt_oss": Tested("GptOssForCausalLM", scores=_SINKS),
    "granite_swa": Tested("GraniteSWAForCausalLM", scores=_SINKS),
    "granitemoe_swa": Tested("GraniteMoeSWAForCausalLM", scores=_SINKS),
    "layoutlmv3": Tested("LayoutLMv3Model", scores=_DENSE, pruning=False, note=_BY_USE),
    "llama": Tested("LlamaForCausalLM"),
    "longt5": Tested(
        "LongT5Model", scores=_OFFSETS, head_masks=_SEQ2SEQ[1:], pruning=False, note=_STOCK_LAYERS
    ),
    "marian": Tested("MarianModel", head_masks=_SEQ2SEQ),
    "mimo_v2_flash": Tested("MiMoV2FlashForCausalLM", scores=_SINKS),
    "mistral": Tested("MistralForCausalLM"),
    "modernbert": Tested("ModernBertModel"),
    "mpnet": Tested("MPNetModel", scores=_OFFSETS, pruning=False, note=_BY_USE),
    "mpt": Tested("MptForCausalLM", scores=_KEYS, pruning=False, note=_BY_USE),
    "mt5": Tested("MT5Model", scores=_OFFSETS, head_masks=_SEQ2SEQ),
    "openai_privacy_filter": Tested("OpenAIPrivacyFilterModel", scores=_SINKS),
    "qwen2": Tested("Qwen2ForCausalLM"),
    "qwen3": Tested("Qwen3ForCausalLM"),
    "roberta": Tested("RobertaModel"),
    "swin": Tested("SwinModel", scores=_DENSE, pruning=False, note=_STAGES),
    "swinv2": Tested("Swinv2Model", scores=_DENSE, pruning=False, note=f"{_STAGES}; {_BY_USE}"),
    "switch_transformers": Tested("SwitchTransformersModel", scores=_OFFSETS, head_masks=_SEQ2SEQ),
    "t5": Tested("T5Model", scores=_OFFSETS, head_masks=_SEQ2SEQ),
    "t5gemma": Tested("T5GemmaModel", scores=_CAP, head_masks=_SEQ2SEQ),
    "umt5": Tested(
        "UMT5Model",
        scores=_OFFSETS,
        head_masks=_SEQ2SEQ,
        pruning=False,
        note="the zeros added by cross-attention are an ordinary bias",
    ),
    "vaultgemma": Tested("VaultGemmaForCausalLM", scores=_CAP),
    "vit": Tested("ViTModel"),
    "afmoe": Tested("AfmoeForCausalLM", output_gate=_ELEMENT, fused=True),
    "bailing_hybrid": Tested(
        "BailingHybridForCausalLM", output_gate=_HEAD, fused=True, pruning=False, note=_HYBRID
    ),
    "beam": Tested("BeamForCausalLM", output_gate=_ELEMENT, fused=True),
    "hrm_text": Tested(
        "HrmTextForCausalLM",
        output_gate=_ELEMENT,
        fused=True,
        note="rows of a head mask are layers of one stack; both stacks use them",
    ),
    "laguna": Tested("LagunaForCausalLM", output_gate="softplus, per token and head", fused=True),
    "lfm3": Tested("Lfm3ForCausalLM", output_gate=_HEAD, fused=True),
    "muse_glimmer_text": Tested("MuseGlimmerTextModel", output_gate=_ELEMENT, fused=True),
    "qwen3_5_moe_text": Tested(
        "Qwen3_5MoeForCausalLM", output_gate=_ELEMENT, fused=True, note=_HYBRID
    ),
    "qwen3_5_text": Tested("Qwen3_5ForCausalLM", output_gate=_ELEMENT, fused=True, note=_HYBRID),
    "qwen3_next": Tested("Qwen3NextForCausalLM", output_gate=_ELEMENT, fused=True, note=_HYBRID),
    "step3p7_text": Tested("Step3p7TextModel", output_gate=_HEAD, fused=True),
    "muse_spark_text": Tested(
        "MuseSparkTextModel",
        output_gate=_ELEMENT,
        pruning=False,
        note="a norm comes between attention and the gate",
    ),
    "neomme": Tested(
        "NeoMMEModel",
        output_gate=_ELEMENT,
        pruning=False,
        note="the values are projected out of the output before the gate",
    ),
}
