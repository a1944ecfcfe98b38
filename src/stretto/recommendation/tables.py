# SPDX-License-Identifier: Apache-2.0
"""Distributes a model with embedding tables: each is whole on a rank, cut, or replicated; the rest is on every rank."""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stretto.collectives.two_level import exchange_hosts, name_nodes
from stretto.memory import group_timeout
from stretto.optim.row_update import RowOptimizer
from stretto.parallel.comm.autograd import at_end_of_backward, scale_gradient
from stretto.parallel.comm.collectives import NO_GROUP, Pending, start_all_reduce
from stretto.parallel.comm.streams import ReductionStream
from stretto.parallel.comm.users_hooks import alive
from stretto.parallel.grid import Grid
from stretto.parallel.meta import MetaInitializer
from stretto.recommendation.growing import GrowingRows
from stretto.recommendation.index_exchange import IndexExchange, find_host_group
from stretto.recommendation.placement import TablePlacement, TableShard, TableSize, place_tables
from stretto.recommendation.pooled_exchange import (
    Implementation,
    TableLookups,
    choose_operators,
    pool_and_exchange,
    refuse_conversion,
)
from stretto.recommendation.sharded_lookup import CombineShards, ShardColumns, look_up_replicated
from stretto.recommendation.table_cache import CachedTables, RowCache
from stretto.recommendation.table_optimizer import TableOptimizer
from stretto.recommendation.table_replicas import TableReplicas, require_replicas


