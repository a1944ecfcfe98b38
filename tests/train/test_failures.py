# SPDX-License-Identifier: Apache-2.0
"""Training after a failed wait for another rank: whatever uses a result raises, and no checkpoint has any of it."""

import contextlib
import gc
from pathlib import Path
from unittest import mock

import pytest
import torch
from tests.train import failure_runs

from stretto.memory import PeerError
from stretto.parallel import CapturedStep
from stretto.train.observe.progress import ProgressReporter
from stretto.train.observe.recorder import StepRecorder


@pytest.fixture
def failed():
    """A workspace one of whose waits has failed, in this process."""
    workspace = failure_runs.Workspace()
    yield workspace
    workspace.record.close()
    gc.collect()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def test_a_loss_is_not_read_after_a_failed_wait(failed):
    recorder = StepRecorder(lambda step: step, None, ProgressReporter())
    recorder.add(1, 0.1, torch.tensor(2.0), torch.tensor(1.0))
    failed.record.mark([1, 3])
    with pytest.raises(PeerError, match="waited in vain for rank 3"):
        recorder.add(2, 0.1, torch.tensor(3.0), torch.tensor(1.0))
    assert recorder.last.step == 1


def test_the_utilization_is_the_rate_over_that_at_the_peak():
    log = mock.MagicMock()
    recorder = StepRecorder(lambda step: 64 * step, log, ProgressReporter(), ranks=4, full_rate=1e6)
    recorder.add(1, 0.1, torch.tensor(2.0), torch.tensor(1.0))
    metrics = log.write.call_args.args[0]
    assert metrics.mfu == pytest.approx(64 / metrics.seconds / 1e6)
    assert metrics.as_line()["tokens_per_second_per_rank"] == pytest.approx(metrics.rate / 4)
    assert recorder.mfu() == pytest.approx(recorder.rate() / 1e6)


class Graph:
    """A captured graph that notes its replays; `on_replay` is what one of them does."""

    def __init__(self, on_replay=lambda: None):
        self.replays, self._on_replay = 0, on_replay

    def replay(self):
        self.replays += 1
        self._on_replay()

    def reset(self):
        pass


@contextlib.contextmanager
def captured(graph):
    """A captured step without inputs on a GPU that is not there, whose graph has been captured."""
    stream = mock.MagicMock()
    with (
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=False),
        mock.patch.object(torch.cuda, "Stream", return_value=stream),
        mock.patch.object(torch.cuda, "current_stream", return_value=stream),
        mock.patch.object(torch.cuda, "stream", return_value=contextlib.nullcontext()),
        mock.patch.object(torch.cuda, "synchronize"),
    ):
        step = CapturedStep(lambda: (), warm_up=0)
        step._graph = graph
        yield step
        step._graph = None


def test_a_captured_step_is_not_replayed_after_a_failed_wait(failed):
    graph = Graph()
    with captured(graph) as step:
        step()
        assert graph.replays == 1
        failed.record.mark([1, 3])
        with pytest.raises(PeerError, match="waited in vain for rank 3"):
            step()
    assert graph.replays == 1


def test_a_wait_that_fails_in_a_replay_is_raised_at_the_next_look(failed):
    graph = Graph(lambda: failed.record.mark([1, 3]))
    with captured(graph) as step:
        step()
        with pytest.raises(PeerError, match="waited in vain for rank 3"):
            step()
    assert graph.replays == 1


def test_no_rank_writes_a_checkpoint_after_a_failed_wait_of_one_of_them(ranks, tmp_path):
    out = tmp_path / "run"
    messages = ranks(2).run(failure_runs.save_after_failure, out, 1)
    assert "waited in vain for rank 3" in messages[1]
    assert messages[0] is not None, "the other rank neither hangs nor writes"
    assert names(out / "checkpoints") == ["step-00000001"]  # of the step before


@pytest.mark.long
def test_a_run_in_which_a_wait_fails_ends_with_its_name_and_the_weights_of_an_earlier_step(ranks, tmp_path):
    out = tmp_path / "run"
    (message,) = ranks(1).run(failure_runs.train_until_failure, out, 4)
    assert "waited in vain for rank 3" in message
    assert names(out / "checkpoints") == ["step-00000002"]
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 3
