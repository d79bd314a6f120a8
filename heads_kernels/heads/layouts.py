"""The table of attention layers that the package knows: where each family of models keeps its projections."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class HeadLayout:
    """Where a class of attention modules keeps what its heads consist of; paths are relative to the module.

    Attributes:
        name: of the layout, for people.
        query, key, value, output: paths of the projections, each an `nn.Linear` or transformers' `Conv1D`. Of two paths
            with a bar between them the first that exists counts. Roles with the same path lie in one fused projection,
            in the order query, key, value.
        inner: path of the module whose forward calls the attention operator, where that is not the module itself.
        head_dim, value_dim: paths of the widths of a head's key and value; "" for a value as wide as the key.
        beside: paths of projections with rows for every query head besides those four: logits of an output gate,
            content biases. A path that doesn't exist, or is None, is left out.
        rows: names of parameters of the module that have one row for each query head.
        shared: all heads share query and key (collaborative attention): those two belong to no head.
        keeps_count: names of head counts that stay as they are when heads are pruned.
        scale: path of the factor of the scores.
        between: what stands between the projections of queries and keys and their products, so that no product of
            weights gives the scores: rotary positions, norms. Such layers have no collaborative form.
    """

    name: str
    query: str = "q_proj"
    key: str = "k_proj"
    value: str = "v_proj"
    output: str = "o_proj"
    inner: str = ""
    head_dim: str = "head_dim"
    value_dim: str = ""
    beside: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    shared: bool = False
    keeps_count: tuple[str, ...] = ()
    scale: str = "scaling"
    between: str = ""


_ROTARY = "rotary positions"
_BERT = HeadLayout(
    "BERT",
    query="self.query",
    key="self.key",
    value="self.value",
    output="output.dense",
    inner="self",
    head_dim="self.attention_head_size",
    scale="self.scaling",
)
# `n_heads` of T5 counts the heads of the position bias, which layers hand on to each other.
_T5 = HeadLayout("T5", "q", "k", "v", "o", head_dim="key_value_proj_dim", keeps_count=("n_heads",))
_LLAMA = HeadLayout("Llama", between=_ROTARY)
_BART = HeadLayout("BART", output="out_proj")

#: By the name of the class; subclasses are served too.
LAYOUTS: dict[str, HeadLayout] = {
    "GatedMultiheadAttention": HeadLayout(
        "hk.nn.GatedMultiheadAttention",
        output="out_proj",
        value_dim="value_dim",
        beside=("gate_proj",),
        scale="scale",
    ),
    "CollaborativeMultiheadAttention": HeadLayout(
        "hk.nn.CollaborativeMultiheadAttention",
        output="out_proj",
        head_dim="shared_dim",
        value_dim="value_dim",
        beside=("content_proj", "gate_proj"),
        rows=("mixing",),
        shared=True,
        scale="scale",
    ),
    **dict.fromkeys(
        (
            "BertAttention",
            "BertGenerationAttention",
            "CamembertAttention",
            "ElectraAttention",
            "ErnieAttention",
            "RobertaAttention",
            "XLMRobertaAttention",
        ),
        _BERT,
    ),
    "AlbertAttention": HeadLayout(
        "ALBERT", "query", "key", "value", "dense", head_dim="attention_head_size"
    ),
    "DistilBertSelfAttention": HeadLayout(
        "DistilBERT", "q_lin", "k_lin", "v_lin", "out_lin", head_dim="attention_head_size"
    ),
    "ModernBertAttention": HeadLayout("ModernBERT", "Wqkv", "Wqkv", "Wqkv", "Wo", between=_ROTARY),
    **dict.fromkeys(
        ("ViTAttention", "DeiTAttention", "Dinov2Attention", "ViTMAEAttention"), HeadLayout("ViT")
    ),
    "GPT2Attention": HeadLayout("GPT-2", "q_attn|c_attn", "c_attn", "c_attn", "c_proj"),
    **dict.fromkeys(("T5Attention", "MT5Attention"), _T5),
    **dict.fromkeys(
        ("BartAttention", "MBartAttention", "MarianAttention", "PegasusAttention"), _BART
    ),
    **dict.fromkeys(
        (
            "EuroBertAttention",
            "Gemma3Attention",
            "GemmaAttention",
            "GraniteAttention",
            "LlamaAttention",
            "MinistralAttention",
            "MistralAttention",
            "MixtralAttention",
            "Qwen2Attention",
            "Qwen2MoeAttention",
            "Qwen3Attention",
            "Qwen3MoeAttention",
            "SmolLM3Attention",
            "Starcoder2Attention",
        ),
        _LLAMA,
    ),
    # Their output is gated: the logits are other rows of q_proj, or a projection of their own.
    **dict.fromkeys(
        ("Qwen3NextAttention", "Qwen3_5Attention", "Qwen3_5MoeAttention"),
        HeadLayout("Qwen3-Next", between=_ROTARY),
    ),
    **dict.fromkeys(
        ("AfmoeAttention", "HrmTextAttention", "MuseGlimmerTextAttention"),
        HeadLayout("AFMoE", beside=("gate_proj",), between=_ROTARY),
    ),
    "BeamAttention": HeadLayout(
        "BEAM", beside=("gate_proj",), rows=("gate_bias",), between=_ROTARY
    ),
    **dict.fromkeys(
        ("LagunaAttention", "Lfm3Attention", "Step3p7Attention"),
        HeadLayout("Laguna", beside=("g_proj",), between=_ROTARY),
    ),
}


def register_layout(class_name: str, layout: HeadLayout) -> None:
    """Let `attention_layers` find modules of the class of this name, and of its subclasses, as `layout` says."""
    LAYOUTS[class_name] = layout


def layout_of(module: nn.Module) -> HeadLayout | None:
    """The layout of the module's class, or of the nearest of its base classes that is in the table."""
    names = (base.__name__ for base in type(module).__mro__)
    return next((LAYOUTS[name] for name in names if name in LAYOUTS), None)
