# SPDX-License-Identifier: Apache-2.0
"""Replaces what blocks compute by fewer kernels, for a model that will only decode.

- Linears of one input (queries, keys and values; gate and up) become one product: their weights are laid out one after
  another, and each parameter becomes a view of its part, so that weights that are loaded later are seen.
- In blocks of Llama's form, the product that ends attention or the MLP, its sum over x, the residual and the next norm
  are `ops.matmul_all_reduce_norm`. Where all blocks are fused so, steps of many tokens may divide these over x instead
  (`TokenDivision`).
- Behind the last block's attention a step computes the tokens alone that the head reads: one of each prompt.
- Token embeddings are looked up in one launch, and added up over x in another: of few rows without a library, whose
  sums a CUDA graph runs on a stream of their own.
- Rotary angles are looked up by position, where they depend on nothing else (`RotaryTables`).

What may be fused is seen in one pass of the model (`watch`): which linears got one and the same input, whether the
attention and the MLP of a block return what a rowwise linear returned, and which norm takes a block's output. What a
model's code computes in some other way stays as it is.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from stretto.huggingface.known_modules import computes_angles, is_of_gated_mlps, is_pre_norm_block
from stretto.inference.divided_tokens import TokenDivision
from stretto.ops import matmul_all_reduce_norm
from stretto.ops.confirmation import measure_choices
from stretto.ops.embedding.move_rows import find_addresses, look_up_rows
from stretto.ops.invariant.kernels import is_for_streaming, multiply_streaming
from stretto.ops.moe import gated_activation
from stretto.ops.row_sums.kernel import sum_rows
from stretto.ops.row_sums.norm import Norm, NormOperands, add_norm, can_launch
from stretto.parallel.layers.embedding import ParallelEmbedding
from stretto.parallel.layers.linear import CompressingLinear, ParallelLinear
from stretto.parallel.layers.loss import ParallelHead
from stretto.parallel.layers.norm import ParallelNorm
from stretto.parallel.layout import local


class BlockFuser:
    """Watches one pass of a model, and then fuses its blocks. group: the ranks of x, one of them or several.

    fuses_gates: gated MLPs, whose SiLU then is rounded once. fuses_angles: see `RotaryTables`; on CPUs cosines may have
    other bits in a table.
    """

    def __init__(
        self, model: nn.Module, group: dist.ProcessGroup, *, fuses_gates: bool = True, fuses_angles: bool = True
    ) -> None:
        self._group, self._model = group, model
        self._fuses_gates, self._fuses_angles = fuses_gates, fuses_angles
        self.tokens, self.can_divide = TokenDivision(group), False
        self._linears = [module for module in model.modules() if _is_plain_linear(module)]
        self._embeddings = [module for module in model.modules() if _is_plain_embedding(module)]
        self._norms = [module for module in model.modules() if _is_plain_norm(module)]
        self._blocks: list[Any] = [module for module in model.modules() if is_pre_norm_block(module)]
        if any(_has_hooks(block, block.self_attn, block.mlp) for block in self._blocks):
            self._blocks = []  # a hook may write to what the next block's norm, computed with this one's sum, reads
        for module in model.modules():
            if isinstance(module.forward, RotaryTables):  # of an engine before
                module.forward = module.forward.own
        self._rotaries = [module for module in model.modules() if computes_angles(module)]
        self._head: nn.Module = model.get_output_embeddings()  # type: ignore[operator]
        self._mlps: list[Any] = [module for module in model.modules() if is_of_gated_mlps(module)]
        # The tensors themselves, which must live on so that no other takes their place in memory.
        self._inputs: dict[nn.Module, Tensor] = {}
        self._outputs: dict[nn.Module, Any] = {}

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Note inputs and outputs of one pass."""
        parts = [part for block in self._blocks for part in (block.self_attn, block.mlp)]
        watched: list[nn.Module] = [*self._linears, *self._norms, *self._blocks, *parts, self._head]
        # An engine before this one may have closed its modules to hooks.
        handles = [nn.Module.register_forward_hook(module, self._note, with_kwargs=True) for module in watched]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if args:
            self._inputs[module] = args[0]
        self._outputs[module] = output[0] if isinstance(output, tuple) else output

    def fuse(self, positions: int) -> None:
        """Fuse what was seen, for tokens of so many positions."""
        if self._fuses_angles:
            for module in self._rotaries:
                module.forward = RotaryTables(module.forward, positions)
        joined: dict[Any, JoinedWeights] = {each: both for both in self._join_linears() for each in both.linears}
        for embedding in self._embeddings:
            _fuse_embedding(embedding, self._group)
        for mlp in self._mlps:
            both = joined.get(mlp.gate_proj)
            if self._fuses_gates and both is not None and both.linears == [mlp.gate_proj, mlp.up_proj]:
                _fuse_gate(mlp, both)
        fused = [fused for block in self._blocks if (fused := self._fuse_block(block, joined)) is not None]
        self.can_divide = len(fused) == len(self._blocks) > 0 and all(each.can_divide for each in fused)
        self.tokens.can_leave_out = any(each.is_last for each in fused)
        if self.can_divide:
            fused[0].is_first = fused[-1].is_last = True
            self._first = fused[0]
        self._inputs.clear()
        self._outputs.clear()

    def _join_linears(self) -> list["JoinedWeights"]:
        groups: dict[int, list[ParallelLinear]] = {}
        for module, x in self._inputs.items():  # in the order of their calls
            if isinstance(module, ParallelLinear) and not module.plan.is_rowwise and not module.plan.is_transposed:
                groups.setdefault(id(x), []).append(module)
        return [JoinedWeights(group, self.tokens) for group in groups.values() if len(group) > 1 and _can_join(group)]

    def _fuse_block(self, block: Any, joined: "Mapping[Any, JoinedWeights]") -> "_FusedBlock | None":
        end, inner = (self._last_linear(part) for part in (block.self_attn, block.mlp))
        norm = block.post_attention_layernorm
        next_norm = next((each for each in self._norms if self._inputs.get(each) is self._outputs.get(block)), None)
        if block not in self._outputs or end is None or norm not in self._norms:
            return None
        attention = _EndOfBlock(end, norm, self._group, self.tokens)
        mlp = None if inner is None or next_norm is None else _EndOfBlock(inner, next_norm, self._group, self.tokens)
        fused = _FusedBlock(block, attention, mlp, self.tokens)
        fused.is_last = next_norm is not None and self._ends_model(block, next_norm)
        if mlp is not None and inner is not None:
            fused.joined = self._find_reader(block.self_attn, block.input_layernorm, end, joined)
            fused.can_divide = None not in (fused.joined, self._find_reader(block.mlp, norm, inner, joined))
        return fused

    def _ends_model(self, block: nn.Module, norm: nn.Module) -> bool:
        """True if the head reads what the norm behind this block returns, and no hook sees all of its tokens."""
        read, normed = self._inputs.get(self._head), self._outputs[norm]
        around = [each for each in self._model.modules() if each is not self._model and block in each.modules()]
        is_read = read is not None and read.data_ptr() == normed.data_ptr()
        return is_read and not _has_hooks(norm, *around, *block.modules())

    def _find_reader(
        self, module: nn.Module, norm: nn.Module, end: nn.Module, joined: "Mapping[Any, JoinedWeights]"
    ) -> "JoinedWeights | None":
        """The joined weights by whose product alone a module reads its input, a norm's output; None: not so."""
        read = [each for each in module.modules() if any(one.dim() > 1 for one in each.parameters(recurse=False))]
        both = next((joined[each] for each in read if each in joined), None)
        if both is None or {*read} != {*both.linears, end}:
            return None
        known = self._outputs.get(norm)
        return both if all(self._inputs.get(each) is known for each in both.linears) else None

    def measure(self, sizes: Sequence[int], like: Tensor) -> int | None:
        """The least of these numbers of tokens from which on dividing them is faster in each; None: in none.

        By the products of a block, on the slowest rank; like: of the dtype and device. Collective, on GPUs.
        """
        least = None
        for tokens in sorted(sizes, reverse=True):
            runs = [partial(self._first.multiply, like, tokens, divides=divides) for divides in (False, True)]
            seconds = measure_choices(runs, self._group.group_name, like.device)
            if seconds is None or seconds[1] >= seconds[0]:
                break
            least = tokens
        return least

    def _last_linear(self, module: nn.Module) -> ParallelLinear | None:
        """The rowwise linear whose output is a module's."""
        output = self._outputs.get(module)
        found = (each for each in self._linears if each.plan.is_rowwise and self._outputs.get(each) is output)
        return None if output is None else next(found, None)


