# SPDX-License-Identifier: Apache-2.0
"""torch.distributed.checkpoint with parallelized models: FSDP2's checkpoints are continued here, and ours there."""

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from stretto.axes import BATCH
from stretto.parallel import Grid, SegmentLoadPlanner, SegmentSavePlanner, gather, mean_over_batch, parallelize
from tests.conftest import Ranks
from tests.differences import largest
from tests.parallel import hugging_face
from tests.parallel.hugging_face import launched_by_host

MakeRanks = Callable[[int], Ranks]
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
Sizes = dict[str, int]
STEPS = 3
GRIDS = [(4, {"data": 2, "z": 2}), (4, {"x": 2, "z": 2}), (1, {})]  # ranks, sizes
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)  # optim.state.<name>.exp_avg


def make(kind: str) -> nn.Module:
    """A language model of fp32: with roles, with fused queries, keys and values, and without roles."""
    torch.manual_seed(3)
    if kind == "blocks":
        layers = [nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True) for _ in range(2)]
        return nn.Sequential(nn.Embedding(37, 16), *layers, nn.Linear(16, 37))
    return hugging_face.gpt2(tied=True) if kind == "gpt2" else hugging_face.llama(tied=False)


def batches(first: int) -> Iterator[tuple[Tensor, Tensor]]:
    for step in range(first, first + STEPS):
        tokens = torch.randint(37, (8, 9), generator=torch.Generator().manual_seed(step))
        yield tokens[:, :-1], tokens[:, 1:]


def train(model: nn.Module, optimizer: Any, first: int, grid: Grid | None = None) -> list[float]:
    """Train STEPS steps, on FSDP2's four ranks or on a grid's. Returns the losses of the global batch."""
    group = None if grid is None else grid.group(BATCH)
    part, parts = dist.get_rank(group), dist.get_world_size(group)
    losses = []
    for tokens, targets in batches(first):
        output = model(tokens.chunk(parts)[part])
        logits = getattr(output, "logits", output)
        total = F.cross_entropy(logits.flatten(0, 1), targets.chunk(parts)[part].flatten(), reduction="sum")
        count = targets.numel() // parts
        loss = total / count if grid is None else mean_over_batch(total, count, grid)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        summed = total.detach().clone()
        dist.all_reduce(summed, group=group)
        losses.append(summed.item() / targets.numel())
    return losses


def by_fsdp2(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = make(kind)
    inner = getattr(model, "model", None) or getattr(model, "transformer", None)
    blocks = model[1:-1] if isinstance(model, nn.Sequential) else getattr(inner, "layers", None) or inner.h
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def by_stretto(kind: str, sizes: Sizes) -> tuple[nn.Module, torch.optim.Optimizer, Grid]:
    grid = Grid(**sizes)
    model = parallelize(make(kind), grid)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2), grid


def save(model: nn.Module, optimizer: Any, folder: Path, name: str = "optim", **options: Any) -> None:
    weights, state = get_state_dict(model, optimizer, options=FLAT if name == "flat" else None)
    dcp.save({"model": weights, name: state}, checkpoint_id=folder, **options)


def load(model: nn.Module, optimizer: Any, folder: Path, name: str = "optim", **options: Any) -> None:
    flat = FLAT if name == "flat" else None
    weights, state = get_state_dict(model, optimizer, options=flat)
    dcp.load({"model": weights, name: state}, checkpoint_id=folder, **options)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state, options=flat)


def start_by_fsdp2(kind: str, folder: Path, name: str) -> list[float]:
    model, optimizer = by_fsdp2(kind)
    train(model, optimizer, 0)
    save(model, optimizer, folder, name)
    return train(model, optimizer, STEPS)


def continue_on_grid(kind: str, sizes: Sizes, folder: Path, name: str) -> list[float]:
    model, optimizer, grid = by_stretto(kind, sizes)
    load(model, optimizer, folder, name, planner=SegmentLoadPlanner() if kind == "gpt2" else None)
    return train(model, optimizer, STEPS, grid)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("gpt2", "flat"),
        *(
            pytest.param(kind, name, marks=pytest.mark.exhaustive)
            for kind, name in [("gpt2", "optim"), ("llama", "flat"), ("llama", "optim"), ("blocks", "optim")]
        ),
    ],
)
@pytest.mark.exhaustive
def test_an_fsdp2_run_is_continued_on_other_grids(kind: str, name: str, ranks: MakeRanks, tmp_path: Path) -> None:
    expected = ranks(4).run(start_by_fsdp2, kind, tmp_path / "saved", name)[0]
    for count, sizes in GRIDS:
        for losses in ranks(count).run(continue_on_grid, kind, sizes, tmp_path / "saved", name):
            assert losses == pytest.approx(expected, rel=1e-5)


def start_on_grid(kind: str, sizes: Sizes, folder: Path) -> list[float]:
    model, optimizer, grid = by_stretto(kind, sizes)
    train(model, optimizer, 0, grid)
    save(model, optimizer, folder, planner=SegmentSavePlanner() if kind == "gpt2" else None)
    return train(model, optimizer, STEPS, grid)


