"""What links the GPUs of a group: NVLink between all of them, or not.

LL128 relies on it: a warp's store of 128 bytes crosses NVLink in one piece, and may be cut on PCIe.
"""

import ctypes

import torch
import torch.distributed as dist

_SUCCESS = 0
_P2P_NVLINK = 2  # NVML_P2P_CAPS_INDEX_NVLINK
_P2P_OK = 0  # NVML_P2P_STATUS_OK


def has_nvlink(group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """Whether NVLink links each rank's GPU to every other's, the same on all ranks. Collective."""
    own = str(torch.cuda.get_device_properties(device).uuid)
    everyone = [own] * dist.get_world_size(group)
    dist.all_gather_object(everyone, own, group=group)
    answer = are_linked(own, everyone)
    answers = [answer] * len(everyone)
    dist.all_gather_object(answers, answer, group=group)
    return all(answers)


def are_linked(own: str, gpus: list[str]) -> bool:
    """Whether NVLink links this GPU to all others, by their UUIDs; not where the driver's NVML does not say so.

    NVML sees the machine's GPUs also where CUDA_VISIBLE_DEVICES leaves a process one of them.
    """
    others = [gpu for gpu in gpus if gpu != own]
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return not others
    if nvml.nvmlInit_v2() != _SUCCESS:
        return not others
    try:
        here = _find(nvml, own)
        return all(_is_pair_linked(nvml, here, _find(nvml, other)) for other in others)
    finally:
        nvml.nvmlShutdown()


def _find(nvml: ctypes.CDLL, gpu: str) -> ctypes.c_void_p | None:
    handle = ctypes.c_void_p()
    name = (gpu if gpu.startswith("GPU-") else f"GPU-{gpu}").encode()  # torch leaves the prefix out
    return handle if nvml.nvmlDeviceGetHandleByUUID(name, ctypes.byref(handle)) == _SUCCESS else None


def _is_pair_linked(nvml: ctypes.CDLL, first: ctypes.c_void_p | None, second: ctypes.c_void_p | None) -> bool:
    if first is None or second is None:
        return False
    status = ctypes.c_int(-1)
    asked = nvml.nvmlDeviceGetP2PStatus(first, second, _P2P_NVLINK, ctypes.byref(status))
    return bool(asked == _SUCCESS and status.value == _P2P_OK)
