# SPDX-License-Identifier: Apache-2.0
"""stretto.optim.Muon: torch's bits on one rank, and one rank's weights on every grid."""

import copy
import pickle
import random
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from tests.differences import largest
from tests.parallel.experts.training import gpt
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor

from stretto.models import GPT
from stretto.optim import Muon, RowParts, hidden_matrices
from stretto.optim.matrix_owners import MatrixExchange
from stretto.optim.muon import NewtonSchulz
from stretto.parallel import Grid, gather, no_sync, parallelize
from stretto.train.optimizer import find_row_parts

SEED = random.randrange(2**31)
SHAPES = (24, 16), (16, 24), (8, 8), (1, 5)


@pytest.mark.parametrize("adjust", ["match_rms_adamw", "original"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_steps_of_plain_matrices_have_torchs_bits(adjust, nesterov):
    print(f"seed {SEED}")
    weights = []
    for is_ours in (True, False):
        torch.manual_seed(SEED)
        parameters = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
        options = {"lr": 0.02, "weight_decay": 0.1, "nesterov": nesterov}
        if is_ours:
            optimizer = Muon(parameters, adjust_lr=adjust, **options)
        else:
            optimizer = torch.optim.Muon(parameters, adjust_lr_fn=adjust, **options)
        for _ in range(3):
            for parameter in parameters:
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()
        weights.append(parameters)
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))


CONFIG = gpt(layers=2, hidden=16, heads=2, expert_ffn=32, num_experts=4, balance="none", vocab=31)
BATCH, SEQ, LR, DECAY = 8, 8, 0.02, 0.1


def rows_of_qkv(config):
    """Queries, keys and values of each KV head's group lie together in a GPT's qkv."""
    queries, dim = config.heads // config.num_kv_heads, config.head_dim
    edges = 0, queries * dim, (queries + 1) * dim, (queries + 2) * dim
    return [RowParts(start, stop, edges[-1]) for start, stop in pairwise(edges)]


def orthogonalize(matrix):
    x = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    x = x / x.norm()
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
    x = x if matrix.shape[0] <= matrix.shape[1] else x.T
    return x * 0.2 * max(matrix.shape) ** 0.5


def orthogonalize_all(name, weight):
    """The update of a GPT's parameter: per expert, and per part of qkv."""
    if weight.dim() == 3:
        return torch.stack([orthogonalize(one) for one in weight])
    if not name.endswith("qkv.weight"):
        return orthogonalize(weight)
    queries, dim = CONFIG.heads // CONFIG.num_kv_heads, CONFIG.head_dim
    update = torch.empty_like(weight).view(-1, queries + 2, dim, weight.shape[1])
    groups = weight.view_as(update)
    for part in (slice(0, queries), slice(queries, queries + 1), slice(queries + 1, queries + 2)):
        chosen = groups[:, part]
        update[:, part] = orthogonalize(chosen.reshape(-1, weight.shape[1])).view_as(chosen)
    return update.view_as(weight)


def make_model():
    torch.manual_seed(0)
    return GPT(CONFIG).double()


def draw(step):
    return torch.randint(CONFIG.vocab, (2, BATCH, SEQ), generator=torch.Generator().manual_seed(step))


FACTORS = {2: 0.5}  # of a step's gradients, as clipping has


def train_plainly(steps):
    """Weights of a plain loop, with another Newton-Schulz and torch's AdamW."""
    model, momenta = make_model(), {}
    names = [n for n, p in model.named_parameters() if p.dim() >= 2 and not n.startswith(("embedding", "head"))]
    matrices = {name: dict(model.named_parameters())[name] for name in names}
    others = [p for n, p in model.named_parameters() if n not in matrices]
    adamw = torch.optim.AdamW(others, lr=LR, betas=(0.9, 0.95), weight_decay=DECAY)
    for step in range(steps):
        model.zero_grad()
        model(*draw(step)).backward()
        for parameter in model.parameters():
            parameter.grad *= FACTORS.get(step, 1)
        adamw.step()
        for name, weight in matrices.items():
            momenta[name] = 0.95 * momenta.get(name, 0.0) + 0.05 * weight.grad
            update = orthogonalize_all(name, 0.05 * weight.grad + 0.95 * momenta[name])
            weight.data = weight.data * (1 - LR * DECAY) - LR * update
    return {name: weight.detach() for name, weight in model.named_parameters()}, names


