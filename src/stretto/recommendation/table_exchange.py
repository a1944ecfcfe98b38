# SPDX-License-Identifier: Apache-2.0
"""Looks the features of one module up in its tables, which ranks share out, or which are all on one.

`TableExchange` sends indices to the tables' owners, pools or looks up there, and sends the vectors back.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from stretto.optim.row_update import RowOptimizer
from stretto.parallel.comm.autograd import scale_gradient
from stretto.parallel.comm.collectives import NO_GROUP
from stretto.recommendation.index_exchange import IndexExchange, find_host_group, side_stream
from stretto.recommendation.jagged import FeatureBags, select_features
from stretto.recommendation.placement import ShardingKind, TablePlacement, TableShard, TableSize
from stretto.recommendation.pooled_exchange import (
    Implementation,
    PoolingMode,
    TableLookups,
    choose_operators,
    exchange_parts,
    pool_and_exchange,
)
from stretto.recommendation.sharded_lookup import CombineShards, ShardColumns
from stretto.recommendation.table_optimizer import TableOptimizer
from stretto.suggestions import name_known

_NO_BAGS = FeatureBags(
    torch.empty(0, dtype=torch.int64, device="cpu"), torch.zeros(1, dtype=torch.int64, device="cpu"), None, 0
)


class TableSpec(NamedTuple):
    """A table of any module: what its look-ups need to know.

    key: of its weight in the module's state dict. mode: of pooling; None for a row an id. features: by name. init:
    fills a weight that is on the meta device.
    """

    name: str
    key: str
    rows: int
    dim: int
    dtype: torch.dtype
    mode: PoolingMode | None
    features: tuple[str, ...]
    sparse: bool = False
    padding_idx: int | None = None
    init: Callable[[Tensor], Any] | None = None


class _FeatureGroup(NamedTuple):
    """Successive features whose tables are of one dtype and mode: they are pooled and exchanged in one call.

    numbers: of the features. order: these, as their vectors stand. dims: how wide the vectors of each rank are
    together. columns: of tables that are cut, how parts become vectors. divides: the tables are cut by rows, and the
    sum of the parts is divided by the number of ids, not each part.
    """

    numbers: range
    mode: PoolingMode | None
    dtype: torch.dtype
    operators: Any | None
    order: tuple[int, ...]
    dims: tuple[int, ...]
    name: str
    columns: ShardColumns | None
    divides: bool


@dataclass
class OptimizedTables:
    """This rank's tables of a group, as `TableOptimizer` reads them of `ShardedTables`."""

    placement: TablePlacement
    dims: tuple[int, ...]
    shards: tuple[TableShard, ...]
    weights: list[nn.Parameter]
    device: torch.device
    dtype: torch.dtype
    operators: Any | None
    caches: None = None


