# SPDX-License-Identifier: Apache-2.0
"""The lab beside the library: benches with their peers, papers' figures, and their committed results. Not in the wheel.

`python -m lab` lists them. A folder has the settings of its benches (of which `stretto.cli.bench.command` makes the
commands' options), the benches, their peers and their pictures.
"""

from lab.harness import list_plots
from stretto.bench.pictures import PLOTS

PLOTS.update(
    list_plots()
    | {
        "faults.json": "tests.faults.report:plot_faults",
        "messages.json": "lab.messages.plot:plot_messages",
        "pipelining.json": "lab.collectives.plot:plot_pipelining",
        "composition.json": "lab.collectives.plot:plot_composition",
        "operator-ablations*.json": "lab.operators.plot:plot_ablations",
        "two-level.json": "lab.two_level.plot:plot_two_level",
        "checkouts.json": "lab.checkouts.plot:plot_checkouts",
        "experts.json": "lab.training.plot:plot_experts",
        "simulated-collectives.json": "lab.simulated_schedules.plot:plot_simulated_collectives",
        "simulated-msccl.json": "lab.simulated_schedules.plot:plot_simulated_msccl",
    }
)
