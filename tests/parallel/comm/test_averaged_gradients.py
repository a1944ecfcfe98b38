# SPDX-License-Identifier: Apache-2.0
"""Terms over whole parameters, which every rank adds to its loss, have the gradients of one process on every grid."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from stretto.models import GPT, GPTConfig
from stretto.parallel import Grid, Pipeline, count_collectives, gather, layout_of, mean_over_batch, no_sync, parallelize
from stretto.parallel.comm import collectives, gradient_buckets
from stretto.parallel.comm.gradient_norm import scale_by
from stretto.parallel.layers import loss
from stretto.train.stored_optimizer import StoredOptimizer, sgd_update
from tests.parallel.training import distance

ROWS, SEQ_LEN, VOCAB = 12, 6, 31
WIDE = torch.float64
BASE = {"layers": 2, "hidden": 24, "heads": 4, "vocab": VOCAB, "max_seq_len": SEQ_LEN, "tie_embeddings": True}
MODELS = {
    "gpt": GPTConfig(**BASE, norm="layernorm", positions="learned"),
    "experts": GPTConfig(**BASE, num_experts=4, expert_ffn=8, balance="switch", balance_loss=0.5, z_loss=0.1),
}


class Scaled(nn.Module):
    """Blocks with norms and a scalar, and a scale for the logits, which is not used in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(8, VOCAB)
        self.scale, self.logit_scale = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.tensor(0.3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build(kind: str) -> nn.Module:
    torch.manual_seed(5)
    model = (Scaled() if kind == "blocks" else GPT(MODELS[kind])).to(WIDE)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, dtype=WIDE), alpha=0.1)
    return model


def whole(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter


def penalty(model: nn.Module) -> Tensor:
    """A term of the parameters alone, which all ranks compute equally."""
    return torch.stack([whole(parameter).pow(3).sum() for parameter in model.parameters()]).sum()


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor, count: int, grid: Grid | None = None) -> Tensor:
    """The mean over the global batch, of which these rows are a part."""
    if isinstance(model, GPT):
        return model(tokens, targets, num_targets=count)
    logits = model(tokens) * whole(model.logit_scale).exp()  # type: ignore[arg-type]
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    parts = 1 if grid is None else grid.size("batch")
    return total / count if grid is None else mean_over_batch(total, count / parts, grid)


def batch(grid: Grid | None) -> tuple[Tensor, Tensor]:
    text = torch.randint(VOCAB, (ROWS, SEQ_LEN + 1), generator=torch.Generator().manual_seed(2))
    rows = slice(None)
    if grid is not None:
        count = ROWS // grid.size("batch")
        rows = slice(grid.coordinate("batch") * count, (grid.coordinate("batch") + 1) * count)
    return text[rows, :-1], text[rows, 1:]


