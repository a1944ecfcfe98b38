# SPDX-License-Identifier: Apache-2.0
"""stretto.optim.AdamW against torch's, with and without the clip's factor; its kernel in Triton's interpreter."""

import copy
import importlib.util
import pickle
import random
from unittest import mock

import pytest
import torch
from torch import nn

from stretto.optim import AdamW, Muon, adamw
from stretto.train.optimizer import ShardOptimizer

SEED = random.randrange(2**31)
OPTIONS = {"lr": 3e-3, "betas": (0.8, 0.95), "eps": 1e-7}
SHAPES = ((3, 5), (1,), (0, 4), (64, 33))


def train(make, dtype, scales, clips_first):
    """Weights after a few steps; a scale for each (None: none), by the optimizer or by hand before it."""
    torch.manual_seed(SEED)
    parameters = [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in SHAPES]
    unused = nn.Parameter(torch.ones(2, dtype=dtype))
    groups = [
        {"params": [*parameters[:2], unused], "weight_decay": 0.1},
        {"params": parameters[2:], "weight_decay": 0.0},
    ]
    optimizer = make(groups, **OPTIONS)
    for scale in scales:
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        if clips_first:
            for parameter in parameters:
                parameter.grad.mul_(1 if scale is None else scale)
            optimizer.step()
        else:
            optimizer.step(scale=None if scale is None else torch.tensor(scale, dtype=torch.float64))
    assert torch.equal(unused, torch.ones(2, dtype=dtype))
    return parameters, optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_it_is_torchs_adamw_after_scaling(dtype):
    scales = (None, 0.3, 1.0, 1e-3)
    ours, _ = train(AdamW, dtype, scales, clips_first=False)
    theirs, _ = train(torch.optim.AdamW, dtype, scales, clips_first=True)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 0}[dtype]
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("make", "key", "weight"),
    [
        (AdamW, "exp_avg", 1 - 0.9),
        (lambda groups: Muon(groups[0]["params"]), "momentum_buffer", 1 - 0.95),
        (lambda groups: torch.optim.SGD(groups, momentum=0.9), "momentum_buffer", 1),
    ],
)
def test_a_factor_is_not_rounded_to_the_dtype_of_16_bit_gradients(make, key, weight):
    torch.manual_seed(SEED)
    model = nn.Sequential(nn.Linear(8, 8, bias=False).bfloat16(), nn.Linear(8, 8, bias=False))
    optimizer = ShardOptimizer(model, make, weight_decay=0.0)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    scaled = {name: (each.grad.float() * 0.3).to(each.dtype) for name, each in model.named_parameters()}
    optimizer.step(1e-3, torch.tensor(0.3))
    for name, gradient in scaled.items():
        assert torch.equal(optimizer.state(name)[key], torch.zeros_like(gradient).lerp(gradient, weight))


def test_its_state_is_torchs():
    ours, optimizer = train(AdamW, torch.float32, (0.5, 0.5), clips_first=False)
    theirs = torch.optim.AdamW(copy.deepcopy(ours), **OPTIONS)
    theirs.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    state = optimizer.state_dict()["state"]
    _, other = train(torch.optim.AdamW, torch.float32, (0.5, 0.5), clips_first=True)
    expected = other.state_dict()["state"]
    assert state.keys() == expected.keys()
    for number, values in expected.items():
        assert state[number].keys() == values.keys()
        for name, value in values.items():
            torch.testing.assert_close(state[number][name], value)


@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))])
def test_a_copied_optimizer_has_all_that_it_steps_with(duplicate, writes):
    parameter = nn.Parameter(torch.ones(3))
    optimizer = duplicate(AdamW([parameter], lr=0.1, writes_copies=writes))
    (mine,) = optimizer.param_groups[0]["params"]
    mine.grad = torch.ones(3)
    optimizer.step(scale=torch.ones(()))
    assert (mine < 1).all()
    assert vars(optimizer).keys() >= vars(AdamW([parameter])).keys() - vars(torch.optim.AdamW([parameter])).keys()
    assert optimizer.writes_copies == writes


