# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts on four ranks: they train as one rank does, also when most tokens go to one expert."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from stretto.models import GPT, GPTConfig
from stretto.models.moe import Router
from stretto.ops import moe
from stretto.ops.moe import places
from stretto.ops.moe.grouped.tile_order import Arrivals
from stretto.optim import AdamW
from stretto.parallel import CapturedStep, Grid, clip_grad_norm_, parallelize
from stretto.parallel.experts import module as experts
from tests.gpu.sharing import sampled
from tests.gpu.test_exchange import poison_buffers
from tests.parallel import moe_families
from tests.parallel.experts import test_columns
from tests.parallel.experts.training import Run, case_of, disagreements, expected_of
from tests.parallel.training import my_rows

RunRanks = Callable[..., list[Any]]

VOCAB, BATCH, SEQ_LEN, K = 32, 8, 16, 2
ROWS = BATCH * SEQ_LEN * K  # that a block's experts compute in a step, on all ranks together
LAST = 50  # steps of skewed training whose losses are compared
GRIDS = ({"data": 4, "expert": 4}, {"data": 2, "x": 2, "expert": 2})
SHARDED = {"data": 2, "z": 2, "expert": 2}
pytestmark = pytest.mark.ranks(4, own=(4,), among=(4,))


def new_model(layers: int, **options: Any) -> GPT:
    torch.manual_seed(0)
    sizes = {"hidden": 32, "expert_ffn": 32, "max_seq_len": SEQ_LEN, **options}
    return GPT(
        GPTConfig(
            layers,
            heads=4,
            vocab=VOCAB,
            activation="swiglu",
            norm="rmsnorm",
            num_experts=8,
            experts_per_token=K,
            **sizes,
        )
    )


def skewed_model() -> GPT:
    """A model whose second block has experts. A bias that stays makes most tokens choose expert 5."""
    model = new_model(2, moe_layers="every:2", balance="bias", bias_rate=0.0)
    for module in model.modules():
        if isinstance(module, Router):
            module.expert_bias[5] = 0.5
    return model


def draw(step: int) -> tuple[Tensor, Tensor]:
    """Sequences in which each token is nearly determined by the one before."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCAB, (BATCH, 1), generator=generator)
    for _ in range(SEQ_LEN):
        noise = (torch.rand(BATCH, 1, generator=generator) < 0.2).long()
        tokens = torch.cat((tokens, (5 * tokens[:, -1:] + 3 + noise) % VOCAB), dim=1)
    return tokens[:, :-1], tokens[:, 1:]


def train(model: nn.Module, grid: Grid | None, device: torch.device, steps: int) -> list[float]:
    """The losses of so many steps of SGD."""
    torch.backends.cuda.matmul.allow_tf32 = False
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        tokens, targets = draw(step)
        if grid is not None:
            part, parts = grid.coordinate("batch"), grid.size("batch")
            tokens, targets = tokens.chunk(parts)[part], targets.chunk(parts)[part]
        loss = model(tokens.to(device), targets.to(device))
        loss.backward()
        if grid is None:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        else:
            clip_grad_norm_(model.parameters(), 1.0, grid)
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def find_by(implementation: str) -> Callable[..., Any]:
    """`find_places` by this implementation, whatever a layer asks for."""
    find = places.find_places
    return lambda *arguments, **options: find(*arguments, **{**options, "implementation": implementation})


def train_both_ways(
    sizes: dict[str, int], expert_rows: int | None, implementation: str
) -> tuple[list[float], list[float]]:
    """The losses of ten steps on one rank, and on the grid."""
    grid = Grid(**sizes)
    plain = train(new_model(2).to(grid.device), None, grid.device, 10)
    with mock.patch.object(experts, "find_places", find_by(implementation)):
        return plain, train(parallelize(new_model(2), grid, expert_rows=expert_rows), grid, grid.device, 10)


@pytest.mark.parametrize(
    ("sizes", "expert_rows", "implementation"),
    sampled(
        [(GRIDS[0], None, "kernel"), (GRIDS[0], ROWS, "auto"), (GRIDS[1], None, "auto"), (GRIDS[1], ROWS, "kernel")],
        list(itertools.product(GRIDS, (None, ROWS), ("auto", "kernel"))),
    ),
    ids=str,
)
def test_losses_are_those_of_one_rank(
    world: int, run_ranks: RunRanks, sizes: dict[str, int], expert_rows: int | None, implementation: str
) -> None:
    for plain, found in run_ranks(world, train_both_ways, sizes, expert_rows, implementation):
        assert found == pytest.approx(plain, rel=1e-5)
        assert plain[-1] < plain[0]


def train_family(family: str, sizes: dict[str, int]) -> tuple[list[float], list[float]]:
    """The losses of five steps of a family's tiny model, on one rank, and on the grid."""
    torch.backends.cuda.matmul.allow_tf32 = False
    grid, found = Grid(**sizes), []
    tokens = torch.randint(3, moe_families.VOCAB, (BATCH, SEQ_LEN), generator=torch.Generator().manual_seed(0))
    for rows in (slice(None), my_rows(grid, BATCH)):
        model: Any = moe_families.build(family)
        model = model.to(grid.device) if rows == slice(None) else parallelize(model, grid)
        optimizer, part = torch.optim.SGD(model.parameters(), lr=0.05, foreach=False), tokens[rows].to(grid.device)
        losses = []
        for _ in range(5):
            optimizer.zero_grad()
            loss = model(input_ids=part, labels=part, use_cache=False).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        found.append(losses)
    return found[0], found[1]


