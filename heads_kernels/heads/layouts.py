"""Where attention modules keep their projections: known classes by name, and forms that many classes share.

Hundreds of classes of transformers share half a dozen sets of names, and every release adds more. So a module is found
by the names of its projections, and `layout_check` verifies it by running it. The table by class holds what names do
not show: projections besides the four, and whether scores are products of weights, for conversion.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, reduce
from typing import Any, Final

from torch import nn

from heads_kernels.checks import refuse


@dataclass(frozen=True)
class HeadLayout:
    """Where a class of attention modules keeps its heads; paths are relative to the module.

    Attributes:
        name: of the layout, for messages.
        query, key, value, output: paths of the projections, each an `nn.Linear` or transformers' `Conv1D`. Of
            `first|second`, the first path that exists is used. Roles with the same path are in one fused projection, in
            the order query, key, value.
        inner: path of the module whose forward calls the attention operator, if it is not the module itself.
        head_dim, value_dim: paths of the widths of a head's key and value; "" for a value as wide as the key.
        beside: paths of other projections with rows for every query head: logits of an output gate, content biases.
            Paths that do not exist, or are None, are skipped.
        rows: names of parameters of the module that have one row per query head; those that are None are skipped.
        shared: whether all heads share query and key (collaborative attention).
        keeps_count: names of head counts that pruning does not change.
        scale: path of the factor of the scores; "" where it is `head_dim ** -0.5`.
        rotary: whether the position rotates features f and f + D/2 of queries and keys together (Su et al. 2021).
            Subclasses of such a class cannot be converted: they may do more.
        between: what else comes between the projections of queries and keys and their products, such as other rotary
            positions or norms. The scores are then not products of weights, and the layer cannot be converted.
        inputs: returns keyword arguments of a forward pass of a module, on the CPU in float32, to verify the layout
            (heads/layout_check.py). None: derived from the names of the arguments of its forward.
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
    rotary: bool = False
    between: str = ""
    inputs: Callable[[Any], Mapping[str, Any]] | None = None

    @property
    def projections(self) -> tuple[str, str, str, str]:
        """The paths of query, key, value and output."""
        return self.query, self.key, self.value, self.output

    def heads(self, holder: nn.Module) -> int:
        """The number of heads of a module that has these parts, by the sizes of its output projection."""
        width: int = at_path(holder, self.value_dim or self.head_dim)
        return size(at_path(holder, self.output), 0) // width


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

#: By the name of the class; also used for subclasses.
LAYOUTS: dict[str, HeadLayout] = {
    "GatedMultiheadAttention": HeadLayout(
        "hk.nn.GatedMultiheadAttention",
        output="out_proj",
        value_dim="value_dim",
        beside=("gate_proj",),
        rows=("alpha_logits",),
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
    "ModernBertAttention": HeadLayout(
        "ModernBERT", "Wqkv", "Wqkv", "Wqkv", "Wo", scale="", rotary=True
    ),
    **dict.fromkeys(
        (
            "LlamaAttention",
            "MistralAttention",
            "MixtralAttention",
            "Qwen2Attention",
            "GemmaAttention",
            "Gemma2Attention",
        ),
        HeadLayout("Llama", rotary=True),
    ),
    **dict.fromkeys(
        ("Qwen3Attention", "Gemma3Attention"),
        HeadLayout("Qwen3", between="norms of its queries and keys and rotary positions"),
    ),
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

#: Layouts of other modules that call transformers' attention function; hundreds of classes share these names. The first
#: whose parts all exist is used, if it fits (heads/layout_check.py).
FORMS: Final = (
    HeadLayout(
        "q_proj",
        output="o_proj|out_proj|dense|proj|projection_layer|Wo",
        value_dim="v_head_dim|head_dim",
    ),
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
    """The layout of the module's class, or of its nearest base class in `LAYOUTS`."""
    names = (base.__name__ for base in type(module).__mro__)
    return next((LAYOUTS[name] for name in names if name in LAYOUTS), None)


def form_of(module: nn.Module) -> HeadLayout | None:
    """The form of a transformers module, by the names of its parts; `misfit` checks whether it fits.

    Classes of a form cannot be converted, since what comes between their projections and scores is unknown.
    """
    for form in FORMS:
        inner = at_path(module, form.inner) if form.inner else module
        if (
            calls_interface(inner)
            and isinstance(at_path(module, form.head_dim), int)
            and all(is_projection(at_path(module, path)) for path in form.projections)
        ):
            rotary = "position_embeddings" in stock_arguments(type(inner))
            return replace(
                form,
                between=_ROTARY if rotary else _UNTESTED,
                rows=("sinks",) if isinstance(getattr(inner, "sinks", None), nn.Parameter) else (),
            )
    return None


def calls_interface(module: nn.Module) -> bool:
    """Whether a module calls transformers' attention function, or the operator instead of its own code."""
    kind: Any = type(module)
    forward = getattr(module, "forward", None)
    return getattr(forward, "calls_operator", False) or class_calls_interface(kind)


def stock_arguments(kind: Any) -> dict[str, inspect.Parameter]:
    """The parameters of the forward of modules of a class, without `self`."""
    return _parameters(inspect.unwrap(kind.forward))


@cache
def _parameters(forward: Any) -> dict[str, inspect.Parameter]:
    return dict(list(inspect.signature(forward).parameters.items())[1:])


@cache
def class_calls_interface(kind: Any) -> bool:
    """Whether the forward of a class refers to transformers' table of attention functions.

    No class says so itself, and a call would need arguments that fit it.
    """
    forward = inspect.unwrap(getattr(kind, "forward", kind))
    if not inspect.isfunction(forward):
        return False
    found = inspect.getclosurevars(forward).globals.values()
    return any(type(each).__name__ == "AttentionInterface" for each in found)


def check_has_parts(name: str, holder: nn.Module, layout: HeadLayout) -> None:
    """Classes are found by name: refuse one that is another class of that name."""
    instead = "register another class name for it (hk.heads.register_layout), or rename the class"
    for path in (*layout.projections, layout.head_dim, layout.value_dim):
        found = at_path(holder, path) if path else 0
        if found is None:
            was = f"is a {type(holder).__name__} without {path!r}, where {layout.name} has it"
            refuse(name, was, instead)
        if path in layout.projections and not is_projection(found):
            was = f"is projected by a {type(found).__name__} at {path!r}, which has no in_features"
            refuse(name, was, "call this before the projection is wrapped")


#: Names of the input and of the output size, of `nn.Linear` and of `Conv1D`. A packed weight has another shape.
_SIZES: Final = (("in_features", "nx"), ("out_features", "nf"))


def size(linear: Any, of: int = 1) -> int:
    """Input features (`of` = 0) or output features (1) of a projection."""
    features: int = next(getattr(linear, name) for name in _SIZES[of] if hasattr(linear, name))
    return features


def is_projection(module: Any) -> bool:
    """Whether it has the sizes of an `nn.Linear` or of transformers' `Conv1D`."""
    return any(hasattr(module, name) for name in _SIZES[0])


def at_path(module: Any, path: str) -> Any:
    """The attribute at a dotted path, of `first|second` the first that exists; None if none does."""
    for alternative in path.split("|"):
        found = reduce(lambda at, part: getattr(at, part, None), alternative.split("."), module)
        if found is not None:
            return found
    return None
