# SPDX-License-Identifier: Apache-2.0
"""Makes a small cluster on one Linux machine: a network namespace a node, and links of a given bandwidth.

`leaf_nodes` nodes each connect to a switch (a bridge), and one link (the trunk) joins each switch to the next. Every
link is a pair of virtual devices, limited to its bandwidth by a token bucket (tbf) at both ends. Ranks of one node send
to each other over the namespace's loopback, which has a token bucket too. The machine's own network is not touched:
nothing here has an address outside the namespaces.
"""

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from stretto.cli.console import raising_on_sigterm

INTERFACE = "stretto"  # a node's network interface, in its namespace
_MTU = 9000
_BURST_BYTES = _MTU + 100  # a token bucket must hold a whole packet with its headers
_QUEUE_BYTES = 64 * 2**20  # never full: with dropped packets, TCP's retransmission would be measured
MAX_NODES = 64
_TCP = (
    # a connection that was idle between two collectives keeps its window, and is not paced
    "net.ipv4.tcp_slow_start_after_idle=0",
    "net.ipv4.tcp_congestion_control=reno",
    # acknowledgements and small messages do not queue behind a whole large message
    f"net.ipv4.tcp_limit_output_bytes={4 * _MTU}",
)


@dataclass(frozen=True)
class Network:
    """Nodes, nodes a switch, and the bandwidths (bytes/s) of a node's link, its loopback, and the switches' trunk."""

    nodes: int
    leaf_nodes: int
    node_bandwidth: float
    loopback_bandwidth: float
    trunk_bandwidth: float

    def __post_init__(self) -> None:
        if not 2 <= self.nodes <= MAX_NODES:
            raise ValueError(f"a network of {self.nodes} nodes: 2 to {MAX_NODES} will do")
        if self.leaf_nodes < 1 or self.nodes % self.leaf_nodes:
            raise ValueError(f"{self.leaf_nodes} nodes a switch do not make up {self.nodes} nodes; 1 would do")
        for name in ("node_bandwidth", "loopback_bandwidth", "trunk_bandwidth"):
            if getattr(self, name) < 1000:
                raise ValueError(f"{name} is {getattr(self, name):g} bytes/s, but must be at least 1000")

    @property
    def leaves(self) -> int:
        return self.nodes // self.leaf_nodes


def namespace_of(node: int) -> str:
    return f"stretto-node{node}"


def command_in(node: int, module: str, *arguments: str) -> list[str]:
    """The command that runs a module of this checkout in a node's namespace."""
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    # OMP: all ranks share the machine's cores.
    environment = ("env", f"PYTHONPATH={path}", f"GLOO_SOCKET_IFNAME={INTERFACE}", "OMP_NUM_THREADS=1")
    return ["ip", "netns", "exec", namespace_of(node), *environment, sys.executable, "-P", "-m", module, *arguments]


def require_namespaces() -> None:
    """Raise ValueError if this machine or user cannot make network namespaces."""
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if sys.platform != "linux":
        raise ValueError("network namespaces are Linux's; this machine runs " + sys.platform)
    if missing:
        raise ValueError(f"{' and '.join(missing)} not found: install iproute2")
    if os.geteuid() != 0:
        raise ValueError("making network namespaces needs root: run this as root (sudo)")


@contextlib.contextmanager
def shaped_network(network: Network) -> Iterator[None]:
    """Make the namespaces and links, and remove them at the end, also after an error, Ctrl-C or SIGTERM.

    Leftovers of a run that was killed are removed first. Raises ValueError if the namespaces cannot be made, or while
    another process uses them.
    """
    require_namespaces()
    with _lock(), raising_on_sigterm():
        _remove()
        try:
            _make(network)
            yield
        finally:
            _remove()


def list_leftovers() -> list[str]:
    """Names of the namespaces and devices that `shaped_network` has made and not removed."""
    namespaces = [line.split()[0] for line in _output("ip", "netns", "list").splitlines() if line.strip()]
    devices = [line.split(":")[1].strip().split("@")[0] for line in _output("ip", "-o", "link").splitlines()]
    return [name for name in namespaces if name.startswith("stretto-node")] + [
        name for name in devices if name.startswith(("strt-leaf", "strt-port", "strt-up"))
    ]


def _make(network: Network) -> None:
    for leaf in range(network.leaves):
        _ip("link", "add", f"strt-leaf{leaf}", "mtu", str(_MTU), "type", "bridge")
        _ip("link", "set", f"strt-leaf{leaf}", "up")
    for leaf in range(network.leaves - 1):
        ends = f"strt-up{leaf}a", f"strt-up{leaf}b"
        _ip("link", "add", ends[0], "mtu", str(_MTU), "type", "veth", "peer", "name", ends[1], "mtu", str(_MTU))
        for end, switch in zip(ends, (leaf, leaf + 1), strict=True):
            _ip("link", "set", end, "master", f"strt-leaf{switch}", "up")
            _shape(end, network.trunk_bandwidth)
    for node in range(network.nodes):
        name, port = namespace_of(node), f"strt-port{node}"
        _ip("netns", "add", name)
        _ip("link", "add", port, "mtu", str(_MTU), "type", "veth", "peer", "name", INTERFACE, "netns", name)
        _ip("-n", name, "link", "set", INTERFACE, "mtu", str(_MTU))
        _ip("link", "set", port, "master", f"strt-leaf{node // network.leaf_nodes}", "up")
        _ip("-n", name, "addr", "add", f"10.213.77.{node + 1}/24", "dev", INTERFACE)
        _ip("-n", name, "link", "set", INTERFACE, "up")
        _ip("-n", name, "link", "set", "lo", "mtu", str(_MTU), "up")
        _shape(port, network.node_bandwidth)
        _shape(INTERFACE, network.node_bandwidth, name)
        _shape("lo", network.loopback_bandwidth, name)
        _run("ip", "netns", "exec", name, "sysctl", "-q", "-w", *_TCP)


def _shape(device: str, bandwidth: float, namespace: str | None = None) -> None:
    where = [] if namespace is None else ["-n", namespace]
    bucket = ["rate", f"{round(8 * bandwidth)}bit", "burst", str(_BURST_BYTES), "limit", str(_QUEUE_BYTES)]
    _run("tc", *where, "qdisc", "add", "dev", device, "root", "tbf", *bucket)


def _remove() -> None:
    for name in list_leftovers():
        # removing a namespace removes both ends of its link: ignore missing ones
        kind = ["netns"] if name.startswith("stretto-node") else ["link"]
        subprocess.run(["ip", *kind, "del", name], capture_output=True, check=False)


@contextlib.contextmanager
def _lock() -> Iterator[None]:
    with (Path(tempfile.gettempdir()) / "stretto-namespaces.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError("another process uses Stretto's network namespaces: wait for its end") from None
        yield


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(
            f"`{' '.join(command)}` failed: {done.stderr.strip()}; this needs a Linux kernel with network namespaces, "
            "veth, bridge and tbf, and the right to use them"
        )
