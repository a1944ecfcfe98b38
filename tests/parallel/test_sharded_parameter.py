# SPDX-License-Identifier: Apache-2.0
"""Edits of a parameter that is on a grid: as of a plain one, however they are written."""

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import init
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from stretto.models import GPT, GPTConfig
from stretto.optim import AdamW
from stretto.parallel import Grid, gather, parallelize


def step_of(optimizer: Callable[..., torch.optim.Optimizer], **options: Any) -> Callable[[Tensor], None]:
    def step(p: Tensor) -> None:
        p.grad = p.detach() * 2
        optimizer([p], lr=0.1, **options).step()
        p.grad = None

    return step


def write_twice_to_a_view(p: Tensor) -> None:
    view = p[1:]
    view.zero_()
    p.add_(1)
    view[0].add_(2)


def write_what_a_view_shows(p: Tensor) -> None:
    view = p[0]
    view.mul_(3)
    p[1].copy_(view)


def initialize_again(p: Tensor) -> None:
    torch.manual_seed(1)
    linear = nn.Linear(p.shape[1], p.shape[0], bias=False, device="meta")
    linear._parameters["weight"] = p
    linear.reset_parameters()


def gradient_of(p: Tensor) -> Tensor:
    p.grad = None
    with torch.enable_grad():
        total = p.square().sum()
        (total.full_tensor() if isinstance(total, DTensor) else total).backward()
    assert p.grad is not None
    p.grad.copy_(2 * p.detach())  # of which a wire in bf16 has rounded the last bits
    return p.grad


def clip_by_hand(p: Tensor) -> None:
    total = gradient_of(p).data.norm(2).item() ** 2 + torch._foreach_norm([p.grad])[0].item() ** 2
    for gradient in (p.grad, p.grad.detach()):
        gradient.mul_(1 / total)
    p.sub_(p.grad, alpha=float((p.grad * 2).abs().max()))
    p.grad = None


def add_noise_to_gradient(p: Tensor) -> None:
    gradient = gradient_of(p)
    gradient.add_(torch.randn_like(gradient))
    gradient[1] = 0
    p.sub_(p.grad)
    del p.grad


def seeded(initialize: Callable[..., Any], *arguments: Any) -> Callable[[Tensor], None]:
    def edit(p: Tensor) -> None:
        torch.manual_seed(2)
        initialize(p, *arguments)

    return edit


EDITS: dict[str, Callable[[Any], Any]] = {
    "p.data = 2p": lambda p: setattr(p, "data", p.data * 2),
    "p.data = plain": lambda p: setattr(p, "data", torch.arange(p.numel(), dtype=p.dtype).view(p.shape)),
    "p.data.fill_": lambda p: p.data.fill_(3),
    "p.data.copy_(plain)": lambda p: p.data.copy_(torch.arange(p.numel(), dtype=p.dtype).view(p.shape)),
    "p[-1].zero_": lambda p: p[-1].zero_(),
    "p[1] = 0": lambda p: p.__setitem__(1, 0.0),
    "p[rows] = 0": lambda p: p.__setitem__(torch.tensor([0, 2]), 0.0),
    "p[mask] = 0": lambda p: p.__setitem__(p > 0, 0.0),
    "p[:, 1] = plain": lambda p: p.__setitem__((slice(None), 1), torch.ones(p.shape[0], dtype=p.dtype)),
    "p[:2].mul_": lambda p: p[:2].mul_(0),
    "p[:, :2].mul_": lambda p: p[:, :2].mul_(0),
    "p[1:][0][1].fill_": lambda p: p[1:][0][1].fill_(5),
    "p.T[1].fill_": lambda p: p.T[1].fill_(5),
    "p.data[0].fill_": lambda p: p.data[0].fill_(3),
    "p.detach()[0].fill_": lambda p: p.detach()[0].fill_(3),
    "p.view(-1)[3] = 9": lambda p: p.view(-1).__setitem__(3, 9.0),
    "p.chunk(2)[1].zero_": lambda p: p.chunk(2)[1].zero_(),
    "p.unbind()[1].zero_": lambda p: p.unbind()[1].zero_(),
    "torch.split(p)": lambda p: torch.split(p, 2)[0].zero_(),
    "p.narrow.zero_": lambda p: p.narrow(0, 1, 2).zero_(),
    "p.diagonal().fill_": lambda p: p.diagonal().fill_(7),
    "fill_diagonal_": lambda p: p.fill_diagonal_(7),
    "tril_": lambda p: p.tril_(),
    "add out=": lambda p: torch.add(p, 1, out=p),
    "eye_": lambda p: init.eye_(p),
    "constant_": lambda p: init.constant_(p, 5),
    "normal_": seeded(init.normal_),
    "view.normal_": seeded(lambda p: p.data[1:].normal_()),
    "randn_like": seeded(lambda p: p.add_(torch.randn_like(p))),
    "kaiming_uniform_": seeded(init.kaiming_uniform_),
    "xavier_normal_": seeded(init.xavier_normal_),
    "orthogonal_": seeded(init.orthogonal_),
    "sparse_": seeded(init.sparse_, 0.5),
    "reset_parameters": initialize_again,
    "vector_to_parameters": lambda p: vector_to_parameters(torch.arange(p.numel(), dtype=p.dtype), [p]),
    "vector of parameters": lambda p: vector_to_parameters(parameters_to_vector([p]) * 2, [p]),
    "p *= 2": lambda p: p.mul_(2),
    "_foreach_add_": lambda p: torch._foreach_add_([p, p], 1.0),
    "AdamW": step_of(torch.optim.AdamW),
    "fused SGD": step_of(torch.optim.SGD, momentum=0.9, fused=True),
    "fused AdamW": step_of(torch.optim.AdamW, fused=True),
    "Stretto's AdamW": step_of(AdamW),
    "fused Adagrad": step_of(torch.optim.Adagrad, fused=True),
    "p / p.norm().item()": lambda p: p.div_(p.norm().item() + float(p.mean()) + p.count_nonzero().item()),
    "renorm": lambda p: p.copy_(torch.renorm(p, 2, 0, 0.1)),
    "clipped by hand": clip_by_hand,
    "noise on a gradient": seeded(add_noise_to_gradient),
    "two writes to a view": write_twice_to_a_view,
    "a view that is read after a write": write_what_a_view_shows,
}


