"""Gradients of parameters that every rank has whole: summed over the ranks under the rest of the backward pass."""

from collections.abc import Iterable, Sequence
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stretto.parallel.communication import Pending, start_all_reduce
from stretto.parallel.overlap import at_end_of_backward


class ReplicatedGradients:
    """Sums gradients over `group`, bucket by bucket: a bucket is sent once the last of its gradients is there.

    When `backward()` returns, each `.grad` holds the sum of all ranks', the same bits on each. Gradients must have been
    dropped before (`zero_grad`), and every parameter must get one. Ranks must make them in the same order.
    """

    def __init__(self, buckets: Iterable[Sequence[nn.Parameter]], group: dist.ProcessGroup) -> None:
        self._group = group
        self._buckets = [tuple(bucket) for bucket in buckets]
        self._missing = [len(bucket) for bucket in self._buckets]
        self._pending: list[tuple[int, Pending]] = []
        self._task = -1  # autograd's number of the pass that is running: one that has failed is not taken up again
        if group.size() == 1:
            return
        # Python's garbage collector does not see what such a hook refers to: a cycle would stay.
        this = ref(self)
        for number, bucket in enumerate(self._buckets):
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(lambda _, number=number: _alive(this)._arrive(number))

    def _arrive(self, number: int) -> None:
        if self._task != (task := torch._C._current_graph_task_id()):
            self._task = task
            self._missing, self._pending = [len(bucket) for bucket in self._buckets], []
            at_end_of_backward(self._finish)
        self._missing[number] -= 1
        if not self._missing[number]:
            flat = torch.cat([_gradient(parameter).reshape(-1) for parameter in self._buckets[number]])
            self._pending.append((number, start_all_reduce(flat, self._group)))

    def _finish(self) -> None:
        self._task = -1
        if any(self._missing):
            raise RuntimeError(f"{sum(self._missing)} parameters had no gradient in this backward pass: each needs one")
        for number, pending in self._pending:
            sums = pending.wait().split([parameter.numel() for parameter in self._buckets[number]])
            for parameter, total in zip(self._buckets[number], sums, strict=True):
                parameter.grad = total.view_as(parameter)


def _alive(this: "ref[ReplicatedGradients]") -> ReplicatedGradients:
    alive = this()
    if alive is None:
        raise RuntimeError("these parameters' model is gone: keep what stretto.parallel.distribute_tables was given")
    return alive


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
