# SPDX-License-Identifier: Apache-2.0
"""The axes of a grid: their order, sizes and groups, and that an axis is added in one place."""

import copy
import json
import pickle
import re
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from stretto import axes
from stretto.axes import GridSizes, check_sizes, fold_experts, group_sizes, name_grid, parameter_axes


def test_the_orders_of_the_axes():
    assert axes.OUTER_TO_INNER == ("pipe", "data", "context", "z", "y", "x")
    assert axes.INNER_TO_OUTER == ("x", "y", "z", "context", "data", "pipe")
    assert axes.NAMES == ("pipe", "data", "context", "x", "y", "z")
    assert axes.STAGE_AXES == ("data", "context", "z", "y", "x")
    assert axes.MESH_ORDER == ("pipe", "data", "context", "y", "x", "z")
    assert axes.WEIGHT_AXES == ("x", "y", "z")


def test_gradients_are_summed_over_context_too_and_the_batch_is_not_split_over_it():
    assert axes.DERIVED_GROUPS == {
        "batch": ("data", "z"),
        "loss": ("data", "context", "z"),
        "replicas": ("data", "context"),
    }
    assert (axes.BATCH, axes.LOSS, axes.REPLICAS) == ("batch", "loss", "replicas")
    sizes = {"data": 2, "context": 7, "x": 3, "y": 1, "z": 5}
    assert group_sizes(sizes) == sizes | {"pipe": 1, "batch": 10, "loss": 70, "replicas": 14, "shards": 5, "expert": 1}
    assert (GridSizes(**sizes).batch_parts, GridSizes(**sizes).replicas) == (10, 14)


def test_sizes_are_a_mapping_with_attributes_and_never_change():
    sizes = GridSizes(data=2, z=5, x=3)
    assert dict(sizes) == sizes.sizes() == {"pipe": 1, "data": 2, "x": 3, "y": 1, "z": 5}
    stages = GridSizes(data=2, z=5, x=3, pipe=4)
    assert (stages.ranks, stages.stage_ranks, stages.batch_parts, stages.weight_parts) == (120, 30, 10, 15)
    assert repr(stages) == "GridSizes(pipe=4, data=2, x=3, y=1, z=5)"
    assert (sizes.x, sizes["z"], sizes.ranks, sizes.batch_parts, sizes.replicas, sizes.weight_parts) == (
        (3, 5, 30, 10, 2, 15)
    )
    assert [sizes.preceding(axis) for axis in axes.INNER_TO_OUTER] == [1, 3, 3, 15, 15, 30]
    assert sizes == GridSizes(2, 3, 1, 5)
    assert len({sizes, GridSizes(2, 3, 1, 5), GridSizes()}) == 2
    assert repr(sizes) == "GridSizes(data=2, x=3, y=1, z=5)"
    for other in (copy.deepcopy(sizes), pickle.loads(pickle.dumps(sizes))):
        assert (other, other.ranks) == (sizes, 30)
    with pytest.raises(AttributeError, match="immutable"):
        sizes.x = 4
    with pytest.raises(KeyError):
        sizes["ranks"]


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"w": 2}, "'w' is not an axis of a grid; the axes are pipe, data, context, x, y, z"),
        ({"x": 0}, "grid.x is 0, but must be a whole number, at least 1"),
        ({"x": True}, "grid.x is True, but must"),
        ({"z": 1.0}, "grid.z is 1.0, but must"),
    ],
)
def test_sizes_of_other_axes_or_kinds_are_refused(sizes, words):
    with pytest.raises(ValueError, match=words):
        check_sizes(sizes)
    assert check_sizes({"x": 2}) == GridSizes(x=2)


@pytest.mark.parametrize(
    ("sizes", "name"),
    [
        ({"data": 1, "x": 2, "y": 1, "z": 2}, "x=2 z=2"),
        ({"data": 4, "x": 1, "y": 8, "z": 1}, "data=4 y=8"),
        ({"data": 1, "x": 1, "y": 1, "z": 1}, "one rank"),
    ],
)
def test_a_grid_is_named_by_its_axes_that_have_several_ranks(sizes, name):
    assert name_grid(sizes) == name
    assert str(GridSizes(**sizes)) == name


def test_parameters_live_on_the_axes_of_several_ranks():
    assert parameter_axes(GridSizes(2, 3, 1, 5)) == ("data", "x", "z")
    assert parameter_axes(GridSizes(x=2, y=2)) == ("y", "x")
    assert parameter_axes(GridSizes()) == parameter_axes(GridSizes(pipe=8)) == ("z",)
    assert parameter_axes(GridSizes(pipe=2, data=2, x=2)) == ("data", "x")


