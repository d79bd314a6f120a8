"""Ordinary attention as collaborative attention: heads share one query and one key, or keep what they need."""

from heads_kernels.convert.budget import error_curve, solve_budget
from heads_kernels.convert.counts import Flops, break_even, count_flops, count_parameters
from heads_kernels.convert.cp import cp
from heads_kernels.convert.energy import CapturedEnergy, captured_energy
from heads_kernels.convert.error import score_error, weight_error
from heads_kernels.convert.factors import Factors
from heads_kernels.convert.heads import Heads
from heads_kernels.convert.moments import Moments
from heads_kernels.convert.ragged import ragged
from heads_kernels.convert.report import Report

__all__ = [
    "CapturedEnergy",
    "Factors",
    "Flops",
    "Heads",
    "Moments",
    "Report",
    "break_even",
    "captured_energy",
    "count_flops",
    "count_parameters",
    "cp",
    "error_curve",
    "ragged",
    "score_error",
    "solve_budget",
    "weight_error",
]
