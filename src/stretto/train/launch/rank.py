"""The process of one rank: `launch` starts `python -m stretto.train.launch.rank MODULE:FUNCTION CONFIG.json PID`."""

import ctypes
import os
import signal
import sys
import warnings
from functools import reduce
from importlib import import_module
from pathlib import Path
from types import TracebackType

from torch.distributed.elastic.multiprocessing.errors import record

from stretto.train.config import job_from_json

PR_SET_PDEATHSIG = 1  # of Linux's prctl


def main(function: str, config_file: str, launcher: str) -> None:
    """Import the function and call it with the configuration. What it raises goes to the launcher's error file."""
    _stop_with(int(launcher))
    module, _, name = function.partition(":")
    entry = reduce(getattr, name.split("."), import_module(module))
    entry(job_from_json(Path(config_file).read_text(encoding="utf-8")))  # type: ignore[operator]


def _stop_with(launcher: int) -> None:
    """Have the kernel send SIGTERM should the launcher be killed, so that the rank stops as if asked to."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != launcher:  # it died before the call
        os.kill(os.getpid(), signal.SIGTERM)


def _leave_reporting_to_launcher(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print no traceback: all ranks fail when one does, and the launcher shows the one that matters."""
    if not issubclass(kind, Exception):  # `record` keeps these out of the error file
        sys.__excepthook__(kind, error, trace)


if __name__ == "__main__":
    # torch's advice to those who call it is not for those who train.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.")
    sys.excepthook = _leave_reporting_to_launcher
    record(main)(*sys.argv[1:])
