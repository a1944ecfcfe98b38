# SPDX-License-Identifier: Apache-2.0
"""Benches of mixtures of experts, and what their settings know."""

from collections.abc import Mapping

ROUTINGS = ("uniform", "skewed", "1.5x", "recorded")
"""Of tokens to experts, in the benches' settings: `lab.experts.routing.find_bias`."""

TENSOR_KINDS = ("tensor-gather", "tensor-scatter", "tensor-forward", "tensor-step")
"""Rows of `lab exchange` of tensor-parallel experts."""

# Hidden and intermediate sizes, experts and top-k.
MODELS: Mapping[str, tuple[int, int, int, int]] = {
    "mixtral-8x7b": (4096, 14336, 8, 2),
    "mixtral-8x22b": (6144, 16384, 8, 2),
    "32-experts": (2048, 1536, 32, 2),
    "qwen1.5-moe": (2048, 1408, 60, 4),
    "deepseek-moe": (2048, 1408, 64, 6),
    "qwen3-30b-a3b": (2048, 768, 128, 8),
}
