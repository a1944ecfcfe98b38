# SPDX-License-Identifier: Apache-2.0
"""Records the forward and backward pass of blocks: when a linear, a norm or a mixture of experts computes and sends.

What is issued when follows docs/overlap.md:

- the sum of a large output in two halves, the first under the product of the second (all_reduce);
- the sum of an input's gradient under the weight's gradient (all_reduce);
- weights gathered one ahead, or all by copy engines from the forward pass's beginning on (all_gather);
- weight gradients scattered during later computation, at most SCATTERS_IN_FLIGHT at a time (reduce_scatter);
- and summed over data under what follows (data), in the last micro-batch.

Without an overlap, computation waits for the collective where it is issued.
"""

from collections.abc import Sequence

from stretto.execution import SCATTERS_IN_FLIGHT, ExecutionOptions, Overlap
from stretto.simulator.training.block_work import (
    BlockWork,
    ExpertWork,
    LinearWork,
    TiledCollective,
    WeightCollectives,
)
from stretto.simulator.training.program import HOST, GroupCollective, Tape, WeightGathers

OTHER = "attention, norms and element-wise kernels"


class GradientSums:
    """Sends weights' gradients: over z in each micro-batch, or in the last alone; over data in the last.

    scatters, is_last: of the micro-batch whose backward pass is recorded.
    """

    def __init__(self, overlap: Overlap, in_flight: int = SCATTERS_IN_FLIGHT) -> None:
        self.scatters = self.is_last = True
        self._overlap, self._in_flight = overlap, in_flight
        self._on_the_way: list[int] = []
        self._sums: list[int] = []
        self._left: list[GroupCollective] = []

    @property
    def on_the_way(self) -> tuple[int, ...]:
        """The last of the scatters over z: all others have ended before it."""
        return tuple(self._on_the_way[-1:])

    def throttle(self, tape: Tape) -> None:
        """Let the next gradient wait until there is room for another on its way over z."""
        if len(self._on_the_way) >= self._in_flight:
            tape.wait(self._on_the_way[-self._in_flight])

    def add(self, tape: Tape, weight: WeightCollectives) -> None:
        """Send the gradient that was computed last."""
        scattered = tape.start("scatter weight gradient", weight.scatter) if self.scatters else None
        if scattered is not None:
            self._on_the_way.append(scattered)
            if not self._overlap.reduce_scatter:
                tape.wait(scattered)
        for each in (weight.data, weight.copies) if self.is_last else ():
            if each is not None:
                self.sum_over_data(tape, each, () if scattered is None else (scattered,))

    def sum_over_data(self, tape: Tape, collective: GroupCollective, after: Sequence[int] = ()) -> None:
        """Sum gradients that are final on this rank, once `after` have ended."""
        if not self._overlap.data:
            self._left.append(collective)
            return
        summed = tape.start("sum gradients", collective, after)
        assert summed is not None
        self._sums.append(summed)

    def finish(self, tape: Tape) -> list[int]:
        """Let what follows wait for all gradients. Returns the sums over data, in order."""
        tape.wait(*self.on_the_way)
        for collective in self._left:
            summed = tape.start("sum gradients", collective)
            assert summed is not None
            self._sums.append(summed)
        self._left.clear()
        return self._sums


