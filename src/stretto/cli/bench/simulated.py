# SPDX-License-Identifier: Apache-2.0
"""`stretto bench`: predictions of the planner and the simulator for published figures and other clusters."""

from __future__ import annotations  # the settings are imported when a command is used

from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto.cli.bench.command import bench_command

if TYPE_CHECKING:
    from stretto.bench.plan.settings import (
        PublishedExpertsSetting,
        PublishedPipelinesSetting,
        PublishedSetting,
        SimulatedStepsSetting,
    )
    from stretto.bench.simulated_schedules.settings import SimulatedCollectivesSetting, SimulatedMscclSetting
    from stretto.bench.simulator_speed import SimulatorSpeedSetting
    from stretto.bench.studies.settings import (
        SimulatedDlrmSetting,
        SimulatedScalingSetting,
        SimulatedTwoLevelSetting,
        SimulatedZero3Setting,
    )


@bench_command("published", "stretto.bench.plan.settings")
def published(setting: PublishedSetting, out: Path) -> Any:
    """Plans for every run of Singh's dissertation (Table 5.2), compared with the published FLOP/s (needs no GPU)."""
    from stretto.bench.plan.published import bench_published

    return bench_published(out, setting.batch)


@bench_command("published-pipelines", "stretto.bench.plan.settings")
def published_pipelines(setting: PublishedPipelinesSetting, out: Path) -> Any:
    """Plans for the pipelines of Singh's chapter 3 on Summit, compared with the published times (needs no GPU)."""
    from stretto.bench.plan.published_pipelines import bench_published_pipelines

    return bench_published_pipelines(out, setting.batch)


@bench_command("published-experts", "stretto.bench.plan.settings")
def published_experts(setting: PublishedExpertsSetting, out: Path) -> Any:
    """Plans for the mixtures of experts of Singh's chapter 7 on Summit, and the published figures (needs no GPU)."""
    from stretto.bench.plan.published_experts import bench_published_experts

    return bench_published_experts(out, setting.micro_batch)


@bench_command("simulated-steps", "stretto.bench.plan.settings")
def simulated_steps(setting: SimulatedStepsSetting, out: Path) -> Any:
    """Steps that were measured on GPUs, compared with the simulator and the planner (needs no GPU)."""
    from stretto.bench.plan.simulated_steps import bench_simulated_steps

    return bench_simulated_steps([Path(folder) for folder in setting.plans], setting.overlaps, out)


@bench_command("simulated-pipelines", "stretto.bench.plan.settings")
def simulated_pipelines(setting: PublishedPipelinesSetting, out: Path) -> Any:
    """The pipelines of Singh's chapter 3 on Summit, simulated, compared with the published times (needs no GPU)."""
    from stretto.bench.plan.simulated_pipelines import bench_simulated_pipelines

    return bench_simulated_pipelines(out, setting.batch)


@bench_command("simulated-collectives", "stretto.bench.simulated_schedules.settings")
def simulated_collectives(setting: SimulatedCollectivesSetting, out: Path) -> Any:
    """Simulated and measured schedules, on H200 and on 8 processes over shaped links (measuring needs root)."""
    setting.require_results()

    from stretto.bench.simulated_schedules.run import bench_simulated_collectives

    return bench_simulated_collectives(setting, out)


@bench_command("simulated-msccl", "stretto.bench.simulated_schedules.settings")
def simulated_msccl(setting: SimulatedMscclSetting, out: Path) -> Any:
    """MSCCLang's figures 8 and 11 simulated: hierarchical, two-step and AllToNext on clusters (needs no GPU)."""
    from stretto.bench.simulated_schedules.msccl import bench_simulated_msccl

    return bench_simulated_msccl(setting, out)


@bench_command("simulator-speed", "stretto.bench.simulator_speed")
def simulator_speed(setting: SimulatorSpeedSetting, out: Path) -> Any:
    """How long simulations of all-gathers and random messages take, by the number of ranks (needs no GPU)."""
    from stretto.bench.simulator_speed import bench_simulator_speed

    return bench_simulator_speed(out, setting)


@bench_command("simulated-two-level", "stretto.bench.studies.settings")
def simulated_two_level(setting: SimulatedTwoLevelSetting, out: Path) -> Any:
    """Two-level collectives on Frontier and Perlmutter, compared with Singh's chapter 6 (needs no GPU)."""
    from stretto.bench.studies.two_level import bench_simulated_two_level

    return bench_simulated_two_level(setting, out)


@bench_command("simulated-zero3", "stretto.bench.studies.settings")
def simulated_zero3(setting: SimulatedZero3Setting, out: Path) -> Any:
    """ZeRO-3 over flat and two-level collectives, simulated and compared with Singh's figure 6.12 (needs no GPU)."""
    from stretto.bench.studies.zero3 import bench_simulated_zero3

    return bench_simulated_zero3(setting, out)


@bench_command("simulated-scaling", "stretto.bench.studies.settings")
def simulated_scaling(setting: SimulatedScalingSetting, out: Path) -> Any:
    """Weak and strong scaling against Singh's figures 5.4, 5.5 and 5.7, and why Table 5.2 is slower (needs no GPU)."""
    from stretto.bench.studies.scaling import bench_simulated_scaling

    return bench_simulated_scaling(setting, out)


@bench_command("simulated-dlrm", "stretto.bench.studies.settings")
def simulated_dlrm(setting: SimulatedDlrmSetting, out: Path) -> Any:
    """A DLRM's step on a torus of 128+ nodes, compared with section 4.4 of Punniyamurthy et al. (needs no GPU)."""
    from stretto.bench.studies.recommendation import bench_simulated_dlrm

    return bench_simulated_dlrm(setting, out)
