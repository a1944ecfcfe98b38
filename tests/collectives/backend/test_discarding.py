# SPDX-License-Identifier: Apache-2.0
"""What a discarded schedule leaves behind on GPUs: nothing, but for what CUDA graphs have captured."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from stretto.collectives.algorithms import find
from stretto.collectives.backend import cuda_runner
from stretto.collectives.backend.calls import BackendCall
from stretto.collectives.backend.runner import Member


class Kernel:
    """Launches nothing."""

    def __call__(self, input, output):
        pass


@pytest.mark.parametrize("is_captured", [True, False])
def test_a_kernel_lives_on_where_a_graph_has_captured_it(is_captured, monkeypatch):
    schedule = find("direct-all-to-all").compile(ranks=2)
    runner = cuda_runner.CudaRunner(Member(0, 2, "g"))
    device = torch.device("cpu")
    workspace = SimpleNamespace(require_lines_for=lambda protocol, name: None, device=device)
    monkeypatch.setattr(runner, "_communicator_or_none", lambda: SimpleNamespace(workspace=workspace))
    runner._communicator = runner._communicator_or_none()
    monkeypatch.setattr(cuda_runner, "FusedScheduleKernel", lambda *_, **__: Kernel())
    monkeypatch.setattr(cuda_runner, "make_enqueued_work", lambda *_: None)
    runner.prepare(schedule, None, 1.0)

    def start():
        runner.start(schedule, BackendCall("alltoall", (torch.zeros(4),), (torch.zeros(4),), "", 0, 1.0, ""))

    for is_capturing in (False, is_captured):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda now=is_capturing: now)
        start()
    (kernel,) = map(weakref.ref, runner._kernels.values())
    runner.discard(schedule)
    gc.collect()
    assert (kernel() is not None) == is_captured
