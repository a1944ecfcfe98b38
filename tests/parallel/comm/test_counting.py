# SPDX-License-Identifier: Apache-2.0
"""Tests that what a training step sends, counted at the process groups, is what equations 5.1 to 5.5 (Singh) say."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

from stretto.execution import ReshardPolicy
from stretto.models import GPT, GPTConfig
from stretto.parallel import Grid, checkpoint_activations, count_collectives, no_sync, parallelize
from stretto.parallel.comm import gradient_buckets
from tests.parallel.comm.wire import Message, WireCounter, bytes_by_axis
from tests.parallel.training import Sizes, my_rows

AXES = ("data", "x", "y", "z", "batch", "world")
SEED = 5
BATCH, SEQ_LEN = 8, 16
CONFIG = GPTConfig(layers=2, hidden=64, heads=8, vocab=61, ffn=96, max_seq_len=SEQ_LEN)
LLAMA = replace(
    CONFIG, positions="rotary", activation="swiglu", norm="rmsnorm", bias=False, kv_heads=4, tie_embeddings=False
)
GRIDS = [(1, 2, 2, 2), (2, 2, 2, 1), (2, 1, 2, 2), (2, 2, 1, 2), (1, 4, 2, 1), (1, 1, 4, 2), (1, 1, 1, 8), (8, 1, 1, 1)]
EXHAUSTIVE = pytest.mark.exhaustive


@dataclass(frozen=True)
class Linear:
    """A linear from k to n features; a rowwise one has x and y change places."""

    k: int
    n: int
    is_swapped: bool


@dataclass(frozen=True)
class Options:
    """Options of the counted step."""

    reshard: ReshardPolicy = "after_backward"
    checkpoints: bool = False
    micro_batches: int = 1
    dtype: torch.dtype | None = None
    fills_buckets: bool = False


@dataclass(frozen=True)
class Observed:
    """One rank's counts of each step: ours, and the bytes by axis that Stretto's own counter reports."""

    steps: list[Counter[Message]]
    bytes_by_axis: list[dict[str, int]]
    stretto_bytes_by_axis: list[dict[str, int]]


def linears(config: GPTConfig) -> Iterator[Linear]:
    """A GPT's linears in the order of its forward pass, without its head."""
    head_dim = config.hidden // config.heads
    for _ in range(config.layers):
        yield Linear(config.hidden, (config.heads + 2 * (config.kv_heads or config.heads)) * head_dim, False)
        yield Linear(config.hidden, config.hidden, True)
        for _ in range(2 if config.activation == "swiglu" else 1):
            yield Linear(config.hidden, config.ffn, False)
        yield Linear(config.ffn, config.hidden, True)


