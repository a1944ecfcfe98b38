# SPDX-License-Identifier: Apache-2.0
"""Measures the machines of a job before it runs, and names what is slow: GPUs, links, files, NICs, clocks, versions.

All ranks measure at once. A rank or a link is slow if its best rate stays below a part of the median of its kind, or of
what a cluster file says. What looks slow is measured again, several times, since other load only ever takes time: what
is slow by itself stays so.
"""

import importlib.metadata
import os
import platform
import socket
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.cluster import Cluster
from stretto.cluster.nics import Nic, choose_nics
from stretto.memory import exchange, group_timeout
from stretto.memory.groups import timed_barrier

SLOW_FILES = 0.3
WRONG_CLOCK = 1.0  # seconds: ranks leave a barrier within less, also on busy machines
ATTEMPTS = 8
MAX_ROUNDS = 33  # of pairs: all pairs of up to 34 ranks
PACKAGES = ("stretto", "torch", "triton", "transformers", "numpy")

Send = Callable[[Tensor, int, dist.ProcessGroup | None], Any]


class PreflightEffort(NamedTuple):
    """Extent of the measurements: side of matrices, products of one timing, bytes and number of messages, bytes of a
    file; and the parts of the usual rate below which products and links are slow."""

    side: int
    products: int
    message_bytes: int
    messages: int
    file_bytes: int
    slow_products: float
    slow_link: float


ON_GPU = PreflightEffort(8192, 32, 64 << 20, 8, 256 << 20, 0.8, 0.5)  # equal GPUs differ by up to a tenth
ON_CPU = PreflightEffort(192, 4, 1 << 18, 4, 4 << 20, 0.6, 0.25)  # ranks share cores


@dataclass(frozen=True)
class MachineFault:
    """Something slow or different. kind: "GPU" or "CPU" (products), "link", "files", "NICs", "clock" or "version"."""

    kind: str
    where: str
    found: str
    expected: str

    def __str__(self) -> str:
        return f"{self.kind} {self.where}: {self.found}; {self.expected}"


@dataclass
class PreflightReport:
    """Measurements of all ranks.

    products: FLOP/s of each rank. links: bytes/s by "sender->receiver". files: bytes/s written and read, clocks:
    seconds ahead of the median, nics: names, by host. rank: this process's. seconds: that it took.
    """

    hosts: list[str]
    rank: int
    products: list[float] = field(default_factory=list)
    links: dict[str, float] = field(default_factory=dict)
    files: dict[str, list[float]] = field(default_factory=dict)
    clocks: dict[str, float] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    nics: dict[str, list[str]] = field(default_factory=dict)
    faults: list[MachineFault] = field(default_factory=list)
    seconds: float = 0.0

    def lines(self) -> Iterator[str]:
        """Return the measurements as text, the faults last."""
        files = list(zip(*self.files.values(), strict=True))
        for name, rates, unit in (
            ("products, TFLOP/s", self.products, 1e12),
            ("links, GB/s", list(self.links.values()), 1e9),
            ("files written, GB/s", files[0], 1e9),
            ("files read, GB/s", files[1], 1e9),
        ):
            if rates:
                low, middle, high = (each / unit for each in (min(rates), statistics.median(rates), max(rates)))
                yield f"{name:20} {low:.3g} to {high:.3g}, median {middle:.3g}, of {len(rates)}"
        yield f"{'clocks':20} within {max(map(abs, self.clocks.values())):.3f} s of the median"
        yield f"{'versions':20} {', '.join(' '.join(pair) for pair in self.versions.items())}"
        for host, names in self.nics.items():
            yield f"{'NICs':20} {host}: {', '.join(names) or 'none that is up'}"
        yield from map(str, self.faults)
        yield f"{len(self.faults) or 'no'} fault{'s' * (len(self.faults) != 1)} found in {self.seconds:.1f} s"


def check_machines(
    device: torch.device,
    *,
    folder: Path,
    cluster: Cluster | None = None,
    multiply: Callable[[Tensor, Tensor], Any] = torch.mm,
    send: Send = dist.send,
) -> PreflightReport:
    """Measure the machines of all ranks of the default group. Every rank returns the same faults. Collective.

    folder: where the rate of files is measured. cluster: what the machines should do, besides the same as each other.
    multiply, send: the work that is timed; tests put something slower in its place.
    """
    begun = time.perf_counter()
    effort = ON_GPU if device.type == "cuda" else ON_CPU
    report = PreflightReport(_gather(socket.gethostname()), dist.get_rank())
    _measure_products(report, device, effort, multiply, cluster)
    group = dist.new_group()  # has the connections between pairs, which end with it
    try:
        _measure_links(report, device, effort, send, cluster, group)
    finally:
        dist.destroy_process_group(group)
    _measure_hosts(report, folder, effort)
    _compare_versions(report, device)
    report.seconds = max(_gather(time.perf_counter() - begun))
    return report


