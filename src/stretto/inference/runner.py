# SPDX-License-Identifier: Apache-2.0
"""Runs a step on the device: tokens in, the next tokens out.

On a GPU, a step that only decodes replays a CUDA graph, and so does one with a whole chunk of a prompt and nothing
else, whose kernels take the host longer to launch than to run.

The host never waits for a token before it launches the next step: a token that was drawn stays on the device (`feed`),
where the next step reads it, and is copied to the host meanwhile.
"""

import inspect
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stretto.huggingface.attention.paged_attention import attend_to_pages
from stretto.huggingface.context import attentions_of
from stretto.inference.cache import CacheShape, CurrentStep, LayerCache, ShapeProbe, StepTokens
from stretto.inference.fused_blocks import BlockFuser
from stretto.inference.sampling import RandomRows, VocabularyPart, best_tokens, draw_tokens, log_probabilities
from stretto.inference.scheduler import SCRATCH_PAGE, Place, StepPart
from stretto.parallel.capture import CapturedStep
from stretto.parallel.fused_modules import defer_rotation
from stretto.parallel.layers.invariant import InvariantOperators

FROM_FEED = -1
"""Stands for a token that was drawn on the device."""


class HostStep(NamedTuple):
    """A step as the host describes it; lists of Python numbers, so that ranks can compare them.

    ids, positions, places, feeds: of each token; its row of the cache, and the slot that knows its id if the host does
    not. counts: tokens of each row. slots, lengths: of each row. random: (row, temperature, top_p, top_k, seed, place)
    of rows that are drawn at random. is_decoding: all tokens were drawn before.
    """

    ids: list[int]
    positions: list[int]
    places: list[int]
    feeds: list[int]
    counts: list[int]
    slots: list[int]
    lengths: list[int]
    random: list[tuple[int, float, float, int, int, int]]
    is_decoding: bool
    wants_log_probabilities: bool

    @property
    def numbers(self) -> list[int]:
        """The numbers that a step reads on the device, one after another: see `_split`."""
        starts, last = [0], []
        for count in self.counts:
            starts.append(starts[-1] + count)
            last.append(starts[-1] - 1)
        small = [*_pad(self.lengths), *_pad(starts)]
        pairs = [low | high << 32 for low, high in zip(small[::2], small[1::2], strict=True)]
        return [*pairs, *self.ids, *self.positions, *self.places, *self.feeds, *self.slots, *last]


def _pad(numbers: list[int]) -> list[int]:
    """Numbers of 32 bits, filled up to a multiple of 16 bytes."""
    return [*numbers, *[0] * (-len(numbers) % 4)]


class _StepNumbers(NamedTuple):
    """Holds what `HostStep` describes, on the device: int64, but lengths and starts, which are int32."""

    lengths: Tensor
    starts: Tensor
    ids: Tensor
    positions: Tensor
    places: Tensor
    feeds: Tensor
    slots: Tensor
    last: Tensor