class ShardedTables(nn.ModuleDict):
    """This rank's tables of a model, or its parts of them, under their numbers, so that parameters keep their names.

    `tables(indices, offsets)` takes the bags of this rank's samples for all tables, feature-major, and returns
    [local batch, sum of all tables' dims], in the order of `placement.order`. Collective, forward and backward;
    ValueError on all ranks where one refuses its batch, or local batches differ in size.
    `exchange` is its first half, `pool` its second. `fuse_update` has the backward pass update the tables, of which
    the operator of stretto.ops does those that are not replicated where it runs (`operators`).
    caches: of tables that are larger than the GPU (`placement.cached`), or grow (`TableSize.growth`), by number.
    `exchange` fetches their rows: make that of the next batch while this one is computed. The `weight` of a larger one
    is its cache; checkpoints have whole tables.
    """

    def __init__(
        self,
        tables: Mapping[int, nn.EmbeddingBag],
        placement: TablePlacement,
        group: dist.ProcessGroup,
        implementation: Implementation,
        device: torch.device,
        dtype: torch.dtype,
        caches: Mapping[int, RowCache | GrowingRows] | None = None,
        replicas: TableReplicas | None = None,
    ) -> None:
        super().__init__({str(number): table for number, table in tables.items()})
        self.placement, self.group, self.dtype, self.device = placement, group, dtype, device
        # This rank's parts, then the replicated tables, which are parts of a whole table each.
        self.shards = (*placement.shards[group.rank()], *map(placement.whole, placement.replicated))
        widths = [shard.columns for of_rank in placement.shards for shard in of_rank]
        self.operators = choose_operators(implementation, dtype, device, widths, group)
        self.optimizer: TableOptimizer | None = None
        self.replicas = replicas
        self.replicated_gradients: ReplicatedGradients | None = None  # of the model's other parameters
        # What is the same on all ranks, and another for other tables.
        self.name = hashlib.sha256(repr(placement).encode()).hexdigest()[:16]
        self.dims = tuple(sum(shard.columns for shard in of_rank) for of_rank in placement.shards)
        places = {shard.table: place for place, shard in enumerate(self.shards)}
        of_places = {places[table]: cache for table, cache in (caches or {}).items()}
        if caches:
            self.register_state_dict_pre_hook(_refuse_state_dict)
            self.register_load_state_dict_pre_hook(_refuse_state_dict)
        self._columns = None if placement.is_whole else ShardColumns.of(placement, device)
        self._host_group = find_host_group(device, group, None if replicas is None else replicas.partition)
        self.caches: CachedTables | None = None
        if any(placement.cached) or any(size.growth for size in placement.tables):
            agreeing = (self._host_group or group) if any(placement.cached) else NO_GROUP  # only caches refuse
            self.caches = CachedTables(of_places, len(places) - len(placement.replicated), device, agreeing)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        refuse_conversion(fn, (self.dtype,), self.device)
        return super()._apply(fn, recurse)

    def forward(self, indices: Tensor | IndexExchange | TableLookups, offsets: Tensor) -> Tensor:
        return self.pool(self.exchange(indices, offsets))

    def exchange(self, indices: Tensor | IndexExchange | TableLookups, offsets: Tensor) -> TableLookups:
        """All samples' bags for this rank's shards, from this rank's samples' for all tables, or what has sent them."""
        if isinstance(indices, Tensor):
            indices = IndexExchange(indices, offsets, self.placement, self.group, host_group=self._host_group)
        lookups = indices.wait() if isinstance(indices, IndexExchange) else indices
        if self.caches is not None and lookups.cached is None:
            lookups = self.caches.fetch(lookups)
        if lookups.cached is not None:
            lookups.cached.agree()
        return lookups

    def pool(self, lookups: TableLookups) -> Tensor:
        """This rank's samples' vectors from all tables."""
        weights, optimizer = self.weights, self.optimizer
        shared = len(weights) - len(self.placement.replicated)
        parts = []
        if optimizer is None and torch.is_grad_enabled() and (self.caches is not None or self.replicas is not None):
            raise ValueError(
                "tables that are cached, grow or have replicas get no gradients: call fuse_update, or use no_grad"
            )
        of_operator = None if optimizer is None else optimizer.find_update()
        caches = self.caches
        if caches is not None:
            lookups, of_operator = caches.use(lookups, of_operator)
        if sum(self.dims):
            exchanged = pool_and_exchange(
                lookups,
                weights[:shared],
                self.dims,
                self.group,
                dtype=self.dtype,
                operators=self.operators,
                name=self.name,
                update=of_operator,
            )
            parts.append(exchanged)
        if lookups.replicated is not None:
            update = None if optimizer is None else optimizer.update_replicated
            parts.append(look_up_replicated(lookups.replicated, weights[shared:], self.group, update))
        pooled = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        if self._columns is not None:
            pooled = CombineShards.apply(pooled, self._columns)
        if caches is not None and lookups.cached is not None:
            number = lookups.cached.number
            caches.end(number, is_last=not pooled.requires_grad)
            if pooled.requires_grad:
                pooled.register_hook(lambda _: caches.begin_update(number))
        if optimizer is not None and pooled.requires_grad:
            pooled.register_hook(lambda _: optimizer.begin())
        if self.replicas is not None:
            replicas = self.replicas
            if pooled.requires_grad:
                pooled.register_hook(lambda _: at_end_of_backward(lambda: replicas.step(self._averaged())))
            pooled = scale_gradient(pooled, replicas.count)
        return pooled

    def average_replicas(self) -> None:
        """Average the groups' tables, if there are several groups: before a checkpoint or an evaluation. Collective."""
        if self.replicas is not None:
            self.replicas.average(self._averaged())

    def _averaged(self) -> list[Tensor]:
        states = [] if self.optimizer is None else self.optimizer.states
        return [*self.weights, *(state for of_table in states for state in of_table.values())]

    @property
    def weights(self) -> list[nn.Parameter]:
        """The parameters of `shards`."""
        return [self[str(shard.table)].get_parameter("weight") for shard in self.shards]

    def fuse_update(self, kind: RowOptimizer = "rowwise-adagrad", **options: Any) -> TableOptimizer:
        """From now on backward passes update the tables, which keep no gradients. Call it once, on all ranks.

        kind: "sgd", "rowwise-adagrad", "full-adagrad" or "adam". options: `lr`; `eps`; `betas` (adam's);
        `weight_decay`, added to the gradients of looked-up rows, as torch.optim does; `max_norm`, of the gradient of a
        row; `lr_factors` by table number; of fp16 and bf16 tables `stochastic_rounding` (default) and its `seed`: the
        bits are the same on every placement. A rank may have no tables. Returns the optimizer: `set_lr(lr)` before a
        backward pass changes the learning rate. ValueError for others, for row-wise Adagrad or `max_norm` of tables
        that are cut by columns, and at a second call.
        """
        if self.optimizer is not None:
            raise ValueError(f"the tables have an optimizer already, {self.optimizer.kind}: fuse_update is called once")
        self.optimizer = TableOptimizer(self, kind, **options)
        for place, states in enumerate(self.optimizer.states):
            cache = None if self.caches is None else self.caches.find(place)
            if cache is not None:
                cache.add_states(list(states.values()))
        return self.optimizer


