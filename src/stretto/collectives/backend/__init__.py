"""The torch.distributed backend "stretto": schedules where they are installed, gloo and NCCL for all else.

The parts: `registration` (the name), `creation` (a group's backend), `native` and `extension` (the class that torch
calls), `dispatcher` (who runs a call), `runner` and `host_runner` (how a schedule runs it), `installing` (what users
call).
"""

from stretto.collectives.backend.extension import CompilerError
from stretto.collectives.backend.installed import Installed
from stretto.collectives.backend.installing import counts, install, uninstall

__all__ = ["CompilerError", "Installed", "counts", "install", "uninstall"]