@pytest.mark.parametrize(
    ("family", "sizes"),
    sampled(
        [("gpt_oss", SHARDED), ("llama4_text", GRIDS[0]), ("granitemoe", SHARDED)],
        list(itertools.product(("gpt_oss", "llama4_text", "granitemoe"), (GRIDS[0], SHARDED))),
    ),
    ids=str,
)
def test_losses_of_families_are_those_of_one_rank(
    world: int, run_ranks: RunRanks, family: str, sizes: dict[str, int]
) -> None:
    for plain, found in run_ranks(world, train_family, family, sizes):
        assert found == pytest.approx(plain, rel=1e-5)


class RowCounter:
    """`find_places`, with the rows of all calls counted on the device: those of this rank's experts."""

    def __init__(self, device: torch.device) -> None:
        self.rows = torch.zeros((), dtype=torch.int64, device=device)
        self.found = places.find_places

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        found = self.found(*args, **kwargs)
        self.rows += found.index.offsets[-1]
        return found


def train_skewed(sizes: dict[str, int], expert_rows: int | None, steps: int) -> dict[str, Any]:
    """The last losses on one rank and on the grid, and the rows of each rank."""
    grid = Grid(**sizes)
    plain = train(skewed_model().to(grid.device), None, grid.device, steps)
    counter = RowCounter(grid.device)
    with mock.patch.object(experts, "find_places", counter):
        found = train(parallelize(skewed_model(), grid, expert_rows=expert_rows), grid, grid.device, steps)
    if expert_rows is not None:
        moe.check_rows(grid.group("expert"))
    counts = [torch.zeros_like(counter.rows) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, counter.rows)
    return {"plain": plain[-LAST:], "found": found[-LAST:], "rows": torch.stack(counts).tolist()}


# Where ranks share a GPU the second grid takes 0.2 s a step: its collectives are staged on the host.
@pytest.mark.parametrize(
    ("sizes", "expert_rows", "steps"),
    [pytest.param(*case, 500, marks=pytest.mark.exhaustive) for case in ((GRIDS[0], None), (GRIDS[1], ROWS))],
    ids=str,
)
def test_when_most_tokens_go_to_one_expert_none_is_lost(
    world: int, run_ranks: RunRanks, sizes: dict[str, int], expert_rows: int | None, steps: int
) -> None:
    for found in run_ranks(world, train_skewed, sizes, expert_rows, steps, timeout=240):
        gathered = sizes.get("x", 1)  # each rank of x has the rows of all
        assert sum(found["rows"]) == gathered * steps * ROWS
        fullest = 5 // (8 // sizes["expert"])  # the coordinate along expert of the rank that has expert 5
        assert max(found["rows"]) == found["rows"][fullest * gathered] > 0.4 * steps * ROWS
        assert sum(found["found"]) == pytest.approx(sum(found["plain"]), rel=0.02)