def train_on_grid(sizes, steps):
    """The largest distance of a weight from the plain loop's."""
    grid = Grid(**sizes)
    model = parallelize(make_model(), grid, dtype=torch.float64)
    expected, names = train_plainly(steps)
    matrices = hidden_matrices(model)
    assert sorted(matrices) == sorted(names)
    others = [p for n, p in model.named_parameters() if n not in matrices]
    parts = [rows_of_qkv(CONFIG) if name.endswith("qkv.weight") else () for name in matrices]
    groups = [{"params": list(matrices.values()), "use_muon": True, "row_parts": parts}, {"params": others}]
    optimizer = Muon(groups, lr=LR, weight_decay=DECAY, grid=grid)
    optimizer.overlap_with(model)
    size, part = grid.size("batch"), grid.coordinate("batch")
    for step in range(steps):
        model(*(one.chunk(size)[part] for one in draw(step))).backward()
        optimizer.step(scale=torch.tensor(FACTORS[step]) if step in FACTORS else None)
        optimizer.zero_grad()
    distances = [(gather(p) - expected[n]).norm() / expected[n].norm() for n, p in model.named_parameters()]
    return float(largest(distances))


GRIDS = [
    {"data": 2, "x": 2, "z": 2, "expert": 2},
    *(
        pytest.param(grid, marks=pytest.mark.exhaustive)
        for grid in (
            {"x": 2, "y": 2, "z": 2},
            {"data": 4, "z": 2, "expert": 4},
            {"data": 8},
            {"z": 8},
            {"x": 2, "data": 4},
            {"y": 2, "z": 4},
            {"data": 2, "context": 2, "z": 2},
        )
    ),
]


@pytest.mark.long
@pytest.mark.parametrize("sizes", GRIDS, ids=str)
def test_weights_on_a_grid_are_one_ranks(ranks, sizes):
    for distance in ranks(8).run(train_on_grid, sizes, 4):
        assert distance < 1e-9


class Overlapped:
    """A model of 2 blocks on a grid, and its Muon, with rounds of a few matrices."""

    def __init__(self, sizes, *, hides=True, **options):
        self.grid = Grid(**sizes)
        self.model = parallelize(make_model(), self.grid, dtype=torch.float64)
        self.matrices = hidden_matrices(self.model)
        others = [p for n, p in self.model.named_parameters() if n not in self.matrices]
        groups = [{"params": list(self.matrices.values()), "use_muon": True}, {"params": others}]
        self.optimizer = Muon(groups, lr=LR, grid=self.grid)
        if hides:
            self.optimizer.overlap_with(self.model, **options)
        self.draws = 0

    def backward(self):
        self.draws += 1
        size, part = self.grid.size("batch"), self.grid.coordinate("batch")
        loss = self.model(*(one.chunk(size)[part] for one in draw(self.draws)))
        loss.backward()
        return loss.detach()

    def step(self, **options):
        self.optimizer.step(**options)
        self.optimizer.zero_grad()

    def late(self):
        return [name for name, parameter in self.matrices.items() if parameter.late_write is not None]


def fail(*_):
    raise ArithmeticError


def raise_in_backward(run):
    handle = run.model.blocks[0].register_full_backward_hook(fail)
    with pytest.raises(ArithmeticError):
        run.backward()
    handle.remove()
    run.optimizer.zero_grad()


