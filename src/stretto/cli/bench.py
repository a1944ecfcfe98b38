# SPDX-License-Identifier: Apache-2.0
"""`stretto bench`: the commands behind every figure in the README and the docs.

A command has an option for each field of its bench's settings, and `--out` and `--json`. It imports the bench, and
torch with it, when all that was given has been checked.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, fields
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import typer

from stretto.bench.checkouts.settings import CheckoutsSetting
from stretto.bench.collectives.settings import AblationsSetting, CollectivesSetting, CompileSetting
from stretto.bench.embedding.settings import EmbeddingSetting
from stretto.bench.experts.settings import ExpertsSetting, MoeLayersSetting
from stretto.bench.messages.settings import MessagesSetting, require_two_ranks
from stretto.bench.operators.settings import OperatorsSetting
from stretto.bench.plan.settings import (
    MemorySetting,
    PlanSetting,
    PublishedExpertsSetting,
    PublishedPipelinesSetting,
    PublishedSetting,
    SchedulesSetting,
    SimulatedStepsSetting,
    read_predictions,
)
from stretto.bench.settings import Ranks, parse_number, split_words
from stretto.bench.simulated_schedules.settings import SimulatedCollectivesSetting, SimulatedMscclSetting
from stretto.bench.simulator_speed import SimulatorSpeedSetting
from stretto.bench.studies.settings import (
    SimulatedDlrmSetting,
    SimulatedScalingSetting,
    SimulatedTwoLevelSetting,
    SimulatedZero3Setting,
)
from stretto.bench.training.settings import (
    BlocksSetting,
    ChunksSetting,
    DdpSetting,
    DlrmSetting,
    MoeDemoSetting,
    OffloadSetting,
    OverlapSetting,
    ParitySetting,
    PeersSetting,
    PipelineSetting,
    RecomputeSetting,
    StagesSetting,
    ThroughputSetting,
)
from stretto.bench.two_level.settings import TwoLevelSetting
from stretto.cli.console import BAD_INPUT, Json, fail, print_json, refusing_bad_input

app = typer.Typer(help="Measure what the README claims, peers beside it in the same run.")


class Needs(Enum):
    """What a bench needs of the machine; the value heads its group in `stretto bench --help`."""

    NO_GPU = "Need no GPU"
    RANKS = "Need GPUs, or --ranks N for processes on the CPU"
    ONE_GPU = "Need a GPU, or --cpu for a try on the CPU"
    TWO_GPUS = "Need two GPUs or more"


_BENCHES: dict[Needs, list[str]] = {each: [] for each in Needs}


@app.callback(invoke_without_command=True)
def _about(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        from stretto.cluster.detection import may_have_gpus

        print(context.get_help())
        if not may_have_gpus():
            print(f"This machine has no GPU. {describe_cpu_benches()}")
        raise typer.Exit(BAD_INPUT)


def describe_cpu_benches() -> str:
    """Say which benches run on a machine without GPUs."""
    names = {need: ", ".join(sorted(benches)) for need, benches in _BENCHES.items()}
    return (
        f"Without GPUs these run: {names[Needs.NO_GPU]}; with --ranks N, on N processes of the CPU: "
        f"{names[Needs.RANKS]}; with --cpu: {names[Needs.ONE_GPU]}."
    )


def _command(
    name: str,
    setting_type: type[Any],
    *,
    needs: Needs = Needs.NO_GPU,
    out: str | None = None,
    count: Callable[[int | None], int] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a command of a function that takes the settings and the output folder, and returns what `--json` prints.

    needs: what it needs of the machine. out: the default folder (None: results/NAME). count: adds an option `--ranks`;
    the function gets the number of ranks that `count` makes of it as its first argument. A ValueError ends the command
    with status 2.
    """

    def decorate(run: Callable[..., Any]) -> Callable[..., Any]:
        def command(*, ranks: int | None = None, out: Path, as_json: bool, **given: Any) -> None:
            with refusing_bad_input(as_json=as_json):
                if count is None and "ranks" in options:
                    given["ranks"] = ranks
                setting = setting_type(**_read(options, given))
                counted = () if count is None else (count(ranks),)
                result = run(*counted, setting, out)
            if isinstance(result, dict) and result.get("failure") is not None:
                raise fail(result["failure"], 1, as_json=as_json)
            if as_json:
                print_json(result if isinstance(result, dict) else {"rows": result})

        options = {field.name: field for field in fields(setting_type)}
        parameters = [_make_parameter(field) for field in options.values()]
        if count is not None:
            parameters.insert(0, _make_ranks())
        folder = Path(out or f"results/{name}")
        parameters.append(
            _parameter("out", Annotated[Path, typer.Option(help="Folder for the JSON and the picture.")], folder)
        )
        parameters.append(_parameter("as_json", Json, False))
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        command.__doc__ = run.__doc__
        _BENCHES[needs].append(name)
        app.command(name, rich_help_panel=needs.value)(command)
        return run

    return decorate


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _make_ranks() -> inspect.Parameter:
    type_, option = get_args(Ranks)
    return _parameter("ranks", Annotated[type_, typer.Option(help=option.help)], None)


