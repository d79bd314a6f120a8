"""Where attention modules keep their projections: classes that the package knows by name, and forms that many share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, reduce
from typing import Any, Final

from torch import nn


@dataclass(frozen=True)
class HeadLayout:
    """Where a class of attention modules keeps what its heads consist of; paths are relative to the module.

    Attributes:
        name: of the layout, for people.
        query, key, value, output: paths of the projections, each an `nn.Linear` or transformers' `Conv1D`. Of two paths
            with a bar between them the first that exists counts. Roles with the same path are in one fused projection,
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
        inputs: gives the keyword arguments of a forward pass of a module, on the CPU in float32, for the check that the
            layout fits (heads/layout_check.py). None: made from the names of the arguments of its forward.
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
    scale: str = "scaling|scale"
    between: str = ""
    inputs: Callable[[Any], Mapping[str, Any]] | None = None

    @property
    def projections(self) -> tuple[str, str, str, str]:
        """The paths of query, key, value and output."""
        return self.query, self.key, self.value, self.output


_ROTARY = "rotary positions"
_UNTESTED = "what conversion is not tested with"
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
    **dict.fromkeys(("T5Attention", "MT5Attention", "SwitchTransformersAttention"), _T5),
    **dict.fromkeys(
        ("BartAttention", "MBartAttention", "MarianAttention", "PegasusAttention"), _BART
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

#: Of other modules whose forward asks transformers for an attention function: the names that hundreds of classes share.
#: The first whose parts are all there counts, and only if it fits (heads/layout_check.py).
FORMS: Final = (
    HeadLayout("q_proj", output="o_proj|out_proj|dense|proj|projection_layer|Wo"),
    HeadLayout(
        "query",
        "query",
        "key",
        "value",
        "dense|output|proj",
        head_dim="head_dim|attention_head_size",
    ),
    replace(_BERT, name="self.query"),
    HeadLayout(
        "attention.query",
        "attention.query",
        "attention.key",
        "attention.value",
        "output.dense",
        inner="attention",
        head_dim="attention.attention_head_size",
    ),
    HeadLayout("q", "q", "k", "v", "proj"),
    HeadLayout(
        "linear_q", "linear_q", "linear_k", "linear_v", "linear_out", head_dim="head_size|head_dim"
    ),
    HeadLayout("qkv", "qkv", "qkv", "qkv", "proj|projection"),
)


def layout_of(module: nn.Module) -> HeadLayout | None:
    """The layout of the module's class, or of the nearest of its base classes that is in the table."""
    names = (base.__name__ for base in type(module).__mro__)
    return next((LAYOUTS[name] for name in names if name in LAYOUTS), None)


def form_of(module: nn.Module) -> HeadLayout | None:
    """The form of a module of transformers, by the names of its parts; whether it fits, `misfit` finds out.

    Classes of a form are not converted: what stands between their projections and their scores is not known.
    """
    for form in FORMS:
        inner = at_path(module, form.inner) if form.inner else module
        if (
            calls_interface(inner)
            and isinstance(at_path(module, form.head_dim), int)
            and all(is_projection(at_path(module, path)) for path in form.projections)
        ):
            rotary = "position_embeddings" in inspect.signature(type(inner).forward).parameters
            return replace(
                form,
                between=_ROTARY if rotary else _UNTESTED,
                rows=("sinks",) if isinstance(getattr(inner, "sinks", None), nn.Parameter) else (),
            )
    return None


def calls_interface(module: nn.Module) -> bool:
    """Whether a module asks transformers for an attention function, or calls the operator in the place of its own."""
    kind: Any = type(module)
    if getattr(kind, "calls_operator", False):
        return True
    return _calls_interface(getattr(kind, "stock", kind))


@cache
def _calls_interface(kind: Any) -> bool:
    code = getattr(inspect.unwrap(getattr(kind, "forward", kind)), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def is_projection(module: Any) -> bool:
    """Whether it has the sizes of an `nn.Linear` or of transformers' `Conv1D`."""
    return hasattr(module, "in_features") or hasattr(module, "nx")


def at_path(module: Any, path: str) -> Any:
    """What is at a dotted path; of alternatives `first|second` the first that exists; None where nothing does."""
    for alternative in path.split("|"):
        found = reduce(lambda at, part: getattr(at, part, None), alternative.split("."), module)
        if found is not None:
            return found
    return None
