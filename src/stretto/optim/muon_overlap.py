# SPDX-License-Identifier: Apache-2.0
"""Hides Muon's exchange of matrices: it starts in the backward pass, and weights are written when they are next read.

    a weight's gradient is final (`GradientListener.final`)      `BackwardExchange` sends momentum's shards to owners
    owners have a round's matrices                               they iterate on a side stream, and send results back
    `Muon.step`                                                  `LateUpdates` writes the weights on that stream, and
    the next forward pass gathers a weight (`settle`)            the gather's stream waits for the write of its round

Without a GPU there are no streams: owners iterate when the next round starts, and `settle` waits for a round's results
and writes its weights. Who reads a shard before, through `TensorOnGrid.to_local`, has it settled, too.

What is sent in the backward pass is computed from the gradient and the old momentum, and changes neither: a step that
does not come, is skipped, or needs a factor that is known later, has nothing to undo. Such a factor (clipping) changes
what is sent, as gradient and momentum are added: the exchange of that step starts when the factor is known.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from stretto.optim.matrix_owners import MatrixExchange
from stretto.parallel.layout import TensorOnGrid

_SAMPLES = 64


class BackwardExchange:
    """The exchange that a backward pass starts: a `GradientListener` of a model's reducer.

    parameters: the model's, of all matrices. read: those that forward passes do not gather, but read at any time.
    begin: makes the exchange of the matrices of these numbers. direction: what is sent, of a matrix's number and this
    rank's gradient. `is_on`: set by the optimizer, if steps need no factor.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        read: Sequence[nn.Parameter],
        begin: Callable[[tuple[int, ...], Callable[[int], Tensor]], MatrixExchange],
        direction: Callable[[int, Tensor | None], Tensor],
    ) -> None:
        self.is_on = False
        self._parameters, self._read = tuple(parameters), tuple(read)
        self._begin, self._direction = begin, direction
        self._number_of = {parameter: number for number, parameter in enumerate(parameters)}
        self._numbers: tuple[int, ...] = ()
        self._exchange: MatrixExchange | None = None
        self._is_open = self._is_stale = False
        self._final: set[int] = set()  # places in `_numbers`
        self._samples: dict[int, Tensor] = {}  # of the gradients that were sent, by numbers

    def final(self, parameter: nn.Parameter) -> None:
        """Send what needs no further gradient."""
        number = self._number_of.get(parameter)
        if not self.is_on or number is None or not (exchange := self._open()):
            return
        if number in self._samples:  # a module runs more often than before
            self._is_stale = True
        elif number in self._numbers:
            self._final.add(self._numbers.index(number))
            exchange.start_ready(self._final)

    def finish(self) -> None:
        """Send the rest."""
        if not self.is_on or not (exchange := self._open()):
            return
        exchange.finish()
        self._is_open = False
        if exchange.stream is not None and torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream().wait_stream(exchange.stream)  # the capture may end before the step
        if self._is_stale:
            self.drop()

    def drop(self) -> None:
        """Forget the exchange, whose results nobody takes."""
        if self._exchange is not None:
            self._exchange.discard()
        self._exchange, self._is_open, self._is_stale = None, False, False

    def begin_forward(self) -> None:
        """Settle what the pass reads; forget the exchange of a backward pass that has raised."""
        settle(self._read)
        if self._is_open:
            self.drop()

    def take(self, numbers: tuple[int, ...], gradients: Sequence[Tensor | None] | None) -> MatrixExchange | None:
        """Return the exchange of these matrices, if the last backward pass has made one, which is forgotten.

        gradients: this rank's, as the step uses them; None if it uses others. RuntimeError (on a GPU: a kernel fails)
        if they are not those that were sent.
        """
        exchange = self._exchange
        if exchange is None or gradients is None or self._is_open or numbers != self._numbers:
            self.drop()
            return None
        self._exchange = None
        now = [None if gradient is None else _sample(gradient) for gradient in gradients]
        sent = [self._samples.get(number) for number in numbers]
        if any((a is None) != (b is None) for a, b in zip(now, sent, strict=True)):
            raise RuntimeError(_CHANGED)
        pairs = [(a, b) for a, b in zip(now, sent, strict=True) if a is not None and b is not None]
        if pairs:
            mine, theirs = (torch.cat([pair[side] for pair in pairs]) for side in (0, 1))
            is_same = ((mine == theirs) | (mine.isnan() & theirs.isnan())).all()
            if is_same.is_cuda:
                torch._assert_async(is_same, _CHANGED)
            elif not is_same:
                raise RuntimeError(_CHANGED)
        return exchange

    def _open(self) -> MatrixExchange | None:
        """The exchange of the running pass; None if nothing is trained."""
        if not self._is_open:
            self.drop()
            self._numbers = tuple(n for n, parameter in enumerate(self._parameters) if parameter.requires_grad)
            self._samples.clear()
            self._final.clear()
            if self._numbers:
                self._exchange, self._is_open = self._begin(self._numbers, self._shard_of), True
        return self._exchange

    def _shard_of(self, place: int) -> Tensor:
        number = self._numbers[place]
        gradient = self._parameters[number].grad
        mine = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        if mine is not None:
            self._samples[number] = _sample(mine)
        return self._direction(number, mine)


