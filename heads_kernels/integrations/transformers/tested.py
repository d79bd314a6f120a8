"""The families of transformers models that are tested, and what holds for each: data, and the table made of it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Final

import transformers

from heads_kernels.heads.layouts import LAYOUTS

_SELF: Final = ("head_mask",)
_SEQ2SEQ: Final = ("head_mask", "decoder_head_mask", "cross_attn_head_mask")


@dataclass(frozen=True)
class Tested:
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
TESTED: Final[dict[str, Tested]] = {
    "albert": Tested("AlbertModel", note="`[L, H]`: a row for each run of the shared layer"),
    "bart": Tested("BartModel", head_masks=_SEQ2SEQ),
    "bert": Tested("BertModel"),
    "deit": Tested("DeiTModel"),
    "distilbert": Tested("DistilBertModel"),
    "electra": Tested("ElectraModel"),
    "gemma3_text": Tested("Gemma3ForCausalLM"),
    "gpt2": Tested("GPT2LMHeadModel"),
    "llama": Tested("LlamaForCausalLM"),
    "marian": Tested("MarianModel", head_masks=_SEQ2SEQ),
    "mistral": Tested("MistralForCausalLM"),
    "modernbert": Tested("ModernBertModel"),
    "mt5": Tested("MT5Model", bias=True, head_masks=_SEQ2SEQ, statistics=False, note=_BIAS),
    "qwen2": Tested("Qwen2ForCausalLM"),
    "qwen3": Tested("Qwen3ForCausalLM"),
    "roberta": Tested("RobertaModel"),
    "t5": Tested("T5Model", bias=True, head_masks=_SEQ2SEQ, statistics=False, note=_BIAS),
    "vit": Tested("ViTModel"),
    "afmoe": Tested("AfmoeForCausalLM", output_gate=_ELEMENT, fused=True),
    "bailing_hybrid": Tested(
        "BailingHybridForCausalLM", output_gate=_HEAD, fused=True, note=_HYBRID
    ),
    "beam": Tested("BeamForCausalLM", output_gate=_ELEMENT, fused=True),
    "hrm_text": Tested(
        "HrmTextForCausalLM",
        output_gate=_ELEMENT,
        fused=True,
        note="rows of a head mask are layers of a stack; both stacks read them",
    ),
    "laguna": Tested("LagunaForCausalLM", output_gate="softplus, by token and head", fused=True),
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
        note="a norm stands between attention and the gate",
    ),
    "neomme": Tested(
        "NeoMMEModel",
        output_gate=_ELEMENT,
        note="the values are projected out of the output before the gate",
    ),
}


def table() -> str:
    """`TESTED` in Markdown, a line each; `hk.heads` knows a family by the attention class in its file."""
    header = (
        "family",
        "tested with",
        "attention",
        "output gate",
        "head masks",
        "statistics",
        "`hk.heads`",
        "",
    )
    rows = [header, ("---",) * len(header)]
    for name, tested in TESTED.items():
        gate = tested.output_gate and f"{tested.output_gate}: {'' if tested.fused else 'not '}fused"
        classes = vars(sys.modules[getattr(transformers, tested.model).__module__])
        rows.append(
            (
                f"`{name}`",
                f"`{tested.model}`",
                "SDPA, times the gates" if tested.bias else "operator",
                gate,
                ", ".join(f"`{mask}`" for mask in tested.head_masks),
                "yes" if tested.statistics else "no",
                "no" if LAYOUTS.keys().isdisjoint(classes) else "yes",
                tested.note,
            )
        )
    return "\n".join(f"| {' | '.join(row)} |".replace("|  |", "| |") for row in rows)
