# SPDX-License-Identifier: Apache-2.0
"""`EmbeddingAllToAll`: this rank's tables as a module, trained by a torch optimizer or by a fused one in backward.

`NamedTables` holds the tables under names that all ranks agree on, so that state dicts of several ranks can be merged.
`_keep_tables_from_ddp` keeps `DistributedDataParallel` from treating different tables as replicas.
"""

import itertools
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from stretto.memory import store_all_gather
from stretto.ops.embedding.backward import TableBlock
from stretto.ops.embedding.fused_optimizer import (
    OPTIMIZERS,
    STATES,
    TableUpdate,
    embedding_all_to_all_updating,
    table_settings,
)
from stretto.ops.embedding.operator import embedding_all_to_all
from stretto.ops.embedding.placement import require_mode
from stretto.ops.embedding.table_set import require_shape
from stretto.ops.operator import find_group, find_kept, find_name


class NamedTables(nn.Module):
    """This rank's tables, in their order; each is a parameter under the table's name.

    `tables[0]` is the first table, `tables["user"]` the one of that name. Iterating yields the tables.
    """

    def __init__(self, tables: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        for name, table in tables.items():
            self.register_parameter(name, table)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the tables' names."""
        return tuple(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)

    def __iter__(self) -> Iterator[nn.Parameter]:
        return self.parameters(recurse=False)

    def __getitem__(self, place: int | str) -> nn.Parameter:
        return self.get_parameter(self.names[place] if isinstance(place, int) else place)


class EmbeddingAllToAll(nn.Module):
    """Embedding tables of this rank, looked up for the global batch by `embedding_all_to_all`.

    shapes: (rows, dim) of each table; a rank may have none. All ranks of the group make their modules in one order, and
    making one is collective: the ranks compare their tables' names, through the group's store.
    names: of this rank's tables, such as the features'. No two tables of the group have the same name. The state dict's
    keys contain them: `tables.<name>`, `state_<name>` and, with "adam", `second_<name>` and `clock`. So the state dicts
    of all ranks can be saved as one by torch.distributed.checkpoint, and loaded by any number of ranks with any
    placement. Default: `rank<global rank>_<place>`, with which a state dict can be loaded only with the same placement.
    optimizer: with None, `tables` are parameters with gradients (sparse ones with sparse=True). With "sgd", "adagrad"
    (row-wise), "full-adagrad" or "adam" (see `embedding_all_to_all_update`), the backward pass itself updates the rows
    that were looked up: then `tables` need no gradients, and no other optimizer should have them. settings: those of
    `table_settings`: learning_rate (of all tables, or of each), epsilon, weight_decay, max_norm, betas. seed: rounds
    fp16 and bf16 tables stochastically. `set_learning_rate` changes the learning rate, also for a captured CUDA
    graph. mode, checks: as in `embedding_all_to_all`.

    Rows start uniformly distributed within +-1 / sqrt(rows) (`reset_parameters`; call it after `to_empty` if the module
    was made on the meta device). dtype is the tables': settings and states are fp32, and stay so when the module is
    moved to another dtype.

    DistributedDataParallel ignores the tables and the optimizer's states, wherever in its model the module is. It
    raises a ValueError if its group has ranks outside of the tables' group, unless its ranks hold replicas (each is in
    another tables' group) and optimizer is None: then it averages their gradients.

    ValueError, on all ranks, for invalid tables, names or optimizers of any rank; PeerError for a rank that does not
    create its module within the group's timeout.
    """

    settings: Tensor
    clock: Tensor | None

    def __init__(
        self,
        shapes: Sequence[tuple[int, int]],
        group: dist.ProcessGroup | None = None,
        *,
        names: Sequence[str] | None = None,
        mode: str = "sum",
        optimizer: str | None = None,
        seed: int | None = None,
        sparse: bool = False,
        checks: bool = True,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        dtype = dtype or torch.get_default_dtype()
        number = next(find_kept(find_name(group), torch.device("cpu"), "embedding modules", itertools.count))
        if names is None:
            names = [f"rank{dist.get_rank()}_{place}" for place in range(len(shapes))]
        error = ""
        try:
            if optimizer is not None and optimizer not in OPTIMIZERS:
                raise ValueError(f"optimizer must be None or one of {', '.join(OPTIMIZERS)}, not {optimizer!r}")
            if optimizer is not None and sparse:
                raise ValueError(f"optimizer={optimizer!r} makes no gradients, so none can be sparse: leave sparse out")
            require_mode(mode)
            rates = table_settings(max(len(shapes), 1), **settings, device="cpu")
            if seed is not None and (optimizer is None or dtype == torch.float32):
                raise ValueError(
                    f"seed is {seed}, but only a fused optimizer rounds, fp16 and bf16 tables: leave it out"
                )
            for place, (rows, dim) in enumerate(shapes):
                require_shape(place, rows, dim, dtype)
            self._require_names(names, len(shapes))
        except ValueError as invalid:
            error = str(invalid)
        _agree_on_names([] if error else list(names), error, group)
        self.name = f"module {number}"
        self.group, self.mode, self.optimizer = group, mode, optimizer
        self.sparse, self.checks = sparse, checks
        # The kernel reads two numbers for all tables, if they suffice.
        is_short = optimizer != "adam" and not {"weight_decay", "max_norm"} & {*settings}
        is_short = is_short and bool((rates[:, 0] == rates[0, 0]).all())
        self._rates, self.seed = rates[0, :2] if is_short else rates[: len(shapes)], seed
        self._blocks = tuple(TableBlock(zlib.crc32(name.encode())) for name in names)
        self.tables = NamedTables(
            {
                name: nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=optimizer is None)
                for name, shape in zip(names, shapes, strict=True)
            }
        )
        self.register_buffer("settings", torch.empty_like(self._rates, device=device), persistent=False)
        self._names_of_states = [kind + name for name in names for kind in self._state_kinds]
        for name, shape in zip(names, shapes, strict=True):
            for kind in self._state_kinds:
                size = shape[:1] if optimizer == "adagrad" else shape
                self.register_buffer(kind + name, torch.empty(size, dtype=torch.float32, device=device))
        counts = optimizer == "adam" or seed is not None
        self.register_buffer("clock", torch.empty(2, dtype=torch.int64, device=device) if counts else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new rows, zero states and clock, and restore the learning rate that the module was made with."""
        for table in self.tables:
            nn.init.uniform_(table, -(len(table) ** -0.5), len(table) ** -0.5)
        for state in self.states:
            nn.init.zeros_(state)
        self.settings.copy_(self._rates)
        if self.clock is not None:
            self.clock.copy_(torch.tensor([0, self.seed or 0], device="cpu"))

    @property
    def _state_kinds(self) -> tuple[str, ...]:
        """Return the prefixes of the names of a table's states."""
        return ("state_", "second_")[: STATES.get(self.optimizer or "sgd", 0)]

    @property
    def states(self) -> list[Tensor]:
        """Return the optimizer's states, fp32: those of the first table, then of the second, and so on."""
        buffers: dict[str, Any] = self._buffers  # get_buffer takes microseconds for each
        return [buffers[name] for name in self._names_of_states]

    def set_learning_rate(self, rate: float) -> None:
        """Set the fused optimizer's learning rate, for the backward passes from now on."""
        self.settings[..., 0] = rate

    def forward(
        self, indices: Tensor, offsets: Tensor, *, weights: Tensor | None = None, batch: int | None = None
    ) -> Tensor:
        """Look up; returns [global batch / world, sum of all ranks' dims]. Arguments as in `embedding_all_to_all`."""
        options: dict[str, Any] = {
            "weights": weights,
            "mode": self.mode,
            "batch": batch,
            "name": self.name,
            "checks": self.checks,
        }
        # The same as list(self.tables), which takes microseconds for each table.
        tables = [table for table in self.tables._parameters.values() if table is not None]
        if self.optimizer is None or not torch.is_grad_enabled():
            return embedding_all_to_all(indices, offsets, tables, self.group, sparse=self.sparse, **options)
        is_stochastic = self.seed is not None and bool(tables) and tables[0].dtype != torch.float32
        update = TableUpdate(self.optimizer, self.settings, self.states, self.clock, self._blocks, is_stochastic)
        return embedding_all_to_all_updating(indices, offsets, tables, self.group, update, **options)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move as `nn.Module` does (`to`, `half`, ...), but keep settings and states in fp32, which updates take."""
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            moved = self._buffers[name]
            if buffer is not None and moved is not None and moved.dtype != buffer.dtype:
                self._buffers[name] = buffer.to(moved.device)
        return self

    def _require_names(self, names: Sequence[str], count: int) -> None:
        """ValueError unless there are `count` names that parameters and buffers of this module can have."""
        if isinstance(names, str) or len(names) != count:
            raise ValueError(f"names has one name for each table, {count}, not {names!r}")
        taken = NamedTables({})
        for name in names:
            if not isinstance(name, str) or not name or "." in name:
                raise ValueError(f"a table's name is a string without a dot, and not empty; not {name!r}")
            if hasattr(taken, name) or hasattr(self, f"state_{name}") or hasattr(self, f"second_{name}"):
                raise ValueError(f"no table can be named {name!r}, since a module has an attribute of that name")

    def extra_repr(self) -> str:
        """Return the mode and the optimizer."""
        return f"mode={self.mode!r}, optimizer={self.optimizer!r}"


def _agree_on_names(names: list[str], error: str, group: dist.ProcessGroup | None) -> None:
    """Compare the names of all ranks' tables. ValueError on all ranks for a name given twice, or where a rank has one.

    error: why this rank cannot make its module, which all ranks then raise; "" if it can.
    """
    sent = json.dumps({"names": names, "error": error})
    of_ranks = [json.loads(text) for text in store_all_gather(sent, find_group(find_name(group)), "stretto tables")]
    if error:
        raise ValueError(error)
    owners: dict[str, int] = {}
    for rank, other in enumerate(of_ranks):
        if other["error"]:
            raise ValueError(f"rank {rank} of the group cannot make its EmbeddingAllToAll: {other['error']}")
        for name in other["names"]:
            if name in owners:
                raise ValueError(
                    f"rank {owners[name]} and rank {rank} of the group both have a table named {name!r}, and a "
                    "checkpoint would contain only one of them: give each table of the group a different name"
                )
            owners[name] = rank


def _keep_tables_from_ddp(owner: nn.Module, name: str, module: nn.Module | None) -> None:
    """Make a `DistributedDataParallel` under construction ignore all tables within its module.

    Torch calls this hook for every registered module. DDP registers its module before it broadcasts anything, and
    honours `_ddp_params_and_buffers_to_ignore` of that module alone, which an inner module cannot set.
    """
    if not isinstance(owner, DistributedDataParallel) or name != "module" or module is None:
        return
    ours: set[int] = set()
    for inner in module.modules():
        if isinstance(inner, EmbeddingAllToAll):
            own = {id(tensor) for tensor in (*inner.parameters(), *inner.buffers())}
            # A user who makes DDP ignore the tables synchronizes replicas in another way.
            ignored = {found for name, found in _name_tensors(module) if name in owner.parameters_to_ignore}
            if not own <= ignored and _are_own(inner, owner.process_group):
                ours |= own
    if not ours:
        return
    owner.parameters_to_ignore |= {name for name, tensor in _name_tensors(module) if tensor in ours}
    owner._module_parameters = [one for one in owner._module_parameters if id(one) not in ours]
    for tensor in (*module.parameters(), *module.buffers()):
        if id(tensor) in ours:
            tensor._ddp_ignored = True  # type: ignore[attr-defined]  # read by DDP's mixed precision
    if not any(parameter.requires_grad for parameter in owner._module_parameters):
        raise ValueError(
            "DistributedDataParallel is not needed: the module has no parameters with gradients but the tables of "
            "EmbeddingAllToAll, each of which is trained by the rank that has it"
        )


def _name_tensors(module: nn.Module) -> list[tuple[str, int]]:
    """Return all names of parameters and buffers, with the tensors' ids; shared ones have several names."""
    named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    return [(name, id(tensor)) for name, tensor in named]


def _are_own(module: EmbeddingAllToAll, replicas: dist.ProcessGroup) -> bool:
    """Return whether DDP over `replicas` must ignore the module's tables; False where its ranks hold replicas of them.

    ValueError for groups with which replicas of the tables would part ways.
    """
    ranks = set(dist.get_process_group_ranks(replicas))
    owners = set(dist.get_process_group_ranks(find_group(find_name(module.group))))
    if ranks <= owners:
        return True
    if ranks & owners != {dist.get_rank()}:
        raise ValueError(
            f"DistributedDataParallel over ranks {sorted(ranks)} cannot hold an EmbeddingAllToAll over ranks "
            f"{sorted(owners)}: the tables of ranks outside of the tables' group would not be kept equal to these. "
            "Give DistributedDataParallel a group inside of the tables' group, or have it ignore the tables "
            "(_set_params_and_buffers_to_ignore_for_model) and reduce their gradients yourself"
        )
    if module.optimizer is not None:
        raise ValueError(
            f"DistributedDataParallel over ranks {sorted(ranks)} would keep replicas of the tables of an "
            f"EmbeddingAllToAll over ranks {sorted(owners)}, but optimizer={module.optimizer!r} makes no gradients "
            "that it could average: take optimizer=None and a torch optimizer"
        )
    return False


register_module_module_registration_hook(_keep_tables_from_ddp)
