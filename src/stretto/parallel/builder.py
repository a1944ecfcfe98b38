# SPDX-License-Identifier: Apache-2.0
"""Builds the parallel counterpart of each submodule and parameter of a model, without touching the model."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace as Namespace
from typing import TYPE_CHECKING, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn

from stretto.axes import EXPERT, EXPERT_Z, SHARDS, STAGE, X_COPIES
from stretto.huggingface.experts import ExpertsKind
from stretto.memory.copy_engine import have_copy_engines
from stretto.ops.invariant import LEAVES
from stretto.parallel.comm.collectives import NO_GROUP
from stretto.parallel.comm.copy_engine_gather import CopyEngineAllGather, CopyEngineGatherer, make_scatter_ring
from stretto.parallel.comm.gradient_reducer import GradientReducer
from stretto.parallel.comm.rank_order import RankOrder
from stretto.parallel.comm.two_level import TwoLevels
from stretto.parallel.comm.weight_gathering import StepGatherer, WeightGatherer, WeightPrefetcher
from stretto.parallel.experts.module import ExpertsPlan, ParallelExperts, TokenFlow, several
from stretto.parallel.experts.products import ExpertProduct
from stretto.parallel.fused_modules import fuses
from stretto.parallel.layers.attention_backend import AttentionTuner
from stretto.parallel.layers.block_shard import BlockShard
from stretto.parallel.layers.dropout import ParallelDropout
from stretto.parallel.layers.embedding import ParallelEmbedding, ParallelPositions
from stretto.parallel.layers.gemm_layout import MatmulTuner
from stretto.parallel.layers.linear import CompressingLinear, ParallelLinear
from stretto.parallel.layers.linear_plan import LinearPlan
from stretto.parallel.layers.loss import ParallelHead, ParallelLoss
from stretto.parallel.layers.norm import ParallelNorm
from stretto.parallel.layers.sharded_module import ShardedModule
from stretto.parallel.layers.token_shards import TokenShards
from stretto.parallel.layers.weight_shard import WeightShard
from stretto.parallel.layout import ParameterLayout, Split, layout_of
from stretto.parallel.meta import MetaInitializer
from stretto.parallel.roles.plan import (
    LINEARS,
    ParameterSharding,
    Role,
    ShardingPlan,
    experts_sharding,
    gathered_sharding,
    sharding_of,
)
from stretto.parallel.sharded_parameter import shard_parameter
from stretto.parallel.state import BlockPlan, ParallelState, ShardingRequest

if TYPE_CHECKING:
    from stretto.parallel.comm.copy_engine_scatter import ScatterRing
    from stretto.parallel.fp8.weights import WeightScaling
    from stretto.parallel.pipeline.cutting import Cut


class TiedParameter(NamedTuple):
    """A parameter that the first and the last pipeline stage share.

    ends: the group of ranks that hold it; None if this rank alone does. owner, key: the first module that has it.
    """

    ends: dist.ProcessGroup | None
    owner_name: str
    owner: nn.Module
    key: str


def _finish(*tuners: MatmulTuner | AttentionTuner) -> None:
    for tuner in tuners:
        tuner.finish()


class Builder:
    """Builds each submodule's parallel counterpart, and one sharded parameter for all places that share a parameter.

    initializer: of a model on the meta device. cut: of a model whose pipeline stages are left in it, which have several
    micro-batches in flight.
    """

    def __init__(
        self,
        model: nn.Module,
        request: ShardingRequest,
        plan: ShardingPlan | BlockPlan,
        initializer: MetaInitializer | None,
        cut: "Cut | None",
    ) -> None:
        grid, options = request.grid, request.options
        has_roles, is_stage = isinstance(plan, ShardingPlan), cut is not None
        self.is_stage = is_stage
        self.model = model
        self.grid = grid
        self.precision = request.precision
        self.options = options
        self.keeps_weights = options.keeps_weights
        self.overlap = overlap = options.overlap
        self.tokens = TokenShards(grid.group("x")) if options.shard_sequence and grid.size("x") > 1 else None
        self.matmuls = MatmulTuner(options.tune_matmuls and has_roles, grid.device, grid.communicator(STAGE))
        self.is_fused = fuses(request, is_pretrained=plan.is_pretrained)
        self.attention = AttentionTuner(options.tune_matmuls and self.is_fused, grid.device, grid.communicator(STAGE))
        self.linears = 0
        over_z = grid.communicator(SHARDS)
        self.order = RankOrder(over_z, "weights and gradients over z")
        levels = TwoLevels.of(grid, options.two_level)
        self.fp8_layers, self.fp8, self.scales = request.fp8_layers, options.fp8, None
        if self.fp8_layers:
            from stretto.parallel.fp8.matrix import OperandCache
            from stretto.parallel.fp8.weights import WeightScales

            self.scales, self.operands = WeightScales(), OperandCache()
        averages = request.gradients == "mean"
        self.gradient_reducer = GradientReducer(
            grid,
            self.precision,
            overlap,
            self.order,
            levels,
            averages=averages,
            at_end=partial(_finish, self.matmuls, self.attention),
        )
        self.gradient_reducer.accumulates_unsharded = options.scatters_once
        self.gradient_reducer.loss_covers_own_rows = averages and not has_roles
        # Copy engines gather into memory that the next forward pass overwrites, and a stage has several in flight.
        by_copies = overlap.copy_engines and not is_stage and have_copy_engines(over_z, grid.device)
        self.ring = self.gradient_reducer.ring = make_scatter_ring(over_z) if by_copies else None
        self.gatherer: WeightGatherer = WeightPrefetcher(
            over_z, self.order, levels, self.scales, is_on=overlap.all_gather
        )
        if by_copies and options.keeps_weights and overlap.all_gather:
            self.gatherer = CopyEngineGatherer(CopyEngineAllGather(over_z), self.gatherer)
        if options.keeps_weights:
            self.gatherer = StepGatherer(self.gatherer)
        self.state = ParallelState(request, plan, self.gradient_reducer, self.gatherer)
        self.tied: dict[int, TiedParameter] = {} if cut is None else dict(cut.tied)
        self._made: dict[int, nn.Parameter] = {}
        # Parameters are identified by id: they must not be freed, and their ids reused, while they are replaced.
        self._originals = list(model.parameters())
        self.initializer = initializer

    def build_all(self, plan: ShardingPlan) -> dict[str, nn.Module]:
        """Build what replaces each submodule, by name. The model is not changed."""
        self.plan = plan
        originals = dict(self.model.named_modules(remove_duplicate=False))
        made: dict[int, nn.Module] = {}
        for name, role in plan.roles.items():
            original = originals[name]
            if role.role != "loss" and id(original) not in made:
                made[id(original)] = module = self._build(name, original, role).train(original.training)
                if isinstance(module, ShardedModule):
                    module.is_local = not self.is_stage and module.can_be_local(self.grid)
        built = {name: made[id(originals[name])] for name, role in plan.roles.items() if role.role != "loss"}
        head = next((built[name] for name in plan.named("head")), None)
        if isinstance(head, ParallelHead) and not plan.is_pretrained:
            built |= {name: ParallelLoss(head) for name in plan.named("loss")}
        return built

    def plain_parameter(self, name: str, role: Role) -> nn.Parameter:
        owner_name, _, key = name.rpartition(".")
        owner = self.model.get_submodule(owner_name)
        original, source = owner.get_parameter(key), self._whole(owner_name, owner)
        is_gathered = role.role == "gathered"
        sharding = gathered_sharding(original, self.grid.sizes) if is_gathered else self._sharding(name, role, key)
        return self.parameter(original, getattr(source, key), sharding)

    def shared_places(self, plan: ShardingPlan) -> list[tuple[nn.Module, str, nn.Parameter]]:
        """Find where a module without a role holds a parameter of `build_all`, under which name, and that parameter."""
        return [
            (module, key, self._made[id(parameter)])
            for name, module in self.model.named_modules()
            if name not in plan.roles
            for key, parameter in module.named_parameters(recurse=False)
            if id(parameter) in self._made
        ]

    def _whole(self, name: str, module: nn.Module) -> nn.Module | Namespace:
        """An object with the module's own parameters and buffers, as they are or are initialized."""
        return module if self.initializer is None else self.initializer.real(name, module)

    def _build(self, name: str, module: nn.Module, role: Role) -> nn.Module:
        match role.role:
            case kind if kind in LINEARS:
                return self._linear(name, module, role)
            case "embedding" | "positions":
                return self._embedding(name, module, role)
            case "norm" | "head_norm" | "inner_norm":
                return self._norm(name, module, role)
            case "experts":
                return self.experts(name, module, self.plan.experts[name])
            case _:
                assert isinstance(module, nn.Dropout)
                if role.role == "dropout":
                    return ParallelDropout(module.p, self.grid, "y", name, self._tokens_of(name))
                return ParallelDropout(module.p, self.grid, "x", name)

    def _linear(self, name: str, module: nn.Module, role: Role) -> nn.Module:
        grid, source = self.grid, self._whole(name, module)
        output_axis, input_axis = LINEARS[role.role]
        tokens = self._tokens_of(name)
        if tokens is not None and None in (output_axis, input_axis):
            raise ValueError(f"shard_sequence: {name} has the role {role.role!r}, which takes whole sequences")
        is_transposed = name in self.plan.transposed
        sharding = sharding_of(role, "weight", is_transposed=is_transposed)
        rows = next((split for split in sharding.splits if split.dim == 0 and split.axis != "z"), None)
        ring = None if role.role == "head" else self.ring  # all of its slots would be as large as a head's gradient
        in_fp8 = name in self.fp8_layers
        weight, shard = self._weight(
            module, source, sharding, rows, may_keep=self.keeps_weights, ring=ring,
            scaling=partial(self._scaling, is_transposed=is_transposed) if in_fp8 else None,
        )  # fmt: skip
        bias = None
        if module.bias is not None:
            bias = self.parameter(module.bias, source.bias, self._sharding(name, role, "bias"))  # type: ignore[arg-type]
        is_whole = None in (input_axis, output_axis)  # on one side
        plan = self._linear_plan(in_fp8)(
            name,
            shard,
            input_axis=input_axis,
            output_axis=output_axis,
            output_reduce_group=NO_GROUP if input_axis is None else grid.communicator(input_axis),
            # The gradients that "expand" returns cover its own heads; `CompressingLinear` sums them.
            input_grad_reduce_group=NO_GROUP if is_whole else grid.communicator(str(output_axis)),
            is_transposed=is_transposed,
            keeps_weights=self.keeps_weights,
            hides_all_reduce=self.overlap.all_reduce,
            matmuls=self.matmuls,
            linear_index=self.linears,
            is_rowwise=role.role == "rowwise",
            tokens=tokens,
            used_rows=self._used_rows(role),
            is_invariant=self.options.invariant,
        )
        self.linears += 1
        if role.role == "head":
            return ParallelHead(weight, bias, plan, self._first(weight.shape[0]), grid)
        if role.role == "compress":
            return CompressingLinear(weight, bias, plan, grid.communicator("x"))
        return ParallelLinear(weight, bias, plan)

    def _linear_plan(self, in_fp8: bool) -> Callable[..., LinearPlan]:
        if not in_fp8:
            return LinearPlan
        from stretto.parallel.fp8.matrix import Fp8LinearPlan

        assert self.fp8 is not None
        return partial(Fp8LinearPlan, recipe=self.fp8.recipe, cache=self.operands)

    def _expert_product(self, in_fp8: bool) -> Callable[..., ExpertProduct]:
        if not in_fp8:
            return ExpertProduct
        from stretto.parallel.fp8.experts import Fp8ExpertProduct

        assert self.fp8 is not None
        return partial(Fp8ExpertProduct, recipe=self.fp8.recipe)

    def _scaling(
        self, weight: Tensor, rows: int, group: dist.ProcessGroup, dim: int = 0, *, is_transposed: bool
    ) -> "WeightScaling":
        """The cast of a weight to fp8; if ranks gather it, it is measured with the others."""
        from stretto.parallel.fp8.weights import WeightScaling

        assert self.fp8 is not None
        assert self.scales is not None
        dtype = self.precision.compute or weight.dtype
        made = WeightScaling(self.fp8.recipe, weight, rows, group, dim, dtype, is_transposed)
        if group.size() > 1:
            self.scales.register(made)
        return made

    def _used_rows(self, role: Role) -> tuple[slice, ...]:
        """The rows that this rank uses of a unit that several ranks hold: its part, and the shared ones; () for all."""
        divided = role.unit - role.shared
        if role.copies == 1 or divided == 0:
            return ()
        part = divided // role.copies
        first = self.grid.coordinate("x") % role.copies * part
        return slice(first, first + part), slice(divided, role.unit)

    def _embedding(self, name: str, module: nn.Module, role: Role) -> nn.Module:
        assert isinstance(module, nn.Embedding)
        source, sharding = self._whole(name, module), self._sharding(name, role, "weight")
        tokens = self._tokens_of(name)
        if role.role == "positions":
            weight = self.parameter(module.weight, source.weight, sharding)  # type: ignore[arg-type]
            return ParallelPositions(weight, self.precision, module.padding_idx, self.gradient_reducer, tokens)
        how = {"may_keep": False, "ring": None, "is_table": True}
        weight, shard = self._weight(module, source, sharding, sharding.splits[0], **how)  # type: ignore[arg-type]
        first, scale = self._first(module.num_embeddings), self.plan.scales[name]
        return ParallelEmbedding(weight, first, shard, self.grid.communicator("x"), module.padding_idx, tokens, scale)

    def _norm(self, name: str, module: nn.Module, role: Role) -> nn.Module:
        source, kind = self._whole(name, module), self.plan.norms[name]
        axis = "x" if role.role == "inner_norm" else "y"
        weight, bias = (
            None
            if getattr(module, part, None) is None
            else self.parameter(getattr(module, part), getattr(source, part), self._sharding(name, role, part))
            for part in ("weight", "bias")
        )
        norm = ParallelNorm(
            weight,
            bias,
            eps=kind.eps,
            is_centred=kind.is_centred,
            weight_offset=kind.weight_offset,
            precision=self.precision,
            group=None if role.role == "head_norm" else self.grid.communicator(axis),
            gradients=self.gradient_reducer,
            name=name,
            axis=axis,
            is_fused=self.is_fused,
        )
        norm.is_invariant = self.options.invariant
        return norm

    def experts(self, name: str, module: nn.Module, kind: ExpertsKind) -> nn.Module:
        grid, source = self.grid, self._whole(name, module)
        shards = self._tokens_of(name) is not None
        is_invariant = self.options.invariant
        flow = TokenFlow.of(grid, shards_sequence=shards, drops=self.options.drop_duplicates, sums_rows=is_invariant)
        group = grid.group(EXPERT) if grid.size(EXPERT) > 1 else None
        over_y, over_z, is_cut = (
            several(grid.communicator("y")),
            grid.communicator(EXPERT_Z),
            grid.size("x") * grid.size("y") > 1,
        )
        rows, reduce = self.options.expert_rows, "choice" if is_invariant else self.options.expert_reduce
        is_first = grid.coordinate("x") == 0
        plan = ExpertsPlan(name, flow, group, over_y, is_cut, rows, reduce, is_first_of_x=is_first)
        parameters, products = {}, {}
        for part in kind.weights:
            original = module.get_parameter(part)
            sharding = experts_sharding(part, original.shape, grid.sizes, kind)
            weight = self.parameter(original, getattr(source, part), sharding)
            before_z, dim = ParameterLayout(tuple(original.shape), sharding.splits[:-1]), sharding.splits[-1].dim
            rows, here = (
                layout.local_shape(grid.layout_sizes, grid.layout_coordinates)[dim]
                for layout in (before_z, layout_of(weight))
            )
            parts = self.precision, self.gatherer, self.gradient_reducer
            in_fp8 = name in self.fp8_layers
            scaling = self._scaling(weight, rows, over_z, dim, is_transposed=kind.is_transposed) if in_fp8 else None
            shard = WeightShard(rows, here, over_z, *parts, dim=dim, scaling=scaling)
            shard.watch(weight, may_keep=self.keeps_weights and over_z.size() == 1)
            parameters[part] = weight
            if kind.has_bias:
                bias = module.get_parameter(f"{part}_bias")
                sharding = experts_sharding(f"{part}_bias", bias.shape, grid.sizes, kind)
                parameters[f"{part}_bias"] = self.parameter(bias, getattr(source, f"{part}_bias"), sharding)
            sums, feeds, leaves = (over_y, flow.sum_rows_over), None, 1
            if part == "down_proj":
                sums, feeds = (flow.sum_rows_over, over_y), plan.kept_of_output()
                leaves = LEAVES // (1 if sums[0] is None else sums[0].size())
            products[part] = self._expert_product(in_fp8)(
                shard,
                *sums,
                self.keeps_weights,
                self.overlap.all_reduce,
                feeds,
                is_transposed=kind.is_transposed,
                leaves=leaves if is_invariant else None,
            )
        return ParallelExperts(module, kind, parameters, plan, products)

    def _tokens_of(self, name: str) -> TokenShards | None:
        """The division of tokens that a submodule sees; None if it sees all of them."""
        return self.tokens if self.tokens is not None and self.plan.sees_part_of_tokens(name) else None

    def _sharding(self, name: str, role: Role, part: str) -> ParameterSharding:
        """The sharding of the role of the submodule `name`. With sequence sharding, one used on this rank's tokens is
        also summed over x."""
        sharding = sharding_of(role, part)
        is_of_tokens = role.role in ("norm", "positions", "router") or (role.role == "rowwise" and part == "bias")
        if is_of_tokens and self._tokens_of(name) is not None:
            return dataclasses.replace(sharding, sum_axes=(*sharding.sum_axes, "x"))
        return sharding

    def _weight(
        self,
        module: nn.Module,
        source: nn.Module | Namespace,
        sharding: ParameterSharding,
        rows: Split | None,
        *,
        may_keep: bool,
        ring: "ScatterRing | None",
        scaling: "Callable[..., WeightScaling] | None" = None,
        is_table: bool = False,
    ) -> tuple[nn.Parameter, WeightShard]:
        """The sharded weight, and how it is gathered over z: `rows` is the split of dim 0 that z splits further,
        if there is one.

        may_keep, is_table: as in `WeightShard.watch`. ring: reduce-scatters its gradient by copy engines, if it is not
        None. scaling: makes the scaling of one in fp8.
        """
        grid, original = self.grid, module.weight
        assert isinstance(original, nn.Parameter)
        weight = self.parameter(original, source.weight, sharding)  # type: ignore[arg-type]
        place = grid.layout_sizes, grid.layout_coordinates
        before_z = ParameterLayout(tuple(original.shape), () if rows is None else (rows,)).local_shape(*place)[0]
        local_rows = layout_of(weight).local_shape(*place)[0]
        over_z = grid.communicator(SHARDS)
        parts = self.precision, self.gatherer, self.gradient_reducer, ring
        found = None if scaling is None else scaling(weight, before_z, over_z)
        shard = WeightShard(before_z, local_rows, over_z, *parts, scaling=found)
        shard.watch(weight, may_keep=may_keep, is_table=is_table)
        return weight, shard

    def parameter(self, original: nn.Parameter, whole: Tensor, sharding: ParameterSharding) -> nn.Parameter:
        """The sharded parameter that replaces the original in all of its places; created at the first call."""
        if id(original) not in self._made:
            tied = self.tied.get(id(original))
            ends = None if tied is None else tied.ends
            if tied is not None and original.is_meta:  # both ends initialize it as the module that comes first does
                whole = getattr(self._whole(tied.owner_name, tied.owner), tied.key)
            layout = ParameterLayout(tuple(original.shape), sharding.splits, 1 if ends is None else ends.size())
            parameter = shard_parameter(whole, layout, self.grid, requires_grad=original.requires_grad)
            others = () if ends is None else (ends,)
            if layout.copies > 1:  # each of them has the gradient of the queries that it has
                others = (*others, self.grid.copies_mesh(layout.copies).get_group(X_COPIES))
            scattered_over = self.grid.layout_sizes[sharding.splits[-1].axis] if sharding.is_weight else None
            self.gradient_reducer.watch(parameter, sharding.sum_axes, scattered_over=scattered_over, others=others)
            self._made[id(original)] = parameter
        return self._made[id(original)]

    def block_shard(self, name: str, places: Sequence[tuple[nn.Module, str]], *, frees: bool) -> BlockShard:
        """The gatherer of the parameters in these places, all together, for the forward pass of the module
        `name`."""
        gatherer, gradients = self.gatherer, self.gradient_reducer
        group = self.grid.communicator(SHARDS)
        return BlockShard(name, places, group, self.precision, gatherer, gradients, frees=frees)

    def _first(self, vocab: int) -> int:
        """The first row of the vocabulary on this x rank."""
        return -(-vocab // self.grid.size("x")) * self.grid.coordinate("x")

    def buffers(self) -> list[tuple[nn.Module, str, Tensor]]:
        """Each module's buffers, on the device; those on the meta device as the model initializes them."""
        found = []
        for name, module in self.model.named_modules():
            own = dict(module.named_buffers(recurse=False))
            source = self._whole(name, module) if any(buffer.is_meta for buffer in own.values()) else module
            found += [(module, key, getattr(source, key).to(self.grid.device)) for key in own]
        return found
