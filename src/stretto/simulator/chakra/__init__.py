# SPDX-License-Identifier: Apache-2.0
"""Chakra execution traces (MLCommons): how ASTRA-sim's users describe what every rank computes and sends."""

from stretto.simulator.chakra.files import ChakraTrace, group_node, read_chakra, write_chakra
from stretto.simulator.chakra.schema import Attribute, ChakraNode, CollectiveType, Metadata, NodeType, TensorInfo

__all__ = [
    "Attribute",
    "ChakraNode",
    "ChakraTrace",
    "CollectiveType",
    "Metadata",
    "NodeType",
    "TensorInfo",
    "group_node",
    "read_chakra",
    "write_chakra",
]
