# SPDX-License-Identifier: Apache-2.0
"""The store of optimizer state on one process: split weights, layouts, elementwise optimizers, missing gradients."""

import importlib.util
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stretto.execution import StateOptions
from stretto.optim.state.layout import StateLayout
from stretto.optim.state.loss_scale import LossScale, LossScaleOptions
from stretto.optim.state.master_weights import join, round_to_bf16
from stretto.optim.state.store import OptimizerStateStore, StoredParameter
from stretto.optim.state.updates import (
    LOW,
    MASTER,
    AdamWUpdate,
    History,
    SGDUpdate,
    StepSettings,
    find_slots,
    open_master,
)
from stretto.train.stored_optimizer import MakeUpdate, NoRanks, adamw_update, build_store, sgd_update, tiled_update

LOWER_HALVES = [0, 1, 2, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF]


def all_upper_halves(lower: int) -> Tensor:
    """Every fp32 number, as its bits, whose lower 16 bits are these."""
    return (torch.arange(1 << 16, dtype=torch.int32) << 16 | lower).view(torch.float32)


@pytest.mark.parametrize("lower", LOWER_HALVES)
def test_split_weights_are_exact_for_every_finite_upper_half(lower: int) -> None:
    """65,280 upper halves of finite numbers; ties go upwards in the bits, and all others to the nearest."""
    numbers = all_upper_halves(lower)
    finite = numbers[numbers.isfinite()]
    assert len(finite) == 65_280
    weight, low = torch.empty_like(finite, dtype=torch.bfloat16), torch.empty_like(finite, dtype=torch.int16)
    round_to_bf16(finite, weight, low)
    assert torch.equal(join(weight, low).view(torch.int32), finite.view(torch.int32))
    if lower != 0x8000:
        assert torch.equal(weight.view(torch.int16), finite.bfloat16().view(torch.int16))


def test_random_numbers_split_exactly_and_nan_stays_nan() -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    bits = torch.randint(-(1 << 31), 1 << 31, (1 << 18,), generator=torch.Generator().manual_seed(seed))
    numbers = bits.to(torch.int32).view(torch.float32)
    weight, low = torch.empty_like(numbers, dtype=torch.bfloat16), torch.empty_like(numbers, dtype=torch.int16)
    round_to_bf16(numbers, weight, low)
    joined = join(weight, low)
    is_nan = numbers.isnan()
    assert torch.equal(joined[~is_nan].view(torch.int32), numbers[~is_nan].view(torch.int32))
    assert joined[is_nan].isnan().all()
    assert weight[is_nan].isnan().all()