def go_through(hides, sizes):
    """Numbers that a training reads in all ways, of steps that are skipped, scaled, accumulated, dropped and failed."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stretto.optim.matrix_owners._ROUND", 100)
        run = Overlapped(sizes, hides=hides)
        matrices, optimizer = list(run.matrices.values()), run.optimizer
        for number in range(2):  # a step, and one whose exchange starts in its backward pass
            run.backward()
            run.step()
            found += [matrices[-1 - number].to_local().detach().clone(), matrices[number].full_tensor()]
        run.backward()
        optimizer.zero_grad()  # a step that does not come
        run.backward()
        run.step(skip=torch.tensor(True))
        found += [p.clone() for p in run.model.state_dict().values()]
        run.backward()
        run.step(scale=torch.tensor(0.25), skip=torch.tensor(False))
        run.model.load_state_dict(run.model.state_dict())
        with no_sync(run.model):
            run.backward()
        run.backward()
        run.step()
        run.backward()
        run.backward()  # the first one has sent its gradients, and is sent again with this one's
        run.step()
        found.append(next(iter(matrices)).norm().full_tensor())
        with torch.no_grad():
            found.append(run.model(*(one.chunk(4)[0] for one in draw(0))))
        matrices[0].requires_grad_(False)
        run.backward()
        run.step()
        raise_in_backward(run)
        matrices[0].requires_grad_(True)
        for _ in range(2):
            found.append(run.backward())
            run.step()
        found.append(copy.deepcopy(optimizer).param_groups[0]["params"][0].full_tensor())
        found += [optimizer.state[p]["momentum_buffer"].full_tensor() for p in matrices]
        found += [gather(p) for p in run.model.parameters()]
    return [each.to_local() if isinstance(each, DTensor) else each for each in found]


def compare_hidden(sizes):
    pairs = list(zip(go_through(True, sizes), go_through(False, sizes), strict=True))
    return len(pairs), [number for number, pair in enumerate(pairs) if not torch.equal(*pair)]


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param({"data": 2, "z": 2}, marks=pytest.mark.long),
        pytest.param({"x": 2, "z": 2}, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_a_hidden_exchange_changes_no_bits_however_weights_are_read(ranks, sizes):
    for count, different in ranks(4).run(compare_hidden, sizes):
        assert count > 50
        assert different == []


def watch_a_step(sizes, scale):
    """How many gradients were final when each round was sent, and which weights were late when each block began."""
    sent, late = [], {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stretto.optim.matrix_owners._ROUND", 100)
        run = Overlapped(sizes)
        listener, start = run.optimizer._overlap.exchange, MatrixExchange._start

        def note_start(exchange):
            sent.append(len(listener._final) if torch._C._current_graph_task_id() != -1 else None)
            start(exchange)

        run.backward()
        run.step(scale=scale)
        patch.setattr(MatrixExchange, "_start", note_start)
        run.backward()
        run.step(scale=scale)
        for number, block in enumerate(run.model.blocks):
            block.register_forward_pre_hook(lambda *_, number=number: late.__setitem__(number, run.late()))
        after = run.late()
        run.model.eval()
        with torch.no_grad():
            run.model(*draw(0))
    return sent, after, late, len(run.matrices), run.late()


@pytest.mark.parametrize("scale", [None, torch.tensor(0.5)], ids=["no factor", "clipped"])
def test_matrices_are_exchanged_in_the_backward_pass_and_written_when_they_are_gathered(ranks, scale):
    for sent, after, late, matrices, left in ranks(2).run(watch_a_step, {"z": 2}, scale):
        if scale is None:
            assert sent[0] < matrices / 2  # the other gradients were still to come
            assert None not in sent
        else:  # in the order in which they are needed
            assert set(sent) == {None}
            assert any(name.startswith("blocks.1") for name in late[0])
            assert late[1]
        assert len(after) == matrices
        assert not any(name.startswith("blocks.0.attention") for name in late[1])
        assert left == []


def test_weights_that_no_gather_asks_for_are_written_before_the_forward_pass(ranks):
    for _, after, late, matrices, _ in ranks(2).run(watch_a_step, {"x": 2}, torch.tensor(0.5)):
        assert len(after) == matrices
        assert late[0] == []


def make_wrongly():
    grid = Grid(data=dist.get_world_size())
    model = parallelize(make_model(), grid, dtype=torch.float64)
    with pytest.raises(ValueError, match="grid=grid"):
        Muon(list(hidden_matrices(model).values()))
    for in_backward in (True, False):
        run = Overlapped({"z": dist.get_world_size()}, in_backward=in_backward)
        for number in range(2):
            run.backward()
            torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.01)
            if number and in_backward:
                with pytest.raises(RuntimeError, match="changed between backward"):
                    run.step()
            else:
                run.step()
    with pytest.raises(ValueError, match="add matrices before overlap_with"):
        run.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, 2))], "use_muon": True})
    with pytest.raises(ValueError, match="takes a model that"):
        run.optimizer.overlap_with(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="no parameters of this model"):
        run.optimizer.overlap_with(model)
    with pytest.raises(ValueError, match="and all its matrices"):
        run.optimizer.overlap_with(run.model, list(run.matrices.values())[1:])


def test_bad_input_is_refused(ranks):
    ranks(2).run(make_wrongly)
    weight = nn.Parameter(torch.ones(6, 4))
    for match, options in {
        "0.95 is usual": {"momentum": 1.0},
        "5 is usual": {"iteration": NewtonSchulz(steps=0)},
        "match_rms_adamw, original": {"adjust_lr": "none"},
    }.items():
        with pytest.raises(ValueError, match=match):
            Muon([weight], **options)
    with pytest.raises(ValueError, match="do not divide the 6 rows"):
        Muon([{"params": [weight], "use_muon": True, "row_parts": [[RowParts(0, 4, 4)]]}])
    with pytest.raises(ValueError, match="use_muon=False would do"):
        Muon([nn.Parameter(torch.ones(3))])
    for name, value in {"momentum": 0.9, "nesterov": False, "ns_steps": 6, "maximize": True}.items():
        with pytest.raises(ValueError, match=f"has {name}, of which groups have none"):
            Muon([{"params": [weight], "use_muon": True, name: value}])


class Small(nn.Sequential):
    """Two linears of 20 numbers each, and their optimizer."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__(nn.Linear(5, 4), nn.Linear(4, 5))
        self.rows = torch.randn(3, 5)

    def loss(self):
        return self(self.rows).square().sum()

    def optimizer(self):
        matrices = list(hidden_matrices(self).values())
        return Muon([{"params": matrices, "use_muon": True}, {"params": [self[0].bias, self[1].bias]}], lr=0.02)

    def train_twice(self, optimizer, closure=None):
        for _ in range(2):
            if closure is None:
                optimizer.zero_grad()
                self.loss().backward()
            optimizer.step(closure)
        return torch.cat([parameter.detach().flatten() for parameter in self.parameters()])


