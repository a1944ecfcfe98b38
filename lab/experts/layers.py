# SPDX-License-Identifier: Apache-2.0
"""`python -m lab moe-layers`: layers of Qwen3-30B-A3B on one GPU, by Stretto and by transformers' `grouped_mm`.

The model is transformers' own, once as it is and once parallelized on a grid of one rank (expert=1); both have bf16
weights and compute forward and backward pass and the gradients' norm, eagerly and with each layer compiled. A run with
fp32 weights shows the memory that the planner predicts, and each run how often a step makes the host wait for the GPU.

Without transformers the model is Stretto's GPT of the same sizes (heads are hidden / heads wide then), and its peer the
same GPT with experts in plain PyTorch: tokens sorted by expert, two grouped products, and a weighted sum.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from lab.harness import Bench, Measured, column
from stretto.bench.harness import run_ranks
from stretto.bench.settings import Needs, Option, Repeats, Rounds, SeqLen, Vocab, WarmUp, require_known
from stretto.bench.training.runs import Step, Stepped, TrainingRun, measure
from stretto.cluster import Cluster
from stretto.models import GPT, GPTConfig
from stretto.models.moe import Experts
from stretto.parallel import Grid, gradient_norm, parallelize
from stretto.planner import predict

PEERS = ("auto", "transformers", "torch")
TINY: dict[str, int] = {"hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "experts": 8, "k": 2, "width": 32}


@dataclass(frozen=True)
class MoeLayersSetting:
    """The layers that `python -m lab moe-layers` trains. Raises ValueError for settings that cannot work.

    The model is Qwen3-30B-A3B, of as many layers. peer: transformers' own model, or one in plain PyTorch that computes
    experts in the same way; auto takes transformers', where it is installed.
    """

    layers: Annotated[int, Option("How many layers of Qwen3-30B-A3B, which has 48.", least=1)] = 8
    seq_len: SeqLen = 4096
    batch: Annotated[int, Option("Sequences of a step.", least=1)] = 1
    vocab: Vocab = 151_936
    peer: Annotated[str, Option("transformers, torch, or auto.")] = "auto"
    compiled: Annotated[bool, Option("Also with compiled layers.")] = True
    has_masters: Annotated[
        bool, Option("Also fp32 weights, whose memory the planner predicts.", "--masters/--no-masters")
    ] = True
    steps_optimizer: Annotated[bool, Option("A step of fused AdamW too.", "--optimizer/--no-optimizer")] = False
    warm_up: WarmUp = 3
    repeats: Repeats = 10
    rounds: Rounds = 3
    on_cpu: Annotated[bool, Option("A tiny model on the CPU, to try the command.", "--cpu")] = False

    def __post_init__(self) -> None:
        require_known("peer", [self.peer], PEERS)

    def shape(self) -> dict[str, Any]:
        """The sizes of a layer, by the names of `TINY`."""
        if self.on_cpu:
            return TINY
        whole = {"hidden": 2048, "heads": 32, "kv_heads": 4, "head_dim": 128, "experts": 128, "k": 8, "width": 768}
        assert whole.keys() == TINY.keys()
        return whole


@dataclass(frozen=True)
class Row:
    """A run: its speed, relative to the peer's; memory; and how often it makes the host wait."""

    name: str = column("run")
    tokens_per_second_per_gpu: float = column("tokens/s", "{:,.0f}")
    step_milliseconds: float = column("step (ms)", "{:.1f}")
    speed: float | None = column("speed to the peer", "{:.3f}")
    peak_memory_gib: float | None = column("peak memory (GiB)", "{:.2f}")
    predicted_memory_gib: float | None = column("predicted by the planner (GiB)", "{:.2f}")
    memory_ratio: float | None = column("predicted to measured", "{:.3f}")
    host_waits: str | None = column("waits of the host in a step")
    loss: float = column("first loss", "{:.5f}")
    gradient_norm: float = column("gradient norm", "{:.4f}")


