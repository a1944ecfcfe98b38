# SPDX-License-Identifier: Apache-2.0
"""Hierarchical collectives: one phase between nodes and one inside them, over torch.distributed's groups.

Training uses it for `ExecutionOptions.two_level` (`stretto.parallel.comm.two_level`), and the torch.distributed backend
after `set_two_level`. Large buffers are cut into parts: while one is between nodes, another one is inside them.

from stretto.collectives.two_level import TwoLevelGroup

two_level = TwoLevelGroup()  # finds from the hosts which ranks share a node
two_level.all_gather(output, input)
work = two_level.all_reduce(gradients, "avg", async_op=True)
work.wait()

The groups, for three nodes of two ranks (a rank is at a *place* of its *node*):

               place 0          place 1
             +---------------------------+
    node 0   |  rank 0  <=====>  rank 1  |     <=====>  intra-node group: the ranks of a node; the library's
             +----^----------------^-----+              collective (NCCL or gloo) on the node's fast links
                  |                |
             +----v----------------v-----+        |     inter-node group: the ranks of one place on all nodes;
    node 1   |  rank 2  <=====>  rank 3  |              ring or recursive, by messages. All places work at once,
             +----^----------------^-----+              so every network interface of a node is busy
                  |                |
             +----v----------------v-----+
    node 2   |  rank 4  <=====>  rank 5  |
             +---------------------------+

Who sends what when, in an all-gather of one block a rank with the ring, seen from rank 2 (b4: the block of rank 4):

    phase          step      sends                 receives                 its slots afterwards
    -              -         -                     -                        [b2, -,  -]
    between nodes  1 of 2    b2 to rank 0          b4 from rank 4           [b2, b4, -]
    between nodes  2 of 2    b4 to rank 0          b0 from rank 4           [b2, b4, b0]
    inside a node  1 of 1    [b2, b4, b0] to 3     [b3, b5, b1] from 3      both, one row a place
    shuffle        (copies)  -                     -                        output [b0, b1, b2, b3, b4, b5]

A reduce-scatter runs the same table backwards (shuffle, sum inside the node, sums between nodes) and adds where the
all-gather copies. An all-reduce is a reduce-scatter and an all-gather.

Modules, in the order in which a call passes them: `group` (the public class), `stretto.cluster.two_level` (chooses
ring, recursive or flat, and the number of parts), `work` (starts collectives in order, waits with a time limit),
`inter_node` and `intra_node` (the phases), `buffers` (splits, views and reduces tensors); `nodes` finds which ranks
share a node.
"""

from stretto.cluster.two_level import TYPICAL, Links, choose, predict
from stretto.collectives.two_level.group import Levels, TwoLevelCall, TwoLevelGroup
from stretto.collectives.two_level.inter_node import GroupTransport, Message, NodeTransport
from stretto.collectives.two_level.nodes import Nodes, exchange_hosts, name_nodes
from stretto.collectives.two_level.work import MessageWork, Work

__all__ = [
    "TYPICAL",
    "GroupTransport",
    "Levels",
    "Links",
    "Message",
    "MessageWork",
    "NodeTransport",
    "Nodes",
    "TwoLevelCall",
    "TwoLevelGroup",
    "Work",
    "choose",
    "exchange_hosts",
    "name_nodes",
    "predict",
]