def test_closures_later_groups_and_rates_in_tensors_change_nothing():
    model = Small()
    expected = model.train_twice(model.optimizer())

    model = Small()
    optimizer = model.optimizer()

    def closure():
        optimizer.zero_grad()  # of all groups
        loss = model.loss()
        loss.backward()
        return loss

    assert torch.equal(model.train_twice(optimizer, closure), expected)

    model = Small()
    optimizer = Muon([{"params": [model[0].weight], "use_muon": True}], lr=0.02)
    optimizer.add_param_group({"params": [model[1].weight], "use_muon": True})
    optimizer.add_param_group({"params": [model[0].bias, model[1].bias]})
    assert torch.equal(model.train_twice(optimizer), expected)

    model = Small()
    optimizer = model.optimizer()
    optimizer.param_groups[0]["lr"] = torch.tensor(0.02)
    assert (model.train_twice(optimizer) - expected).abs().max() < 1e-6  # with an update rounded to bf16, 1e-4


def through_torch(optimizer, model):
    state = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    fresh = model.optimizer()
    set_optimizer_state_dict(model, fresh, state)
    return fresh


def through_state_dict(optimizer, model):
    fresh = model.optimizer()
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return fresh


@pytest.mark.parametrize("way", [None, "copy", "pickle", through_state_dict, through_torch])
def test_a_copied_or_loaded_muon_goes_on(way):
    model = Small()
    optimizer = model.optimizer()
    model.train_twice(optimizer)
    if way in ("copy", "pickle"):
        pair = model, optimizer
        model, optimizer = copy.deepcopy(pair) if way == "copy" else pickle.loads(pickle.dumps(pair))
    elif way is not None:
        optimizer = way(optimizer, model)
    found = model.train_twice(optimizer)
    model = Small()
    optimizer = model.optimizer()
    model.train_twice(optimizer)
    assert torch.equal(found, model.train_twice(optimizer))


