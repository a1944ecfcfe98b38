# SPDX-License-Identifier: Apache-2.0
"""`parallelize(..., invariant=True)`: a forward pass in which a token's bits depend on its own sequence alone.

Linears, norms and experts have an invariant form of their own. Here is what surrounds them: attention, products in the
code of layers (routers, gates), activations on CPUs, and the refusal of what has no invariant form.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode

from stretto.execution import ExecutionOptions
from stretto.huggingface import context as of_transformers
from stretto.huggingface.attention.paged_attention import refusal_of_decoding
from stretto.huggingface.known_modules import cache_of_nothing
from stretto.huggingface.pretrained_model import is_pretrained_model, unwrap
from stretto.ops import LEAVES, invariant_matmul, paged_attention
from stretto.parallel.blocks import find_blocks
from stretto.parallel.layers.dropout import ParallelDropout
from stretto.parallel.layers.sharded_module import ShardedModule, refuse_compiler
from stretto.parallel.roles.plan import ShardingPlan
from stretto.parallel.state import BlockPlan

_PRODUCTS = (
    torch.matmul, torch.mm, torch.bmm, torch.addmm, torch.baddbmm, torch.einsum, torch.Tensor.matmul, torch.Tensor.mm,
    torch.Tensor.bmm, torch.Tensor.__matmul__, torch.Tensor.__rmatmul__, F.scaled_dot_product_attention,
)  # fmt: skip
_OUTER_PRODUCTS = {torch.matmul, torch.mm, torch.bmm, Tensor.matmul, Tensor.mm, Tensor.bmm, Tensor.__matmul__}
_ACTIVATIONS = (
    F.silu, F.gelu, F.sigmoid, F.mish, F.softplus, F.elu, torch.sigmoid, torch.Tensor.sigmoid, torch.tanh,
    torch.Tensor.tanh, torch.exp, torch.Tensor.exp,
)  # fmt: skip


class InvariantOperators(TorchFunctionMode):
    """Runs the operators of a layer's own code so that a row's bits depend on no other row.

    `F.linear`, of a router say, becomes `invariant_matmul`, and an outer product one of elements; other products are
    refused by name. On CPUs torch computes
    the last elements of a tensor by other instructions than the rest: activations are computed in fp64, and rounded.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            return _multiply(*args, **kwargs)
        if func in _OUTER_PRODUCTS and len(args) == 2 and not kwargs and _is_outer(*args):
            return args[0] * args[1]  # of angles and positions, say: no additions, and no TF32
        if func in _PRODUCTS:
            raise ValueError(
                f"invariant=True: a layer's own code calls {getattr(func, '__name__', func)}, whose bits depend on the "
                "number of rows, and which is no linear that parallelize has replaced: invariant=False would do"
            )
        if func in _ACTIVATIONS and args[0].device.type == "cpu" and args[0].dtype != torch.float64:
            return func(args[0].double(), *args[1:], **kwargs).to(args[0].dtype)
        return func(*args, **kwargs)


def _is_outer(left: Any, right: Any) -> bool:
    """True for [..., m, 1] times [..., 1, n]."""
    return left.dim() > 1 < right.dim() and left.shape[-1] == right.shape[-2] == 1


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return invariant_matmul(x.contiguous(), weight, bias=bias)


