# SPDX-License-Identifier: Apache-2.0
"""Describes a machine: nodes, GPUs, links, with the source of each figure. Imports no GPU library.

Modules: `cluster` (the class `Cluster`), `model` (its parts), `schema` (checks values, reads and writes TOML), `files`
(bounded reading of files and presets), `detection` (the machine at hand, datasheets of known GPUs), `description` (a
table for people), `host_memory` (this machine's host memory, its limits and what is left), `local_ranks` (which ranks
of a job are on this machine, and on one node), `nics` (the network interface of each rank), `two_level` (the times of
collectives between and inside nodes).
"""

from stretto.axes import name_grid
from stretto.cluster.cluster import Cluster
from stretto.cluster.files import check_depth, read_bounded, reading
from stretto.cluster.model import (
    GPU,
    FlopRates,
    HostLink,
    HostTimes,
    InNodeBandwidth,
    Matmul,
    MeasuredCollective,
    NetworkLink,
    NodeLink,
)

__all__ = [
    "GPU",
    "Cluster",
    "FlopRates",
    "HostLink",
    "HostTimes",
    "InNodeBandwidth",
    "Matmul",
    "MeasuredCollective",
    "NetworkLink",
    "NodeLink",
    "check_depth",
    "name_grid",
    "read_bounded",
    "reading",
]
