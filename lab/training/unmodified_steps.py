# SPDX-License-Identifier: Apache-2.0
"""Steps of `python -m lab transformers`: one model by FSDP2, DTensor tensor parallelism, plain PyTorch and Stretto."""

import itertools
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from lab.experts.peers import CutExperts, exchange_model
from lab.experts.routing import route
from lab.peers import MasterWeights
from lab.training import context_peer
from lab.training.families import TRANSFORMERS, make_transformer
from lab.training.muon_peers import ShardedMuon, orthogonalize_exchanged, orthogonalize_gathered
from stretto.axes import OUTER_TO_INNER
from stretto.bench.training.fsdp2 import clip_sharded_grad_norm_
from stretto.bench.training.runs import MAX_NORM, Step, Stepped
from stretto.huggingface.known_modules import cache_of_nothing, keeps_keys_and_values
from stretto.ops import free_workspaces
from stretto.optim import AdamW, Muon, hidden_matrices
from stretto.parallel import Grid, balance_experts, clip_scale, gradient_norm, no_sync, parallelize

LEARNING_RATE = 1e-5
PLACEMENTS: tuple[Placement, Placement] = Shard(1), Replicate()  # of activations between and within layers
OptimizerOfWay = Literal["adamw", "hidden muon", "exposed muon", "gathered muon", "exchanged muon"]
_PEERS_OF_MUON = {"gathered muon": orthogonalize_gathered, "exchanged muon": orthogonalize_exchanged}
MASKED = -100  # of a label: it does not count in the loss


@dataclass(frozen=True)
class TransformerWorkload:
    """A model with its global batch, and how its steps are timed. is_small: tiny sizes, computed in fp32.

    routing: of `lab.experts`, of a model that has experts. micro_batches: of a rank's part of the batch.
    """

    name: str
    layers: int
    batch: int
    seq_len: int
    is_small: bool
    warm_up: int
    repeats: int
    rounds: int
    routing: str | None = None
    micro_batches: int = 1

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.is_small else torch.bfloat16

    def make(self) -> nn.Module:
        """Make the model on the default device, with the same fp32 weights on every rank."""
        torch.manual_seed(0)
        model = make_transformer(self.name, self.layers, is_small=self.is_small)
        if self.routing is not None:
            route(model, self.routing)
        return model

    def tokens(self, part: int, parts: int, device: torch.device) -> Tensor:
        """One part of a fixed random batch. Raises ValueError if `parts`, or micro-batches, do not divide it."""
        if self.batch % (parts * self.micro_batches):
            raise ValueError(f"a batch of {self.batch} cannot be cut into {parts * self.micro_batches} parts")
        vocab = TRANSFORMERS[self.name].config(1, is_small=self.is_small).vocab_size
        whole = torch.randint(vocab, (self.batch, self.seq_len), generator=torch.Generator().manual_seed(0))
        return whole.chunk(parts)[part].to(device)


@dataclass(frozen=True)
class Way:
    """A way to train the model, by torch or Stretto. compiles: what torch.compile takes.

    Torch's: tensor is the ranks of DTensor's tensor parallelism; FSDP2 is over the others, and casts (`precision`);
    autocast, with DDP over several, and bf16 weights with fp32 masters, are of runs without it. frees_weights,
    is_symmetric: FSDP2's. options: of both, "reduce_dtype" in place of fp32.
    is_async: async-TP. exchanges: experts divided among all ranks, with NCCL's all-to-all. Stretto's: grid, options of
    `parallelize`; by_blocks: without roles. optimizer: of Muon, whether its exchange is hidden, or exposed; torch's
    gathers matrices in turn, or exchanges them by groups. clips: gradients are clipped, and not only measured. rotates:
    torch's context parallelism over all ranks, by this method. routing: in place of the workload's. replicas: of hot
    experts, on each rank, by the loads of the step before.
    """

    kind: Literal["torch", "stretto"]
    compiles: Literal["", "layers", "layers and loss", "model"] = "layers"
    precision: Literal["fsdp2", "autocast", "masters"] = "fsdp2"
    tensor: int = 1
    frees_weights: bool = False
    is_async: bool = False
    is_symmetric: bool = False
    exchanges: bool = False
    by_blocks: bool = False
    optimizer: OptimizerOfWay = "adamw"
    clips: bool = True
    rotates: Literal["", "allgather", "alltoall"] = ""
    routing: str | None = None
    replicas: int = 0
    grid: Mapping[str, int] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_peer(self) -> bool:
        """True of torch's, and of the balanced run beside skewed ones."""
        return self.kind == "torch" or self.routing == "uniform"


