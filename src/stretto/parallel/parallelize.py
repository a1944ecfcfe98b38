"""`parallelize`: put an nn.Module on a grid, in place, under its own names."""

import dataclasses
import inspect
import re
import sys
from collections.abc import Mapping
from types import SimpleNamespace as Namespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stretto.parallel import huggingface
from stretto.parallel.communication import all_reduce
from stretto.parallel.cuts import Cut, cut_of, linear_axes
from stretto.parallel.dropout import ParallelDropout
from stretto.parallel.embedding import ParallelEmbedding, ParallelPositions
from stretto.parallel.gradients import GradientSum
from stretto.parallel.grid import Grid
from stretto.parallel.layout import Layout, Split, layout_of, shard_parameter
from stretto.parallel.linear import LinearPlan, ParallelLinear, WeightShard
from stretto.parallel.loss import ParallelHead, ParallelLoss, is_mean_over_batch
from stretto.parallel.matmul import MatmulTuner
from stretto.parallel.meta import MetaInitializer
from stretto.parallel.norm import ParallelNorm
from stretto.parallel.norm_kinds import norm_kind
from stretto.parallel.overlap import GatherAhead, Overlap, in_backward
from stretto.parallel.plan import Plan, Role, read_plan
from stretto.parallel.precision import Precision
from stretto.parallel.pushed import PushedGather, can_push, make_ring
from stretto.parallel.replicated_modules import CUT, keep_whole
from stretto.parallel.sequence import TokenShards
from stretto.parallel.sharded_module import refuse_copies
from stretto.parallel.validation import check_takes_sharded_sequence, is_conv1d, validate_plan


def parallelize(
    model: nn.Module,
    grid: Grid,
    *,
    roles: Mapping[str, Role | str | Mapping[str, Any]] | None = None,
    local_attributes: Mapping[str, str] | None = None,
    dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    keep_gathered: bool = True,
    sharded_loss: bool = True,
    overlap: Overlap | bool = True,
    tune_matmuls: bool = False,
    shard_sequence: bool = False,
    seed: int = 0,
) -> nn.Module:
    """Shard `model` over `grid` in place, and return it (Singh, Algorithm 3).

    Linears, embeddings, norms, dropouts, head and loss are replaced; parameters become DTensors on the grid's mesh
    under their old names, each rank holding 1 / (x y z) of every linear's weight. Afterwards every rank calls the
    model with its own shard of the batch [batch / (data x Z), ...]; the loss is the mean over the global batch, the
    same on every rank, and gradients are final when `backward()` returns. Collective: every rank makes the same call.

    roles: name patterns ("*" is one part of a dotted name) to roles, for models that do not say themselves what their
        submodules are; see `stretto.parallel.Role`.
    local_attributes: patterns of integer attributes that count what one rank holds ("h.*.attn.n_head"), to the axis
        that divides them.
    dtype: of activations, and of weights and partial sums on the wire (None: the parameters'). Parameters keep theirs:
        fp32 parameters with dtype=torch.bfloat16 are master weights.
    reduce_dtype: of weight gradients on the wire (None: as computed, in `dtype`).
    keep_gathered: keep weights gathered over z from the forward to the backward pass; False frees and gathers again.
    sharded_loss: False if the model changes logits between head and loss: whole logits are made then.
    overlap: which collectives hide under computation (False: none); results are the same.
    tune_matmuls: time every linear's products in each layout at the end of the first backward pass, and take the
        fastest from then on (Singh, section 5.1.3); times are kept on disk, in $STRETTO_CACHE or ~/.cache/stretto.
    shard_sequence: between blocks, keep only this x rank's share of the tokens: in place of all-reduces over x come
        all-gathers before normal linears and reduce-scatters after swapped ones, which on GPUs run within the products
        (`stretto.ops`). The rank's tokens, batch x seq, must be a multiple of x. For models that say that they take it
        (`takes_sharded_sequence`: inside attention, shapes come from what linears return), as `stretto.models.GPT`.
    seed: a model on the meta device is initialized here, from this seed and each module's name, alike on every grid.

    Raises ValueError when nothing says what a submodule is, when an axis does not divide what it must, and when ranks
    hold different weights; the model is then as it was.
    """
    if hasattr(model, "gradient_sum"):
        raise ValueError(f"this {type(model).__name__} is on a grid already: build another one to parallelize it anew")
    precision = Precision(dtype, reduce_dtype)
    plan = read_plan(model, roles, local_attributes)
    validate_plan(model, plan, grid.sizes)
    if shard_sequence:
        check_takes_sharded_sequence(model)
        if plan.replicated:
            raise ValueError("shard_sequence: replicated modules would see other tokens on each rank of x")
    _check_ranks_agree(model, plan, grid)
    if isinstance(overlap, bool):
        overlap = Overlap() if overlap else Overlap.none()
    matmuls = MatmulTuner(tune_matmuls, grid.device, grid.group("world"))
    tokens = TokenShards(grid.group("x")) if shard_sequence and grid.size("x") > 1 else None
    builder = _Builder(model, grid, precision, overlap, matmuls, keep_gathered, tokens, seed)
    # All that can fail comes first, so that a failure leaves the model as it was.
    built = builder.build_all(plan)
    replicated = builder.build_replicated(plan)
    buffers = builder.buffers()
    attributes = _local_attributes(model, plan, grid)
    for name, module in built.items():
        _replace(model, name, module)
    for part in plan.replicated:
        parameters = {name: replicated[name] for name in part.parameters}
        keep_whole(model, part, parameters, precision=precision, gradients=builder.gradient_sum)
    for owner, attribute, value in [*attributes, *buffers]:
        setattr(owner, attribute, value)
    _install_loss(model, plan, grid, sharded_loss)
    if huggingface.is_pretrained_model(model) and grid.size("z") > 1:
        huggingface.generate_in_step(model)
    huggingface.refuse_saving(model)
    refuse_copies(model)
    model.gradient_sum = builder.gradient_sum  # type: ignore[assignment]
    gather_ahead, gradient_sum = (
        builder.gather_ahead,
        builder.gradient_sum,
    )  # the builder holds the whole model: it goes
    model.register_forward_pre_hook(lambda model, _: _begin_forward(model, gather_ahead, gradient_sum))
    model.register_forward_hook(lambda *_: _end_forward(gather_ahead), always_call=True)
    if grid.size("x") * grid.size("y") > 1:
        model.register_forward_hook(_explain_sizes, always_call=True)
    return model


