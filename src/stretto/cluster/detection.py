# SPDX-License-Identifier: Apache-2.0
"""Detects the machine that this process runs on; datasheets of known GPUs. Imports torch only when called."""

import os
import platform
import sys
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from stretto.cluster.host_memory import host_memory_limit
from stretto.cluster.model import GPU, FlopRates, HostLink
from stretto.cluster.schema import LONGEST_TEXT

Detected = tuple[int, GPU, dict[str, str]]


def detect() -> Detected:
    """The number of devices of this node, one of them, and the sources of its figures: GPUs, or the CPU's cores."""
    return _detect_gpus() or _detect_cpu()


def count_gpus() -> int:
    """The number of GPUs that torch sees. Does not import torch on a machine that certainly has none."""
    if "torch" not in sys.modules and not may_have_gpus():
        return 0
    import torch

    return torch.cuda.device_count()


def may_have_gpus() -> bool:
    """True if torch might find a GPU: the process may see some, and a driver's device files are there."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1"):
        return False
    if sys.platform != "linux":
        return sys.platform != "darwin"
    return any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/nvidia0", "/dev/kfd", "/dev/dxg"))


def machine_kind() -> dict[str, str]:
    """The devices and versions that figures were measured on; never a machine's name."""
    import torch

    if torch.cuda.is_available():
        devices = f"{torch.cuda.device_count()}x {torch.cuda.get_device_name(0)}"
    else:
        devices = f"{os.cpu_count()} CPU cores"
    kind = {"devices": devices, "torch": torch.__version__, "python": platform.python_version()}
    if torch.cuda.is_available():
        kind["nccl"] = ".".join(str(part) for part in torch.cuda.nccl.version())
    for package in ("triton", "transformers"):
        with suppress(PackageNotFoundError):
            kind[package] = version(package)
    return kind


def _detect_gpus() -> Detected | None:
    if "torch" not in sys.modules and not may_have_gpus():
        return None
    try:
        import torch
    except (ImportError, OSError, RuntimeError):  # absent, or a build whose libraries do not load here
        return None
    try:
        if not torch.cuda.is_available():
            return None
        devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    except (RuntimeError, AssertionError):  # a driver that is too old, a device that is lost
        return None
    if not devices:
        return None
    names = list(dict.fromkeys(_printable(device.name) for device in devices))
    # A grid gives every rank the same work, so in a mixed node the smallest memory is what counts.
    memory = float(min(device.total_memory for device in devices)) or None
    sources = {"gpu.name": "read from this machine by torch.cuda", "gpu.memory": "read from this machine by torch.cuda"}
    datasheet = DATASHEETS.get(names[0]) if len(names) == 1 else None
    if datasheet is None:
        return len(devices), GPU(name=" + ".join(names)[:LONGEST_TEXT], memory=memory), sources
    gpu = GPU(
        name=names[0], memory=memory, memory_bandwidth=datasheet.memory_bandwidth, peak_flops=datasheet.peak_flops
    )
    sources |= {"gpu.memory_bandwidth": datasheet.source, "gpu.peak_flops": datasheet.source}
    return len(devices), gpu, sources


def _detect_cpu() -> Detected:
    cores, (memory, _) = usable_cores(), find_host_memory()
    gpu = GPU(name=f"{_cpu_name()} (one core)", memory=None if memory is None else memory / cores)
    sources = {
        "gpus_per_node": "the cores that this process may use, one rank each",
        "gpu.memory": "this machine's memory, or its container's limit, divided by the cores",
    }
    return cores, gpu, sources


def usable_cores() -> int:
    """Count the cores that this process may use; a container may limit them."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS and Windows
        return len(os.sched_getaffinity(0)) or 1
    return os.cpu_count() or 1


def find_host_memory() -> tuple[float | None, str]:
    """Bytes of memory that may be used here, and what limits them; None where this system does not report it."""
    try:
        limit = host_memory_limit()
    except OSError:
        return None, ""
    return float(limit.bytes), f"read from this machine: {limit.source}"


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2] for line in lines if line.startswith("model name")]
    candidates = [*models[:1], platform.processor(), platform.machine()]
    return next((name for name in map(_printable, candidates) if name), "CPU")


def _printable(name: str) -> str:
    """A device's name without characters that could disturb a terminal or a file."""
    return "".join(character for character in name if character.isprintable()).strip()[:200]


# Datasheets, by the exact name that torch.cuda reports. A near name is another chip: "NVIDIA H100 PCIe" computes three
# quarters of what "NVIDIA H100 80GB HBM3" does, and a MIG slice has its parent's name with a suffix. Rates are dense:
# where a datasheet prints them with 2:4 sparsity, they are halved.


