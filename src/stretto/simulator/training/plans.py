# SPDX-License-Identifier: Apache-2.0
"""Simulates plans: the step of one grid, and the best few of a search in the order that the simulator finds."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from stretto.axes import GridSizes
from stretto.cluster import Cluster
from stretto.execution import ExecutionOptions, Overlap, StateOptions, TwoLevel
from stretto.planner import GridPlan, plan
from stretto.planner.architecture_loader import read_architecture
from stretto.planner.documents import read_packed
from stretto.planner.search import find_cluster
from stretto.planner.search_space import set_imbalance
from stretto.planner.workload import Dtype, OptimizerName, ScheduleChoice, StepConfig, StepWorkload
from stretto.simulator.training.simulation import Fidelity, StepSimulation, simulate_step

SIMULATED = 8
"""The number of the fastest plans that fit which are simulated."""


def step_of_plan(
    plan: GridPlan,
    *,
    overlap: Overlap | bool = True,
    drop_duplicates: bool = True,
    state: StateOptions | None = None,
    clips: bool = True,
    two_level: TwoLevel = False,
) -> StepConfig:
    """The configuration that a plan predicts, with options that it lacks. state: except for its location."""
    options = ExecutionOptions(
        Overlap.parse(overlap),
        plan.reshard,
        plan.recompute,
        plan.shard_sequence,
        drop_duplicates=drop_duplicates,
        two_level=two_level,
    )
    schedule = None
    if plan.schedule is not None:
        schedule = ScheduleChoice(plan.schedule, plan.virtual_stages, plan.extra_warm_up, plan.limit, plan.serve_first)
    kept = replace(state or StateOptions(), location=plan.optimizer_state)
    return StepConfig(GridSizes(**plan.grid), plan.micro_batch, options, kept, clips, schedule, plan.attention_way)


def plan_simulated(
    model: Any,
    cluster: Cluster | str,
    *,
    batch: int,
    seq_len: int,
    simulated: int = SIMULATED,
    fidelity: Fidelity = "closed-form",
    dtype: Dtype = "bf16",
    optimizer: OptimizerName = "adamw",
    **search: Any,
) -> list[GridPlan]:
    """Plan with the full model (`stretto.plan`), and put its fastest plans into the order of their simulated steps.

    simulated: how many plans that fit are simulated. The others follow in the full model's order. Of simulated plans,
    `step_time`, `terms`, `exposed` and `why` are the simulator's. search: as of `stretto.plan`.

    Raises ValueError like `stretto.plan` and `simulate_step`.
    """
    machine = find_cluster(cluster, captured=search.pop("captured", False))
    plans = plan(model, machine, batch=batch, seq_len=seq_len, cost="full", dtype=dtype, optimizer=optimizer, **search)
    architecture = set_imbalance(read_architecture(model, seq_len), search.get("imbalance"))
    documents = read_packed(search.get("documents"), seq_len)
    workload = StepWorkload(architecture, batch, seq_len, documents, dtype=dtype, optimizer=optimizer)
    names = ("drop_duplicates", "state", "clips", "two_level")
    about = {name: search[name] for name in names if search.get(name) is not None}
    overlap = search.get("overlaps", True)
    best = [each for each in plans if each.is_possible and each.fits][:simulated]
    steps = [
        (each, simulate_step(workload, step_of_plan(each, overlap=overlap, **about), machine, fidelity=fidelity))
        for each in best
    ]
    steps.sort(key=lambda pair: pair[1].step_time)
    found = [_simulated_plan(each, step, steps[0][1]) for each, step in steps]
    note = f"the first {len(found)} plans are in the order of simulated steps ({fidelity}); others were not simulated"
    others = [each for each in plans if each not in best]
    return [replace(each, notes=(*each.notes, note)) for each in (*found, *others)]


def list_terms(step: StepSimulation) -> dict[str, float]:
    """The parts of a simulated step by the planner's names: their sum is its time. An axis that is exposed together
    with another has its part of that time."""
    shared = sum(step.exposed.values())
    part = step.exposed_total / shared if shared else 0.0
    slowed = max(0.0, step.computation - step.undisturbed)
    terms = {"computation": step.undisturbed - step.optimizer, "the optimizer": step.optimizer}
    if len(step.programs.ranks) > 1:
        terms["pipeline bubbles"] = step.idle
    terms |= {f"exposed communication over {axis}": part * time for axis, time in step.exposed.items()}
    terms["slower computation beside communication"] = slowed
    if len(step.programs.ranks) == 1 and step.idle > 0:
        terms["waits"] = step.idle
    return terms


def _simulated_plan(plan: GridPlan, step: StepSimulation, best: StepSimulation) -> GridPlan:
    terms = list_terms(step)
    exposed = dict(plan.exposed) | dict.fromkeys(plan.exposed, 0.0) | step.exposed
    return replace(
        plan,
        step_time=step.step_time,
        terms=terms,
        exposed=exposed,
        bubble=step.idle if plan.schedule else 0.0,
        why=_explain(terms, list_terms(best), step.step_time / best.step_time - 1),
    )


def _explain(terms: Mapping[str, float], best: Mapping[str, float], slower: float) -> str:
    """Say why a plan is not the first: the parts of its step that are longer, the longest first."""
    if slower <= 0:
        return "the fastest simulated step"
    longer = {name: time - best.get(name, 0.0) for name, time in terms.items()}
    causes: Sequence[str] = sorted((name for name in longer if longer[name] > 0), key=lambda name: -longer[name])[:2]
    shown = ", ".join(f"{name} +{longer[name] * 1e3:.3g} ms" for name in causes)
    return f"{slower:.1%} slower in simulation: {shown}"
