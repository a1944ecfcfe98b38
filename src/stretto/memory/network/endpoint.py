# SPDX-License-Identifier: Apache-2.0
"""A group's endpoint on this rank: its proxies, its regions, and the FIFO by which the host puts."""

import logging
import os
import secrets
import threading
import time
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from stretto.cluster.nics import pinned_near
from stretto.memory.groups import exchange, find_own_rank, group_timeout
from stretto.memory.network.descriptors import Fifo, Put
from stretto.memory.network.frames import MAX_PUT_BYTES, TOKEN_BYTES
from stretto.memory.network.interfaces import NetworkInterface, find_gin_obstacle, find_interface
from stretto.memory.network.native import NativeProxy, load_library
from stretto.memory.network.proxy import Proxy
from stretto.memory.network.transport import LOCAL_REGIONS, PutRegion
from stretto.memory.symmetric import PeerError
from stretto.native_code import CompilerError

logger = logging.getLogger(__name__)

PROXY_VARIABLE = "STRETTO_PROXY"
"""The variable that names a proxy: "native", "python", or "auto" (the default): native where it can be compiled."""
_PROXIES = ("auto", "native", "python")
_CLOSING_SECONDS = 2.0


class _Address(NamedTuple):
    """A rank's description of itself for the others: its node, its NIC, where its lanes' proxies listen, how many
    lanes it has cores for, rank 0's token, a refusal."""

    node: str
    nic: str
    host: str
    ports: tuple[int, ...]
    lanes: int
    token: bytes
    refusal: str


class Endpoint:
    """This rank's end of all puts of a group; made by `find_endpoint`.

    nodes: of each rank, its node's number. Only one thread may put at a time. lanes: proxies, which all know all
    regions; `proxy` is the first one, by which the host puts. What goes by one lane has no order with what goes by
    another.
    """

    def __init__(self, group: dist.ProcessGroup | None, nodes: Sequence[str], timeout: float) -> None:
        self.rank, self.world = find_own_rank(group)
        self.timeout = group_timeout(group)
        order = {name: number for number, name in enumerate(dict.fromkeys(nodes))}
        self.nodes = tuple(order[name] for name in nodes)
        self._regions = 0
        self._local_regions = LOCAL_REGIONS
        self._lock = threading.Lock()
        token = secrets.token_bytes(TOKEN_BYTES)
        make: type[Proxy] | type[NativeProxy] | None = None
        lanes = 1
        interface, refusal = NetworkInterface("", ""), ""
        try:  # here, so that all ranks learn what is wrong on one, and wait for one that compiles
            make = choose_proxy()
            lanes = make.count_lanes(sum(name == nodes[self.rank] for name in nodes))
            interface = find_interface(is_one_machine=len({name.partition(" node ")[0] for name in nodes}) == 1)
        except (ValueError, OSError, CompilerError) as error:
            refusal = str(error)
        # The token is rank 0's. Listeners open once all ranks know it, and nobody connects before the second exchange.
        offers = exchange(_Address("", interface.name, "", (), lanes, token, refusal), group, timeout, _Address)
        _require_willing(offers)
        assert make is not None
        proxies: list[Proxy | NativeProxy] = []
        lanes = min(offer.lanes for offer in offers)
        try:
            while len(proxies) < lanes:
                proxies.append(make(self.rank, self.world, offers[0].token, interface.address, self.timeout))
        except OSError as error:
            refusal = str(error)
        try:
            ports = tuple(proxy.address[1] for proxy in proxies)
            host = interface.address
            own = _Address(nodes[self.rank], interface.name, host, ports, lanes, b"", refusal)
            addresses = exchange(own, group, timeout, _Address)
            _require_willing(addresses)
        except BaseException:
            for proxy in proxies:
                proxy.close(0.0)
            raise
        self.lanes, self.proxy = tuple(proxies), proxies[0]
        self.nics = tuple(address.nic for address in addresses)
        far = {peer: one for peer, one in enumerate(addresses) if one.node != nodes[self.rank]}
        with pinned_near(interface.name):
            for lane, proxy in enumerate(proxies):
                proxy.connect({peer: (one.host, one.ports[lane]) for peer, one in far.items()})
        self._fifo = Fifo.allocate()
        self.proxy.add_fifo(self._fifo, False)

    def add_region(self, whole: Tensor, pad_bytes: int, signals: int, near: dict[int, Tensor]) -> int:
        """Register a region that all ranks register in the same order; returns its number."""
        number = self._regions
        if number == LOCAL_REGIONS:
            raise RuntimeError(f"a group has up to {LOCAL_REGIONS} regions in its life: make a new group")
        self._regions += 1
        for proxy in self.lanes:
            proxy.add_region(PutRegion(number, whole, pad_bytes, signals, near))
        return number

    def add_source(self, memory: Tensor) -> int:
        """Register memory of this rank that puts read, uint8; returns its number."""
        number = self._local_regions
        self._local_regions += 1
        self.proxy.add_region(PutRegion(number, memory, 0, 0, {}))
        return number

    def remove_region(self, number: int) -> None:
        """Forget a region or a source, once what was put from it has arrived."""
        self._fifo.wait_until_read(_CLOSING_SECONDS)
        deadline = time.monotonic() + self.timeout  # of all lanes together
        for proxy in self.lanes:
            proxy.remove_region(number, max(deadline - time.monotonic(), 0.0))

    def put(self, put: Put) -> None:
        """Post a put of any size; its signal comes after all of its bytes. PeerError if the peer is lost."""
        try:
            with self._lock:
                while put.size > MAX_PUT_BYTES:
                    self.proxy.put(self._fifo, put._replace(size=MAX_PUT_BYTES, signal=None), self.timeout)
                    put = put._replace(
                        source=put.source + MAX_PUT_BYTES,
                        offset=put.offset + MAX_PUT_BYTES,
                        size=put.size - MAX_PUT_BYTES,
                    )
                may_be_lost = self.proxy.put(self._fifo, put, self.timeout)
        except TimeoutError as error:
            raise PeerError(f"rank {self.rank} puts to rank {put.peer}, and {error}") from error
        if may_be_lost:
            self.check(put.peer)

    def check(self, peer: int) -> None:
        """PeerError if the peer cannot be reached any more; it names both ranks, their nodes and NICs, and why."""
        if (why := self.failure(peer)) is not None:
            raise PeerError(f"{self.describe(self.rank)} has lost {self.describe(peer)}: {why}")

    def failure(self, peer: int) -> str | None:
        """Say why a lane cannot reach the peer, or is broken; None as long as all can."""
        return next((why for proxy in self.lanes if (why := proxy.failure(peer)) is not None), None)

    def describe(self, rank: int) -> str:
        return f"rank {rank} of {self.world} (node {self.nodes[rank]}, NIC {self.nics[rank]})"

    def close(self) -> None:
        """End the proxies, once all that was put has arrived, or after two seconds."""
        self._fifo.wait_until_read(_CLOSING_SECONDS)
        deadline = time.monotonic() + _CLOSING_SECONDS
        for proxy in self.lanes:
            proxy.close(max(deadline - time.monotonic(), 0.0))


