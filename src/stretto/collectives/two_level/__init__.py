"""Collectives in two levels, between nodes and inside them, over torch.distributed's groups.

from stretto.collectives.two_level import TwoLevelGroup

two_level = TwoLevelGroup()  # nodes are found from the host names
two_level.all_gather(output, input)
work = two_level.all_reduce(gradients, "avg", async_op=True)
work.wait()
"""

from stretto.collectives.two_level.group import TwoLevelCall, TwoLevelGroup
from stretto.collectives.two_level.inter_node import GroupTransport, Message, Transport
from stretto.collectives.two_level.model import TYPICAL, Links, choose, find_crossovers, predict
from stretto.collectives.two_level.nodes import Nodes
from stretto.collectives.two_level.work import MessageWork, Work
from stretto.deprecated import alias

__all__ = [
    "TYPICAL",
    "GroupTransport",
    "Links",
    "Message",
    "MessageWork",
    "Nodes",
    "Transport",
    "TwoLevelCall",
    "TwoLevelGroup",
    "Work",
    "choose",
    "find_crossovers",
    "predict",
]

__getattr__ = alias(__name__, {"Call": "TwoLevelCall", "Transfer": "MessageWork"})