def check_copies(p: Tensor) -> None:
    """Copies, in memory and in files, are of the shard alone, and stay DTensors."""
    for tensor in (p.detach(), p):
        file = io.BytesIO()
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            torch.save(tensor, file)
        warned = [each for each in warned if "this rank's shards alone" in str(each.message)]
        assert bool(warned) == (tensor.to_local().shape != tensor.shape)  # what is in it is not the weight
        file.seek(0)
        for other in (torch.load(file, weights_only=tensor is not p), copy.deepcopy(tensor)):
            assert isinstance(other, DTensor)
            assert other.placements == tensor.placements
            assert torch.equal(other.to_local(), tensor.to_local())
    assert type(copy.deepcopy(p)) is type(p)
    assert isinstance(copy.deepcopy(p), nn.Parameter)


def differences(sizes: dict[str, int], options: dict[str, Any], make: Callable[[], nn.Module], name: str) -> list[str]:
    """The edits that leave another weight than that of a plain model, and those that no version shows."""
    grid, wrong = Grid(**sizes), []
    for edit in EDITS:
        torch.manual_seed(0)
        plain = make()
        torch.manual_seed(0)
        model = parallelize(make(), grid, **options)
        right, found = plain.get_parameter(name), model.get_parameter(name)
        shard = found.to_local()
        before = shard._version, found._version
        with torch.set_grad_enabled(edit.startswith(("p.data", "p.detach"))):
            EDITS[edit](right)
            try:
                EDITS[edit](found)
            except Exception as error:  # noqa: BLE001
                wrong.append(f"{edit}: {error!r:.150}")
                continue
        if not torch.allclose(gather(found), right, atol=1e-6):
            wrong.append(f"{edit} is lost")
        check_copies(found)
        if (shard._version, found._version) == before and edit != "AdamW":
            wrong.append(f"{edit} counts no version")
    return wrong


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5, bias=False))


def tied_gpt() -> nn.Module:
    return GPT(GPTConfig(layers=1, hidden=8, heads=2, vocab=13, max_seq_len=8))


@pytest.mark.parametrize(
    ("count", "sizes", "options", "make", "name"),
    [
        (2, {"z": 2}, {}, linear, "0.weight"),
        (2, {"data": 2}, {"dtype": torch.bfloat16}, linear, "0.weight"),
        pytest.param(2, {"y": 2}, {}, tied_gpt, "blocks.0.mlp.up.weight", marks=pytest.mark.long),
        pytest.param(4, {"data": 2, "z": 2}, {}, linear, "0.weight", marks=pytest.mark.exhaustive),
        pytest.param(4, {"x": 2, "z": 2}, {}, tied_gpt, "blocks.0.attention.qkv.weight", marks=pytest.mark.exhaustive),
        pytest.param(4, {"x": 2, "y": 2}, {}, tied_gpt, "embedding.weight", marks=pytest.mark.exhaustive),
        pytest.param(4, {"x": 2, "y": 2}, {}, tied_gpt, "blocks.0.mlp.up.weight", marks=pytest.mark.exhaustive),
    ],
    ids=lambda value: value.__name__ if callable(value) else str(value),
)
def test_every_edit_of_a_weight_is_made_as_in_plain_pytorch(ranks, count, sizes, options, make, name):
    assert ranks(count).run(differences, sizes, options, make, name) == [[]] * count