def compare_layers(setting: MoeLayersSetting) -> Measured:
    """Measure all runs. Raises ValueError where there is no GPU, or where the peer is not installed."""
    if not setting.on_cpu and not torch.cuda.is_available():
        raise ValueError("this bench takes a GPU, and torch finds none here: --cpu tries the command without one")
    if setting.peer == "transformers" and find_spec("transformers") is None:
        raise ValueError("--peer is 'transformers', which is not installed: --peer torch would do")
    if setting.on_cpu:
        setting = replace(setting, vocab=min(setting.vocab, 256), seq_len=min(setting.seq_len, 64))
    return Measured(run_ranks(1, measure_layers, setting), {"shape": setting.shape()})


def measure_layers(setting: MoeLayersSetting) -> list[dict[str, Any]]:
    """The job of the only rank: a row for each run, which are measured in turn."""
    grid = Grid(device="cpu" if setting.on_cpu else "cuda")
    make, peer = _choose_model(setting)
    runs: list[TrainingRun] = []
    for suffix in ("", ", compiled") if setting.compiled else ("",):
        for name, is_peer in ((peer, True), ("Stretto", False)):
            build = partial(_build, setting, grid, make, is_peer=is_peer, is_compiled=bool(suffix))
            runs.append(TrainingRun(f"{name}{suffix}", build, is_peer=is_peer, is_compiled=bool(suffix)))
    if setting.has_masters:
        runs.append(TrainingRun("Stretto, fp32 weights", partial(_build, setting, grid, make, has_masters=True)))
    rows = measure(runs, setting, grid.device, extra=partial(_count_host_waits, grid.device))
    speeds = {row["name"]: row["tokens_per_second_per_gpu"] for row in rows if "error" not in row}
    for row in rows:
        counterpart = row["name"].replace("Stretto", peer)
        if row["name"] in speeds and not row["is_peer"] and counterpart in speeds:
            row["speed"] = speeds[row["name"]] / speeds[counterpart]
        if row["name"].endswith("fp32 weights") and "error" not in row:
            row |= _predict_memory(setting, make, row["peak_memory_gib"])
    return rows


Make = Callable[[bool], nn.Module]
"""Makes the model on the default device, in the form for Stretto's run or for the peer's."""


def _choose_model(setting: MoeLayersSetting) -> tuple[Make, str]:
    """The function that makes the model, and the peer's name."""
    if setting.peer != "torch" and find_spec("transformers") is not None:
        return partial(_make_qwen, setting), "transformers, grouped_mm"
    return partial(_make_gpt, setting), "plain PyTorch, experts as transformers' grouped_mm"


def _make_qwen(setting: MoeLayersSetting, is_peer: bool) -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    shape = setting.shape()
    config = Qwen3MoeConfig(  # type: ignore[call-arg]  # arguments of every configuration are not in its signature
        vocab_size=setting.vocab,
        hidden_size=shape["hidden"],
        num_hidden_layers=setting.layers,
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv_heads"],
        head_dim=shape["head_dim"],
        num_experts=shape["experts"],
        num_experts_per_tok=shape["k"],
        moe_intermediate_size=shape["width"],
        norm_topk_prob=True,
        max_position_embeddings=max(setting.seq_len, 64),
        use_cache=False,
        architectures=["Qwen3MoeForCausalLM"],
        experts_implementation="grouped_mm",
        attn_implementation="sdpa",
    )
    return _Loss(Qwen3MoeForCausalLM(config)) if is_peer else Qwen3MoeForCausalLM(config)