def test_experts_take_ranks_of_data_then_of_z():
    for data, z, ranks in product((1, 2, 3, 4, 6), (1, 2, 4), (1, 2, 3, 4, 8, 12)):
        sizes = {"data": data, "x": 2, "y": 1, "z": z}
        try:
            taken = fold_experts(sizes, ranks)
        except ValueError:
            continue
        assert taken["data"] * taken["z"] == ranks
        assert data % taken["data"] == z % taken["z"] == 0
    assert fold_experts({"data": 4, "x": 2, "z": 4}, 8) == {"data": 4, "x": 1, "z": 2}
    with pytest.raises(ValueError, match="data=2 and z=2 do not hold a group of 8 ranks for experts"):
        fold_experts({"data": 2, "x": 2, "z": 2}, 8)


def test_expert_is_named_written_and_compared_with_the_grid_and_multiplies_no_ranks():
    sizes = check_sizes({"data": 4, "x": 2, "z": 2, "expert": 4})
    assert sizes.ranks == sizes.stage_ranks == 16
    assert (sizes["expert"], sizes.expert_data, sizes.expert_z, sizes.expert_x) == (4, 1, 2, 2)
    assert str(sizes) == "data=4 x=2 z=2 expert=4"
    assert repr(sizes) == "GridSizes(data=4, x=2, y=1, z=2, expert=4)"
    assert sizes.sizes() == {"pipe": 1, "data": 4, "x": 2, "y": 1, "z": 2, "expert": 4}
    folded = check_sizes(sizes.sizes() | {"expert_tensor": "fold"})
    assert (folded.expert_taken, folded.expert_data, folded.expert_x) == ({"x": 2, "data": 2, "z": 1}, 2, 1)
    assert str(folded) == "data=4 x=2 z=2 expert=4 expert_tensor=fold"
    assert repr(folded) == "GridSizes(data=4, x=2, y=1, z=2, expert=4, expert_tensor='fold')"
    assert len({sizes, folded, check_sizes(sizes.sizes()), check_sizes(folded.sizes()), GridSizes(4, 2, 1, 2)}) == 3
    assert sizes != folded != GridSizes(4, 2, 1, 2)
    for other in (copy.deepcopy(folded), pickle.loads(pickle.dumps(folded))):
        assert other == folded == folded.sizes()
    assert check_sizes({"data": 2, "expert": 2, "expert_tensor": "fold"}) == check_sizes({"data": 2, "expert": 2})
    without = GridSizes(4, 2, 1, 2)
    assert (without["expert"], without.expert_data, without.expert_z, without.expert_x) == (1, 4, 2, 2)
    assert list(without) == ["pipe", "data", "x", "y", "z"]
    assert dict(GridSizes(context=2)) == {"pipe": 1, "data": 1, "context": 2, "x": 1, "y": 1, "z": 1}


def test_experts_parameters_have_axes_of_their_own():
    names = axes.expert_parameter_axes
    assert names(check_sizes({"data": 8, "x": 2, "y": 2, "z": 2, "expert": 4})) == (
        ("expert_data", "y", "x", "expert", "expert_z")
    )
    folded = check_sizes({"data": 8, "x": 2, "y": 2, "z": 2, "expert": 4, "expert_tensor": "fold"})
    assert names(folded) == ("expert_data", "y", "expert", "expert_z")
    assert names(check_sizes({"data": 2, "z": 2, "expert": 4})) == ("expert",)
    assert axes.layout_sizes(folded.sizes()) == {
        "pipe": 1,
        "data": 8,
        "context": 1,
        "x": 2,
        "y": 2,
        "z": 2,
        "expert_data": 4,
        "expert": 4,
        "expert_z": 2,
    }


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"data": 4, "expert": 3}, "data=4 and z=1 do not hold a group of 3 ranks .* expert=4 would do"),
        ({"data": 2, "z": 3, "expert": 12}, "data=2 and z=3 do not hold .* expert=6 would do"),
        ({"x": 8, "expert": 8}, "data=1 and z=1 do not hold .* expert=1 would do"),
        (
            {"data": 2, "x": 4, "expert": 6, "expert_tensor": "fold"},
            r"x=4 folds into it .* must be a multiple of x; expert=8 would do, or expert_tensor='cut'",
        ),
        (
            {"data": 2, "x": 2, "expert": 12, "expert_tensor": "fold"},
            "data=2 and z=1 and x=2 do not hold .* expert=4 would do",
        ),
        ({"data": 2, "expert": 0}, "grid.expert is 0, but must be a whole number, at least 1"),
        (
            {"data": 2, "expert": 2, "expert_tensor": "both"},
            "grid.expert_tensor is 'both', but must be 'cut' or 'fold'",
        ),
    ],
)
def test_an_expert_without_the_ranks_for_it_is_refused_with_the_nearest_that_would_do(sizes, words):
    with pytest.raises(ValueError, match=words):
        check_sizes(sizes)


