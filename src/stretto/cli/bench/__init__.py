# SPDX-License-Identifier: Apache-2.0
"""`stretto bench`: a command for each bench; see `command` for what makes it of the bench's settings."""

from stretto.cli.bench import measured, simulated
from stretto.cli.bench.command import app

__all__ = ["app", "measured", "simulated"]
