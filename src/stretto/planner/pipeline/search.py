# SPDX-License-Identifier: Apache-2.0
"""Searches how a pipeline runs best on each grid: schedule, virtual stages, limit, micro-batch and memory's choices.

Closed forms rank all of them (`pipeline.cost.phase_time`). Of many grids, those are left out whose bound, a step
without bubbles, messages and waits, is slower than what was found already.
"""

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from stretto.axes import NAMES, GridSizes
from stretto.cluster import Cluster
from stretto.execution import ExecutionOptions
from stretto.planner.communication import Rates, Volume, bandwidths, blocks_volume, seconds
from stretto.planner.compute import Device, block_seconds, cast_seconds
from stretto.planner.cost import Cost
from stretto.planner.experts.cost import expert_seconds, expert_volume, local_expert_parameters
from stretto.planner.experts.search import BestTimes, best_of_each_grid, choose_expert_grids
from stretto.planner.grid_plan import Candidate, ChosenWay, check_finite, choose_way, rounded
from stretto.planner.grids import divisors, why_impossible
from stretto.planner.memory import local_parameters, peak
from stretto.planner.optimizer_state import host_memory, number_bytes, optimizer_seconds
from stretto.planner.pipeline.cost import (
    PipelineEstimate,
    estimate,
    estimate_evenly,
    paper_pipeline_cost,
    phase_time,
    pipeline_cost,
)
from stretto.planner.pipeline.memory import RankMemory, StageMemory, checkpoint_interval, pipeline_memory, stage_memory
from stretto.planner.pipeline.space import MAX_VIRTUAL_STAGES, PipelineSpace, why_no_schedule
from stretto.planner.pipeline.stage_times import RankStages, StageLayout, StepEdges, measure_parts, place_stages
from stretto.planner.search_space import SearchSpace, StepChoice, set_imbalance
from stretto.planner.step import overlap_slowdown
from stretto.planner.workload import ScheduleChoice, StepConfig, StepWorkload

# With more grids with pipelines than this, grids whose lower bound is slower than the tenth plan are skipped.
MAX_LISTED = 200
REPLAYED = 10
LISTED_WITH_EXPERTS = 3


class _Timed(NamedTuple):
    """A schedule and micro-batch with their predicted time, before its memory is predicted."""

    time: float
    estimate: PipelineEstimate


