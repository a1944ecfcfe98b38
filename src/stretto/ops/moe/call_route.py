# SPDX-License-Identifier: Apache-2.0
"""Selects and finds the route of a call that sends tokens to experts: by kernels, all-to-alls or gathers."""

from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.collectives.schedule import Schedule
from stretto.memory import group_timeout
from stretto.memory.copy_engine import has_nvlink
from stretto.memory.groups import make_local_group, next_group_number
from stretto.memory.plain_data import all_gather_data
from stretto.ops.choices import find_agreed
from stretto.ops.joint.registry import name_between_nodes, name_schedule
from stretto.ops.moe.fixed_rows import find_fixed_route, look_for_errors
from stretto.ops.moe.grouped.config import DTYPES
from stretto.ops.moe.kernel_route import find_kernel_route, find_messages
from stretto.ops.moe.pairs import ExpertParts
from stretto.ops.moe.permutation import require_tokens, require_weighted
from stretto.ops.moe.routes import CollectiveWrapper, Route, find_route
from stretto.ops.operator import find_known, find_name, require_agreement
from stretto.quantities import require_whole

_IMPLEMENTATIONS = ("auto", "kernel", "library")


class RouteCall(NamedTuple):
    """The checked arguments of a call. group, gather_group: None for one rank. runs_kernels: the same on all ranks.

    schedule: the name of the one that its exchanges have, if any.
    """

    num_experts: int
    group: dist.ProcessGroup | None
    gather_group: dist.ProcessGroup | None
    max_rows: int | None
    runs_kernels: bool
    wrap_collective: CollectiveWrapper
    schedule: str = ""

    @property
    def is_alone(self) -> bool:
        """True if all experts and tokens are here, and nothing is sent."""
        return self.group is None and self.gather_group is None

    def find(
        self,
        operator: str,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor | None,
        form: str,
        *,
        starts: bool = False,
    ) -> Route:
        """The route of topk_ids, with which topk_weights are sent if given.

        form: whatever else the ranks' calls have in common. starts: the group's next call is `Places.start` with x.
        ValueError if ranks make different calls, and for an earlier call's rows that exceeded max_rows.
        """
        groups = tuple(one for one in (self.group, self.gather_group) if one is not None)
        look_for_errors(groups[0], x.device)
        (t, k), max_rows, weights = topk_ids.shape, self.max_rows, "no" if topk_weights is None else topk_weights.dtype
        same = (
            f"moe.{operator} of {x.dtype} [., {x.shape[1]}], k={k}, {self.num_experts} experts, max_rows={max_rows}, "
            f"{form}, {self.schedule or ('kernel' if self.runs_kernels else 'library')}, {weights} weights"
        )
        # With max_rows the host does not learn how many tokens the others have.
        fixed = "" if max_rows is None else f", {t} tokens, {topk_ids.dtype}"
        for one in groups:
            require_agreement(same + fixed, False, find_name(one), x.device)
        arguments, wrap = (topk_ids, self.num_experts), self.wrap_collective
        with torch.no_grad():
            if self.runs_kernels and self.group is not None:
                joint, parts = self.group, None
                if self.gather_group is not None:
                    joint, parts = _join(self.group, self.gather_group, x.device)
                tokens = x if starts and x.dtype in DTYPES else None
                return find_kernel_route(
                    *arguments, max_rows, joint, wrap, topk_weights, parts, self.group, self.schedule, tokens
                )
            if max_rows is None:
                return find_route(*arguments, self.group, self.gather_group, wrap, topk_weights)
            shards, shard = (1, 0) if self.group is None else (self.group.size(), self.group.rank())
            return find_fixed_route(*arguments, max_rows, groups, shards, shard, wrap)


