"""The tested families of transformers models, and the table generated from them."""

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

#: Others whose attention has one of the forms of `hk.heads` (`FORMS` in heads/layouts.py): tested are outputs under
#: `use`, gates, closed and pruned heads, saving.
OF_A_FORM: Final[tuple[str, ...]] = (
    "aimv2_text_model", "aimv2_vision_model", "apertus", "arcee", "aria_text", "biogpt", "blenderbot",
    "blenderbot-small", "chinese_clip_vision_model", "clip_text_model", "clip_vision_model", "cohere",
    "cohere2", "cohere2_moe", "cwm", "data2vec-audio", "data2vec-text", "dinov2_with_registers", "dinov3_vit",
    "dpt", "emu3_text_model", "ernie4_5", "esm", "exaone4", "exaone_moe", "glm", "glm4", "glm4_moe",
    "glmasr_encoder", "granitemoe", "granitemoeshared", "gte", "helium", "hubert", "hy_v3", "hyperclovax",
    "ijepa", "jais2", "jina_embeddings_v3", "kolibri1", "layoutlm", "lfm2", "llama4_text", "m2m_100", "mellum",
    "minimax", "minimax_m3_vl_text", "ministral3", "mllama_text_model", "modernbert-decoder", "molmo2_text",
    "nanochat", "nemotron", "nomic_bert", "olmo", "opt", "owlv2_text_model", "owlv2_vision_model", "phi",
    "phimoe", "pixio", "pixtral", "plbart", "qwen2_audio_encoder", "qwen3_vl_moe_text", "qwen3_vl_text",
    "roberta-prelayernorm", "roc_bert", "sapiens2", "seed_oss", "sew", "siglip2_text_model",
    "siglip_text_model", "siglip_vision_model", "solar_open", "stablelm", "tipsv2_text_model",
    "tipsv2_vision_model", "ultrabert", "unispeech", "unispeech-sat", "vit_msn", "voxtral_encoder",
    "voxtral_realtime_encoder", "wav2vec2", "whisper", "xlm-roberta-xl",
)  # fmt: skip

#: Others whose heads are not known in their weights, because norms, rotations or other projections are over all of
#: them: tested are outputs under `use`, gates, closed heads and analysis.
ATTENTION_ALONE: Final[tuple[str, ...]] = (
    "bitnet", "blip_2_vision_model", "deepseek_v2", "diffllama", "esmc", "flex_olmo",
    "glm4_moe_lite", "gpt_bigcode", "gpt_neox", "instructblip_vision_model", "internvl_vision",
    "janus_vision_model", "minicpm3", "minimax_m2", "mistral4", "olmo2", "olmo3",
    "olmo_hybrid", "olmoe", "persimmon", "phi3", "qianfan_ocr_vision", "sam3_vit_model", "wav2vec2-conformer",
)  # fmt: skip


def table() -> str:
    """`TESTED` in Markdown, a line each."""
    header = (
        "family",
        "tested with",
        "scores",
        "output gate",
        "head masks",
        "statistics",
        "pruning",
        "",
    )
    rows = [header, ("---",) * len(header)]
    for name, tested in TESTED.items():
        gate = tested.output_gate and f"{tested.output_gate}: {'' if tested.fused else 'not '}fused"
        rows.append(
            (
                f"`{name}`",
                f"`{tested.model}`",
                tested.scores,
                gate,
                ", ".join(f"`{mask}`" for mask in tested.head_masks),
                "yes" if tested.statistics else "no",
                "yes" if tested.pruning else "no",
                tested.note,
            )
        )
    return "\n".join(
        f"| {' | '.join(row)} |".replace("|  |", "| |").replace("|  |", "| |") for row in rows
    )


def of_a_form() -> str:
    """`OF_A_FORM` in Markdown."""
    return ", ".join(f"`{name}`" for name in OF_A_FORM)


def attention_alone() -> str:
    """`ATTENTION_ALONE` in Markdown."""
    return ", ".join(f"`{name}`" for name in ATTENTION_ALONE)