def steps_skipped_for_one_experts_infinity() -> float:
    model: Any = GPT(
        GPTConfig(layers=1, hidden=8, heads=2, vocab=13, max_seq_len=8, num_experts=2, experts_per_token=1)
    )
    parallelize(model, Grid(data=2, expert=2))
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu", init_scale=2.0)
    tokens = torch.arange(8).view(1, 8)
    scaler.scale(model(tokens, tokens)).backward()
    if dist.get_rank() == 1:
        model.blocks[0].mlp.experts.down_proj.grad.to_local()[0, 0, 0] = torch.inf
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale()


def test_all_ranks_skip_a_step_for_an_infinity_of_one_ranks_expert(ranks):
    assert ranks(2).run(steps_skipped_for_one_experts_infinity) == [1.0, 1.0]


def gradients_of_written_weights(sizes: dict[str, int], options: dict[str, Any]) -> list[str]:
    """The weights that, written between a forward pass and its backward pass, leave it other gradients in silence."""
    torch.manual_seed(0)
    config = GPTConfig(
        layers=2, hidden=8, heads=2, vocab=13, max_seq_len=8, tie_embeddings=False, num_experts=2, moe_layers=(1,)
    )
    model = parallelize(GPT(config), Grid(**sizes), **options)
    tokens, others = torch.arange(16).view(2, 8) % 13, dict(model.named_parameters())

    def gradients(write: Callable[[], object]) -> dict[str, Tensor]:
        model.zero_grad()
        loss = model(tokens, tokens)
        write()
        loss.backward()
        return {name: gather(p.grad) for name, p in others.items() if p.grad is not None}

    def double(p: Any) -> None:
        with torch.no_grad():
            p.mul_(2)

    def step(p: Any, optimizer: Callable[..., torch.optim.Optimizer], **how: Any) -> None:
        p.grad = torch.ones_like(p)
        optimizer([p], lr=0.1, **how).step()
        p.grad = None

    right, silent, refused = gradients(lambda: None), [], set()
    writes: dict[str, Callable[[Any], None]] = {
        "doubled": double,
        "a view": lambda p: double(p.detach()[:1]),
        "AdamW": lambda p: step(p, torch.optim.AdamW),
        "fused AdamW": lambda p: step(p, torch.optim.AdamW, fused=True),
        "foreach SGD": lambda p: step(p, torch.optim.SGD, foreach=True),
        "Stretto's AdamW": lambda p: step(p, AdamW),
    }
    for name, p in others.items():
        before = p.detach().clone()
        for what, write in writes.items() if name == "blocks.0.mlp.down.weight" else [("doubled", double)]:
            try:
                found = gradients(lambda p=p, write=write: write(p))
            except RuntimeError as error:
                if "modified" not in str(error):
                    raise
                refused.add(name)
            else:
                if any(not torch.equal(found[each], right[each]) for each in right):
                    silent.append(f"{name}: {what}")
            with torch.no_grad():
                p.copy_(before)
    p = others["blocks.0.mlp.down.weight"]
    if "data" in sizes and not options:
        assert {"blocks.0.mlp.down.weight", "blocks.0.mlp_norm.weight"} <= refused, refused
        gradients(lambda: p.data.mul_(2))  # which autograd does not see in plain PyTorch
    return silent


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"data": 2}, {}),
        pytest.param({"data": 2, "expert": 2}, {}, marks=pytest.mark.long),
        pytest.param({"z": 2}, {}, marks=pytest.mark.long),
        pytest.param({"y": 2}, {}, marks=pytest.mark.long),
        ({"x": 2}, {"shard_sequence": True}),
        ({"z": 2}, {"reshard": "after_forward"}),
        ({"data": 2}, {"reshard": "after_forward"}),
        ({"z": 2}, {"blocks": ["blocks.*"], "reshard": "after_forward"}),
        ({"data": 2}, {"blocks": ["blocks.*"]}),
    ],
    ids=str,
)
def test_no_backward_pass_takes_weights_that_were_written_since_its_forward_pass(ranks, sizes, options):
    assert ranks(2).run(gradients_of_written_weights, sizes, options) == [[], []]
