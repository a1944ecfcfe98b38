"""The torch.distributed backend "stretto": schedules where they are installed, gloo and NCCL for all else.

The parts: `registration` (the name), `factory` (a group's backend), `native` and `extension` (the class that torch
calls), `dispatcher` (who runs a call), `runner` and `host_runner` (how a schedule runs it), `api` (what users
call).
"""

from stretto.collectives.backend.api import call_counts, install, uninstall
from stretto.collectives.backend.dispatcher import InstalledSchedule
from stretto.collectives.backend.native import CompilerError
from stretto.deprecated import alias

__all__ = ["CompilerError", "InstalledSchedule", "call_counts", "install", "uninstall"]

__getattr__ = alias(__name__, {"Installed": "InstalledSchedule", "counts": "call_counts"})