class _FusedBlock:
    """A block of Llama's form, whose forward pass it replaces.

    joined: of queries, keys and values. can_divide: see `TokenDivision`.
    """

    def __init__(self, block: Any, attention: "_EndOfBlock", mlp: "_EndOfBlock | None", tokens: TokenDivision) -> None:
        self._block, self._attention, self._mlp, self._tokens = block, attention, mlp, tokens
        self._own = block.forward
        self.joined: JoinedWeights | None = None
        self.can_divide = self.is_first = self.is_last = False
        block.forward = self.forward

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the block's residual; where tokens are divided this rank's part of it, but of the last block."""
        block, attention, mlp, tokens = self._block, self._attention, self._mlp, self._tokens
        if args:
            return self._own(hidden_states, *args, **kwargs)
        if self.is_first:
            hidden_states = tokens.begin(hidden_states)
        normed = self._input_of(block.input_layernorm(hidden_states))
        with attention.left_out():
            attended = block.self_attn(hidden_states=normed, **kwargs)[0]
        if self.is_last:
            attended, hidden_states = tokens.leave_out(attended, hidden_states)
        normed, residual = attention.finish(attended, hidden_states)
        if mlp is None:
            return residual + block.mlp(normed)
        with mlp.left_out():
            activated = block.mlp(self._input_of(normed))
        normed, residual = mlp.finish(activated, residual)
        return mlp.keep_for_next(normed, residual)

    def multiply(self, like: Tensor, tokens: int, *, divides: bool) -> None:
        """The products of the block, without attention, on so many tokens of zeros."""
        assert self.joined is not None
        assert self._mlp is not None
        hidden, attended = (like.new_zeros(1, tokens, features) for features in self._attention.features)
        least, self._tokens.least = self._tokens.least, 1 if divides else None
        hidden = self._tokens.begin(hidden)
        self._tokens.least = least
        self.joined.multiply(self._input_of(hidden))
        normed, residual = self._attention.finish(attended, hidden)
        with self._mlp.left_out():
            self._mlp.finish(self._block.mlp(self._input_of(normed)), residual)
        self._tokens.is_dividing = False

    def _input_of(self, normed: Tensor) -> Tensor:
        return self._tokens.stand_in(normed) if self._tokens.is_dividing else normed


class JoinedWeights:
    """Linears of one input, as one product. Called for the first of them, it keeps the others' parts."""

    def __init__(self, linears: Sequence[ParallelLinear], tokens: TokenDivision) -> None:
        self.linears, self._tokens = list(linears), tokens
        self._is_invariant = linears[0].plan.is_invariant
        parts = [local(linear.weight) for linear in self.linears]
        self._sizes = [len(part) for part in parts]
        self._weight = torch.cat([part.detach() for part in parts])
        self._bias = None if linears[0].bias is None else torch.cat([_bias_of(each).detach() for each in linears])
        for parameters, whole in (([each.weight for each in linears], self._weight), (self._biases(), self._bias)):
            for parameter, view in zip(parameters, () if whole is None else whole.split(self._sizes), strict=True):
                _become_view(parameter, view)
        for linear in linears:
            linear.forget_weights()  # or their own memory would stay beside what was joined
        self._input: Tensor | None = None
        self._parts: tuple[Tensor, ...] = ()
        for number, linear in enumerate(linears):
            linear.forward = self._forward_of(number)  # type: ignore[method-assign]

    def _biases(self) -> list[Tensor]:
        return [bias for linear in self.linears if isinstance(bias := linear.bias, Tensor)]

    def multiply(self, x: Tensor) -> Tensor:
        """All of them, one after another in the last dim."""
        if (part := self._tokens.find_part(x)) is not None:
            return self._tokens.gather_multiply(part, self._weight, self._bias)
        rows = x.flatten(0, -2)
        if self._is_invariant or not is_for_streaming(rows, self._weight):
            return F.linear(x, self._weight, self._bias)  # of invariant linears: see `InvariantOperators`
        return multiply_streaming(rows, self._weight, self._bias).view(*x.shape[:-1], -1)

    def _forward_of(self, number: int) -> Any:
        def forward(x: Tensor) -> Tensor:
            if self._input is not x:
                self._input, self._parts = x, self.multiply(x).split(self._sizes, -1)
            part = self._parts[number]
            if number == len(self._sizes) - 1:
                self._input, self._parts = None, ()
            return part

        return forward


