"""The heads of a model: where they lie, gating, pruning and saving them, and reading what they do."""

from heads_kernels.heads.distance import HeadDistance, distance
from heads_kernels.heads.gating import close, closed, gate, reopen, ungate
from heads_kernels.heads.importance import importance
from heads_kernels.heads.layers import (
    AttentionLayer,
    Projection,
    attention_layers,
    register_layout,
)
from heads_kernels.heads.layouts import HeadLayout
from heads_kernels.heads.maps import HeadMaps, bertviz, maps, plot_maps
from heads_kernels.heads.observing import observe
from heads_kernels.heads.pruning import prune
from heads_kernels.heads.rare_words import RareWords
from heads_kernels.heads.relations import Relation
from heads_kernels.heads.relevance import relevance
from heads_kernels.heads.roles import HeadRoles, Role, roles
from heads_kernels.heads.saving import load, save
from heads_kernels.heads.schedule import GateSchedule
from heads_kernels.heads.scores import HeadScores
from heads_kernels.heads.statistics import HeadStatistics, statistics
from heads_kernels.nn.observing import AttentionCall

__all__ = [
    "AttentionCall",
    "AttentionLayer",
    "GateSchedule",
    "HeadDistance",
    "HeadLayout",
    "HeadMaps",
    "HeadRoles",
    "HeadScores",
    "HeadStatistics",
    "Projection",
    "RareWords",
    "Relation",
    "Role",
    "attention_layers",
    "bertviz",
    "close",
    "closed",
    "distance",
    "gate",
    "importance",
    "load",
    "maps",
    "observe",
    "plot_maps",
    "prune",
    "register_layout",
    "relevance",
    "reopen",
    "roles",
    "save",
    "statistics",
    "ungate",
]
