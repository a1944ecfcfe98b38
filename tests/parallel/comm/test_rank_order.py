# SPDX-License-Identifier: Apache-2.0
"""Ranks that run other submodules than in earlier steps: gradients as plain code gives, or an error that names them."""

from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from stretto.parallel import Grid, gather, layout_of, no_sync, parallelize
from stretto.parallel.comm import collectives
from stretto.parallel.comm.rank_order import RankOrder
from stretto.train.observe.metrics import CorruptionError
from stretto.train.replicas import ModelWeights, ReplicaCheck
from stretto.train.stored_optimizer import StoredOptimizer, sgd_update
from tests.differences import largest

WIDTH = 8


class Towers(nn.Module):
    """A trunk, and towers of one size that the call chooses from."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.trunk = nn.Linear(WIDTH, WIDTH)
        self.towers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, towers: str = "01") -> Tensor:
        x = torch.tanh(self.trunk(x))
        for tower in towers:
            x = torch.tanh(self.towers[int(tower)](x))
        return x


ROLES = {"trunk": "colwise", "towers.0": "rowwise", "towers.1": "colwise", "towers.2": "rowwise"}
STEPS = {
    "one rank skips": ("01", "0"),
    "both run different ones": ("0", "1"),
    "in another order": ("01", "10"),
    "one that no rank had run": ("012", "01"),
    "as before again": ("01", "01"),
    "all run other ones": ("1", "1"),
}
"""What the ranks of data run, in later steps."""


def whole_gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {
        name: None if parameter.grad is None else gather(parameter.grad, layout_of(parameter)).clone()
        for name, parameter in model.named_parameters()
    }


def errors_over_data(sizes: dict[str, int], how: str) -> dict[str, float]:
    """Return how far each step's gradients are from those of one rank with all rows;
    infinite where only one has any.
    """
    grid = Grid(**sizes)
    roles = None if how == "blocks" else dict.fromkeys(ROLES, "replicated") if sizes.get("z", 1) == 1 else ROLES
    model = parallelize(Towers().double(), grid, roles=roles)
    plain = Towers().double()
    inputs = torch.randn(grid.size("batch"), 2, WIDTH, generator=torch.Generator().manual_seed(1)).double()
    mine = grid.coordinate("batch")
    found = {}
    for step, towers in {"first": ("01", "01"), **STEPS}.items():
        chosen = [towers[place // grid.size("z")] for place in range(len(inputs))]
        model.zero_grad()
        plain.zero_grad()
        model(inputs[mine], chosen[mine]).square().mean().backward()
        for rows, which in zip(inputs, chosen, strict=True):
            (plain(rows, which).square().mean() / len(inputs)).backward()
        found[step] = 0.0
        for name, gradient in whole_gradients(model).items():
            expected = plain.get_parameter(name).grad
            if gradient is None or expected is None:
                found[step] = largest(found[step], 0.0 if gradient is expected else float("inf"))
            else:
                found[step] = largest(found[step], float((gradient - expected).abs().max()))
    return found


@pytest.mark.long
def test_ranks_of_data_may_run_other_submodules_in_each_step(ranks):
    for sizes in ({"data": 2}, {"data": 2, "z": 2}):
        for how in ("roles", "blocks"):
            for found in ranks(2 * sizes.get("z", 1)).run(errors_over_data, sizes, how):
                assert largest(found.values()) < 1e-12, (sizes, how, found)


def differences_of_an_optimizer_in_backward() -> list[str]:
    """Return what hooks train otherwise than plain PyTorch, where ranks run other modules."""
    grid = Grid(data=torch.distributed.get_world_size())
    model, plain = parallelize(Towers().double(), grid), Towers().double()
    inputs = torch.randn(grid.size("data"), 2, WIDTH, generator=torch.Generator().manual_seed(1)).double()

    def step(parameter: Tensor) -> None:
        gather(parameter.grad, layout_of(parameter))  # hooks may communicate: ranks call them in one order
        torch.optim.SGD([parameter], lr=0.1).step()
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for towers in (("01", "01", "01"), ("0", "1", "0"), ("02", "0", ""), ("12", "21", "1")):
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        optimizer.zero_grad()
        for rows, which in zip(inputs, towers, strict=False):
            (plain(rows, which).square().mean() / len(inputs)).backward()
        optimizer.step()
        mine = grid.coordinate("data")
        model(inputs[mine], towers[mine]).square().mean().backward()
    ours = {name: gather(parameter) for name, parameter in model.named_parameters()}
    return [name for name, weight in plain.named_parameters() if not (ours[name] - weight).abs().max() < 1e-12]


@pytest.mark.parametrize("count", [2, 3])
def test_hooks_are_called_on_all_ranks_for_a_module_that_some_of_them_run(ranks, count):
    assert ranks(count).run(differences_of_an_optimizer_in_backward) == [[]] * count


def refusal_of_stored_optimizer(second: tuple[str, str]) -> str:
    """Return what is said where ranks of data run different modules, in the first step or in the second."""
    grid = Grid(data=2)
    model = parallelize(Towers(), grid)
    optimizer = StoredOptimizer(model, grid, sgd_update(), name="sgd", dtype=torch.float32)
    try:
        for towers in (("01", "01"), second) if second[0] == "01" else (second,):
            model(torch.ones(2, WIDTH), towers[grid.coordinate("data")]).square().mean().backward()
            optimizer.step(0.1)
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_stored_optimizer_refuses_modules_that_some_ranks_alone_have_run(ranks):
    for second in (("0", "1"), ("1", ""), ("01", "0"), ("01", "02")):
        for said in ranks(2).run(refusal_of_stored_optimizer, second):
            assert "towers" in said, second
            assert "rank 0" in said, second


def refusal_of_frozen(frozen: tuple[str, str]) -> str:
    """Return what is said where ranks freeze different parameters in the second step,
    and the first ones are the same.
    """
    grid = Grid(data=2)
    model = parallelize(Towers(), grid)
    model(torch.ones(2, WIDTH)).square().mean().backward()
    for name in ("towers.1.weight", "towers.1.bias", frozen[grid.coordinate("data")]):
        model.get_parameter(name).requires_grad_(False)
    try:
        model(torch.ones(2, WIDTH)).square().mean().backward()
    except RuntimeError as error:
        return str(error)
    return ""


def test_parameters_after_the_first_ones_are_compared_too(ranks):
    for said in ranks(2).run(refusal_of_frozen, ("towers.0.weight", "trunk.weight")):
        assert "towers.0.weight" in said
        assert "trunk.weight" in said


def refusal_over_z(sizes: dict[str, int], how: str, towers: tuple[str, ...], trick: str = "") -> str:
    """The error of a step, after three that were alike, in which ranks of z do different things."""
    collectives.LOOKS_EVERY = 0.05
    grid = Grid(**sizes, timeout=60)
    model = parallelize(Towers(), grid, roles=ROLES if how == "roles" else None)
    place = grid.coordinate("z")
    x = torch.randn(2, WIDTH)

    def step(which: str) -> None:
        if trick == "no_sync":
            with no_sync(model):
                model(x, which).square().mean().backward()
        model(x, which).square().mean().backward()

    for _ in range(3):
        step("01")
    if trick == "frozen" and place == 1:
        model.towers[1].requires_grad_(False)
    if trick == "detached" and place == 1:
        model.towers[1].register_forward_hook(lambda module, args, output: args[0] + output.detach())
    try:
        step(towers[place])
        step(towers[place])
    except RuntimeError as error:
        return str(error)
    return "no error"


SKIPPED = ("01", "0")


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "towers", "trick"),
    [
        ("blocks", SKIPPED, ""),
        ("blocks", ("01", "1"), ""),
        ("blocks", ("01", "011"), ""),
        ("blocks", SKIPPED, "no_sync"),
        ("blocks", ("01", "01"), "detached"),
        ("roles", ("02", "01"), ""),
        ("roles", ("01", "01"), "frozen"),
    ],
    ids=str,
)
def test_ranks_of_z_that_run_other_submodules_raise_an_error_that_names_them(ranks, how, towers, trick):
    for rank, message in enumerate(ranks(2).run(refusal_over_z, {"z": 2}, how, towers, trick)):
        assert "weights and gradients over z" in message
        assert f"rank {rank} " in message
        assert f"rank {1 - rank} " in message
        assert "towers." in message
        assert "call it on zeros" in message


def errors_of_a_rank_that_looks_while_the_other_agrees() -> str:
    """What is said where one rank finds another's first pass to differ, and this one waits for it to agree."""
    grid = Grid(z=2, timeout=60)
    order, barrier = RankOrder(grid.group("z"), "weights over z"), torch.distributed.barrier
    order.begin("forward")
    with mock.patch.object(order, "_compare_one"):  # which both have come to, and whose end one has not seen yet
        order.follow((f"gathering by rank {grid.coordinate('z')}",))
    try:
        for step in (order.look, order._compare_first) if grid.coordinate("z") else (lambda: None, order.look):
            barrier(grid.group("z"))
            step()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_a_rank_whose_look_finds_another_first_pass_tells_the_one_that_waits_for_it(ranks):
    for rank, said in enumerate(ranks(2).run(errors_of_a_rank_that_looks_while_the_other_agrees)):
        assert f"rank {rank} has come to gathering by rank {rank}, and rank {1 - rank} to gathering by rank" in said