def train_captured(implementation: str, reduce: str) -> tuple[list[float], list[float]]:
    """Losses of seven steps in bf16, of which the last are a graph's replays, and of seven that are not captured."""
    with mock.patch.object(experts, "find_places", find_by(implementation)):
        return train_captured_and_not(reduce)


def train_captured_and_not(reduce: str) -> tuple[list[float], list[float]]:
    """The losses of `train_captured`."""
    world = dist.get_world_size()
    grid = Grid(data=world, expert=world, device="cuda")
    tokens, targets = (one.chunk(world)[grid.coordinate("data")].to(grid.device) for one in draw(0))

    def run(captures: bool) -> list[float]:
        model = new_model(2, balance="none", shared_ffn=32)
        model = parallelize(model, grid, dtype=torch.bfloat16, expert_rows=ROWS, expert_reduce=reduce)
        assert all(one.starts_early for one in model.modules() if isinstance(one, experts.ParallelExperts))
        optimizer = AdamW(model.parameters(), lr=torch.tensor(1e-2, device=grid.device))

        def step() -> tuple[Tensor, ...]:
            loss = model(tokens, targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return (loss.detach(),)

        call = CapturedStep(step) if captures else step
        losses = [float(call()[0].clone()) for _ in range(7)]
        if isinstance(call, CapturedStep):
            call.close()
        return losses

    return run(captures=True), run(captures=False)


@pytest.mark.own_gpus("a batch's targets are counted by way of the host where ranks share a GPU")
@pytest.mark.ranks(2, own=(2,), among=(2,))
@pytest.mark.parametrize("reduce", ["rank", "choice"])
@pytest.mark.parametrize("implementation", ["library", "kernel"])
def test_a_captured_step_in_bf16_is_an_eager_one(
    world: int, run_ranks: RunRanks, implementation: str, reduce: str
) -> None:
    for captured, eager in run_ranks(world, train_captured, implementation, reduce):
        assert captured == pytest.approx(eager, rel=1e-3)
        assert captured[-1] < captured[0]


def train_while_rows_arrive(expert_rows: int | None, shared_ffn: int | None) -> tuple[list[bool], int]:
    """Whether steps in bf16 whose products begin on rows that have arrived have the bits of those that wait for all.

    The second has the number of such products. One rank is late in each step, and buffers are poisoned between them.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    grid = Grid(data=world, expert=world, device="cuda")
    group, tokens = grid.group("expert"), ROWS // K // BATCH * 64
    run, products = Arrivals.run, []

    def count(arrivals: Arrivals, *arguments: Any) -> None:
        products.append(arguments[0].fn.__name__)
        run(arrivals, *arguments)

    def train(implementation: str) -> list[Tensor]:
        options = {"hidden": 128, "expert_ffn": 128, "max_seq_len": tokens, "shared_ffn": shared_ffn}
        model = parallelize(new_model(2, **options), grid, dtype=torch.bfloat16, expert_rows=expert_rows)
        found = []
        for step in range(4):  # each of two buffers is used twice
            data = torch.randint(VOCAB, (2, 1, tokens), generator=torch.Generator().manual_seed(8 * step + rank)).cuda()
            if rank == step % world:
                torch.cuda._sleep(50_000_000)
            loss = model(*data)
            loss.backward()
            found += [loss.detach().clone(), *(each.grad.to_local().clone() for each in model.parameters())]
            model.zero_grad()
            if implementation == "kernel":
                poison_buffers(group)
        return found

    ways = []
    for implementation in ("library", "kernel"):
        with (
            mock.patch.object(experts, "find_places", find_by(implementation)),
            mock.patch.object(Arrivals, "run", count),
            mock.patch.multiple(places, _LEAST_COLUMNS=32, _LEAST_NUMBERS=0),
            sdpa_kernel(SDPBackend.MATH),  # others' gradients have other bits in each run
        ):
            ways.append(train(implementation))
    if expert_rows is not None:
        moe.check_rows(group)
    return [torch.equal(*pair) for pair in zip(*ways, strict=True)], len(products)


@pytest.mark.ranks(4, own=(2, 4), among=(2, 4))
@pytest.mark.parametrize(
    ("is_fixed", "shared_ffn"),
    [
        (False, None),
        (True, 128),
        *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in ((True, None), (False, 128))),
    ],
)
def test_products_that_begin_on_rows_that_have_arrived_have_the_same_bits(
    world: int, run_ranks: RunRanks, is_fixed: bool, shared_ffn: int | None
) -> None:
    rows = world * ROWS // BATCH * 64 if is_fixed else None
    for same, products in run_ranks(world, train_while_rows_arrive, rows, shared_ffn):
        assert all(same), same
        assert products == 4 * 2 * 2  # steps, layers, forward and backward


def find_overlaps() -> tuple[int, int]:
    """(pushes of tokens that run while a shared expert begins, passes) of forward passes that the host has queued."""
    grid = Grid(data=dist.get_world_size(), expert=dist.get_world_size(), device="cuda")
    model = new_model(1, hidden=2048, expert_ffn=256, shared_ffn=256, max_seq_len=2048, balance="none")
    model = parallelize(model, grid, dtype=torch.bfloat16, expert_rows=4 * 2048 * K * grid.size("expert"))
    tokens = torch.randint(VOCAB, (4, 2048), device=grid.device)
    model.get_submodule("blocks.0.mlp.shared").register_forward_pre_hook(lambda *_: torch.cuda._sleep(1_000_000))
    with torch.no_grad():
        model(tokens)
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            for _ in range(3):
                torch.cuda._sleep(100_000_000)
                model(tokens)
            torch.cuda.synchronize()
    kernels = [each for each in profiler.events() if each.device_type == DeviceType.CUDA]
    pushes, spins = ([one.time_range for one in kernels if name in one.name] for name in ("push_rows", "spin"))
    return sum(any(push.start < spin.start < push.end for push in pushes) for spin in spins), 3


@pytest.mark.own_gpus("it sees what runs at the same time")
def test_a_shared_expert_begins_while_tokens_are_sent(world: int, run_ranks: RunRanks) -> None:
    for overlapping, passes in run_ranks(world, find_overlaps):
        assert overlapping == passes


def train_in_stages() -> dict[str, float]:
    """Return what differs from training on one CPU, where two stages have two expert ranks each."""
    run = Run({"pipe": 2, "data": 2, "expert": 2}, {}, "top-2 in micro-batches, learned positions")
    return disagreements(run, case_of(run), expected_of(run))


def test_training_in_stages_is_plain_training(world: int, run_ranks: RunRanks) -> None:
    assert run_ranks(world, train_in_stages) == [{}] * world


def test_tensor_parallel_experts_train_by_kernels_that_were_timed_to_be_faster(
    world: int, run_ranks: RunRanks, tmp_path: Path
) -> None:
    others = [{"recompute": "communication"}, {"is_compiled": True}]
    for distance, by_library, done, again in run_ranks(
        world, test_columns.compare, str(tmp_path), {"x": 2, "z": 2}, others
    ):
        assert distance < 0.05  # bf16, in another order
        assert (by_library, done) == ([], test_columns.STEP)
        assert again[0] == (True, test_columns.STEP)
        assert again[1][1] == test_columns.STEP  # compiled norms round elsewhere
