# SPDX-License-Identifier: Apache-2.0
"""Routers on a grid: they stay as they are, read whole hidden features, and count the tokens of all ranks."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stretto.axes import LOSS
from stretto.parallel.comm.autograd import sum_gradient
from stretto.parallel.comm.collectives import NO_GROUP, Pending, all_reduce, gather_rows, start_all_reduce
from stretto.parallel.comm.kept_outputs import keep_output, run_once
from stretto.parallel.grid import Grid
from stretto.parallel.layers.plain_parts import tensors_in
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
) -> None:
    """Have a router read whole hidden features, which are gathered over y, and plain tensors as its parameters.

    Its first argument is the hidden features, in the compute dtype, as are its parameters; but a router of
    `stretto.models`, which computes in fp32, reads its parameters in their own. If it returns one number for each token
    ([..., 1], by which features are scaled), the gradient of that is summed over y. Hooks that a router may have are
    set: `sum_over_ranks`, `start_sum_over_ranks` and `sum_over_earlier_ranks`, over ranks that have other tokens; and
    `record` happens once where a block is computed again.
    """
    module = model.get_submodule(part.whose)
    forward, over_y, name = module.forward, grid.group("y"), part.whose
    checks = grid.size("x") * grid.size("y") > 1
    counts_tokens = hasattr(module, "sum_over_ranks")
    of_parameters = Precision() if counts_tokens else precision

    @functools.wraps(forward)
    def on_whole_features(*args: Any, **kwargs: Any) -> Any:
        if not args or not isinstance(args[0], Tensor) or not args[0].is_floating_point():
            raise ValueError(f"{name} has the role 'router', but its first argument is no tensor of hidden features")
        if checks:
            check_features(args[0], "y", name)
        hidden = precision.cast(args[0])
        if over_y.size() > 1:
            hidden = gather_features(hidden, hidden.shape[-1] * over_y.size(), over_y)
        with tensors_in(places, of_parameters):
            found = forward(hidden, *args[1:], **kwargs)
        is_factor = isinstance(found, Tensor) and found.shape[-1] == 1
        return sum_gradient(found, over_y) if is_factor and over_y.size() > 1 else found

    on_grid = torch.compiler.disable(on_whole_features, recursive=False)
    # On one rank nothing is sent, and a compiler may trace the whole forward. Not where a router's statistics are kept
    # in Python.
    may_trace = grid.size("world") == 1 and not counts_tokens

    @functools.wraps(forward)
    def route(*args: Any, **kwargs: Any) -> Any:
        return on_whole_features(*args, **kwargs) if may_trace else on_grid(*args, **kwargs)

    module.forward = route
    if counts_tokens:
        groups = [grid.group(LOSS), *([] if tokens is None else [tokens.group])]
        _count_over_ranks(module, [group for group in groups if group.size() > 1])


def _count_over_ranks(router: Any, groups: Sequence[dist.ProcessGroup]) -> None:
    """Set a router's hooks. groups: of ranks that have other tokens, the first those whose tokens lie further apart."""
    router.sum_over_ranks = functools.partial(_keep, functools.partial(_sum, groups))
    router.sum_over_earlier_ranks = functools.partial(_keep, functools.partial(_sum_of_earlier, groups))
    router.record = functools.partial(run_once, router.record)
    if hasattr(router, "start_sum_over_ranks"):
        # Once: a block that is computed again is in the backward pass, which would wait for another sum at once.
        router.start_sum_over_ranks = functools.partial(run_once, _StartedSum, groups)


def _keep(function: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    return keep_output("router statistics", functools.partial(function, tensor.detach()))


def _sum(groups: Sequence[dist.ProcessGroup], tensor: Tensor) -> Tensor:
    total = tensor.clone()
    for group in groups:
        all_reduce(total, group)
    return total


class _StartedSum:
    """A sum over groups that has begun: over the first while the model goes on, over others when it is asked for."""

    def __init__(self, groups: Sequence[dist.ProcessGroup], tensor: Tensor) -> None:
        first, self._others = (groups[0], groups[1:]) if groups else (NO_GROUP, groups)
        self._pending: Pending | None = start_all_reduce(tensor.detach().clone(), first)
        self._total = self._pending.result

    def __call__(self) -> Tensor:
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
            for group in self._others:
                all_reduce(self._total, group)
        return self._total


def _sum_of_earlier(groups: Sequence[dist.ProcessGroup], tensor: Tensor) -> Tensor:
    """The sum over ranks whose tokens come before this rank's in the micro-batch."""
    earlier = torch.zeros_like(tensor)
    for group in reversed(groups):  # the ranks of x, then those of other rows, each of which has all tokens of its x
        of_ranks = gather_rows(tensor.unsqueeze(0), group.size(), group)
        earlier += of_ranks[: group.rank()].sum(0)
        tensor = of_ranks.sum(0)
    return earlier