def messages_of_linears(config: GPTConfig, sizes: Sizes, gathers: int = 1) -> Counter[Message]:
    """Algorithm 3, line by line, for every linear of the model: fp32, one forward and one backward pass."""
    data, x, y, z = sizes
    rows = BATCH * SEQ_LEN // (data * z)
    messages: Counter[Message] = Counter()
    for linear in linears(config):
        axis_x, axis_y, size_x, size_y = ("y", "x", y, x) if linear.is_swapped else ("x", "y", x, y)
        weight = linear.k * linear.n // (size_x * size_y)
        messages[Message("z", "all-gather", weight, 4)] += gathers
        messages[Message(axis_y, "all-reduce", rows * linear.n // size_x, 4)] += 1
        messages[Message(axis_x, "all-reduce", rows * linear.k // size_y, 4)] += 1
        messages[Message("z", "reduce-scatter", weight, 4)] += 1
        # Over data a number more, which says whether the rank has the gradient.
        messages[Message("data", "all-reduce", weight // z + 1, 4)] += 1
    return only_those_sent(messages, sizes)


def only_those_sent(messages: Counter[Message], sizes: Sizes) -> Counter[Message]:
    size_of = dict(zip(("data", "x", "y", "z"), sizes, strict=True))
    return Counter({message: times for message, times in messages.items() if size_of[message.axis] > 1})


def equations(config: GPTConfig, sizes: Sizes, gathers: int = 1) -> dict[str, float]:
    """Equations 5.1 to 5.5 summed over the linears, in bytes of fp32; m is the data group's share of the tokens."""
    data, x, y, z = sizes
    m = BATCH * SEQ_LEN / data
    total = dict.fromkeys(("data", "x", "y", "z"), 0.0)
    for linear in linears(config):
        k, n = linear.k, linear.n
        axis_x, axis_y, gx, gy = ("y", "x", y, x) if linear.is_swapped else ("x", "y", x, y)
        total["z"] += 4 * gathers * (z - 1) * k * n / (gx * gy * z)  # 5.1
        total["z"] += 4 * (z - 1) / z * k * n / (gx * gy)  # 5.2
        total[axis_y] += 4 * 2 * (gy - 1) / gy * m * n / (z * gx)  # 5.3
        total[axis_x] += 4 * 2 * (gx - 1) / gx * m * k / (z * gy)  # 5.4
        total["data"] += 4 * 2 * (data - 1) / data * (k * n / (gx * gy * z) + 1)  # 5.5
    return {axis: sent for axis, sent in total.items() if sent}


def observe(sizes: Sizes, config: GPTConfig, options: Options) -> Observed:
    """Two training steps on this rank, each counted twice: by Stretto and by this test.

    By default each gradient has a bucket of its own, so that it can be distinguished from others on the wire.
    """
    bucket_bytes = gradient_buckets.BUCKET_BYTES if options.fills_buckets else 1
    with mock.patch.object(gradient_buckets, "BUCKET_BYTES", bucket_bytes):
        return observe_steps(sizes, config, options)


def observe_steps(sizes: Sizes, config: GPTConfig, options: Options) -> Observed:
    data, x, y, z = sizes
    grid = Grid(data=data, x=x, y=y, z=z)
    torch.manual_seed(SEED)
    model = parallelize(GPT(config), grid, reshard=options.reshard, dtype=options.dtype)
    if options.checkpoints:
        checkpoint_activations(model)
    groups = {axis: grid.group(axis) for axis in AXES}
    rows = my_rows(grid, BATCH)
    observed = Observed([], [], [])
    for _ in range(2):
        text = torch.randint(config.vocab, (BATCH, SEQ_LEN + 1))[rows]
        with count_collectives(grid) as counts, WireCounter(groups) as wire:
            train_step(model, text, options)
        descend(model)
        observed.steps.append(wire.messages)
        observed.bytes_by_axis.append(wire.bytes_by_axis())
        observed.stretto_bytes_by_axis.append({axis: sent for axis, sent in counts.bytes_by_axis().items() if sent})
    return observed


def descend(model: torch.nn.Module) -> None:
    """A step of SGD on this rank's shards: torch works out its rules for each DTensor operation, which takes longer."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().add_(parameter.grad.to_local(), alpha=-0.1)
    model.zero_grad()


def train_step(model: torch.nn.Module, text: torch.Tensor, options: Options) -> None:
    parts = text.chunk(options.micro_batches)
    for part in parts[:-1]:
        with no_sync(model):
            model(part[:, :-1], part[:, 1:], num_targets=BATCH * SEQ_LEN).backward()
    num_targets = {"num_targets": BATCH * SEQ_LEN} if len(parts) > 1 else {}
    model(parts[-1][:, :-1], parts[-1][:, 1:], **num_targets).backward()


def without(messages: Counter[Message], those: Counter[Message]) -> Counter[Message]:
    """Return what is left of `messages`; all of `those` must be among them."""
    missing = those - messages
    assert not missing, f"not sent: {dict(missing)}\nsent: {sorted(messages.items())}"
    return messages - those


def is_small(message: Message, config: GPTConfig, sizes: Sizes) -> bool:
    """No more than two numbers a token from each rank, or a vector of the model: what a norm or a bias may send."""
    data, _, y, z = sizes
    rows = BATCH * SEQ_LEN // (data * z)
    if message.kind == "all-gather":  # statistics over y
        return message.axis == "y" and message.numel <= 2 * rows * y
    return message.numel <= max(2 * rows, 3 * config.hidden + 1, (config.ffn or 0) + 1)


@pytest.mark.parametrize("config", [CONFIG, LLAMA], ids=["gpt2-like", "llama-like"])
@pytest.mark.parametrize("sizes", GRIDS, ids=str)
def test_the_messages_of_algorithm_3_have_the_sizes_of_the_equations(sizes, config):
    size_of = dict(zip(("data", "x", "y", "z"), sizes, strict=True))
    for gathers in (1, 2):
        messages = messages_of_linears(config, sizes, gathers)
        assert bytes_by_axis(messages, size_of) == equations(config, sizes, gathers)


def observe_two_depths(sizes: Sizes, config: GPTConfig, options: Options) -> tuple[Observed, Observed]:
    """The model, and the model with one block more."""
    return observe(sizes, config, options), observe(sizes, replace(config, layers=config.layers + 1), options)


@pytest.mark.long
@pytest.mark.parametrize(
    ("sizes", "model", "reshard"),
    [
        ((1, 2, 1, 2), "llama-like", "after_forward"),
        *(pytest.param(sizes, "gpt2-like", "after_backward", marks=EXHAUSTIVE) for sizes in GRIDS[::2]),
        *(pytest.param(sizes, "llama-like", "after_forward", marks=EXHAUSTIVE) for sizes in GRIDS[1::2]),
        pytest.param((1, 2, 2, 2), "llama-like", "after_forward", marks=EXHAUSTIVE),
        pytest.param((2, 2, 2, 1), "gpt2-like", "after_backward", marks=EXHAUSTIVE),
    ],
    ids=str,
)
def test_a_gpts_linears_send_what_the_equations_predict_and_its_blocks_no_other_large_messages(
    ranks, sizes, model, reshard
):
    print(f"seed {SEED}")
    config = {"gpt2-like": CONFIG, "llama-like": LLAMA}[model]
    deeper = replace(config, layers=config.layers + 1)
    gathers = 2 if reshard == "after_forward" else 1
    options = Options(reshard=reshard)
    for shallow, deep in ranks(prod(sizes)).run(observe_two_depths, sizes, config, options):
        # At the end of the first pass ranks agree on the order of gradients, in integers.
        assert all(message.element_size == 8 for message in without(shallow.steps[0], shallow.steps[1]))
        apart = without(shallow.steps[1], messages_of_linears(config, sizes, gathers))
        apart_when_deeper = without(deep.steps[1], messages_of_linears(deeper, sizes, gathers))
        of_one_block = without(apart_when_deeper, apart)
        print("norms and biases of a block:", *sorted(of_one_block.items()), sep="\n  ")
        print("embedding, last norm, head and loss:", *sorted((apart - of_one_block).items()), sep="\n  ")
        assert [message for message in of_one_block if not is_small(message, config, sizes)] == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("sizes", [(8, 1, 1, 1), (2, 1, 2, 2), (2, 2, 1, 2)], ids=str)
def test_buckets_send_the_same_bytes_over_data_in_one_message_for_each_group_of_ranks(ranks, sizes):
    print(f"seed {SEED}")
    single_ranks = ranks(prod(sizes)).run(observe, sizes, CONFIG, Options())
    filled_ranks = ranks(prod(sizes)).run(observe, sizes, CONFIG, Options(fills_buckets=True))
    for single, filled in zip(single_ranks, filled_ranks, strict=True):
        assert filled.bytes_by_axis == single.bytes_by_axis
        for number, step in enumerate(filled.steps):
            sums = [message for message in step.elements() if message.axis == "data" and message.numel > 1]
            if (
                number == 0
            ):  # its end, where ranks agree on the order of gradients in integers: with data alone, over it
                sums = [message for message in sums if message.element_size == 4]
            assert len(sums) == 1, sums


@pytest.mark.long
@pytest.mark.parametrize(
    "sizes",
    [
        (1, 2, 1, 2),
        *(
            pytest.param(sizes, marks=pytest.mark.exhaustive)
            for sizes in ((1, 2, 2, 2), (2, 2, 1, 2), (1, 4, 2, 1), (1, 1, 4, 2))
        ),
    ],
    ids=str,
)
def test_embedding_head_and_loss_never_send_the_whole_logits(ranks, sizes):
    print(f"seed {SEED}")
    config = replace(CONFIG, vocab=1021)
    rows = BATCH * SEQ_LEN // (sizes[0] * sizes[3])
    for observed in ranks(prod(sizes)).run(observe, sizes, config, Options()):
        apart = without(observed.steps[0], messages_of_linears(config, sizes))
        on_x = [message for message in apart if message.axis == "x"]
        assert all(message.numel < rows * config.vocab / sizes[1] for message in on_x), apart


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ((2, 2, 1, 2), Options()),
        ((2, 1, 2, 2), Options("after_forward")),
        ((1, 2, 2, 2), Options(checkpoints=True)),
        ((2, 1, 2, 2), Options(micro_batches=2)),
        ((1, 4, 2, 1), Options("after_forward")),
    ],
    ids=str,
)
def test_strettos_own_counter_reports_what_was_handed_to_the_groups(ranks, sizes, options):
    print(f"seed {SEED}")
    for observed in ranks(prod(sizes)).run(observe, sizes, LLAMA, options):
        assert observed.stretto_bytes_by_axis == observed.bytes_by_axis


def count_calls() -> dict[str, dict[tuple[str, str], int]]:
    """Return what is counted of calls of 32 bytes a rank that Stretto itself does not make."""
    grid = Grid(z=2)
    group, rank = grid.group("z"), grid.coordinate("z")
    parts = [torch.ones(8), torch.ones(8)]
    wide = [torch.ones(16), torch.ones(16)]
    calls = {
        "all_reduce": lambda: funcol.all_reduce_coalesced(parts, "sum", group),
        "all_gather": lambda: funcol.all_gather_into_tensor_coalesced(parts, group),
        "reduce_scatter": lambda: funcol.reduce_scatter_tensor_coalesced(wide, "sum", [0, 0], group),
        "gather": lambda: dist.gather(parts[0], parts if rank == 0 else None, 0, group=group),
        "scatter": lambda: dist.scatter(torch.empty(8), parts if rank == 0 else None, 0, group=group),
    }
    found = {}
    for name, call in calls.items():
        with count_collectives(grid) as counts:
            for tensor in call() or ():
                tensor.sum()  # waits
        found[name] = counts.bytes_by_kind()
    return found


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_coalesced_and_rooted_collectives_count_as_well(ranks):
    """2 x 32 bytes of each kind in a ring of two ranks, and 16 on average of those with a root."""
    expected = {name: {("z", name): 64} for name in ("all_reduce", "all_gather", "reduce_scatter")}
    expected |= {name: {("z", name): 16} for name in ("gather", "scatter")}
    assert ranks(2).run(count_calls) == [expected] * 2


@pytest.mark.exhaustive
@pytest.mark.parametrize("sizes", [(1, 2, 2, 2), (2, 2, 2, 1), (1, 1, 4, 2)], ids=str)
def test_checkpointing_repeats_the_forward_pass_of_the_blocks_and_nothing_of_the_backward_pass(ranks, sizes):
    print(f"seed {SEED}")
    forward = forward_messages(LLAMA, sizes)
    plain_ranks = ranks(prod(sizes)).run(observe, sizes, LLAMA, Options())
    checkpointed_ranks = ranks(prod(sizes)).run(observe, sizes, LLAMA, Options(checkpoints=True))
    for plain, checkpointed in zip(plain_ranks, checkpointed_ranks, strict=True):
        repeated = without(checkpointed.steps[0], plain.steps[0])
        of_size = Counter({m: times for m, times in repeated.items() if not is_small(m, LLAMA, sizes)})
        print("repeated:", *sorted(repeated.items()), sep="\n  ")
        # A block's last linear need not be repeated: nobody saved its output.
        last = forward_messages(LLAMA, sizes, only_last=True)
        assert not of_size - forward, "more than a forward pass is repeated"
        assert not (forward - last) - of_size, "less than a block's forward pass is repeated"


def forward_messages(config: GPTConfig, sizes: Sizes, only_last: bool = False) -> Counter[Message]:
    """Lines 2 and 4 of Algorithm 3 for every linear (or each block's last one).

    Checkpointing drops what a block saved, gathered weights too: recomputing it gathers them again.
    """
    data, x, y, z = sizes
    rows = BATCH * SEQ_LEN // (data * z)
    in_a_block = len(list(linears(config))) // config.layers
    messages: Counter[Message] = Counter()
    for index, linear in enumerate(linears(config)):
        if not only_last or index % in_a_block == in_a_block - 1:
            axis, size_x = ("x", y) if linear.is_swapped else ("y", x)
            messages[Message("z", "all-gather", linear.k * linear.n // (x * y), 4)] += 1
            messages[Message(axis, "all-reduce", rows * linear.n // size_x, 4)] += 1
    return only_those_sent(messages, sizes)


@pytest.mark.long
@pytest.mark.parametrize(
    "sizes", [(2, 1, 1, 2), *(pytest.param(each, marks=EXHAUSTIVE) for each in [(2, 2, 1, 2), (2, 1, 2, 2)])], ids=str
)
def test_micro_batches_reduce_gradients_over_data_once_a_step(ranks, sizes):
    print(f"seed {SEED}")
    whole_ranks = ranks(prod(sizes)).run(observe, sizes, LLAMA, Options())
    split_ranks = ranks(prod(sizes)).run(observe, sizes, LLAMA, Options(micro_batches=2))
    for whole, split in zip(whole_ranks, split_ranks, strict=True):
        assert split.bytes_by_axis[0]["data"] == whole.bytes_by_axis[0]["data"]


@pytest.mark.long
@pytest.mark.parametrize(
    "sizes", [(1, 2, 1, 2), *(pytest.param(each, marks=EXHAUSTIVE) for each in [(1, 2, 2, 2), (2, 1, 2, 2)])], ids=str
)
def test_in_bf16_weights_and_activations_are_sent_in_two_bytes(ranks, sizes):
    print(f"seed {SEED}")
    sent = messages_of_linears(LLAMA, sizes)
    in_bf16 = Counter(
        {replace(m, element_size=2): n for m, n in sent.items() if m.axis in "xy" or m.kind == "all-gather"}
    )
    for observed in ranks(prod(sizes)).run(observe, sizes, LLAMA, Options(dtype=torch.bfloat16)):
        without(observed.steps[0], in_bf16)


def bytes_held(sizes: Sizes, config: GPTConfig, reshard: ReshardPolicy) -> dict[str, tuple[int, int]]:
    """Of each linear's weight: the bytes of this rank's shard, and of the storage that it keeps alive."""
    data, x, y, z = sizes
    model = parallelize(GPT(config), Grid(data=data, x=x, y=y, z=z), reshard=reshard)
    tokens = torch.randint(config.vocab, (1, SEQ_LEN))
    model(tokens, tokens).backward()
    held: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        if name.startswith("blocks.") and parameter.dim() == 2:
            shards = (parameter.to_local(), parameter.grad.to_local())
            held[name] = (
                max(shard.numel() * shard.element_size() for shard in shards),
                max(shard.untyped_storage().nbytes() for shard in shards),
            )
    return held


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("sizes", "reshard"),
    [
        ((1, 2, 2, 2), "after_backward"),
        ((2, 1, 2, 2), "after_forward"),
        ((1, 4, 2, 1), "after_backward"),
        ((1, 1, 1, 8), "after_forward"),
    ],
)
def test_each_rank_holds_one_part_in_x_y_z_of_the_linears_and_of_their_gradients(ranks, sizes, reshard):
    whole = {
        name: 4 * parameter.numel()
        for name, parameter in GPT(LLAMA).named_parameters()
        if name.startswith("blocks.") and parameter.dim() == 2
    }
    parts = prod(sizes[1:])
    expected = {name: (size // parts, size // parts) for name, size in whole.items()}
    assert ranks(prod(sizes)).run(bytes_held, sizes, LLAMA, reshard) == [expected] * prod(sizes)
