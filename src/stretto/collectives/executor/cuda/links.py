"""What links the GPUs of a group: NVLink between all of them, or not.

LL128 relies on it: a warp's store of 128 bytes crosses NVLink in one piece, and may be cut on PCIe.
"""

import torch
import torch.distributed as dist

from stretto.memory.gpus import NVML_NVLINK, nvml_supports


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
    """Whether NVLink links this GPU to all others, by their UUIDs; not where the driver's NVML does not say so."""
    return nvml_supports(NVML_NVLINK, own, gpus) is True
