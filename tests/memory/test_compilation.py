# SPDX-License-Identifier: Apache-2.0
"""Ranks wait longer for one another while one of them may be compiling a kernel."""

from collections.abc import Iterator
from datetime import timedelta
from unittest import mock

import pytest
import torch.distributed as dist

from stretto.memory import PeerError, compilation, failures, store_all_gather
from stretto.memory.compilation import ALLOWANCE, CallLimit, note_loaded_kernel
from stretto.memory.groups import timed_barrier


@pytest.fixture(autouse=True)
def _loads_of_this_test_alone() -> Iterator[None]:
    before = compilation._loaded.value
    yield
    compilation._loaded.value = before


def test_the_first_call_after_a_kernel_was_loaded_may_wait_longer():
    note_loaded_kernel()
    limit, other = CallLimit(30.0), CallLimit(7.0)
    assert limit.of_call() == 30.0  # the ranks have met since
    note_loaded_kernel()
    assert [limit.of_call(), limit.of_call()] == [30.0 + ALLOWANCE, 30.0]
    stages = CallLimit(5.0, loads_first=True)  # whose peers load kernels that this rank does not
    assert [stages.of_call(), stages.of_call()] == [5.0 + ALLOWANCE, 5.0]
    assert [other.of_call(), other.of_call()] == [7.0 + ALLOWANCE, 7.0]  # each workspace has peers of its own


def meet_after_loading():
    """Rank 0's errors where rank 1 does not come: by the first meeting after a kernel was loaded, and by the second."""
    with mock.patch.object(compilation, "ALLOWANCE", 1.0):
        before = compilation._loaded.value
        try:
            return _meet_after_loading()
        finally:  # other tests run in this process, too
            compilation._loaded.value = before


def _meet_after_loading():
    rank, errors = dist.get_rank(), []
    group = dist.new_group(timeout=timedelta(seconds=30))
    for meet in (lambda: store_all_gather("a call", group, "topic", 0.25), lambda: timed_barrier(group, 0.25)):
        note_loaded_kernel()
        for _ in range(2 if rank == 0 else 0):
            with pytest.raises(PeerError) as error:
                meet()
            errors.append(str(error.value))
        dist.barrier()
    return errors


@pytest.mark.long
def test_hosts_wait_longer_in_the_first_meeting_after_a_kernel_was_loaded(ranks):
    errors, _ = ranks(2).run(meet_after_loading)
    for error, seconds in zip(errors, ["1.25", "0.25"] * 2, strict=True):
        assert f"within {seconds} s" in error


@pytest.mark.parametrize("seconds", [0.5, 630.0, 30 * 24 * 3600 + ALLOWANCE])
def test_a_failure_record_has_the_limit_that_was_waited(seconds):
    nanoseconds = int(seconds * 1e9)
    words = [0] * failures.RECORD_WORDS
    for index in range(2):
        word = nanoseconds >> 32 * index & 0xFFFFFFFF
        words[failures.LIMIT + index] = word - (1 << 32) if word >= 1 << 31 else word  # as int32
    assert failures.read_limit(words) == seconds
