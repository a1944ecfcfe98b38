"""What the machine is: nodes, GPUs, links, with the source of each figure. Imports no GPU library."""

from stretto.cluster.bounded import read_bounded
from stretto.cluster.cluster import Cluster
from stretto.cluster.model import GPU, FlopRates, InNodeBandwidth, Matmul, NetworkLink, NodeLink, Transfer
from stretto.cluster.naming import name_grid

__all__ = [
    "GPU",
    "Cluster",
    "FlopRates",
    "InNodeBandwidth",
    "Matmul",
    "NetworkLink",
    "NodeLink",
    "Transfer",
    "name_grid",
    "read_bounded",
]