def continue_by_fsdp2(kind: str, folder: Path) -> list[float]:
    model, optimizer = by_fsdp2(kind)
    load(model, optimizer, folder)
    return train(model, optimizer, STEPS)


@pytest.mark.long
@pytest.mark.parametrize("sizes", [{"x": 2, "z": 2}, {"x": 2, "y": 2}, {"data": 2, "z": 2}], ids=str)
@pytest.mark.parametrize("kind", ["llama", "gpt2", "blocks"])
@pytest.mark.sampled(1)
def test_a_run_on_a_grid_is_continued_by_fsdp2(kind: str, sizes: Sizes, ranks: MakeRanks, tmp_path: Path) -> None:
    expected = ranks(4).run(start_on_grid, kind, sizes, tmp_path / "saved")[0]
    for losses in ranks(4).run(continue_by_fsdp2, kind, tmp_path / "saved"):
        assert losses == pytest.approx(expected, rel=1e-5)


def continue_with_other_shards(kind: str, folder: Path) -> dict[str, list[float]]:
    """Losses of runs of a model of small weights, with blocks gathered whole and with roles, and of what the other
    continues from their checkpoint."""
    found = {}
    for starts, continues in (("blocks", "roles"), ("roles", "blocks")):
        with launched_by_host() if starts == "blocks" else nullcontext():
            found[f"{starts} go on"] = start_on_grid(kind, {"z": 2}, folder / starts)
        with launched_by_host() if continues == "blocks" else nullcontext():
            found[f"{continues} continue"] = continue_on_grid(kind, {"z": 2}, folder / starts, "optim")
    return found


@pytest.mark.parametrize("kind", ["gpt2", pytest.param("llama", marks=pytest.mark.long)])
def test_small_blocks_and_roles_continue_each_others_checkpoints(kind: str, ranks: MakeRanks, tmp_path: Path) -> None:
    for found in ranks(2).run(continue_with_other_shards, kind, tmp_path):
        for losses in found.values():
            assert losses == pytest.approx(found["roles go on"], rel=1e-5)


def messages_of_default_planners(folder: Path) -> list[str]:
    """Return what torch's own planners say to a model whose fused weights x cuts, and to its optimizer's moments."""
    model, optimizer, _ = by_stretto("gpt2", {"x": 2})
    messages = []
    for name, state in (("model", model.state_dict()), ("optim", get_optimizer_state_dict(model, optimizer))):
        for call in (dcp.save, dcp.load):
            with pytest.raises(dcp.CheckpointException) as caught:
                call({name: state}, checkpoint_id=folder)
            messages.append(str(caught.value))
    return messages


def test_torchs_own_planners_are_refused_where_they_would_mix_up_numbers(ranks: MakeRanks, tmp_path: Path) -> None:
    plain = make("gpt2")
    state = get_optimizer_state_dict(plain, torch.optim.AdamW(plain.parameters()))
    dcp.save({"model": plain.state_dict(), "optim": state}, checkpoint_id=tmp_path, no_dist=True)
    for messages in ranks(2).run(messages_of_default_planners, tmp_path):
        assert ["SegmentLoadPlanner" in message for message in messages] == [True] * 4


def far_after_a_broadcast(kind: str, sizes: Sizes) -> float:
    """The largest distance of weights from those of rank 0, of which alone they were loaded."""
    model, _, _ = by_stretto(kind, sizes)
    plain = {name: value + 1 for name, value in make(kind).state_dict().items()}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, dict(plain) if dist.get_rank() == 0 else {}, options=options)
    model.load_state_dict(model.state_dict() | {name: value for name, value in plain.items() if "norm" in name})
    return largest((gather(value) - plain[name]).abs().max().item() for name, value in model.named_parameters())


def test_weights_of_rank_0_are_broadcast_or_that_is_refused(ranks: MakeRanks) -> None:
    assert ranks(2).run(far_after_a_broadcast, "blocks", {"z": 2}) == [0, 0]
    assert ranks(2).run(far_after_a_broadcast, "llama", {"pipe": 2}) == [0, 0]  # each rank loads its own stages
    with pytest.raises(RuntimeError, match="broadcast_from_rank0=True") as caught:  # torch gives each rank one box
        ranks(2).run(far_after_a_broadcast, "gpt2", {"x": 2})
    assert "c_attn" in str(caught.value)
    assert "keep_vars=True" in str(caught.value)  # whose state dict is the same, and harmless


