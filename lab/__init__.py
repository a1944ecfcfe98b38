# SPDX-License-Identifier: Apache-2.0
"""The lab beside the library: benches with their peers, papers' figures, and their committed results. Not in the wheel.

`python -m lab` lists them. A folder has the settings of its benches (of which `stretto.cli.settings_command` makes the
commands' options), the benches, their peers and their pictures.
"""

from lab.harness import list_plots
from lab.pictures import PLOTS

PLOTS.update(
    list_plots()
    | {
        "overlap.json": "lab.training.plot:plot_overlap",
        "dlrm.json": "lab.training.plot:plot_dlrm",
        "ddp.json": "lab.training.plot:plot_ddp",
        "offload-buckets.json": "lab.training.plot:plot_buckets",
        "pipeline.json": "lab.training.plot:plot_pipeline",
        "faults.json": "tests.faults.report:plot_faults",
        "messages.json": "lab.messages.plot:plot_messages",
        "plan.json": "lab.planning.plot:plot_plan",
        "layouts-*.json": "lab.planning.plot:plot_layouts",
        "pipelining.json": "lab.collectives.plot:plot_pipelining",
        "composition.json": "lab.collectives.plot:plot_composition",
        "operator-ablations*.json": "lab.operators.plot:plot_ablations",
        "two-level.json": "lab.two_level.plot:plot_two_level",
        "simulated-two-level.json": "lab.studies.plot:plot_two_level_heat_maps",
        "simulated-curves.json": "lab.studies.plot:plot_curves",
        "simulated-zero3.json": "lab.studies.plot:plot_zero3",
        "simulated-dlrm.json": "lab.studies.plot:plot_simulated_dlrm",
        "simulated-scaling.json": "lab.studies.plot:plot_scaling",
        "checkouts.json": "lab.checkouts.plot:plot_checkouts",
        "simulated-steps.json": "lab.planning.plot:plot_simulated_steps",
        "simulated-pipelines.json": "lab.planning.plot:plot_simulated_pipelines",
        "experts.json": "lab.training.plot:plot_experts",
        "simulated-collectives.json": "lab.simulated_schedules.plot:plot_simulated_collectives",
        "simulated-msccl.json": "lab.simulated_schedules.plot:plot_simulated_msccl",
    }
)
