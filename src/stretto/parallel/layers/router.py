# SPDX-License-Identifier: Apache-2.0
"""Routers on a grid: they are not sharded, read whole hidden features, and count the tokens of all ranks."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stretto.axes import LOSS, STAGE
from stretto.parallel.comm.autograd import sum_gradient
from stretto.parallel.comm.collectives import Pending, gather_rows, start_all_reduce
from stretto.parallel.comm.gradient_reducer import GradientReducer
from stretto.parallel.comm.graph_functions import GraphCode
from stretto.parallel.comm.kept_outputs import keep_output, run_once
from stretto.parallel.grid import Grid
from stretto.parallel.layers.plain_parts import forward_scales, tensors_in
from stretto.parallel.layers.sharded_module import check_features, gather_features
from stretto.parallel.layers.token_shards import TokenShards
from stretto.parallel.precision import Precision
from stretto.parallel.roles.plan import PlainPart


def route_whole_features(
    model: nn.Module,
    part: PlainPart,
    places: Sequence[tuple[nn.Module, str]],
    precision: Precision,
    grid: Grid,
    tokens: TokenShards | None,
    gradients: GradientReducer,
    *,
    overlaps: bool,
) -> None:
    """Have a router read whole hidden features, which are gathered over y, and plain tensors as its parameters.

    Its first argument is the hidden features, in the compute dtype, as are its parameters; but a router of
    `stretto.models`, which computes in fp32, reads its parameters in their own. If it returns one number for each token
    ([..., 1], by which features are scaled), the gradient of that is summed over y. Hooks that a router may have are
    set: `sum_over_ranks`, `start_sum_over_ranks` and `sum_over_earlier_ranks`, over ranks that have other tokens;
    `averaged_ranks`, how many of them average gradients; and
    `record` happens once where a block is computed again. overlaps: whether a sum that was started goes on while the
    model does.
    """
    module = model.get_submodule(part.whose)
    forward, over_y, name = module.forward, grid.communicator("y"), part.whose
    checks = grid.size("x") * grid.size("y") > 1
    counts_tokens = hasattr(module, "sum_over_ranks")
    of_parameters = Precision() if counts_tokens else precision
    scales = forward_scales(places, gradients)

    ranks = over_y.size()
    gathered = GraphCode(lambda part: gather_features(part, part.shape[-1] * ranks, over_y))
    summed_back = GraphCode(lambda factor: sum_gradient(factor, over_y))

    @functools.wraps(forward)
    def on_whole_features(*args: Any, **kwargs: Any) -> Any:
        if not args or not isinstance(args[0], Tensor) or not args[0].is_floating_point():
            raise ValueError(f"{name} has the role 'router', but its first argument is no tensor of hidden features")
        if checks:
            check_features(args[0], "y", name)
        hidden = precision.cast(args[0])
        if ranks > 1:
            hidden = gathered.run((*hidden.shape[:-1], hidden.shape[-1] * ranks), hidden)
        with tensors_in(places, of_parameters, scales, gradients):
            found = forward(hidden, *args[1:], **kwargs)
        is_factor = isinstance(found, Tensor) and found.shape[-1] == 1
        return summed_back.run(found.shape, found) if is_factor and ranks > 1 else found

    if counts_tokens:
        count_over_ranks(module, gradients, tokens, overlaps=overlaps)
    on_grid = torch.compiler.disable(on_whole_features, recursive=False)
    # A compiler cannot trace statistics that are kept in Python.
    may_trace = not counts_tokens or getattr(module, "in_graphs", None) is not None

    @functools.wraps(forward)
    def route(*args: Any, **kwargs: Any) -> Any:
        return on_whole_features(*args, **kwargs) if may_trace else on_grid(*args, **kwargs)

    module.forward = route


def count_over_ranks(router: Any, gradients: GradientReducer, tokens: TokenShards | None, *, overlaps: bool) -> None:
    """Set the hooks of a router. Ranks of LOSS have other rows of the batch; with `tokens`, those of x other tokens.

    One sum over all of these ranks, not one over x after one over LOSS: the second would begin when the first has been
    waited for, and so in an order that may differ between the ranks of x.
    """
    grid = gradients.grid
    router.averaged_ranks = grid.size(LOSS) if gradients.averages else 1
    # Ranks of y have the same tokens: the first counts them.
    over, is_counted = (LOSS, True) if tokens is None else (STAGE, grid.coordinate("y") == 0)
    start_sum = functools.partial(_start_sum, grid.communicator(over), is_counted=is_counted, overlaps=overlaps)
    groups = [
        group for group in (grid.communicator(LOSS), tokens.group if tokens else None) if group and group.size() > 1
    ]
    router.sum_over_ranks = functools.partial(_keep, lambda tensor: start_sum(tensor)())
    router.sum_over_earlier_ranks = functools.partial(_keep, functools.partial(_sum_of_earlier, groups))
    if hasattr(router, "record"):
        router.record = functools.partial(run_once, router.record)
    # With a capacity the choices wait for the sum over ranks, and a compiler's graph breaks.
    if hasattr(router, "add_losses") and router.options.capacity_factor is None:
        router.in_graphs = GraphCode(functools.partial(_add_losses, router))
    # On one rank nothing is waited for, and torch.compile traces the router's losses.
    if hasattr(router, "start_sum_over_ranks") and grid.size(over) > 1:
        # Once: recomputation runs in the backward pass, which would wait for another sum immediately.
        router.start_sum_over_ranks = functools.partial(run_once, start_sum)


def _add_losses(router: Any, weights: Tensor, *others: Tensor) -> Tensor:
    """A router's `add_losses`, which keeps what it is given for its statistics."""
    counts, dropped, *sums = (each.clone() for each in others)
    return router.add_losses(weights, counts, dropped, *(sums or (None,)))


def _keep(function: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    return keep_output("router statistics", functools.partial(function, tensor.detach()))


def _start_sum(group: dist.ProcessGroup, tensor: Tensor, *, is_counted: bool, overlaps: bool) -> Callable[[], Tensor]:
    """Begin to sum a tensor over the ranks of a group that are counted, and return what waits for the sum."""
    tensor = tensor.detach()
    started = _StartedSum(start_all_reduce(tensor.clone() if is_counted else torch.zeros_like(tensor), group))
    if not overlaps:
        started()
    return started


class _StartedSum:
    """Waits for a sum, and returns it; may be called again."""

    def __init__(self, pending: Pending) -> None:
        self._pending = pending

    def __call__(self) -> Tensor:
        total = self._pending.wait()
        if total.device.type == "cpu":
            # gloo's Work holds the state of the thread that started it, with the hooks of saved tensors in it. Of a
            # block that is computed again these hold what the block has kept, this object too: a cycle in C++, by which
            # the whole model would never be freed.
            self._pending = Pending(total)
        return total


def _sum_of_earlier(groups: Sequence[dist.ProcessGroup], tensor: Tensor) -> Tensor:
    """The sum over ranks whose tokens come before this rank's in the micro-batch."""
    earlier = torch.zeros_like(tensor)
    for group in reversed(groups):  # the ranks of x, then those of other rows, each of which has all tokens of its x
        of_ranks = gather_rows(tensor.unsqueeze(0), group.size(), group)
        earlier += of_ranks[: group.rank()].sum(0)
        tensor = of_ranks.sum(0)
    return earlier