def load_state_of_rank_0(folder: Path) -> None:
    """Load optimizer state of fused weights that x cuts, from rank 0, in place, after a step, and from a checkpoint."""
    model, optimizer, grid = by_stretto("gpt2", {"x": 2})
    plain = make("gpt2")
    whole = get_optimizer_state_dict(plain, torch.optim.AdamW(plain.parameters()))
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    for _ in range(2):  # a fresh optimizer, and one that has made steps
        given = copy.deepcopy(whole) if dist.get_rank() == 0 else {}
        with pytest.raises(RuntimeError, match=r"exp_avg of .*c_attn.* was written shard by shard"):
            set_optimizer_state_dict(model, optimizer, given, options=options)
        set_optimizer_state_dict(model, optimizer, copy.deepcopy(whole), options=StateDictOptions(full_state_dict=True))
        train(model, optimizer, 0, grid)
    own = get_optimizer_state_dict(model, optimizer)
    dcp.save({"optim": own}, checkpoint_id=folder, planner=SegmentSavePlanner())
    dcp.load({"optim": own}, checkpoint_id=folder, planner=SegmentLoadPlanner())
    set_optimizer_state_dict(model, optimizer, own)
    own = get_optimizer_state_dict(model, optimizer)
    train(model, optimizer, 0, grid)
    set_optimizer_state_dict(model, optimizer, own)


def test_optimizer_state_of_rank_0_that_a_broadcast_mixes_up_is_refused(ranks: MakeRanks, tmp_path: Path) -> None:
    ranks(2).run(load_state_of_rank_0, tmp_path)


def unset_on_meta(kind: str) -> tuple[bool, bool, float]:
    """Of a model on the meta device without a seed: whether all parameters are NaN, buffers right, and a loss."""
    plain = make(kind)
    with torch.device("meta"):
        model = make(kind)
    model = parallelize(model, Grid(x=2, z=2), seed=None)
    are_unset = all(bool(parameter.to_local().isnan().all()) for parameter in model.parameters())
    buffers = dict(plain.named_buffers())
    are_right = all(torch.equal(value, buffers[name]) for name, value in model.named_buffers())
    model.load_state_dict(plain.state_dict())
    tokens = next(batches(0))[0]
    return are_unset, are_right, (model(tokens).logits - plain(tokens).logits).abs().max().item()


@pytest.mark.long
@pytest.mark.parametrize("kind", ["llama", pytest.param("gpt2", marks=pytest.mark.long)])
def test_weights_that_are_loaded_afterwards_are_not_drawn_before(kind: str, ranks: MakeRanks) -> None:
    for are_unset, are_right, far in ranks(4).run(unset_on_meta, kind):
        assert are_unset
        assert are_right
        assert far < 1e-5


class Scaled(nn.Module):
    """Its scale is a tensor of no dims."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.scale = nn.Linear(4, 4), nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale


def steps_with_whole_state(grid: Grid | None, *, is_loaded: bool) -> list[float]:
    """The scale in three steps; the whole state of the first one is loaded, or not, into a second optimizer."""
    model = Scaled() if grid is None else parallelize(Scaled(), grid)
    first, second = (torch.optim.AdamW(model.parameters(), lr=0.1) for _ in range(2))
    found = []
    for optimizer in (first, second, second):
        if optimizer is second and is_loaded:
            is_loaded = False
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=grid is not None)
            state = get_optimizer_state_dict(model, first, options=StateDictOptions(full_state_dict=True))
            set_optimizer_state_dict(model, second, state, options=options)
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(model.scale if grid is None else gather(model.scale)))
    return found


def compare_whole_state(sizes: Sizes) -> None:
    expected = steps_with_whole_state(None, is_loaded=True)
    assert steps_with_whole_state(Grid(**sizes), is_loaded=True) == pytest.approx(expected, rel=1e-5)
    assert steps_with_whole_state(None, is_loaded=False) != pytest.approx(expected, rel=1e-3)


def test_whole_optimizer_state_of_a_scalar_is_loaded(ranks: MakeRanks) -> None:
    ranks(2).run(compare_whole_state, {"z": 2})
    ranks(2).run(compare_whole_state, {"data": 2})


def lose_by_asynchronous_save(kind: str, sizes: Sizes, folder: Path) -> list[str]:
    """Names of weights and moments that are not in the file as they were when the save began."""
    model, optimizer, grid = by_stretto(kind, sizes)
    train(model, optimizer, 0, grid)
    given = dict(zip(("model", "optim"), get_state_dict(model, optimizer, options=FLAT), strict=True))
    before, group = copy.deepcopy(given), dist.new_group()  # the save has its own messages
    written: Any = dcp.async_save(given, checkpoint_id=folder, planner=SegmentSavePlanner(), process_group=group)
    train(model, optimizer, STEPS, grid)
    written.result()
    other, its_optimizer, _ = by_stretto(kind, sizes)
    read = dict(zip(("model", "optim"), get_state_dict(other, its_optimizer, options=FLAT), strict=True))
    dcp.load(read, checkpoint_id=folder, planner=SegmentLoadPlanner())
    return [
        name
        for part, values in before.items()
        for name, value in values.items()
        if isinstance(value, DTensor) and not torch.equal(value.to_local(), read[part][name].to_local())
    ]


@pytest.mark.parametrize("kind", ["blocks", pytest.param("gpt2", marks=pytest.mark.long)])
def test_asynchronous_saves_have_the_weights_of_their_call(kind: str, ranks: MakeRanks, tmp_path: Path) -> None:
    assert ranks(2).run(lose_by_asynchronous_save, kind, {"x": 2} if kind == "gpt2" else {"z": 2}, tmp_path) == [[], []]
