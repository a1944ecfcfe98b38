# SPDX-License-Identifier: Apache-2.0
"""Optimizer steps on ranges of flat tensors: AdamW's own, and those of any elementwise optimizer of torch, by tiles."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stretto.memory import failures
from stretto.optim.state.master_weights import join, round_to, round_to_bf16

MASTER = "master"
LOW = "low"
AVERAGE = "average"  # a parameter's moving average (`stretto.optim.averages`), also in checkpoints
TILE = 1_800_000
"""Numbers of a tile on a CPU: those of Singh, section 7.2, whose fp32 gradients take 7.2 MB."""
GPU_TILE = 1 << 26
"""Numbers of a tile on a GPU: 256 MB. A tile costs the host 0.13 ms, which a GPU's time for small ones does not hide
(lab/results/offload)."""

MakeOptimizer = Callable[[list[dict[str, Any]]], Optimizer]


@dataclass
class History:
    """State that parameters share which have taken equally many steps, and that is not kept for every number.

    scalars: by name; "step" of AdamW. has_state: False before the first step.
    """

    scalars: dict[str, Any] = field(default_factory=dict)
    has_state: bool = False

    def copy(self) -> "History":
        """One that goes on by itself."""
        return History({name: copied(value) for name, value in self.scalars.items()}, self.has_state)


def copied(value: Any) -> Any:
    """A value that is read later: the caller may write the next step's into its tensor."""
    return value.clone() if isinstance(value, Tensor) else value


@dataclass(frozen=True)
class StepSettings:
    """Settings that all ranges of a step share.

    lr: a number, or a 0-dim tensor on the device. scale: fp32, 0-dim, what gradients are multiplied by. skip: int32
    [1], not 0 if the step must change nothing.
    """

    lr: float | Tensor
    scale: Tensor
    skip: Tensor


class Update(ABC):
    """Updates a range of weights from its gradients and its state.

    slots: the state that it keeps for every element, by name, with dtypes; in addition to the master weight.
    """

    slots: Mapping[str, torch.dtype]

    @abstractmethod
    def begin(self, settings: StepSettings, histories: Mapping[int, History], weight_decays: tuple[float, ...]) -> None:
        """Prepare a step of these histories: parameters of one history have taken equally many steps.

        Advances the numbers that a history has (`step`). weight_decays: of each segment.
        """

    @abstractmethod
    def apply(
        self, weight: Tensor, gradient: Tensor, state: Mapping[str, Tensor], *, history: int, segment: int
    ) -> None:
        """Update `weight` [n] and `state`, of n numbers each, from `gradient`."""

    def end(self) -> None:
        return


class KernelUpdate(Update):
    """An update that reads 16-bit gradients: one kernel on a GPU.

    On a CPU it takes tiles of `tile` elements, and each operation rounds separately, so that the bits of a result do
    not depend on where a range ends.
    """

    tile: int
    _settings: StepSettings | None = None

    def apply(
        self, weight: Tensor, gradient: Tensor, state: Mapping[str, Tensor], *, history: int, segment: int
    ) -> None:
        settings = self._settings
        assert settings is not None
        if weight.is_cuda:
            flags = {"skip": settings.skip, "failed": failures.find_flag(weight.device)}
            self._launch(weight, gradient, state, history, segment, scale=settings.scale, **flags)
        elif not settings.skip.item():
            for first in range(0, weight.numel(), self.tile):
                part = slice(first, first + self.tile)
                own = {name: tensor[part] for name, tensor in state.items()}
                master = open_master(weight[part], own)
                self._step(master, gradient[part].to(torch.float32) * settings.scale, own, history, segment)
                close_master(master, weight[part], own)

    @abstractmethod
    def _launch(
        self, weight: Tensor, gradient: Tensor, state: Mapping[str, Tensor], history: int, segment: int, **common: Any
    ) -> None:
        """Launch the kernel. common: its arguments `scale`, `skip` and `failed`."""

    @abstractmethod
    def _step(self, master: Tensor, gradient: Tensor, state: Mapping[str, Tensor], history: int, segment: int) -> None:
        """Update fp32 weights and their state in place. gradient: fp32 and scaled; may be overwritten."""


