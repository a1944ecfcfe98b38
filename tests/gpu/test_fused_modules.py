# SPDX-License-Identifier: Apache-2.0
"""Transformers' models whose modules fused kernels replace: beside transformers' own on a GPU, and as a CUDA graph."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from stretto.ops.rms_norm import rms_norm
from stretto.ops.rotary import rotate_halves
from stretto.optim import AdamW
from stretto.parallel import CapturedStep, Grid, parallelize
from stretto.parallel.layers.attention_backend import BACKENDS, AttentionTuner
from stretto.parallel.state import require_state
from tests.differences import largest
from tests.gpu.test_fused import draw
from tests.gpu.test_moe import no_host_waits
from tests.parallel.layers.test_fused import far_from
from tests.parallel.training import distance

pytestmark = pytest.mark.ranks(1, own=(1,), among=(1,))
FAMILIES = ("llama", "mistral", "qwen3", "gemma2", "gemma3_text", "gpt2", "qwen3_moe")


def make_model(family: str) -> nn.Module:
    from tests.parallel import hugging_face

    torch.manual_seed(0)
    sizes = {"hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8, "head_dim": 64}
    if family == "gpt2":
        sizes = {"hidden_size": 512, "num_attention_heads": 8, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    if family == "qwen3_moe":
        sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
    return hugging_face.causal_lm(family, max_position_embeddings=256, vocab_size=509, **sizes)


def train(model: nn.Module) -> tuple[Tensor, list[Tensor]]:
    ids = (torch.arange(4 * 256, device="cuda") * 7 % 509).view(4, 256)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    grads = [parameter.grad for parameter in model.parameters()]
    return loss.detach(), [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]  # of one rank


def measure_models(family: str, by_blocks: bool) -> dict[str, float]:
    """How far a fused model is from transformers' in fp32, and both, in bf16, from that: the largest of loss and
    gradients."""
    blocks = (["transformer.h.*"] if family == "gpt2" else ["model.layers.*"]) if by_blocks else None

    def compare(found: tuple[Tensor, list[Tensor]]) -> float:
        return largest(distance(one.float(), other) for one, other in zip(found[1], right[1], strict=True))

    def fused(dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        model = parallelize(make_model(family).to(dtype), Grid(device="cuda"), blocks=blocks)
        assert sum("forward" in vars(module) or getattr(module, "is_fused", False) for module in model.modules()) >= 2
        return train(model)

    right = train(make_model(family).cuda())
    exact, half, own = fused(torch.float32), fused(torch.bfloat16), train(make_model(family).cuda().bfloat16())
    return {
        "loss": distance(exact[0].float(), right[0].float()),
        "gradients": compare(exact),
        "bf16": compare(half),
        "transformers' bf16": compare(own),
    }


@pytest.mark.parametrize("by_blocks", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_computes_what_transformers_does(
    run_ranks: Callable[..., list[Any]], world: int, family: str, by_blocks: bool
) -> None:
    (far,) = run_ranks(world, measure_models, family, by_blocks)
    assert far["loss"] < 1e-5, far
    assert far["gradients"] < 5e-5, far
    assert far["bf16"] < 1.5 * far["transformers' bf16"], far


def measure_kernels(dtype: torch.dtype) -> list[float]:
    """Errors of results and gradients, in units of one rounding, of calls for which the host does not wait."""
    errors = []
    for shape, offset in (((2, 1000, 4096), 0.0), ((3, 512, 8, 128), 1.0), ((5, 7, 12289), 0.0)):
        x, grad = (draw(seed, *shape, dtype=dtype).requires_grad_() for seed in (1, 2))
        weight = draw(3, shape[-1], dtype=dtype).requires_grad_()
        wide = [one.detach().double().requires_grad_() for one in (x, weight)]
        right = wide[0] * (wide[0].square().mean(-1, keepdim=True) + 1e-2).rsqrt() * (wide[1] + offset)
        rights = right, *torch.autograd.grad(right, wide, grad.detach().double())
        rms_norm(x, weight, 1e-2, offset)
        with no_host_waits():
            out = rms_norm(x, weight, 1e-2, offset)
            found = out, *torch.autograd.grad(out, (x, weight), grad.detach())
        sizes = 64.0, 64.0, 8.0 * grad[..., 0].numel()
        errors += [
            far_from(one.detach(), other.detach(), size) for one, other, size in zip(found, rights, sizes, strict=True)
        ]
    for angles in (1, 2):
        heads = [draw(seed, 2, 512, count, 128, dtype=dtype).transpose(1, 2) for seed, count in ((1, 12), (2, 4))]
        heads = [one.requires_grad_() for one in heads]
        cos, sin = (draw(seed, angles, 512, 128, dtype=dtype) for seed in (3, 4))
        wide = [one.detach().double().requires_grad_() for one in heads]
        halves = [one.chunk(2, -1) for one in wide]
        rights = tuple(
            one * cos[:, None].double() + torch.cat((-second, first), -1) * sin[:, None].double()
            for one, (first, second) in zip(wide, halves, strict=True)
        )
        grads = [draw(seed, *one.shape, dtype=dtype) for seed, one in enumerate(heads)]
        with no_host_waits():
            found = rotate_halves(heads[0], heads[1], cos, sin)
            of_heads = torch.autograd.grad(found, heads, grads)
        of_rights = torch.autograd.grad(rights, wide, [one.double() for one in grads])
        pairs = zip((*found, *of_heads), (*rights, *of_rights), strict=True)
        errors += [far_from(one.detach(), other.detach(), 64.0) for one, other in pairs]
    return errors


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_kernels_round_once(run_ranks: Callable[..., list[Any]], world: int, dtype: torch.dtype) -> None:
    (errors,) = run_ranks(world, measure_kernels, dtype)
    assert largest(errors) <= 1.0, errors


def train_captured() -> tuple[list[float], list[float]]:
    """Losses of seven steps, of which the last are a graph's replays, and of seven that are not captured."""
    grid = Grid(z=dist.get_world_size(), device="cuda")
    ids = (torch.arange(4 * 64, device=grid.device) * 7 % 509).view(4, 64)

    def run(captures: bool) -> list[float]:
        model = parallelize(make_model("llama"), grid, dtype=torch.bfloat16)
        optimizer = AdamW(model.parameters(), lr=torch.tensor(1e-3, device=grid.device))

        def step(ids: Tensor) -> tuple[Tensor, ...]:
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return (loss.detach(),)

        call = CapturedStep(step) if captures else step
        losses = [call(ids)[0] for _ in range(7)]
        found = [float(loss) for loss in losses]
        if isinstance(call, CapturedStep):
            call.close()
        return found

    waiting = CapturedStep(lambda ids: (torch.ones(int(ids.max())),), warm_up=0)
    with pytest.raises(RuntimeError, match="makes the host wait for the GPU"):
        waiting(ids)
    waiting.close()
    torch.rand(2, device=grid.device)
    return run(captures=True), run(captures=False)


def test_a_transformers_step_is_captured_and_one_that_waits_is_refused(
    run_ranks: Callable[..., list[Any]], world: int
) -> None:
    ((captured, plain),) = run_ranks(world, train_captured)
    assert captured == plain
    assert captured[-1] < captured[0]


def tune_attention() -> bool:
    """True if a kernel was timed, and the second step's loss is the first one's."""
    query, key = draw(1, 2, 8, 1024, 128, dtype=torch.bfloat16), draw(2, 2, 2, 1024, 128, dtype=torch.bfloat16)
    grid = Grid(device="cuda")
    tuner = AttentionTuner(True, grid.device, grid.communicator("data"))
    with tuner.select(query, key, key, is_causal=True):
        pass
    tuner.finish()
    assert tuner.order is None or tuner.order[0] in BACKENDS
    model = parallelize(make_model("llama"), grid, dtype=torch.bfloat16, tune_matmuls=True)
    first, second = (train(model)[0] for _ in range(2))
    assert require_state(model, "test").options.tune_matmuls
    return bool((first - second).abs() < 0.02)


def test_attention_is_tuned(run_ranks: Callable[..., list[Any]], world: int) -> None:
    assert run_ranks(world, tune_attention) == [True]
