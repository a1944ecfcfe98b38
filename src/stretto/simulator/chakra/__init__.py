# SPDX-License-Identifier: Apache-2.0
"""Chakra execution traces (MLCommons): how ASTRA-sim's users describe what every rank computes and sends."""

from stretto.simulator.chakra.files import ChakraTrace, group_node, read_chakra, write_chakra
from stretto.simulator.chakra.from_graph import graph_trace
from stretto.simulator.chakra.schema import Attribute, ChakraNode, CollectiveType, Metadata, NodeType, TensorInfo
from stretto.simulator.chakra.to_graph import ALGORITHMS, NodeTimes, trace_graph

__all__ = [
    "ALGORITHMS",
    "Attribute",
    "ChakraNode",
    "ChakraTrace",
    "CollectiveType",
    "Metadata",
    "NodeTimes",
    "NodeType",
    "TensorInfo",
    "graph_trace",
    "group_node",
    "read_chakra",
    "trace_graph",
    "write_chakra",
]
