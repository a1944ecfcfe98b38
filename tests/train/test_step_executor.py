# SPDX-License-Identifier: Apache-2.0
"""Executors of a step: which micro-batches they run, in which order, and what their ranks send."""

import pytest
import torch
from tests.train import runs
from torch import Tensor

from stretto.parallel import count_collectives
from stretto.train.step_executor import AccumulatingExecutor, CudaGraphExecutor, StepFunctions, build_executor


def run_step(
    rows: int, micro_batch: int | None, axis: str = "data", gathers_once: bool = False
) -> tuple[list[str], float, float, int]:
    """Run a step of a GPT on two ranks of an axis. Returns the calls, the loss, the gradient's sum, and the axis's
    bytes."""
    model, optimizer, grid = runs.sharded(runs.make_gpt, {axis: 2}, seed=1)
    torch.manual_seed(3 + grid.coordinate(axis))
    tokens = torch.randint(61, (rows, 16))
    calls: list[str] = []

    def compute_loss(inputs: Tensor, targets: Tensor) -> Tensor:
        calls.append(f"loss of {len(inputs)} from {int((tokens == inputs[0]).all(dim=1).nonzero()[0])}")
        return model(inputs, targets, num_targets=2 * rows * 16)

    def update(lr: float | Tensor, _: Tensor) -> Tensor:
        calls.append(f"update at {lr}")
        total = torch.stack([p.grad.to_local().sum() for p in optimizer.parameters.values()]).sum()
        optimizer.step(lr)
        return total

    functions = StepFunctions(model, compute_loss, update)
    executor = build_executor(functions, micro_batch=micro_batch, gathers_once=gathers_once)
    with count_collectives(grid) as counts:
        loss, total = executor.run((tokens, tokens), 0.5)
    executor.close()
    assert loss.dtype == torch.float64
    return calls, float(loss), float(total), counts.bytes_by_axis()[axis]


def test_micro_batches_run_in_order_and_the_update_runs_once_after_them(ranks):
    for calls, *_ in ranks(2).run(run_step, 4, 2):
        assert calls == ["loss of 2 from 0", "loss of 2 from 2", "update at 0.5"]
    for calls, *_ in ranks(2).run(run_step, 4, None):
        assert calls == ["loss of 4 from 0", "update at 0.5"]


def test_micro_batches_add_up_to_the_whole_batch_and_send_gradients_once(ranks):
    for whole, cut in zip(ranks(2).run(run_step, 4, None), ranks(2).run(run_step, 4, 1), strict=True):
        assert cut[1] == pytest.approx(whole[1], rel=1e-6)
        assert cut[2] == pytest.approx(whole[2], rel=1e-4, abs=1e-6)
        # Besides gradients, which are summed once, each micro-batch sums its loss over data: at most 8 bytes.
        assert whole[3] > 1000
        assert 0 <= cut[3] - whole[3] <= 3 * 8


@pytest.mark.long
def test_weights_are_gathered_once_where_they_are_to_be(ranks):
    runs = [ranks(2).run(run_step, 4, size, "z", once) for size, once in ((None, False), (1, False), (1, True))]
    for whole, each_time, once in zip(*runs, strict=True):
        assert once[:3] == each_time[:3]
        # Three more micro-batches send gradients three times more, and gather weights, as many bytes, as often or not.
        more = each_time[3] - whole[3]
        assert more > whole[3]
        assert each_time[3] - once[3] == pytest.approx(more / 2, rel=0.02)


def test_a_closed_executor_does_not_run_and_holds_nothing() -> None:
    functions = StepFunctions(torch.nn.Identity(), lambda x: x.sum(), lambda lr, loss: torch.zeros(()))
    executor = AccumulatingExecutor(functions)
    executor.close()
    with pytest.raises(ValueError, match="was closed"):
        executor.run((torch.zeros(1),), 0.1)
    assert functions not in vars(executor).values()


def test_a_batch_that_is_not_split_may_have_tensors_of_any_length() -> None:
    seen = []

    def compute_loss(dense: Tensor, indices: Tensor) -> Tensor:
        seen.append((len(dense), len(indices)))
        return dense.sum() * torch.ones((), requires_grad=True)

    executor = AccumulatingExecutor(StepFunctions(torch.nn.Identity(), compute_loss, lambda lr, loss: torch.zeros(())))
    executor.run((torch.zeros(3), torch.zeros(7)), 0.1)
    assert seen == [(3, 7)]


def test_a_graph_takes_no_dropout_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stretto.train.step_executor.CapturedStep", lambda step: step)
    functions = StepFunctions(torch.nn.Identity(), lambda x: x.sum(), lambda lr, loss: torch.zeros(()))
    executor = build_executor(functions, cuda_graph=True)
    assert isinstance(executor, CudaGraphExecutor)
    with pytest.raises(ValueError, match="no dropout_seed"):
        executor.run((torch.zeros(1),), 0.1, dropout_seed=1)