@pytest.mark.parametrize("kind", [AdamW, Muon])
def test_hooks_are_called_once_a_step_whichever_optimizers_were_made_before(kind):
    torch.optim.AdamW([nn.Parameter(torch.ones(1))]), AdamW([nn.Parameter(torch.ones(1))])
    parameter, calls = nn.Parameter(torch.ones(3)), []
    optimizer = kind([{"params": [parameter], **({"use_muon": False} if kind is Muon else {})}], lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    parameter.grad = torch.ones(3)
    optimizer.step(scale=torch.ones(()))
    assert (calls, (parameter < 1).all()) == (["before", "after"], True)


def test_a_closure_goes_without_a_scale():
    parameter = nn.Parameter(torch.ones(3))
    optimizer = AdamW([parameter], lr=0.1)

    def closure():
        parameter.grad = torch.ones(3)
        return 5.0

    assert optimizer.step(closure) == 5.0
    assert (parameter < 1).all()
    with pytest.raises(ValueError, match="a closure makes new gradients"):
        optimizer.step(closure, scale=torch.ones(()))


class Copy:
    """A copy of a parameter in another dtype, which the kernel writes."""

    is_written = False

    def open(self, parameter):
        self.kept = torch.full_like(parameter, 7, dtype=torch.float16)  # the interpreter cuts bfloat16 off
        return self.kept

    def close(self, parameter):
        self.is_written = torch.equal(self.kept, parameter.half())


class RefusingCopy:
    def open(self, parameter):
        return None


def step_by_kernel(seed, scale):
    """Three steps by the interpreted kernel beside torch's, with and without copies that are written, too."""
    torch.manual_seed(seed)
    shapes = (
        (70, 65),
        (3,),
        (0,),
        (33, 1000),
        *[(7,)] * 39,
        (9000,),
    )  # two launches of many, and one of a large parameter
    ours = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    theirs = [nn.Parameter(one.detach().double()) for one in ours]  # in fp32, MKL's first sqrt is at times off by 3e-4
    one = AdamW(ours, lr=1e-2, betas=(0.9, 0.999), weight_decay=0.1, writes_copies=scale is not None)
    for mine in ours[1:]:
        mine.low_precision_weight = Copy()
    ours[0].low_precision_weight = RefusingCopy()
    other = torch.optim.AdamW(theirs, lr=1e-2, betas=(0.9, 0.999), weight_decay=0.1)
    with mock.patch.object(adamw, "_suits_kernel", return_value=True):
        for number in range(3):
            trained = ours if number else [*ours[:3], *ours[4:-20]]  # so that counts of steps differ
            versions = [mine._version for mine in trained]
            for mine, its in [
                pair for pair in zip(ours, theirs, strict=True) if any(pair[0] is one for one in trained)
            ]:
                mine.grad = torch.randn_like(mine)
                its.grad = mine.grad.double() * (scale or 1)
            one.step(scale=None if scale is None else torch.tensor(scale, dtype=torch.float64))
            other.step()
            assert all(mine._version > before for mine, before in zip(trained, versions, strict=True))
            assert all(mine.low_precision_weight.is_written == one.writes_copies for mine in trained[1:])
    for mine, its in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.double(), its, rtol=2e-6, atol=2e-6)
        for name in ("step", "exp_avg", "exp_avg_sq"):
            value = one.state[mine][name].to(other.state[its][name].dtype)
            torch.testing.assert_close(value, other.state[its][name], rtol=2e-6, atol=1e-7)


def update_parts(seed, scale):
    """The bits of a parameter that its own launch updates, and of parts of it that share one."""
    torch.manual_seed(seed)
    from stretto.optim.adamw_kernel import SMALL, AdamWTensors, launch
    from stretto.tiles import launches

    tensors = [*torch.rand(4, SMALL + 99).clone(), torch.zeros(SMALL + 99, dtype=torch.float16)]
    others = [each.clone() for each in tensors]
    parts = zip(*[each.split(1999) for each in others], strict=True)  # of all alignments
    for updates in ([AdamWTensors(*tensors)], [AdamWTensors(*some) for some in parts]):
        corrections = torch.tensor([[0.3, 1.7, 0.9]]).repeat(len(updates), 1)
        options = {"betas": (0.9, 0.95), "eps": 1e-8}
        with mock.patch.object(launches, "launch_kernel", wraps=launches.launch_kernel) as launched:
            launch(updates, corrections, None if scale is None else torch.tensor(scale), None, options)
        assert launched.call_count == 1
    assert all(map(torch.equal, tensors, others))


