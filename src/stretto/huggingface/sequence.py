# SPDX-License-Identifier: Apache-2.0
"""Sequence sharding of transformers' models: between the first block's entry and the last one's end, each rank of x has
its part of the tokens. Embeddings, masks, rotary tables, final norm, head and loss see all of them, as always.

Attention reads its input's shape, so it gets a stand-in of the whole shape, in whose place its linears gather the part.
"""

import inspect
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from stretto.huggingface.pretrained_model import base_of


class DividedTokens(Protocol):
    """`stretto.parallel`'s division of a batch's tokens among the ranks of x."""

    def enter(self, whole: Tensor) -> Tensor: ...

    def leave(self, part: Tensor) -> Tensor: ...

    def forget_gathered(self) -> None: ...

    def stand_in(self, part: Tensor, module: nn.Module) -> Tensor: ...

    def is_part(self, hidden: Tensor) -> bool: ...


def blocks_of(model: nn.Module, names: Iterable[str]) -> tuple[str, ...]:
    """The items of the outermost nn.ModuleList that holds submodules of these names, in order. ValueError for none, or
    several lists."""
    lists: dict[str, None] = {}
    for name in names:
        parts = name.split(".")
        outer = (".".join(parts[:length]) for length in range(1, len(parts)))
        found = (each for each in outer if isinstance(model.get_submodule(each), nn.ModuleList))
        lists[next(found, "")] = None
    if len(lists) != 1 or "" in lists:
        named = ", ".join(each or "none" for each in lists) or "none"
        raise ValueError(
            f"shard_sequence takes a model with one list of blocks, and {type(model).__name__} has {named}"
        )
    (one,) = lists
    return tuple(f"{one}.{index}" for index in range(len(model.get_submodule(one))))  # type: ignore[arg-type]


def changes_in_place(attention: nn.Module) -> bool:
    """True if an attention's code changes tensors in place, as OLMoE's clips queries, keys and values: autograd lets it
    not do so to parts of one product."""
    names = inspect.unwrap(type(attention).forward).__code__.co_names
    clips = getattr(getattr(attention, "config", None), "clip_qkv", True) is not None
    return clips and any(name.endswith("_") and not name.endswith("__") for name in names)


def shard_between_blocks(
    model: nn.Module, blocks: Sequence[str], attentions: Iterable[str], tokens: DividedTokens
) -> None:
    """Have the first block take its rank's tokens, the last one return all, and attention take stand-ins; hidden states
    that the model returns are whole."""

    @torch.compiler.disable
    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return _with_hidden(args, kwargs, tokens.enter)

    @torch.compiler.disable
    def begin(*_: Any) -> None:
        tokens.forget_gathered()

    @torch.compiler.disable
    def leave(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return (tokens.leave(output[0]), *output[1:]) if isinstance(output, tuple) else tokens.leave(output)

    def stand_in(attention: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return _with_hidden(args, kwargs, lambda part: tokens.stand_in(part, attention))

    @torch.compiler.disable
    def gather_states(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        def whole(states: Any) -> Any:
            if not isinstance(states, tuple) or not any(isinstance(each, Tensor) for each in states):
                return states
            return tuple(
                tokens.leave(each) if isinstance(each, Tensor) and tokens.is_part(each) else each for each in states
            )

        if isinstance(output, tuple):
            return tuple(whole(each) for each in output)
        if getattr(output, "hidden_states", None) is not None:
            output.hidden_states = whole(output.hidden_states)
        return output

    for name in blocks:
        model.get_submodule(name).register_forward_pre_hook(begin)
    model.get_submodule(blocks[0]).register_forward_pre_hook(enter, with_kwargs=True)
    model.get_submodule(blocks[-1]).register_forward_hook(leave)
    for name in attentions:
        model.get_submodule(name).register_forward_pre_hook(stand_in, with_kwargs=True)
    for module in {model: None, base_of(model): None}:
        module.register_forward_hook(gather_states)


def _with_hidden(args: tuple[Any, ...], kwargs: dict[str, Any], change: Any) -> tuple[Any, Any]:
    """The arguments of a block or its attention, with hidden states as `change` makes them."""
    if args:
        return (change(args[0]), *args[1:]), kwargs
    return args, kwargs | {"hidden_states": change(kwargs["hidden_states"])}