class Groups:
    """Grids and meshes of a job, which its runs share: NCCL's communicators live until their process ends."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._grids: dict[tuple[tuple[str, Any], ...], Grid] = {}
        self._meshes: dict[tuple[int, int], DeviceMesh] = {}

    def grid(self, sizes: Mapping[str, Any]) -> Grid:
        key = tuple(sizes.items())
        if key not in self._grids:
            self._grids[key] = Grid(**sizes, device=self.device)
        return self._grids[key]

    def mesh(self, dp: int, tp: int) -> DeviceMesh:
        """The mesh of dims "dp" and "tp" of these sizes."""
        if (dp, tp) not in self._meshes:
            self._meshes[dp, tp] = init_device_mesh(self.device.type, (dp, tp), mesh_dim_names=("dp", "tp"))
        return self._meshes[dp, tp]

    def free_workspaces(self) -> None:
        """Free what operators of earlier runs have kept for their next calls."""
        for grid, axis in itertools.product(self._grids.values(), OUTER_TO_INNER):
            if grid.size(axis) > 1:
                free_workspaces(grid.group(axis))


def build_step(workload: TransformerWorkload, way: Way, groups: Groups) -> Step:
    """Build a step of this way. Raises ValueError where it cannot train the model or cut the batch."""
    groups.free_workspaces()
    workload = workload if way.routing is None else replace(workload, routing=way.routing)
    return (_build_stretto if way.kind == "stretto" else _build_torch)(workload, way, groups)


def _build_stretto(workload: TransformerWorkload, way: Way, groups: Groups) -> Step:
    grid = groups.grid(way.grid)
    tokens = workload.tokens(grid.coordinate("batch"), grid.size("batch"), grid.device)
    with grid.device:
        model = workload.make()
    blocks = _find_blocks(model)
    options = {"dtype": workload.dtype, "reduce_dtype": torch.float32, **way.options}
    model = parallelize(model, grid, blocks=blocks if way.by_blocks else None, **options)
    _compile(model, blocks, way)
    optimizer: AdamW
    if way.optimizer == "adamw":
        optimizer = AdamW(model.parameters(), lr=LEARNING_RATE, writes_copies=True)
    else:
        matrices = hidden_matrices(model)
        groups_of_muon: list[dict[str, Any]] = [
            {"params": list(matrices.values()), "use_muon": True},
            {"params": [parameter for name, parameter in model.named_parameters() if name not in matrices]},
        ]
        optimizer = Muon(groups_of_muon, lr=LEARNING_RATE, grid=grid)
        if way.optimizer == "hidden muon":
            optimizer.overlap_with(model)

    def step() -> Stepped:
        total = torch.zeros((), device=tokens.device)
        for rest, rows in zip(range(workload.micro_batches)[::-1], tokens.chunk(workload.micro_batches), strict=True):
            with no_sync(model) if rest else nullcontext():
                loss = model(input_ids=rows, labels=rows).loss / workload.micro_batches
                loss.backward()
            total += loss.detach()
        norm = gradient_norm(model.parameters(), grid)
        optimizer.step(scale=clip_scale(norm, MAX_NORM) if way.clips else None)
        optimizer.zero_grad()
        return Stepped(total, norm)

    return BalancedStep(step, model, tokens, way.replicas) if way.replicas else step


class BalancedStep:
    """A step whose hot experts have replicas, by the loads of the step before."""

    def __init__(self, step: Step, model: nn.Module, tokens: Tensor, replicas: int) -> None:
        self._step, self._model, self._tokens, self._replicas = step, model, tokens, replicas
        self._busiest: Mapping[str, float] = {}

    def __call__(self) -> Stepped:
        stepped = self._step()
        self._busiest = balance_experts(self._model, self._replicas)
        return stepped

    @torch.no_grad()
    def compare(self) -> dict[str, Any]:
        """The busiest rank's load over the mean, of any layer; and whether the loss of the batch has the bits of the
        one without replicas, on every rank."""
        found = self._model(input_ids=self._tokens, labels=self._tokens).loss
        balance_experts(self._model, 0)
        right = self._model(input_ids=self._tokens, labels=self._tokens).loss
        is_same = torch.eq(found, right).int()
        dist.all_reduce(is_same, op=dist.ReduceOp.MIN)
        return {"balanced_load": max(self._busiest.values()), "same_bits": "yes" if is_same.item() else "no"}


def compare_replicas(step: Step) -> dict[str, Any]:
    """The columns of a run that are of replicas only."""
    return step.compare() if isinstance(step, BalancedStep) else {}


def _build_torch(workload: TransformerWorkload, way: Way, groups: Groups) -> Step:
    mesh, tensors = groups.mesh(dist.get_world_size() // way.tensor, way.tensor), way.tensor > 1
    parts = (0, 1) if way.rotates else (mesh["dp"].get_local_rank(), mesh["dp"].size())
    tokens = workload.tokens(*parts, groups.device)
    with groups.device:
        model = workload.make()
    if way.rotates:
        context_peer.prepare(model)
    if way.precision == "masters":
        model.to(workload.dtype)
    blocks = _find_blocks(model)
    if tensors:
        _shard_tensors(model, blocks, mesh["tp"])
    exchanged = exchange_model(model, mesh["dp"]) if way.exchanges else set()
    if way.is_async:
        from torch.distributed._symmetric_memory import enable_symm_mem_for_group

        enable_symm_mem_for_group(mesh["tp"].get_group().group_name)
    prepare = _convert_to_fp8(model, blocks, way, mesh["dp"].size()) if "fp8" in way.options else None
    _compile(model, blocks, way)
    if way.precision == "fsdp2":
        _shard_fully(model, blocks, workload, mesh["dp"], way, exchanged)
    parameters = list(model.parameters())
    is_sharded = isinstance(parameters[0], DTensor)
    optimizer: Any = (
        MasterWeights(model, LEARNING_RATE)
        if way.precision == "masters"
        else ShardedMuon(model, LEARNING_RATE, mesh["dp"].get_group(), _PEERS_OF_MUON[way.optimizer])
        if way.optimizer in _PEERS_OF_MUON
        else torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True, capturable=tokens.is_cuda)
    )
    cast = partial(torch.autocast, tokens.device.type, torch.bfloat16, enabled=way.precision == "autocast")
    # As Stretto's runs: with its own cache, torch.compile stops at the eighth layer; without one, the host waits.
    cache = {"use_cache": False, "past_key_values": cache_of_nothing()} if keeps_keys_and_values(model) else {}
    if way.precision == "autocast" and mesh["dp"].size() > 1:
        model = DistributedDataParallel(model)

    def measure_loss(rows: Tensor) -> Tensor:
        if not tensors:
            return model(input_ids=rows, labels=rows, **cache).loss
        logits = model(input_ids=rows, **cache).logits  # the vocabulary stays sharded
        targets = nn.functional.pad(rows[:, 1:], (0, 1), value=MASKED)
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=MASKED)

    def step() -> Stepped:
        total = torch.zeros((), device=tokens.device)
        for rows in tokens.chunk(workload.micro_batches):
            if way.rotates:
                with context_peer.cut_batch(rows, MASKED, mesh["dp"], way.rotates) as arguments:
                    loss = model(**arguments, **cache).loss / workload.micro_batches
                    loss.backward()
                total += loss.detach()
                continue
            with loss_parallel() if tensors else nullcontext():
                with cast():
                    loss = measure_loss(rows) / workload.micro_batches
                loss.backward()
            loss = loss.detach()
            total += loss.full_tensor() if isinstance(loss, DTensor) else loss
        if is_sharded:
            norm = clip_sharded_grad_norm_(model, MAX_NORM)
        else:
            norm = nn.utils.clip_grad_norm_(parameters, MAX_NORM, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        if prepare is not None:
            prepare(model)
        return Stepped(total, norm)

    return step


def _convert_to_fp8(model: nn.Module, blocks: list[str], way: Way, ranks: int) -> Callable[[nn.Module], None] | None:
    """Convert all blocks but the first and the last by torchao, as torchtitan does; returns what is to follow a step.

    Tensorwise, weights are gathered in fp8, by scales that one all-reduce makes after the optimizer's step.
    """
    try:
        from torchao import float8
    except ImportError as error:  # the other runs are measured
        raise ValueError(f"torchao cannot be imported: {error}") from error
    recipe, inner = way.options["fp8"], tuple(f"{block}." for block in blocks[1:-1])
    gathers = recipe == "tensorwise" and way.precision == "fsdp2" and ranks > 1
    config = replace(float8.Float8LinearConfig.from_recipe_name(recipe), enable_fsdp_float8_all_gather=gathers)
    float8.convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name.startswith(inner))
    return float8.precompute_float8_dynamic_scale_for_fsdp if gathers else None


def _compile(model: Any, blocks: list[str], way: Way) -> None:
    if way.compiles == "model":
        model.compile()
    elif way.compiles:
        for name in blocks:
            model.get_submodule(name).compile(options={"_micro_pipeline_tp": True} if way.is_async else None)
    if way.compiles == "layers and loss":
        model.loss_function = torch.compile(model.loss_function)


def _shard_fully(
    model: nn.Module, blocks: list[str], workload: TransformerWorkload, mesh: Any, way: Way, ignored: set[nn.Parameter]
) -> None:
    reduced = way.options.get("reduce_dtype", torch.float32)  # None: in the dtype of gradients
    policy = MixedPrecisionPolicy(param_dtype=workload.dtype, reduce_dtype=reduced)
    shard: Callable[..., Any] = partial(fully_shard, mesh=mesh, mp_policy=policy, ignored_params=ignored)
    for name in blocks:
        shard(model.get_submodule(name), reshard_after_forward=way.frees_weights)
    embedding, norm, head = _find_ends(model)
    if embedding.weight is not head.weight:  # a shared weight has to belong to the root module
        shard(embedding, reshard_after_forward=way.frees_weights)
        shard([norm, head], reshard_after_forward=False)
    shard(model, reshard_after_forward=False)
    if way.is_symmetric:
        if not hasattr(FSDPModule, "set_symm_mem_for_comm"):
            raise ValueError(f"torch {torch.__version__} has no set_symm_mem_for_comm; 2.13 has")
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_symm_mem_for_comm()


def _find_blocks(model: Any) -> list[str]:
    name = "h" if hasattr(model.base_model, "h") else "layers"
    return [f"{model.base_model_prefix}.{name}.{index}" for index in range(model.config.num_hidden_layers)]


def _find_ends(model: Any) -> tuple[Any, Any, Any]:
    """The embedding, the last norm and the head."""
    base = model.base_model
    return model.get_input_embeddings(), base.ln_f if hasattr(base, "ln_f") else base.norm, model.lm_head


_LLAMA_BLOCK = {
    "input_layernorm": "norm",
    "self_attn": "gather hidden_states",
    **dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "columns"),
    "self_attn.o_proj": "rows",
    "post_attention_layernorm": "norm",
    "mlp": "gather",
    **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), "columns"),
    "mlp.down_proj": "rows",
}
_GPT2_BLOCK = {
    "ln_1": "norm",
    "attn": "gather",
    "attn.c_attn": "columns",
    "attn.c_proj": "rows",
    "ln_2": "norm",
    "mlp": "gather",
    "mlp.c_fc": "columns",
    "mlp.c_proj": "rows",
}
_ATTENTION = {part: style for part, style in _LLAMA_BLOCK.items() if not part.startswith("mlp")}
_MIXTRAL_BLOCK = {**_ATTENTION, "mlp": "own", "mlp.gate": "router"}
_QWEN2_MOE_BLOCK = {
    **_MIXTRAL_BLOCK,
    "mlp.shared_expert": "gather tokens",
    **dict.fromkeys(("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"), "columns"),
    "mlp.shared_expert.down_proj": "rows of tokens",
    "mlp.shared_expert_gate": "own tokens",
}
_PLANS = {
    "llama": _LLAMA_BLOCK,
    "gemma": _LLAMA_BLOCK,
    "gpt2": _GPT2_BLOCK,
    "mixtral": _MIXTRAL_BLOCK,
    "qwen2_moe": _QWEN2_MOE_BLOCK,
}


def _shard_tensors(model: Any, blocks: list[str], mesh: Any) -> None:
    """Shard a model over the ranks of `mesh` as torchtitan does: sequences between blocks, vocabulary in both ends.

    Raises ValueError for a family without a plan, and for sizes that the ranks cannot cut.
    """
    config, ranks = model.config, mesh.size()
    if (plan := _PLANS.get(config.model_type)) is None:
        raise ValueError(f"the tensor-parallel peer has plans for {', '.join(_PLANS)}, not {config.model_type!r}")
    for size in (config.num_attention_heads, getattr(config, "num_key_value_heads", ranks), config.vocab_size):
        if size % ranks:
            raise ValueError(f"{size} heads or rows of the vocabulary cannot be cut into {ranks} parts")
    given, wanted = ({"hidden_states": placement} for placement in PLACEMENTS)
    styles: dict[str, Callable[[], Any]] = {
        "norm": SequenceParallel,
        "gather": partial(PrepareModuleInput, input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "gather hidden_states": partial(
            PrepareModuleInput, input_kwarg_layouts=given, desired_input_kwarg_layouts=wanted
        ),
        "columns": ColwiseParallel,
        "rows": partial(RowwiseParallel, output_layouts=Shard(1)),
        # Mixtures of experts: each rank routes its own tokens, which experts gather themselves (`CutExperts`).
        "own": partial(
            PrepareModuleInput, input_layouts=(Shard(1),), desired_input_layouts=(Shard(1),), use_local_output=True
        ),
        "router": partial(SequenceParallel, sequence_dim=0),
        "own tokens": partial(SequenceParallel, sequence_dim=0, use_local_output=True),
        "gather tokens": partial(PrepareModuleInput, input_layouts=(Shard(0),), desired_input_layouts=(Replicate(),)),
        "rows of tokens": partial(RowwiseParallel, output_layouts=Shard(0)),
    }
    if config.model_type == "gpt2":
        _prepare_gpt2(model, ranks)
    embedding, norm, head = _find_ends(model)
    is_tied = embedding.weight is head.weight
    # Outputs stay DTensors where the model reads a sequence's length from them. src_data_rank=None: each rank takes its
    # shard of its own copy, for all hold the same weights.
    place = partial(parallelize_module, device_mesh=mesh, src_data_rank=None)
    rows: dict[str, Any] = {"input_layouts": Replicate(), "output_layouts": Shard(1), "use_local_output": False}
    for each in (embedding, model.base_model.wpe) if config.model_type == "gpt2" else (embedding,):
        place(each, parallelize_plan=RowwiseParallel(**rows))
    place(norm, parallelize_plan=SequenceParallel())
    columns: dict[str, Any] = {"input_layouts": Shard(1), "output_layouts": Shard(-1), "use_local_output": False}
    place(head, parallelize_plan=ColwiseParallel(**columns))
    if is_tied:
        head.weight = embedding.weight
    for name in blocks:
        place(model.get_submodule(name), parallelize_plan={part: styles[style]() for part, style in plan.items()})
        if "mlp.gate" in plan:
            model.set_submodule(f"{name}.mlp.experts", CutExperts(model.get_submodule(f"{name}.mlp.experts"), mesh))
    # The copy makes a plain tensor of an AsyncCollectiveTensor, whose gradient a compiled block would lose.
    embedding.register_forward_hook(lambda _, inputs, output: output.clone())
    first = model.get_submodule(blocks[0])
    first.register_forward_pre_hook(lambda _, inputs: (inputs[0].to_local(), *inputs[1:]))


def _prepare_gpt2(model: Any, ranks: int) -> None:
    """Make linears of GPT-2's Conv1D, which torch's styles do not take; a rank's rows of c_attn are its own heads'."""
    model.transformer.drop = nn.Identity()
    for block in model.transformer.h:
        for owner in (block.attn, block.mlp):
            for name, old in list(owner.named_children()):
                if type(old).__name__ != "Conv1D":
                    continue
                weight, bias = old.weight.detach().t(), old.bias.detach()
                if name == "c_attn":
                    weight, bias = (
                        each.unflatten(0, (3, ranks, -1)).transpose(0, 1).flatten(0, 2) for each in (weight, bias)
                    )
                new = nn.Linear(old.weight.shape[0], old.weight.shape[1], device="meta")
                new.weight, new.bias = nn.Parameter(weight.contiguous()), nn.Parameter(bias.contiguous())
                setattr(owner, name, new)
        block.attn.split_size //= ranks
