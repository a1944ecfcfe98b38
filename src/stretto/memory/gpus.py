# SPDX-License-Identifier: Apache-2.0
"""Facts about GPUs: whether a group's kernels can work together, and how many of their programs may wait at once."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from stretto.cluster.local_ranks import name_node, require_declared
from stretto.memory import shared_gpus
from stretto.memory.mps import PERCENTAGE, PIPES, QUEUES
from stretto.memory.plain_data import all_gather_data

NCCL_BLOCKS = 32
"""The most thread blocks that an NCCL collective uses."""

FEWEST_QUEUES = 4
"""The least queues of a process with which two groups' kernels do not wait for each other (decision 014)."""

_NATIVE_ATOMICS = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED


class _Gpu(NamedTuple):
    """A rank's description of its GPU for the others."""

    node: str
    identity: str
    kind: str
    may_be_shared: bool
    queues: int


def find_obstacle(
    group: dist.ProcessGroup, device: torch.device, *, needs_atomics: bool = True, puts_between_nodes: bool = False
) -> str | None:
    """Say why kernels of these GPUs cannot work together; None where they can. Collective, one result on all ranks.

    device: this rank's GPU. needs_atomics: whether the kernels signal by atomic operations on other GPUs' memory. GPUs
    that PCIe connects have no native ones, so that an addition may be lost. puts_between_nodes: whether each rank's
    kernels need only reach those of its own node. A process that sees only its own GPU cannot
    ask which others it reaches; symmetric memory then finds out when it maps them.
    """
    properties = torch.cuda.get_device_properties(device)
    kind = f"{properties.name} with {properties.multi_processor_count} multiprocessors"
    node = name_node(dist.get_rank(), dist.get_world_size())
    here = _Gpu(node, str(properties.uuid), kind, shared_gpus.is_enabled(), count_queues())
    everyone = all_gather_data(here, group, _Gpu)
    require_declared([gpu.node for gpu in everyone])
    nodes, identities, kinds, switches, queues = (set(each) for each in zip(*everyone, strict=True))
    gpus = {gpu.identity for gpu in everyone if gpu.node == here.node}
    if len(nodes) > 1 and not puts_between_nodes:
        return f"its ranks are on {len(nodes)} nodes"
    if len(identities) < len(everyone) and switches != {True}:
        return "several of its ranks share a GPU"
    if len(kinds) > 1:  # kernels divide work by the number of multiprocessors
        return f"its GPUs are of {len(kinds)} kinds: {', '.join(sorted(kinds))}"
    if (fewest := min(queues)) < FEWEST_QUEUES:
        return (
            f"streams share {fewest} queue{'s' * (fewest > 1)} to a GPU, where kernels of two groups can wait for each "
            f"other: set {QUEUES} to {FEWEST_QUEUES} or more, before the ranks start"
        )
    visible = {str(torch.cuda.get_device_properties(index).uuid): index for index in range(torch.cuda.device_count())}
    far = [gpu for gpu in gpus if gpu != here.identity and gpu in visible]
    reaches = all(torch.cuda.can_device_access_peer(device, visible[gpu]) for gpu in far)
    near = not needs_atomics or all(
        has_native_atomics(device.index, visible[gpu])
        if gpu in visible
        else nvml_supports(NVML_ATOMICS, here.identity, [gpu]) is not False
        for gpu in gpus
        if gpu != here.identity
    )
    answers = all_gather_data((reaches, near), group, tuple[bool, bool])
    if not all(reaches for reaches, _ in answers):
        return "some of its GPUs do not reach each other's memory"
    if not all(near for _, near in answers):
        return "some of its GPUs have no native atomic operations on each other's memory, as over PCIe"
    return None


def count_queues() -> int:
    """The queues by which this process's streams reach its GPU, as the driver reads them from the environment."""
    given = os.environ.get(QUEUES, "")
    if given.isdecimal() and int(given) > 0:
        return int(given)
    return 2 if PERCENTAGE in os.environ or PIPES in os.environ else 8


def has_native_atomics(device: int, peer: int) -> bool:
    """Check whether a GPU's atomic operations on a peer's memory are native, by the driver's attribute of the pair.

    device, peer: indices of GPUs that this process sees.
    """
    driver, answer = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(0)
    failed = driver.cuDeviceGetP2PAttribute(ctypes.byref(answer), _NATIVE_ATOMICS, device, peer)
    return not failed and bool(answer.value)


def find_numa_domain(device: torch.device) -> int:
    """The NUMA domain of a GPU's slot; -1 where Linux or torch does not say, and of CPUs."""
    if device.type != "cuda":
        return -1
    properties = torch.cuda.get_device_properties(device)
    try:
        domain, bus, slot = (int(getattr(properties, f"pci_{part}_id")) for part in ("domain", "bus", "device"))
        return int(Path(f"/sys/bus/pci/devices/{domain:04x}:{bus:02x}:{slot:02x}.0/numa_node").read_text())
    except (AttributeError, OSError, ValueError):
        return -1