def _split(numbers: Tensor, tokens: int, rows: int) -> _StepNumbers:
    """Take `HostStep.numbers` apart, without a launch."""
    padded = [rows + -rows % 4, rows + 1 + (-rows - 1) % 4]
    small, *others = numbers.split([sum(padded) // 2, *[tokens] * 4, rows, rows])
    lengths, starts = small.view(torch.int32).split(padded)
    return _StepNumbers(lengths[:rows], starts[: rows + 1], *others)


class Drawn(NamedTuple):
    """The tokens [1, rows] that a step has drawn, int64, on the way to the host; or, if their log-probabilities were
    asked for, float64 [2, rows], with these below them."""

    values: Tensor
    arrived: "torch.cuda.Event | None"

    def wait(self) -> tuple[list[int], list[float]]:
        """Wait for them: (tokens, log-probabilities, or zeros)."""
        if self.arrived is not None:
            self.arrived.synchronize()
        tokens, *logs = self.values.tolist()
        return [int(token) for token in tokens], logs[0] if logs else [0.0] * len(tokens)


def describe(parts: Sequence[StepPart], rows: int, scratch: int, page: int) -> HostStep:
    """Describe a step of these parts, filled up to `rows` with rows of the slot `scratch`. page: tokens of one."""
    wants_logs = any(part.draws and part.place.request.wants_log_probabilities for part in parts)
    step = HostStep([], [], [], [], [], [], [], [], all(not part.is_prompt for part in parts), wants_logs)
    for row, part in enumerate(parts):
        request, pages, end = part.place.request, part.place.pages, part.start + part.count
        step.ids.extend(request.prompt[part.start : end] if part.is_prompt else [FROM_FEED])
        step.positions.extend(range(part.start, end))
        step.places.extend(pages[at // page] * page + at % page for at in range(part.start, end))
        step.feeds.extend([part.place.slot] * part.count)
        step.counts.append(part.count)
        step.slots.append(part.place.slot)
        step.lengths.append(end)
        how = request.sampling
        if part.draws and how.is_random:
            step.random.append((row, how.temperature, how.top_p, how.top_k or 0, how.seed, end - len(request.prompt)))
    for _ in range(len(parts), rows):
        step.ids.append(0)
        step.positions.append(0)
        step.places.append(SCRATCH_PAGE * page)
        step.feeds.append(scratch)
        step.counts.append(1)
        step.slots.append(scratch)
        step.lengths.append(1)
    return step


class StepRunner:
    """A model, its cache and its graphs. slots: requests at a time, of at most `longest` tokens each.

    fuses_rotation: whether heads may be rotated by a kernel in fp32, rounded once.
    """

    def __init__(
        self,
        model: nn.Module,
        part: VocabularyPart,
        device: torch.device,
        *,
        slots: int,
        longest: int,
        page: int,
        chunk: int,
        is_invariant: bool = False,
        fuses_rotation: bool = True,
    ) -> None:
        self.model, self.part, self.device = model, part, device
        self.slots, self.page, self._chunk, self._is_invariant = slots, page, chunk, is_invariant
        self._fuses_rotation = fuses_rotation
        self.is_captured = False
        self._keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._step = CurrentStep()
        self._width = -(-longest // page)
        # By tokens, rows, and whether the tokens are the first of a request.
        self._graphs: dict[tuple[int, int, bool], CapturedStep] = {}
        self._static_logits: dict[tuple[int, int, bool], Tensor] = {}
        self.layers: list[LayerCache] = []
        self._rotates: list[bool] = []

    @torch.no_grad()
    def probe(self, fuser: BlockFuser) -> list[ShapeProbe]:
        """Run a token through the model with probes in place of its attentions. Collective."""
        model: Any = self.model
        attentions, before = attentions_of(model), model.config._attn_implementation
        probes = [ShapeProbe(type(module).__name__) for module in attentions]
        attend_to_pages(model, probes)
        own = [module.forward for module in attentions]
        self._tokens = fuser.tokens
        if self._fuses_rotation:
            for module, probe in zip(attentions, probes, strict=True):
                defer_rotation(module, probe.rotate)
        zero = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        try:
            with fuser.watch():
                model(input_ids=zero, position_ids=zero, use_cache=False)
        except ValueError:  # of attention that no cache has a place for
            model.set_attn_implementation(before)
            raise
        finally:
            for module, forward in zip(attentions, own, strict=True):
                module.forward = forward
        for probe in probes:
            probe.is_over = True
        self._rotates = [probe.can_rotate for probe in probes]
        return probes

    def count_table_bytes(self, heads: int) -> int:
        """The bytes of what `allocate` allocates for the slots."""
        return (self.slots + 1) * 4 * (2 + self._width + heads)

    def allocate(self, shapes: Sequence[CacheShape], like: Tensor, pages: int) -> None:
        """Allocate the cache, and have the model attend to it."""
        heads, slots = max(shape.heads for shape in shapes), self.slots + 1  # the last one is of rows that fill a batch
        self._feed = torch.zeros(slots, dtype=torch.int64, device=self.device)
        self._table = torch.full((slots, self._width), SCRATCH_PAGE, dtype=torch.int32, device=self.device)
        self._step.arrivals = torch.zeros(self.slots * heads, dtype=torch.int32, device=self.device)
        given = pages, self.page, like, self._step
        self.layers = [LayerCache(shape, *given, is_invariant=self._is_invariant) for shape in shapes]
        attend_to_pages(self.model, self.layers)
        attentions = attentions_of(self.model)
        for module, layer, rotates in zip(attentions, self.layers, self._rotates, strict=True):
            if rotates:
                defer_rotation(module, layer.rotate_later)
        self._attention: Any = attentions[0]

    def join(self, places: Sequence[Place]) -> None:
        """Write the pages of requests that join."""
        for place in places:
            pages = self._upload(place.pages, torch.int32)
            self._table[place.slot, : len(pages)].copy_(pages, non_blocking=True)

    @torch.no_grad()
    def run(self, step: HostStep, *, may_replay: bool = True) -> Drawn:
        """Launch a step; may_replay: by a CUDA graph. Collective over x, and over expert."""
        if self._attention.attend_to_pages is not self.layers[0]:
            raise ValueError(  # its graphs may read weights that the other one has joined anew
                "another Engine has been made of this engine's model, and has taken it over: use that one, or give "
                "each a model of its own"
            )
        numbers = self._upload(step.numbers, torch.int64)
        rows, tokens = len(step.counts), len(step.ids)
        is_whole = rows == 1 and 1 < tokens == self._chunk
        # Of other lengths, cuDNN would build a graph for each.
        size = tokens, rows, rows == 1 and step.positions[0] == 0 and (is_whole or self.device.type == "cpu")
        if (step.is_decoding or is_whole) and self.is_captured and may_replay:
            if size not in self._graphs:
                self._graphs[size] = CapturedStep(partial(self._compute_static, size))
            (drawn,) = self._graphs[size](numbers)
            logits = self._static_logits[size]
        else:
            drawn, logits = self._compute(numbers, *size, is_decoding=step.is_decoding)
        if step.random:
            self._draw_random(step, logits, drawn)
        values = drawn[None]
        if step.wants_log_probabilities:
            values = torch.stack((drawn.double(), log_probabilities(logits, drawn, self.part).double()))
        if self.device.type == "cpu":
            return Drawn(values, None)
        there = torch.empty(values.shape, dtype=values.dtype, pin_memory=True, device="cpu")
        there.copy_(values, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        return Drawn(there, arrived)

    def close(self) -> None:
        """Free the graphs and the cache."""
        for graph in self._graphs.values():
            graph.close()
        self._graphs.clear()
        self._static_logits.clear()
        for layer in self.layers:  # which the model holds
            layer.keys = layer.values = layer.keys.new_empty(0)

    def _compute_static(self, size: tuple[int, int, bool], numbers: Tensor) -> tuple[Tensor]:
        """Compute the best tokens, as a graph captures it. Its logits stay where they are, for draws after a replay."""
        found = self._compute(numbers, *size, is_decoding=size[0] == size[1])  # else a whole chunk
        drawn, self._static_logits[size] = found
        return (drawn,)

    def _compute(
        self, numbers: Tensor, tokens: int, rows: int, is_start: bool, *, is_decoding: bool
    ) -> tuple[Tensor, Tensor]:
        """The best tokens [rows], which the next step is fed, and the logits [rows, vocabulary here]."""
        step, is_single = _split(numbers, tokens, rows), rows == tokens
        # Where all were drawn on the device, ids that the host sends are not even read.
        ids = self._feed[step.feeds]
        if not is_decoding:
            ids = torch.where(step.ids == FROM_FEED, ids, step.ids)
        starts = None if is_single else step.starts
        self._step.tokens = StepTokens(step.places, starts, step.lengths, self._table[step.slots], is_start)
        is_whole = is_single or self._tokens.can_leave_out  # the head reads all that there is
        self._tokens.read = step.last if is_whole and not is_single else None
        try:
            given: dict[str, Any] = {"logits_to_keep": 0 if is_whole else step.last} if self._keeps else {}
            # A caller's autocast would compute in other dtypes than the cache has.
            with (
                InvariantOperators() if self._is_invariant else nullcontext(),
                torch.autocast(self.device.type, enabled=False),
            ):
                output = self.model(input_ids=ids[None], position_ids=step.positions[None], use_cache=False, **given)
        finally:
            self._step.tokens = self._tokens.read = None
        logits = output.logits[0] if self._keeps or is_whole else output.logits[0, step.last]
        drawn = best_tokens(logits, self.part)
        self._feed.index_copy_(0, step.slots, drawn.clamp(min=0))  # -1 is of logits that are no numbers
        return drawn, logits

    def _draw_random(self, step: HostStep, logits: Tensor, drawn: Tensor) -> None:
        """Draw the tokens of rows that are random, in place of the best ones."""
        at, temperature, top_p, top_k, seed, place = zip(*step.random, strict=True)
        reals = self._upload([*temperature, *top_p], torch.float64).view(2, -1)
        slots = [step.slots[row] for row in at]
        rows, slot, seeds, places, counts = self._upload([*at, *slots, *seed, *place, *top_k], torch.int64).view(5, -1)
        chosen = logits[rows]
        how = RandomRows(reals[0], seeds, places, counts if any(top_k) else None, reals[1] if min(top_p) < 1 else None)
        found = draw_tokens(chosen, how, self.part)
        drawn.index_copy_(0, rows, found)
        self._feed.index_copy_(0, slot, found.clamp(min=0))

    def _upload(self, numbers: Sequence[float], dtype: torch.dtype) -> Tensor:
        """Numbers on the device. The host does not wait; torch keeps its memory until the copy is done."""
        here = torch.tensor(numbers, dtype=dtype, pin_memory=self.device.type == "cuda", device="cpu")
        return here.to(self.device, non_blocking=True)