class AdamWUpdate(KernelUpdate):
    """AdamW (Loshchilov and Hutter 2019, algorithm 2)."""

    slots: Mapping[str, torch.dtype] = {"exp_avg": torch.float32, "exp_avg_sq": torch.float32}

    def __init__(self, *, betas: tuple[float, float], eps: float, tile: int = TILE) -> None:
        self.betas, self.eps, self.tile = betas, eps, tile
        self._corrections: dict[tuple[int, int], Tensor] = {}

    def begin(self, settings: StepSettings, histories: Mapping[int, History], weight_decays: tuple[float, ...]) -> None:
        self._settings = settings
        device = settings.skip.device
        for history in histories.values():
            if not history.has_state:
                history.scalars["step"] = torch.zeros((), dtype=torch.float32, device=device)
                history.has_state = True
        taken = (settings.skip[0] == 0).float()
        failed = failures.find_flag(device)
        if failed is not None:
            taken = taken * (failed[0] == 0)
        steps = [history.scalars["step"] for history in histories.values()]
        torch._foreach_add_(steps, [taken] * len(steps))
        counts = torch.stack(steps).double()
        first_rest, second_rest = (1 - beta**counts for beta in self.betas)
        self._corrections = {}
        for segment, decay in enumerate(weight_decays):
            left = torch.ones_like(counts) - settings.lr * decay
            rows = torch.stack((settings.lr / first_rest, second_rest.rsqrt(), left), dim=1).float()
            self._corrections |= {(history, segment): rows[at] for at, history in enumerate(histories)}

    def _launch(
        self, weight: Tensor, gradient: Tensor, state: Mapping[str, Tensor], history: int, segment: int, **common: Any
    ) -> None:
        from stretto.optim.state.kernels import launch  # imported here, since Triton comes with GPUs

        moments, rest = (state["exp_avg"], state["exp_avg_sq"]), state.get(MASTER, state.get(LOW))
        options = {"betas": self.betas, "eps": self.eps}
        corrections = self._corrections[history, segment]
        launch(weight, gradient, *moments, rest, corrections=corrections, options=options, **common)

    def _step(self, master: Tensor, gradient: Tensor, state: Mapping[str, Tensor], history: int, segment: int) -> None:
        step_size, root_scale, keep = self._corrections[history, segment].unbind()
        (beta1, beta2), first, second = self.betas, state["exp_avg"], state["exp_avg_sq"]
        first.mul_(beta1).add_(gradient * (1 - beta1))
        second.mul_(beta2).add_(gradient.mul_(gradient).mul_(1 - beta2))
        denominator = second.sqrt().mul_(root_scale).add_(self.eps)
        master.mul_(keep).sub_((first * step_size).div_(denominator))


class SGDUpdate(KernelUpdate):
    """SGD with momentum, as torch's (no dampening, no Nesterov)."""

    def __init__(self, *, momentum: float, tile: int = TILE) -> None:
        self.momentum, self.tile = momentum, tile
        self.slots = {"momentum_buffer": torch.float32} if momentum else {}
        self._lr: Tensor = torch.empty((), device="cpu")
        self._weight_decays: tuple[float, ...] = ()

    def begin(self, settings: StepSettings, histories: Mapping[int, History], weight_decays: tuple[float, ...]) -> None:
        self._settings, self._weight_decays = settings, weight_decays
        self._lr = torch.as_tensor(settings.lr, dtype=torch.float32, device=settings.skip.device)
        for history in histories.values():
            history.has_state = bool(self.momentum)

    def _launch(
        self, weight: Tensor, gradient: Tensor, state: Mapping[str, Tensor], history: int, segment: int, **common: Any
    ) -> None:
        from stretto.optim.state.kernels import launch_sgd  # imported here, since Triton comes with GPUs

        buffer, rest = state.get("momentum_buffer"), state.get(MASTER, state.get(LOW))
        options = self.momentum, self._weight_decays[segment]
        launch_sgd(weight, gradient, buffer, rest, lr=self._lr, options=options, **common)

    def _step(self, master: Tensor, gradient: Tensor, state: Mapping[str, Tensor], history: int, segment: int) -> None:
        change = gradient.add_(master * self._weight_decays[segment])
        if self.momentum:
            change = state["momentum_buffer"].mul_(self.momentum).add_(change)
        master.sub_(change * self._lr)


