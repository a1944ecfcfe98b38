# SPDX-License-Identifier: Apache-2.0
"""`python -m lab transformers`: unmodified transformers models trained by Stretto and by the best public ways of torch.

All runs train one model from the same weights on the same tokens, in bf16 with fp32 weights and fp32 reduction, and
with gradients clipped at norm 1. Torch's are FSDP2 (fused AdamW, one collective for the norm), tensor parallelism by
DTensor with sharded sequences and with async-TP (TileLink's figure 11), both together, and on one GPU plain PyTorch.
With `--context`, for long sequences (`--seq-len 65536`), they are FSDP2 with torch's context parallelism.
Attention and experts are transformers' fastest; experts are also divided among the ranks by NCCL's all-to-all, and
some get more tokens than the others with `--routing skewed` (`lab/experts/routing.py`). `--replicas` compares balanced
experts with skewed ones, and with replicas of those. With `--cluster` Stretto's runs are only predicted, for a file
that is committed before anything is measured. Rows are written as they come, in the order of rounds over all runs.
"""

import itertools
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch

from lab.experts import ROUTINGS
from lab.experts.routing import draw_routing
from lab.harness import ANY_CPU, Bench, Measured, column, keep_rows
from lab.training.families import TRANSFORMERS
from lab.training.unmodified_steps import Groups, TransformerWorkload, Way, build_step, compare_replicas
from stretto.axes import check_sizes
from stretto.bench.harness import run_ranks
from stretto.bench.settings import Layers, Needs, Option, Ranks, Repeats, Rounds, WarmUp, require_known
from stretto.bench.training.runs import TrainingRun, measure
from stretto.cluster import Cluster
from stretto.ops.moe import place_replicas
from stretto.parallel import Grid
from stretto.planner import plan, predict
from stretto.planner.grids import divisors

GIB = 1 << 30
TIME_LIMIT = 180.0  # seconds after which NCCL aborts ranks that wait for a failed one
_SHARDED = {"shard_sequence": True}
# Gradients are sent as they are made, in bf16: NCCL adds in bf16, the kernel beside Stretto's copy engines in fp32.
_NARROW: Mapping[str, Any] = {"reduce_dtype": None}
PLANNED = 3  # of the grids that `plan` ranks


@dataclass(frozen=True)
class TransformersSetting:
    """Settings of `python -m lab transformers`. Raises ValueError for an unknown model."""

    models: Annotated[
        tuple[str, ...], Option("Names of lab/training/families.py: llama-3.75b, qwen3-8b, gpt2-xl, and others.")
    ] = ("llama-3.75b",)
    ranks: Ranks = None
    layers: Layers = None
    batch: Annotated[
        int | None, Option("Sequences of a step (default: 8192 tokens a rank and micro-batch).", least=1)
    ] = None
    micro_batches: Annotated[int, Option("Micro-batches of a rank's part of the batch.", least=1)] = 1
    seq_len: Annotated[int | None, Option("Tokens a sequence (default: the model's).", least=1)] = None
    only: Annotated[
        tuple[str, ...], Option("Only the run of this name, or runs with this in their name.", is_repeated=True)
    ] = ()
    routing: Annotated[tuple[str, ...], Option(f"Of tokens to experts: {', '.join(ROUTINGS)}, with commas.")] = (
        ROUTINGS[:1]
    )
    context: Annotated[
        bool, Option("Only runs that cut sequences among ranks, and one that cuts activations by x.")
    ] = False
    replicas: Annotated[
        bool, Option("Only experts divided among all ranks: balanced, skewed, and with replicas of hot ones.")
    ] = False
    small: Annotated[bool, Option("Tiny sizes of the same models in fp32, for a try without a GPU.")] = False
    cluster: Annotated[str | None, Option("Only predict, for this cluster: a file or a preset's name.")] = None
    warm_up: WarmUp = 6  # the first steps of a layout with many exchanges are up to a sixth slower
    repeats: Repeats = 5
    rounds: Rounds = 2

    def __post_init__(self) -> None:
        require_known("model", self.models, TRANSFORMERS)
        require_known("routing", self.routing, ROUTINGS)
        for model in self.models:
            if (self.replicas or self.routing != ("uniform",)) and not has_experts(model):
                raise ValueError(f"{model} has no experts to be routed to; --models qwen3-30b-a3b would do")


