# SPDX-License-Identifier: Apache-2.0
"""Finds modules of experts by transformers' interface, and detects what they compute by running them.

The interface (`use_experts_implementation`): experts(hidden [t, h], top_k_index [t, k], top_k_weights [t, k]) ->
[t, h], with the weights of all experts in two parameters. Classes that follow it without saying so are taken as well.
Llama 4's experts each take a scaled copy of all tokens: `choose_scaled_inputs` gives them the chosen ones.
"""

import contextlib
import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stretto.huggingface.formulas import UnknownRolesError


@dataclass(frozen=True)
class ExpertsKind:
    """down(gate(up(x))) of each expert, where `up` names the first weight, "gate_up_proj", or "up_proj" without gates.

    is_transposed: weights are [E, in, out], not [E, out, in]. has_bias: each has a bias, `{weight}_bias` [E, out].
    is_interleaved: columns of the gate and of what it scales take turns. has_own_gate: the module's `_apply_gate` is
    another than act_fn(gate) * up. takes_copies: the module takes [E * t, h], each expert's scaled inputs (Llama 4).
    """

    up: str
    is_transposed: bool = False
    has_bias: bool = False
    is_interleaved: bool = False
    has_own_gate: bool = False
    takes_copies: bool = False

    @property
    def is_gated(self) -> bool:
        return self.up == "gate_up_proj"

    @property
    def weights(self) -> tuple[str, str]:
        return self.up, "down_proj"

    def shapes(self, experts: int, inner: int, hidden: int) -> dict[str, tuple[int, ...]]:
        """The whole shapes of the parameters."""
        outputs = {self.up: (2 * inner if self.is_gated else inner, hidden), "down_proj": (hidden, inner)}
        found: dict[str, tuple[int, ...]] = {
            name: (experts, *(shape[::-1] if self.is_transposed else shape)) for name, shape in outputs.items()
        }
        return found | ({f"{name}_bias": (experts, out) for name, (out, _) in outputs.items()} if self.has_bias else {})

    def own_gate(self, module: nn.Module) -> Callable[[Tensor], Tensor]:
        """The module's `_apply_gate`, of [n, 2F], without the module's parameters."""
        bare: Any = copy.copy(module)
        bare._parameters = {}
        return bare._apply_gate


def find_experts(model: nn.Module) -> list[str]:
    """The names of modules that hold the weights of several experts in two parameters."""

    def holds(module: nn.Module, *parts: str) -> bool:
        return any(isinstance(found := getattr(module, part, None), Tensor) and found.dim() == 3 for part in parts)

    return [
        name
        for name, module in model.named_modules()
        if holds(module, "down_proj") and holds(module, "gate_up_proj", "up_proj")
    ]


def experts_kind(model: nn.Module, name: str) -> ExpertsKind:
    """Find what a module of experts computes. Raises UnknownRolesError for what `ParallelExperts` does not.

    Each token's chosen experts are weighted and summed. It is run on small parameters, with inputs of several
    magnitudes, so that a limit on activations shows too.
    """
    module = model.get_submodule(name)
    kind = _kind_by_shapes(module, name)
    generator = torch.Generator().manual_seed(0)
    experts = int(module.num_experts)  # type: ignore[arg-type]
    trial: Any = copy.copy(module)
    trial._parameters = {
        part: nn.Parameter(torch.randn(shape, generator=generator, device="cpu"))
        for part, shape in kind.shapes(experts, 8, 8).items()
    }
    hidden = torch.randn(6, 8, generator=generator, device="cpu") * torch.tensor(
        [0.1, 0.1, 1.0, 1.0, 10.0, 10.0], device="cpu"
    ).unsqueeze(1)
    ids = torch.stack([torch.randperm(experts, generator=generator, device="cpu")[: min(2, experts)] for _ in hidden])
    factors = torch.rand(ids.shape, generator=generator, device="cpu")
    takes_copies = len(inspect.signature(module.forward).parameters) == 1
    try:
        kind = replace(_with_gate(kind, trial), takes_copies=takes_copies)
        with torch.no_grad():
            if takes_copies:
                moe = _trial_around(model.get_submodule(name.rpartition(".")[0]), trial, generator)
                expected, found = _mix_scaled(moe, partial(_mix_experts, trial, kind), hidden)[0], moe(hidden)[0]
            else:
                expected, found = _mix_experts(trial, kind, hidden, ids, factors), trial(hidden, ids, factors)
    except (TypeError, ValueError, IndexError, AttributeError, RuntimeError):  # one of them takes something else
        expected, found = hidden, None
    if not isinstance(found, Tensor) or not torch.allclose(found.to(expected.dtype), expected, rtol=1e-3, atol=1e-4):
        raise UnknownRolesError(
            f"{name} ({type(module).__name__}) has the role 'experts', but does not compute down(act(gate(x)) * up(x)) "
            "of each token's experts: what it computes, tried on random numbers, is something else"
        )
    return kind


def _trial_around(moe: nn.Module, experts: Any, generator: torch.Generator) -> nn.Module:
    """A copy of Llama 4's module around experts, of the size of these, and with something simple as shared expert."""
    trial: Any = copy.copy(moe)
    router = copy.copy(trial.router)
    weight = torch.randn(experts.num_experts, 8, generator=generator, device="cpu")
    router._parameters = {"weight": nn.Parameter(weight), "bias": None}
    trial._modules = {"experts": experts, "router": router, "shared_expert": nn.Hardtanh()}
    trial.hidden_dim = experts.hidden_size = 8
    return trial


