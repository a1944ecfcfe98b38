# SPDX-License-Identifier: Apache-2.0
"""A DLRM's training step with look-up and all-to-all separate or fused, on any network."""

from lab.simulated_dlrm.exchange import EXCHANGES
from lab.simulated_dlrm.kernels import H200, KERNELS, MI210, KernelRates, RecommendationStep, find_kernels
from lab.simulated_dlrm.step import (
    FIDELITIES,
    FUSIONS,
    SimulatedRecommendation,
    recommendation_graph,
    simulate_recommendation,
)

__all__ = [
    "EXCHANGES",
    "FIDELITIES",
    "FUSIONS",
    "H200",
    "KERNELS",
    "MI210",
    "KernelRates",
    "RecommendationStep",
    "SimulatedRecommendation",
    "find_kernels",
    "recommendation_graph",
    "simulate_recommendation",
]