@dataclass(frozen=True)
class Row:
    """A run: its step beside the first peer's and the prediction, memory, and losses."""

    name: str = column("run")
    step_milliseconds: float | None = column("step (ms)", "{:.1f}")
    speed: float | None = column("speed to the first peer", "{:.3f}")
    predicted_milliseconds: float | None = column("predicted (ms)", "{:.0f}")
    peak_memory_gib: float | None = column("peak memory (GiB)", "{:.1f}")
    predicted_gib: float | None = column("predicted (GiB)", "{:.1f}")
    tokens_per_second_per_gpu: float | None = column("tokens/s/GPU", "{:,.0f}")
    loss: float | None = column("first loss", "{:.4f}")
    gradient_norm: float | None = column("gradient norm", "{:.3f}")
    last_loss: float | None = column("last loss", "{:.4f}")
    balanced_load: float | None = column("busiest rank / mean", "{:.3f}")
    same_bits: str | None = column("loss has the bits of one without replicas")
    reason: str | None = column("why not")


def run_transformers(setting: TransformersSetting, out: Path) -> Iterator[Measured]:
    """Predict each model's runs, or measure them, a model in a job of its own."""
    ranks = setting.ranks
    assert ranks is not None
    for model, routing in itertools.product(setting.models, setting.routing):
        workload = _make_workload(model, setting, routing)
        ways = list_ways(ranks, has_experts=has_experts(model))
        ways = list_context_ways(ranks) if setting.context else list_replica_ways(ranks) if setting.replicas else ways
        chosen = {name: way for name, way in ways.items() if _is_chosen(name, setting.only, ways)}
        if not chosen:
            raise ValueError(f"no run has {' or '.join(map(repr, setting.only))} in its name")
        name = f"{model}-batch-{workload.batch}-ranks-{ranks}" + ("-small" if setting.small else "")
        name += "" if setting.micro_batches == 1 else f"-micro-batches-{setting.micro_batches}"
        name += "" if setting.seq_len is None else f"-seq-{setting.seq_len}"
        name += f"-{routing}" * (routing != "uniform") + "-replicas" * setting.replicas
        about = {"model": model, "ranks": ranks, "workload": asdict(workload)}
        predictions = f"predictions-{name}"
        if setting.cluster is not None:
            cluster = Cluster.find(setting.cluster)
            about |= {"machine": ANY_CPU, "cluster": setting.cluster}
            lines: tuple[str, ...] = ()
            if not (setting.context or setting.replicas) and (found := _plan(workload, cluster, ranks)):
                chosen = found | chosen
                about["planned"] = [
                    {"name": picked, "grid": way.grid, "options": way.options} for picked, way in found.items()
                ]
                lines = (f"Of all grids, `plan` picks {'; '.join(name.removesuffix(', compiled') for name in found)}.",)
            rows = _predict(workload, chosen, cluster)
            yield Measured(rows, about, lines, name=predictions, title=_title(workload, ranks))
            continue
        predicted, planned = _read_predictions(out / f"{predictions}.json", workload)
        names = {**ways, **dict.fromkeys(each["name"] for each in planned)}
        for each in planned:
            if _is_chosen(each["name"], setting.only, names):
                chosen.setdefault(each["name"], Way("stretto", grid=each["grid"], options=each["options"]))
        keep = partial(_keep, out, name, about, predicted)
        measured = run_ranks(ranks, measure_model, workload, chosen, ranks, keep)
        rows = _compare(measured, predicted)
        yield Measured(rows, about, _judge(rows), name=name, title=_title(workload, ranks))


def has_experts(model: str) -> bool:
    return TRANSFORMERS[model].experts is not None