class _Loss(nn.Module):
    """transformers' model, called as Stretto's are: the loss of tokens and the next ones."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=tokens, shift_labels=targets, labels=targets).loss
        return loss


class GroupedExperts(Experts):
    """Experts in plain PyTorch, computed as transformers' `grouped_mm` experts are."""

    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        tokens, k = top_k_index.shape
        experts, order = top_k_index.flatten().sort()
        bounds = torch.arange(self.num_experts, device=experts.device)
        offsets = torch.searchsorted(experts, bounds, right=True).to(torch.int32)
        product = nn.functional.grouped_mm if hasattr(nn.functional, "grouped_mm") else torch._grouped_mm
        inner: Tensor = product(hidden[order // k], self.gate_up_proj.mT, offs=offsets)
        gate, up = inner.chunk(2, dim=-1)
        rows: Tensor = product(self.act_fn(gate) * up, self.down_proj.mT, offs=offsets)
        weighted = rows * top_k_weights.flatten()[order, None].to(rows.dtype)
        return weighted[order.argsort()].view(tokens, k, -1).sum(1)


def _make_gpt(setting: MoeLayersSetting, is_peer: bool) -> nn.Module:
    shape = setting.shape()
    model = GPT(
        GPTConfig(
            setting.layers,
            shape["hidden"],
            shape["heads"],
            kv_heads=shape["kv_heads"],
            vocab=setting.vocab,
            max_seq_len=setting.seq_len,
            positions="rotary",
            activation="swiglu",
            norm="rmsnorm",
            bias=False,
            tie_embeddings=False,
            num_experts=shape["experts"],
            experts_per_token=shape["k"],
            expert_ffn=shape["width"],
            balance="none",
        )
    )
    if is_peer:
        for module in model.modules():
            if type(module) is Experts:
                module.__class__ = GroupedExperts
    return model


def _build(
    setting: MoeLayersSetting,
    grid: Grid,
    make: Make,
    *,
    is_peer: bool = False,
    is_compiled: bool = False,
    has_masters: bool = False,
) -> Step:
    """A run with the same weights and tokens as all. A CPU computes in fp32, whose products support any size."""
    is_gpu = grid.device.type == "cuda"
    torch.manual_seed(0)
    with grid.device:
        model = make(is_peer).to(torch.bfloat16 if is_gpu and not has_masters else torch.float32)
    if not is_peer:
        model = parallelize(model, grid, dtype=torch.bfloat16 if has_masters and is_gpu else None)
    called = model if is_peer or isinstance(model, GPT) else _Loss(model)
    if is_compiled:
        for name, module in model.named_modules():
            if name.rpartition(".")[0].endswith(("layers", "blocks")):
                module.compile()
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(setting.vocab, (setting.batch, setting.seq_len + 1), generator=generator).to(grid.device)
    tokens, targets = drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=is_gpu) if setting.steps_optimizer else None

    def step() -> Stepped:
        loss = called(tokens, targets)
        loss.backward()
        if is_peer:
            norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        else:
            norm = gradient_norm(model.parameters(), grid)
        if optimizer is not None:
            optimizer.step()
        model.zero_grad(set_to_none=True)
        return Stepped(loss.detach(), norm)

    return step


def _count_host_waits(device: torch.device, step: Step) -> dict[str, Any]:
    """Return how often a step makes the host wait for the GPU, by torch's synchronization warnings, and in which files'
    lines; None on a CPU."""
    if device.type != "cuda":
        return {"host_waits": None}
    step()  # so that nothing is set up in the step that counts
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    places = ["/".join(Path(each.filename).parts[-2:]) for each in caught if "synchroniz" in str(each.message)]
    places = [place for place in places if place != "cuda/__init__.py"]  # where torch itself warns of the mode
    return {"host_waits": ", ".join([str(len(places)), *sorted(set(places))])}


def _predict_memory(setting: MoeLayersSetting, make: Make, measured: float | None) -> dict[str, Any]:
    """The planner's peak memory of a step with fp32 weights, and the measured one (None on a CPU)."""
    with torch.device("meta"):
        model = make(False)
    plan = predict(
        model,
        Cluster.find("dgx-h100"),
        grid={},
        batch=setting.batch,
        seq_len=setting.seq_len,
        dtype="bf16",
        optimizer="adamw" if setting.steps_optimizer else "sgd",
        reshard="after_backward",
    )
    predicted = plan.peak_memory / 2**30
    return {"predicted_memory_gib": predicted, "memory_ratio": predicted / measured if measured else None}


BENCH = Bench(
    "moe-layers",
    "Layers of Qwen3-30B-A3B on one GPU, compared with transformers: tokens/s, memory, host synchronizations.",
    MoeLayersSetting,
    compare_layers,
    Row,
    title=lambda setting: f"{setting.layers} layers of Qwen3-30B-A3B",
    needs=Needs.ONE_GPU,
)