def test_anothers_state_and_groups_that_cannot_be_are_refused():
    model = Small()
    other = torch.optim.AdamW(
        [{"params": [model[0].weight, model[1].weight]}, {"params": [model[0].bias, model[1].bias]}]
    )
    optimizer = model.optimizer()
    with pytest.raises(
        ValueError, match=r"another optimizer.*use_muon is \[None, None\] in its groups, and \[True, False"
    ):
        optimizer.load_state_dict(other.state_dict())
    extra = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(ValueError, match="1 parameters, but row_parts of 2"):
        optimizer.add_param_group({"params": [extra], "use_muon": True, "row_parts": [(), ()]})
    with pytest.raises(ValueError, match=r"not torch\.complex64"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, 2) * 1j)], "use_muon": True})
    assert len(optimizer.param_groups) == 2
    with pytest.raises(TypeError, match="must be a dict, but is a Parameter"):
        Muon([{"params": [model[0].weight], "use_muon": True}, model[1].weight])
    with pytest.raises(ValueError, match="empty"):
        Muon([])


@pytest.mark.parametrize("adjust", ["match_rms_adamw", "original"])
def test_a_transposed_weight_has_the_update_of_its_transpose(adjust):
    torch.manual_seed(SEED)
    whole, gradient = torch.randn(2, 12, 8, dtype=torch.float64)
    parts = RowParts(0, 4, 12), RowParts(4, 12, 12)
    found = []
    for dim in (-2, -1):
        weight = nn.Parameter((whole if dim == -2 else whole.T).clone())
        weight.grad = (gradient if dim == -2 else gradient.T).contiguous()
        own = [tuple(part._replace(dim=dim) for part in parts)]
        Muon([{"params": [weight], "use_muon": True, "row_parts": own}], lr=0.1, adjust_lr=adjust).step()
        found.append(weight.detach() if dim == -2 else weight.detach().T)
    assert (found[0] - found[1]).abs().max() < 1e-9
    with pytest.raises(ValueError, match=r"do not divide the 8 columns"):
        Muon([{"params": [nn.Parameter(whole)], "use_muon": True, "row_parts": [[RowParts(0, 12, 12, dim=-1)]]}])


def note_call(calls, function, *arguments):
    calls.append(0)
    return function(*arguments)


def train_partly_frozen(kind):
    """Distance of weights on 2 ranks from those of one, of which one matrix was never trained, and one is later."""
    found = []
    for sizes in ({}, {"z": 2}) if kind == "grid" else ({},):
        model = make_model()
        grid = Grid(**sizes) if sizes else None
        if grid is not None:
            model = parallelize(model, grid, dtype=torch.float64)
        matrices = hidden_matrices(model)
        optimizer = Muon([{"params": list(matrices.values()), "use_muon": True}], lr=LR, grid=grid)
        frozen = [parameter for name, parameter in matrices.items() if "attention" in name]
        iterated = []
        optimizer._orthogonalize = partial(note_call, iterated, optimizer._orthogonalize)
        for step in range(2):
            for parameter in frozen:
                parameter.requires_grad_(step == 1)
            rows = draw(step) if grid is None else [one.chunk(2)[grid.coordinate("batch")] for one in draw(step)]
            model(*rows).backward()
            optimizer.step()
            optimizer.zero_grad()
            iterated.append(1)
        found.append([gather(p) if grid is not None else p.detach() for p in matrices.values()])
        counts = iterated.index(1), len(iterated) - iterated.index(1) - 2
        assert counts[0] < counts[1]
    return largest(float((a - b).norm() / b.norm()) for a, b in zip(*found, strict=True))


def test_frozen_matrices_are_not_iterated_until_they_are_trained(ranks):
    for distance in ranks(2).run(train_partly_frozen, "grid"):
        assert distance < 1e-9