def distances(kind: str, sizes: dict[str, Any], options: dict[str, Any], micro_batches: int) -> dict[str, float]:
    """Return how far the loss and the gradients of a loss and a penalty are from those of one process."""
    grid, plain = Grid(**sizes), build(kind)
    expected = loss_of(plain, *batch(None), ROWS * SEQ_LEN)
    (expected + penalty(plain)).backward()
    model = parallelize(build(kind), grid, **options)
    tokens, targets = batch(grid)
    if grid.size("pipe") > 1:
        with Pipeline(model, grid, micro_batch_size=len(tokens)) as pipeline:
            loss = pipeline.step(tokens, targets=targets).detach()
        penalty(model).backward()
    else:
        loss = torch.zeros((), dtype=WIDE)
        for number, part in enumerate(zip(tokens.chunk(micro_batches), targets.chunk(micro_batches), strict=True)):
            term = loss_of(model, *part, ROWS * SEQ_LEN // (1 if kind != "blocks" else micro_batches), grid)
            term = term if kind != "blocks" else term / micro_batches
            loss += term.detach()
            if number < micro_batches - 1:
                with no_sync(model):
                    (term + penalty(model) / micro_batches).backward()
            else:
                (term + penalty(model) / micro_batches).backward()
    others = dict(plain.named_parameters())
    found = {"loss": distance(loss, expected.detach())}
    for name, parameter in model.named_parameters():
        found[name] = distance(gather(parameter.grad, layout_of(parameter)), others[name].grad)
    return {name: value for name, value in found.items() if not value < 1e-10}


TWO = [
    ("gpt", {"data": 2}, {}, 1),
    ("gpt", {"z": 2}, {}, 2),
    ("gpt", {"x": 2}, {"shard_sequence": True}, 1),
    ("gpt", {"pipe": 2}, {}, 1),
    ("experts", {"data": 2, "expert": 2}, {}, 1),
    ("blocks", {"data": 2}, {}, 2),
    ("blocks", {"z": 2}, {}, 2),
]
FOUR = [
    ("gpt", {"data": 2, "z": 2}, {}, 2),
    ("gpt", {"x": 2, "y": 2}, {}, 1),
    ("gpt", {"x": 2, "z": 2}, {"shard_sequence": True}, 1),
    ("gpt", {"pipe": 2, "data": 2}, {}, 1),
    ("experts", {"data": 2, "z": 2, "expert": 2}, {}, 1),
    ("experts", {"x": 2, "z": 2, "expert": 4, "expert_tensor": "fold"}, {"shard_sequence": True}, 1),
    ("blocks", {"data": 2, "z": 2}, {}, 2),
]
THREE = [("gpt", {"data": 3}, {}, 1), ("gpt", {"z": 3}, {}, 1), ("blocks", {"z": 3}, {}, 1)]


def disagreements(runs: list[Any]) -> list[Any]:
    return [(*run, wrong) for run in runs if (wrong := distances(*run))]


@pytest.mark.long
@pytest.mark.parametrize(
    "runs",
    [TWO, pytest.param(THREE, marks=pytest.mark.long), pytest.param(FOUR, marks=pytest.mark.exhaustive)],
    ids=["2", "3", "4"],
)
def test_a_term_over_parameters_outside_of_forward_has_the_gradient_of_one_process(ranks, runs):
    count = {id(TWO): 2, id(THREE): 3, id(FOUR): 4}[id(runs)]
    assert ranks(count).run(disagreements, runs) == [[]] * count


def distances_of_own_rows(sizes: dict[str, int]) -> dict[str, float]:
    """Return how far gradients are from one process's, of weights that multiply a rank's own rows outside of
    forward.
    """
    grid, plain, model = Grid(**sizes), build("blocks"), parallelize(build("blocks"), Grid(**sizes))

    def term(model: nn.Module, tokens: Tensor) -> Tensor:
        return (model(tokens) @ whole(model.head.weight) @ whole(model.blocks[0][0].weight)).square().mean()

    term(plain, batch(None)[0]).backward()
    term(model, batch(grid)[0]).backward()
    others = dict(plain.named_parameters())
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    found = {name: distance(gather(grad), others[name].grad) for name, grad in grads.items()}
    return {name: value for name, value in found.items() if not value < 1e-10}


@pytest.mark.long
def test_a_rank_may_multiply_its_rows_with_whole_weights_outside_of_forward(ranks):
    for count, sizes in ((2, {"data": 2}), (2, {"z": 2}), (3, {"z": 3}), (4, {"data": 2, "z": 2})):
        assert ranks(count).run(distances_of_own_rows, sizes) == [{}] * count, sizes


def stored(kind: str, sizes: dict[str, Any]) -> dict[str, float]:
    """Return how far weights are from plain training's after two steps of a StoredOptimizer, with the penalty."""
    grid, plain, model = Grid(**sizes), build(kind).float(), parallelize(build(kind).float(), Grid(**sizes))
    optimizer = StoredOptimizer(model, grid, sgd_update(), name="sgd", dtype=torch.float32)
    for _ in range(2):
        plain.zero_grad()
        (loss_of(plain, *batch(None), ROWS * SEQ_LEN) + penalty(plain)).backward()
        torch.optim.SGD(plain.parameters(), lr=0.02).step()
        (loss_of(model, *batch(grid), ROWS * SEQ_LEN, grid) + penalty(model)).backward()
        optimizer.step(0.02)
    handle = next(model.parameters()).register_post_accumulate_grad_hook(print)
    with pytest.raises(ValueError, match=r"never to \.grad"):
        loss_of(model, *batch(grid), ROWS * SEQ_LEN, grid)
    handle.remove()
    others = dict(plain.named_parameters())
    found = {name: distance(gather(weight), others[name]) for name, weight in model.named_parameters()}
    return {name: value for name, value in found.items() if not value < 1e-6}


@pytest.mark.long
def test_a_stored_optimizer_takes_the_gradients_of_terms_outside_of_forward(ranks):
    for kind, sizes in (
        ("gpt", {"data": 2, "z": 2}),
        ("blocks", {"data": 2, "z": 2}),
        ("experts", {"z": 4, "expert": 2}),
    ):
        assert ranks(4).run(stored, kind, sizes) == [{}] * 4, kind


def large_gradients(sizes: dict[str, int], gradients: str) -> list[float]:
    """Weights' gradients of 40,000, as each rank has them, in fp16: their averages, or sums."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model = parallelize(model, Grid(**sizes), dtype=torch.float16, gradients=gradients)
    model(torch.zeros(1, 2)).mul(40000.0).sum().backward()
    return gather(model[1].bias.grad).tolist()


def test_averages_of_fp16_gradients_do_not_overflow(ranks):
    for sizes in ({"data": 2}, {"z": 2}):
        assert ranks(2).run(large_gradients, sizes, "mean") == [[40000.0] * 2] * 2
        assert ranks(2).run(large_gradients, sizes, "sum") == [[float("inf")] * 2] * 2


def averaged_by_the_backend(kind: str, sizes: dict[str, int]) -> tuple[bool, int]:
    """Whether gradients have the same bits if the backend averages, as NCCL does; and the passes that multiply then."""
    sums, reduces, divided = collectives._reduce_scatter, dist.all_reduce, []

    def divide_first(tensor: Tensor, op: Any, group: Any) -> Tensor:
        return tensor / group.size() if op == dist.ReduceOp.AVG else tensor

    def reduce_scatter(part: Tensor, source: Tensor, *, op: Any, group: Any, async_op: bool) -> Any:
        divided.append(divide_first(source, op, group))  # kept until gloo has sent it
        return sums(part, divided[-1], group=group, async_op=async_op)

    def all_reduce(tensor: Tensor, *, op: Any = dist.ReduceOp.SUM, group: Any, async_op: bool) -> Any:
        tensor.copy_(divide_first(tensor, op, group))
        return reduces(tensor, op=dist.ReduceOp.SUM if op == dist.ReduceOp.AVG else op, group=group, async_op=async_op)

    def scale_each(gradients: list[Tensor], factor: Tensor) -> None:
        for gradient in gradients:
            scale_by(gradient, factor, out=gradient)

    grid, found, multiply = Grid(**sizes), [], torch._foreach_mul_
    for averages in (False, True):
        model = parallelize(build(kind), grid, blocks=["blocks.*"] if kind == "blocks" else None)
        with (
            mock.patch.object(collectives, "can_average", return_value=averages),
            mock.patch.object(gradient_buckets, "can_average", return_value=averages),
            mock.patch.object(collectives, "_reduce_scatter", reduce_scatter),
            mock.patch.object(dist, "all_reduce", all_reduce),
            mock.patch.object(loss, "scale_gradients", scale_each),  # the head's own, which is no pass over gradients
            mock.patch.object(torch, "_foreach_mul_", mock.Mock(wraps=multiply)) as passes,
        ):
            loss_of(model, *batch(grid), ROWS * SEQ_LEN, grid).backward()
        found.append(
            [parameter.grad.to_local().clone() for parameter in model.parameters() if parameter.grad is not None]
        )
    return all(map(torch.equal, *found)), passes.call_count


@pytest.mark.long
@pytest.mark.parametrize("kind", ["gpt", pytest.param("blocks", marks=pytest.mark.long)])
def test_a_backend_that_averages_leaves_no_pass_over_gradients_and_the_same_bits(ranks, kind):
    assert ranks(4).run(averaged_by_the_backend, kind, {"data": 2, "z": 2}) == [(True, 0)] * 4


def unsharded(dtype: torch.dtype) -> list[float]:
    """A gradient of 256 + 1 in two micro-batches, which bf16 cannot hold."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(dtype)
    options = {"dtype": torch.bfloat16, "reduce_dtype": torch.float32, "reshard": "gradients_after_step"}
    model, one, found = parallelize(model, Grid(z=2), **options), torch.ones(1, 4), []
    for is_last in (False, True):  # whether the last micro-batch has a gradient of it, too
        model.zero_grad()
        for factor in (256, 1):
            with no_sync(model):
                (model(one) * factor).sum().backward()
        loss = model(one).sum() if is_last else model[0](one).sum()
        loss.backward()
        found.append(gather(model[1].bias.grad).float()[0].item())
    return found


def test_unsharded_micro_batches_are_added_in_the_dtype_in_which_gradients_are_reduced(ranks):
    assert ranks(2).run(unsharded, torch.float32) == [[257.0, 258.0]] * 2
    assert ranks(2).run(unsharded, torch.bfloat16) == [[256.0, 258.0]] * 2  # 257 is rounded in a bf16 .grad


def summed_embedding() -> tuple[bool, dict[str, int]]:
    """Whether an embedding's gradient is the fp32 sum of what ranks have in bf16; and the bytes sent for it."""
    grid = Grid(z=3)
    rank = grid.coordinate("z")
    table = parallelize(
        nn.Sequential(nn.Embedding(10, 4)), grid, roles={"0": "embedding"}, dtype=torch.bfloat16,
        reduce_dtype=torch.float32, gradients="sum",
    )  # fmt: skip
    ids = torch.tensor([[1, 1, 9 - rank, 5]])
    wanted = torch.zeros(10, 4)
    for each in range(3):
        here = torch.zeros(10, 4, dtype=torch.bfloat16)
        for number, row in enumerate((1, 1, 9 - each, 5)):
            here[row] += (each + 1) * (257 + number) / 3
        wanted += here
    factors = ((rank + 1) * (torch.arange(4) + 257) / 3).bfloat16().view(1, 4, 1)
    with count_collectives(grid) as counts:
        (table(ids) * factors).sum().backward()
    sent = {kind: sent for (axis, kind), sent in counts.bytes_by_kind().items() if axis == "z" and sent >= 64}
    return torch.equal(gather(table[0].weight.grad), wanted), sent


def test_an_embeddings_gradient_is_sent_as_it_is_and_summed_in_the_dtype_of_reductions(ranks):
    # Of 12 rows of 4 numbers, two thirds go to others; the weight is gathered, 4 rows to each of two.
    assert ranks(3).run(summed_embedding) == [(True, {"all_gather": 64, "all_to_all": 64})] * 3
