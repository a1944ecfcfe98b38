# SPDX-License-Identifier: Apache-2.0
"""The process of one rank: `launch` starts `python -m stretto.launch.rank ENTRY LOADER FILE PID`.

Its counters are shared before torch is imported, so that a rank that is stuck in its imports is seen, too.
"""

import faulthandler
import os
import sys
import time
import warnings
from functools import reduce
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any

from stretto import counters
from stretto.launch.failures import ERROR_FILE, Failure, seen_file, write_error
from stretto.launch.watching.joining import FOLDER, end_with_parent, join_watched, precede_launcher_out_of_memory

STORE_SOCKET = "STRETTO_STORE_SOCKET"
"""The environment variable by which rank 0 gets the descriptor of the socket on which the job's store listens."""
# Seconds in which a failed rank keeps its connections, until the launcher has read all errors: if it closed them, ranks
# that wait for it would fail, too, and hide which rank failed first.
LINGER = 10.0

_store: Any = None  # rank 0 serves it as long as its process lives, though its launcher be killed


def main(entry: str, loader: str, file: str) -> None:
    """Call the entry with what the loader makes of the file, both as "module:function"."""
    global _store
    if (descriptor := os.environ.pop(STORE_SOCKET, None)) is not None:
        from torch.distributed import TCPStore

        _store = TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=int(descriptor),
        )
    argument = _import(loader)(Path(file).read_text(encoding="utf-8"))
    function = _import(entry)
    counters.note("start")
    function(argument)
    counters.note("exit")
    counters.mark_done()


def _import(name: str) -> Any:
    module, _, function = name.partition(":")
    return reduce(getattr, function.split("."), import_module(module))


def _leave_reporting_to_launcher(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Write the error and print no traceback: when one rank fails all do, and the launcher shows the first error."""
    file = Path(os.environ[ERROR_FILE])
    try:
        if isinstance(error, Exception):
            failure = Failure.of_error(int(os.environ["RANK"]), error)
            if failure.is_consequence:
                counters.mark_failed()  # it has waited for another rank, and now keeps none waiting
            write_error(file, failure)
    except OSError:  # such as a full disk
        pass
    if not file.exists():
        sys.__excepthook__(kind, error, trace)
        return
    seen, deadline = seen_file(file), time.monotonic() + LINGER
    while not seen.exists() and time.monotonic() < deadline:
        time.sleep(0.02)


if __name__ == "__main__":
    end_with_parent(int(sys.argv[4]))
    precede_launcher_out_of_memory()
    join_watched(Path(os.environ[FOLDER]), int(os.environ["RANK"]))
    # torch's FutureWarnings are for developers, not for users who train.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.")
    faulthandler.enable()
    sys.excepthook = _leave_reporting_to_launcher
    main(*sys.argv[1:4])
