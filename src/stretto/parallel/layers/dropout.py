# SPDX-License-Identifier: Apache-2.0
"""Dropout whose mask depends on an element's global place: the same on any grid."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from stretto.axes import BATCH, LOSS
from stretto.parallel.comm.autograd import in_backward
from stretto.parallel.comm.collectives import broadcast
from stretto.parallel.grid import Grid
from stretto.parallel.layers.sharded_module import ShardedModule, check_features, note_features
from stretto.parallel.layers.token_shards import TokenShards

_MAX_AGREED = 64  # passes whose states differed and that may be recomputed as a whole
_MASK64 = (1 << 64) - 1


def _signed(value: int) -> int:
    """A 64-bit pattern as the int64 that torch takes."""
    value &= _MASK64
    return value - (1 << 64) if value >> 63 else value


def _mix(bits: Tensor) -> Tensor:
    """SplitMix64's finalizer on int64, which wraps; right shifts are made logical by a mask."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        bits = (bits ^ ((bits >> shift) & ((1 << (64 - shift)) - 1))) * _signed(factor)
    return bits ^ ((bits >> 31) & ((1 << 33) - 1))


class ParallelDropout(ShardedModule):
    """Dropout of activations [batch / (data x Z), ..., features / size of `axis`].

    The mask is a hash of a seed and the element's place in the whole activation. The seed is drawn from torch's default
    CPU generator, which ranks must have seeded alike (`AgreedRandomState`); recomputation under activation
    checkpointing restores it. The
    input's batch is all that the rank has of the global batch, unless `micro_batch_of` says otherwise. With sequence
    sharding the input has this rank's tokens, [1, tokens / X, ...] (`tokens`; None inside attention and MLP,
    where sequences are whole).
    """

    def __init__(
        self, p: float, grid: Grid, axis: str, name: str = "this dropout", tokens: TokenShards | None = None
    ) -> None:
        super().__init__()
        self.tokens = tokens
        self.p = p
        self.grid = grid
        self.axis = axis
        self.name = name
        self._is_split = grid.size("x") * grid.size("y") > 1
        self.rows: int | None = None  # how many of the global batch this rank has; None: those of the input
        self.first = 0  # which of them is the input's first
        # Finds the places of a part's tokens in the whole sequence, by their number; None: sequences are whole.
        self.place_tokens: Callable[[int], Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self._is_split:
            check_features(x, self.axis, self.name)
        if not self.training or self.p == 0.0:
            return x
        # Also for an empty shard: keeps generators in step. A tensor, since a number would break a compiler's graph.
        seed = torch.randint(0, 2**62, (), device="cpu")
        if x.numel() == 0:
            return x
        if x.dim() == 1:
            return self._drop(x.unsqueeze(0), seed).squeeze(0)
        return note_features(self._drop(x, seed), self.axis)

    def _drop(self, x: Tensor, seed: Tensor) -> Tensor:
        columns = x.shape[-1]
        column = torch.arange(columns, device=x.device) + self.grid.coordinate(self.axis) * columns
        if self.tokens is None:
            rows, middle = x.shape[0], x[0].numel() // columns
            here = slice(0, rows * middle)
        else:
            (rows, middle), here = self.tokens.shape, self.tokens.here
        position = torch.arange(here.start, here.stop, device=x.device)
        if self.place_tokens is not None and (self.tokens is not None or x.dim() > 2):
            row, token = position // middle, position % middle
            places = self.place_tokens(middle).to(x.device)
            middle *= self.grid.size("context")
            position = row * middle + places[token]
            group = BATCH
        else:  # all ranks that see other tokens draw other parts of the mask
            group = LOSS
        position += (self.grid.coordinate(group) * (self.rows or rows) + self.first) * middle
        element = position[..., None] * (columns * self.grid.size(self.axis)) + column
        bits = _mix(_mix(element * _signed(0x9E3779B97F4A7C15)) + seed)
        is_kept = (bits & ((1 << 53) - 1)).to(torch.float64) >= self.p * 2.0**53
        return x * is_kept.view(x.shape).to(x.dtype) / (1.0 - self.p)

    def extra_repr(self) -> str:
        return f"p={self.p}"


class AgreedRandomState:
    """Gives ranks of x and y the random state of the first of them at each forward pass of a model that trains.

    They compute the same for their rows: masks that differed would give them other gradients of replicated parameters,
    which nothing brings together. A rank may have drawn more numbers before, for augmentation or an assertion.
    modules: of the model. always: also where none of them is a dropout (a model's own code may draw). A forward
    pre-hook of the model. Costs a broadcast of 5 kB a pass, between hosts.
    """

    def __init__(self, modules: Iterable[nn.Module], grid: Grid, *, always: bool) -> None:
        self._groups = [grid.group(axis) for axis in ("y", "x") if grid.size(axis) > 1]
        self._device = grid.device
        found = (module for module in modules if isinstance(module, (ParallelDropout, _DropoutNd)))
        self._dropouts = [ref(module) for module in found if module.p > 0]
        self._always = always
        self._agreed: dict[bytes, tuple[Tensor, ...]] = {}

    @property
    def is_needed(self) -> bool:
        """True if ranks could draw different numbers for the same."""
        return bool(self._groups) and (self._always or bool(self._dropouts))

    def __call__(self, model: nn.Module, args: object) -> None:
        """Take the first rank's state, or, where the whole pass is recomputed, the one that it had."""
        on_gpu = self._device.type == "cuda"
        draws = model.training or any(
            (module := dropout()) is not None and module.training for dropout in self._dropouts
        )
        if not draws or (on_gpu and torch.cuda.is_current_stream_capturing()):
            return
        if not in_backward():
            own = self._own()
            if agreed := self.agree():
                self._agreed[_key_of(own)] = agreed
                if len(self._agreed) > _MAX_AGREED:
                    del self._agreed[next(iter(self._agreed))]
        elif agreed := self._agreed.get(_key_of(self._own()), ()):
            self._set(agreed)

    def agree(self) -> tuple[Tensor, ...]:
        """Take the first rank's state; returns it, or () where this rank had it. Collective."""
        own = self._own()
        agreed = tuple(self._take_first(state.clone()) for state in own)
        if all(map(torch.equal, agreed, own)):
            return ()
        self._set(agreed)
        return agreed

    def _own(self) -> tuple[Tensor, ...]:
        of_gpu = [torch.cuda.get_rng_state(self._device)] if self._device.type == "cuda" else []
        return torch.get_rng_state(), *of_gpu

    def _set(self, states: tuple[Tensor, ...]) -> None:
        torch.set_rng_state(states[0])
        for of_gpu in states[1:]:
            torch.cuda.set_rng_state(of_gpu, self._device)

    def _take_first(self, state: Tensor) -> Tensor:
        for group in self._groups:
            has_host = torch.device("cpu") in group._device_types
            state = broadcast(state if has_host else state.to(self._device), group).cpu()
        return state


def _key_of(states: tuple[Tensor, ...]) -> bytes:
    return b"".join(state.numpy().tobytes() for state in states)


@contextmanager
def micro_batch_of(model: nn.Module, rows: int, first: int) -> Iterator[None]:
    """Call `model`, and its backward pass, on a part of this rank's `rows` of the global batch, from row `first` on.

    Dropout then drops what it would have dropped of the whole batch at once, if torch's generator is seeded alike for
    each part: which rows share a micro-batch depends on the grid, and the masks do not.
    """
    dropouts = [module for module in model.modules() if isinstance(module, ParallelDropout)]
    for dropout in dropouts:
        dropout.rows, dropout.first = rows, first
    try:
        yield
    finally:
        for dropout in dropouts:
            dropout.rows, dropout.first = None, 0
