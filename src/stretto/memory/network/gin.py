# SPDX-License-Identifier: Apache-2.0
"""Why NCCL's device API (GPU-initiated networking) takes no puts here: there is no transport for it yet."""

import importlib.util
import os
from pathlib import Path

import torch

_FIRST = (2, 28)  # over RDMA
_OVER_SOCKETS = (2, 32)
_HEADER = "nccl_device.h"
_RDMA_DEVICES = Path("/sys/class/infiniband")


def find_gin_obstacle() -> str:
    """The first thing that a transport by NCCL's device API lacks on this machine, for messages."""
    if not torch.cuda.is_available():
        return "this torch has no NCCL, or finds no GPU"
    version = torch.cuda.nccl.version()
    nccl = f"NCCL {'.'.join(map(str, version))}"
    if version < _FIRST:
        return f"{nccl} has no device API for networks: {'.'.join(map(str, _FIRST))} is the first that has"
    folders = _list_include_folders()
    if not any((folder / _HEADER).is_file() for folder in folders):
        return f"{nccl} has its device API, and its header {_HEADER} is in none of {', '.join(map(str, folders))}"
    has_rdma = _RDMA_DEVICES.is_dir() and any(_RDMA_DEVICES.iterdir())
    if version < _OVER_SOCKETS and not has_rdma:
        needed = ".".join(map(str, _OVER_SOCKETS))
        return f"{nccl} puts from GPUs over RDMA alone (over sockets from {needed} on), and there is no RDMA device"
    return f"{nccl} could, and Stretto has no transport by it: none could be tried yet"


def _list_include_folders() -> list[Path]:
    """Where NCCL's headers may be: NCCL_HOME, torch's wheel of NCCL, the system's."""
    homes = [Path(os.environ["NCCL_HOME"])] if os.environ.get("NCCL_HOME") else []
    spec = importlib.util.find_spec("nvidia")
    homes += [Path(place) / "nccl" for place in (spec.submodule_search_locations or () if spec else ())]
    return [*(home / "include" for home in homes), Path("/usr/include")]