def distribute_tables(
    model: nn.Module,
    grid: Grid,
    *,
    placement: TablePlacement | None = None,
    pooling: Sequence[float] | None = None,
    implementation: Implementation = "auto",
    seed: int = 0,
    replicas: int = 1,
    sync_every: int = 1,
) -> TablePlacement:
    """Distribute a model's embedding tables over all ranks, in place, and replicate its other modules.

    model: a model on the meta device such as `DLRM`, with the attribute `tables`, an nn.ModuleList of nn.EmbeddingBag,
    and a method `reorder(order)`, which sets the order of the tables' vectors. Each module is
    initialized from `seed` and its name, with the same weights on every grid; a rank allocates only its own tables.
    grid: a grid with only the axis `data`. placement: by default `place_tables` for `pooling`, the mean number of rows
    in a bag of each table, which keeps tables whole; `plan_tables` cuts and replicates them for balance. Tables that
    are cut or replicated are looked up in the same call, with the results of one rank up to rounding; each is whole on
    its ranks for a moment while it is initialized.

    Each rank then calls the model with its own samples, equally many on every rank, and divides their summed loss by
    the global batch size. When `backward()` returns, gradients are fully reduced: each table's sparse gradient is on
    its owner, and all other gradients are all-reduced.

    Tables that `placement.cached` names are in host memory, with a cache on the GPU; they start from the random numbers
    of a CPU, and all else is as if they were on the GPU, bit for bit. They need `fuse_update`.

    replicas: how many groups of ranks have all tables each, which they average every `sync_every` steps
    (`table_replicas`); placements are for the ranks of a group. Such tables need `fuse_update`, too.

    Raises ValueError for another model or grid, a placement of other tables, or an implementation that is not there.
    """
    tables = _check_model(model)
    ranks = grid.size("data")
    if grid.size("world") != ranks:
        raise ValueError(
            f"{grid} has other axes than data, but tables are distributed only over data: use Grid(data=...)"
        )
    if pooling is not None and len(pooling) != len(tables):
        raise ValueError(f"pooling has {len(pooling)} numbers, but there are {len(tables)} tables: give one for each")
    sizes = tuple(
        TableSize(table.num_embeddings, table.embedding_dim, rate)
        for table, rate in zip(tables, pooling or [1.0] * len(tables), strict=True)
    )
    require_replicas(replicas, sync_every, ranks)
    ranks //= replicas
    placement = placement or place_tables(sizes, ranks)
    if replicas > 1 and (placement.cached or any(size.growth for size in placement.tables)):
        raise ValueError(f"tables that are cached or grow have one copy: replicas=1 would do, not {replicas}")
    group = grid.group("data")
    nodes = None
    if "table-row" in placement.kinds:
        nodes = name_nodes([host for _, host in exchange_hosts(group, group_timeout(group))])
        first = grid.coordinate("data") // ranks * ranks
        nodes = nodes[first : first + ranks]
    placement.check([(size.rows, size.dim) for size in sizes], ranks, nodes)
    dtype = tables[0].weight.dtype
    # Before anything is allocated.
    widths = [shard.columns for of_rank in placement.shards for shard in of_rank]
    choose_operators(implementation, dtype, grid.device, widths)

    initializer = MetaInitializer(model, grid.device, seed)
    of_host = MetaInitializer(model, torch.device("cpu"), seed)
    copies = TableReplicas(group, replicas, sync_every, grid.device) if replicas > 1 else None
    group = group if copies is None else copies.group
    mine = {shard.table: shard for shard in placement.shards[group.rank()]}
    mine |= {table: placement.whole(table) for table in placement.replicated}
    for name, module in model.named_modules():
        owner, _, number = name.partition(".")
        if owner != "tables" or (number and int(number) in mine):
            is_cached = owner == "tables" and number and placement.cache_of(mine[int(number)])
            _materialize(module, (of_host if is_cached else initializer).real(name, module))
    caches = dict[int, RowCache | GrowingRows]()
    for table, shard in mine.items():
        _keep_shard(tables[table], shard)
        growth = placement.tables[table].growth
        if growth is not None:
            caches[table] = GrowingRows(tables[table].weight.detach(), growth, table)
        if rows := placement.cache_of(shard):
            weight = tables[table].weight.detach()
            caches[table] = cache = RowCache(shard.rows, shard.columns, rows, weight.dtype, grid.device)
            cache.held[0].copy_(weight)
            tables[table].weight = nn.Parameter(cache.weight)
    sharded = ShardedTables(
        {table: tables[table] for table in mine}, placement, group, implementation, grid.device, dtype, caches, copies
    )
    grid.gradients.add("sum")
    model.tables = sharded
    model.reorder(placement.order)  # type: ignore[operator]
    # The last MLP's gradients are there first: one bucket a module, each on its way while the next is computed.
    replicated = [list(child.parameters()) for name, child in model.named_children() if name != "tables"]
    sharded.replicated_gradients = ReplicatedGradients([bucket for bucket in replicated if bucket], grid.group("data"))
    return placement


