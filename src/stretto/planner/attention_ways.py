# SPDX-License-Identifier: Apache-2.0
"""The way that attention over context takes: gathered keys, a ring of them, or exchanged heads (Ulysses).

Calls choose by themselves (`implementation="auto"` of `stretto.ops.context_attention`). This predicts what they choose,
by their rules: the first of the ways that fit, unless another one is clearly faster.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from stretto.planner.communication import Rates, has_nvlink_over, keys_numbers, sends_latents
from stretto.planner.compute import BACKWARD_ATTENTION, Device, block_seconds
from stretto.planner.cost import full_cost
from stretto.planner.memory import RING_BYTES
from stretto.planner.workload import AttentionWay, StepConfig, StepWorkload

# With less than this part of its time another way replaces the default (`stretto.ops.attention.choice`).
CLEARLY_FASTER = 0.9

NAMES: dict[AttentionWay, str] = {
    "all_gather": "gathers keys",
    "ring": "passes keys around a ring",
    "ulysses": "exchanges heads (Ulysses)",
}


@dataclass(frozen=True)
class ChosenWay:
    """The way that was chosen, and the predicted seconds of a step by each way that calls may take."""

    way: AttentionWay
    seconds: Mapping[AttentionWay, float]

    def explain(self) -> str:
        """Say which it is, and why."""
        reasons = [
            f"{1e3 * (seconds - self.seconds[self.way]):+.3g} ms a step if it {NAMES[way]}"
            for way, seconds in self.seconds.items()
            if way != self.way
        ]
        if "all_gather" not in self.seconds:
            reasons.append(f"gathered keys would take more than {RING_BYTES >> 30} GiB a layer")
        return f"attention over context {NAMES[self.way]}" + (f" ({', '.join(reasons)})" if reasons else "")


def list_ways(workload: StepWorkload, config: StepConfig) -> tuple[AttentionWay, ...]:
    """The ways that all layers may take, the default first; none without context."""
    model, ranks = workload.model, config.grid.context
    if ranks == 1:
        return ()
    grid, tokens = model.splitting_sizes(config.grid), config.tokens(workload)
    whole = max(keys_numbers(kind.model, grid, tokens) for kind in model.kinds) * ranks / (ranks - 1)
    layers = [layer for kind in model.kinds for layer in kind.model.block if layer.exchanged_keys(grid)]
    ways: list[AttentionWay] = ["all_gather"] if whole * workload.element <= RING_BYTES else []
    ways.append("ring")
    if layers and all(layer.exchanged_heads(grid) for layer in layers):
        ways.append("ulysses")
    return tuple(ways)


def choose_way(
    workload: StepWorkload, config: StepConfig, device: Device, rates: Rates
) -> tuple[StepConfig, ChosenWay | None]:
    """The config with the way that calls will take, and why; None where there is no choice: without context, with
    pipeline stages, and of latents that travel."""
    has_nvlink, model = has_nvlink_over(device.cluster, config.grid, "context"), workload.model
    ways = list_ways(workload, config) if config.grid.pipe == 1 else ()
    if not ways or sends_latents(workload, config, has_nvlink=has_nvlink):
        return config, None
    costs = {way: full_cost(workload, replace(config, attention_way=way), device, rates) for way in ways}
    seconds = {way: cost.step_time for way, cost in costs.items()}
    # Calls compare what they take themselves: their products, and what these do not hide.
    scores = sum(count * block_seconds(workload, kind, config, device).attention for count, kind in model.kinds)
    scores *= (1 + BACKWARD_ATTENTION) * config.micro_batches(workload)
    best, default, least = min(ways, key=seconds.__getitem__), ways[0], min(seconds.values())
    is_clearly_faster = scores < CLEARLY_FASTER * (scores + seconds[default] - least)
    way = best if is_clearly_faster else default
    return replace(config, attention_way=way), ChosenWay(way, seconds)
