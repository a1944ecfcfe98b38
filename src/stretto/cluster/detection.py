"""What the machine that this process runs on says about itself. torch is imported only when asked."""

import os
import platform
from pathlib import Path

from stretto.cluster.datasheets import DATASHEETS
from stretto.cluster.model import GPU
from stretto.cluster.schema import LONGEST_TEXT

Detected = tuple[int, GPU, dict[str, str]]


def detect() -> Detected:
    """Devices in this node, what one of them is, and the sources of its figures: GPUs, or the CPU's cores."""
    return _detect_gpus() or _detect_cpu()


def _detect_gpus() -> Detected | None:
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
    sources = {
        "gpu.name": "read from this machine by torch.cuda",
        "gpu.memory": "read from this machine by torch.cuda",
    }
    datasheet = DATASHEETS.get(names[0]) if len(names) == 1 else None
    if datasheet is None:
        return len(devices), GPU(name=" + ".join(names)[:LONGEST_TEXT], memory=memory), sources
    gpu = GPU(
        name=names[0],
        memory=memory,
        memory_bandwidth=datasheet.memory_bandwidth,
        peak_flops=datasheet.peak_flops,
    )
    sources |= {"gpu.memory_bandwidth": datasheet.source, "gpu.peak_flops": datasheet.source}
    return len(devices), gpu, sources


def _detect_cpu() -> Detected:
    cores, memory = _usable_cores(), _usable_memory()
    gpu = GPU(name=f"{_cpu_name()} (one core)", memory=None if memory is None else memory / cores)
    sources = {
        "gpus_per_node": "the cores that this process may use, one rank each",
        "gpu.memory": "this machine's memory, or its container's limit, divided by the cores",
    }
    return cores, gpu, sources


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # not on macOS and Windows
        return len(os.sched_getaffinity(0)) or 1
    return os.cpu_count() or 1


def _usable_memory() -> float | None:
    """Bytes, or None where this system does not say."""
    try:
        installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # no sysconf on Windows, no such name elsewhere
        return None
    if installed <= 0:
        return None
    limit = _first_line("/sys/fs/cgroup/memory.max")  # "max" outside a container with a limit
    return float(min(installed, int(limit))) if limit.isdecimal() and int(limit) > 0 else float(installed)


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2] for line in lines if line.startswith("model name")]
    candidates = [*models[:1], platform.processor(), platform.machine()]
    return next((name for name in map(_printable, candidates) if name), "CPU")


def _first_line(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").split("\n", 1)[0].strip()
    except OSError:
        return ""


def _printable(name: str) -> str:
    """A device's name with nothing in it that could disturb a terminal or a file."""
    return "".join(character for character in name if character.isprintable()).strip()[:200]
