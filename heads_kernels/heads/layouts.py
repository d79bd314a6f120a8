"""Where attention modules keep their projections: known classes by name, and forms that many classes share.

Hundreds of classes of transformers share half a dozen sets of names, and every release adds more. So a module is found
by the names of its projections, and `projected_layers` verifies it by running it. The table by class holds what names
do not show: that scores are products of weights, for conversion.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Final

from torch import nn

from heads_kernels.checks import refuse
from heads_kernels.heads.interface import calls_interface, stock_arguments


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
        rows: names of parameters of the module that have one row per query head; those that do not exist are skipped.
        shared: whether all heads share query and key (collaborative attention).
        keeps_count: names of head counts that pruning does not change.
        scale: path of the factor of the scores; "" where it is `head_dim ** -0.5`.
        rotary: whether the position rotates features f and f + D/2 of queries and keys together (Su et al. 2021).
            Subclasses of such a class cannot be converted: they may do more.
        between: what else comes between the projections of queries and keys and their products, such as other rotary
            positions or norms. The scores are then not products of weights, and the layer cannot be converted.
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

    @property
    def projections(self) -> tuple[str, str, str, str]:
        """The paths of query, key, value and output."""
        return self.query, self.key, self.value, self.output

    def heads(self, holder: nn.Module) -> int:
        """The number of heads of a module that has these parts, by the sizes of its output projection."""
        width: int = at_path(holder, self.value_dim or self.head_dim)
        return size(at_path(holder, self.output), 0) // width


# ---------------------------------------------------------------------- forms: hundreds of classes share these names
_ROTARY = "rotary positions"
_UNTESTED = "what conversion is not tested with"
_Q_PROJ = HeadLayout(
    "q_proj",
    output="o_proj|out_proj|dense|proj|projection_layer|Wo",
    value_dim="v_head_dim|head_dim",
    beside=("gate_proj", "g_proj"),
    rows=("sinks", "gate_bias"),
)
_QUERY = HeadLayout("query", "query", "key", "value", "dense|output|proj", head_dim="head_dim|attention_head_size")


def _around(inner: str) -> HeadLayout:
    """A module with the output projection around one with the others, which calls the attention function."""
    query, key, value = (f"{inner}.{role}" for role in ("query", "key", "value"))
    width, scale = f"{inner}.attention_head_size", f"{inner}.scaling"
    return HeadLayout(query, query, key, value, "output.dense", inner=inner, head_dim=width, scale=scale)


_SELF_QUERY = _around("self")

#: Layouts of modules that call transformers' attention function. The first whose parts all exist is used, if it fits.
FORMS: Final = (
    _Q_PROJ,
    _QUERY,
    _SELF_QUERY,
    _around("attention"),
    HeadLayout("q", "q", "k", "v", "proj"),
    HeadLayout("linear_q", "linear_q", "linear_k", "linear_v", "linear_out", head_dim="head_size|head_dim"),
    HeadLayout("qkv", "qkv", "qkv", "qkv", "proj|projection"),
)

# ---------------------------------------------------------------------- classes
_OURS = HeadLayout("hk.nn", output="out_proj", value_dim="value_dim", beside=("content_proj", "gate_proj"))
_OF_BERT = (
    "BertAttention", "BertGenerationAttention", "CamembertAttention", "ElectraAttention", "ErnieAttention",
    "RobertaAttention", "XLMRobertaAttention",
)  # fmt: skip
_OF_BART_AND_VIT = (
    "BartAttention", "DeiTAttention", "Dinov2Attention", "MBartAttention", "MarianAttention", "PegasusAttention",
    "ViTAttention", "ViTMAEAttention",
)  # fmt: skip
_OF_LLAMA = (
    "Gemma2Attention", "GemmaAttention", "LlamaAttention", "MistralAttention", "MixtralAttention", "Qwen2Attention",
)  # fmt: skip

#: By the name of the class; also used for subclasses. Those of transformers are the ones that can be converted.
LAYOUTS: dict[str, HeadLayout] = {
    "GatedMultiheadAttention": replace(_OURS, rows=("alpha_logits",)),
    "CollaborativeMultiheadAttention": replace(_OURS, head_dim="shared_dim", rows=("mixing",), shared=True),
    **dict.fromkeys(_OF_BERT, _SELF_QUERY),
    "AlbertAttention": _QUERY,
    **dict.fromkeys(_OF_BART_AND_VIT, _Q_PROJ),
    **dict.fromkeys(_OF_LLAMA, replace(_Q_PROJ, rotary=True)),
    "ModernBertAttention": HeadLayout("ModernBERT", "Wqkv", "Wqkv", "Wqkv", "Wo", scale="", rotary=True),
    "DistilBertSelfAttention": HeadLayout(
        "DistilBERT", "q_lin", "k_lin", "v_lin", "out_lin", head_dim="attention_head_size"
    ),
    "GPT2Attention": HeadLayout("GPT-2", "q_attn|c_attn", "c_attn", "c_attn", "c_proj"),
    # `n_heads` counts the heads of the position bias, which layers hand on to each other.
    **dict.fromkeys(
        ("MT5Attention", "SwitchTransformersAttention", "T5Attention"),
        HeadLayout("T5", "q", "k", "v", "o", head_dim="key_value_proj_dim", keeps_count=("n_heads",)),
    ),
}


def register_layout(class_name: str, layout: HeadLayout) -> None:
    """Let `attention_layers` find modules of the class `class_name` and its subclasses, with this layout.

    The layout is verified once per class and shape, before its first use: a closed head is compared with the same head
    pruned, on random input and small random weights on the CPU.

    Args:
        class_name: name of a class whose modules call the attention operators or transformers' attention function.
        layout: of the class.
    """
    LAYOUTS[class_name] = layout


def layout_of(module: nn.Module) -> HeadLayout | None:
    """The layout of the module's class, or of its nearest base class in `LAYOUTS`."""
    names = (base.__name__ for base in type(module).__mro__)
    return next((LAYOUTS[name] for name in names if name in LAYOUTS), None)


def form_of(module: nn.Module) -> HeadLayout | None:
    """The form of a transformers module, by the names of its parts.

    Classes of a form cannot be converted, since what comes between their projections and scores is unknown.
    """
    for form in FORMS:
        inner = at_path(module, form.inner)
        if (
            calls_interface(inner)
            and isinstance(at_path(module, form.head_dim), int)
            and all(is_projection(at_path(module, path)) for path in form.projections)
        ):
            rotary = "position_embeddings" in stock_arguments(type(inner))
            return replace(form, between=_ROTARY if rotary else _UNTESTED)
    return None


def check_has_parts(name: str, holder: nn.Module, layout: HeadLayout) -> None:
    """Classes are found by name: refuse one that is another class of that name."""
    instead = "register another class name for it (hk.heads.register_layout), or rename the class"
    for path in (*layout.projections, layout.head_dim, layout.value_dim):
        found = at_path(holder, path) if path else 0
        if found is None:
            refuse(name, f"is a {type(holder).__name__} without {path!r} of the layout {layout.name!r}", instead)
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
    """The attribute at a dotted path, of `first|second` the first that exists; None if none does. "" is the module."""
    if not path:
        return module
    for alternative in path.split("|"):
        found = reduce(lambda at, part: getattr(at, part, None), alternative.split("."), module)
        if found is not None:
            return found
    return None