def test_a_layout_covers_every_number_once() -> None:
    """Random sizes, keys, buckets and chunks: buckets tile the segments, and runs tile the parameters."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    for _ in range(50):
        count = draw.randrange(1, 12)
        sizes = [draw.choice((0, 1, 63, 64, 65, 500, 3000)) for _ in range(count)]
        keys = [draw.randrange(3) for _ in range(count)]
        bucket_size, coarsening = 64 * draw.randrange(1, 20), draw.randrange(1, 5)
        layout = StateLayout.of(sizes, keys, bucket_size=bucket_size, coarsening=coarsening)
        present = [index for index in range(count) if draw.random() < 0.7]
        histories = [draw.randrange(2) for _ in range(count)]
        touched = torch.zeros(layout.size, dtype=torch.int64)
        seen = torch.full((layout.size,), -1)
        for bucket in layout.buckets:
            assert 0 < bucket.size <= bucket_size
            touched[bucket.start : bucket.stop] += 1
            chunk = layout.chunks[bucket.chunk]
            assert chunk.start <= bucket.start < bucket.stop <= chunk.stop
            own = [index for index in chunk.parameters if index in present]
            for history, part in layout.runs(bucket, own, histories):
                assert bucket.start <= part.start < part.stop <= bucket.stop
                seen[part] = history
        assert (touched == 1).all()
        assert all(len(chunk.buckets) <= coarsening for chunk in layout.chunks)
        for index, place in enumerate(layout.places):
            expected = histories[index] if index in present else -1
            assert (seen[place.start : place.stop] == expected).all()


def flat_store(
    sizes: list[int], make: MakeUpdate, options: StateOptions, dtype: torch.dtype = torch.float32, decay: float = 0.1
) -> tuple[OptimizerStateStore, list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    values = [torch.randn(size, generator=generator) for size in sizes]
    parameters = [StoredParameter(f"p{i}", value.shape, (), 1, decay) for i, value in enumerate(values)]
    store = build_store(parameters, make, dtype, options, torch.device("cpu"), NoRanks())
    for index, value in enumerate(values):
        store.set_weight(index, value)
    store.prepare()
    return store, values


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2),
    "adam, amsgrad": lambda groups: torch.optim.Adam(groups, lr=1e-2, amsgrad=True),
    "sgd, nesterov": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9, nesterov=True),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=1e-2, centered=True),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=1e-2),
    "nadam": lambda groups: torch.optim.NAdam(groups, lr=1e-2),
}
SIZES = [100, 3000, 1, 700]


@pytest.mark.parametrize("name", [*OPTIMIZERS, "kernel of adamw", "kernel of sgd"])
def test_any_elementwise_optimizer_steps_as_torchs_own(name: str) -> None:
    """Five steps in buckets of 256 numbers and tiles of 100, on the host; in steps 1 and 3 parameter 1 has no gradient.

    Torch skips a parameter without a gradient, and its count of steps stays.
    """
    make = OPTIMIZERS.get(name)
    if name == "kernel of adamw":
        make, update = OPTIMIZERS["adamw"], adamw_update(betas=(0.9, 0.999), eps=1e-8, tile=100)
    elif name == "kernel of sgd":
        make, update = (
            (lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9)),
            sgd_update(momentum=0.9, tile=90),
        )
    else:
        assert make is not None
        update = tiled_update(make, tile=100)
    store, values = flat_store(SIZES, update, StateOptions("host", bucket_size=256, coarsening=2, buffer_sets=2))
    parameters = [nn.Parameter(value.clone()) for value in values]
    optimizer = make([{"params": parameters, "weight_decay": 0.1}])
    generator = torch.Generator().manual_seed(2)
    for step in range(5):
        for index, parameter in enumerate(parameters):
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = None if index == 1 and step in (1, 3) else gradient
            if parameter.grad is not None:
                store.add(index, gradient)
        store.finish()
        norm = store.step(1e-2)
        total = torch.stack([p.grad.norm() for p in parameters if p.grad is not None]).norm()
        assert float(norm) == pytest.approx(float(total), rel=1e-5)
        optimizer.step()
    for index, parameter in enumerate(parameters):
        torch.testing.assert_close(store.weight(index), parameter.detach(), rtol=1e-5, atol=1e-6)
        for key, value in store.state(index).items():
            torch.testing.assert_close(value, optimizer.state[parameter][key], rtol=1e-5, atol=1e-6)


class RowNormalized(torch.optim.Optimizer):
    """Not elementwise: each row of a matrix is divided by its norm."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "weight_decay": 0.0})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data -= 0.1 * parameter.grad / parameter.grad.norm(dim=-1, keepdim=True)


@pytest.mark.parametrize("make", [RowNormalized, lambda groups: torch.optim.Adafactor(groups)])
def test_an_optimizer_that_is_not_elementwise_is_refused(make: Any) -> None:
    with pytest.raises(ValueError, match=r"elementwise|keeps"):
        find_slots(make)


def test_gradients_computed_after_their_chunk_was_sent_are_added() -> None:
    """A module that is called once more than in the step before: its parameter's chunk is on its way already."""
    store, values = flat_store([100, 50], sgd_update(), StateOptions("device", bucket_size=64), decay=0.0)
    for index, size in enumerate((100, 50)):
        store.add(index, torch.ones(size))
        store.complete(index)
    store.add(0, torch.full((100,), 2.0))
    store.finish()
    store.step(1.0)
    torch.testing.assert_close(store.weight(0), values[0] - 3)
    torch.testing.assert_close(store.weight(1), values[1] - 1)


