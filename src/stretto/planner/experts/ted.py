# SPDX-License-Identifier: Apache-2.0
"""The memory model of tensor, expert and data parallelism (Singh, section 7.1.1, equation 7.4).

Every second block of a base model has experts, one on each rank of `expert`, so that E ranks divide E experts; the
planner's own model takes any number of them a rank. Weights and gradients have 2 bytes each, and ZeRO's first stage
divides 12 bytes of optimizer state by the ranks that hold the same weights. In the text of equation 7.4 the two
parameter counts are swapped: NP_gpu^nonexp is that of the other parameters, NP_gpu^exp that of the experts.
"""

from stretto.axes import GridSizes
from stretto.planner.architecture import Architecture
from stretto.planner.experts.cost import local_expert_parameters
from stretto.planner.memory import local_parameters
from stretto.planner.optimizer_state import Formula

STATE = 12  # bytes of a parameter


def list_memory(model: Architecture, grid: GridSizes) -> dict[str, float]:
    """Equation 7.4 in bytes by component, of a rank, for any pattern of blocks and any experts a rank.

    Ranks of z hold the same here, as ranks of data do: the paper has no z.
    """
    parts = _parameters(model, grid)
    return {
        "parameters": sum(2 * parameters for parameters, _ in parts),
        "optimizer": sum(STATE * parameters / replicas for parameters, replicas in parts),
        "gradients": sum(2 * parameters for parameters, _ in parts),
        **dict.fromkeys(("gathered_weights", "activations", "logits", "temporary"), 0.0),
    }


def _parameters(model: Architecture, grid: GridSizes) -> tuple[tuple[float, int], tuple[float, int]]:
    """Parameters of a rank, and how many ranks hold them: of all but experts, and of experts."""
    whole = GridSizes(x=grid.x, y=grid.y)
    others = local_parameters(model, whole) - local_expert_parameters(model, whole)
    of_experts = local_expert_parameters(model, grid) * grid.expert_z
    return (others, grid.batch_parts), (of_experts, grid.expert_data * grid.expert_z)


def explain_memory(model: Architecture, grid: GridSizes) -> Formula:
    """Equation 7.4 as a line of an explanation."""
    (others, replicas), (of_experts, expert_replicas_) = _parameters(model, grid)
    terms = {
        "NP_nonexp": others,
        "G_data_nonexp": float(replicas),
        "NP_exp": of_experts,
        "G_data_exp": float(expert_replicas_),
    }
    formula = "(4 + 12 / G_data_nonexp) NP_nonexp + (4 + 12 / G_data_exp) NP_exp"
    return Formula("with ZeRO-1, at least (eq. 7.4)", formula, terms, sum(list_memory(model, grid).values()))
