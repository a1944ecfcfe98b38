# SPDX-License-Identifier: Apache-2.0
"""Decodes from models on a grid of data, x and expert: the step below a server.

engine      `Engine`: generate, submit, step; load and apply_patches
requests    `Request`, and how its tokens are drawn
scheduler   which tokens of which requests the next step computes, and where the cache keeps them
cache       the paged cache of keys and values
runner      one step on the device; a CUDA graph a batch size
sampling    draws tokens where each rank has a part of the vocabulary
weights     weights from a model on another grid, and patches of what changed in them
lockstep    ranks that step together, and which of them has failed
vllm_plugin a plug-in for vLLM, which sums by Stretto
vllm_weights  weights for vLLM's workers, from a model on any grid
"""

from typing import TYPE_CHECKING

from stretto.lazy import attach

if TYPE_CHECKING:
    from stretto.inference.engine import Engine
    from stretto.inference.requests import Request
    from stretto.inference.sampling import token_log_probabilities
    from stretto.inference.weights import WeightChanges, apply_patches, copy_weights

__all__ = ["Engine", "Request", "WeightChanges", "apply_patches", "copy_weights", "token_log_probabilities"]

__getattr__, __dir__ = attach(__name__)
