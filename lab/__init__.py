# SPDX-License-Identifier: Apache-2.0
"""The lab beside the library: benches with their peers, papers' figures, and their committed results. Not in the wheel.

`python -m lab` lists them. A bench is one file (`lab.harness`); peers of several are in `lab.peers`.
"""

from lab.harness import list_plots
from lab.pictures import PLOTS

PLOTS.update(list_plots() | {"faults.json": "tests.faults.report:plot_faults"})
