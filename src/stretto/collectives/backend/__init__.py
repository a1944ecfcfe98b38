"""The torch.distributed backend "stretto": schedules where they are installed, gloo and NCCL for all else.

The parts: `registration` (the name), `factory` (a group's backend), `native` and `extension` (the class that torch
calls), `dispatcher` (who runs a call), `runner` and `host_runner` (how a schedule runs it), `api` (what users
call).
"""

from stretto.collectives.backend.api import counts, install, uninstall
from stretto.collectives.backend.dispatcher import Installed
from stretto.collectives.backend.native import CompilerError

__all__ = ["CompilerError", "Installed", "counts", "install", "uninstall"]