@pytest.mark.parametrize("clip", [None, 1.0])
def test_the_norm_does_not_depend_on_the_order_of_the_sums(clip: float | None) -> None:
    """A process's first backward pass may complete gradients in another order than later ones do."""
    sizes = [64] * 30
    gradients = [torch.randn(64, generator=torch.Generator().manual_seed(index)) for index in range(30)]
    norms = set()
    for seed in range(8):
        options = StateOptions("device", bucket_size=64, coarsening=1)
        store, _ = flat_store(sizes, sgd_update(), options)
        store.clip = None if clip is None else lambda norm: clip / norm
        for index in random.Random(seed).sample(range(30), 30):
            store.add(index, gradients[index])
            store.complete(index)
        store.finish()
        norms.add(store.step(0.1).item())
    assert len(norms) == 1


def test_a_step_needs_summed_gradients_and_does_nothing_without_any() -> None:
    store, values = flat_store([100, 50], sgd_update(), StateOptions("device"), decay=0.0)
    assert float(store.step(1.0)) == 0
    store.add(0, torch.ones(100))
    with pytest.raises(RuntimeError, match="must not be in no_sync"):
        store.step(1.0)
    store.drop()
    store.finish()
    assert float(store.step(1.0)) == 0
    assert torch.equal(store.weight(0), values[0])
    store.add(0, torch.ones(100))
    store.finish()
    assert float(store.step(1.0)) == 10
    torch.testing.assert_close(store.weight(0), values[0] - 1)
    assert torch.equal(store.weight(1), values[1])
    store.add(0, torch.ones(100))
    store.finish()
    store.add(1, torch.ones(50))  # of a pass in no_sync after one that sums
    with pytest.raises(RuntimeError, match="must not be in no_sync"):
        store.step(1.0)
    store.finish()
    assert float(store.step(1.0)) == pytest.approx(150**0.5)
    torch.testing.assert_close(store.weight(1), values[1] - 1)


def test_the_loss_scale_halves_at_an_overflow_and_doubles_after_steps_without_one() -> None:
    scale = LossScale(LossScaleOptions(1024.0, 3), torch.device("cpu"))
    found = []
    for is_overflow in (False, True, False, False, False, True, False, False):
        scale.update(torch.tensor(is_overflow))
        found.append(float(scale.value))
    assert found == [1024, 512, 512, 512, 1024, 512, 512, 512]


@pytest.mark.parametrize("options", [{"initial": 0.5}, {"interval": 0}])
def test_an_impossible_loss_scale_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="loss scale"):
        LossScaleOptions(**options)


def test_64_sums_in_bf16_lose_what_fp32_keeps() -> None:
    """`accumulates_fp32` keeps the sum of 64 micro-batches whose gradients are 1 + 1/64."""
    gradient = torch.full((64,), 1 + 1 / 64).bfloat16()
    sums = []
    for accumulates in (False, True):
        options = StateOptions("device", accumulates_fp32=accumulates)
        store, _ = flat_store([64], sgd_update(), options, torch.bfloat16)
        for _ in range(64):
            store.add(0, gradient)
        sums.append(float(store.gradients[0]))
    assert sums[1] == 65.0
    assert abs(sums[0] - 65.0) > 0.4