def validate(
    model: nn.Module,
    sizes: Mapping[str, int],
    *,
    roles: Mapping[str, Role | str | Mapping[str, Any]] | None = None,
    local_attributes: Mapping[str, str] | None = None,
) -> None:
    """Raise the ValueError that `parallelize` would, for a grid of these sizes. Needs no process group."""
    validate_plan(model, read_plan(model, roles, local_attributes), sizes)


_TARGETS = ("targets", "labels")  # what a model's forward calls them

if TYPE_CHECKING:
    from stretto.parallel.pushed_scatter import ScatterRing


class _Builder:
    """Makes the parallel counterpart of each submodule, once, and of each parameter, however many places share it."""

    def __init__(
        self,
        model: nn.Module,
        grid: Grid,
        precision: Precision,
        overlap: Overlap,
        matmuls: MatmulTuner,
        keep_gathered: bool,
        tokens: TokenShards | None,
        seed: int,
    ) -> None:
        self.model = model
        self.grid = grid
        self.precision = precision
        self.keep_gathered = keep_gathered
        self.tokens = tokens
        self.seed = seed
        self.overlap = overlap
        self.matmuls = matmuls
        self.linears = 0
        self.gradient_sum = GradientSum(grid, precision, overlap, at_end=matmuls.finish)
        over_z = grid.group("z")
        pushes = overlap.copy_engines and can_push(over_z, grid.device)
        self.ring = self.gradient_sum.ring = make_ring(over_z) if pushes else None
        self.gather_ahead = GatherAhead(
            overlap.all_gather, PushedGather(over_z) if pushes and keep_gathered and overlap.all_gather else None
        )
        self._made: dict[int, nn.Parameter] = {}
        # Parameters are told apart by id: these must not be freed, and their ids reused, while we replace them.
        self._originals = list(model.parameters())
        self._initializer = MetaInitializer(model, grid.device, seed)

    def build_all(self, plan: Plan) -> dict[str, nn.Module]:
        """What takes the place of each submodule, by name. The model is not touched."""
        originals = dict(self.model.named_modules(remove_duplicate=False))
        made: dict[int, nn.Module] = {}
        for name, role in plan.roles.items():
            original = originals[name]
            if role.role != "loss" and id(original) not in made:
                made[id(original)] = self._build(name, original, role).train(original.training)
        return {name: made[id(originals[name])] for name, role in plan.roles.items() if role.role != "loss"}

    def build_replicated(self, plan: Plan) -> dict[str, nn.Parameter]:
        """What takes the place of each parameter that every rank has whole, by its name."""
        made: dict[str, nn.Parameter] = {}
        for name in (name for part in plan.replicated for name in part.parameters):
            owner_name, _, key = name.rpartition(".")
            owner = self.model.get_submodule(owner_name)
            source = self._initializer.real(owner_name, owner)
            made[name] = self._parameter(owner.get_parameter(key), getattr(source, key), CUT)
        return made

    def _build(self, name: str, module: nn.Module, role: Role) -> nn.Module:
        match role.role:
            case "normal" | "swapped" | "head":
                return self._linear(name, module, role)
            case "embedding" | "positions":
                return self._embedding(name, module, role)
            case "norm" | "head_norm":
                return self._norm(name, module, role)
            case _:
                assert isinstance(module, nn.Dropout)
                if role.role == "dropout":
                    return ParallelDropout(module.p, self.grid, "y", name, self.tokens)
                return ParallelDropout(module.p, self.grid, "x", name)

    def _linear(self, name: str, module: nn.Module, role: Role) -> nn.Module:
        grid, source = self.grid, self._initializer.real(name, module)
        output_axis, input_axis = linear_axes(role)
        is_transposed = is_conv1d(module)
        cut = cut_of(role, "weight", is_transposed=is_transposed)
        rows = cut.splits[0] if not is_transposed else cut.splits[1]
        ring = None if role.role == "head" else self.ring  # a head's gradient would make all of its slots large
        weight, shard = self._weight(module, source, cut, rows, stays=self.keep_gathered, ring=ring)
        bias = None
        if module.bias is not None:
            bias = self._parameter(module.bias, source.bias, self._cut(role, "bias"))  # type: ignore[arg-type]
        plan = LinearPlan(
            name,
            shard,
            input_axis=input_axis,
            output_axis=output_axis,
            output_group=grid.group(input_axis),
            input_group=grid.group(output_axis),
            is_transposed=is_transposed,
            keep_gathered=self.keep_gathered,
            hides_all_reduce=self.overlap.all_reduce,
            matmuls=self.matmuls,
            place=self.linears,
            is_swapped=role.role == "swapped",
            tokens=self.tokens,
        )
        self.linears += 1
        if role.role == "head":
            return ParallelHead(weight, bias, plan, self._first(weight.shape[0]), grid)
        return ParallelLinear(weight, bias, plan)

    def _embedding(self, name: str, module: nn.Module, role: Role) -> nn.Module:
        assert isinstance(module, nn.Embedding)
        source, cut = self._initializer.real(name, module), self._cut(role, "weight")
        if role.role == "positions":
            weight = self._parameter(module.weight, source.weight, cut)  # type: ignore[arg-type]
            return ParallelPositions(weight, self.precision, module.padding_idx, self.gradient_sum, self.tokens)
        weight, shard = self._weight(module, source, cut, cut.splits[0], stays=False, ring=None)
        first = self._first(module.num_embeddings)
        return ParallelEmbedding(weight, first, shard, self.grid.group("x"), module.padding_idx, self.tokens)

    def _norm(self, name: str, module: nn.Module, role: Role) -> nn.Module:
        source, kind = self._initializer.real(name, module), norm_kind(module, name)
        weight, bias = (
            None
            if getattr(module, part, None) is None
            else self._parameter(getattr(module, part), getattr(source, part), self._cut(role, part))
            for part in ("weight", "bias")
        )
        return ParallelNorm(
            weight,
            bias,
            eps=kind.eps,
            is_centred=kind.is_centred,
            weight_offset=kind.weight_offset,
            precision=self.precision,
            group=self.grid.group("y") if role.role == "norm" else None,
            gradients=self.gradient_sum,
            name=name,
        )

    def _cut(self, role: Role, part: str) -> Cut:
        """`cut_of` what is used on this rank's tokens alone: with sequence sharding, other x ranks have others."""
        cut = cut_of(role, part)
        is_of_tokens = role.role in ("norm", "positions") or (role.role == "swapped" and part == "bias")
        if self.tokens is not None and is_of_tokens:
            return dataclasses.replace(cut, sum_axes=(*cut.sum_axes, "x"))
        return cut

    def _weight(
        self,
        module: nn.Module,
        source: nn.Module | Namespace,
        cut: Cut,
        rows: Split,
        *,
        stays: bool,
        ring: "ScatterRing | None",
    ) -> tuple[nn.Parameter, WeightShard]:
        """The sharded weight, and how it is gathered over z: `rows` is the split of dim 0 that z cuts further.

        stays: see `WeightShard.watch`. ring: what its gradient is scattered through, if not the process group.
        """
        grid, original = self.grid, module.weight
        assert isinstance(original, nn.Parameter)
        weight = self._parameter(original, source.weight, cut)  # type: ignore[arg-type]
        coordinates = {axis: grid.coordinate(axis) for axis in grid.sizes}
        before_z = Layout(tuple(original.shape), (rows,)).local_shape(grid.sizes, coordinates)[0]
        local_rows = layout_of(weight).local_shape(grid.sizes, coordinates)[0]
        shard = WeightShard(
            before_z, local_rows, grid.group("z"), self.precision, self.gather_ahead, self.gradient_sum, ring
        )
        shard.watch(weight, stays=stays)
        return weight, shard

    def _parameter(self, original: nn.Parameter, whole: Tensor, cut: Cut) -> nn.Parameter:
        if id(original) not in self._made:
            layout = Layout(tuple(original.shape), cut.splits)
            parameter = shard_parameter(whole, layout, self.grid, requires_grad=original.requires_grad)
            self.gradient_sum.watch(parameter, cut.sum_axes, is_weight=cut.is_weight)
            self._made[id(original)] = parameter
        return self._made[id(original)]

    def _first(self, vocab: int) -> int:
        """The first row of the vocabulary on this x rank."""
        return -(-vocab // self.grid.size("x")) * self.grid.coordinate("x")

    def buffers(self) -> list[tuple[nn.Module, str, Tensor]]:
        """Each module's buffers on the device; those that were on the meta device as the model initializes them."""
        found = []
        for name, module in self.model.named_modules():
            own = dict(module.named_buffers(recurse=False))
            is_meta = any(buffer.is_meta for buffer in own.values())
            source = self._initializer.real(name, module) if is_meta else module
            found += [(module, key, getattr(source, key).to(self.grid.device)) for key in own]
        return found


def _local_attributes(model: nn.Module, plan: Plan, grid: Grid) -> list[tuple[nn.Module, str, int]]:
    """What each module's attribute is on this rank; a module under several names is there once."""
    found = {}
    for name, axis in plan.local_attributes.items():
        owner, _, attribute = name.rpartition(".")
        module = model.get_submodule(owner)
        found[id(module), attribute] = (module, attribute, getattr(module, attribute) // grid.size(axis))
    return list(found.values())


@torch.compiler.disable
def _begin_forward(model: nn.Module, gather_ahead: GatherAhead, gradient_sum: GradientSum) -> None:
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not hasattr(parameter, "stretto_layout"):
            raise ValueError(
                f"{name} was added or replaced after stretto.parallelize, and nothing would bring its gradient "
                "together: add it before, or copy the new values into the parameter that was there"
            )
        gradient_sum.refuse_hook(name, parameter)
    if not in_backward():
        gather_ahead.begin_forward()
        gradient_sum.drop_failed_passes()


@torch.compiler.disable
def _end_forward(gather_ahead: GatherAhead) -> None:
    gather_ahead.end_forward()


@torch.compiler.disable
def _explain_sizes(model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Add to a forward's error about sizes what may be behind it: code that counts the whole model's heads."""
    error = sys.exception()
    if output is None and isinstance(error, RuntimeError) and re.search(r"\b(sizes?|shapes?)\b", str(error)):
        error.add_note(
            f"{type(model).__name__} is on a grid: a rank has 1/x of heads and inner features and 1/y of hidden ones. "
            "Code that views or splits by the whole model's numbers needs -1 there, or their attributes' names in "
            "parallelize(..., local_attributes=); what is passed in (inputs_embeds, say) must be this rank's part"
        )


def _replace(model: nn.Module, name: str, new: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    old = model.get_submodule(name)
    for key in vars(nn.Module()):
        if "_hook" in key:  # the dicts themselves, so that what removes a user's hook still does
            setattr(new, key, getattr(old, key))
    setattr(model.get_submodule(parent), child, new)


def _install_loss(model: nn.Module, plan: Plan, grid: Grid, is_sharded: bool) -> None:
    """Put the sharded loss where the model keeps its own, and tell the head while the model computes it."""
    head = next((model.get_submodule(name) for name in plan.named("head")), None)
    loss = ParallelLoss(head) if isinstance(head, ParallelHead) else None
    if huggingface.is_pretrained_model(model):
        loss = huggingface.install_loss(model, loss)
        is_sharded = is_sharded and huggingface.calls_loss_function(model)
        if grid.size("batch") > 1:
            _refuse_losses_of_one_rank(model, loss)
    elif loss is not None and (names := plan.named("loss")):
        _replace(model, names[0], loss)
    else:  # what the model returns, if that is no loss, is whole
        if grid.size("batch") > 1:
            model.register_forward_hook(_refuse_means_of_one_rank)
        return
    signature = inspect.signature(model.forward)
    target = next((name for name in _TARGETS if name in signature.parameters), None)
    if isinstance(head, ParallelHead) and loss is not None and target is not None and is_sharded:
        _defer_loss(model, head, signature, target)


def _defer_loss(model: nn.Module, head: ParallelHead, signature: inspect.Signature, target: str) -> None:
    """Have the head leave its product to the loss in the calls that are given targets."""

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        head.defers_loss = signature.bind_partial(*args, **kwargs).arguments.get(target) is not None

    def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        was_deferred, was_taken = head.defers_loss, head.passed_through is None
        head.defers_loss, head.passed_through = False, None
        if was_deferred and not was_taken and output is not None:  # None: the forward has raised
            raise ValueError(
                f"{type(model).__name__} was given {target}, but has not called the loss that Stretto has put in the "
                "place of its own: call parallelize(..., sharded_loss=False)"
            )
        if was_deferred and getattr(output, "logits", None) is not None:
            # They were never made: what stands there is the head's input. Setting them to None would leave the item.
            output = dataclasses.replace(output, logits=None)
        elif was_deferred and isinstance(output, tuple):
            output = (output[0], None, *output[2:])
        return output

    model.register_forward_pre_hook(before, with_kwargs=True)
    model.register_forward_hook(after, always_call=True)


def _refuse_losses_of_one_rank(model: nn.Module, loss: ParallelLoss | None) -> None:
    """Raise if the model returns a loss that it has computed in its own code: the mean over this rank's rows alone."""
    if loss is not None:
        model.register_forward_pre_hook(lambda *_: setattr(loss, "was_computed", False))

    def after(model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else getattr(output, "loss", None)
        if isinstance(first, Tensor) and not first.dim() and not (loss is not None and loss.was_computed):
            raise ValueError(huggingface.refusal_of_loss(model))

    model.register_forward_hook(after)


@torch.compiler.disable
def _refuse_means_of_one_rank(model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Raise ValueError if a model returns a loss that its own code has computed from this rank's rows."""
    found = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple | list) else [output]
    for item in found:
        if isinstance(item, Tensor) and not item.dim() and item.requires_grad and not is_mean_over_batch(item):
            raise ValueError(
                f"{type(model).__name__} has computed a loss in its own code, from this rank's rows alone, where ranks "
                "have parts of the batch: gradients are summed over them, so it would be too large. Use "
                "stretto.parallel.mean_over_batch there, or have the model return its logits and use it on these; or "
                "make the loss a module (nn.CrossEntropyLoss, say) with the role 'loss'"
            )


def _check_ranks_agree(model: nn.Module, plan: Plan, grid: Grid) -> None:
    """Every rank must start from the same weights (and draw the same dropout): compare sums, in one collective."""
    named = [(name, p) for name, p in model.named_parameters() if not p.is_meta]
    sums = [
        (p.detach().sum(dtype=torch.float64), torch.linalg.vector_norm(p.detach(), dtype=torch.float64))
        for _, p in named
    ]
    flat = [float(value) for pair in sums for value in pair]
    drops = any(getattr(model.get_submodule(name), "p", 0) > 0 for name in plan.named("dropout", "inner_dropout"))
    flat.append(float(torch.initial_seed() % 2**52) if drops else 0.0)
    highest = torch.tensor(flat, dtype=torch.float64, device=grid.device)
    lowest = highest.clone()
    all_reduce(highest, grid.group("world"), dist.ReduceOp.MAX)
    all_reduce(lowest, grid.group("world"), dist.ReduceOp.MIN)
    spread = (highest - lowest).tolist()
    for index, (name, _) in enumerate(named):
        scale = 1.0 + abs(flat[2 * index + 1])
        if max(spread[2 * index : 2 * index + 2]) > 1e-6 * scale:
            raise ValueError(
                f"ranks hold different values of {name}: seed them alike before building the model, "
                "or load one checkpoint"
            )
    if spread[-1]:
        raise ValueError(
            "ranks have different random seeds, so their dropout masks would differ: torch.manual_seed(the same number)"
        )
