# SPDX-License-Identifier: Apache-2.0
"""The command `stretto`, and `python -m stretto`."""

import os
import signal
from types import FrameType


def main() -> None:
    """Run the command line. Ctrl-C ends it without a traceback also while its modules are imported."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # and not ignored, as under nohup
        signal.signal(signal.SIGINT, _interrupt)
    try:
        from stretto.cli import main as run

        run()
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt; while a module is imported, when nothing has been begun, end at once.

    Imports lose exceptions: torch's registrations run Python from C++ and from callbacks that drop them.
    """
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            os._exit(128 + number)
        frame = frame.f_back
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
