"""The families of transformers models that are tested, and what holds for each: data, and the table made of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_SELF: Final = ("head_mask",)
_SEQ2SEQ: Final = ("head_mask", "decoder_head_mask", "cross_attn_head_mask")


@dataclass(frozen=True)
class Family:
    """What `use` gives a family of models.

    Attributes:
        model: the class that the tests make a tiny random model of.
        bias: scores have an additive bias: attention runs as SDPA, and its output times the gates.
        output_gate: how the family gates the output of attention; "" where it does not.
        fused: whether that gate and attention run as one op.
        head_masks: arguments of `model(...)` that are honoured.
        statistics: whether `output_attentions=True` gives `hk.AttentionStatistics`.
        note: what else is to be known.
    """

    model: str
    bias: bool = False
    output_gate: str = ""
    fused: bool = False
    head_masks: tuple[str, ...] = _SELF
    statistics: bool = True
    note: str = ""


_ELEMENT: Final = "sigmoid, by element"
_HEAD: Final = "sigmoid, by token and head"
_HYBRID: Final = "layers of linear attention stay as they are"
_BIAS: Final = (
    "relative positions are a bias; in cross-attention that bias is 0, and is added all the same"
)

#: By the `model_type` of the config.
FAMILIES: Final[dict[str, Family]] = {
    "albert": Family("AlbertModel", note="`[L, H]`: a row for each run of the shared layer"),
    "bart": Family("BartModel", head_masks=_SEQ2SEQ),
    "bert": Family("BertModel"),
    "deit": Family("DeiTModel"),
    "distilbert": Family("DistilBertModel"),
    "electra": Family("ElectraModel"),
    "gemma3_text": Family("Gemma3ForCausalLM"),
    "gpt2": Family(
        "GPT2LMHeadModel",
        statistics=False,
        note="the model drops `output_attentions` before it reaches a layer",
    ),
    "llama": Family("LlamaForCausalLM"),
    "marian": Family("MarianModel", head_masks=_SEQ2SEQ),
    "mistral": Family("MistralForCausalLM"),
    "modernbert": Family("ModernBertModel"),
    "mt5": Family("MT5Model", bias=True, head_masks=_SEQ2SEQ, statistics=False, note=_BIAS),
    "qwen2": Family("Qwen2ForCausalLM"),
    "qwen3": Family("Qwen3ForCausalLM"),
    "roberta": Family("RobertaModel"),
    "t5": Family("T5Model", bias=True, head_masks=_SEQ2SEQ, statistics=False, note=_BIAS),
    "vit": Family("ViTModel"),
    "afmoe": Family("AfmoeForCausalLM", output_gate=_ELEMENT, fused=True),
    "bailing_hybrid": Family(
        "BailingHybridForCausalLM", output_gate=_HEAD, fused=True, note=_HYBRID
    ),
    "beam": Family("BeamForCausalLM", output_gate=_ELEMENT, fused=True),
    "hrm_text": Family(
        "HrmTextForCausalLM",
        output_gate=_ELEMENT,
        fused=True,
        note="rows of a head mask are layers of a stack; both stacks read them",
    ),
    "laguna": Family("LagunaForCausalLM", output_gate="softplus, by token and head", fused=True),
    "lfm3": Family("Lfm3ForCausalLM", output_gate=_HEAD, fused=True),
    "muse_glimmer_text": Family("MuseGlimmerTextModel", output_gate=_ELEMENT, fused=True),
    "qwen3_5_moe_text": Family(
        "Qwen3_5MoeForCausalLM", output_gate=_ELEMENT, fused=True, note=_HYBRID
    ),
    "qwen3_5_text": Family("Qwen3_5ForCausalLM", output_gate=_ELEMENT, fused=True, note=_HYBRID),
    "qwen3_next": Family("Qwen3NextForCausalLM", output_gate=_ELEMENT, fused=True, note=_HYBRID),
    "step3p7_text": Family("Step3p7TextModel", output_gate=_HEAD, fused=True),
    "muse_spark_text": Family(
        "MuseSparkTextModel",
        output_gate=_ELEMENT,
        note="a norm stands between attention and the gate",
    ),
    "neomme": Family(
        "NeoMMEModel",
        output_gate=_ELEMENT,
        note="the values are projected out of the output before the gate",
    ),
}


def table() -> str:
    """`FAMILIES` in Markdown, a line each."""
    header = ("family", "tested with", "attention", "output gate", "head masks", "statistics", "")
    rows = [header, ("---",) * len(header)]
    for name, family in FAMILIES.items():
        gate = family.output_gate and f"{family.output_gate}: {'' if family.fused else 'not '}fused"
        rows.append(
            (
                f"`{name}`",
                f"`{family.model}`",
                "SDPA, times the gates" if family.bias else "operator",
                gate,
                ", ".join(f"`{mask}`" for mask in family.head_masks),
                "yes" if family.statistics else "no",
                family.note,
            )
        )
    return "\n".join(f"| {' | '.join(row)} |".replace("|  |", "| |") for row in rows)