def _gather(value: Any) -> list[Any]:
    """Every rank's value, in rank order, as plain data."""
    return exchange(value, None, group_timeout(None))


class _Rate(NamedTuple):
    """A rate, the median of its kind, and what the cluster file says."""

    where: str
    rate: float
    median: float
    expected: float | None

    def is_slow(self, part: float) -> bool:
        return self.rate < part * max(self.median, self.expected or 0.0)

    def fault(self, kind: str, unit: float, name: str) -> MachineFault:
        of_file = "" if self.expected is None else f", of the cluster file {self.expected / unit:.3g}"
        expected = f"the median is {self.median / unit:.3g}{of_file}"
        return MachineFault(kind, self.where, f"{self.rate / unit:.3g} {name}", expected)


def _measure_products(
    report: PreflightReport,
    device: torch.device,
    effort: PreflightEffort,
    multiply: Callable[[Tensor, Tensor], Any],
    cluster: Cluster | None,
) -> None:
    is_gpu = device.type == "cuda"
    a, b = torch.randn(2, effort.side, effort.side, device=device).to(torch.bfloat16 if is_gpu else torch.float32)
    expected = None if cluster is None else getattr(cluster.gpu.empirical_flops, "bf16" if is_gpu else "fp32")
    clock = time.perf_counter if is_gpu else time.process_time  # which does not count what other processes take
    own, slow = 0.0, []
    for _ in range(ATTEMPTS):
        for _ in range(3):
            start = clock()
            for _ in range(effort.products):
                multiply(a, b)
            if is_gpu:
                torch.cuda.synchronize(device)
            own = max(own, 2 * effort.side**3 * effort.products / max(clock() - start, 1e-9))
        report.products = _gather(own)
        median = statistics.median(report.products)
        rates = [
            _Rate(f"of rank {rank} on {report.hosts[rank]}", rate, median, expected)
            for rank, rate in enumerate(report.products)
        ]
        if not (slow := [rate for rate in rates if rate.is_slow(effort.slow_products)]):
            return
    report.faults += [rate.fault("GPU" if is_gpu else "CPU", 1e12, "TFLOP/s of products") for rate in slow]


