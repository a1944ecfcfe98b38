"""What the machine is: nodes, GPUs, links, with the source of each figure. Imports no GPU library."""

from stretto.cluster.cluster import Cluster
from stretto.cluster.model import GPU, FlopRates, InNodeBandwidth, NetworkLink, NodeLink

__all__ = ["GPU", "Cluster", "FlopRates", "InNodeBandwidth", "NetworkLink", "NodeLink"]