def choose_scaled_inputs(moe: nn.Module, *, overlaps: bool) -> None:
    """Have Llama 4's module around experts, which `ParallelExperts` has replaced, give them the chosen inputs alone.

    Its own code gives each expert a copy of all tokens, times their scores, which are 0 for tokens that chose others.
    overlaps: whether the shared expert computes while tokens travel, not in the same order alone.
    """
    around: Any = moe
    around.experts.starts_early = overlaps and around.experts.can_start
    around.forward = lambda hidden_states: _mix_scaled(around, around.experts, hidden_states)


def _mix_scaled(moe: Any, experts: Callable[..., Tensor], hidden: Tensor) -> tuple[Tensor, Tensor]:
    """The output, and the router's logits. experts: as other modules of experts are called."""
    tokens = hidden.reshape(-1, moe.hidden_dim)
    scores, logits = moe.router(tokens)
    factors, ids = torch.topk(scores, moe.top_k, dim=1)
    copies = (tokens.unsqueeze(1) * factors.unsqueeze(2)).flatten(0, 1)
    chosen = copies, ids.view(-1, 1), torch.ones_like(factors).view(-1, 1)
    begins = getattr(experts, "can_start", False)  # to send tokens, for the call that follows
    started = {"started": experts.start(*chosen)} if begins else {}  # type: ignore[attr-defined]
    shared = moe.shared_expert(tokens)
    made = experts(*chosen, **started)
    return shared + made.view(*ids.shape, -1).sum(1), logits


def _kind_by_shapes(module: nn.Module, name: str) -> ExpertsKind:
    shapes = {part: tuple(parameter.shape) for part, parameter in module.named_parameters()}
    up = "gate_up_proj" if "gate_up_proj" in shapes else "up_proj"
    has_bias, says_transposed = "down_proj_bias" in shapes, bool(getattr(module, "is_transposed", False))
    down, experts = shapes.get("down_proj", ()), getattr(module, "num_experts", None)
    kinds = [ExpertsKind(up, is_transposed, has_bias) for is_transposed in (says_transposed, not says_transposed)]
    # Shapes say which of the two it is, but of square up projections without gates.
    for kind in kinds if len(down) == 3 and down[0] == experts else ():
        inner, hidden = down[1:] if kind.is_transposed else down[:0:-1]
        if kind.shapes(down[0], inner, hidden) == shapes:
            break
    else:
        found = ", ".join(f"{part} {list(shape)}" for part, shape in sorted(shapes.items())) or "none"
        raise UnknownRolesError(
            f"{name} ({type(module).__name__}) has the parameters {found} and num_experts={experts}, but a module with "
            "the role 'experts' has num_experts=E, down_proj [E, h, F], and either gate_up_proj [E, 2F, h] or up_proj "
            "[E, F, h] (or both with their last dims swapped), and perhaps a bias of each"
        )
    if not (callable(getattr(module, "act_fn", None)) or callable(getattr(module, "_apply_gate", None))):
        raise UnknownRolesError(f"{name} has the role 'experts', but no act_fn, a function of a tensor")
    return kind


def _with_gate(kind: ExpertsKind, module: nn.Module) -> ExpertsKind:
    """The same with what the module's `_apply_gate` computes, where it has one."""
    if not kind.is_gated or not hasattr(module, "_apply_gate"):
        return kind
    positive = (torch.rand(2, 16, generator=torch.Generator().manual_seed(0), device="cpu") + 0.1).requires_grad_()
    with torch.enable_grad():
        own = module._apply_gate(positive / 100)  # type: ignore[operator]  # below activations' limit
        (of_first,) = torch.autograd.grad(own[0, 0], positive)
    match of_first[0].nonzero().flatten().tolist():
        case [0, 1]:
            return replace(kind, is_interleaved=True, has_own_gate=True)
        case [0, 8]:
            inner = torch.cat((positive, -positive, 100 * positive, -100 * positive)).detach()
            with contextlib.suppress(TypeError, AttributeError):  # act_fn may take something else
                is_plain = torch.allclose(_activate(kind, module, inner), module._apply_gate(inner))  # type: ignore[operator]
                return replace(kind, has_own_gate=not is_plain)
            return replace(kind, has_own_gate=True)
    raise ValueError("the gate takes other columns")


def _activate(kind: ExpertsKind, module: nn.Module, inner: Tensor) -> Tensor:
    """Apply what experts compute between their products."""
    act: Callable[[Tensor], Tensor] = kind.own_gate(module) if kind.has_own_gate else module.act_fn  # type: ignore[assignment]
    if kind.has_own_gate or not kind.is_gated:
        return act(inner)
    gate, up = inner.chunk(2, -1)
    return act(gate) * up


def _mix_experts(module: nn.Module, kind: ExpertsKind, hidden: Tensor, ids: Tensor, factors: Tensor) -> Tensor:
    """The sum over each token's experts, one after another."""

    def multiply(name: str, expert: int, x: Tensor) -> Tensor:
        weight = module.get_parameter(name)[expert]
        y = x @ weight if kind.is_transposed else weight @ x
        return y + module.get_parameter(f"{name}_bias")[expert] if kind.has_bias else y

    mixed = torch.zeros_like(hidden)
    for token, (chosen, scales) in enumerate(zip(ids.tolist(), factors, strict=True)):
        for expert, scale in zip(chosen, scales, strict=True):
            inner = _activate(kind, module, multiply(kind.up, expert, hidden[token]).unsqueeze(0)).squeeze(0)
            mixed[token] += scale * multiply("down_proj", expert, inner)
    return mixed
