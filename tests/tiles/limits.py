# SPDX-License-Identifier: Apache-2.0
"""The time limits of launches where there is no GPU: each of a channel's launches, and the limit that it was given.

A process that imports this can launch nothing else (`tests.ops.recorded`): tests run `main` in one of its own.
"""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from tests.ops.recorded import Memory, Recorder
from triton.runtime import driver

from stretto import tiles
from stretto.memory import compilation
from stretto.tiles import host
from stretto.tiles.call_state import CLOCK
from stretto.tiles.launches import launch_kernel

LIMIT = 30.0
FIRST = LIMIT + compilation.ALLOWANCE


@triton.jit
def store(pointer, VALUE: tl.constexpr):  # type: ignore[no-untyped-def]
    """A kernel that is compiled for each value."""
    tl.store(pointer, VALUE)


class LimitRecorder(Recorder):
    """A driver that notes the limit of `channel`'s waits at each launch."""

    def __init__(self) -> None:
        super().__init__()
        self.channel: Any = None
        self.limits: list[float] = []
        self.is_refusing = False

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        """As of `Recorder`."""
        launch = super().launcher_cls(source, metadata)

        def note(*arguments: Any) -> None:
            if self.is_refusing:
                raise RuntimeError("CUDA refuses")
            self.limits.append(self.channel._state[CLOCK.value + 2 : CLOCK.value + 4].view(torch.int64).item() / 1e9)
            launch(*arguments)

        return note


@contextlib.contextmanager
def capturing(channel: Any) -> Iterator[None]:
    """Have the current stream captured in a CUDA graph: nothing has run afterwards."""
    before = channel._state.clone()
    torch.cuda.is_initialized = torch.cuda.is_current_stream_capturing = lambda: True
    yield
    torch.cuda.is_initialized = torch.cuda.is_current_stream_capturing = lambda: False
    channel._state.copy_(before)


def main() -> None:
    """Return which launches have the longer limit."""
    recorder = LimitRecorder()
    driver.set_active(recorder)
    mapping, word = tiles.shard_tiles(24, 4, 8, channels=2), torch.zeros(1, dtype=torch.int32)

    def make_channel() -> Any:
        recorder.channel = tiles.BlockChannel(Memory(1 << 16), 8, 8, LIMIT)  # type: ignore[arg-type]
        return recorder.channel

    def limits_of(*launches: Any) -> list[float]:
        recorder.limits.clear()
        for launch in launches:
            launch()
        return list(recorder.limits)

    def begin() -> None:
        channel.begin("a", mapping, mapping, "broadcast")

    def launch(value: int) -> None:
        channel.launch(store, value, 1, (word, value), num_warps=1)

    channel = make_channel()
    assert limits_of(begin, begin, begin) == [FIRST, LIMIT, LIMIT]
    # A kernel that is loaded within a call: in all of the call, and not in the next one, which launches it again.
    call = begin, lambda: launch(1), lambda: host.rank_wait(channel, 2, 1), lambda: host.rank_wait(channel, 2, 1)
    assert limits_of(*call) == [LIMIT, FIRST, FIRST, FIRST]
    assert limits_of(*call) == [LIMIT] * 4
    # The end of a call by `enter` sets the limit back, so that the next one need not.
    channel.enter("b", "broadcast")
    assert limits_of(lambda: launch(2), lambda: launch(1)) == [FIRST] * 2
    writes = channel._state._version
    channel.enter("b", "broadcast")
    assert channel._state._version == writes
    channel._state[CLOCK.value + 2 : CLOCK.value + 4] = channel._state[CLOCK.value + 4 : CLOCK.value + 6]
    assert limits_of(lambda: launch(2), lambda: launch(1)) == [LIMIT] * 2
    # One that waits for nobody: a peer may compile it before the call.
    launch_kernel(store, 1, word, 3, num_warps=1)
    assert limits_of(begin, begin) == [FIRST, LIMIT]
    launch_kernel(store, 1, word, 3, num_warps=1)
    assert limits_of(begin) == [LIMIT]
    # One whose launch has failed.
    recorder.is_refusing = True
    try:
        launch(4)
    except RuntimeError:
        recorder.is_refusing = False
    assert limits_of(begin, lambda: launch(4)) == [LIMIT] * 2
    # A graph has the group's limit, and leaves the longer one to the next call.
    launch_kernel(store, 1, word, 5, num_warps=1)
    with capturing(channel):
        assert limits_of(begin) == [LIMIT]
    assert limits_of(begin) == [FIRST]
    with capturing(channel):
        assert limits_of(begin) == [LIMIT]
    assert limits_of(begin) == [LIMIT]
    # Another limit of the group.
    channel.limit.seconds = 0.5
    assert limits_of(begin) == [0.5]
    # Ranks that make a channel meet, after all that they have compiled.
    launch_kernel(store, 1, word, 6, num_warps=1)
    channel = make_channel()
    assert limits_of(begin) == [LIMIT]


if __name__ == "__main__":
    sys.exit(main())