MADE_UP = '    Axis("sheaf", "made up by a test", sums_gradients=True),\n'
"""One line, before z: an axis that splits neither the batch nor weights, and over which gradients are summed."""


def with_made_up_axis(program: str, ranks: int = 0, imports: str = "") -> list[dict]:
    """Return what `program`, which leaves a dict `found`, finds where AXES has one line more.

    ranks: of as many processes, which are forked after `imports`; 0: of the one that imports.
    """
    source = Path(axes.__file__).read_text()
    (z,) = re.finditer(r'^ +Axis\(\s*"z"', source, re.MULTILINE)
    changed = source[: z.start()] + MADE_UP + source[z.start() :]
    head = (
        "import json, sys, types\n"
        "module = types.ModuleType('stretto.axes')\n"
        "sys.modules['stretto.axes'] = module\n"
        f"exec(compile({changed!r}, 'axes.py', 'exec'), module.__dict__)\n"
    )
    if ranks:
        compiled = f"PROGRAM = compile({imports + program!r}, 'program.py', 'exec')"
        program = f"{imports}\n{compiled}\n{FORKED}run_all({ranks})\n"
    else:
        program += "\nprint('FOUND ' + json.dumps(found))\n"
    done = subprocess.run([sys.executable, "-c", head + program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line[6:]) for line in done.stdout.splitlines() if line.startswith("FOUND ")]


FORKED = """
import multiprocessing, os

def run(rank):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    names = {}
    exec(PROGRAM, names)
    return names["found"]

def run_all(ranks):
    os.environ["WORLD_SIZE"] = str(ranks)
    with multiprocessing.get_context("fork").Pool(ranks) as pool:  # each waits for the others, so each runs one
        for found in pool.map(run, range(ranks), chunksize=1):
            print("FOUND " + json.dumps(found))
"""


def test_an_axis_that_is_added_in_one_place_has_its_place_among_axes_and_groups():
    (found,) = with_made_up_axis(
        "from stretto import axes\n"
        "names = 'NAMES', 'OUTER_TO_INNER', 'MESH_ORDER', 'LOSS', 'REPLICAS'\n"
        "found = {name: getattr(axes, name) for name in names}\n"
        "found['groups'] = axes.DERIVED_GROUPS\n"
    )
    assert found == {
        "NAMES": ["pipe", "data", "context", "sheaf", "x", "y", "z"],
        "OUTER_TO_INNER": ["pipe", "data", "context", "sheaf", "z", "y", "x"],
        "MESH_ORDER": ["pipe", "data", "context", "sheaf", "y", "x", "z"],
        "LOSS": "loss",
        "REPLICAS": "replicas",
        "groups": {
            "batch": ["data", "z"],
            "loss": ["data", "context", "sheaf", "z"],
            "replicas": ["data", "context", "sheaf"],
        },
    }


def test_the_planner_knows_an_axis_that_is_added_in_one_place():
    (found,) = with_made_up_axis(
        "from stretto.axes import GridSizes\n"
        "from stretto.planner import plan, predict\n"
        "from stretto.planner.grids import every_grid\n"
        "from stretto.cluster import Cluster\n"
        "grids = list(every_grid(8))\n"
        "options = dict(batch=8, seq_len=128, cost='full')\n"
        "cluster = Cluster.preset('perlmutter')\n"
        "plans = [predict('gpt2-small', cluster, grid=grid, **options).as_dict()\n"
        "         for grid in ({'data': 2}, {'sheaf': 2})]\n"
        "found = {'grids': len(grids), 'sizes': [grid.sizes() for grid in grids if grid.sheaf == 8],\n"
        "         'parts': GridSizes(sheaf=2, data=3).batch_parts, 'replicas': GridSizes(sheaf=2, data=3).replicas,\n"
        "         'plans': [{key: each[key] for key in ('grid', 'bandwidth', 'exposed')} for each in plans],\n"
        "         'sums': [each['communication']['all_reduce_data'] > 0 for each in plans],\n"
        "         'all': len(plan('gpt2-small', cluster, gpus=8, batch=8, seq_len=128))}"
    )
    assert found["grids"] == found["all"] == 35  # ways to write 8 as a product of five
    assert found["sizes"] == [{"pipe": 1, "data": 1, "sheaf": 8, "x": 1, "y": 1, "z": 1}]
    assert (found["parts"], found["replicas"]) == (3, 6)
    assert found["plans"][1]["grid"] == {"pipe": 1, "data": 1, "sheaf": 2, "x": 1, "y": 1, "z": 1}
    for each in found["plans"]:
        assert set(each["bandwidth"]) == set(each["exposed"]) == {"pipe", "data", "context", "sheaf", "x", "y", "z"}
    assert found["sums"] == [True, True]


