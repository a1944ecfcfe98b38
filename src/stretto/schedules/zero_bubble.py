# SPDX-License-Identifier: Apache-2.0
"""Generators of schedules that split backward passes and fill bubbles with weight gradients."""

from collections import Counter, deque

from stretto.schedules.schedule import Action, PipelineOperation

_F, _B = PipelineOperation.FORWARD, PipelineOperation.BACKWARD
_I, _W = PipelineOperation.BACKWARD_INPUT, PipelineOperation.BACKWARD_WEIGHT


class _RankProgram:
    """The actions of a rank so far. Each operation of a stage takes the micro-batches in order."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self._next: Counter[tuple[int, PipelineOperation]] = Counter()
        self._weights: deque[tuple[int, int]] = deque()  # the stage and micro-batch of each I without its W

    def forward(self, stage: int) -> None:
        self.actions.append(Action(stage, _F, self._take(stage, _F)))

    def backward(self, stage: int) -> None:
        self.actions.append(Action(stage, _B, self._take(stage, _B)))

    def backward_input(self, stage: int) -> None:
        micro_batch = self._take(stage, _B)
        self.actions.append(Action(stage, _I, micro_batch))
        self._weights.append((stage, micro_batch))

    def backward_weight(self) -> None:
        """Compute the weight gradients that have waited for the longest, if some wait."""
        if self._weights:
            stage, micro_batch = self._weights.popleft()
            self.actions.append(Action(stage, _W, micro_batch))

    def backward_weights(self) -> None:
        """Compute all weight gradients that wait."""
        while self._weights:
            self.backward_weight()

    def split_backward(self, stage: int) -> None:
        self.backward_input(stage)
        self.backward_weight()

    def overlap(self, forward: int, backward: int) -> None:
        """A forward pass of one stage that may be computed together with a backward pass of another."""
        self.actions.append(Action(forward, _F, self._take(forward, _F), overlaps_next=True))
        self.backward(backward)

    def _take(self, stage: int, operation: PipelineOperation) -> int:
        micro_batch = self._next[stage, operation]
        self._next[stage, operation] += 1
        return micro_batch


def zb_h1(pipe: int, micro_batches: int, virtual_stages: int, extra_warm_up: int) -> list[list[Action]]:
    """1F1B with split backward passes, whose weight gradients wait: on rank r, r of them at most.

    So no rank keeps more micro-batches than the first rank of 1F1B, and weight gradients fill a part of the bubble at
    the end.
    """
    ranks = []
    for rank in range(pipe):
        program = _RankProgram()
        warm_up = min(micro_batches, pipe - 1 - rank)
        for _ in range(warm_up):
            program.forward(rank)
        for n in range(micro_batches):
            if n < micro_batches - warm_up:
                program.forward(rank)
            program.backward_input(rank)
            if n >= rank:
                program.backward_weight()
        program.backward_weights()
        ranks.append(program.actions)
    return ranks


def zb_v(pipe: int, micro_batches: int, virtual_stages: int, extra_warm_up: int) -> list[list[Action]]:
    """Two stages on a rank, in a V. Without a bubble between a rank's first and last unit where F = I = W.

    Built for at least as many micro-batches as fill the pipeline; with fewer, the actions of the others are left out,
    which breaks no order, since micro-batches wait for nothing of each other.
    """
    built = max(micro_batches, 2 * pipe - 1)
    ranks = []
    for rank in range(pipe):
        down, up = rank, 2 * pipe - 1 - rank
        program = _RankProgram()
        # The first micro-batch needs 2 * (pipe - 1 - rank) + 1 units from this rank's first stage to its second.
        for _ in range(2 * (pipe - rank) - 1):
            program.forward(down)
        for _ in range(rank):
            program.forward(up)
            program.forward(down)
        for _ in range(pipe - rank):
            program.forward(up)
            program.split_backward(up)
        for n in range(2 * pipe - 1 - rank, built + pipe - 1 - rank):
            if n < built:
                program.forward(down)
            program.split_backward(down)
            program.forward(up)
            program.split_backward(up)
        # Input gradients are sent to the ranks that wait for them; weight gradients are computed last.
        for _ in range(rank):
            program.backward_input(down)
            program.backward_input(up)
        for _ in range(pipe - rank):
            program.backward_input(down)
            program.backward_weight()
        program.backward_weights()
        ranks.append([action for action in program.actions if (action.micro_batch or 0) < micro_batches])
    return ranks


def dualpipe_v(pipe: int, micro_batches: int, virtual_stages: int, extra_warm_up: int) -> list[list[Action]]:
    """Two stages on a rank, in a V, where forward passes of one overlap backward passes of the other.

    An overlapped pair hides the messages of one pass (of experts, above all) under the computation of the other.
    """
    ranks = []
    for rank in range(pipe):
        down, up = rank, 2 * pipe - 1 - rank
        left = pipe - 1 - rank
        program = _RankProgram()
        for _ in range(2 * left):
            program.forward(down)
        for _ in range(rank + 1):
            program.forward(down)
            program.forward(up)
        for _ in range(left):
            program.split_backward(up)
            program.forward(up)
        for n in range(micro_batches - 2 * pipe + rank + 1):
            if n == 0 and left == 0:  # separately, so that the gradient leaves the last stage sooner
                program.forward(down)
                program.backward(up)
            else:
                program.overlap(down, up)
            program.overlap(up, down)
        for _ in range(left):
            program.backward(up)
            program.overlap(up, down)
        # The second half of the last backward passes is split: inputs first, weights fill the bubble at the end.
        for n in range(2 * (rank + 1)):
            (program.backward_input if n > rank else program.backward)(down if n % 2 else up)
        for _ in range(left):
            program.backward_weight()
            program.backward_input(down)
        program.backward_weights()
        ranks.append(program.actions)
    return ranks