def bound_blocks(multiprocessors: int) -> int:
    """The most thread blocks for a kernel that waits for peers while it occupies multiprocessors.

    It is at most three quarters of the multiprocessors. This keeps kernels of two groups and NCCL's, launched in
    different orders on the ranks, from deadlocking: the remaining multiprocessors have room for NCCL's kernel and one
    block more, so each of our kernels can have at least one block resident on every rank.
    docs/decisions/014-multiprocessors-left-free.md has the argument for operators, and
    docs/decisions/015-thread-block-limit.md for collectives. On a small GPU, or a small share of one, it is half.
    """
    others = max(multiprocessors // 4, min(NCCL_BLOCKS + 1, multiprocessors // 2), 1)
    return max(multiprocessors - others, 1)


@lru_cache
def find_capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


@lru_cache
def count_processors(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def count_multiprocessors(device: torch.device) -> int:
    """A GPU's number of multiprocessors; 1 for a CPU."""
    return count_processors(device.index) if device.type == "cuda" else 1


def limit_waiting(programs: int, device: torch.device) -> int:
    """`programs`, but at most `bound_blocks` of the GPU's multiprocessors; interpreted programs wait in turns."""
    return min(programs, bound_blocks(count_processors(device.index))) if device.type == "cuda" else programs


@lru_cache
def leave_room_for_copies(programs: int, device: torch.device) -> int:
    """`programs` of a kernel that waits for copies of peers, limited like `limit_waiting` if ranks share GPUs.

    Between GPUs, copy engines copy. A copy within a GPU may need a multiprocessor of the rank that issues it, which a
    kernel that fills the rank's share while it waits would never give back.
    """
    return limit_waiting(programs, device) if shared_gpus.is_enabled() else programs


NVML_NVLINK = 2
"""NVML_P2P_CAPS_INDEX_NVLINK: NVLink connects the pair."""
NVML_ATOMICS = 3
"""NVML_P2P_CAPS_INDEX_ATOMICS: each GPU's atomic operations work on the other's memory."""

NVLINK_MAX_LINKS = 18
"""NVML_NVLINK_MAX_LINKS: so many has a GPU of sm_90, SXM."""

_SUCCESS = 0
_P2P_OK = 0  # NVML_P2P_STATUS_OK


def nvml_supports(capability: int, own: str, gpus: list[str]) -> bool | None:
    """Check whether this GPU has a capability with all others, given by UUID; None where NVML is not installed.

    NVML, the management library of NVIDIA's driver, sees all GPUs of the machine, even where CUDA_VISIBLE_DEVICES
    leaves a process only one of them.
    """
    others = [gpu for gpu in gpus if gpu != own]
    if not others:
        return True
    with _open_nvml() as nvml:
        if nvml is None:
            return None
        here = _find_gpu(nvml, own)
        return all(_has_capability(nvml, capability, here, _find_gpu(nvml, other)) for other in others)


@contextmanager
def _open_nvml() -> Iterator[ctypes.CDLL | None]:
    """NVML while it is initialized; None where it is not installed, or does not start."""
    nvml = None
    with suppress(OSError):
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    if nvml is None or nvml.nvmlInit_v2() != _SUCCESS:
        yield None
        return
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


def _find_gpu(nvml: ctypes.CDLL, gpu: str) -> ctypes.c_void_p | None:
    handle = ctypes.c_void_p()
    name = (gpu if gpu.startswith("GPU-") else f"GPU-{gpu}").encode()  # torch omits the prefix
    return handle if nvml.nvmlDeviceGetHandleByUUID(name, ctypes.byref(handle)) == _SUCCESS else None


def _has_capability(
    nvml: ctypes.CDLL, capability: int, first: ctypes.c_void_p | None, second: ctypes.c_void_p | None
) -> bool:
    if first is None or second is None:
        return False
    status = ctypes.c_int(-1)
    asked = nvml.nvmlDeviceGetP2PStatus(first, second, capability, ctypes.byref(status))
    return bool(asked == _SUCCESS and status.value == _P2P_OK)


@lru_cache
def count_links(gpu: str) -> int:
    """The active NVLink links of a GPU, given by UUID; those of an SXM part of sm_90 where NVML does not tell."""
    with _open_nvml() as nvml:
        if nvml is None or (handle := _find_gpu(nvml, gpu)) is None:
            return NVLINK_MAX_LINKS
        active, state = 0, ctypes.c_uint(0)
        for link in range(NVLINK_MAX_LINKS):
            asked = nvml.nvmlDeviceGetNvLinkState(handle, link, ctypes.byref(state))
            active += asked == _SUCCESS and state.value == 1  # NVML_FEATURE_ENABLED
        return active or NVLINK_MAX_LINKS