class PipelineSearch:
    """Searches the best pipeline of each grid of one workload on one cluster.

    device: None ranks by the paper's cost model. limit: bytes that a rank may allocate. micro_batch: fixed where given.
    """

    def __init__(
        self,
        workload: StepWorkload,
        cluster: Cluster,
        device: Device | None,
        space: SearchSpace,
        pipelines: PipelineSpace,
        limit: float,
        micro_batch: int | None,
    ) -> None:
        self.workload, self.cluster, self.device = workload, cluster, device
        self.space, self.pipelines, self.limit, self.micro_batch = space, pipelines, limit, micro_batch
        self._computed: dict[tuple[int, int, int, str, int, int, bool], tuple[float, float]] = {}
        self._balanced = (
            workload if workload.model.moe is None else replace(workload, model=set_imbalance(workload.model, 1.0))
        )
        self._sent: dict[GridSizes, tuple[float, float, float]] = {}
        self._rates: dict[GridSizes, Rates] = {}

    def search_all(self, ranks: int, found: Sequence[Candidate] = ()) -> tuple[list[Candidate], list[str]]:
        """The best candidate of each grid with several stages, and notes on the grids that were left out.

        found: candidates without stages.
        """
        model, batch = self.workload.model, self.workload.batch
        grids = [grid for pipe in self.pipelines.pipes if pipe > 1 for grid in self.space.every_grid(ranks, pipe)]
        if len(grids) <= MAX_LISTED and model.moe is None:
            return [candidate for grid in grids if (candidate := self.search_grid(grid)) is not None], []
        possible = [grid for grid in grids if why_impossible(model, grid, batch) is None]
        best: list[Candidate] = []
        times = BestTimes(self.listed, found)
        for bound, grid in self.in_order(possible, times):
            if math.isinf(bound) and (best or found):
                break
            candidate = self.search_grid(grid, most=times.most)
            if candidate is not None and (candidate.fits or not best):
                best.append(candidate)
            if candidate is not None:
                times.note(candidate)
        best = best_of_each_grid(best)
        left = len(grids) - len(best)
        note = (
            f"{left:,} of {len(grids):,} grids with pipeline stages were left out: they cannot run, do not fit, or "
            f"take longer than plan {self.listed}"
        )
        return best, [note] if left else []

    @property
    def listed(self) -> int:
        """The least number of plans to list of many grids: grids that are slower than so many are left out."""
        return REPLAYED if self.workload.model.moe is None else LISTED_WITH_EXPERTS

    def in_order(self, grids: Sequence[GridSizes], times: "BestTimes") -> Iterator[tuple[float, GridSizes]]:
        """Grids that can run, each with the divisions of experts worth predicting, by the time that they take at
        least; until that is longer than the last of `times`."""
        model = self.workload.model
        waiting = [(self.bound(grid, model.moe is not None), place, False) for place, grid in enumerate(grids)]
        heapq.heapify(waiting)
        known = list(grids)
        while waiting and waiting[0][0] <= times.most:
            bound, place, is_way = heapq.heappop(waiting)
            if is_way or model.moe is None:
                yield bound, known[place]
                continue
            for way, impossible in choose_expert_grids(self.workload, self.cluster, self.space, known[place]):
                if impossible is None:
                    heapq.heappush(waiting, (self.bound(way), len(known), True))
                    known.append(way)

    def bound(self, grid: GridSizes, of_any_way: bool = False) -> float:
        """Seconds that a step takes at least: computation without any bubble, and the optimizer; infinite for a grid
        whose parameters alone do not fit.

        of_any_way: whatever number of its ranks divides the experts.
        """
        workload, model = self.workload, self.workload.model
        sizes = model.splitting_sizes(grid)
        parameters = local_parameters(model, sizes) / grid.pipe
        if of_any_way:
            parameters -= (
                local_expert_parameters(model, sizes) - model.expert_parameters / sizes.stage_ranks
            ) / grid.pipe
        states = self.space.states
        least = min(number_bytes(workload, state).weight + number_bytes(workload, state).gradient for state in states)
        kept = min(number_bytes(workload, state).state if state.location != "host" else 0 for state in states)
        if parameters * (least + kept) > self.limit:
            return float("inf")
        if self.device is None:
            return 0.0
        optimizer = min(
            optimizer_seconds(workload, state, self.cluster, parameters, self.device.traffic) for state in states
        )
        local = workload.batch // grid.batch_parts
        options = ExecutionOptions(recompute=self.space.recomputes[0])
        bubble = (grid.pipe - 1) / self._max_virtual_stages / local
        return self._min_phase(grid, local, options, of_any_way) * (1 + bubble) + optimizer

    def _min_phase(self, grid: GridSizes, size: int, options: ExecutionOptions, of_any_way: bool = False) -> float:
        """Seconds that forward and backward passes of a rank's stages take at least, with micro-batches of a size."""
        assert self.device is not None
        workload, sizes = self.workload, self.workload.model.splitting_sizes(grid)
        count_of_batches = workload.batch // grid.batch_parts // size
        alone, of_balanced = _alone(sizes), workload
        if of_any_way:
            assert workload.model.moe is not None
            alone = _alone(
                GridSizes(x=sizes.x, y=sizes.y, data=workload.model.moe.experts, expert=workload.model.moe.experts)
            )
            of_balanced = self._balanced
        key = sizes.x, sizes.y, size, options.recompute, alone.expert, alone.expert_x, of_any_way
        if key not in self._computed:
            forward_time = backward_time = 0.0
            for count, kind in workload.model.kinds:
                config = StepConfig(alone, size, ExecutionOptions(recompute=options.recompute))
                of_all = replace(of_balanced, batch=size * alone.batch_parts)
                block = of_all.stage(1, is_first=False, is_last=False, moe_blocks=min(1, kind.moe_blocks))
                work = block_seconds(block, block.model.kinds[0].model, config, self.device)
                casts = cast_seconds(block, config, self.device)
                forward_time += count * (work.forward + casts.forward)
                backward_time += count * (work.backward + casts.again + casts.backward)
            self._computed[key] = forward_time, backward_time
        if of_any_way:
            return count_of_batches * sum(self._computed[key]) / grid.pipe
        if grid not in self._sent:
            tokens, share = workload.tokens / grid.replicas, workload.gathered_share
            volume = blocks_volume(
                workload.model, sizes, tokens, workload.element, gathers=share, documents=workload.documents
            )
            sent = seconds(volume, self._rates_of(grid), grid)
            sums = self._min_waits * (sent.all_reduce_x + sent.all_reduce_y)
            of_experts = self._min_of_experts(sizes)
            gather = sent.all_gather_z + of_experts.all_gather_z
            scatter = sent.reduce_scatter_z + of_experts.reduce_scatter_z
            rows = of_experts.all_reduce_x + of_experts.all_reduce_y + of_experts.all_to_all
            self._sent[grid] = sums + rows, gather, scatter
        forward, backward = self._computed[key]
        sums, gather, scatter = self._sent[grid]
        # What each micro-batch sends over z hides at most in its own passes.
        recomputes = options.recomputation.is_on
        times = recomputes + (not (recomputes and workload.model.is_sharded_by_blocks))
        again = 0.0 if options.keeps_weights else times * gather
        over_z = again + (0.0 if options.scatters_once else scatter)
        passes = max(forward, 0.0 if options.keeps_weights else gather) + max(backward, over_z)
        return (count_of_batches * passes + sums) / grid.pipe

    def _min_of_experts(self, grid: GridSizes) -> Volume:
        """Seconds of experts' communication in a step, without start-ups and recomputation."""
        workload = self.workload
        if workload.model.moe is None:
            return Volume()
        tokens, share = workload.tokens / grid.token_parts, workload.gathered_share
        volume = expert_volume(workload.model, grid, tokens, workload.element, gathers=share)
        return expert_seconds(volume, grid, self.cluster)

    def _rates_of(self, grid: GridSizes) -> Rates:
        if grid not in self._rates:
            self._rates[grid] = bandwidths(self.cluster, grid)
        return self._rates[grid]

    @property
    def _max_virtual_stages(self) -> int:
        """The most by which virtual stages, or zero bubbles, divide bubbles."""
        return max(MAX_VIRTUAL_STAGES, self.pipelines.virtual_stages or 1)

    @property
    def _min_waits(self) -> float:
        """A lower bound of the exposed part of the sums over x and y, and of the slowdown by them.

        Half of them are in the forward pass, where at most half can be hidden.
        """
        if not self.space.overlaps:
            return 1.0
        slowdown = overlap_slowdown(self.cluster)
        if True in self.space.shardings:
            return slowdown / 2
        return (1 + 3 * slowdown) / 4

    def search_grid(self, grid: GridSizes, most: float = float("inf")) -> Candidate | None:
        """The best candidate of one grid: the fastest that fits, else the one that needs least memory.

        most: seconds; None is returned where nothing that fits is faster.
        """
        impossible = why_impossible(self.workload.model, grid, self.workload.batch)
        local = self.workload.batch // grid.batch_parts if impossible is None else 1
        if impossible is None and self.micro_batch is not None and local % self.micro_batch:
            impossible = f"a micro-batch of {self.micro_batch} does not divide the {local} sequences of a rank"
        if impossible is None:
            impossible = self._why_no_schedule(grid, local)
        if impossible is not None:
            return self._impossible(grid, impossible)
        best: Candidate | None = None
        settled: list[StepChoice] = []
        frugal: tuple[float, StepConfig] | None = None
        for choice in self._list_choices(grid):
            # Experts' weights are many, and gathering them with each pass is for those that fit in no other way.
            if self.workload.model.moe is not None and best is not None and not choice.options.keeps_weights:
                continue
            if any(choice.repeats_as_much_as(other) for other in settled):
                continue
            is_settled, worse = False, 0
            for size in self._sizes(local):
                config = StepConfig(grid, size, choice.options, choice.state, self.space.clips)
                if config.tokens(self.workload) % config.token_parts:
                    continue
                limit = most if best is None else min(most, best.cost.step_time)
                bubble = (grid.pipe - 1) / self._max_virtual_stages * size / local
                if self.device and self._min_phase(grid, size, choice.options) * (1 + bubble) > limit:
                    continue
                least = self._min_memory(config)
                if frugal is None or least < frugal[0]:
                    frugal = least, config
                if least > self.limit:  # and larger ones need more
                    break
                candidate, is_first = self._search_schedules(config, limit)
                if candidate is not None and candidate.fits and (best is None or candidate.rank < best.rank):
                    best, is_settled, worse = candidate, is_first, 0
                elif best is not None:
                    worse += 1
                if worse == 2:  # larger micro-batches have longer bubbles, and need more memory
                    break
            if is_settled:
                settled.append(choice)
        if best is None and frugal is not None and most == float("inf"):
            best, _ = self._search_schedules(frugal[1])
        if best is None and frugal is None:
            return self._impossible(grid, f"with shard_sequence, x={grid.x} divides no micro-batch of a rank's tokens")
        return best

    def _min_memory(self, config: StepConfig) -> float:
        """Bytes that the first rank needs at least, with as many live micro-batches as any schedule keeps there."""
        blocks, pipe, moe = (
            self.workload.model.layers // config.grid.pipe,
            config.grid.pipe,
            self.workload.model.has_moe,
        )
        stages = StageLayout((0, blocks), (0,), moe).stages((0,), is_first=True, is_last=False)
        first = stage_memory(self.workload, config, stages, self.cluster)
        live = min(config.micro_batches(self.workload), self.pipelines.limit or pipe)
        return peak(first.in_step) + (live - 1) * sum(first.between)

    def _why_no_schedule(self, grid: GridSizes, local: int) -> str | None:
        """Say why no schedule can run on a grid with any micro-batch."""
        model, why = self.workload.model, "no schedule takes its stages and micro-batches"
        for size in self._sizes(local):
            if next(self.pipelines.list_schedules(model, grid.pipe, local // size), None) is not None:
                return None
        if self.pipelines.schedule is not None:
            choice = next(self.pipelines.list_named(model, grid.pipe))
            why = why_no_schedule(model, choice, grid.pipe, local // self._sizes(local)[0]) or why
        return why

    def _sizes(self, local: int) -> list[int]:
        return [self.micro_batch] if self.micro_batch is not None else divisors(local)

    def _list_choices(self, grid: GridSizes) -> Iterator[StepChoice]:
        """The space's choices; where it searches full checkpointing of dense models, that of several blocks at once
        too: of experts, what several blocks keep while they are computed again is more than their inputs."""
        interval = checkpoint_interval(self.workload.model.layers, grid.pipe)
        for choice in self.space.list_choices(grid):
            yield choice
            searches_full = choice.options.recompute == "full" and len(self.space.recomputes) > 1
            if searches_full and interval > 1 and self.workload.model.moe is None:
                yield choice._replace(options=choice.options.replace(recompute=f"every:{interval}"))

    def _search_schedules(self, config: StepConfig, most: float = float("inf")) -> tuple[Candidate | None, bool]:
        """The fastest schedule that fits, and whether it is the fastest of all.

        Where none fits, the one that comes nearest, unless only those that take less than `most` seconds are wanted.
        """
        known: dict[RankStages, StageMemory] = {}
        nearest: tuple[float, PipelineEstimate, RankMemory] | None = None
        for place, (time, plan) in enumerate(self._time_schedules(config, most)):
            if time > most:
                break
            memory = pipeline_memory(self.workload, plan.config, plan.ranks, known, self.cluster)[0]
            needed = peak(memory.peak)
            if needed <= self.limit and (candidate := self._make(plan, memory)).fits:
                return candidate, place == 0
            if nearest is None or needed < nearest[0]:
                nearest = needed, plan, memory
        if nearest is None or most < float("inf"):
            return None, False
        return self._make(*nearest[1:]), False

    def _time_schedules(self, config: StepConfig, most: float) -> list[_Timed]:
        """The schedules of one micro-batch, the fastest first; none if they all take longer than `most` seconds."""
        workload, pipe = self.workload, config.grid.pipe
        count = config.micro_batches(workload)
        choices = self.pipelines.list_schedules(workload.model, pipe, count)
        if self.device is None:
            first = next((each for each in choices if each.is_message_driven or self.pipelines.schedule), None)
            if first is None:
                return []
            return [_Timed(0.0, estimate_evenly(workload, replace(config, schedule=first), self.cluster))]
        rates = self._rates_of(config.grid)
        parts = measure_parts(workload, config, self.device, rates)
        whole = parts.all_blocks.whole + parts.first.whole + parts.last.whole
        if (count + (pipe - 1) / self._max_virtual_stages) * whole / pipe > most:
            return []
        known: dict[tuple[int, ...], tuple[PipelineEstimate, float]] = {}
        edges: dict[RankStages, StepEdges] = {}
        timed = []
        for choice in choices:
            placed = place_stages(choice, pipe)
            of_choice = replace(config, schedule=choice)
            if placed not in known:
                made = estimate(workload, of_choice, self.device, rates, parts, edges)
                ends = made.edges.values()
                known[placed] = made, max(each.gather + each.sums + each.optimizer for each in ends)
            made, at_ends = known[placed]
            plan = replace(made, config=of_choice)
            timed.append(_Timed(rounded(phase_time(plan) + at_ends), plan))
        return sorted(timed, key=lambda each: each.time)

    def _make(self, plan: PipelineEstimate, memory: RankMemory) -> Candidate:
        return make_candidate(self.workload, self.cluster, self.device, self.limit, plan, memory)

    def _impossible(self, grid: GridSizes, why: str) -> Candidate:
        """A candidate that cannot run, with a schedule and stages as if it could."""
        schedule = ScheduleChoice("1f1b")
        config = StepConfig(grid, 1, next(iter(self.space.list_choices(grid))).options, schedule=schedule)
        host = host_memory(self.workload, config, self.cluster, 0.0, 0.0)
        cost = Cost({"computation": 0.0}, bandwidths(self.cluster, grid), Volume(), dict.fromkeys(NAMES, 0.0))
        return Candidate(config, cost, {"parameters": 0.0}, host, False, why, 1)


def _alone(grid: GridSizes) -> GridSizes:
    """The smallest grid whose ranks compute the same as those of another."""
    if grid.expert == 1:
        return GridSizes(x=grid.x, y=grid.y)
    data = grid.expert // (grid.x // grid.expert_x)
    return GridSizes(data=data, x=grid.x, y=grid.y, expert=grid.expert, expert_tensor=grid.expert_tensor)


def make_candidate(
    workload: StepWorkload,
    cluster: Cluster,
    device: Device | None,
    limit: float,
    plan: PipelineEstimate,
    memory: RankMemory,
    *,
    replays: bool = False,
    attention: ChosenWay | None = None,
) -> Candidate:
    """The candidate of one config's predicted stages. memory: of the rank that needs most. attention: as `Candidate`
    has it."""
    config, rates = plan.config, bandwidths(cluster, plan.config.grid)
    if device is None:
        cost = paper_pipeline_cost(workload, plan, cluster, rates)
    else:
        cost = pipeline_cost(plan, rates, replays=replays)
    check_finite(cost, cluster)
    host = host_memory(workload, config, cluster, memory.parameters, memory.kept_on_host)
    fits = peak(memory.peak) <= limit and host.fits
    copies = workload.model.copies(config.grid)
    return Candidate(config, cost, memory.peak, host, fits, None, copies, worst=memory, attention=attention)


def judge_pipeline(
    workload: StepWorkload, config: StepConfig, cluster: Cluster, device: Device | None, limit: float
) -> Candidate:
    """The candidate of one config, its schedule simulated. Raises ValueError for one that cannot run."""
    assert config.schedule is not None
    count, model = config.micro_batches(workload), workload.model
    if why := why_no_schedule(model, config.schedule, config.grid.pipe, count):
        raise ValueError(f"the grid {config.grid} cannot run {model.name}: {why}")
    attention = None
    if device is None:
        plan = estimate_evenly(workload, config, cluster)
    else:
        rates = bandwidths(cluster, config.grid)
        config, attention = choose_way(
            workload, config, device,
            lambda each: pipeline_cost(estimate(workload, each, device, rates), rates),
        )  # fmt: skip
        plan = estimate(workload, config, device, rates)
    memory = pipeline_memory(workload, config, plan.ranks, cluster=cluster)[0]
    return make_candidate(workload, cluster, device, limit, plan, memory, replays=True, attention=attention)


def replay_first(
    candidates: list[Candidate], workload: StepWorkload, cluster: Cluster, device: Device | None, limit: float
) -> list[Candidate]:
    """Simulate the schedules of the first candidates, in the order that the simulated times give."""
    if device is None:
        return candidates
    for _ in range(3 * REPLAYED):
        waiting = (
            place
            for place, each in enumerate(candidates[:REPLAYED])
            if each.impossible is None and each.cost.pipeline is not None and not each.cost.pipeline.is_replayed
        )
        if (place := next(waiting, None)) is None:
            break
        candidates[place] = judge_pipeline(workload, candidates[place].config, cluster, device, limit)
        candidates.sort(key=lambda candidate: candidate.rank)
    return candidates
