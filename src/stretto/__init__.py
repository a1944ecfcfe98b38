# SPDX-License-Identifier: Apache-2.0
"""Stretto overlaps communication with computation in distributed deep learning.

The main functions and classes are `Cluster` (describes a machine), `plan` (predicts the fastest grid), `Grid` (arranges
ranks along axes), `parallelize` (shards a model over a grid), `full_parameters` (edits its weights) and the command
`stretto`. These names and subpackages such as `stretto.ops` are imported on first use, so that `import stretto` is
cheap and modules that need no GPU library do not import one. `import stretto` registers the backend "stretto" with
torch.distributed (stretto.collectives.backend).
"""

from typing import TYPE_CHECKING

from stretto.lazy import attach
from stretto.registration import register

if TYPE_CHECKING:
    from stretto import axes as axes
    from stretto import cluster as cluster
    from stretto import collectives as collectives
    from stretto import execution as execution
    from stretto import huggingface as huggingface
    from stretto import inference as inference
    from stretto import memory as memory
    from stretto import models as models
    from stretto import ops as ops
    from stretto import optim as optim
    from stretto import parallel as parallel
    from stretto import planner as planner
    from stretto import recommendation as recommendation
    from stretto import report as report
    from stretto import tiles as tiles
    from stretto import train as train
    from stretto import tuning as tuning
    from stretto.cluster import Cluster
    from stretto.parallel.api import parallelize
    from stretto.parallel.gathered_parameters import full_parameters
    from stretto.parallel.grid import Grid
    from stretto.planner import plan

__version__ = "0.1.0"
__all__ = ["Cluster", "Grid", "__version__", "full_parameters", "parallelize", "plan"]

__getattr__, __dir__ = attach(__name__)


register()