@dataclass(frozen=True)
class Datasheet:
    """Figures of one GPU: dense peak FLOP/s, memory bandwidth in bytes/s, and the document that states them.

    host_link: the default for clusters that do not say theirs; not from a datasheet, but measured.
    """

    peak_flops: FlopRates
    memory_bandwidth: float | None
    source: str
    host_link: HostLink = field(default_factory=HostLink)


_V100 = FlopRates(fp64=7.8e12, fp32=15.7e12, fp16=125e12)
_A100 = FlopRates(fp64=19.5e12, fp32=19.5e12, tf32=156e12, bf16=312e12, fp16=312e12)
_H100_SXM = FlopRates(fp64=67e12, fp32=67e12, tf32=494e12, bf16=989e12, fp16=989e12, fp8=1979e12)
_H100_PCIE = FlopRates(fp64=51e12, fp32=51e12, tf32=378e12, bf16=756e12, fp16=756e12, fp8=1513e12)
_L40S = FlopRates(fp32=91.6e12, tf32=183e12, bf16=362e12, fp16=362e12, fp8=733e12)
_MI210 = FlopRates(fp64=45.3e12, fp32=45.3e12, bf16=181e12, fp16=181e12)
_MI250X_DIE = FlopRates(fp64=47.85e12, fp32=47.85e12, bf16=191.5e12, fp16=191.5e12)
_MI300X = FlopRates(fp64=163.4e12, fp32=163.4e12, tf32=653.7e12, bf16=1307.4e12, fp16=1307.4e12, fp8=2614.9e12)
_V100_SOURCE = "NVIDIA V100 datasheet"
_A100_SOURCE = "NVIDIA A100 datasheet"
_H100_SOURCE = "NVIDIA H100 datasheet; rates printed with sparsity are halved"
_GH200_SOURCE = "NVIDIA GH200 datasheet (the 96 GB HBM3 part); rates printed with sparsity are halved"
# Measured of an H200 with 128 GiB of host memory, 2026-11; the other parts have the same 16 lanes of PCI Express 5.
_PCI_EXPRESS_5 = HostLink(to_device_bandwidth=55e9, to_host_bandwidth=55e9, duplex_bandwidth=101e9)
DATASHEETS = {
    "Tesla V100-SXM2-16GB": Datasheet(_V100, 900e9, _V100_SOURCE),
    "Tesla V100-SXM2-32GB": Datasheet(_V100, 900e9, _V100_SOURCE),
    # DGX-2's own part: no datasheet gives its bandwidth and its other rates.
    "Tesla V100-SXM3-32GB": Datasheet(
        FlopRates(fp16=125e12), None, "NVIDIA DGX-2 datasheet: 2 petaFLOPS of 16 GPUs on tensor cores"
    ),
    "NVIDIA A100-SXM4-40GB": Datasheet(_A100, 1555e9, _A100_SOURCE),
    "NVIDIA A100-PCIE-40GB": Datasheet(_A100, 1555e9, _A100_SOURCE),
    "NVIDIA A100-SXM4-80GB": Datasheet(_A100, 2039e9, _A100_SOURCE),
    "NVIDIA A100 80GB PCIe": Datasheet(_A100, 1935e9, _A100_SOURCE),
    "NVIDIA H100 80GB HBM3": Datasheet(_H100_SXM, 3.35e12, _H100_SOURCE, _PCI_EXPRESS_5),
    "NVIDIA H100 PCIe": Datasheet(_H100_PCIE, 2e12, _H100_SOURCE, _PCI_EXPRESS_5),
    "NVIDIA H800": Datasheet(
        replace(_H100_SXM, fp64=1e12), 3.35e12, "NVIDIA H800 datasheet, SXM; rates printed with sparsity are halved"
    ),
    "NVIDIA H200": Datasheet(
        _H100_SXM, 4.8e12, "NVIDIA H200 datasheet; rates printed with sparsity are halved", _PCI_EXPRESS_5
    ),
    "NVIDIA GH200 120GB": Datasheet(_H100_SXM, 4e12, _GH200_SOURCE),
    "NVIDIA GH200 480GB": Datasheet(_H100_SXM, 4e12, _GH200_SOURCE),
    "NVIDIA L40S": Datasheet(_L40S, 864e9, "NVIDIA L40S datasheet"),
    "AMD Instinct MI210": Datasheet(_MI210, 1638.4e9, "AMD Instinct MI210 datasheet; fp64 and fp32 on matrix cores"),
    "AMD Instinct MI250X": Datasheet(
        _MI250X_DIE, 1638.4e9, "AMD Instinct MI250X datasheet, halved: torch sees each of its two dies as a device"
    ),
    "AMD Instinct MI300X": Datasheet(_MI300X, 5.3e12, "AMD Instinct MI300X datasheet"),
}
