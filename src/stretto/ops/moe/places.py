# SPDX-License-Identifier: Apache-2.0
"""Tokens at their experts' ranks without a copy for each expert, for experts that gather rows by index.

A layer's products gather the rows of the tokens that were sent, and sums of each token's rows return. The two exchanges
are each other's transposes: backward, the gradient of the sums is sent as tokens are, and that of the tokens returns as
sums do.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import zip_longest

import torch
import torch.distributed as dist
import triton
from torch import Tensor

from stretto.memory.copy_engine import SideStream
from stretto.memory.gpus import count_processors
from stretto.ops.config import LIBRARY, KernelConfig
from stretto.ops.moe.call_route import RouteCall, can_send, check_call
from stretto.ops.moe.fixed_rows import FixedRoute
from stretto.ops.moe.grouped.config import DTYPES
from stretto.ops.moe.grouped.matmul import grouped_matmul
from stretto.ops.moe.grouped.tile_order import Arrivals
from stretto.ops.moe.kernel_route import KernelRoute
from stretto.ops.moe.permutation import spread_tokens, sum_copies
from stretto.ops.moe.routes import CollectiveWrapper, PlaceIndex, Route, call
from stretto.ops.moe.sorting import sort_copies
from stretto.ops.moe.tensor_parallel import choose_implementation, find_tiles, gather_multiply, multiply_scatter
from stretto.ops.moe.tensor_parallel_kernels import Routed, multiply_leaving, push_tokens
from stretto.ops.operator import find_group, find_name, is_traced
from stretto.tiles import INTERPRETED

_PART_OF_GPU = 6  # of which one is left to what returns under a product
_SUMMED_ROWS = 6  # of one that is sent: with more, summing takes as long as sending
_LEAST_COLUMNS = 256  # that are multiplied at once: a tile's
_LEAST_NUMBERS = 1 << 24  # that a rank receives at once, for which products are divided
_LEAST_OF_PART = 1 << 38  # multiplications with a row a place: 0.3 to 3 ms, since a place has 1 to k rows
_MOST_PARTS = 4


@dataclass(frozen=True)
class Places:
    """The places of tokens at their experts' ranks, for a layer whose own backward pass sends gradients.

    index: the rows of this rank's experts; row i is the token of place `index.places[i]`, and a place's rows are
    `index.positions` where `index.is_here`. Places are in the order of their source ranks. route: None where one rank
    has all experts. Nothing here has gradients.
    """

    index: PlaceIndex
    route: Route | None
    wrap_collective: CollectiveWrapper

    def send_weights(self, weights: Tensor) -> Tensor:
        """The weights of places' choices; with the fixed number of rows exceeded, NaN."""
        route = self.route
        if route is None:
            return weights
        found = route.weights if route.weights is not None else route.send(lambda: weights, self.wrap_collective)
        if route.needed is None:
            return found
        return found + torch.where(route.needed > len(self.index.slots), torch.nan, 0.0).to(found.dtype)

    def start(self, tokens: Tensor, columns: int = 0, *, keeps: bool = True) -> tuple[Tensor, Arrivals | None]:
        """Send tokens to their places: (rows of places, what is on its way, None if they are there).

        Of rows on their way products take `Arrivals.rows`, and what this has returned is filled when they have arrived
        (keeps: if anybody will read it): `Arrivals.run`, `Arrivals.wait`. It is so for the kernels' exchange of what
        grouped kernels multiply. columns: of all ranks' weights together by which these rows are multiplied, transposed
        ones if nothing is kept; 0 if kernels that multiply and gather are not to be chosen.
        """
        route, found = self.route, list[Arrivals]()
        if route is None:
            return tokens, None
        if not isinstance(route, KernelRoute) or not self._overlaps(tokens):
            return route.mark_excess(route.send(lambda: tokens, self.wrap_collective)), None

        def push() -> Tensor:
            found.append(route.start(tokens))
            if not keeps:
                return found[0].rows
            return tokens.new_empty(len(self.index.positions), tokens.shape[1])

        return self._wrap_push("all_to_all", push, found, keeps)

    def _wrap_push(
        self, kind: str, push: Callable[[], Tensor], found: list[Arrivals], keeps: bool
    ) -> tuple[Tensor, Arrivals | None]:
        rows: Tensor = self.wrap_collective(kind, push)
        if not found:
            return rows, None
        if keeps:
            found[0].copy_to(rows)
        return rows, found[0]

    def spread(self, tokens: Tensor, arrivals: Arrivals | None = None) -> Tensor:
        """A row for each choice of places' tokens here; of tokens on their way, filled when they have arrived."""
        if arrivals is None:
            return self._spread(tokens)
        rows = tokens.new_empty(len(self.index.slots), tokens.shape[1])
        arrivals.copies.append(lambda: self._spread(tokens, rows))
        return rows

    def _spread(self, tokens: Tensor, rows: Tensor | None = None) -> Tensor:
        index, route = self.index, self.route
        is_here, needed = (None, None) if route is None else (index.is_here, route.needed)
        tokens = tokens[: len(index.positions)]  # a buffer has as many rows as the rank with the most places
        return spread_tokens(tokens, index.positions, None, is_here, len(index.slots), needed, rows)

    def begin(self, tokens: Tensor, columns: int, *, is_ahead: bool) -> tuple[Callable[[], Tensor], Arrivals | None]:
        """Begin as `start`; returns a function that returns the rows, before which nothing may overwrite the tokens.

        is_ahead: the caller does something else before, so that it pays to use a side stream for any exchange.
        """
        is_ahead = is_ahead and self.route is not None and not self._overlaps(tokens)
        found: list[Arrivals | None] = []

        def start() -> Tensor:
            rows, arrivals = self.start(tokens, columns)
            found.append(arrivals)
            return rows

        return run_beside(start, tokens, is_ahead=is_ahead), found[0]

    def _overlaps(self, tokens: Tensor) -> bool:
        """True if the kernels' exchange sends rows while grouped kernels multiply them."""
        return isinstance(self.route, KernelRoute) and tokens.dtype in DTYPES

    def give_back(self, rows: Tensor) -> Tensor:
        """Sum what the ranks have of each token at its rank: in fp32, in the order of ranks, rounded once."""
        return rows if self.route is None else self.route.give_back(lambda: rows, self.wrap_collective)

    @property
    def room(self) -> int:
        """Multiprocessors that what returns under a product is pushed by, and that the product leaves free."""
        positions = self.index.positions
        if not isinstance(self.route, KernelRoute) or not positions.is_cuda:
            return 0
        return count_processors(positions.device.index) // _PART_OF_GPU

    @property
    def room_of_sums(self) -> int:
        """The `room` of `start_product_back`; 0 if it sums and sends before anything else.

        All multiprocessors sum some eleven rows in the time in which NVLink takes one (H200: 4 TB/s, 350 GB/s). Where
        they need about as long as the links do, nothing is gained by leaving a product a sixth of them fewer.
        """
        index, route = self.index, self.route
        if not isinstance(route, KernelRoute):
            return 0
        world = route.group.size()
        leaving = len(index.positions) * (world - 1) // world
        return self.room if leaving * _SUMMED_ROWS > len(index.slots) else 0

    def start_back(self, rows: Tensor, *, is_ahead: bool = False) -> Callable[[], Tensor]:
        """Begin `give_back`; returns the function that ends it. Nothing else is called on the group before.

        is_ahead: the caller does more than a product before, so that it pays to use a side stream for any exchange.
        """
        room = self.room
        if room and isinstance(self.route, KernelRoute):
            return self.route.start_back(rows, self.wrap_collective, room)
        return run_beside(lambda: self.give_back(rows), rows, is_ahead=is_ahead and self.route is not None)

    def start_product_back(self, rows: Tensor, weight: Tensor, *, is_ahead: bool = False) -> Callable[[], Tensor]:
        """Multiply experts' rows, and begin to return each place's sum, as `start_back` does."""
        index, is_here = self.index, None if self.route is None else self.index.is_here
        product = grouped_matmul(rows, weight, index.offsets)
        if isinstance(self.route, KernelRoute) and not is_traced(product):
            return self.route.start_sum_back(product, self.wrap_collective, self.room_of_sums or None)
        return self.start_back(sum_copies(product, index.positions, None, is_here), is_ahead=is_ahead)

    def multiply_and_give_back(
        self,
        activate: Callable[[], Tensor],
        weight: Tensor,
        weights: Tensor,
        wrap_product: CollectiveWrapper | None = None,
    ) -> Tensor:
        """Sum experts' products with the rows that `activate` makes, times places' weights, at their tokens' ranks.

        A token's sum needs rows of several experts, so of a large product columns are divided: sums of some are formed
        and return while the next ones are multiplied, as in COMET (Zhang et al., arXiv 2502.19811). A product that is
        short by its rows' size is not: on 2 H200, Qwen3-30B's took 0.6 ms whole and 1.0 in four parts, as long as what
        returned under them. wrap_product: None, or called with "product" around what is multiplied and summed here, all
        at once.
        """
        index, room, route = self.index, self.room, self.route
        is_here = None if route is None else index.is_here

        def multiply() -> Tensor:
            return grouped_matmul(activate(), weight, index.offsets)

        if wrap_product is not None or route is None:
            wrap_product = call if wrap_product is None else wrap_product
            return self.give_back(
                wrap_product("product", lambda: sum_copies(multiply(), index.positions, weights, is_here))
            )
        parts = self._divide(*weight.shape[1:])
        if len(parts) == 1:
            return route.sum_back(multiply, weights, self.wrap_collective)
        assert isinstance(route, KernelRoute)
        side, activated = _find_side_stream(index.positions.device), activate()
        # All are kept until the side stream has read them.
        rows = [grouped_matmul(activated, weight[:, parts[0]], index.offsets)]
        out = rows[0].new_empty(route.pairs.numbers.shape[0], weight.shape[1])
        for part, following in zip_longest(parts, parts[1:]):
            side.open()
            with side:
                out[:, part] = route.sum_back(lambda: rows[-1], weights, self.wrap_collective)
            if following is not None:
                rows.append(grouped_matmul(activated, weight[:, following], index.offsets, room=room))
        side.join()
        return out

    def _divide(self, columns: int, inner: int) -> list[slice]:
        """The columns that are multiplied at once, the same on all ranks, of a product of rows of `inner` numbers."""
        if not (isinstance(self.route, KernelRoute) and self.room):  # the library returns whole rows
            return [slice(columns)]
        is_worth_it = self.route.places * columns >= _LEAST_NUMBERS
        most = min(columns // _LEAST_COLUMNS, _MOST_PARTS, self.route.places * columns * inner // _LEAST_OF_PART)
        count = most if is_worth_it else 1
        width = triton.cdiv(triton.cdiv(columns, max(count, 1)), _LEAST_COLUMNS) * _LEAST_COLUMNS
        return [slice(begin, min(begin + width, columns)) for begin in range(0, columns, width)]


@dataclass(frozen=True)
class ColumnPlaces(Places):
    """Places of all tokens of a group, whose ranks have columns of all experts: tensor-parallel experts.

    Where `all_gather_moe` or `moe_reduce_scatter` would run as a kernel for a product here, it does: tokens arrive
    while others are multiplied, and sums leave. Elsewhere a product follows the library's gather, or is followed by its
    reduce-scatter.
    """

    group: str

    def start(self, tokens: Tensor, columns: int = 0, *, keeps: bool = True) -> tuple[Tensor, Arrivals | None]:
        """Begin as `Places` does, by copy engines where a kernel multiplies tokens as they arrive."""
        columns //= find_group(self.group).size()
        shape = torch.Size((len(self.index.offsets) - 1, columns, tokens.shape[1]))

        def run(how: KernelConfig) -> object:
            stored = shape if keeps else (shape[0], shape[2], shape[1])
            weight = torch.empty(stored, dtype=tokens.dtype, device=tokens.device).normal_(std=shape[2] ** -0.5)
            weight = weight if keeps else weight.mT
            return gather_multiply(tokens, weight, *self._routed, self.group, how.encode(), keeps)

        how = self._choose("all_gather_moe", tokens, shape, run, is_transposed=not keeps)
        if how == LIBRARY.encode():
            return super().start(tokens, columns)
        found = list[Arrivals]()

        def push() -> Tensor:
            kept = tokens.new_empty(len(self.index.positions), tokens.shape[1]) if keeps else None
            found.append(push_tokens(tokens.contiguous(), self.group, kept))
            return found[0].rows if kept is None else kept

        return self._wrap_push("all_gather", push, found, keeps)

    def start_product_back(self, rows: Tensor, weight: Tensor, *, is_ahead: bool = False) -> Callable[[], Tensor]:
        """Begin as `Places` does; where a kernel has multiplied, all is done."""
        found = self._multiply_leaving(lambda: rows, weight, None)
        return super().start_product_back(rows, weight, is_ahead=is_ahead) if found is None else lambda: found

    def multiply_and_give_back(
        self,
        activate: Callable[[], Tensor],
        weight: Tensor,
        weights: Tensor,
        wrap_product: CollectiveWrapper | None = None,
    ) -> Tensor:
        """Multiply as `Places` does, by one kernel where it is chosen."""
        found = self._multiply_leaving(activate, weight, weights)
        return super().multiply_and_give_back(activate, weight, weights, wrap_product) if found is None else found

    def _multiply_leaving(self, make: Callable[[], Tensor], weight: Tensor, weights: Tensor | None) -> Tensor | None:
        """The kernel's sums of this rank's tokens, None for the library."""

        def run(how: KernelConfig) -> Tensor:
            own = None if weights is None else weights.chunk(find_group(self.group).size())[0]
            return multiply_scatter(make(), weight, own, *self._routed, self.group, how.encode())[0]

        def multiply() -> Tensor:
            rows = make()
            config = find_tiles(how, (rows, weight), len(rows))
            return multiply_leaving(config, rows, weight, weights, self._routed, self.group)

        is_transposed = not weight.is_contiguous()
        how = self._choose("moe_reduce_scatter", weight, weight.shape, run, is_transposed=is_transposed)
        if how == LIBRARY.encode():
            return None
        return self.wrap_collective("moe_reduce_scatter", multiply)

    @cached_property
    def _routed(self) -> Routed:
        index = self.index
        return Routed(index.places, index.positions, index.offsets)

    def _choose(
        self,
        operator: str,
        like: Tensor,
        weight: torch.Size,
        run: Callable[[KernelConfig], object],
        *,
        is_transposed: bool,
    ) -> str:
        """Choose what "auto" is; on CPUs that interpret no kernels, the library, of which nobody need be told."""
        if not (like.is_cuda or INTERPRETED) or like.dtype not in DTYPES:
            return LIBRARY.encode()
        options = "in a layer"
        return choose_implementation(
            operator, like, weight, self.index.positions, self.group, run, options, is_transposed=is_transposed
        )


@cache
def _find_side_stream(device: torch.device) -> SideStream:
    return SideStream(device)


def run_beside(make: Callable[[], Tensor], reads: Tensor, *, is_ahead: bool) -> Callable[[], Tensor]:
    """Begin to make a tensor, and return what returns it: on GPUs, if is_ahead, on a side stream that is joined then.

    reads: what it reads, which is not freed before.
    """
    if not is_ahead or not reads.is_cuda:
        made = make()
        return lambda: made
    side = _find_side_stream(reads.device)
    side.open()
    with side:
        made = make()
    return partial(_join, side, made, reads)


def _join(side: SideStream, made: Tensor, _reads: Tensor) -> Tensor:
    side.join()
    return made


def find_places(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    num_experts: int,
    group: dist.ProcessGroup | None = None,
    *,
    max_rows: int | None = None,
    gather_group: dist.ProcessGroup | None = None,
    wrap_collective: CollectiveWrapper = call,
    implementation: str = "auto",
) -> Places:
    """The places of tokens, with the arguments and errors of `dispatch`; topk_weights are sent, tokens are not."""
    route_call = check_call(
        "experts", x, topk_ids, topk_weights, num_experts, group, gather_group, max_rows, wrap_collective,
        implementation,
    )  # fmt: skip
    if route_call.is_alone and max_rows is None:
        return Places(PlaceIndex(*sort_copies(topk_ids, num_experts)), None, wrap_collective)
    if route_call.is_alone:
        raise ValueError("experts: one rank with all experts has as many rows as choices: give max_rows=None")
    return _find(x, topk_ids, topk_weights, route_call, implementation)


@torch.compiler.disable  # a graph break, as in `dispatch`
def _find(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, route_call: RouteCall, implementation: str) -> Places:
    given, wrap_collective = topk_weights if can_send(topk_weights) else None, route_call.wrap_collective
    # Weights that the route does not have are sent before the tokens.
    route = route_call.find("experts", x, topk_ids, given, "rank", starts=given is not None)
    group, gather_group = route_call.group, route_call.gather_group
    is_whole = group is None and isinstance(route, FixedRoute) and route.needed is None
    if implementation == "auto" and is_whole and gather_group is not None:
        return ColumnPlaces(route.index, route, wrap_collective, find_name(gather_group))
    return Places(route.index, route, wrap_collective)
