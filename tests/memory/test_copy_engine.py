# SPDX-License-Identifier: Apache-2.0
"""Copy engines call CUDA's driver in the right order and on the right streams; without a GPU."""

import ctypes
from types import SimpleNamespace

import pytest
import torch

from stretto.memory import copy_engine

SIDES = {"copy": 1, "flag": 2, "wait": 3}  # handles, in the order in which streams are made
CALLER = 77


class FakeFunction:
    """A function of the driver that notes its calls, and answers an error number."""

    def __init__(self, name, calls, error):
        self._name, self._calls, self._error = name, calls, error

    def __call__(self, *arguments):
        self._calls.append((self._name, *arguments))
        return self._error


class FakeEvent:
    """As torch's: its handle is there once it has been recorded."""

    made = 0

    def record(self, stream):
        FakeEvent.made += 1
        self.cuda_event = 100 + FakeEvent.made


@pytest.fixture
def driver(monkeypatch):
    """The calls that a driver has had, for a machine on which all of them return `error`."""

    def use(error=0):
        calls, handles = [], iter(SIDES.values())

        class Library:
            def __getattr__(self, name):
                return FakeFunction(name, calls, error)

        monkeypatch.setattr(ctypes, "CDLL", lambda name: Library())
        monkeypatch.setattr(torch.cuda, "Stream", lambda *_, **__: SimpleNamespace(cuda_stream=next(handles)))
        monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: CALLER, raising=False)
        FakeEvent.made = 0
        copy_engine.find_driver.cache_clear()
        return calls

    yield use
    copy_engine.find_driver.cache_clear()


def test_streams_of_a_call_fork_from_the_callers_copy_and_join_it(driver):
    calls = driver()
    streams = copy_engine.CudaCopyStreams(torch.device("cuda", 0))
    for joined in range(2):
        calls.clear()
        streams.fork()
        streams.copy(1000, 2000, 64, "copy")
        streams.mark("copied", "copy")
        streams.follow("copied", "flag")
        streams.join()
        forked, copied, ended = 101, 102, 103  # events are made once
        assert calls == [
            ("cuEventRecord", forked, CALLER),
            *(("cuStreamWaitEvent", side, forked, 0) for side in SIDES.values()),
            ("cuMemcpyAsync", 1000, 2000, 64, SIDES["copy"]),
            ("cuEventRecord", copied, SIDES["copy"]),
            ("cuStreamWaitEvent", SIDES["flag"], copied, 0),
            *(
                call
                for side in SIDES.values()
                for call in (("cuEventRecord", ended, side), ("cuStreamWaitEvent", CALLER, ended, 0))
            ),
        ], joined
    assert streams.handle("wait") == SIDES["wait"]


def test_a_side_stream_forks_and_joins_by_two_calls_each(driver, monkeypatch):
    calls = driver()
    monkeypatch.setattr(copy_engine, "find_current", lambda _: SimpleNamespace(cuda_stream=CALLER))
    side = copy_engine.SideStream(torch.device("cuda", 0))
    for _ in range(2):
        calls.clear()
        side.open()
        side.join()
        handle = side.stream.cuda_stream
        assert calls == [
            *(("cuEventRecord", 101, CALLER), ("cuStreamWaitEvent", handle, 101, 0)),
            *(("cuEventRecord", 102, handle), ("cuStreamWaitEvent", CALLER, 102, 0)),
        ]


def test_a_flag_in_host_memory_is_written_at_once():
    word, value = torch.zeros(1, dtype=torch.int32), torch.tensor([7], dtype=torch.int32)
    copy_engine.set_flag(word, value)
    assert word.item() == 7


def test_a_wait_for_a_count_and_the_end_of_counts_are_one_call_each(driver):
    calls = driver()
    copy_engine.find_driver().await_count(4096, 3, CALLER)
    copy_engine.find_driver().clear(4096, 12, CALLER)
    assert calls == [("cuStreamWaitValue32_v2", CALLER, 4096, 3, 0), ("cuMemsetD32Async", 4096, 0, 12, CALLER)]


@pytest.mark.parametrize(
    "call",
    [
        lambda made: made.copy(1000, 2000, 64, CALLER),
        lambda made: made.copy_rows((1000, 64), (2000, 128), 32, 4, CALLER),
        lambda made: made.record(101, CALLER),
        lambda made: made.follow(CALLER, 101),
        lambda made: made.await_count(4096, 3, CALLER),
        lambda made: made.clear(4096, 3, CALLER),
    ],
)
def test_a_call_that_the_driver_refuses_raises_its_error(driver, call):
    driver(error=700)
    with pytest.raises(RuntimeError, match="CUDA error 700"):
        call(copy_engine.find_driver())
