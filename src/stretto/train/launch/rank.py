# SPDX-License-Identifier: Apache-2.0
"""The process of one rank: `launch` starts `python -m stretto.train.launch.rank MODULE:FUNCTION CONFIG.json PID`."""

import ctypes
import os
import signal
import sys
import time
import warnings
from functools import reduce
from importlib import import_module
from pathlib import Path
from types import TracebackType

from torch.distributed.elastic.multiprocessing.errors import record

from stretto.train.config import job_from_json
from stretto.train.health import Heartbeat, note
from stretto.train.health.failures import seen_file

PR_SET_PDEATHSIG = 1  # of Linux's prctl
# Seconds in which a failed rank keeps its connections, until the launcher has read all errors: if it closed them, ranks
# that wait for it would fail, too, and hide which rank failed first.
LINGER = 10.0


def main(function: str, config_file: str, launcher: str) -> None:
    """Import the function and call it with the configuration. Its exception is written to the launcher's error file."""
    _stop_with(int(launcher))
    config = job_from_json(Path(config_file).read_text(encoding="utf-8"))
    Heartbeat.start(timeout=config.train.timeout)
    module, _, name = function.partition(":")
    entry = reduce(getattr, name.split("."), import_module(module))
    entry(config)  # type: ignore[operator]
    note("exit")


def _stop_with(launcher: int) -> None:
    """Ask the kernel to send SIGTERM if the launcher is killed, so that the rank then stops as if it was asked to."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != launcher:  # the launcher died before the call
        os.kill(os.getpid(), signal.SIGTERM)


def _leave_reporting_to_launcher(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print no traceback: when one rank fails all do, and the launcher shows the first error."""
    if not issubclass(kind, Exception):  # `record` does not write these to the error file
        sys.__excepthook__(kind, error, trace)
        return
    seen, deadline = seen_file(Path(os.environ["TORCHELASTIC_ERROR_FILE"])), time.monotonic() + LINGER
    while not seen.exists() and time.monotonic() < deadline:
        time.sleep(0.02)


if __name__ == "__main__":
    # torch's FutureWarnings are for developers, not for users who train.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.")
    sys.excepthook = _leave_reporting_to_launcher
    record(main)(*sys.argv[1:])
