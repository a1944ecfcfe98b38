# SPDX-License-Identifier: Apache-2.0
"""The experts of a mixture of experts on a grid: tensor, expert and data parallelism together (TED; Singh, chapter 7).

The axis `expert` divides the experts, so that tokens are sent to their experts' ranks and back (all-to-alls over
expert). x cuts each expert's inner features, y the hidden ones, as of any other MLP, and the weights' shards are
gathered over what expert leaves of z. All ranks of x have the same tokens. What becomes of them (`TokenFlow.of`):

    dropped     Each rank of x sends its part of them to the experts; there rows are gathered over x, and products
                summed by a reduce-scatter (duplicate token dropping, section 7.3.1). At last outputs are gathered over
                x.
    repeated    Each rank of x sends all, and products are summed by an all-reduce (TED without dropping).
    here        No token travels, for one rank has all experts; what x sums are tokens, of which there are fewer.
    distinct    Each rank of x has its own tokens (sequence sharding): as dropped, without the first and the last step.
    folded      The ranks of x are among those of expert: each sends its part to whole experts.

The gradient of the hidden features and of the experts' weights is complete, and equal, on ranks that have the same.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stretto.axes import EXPERT
from stretto.execution import ExpertReduce
from stretto.huggingface.experts import ExpertsKind
from stretto.ops.moe import combine, combine_few, dispatch, dispatch_few, gated_activation, grouped_matmul
from stretto.ops.moe.activation import has_hooks, is_silu
from stretto.ops.moe.places import find_places
from stretto.parallel.comm.autograd import scale_gradient, sum_gradient
from stretto.parallel.comm.collectives import all_reduce, mark_experts
from stretto.parallel.comm.graph_functions import GraphCode
from stretto.parallel.experts.products import (
    KEPT_AS,
    AddBias,
    CopyRows,
    ExpertProduct,
    MultiplyRows,
    MultiplyTokens,
    PendingTokens,
    SendTokens,
    SumRows,
    SumTokens,
    keep_collective,
)
from stretto.parallel.experts.replicas import ExpertReplicas
from stretto.parallel.grid import Grid
from stretto.parallel.layers.local_tensors import TakeGradient
from stretto.parallel.layers.sharded_module import ShardedModule, check_features, note_features
from stretto.parallel.layers.token_shards import cut_tokens, gather_tokens, own_tokens
from stretto.parallel.layout import local


@dataclass(frozen=True)
class TokenFlow:
    """Paths of the tokens that all ranks of x have. Groups are None where they would have one rank.

    cut_over: the ranks of x, each of which takes its part of the tokens. gather_over: over them rows are gathered after
    the all-to-all, and scattered before the one back. sum_rows_over, sum_tokens_over: they sum products, before or
    after they are tokens' again.
    """

    cut_over: dist.ProcessGroup | None = None
    gather_over: dist.ProcessGroup | None = None
    sum_rows_over: dist.ProcessGroup | None = None
    sum_tokens_over: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, grid: Grid, *, shards_sequence: bool, drops: bool, sums_rows: bool = False) -> "TokenFlow":
        """shards_sequence: ranks of x have different tokens. drops: whether duplicates are dropped. sums_rows: each
        expert's output is whole before a token's are summed."""
        x = several(grid.communicator("x"))
        if grid.expert_tensor == "fold":
            return cls(cut_over=None if shards_sequence else x)
        if shards_sequence:
            return cls(gather_over=x)
        if sums_rows:
            return cls(sum_rows_over=x)
        if grid.size(EXPERT) == 1:
            return cls(sum_tokens_over=x)
        return cls(cut_over=x, gather_over=x) if drops else cls(sum_rows_over=x)


def several(group: dist.ProcessGroup) -> dist.ProcessGroup | None:
    """The group; None if it has one rank."""
    return group if group.size() > 1 else None


@dataclass(frozen=True)
class ExpertsPlan:
    """The placement of one module's experts, and the routing of tokens.

    group: the ranks that divide the experts; None for one rank. over_y: the grid's group. checks_features: whether x
    or y have several ranks. max_rows, reduce: of `stretto.ops.moe.dispatch`. is_first_of_x: this rank is x's first.
    """

    name: str
    flow: TokenFlow
    group: dist.ProcessGroup | None
    over_y: dist.ProcessGroup | None
    checks_features: bool
    max_rows: int | None
    reduce: ExpertReduce
    is_first_of_x: bool

    def kept_of_output(self) -> str | None:
        """The name by which recomputation keeps what `combine` sends first; None if it needs the rows themselves."""
        if self.reduce == "rank":
            return None
        if self.group is not None:
            return KEPT_AS["all_to_all"]
        return None if self.flow.gather_over is None else KEPT_AS["reduce_scatter"]


class ParallelExperts(ShardedModule):
    """Experts of which each rank has some: hidden [t, h / y], top_k_index [t, k], top_k_weights [t, k] -> [t, h / y].

    Every rank gives its own tokens; those of x and y that share a batch give the same (with sequence sharding, ranks of
    x give their parts). Parameters have the names of the module that this replaces, and are DTensors of whole shapes. A
    choice of `num_experts` counts for nothing, if its weight is 0.
    """

    def __init__(
        self,
        module: nn.Module,
        kind: ExpertsKind,
        parameters: Mapping[str, nn.Parameter],
        plan: ExpertsPlan,
        products: Mapping[str, ExpertProduct],
    ) -> None:
        """products: the first and the second, by the names of their weights in `parameters`."""
        self._up, self._down = products
        gradients = products[self._up].shard.gradients
        super().__init__(gradients)
        for name, parameter in parameters.items():
            self.register_parameter(name, parameter)
        self._bias_scales = {name: gradients.forward_scale(parameters[name]) for name in parameters if "bias" in name}
        self.num_experts: int = parameters[self._up].shape[0]
        self.kind = kind
        self._own_gate = kind.own_gate(module) if kind.has_own_gate else None
        if self._own_gate is None:
            self.act_fn: Callable[[Tensor], Tensor] = module.act_fn  # type: ignore[assignment]
        self.plan = plan
        weights = [(product.shard, parameters[name]) for name, product in products.items()]
        self.replicas = None if plan.group is None else ExpertReplicas(plan.group, plan.flow.gather_over, weights)
        self.products = {name: replace(product, replicas=self.replicas) for name, product in products.items()}
        # Set by an engine: of steps with at most so many tokens on each rank, which travel by the low-latency exchange.
        self.few_tokens: int | None = None
        self.starts_early = False  # something runs between `start` and the products
        self._sent: list[PendingTokens] = []  # by `_start`, until `_finish`
        make = partial(GraphCode, keeps_inputs=lambda: gradients.deferred is not None)
        self._gathers_tokens = self._find_gathers_tokens()
        # On the group of expert nothing else is called, whatever is called between `start` and the products.
        self.can_start = plan.group is not None
        code: Callable[..., Tensor] = self._multiply_tokens if self._gathers_tokens else self._multiply_rows
        code = self._finish if self.can_start else code
        self.in_graphs: GraphCode = make(code, *self.weights_in_graphs())
        self._start_in_graphs = make(self._start)

    @property
    def has_biases(self) -> bool:
        return bool(self._bias_scales)

    def can_be_local(self, grid: Grid) -> bool:
        weights = {name: self.get_parameter(name) for name in (self._up, self._down)}
        takes = (self.products[name].shard.takes_own_gradient(weight) for name, weight in weights.items())
        in_fp8 = self.products[self._up].shard.scaling is not None
        return grid.size("world") == 1 and not in_fp8 and all(takes)

    def gradients_of_shards(self) -> Mapping[str, TakeGradient | None]:
        names = (self._up, self._down) if self.is_local else ()
        return {name: self.products[name].shard.taking(self.get_parameter(name)) for name in names}

    def weights_in_graphs(self) -> Sequence[Tensor]:
        return self.get_parameter(self._up), self.get_parameter(self._down)

    def forward(
        self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor, started: Tensor | None = None
    ) -> Tensor:
        weights = self.local_tensors() if self.is_local and torch.compiler.is_compiling() else None
        if weights is None:
            with mark_experts():
                return self._forward_on_grid(hidden, top_k_index, top_k_weights, started)
        up, down = weights
        assert up is not None
        assert down is not None
        x, ids = hidden.to(up.dtype).flatten(0, -2), self._known(top_k_index)
        found = dispatch(x, ids, self.num_experts, max_rows=self.plan.max_rows)
        inner = grouped_matmul(found.rows, self.products[self._up].orient(up), found.offsets)
        biases = self._biases()
        inner = self._activate(self._add_bias(self._up, inner, found.offsets, biases))
        rows = grouped_matmul(inner, self.products[self._down].orient(down), found.offsets)
        y = combine(self._add_bias(self._down, rows, found.offsets, biases), found.handle, top_k_weights)
        return y.view(hidden.shape)

    def _forward_on_grid(
        self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor, started: Tensor | None
    ) -> Tensor:
        if self.plan.checks_features:
            check_features(hidden, "y", self.plan.name)
        x = self._tokens_of(hidden)
        inputs: tuple[Tensor, ...] = x, top_k_weights, top_k_index
        if self.few_tokens is not None:
            y = self._multiply_few(x, top_k_weights, top_k_index, self.few_tokens)
            return note_features(y.view(hidden.shape), "y")
        if self.can_start:
            started = self._start_in_graphs.run((1,), *inputs) if started is None else started
            # A compiler keeps the tokens' memory until this has read it. Their gradients go by `started`.
            inputs = started, x.detach()
        y = self.in_graphs.run(x.shape, *inputs, *self._biases())
        return note_features(y.view(hidden.shape), "y")

    def _tokens_of(self, hidden: Tensor) -> Tensor:
        """Hidden states as [tokens, features], in the dtype of the products: autocast changes none of these."""
        compute = self.products[self._up].shard.precision.compute
        return hidden.to(compute or self.get_parameter(self._up).dtype).flatten(0, -2)

    def start(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor | None:
        """Begin to send tokens, where `can_start`. The next call takes the same arguments, and what this returns.

        What is called between the two runs while tokens travel, and backward while their gradients do. None, and
        nothing is sent, of a module with hooks: that call may get other tokens, or gradients.
        """
        if has_hooks(self):
            return None
        x = self._tokens_of(hidden)
        with mark_experts():
            return self._start_in_graphs.run((1,), x, top_k_weights, top_k_index)

    def _take_part(self, x: Tensor, weights: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The tokens, weights and choices that this rank sends."""
        plan, flow = self.plan, self.plan.flow
        if plan.group is not None and plan.max_rows is None and x.is_cuda:
            self._refuse_capture()
        ids, tokens = self._known(ids), x.shape[0]
        if plan.over_y is not None:
            weights = sum_gradient(weights, plan.over_y)
        if flow.cut_over is not None:
            if plan.max_rows is not None:
                self._check_divides(tokens, flow.cut_over.size())
            x, weights = cut_tokens(x, flow.cut_over), cut_tokens(weights, flow.cut_over)
            ids = ids[own_tokens(tokens, flow.cut_over)]
        if flow.sum_tokens_over is not None:
            x, weights = sum_gradient(x, flow.sum_tokens_over), sum_gradient(weights, flow.sum_tokens_over)
        if self.replicas is not None:
            self.replicas.note(ids, self.num_experts)
        return x, weights, ids

    def _complete(self, y: Tensor, x: Tensor) -> Tensor:
        """The output for the tokens x, of that for those that this rank has sent."""
        flow = self.plan.flow
        if flow.cut_over is not None:
            y = gather_tokens(y, x.shape[0], flow.cut_over)
        if flow.sum_tokens_over is not None:
            y = SumTokens.apply(y, flow.sum_tokens_over)
        return y

    def _find_gathers_tokens(self) -> bool:
        """True if the products gather tokens by index: nothing is done between them but SiLU gates."""
        plan, is_plain = self.plan, self._own_gate is None and not self._bias_scales
        is_summed = plan.over_y is not None or plan.flow.sum_rows_over is not None
        is_transposed = any(product.is_transposed for product in self.products.values())
        is_gated = is_plain and self._up == "gate_up_proj" and is_silu(self.act_fn)
        is_transposed |= any(product.shard.scaling is not None for product in self.products.values())  # in fp8
        return is_gated and not is_transposed and not is_summed and plan.reduce == "rank"

    def _multiply_tokens(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """The output for tokens that are sent once to a rank, and gathered there by the products."""
        if not is_silu(self.act_fn):
            return self._multiply_rows(x, weights, ids)
        return self._finish(self._start(x, weights, ids), x)

    def _start(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """Begin to send tokens, once to a rank."""
        plan, gather_group = self.plan, self.plan.flow.gather_over
        x, weights, ids = self._take_part(x, weights, ids)
        is_alone = plan.group is None and gather_group is None
        overlaps = self.products[self._up].hides_all_reduce
        places = find_places(
            x,
            *self._find_slots(ids, weights),
            plan.group,
            max_rows=None if is_alone else self._count_rows(ids),
            gather_group=gather_group,
            wrap_collective=keep_collective,
            implementation="auto" if plan.group is not None or overlaps else "library",
        )
        columns = self.get_parameter(self._up).shape[1]
        handle: Tensor = SendTokens.apply(x, weights, places, columns, self.starts_early, self._sent.append)
        if plan.reduce == "choice":  # a copy: a compiled graph may overwrite its memory before the sums
            self._sent[-1] = replace(self._sent[-1], own_weights=weights.detach().clone())
        return handle

    def _finish(self, handle: Tensor, x: Tensor, *biases: Tensor) -> Tensor:
        """The output for the tokens x, which `_start` has begun to send."""
        sent, self._sent = self._sent[-1], []  # there may be one whose call an error has ended
        if self._gathers_tokens and is_silu(self.act_fn):  # nobody has replaced it since, or given it hooks
            parameters, products = map(self.get_parameter, self.products), tuple(self.products.values())
            return self._complete(MultiplyTokens.apply(handle, *parameters, x, sent, products), x)
        rows = self._multiply_experts(CopyRows.apply(handle, sent, self.plan.reduce), sent.places.index.offsets, biases)
        return self._complete(SumRows.apply(handle, rows, sent, self.plan.reduce), x)

    def _find_slots(self, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, int]:
        """(choices, their weights, experts that they are among), replicas of experts counted, if there are any."""
        placement = None if self.replicas is None else self.replicas.placement
        return (
            (ids, weights, self.num_experts)
            if placement is None
            else (placement.spread(ids), weights, placement.num_slots)
        )

    def _count_rows(self, ids: Tensor) -> int | None:
        """The number of rows if it is fixed: as given, or all where a sharded sequence meets all experts here.

        Ranks of x have equal parts of a sequence, so that none need ask for the others' numbers.
        """
        plan, gather_group = self.plan, self.plan.flow.gather_over
        if plan.group is None and gather_group is not None:
            return max(gather_group.size() * ids.numel(), 1)
        return plan.max_rows

    def _multiply_rows(self, x: Tensor, weights: Tensor, ids: Tensor, *biases: Tensor) -> Tensor:
        """The output for tokens that are copied for each of their experts, and sent as the plan says."""
        plan = self.plan
        part, weights, ids = self._take_part(x, weights, ids)
        slots, _, count = self._find_slots(ids, weights)
        found = dispatch(
            part,
            slots,
            count,
            plan.group,
            topk_weights=weights,
            max_rows=self._count_rows(ids),
            gather_group=plan.flow.gather_over,
            reduce=plan.reduce,
            wrap_collective=keep_collective,
        )
        rows = self._multiply_experts(found.rows, found.offsets, biases)
        return self._complete(combine(rows, found.handle, weights, plan.group, wrap_collective=keep_collective), x)

    @property
    def takes_few(self) -> bool:
        """True if `few_tokens` may be set: ranks divide the experts, and a token's sum is each rank's before theirs."""
        has_replicas = self.replicas is not None and self.replicas.placement is not None
        return self.plan.group is not None and self.plan.reduce == "rank" and not has_replicas

    def _multiply_few(self, x: Tensor, weights: Tensor, ids: Tensor, most: int) -> Tensor:
        """The output for few tokens, without gradients. Ranks of x that have parts of experts send all of them."""
        plan, flow, tokens = self.plan, self.plan.flow, x.shape[0]
        ids, sums_over = self._known(ids), flow.gather_over or flow.sum_tokens_over
        folded = flow.cut_over if sums_over is None else None
        if folded is not None:
            x, weights, ids = cut_tokens(x, folded), cut_tokens(weights, folded), ids[own_tokens(tokens, folded)]
        found = dispatch_few(x, ids, weights, self.num_experts, plan.group, max_tokens=most)
        y = combine_few(self._multiply_experts(found.rows, found.offsets, self._biases()), found.handle)
        if folded is not None:
            return gather_tokens(y, tokens, folded)
        return y if sums_over is None else all_reduce(y, sums_over)

    def _multiply_experts(self, rows: Tensor, offsets: Tensor, biases: Sequence[Tensor]) -> Tensor:
        inner = self._activate(self._multiply(self._up, rows, offsets, biases))
        return self._multiply(self._down, inner, offsets, biases)

    def _multiply(self, name: str, rows: Tensor, offsets: Tensor, biases: Sequence[Tensor]) -> Tensor:
        output: Tensor = MultiplyRows.apply(rows, self.get_parameter(name), offsets, self.products[name])
        return self._add_bias(name, output, offsets, biases)

    def _activate(self, inner: Tensor) -> Tensor:
        if self._own_gate is not None:
            return self._own_gate(inner)
        return gated_activation(inner, self.act_fn) if self._up == "gate_up_proj" else self.act_fn(inner)

    def _biases(self) -> tuple[Tensor, ...]:
        """This rank's parts of the biases, of the first product and the second; none if they have none."""
        scales = self._bias_scales.items()
        return tuple(scale_gradient(local(self.get_parameter(name)), scale) for name, scale in scales)

    def _add_bias(self, name: str, rows: Tensor, offsets: Tensor, biases: Sequence[Tensor]) -> Tensor:
        """The product with its bias, if it has one, which ranks of x that sum their parts of a product add once."""
        if f"{name}_bias" not in self._bias_scales:
            return rows
        bias = biases[list(self._bias_scales).index(f"{name}_bias")].to(rows.dtype)
        flow = self.plan.flow
        is_part = name != self._up and (flow.gather_over is not None or flow.sum_tokens_over is not None)
        return AddBias.apply(rows, bias, offsets, self.plan.is_first_of_x or not is_part)

    def _known(self, ids: Tensor) -> Tensor:
        """The choices, with those that were dropped, whose weights are 0, divided evenly among the experts."""
        numbers = torch.arange(ids.shape[0], device=ids.device).unsqueeze(1) % self.num_experts
        return torch.where(ids == self.num_experts, numbers, ids)

    def _check_divides(self, tokens: int, ranks: int) -> None:
        """Raise ValueError unless ranks of x get equally many tokens, as required without exchanged counts."""
        if tokens % ranks:
            nearest = max(1, round(tokens / ranks)) * ranks
            raise ValueError(
                f"{self.plan.name}: expert_rows is {self.plan.max_rows}, so x={ranks} must divide a rank's {tokens} "
                f"tokens; {nearest} would do, or expert_rows=None"
            )

    def _refuse_capture(self) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise ValueError(
                f"{self.plan.name}: a CUDA graph cannot wait for the number of rows from other ranks: set a capacity, "
                "parallelize(..., expert_rows=), or choose expert=1"
            )

    def extra_repr(self) -> str:
        shapes = [(name, tuple(p.shape), tuple(local(p).shape)) for name, p in self.named_parameters(recurse=False)]
        return ", ".join(f"{name}={whole} of which {here} here" for name, whole, here in shapes)
