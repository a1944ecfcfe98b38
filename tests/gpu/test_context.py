# SPDX-License-Identifier: Apache-2.0
"""On GPUs: models whose sequences are cut over context train as on one GPU, and keep their part of the activations."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from stretto.models import GPT, GPTConfig
from stretto.parallel import Grid, clip_grad_norm_, gather, parallelize
from tests.gpu.sharing import SHARED, GpuRanks, is_shared
from tests.parallel import hugging_face, moe_families

STEPS, ROWS, SEQ_LEN = 5, 4, 240  # twice every number of ranks divides the length
CONFIG = GPTConfig(
    layers=2, hidden=240, heads=8, kv_heads=4, vocab=1003, max_seq_len=SEQ_LEN, positions="rotary", activation="swiglu"
)
LINEAR: dict[str, dict[str, Any]] = {
    "qwen3_next": {"num_experts": 0, "layer_types": ["linear_attention", "full_attention"]}
    | {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 64},
    "nemotron_h": {"layers_block_type": ["mamba", "attention"], "mamba_num_heads": 8, "mamba_head_dim": 64}
    | {"ssm_state_size": 64, "n_groups": 2},
}
PACKAGES = {"qwen3_next": ("causal_conv1d", "fla"), "nemotron_h": ("causal_conv1d", "mamba_ssm")}
DOCUMENTS = [7, 113, 2, 118]  # of SEQ_LEN
pytestmark = pytest.mark.ranks(4, own=(2, 4), among=SHARED)


def grids(world: int) -> list[dict[str, Any]]:
    axes = () if world not in (4, 8) else ("x",) if is_shared(world) else ("data", "x", "z")
    over_context: list[dict[str, Any]] = [{"context": world}, {"context": world, "context_weights": "shard"}]
    return [*over_context, *({"context": 2, axis: world // 2} for axis in axes)]


def make_gpt() -> nn.Module:
    torch.manual_seed(0)
    return GPT(CONFIG)


def make_hugging_face(family: str) -> nn.Module:
    torch.manual_seed(0)
    options: dict[str, Any] = {"max_position_embeddings": SEQ_LEN} | LINEAR.get(family, {})
    if family == "gpt_oss":  # sinks and windows
        return moe_families.build(family, **options)
    return hugging_face.causal_lm(family, **options | {"hidden_size": 256, "head_dim": 64}).train()


def batch(vocab: int, device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(3, vocab, (ROWS, SEQ_LEN), generator=generator)
    labels = tokens.clone()
    labels[torch.rand(labels.shape, generator=generator) < 0.2] = -100
    return tokens.to(device), labels.to(device)


def train(model: nn.Module, grid: Grid, *, is_plain: bool = False) -> dict[str, Any]:
    """Losses, norms and weights of some steps; is_plain: of a model that is not on the grid."""
    is_gpt = isinstance(model, GPT)
    tokens, labels = batch(1003 if is_gpt else hugging_face.VOCAB, grid.device)
    if not is_plain:
        part, parts = grid.coordinate("batch"), grid.size("batch")
        tokens, labels = tokens.chunk(parts)[part], labels.chunk(parts)[part]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses, norms = [], []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(tokens, labels) if is_gpt else model(input_ids=tokens, labels=labels).loss
        loss.backward()
        clip = nn.utils.clip_grad_norm_ if is_plain else partial(clip_grad_norm_, grid=grid)
        norms.append(clip(model.parameters(), 1.0).item())
        optimizer.step()
        losses.append(loss.item())
    weights = {name: gather(parameter).detach().double().cpu() for name, parameter in model.named_parameters()}
    return {"losses": losses, "norms": norms, "weights": weights}


def train_all(family: str) -> dict[str, Any]:
    make = make_gpt if family == "gpt" else partial(make_hugging_face, family)
    world = dist.get_world_size()
    torch.backends.cuda.matmul.allow_tf32 = False
    grid = Grid(context=world)
    found = {"plain": train(make().to(grid.device), grid, is_plain=True)}
    for sizes in grids(world):
        grid = Grid(**sizes)
        found[str(sizes)] = train(parallelize(make(), grid), grid)
        for again in ("", " again") if family == "gpt" else ():
            found[f"bf16 {sizes}{again}"] = train(parallelize(make(), grid, dtype=torch.bfloat16), grid)
    return found if dist.get_rank() == 0 else {}


@pytest.mark.parametrize("family", ["gpt", "llama", "gpt_oss", *LINEAR])
def test_sequences_that_are_cut_train_as_on_one_gpu(gpu_pool: GpuRanks, world: int, family: str) -> None:
    found = gpu_pool.run(world, train_all, family, timeout=150)[0]
    plain = found["plain"]
    for sizes in grids(world):
        actual = found[str(sizes)]
        assert actual["losses"] == pytest.approx(plain["losses"], rel=1e-5), sizes
        assert actual["norms"] == pytest.approx(plain["norms"], rel=1e-4), sizes
        for name, weight in plain["weights"].items():
            assert (actual["weights"][name] - weight).norm() / weight.norm() < 1e-5, (sizes, name)
        if family == "gpt":
            once, again = (found[f"bf16 {sizes}{which}"] for which in ("", " again"))
            assert once["losses"] == pytest.approx(plain["losses"], rel=1e-2), sizes
            assert once["losses"] == again["losses"], sizes
            assert all(torch.equal(weight, again["weights"][name]) for name, weight in once["weights"].items()), sizes


def losses_of_documents(family: str, axis: str = "context") -> tuple[float, float, float, float]:
    """The loss and the norm of gradients, in bf16: of packed documents on the grid, and of separate ones on one GPU."""
    grid = Grid(**{axis: dist.get_world_size()})
    tokens = torch.randint(3, hugging_face.VOCAB, (1, SEQ_LEN), generator=torch.Generator().manual_seed(2))
    positions = torch.cat([torch.arange(length) for length in DOCUMENTS])[None]
    labels = tokens.masked_fill(positions == 0, -100)
    tokens, positions, labels = (each.to(grid.device) for each in (tokens, positions, labels))
    plain = make_hugging_face(family).to(grid.device)
    with torch.autocast("cuda", torch.bfloat16):
        logits = torch.cat([plain(input_ids=part).logits[:, :-1] for part in tokens.split(DOCUMENTS, 1)], 1)
    targets = torch.cat([part[:, 1:] for part in tokens.split(DOCUMENTS, 1)], 1)
    apart = nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
    apart.backward()
    norm = nn.utils.get_total_norm([parameter.grad for parameter in plain.parameters()])
    model = parallelize(make_hugging_face(family), grid, dtype=torch.bfloat16)
    packed = model(input_ids=tokens, position_ids=positions, labels=labels, use_cache=False).loss
    packed.backward()
    return packed.item(), apart.item(), clip_grad_norm_(model.parameters(), 1e9, grid=grid).item(), norm.item()


@pytest.mark.parametrize("axis", ["context", "x"])
def test_packed_documents_are_separate_ones(gpu_pool: GpuRanks, world: int, axis: str) -> None:
    for packed, apart, packed_norm, apart_norm in gpu_pool.run(world, losses_of_documents, "llama", axis, timeout=150):
        assert packed == pytest.approx(apart, rel=5e-3)
        assert packed_norm == pytest.approx(apart_norm, rel=5e-2)


@pytest.mark.parametrize("family", LINEAR)
def test_kernels_of_linear_attention_keep_documents_apart(gpu_pool: GpuRanks, world: int, family: str) -> None:
    for package in PACKAGES[family]:
        pytest.importorskip(package)
    for packed, apart, packed_norm, apart_norm in gpu_pool.run(world, losses_of_documents, family, timeout=300):
        assert packed == pytest.approx(apart, rel=5e-3)
        assert packed_norm == pytest.approx(apart_norm, rel=5e-2)


def bytes_of_activations() -> tuple[int, int]:
    """Bytes that are allocated between the passes of one sequence: of all of it, and of this rank's part."""
    found, length, world = [], 64 * SEQ_LEN, dist.get_world_size()
    config = GPTConfig(layers=2, hidden=256, heads=4, vocab=256, max_seq_len=length, positions="rotary")
    for sizes in ({"data": world}, {"context": world}):
        grid = Grid(**sizes)
        torch.manual_seed(0)
        model = parallelize(GPT(config), grid, dtype=torch.bfloat16)
        tokens = torch.arange(length, device=grid.device)[None] % 256
        for _ in range(2):  # the first pass makes what stays
            model.zero_grad()
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            loss = model(tokens, tokens)
            torch.cuda.synchronize()
            kept = torch.cuda.memory_allocated() - before
            loss.backward()
        found.append(kept)
    return found[0], found[1]


def test_a_rank_keeps_the_activations_of_its_part(gpu_pool: GpuRanks, world: int) -> None:
    for whole, part in gpu_pool.run(world, bytes_of_activations, timeout=150):
        assert part == pytest.approx(whole / world, rel=0.1)
