# SPDX-License-Identifier: Apache-2.0
"""Modules with embedding tables: collections with the names, arguments and results of TorchRec's, and torch's own.

`EmbeddingBagCollection` pools the rows of each feature's bags; `EmbeddingCollection` returns a row for each id. They
have all of their tables at first; `distribute_embeddings` puts one in their place that has this rank's.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from stretto.optim.row_update import RowOptimizer
from stretto.recommendation.index_exchange import IndexExchange
from stretto.recommendation.jagged import FeatureBags, result_type
from stretto.recommendation.placement import TableShard
from stretto.recommendation.pooled_exchange import PoolingMode, refuse_conversion
from stretto.recommendation.table_exchange import TableExchange, TableSpec
from stretto.recommendation.table_optimizer import TableOptimizer
from stretto.recommendation.table_state import TensorBox
from stretto.suggestions import require_type


class PoolingType(Enum):
    """The way in which the rows of a bag become one vector."""

    SUM = "SUM"
    MEAN = "MEAN"


class DataType(Enum):
    """The dtype of a table."""

    FP32 = "FP32"
    FP16 = "FP16"
    BF16 = "BF16"


_MODES: dict[str | None, PoolingMode | None] = {"SUM": "sum", "MEAN": "mean", None: None}
_DTYPES = {"FP32": torch.float32, "FP16": torch.float16, "BF16": torch.bfloat16}


@dataclass
class EmbeddingConfig:
    """A table of an `EmbeddingCollection`.

    feature_names: the features that are looked up in it (default: one of the table's name). weight_init_min,
    weight_init_max: rows start uniformly distributed between them (default: -+1 / sqrt(num_embeddings)); or init_fn,
    which fills the weight.
    """

    num_embeddings: int
    embedding_dim: int
    name: str = ""
    data_type: DataType = DataType.FP32
    feature_names: list[str] = field(default_factory=list)
    weight_init_max: float | None = None
    weight_init_min: float | None = None
    init_fn: Callable[[Tensor], Any] | None = None

    def __post_init__(self) -> None:
        if self.num_embeddings < 1 or self.embedding_dim < 1:
            raise ValueError(
                f"table {self.name!r} is {self.num_embeddings} x {self.embedding_dim}, but has at least one row of at "
                "least one number"
            )
        if self.init_fn is None:
            bound = self.num_embeddings**-0.5
            low = -bound if self.weight_init_min is None else self.weight_init_min
            self.init_fn = partial(
                nn.init.uniform_, a=low, b=bound if self.weight_init_max is None else self.weight_init_max
            )


@dataclass
class EmbeddingBagConfig(EmbeddingConfig):
    """A table of an `EmbeddingBagCollection`."""

    pooling: PoolingType = PoolingType.SUM


class EmbeddingTable(nn.Module):
    """A table's weight. init: fills it (`reset_parameters`).

    shape, offsets: of a table that is cut, the whole's, and where this part begins; its state dicts then have a
    `TensorBox`, and take that or the whole table.
    """

    reduces_own_gradients = False  # read by stretto.parallel.forward_passes; True for tables that ranks share out
    shape: tuple[int, ...] | None = None
    offsets: tuple[int, ...] = ()

    def __init__(self, weight: Tensor, init: Callable[[Tensor], Any] | None = None) -> None:
        super().__init__()
        self.weight, self.init = nn.Parameter(weight, weight.requires_grad), init

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.shape is not None:
            destination[f"{prefix}weight"] = TensorBox(self.weight.detach(), self.shape, self.offsets)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        key = f"{prefix}weight"
        given = state_dict.get(key)
        if isinstance(given, TensorBox):
            state_dict[key] = given.held
        elif given is not None and self.shape is not None and given.shape == self.shape:
            for dim, (start, size) in enumerate(zip(self.offsets, self.weight.shape, strict=True)):
                state_dict[key] = state_dict[key].narrow(dim, start, size)
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def reset_parameters(self) -> None:
        """Fill the weight, unless it is on the meta device."""
        if self.init is not None and not self.weight.is_meta:
            with torch.no_grad():
                self.init(self.weight)


def embedding_names(specs: Sequence[TableSpec]) -> list[str]:
    """The names of the outputs, table after table: the feature's, or "feature@table" where several tables have it."""
    features = [feature for spec in specs for feature in spec.features]
    return [
        f"{feature}@{spec.name}" if features.count(feature) > 1 else feature
        for spec in specs
        for feature in spec.features
    ]


def describe_tables(modules: Mapping[str, nn.Module], configs: Iterable[Any], attribute: str) -> list[TableSpec]:
    """The tables of a collection, ours or TorchRec's. attribute: that has their modules."""
    specs = []
    for config in configs:
        if getattr(config, "use_virtual_table", False):
            raise ValueError(
                f"table {config.name!r} has use_virtual_table=True: only tables of a fixed size are supported"
            )
        pooling = getattr(getattr(config, "pooling", None), "value", None)
        if pooling not in _MODES:
            raise ValueError(f"table {config.name!r} has pooling {pooling}, but must have SUM or MEAN")
        module = modules[config.name]
        weight = module.get_parameter("weight")
        rows, dim = weight.shape
        specs.append(
            TableSpec(
                config.name,
                f"{attribute}.{config.name}.weight",
                rows,
                dim,
                weight.dtype,
                _MODES[pooling],
                tuple(config.feature_names or [config.name]),
                getattr(module, "sparse", False),
                init=config.init_fn,
            )
        )
    return specs


def _widen(values: Tensor) -> Tensor:
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


class CollectionOptimizer(torch.optim.Optimizer):
    """Updates this rank's tables of a module in the backward pass; made by `fuse_update`.

    A torch optimizer, for schedulers: all that `step` and `zero_grad` do is pass the learning rate of `param_groups` on
    to the next backward passes. parts: the optimizers of the tables of a dtype and pooling.
    """

    def __init__(self, parts: Sequence[TableOptimizer]) -> None:
        self.parts = tuple(parts)
        super().__init__([{"params": [weight for part in parts for weight in part.weights]}], {"lr": parts[0].lr})

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of the next updates; a table's is this times its factor."""
        self.param_groups[0]["lr"] = lr
        for part in self.parts:
            part.set_lr(lr)

    @property
    def _step_supports_amp_scaling(self) -> bool:  # GradScaler.step asks
        raise ValueError(
            "a GradScaler's loss has updated these tables by scaled gradients, in the backward pass: train them in "
            "bf16, without a scaler, or without fuse_update"
        )

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take over the learning rate: the update was made in the backward pass."""
        if self.param_groups[0]["lr"] != self.parts[0].lr:
            self.set_lr(self.param_groups[0]["lr"])

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Take over the learning rate: there are no gradients."""
        self.step()


class TableModule(nn.Module):
    """A module with tables, of which this rank may have some; their weights are under the keys of their specs.

    A state dict has this rank's tables; one with all tables can be loaded.
    """

    _exchange: TableExchange

    @classmethod
    def distributed(cls, original: Any, exchange: TableExchange, own: Mapping[int, EmbeddingTable]) -> Self:
        """The module in place of another one, torch's, TorchRec's or ours, with this rank's tables."""
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made._take_options(original)
        return made.hold(exchange, own)

    def _take_options(self, original: Any) -> None:
        """Take what else the other module has."""

    def hold(self, exchange: TableExchange, own: Mapping[int, EmbeddingTable]) -> Self:
        """Take what looks up, and this rank's tables, by their numbers."""
        self._exchange, self._own = exchange, [*own]
        for number, table in own.items():
            attribute, _, name = exchange.specs[number].key.removesuffix("weight").strip(".").partition(".")
            if not attribute:
                self.weight, self.reduces_own_gradients = table.weight, table.reduces_own_gradients
                continue
            if attribute not in self._modules:
                self.add_module(attribute, nn.ModuleDict())
            self.get_submodule(attribute).add_module(name, table)
        return self

    @property
    def is_distributed(self) -> bool:
        """True if `distribute_embeddings` has made it."""
        return self._exchange.is_distributed

    @property
    def is_fused(self) -> bool:
        """True if the operator of stretto.ops pools all tables."""
        return self._exchange.is_fused

    def fuse_update(
        self, kind: RowOptimizer = "rowwise-adagrad", *, lr_factors: Mapping[str, float] | None = None, **options: Any
    ) -> "CollectionOptimizer":
        """From now on backward passes update the tables, which keep no gradients. Call it once, on all ranks.

        kind and options are those of `ShardedTables.fuse_update`; lr_factors: by the tables' names. Returns the
        optimizer, whose `set_lr(lr)` changes the learning rate of later backward passes; torch's schedulers take it.
        Tables that are frozen stay as they are, with their states; they may be frozen and thawed at any time.
        """
        return CollectionOptimizer(self._exchange.fuse_update(kind, self._weights(), lr_factors or {}, **options))

    def boxes(self) -> Iterator[tuple[str, tuple[int, int], TableShard | None, dict[str, Tensor]]]:
        """This rank's tables and the states of their optimizer, for checkpoints (`TableExchange.boxes`)."""
        return self._exchange.boxes(self._weights())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        if self.is_distributed:
            refuse_conversion(fn, {spec.dtype for spec in self._exchange.specs}, self._exchange.device)
        return super()._apply(fn, recurse)

    def _weights(self) -> dict[int, nn.Parameter]:
        return {number: self.get_parameter(self._exchange.specs[number].key) for number in self._own}

    def _look_up(self, bags: FeatureBags) -> list[Tensor]:
        # No `get_parameter`: `parallelize` has modules hold plain tensors while they run.
        paths = {number: self._exchange.specs[number].key.rpartition(".")[0] for number in self._own}
        weights: dict[int, Any] = {number: self.get_submodule(path).weight for number, path in paths.items()}
        return self._exchange.look_up(bags, weights)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        """Load as `nn.Module` does, and pass over the tables of other ranks."""
        errors: list[str] = arguments[-1]
        for number, spec in enumerate(self._exchange.specs):
            found = None if number in self._own else state_dict.pop(prefix + spec.key, None)
            if found is not None and found.shape != (spec.rows, spec.dim):
                errors.append(f"{prefix}{spec.key} is {[*found.shape]}, but the model's is {[spec.rows, spec.dim]}")
        super()._load_from_state_dict(state_dict, prefix, *arguments)


class _Collection(TableModule):
    """Tables by name, in the attribute `attribute`."""

    attribute: str

    def __init__(self, tables: Sequence[EmbeddingConfig], device: torch.device | None) -> None:
        super().__init__()
        if not tables:
            raise ValueError(f"{type(self).__name__} has no tables: give it at least one")
        made: dict[str, nn.Module] = {}
        for config in tables:
            if config.name in made:
                raise ValueError(f"two tables are named {config.name!r}: give each another name")
            if not config.name or "." in config.name or hasattr(nn.ModuleDict, config.name):
                raise ValueError(
                    f"no table can be named {config.name!r}: a name has no dot, is not empty, and is no attribute of a "
                    "module, such as 'items'"
                )
            config.feature_names = config.feature_names or [config.name]
            shape = config.num_embeddings, config.embedding_dim
            weight = torch.empty(shape, dtype=_DTYPES[config.data_type.value], device=device).requires_grad_()
            made[config.name] = table = EmbeddingTable(weight, config.init_fn)
            table.reset_parameters()
        self._configs: list[Any] = list(tables)
        self.hold(TableExchange(describe_tables(made, tables, self.attribute)), dict(enumerate(made.values())))  # type: ignore[arg-type]

    def send_ahead(self, features: Any, refused: Exception | None = None) -> IndexExchange:
        """Begin to exchange the ids of a later call with these very features (`prefetch_embeddings`). Collective.

        refused: why this rank has no features, of which the exchange notifies the others.
        """
        is_weighted = isinstance(self, EmbeddingBagCollection) and self.is_weighted()
        return self._exchange.send_ahead(features, refused, is_weighted=is_weighted)

    def was_left(self, exchange: IndexExchange) -> bool:
        """True if no call has taken what was sent ahead."""
        return any(other is exchange for *_, other in self._exchange.ahead)

    def drop_ahead(self) -> None:
        """Forget what was sent ahead."""
        self._exchange.ahead.clear()

    @property
    def device(self) -> torch.device:
        """The tables' device."""
        return next(self.parameters()).device


class EmbeddingBagCollection(_Collection):
    """Tables whose rows are pooled, bag by bag: TorchRec's module of this name, in plain PyTorch.

    `collection(features)`: a KeyedJaggedTensor with the tables' features, of any keys in any order. Returns a
    KeyedTensor [batch, sum of the features' dims] in order of table, then feature; an empty bag gives zeros. Names are
    the features', or "feature@table" for a feature of several tables. is_weighted: rows are multiplied by the features'
    weights, which get gradients. The state dict has `embedding_bags.<table>.weight`.

    ValueError for tables of one name, for features that the input lacks, and on a CPU for ids out of range.
    """

    attribute = "embedding_bags"

    def __init__(
        self, tables: Sequence[EmbeddingBagConfig], is_weighted: bool = False, device: torch.device | None = None
    ) -> None:
        super().__init__(tables, device)
        self._is_weighted = is_weighted

    def _take_options(self, original: Any) -> None:
        self._configs, self._is_weighted = original.embedding_bag_configs(), original.is_weighted()

    def is_weighted(self) -> bool:
        """True if rows are multiplied by weights."""
        return self._is_weighted

    def embedding_bag_configs(self) -> list[Any]:
        """The tables' configs."""
        return self._configs

    def forward(self, features: Any) -> Any:
        specs = self._exchange.specs
        bags = self._exchange.select(features, is_weighted=self._is_weighted)
        widths = [spec.dim for spec in specs for _ in spec.features]
        pooled = torch.cat([*map(_widen, self._look_up(bags))], dim=1)
        return result_type(features, "KeyedTensor")(embedding_names(specs), widths, pooled)


class EmbeddingCollection(_Collection):
    """Tables of which each id gives a row: TorchRec's module of this name, in plain PyTorch.

    `collection(features)`: a KeyedJaggedTensor with the tables' features. Returns a dict of JaggedTensors, whose values
    are [ids of the feature, dim]; their weights are the ids if need_indices=True. The state dict has
    `embeddings.<table>.weight`. All tables have one dim.
    """

    attribute = "embeddings"

    def __init__(
        self, tables: Sequence[EmbeddingConfig], device: torch.device | None = None, need_indices: bool = False
    ) -> None:
        for config in tables:
            if config.embedding_dim != tables[0].embedding_dim:
                raise ValueError(
                    f"table {config.name!r} has dim {config.embedding_dim} and {tables[0].name!r} "
                    f"{tables[0].embedding_dim}: all tables of an EmbeddingCollection have one"
                )
        super().__init__(tables, device)
        self._need_indices = need_indices

    def _take_options(self, original: Any) -> None:
        self._configs, self._need_indices = original.embedding_configs(), original.need_indices()

    def need_indices(self) -> bool:
        """True if outputs have their ids as weights."""
        return self._need_indices

    def embedding_configs(self) -> list[Any]:
        """The tables' configs."""
        return self._configs

    def embedding_dim(self) -> int:
        """The tables' dim."""
        return self._configs[0].embedding_dim

    def forward(self, features: Any) -> dict[str, Any]:
        specs = self._exchange.specs
        rows = self._look_up(self._exchange.select(features))
        given, kind = features.to_dict(), result_type(features, "JaggedTensor")
        inputs = [given[feature] for spec in specs for feature in spec.features]
        return {
            name: kind(
                values=_widen(values), lengths=ids.lengths(), weights=ids.values() if self._need_indices else None
            )
            for name, ids, values in zip(embedding_names(specs), inputs, rows, strict=True)
        }


class DistributedEmbeddingBag(TableModule):
    """An nn.EmbeddingBag, whose table is on one rank."""

    include_last_offset: bool

    def _take_options(self, original: nn.EmbeddingBag) -> None:
        self.include_last_offset = original.include_last_offset

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        return self._look_up(self._exchange.make_bags(lambda: self._cut(input, offsets, per_sample_weights)))[0]

    def _cut(self, input: Tensor, offsets: Tensor | None, per_sample_weights: Tensor | None) -> FeatureBags:
        require_type(input, Tensor, "input")
        if (input.dim() == 2) != (offsets is None):
            raise ValueError("input [bags, ids of each] takes no offsets, and input [ids] takes them: where bags begin")
        if offsets is None:
            offsets = torch.arange(len(input) + 1, device="cpu") * input.shape[1]
        elif not self.include_last_offset:
            offsets = torch.cat([offsets, offsets.new_full((1,), len(input))])
        weights = None if per_sample_weights is None else per_sample_weights.flatten()
        return FeatureBags(input.flatten(), offsets, weights, len(offsets) - 1)


class DistributedEmbedding(TableModule):
    """An nn.Embedding, whose table is on one rank."""

    def forward(self, input: Tensor) -> Tensor:
        rows = self._look_up(self._exchange.make_bags(lambda: self._cut(input)))[0]
        return rows.view(*input.shape, rows.shape[1])

    def _cut(self, input: Tensor) -> FeatureBags:
        require_type(input, Tensor, "input")
        # One bag of all ids, so that ranks may have unequally many.
        ends = torch.tensor([0, input.numel()], device="cpu")
        return FeatureBags(input.flatten(), ends, None, 1)