def check_call(
    operator: str,
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor | None,
    num_experts: int,
    group: dist.ProcessGroup | None,
    gather_group: dist.ProcessGroup | None,
    max_rows: int | None,
    wrap_collective: CollectiveWrapper,
    implementation: str,
    schedule: str | Schedule | None = None,
) -> RouteCall:
    """Check the arguments of a call that sends tokens, and select its implementation. ValueError for wrong ones."""
    if implementation not in _IMPLEMENTATIONS:
        raise ValueError(f'{operator}: implementation must be "auto", "kernel" or "library", not {implementation!r}')
    require_tokens(operator, x, topk_ids, num_experts)
    if topk_weights is not None:
        require_weighted(operator, x, topk_weights, topk_ids.shape)
    if max_rows is not None:
        require_whole(f"{operator}: max_rows", max_rows, rest=", or None for as many as there are")
    group, gather_group = find_several(group), find_several(gather_group)
    _require_divisible(operator, num_experts, 1 if group is None else group.size())
    is_alone = group is None and gather_group is None
    if is_alone and implementation == "kernel":
        raise ValueError(
            f"{operator}: no kernel can run: one rank has all {num_experts} experts, so that nothing is sent; "
            'implementation="library" will do'
        )
    name = ""
    if schedule is not None:
        if gather_group is not None:
            raise ValueError(f"{operator}: a schedule is one of group's ranks: leave out gather_group, or schedule")
        name = _name_schedule(schedule, implementation, 1 if group is None else group.size())
        implementation = "kernel"
    elif implementation == "kernel" and group is not None and gather_group is None and operator != "dispatch_few":
        name = _name_between_nodes(group, x.device)
    runs_kernels = not is_alone and _runs_kernels(operator, implementation, group, gather_group, x.device, name)
    return RouteCall(num_experts, group, gather_group, max_rows, runs_kernels, wrap_collective, name)


@torch.compiler.disable
def _name_schedule(schedule: str | Schedule, implementation: str, ranks: int) -> str:
    name = name_schedule("dispatch_grouped_matmul", schedule, implementation, ranks)
    find_messages(name, ranks)
    return name


@torch.compiler.disable
def _name_between_nodes(group: dist.ProcessGroup, device: torch.device) -> str:
    """The schedule by which tokens go between nodes; "" in one, where kernels store them."""
    nodes = find_agreed(find_name(group), device).nodes
    return name_between_nodes("dispatch_grouped_matmul", nodes) if nodes else ""


def _join(
    group: dist.ProcessGroup, gather_group: dist.ProcessGroup, device: torch.device
) -> tuple[dist.ProcessGroup, ExpertParts]:
    """The group of all ranks of gather_group's groups, and which of its ranks have parts of the same experts."""

    def make() -> tuple[dist.ProcessGroup, ExpertParts]:
        groups = max(all_gather_data(next_group_number(), group, int))
        offers = all_gather_data((dist.get_process_group_ranks(group), groups), gather_group, tuple[list[int], int])
        rows = [row for row, _ in offers]
        ranks = sorted(rank for row in rows for rank in row)
        limit = timedelta(seconds=group_timeout(group))
        # Kernels use no communicator: gloo's group serves to share memory.
        joint = make_local_group(ranks, "gloo", limit, max(groups for _, groups in offers))
        owners = [next(row.index(rank) for row in rows if rank in row) for rank in ranks]
        holders = [[ranks.index(row[owner]) for row in rows] for owner in range(group.size())]
        return joint, ExpertParts(torch.tensor(owners, device=device), torch.tensor(holders, device=device))

    return find_known(find_name(group), device, ("moe parts", find_name(gather_group)), make)


def find_several(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The group, or None where it has one rank. ValueError for a rank outside of it."""
    if group is None:
        return None
    find_name(group)
    return None if group.size() == 1 else group


def can_send(topk_weights: Tensor) -> bool:
    """True if weights are sent with the tokens, as fp32: none of fp64, nor those whose writes torch does not count."""
    return topk_weights.dtype != torch.float64 and not topk_weights.is_inference()


def _require_divisible(operator: str, num_experts: int, world: int) -> None:
    if num_experts % world:
        nearest = max(round(num_experts / world), 1) * world
        raise ValueError(
            f"{operator}: {num_experts} experts cannot be divided among {world} ranks: a multiple of the group's size "
            f"will do, such as {nearest}"
        )


@torch.compiler.disable  # ranks exchange facts at a group's first call
def _runs_kernels(
    operator: str,
    implementation: str,
    group: dist.ProcessGroup | None,
    gather_group: dist.ProcessGroup | None,
    device: torch.device,
    schedule: str,
) -> bool:
    """True if kernels exchange the tokens of a call, on all ranks alike. ValueError for "kernel" if none can."""
    # With gather_group kernels have not been measured.
    if implementation == "library" or (
        implementation == "auto" and (device.type != "cuda" or gather_group is not None)
    ):
        return False
    obstacle = "gather_group without a group gathers by the library" if group is None else ""
    if group is not None:
        joint = group if gather_group is None else _join(group, gather_group, device)[0]
        agreed = find_agreed(find_name(joint), device)
        obstacle = agreed.routed_obstacle if schedule else agreed.obstacle
    if implementation == "kernel":
        if obstacle:
            raise ValueError(f'{operator}: no kernel can run: {obstacle}; implementation="library" will do')
        return True
    if group is None or obstacle:
        return False
    return find_known(find_name(group), device, "nvlink", lambda: has_nvlink(group, device))