def step_after_loading(seed):
    """A step by the interpreted kernel with moments that were saved of a weight in channels_last."""
    torch.manual_seed(seed)
    saved = nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last))
    loaded = nn.Parameter(saved.detach().contiguous())
    one, other = AdamW([loaded], lr=1e-2), torch.optim.AdamW([saved], lr=1e-2)
    for number in range(2):
        saved.grad = torch.randn_like(saved)
        if number:
            one.load_state_dict(copy.deepcopy(other.state_dict()))
            loaded.data.copy_(saved)
            loaded.grad = saved.grad.contiguous()
        other.step()
    with mock.patch.object(adamw, "_suits_kernel", return_value=True):
        one.step()
    torch.testing.assert_close(loaded, saved, rtol=1e-6, atol=1e-6, check_stride=False)


@pytest.mark.parametrize("option", ["amsgrad", "maximize"])
@pytest.mark.parametrize("is_loaded", [False, True])
def test_options_that_the_kernel_has_not_are_torchs_where_it_could_run(option, is_loaded):
    torch.manual_seed(SEED)
    ours, theirs = (nn.Parameter(torch.full((2, 3), 0.5)) for _ in range(2))
    other = torch.optim.AdamW([theirs], lr=0.1, **{option: True})
    one = AdamW([ours] if is_loaded else [{"params": [ours], option: True}], lr=0.1)
    if is_loaded:
        one.load_state_dict(copy.deepcopy(other.state_dict()))
    with mock.patch.object(adamw, "_suits_kernel", return_value=True):
        for size in (3.0, 0.1):
            ours.grad, theirs.grad = (torch.full_like(ours, size) for _ in range(2))
            one.step(scale=torch.tensor(1.0))
            other.step()
    assert torch.equal(ours, theirs)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="there is no Triton for this platform")
def test_moments_of_another_memory_format_are_loaded_as_the_kernel_reads_them(interpret):
    print(f"seed {SEED}")
    interpret(1, step_after_loading, SEED)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="there is no Triton for this platform")
@pytest.mark.parametrize("scale", [None, 0.3])
def test_the_kernel_is_torchs_adamw(interpret, scale):
    print(f"seed {SEED}")
    interpret(1, step_by_kernel, SEED, scale)
    interpret(1, update_parts, SEED, scale)


def skip_by_kernel(seed):
    """Steps by the interpreted kernel of which some are skipped: those change nothing, and copies are current."""
    torch.manual_seed(seed)
    ours = [nn.Parameter(torch.randn(shape)) for shape in ((70, 65), (3,))]
    others = [nn.Parameter(one.detach().clone()) for one in ours]
    one, other = (AdamW(parameters, lr=1e-2, writes_copies=True) for parameters in (ours, others))
    for mine in (*ours, *others):
        mine.low_precision_weight = Copy()
    with mock.patch.object(adamw, "_suits_kernel", return_value=True):
        for skips in (True, False, True, False):
            for mine, its in zip(ours, others, strict=True):
                mine.grad = torch.full_like(mine, torch.nan) if skips else torch.randn_like(mine)
                its.grad = mine.grad
            one.step(scale=torch.tensor(torch.nan if skips else 0.5), skip=torch.tensor(skips))
            if not skips:
                other.step(scale=torch.tensor(0.5))
            assert all(mine.low_precision_weight.is_written for mine in ours)
    for mine, its in zip(ours, others, strict=True):
        assert torch.equal(mine, its)
        for name in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(one.state[mine][name], other.state[its][name]), name


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="there is no Triton for this platform")
def test_the_kernel_skips_steps(interpret):
    print(f"seed {SEED}")
    interpret(1, skip_by_kernel, SEED)