class BlockRecorder:
    """Records blocks of one kind on tapes."""

    def __init__(self, work: BlockWork, options: ExecutionOptions) -> None:
        self.work, self.overlap, self.recomputation = work, options.overlap, options.recomputation
        self._frees = not options.keeps_weights
        self._is_gathered_whole = not any(linear.weight for linear in work.linears)
        # Before each linear and after the last.
        self._parts = len(work.linears) + 1

    def gathers(self, *, again: bool = False, is_last: bool = False) -> list[GroupCollective | None]:
        """All-gathers of a pass over the block's weights, in the order of use. Reversed, they are a backward pass's.

        again, is_last: as of `forward`. Of a weight that is freed after use nothing is gathered for an output that is
        left out.
        """
        linears = self.work.linears[: -1 if self._frees and self._leaves_out_last(again, is_last) else None]
        together = [weight.gather for weight in self.work.weights]
        return [linear.weight.gather for linear in linears if linear.weight is not None] + together

    def _leaves_out_last(self, again: bool, is_last: bool) -> bool:
        return again and is_last and self.work.left_out > 0

    def forward(self, tape: Tape, weights: WeightGathers | None, *, again: bool = False, is_last: bool = False) -> None:
        """Record a forward pass. weights: gathered during it. again: it is a recomputation, except for kept outputs.
        is_last:
        of the blocks that are recomputed together."""
        work = self.work
        other = (work.other_again if again else work.other_forward) / self._parts
        exchanges = not again or self.recomputation.exchanges_again
        sums = not again or self.recomputation.sums_again
        if self._is_gathered_whole:
            self._use_together(weights)
        for place, linear in enumerate(work.linears):
            if self._begins_with_norm(place) and exchanges:
                tape.run("norm statistics", work.statistics)
            tape.compute(OTHER, other)
            is_left_out = self._leaves_out_last(again, is_last) and place == len(work.linears) - 1
            if weights is not None and linear.weight is not None and not (is_left_out and self._frees):
                weights.use()
            if is_left_out:
                continue
            self._output(tape, linear, 0.0 if again and linear.is_kept else linear.product, exchanges, sums)
        if not self._is_gathered_whole:
            self._use_together(weights)
        tape.run("gather features", work.features)
        if work.experts is not None:
            self._experts(tape, work.experts, work.experts.forward if exchanges else ((), ()), waits=exchanges)
        tape.compute(OTHER, other)

    def _output(self, tape: Tape, linear: LinearWork, product: float, exchanges: bool, sums: bool) -> None:
        """A linear's product, what brings its input, and the sum of its output."""
        name = linear.name
        if exchanges and linear.gathers_input is not None:
            self._product_of_gathered(tape, name, product, linear.gathers_input)
        elif sums and linear.scatters_output is not None:
            self._scattered_product(tape, name, product, linear.scatters_output)
        else:
            parts = linear.output if sums and linear.output else (None,)
            for collective in parts:
                tape.compute(name, product / len(parts))
                # A second half is there at last when its own sum has ended; the first half's is under its product.
                summed = tape.start(f"sum {name}", collective)
                if not self.overlap.all_reduce or len(parts) == 1:
                    tape.wait(summed)
            tape.wait(summed)
            return
        if sums:
            for collective in linear.output:
                tape.run(f"sum {name}", collective)

    @staticmethod
    def _experts(
        tape: Tape,
        experts: ExpertWork,
        around: tuple[tuple[GroupCollective, ...], tuple[GroupCollective, ...]],
        *,
        waits: bool,
    ) -> None:
        if waits:
            tape.compute("wait for counts of rows", experts.host_wait, HOST)
        for collective in around[0]:
            tape.run(f"{collective.kind} of rows", collective)
        tape.compute("experts", experts.product)
        for collective in around[1]:
            tape.run(f"{collective.kind} of rows", collective)

    def backward(
        self, tape: Tape, gradients: GradientSums, weights: WeightGathers | None, *, computes_weight: bool = True
    ) -> None:
        """Record a backward pass, with weights' gradients or without."""
        work = self.work
        other = work.other_backward / self._parts
        self._use_together(weights)
        tape.compute(f"{OTHER}, backward", other)
        if work.experts is not None:
            self._experts(tape, work.experts, work.experts.backward, waits=False)
            if computes_weight:
                tape.compute("gradient of experts' weights", work.experts.weight_gradient)
        tape.run("gather gradients of features", work.features)
        if computes_weight and not self._is_gathered_whole:
            self._send_together(tape, gradients)
        for place, linear in reversed(list(enumerate(work.linears))):
            if weights is not None and linear.weight is not None:
                weights.use()
            self._gradients(tape, linear, gradients, computes_weight)
            tape.compute(f"{OTHER}, backward", other)
            if self._begins_with_norm(place):
                tape.run("norm statistics, backward", work.statistics)
        if computes_weight and self._is_gathered_whole:
            self._send_together(tape, gradients)

    def _gradients(self, tape: Tape, linear: LinearWork, gradients: GradientSums, computes_weight: bool) -> None:
        name = f"input gradient of {linear.name}"
        is_tiled = True
        if linear.gathers_gradient is not None:
            self._product_of_gathered(tape, name, linear.input_gradient, linear.gathers_gradient)
        elif linear.scatters_gradient is not None:
            self._scattered_product(tape, name, linear.input_gradient, linear.scatters_gradient)
        else:
            is_tiled = False
            tape.compute(name, linear.input_gradient)
        summed = tape.start(f"sum {name}", linear.gradient)
        if is_tiled or not self.overlap.all_reduce:
            tape.wait(summed)
        if computes_weight:
            self._weight_gradient(tape, linear, gradients)
        tape.wait(summed)

    def weight_gradients(self, tape: Tape, gradients: GradientSums) -> None:
        """Record the weights' gradients alone, where a schedule splits backward passes."""
        if self.work.experts is not None:
            tape.compute("gradient of experts' weights", self.work.experts.weight_gradient)
        for linear in reversed(self.work.linears):
            self._weight_gradient(tape, linear, gradients)
        self._send_together(tape, gradients)

    @staticmethod
    def _weight_gradient(tape: Tape, linear: LinearWork, gradients: GradientSums) -> None:
        gradients.throttle(tape)
        tape.compute(f"weight gradient of {linear.name}", linear.weight_gradient)
        if linear.weight is not None:
            gradients.add(tape, linear.weight)

    def _product_of_gathered(self, tape: Tape, name: str, product: float, tiled: TiledCollective) -> None:
        """A product whose first tiles wait for one rank's part, while the others are gathered concurrently."""
        tape.run(f"gather for {name}", tiled.first)
        beside = tape.start(f"gather for {name}", tiled.rest)
        if not self.overlap.hides_any:
            tape.wait(beside)
        tape.compute(name, product)
        tape.wait(beside)

    def _scattered_product(self, tape: Tape, name: str, product: float, tiled: TiledCollective) -> None:
        """A product whose tiles are scattered as they come; the last rank's part follows it."""
        if self.overlap.hides_any:
            beside = tape.start(f"scatter {name}", tiled.rest)
            tape.compute(name, product)
        else:
            tape.compute(name, product)
            beside = tape.start(f"scatter {name}", tiled.rest)
        tape.wait(beside)
        tape.run(f"scatter {name}", tiled.first)

    def _use_together(self, weights: WeightGathers | None) -> None:
        if weights is not None:
            for _ in self.work.weights:
                weights.use()

    def _send_together(self, tape: Tape, gradients: GradientSums) -> None:
        for weight in self.work.weights:
            gradients.throttle(tape)
            gradients.add(tape, weight)

    def _begins_with_norm(self, place: int) -> bool:
        """Whether one of a block's two norms stands before a linear: the first, and that in the middle."""
        return place == 0 or place == len(self.work.linears) // 2
