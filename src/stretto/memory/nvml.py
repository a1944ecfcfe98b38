"""What NVML, the library of NVIDIA's driver for management, says of pairs of GPUs.

NVML sees all GPUs of the machine, also where CUDA_VISIBLE_DEVICES leaves a process one of them.
"""

import ctypes

NVLINK = 2
"""NVML_P2P_CAPS_INDEX_NVLINK: the pair is linked by NVLink."""
ATOMICS = 3
"""NVML_P2P_CAPS_INDEX_ATOMICS: each GPU's atomic operations work on the other's memory."""

_SUCCESS = 0
_P2P_OK = 0  # NVML_P2P_STATUS_OK


def supports(capability: int, own: str, gpus: list[str]) -> bool | None:
    """Whether this GPU has a capability with all others, by their UUIDs; None where NVML is not there to be asked."""
    others = [gpu for gpu in gpus if gpu != own]
    if not others:
        return True
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    if nvml.nvmlInit_v2() != _SUCCESS:
        return None
    try:
        here = _find(nvml, own)
        return all(_has_capability(nvml, capability, here, _find(nvml, other)) for other in others)
    finally:
        nvml.nvmlShutdown()


def _find(nvml: ctypes.CDLL, gpu: str) -> ctypes.c_void_p | None:
    handle = ctypes.c_void_p()
    name = (gpu if gpu.startswith("GPU-") else f"GPU-{gpu}").encode()  # torch leaves the prefix out
    return handle if nvml.nvmlDeviceGetHandleByUUID(name, ctypes.byref(handle)) == _SUCCESS else None


def _has_capability(
    nvml: ctypes.CDLL, capability: int, first: ctypes.c_void_p | None, second: ctypes.c_void_p | None
) -> bool:
    if first is None or second is None:
        return False
    status = ctypes.c_int(-1)
    asked = nvml.nvmlDeviceGetP2PStatus(first, second, capability, ctypes.byref(status))
    return bool(asked == _SUCCESS and status.value == _P2P_OK)
