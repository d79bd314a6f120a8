"""Analysis of a model's heads: observed calls, statistics, importance, relevance, roles, distances and maps."""

from heads_kernels.analysis.distance import HeadDistance, distance
from heads_kernels.analysis.head_scores import HeadScores
from heads_kernels.analysis.importance import importance
from heads_kernels.analysis.maps import HeadMaps, bertviz, maps, plot_maps
from heads_kernels.analysis.observe import observe
from heads_kernels.analysis.relevance import relevance
from heads_kernels.analysis.role_counts import RareWords, Relation, Repeats
from heads_kernels.analysis.roles import HeadRoles, Role, roles
from heads_kernels.analysis.statistics import HeadReceived, HeadStatistics, received, statistics
from heads_kernels.nn.attention_call import AttentionCall

__all__ = [
    "AttentionCall",
    "HeadDistance",
    "HeadMaps",
    "HeadReceived",
    "HeadRoles",
    "HeadScores",
    "HeadStatistics",
    "RareWords",
    "Relation",
    "Repeats",
    "Role",
    "bertviz",
    "distance",
    "importance",
    "maps",
    "observe",
    "plot_maps",
    "received",
    "relevance",
    "roles",
    "statistics",
]