def require_invariant(
    model: Any, sizes: Mapping[str, int], plan: ShardingPlan | BlockPlan, options: ExecutionOptions
) -> None:
    """Raise ValueError for models, grids and options that have no invariant forward pass."""
    kind = type(model).__name__
    if not isinstance(plan, ShardingPlan):
        raise ValueError(f"invariant=True takes models with roles, but {kind} is sharded by blocks: {plan.reason}")
    if not is_pretrained_model(model):
        raise ValueError(f"invariant=True takes transformers' causal language models, not {kind}")
    if refusal := refusal_of_decoding(unwrap(model), list(inspect.signature(unwrap(model).forward).parameters)):
        raise ValueError(f"invariant=True: {refusal}")
    sizes = dict(sizes) | {"pipe": sizes.get("pipe", 1) * options.stages.virtual_stages}
    for axis in ("pipe", "context", "y"):
        if sizes.get(axis, 1) > 1:
            raise ValueError(
                f"invariant=True runs on data, x, z and expert, but {axis} is {sizes[axis]}: {axis}=1 would do"
            )
    if (x := sizes.get("x", 1)) not in (1, 2, 4, LEAVES):
        nearest = min((1, 2, 4, LEAVES), key=lambda size: abs(size - x))
        raise ValueError(f"invariant=True takes x of 1, 2, 4 or {LEAVES}, not {x}: x={nearest} would do")
    if options.shard_sequence and plan.experts:  # in bf16 a nightly case had other bits
        raise ValueError(
            f"invariant=True with shard_sequence=True takes no experts, whose bits it may change, and {kind} has some: "
            "shard_sequence=False would do"
        )
    inputs = {
        name: module.weight.shape[int(name not in plan.transposed)]
        for name in plan.named("rowwise")
        if isinstance((module := model.get_submodule(name)).weight, Tensor)
    }
    for name, experts in plan.experts.items():
        shape = model.get_submodule(name).down_proj.shape
        inputs[name] = shape[1 if experts.is_transposed else 2]
    for name, size in inputs.items():
        if size % LEAVES:
            nearest = max(1, round(size / LEAVES)) * LEAVES
            raise ValueError(
                f"invariant=True adds up the inputs of {name} in {LEAVES} equal parts, which do not divide {size}: "
                f"{nearest} would do"
            )