def test_what_hugging_face_models_fuse_is_known():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 16}
    sizes |= {"intermediate_size": 48, "num_hidden_layers": 1, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1}
    thirds = [(0, 32, 96, -2), (32, 64, 96, -2), (64, 96, 96, -2)]
    of_head = [(0, 8, 24, -2), (8, 16, 24, -2), (16, 24, 24, -2)]
    gate_up = [(0, 48, 96, -2), (48, 96, 96, -2)]
    expected = {
        ("GPT2", "n_embd=32 n_head=4 n_layer=1 vocab_size=16"): {
            "attn.c_attn.weight": [(*part[:3], -1) for part in thirds],
            "mlp.c_proj.weight": [(0, 32, 32, -1)],
        },
        ("Phi3", ""): {
            "qkv_proj.weight": [(0, 32, 64, -2), (32, 48, 64, -2), (48, 64, 64, -2)],
            "gate_up_proj.weight": gate_up,
            "down_proj.weight": [],
        },
        ("Mixtral", "experts"): {"experts.gate_up_proj": gate_up, "experts.down_proj": []},
        ("GptOss", "experts"): {
            "experts.gate_up_proj": [(0, 1, 2, -1), (1, 2, 2, -1)],
            "experts.down_proj": [(0, 32, 32, -1)],
            "experts.gate_up_proj_bias": None,
            "lm_head.weight": None,
        },
        ("GPTNeoX", ""): {"query_key_value.weight": of_head, "embed_out.weight": None},
    }
    for (family, options), weights in expected.items():
        config = getattr(transformers, f"{family}Config")
        given = dict(part.split("=") for part in options.split()) if "=" in options else sizes
        given = {key: int(value) for key, value in given.items()} | (experts if options == "experts" else {})
        with torch.device("meta"):
            model = getattr(transformers, f"{family}{'LMHeadModel' if family == 'GPT2' else 'ForCausalLM'}")(
                config(**given)
            )
        matrices = hidden_matrices(model)
        for ending, parts in weights.items():
            found = [name for name in matrices if name.endswith(ending)]
            assert len(found) == (parts is not None), (family, ending)
            assert not found or [tuple(part) for part in find_row_parts(model, found[0])] == parts, (family, ending)


OF_MIXERS = {
    "Dbrx": (
        {"d_model": 32, "n_heads": 4, "n_layers": 1, "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4}}
        | {"ffn_config": {"hidden_size": 32, "ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 1}},
        {"Wqkv.weight": (32, 16, 16), "experts.mlp.w1": (16,) * 4, "experts.mlp.w2": (16,) * 4},
    ),
    "CodeGen": ({"n_embd": 32, "n_head": 4, "n_layer": 1, "rotary_dim": 4}, {"qkv_proj.weight": (8, 8, 8)}),
    "Mamba2": (
        {"hidden_size": 32, "num_hidden_layers": 1, "num_heads": 8, "head_dim": 8, "n_groups": 2, "state_size": 4},
        {"in_proj.weight": (64, 64, 8, 8, 8)},
    ),
    "Qwen3Next": (
        {"hidden_size": 32, "num_hidden_layers": 1, "layer_types": ["linear_attention"], "moe_intermediate_size": 16}
        | {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "num_experts": 2}
        | {"linear_value_head_dim": 8, "num_experts_per_tok": 1, "shared_expert_intermediate_size": 16},
        {"in_proj_qkvz.weight": (8, 8, 16, 16), "in_proj_ba.weight": (2, 2), "experts.gate_up_proj": (16, 16)},
    ),
}


def test_what_mixers_and_experts_in_rows_fuse_is_known_and_adapters_of_embeddings_are_no_matrices():
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    for family, (sizes, weights) in OF_MIXERS.items():
        with torch.device("meta"):
            config = getattr(transformers, f"{family}Config")(vocab_size=16, **sizes)
            model = getattr(transformers, f"{family}ForCausalLM")(config)
        for ending, expected in weights.items():
            (name,) = (name for name in hidden_matrices(model) if name.endswith(ending))
            parts = find_row_parts(model, name)
            assert tuple(part.stop - part.start for part in parts) == expected, (family, name)
            assert {part.period for part in parts} == {sum(expected)}, (family, name)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["embed_tokens", "out_proj", "lm_head"]))
    adapters = {name.split(".")[-4] for name in hidden_matrices(adapted) if "lora" in name}
    assert adapters == {"out_proj"}


def test_fused_weights_that_nobody_knows_are_one_matrix_with_a_warning(caplog):
    model = nn.ModuleDict({"qkv": nn.Linear(4, 12), "attention": nn.MultiheadAttention(4, 2)})
    model.config = SimpleNamespace(model_type="own", num_attention_heads=2, hidden_size=4)
    assert find_row_parts(model, "qkv.weight") == ()
    assert "Muon takes qkv.weight [12, 4] for one matrix" in caplog.text
    assert [part.stop for part in find_row_parts(model, "attention.in_proj_weight")] == [4, 8, 12]