class TiledUpdate(Update):
    """Steps of any elementwise optimizer of torch, by tiles of `tile` numbers (Singh, section 7.2).

    Each tile is a separate parameter during its step, with its gradient in fp32: 4 x tile bytes of scratch
    in place of 4 bytes a parameter. make: as `ShardOptimizer` takes it; `find_slots` says what state it keeps. tile:
    None for TILE, or GPU_TILE.
    """

    def __init__(self, make: MakeOptimizer, slots: Mapping[str, torch.dtype], *, tile: int | None = None) -> None:
        self.slots = slots
        self.tile = tile
        self._make = make
        self._inner: list[Optimizer] = []  # of each segment
        self._settings: StepSettings | None = None
        self._before: Mapping[int, History] = {}
        self._after: dict[int, dict[str, Any]] = {}
        self._scratch = torch.empty(0, device="cpu")
        self._is_skipped = False

    def begin(self, settings: StepSettings, histories: Mapping[int, History], weight_decays: tuple[float, ...]) -> None:
        self._settings = settings
        if not self._inner:
            empty = [nn.Parameter(torch.empty(0, device=settings.skip.device)) for _ in weight_decays]
            self._inner = [
                self._make([{"params": [parameter], "weight_decay": decay}])
                for parameter, decay in zip(empty, weight_decays, strict=True)
            ]
        for optimizer in self._inner:
            for group in optimizer.param_groups:
                group["lr"] = settings.lr
        self._before, self._after = histories, {}
        # A general optimizer cannot skip a step on the device, so the host asks for it.
        self._is_skipped = bool(settings.skip.item())
        failures.check()

    def apply(
        self, weight: Tensor, gradient: Tensor, state: Mapping[str, Tensor], *, history: int, segment: int
    ) -> None:
        assert self._settings is not None
        if self._is_skipped:
            return
        tile = self.tile or (GPU_TILE if weight.is_cuda else TILE)
        if self._scratch.device != weight.device or not len(self._scratch):
            self._scratch = torch.empty(tile, dtype=torch.float32, device=weight.device)
        before, optimizer = self._before[history], self._inner[segment]
        for first in range(0, weight.numel(), tile):
            part = slice(first, first + tile)
            own = {name: tensor[part] for name, tensor in state.items()}
            master = open_master(weight[part], own)
            parameter = nn.Parameter(master)
            parameter.grad = scaled(gradient[part], self._settings.scale, self._scratch[: len(master)])
            optimizer.param_groups[0]["params"] = [parameter]
            optimizer.state.clear()
            if before.has_state:
                optimizer.state[parameter] = before.copy().scalars | {name: own[name] for name in self.slots}
            optimizer.step()
            self._after[history] = self._write_back(optimizer.state[parameter], own)
            close_master(master, weight[part], own)
        optimizer.param_groups[0]["params"] = []
        optimizer.state.clear()

    def _write_back(self, left: Mapping[str, Any], own: Mapping[str, Tensor]) -> dict[str, Any]:
        """Write back the state that an optimizer has put elsewhere. Returns what is not of every number."""
        for name in self.slots:
            if left[name] is not own[name]:
                own[name].copy_(left[name])
        return {name: value for name, value in left.items() if name not in self.slots}

    def end(self) -> None:
        for history, scalars in self._after.items():
            self._before[history].scalars = scalars
            self._before[history].has_state = True
        self._after = {}


def scaled(gradient: Tensor, scale: Tensor, out: Tensor) -> Tensor:
    """`gradient` times `scale` in fp32, in `out`, which is returned."""
    if gradient.is_cuda:
        from stretto.optim.state.kernels import launch_scale

        launch_scale(gradient, scale, out)
        return out
    return out.copy_(gradient).mul_(scale)


def open_master(weight: Tensor, state: Mapping[str, Tensor]) -> Tensor:
    """The fp32 weights: those in memory, which `close_master` need not write, or new ones."""
    if LOW in state:
        return join(weight, state[LOW])
    return state.get(MASTER, weight)


def close_master(master: Tensor, weight: Tensor, state: Mapping[str, Tensor]) -> None:
    """Round updated fp32 weights to `weight`, and keep them."""
    if LOW in state:
        round_to_bf16(master, weight, state[LOW])
    elif MASTER in state:
        round_to(master, weight)


def find_slots(make: MakeOptimizer) -> dict[str, torch.dtype]:
    """The state that an optimizer keeps for every number, by name.

    ValueError for an optimizer that is not elementwise. It is tried: three steps of small parameters, whole and in
    pieces, must give the same numbers.
    """
    whole, state = _try(make, [(6, 4)])
    pieces, _ = _try(make, [(7,), (17,)])
    if not torch.allclose(whole, pieces, rtol=1e-6, atol=1e-9):
        raise ValueError(
            "optimizer state is kept in flat buckets, which takes an elementwise optimizer (AdamW, SGD, Adagrad, "
            "RMSprop, Lion), and this one updates a matrix otherwise than its numbers one by one: keep its state with "
            "the parameters"
        )
    slots = {name: value for name, value in state.items() if isinstance(value, Tensor) and value.numel() == 24}
    for name, value in state.items():
        if isinstance(value, Tensor) and value.numel() not in (1, 24):
            raise ValueError(f"this optimizer keeps {name} of {list(value.shape)} for a parameter of [6, 4] numbers")
    return {name: value.dtype for name, value in slots.items()}


def _try(make: MakeOptimizer, shapes: list[tuple[int, ...]]) -> tuple[Tensor, dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(24, generator=generator, device="cpu")
    sizes = [torch.Size(shape).numel() for shape in shapes]
    parameters = [
        nn.Parameter(part.clone().view(shape)) for part, shape in zip(values.split(sizes), shapes, strict=True)
    ]
    try:
        optimizer = make([{"params": parameters, "weight_decay": 0.01}])
        for _ in range(3):
            gradient = torch.randn(24, generator=generator, device="cpu")
            for parameter, part in zip(parameters, gradient.split(sizes), strict=True):
                parameter.grad = part.clone().view(parameter.shape)
            optimizer.step()
    except (RuntimeError, ValueError, TypeError) as error:
        raise ValueError(f"this optimizer cannot step a vector, as flat buckets of its state are: {error}") from error
    after = torch.cat([parameter.detach().flatten() for parameter in parameters])
    return after, dict(optimizer.state[parameters[0]])