def install_invariant(model: Any) -> None:
    """Have a model's attention, and its layers' own code, compute invariant results."""
    of_transformers.replace_attention(model, _attend)
    blocks = find_blocks(model)
    for name, module in model.named_modules():
        # Rotary angles, say, are computed beside the blocks.
        is_beside = not any(module.children()) and not name.startswith(tuple(f"{block}." for block in blocks))
        if name in blocks or (is_beside and not isinstance(module, ShardedModule)):
            module.forward = _run_invariant(module.forward)
    signature = inspect.signature(unwrap(model).forward)
    dropouts = {name: one for name, one in model.named_modules() if isinstance(one, ParallelDropout | _DropoutNd)}

    def find_documents(
        model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if name := next((name for name, one in dropouts.items() if one.training and one.p > 0), None):
            raise ValueError(
                f"invariant=True: {name} drops {dropouts[name].p:g} of its numbers, which an engine does not: a "
                "configuration without dropout would do, or model.eval()"
            )
        if model.config._attn_implementation != of_transformers.NAME:  # an engine runs it
            return None
        given = signature.bind(*args, **kwargs).arguments
        given |= given.pop("kwargs", {})
        documents = _find_documents(model, given)
        return None if documents is None else (args, kwargs | {"cu_seq_lens_q": documents, "cu_seq_lens_k": documents})

    model.register_forward_pre_hook(torch.compiler.disable(find_documents), with_kwargs=True)


def _run_invariant(forward: Callable[..., Any]) -> Callable[..., Any]:
    layer: Any = getattr(forward, "__self__", None)

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        refuse_compiler()
        own = getattr(layer, "_gradient_checkpointing_func", None)
        if own is not None and not isinstance(own, _InvariantCheckpoint):  # transformers' is within the forward
            layer._gradient_checkpointing_func = _InvariantCheckpoint(own)
        with InvariantOperators():
            return forward(*args, **kwargs)

    return run


class _InvariantCheckpoint:
    """A layer's checkpoint function, which also computes again by `InvariantOperators`."""

    def __init__(self, own: Callable[..., Any]) -> None:
        self._own = own

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self._own(_run_invariant(function), *args, **kwargs)


def _find_documents(model: Any, given: Mapping[str, Any]) -> Tensor | None:
    """The documents of packed or padded rows, int32 [documents + 1] on the CPU; None if each row is one."""
    cache, mask = given.get("past_key_values"), given.get("attention_mask")
    tokens = next((one for name in ("input_ids", "inputs_embeds") if isinstance(one := given.get(name), Tensor)), None)
    if tokens is None:
        return None
    if cache is not None and cache is not cache_of_nothing():
        if getattr(cache, "is_compileable", False):
            raise ValueError("invariant=True takes no static cache: a dynamic one would do, or an Engine")
        if isinstance(mask, Tensor) and not bool(mask.bool().all()):
            raise ValueError("invariant=True takes no padding together with a cache: an Engine takes prompts without")
        return None
    return of_transformers.find_documents(model, given, *tokens.shape[:2]).ends


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    documents: Tensor | None = None,
    sinks: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Causal attention [batch, heads, seq, size], with the bits of `paged_attention` with invariant=True."""
    if sinks is not None or key.shape != value.shape:
        raise ValueError("invariant=True: attention takes no sinks, and keys and values of one size")
    return _Attention.apply(query, key, value, scale, window, documents)


class _Attention(torch.autograd.Function):
    """Attention by pages of which each has a whole row, or one token of packed rows. Gradients are torch's."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None,
        window: int | None,
        documents: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.options = scale, window, documents
        (rows, heads, new, size), device = query.shape, query.device
        keys, values = (each.transpose(1, 2) for each in (key, value))
        if documents is not None or keys.stride() != values.stride() or keys.stride(3) != 1:
            keys, values = keys.contiguous(), values.contiguous()
        if documents is None:
            table = torch.arange(rows, dtype=torch.int32, device=device)[:, None]
            lengths = torch.full((rows,), key.shape[2], dtype=torch.int32, device=device)
            offsets = torch.arange(0, rows * new + 1, new, dtype=torch.int32, device=device)
        else:
            keys, values = keys.flatten(0, 1).unsqueeze(1), values.flatten(0, 1).unsqueeze(1)
            offsets, lengths = documents, documents.diff()
            table = (offsets[:-1, None] + torch.arange(int(lengths.max()), device="cpu")).clamp(max=len(keys) - 1).int()
            offsets, lengths, table = (each.to(device) for each in (offsets, lengths, table))
        queries = query.transpose(1, 2).contiguous().view(-1, heads, size)
        options: dict[str, Any] = {"scale": scale, "window": window, "invariant": True}
        out = paged_attention(queries, keys, values, table, lengths, query_offsets=offsets, **options)
        return out.view(rows, new, heads, size).transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        scale, window, documents = ctx.options
        query, key, value = (each.detach().requires_grad_() for each in ctx.saved_tensors)
        mask = _make_mask(query.shape, key.shape, window, documents)
        mask = None if mask is None else mask.to(gradient.device)
        is_grouped = query.shape[1] != key.shape[1]
        with torch.enable_grad():
            out = F.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=is_grouped
            )
        return *torch.autograd.grad(out, (query, key, value), gradient), None, None, None


def _make_mask(query: torch.Size, key: torch.Size, window: int | None, documents: Tensor | None) -> Tensor | None:
    """Make the mask of what each query sees, bool [rows or 1, 1, queries, keys]; None for plain causal attention."""
    new, whole = query[2], key[2]
    if window is None and documents is None and new == whole:
        return None
    place = torch.arange(whole, device="cpu")
    distance = place[whole - new :, None] - place
    seen = (distance >= 0) & (distance < (window or whole))
    if documents is None:
        return seen[None, None]
    number = torch.searchsorted(documents[1:].long(), torch.arange(query[0] * whole, device="cpu"), right=True).view(
        -1, whole
    )
    return (seen & (number[:, :, None] == number[:, None]))[:, None]
