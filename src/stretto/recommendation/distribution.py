# SPDX-License-Identifier: Apache-2.0
"""`distribute_embeddings`: ranks share out the embedding tables of any model, and `parallelize` takes the rest."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar
from weakref import ref

from torch import nn

from stretto.parallel import parallelize
from stretto.parallel.comm.users_hooks import refuse_optimizers_of
from stretto.parallel.grid import GradientReduction, Grid
from stretto.parallel.meta import MetaInitializer
from stretto.quantities import to_whole
from stretto.recommendation.embedding_collections import (
    DistributedEmbedding,
    DistributedEmbeddingBag,
    EmbeddingBagCollection,
    EmbeddingCollection,
    EmbeddingTable,
    TableModule,
    describe_tables,
)
from stretto.recommendation.placement import ShardingKind, TableSize, place_tables
from stretto.recommendation.pooled_exchange import Implementation
from stretto.recommendation.table_exchange import TableExchange, TableSpec
from stretto.suggestions import did_you_mean, require_type

Model = TypeVar("Model", bound=nn.Module)


def distribute_embeddings(
    model: Model,
    grid: Grid,
    *,
    modules: Sequence[str] | None = None,
    owners: Mapping[str, int | Sequence[int]] | None = None,
    kinds: Mapping[str, ShardingKind] | None = None,
    pooling: Mapping[str, float] | None = None,
    implementation: Implementation = "auto",
    gradients: GradientReduction = "mean",
    sparse: bool | None = None,
    seed: int | None = 0,
    **options: Any,
) -> Model:
    """Distribute the embedding tables of a model over the ranks of data and z, and `parallelize` all else, in place.

    What is replaced, wherever it is in the model: EmbeddingBagCollection and EmbeddingCollection of torchrec and of
    `stretto.recommendation`, nn.EmbeddingBag, and nn.Embedding. Parameters keep their names, and each table is on one
    rank. The modules take and return what they did before, of this rank's samples; all ranks have equally many. Tables
    get the gradients of the global batch: of the mean of the losses that the ranks compute, or, with gradients="sum",
    of their sum. Collective, as are the calls of the model.

    modules: names of the modules to replace (default: all of these kinds). owners: the rank of each table, by the
    table's name in its collection, or the module's in the model (default: `place_tables`). kinds: by such names, tables
    of an EmbeddingBagCollection that are cut, by "row" or "column", in equal parts: over the ranks that `owners` lists,
    or over all; the results are those of whole tables, up to rounding. pooling: the mean number of
    ids in a bag, by such names, for which tables are placed. implementation: "kernel" pools by
    `stretto.ops.embedding_all_to_all`, "library" by PyTorch's functions, "auto" by the kernel on GPUs where it takes
    dtype and dim; rows that are not pooled go by PyTorch's functions. sparse: whether tables get sparse gradients
    (None: as the module has it; TorchRec's collections have dense ones). seed: of a model (or tables) on the meta
    device, of which each rank allocates its own tables only: the same weights on every grid. options: further ones of
    `parallelize`.

    Returns the model (a new module if the model itself is one of the modules). Raises ValueError where there is nothing
    to replace, for options of an embedding that are not supported, for tables that other modules share, for axes other
    than data and z, and for what `parallelize` refuses; the model is then unchanged.
    """
    require_type(model, nn.Module, "model")
    require_type(grid, Grid, "grid")
    for axis in ("x", "y", "context", "pipe"):
        if grid.size(axis) > 1:
            raise ValueError(
                f"{grid} has {axis}={grid.size(axis)}, but tables are distributed over data and z: choose {axis}=1"
            )
    found = _find_modules(model, modules)
    specs = {name: _describe(name, module) for name, module in found.items()}
    if sparse is not None:
        specs = {name: [spec._replace(sparse=sparse) for spec in of_module] for name, of_module in specs.items()}
    _refuse_shared(model, found)
    group = grid.group("batch")
    ranks = _place(specs, owners, kinds or {}, pooling, group.size())
    exchanges = {
        name: TableExchange(
            specs[name], ranks[name], group, grid.device,
            kinds=[(kinds or {}).get(spec.name, "table") for spec in specs[name]], implementation=implementation,
            averages=gradients == "mean", name=f"{name} of {type(model).__name__}",
        )
        for name in found
    }  # fmt: skip
    initializer = MetaInitializer(model, grid.device, seed)
    made = {}
    for name, module in found.items():
        own = {}  # this rank's tables, on the grid's device
        for number, spec in enumerate(specs[name]):
            if group.rank() not in ranks[name][number]:
                continue
            inner = spec.key.rpartition(".")[0]
            holder, weight = module.get_submodule(inner), module.get_parameter(spec.key)
            if weight.is_meta and spec.init is not None and not isinstance(holder, EmbeddingTable):  # TorchRec's
                holder = EmbeddingTable(weight, spec.init)
            real: Any = initializer.real(".".join(filter(None, (name, inner))), holder)
            whole = real.weight.detach().to(grid.device)
            shard = exchanges[name].find_shard(number)
            is_cut = whole.shape != (shard.rows, shard.columns)
            if is_cut:  # in memory of its own
                whole = whole[shard.row : shard.row + shard.rows, shard.column : shard.column + shard.columns].clone()
            own[number] = EmbeddingTable(whole.contiguous().requires_grad_(weight.requires_grad), spec.init)
            if is_cut:
                own[number].shape, own[number].offsets = (spec.rows, spec.dim), (shard.row, shard.column)
            own[number].reduces_own_gradients = True
        made[name] = _kind_of(module).distributed(module, exchanges[name], own).train(module.training)  # type: ignore[union-attr]
    tables = [ref(table) for module in found.values() for table in module.parameters()]
    if "" in found:
        refuse_optimizers_of(tables, made[""].parameters())
        return made[""]
    empty = {name: nn.Module() for name in found}  # while the rest is parallelized
    _replace(model, {id(found[name]): empty[name] for name in found})
    try:
        if any(True for _ in model.parameters()):
            parallelize(model, grid, gradients=gradients, seed=seed, **options)
    except BaseException:
        _replace(model, {id(empty[name]): found[name] for name in found})
        raise
    _replace(model, {id(empty[name]): made[name] for name in found})
    refuse_optimizers_of(tables, model.parameters())
    return model


def _kind_of(module: nn.Module) -> Any | None:
    """The class of what takes the place of a module; None for a module that stays. TorchRec's are known by methods."""
    if isinstance(module, TableModule) and module.is_distributed:
        return None
    if hasattr(module, "embedding_bag_configs") and isinstance(getattr(module, "embedding_bags", None), nn.ModuleDict):
        return EmbeddingBagCollection
    if hasattr(module, "embedding_configs") and isinstance(getattr(module, "embeddings", None), nn.ModuleDict):
        return EmbeddingCollection
    return {nn.EmbeddingBag: DistributedEmbeddingBag, nn.Embedding: DistributedEmbedding}.get(type(module))


def _find_modules(model: nn.Module, names: Sequence[str] | None) -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if _kind_of(module) and not any(name.startswith(f"{outer}." if outer else "") for outer in found):
            found[name] = module
    for name in names or ():
        if name not in found:
            near = did_you_mean(name, found) or f": they are {', '.join(found) or 'none'}"
            raise ValueError(f"no module with embeddings is named {name!r}{near}")
    found = {name: module for name, module in found.items() if names is None or name in names}
    if not found:
        if any(isinstance(module, TableModule) and module.is_distributed for module in model.modules()):
            raise ValueError(f"the tables of this {type(model).__name__} are distributed already: once is enough")
        raise ValueError(
            f"{type(model).__name__} has no EmbeddingBagCollection, EmbeddingCollection, nn.EmbeddingBag or "
            "nn.Embedding to distribute: stretto.parallelize takes it"
        )
    return found


def _describe(name: str, module: Any) -> list[TableSpec]:
    kind = _kind_of(module)
    if hasattr(module, "fused_optimizer"):
        raise ValueError(
            f"{name or 'the model'} is a {type(module).__name__}, whose optimizer would be left out: distribute an "
            "EmbeddingBagCollection or EmbeddingCollection, and call its fuse_update"
        )
    if kind is EmbeddingBagCollection:
        return describe_tables(module.embedding_bags, module.embedding_bag_configs(), "embedding_bags")
    if kind is EmbeddingCollection:
        return describe_tables(module.embeddings, module.embedding_configs(), "embeddings")
    mode = getattr(module, "mode", None)
    unsupported = ["max_norm", "scale_grad_by_freq", *(["padding_idx"] if mode else [])]
    for option in unsupported:
        if (value := getattr(module, option)) not in (None, False):
            raise ValueError(f"{name} has {option}={value}, which is not supported by tables on several ranks")
    if mode == "max":
        raise ValueError(f"{name} has mode='max', but tables on several ranks take 'sum' or 'mean'")
    rows, dim = module.weight.shape
    dtype, padding = module.weight.dtype, module.padding_idx
    return [TableSpec(name, "weight", rows, dim, dtype, mode, ("",), module.sparse, padding)]


def _refuse_shared(model: nn.Module, found: Mapping[str, nn.Module]) -> None:
    """ValueError for a table that is also a parameter of another module, and for one with an optimizer or hooks."""
    holders: dict[int, set[int]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            holders.setdefault(id(parameter), set()).add(id(module))
    for name, module in found.items():
        for key, parameter in module.named_parameters(prefix=name):
            if len(holders[id(parameter)]) > 1:
                raise ValueError(f"{key} is a parameter of other modules, too: leave {name} out of modules=")
            if hasattr(parameter, "_optimizer_classes"):  # of torch's function and of TorchRec's
                raise ValueError(
                    f"{key} was given to apply_optimizer_in_backward, whose update would be left out: call "
                    "fuse_update of the module that distribute_embeddings makes instead"
                )
            if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
                raise ValueError(
                    f"{key} has hooks, and another parameter takes its place: register them after distribute_embeddings"
                )


def _place(
    specs: Mapping[str, Sequence[TableSpec]],
    owners: Mapping[str, int | Sequence[int]] | None,
    kinds: Mapping[str, ShardingKind],
    pooling: Mapping[str, float] | None,
    ranks: int,
) -> dict[str, list[list[int]]]:
    """The ranks of each table of each module."""
    tables = [spec for of_module in specs.values() for spec in of_module]
    known = {spec.name for spec in tables}
    for argument, given in (("owners", owners), ("kinds", kinds), ("pooling", pooling)):
        for table in given or {}:
            if table not in known:
                near = did_you_mean(table, known) or f": they are {', '.join(known)}"
                raise ValueError(f"{argument}: no table is named {table!r}{near}")
    if owners is None:
        sizes = [
            TableSize(spec.rows, spec.dim, (pooling or {}).get(spec.name, 1.0) * len(spec.features)) for spec in tables
        ]
        placement = place_tables(sizes, ranks)
        every = [*range(ranks)]
        chosen = [
            every if kinds.get(spec.name, "table") != "table" else [placement.owner(number)]
            for number, spec in enumerate(tables)
        ]
    else:
        if missing := known - {*owners}:
            raise ValueError(
                f"owners has no rank for table {sorted(missing)[0]!r}: give each table one, or leave owners out"
            )
        given = {table: to_whole(of_table) for table, of_table in owners.items()}
        listed = {table: [some] if isinstance(some, int) else sorted(some) for table, some in given.items()}
        for table, found in listed.items():
            for rank in found:
                if not 0 <= rank < ranks:
                    raise ValueError(f"owners: table {table!r} is on rank {rank}, but ranks are 0 to {ranks - 1}")
            if len(found) != 1 and (not found or kinds.get(table, "table") == "table"):
                raise ValueError(
                    f"owners: table {table!r} is on ranks {found}, but whole on one: kinds={{{table!r}: 'row'}} would "
                    "cut it"
                )
        chosen = [listed[spec.name] for spec in tables]
    left = iter(chosen)
    return {name: [next(left) for _ in of_module] for name, of_module in specs.items()}


def _replace(model: nn.Module, new: Mapping[int, nn.Module]) -> None:
    """Put other modules in the place of submodules, by the ids of these, under all of their names."""
    for parent in [*model.modules()]:
        for key, child in parent._modules.items():
            if id(child) in new:
                parent._modules[key] = new[id(child)]
