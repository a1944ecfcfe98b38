"""What operators refuse, before anything is allocated or launched."""

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.memory import find_own_rank

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def find_name(group: dist.ProcessGroup | None) -> str:
    """The group's name (None: all ranks), which operators' schemas have. ValueError for a rank outside of it."""
    if not (group is None or isinstance(group, dist.ProcessGroup) or group == dist.GroupMember.NON_GROUP_MEMBER):
        raise ValueError(
            f"group is a torch.distributed.ProcessGroup, or None for all ranks, not {group!r}: of a mesh's axis, give "
            "mesh.get_group(axis)"
        )
    find_own_rank(group)
    world = dist.group.WORLD if group is None else group
    assert world is not None
    return world.group_name


def require_operands(
    operator: str, x: Tensor, weight: Tensor, bias: Tensor | None, implementation: str = "auto"
) -> None:
    """ValueError unless x [., k], weight [n, k] and bias [n] are of one dtype and device, and lie as kernels take them.

    weight may also be the transpose of a contiguous tensor. fp64 is for implementation="library" alone.
    """
    if x.dim() != 2 or weight.dim() != 2:
        raise ValueError(
            f"{operator} takes x [rows, k] and weight [n, k], of two dims each, not {_say(x)} and {_say(weight)}: "
            "flatten the dims before the last one"
        )
    if x.shape[1] != weight.shape[1]:
        raise ValueError(f"{operator}: x {_say(x)} and weight {_say(weight)} differ in k, their last dim")
    if x.dtype not in DTYPES and not (x.dtype == torch.float64 and implementation == "library"):
        names = ", ".join(str(dtype) for dtype in DTYPES)
        rest = ', or give implementation="library"' if x.dtype == torch.float64 else ""
        raise ValueError(f"{operator} takes {names}, not {x.dtype}: convert x, weight and bias{rest}")
    if not x.is_contiguous():
        raise ValueError(f"{operator} takes a contiguous x, not strides {x.stride()}: call contiguous() on it")
    require_weight(operator, x, weight, bias)
    if x.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{operator} takes tensors on devices of type cpu or cuda, not {x.device}")
    if x.device.type == "cuda" and x.device.index != torch.cuda.current_device():
        raise ValueError(
            f"{operator}: x is on {x.device}, and this rank's current GPU is {torch.cuda.current_device()}: call "
            "torch.cuda.set_device first"
        )


def require_weight(operator: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """ValueError unless weight [n, k] and bias [n] are of x's dtype and on its device, and lie as kernels take them."""
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"{operator}: a bias for weight {_say(weight)} is [{weight.shape[0]}], not {_say(bias)}")
    for name, other in (("weight", weight), ("bias", bias)):
        if other is None:
            continue
        if other.dtype != x.dtype:
            raise ValueError(f"{operator}: x is {x.dtype} and {name} {other.dtype}: convert one of them")
        if other.device != x.device:
            raise ValueError(f"{operator}: x is on {x.device} and {name} on {other.device}: move one of them")
    if bias is not None and not bias.is_contiguous():
        raise ValueError(f"{operator} takes a contiguous bias, not strides {bias.stride()}: call contiguous() on it")
    if not (weight.is_contiguous() or weight.t().is_contiguous()):
        raise ValueError(
            f"{operator} takes a contiguous weight, or the transpose of one, not strides {weight.stride()}: call "
            "contiguous() on it"
        )


def _say(tensor: Tensor) -> str:
    return str(list(tensor.shape))
