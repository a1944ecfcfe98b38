# SPDX-License-Identifier: Apache-2.0
"""More ranks than GPUs, for benches that are tried where there is one GPU."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from stretto.cluster.detection import count_gpus
from stretto.launch import changed_environment
from stretto.memory import shared_gpus
from stretto.memory.mps import has_mps, mps_daemon, share_for


@contextmanager
def shared_where_few(ranks: int) -> Iterator[None]:
    """Processes started within the block share the machine's GPUs if it has fewer than `ranks`, by MPS where it is
    available. Does nothing on a machine without GPUs."""
    gpus = count_gpus()
    with ExitStack() as stack:
        if gpus and ranks > gpus:
            variables = {shared_gpus.SWITCH: "1", shared_gpus.OVERLAPPING: "1"}
            if has_mps():
                variables |= stack.enter_context(mps_daemon(share_for(ranks)))
            stack.enter_context(changed_environment(variables))
        yield
