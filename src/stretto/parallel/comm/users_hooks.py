# SPDX-License-Identifier: Apache-2.0
"""Users' hooks of accumulated gradients, called once `.grad` is reduced and not while autograd accumulates; and their
optimizers of parameters that shards have replaced, which raise an error."""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar
from weakref import ref

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

Kept = TypeVar("Kept")


class UsersHooks:
    """Takes the place of users' hooks, and calls those of parameters whose `.grad` has changed.

    begin: has `call` be called at the end of the running backward pass, or of the next that syncs.
    """

    def __init__(self, begin: Callable[[], object]) -> None:
        self._begin = begin
        self._accumulated: dict[nn.Parameter, None] = {}  # with deferred hooks, since the last pass that syncs

    def defer(
        self,
        parameter: nn.Parameter,
        name: str,
        own: Sequence[RemovableHandle] | None,
        *,
        is_reduced: bool,
        has_sink: bool,
    ) -> None:
        """Have a user's hooks of accumulated gradients be called once `.grad` is final. name: for errors.

        own: the reducer's hooks of the parameter, of both kinds. is_reduced: whether `.grad` is final only after the
        pass. has_sink: whether the gradient never comes to `.grad`.

        Raises ValueError for hooks that would see a gradient before it is reduced, and for those that would see none.
        """
        name, is_ours = name or f"a parameter of shape {list(parameter.shape)}", own is not None
        if is_reduced and len(parameter._backward_hooks or ()) > is_ours:
            raise ValueError(
                f"{name} has a hook of register_hook, which would see no gradient, or a rank's own part of it: use "
                "register_post_accumulate_grad_hook, whose hooks are called when .grad is reduced, and may change it"
            )
        hooks = parameter._post_accumulate_grad_hooks or {}
        if len(hooks) == is_ours:
            return
        if has_sink:
            raise ValueError(
                f"{name} has a hook, but its gradient goes to the optimizer that holds its state, and never to .grad"
            )
        for key, hook in hooks.items():  # in place, so that what removes a hook still does
            if not isinstance(hook, _DeferredHook) and (own is None or key != own[1].id):
                hooks[key] = _DeferredHook(hook, ref(self))

    def note(self, parameter: nn.Parameter) -> None:
        """Call this parameter's deferred hooks with the next `call`."""
        self._accumulated[parameter] = None

    def accumulated_by_autograd(self, parameter: nn.Parameter) -> None:
        """Note a parameter of which autograd itself has accumulated the gradient."""
        self._begin()
        self.note(parameter)

    def call(self, place: Callable[[Any], int]) -> None:
        """Call the hooks of all noted parameters, by falling places: one order on all ranks, also where these run
        different modules, since a hook may communicate."""
        hooked, self._accumulated = sorted(self._accumulated, key=place, reverse=True), {}
        with torch.no_grad():
            for parameter in (each for each in hooked if each.grad is not None):
                for hook in list((parameter._post_accumulate_grad_hooks or {}).values()):
                    if isinstance(hook, _DeferredHook):
                        hook.call(parameter)


class _DeferredHook:
    """Stands for a user's hook, which autograd would call before the gradient is reduced."""

    def __init__(self, call: Callable[[nn.Parameter], None], hooks: "ref[UsersHooks]") -> None:
        self.call = call
        # A weak reference: Python's garbage collector does not see what such a hook refers to.
        self._hooks = hooks

    def __call__(self, parameter: nn.Parameter) -> None:
        alive(self._hooks).accumulated_by_autograd(parameter)


def alive(kept: "ref[Kept]") -> Kept:
    """The object that a weak reference refers to. RuntimeError once it is gone, with the model that has held it."""
    found = kept()
    if found is None:
        raise RuntimeError("this parameter's model is gone: keep a reference to the model")
    return found


_OF_WHOLE_WEIGHTS = (torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.Rprop)
_replaced: dict[int, ref[nn.Parameter]] = {}  # by id, while anything holds them


def refuse_optimizers_of(before: Iterable[ref[nn.Parameter]], now: Iterable[nn.Parameter]) -> None:
    """Have optimizers of parameters of `before` that are none of a model's `now` raise ValueError in `step`.

    They would skip them in silence, as these get no gradients. So do torch's optimizers that cannot update shards.
    """
    own = {id(parameter) for parameter in now}
    left = [parameter for one in before if (parameter := one()) is not None and id(parameter) not in own]
    alive = {id(parameter): ref(parameter, _forget) for parameter in left}
    _watch_optimizers()
    _replaced.update(alive)


@functools.cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_refuse_in_step)


def _forget(dead: ref[nn.Parameter]) -> None:
    for number in [number for number, one in _replaced.items() if one is dead]:
        del _replaced[number]


def _refuse_in_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    if _replaced and any(id(one) in _replaced for one in _parameters_of(optimizer)):
        raise ValueError(
            f"this {type(optimizer).__name__} was made before stretto.parallelize or distribute_embeddings, which has "
            "replaced parameters by shards, and would not train them: make it afterwards, of model.parameters()"
        )
    kind = type(optimizer)
    of_transformers = kind.__module__ == "transformers.optimization"  # Adafactor: adds any DTensor to plain tensors
    if (of_transformers and any(isinstance(one, DTensor) for one in _parameters_of(optimizer))) or (
        isinstance(optimizer, _OF_WHOLE_WEIGHTS) and any(map(_is_cut, _parameters_of(optimizer)))
    ):
        raise ValueError(
            f"{kind.__module__.split('.')[0]}'s {kind.__name__} cannot update shards of weights, which "
            "stretto.parallelize or distribute_embeddings has made: torch's AdamW, SGD, RMSprop and Adagrad can, and "
            "stretto.optim's Muon"
        )


def _parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _is_cut(parameter: Tensor) -> bool:
    return isinstance(parameter, DTensor) and any(
        placement.is_shard() and parameter.device_mesh.size(dim) > 1
        for dim, placement in enumerate(parameter.placements)
    )
