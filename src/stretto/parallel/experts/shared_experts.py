# SPDX-License-Identifier: Apache-2.0
"""Runs what else a block computes, such as its shared experts, while its tokens travel to their experts.

A block's own forward calls its shared experts before its router, or after its experts. torch.fx records it, with the
block's submodules as single calls, and its nodes are put in another order: what the experts need, the start of the
exchange, what neither needs nor is needed by the experts, the experts, and the rest. Autograd runs the same order
backward.
"""

import logging
import operator
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

from torch import nn
from torch.fx import Graph, GraphModule, Node, Proxy, Tracer
from torch.fx.node import map_arg
from torch.fx.proxy import Attribute, TraceError

from stretto.parallel.experts.module import ParallelExperts

_logger = logging.getLogger(__name__)


def compute_under_exchange(block: nn.Module, name: str, *, is_on: bool) -> None:
    """Have a block compute what its experts, its child `name`, do not need while their tokens travel.

    is_on: else only the order changes, in which the parts of a gradient are added. The block stays as it is if there is
    nothing such, or if torch.fx cannot record its forward.
    """
    experts = getattr(block, name)
    if not isinstance(experts, ParallelExperts) or not experts.can_start or "forward" in vars(block):
        return
    try:
        found = [_reorder(_record(block, is_training=each), name) for each in (True, False)]
    except Exception as error:  # noqa: BLE001  (the block's own code may do what torch.fx cannot record)
        _logger.debug("what %s computes beside its experts is not overlapped: %s", type(block).__name__, error)
        return
    graphs = [graph for graph in found if graph is not None]
    sources = {graph.python_code("self").src for graph in graphs}
    if len(graphs) == 2 and len(sources) == 1:
        key = type(block), sources.pop()
        if key not in _forwards:
            _forwards[key] = type(GraphModule(block, graphs[0])).forward
        block.forward = MethodType(_forwards[key], block)
        experts.starts_early = is_on


_forwards: dict[tuple[type, str], Callable[..., Any]] = {}  # one a kind of blocks, which share a compiled graph then


class _Shape(Attribute):
    """A tensor's shape, of a number of dims that a record does not know: as many arguments it stays one, a shape."""

    def __len__(self) -> int:
        raise TypeError("a recorded shape has no length")  # so that Python takes what `iter` returns


class _Proxy(Proxy):
    def __getattr__(self, name: str) -> Attribute:
        return _Shape(self, name) if name == "shape" else super().__getattr__(name)


class _BlockTracer(Tracer):
    """Records a module's own code, and takes its submodules as they are."""

    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        return True

    def proxy(self, node: Node) -> Proxy:
        return _Proxy(node, self)

    def iter(self, obj: Proxy) -> Iterator[Any]:
        if not isinstance(obj, _Shape):
            return super().iter(obj)
        self.shapes.append(obj.node)
        return iter([obj])

    def record(self, block: nn.Module) -> Graph:
        """The graph of the block's forward. Shapes that it iterates over are a method's only arguments."""
        self.shapes: list[Node] = []
        graph = self.trace(block)
        users = [(user, shape) for shape in self.shapes for user in shape.users if user.target is not operator.getitem]
        if any(user.op != "call_method" or user.args[1:] != (shape,) for user, shape in users):
            raise TraceError("a shape was iterated over")
        return graph


def _record(block: nn.Module, *, is_training: bool) -> Graph:
    before, block.training = block.training, is_training
    try:
        return _BlockTracer().record(block)
    finally:
        block.training = before


def _reorder(graph: Graph, name: str) -> Graph | None:
    """The graph in the new order; None if it has nothing to run under the exchange, or writes to its tensors."""
    calls = [node for node in graph.nodes if node.op == "call_module" and node.target == name]
    if len(calls) != 1 or any(map(_writes, graph.nodes)):
        return None
    (call,) = calls
    before, after = _reach(call, "all_input_nodes"), _reach(call, "users")
    others = [node for node in graph.nodes if node not in before and node not in after]
    if not any(node.op == "call_module" for node in others):
        return None
    made, copies = Graph(), dict[Node, Node]()
    for node in graph.nodes:
        if node in before and node is not call:
            copies[node] = made.node_copy(node, copies.__getitem__)
    for node in others:
        if node.op == "placeholder":
            copies[node] = made.node_copy(node)
    args, kwargs = map_arg((call.args, call.kwargs), copies.__getitem__)
    started = made.call_method("start", (made.get_attr(name), *args), kwargs)
    for node in others:
        if node.op != "placeholder":
            copies[node] = made.node_copy(node, copies.__getitem__)
    copies[call] = made.call_module(name, args, {**kwargs, "started": started})
    for node in graph.nodes:
        if node not in copies:
            copies[node] = made.node_copy(node, copies.__getitem__)
    return made


def _writes(node: Node) -> bool:
    """True for a node that writes to a tensor in place."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if node.op == "call_function":
        is_in_place = hasattr(operator, f"__{name}__") and hasattr(operator, f"__{name[1:]}__")  # iadd, of add
        return is_in_place or name == "setitem" or name.endswith("_") or bool({"out", "inplace"} & node.kwargs.keys())
    return node.op == "call_method" and name.endswith("_") and not name.endswith("__")


def _reach(node: Node, edges: str) -> dict[Node, None]:
    """The node, and what it reaches by edges of a kind."""
    found, waiting = {node: None}, [node]
    while waiting:
        for each in getattr(waiting.pop(), edges):
            if each not in found:
                found[each] = None
                waiting.append(each)
    return found