_endpoints: "weakref.WeakKeyDictionary[dist.ProcessGroup, Endpoint]" = weakref.WeakKeyDictionary()


def find_endpoint(group: dist.ProcessGroup | None, nodes: Sequence[str], timeout: float) -> Endpoint:
    """The group's endpoint; made at the first call, by all ranks together. nodes: each rank's node's name."""
    known = dist.group.WORLD if group is None else group
    assert known is not None
    endpoint = _endpoints.get(known)
    if endpoint is None:
        endpoint = _endpoints[known] = Endpoint(group, nodes, timeout)
        weakref.finalize(known, endpoint.close)
    return endpoint


def _require_willing(offers: Sequence[_Address]) -> None:
    for peer, offer in enumerate(offers):
        if offer.refusal:
            raise ValueError(f"rank {peer} cannot put to other nodes: {offer.refusal}")


def choose_proxy() -> type[Proxy] | type[NativeProxy]:
    """The proxy that STRETTO_PROXY names, or the native one where it can be compiled and loaded.

    Raises ValueError for another name; CompilerError and OSError for "native" where that cannot be.
    """
    asked = os.environ.get(PROXY_VARIABLE, "") or "auto"
    if asked == "gin":
        raise ValueError(f"{PROXY_VARIABLE}=gin: {find_gin_obstacle()}; {', '.join(_PROXIES)} would do")
    if asked not in _PROXIES:
        raise ValueError(f"{PROXY_VARIABLE} must be one of {', '.join(_PROXIES)}, not {asked!r}")
    if asked == "python":
        return Proxy
    try:
        load_library()
    except (CompilerError, OSError) as error:
        if asked == "native":
            raise
        logger.warning("puts between nodes go through the proxy in Python, which takes more of a core: %s", error)
        return Proxy
    return NativeProxy