@pytest.mark.long
@pytest.mark.usefixtures("forks_torch_processes")
def test_options_and_timeline_know_an_axis_that_is_added_in_one_place():
    (found,) = with_made_up_axis(
        "import pydantic\n"
        "from stretto.train.config.rules import nearest_grid\n"
        "from stretto.train.config.options import GridConfig\n"
        "from stretto.train.observe.timeline import ROWS, read_timeline\n"
        "from docs.configuration import reference\n"
        "grid = GridConfig(sheaf=2, z=3)\n"
        "span = {'cat': 'kernel', 'tid': 1}\n"
        "trace = {'stretto': {'groups': {'7': 'sheaf'}, 'rank': 0, 'grid': {'sheaf': 2}}, 'traceEvents': [\n"
        "    {'name': 'stretto step 1', 'cat': 'user_annotation', 'ts': 0, 'dur': 10},\n"
        "    {'name': 'ncclKernel', 'ts': 2, 'dur': 4, 'args': {'Process Group Name': '7'}, **span}]}\n"
        "timeline = read_timeline(trace)\n"
        "found = {'sizes': grid.sizes(), 'ranks': grid.ranks, 'parts': grid.batch_parts, 'text': str(grid),\n"
        "         'nearest': nearest_grid(grid, 2).sizes(), 'rows': ROWS,\n"
        "         'documented': 'sheaf' in reference() and 'made up by a test' in reference(),\n"
        "         'drawn': timeline.rows, 'time': timeline.communication}\n"
    )
    assert found.pop("time") == dict.fromkeys(("x", "y", "z", "context", "data", "pipe"), 0) | {
        "sheaf": pytest.approx(4e-6)
    }
    assert found == {
        "sizes": {"pipe": 1, "data": 1, "sheaf": 2, "x": 1, "y": 1, "z": 3},
        "ranks": 6,
        "parts": 3,
        "text": "data=1 sheaf=2 x=1 y=1 z=3",
        "nearest": {"pipe": 1, "data": 1, "sheaf": 2, "x": 1, "y": 1, "z": 1},
        "rows": [
            "compute",
            "experts",
            "x",
            "y",
            "z",
            "sheaf",
            "context",
            "data",
            "pipe",
            "expert",
            "other",
            "host to device",
            "device to host",
            "bubble",
        ],
        "documented": True,
        "drawn": ["compute", "sheaf"],
    }