def reset_in_place() -> tuple[list[bool], str, str]:
    """True if weights that are reset by blocks are those of one rank; the refusal with roles; a difference that is
    found in a loop of one's own."""
    equal = []
    for sizes in ({"z": 2}, {"data": 2}):
        grid = Grid(**sizes)
        model, plain = parallelize(Towers(), grid), Towers()
        torch.manual_seed(7)
        for layer in (plain.trunk, *plain.towers):
            layer.reset_parameters()
        torch.manual_seed(7)
        torch.rand(grid.coordinate("batch"))  # one number more on one rank
        for layer in (model.trunk, *model.towers):
            layer.reset_parameters()
        equal.append(
            all(torch.equal(gather(p), q) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
        )
    check = ReplicaCheck(ModelWeights(model, grid))
    check.check(0)
    with torch.no_grad():
        model.trunk.weight.to_local()[0, 0] += grid.coordinate("batch")
    with pytest.raises(CorruptionError) as difference:
        check.check(1)
    with_roles = parallelize(Towers(), Grid(x=2), roles=ROLES)
    with pytest.raises(ValueError, match="reset_parameters") as refusal:
        with_roles.trunk.reset_parameters()
    return equal, str(refusal.value), str(difference.value)


def test_weights_that_are_reset_are_those_of_one_rank_and_replicas_are_compared_in_any_loop(ranks):
    for equal, refusal, difference in ranks(2).run(reset_in_place):
        assert equal == [True, True]
        assert "load_state_dict" in refusal
        assert "trunk.weight after step 1, which were equal at step 0" in difference