class LateUpdates:
    """Writes the results of an exchange to parameters, at the latest when they are read.

    apply: (place of a parameter, its update), on the exchange's stream. parameters: the model's, in the order of the
    exchange's layouts.
    """

    def __init__(
        self, exchange: MatrixExchange, apply: Callable[[int, Tensor], None], parameters: Sequence[nn.Parameter]
    ) -> None:
        self._exchange, self._apply = exchange, apply
        self._settled = 0
        self._events: list[torch.cuda.Event] = []
        self._parameters: list[list[nn.Parameter]] = [[] for _ in exchange.owners.rounds]
        for place, number in exchange.owners.last_round.items():
            self._parameters[number].append(parameters[place])
        self._is_captured = False
        if exchange.stream is not None:
            self._is_captured = torch.cuda.is_current_stream_capturing()
            exchange.stream.wait_stream(torch.cuda.current_stream(exchange.stream.device))
            with exchange.on_stream():
                for number in range(len(self._parameters)):
                    self._write(number)
                    self._events.append(exchange.stream.record_event())
        for number, held in enumerate(self._parameters):
            for parameter in held:
                parameter.late_write = partial(self.settle, number)  # type: ignore[attr-defined]
        if self._is_captured:
            self.settle_all()

    def settle_all(self) -> None:
        """Have the current stream wait for all writes."""
        self.settle(len(self._parameters) - 1)

    def settle(self, number: int) -> None:
        """Have the current stream wait for the writes of the rounds up to this one."""
        while self._settled <= number:
            current, self._settled = self._settled, self._settled + 1
            for parameter in self._parameters[current]:
                parameter.late_write = None  # type: ignore[attr-defined]
            if self._exchange.stream is None:
                self._write(current)
            elif self._is_captured or not torch.cuda.is_current_stream_capturing():  # a capture has waited before
                torch.cuda.current_stream(self._exchange.stream.device).wait_event(self._events[current])

    @torch.no_grad()
    def _write(self, number: int) -> None:
        for place, update in self._exchange.take(number):
            self._apply(place, update)


def settle(parameters: Iterable[nn.Parameter]) -> None:
    """Have the current stream wait until these parameters of a model are written."""
    for parameter in parameters:
        if isinstance(parameter, TensorOnGrid) and parameter.late_write is not None:
            parameter.late_write()


def _sample(gradient: Tensor) -> Tensor:
    """Copy some numbers of a gradient, in fp64, by which a changed one is told from it."""
    some = gradient.detach().reshape(-1)[:: max(1, gradient.numel() // _SAMPLES)]
    return some.to(torch.float64, copy=True)


_CHANGED = (
    "gradients of Muon's matrices were changed between backward(), which exchanges them, and step(): clip by "
    "step(scale=...), or take Muon.overlap_with(model, in_backward=False)"
)