IMPORTS = """
import os, torch
import torch.distributed as dist
from stretto.models import GPT, GPTConfig
from stretto.parallel import Grid, clip_grad_norm_, count_collectives, gather, layout_of, parallelize, validate
from stretto.parallel.layers.dropout import ParallelDropout
from tests.train.saving import save_checkpoint
from stretto.train.checkpoint import load_checkpoint
from stretto.train.config.gpt import RunConfig
from stretto.train.optimizer import build_optimizer
from pathlib import Path
from dataclasses import replace
import torch.distributed.tensor, stretto.parallel.install, stretto.parallel.place, stretto.parallel.resolve
"""
TRAINING = """
dist.init_process_group("gloo", init_method="file://" + FOLDER + "/store", rank=int(os.environ["RANK"]), world_size=4)
config = GPTConfig(layers=2, hidden=16, heads=2, vocab=32, max_seq_len=8)

def make(seed=0):
    torch.manual_seed(seed)
    return GPT(config).double()

tokens = torch.arange(32).view(4, 8) * 7 % 32
plain = make()
plain(tokens, tokens).backward()
wanted = {name: parameter.grad for name, parameter in plain.named_parameters()}

grid = Grid(z=2, sheaf=2)
at = {axis: grid.coordinate(axis) for axis in (*grid.sizes, "batch", "loss", "replicas")}
model = parallelize(make(), grid)
part = tokens.chunk(2)[grid.coordinate("batch")]
with count_collectives(grid) as counts:
    model(part, part).backward()
grads = {name: gather(p.grad, layout_of(p)) for name, p in model.named_parameters()}
norm = float(clip_grad_norm_(model.parameters(), 1e9, grid))

def make_experts():
    torch.manual_seed(4)
    return GPT(replace(config, layers=1, num_experts=4, balance="none")).double()

whole, own = make_experts(), parallelize(make_experts(), Grid(z=2, sheaf=2, expert=2))
whole(torch.cat((tokens, tokens + 1)) % 32, torch.cat((tokens, tokens))).backward()
mine = (part + grid.coordinate("sheaf")) % 32  # the ranks of sheaf have other tokens
own(mine, part).backward()
of_experts = max(
    float((gather(mine.grad, layout_of(mine)) - theirs.grad).abs().max())
    for mine, theirs in zip(own.parameters(), whole.parameters())
)

torch.manual_seed(3)
dropped = ParallelDropout(0.5, grid, "x")(torch.ones(2, 64))

optimizer = build_optimizer(model, RunConfig(steps=1, batch=4, seq_len=8, dtype="fp64", lr=1e-2))
optimizer.step(lr=1e-2)
path = save_checkpoint(Path(FOLDER), 1, model, optimizer, model_config=config, run={}, data={}, keep=1)
again = make(seed=1)
load_checkpoint(path, again)
whole = {name: gather(parameter) for name, parameter in model.named_parameters()}

def refusal(function):
    try:
        function()
    except (ValueError, RuntimeError) as error:
        return str(error)

def other_weights():
    parallelize(make(seed=grid.coordinate("sheaf")), grid)

def other_gradients():
    model = parallelize(make(), grid)
    if grid.coordinate("sheaf"):
        for parameter in list(model.parameters())[-2:]:
            parameter.requires_grad_(False)
    model(part, part).backward()

found = {
    "at": at, "ranks": grid.mesh.mesh.flatten().tolist(), "parameters": grid.parameter_axes,
    "mesh": next(iter(model.parameters())).device_mesh.mesh_dim_names,
    "distance": max(float((grads[name] - grad).abs().max()) for name, grad in wanted.items()),
    "of experts": of_experts,
    "dropped": dropped.flatten().tolist(),
    "norm": norm / float(torch.stack([grad.norm() for grad in wanted.values()]).norm()),
    "summed over": sorted(counts.bytes_by_axis()),
    "checkpoint": all(torch.equal(whole[name], parameter) for name, parameter in again.named_parameters()),
    "other weights": refusal(other_weights),
}
found["other gradients"] = refusal(other_gradients)
sizes_refused = refusal(lambda: validate(make(), {"leaf": 2}))
found["sizes"] = sizes_refused
"""


@pytest.mark.long
@pytest.mark.usefixtures("forks_torch_processes")
def test_grid_layouts_gradients_and_checkpoints_know_an_axis_that_is_added_in_one_place(tmp_path):
    results = with_made_up_axis(f"FOLDER = {str(tmp_path)!r}\n" + TRAINING, ranks=4, imports=IMPORTS)
    assert len({tuple(found["dropped"]) for found in results}) == 4  # other tokens, other parts of dropout's mask
    for rank, found in enumerate(results):
        sheaf, z = divmod(rank, 2)
        assert found["at"] == {
            "pipe": 0,
            "data": 0,
            "sheaf": sheaf,
            "x": 0,
            "y": 0,
            "z": z,
            "batch": z,
            "loss": rank,
            "replicas": sheaf,
        }
        assert found["ranks"] == [0, 1, 2, 3]
        assert found["parameters"] == found["mesh"] == ["sheaf", "z"]
        assert found["distance"] < 1e-12
        assert found["of experts"] < 1e-12
        assert found["norm"] == pytest.approx(1)
        assert {"replicas", "z", "loss"} <= set(found["summed over"])
        assert found["checkpoint"]
        assert "ranks hold different values of" in found["other weights"]
        assert "ranks train different parameters" in found["other gradients"]
        assert found["sizes"] == "'leaf' is not an axis of a grid; the axes are pipe, data, context, sheaf, x, y, z"