def step_by_kernels(dtype_name: str, is_split: bool) -> None:
    """The interpreted kernels of AdamW and SGD beside the CPU's steps; the last one is skipped."""
    from stretto.optim.state import kernels

    dtype = getattr(torch, dtype_name)
    generator = torch.Generator().manual_seed(4)
    size = 3000
    wide = torch.randn(size, generator=generator)
    gradient = torch.randn(size, generator=generator).to(torch.float16)  # the interpreter cuts bfloat16 off
    scale, skip = torch.tensor(0.25), torch.zeros(1, dtype=torch.int32)
    for kind in ("adamw", "sgd"):
        update = AdamWUpdate(betas=(0.9, 0.95), eps=1e-8) if kind == "adamw" else SGDUpdate(momentum=0.9)
        found = []
        for by_kernel in (False, True):
            weight = torch.empty(size, dtype=dtype)
            state = {name: torch.zeros(size) for name in update.slots}
            if is_split:
                state[LOW] = torch.empty(size, dtype=torch.int16)
                round_to_bf16(wide, weight, state[LOW])
            else:
                weight.copy_(wide)
                if dtype != torch.float32:
                    state[MASTER] = wide.clone()
            histories = {0: History()}
            for step in range(3):
                skip.fill_(step == 2)
                update.begin(StepSettings(1e-2, scale, skip), histories, (0.1,))
                if not by_kernel:
                    update.apply(weight, gradient, state, history=0, segment=0)
                    continue
                common = {"scale": scale, "skip": skip, "failed": None}
                master = state.get(MASTER, state.get(LOW))
                if isinstance(update, AdamWUpdate):
                    options = {"betas": update.betas, "eps": update.eps}
                    corrections = update._corrections[0, 0]
                    moments = (state["exp_avg"], state["exp_avg_sq"])
                    kernels.launch(
                        weight, gradient, *moments, master, corrections=corrections, options=options, **common
                    )
                else:
                    lr = torch.tensor(1e-2)
                    buffer = state["momentum_buffer"]
                    kernels.launch_sgd(weight, gradient, buffer, master, lr=lr, options=(0.9, 0.1), **common)
            found.append([open_master(weight, state), *(state[name] for name in update.slots)])
        for expected, other in zip(*found, strict=True):
            torch.testing.assert_close(other, expected, rtol=2e-6, atol=2e-6)
    weight, low = torch.empty(size, dtype=torch.bfloat16), torch.empty(size, dtype=torch.int16)
    kernels.launch_round(wide, weight, low)
    joined = torch.empty(size)
    kernels.launch_join(weight, low, joined)
    assert torch.equal(joined, wide)
    kernels.launch_scale(gradient, scale, joined)
    assert torch.equal(joined, gradient.float() / 4)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="there is no Triton for this platform")
@pytest.mark.parametrize(
    ("dtype", "is_split"), [("bfloat16", True), ("bfloat16", False), ("float16", False), ("float32", False)]
)
def test_the_kernels_give_what_the_cpu_does(interpret: Any, dtype: str, is_split: bool) -> None:
    interpret(1, step_by_kernels, dtype, is_split)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="there is no Triton for this platform")
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_the_kernels_compile(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For every dtype of weights and gradients, without a GPU."""
    from stretto.optim.state import kernels
    from stretto.tiles.compile_only import compile_kernel

    launched: list[Any] = []
    monkeypatch.setattr(
        kernels, "launch_kernel", lambda kernel, programs, *args, **rest: launched.append((kernel, args, rest))
    )
    wide, number, flag = torch.zeros(64), torch.zeros(()), torch.zeros(1, dtype=torch.int32)
    for dtype, master in (
        (torch.bfloat16, torch.zeros(64, dtype=torch.int16)),
        (torch.bfloat16, wide),
        (torch.float16, wide),
        (torch.float32, None),
    ):
        weight = torch.zeros(64, dtype=dtype)
        rest = {"scale": number, "skip": flag, "failed": flag}
        options = {"betas": (0.9, 0.95), "eps": 1e-8}
        kernels.launch(weight, weight, wide, wide, master, corrections=wide, options=options, **rest)
        kernels.launch_sgd(weight, weight, wide, master, lr=number, options=(0.9, 0.1), **rest)
        kernels.launch_sgd(weight, wide, None, master, lr=number, options=(0.0, 0.1), **rest)
        kernels.launch_scale(weight, number, wide)
    half = torch.zeros(64, dtype=torch.bfloat16)
    kernels.launch_round(wide, half, None)
    kernels.launch_round(wide, half, torch.zeros(64, dtype=torch.int16))
    kernels.launch_join(half, torch.zeros(64, dtype=torch.int16), wide)
    for kernel, arguments, options in launched:
        assert "ptx" in compile_kernel(kernel, arguments, options, target)
