"""Surgery on the heads of a model: its layers and their layouts, gates, pruning, schedules and files."""

from heads_kernels.heads.gating import close, closed, gate, reopen, ungate
from heads_kernels.heads.layers import AttentionLayer, attention_layers
from heads_kernels.heads.layouts import HeadLayout, register_layout
from heads_kernels.heads.patching import outputs, patch
from heads_kernels.heads.projected import projected_layers
from heads_kernels.heads.pruning import prune
from heads_kernels.heads.saving import apply_shapes, load, save, shapes
from heads_kernels.heads.schedule import GateSchedule
from heads_kernels.heads.weights import ProjectedLayer, Projection

__all__ = [
    "AttentionLayer",
    "GateSchedule",
    "HeadLayout",
    "ProjectedLayer",
    "Projection",
    "apply_shapes",
    "attention_layers",
    "close",
    "closed",
    "gate",
    "load",
    "outputs",
    "patch",
    "projected_layers",
    "prune",
    "register_layout",
    "reopen",
    "save",
    "shapes",
    "ungate",
]
