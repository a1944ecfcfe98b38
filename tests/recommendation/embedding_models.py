# SPDX-License-Identifier: Apache-2.0
"""A model with all kinds of embeddings, its batches, and what ranks do with it; in a module, for a pool to import."""

import copy
from collections.abc import Callable
from importlib import import_module
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from stretto.parallel import Grid
from stretto.recommendation import (
    DataType,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    JaggedTensor,
    KeyedJaggedTensor,
    PoolingType,
    distribute_embeddings,
    distributed_state,
    prefetch_embeddings,
)
from stretto.recommendation.index_exchange import IndexExchange
from stretto.recommendation.table_state import TensorBox
from tests.differences import largest

BATCH, STEPS = 12, 3
ROWS = {"clicks": 5, "country": 7, "items": 10, "unused": 3}  # of the smallest table that a feature is looked up in


class ClickModel(nn.Module):
    """Pooled tables of two modes, of which one has two features and one feature has two tables; weighted ones, whose
    weights a layer computes; rows by id; torch's own embeddings; a layer over all of these."""

    def __init__(self, *, everything: bool = True) -> None:
        super().__init__()
        mean = PoolingType.MEAN
        self.pooled = EmbeddingBagCollection(
            [
                EmbeddingBagConfig(10, 4, "t1", feature_names=["clicks", "items"]),
                EmbeddingBagConfig(7, 8, "t2", feature_names=["country"], pooling=mean),
                EmbeddingBagConfig(5, 4, "t3", feature_names=["clicks"]),
            ]
        )
        self.weighted = EmbeddingBagCollection(
            [
                EmbeddingBagConfig(11, 4, "w1", feature_names=["items"]),
                EmbeddingBagConfig(8, 4, "w2", feature_names=["country"], pooling=mean),
            ],
            is_weighted=True,
        )
        self.factor = nn.Linear(1, 1)
        self.everything = everything
        if everything:
            self.rows = EmbeddingCollection(
                [
                    EmbeddingConfig(10, 4, "s1", feature_names=["clicks"]),
                    EmbeddingConfig(9, 4, "s2", feature_names=["country", "clicks"]),
                ]
            )
            self.bag, self.row = nn.EmbeddingBag(6, 4, mode="mean"), nn.Embedding(11, 4, padding_idx=3, sparse=True)
        self.over = nn.Sequential(nn.Linear(48 if everything else 28, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, features: KeyedJaggedTensor, ids: Tensor) -> Tensor:
        factors = self.factor(features.weights().unsqueeze(1)).squeeze(1)
        weighted = KeyedJaggedTensor(features.keys(), features.values(), factors, features.lengths())
        found = [self.pooled(features).values(), self.weighted(weighted).values()]
        if self.everything:
            found += [one.to_padded_dense(2).sum(1) for one in self.rows(features).values()]
            found += [self.bag(ids % 6), self.row(ids).sum(1)]
        return self.over(torch.cat(found, 1)).squeeze(1)


def make_batch(
    step: int, size: int = BATCH, dtype: torch.dtype = torch.float64
) -> tuple[KeyedJaggedTensor, Tensor, Tensor]:
    """Features with empty bags, ids and targets of a global batch."""
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(0, 4, (len(ROWS), size), generator=generator)
    values = torch.cat(
        [
            torch.randint(rows, (int(own.sum()),), generator=generator)
            for rows, own in zip(ROWS.values(), lengths, strict=True)
        ]
    )
    weights = torch.rand(len(values), generator=generator, dtype=dtype)
    features = KeyedJaggedTensor.from_lengths_sync([*ROWS], values, lengths.flatten(), weights)
    ids = torch.randint(11, (size, 3), generator=generator)
    return features, ids, torch.rand(size, generator=generator, dtype=dtype)


def local_part(
    batch: tuple[KeyedJaggedTensor, Tensor, Tensor], rank: int, ranks: int, device: str | torch.device = "cpu"
) -> Any:
    """The rank's samples of a global batch, on a device."""
    features, ids, targets = batch
    size = len(targets) // ranks
    rows = slice(rank * size, (rank + 1) * size)
    own = {
        key: JaggedTensor.from_dense(one.to_dense()[rows], (one.to_dense_weights() or [])[rows])
        for key, one in features.to_dict().items()
        if size
    } or {key: JaggedTensor(features.values()[:0], features.weights()[:0], features.lengths()[:0]) for key in ROWS}
    place = torch.device(device)
    return KeyedJaggedTensor.from_jt_dict(own).to(place), ids[rows].to(place), targets[rows].to(place)


def steps(model: nn.Module, batches: Callable[[int], Any], count: int = STEPS, factor: float = 1.0) -> list[float]:
    """SGD's losses; `factor` multiplies the loss before the backward pass."""
    sgd = torch.optim.SGD(model.parameters(), lr=0.5, foreach=False)
    losses = []
    for step in range(count):
        features, ids, targets = batches(step)
        loss = (model(features, ids) - targets).square().mean()
        sgd.zero_grad()
        (loss * factor).backward()
        sgd.step()
        losses.append(loss.item())
    return losses


def whole(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter.detach()


def make_model(dtype: torch.dtype, everything: bool = True) -> ClickModel:
    torch.manual_seed(5)
    return ClickModel(everything=everything).to(dtype)


def train_torchrecs_model(kinds: dict[str, Any], **generated: Any) -> float:
    """Train the model of TorchRec's tests on its generator's batches, distributed and alone on the global ones; returns
    the largest difference of predictions and weights."""
    torchrec, models = import_module("torchrec"), import_module("torchrec.distributed.test_utils.test_model")
    rank, world, cpu = dist.get_rank(), dist.get_world_size(), torch.device("cpu")

    def configs(count: int, kind: str) -> list[Any]:
        return [
            torchrec.EmbeddingBagConfig(
                name=f"{kind}table_{place}", num_embeddings=10 * (place + 1), embedding_dim=4 * (place + 2),
                feature_names=[f"{kind}feature_{place}"],
            )
            for place in range(count)
        ]  # fmt: skip

    tables, weighted = configs(4, ""), configs(2, "weighted_")
    torch.manual_seed(3)
    plain = models.TestSparseNN(tables=tables, weighted_tables=weighted, dense_device=cpu, sparse_device=cpu)
    plain.dense.dummy_buffer = plain.dense.dummy_buffer.detach()  # a parameter that is a buffer
    shared = distribute_embeddings(copy.deepcopy(plain), Grid(data=world, device="cpu"), kinds=kinds)
    alone, ours = (torch.optim.SGD(model.parameters(), lr=0.5, foreach=False) for model in (plain, shared))
    worst = 0.0
    for step in range(STEPS):
        whole_batch, parts = models.ModelInput.generate(
            4, world, num_float_features=10, tables=tables, weighted_tables=weighted, random_seed=step, **generated
        )
        found = []
        for model, optimizer, batch in ((plain, alone, whole_batch), (shared, ours, parts[rank])):
            optimizer.zero_grad()
            loss, predictions = model(batch)
            loss.backward()
            optimizer.step()
            found.append(predictions.detach())
        worst = largest(worst, float((found[0].chunk(world)[rank] - found[1]).abs().max()))
    expected = plain.state_dict()
    for name, value in shared.state_dict().items():
        if not isinstance(value, TensorBox):
            worst = largest(worst, float((whole(value) - expected[name]).abs().max()))
    return worst


def schedule(implementation: Any = "library") -> list[bool]:
    """Whether a table whose rate a scheduler halves has torch's numbers, one that is frozen its first, and an optimizer
    of no table its rate."""
    (features, _, _), grid, rank = make_batch(0, dtype=torch.float32), Grid(data=2, device="cpu"), dist.get_rank()
    configs = [
        EmbeddingBagConfig(10, 4, "t1", feature_names=["items"]),
        EmbeddingBagConfig(5, 4, "t2", feature_names=["clicks"]),
    ]
    torch.manual_seed(1)
    plain = EmbeddingBagCollection(configs)
    plain.embedding_bags["t2"].weight.requires_grad_(False)
    options: dict[str, Any] = {"owners": {"t1": 0, "t2": 0}, "implementation": implementation}
    tables = distribute_embeddings(copy.deepcopy(plain), grid, gradients="sum", **options)
    first = plain.embedding_bags["t2"].weight.clone()
    sgd = torch.optim.SGD([plain.embedding_bags["t1"].weight], lr=0.8)
    for model, optimizer in ((plain, sgd), (tables, tables.fuse_update("sgd", lr=0.8))):
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        for _ in range(3):
            bags = features if model is plain else local_part((features, *make_batch(0)[1:]), rank, 2)[0]
            optimizer.zero_grad()
            model(bags).values().square().sum().backward()
            optimizer.step()
            scheduler.step()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    with pytest.raises(ValueError, match="by scaled gradients"):
        scaler.step(optimizer)
    rate = scheduler.get_last_lr() == [0.1] and optimizer.param_groups[0]["lr"] == 0.1
    if rank:
        return [not [*tables.parameters()], rate, optimizer.parts[0].lr == 0.2]
    found = tables.embedding_bags
    same = torch.allclose(found["t1"].weight, plain.embedding_bags["t1"].weight, atol=1e-6)
    return [same, torch.equal(found["t2"].weight, first), rate]


def freeze(implementation: Any = "library") -> list[bool]:
    """Whether a table and its states stay while it is frozen after fuse_update, and are trained before and after."""
    grid, rank = Grid(data=2, device="cpu"), dist.get_rank()
    configs = [EmbeddingBagConfig(10, 4, name, feature_names=[of]) for name, of in (("t1", "items"), ("t2", "clicks"))]
    tables = distribute_embeddings(
        EmbeddingBagCollection(configs), grid, owners={"t1": 0, "t2": 0}, implementation=implementation
    )
    if not rank:
        tables.embedding_bags["t2"].weight.requires_grad_(False)
    (part,) = tables.fuse_update("adam", lr=0.1).parts
    kept = []
    for step, frozen in enumerate(("t2", "t1", "t2")):
        for name, table in getattr(tables, "embedding_bags", {}).items():
            table.requires_grad_(name != frozen)
        before = [
            [tensor.clone() for tensor in (weight, *states.values())]
            for weight, states in zip(part.weights, part.states, strict=True)
        ]
        features, *rest = make_batch(step, dtype=torch.float32)
        tables(local_part((features, *rest), rank, 2)[0]).values().square().sum().backward()
        for number, (weight, states) in enumerate(zip(part.weights, part.states, strict=True)):
            same = [torch.equal(*pair) for pair in zip(before[number], (weight, *states.values()), strict=True)]
            kept.append(all(same) if frozen == f"t{number + 1}" else not any(same))
    return kept


def convert() -> str:
    """What is said to who converts distributed tables; a rank without tables, too."""
    tables = EmbeddingBagCollection([EmbeddingBagConfig(10, 4, "t1", feature_names=["items"])])
    model = nn.Sequential(distribute_embeddings(tables, Grid(data=2, device="cpu")), nn.Linear(4, 1))
    model.float()
    with pytest.raises(ValueError, match="cannot become") as raised:
        model.double()
    return str(raised.value).partition(":")[0]


def compare(device: str = "cpu", tolerance: float = 1e-12, **options: Any) -> dict[str, list[str]]:
    """Train a distributed model and the same one alone on the whole batch; this rank's tables, by module."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    plain, z = make_model(torch.float64), options.pop("z", 1)
    grid = Grid(data=ranks // z, z=z, device=device)
    model = distribute_embeddings(make_model(torch.float64), grid, **options)
    factor = 1 / ranks if options.get("gradients") == "sum" else 1.0
    expected = steps(plain, make_batch)
    losses = steps(model, lambda step: local_part(make_batch(step), rank, ranks, grid.device), factor=factor)
    found = torch.tensor(losses, device=grid.device)
    dist.all_reduce(found)
    torch.testing.assert_close((found / ranks).tolist(), expected, rtol=0, atol=1e-6)
    require_weights(model, plain, tolerance)
    with torch.no_grad():  # collectives of the forward pass alone
        model(*local_part(make_batch(9), rank, ranks, grid.device)[:2])
    return {name: [key for key, _ in module.named_parameters()] for name, module in model.named_children()}


def compare_optimizers(
    kind: str, torchs: type[torch.optim.Optimizer], kinds: dict[str, Any] | None = None, **options: Any
) -> None:
    """Train with an optimizer in the backward pass, and alone with torch's on the rows of the whole batch."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    plain, model = make_model(torch.float64), make_model(torch.float64)
    model = distribute_embeddings(model, Grid(data=ranks, device="cpu"), kinds=kinds)
    modules = [model.pooled, model.weighted, model.rows, model.bag, model.row]
    made = [module.fuse_update(kind, lr=9.0, **options) for module in modules]
    for optimizer in made:
        optimizer.set_lr(0.1)
    names = [name for name, _ in plain.named_parameters() if not name.startswith(("over", "factor"))]
    theirs = torchs([plain.get_parameter(name) for name in names], lr=0.1, **options)
    rest = [name for name, _ in plain.named_parameters() if name not in names]
    optimizers = [torch.optim.SGD([own.get_parameter(name) for name in rest], lr=0.5) for own in (plain, model)]
    for step in range(STEPS):
        for own, batch in ((plain, make_batch(step)), (model, local_part(make_batch(step), rank, ranks))):
            (own(*batch[:2]) - batch[2]).square().mean().backward()
        for optimizer in (theirs, *optimizers):
            optimizer.step()
            optimizer.zero_grad()
        plain.zero_grad()
    assert all(parameter.grad is None for module in modules for parameter in module.parameters())
    require_weights(model, plain, 1e-9)


def save_or_resume(folder: str, resumes: bool, **options: Any) -> dict[str, tuple[Any, Any, Tensor]]:
    """Two steps by optimizers in the backward pass, saved or loaded, then a third; this rank's tables and states:
    their whole shapes, and its parts of them."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model: Any = distribute_embeddings(make_model(torch.float64), Grid(data=ranks, device="cpu"), **options)
    modules = [model.pooled, model.weighted, model.rows, model.bag, model.row]
    for number, module in enumerate(modules):
        module.fuse_update("adam" if number % 2 else "rowwise-adagrad", lr=0.1)
    if resumes:
        dcp.load(distributed_state(model), checkpoint_id=folder)
    for step in range(2 if resumes else 0, 3):
        if step == 2 and not resumes:
            dcp.save(distributed_state(model), checkpoint_id=folder)
        batch = local_part(make_batch(step), rank, ranks)
        (model(*batch[:2]) - batch[2]).square().mean().backward()
        model.zero_grad()  # all but the tables stays as it was
    return {
        name: (tensor.shape, tensor.place.offsets, tensor.held)
        if isinstance(tensor, TensorBox)
        else (tensor.shape, (0,), tensor)
        for name, tensor in distributed_state(model).items()
    }


def require_weights(model: nn.Module, plain: nn.Module, tolerance: float) -> None:
    for name, parameter in model.named_parameters():
        expected, holder = plain.get_parameter(name).detach(), model.get_submodule(name.rpartition(".")[0])
        if (begin := getattr(holder, "offsets", ())) and holder.shape is not None:
            expected = expected[begin[0] : begin[0] + len(parameter), begin[1] : begin[1] + parameter.shape[1]]
        torch.testing.assert_close(
            whole(parameter).cpu(), expected, rtol=0, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


def compare_kernel(device: str = "cpu", kinds: dict[str, Any] | None = None) -> None:
    """A step by the fused operator, of one module with gradients and of one updated by it, in fp32; an empty batch."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    grid, size = Grid(data=ranks, device=device), 2 * ranks
    plain = make_model(torch.float32, everything=False)
    steps(plain, lambda step: make_batch(step, size, torch.float32), 1)
    model: Any = make_model(torch.float32, everything=False)
    model = distribute_embeddings(model, grid, implementation="kernel", kinds=kinds)
    assert model.pooled.is_fused
    model.weighted.fuse_update("sgd", lr=0.5)
    steps(model, lambda step: local_part(make_batch(step, size, torch.float32), rank, ranks, grid.device), 1)
    require_weights(model, plain, 2e-6)
    model(*local_part(make_batch(0, 0, torch.float32), 0, 1, grid.device)[:2]).sum().backward()


def refuse_and_go_on(device: str = "cpu") -> list[str]:
    """Errors of this rank where rank 1 alone is given bad input; then all go on with an empty batch, and a good one."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model: Any = distribute_embeddings(make_model(torch.float64), Grid(data=ranks, device=device))
    device = str(model.over[0].weight.device)
    model.requires_grad_(False)  # backward passes need no trainable table
    model.over.requires_grad_(True)
    good = local_part(make_batch(0), rank, ranks, device)
    bags, rows = good[0].lengths(), good[0].values()

    def features(**changes: Any) -> KeyedJaggedTensor:
        given = {"keys": [*ROWS], "values": rows, "weights": good[0].weights(), "lengths": bags} | changes
        return KeyedJaggedTensor(**given)

    outside = rows.clone()
    outside[len(good[0]["clicks"].values())] = 7  # the first id of "country"
    cases = [
        features(values=outside),
        features(keys=["click", "country", "items", "unused"]),
        features(values=rows.double()),
        features(weights=None),
        local_part(make_batch(0, 2), 0, 1, device)[0],
    ]
    messages = []
    for number, bad in enumerate(cases):
        module = model.weighted if number == 3 else model.pooled
        with pytest.raises(ValueError) as error:
            module(bad if rank == 1 else good[0])
        messages.append(str(error.value))
    ids = torch.zeros(2, 2, dtype=torch.long, device=device)
    for module, given, bad, kind in (
        (model.bag, ids, ids[0], ValueError),
        (model.row, ids, [[0]], TypeError if rank == 1 else ValueError),
    ):
        with pytest.raises(kind) as error:
            module(bad if rank == 1 else given)
        messages.append(str(error.value))
    with pytest.raises(ValueError, match="distributed already"):
        distribute_embeddings(model, Grid(data=ranks, device=device))
    empty = local_part(make_batch(0, 0), 0, 1, device)
    assert model(*empty[:2]).shape == (0,)
    model(*empty[:2]).sum().backward()
    model(*good[:2]).sum().backward()
    return messages


def save_and_load_parts(folder: str) -> None:
    """Load a whole state dict, and save it, by tables that are cut; load it by tables that are cut otherwise."""
    grid, source = Grid(data=dist.get_world_size(), device="cpu"), make_model(torch.float64).state_dict()
    for number, kinds in enumerate(CUTS):
        model = distribute_embeddings(make_model(torch.float64), grid, kinds=kinds)
        model.requires_grad_(False)
        for parameter in model.parameters():
            parameter.zero_()
        if number == 0:
            model.load_state_dict(source)
            dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
            continue
        state = {"model": model.state_dict()}
        dcp.load(state, checkpoint_id=folder)
        model.load_state_dict(state["model"])
        require_weights(model, make_model(torch.float64), 0)


CUTS: list[dict[str, Any]] = [
    {"t1": "row", "t2": "row", "t3": "column", "w1": "row", "w2": "column"},
    {"t1": "column", "t2": "column", "w1": "column", "w2": "row"},
]


def save_and_load(folder: str) -> list[str]:
    """Load a whole state dict, train, save shards, load them with every table elsewhere; the names that a rank has."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    grid = Grid(data=ranks, device="cpu")
    source = make_model(torch.float64).state_dict()
    with torch.device("meta"):
        empty = ClickModel().double()
    model = distribute_embeddings(copy.deepcopy(empty), grid, seed=None)
    model.load_state_dict(source)
    for name, parameter in model.named_parameters():
        assert torch.equal(whole(parameter), source[name])
    wrong = source | {"pooled.embedding_bags.t2.weight": torch.zeros(7, 4)}
    with pytest.raises(RuntimeError, match=r"pooled\.embedding_bags\.t2\.weight"):
        model.load_state_dict(wrong)
    with pytest.raises(RuntimeError, match="t9"):
        model.load_state_dict(source | {"pooled.embedding_bags.t9.weight": torch.zeros(7, 4)})
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    tables = [name for name in source if "embedding" in name or name in ("bag.weight", "row.weight")]
    owners = {}
    for name in tables:
        mine = torch.tensor(rank if name in model.state_dict() else 0)
        dist.all_reduce(mine)
        owners[name.removesuffix(".weight").rpartition(".")[2]] = (int(mine) + 1) % ranks
    other = distribute_embeddings(copy.deepcopy(empty), grid, owners=owners, seed=3)
    state = {"model": other.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    other.load_state_dict(state["model"])
    for name, parameter in other.named_parameters():
        assert torch.equal(whole(parameter), source[name])
    assert not {*other.state_dict()} & {*model.state_dict()} & {*tables}
    return sorted(model.state_dict())


def initial_weights(seed: int) -> dict[str, Tensor]:
    """The tables of a model that was on the meta device, on this rank."""
    with torch.device("meta"):
        model = ClickModel()
    model = distribute_embeddings(model, Grid(data=dist.get_world_size(), device="cpu"), seed=seed)
    return {name: whole(parameter) for name, parameter in model.named_parameters()}


def forms_of_bags() -> None:
    """An nn.EmbeddingBag's inputs: with and without a last offset, weighted, and of two dims."""
    grid = Grid(data=dist.get_world_size(), device="cpu")
    for has_last in (False, True):
        torch.manual_seed(0)
        plain = nn.EmbeddingBag(9, 4, mode="sum", include_last_offset=has_last)
        bag = distribute_embeddings(copy.deepcopy(plain), grid)
        torch.manual_seed(dist.get_rank())
        ids, weights = torch.randint(9, (6,)), torch.rand(6)
        offsets = torch.tensor([0, 2, 2, 5, 6][: 4 + has_last])
        for arguments in ((ids, offsets), (ids, offsets, weights), (ids.view(2, 3),), (ids[:0], offsets[:has_last])):
            torch.testing.assert_close(bag(*arguments), plain(*arguments))
        with pytest.raises(ValueError, match="takes no offsets"):
            bag(ids)


def leave_some_to_parallelize() -> None:
    """Collections that are not named are dense layers, which parallelize shards over z as any other."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    plain, named = make_model(torch.float64), ["pooled", "row"]
    model = distribute_embeddings(make_model(torch.float64), Grid(z=ranks, device="cpu"), modules=named)
    steps(plain, make_batch)
    steps(model, lambda step: local_part(make_batch(step), rank, ranks))
    require_weights(model, plain, 1e-12)


def half_precision() -> list[torch.dtype]:
    """Dtypes of results of fp16 tables beside fp32 ones, which are as without ranks."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    tables = [
        EmbeddingBagConfig(10, 4, "t1", DataType.FP16, ["clicks"]),
        EmbeddingBagConfig(10, 4, "t2", DataType.FP32, ["clicks"]),
    ]
    torch.manual_seed(0)
    plain = EmbeddingBagCollection(tables)
    module = distribute_embeddings(copy.deepcopy(plain), Grid(data=ranks, device="cpu"))
    features = local_part(make_batch(0), rank, ranks)[0]
    torch.testing.assert_close(module(features).values(), plain(features).values())
    return [module(features).values().dtype, *(p.dtype for p in module.parameters())]


def prefetch(device: str = "cpu") -> list[str]:
    """Train with ids sent ahead and without: the same bits. Then the errors of what only rank 1 does wrongly."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    grid = Grid(data=ranks, device=device)
    ahead = {
        "pooled": lambda batch: batch[0],
        "rows": lambda batch: batch[0],
    }  # the weights of "weighted" are a layer's
    sizes = [BATCH, 0, 2 * BATCH, BATCH]
    batches = [local_part(make_batch(step, size), rank, ranks, grid.device) for step, size in enumerate(sizes)]
    events: list[str] = []
    send = IndexExchange._send

    def note(exchange: Any) -> Any:
        events.append("send")
        return send(exchange)

    def train(given: Any) -> tuple[list[float], nn.Module]:
        model = distribute_embeddings(make_model(torch.float64), grid)
        model.pooled.fuse_update("full-adagrad", lr=0.1)  # type: ignore[operator, union-attr]
        sgd, losses = torch.optim.SGD(model.over.parameters(), lr=0.5), []
        for features, ids, targets in given(model):
            events.append("step")
            loss = (model(features, ids) - targets).square().sum()
            events.append("backward")
            loss.backward()
            sgd.step()
            sgd.zero_grad()
            losses.append(loss.item())
        return losses, model

    with mock.patch.object(IndexExchange, "_send", note):
        losses, model = train(lambda model: prefetch_embeddings(model, batches, ahead))
    # Five exchanges a step: those of the bags, the single rows and the weighted ones, and two that are a step ahead.
    assert events[: events.index("backward")].count("send") == 7
    plain, other = train(lambda _: batches)
    assert losses == plain
    assert len(plain) == len(sizes)
    for one, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(whole(one), whole(theirs))

    def fail_after(count: int, error: Exception) -> Any:
        for number in range(count):
            yield batches[number]
        if rank == 1:
            raise error
        yield from batches[count:]

    outside = KeyedJaggedTensor([*ROWS], batches[3][0].values() + 100, batches[3][0].weights(), batches[3][0].lengths())
    wrong = (outside, *batches[3][1:]) if rank == 1 else batches[3]
    cases: list[tuple[Any, Any, int]] = [
        (fail_after(2, OSError("disk")), ahead, 2 + (rank != 1)),  # the others are told by the collection
        ([*batches[:2], wrong, batches[0]], ahead, 3),
        (batches[: 3 if rank else 4], ahead, 3 + (rank == 0)),
        (iter(batches), {"pooled": lambda batch: batch[0].permute([0, 1, 2, 3])}, 1),
        (iter(batches), {"weighted": lambda batch: require_gradients(batch[0])}, 1),
        (iter(batches), {"poled": ahead["pooled"]}, 0),
        (iter([1]), None, 0),
    ]
    messages = []
    for given, features, steps_done in cases:
        count = 0
        with pytest.raises((ValueError, OSError)) as error:  # noqa: PT012
            for features_of, ids, _ in prefetch_embeddings(model, given, features):
                count += 1
                model(require_gradients(features_of), ids) if "weighted" in (features or {}) else model(
                    features_of, ids
                )
        assert count == steps_done, f"{len(messages)}: {error.value}"
        messages.append(str(error.value))
    model(*batches[0][:2]).sum().backward()
    return messages


def require_gradients(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        features.keys(), features.values(), features.weights().clone().requires_grad_(), features.lengths()
    )