def _make_parameter(field: "Field[Any]") -> inspect.Parameter:
    """The parameter (option) of a field. Tuples are given as text; a default that a factory makes is shown as None."""
    type_, option = get_args(field.type)
    default: Any = inspect.Parameter.empty if field.default is MISSING else field.default
    if get_origin(type_) is tuple and option.is_repeated:
        type_, default = list[str] | None, None
    elif get_origin(type_) is tuple:
        type_ = str if default else str | None
        default = option.separator.join(map(str, default)) if default else None
    elif field.default_factory is not MISSING:
        type_, default = type_ | None, None
    flags = (option.flags,) if option.flags else ()
    made = typer.Option(*flags, help=option.help, metavar=option.metavar, envvar=option.envvar)
    return _parameter(field.name, Annotated[type_, made], default)


def _read(options: "Mapping[str, Field[Any]]", given: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the command line's values into the fields' values. Raises ValueError for text that cannot be parsed."""
    values = {}
    for name, value in given.items():
        type_, option = get_args(options[name].type)
        if value is None and options[name].default_factory is not MISSING:
            continue
        if get_origin(type_) is tuple:
            flag = option.flags or "--" + name.replace("_", "-")
            words = (value or []) if option.is_repeated else split_words(value or "")
            if not words and options[name].default:
                raise ValueError(f"{flag} is empty, but takes one name or more")
            value = tuple(_read_items(words, get_args(type_)[0], flag))
        values[name] = value
    return values


def _read_items(words: list[str], kind: Any, flag: str) -> Iterator[Any]:
    for word in words:
        if kind is int:
            yield parse_number(word, flag)
        elif kind is float:
            yield _parse_float(word, flag)
        else:
            yield word if kind is str else kind.parse(word)


def _parse_float(word: str, flag: str) -> float:
    try:
        return float(word)
    except ValueError:
        raise ValueError(f"{flag} has {word!r}, which is no number") from None


def _count_ranks(ranks: int | None) -> int:
    """The number of ranks to start: as given, else the machine's GPUs. Raises ValueError if there are none."""
    if ranks is not None and ranks < 1:
        raise ValueError(f"--ranks is {ranks}, but must be at least 1")
    from stretto.cluster.detection import count_gpus

    count = ranks or count_gpus()
    if not count:
        raise ValueError(f"this machine has no GPU: say how many CPU --ranks to use. {describe_cpu_benches()}")
    return count


def _count_gpus(ranks: int | None) -> int:
    """The number of ranks of a bench that needs a GPU a rank. Raises ValueError for more ranks than GPUs."""
    from stretto.cluster.detection import count_gpus

    there = count_gpus()
    if not there:
        raise ValueError(
            f"this bench takes 2 GPUs or more, one a rank, and this machine has none. {describe_cpu_benches()}"
        )

    from stretto.memory import shared_gpus  # imports torch, as counting GPUs has

    if shared_gpus.is_enabled():
        there = max(there, ranks or 2)
    if there < 2 or (ranks is not None and not 2 <= ranks <= there):
        asked = "" if ranks is None else f", and --ranks is {ranks}"
        raise ValueError(f"this bench takes 2 GPUs or more, one a rank: this machine has {there}{asked}")
    return ranks or there


@app.command("redraw", rich_help_panel=Needs.NO_GPU.value)
def redraw(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Results, in it and in its subfolders.")],
    as_json: Json = False,
) -> None:
    """Draw the pictures of results again from their JSON, and the losses of runs; nothing is measured."""
    with refusing_bad_input(as_json=as_json):
        from stretto.bench.pictures import redraw

        pictures = redraw(folder)
    if as_json:
        print_json({"pictures": pictures})
    else:
        print("\n".join(map(str, pictures)))


@_command("train", ThroughputSetting, needs=Needs.RANKS)
def train(setting: ThroughputSetting, out: Path) -> Any:
    """Training throughput on every grid of the ranks, beside torch's FSDP2 of the same model."""
    ranks = _count_ranks(setting.ranks)
    workload = setting.workload(ranks)

    from stretto.bench.training.throughput import bench_train
    from stretto.cluster import Cluster

    return bench_train(workload, ranks, out, Cluster.detect().gpu.peak_flops.bf16, setting.has_peers)


@_command("parity", ParitySetting)
def parity(setting: ParitySetting, out: Path) -> Any:
    """Five steps on every grid of 1, 2, 4 ... ranks, compared with plain PyTorch on one (CPU, fp64 and fp32)."""
    from stretto.bench.training.parity import bench_parity

    return bench_parity(setting.ranks, out)


@_command("compile", CompileSetting)
def compile_(setting: CompileSetting, out: Path) -> Any:
    """Seconds and memory to compile and verify collectives of up to 512 ranks (needs no GPU)."""
    from stretto.bench.collectives.compile import bench_compile

    return bench_compile(out, setting.largest)


@_command("published", PublishedSetting)
def published(setting: PublishedSetting, out: Path) -> Any:
    """Plans for every run of Singh's dissertation (Table 5.2), beside the published FLOP/s (needs no GPU)."""
    from stretto.bench.plan.published import bench_published

    return bench_published(out, setting.batch)


@_command("published-pipelines", PublishedPipelinesSetting)
def published_pipelines(setting: PublishedPipelinesSetting, out: Path) -> Any:
    """Plans for the pipelines of Singh's chapter 3 on Summit, beside the published times (needs no GPU)."""
    from stretto.bench.plan.published_pipelines import bench_published_pipelines

    return bench_published_pipelines(out, setting.batch)


@_command("published-experts", PublishedExpertsSetting)
def published_experts(setting: PublishedExpertsSetting, out: Path) -> Any:
    """Plans for the mixtures of experts of Singh's chapter 7 on Summit, beside the published figures (needs no GPU)."""
    from stretto.bench.plan.published_experts import bench_published_experts

    return bench_published_experts(out, setting.micro_batch)


@_command("simulated-steps", SimulatedStepsSetting)
def simulated_steps(setting: SimulatedStepsSetting, out: Path) -> Any:
    """Steps that were measured on GPUs, beside the simulator's and the planner's (needs no GPU)."""
    from stretto.bench.plan.simulated_steps import bench_simulated_steps

    return bench_simulated_steps([Path(folder) for folder in setting.plans], setting.overlaps, out)


@_command("simulated-pipelines", PublishedPipelinesSetting)
def simulated_pipelines(setting: PublishedPipelinesSetting, out: Path) -> Any:
    """The pipelines of Singh's chapter 3 on Summit, simulated, beside the published times (needs no GPU)."""
    from stretto.bench.plan.simulated_pipelines import bench_simulated_pipelines

    return bench_simulated_pipelines(out, setting.batch)


@_command("simulated-collectives", SimulatedCollectivesSetting)
def simulated_collectives(setting: SimulatedCollectivesSetting, out: Path) -> Any:
    """Simulated schedules beside measured ones, on H200 and on 8 processes over shaped links (measuring needs root)."""
    setting.require_results()

    from stretto.bench.simulated_schedules.run import bench_simulated_collectives

    return bench_simulated_collectives(setting, out)


@_command("simulated-msccl", SimulatedMscclSetting)
def simulated_msccl(setting: SimulatedMscclSetting, out: Path) -> Any:
    """MSCCLang's figures 8 and 11 simulated: hierarchical, two-step and AllToNext on clusters (needs no GPU)."""
    from stretto.bench.simulated_schedules.msccl import bench_simulated_msccl

    return bench_simulated_msccl(setting, out)


@_command("simulator-speed", SimulatorSpeedSetting)
def simulator_speed(setting: SimulatorSpeedSetting, out: Path) -> Any:
    """How long simulations of all-gathers and random messages take, by the number of ranks (needs no GPU)."""
    from stretto.bench.simulator_speed import bench_simulator_speed

    return bench_simulator_speed(out, setting)


@_command("peers", PeersSetting, needs=Needs.RANKS)
def peers(setting: PeersSetting, out: Path) -> Any:
    """One model under Stretto, FSDP2, DTensor tensor parallelism and both, compiled and not: a table a batch."""
    ranks = _count_ranks(setting.ranks)
    workloads_by_name = setting.workloads(ranks)

    from stretto.bench.training.peers import bench_peers

    rows: list[dict[str, Any]] = []
    for name, workloads in workloads_by_name.items():
        measured = bench_peers(
            name,
            workloads[0],
            [workload.batch for workload in workloads],
            ranks,
            out,
            grids=setting.grids,
            only=setting.only,
            with_compiled=setting.with_compiled,
            tunes_matmuls=setting.tunes_matmuls,
        )
        rows += [{"model": name, "batch": batch} | row for batch, found in measured.items() for row in found]
    return rows


@_command("overlap", OverlapSetting, needs=Needs.RANKS)
def overlap(setting: OverlapSetting, out: Path) -> Any:
    """Step time without overlap, then with all-reduce, reduce-scatter, all-gather, data's buckets, copy engines."""
    ranks = _count_ranks(setting.ranks)
    workload = setting.workload(ranks)

    from stretto.bench.training.overlap import bench_overlap

    return bench_overlap(setting.model, workload, ranks, setting.grids, out)


@_command("blocks", BlocksSetting, needs=Needs.RANKS)
def blocks(setting: BlocksSetting, out: Path) -> Any:
    """Models without roles, sharded block by block, beside torch's FSDP2 of the same blocks."""
    ranks = _count_ranks(setting.ranks)

    from stretto.bench.training.blocks import bench_blocks

    return bench_blocks(setting, ranks, out)


@_command("chunks", ChunksSetting)
def chunks(setting: ChunksSetting, out: Path) -> Any:
    """Gradients' all-reduces and the optimizer's steps together, by buckets an all-reduce, over a slow link."""
    from stretto.bench.training.chunks import bench_chunks

    return bench_chunks(setting, out)


@_command("pipeline", PipelineSetting)
def pipeline(setting: PipelineSetting, out: Path) -> Any:
    """A step in pipeline stages that sleep, by schedule, beside the timing model's."""
    from stretto.bench.training.pipeline import bench_pipeline

    return bench_pipeline(setting, out)


@_command("stages", StagesSetting)
def stages(setting: StagesSetting, out: Path) -> Any:
    """Several pipeline stages on one rank, beside plain accumulation and torch's pipelining."""
    from stretto.bench.training.stages import bench_stages

    return bench_stages(setting, out)


@_command("offload", OffloadSetting, needs=Needs.ONE_GPU)
def offload(setting: OffloadSetting, out: Path) -> Any:
    """Optimizer state on the host: steps beside the host links, training beside resident state, FSDP2's offload."""
    from stretto.bench.training.offload import bench_offload

    return bench_offload(setting, out)


@_command("recompute", RecomputeSetting)
def recompute(setting: RecomputeSetting, out: Path) -> Any:
    """Recomputation that sends activations again, and that keeps them, over slow links between processes of the CPU."""
    from stretto.bench.training.recompute import bench_recompute

    return bench_recompute(setting, out)


@_command("moe-demo", MoeDemoSetting)
def moe_demo(setting: MoeDemoSetting, out: Path) -> Any:
    """A mixture of experts on 4 processes of the CPU, beside a dense model of its active size: losses and load."""
    from stretto.bench.training.moe_demo import bench_moe_demo

    return bench_moe_demo(setting, out)


@_command("experts", ExpertsSetting)
def experts(setting: ExpertsSetting, out: Path) -> Any:
    """What dropping duplicates of tokens and keeping what was sent save experts, over slow links between processes."""
    from stretto.bench.experts.communication import bench_experts

    return bench_experts(setting, out)


@_command("moe-layers", MoeLayersSetting, needs=Needs.ONE_GPU)
def moe_layers(setting: MoeLayersSetting, out: Path) -> Any:
    """Layers of Qwen3-30B-A3B on one GPU, beside transformers' own: tokens/s, memory, and waits of the host."""
    from stretto.bench.experts.layers import bench_moe_layers

    return bench_moe_layers(setting, out)


@_command("ddp", DdpSetting, needs=Needs.ONE_GPU)
def ddp(setting: DdpSetting, out: Path) -> Any:
    """The timeline of DistributedDataParallel over two checkouts' backends: buckets beside the backward pass."""
    from stretto.bench.training.ddp import bench_ddp

    return bench_ddp(setting, out)


@_command("plan", PlanSetting, needs=Needs.RANKS)
def plan(setting: PlanSetting, out: Path) -> Any:
    """Every grid of the ranks, measured beside what the planner predicted: step times, memory, order, choice.

    Predict first (this needs no GPU): stretto bench plan --predict FILE --cluster CLUSTER.toml --ranks 4
    """
    from stretto.cluster import Cluster

    planned = setting.workloads(_count_ranks(setting.ranks))
    if setting.predict is None or setting.cluster is None:
        read_predictions(setting.predictions, planned)  # refused before torch is imported

        from stretto.bench.plan.run import bench_plan

        return bench_plan(planned, setting.predictions, out, again=setting.again)
    cluster = Cluster.find(setting.cluster)

    from stretto.bench.plan.run import write_predictions

    written = write_predictions(planned, cluster, setting.predict, shards_sequence=setting.shards_sequence)
    print(f"predictions written to {setting.predict}", file=sys.stderr)
    return written


@_command("schedules", SchedulesSetting)
def schedules(setting: SchedulesSetting, out: Path) -> Any:
    """Message-driven order beside 1F1B where units take unequal times, by the timing model of pipelines."""
    from stretto.bench.plan.schedules import bench_schedules

    return bench_schedules(setting, out)


@_command("memory", MemorySetting, needs=Needs.ONE_GPU)
def memory(setting: MemorySetting, out: Path) -> Any:
    """Training runs that nearly fill one GPU: what they allocate and reserve, beside what the planner predicted."""
    from stretto.bench.plan.memory import bench_memory

    return bench_memory(setting, out)


@_command("collectives", CollectivesSetting, needs=Needs.TWO_GPUS, count=_count_gpus)
def collectives(ranks: int, setting: CollectivesSetting, out: Path) -> Any:
    """Collectives by Stretto's kernels, NCCL and torch's symmetric-memory operators, size by size."""
    from stretto.bench.collectives.run import bench_collectives

    return bench_collectives(ranks, out, setting)


@_command("ablations", AblationsSetting, needs=Needs.TWO_GPUS, count=_count_gpus)
def ablations(ranks: int, setting: AblationsSetting, out: Path) -> Any:
    """MSCCLang's ablations: pipelining over tiles on and off; one kernel against the algorithm made of NCCL calls."""
    from stretto.bench.collectives.ablations import bench_ablations

    return bench_ablations(ranks, out, setting)


@_command("embedding", EmbeddingSetting, needs=Needs.RANKS, count=_count_ranks)
def embedding(ranks: int, setting: EmbeddingSetting, out: Path) -> Any:
    """Embedding look-ups fused with their all-to-all, beside EmbeddingBag, one batched kernel, and its two streams."""
    from stretto.bench.embedding.run import bench_embedding

    return bench_embedding(ranks, out, setting)


@_command("ops", OperatorsSetting, needs=Needs.TWO_GPUS, out="results/operators", count=_count_gpus)
def ops(ranks: int, setting: OperatorsSetting, out: Path) -> Any:
    """Overlapped operators beside the GEMM alone, GEMM and NCCL, and torch's async tensor parallelism.

    Rows are added to those that the folder has, and written as they come.
    """
    from stretto.bench.operators.ablations import bench_operator_ablations
    from stretto.bench.operators.run import bench_operators

    return (bench_operator_ablations if setting.is_ablation else bench_operators)(ranks, out, setting)


@_command("two-level", TwoLevelSetting)
def two_level(setting: TwoLevelSetting, out: Path) -> Any:
    """Two-level collectives between network namespaces: recursive, ring and flat beside the model (needs root)."""
    from stretto.bench.two_level.run import bench_two_level

    return bench_two_level(setting, out)


@_command("simulated-two-level", SimulatedTwoLevelSetting)
def simulated_two_level(setting: SimulatedTwoLevelSetting, out: Path) -> Any:
    """Two-level collectives on Frontier and Perlmutter, simulated beside Singh's chapter 6 (needs no GPU)."""
    from stretto.bench.studies.two_level import bench_simulated_two_level

    return bench_simulated_two_level(setting, out)


@_command("simulated-zero3", SimulatedZero3Setting)
def simulated_zero3(setting: SimulatedZero3Setting, out: Path) -> Any:
    """ZeRO-3 over flat and two-level collectives, simulated beside Singh's figure 6.12 (needs no GPU)."""
    from stretto.bench.studies.zero3 import bench_simulated_zero3

    return bench_simulated_zero3(setting, out)


@_command("simulated-scaling", SimulatedScalingSetting)
def simulated_scaling(setting: SimulatedScalingSetting, out: Path) -> Any:
    """Weak and strong scaling beside Singh's figures 5.4, 5.5 and 5.7, and why Table 5.2 is slower (needs no GPU)."""
    from stretto.bench.studies.scaling import bench_simulated_scaling

    return bench_simulated_scaling(setting, out)


@_command("simulated-dlrm", SimulatedDlrmSetting)
def simulated_dlrm(setting: SimulatedDlrmSetting, out: Path) -> Any:
    """A DLRM's step on a torus of 128 nodes and more, beside Punniyamurthy et al.'s section 4.4 (needs no GPU)."""
    from stretto.bench.studies.recommendation import bench_simulated_dlrm

    return bench_simulated_dlrm(setting, out)


@_command("dlrm", DlrmSetting, needs=Needs.RANKS)
def dlrm(setting: DlrmSetting, out: Path) -> Any:
    """A DLRM's training step with its look-up and exchange fused, beside PyTorch's functions, in one job."""
    workload, ranks = setting.workload(), _count_ranks(setting.ranks)

    from stretto.bench.training.dlrm import bench_dlrm

    return bench_dlrm(workload, ranks, out)


@_command("checkouts", CheckoutsSetting, needs=Needs.ONE_GPU)
def checkouts(setting: CheckoutsSetting, out: Path) -> Any:
    """Collectives, tiles, embeddings and operators of two checkouts, interleaved, all ranks on one GPU under MPS.

    A case that loses ranks is left out. Ends with 1 where that happened four times; what was measured until then is
    written.
    """
    from stretto.bench.checkouts.run import bench_checkouts

    return bench_checkouts(setting, out)


@_command("messages", MessagesSetting, needs=Needs.RANKS, count=_count_ranks)
def messages(ranks: int, setting: MessagesSetting, out: Path) -> Any:
    """Messages between pipeline stages by carrier, beside torch's send and recv, and all-reduces by back end."""
    require_two_ranks(ranks)

    from stretto.bench.messages.run import bench_messages

    return bench_messages(ranks, setting, out)