def _check_model(model: nn.Module) -> list[nn.EmbeddingBag]:
    tables = getattr(model, "tables", None)
    if not isinstance(tables, nn.ModuleList) or not callable(getattr(model, "reorder", None)):
        raise ValueError(
            f"{type(model).__name__} has no `tables`, an nn.ModuleList of nn.EmbeddingBag, and `reorder`, as "
            "stretto.recommendation.DLRM has"
        )
    bags = [table for table in tables if isinstance(table, nn.EmbeddingBag)]
    if len(bags) != len(tables) or any(bag.mode != "sum" or not bag.include_last_offset for bag in bags):
        raise ValueError("tables must be nn.EmbeddingBag with mode='sum' and include_last_offset=True")
    if any(not parameter.is_meta for parameter in model.parameters()):
        raise ValueError("build the model under torch.device('meta'): each rank then allocates its own tables only")
    return bags


def _materialize(module: nn.Module, real: Any) -> None:
    if real is module:
        return
    for name in module._parameters:
        module._parameters[name] = getattr(real, name)
    for name in module._buffers:
        module._buffers[name] = getattr(real, name)


def _keep_shard(table: nn.EmbeddingBag, shard: TableShard) -> None:
    """Cut a table down to a box of it, in memory of its own."""
    whole, table.num_embeddings, table.embedding_dim = table.weight, shard.rows, shard.columns
    if whole.shape != (shard.rows, shard.columns):
        box = whole.detach()[shard.row : shard.row + shard.rows, shard.column : shard.column + shard.columns]
        table.weight = nn.Parameter(box.clone(memory_format=torch.contiguous_format), whole.requires_grad)


def _refuse_state_dict(*_: Any) -> None:
    raise ValueError("tables that are cached or grow are more than parameters: distributed_state has them whole")


class ReplicatedGradients:
    """Sums gradients over `group`, bucket by bucket: a bucket is sent once the last of its gradients is there.

    When `backward()` returns, the sum of all ranks' is added to each `.grad`, the same bits on each. Every parameter
    must get a gradient. Ranks must make them in the same order.
    """

    def __init__(self, buckets: Iterable[Sequence[nn.Parameter]], group: dist.ProcessGroup) -> None:
        self._group = group
        self._buckets = [tuple(bucket) for bucket in buckets]
        self._missing = [len(bucket) for bucket in self._buckets]
        self._pending: list[tuple[int, Pending]] = []
        self._earlier: dict[nn.Parameter, Tensor] = {}  # of earlier passes, summed already
        self._task = -1  # autograd's number of the pass that is running: one that has failed is not taken up again
        self._stream = ReductionStream(torch.device("cpu"))  # of the pass: that of its first gradient
        if group.size() == 1:
            return
        # Python's garbage collector does not see the references of such a hook: a cycle would never be freed.
        this = ref(self)
        for number, bucket in enumerate(self._buckets):
            for parameter in bucket:
                parameter.register_hook(lambda _, parameter=parameter: alive(this)._set_aside(parameter))
                parameter.register_post_accumulate_grad_hook(
                    lambda done, number=number: alive(this)._arrive(done, number)
                )

    def _set_aside(self, parameter: nn.Parameter) -> None:
        """Take what `.grad` holds, so that autograd does not add to it before the sum over ranks."""
        self._begin(parameter.device)
        if parameter.grad is not None:
            self._earlier[parameter], parameter.grad = parameter.grad, None

    def _begin(self, device: torch.device) -> None:
        if self._task != (task := torch._C._current_graph_task_id()):
            self._task, self._stream = task, ReductionStream(device)
            self._missing, self._pending = [len(bucket) for bucket in self._buckets], []
            self._earlier = {}
            at_end_of_backward(self._finish)

    def _arrive(self, parameter: nn.Parameter, number: int) -> None:
        if self._stream.is_elsewhere():
            with self._stream.enter(_gradient(parameter)):
                self._arrive(parameter, number)
            return
        self._missing[number] -= 1
        if not self._missing[number]:
            flat = torch.cat([_gradient(parameter).reshape(-1) for parameter in self._buckets[number]])
            self._pending.append((number, start_all_reduce(flat, self._group)))

    def _finish(self) -> None:
        if self._stream.is_elsewhere():
            with self._stream.enter():
                self._finish()
            self._stream.join()
            return
        self._task = -1
        if any(self._missing):
            raise RuntimeError(f"{sum(self._missing)} parameters had no gradient in this backward pass: each needs one")
        for number, pending in self._pending:
            sums = pending.wait().split([parameter.numel() for parameter in self._buckets[number]])
            for parameter, total in zip(self._buckets[number], sums, strict=True):
                earlier = self._earlier.get(parameter)
                parameter.grad = total.view_as(parameter) if earlier is None else earlier + total.view_as(parameter)
        self._earlier = {}


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