def rounds_of_pairs(ranks: int) -> Iterator[list[tuple[int, int]]]:
    """Rounds of pairs in which each rank is in at most one: together all pairs, of very many ranks evenly chosen ones.

    The circle method of tournaments.
    """
    places = ranks + ranks % 2
    for turn in range(0, places - 1, max(1, -(-(places - 1) // MAX_ROUNDS))):
        circle = [0, *((turn + offset) % (places - 1) + 1 for offset in range(places - 1))]
        pairs = zip(circle[: places // 2], reversed(circle[places // 2 :]), strict=True)
        yield [(min(pair), max(pair)) for pair in pairs if max(pair) < ranks]


def _measure_links(
    report: PreflightReport,
    device: torch.device,
    effort: PreflightEffort,
    send: Send,
    cluster: Cluster | None,
    group: dist.ProcessGroup | None,
) -> None:
    rank, hosts = report.rank, report.hosts
    payload = torch.zeros(effort.message_bytes, dtype=torch.uint8, device=device)
    ready = payload[:1].clone()
    own: dict[int, float] = {}

    def transfer(sender: int, receiver: int) -> None:
        """Send messages. The receiver keeps the rate of the fastest, from its being ready to the end."""
        for _ in range(effort.messages):
            if rank == sender:
                dist.recv(ready, receiver, group)
                send(payload, receiver, group)
            elif rank == receiver:
                dist.send(ready, sender, group)
                start = time.perf_counter()
                dist.recv(payload, sender, group)
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                own[sender] = max(own.get(sender, 0.0), effort.message_bytes / (time.perf_counter() - start))

    rounds = [[*pairs, *((b, a) for a, b in pairs)] for pairs in rounds_of_pairs(len(hosts))]
    slow: list[tuple[tuple[int, int], _Rate]] = []
    for _ in range(ATTEMPTS):
        for pairs in rounds:
            for pair in pairs:
                transfer(*pair)
            timed_barrier(None, group_timeout(None))  # or messages of the next round would share links with these
        found = {
            (sender, receiver): rate
            for receiver, rates in enumerate(_gather(list(own.items())))
            for sender, rate in rates
        }
        slow = [(pair, rate) for pair, rate in _compare(found, hosts, cluster) if rate.is_slow(effort.slow_link)]
        report.links = {f"{a}->{b}": found[a, b] for a, b in sorted(found)}
        if not slow:
            return
        rounds = [[pair] for pair, _ in slow]
    report.faults += [rate.fault("link", 1e9, "GB/s") for _, rate in slow]


def _compare(
    found: dict[tuple[int, int], float], hosts: Sequence[str], cluster: Cluster | None
) -> Iterator[tuple[tuple[int, int], _Rate]]:
    """Each link's rate with those of its kind: inside hosts, or between them."""
    for is_inside in (True, False):
        rates = {(a, b): rate for (a, b), rate in found.items() if (hosts[a] == hosts[b]) == is_inside}
        expected = None
        if cluster is not None:
            inside = cluster.in_node.pair_bandwidth or cluster.in_node.bandwidth
            expected = inside if is_inside else cluster.between_nodes.bandwidth
        for (a, b), rate in rates.items():
            where = f"from rank {a} on {hosts[a]} to rank {b} on {hosts[b]}"
            yield (a, b), _Rate(where, rate, statistics.median(rates.values()), expected)


def _measure_hosts(report: PreflightReport, folder: Path, effort: PreflightEffort) -> None:
    """Clocks, files and NICs: by the first rank of each host."""
    hosts = report.hosts
    leaders = {host: hosts.index(host) for host in hosts}
    offsets = []
    for _ in range(5):
        timed_barrier(None, group_timeout(None))  # which ranks leave at about one time
        times = _gather(time.time())
        offsets.append([each - statistics.median(times) for each in times])
    mine: list[Any] = []
    if leaders[hosts[report.rank]] == report.rank:
        nics: tuple[Nic, ...] = ()
        with suppress(ValueError):  # of STRETTO_NICS, which whoever uses it reports
            nics = tuple(dict.fromkeys(choose_nics(hosts.count(hosts[report.rank]))))
        mine = [
            _time_files(folder, effort.file_bytes),
            [nic.describe() for nic in nics],
            sum(nic.gbits or 0.0 for nic in nics),
        ]
    measured = _gather(mine)
    for host, leader in leaders.items():
        report.clocks[host] = min((of_try[leader] for of_try in offsets), key=abs)
        report.files[host], report.nics[host] = measured[leader][:2]
    report.faults += [
        MachineFault("clock", f"of {host}", f"{ahead:+.1f} s", "against the median of all ranks")
        for host, ahead in report.clocks.items()
        if abs(ahead) > WRONG_CLOCK
    ]
    speeds = {host: measured[leader][2] for host, leader in leaders.items()}
    for kind, rates, part, unit, name in (
        ("NICs", speeds, 1.0, 1.0, "Gbit/s"),
        ("files", {host: rates[0] for host, rates in report.files.items()}, SLOW_FILES, 1e9, "GB/s written"),
        ("files", {host: rates[1] for host, rates in report.files.items()}, SLOW_FILES, 1e9, "GB/s read"),
    ):
        median = statistics.median(rates.values())
        found = [_Rate(f"of {host}", rate, median, None) for host, rate in rates.items()]
        report.faults += [rate.fault(kind, unit, name) for rate in found if rate.is_slow(part)]


def _time_files(folder: Path, size: int) -> list[float]:
    """Bytes a second of writing a file to disk, and of reading it without the page cache; zeros if that fails."""
    path = folder / f".stretto-preflight-{os.urandom(8).hex()}"
    data = os.urandom(1 << 20) * (size >> 20)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        start = time.perf_counter()
        with path.open("xb", buffering=0) as file:
            file.write(data)
            os.fsync(file.fileno())
        written = size / (time.perf_counter() - start)
        with path.open("rb", buffering=0) as file:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            start = time.perf_counter()
            while file.read(1 << 20):
                pass
            return [written, size / (time.perf_counter() - start)]
    except OSError:  # of one host: the others must not wait for it
        return [0.0, 0.0]
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def _compare_versions(report: PreflightReport, device: torch.device) -> None:
    """Name the ranks whose versions of packages, GPUs and drivers are not those of most."""
    own = {"Python": platform.python_version()}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            own[name] = importlib.metadata.version(name)
    if device.type == "cuda":
        own |= {"NCCL": ".".join(map(str, torch.cuda.nccl.version())), "GPU": torch.cuda.get_device_name(device)}
        with suppress(OSError):
            own["driver"] = Path("/sys/module/nvidia/version").read_text().strip()
    found = _gather(own)
    for name in dict.fromkeys(name for versions in found for name in versions):
        values = [versions.get(name, "none") for versions in found]
        usual = report.versions[name] = Counter(values).most_common(1)[0][0]
        report.faults += [
            MachineFault("version", f"of {name} on {report.hosts[rank]}, rank {rank}", value, f"most have {usual}")
            for rank, value in enumerate(values)
            if value != usual
        ]