class _EndOfBlock:
    """The rowwise linear that ends attention or an MLP, with the residual and the norm after it."""

    def __init__(
        self, linear: ParallelLinear, norm: ParallelNorm, group: dist.ProcessGroup, tokens: TokenDivision
    ) -> None:
        self._linear, self._norm, self._group, self._tokens = linear, norm, group, tokens
        self._is_left_out = False
        self._normed: tuple[Tensor, Tensor] | None = None
        own, own_norm = linear.forward, norm.forward
        linear.forward = lambda x: x if self._is_left_out else own(x)  # type: ignore[method-assign]

        def find_norm(x: Tensor) -> Tensor:
            """The known state of the norm's input; each output is used once."""
            known, self._normed = self._normed, None
            return known[1] if known is not None and known[0] is x else own_norm(x)

        norm.forward = find_norm  # type: ignore[method-assign]

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Have the linear return its input."""
        self._is_left_out = True
        try:
            yield
        finally:
            self._is_left_out = False

    @property
    def features(self) -> tuple[int, int]:
        """The features of the linear's output, and those of its input that this rank has."""
        out, features = local(self._linear.weight).shape
        return (features, out) if self._linear.plan.is_transposed else (out, features)

    def finish(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(the norm of the new residual, the new residual) of the linear's input and the residual."""
        linear, norm = self._linear, self._norm
        weight = local(linear.weight)
        assert norm.weight is not None
        norm_weight = local(norm.weight)
        # An invariant norm rounds its weights, as a trainer does those that it keeps in fp32.
        dtype = x.dtype if norm.is_invariant else norm_weight.dtype
        weight = weight.t() if linear.plan.is_transposed else weight
        bias = None if linear.bias is None else _bias_of(linear)
        norm_weight, norm_bias = norm_weight.to(dtype), None if norm.bias is None else local(norm.bias).to(dtype)
        kind, eps = "layer" if norm.is_centred else "rms", norm._eps_of(x)
        if self._tokens.is_dividing:
            total = self._tokens.multiply_scatter(x, weight, bias)
            operands = NormOperands(None, residual[0].contiguous(), norm_weight, norm_bias)
            normed, added = add_norm(total, operands, Norm(kind, eps, norm.weight_offset))
            return normed[None], added[None]
        return matmul_all_reduce_norm(
            x.contiguous(),
            weight,
            residual.contiguous(),
            norm_weight,
            self._group,
            eps=eps,
            norm=kind,
            bias=bias,
            norm_bias=norm_bias,
            offset=norm.weight_offset,
            invariant=norm.is_invariant,
        )

    def keep_for_next(self, normed: Tensor, added: Tensor) -> Tensor:
        """The new residual, of which the norm that takes it knows its output already."""
        self._normed = added, normed
        return added


class RotaryTables:
    """A rotary embedding's forward pass, of which it keeps the angles of all positions, in each form that is asked for.

    own: its forward pass: x, position_ids [1, tokens] and what else names a form -> cos, sin [1, tokens, d].
    """

    def __init__(self, own: Callable[..., Any], positions: int) -> None:
        self.own, self._positions = own, positions
        self._tables: dict[Hashable, tuple[Tensor, ...]] = {}

    def __call__(self, x: Tensor, position_ids: Tensor, *others: Any, **named: Any) -> tuple[Tensor, ...]:
        """Look up the angles of positions below `positions`."""
        form = x.dtype, others, *named.items()
        if form not in self._tables:
            every = torch.arange(self._positions, device=position_ids.device)[None]
            self._tables[form] = tuple(each[0].contiguous() for each in self.own(x, every, *others, **named))
        return tuple(F.embedding(position_ids, table) for table in self._tables[form])


def _fuse_gate(mlp: Any, both: JoinedWeights) -> None:
    def forward(x: Tensor) -> Tensor:
        inner = both.multiply(x)
        return mlp.down_proj(gated_activation(inner.flatten(0, -2), mlp.act_fn).view(*inner.shape[:-1], -1))

    mlp.forward = forward


def _fuse_embedding(embedding: ParallelEmbedding, group: dist.ProcessGroup) -> None:
    own = local(embedding.weight)
    address, rows = find_addresses([own], own.device), embedding.plan.rows

    def forward(ids: Tensor) -> Tensor:  # which the engine has checked
        found = look_up_rows(ids, address, embedding.first_row, rows, own)
        return embedding.finish(sum_rows(found.flatten(0, -2), group.group_name).view_as(found))

    embedding.forward = forward


def _is_plain_embedding(module: nn.Module) -> TypeGuard[ParallelEmbedding]:
    """True for an embedding whose shard is looked up as it is, by a kernel."""
    if not isinstance(module, ParallelEmbedding) or _has_hooks(module):
        return False
    own, compute = local(module.weight), module.plan.precision.compute
    is_known = compute in (None, own.dtype) and not module.plan.is_sharded
    return can_launch(own) and own.is_contiguous() and is_known


def _is_plain_linear(module: nn.Module) -> TypeGuard[ParallelLinear]:
    """True for a linear whose shards are multiplied as they are."""
    if not isinstance(module, ParallelLinear) or isinstance(module, ParallelHead | CompressingLinear):
        return False
    compute = module.plan.shard.precision.compute
    is_cast = compute is not None and any(parameter.dtype != compute for parameter in module.parameters())
    is_cast |= module.plan.shard.scaling is not None  # in fp8
    return not (is_cast or module.plan.used_rows or _has_hooks(module))


def _is_plain_norm(module: nn.Module) -> TypeGuard[ParallelNorm]:
    return isinstance(module, ParallelNorm) and module.weight is not None and not _has_hooks(module)


def _has_hooks(*modules: nn.Module) -> bool:
    return any(each._forward_hooks or each._forward_pre_hooks for each in modules)


def _can_join(linears: Sequence[ParallelLinear]) -> bool:
    return len({(each.bias is None, each.weight.dtype, each.plan.output_axis) for each in linears}) == 1


def _bias_of(linear: ParallelLinear) -> Tensor:
    assert linear.bias is not None
    return local(linear.bias)


@torch.no_grad()
def _become_view(parameter: Any, view: Tensor) -> None:
    """Have a parameter's shard be a view of another tensor, which has its numbers."""
    shard: Any = parameter._local_tensor  # to_local would return an alias, whose storage is its own
    shard.set_(view.untyped_storage(), view.storage_offset(), view.shape, view.stride())