class TableExchange:
    """Looks features up in tables that ranks own. Collective over `group`, forward and backward.

    owners: the ranks of each table (default: rank 0), several where it is cut. kinds: of pooled tables "table" (whole),
    "row" or "column"; default: all are whole. averages: gradients of the tables are averaged over the ranks, not
    summed. name: another one for each module of a group. Features are numbered by dtype and mode of their tables;
    `features` are their names in that order, in which `look_up` takes bags.
    """

    def __init__(
        self,
        specs: Sequence[TableSpec],
        owners: Sequence[Sequence[int]] | None = None,
        group: dist.ProcessGroup = NO_GROUP,
        device: torch.device | None = None,
        *,
        kinds: Sequence[ShardingKind] = (),
        implementation: Implementation = "library",
        averages: bool = False,
        name: str = "",
    ) -> None:
        owners, device = owners or [[0]] * len(specs), device or torch.device("cpu")
        kinds = kinds or ["table"] * len(specs)
        for spec, sharding in zip(specs, kinds, strict=True):
            if sharding not in ("table", "row", "column") or (spec.mode is None and sharding != "table"):
                raise ValueError(
                    f"table {spec.name!r} has kind {sharding!r}: pooled tables are 'table' (whole), 'row' or 'column', "
                    "others 'table'"
                )
        self.specs, self._group, self.is_distributed = specs, group, isinstance(group, dist.ProcessGroup)
        self._scale = 1 / group.size() if averages else 1.0
        of_table = [(table, feature) for table, spec in enumerate(specs) for feature in spec.features]
        divides = [spec.mode == "mean" and sharding == "row" for spec, sharding in zip(specs, kinds, strict=True)]
        kind = [(spec.mode or "", str(spec.dtype), by_ids) for spec, by_ids in zip(specs, divides, strict=True)]
        self._order = sorted(range(len(of_table)), key=lambda place: kind[of_table[place][0]])
        self._tables = [of_table[place][0] for place in self._order]
        self.features = [of_table[place][1] for place in self._order]
        self._names = [
            f"feature {feature!r} of table {specs[table].name!r}" if feature else specs[table].name
            for table, feature in zip(self._tables, self.features, strict=True)
        ]
        owned = tuple(
            tuple(number for number, table in enumerate(self._tables) if rank in owners[table])
            for rank in range(group.size())
        )
        sizes = tuple(TableSize(specs[table].rows, specs[table].dim) for table in self._tables)
        self._placement = TablePlacement(sizes, owned, tuple(kinds[table] for table in self._tables))
        self._placement.check([(size.rows, size.dim) for size in sizes], group.size())
        self._groups = []
        for (mode, *_), numbers in groupby(range(len(self._tables)), key=lambda number: kind[self._tables[number]]):
            found = [*numbers]
            first, own = found[0], slice(found[0], found[-1] + 1)
            by_rank = tuple(tuple(number - first for number in of_rank if number in found) for of_rank in owned)
            placement = TablePlacement(sizes[own], by_rank, self._placement.kinds[own])
            widths = [[shard.columns for shard in of_rank] for of_rank in placement.shards]
            dtype = specs[self._tables[found[0]]].dtype
            operators = None
            if mode:
                operators = choose_operators(implementation, dtype, device, [*chain.from_iterable(widths)])
            self._groups.append(
                _FeatureGroup(
                    range(found[0], found[-1] + 1),
                    specs[self._tables[found[0]]].mode,
                    dtype,
                    operators,
                    tuple(first + number for number in placement.order),
                    tuple(map(sum, widths)),
                    f"{mode} {dtype} of {hashlib.sha256(repr((name, self._placement)).encode()).hexdigest()[:16]}",
                    None if placement.is_whole else ShardColumns.of(placement, device),
                    divides[self._tables[first]],
                )
            )
        self.is_fused = all(each.operators is not None for each in self._groups)
        self._owners, self._kinds, self.device = owners, kinds, device
        self._optimizers: list[TableOptimizer] = []  # of the groups
        self.ahead: list[tuple[Any, FeatureBags, IndexExchange]] = []  # what was sent ahead, with its features
        self._host_group = find_host_group(device, group)

    def fuse_update(
        self, kind: RowOptimizer, weights: Mapping[int, nn.Parameter], lr_factors: Mapping[str, float], **options: Any
    ) -> list[TableOptimizer]:
        """Have backward passes update the tables by an optimizer a group. weights: of this rank's tables."""
        if self._optimizers:
            raise ValueError(
                f"the tables have an optimizer already, {self._optimizers[0].kind}: fuse_update is called once"
            )
        found = {spec.name: table for table, spec in enumerate(self.specs)}
        for name in lr_factors:
            if name not in found:
                raise ValueError(f"lr_factors: there is no table {name!r}{name_known(name, found)}")
        made = []
        for group in self._groups:
            tables = self._tables_of(group)
            factors = {
                tables.index(found[name]): factor for name, factor in lr_factors.items() if found[name] in tables
            }
            placement = self._place(tables)
            own = [weights[table] for table in tables if table in weights]
            shards = placement.shards[self._group.rank()]
            held = OptimizedTables(placement, group.dims, shards, own, self.device, group.dtype, group.operators)
            made.append(TableOptimizer(held, kind, lr_factors=factors, **options))
        self._optimizers = made
        return made

    def boxes(
        self, weights: Mapping[int, nn.Parameter]
    ) -> Iterator[tuple[str, tuple[int, int], TableShard | None, dict[str, Tensor]]]:
        """Yield for a checkpoint, of each of this rank's tables: its weight's key, its shape, which part is here, and
        that part's numbers ("") with the optimizer's states by their names. No part: what is of no single table."""
        for index, group in enumerate(self._groups):
            tables = self._tables_of(group)
            optimizer = self._optimizers[index] if self._optimizers else None
            own = self._place(tables).shards[self._group.rank()]
            for place, shard in enumerate(own):
                spec = self.specs[tables[shard.table]]
                states = {} if optimizer is None else optimizer.states[place]
                tensors = {"": weights[tables[shard.table]].detach(), **states}
                yield spec.key, (spec.rows, spec.dim), shard, tensors
            if optimizer is not None:
                kind = f"{group.mode or 'rows'}.{str(group.dtype).removeprefix('torch.')}"
                yield kind, (0, 0), None, {"clock": optimizer.clock}

    def _place(self, tables: Sequence[int]) -> TablePlacement:
        """The placement of some tables, by their places among these."""
        sizes = tuple(TableSize(self.specs[table].rows, self.specs[table].dim) for table in tables)
        ranks = range(self._group.size())
        owned = tuple(tuple(at for at, table in enumerate(tables) if rank in self._owners[table]) for rank in ranks)
        return TablePlacement(sizes, owned, tuple(self._kinds[table] for table in tables))

    def find_shard(self, table: int) -> TableShard:
        """This rank's part of a table, of which it has one."""
        rank = self._group.rank()
        shards = zip(self._placement.owned[rank], self._placement.shards[rank], strict=True)
        return next(shard for number, shard in shards if self._tables[number] == table)

    def _tables_of(self, group: _FeatureGroup) -> list[int]:
        return sorted({self._tables[number] for number in group.numbers})

    def select(self, features: Any, *, is_weighted: bool = False) -> FeatureBags:
        """The bags of a KeyedJaggedTensor. An error on all ranks where one refuses its own."""
        for place, (given, bags, exchange) in enumerate(self.ahead):
            if given is features:
                del self.ahead[place]
                return bags._replace(exchange=exchange)
        return self.make_bags(lambda: select_features(features, self.features, is_weighted=is_weighted))

    def make_bags(self, make: Callable[[], FeatureBags]) -> FeatureBags:
        """Call `make` for the bags. Its error is raised once the other ranks know, which then raise ValueError."""
        try:
            return make()
        except Exception as error:
            self._begin(_NO_BAGS, error).wait()
            raise

    def send_ahead(self, features: Any, refused: Exception | None, *, is_weighted: bool) -> IndexExchange:
        """Begin the exchange for a later `select` of the same object. refused: why there are no features."""
        bags = _NO_BAGS
        if refused is None:
            try:
                bags = select_features(features, self.features, is_weighted=is_weighted)
                if bags.weights is not None and bags.weights.requires_grad:
                    raise ValueError(
                        "these weights of ids need gradients, so they depend on the step before, and cannot be sent "
                        "ahead of it: leave their collection out of features="
                    )
            except ValueError as error:
                refused = error
        exchange = self._begin(bags, refused, side_stream(self.device))
        self.ahead.append((features, bags, exchange))
        return exchange

    def _begin(
        self, bags: FeatureBags, refused: Exception | None = None, stream: "torch.cuda.Stream | None" = None
    ) -> IndexExchange:
        factors = bags.weights
        if factors is not None:  # they are this rank's own: their gradients are not averaged
            factors = scale_gradient(factors, 1 / self._scale)
        return IndexExchange(
            bags.indices,
            bags.offsets,
            self._placement,
            self._group,
            host_group=self._host_group,
            weights=factors,
            names=self._names,
            checks_device=not self.is_fused,
            refused=refused,
            stream=stream,
        )

    def look_up(self, bags: FeatureBags, weights: Mapping[int, Tensor]) -> list[Tensor]:
        """Vectors of this rank's samples, for each feature in order of table: [batch, dim], or [ids, dim] unpooled.

        weights: of this rank's tables, by their numbers.
        """
        lookups = (bags.exchange or self._begin(bags)).wait()
        owned = self._placement.owned[self._group.rank()]
        found: dict[int, Tensor] = {}
        for index, group in enumerate(self._groups):
            places = [place for place, number in enumerate(owned) if number in group.numbers]
            first, last = (places[0], places[-1] + 1) if places else (0, 0)
            own = [self._tables[owned[place]] for place in places]
            part = lookups.of_tables(first, last)
            optimizer = self._optimizers[index] if self._optimizers else None
            if group.mode is None:
                found |= self._look_up_rows(group, part, lookups.sizes, own, weights, optimizer)
            else:
                found |= self._pool(group, part, own, weights, optimizer, bags)
        for *_, exchange in self.ahead:  # now, as the backward pass has collectives of its own
            exchange.issue()
        by_place = dict(zip(self._order, range(len(self._order)), strict=True))
        return [found[by_place[place]] for place in range(len(self._order))]

    def _pool(
        self,
        group: _FeatureGroup,
        lookups: TableLookups,
        own: Sequence[int],
        weights: Mapping[int, Tensor],
        optimizer: TableOptimizer | None,
        bags: FeatureBags,
    ) -> dict[int, Tensor]:
        update = None if optimizer is None else optimizer.find_update()
        if update is not None:
            tables = [table for table in self._tables_of(group) if table in weights]
            update = update.of_tables([tables.index(table) for table in own], len(tables))
        pooled = pool_and_exchange(
            lookups,
            [weights[table] for table in own],
            group.dims,
            self._group,
            dtype=group.dtype,
            operators=group.operators,
            name=group.name,
            update=update,
            mode="sum" if group.divides else group.mode or "sum",
            sparse=optimizer is not None or self.specs[self._tables[group.numbers[0]]].sparse,
        )
        if group.columns is not None:
            pooled = CombineShards.apply(pooled, group.columns)
        pooled = self._follow(pooled, optimizer)
        widths = [self._placement.tables[number].dim for number in group.order]
        found = dict(zip(group.order, pooled.split(widths, dim=1), strict=True))
        if group.divides:
            counts = bags.offsets.diff().view(len(self._tables), -1).clamp(min=1).unsqueeze(2).to(pooled.device)
            found = {number: vectors / counts[number] for number, vectors in found.items()}
        return found

    def _follow(self, vectors: Tensor, optimizer: TableOptimizer | None) -> Tensor:
        """The group's vectors, whose gradient has the optimizer begin a step, and is averaged."""
        if optimizer is not None and vectors.requires_grad:
            vectors.register_hook(lambda _: optimizer.begin())
        return scale_gradient(vectors, self._scale)

    def _look_up_rows(
        self,
        group: _FeatureGroup,
        lookups: TableLookups,
        sizes: Sequence[int],
        own: Sequence[int],
        weights: Mapping[int, Tensor],
        optimizer: TableOptimizer | None,
    ) -> dict[int, Tensor]:
        """A row for each id. Rows return to the ranks that asked for them by the reverse of the indices' exchange."""
        dim = self.specs[self._tables[group.numbers[0]]].dim
        rows = []
        for place, table in enumerate(own):
            spec, asked = self.specs[table], lookups.of_tables(place, place + 1).indices
            is_sparse = optimizer is not None or spec.sparse
            rows.append(F.embedding(asked, weights[table], spec.padding_idx, sparse=is_sparse))
        if self._group.size() > 1:
            counts, world = lookups.counts, self._group.size()
            by_table = [of_table.split([of_rank[place] for of_rank in counts]) for place, of_table in enumerate(rows)]
            leaving = [by_table[place][rank] for rank in range(world) for place in range(len(own))]
            empty = torch.empty(0, dim, dtype=group.dtype, device=lookups.indices.device)
            flat = torch.cat([empty, *leaving]).flatten()
            sends = [dim * sum(of_rank) for of_rank in counts]
            receives = [
                dim * sum(sizes[number] for number in of_rank if number in group.numbers)
                for of_rank in self._placement.owned
            ]
            arrived = exchange_parts(flat, receives, sends, self._group, needs_grad=True)
            arrived = self._follow(arrived.view(-1, dim), optimizer)
            return dict(zip(group.order, arrived.split([sizes[number] for number in group.order]), strict=True))
        joined = self._follow(torch.cat(rows), optimizer)
        return dict(zip(group.order, joined.split([len(of_table) for of_table in rows]), strict=True))