def _make_workload(model: str, setting: TransformersSetting, routing: str = "uniform") -> TransformerWorkload:
    known = TRANSFORMERS[model]
    seq_len = setting.seq_len or (32 if setting.small else known.seq_len)
    batch = 1 if setting.context else (setting.ranks or 1)
    batch = setting.batch or batch * (2 if setting.small else max(1, 8192 // seq_len))
    batch *= 1 if setting.batch else setting.micro_batches
    layers = setting.layers or (2 if setting.small else known.layers)
    times = setting.warm_up, setting.repeats, setting.rounds
    of_experts = routing if has_experts(model) else None
    return TransformerWorkload(model, layers, batch, seq_len, setting.small, *times, of_experts, setting.micro_batches)


def _is_chosen(name: str, only: Sequence[str], names: Collection[str]) -> bool:
    return not only or any(name == part or (part not in names and part in name) for part in only)


def _title(workload: TransformerWorkload, ranks: int) -> str:
    name = workload.name + (f", {workload.routing}" if workload.routing else "")
    return f"{name}, {workload.layers} layers, {workload.batch} x {workload.seq_len} tokens, {ranks} ranks"


def list_ways(ranks: int, *, has_experts: bool) -> dict[str, Way]:
    """The runs by name, peers first."""
    ways = {
        "FSDP2, compiled": Way("torch"),
        "FSDP2, compiled, loss too": Way("torch", "layers and loss"),
        "FSDP2, eager": Way("torch", ""),
    }
    grids: list[dict[str, int]] = [{"z": ranks}]
    if ranks > 1:
        ways["FSDP2, compiled, resharded"] = Way("torch", frees_weights=True)
        ways["FSDP2, compiled, symmetric memory"] = Way("torch", is_symmetric=True)
        ways["FSDP2, gradients in the compute dtype, compiled"] = Way("torch", options=_NARROW)
        for tensor, is_async in itertools.product(divisors(ranks)[1:], (False, True)):
            name = (f"FSDP2={ranks // tensor} " if tensor < ranks else "") + f"TP={tensor}, sequence sharded"
            name += ", async" if is_async else ""
            ways[f"{name}, compiled"] = Way("torch", tensor=tensor, is_async=is_async)
            if has_experts and not is_async:  # Inductor cannot compile its experts (torch 2.11)
                ways[f"{name}, eager"] = Way("torch", "", tensor=tensor)
            if tensor == ranks:
                masters = Way("torch", precision="masters", tensor=tensor, is_async=is_async)
                ways[f"{name}, bf16 weights, compiled"] = masters
    else:
        precisions: dict[str, Literal["autocast", "masters"]] = {"autocast": "autocast", "bf16 weights": "masters"}
        for text, precision in precisions.items():
            ways[f"PyTorch, {text}, layers compiled"] = Way("torch", precision=precision)
            ways[f"PyTorch, {text}, model compiled"] = Way("torch", "model", precision)
            ways[f"PyTorch, {text}"] = Way("torch", "", precision)
    if has_experts and ranks > 1:
        grids += [{"z": ranks, "expert": ranks}, {"data": ranks, "expert": ranks}]
        if ranks > 2 and ranks % 2 == 0:
            grids.append({"data": 2, "z": ranks // 2, "expert": ranks})
        ways["FSDP2, experts by NCCL's all-to-all, compiled"] = Way("torch", exchanges=True)
        ways["FSDP2, experts by NCCL's all-to-all"] = Way("torch", "", exchanges=True)
    for grid in grids:
        ways[f"{_name(grid)}, compiled"] = Way("stretto", grid=grid)
        ways[_name(grid)] = Way("stretto", "", grid=grid)
    halves = [{"x": 2, "z": ranks // 2}] if ranks > 2 and ranks % 2 == 0 else []
    for recipe in ("tensorwise", "rowwise"):
        ways[f"FSDP2, torchao's fp8 {recipe}, compiled"] = Way("torch", options={"fp8": recipe})
        for grid in (grids[0], *halves):
            ways[f"{_name(grid)}, fp8 {recipe}, compiled"] = Way("stretto", grid=grid, options={"fp8": recipe})
    if ranks > 1:
        name = f"Stretto z={ranks}"
        ways["FSDP2, Muon on gathered matrices, compiled"] = Way("torch", optimizer="gathered muon")
        ways["FSDP2, Muon by all-to-all, compiled"] = Way("torch", optimizer="exchanged muon")
        for text, clips in (("Muon", True), ("Muon, not clipped", False)):
            ways[f"{name}, {text}, compiled"] = Way("stretto", grid=grids[0], optimizer="hidden muon", clips=clips)
        ways[f"{name}, Muon exposed, compiled"] = Way("stretto", grid=grids[0], optimizer="exposed muon")
        ways[f"{name}, gradients in the compute dtype, compiled"] = Way("stretto", grid=grids[0], options=_NARROW)
        ways[f"{name}, compiled, resharded"] = Way("stretto", grid=grids[0], options={"reshard": "after_forward"})
        ways[f"{name} by blocks, compiled"] = Way("stretto", grid=grids[0], by_blocks=True)
        ways[f"{name} by blocks"] = Way("stretto", "", grid=grids[0], by_blocks=True)
        for grid in (*halves, {"x": ranks}):
            ways[f"{_name(grid)}, compiled"] = Way("stretto", grid=grid)
            ways[f"{_name(grid)}, sequence sharded, compiled"] = Way("stretto", grid=grid, options=_SHARDED)
    return ways


def list_context_ways(ranks: int) -> dict[str, Way]:
    """The runs of `--context` by name, peers first; the last one cuts no sequences."""
    ways: dict[str, Way] = {}
    methods: dict[str, Literal["allgather", "alltoall"]] = {"gathering": "allgather", "ring": "alltoall"}
    for text, method in methods.items():
        name = f"FSDP2, torch's context parallelism, {text}"
        ways |= {f"{name}, compiled": Way("torch", rotates=method), name: Way("torch", "", rotates=method)}
    grids: list[dict[str, Any]] = [{"context": ranks, "context_weights": "shard"}, {"context": ranks}]
    grids += [{"context": 2, "x": ranks // 2}] * (ranks > 2 and ranks % 2 == 0)
    for grid in grids:
        options = _SHARDED if "x" in grid else {}
        ways |= {f"{_name(grid)}, compiled": Way("stretto", grid=grid, options=options)}
        ways |= {_name(grid): Way("stretto", "", grid=grid, options=options)}
    ways[f"Stretto x={ranks}, sequence sharded, compiled"] = Way("stretto", grid={"x": ranks}, options=_SHARDED)
    return ways


def list_replica_ways(ranks: int) -> dict[str, Way]:
    """The runs of `--replicas` by name, the balanced one first."""
    grid = {"z": ranks, "expert": ranks}
    ways = {f"{_name(grid)}, uniform, compiled": Way("stretto", grid=grid, routing="uniform")}
    for routing, replicas in itertools.product(("1.5x", "recorded"), (0, 1, 4)):
        name = f"{_name(grid)}, {routing}" + (f", {replicas} replicas" if replicas else "")
        way = Way("stretto", grid=grid, routing=routing, replicas=replicas)
        ways[f"{name}, compiled"] = way
        if replicas == 1:
            ways[f"{name}, sums by choices, compiled"] = replace(way, options={"expert_reduce": "choice"})
    return ways


def _name(grid: Mapping[str, int]) -> str:
    return "Stretto " + " ".join(f"{axis}={size}" for axis, size in grid.items())


def measure_model(
    workload: TransformerWorkload, ways: Mapping[str, Way], ranks: int, keep: Any
) -> list[dict[str, Any]]:
    device = Grid(data=ranks, timeout=TIME_LIMIT).device  # joins the job
    groups = Groups(device)
    runs: list[TrainingRun] = []
    for name, way in ways.items():
        build = partial(build_step, workload, way, groups)
        runs.append(TrainingRun(name, build, is_peer=way.is_peer, is_compiled=bool(way.compiles)))
    return measure(runs, workload, device, extra=compare_replicas, keep=keep)


def _keep(
    out: Path, name: str, about: Mapping[str, Any], predicted: Mapping[str, Any], rows: list[dict[str, Any]]
) -> None:
    keep_rows(out, name, Row, about, _compare(rows, predicted))


def _compare(rows: Sequence[Mapping[str, Any]], predicted: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows with their predictions, and their speed relative to the first peer's."""
    base = next((row["step_milliseconds"] for row in rows if row["is_peer"] and "step_milliseconds" in row), None)
    joined = []
    for row in rows:
        speed = base / row["step_milliseconds"] if base is not None and "step_milliseconds" in row else None
        joined.append({**predicted.get(row["name"], {}), **row, "speed": speed})
    return joined


def _predict(workload: TransformerWorkload, ways: Mapping[str, Way], cluster: Cluster) -> list[dict[str, Any]]:
    """Predict Stretto's runs, or say why there is no prediction; the planner knows no eager or compiled layers."""
    rows = []
    with torch.device("meta"):
        model = workload.make()
    for name, way in ways.items():
        if way.kind != "stretto":
            continue
        row: dict[str, Any] = {"name": name}
        try:
            if way.by_blocks:
                raise ValueError("the planner predicts models with roles")
            if "expert_reduce" in way.options:
                raise ValueError("the planner predicts sums by ranks")
            if way.optimizer == "exposed muon":
                raise ValueError("the planner predicts a hidden exchange")
            batch: dict[str, Any] = {"batch": workload.batch, "seq_len": workload.seq_len}
            parts = check_sizes(way.grid).batch_parts * workload.micro_batches
            batch["micro_batch"] = max(1, workload.batch // parts)
            batch |= {"optimizer": "adamw" if way.optimizer == "adamw" else "muon", "clips": way.clips}
            if workload.routing is not None and (parts := way.grid.get("expert", 1)) > 1:
                batch["imbalance"] = _find_imbalance(workload, way.routing or workload.routing, parts, way.replicas)
            options = {name: value for name, value in way.options.items() if name != "reduce_dtype"}
            found = predict(model, cluster, grid=way.grid, **batch, **options)
            row |= {"predicted_milliseconds": found.step_time * 1e3, "predicted_gib": found.peak_memory / GIB}
        except ValueError as error:
            row["reason"] = str(error)
        rows.append(row)
    return rows


def _find_imbalance(workload: TransformerWorkload, routing: str, ranks: int, replicas: int) -> float:
    """The busiest rank's load over the mean, in the mean over layers. What replicas' weights take is not counted."""
    sizes, found = TRANSFORMERS[workload.name].experts, []
    assert sizes is not None
    for layer in range(workload.layers):
        ids, _ = draw_routing(workload.seq_len, *sizes, routing, torch.device("cpu"), layer=layer)
        loads = torch.bincount(ids.flatten(), minlength=sizes[0]).tolist()
        found.append(max(place_replicas(loads, ranks, replicas).loads(loads)) * ranks / ids.numel())
    return sum(found) / len(found)


def _plan(workload: TransformerWorkload, cluster: Cluster, ranks: int) -> dict[str, Way]:
    """The first three of `plan` that train the batch in as many micro-batches, on three grids; {} if none does."""
    with torch.device("meta"):
        model = workload.make()
    batch: dict[str, Any] = {"batch": workload.batch, "seq_len": workload.seq_len}
    if workload.routing is not None:
        batch["imbalance"] = _find_imbalance(workload, workload.routing, ranks, 0)
    try:
        plans = plan(model, cluster, gpus=ranks, **batch)
    except ValueError:  # rows say it of their grids
        return {}
    found: dict[str, Way] = {}
    for each in plans:
        grid = {axis: size for axis, size in each.grid.items() if size not in (1, "cut")}
        is_another = all(grid != way.grid for way in found.values())
        parts = check_sizes(each.grid).batch_parts * workload.micro_batches
        if len(found) < PLANNED and is_another and each.micro_batch * parts == workload.batch:
            defaults = {"recompute": "none", "reshard": "after_backward"}
            options = {key: getattr(each, key) for key, default in defaults.items() if getattr(each, key) != default}
            name = ", ".join([_name(grid), *["sequence sharded"] * each.shard_sequence, *options.values()])
            options |= _SHARDED if each.shard_sequence else {}
            found[f"{name}, compiled"] = Way("stretto", grid=grid, options=options)
    return found


def _judge(rows: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Name the run of Stretto's that was predicted to be the fastest, and the one that was."""
    known = [row for row in rows if row.get("step_milliseconds") and row.get("predicted_milliseconds")]
    known = [row for row in known if "fp8" not in row["name"]]
    if not known:
        return ()
    first, fastest = (
        min(known, key=lambda row: row[f"{which}_milliseconds"])["name"] for which in ("predicted", "step")
    )
    return (f"Predicted to be Stretto's fastest: {first}. Measured: {fastest}.",)


def _read_predictions(
    path: Path, workload: TransformerWorkload
) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """Each run's prediction, and what `plan` picked. ValueError without a file, and for another model's or batch's."""
    if not path.is_file():
        if workload.is_small:
            return {}, []
        raise ValueError(f"there is no file of predictions at {path}: write it first, with --cluster CLUSTER.toml")
    found = json.loads(path.read_text())
    for option in ("layers", "batch", "seq_len", "micro_batches"):
        if (known := found["workload"].get(option, 1)) != getattr(workload, option):
            raise ValueError(f"{path} predicts {option}={known}, not {getattr(workload, option)}")
    rows = {row.pop("name"): {key: row.get(key) for key in _PREDICTED} for row in found["rows"]}
    return rows, found.get("planned", [])


_PREDICTED = ("predicted_milliseconds", "predicted_gib")
BENCH = Bench(
    "transformers",
    "Unmodified transformers models with Stretto, FSDP2, DTensor tensor parallelism and plain PyTorch.",
    TransformersSetting,
    run_transformers,
    Row,
    title="",
    needs=Needs.RANKS,
    about=lambda setting: {},
)
