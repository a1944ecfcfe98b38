# SPDX-License-Identifier: Apache-2.0
"""Initializes a model on the meta device, seeded by each module's name: the same weights on every grid."""

import copy
import hashlib
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn


class MetaInitializer:
    """Makes the initial weights of a model's modules, one module at a time; the model itself is not changed."""

    def __init__(self, model: nn.Module, device: torch.device, seed: int | None) -> None:
        """seed: None to leave parameters unset (NaN), for weights that are loaded afterwards."""
        self.model = model
        self.device = device
        self.seed = seed

    def remember(self, whole: nn.Module) -> None:
        """Take the modules that initialize from this copy on meta: the model is going to be cut into stages."""
        self.__dict__["_shadow"] = whole

    def real(self, name: str, module: nn.Module) -> nn.Module | SimpleNamespace:
        """An object with the module's own parameters and buffers: itself, or what those on meta are initialized to.

        As Hugging Face does, `_init_weights` of the model (or of the part of it that has its own) is called for the
        module and then for those that it is in, which may initialize it otherwise; a model without one leaves it to
        the module's `reset_parameters`. Raises ValueError where neither sets a value.
        """
        own = {**module._parameters, **module._buffers}
        if not any(tensor is not None and tensor.is_meta for tensor in own.values()):
            return module
        real = {key: tensor for key, tensor in own.items() if tensor is None or not tensor.is_meta}
        if self.seed is None and not any(buffer is not None and buffer.is_meta for buffer in module._buffers.values()):
            unset = {key: self._make_unset(tensor) for key, tensor in own.items() if tensor is not None}
            return SimpleNamespace(**{**unset, **real})
        has_initializer = callable(getattr(self.model, "_init_weights", None))
        root = self._shadow if has_initializer else copy_to_meta(module)
        path = list(_path(root, name if has_initializer else ""))
        target = path[-1]
        steps: Sequence[Callable[[], Any]]
        if has_initializer:
            steps = [partial(_nearest_initializer(path[: depth + 1]), path[depth]) for depth in range(len(path))][::-1]
        elif callable(by_itself := getattr(target, "reset_parameters", None)):
            steps = [by_itself]
        else:
            wanted = module.named_buffers if self.seed is None else module.named_parameters
            held = ", ".join(name for name, _ in wanted(recurse=False)) or "buffers"
            raise ValueError(
                f"{name or 'the model'} ({type(module).__name__}) is on the meta device and has no reset_parameters to "
                f"initialize what it holds itself ({held}): give it that method, or build the model on a real device"
            )
        saved = dict(target._parameters), dict(target._buffers)
        blank = self._make_blank(target)
        versions = {key: tensor._version for key, tensor in blank.items()}
        digest = hashlib.sha256(f"{self.seed}:{name}".encode()).digest()
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.no_grad(), torch.random.fork_rng(devices):
            torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            for step in steps:
                step()
        values = {key: getattr(target, key) for key in own}
        target._parameters, target._buffers = saved
        for key, tensor in blank.items():
            if tensor.is_floating_point():
                is_unset = bool(values[key].isnan().any())
            else:
                is_unset = values[key] is tensor and tensor._version == versions[key]
            if is_unset:
                raise ValueError(
                    f"{name} is on the meta device and its initialization leaves {key} unset, or some of it: "
                    "build the model on a real device, or set it in _init_weights or reset_parameters"
                )
        # What was not on the meta device keeps its value.
        return SimpleNamespace(**{**values, **real})

    @cached_property
    def _shadow(self) -> nn.Module:
        return copy_to_meta(self.model)

    def _make_unset(self, tensor: Tensor) -> Tensor:
        """Make a tensor of this shape on the device, NaN where it can be."""
        new = torch.zeros_like(tensor, device=self.device, requires_grad=False)
        return new.fill_(torch.nan) if new.is_floating_point() else new

    def _make_blank(self, target: nn.Module) -> dict[str, Tensor]:
        """Give a module tensors on the device, NaN where they can be; returns them by name."""
        blank: dict[str, Tensor] = {}
        for tensors in (target._parameters, target._buffers):
            for key, tensor in tensors.items():
                if tensor is None:
                    continue
                new = self._make_unset(tensor)
                blank[key] = nn.Parameter(new, tensor.requires_grad) if tensors is target._parameters else new
                tensors[key] = blank[key]  # type: ignore[assignment]
        return blank


def copy_to_meta(module: nn.Module) -> nn.Module:
    """A copy of which every parameter and buffer is on the meta device.

    Attributes that cannot be copied, such as a grid or a process group, are those of the module itself.
    """
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    try:
        return copy.deepcopy(module, dict(memo))
    except TypeError:
        of_torch = set(vars(nn.Module()))
        values = [value for each in module.modules() for key, value in vars(each).items() if key not in of_torch]
        memo |= {id(value): value for value in values if not _can_be_copied(value, memo)}
        return copy.deepcopy(module, memo)


def _can_be_copied(value: Any, memo: dict[int, Any]) -> bool:
    try:
        copy.deepcopy(value, dict(memo))
    except TypeError:
        return False
    return True


def _path(root: nn.Module, name: str) -> Iterator[nn.Module]:
    """The modules from the root down to the one of this name."""
    yield root
    for part in name.split(".") if name else []:
        root = root.get_submodule(part)
        yield root


def _nearest_initializer(path: list[nn.Module]) -> Callable[[nn.Module], Any]:
    """The `_init_weights` of the last module in the path that has one."""
    return next(init for module in reversed(path) if callable(init := getattr(module, "_init_weights", None)))
