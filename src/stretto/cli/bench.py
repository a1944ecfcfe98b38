"""`stretto bench`: the commands behind every figure in the README and the docs."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from stretto.cli.console import Json, print_json, refusing_bad_input

app = typer.Typer(no_args_is_help=True, help="Measure what the README claims, peers beside it in the same run.")

Out = Annotated[Path, typer.Option("--out", help="Folder for the JSON and the picture.")]
Ranks = Annotated[int | None, typer.Option(help="Default: the machine's GPUs.")]
WarmUp = Annotated[int, typer.Option(help="Steps before timing.")]
Repeats = Annotated[int, typer.Option(help="Steps timed a round; their median counts.")]
Rounds = Annotated[int, typer.Option(help="Rounds over all runs; a run's best median counts.")]
Layers = Annotated[int | None, typer.Option(help="How many of its layers (default: all).")]
SeqLen = Annotated[int, typer.Option(help="Tokens a sequence.")]
Vocab = Annotated[
    int, typer.Option(help="Vocabulary; GPT-2's 50,257 padded to 64, or an odd GEMM slows everything down.")
]


@app.command()
def train(
    model: Annotated[str, typer.Option(help="gpt-5b to gpt-640b, or gpt2-small.")] = "gpt-5b",
    layers: Layers = None,
    ranks: Ranks = None,
    vocab: Vocab = 50304,
    batch: Annotated[int | None, typer.Option(help="Global batch in sequences (default: 2 a rank).")] = None,
    seq_len: SeqLen = 2048,
    warm_up: WarmUp = 3,
    repeats: Repeats = 5,
    rounds: Rounds = 2,
    checkpointing: Annotated[bool, typer.Option(help="Activation checkpointing of every block.")] = False,
    reduce_fp32: Annotated[
        bool, typer.Option(help="Reduce Stretto's weight gradients in fp32, as FSDP2 does.")
    ] = False,
    peers: Annotated[bool, typer.Option(help="Measure FSDP2 too.")] = True,
    out: Out = Path("results/train"),
    as_json: Json = False,
) -> None:
    """Training throughput on every grid of the ranks, beside torch's FSDP2 of the same model."""
    with refusing_bad_input(as_json=as_json):
        from stretto.bench.train import bench_train
        from stretto.bench.training_runs import Workload
        from stretto.cluster import Cluster
        from stretto.models import GPTConfig

        count = _count(ranks)
        overrides = {} if layers is None else {"layers": layers}
        config = GPTConfig.preset(model, max_seq_len=seq_len, vocab=vocab, **overrides)
        workload = Workload(config, batch or 2 * count, seq_len, warm_up, repeats, rounds, checkpointing, reduce_fp32)
        rows = bench_train(workload, count, out, Cluster.detect().gpu.peak_flops.bf16, peers)
        if as_json:
            print_json({"rows": rows})


@app.command()
def parity(
    ranks: Annotated[int, typer.Option(help="Largest number of ranks; its powers of two below are run too.")] = 8,
    out: Out = Path("results/parity"),
    as_json: Json = False,
) -> None:
    """Five steps on every grid of 1, 2, 4 ... ranks, compared with plain PyTorch on one (CPU, fp64 and fp32)."""
    with refusing_bad_input(as_json=as_json):
        from stretto.bench.parity import bench_parity

        rows = bench_parity(ranks, out)
        if as_json:
            print_json({"rows": rows})


@app.command("compile")
def compile_(
    largest: Annotated[int | None, typer.Option(help="Leave out what has more ranks.")] = None,
    out: Out = Path("results/compile"),
    as_json: Json = False,
) -> None:
    """Seconds and memory to compile and verify collectives of up to 512 ranks (needs no GPU)."""
    with refusing_bad_input(as_json=as_json):
        from stretto.bench.compile import bench_compile

        rows = bench_compile(out, largest)
        if as_json:
            print_json({"rows": rows})


@app.command()
def published(
    batch: Annotated[int, typer.Option(help="Global batch, in sequences of 2048 tokens.")] = 8192,
    out: Out = Path("results/published"),
    as_json: Json = False,
) -> None:
    """Plans for every run of Singh's dissertation (Table 5.2), beside the published FLOP/s (needs no GPU)."""
    with refusing_bad_input(as_json=as_json):
        from stretto.bench.published import bench_published

        rows = bench_published(out, batch)
        if as_json:
            print_json({"rows": rows})


@app.command()
def peers(
    models: Annotated[str, typer.Option(help="llama-7b, or gpt-5b to gpt-640b, with spaces between.")] = "llama-7b",
    layers: Layers = None,
    ranks: Ranks = None,
    batches: Annotated[
        str | None, typer.Option(help="Global batches in sequences (default: 1, 2, and 1 and 2 a rank).")
    ] = None,
    seq_len: SeqLen = 4096,
    grids: Annotated[
        str | None, typer.Option(help="Stretto's grids, as 'z=4, x=2 z=2' (default: all that can cut the batch).")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Only runs with this in their name; may be given several times.")
    ] = None,
    compiled: Annotated[bool, typer.Option(help="Measure compiled blocks too.")] = True,
    tune_matmuls: Annotated[bool, typer.Option(help="Let Stretto choose each product's layout by timing it.")] = False,
    warm_up: WarmUp = 3,
    repeats: Repeats = 5,
    rounds: Rounds = 2,
    out: Out = Path("results/peers"),
    as_json: Json = False,
) -> None:
    """One model under Stretto, FSDP2, DTensor tensor parallelism and both, compiled and not: a table a batch."""
    with refusing_bad_input(as_json=as_json):
        from stretto.bench.peers import bench_peers, model_config
        from stretto.bench.training_runs import Workload

        count = _count(ranks)
        sizes = sorted({1, 2, count, 2 * count}) if batches is None else _numbers(batches, "--batches")
        configs = {name: model_config(name, layers, seq_len) for name in models.replace(",", " ").split()}
        rows = []
        for name, config in configs.items():
            measured = bench_peers(
                name,
                Workload(config, sizes[0], seq_len, warm_up, repeats, rounds),
                sizes,
                count,
                out,
                grids=grids,
                only=only or (),
                with_compiled=compiled,
                tunes_matmuls=tune_matmuls,
            )
            rows += [{"model": name, "batch": batch} | row for batch, found in measured.items() for row in found]
        if as_json:
            print_json({"rows": rows})


@app.command()
def overlap(
    model: Annotated[str, typer.Option(help="llama-7b, or gpt-5b to gpt-640b.")] = "gpt-5b",
    layers: Layers = None,
    ranks: Ranks = None,
    batch: Annotated[int | None, typer.Option(help="Global batch in sequences (default: 2 a rank).")] = None,
    seq_len: SeqLen = 2048,
    grids: Annotated[str, typer.Option(help="Grids to switch overlaps on in.")] = "x=2 z=2, data=2 z=2",
    warm_up: WarmUp = 3,
    repeats: Repeats = 5,
    rounds: Rounds = 3,
    out: Out = Path("results/overlap"),
    as_json: Json = False,
) -> None:
    """What each is worth: no overlap, then all-reduce, reduce-scatter, all-gather, data's buckets, copy engines."""
    with refusing_bad_input(as_json=as_json):
        from stretto.bench.overlap import bench_overlap
        from stretto.bench.peers import model_config
        from stretto.bench.training_runs import Workload

        count = _count(ranks)
        config = model_config(model, layers, seq_len)
        workload = Workload(config, batch or 2 * count, seq_len, warm_up, repeats, rounds)
        rows = bench_overlap(model, workload, count, grids, out)
        if as_json:
            print_json({"rows": rows})


@app.command()
def plan(
    models: Annotated[
        str, typer.Option(help="Sizes of Table 5.1, with :LAYERS where not all are taken.")
    ] = "gpt-5b gpt-10b",
    ranks: Ranks = None,
    batches: Annotated[str, typer.Option(help="Global batches in sequences.")] = "8,16",
    seq_len: SeqLen = 2048,
    vocab: Vocab = 50304,
    dtype: Annotated[str, typer.Option(help="What is computed in: bf16 or fp32.")] = "bf16",
    predict: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Only predict, into this file: to be done before measuring.")
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(help="To predict for: a cluster file (`stretto probe`) or a preset's name.")
    ] = None,
    predictions: Annotated[Path, typer.Option(help="The file that --predict has written.")] = Path(
        "results/plan/predictions.json"
    ),
    shard_sequence: Annotated[
        bool, typer.Option("--shard-sequence", help="With --predict: grids with x > 1 with sharded tokens too.")
    ] = False,
    again: Annotated[bool, typer.Option(help="Measure also what plan.json has already.")] = False,
    warm_up: WarmUp = 3,
    repeats: Repeats = 5,
    rounds: Rounds = 2,
    out: Out = Path("results/plan"),
    as_json: Json = False,
) -> None:
    """Every grid of the ranks, measured beside what the planner predicted: step times, memory, order, choice.

    Predict first (this needs no GPU): stretto bench plan --predict FILE --cluster CLUSTER.toml --ranks 4
    """
    with refusing_bad_input(as_json=as_json):
        from stretto.bench.peers import model_config
        from stretto.bench.plan import DTYPES, Planned, bench_plan, write_predictions
        from stretto.bench.training_runs import Workload
        from stretto.cluster import Cluster

        if (predict is None) != (cluster is None):
            raise ValueError("--predict FILE and --cluster go together: predictions are made for a cluster")
        if shard_sequence and predict is None:
            raise ValueError("--shard-sequence goes with --predict: what the file predicts is measured")
        if dtype not in DTYPES:
            raise ValueError(f"--dtype is {' or '.join(DTYPES)}, not {dtype!r}")
        count, planned = _count(ranks), []
        for spec in models.replace(",", " ").split():
            name, _, layers = spec.partition(":")
            config = model_config(name, _number(layers, "the layers in --models") if layers else None, seq_len)
            config = replace(config, vocab=vocab)
            for batch in _numbers(batches, "--batches"):
                work = Workload(config, batch, seq_len, warm_up, repeats, rounds, dtype=dtype)
                planned.append(Planned(name, work, count))
        if predict is not None and cluster is not None:
            result = write_predictions(planned, Cluster.find(cluster), predict, shards_sequence=shard_sequence)
            print(f"predictions written to {predict}", file=sys.stderr)
        else:
            result = bench_plan(planned, predictions, out, again=again)
        if as_json:
            print_json(result)


@app.command()
def collectives(
    ranks: Ranks = None,
    only: Annotated[str, typer.Option(help="Collectives, with commas.")] = "allreduce,allgather,reducescatter,alltoall",
    dtypes: Annotated[str, typer.Option(help="bf16, fp32, with commas.")] = "bf16,fp32",
    smallest: Annotated[int, typer.Option(help="Bytes of the whole array; sizes are powers of 4 from here.")] = 1024,
    largest: Annotated[int, typer.Option(help="Bytes of the whole array.")] = 1 << 30,
    step: Annotated[int, typer.Option(help="A size is this many times the one before it.")] = 4,
    modes: Annotated[str, typer.Option(help="graph, eager, with commas.")] = "graph,eager",
    tune: Annotated[
        bool, typer.Option(help="Measure every way first, and keep the times for runs on this machine.")
    ] = False,
    table: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            envvar="STRETTO_COLLECTIVES_TABLE",
            help="Where --tune keeps the times, and whose times choose (default: the cache).",
        ),
    ] = None,
    out: Out = Path("results/collectives"),
    json: Json = False,
) -> None:
    """Collectives by Stretto's kernels, NCCL and torch's symmetric-memory operators, size by size."""
    from stretto.bench.collectives import bench_collectives

    with refusing_bad_input():
        sizes = _sizes(smallest, largest, step)
        rows = bench_collectives(
            _gpus(ranks),
            out,
            collectives=only.split(","),
            dtypes=dtypes.split(","),
            sizes=sizes,
            modes=modes.split(","),
            tunes=tune,
            table=table,
        )
    if json:
        print_json({"rows": rows})


@app.command()
def ablations(
    ranks: Ranks = None,
    only: Annotated[str, typer.Option(help="pipelining, composition, with commas.")] = "pipelining,composition",
    protocol: Annotated[str, typer.Option(help="Simple, LL or LL128.")] = "LL128",
    instances: Annotated[
        int, typer.Option(help="Of the interpreted schedules; each has thread blocks of its own.")
    ] = 16,
    tiles: Annotated[str, typer.Option(help="Bytes of tiles, with commas.")] = "16384,65536,262144",
    smallest: Annotated[int, typer.Option(help="Bytes of the whole array; sizes are multiples of it.")] = 1 << 20,
    largest: Annotated[int, typer.Option(help="Bytes of the whole array.")] = 256 << 20,
    step: Annotated[int, typer.Option(help="A size is this many times the one before it.")] = 4,
    modes: Annotated[str, typer.Option(help="graph, eager, with commas.")] = "graph,eager",
    out: Out = Path("results/ablations"),
    as_json: Json = False,
) -> None:
    """MSCCLang's ablations: pipelining over tiles on and off; one kernel against the algorithm made of NCCL calls."""
    with refusing_bad_input(as_json=as_json):
        from stretto.bench.ablations import Setting, bench_ablations

        setting = Setting(
            sizes=tuple(_sizes(smallest, largest, step)),
            tiles=tuple(_numbers(tiles, "--tiles")),
            protocol=protocol,
            instances=instances,
            modes=tuple(modes.split(",")),
            ablations=tuple(only.split(",")),
        )
        rows = bench_ablations(_gpus(ranks), out, setting)
        if as_json:
            print_json(rows)


@app.command()
def embedding(
    ranks: Ranks = None,
    cases: Annotated[
        str, typer.Option(help="BATCHxTABLESxDIMxPOOLING (tables of each rank) or mlperf, with commas.")
    ] = "256x16x256x70,1024x64x256x70,4096x64x128x70,65536x7x128x8,mlperf",
    studies: Annotated[str, typer.Option(help="peers, orders, slices, occupancy, timeline, with commas.")] = "peers",
    rows: Annotated[int, typer.Option(help="Of each table; of MLPerf's, at most.")] = 100_000,
    dtype: Annotated[str, typer.Option(help="float32, float16 or bfloat16.")] = "float32",
    graph: Annotated[bool, typer.Option(help="Time CUDA graphs, not calls.")] = False,
    backward: Annotated[bool, typer.Option(help="Measure the backward pass too.")] = True,
    jagged: Annotated[bool, typer.Option(help="Bags of 0 to twice the pooling, not all of it.")] = False,
    skip: Annotated[str, typer.Option(help="Peers to leave out: bags, batched, chunked, with commas.")] = "",
    rounds: Rounds = 2,
    replays: Annotated[int, typer.Option(help="Timed rows of calls in a round.")] = 5,
    out: Out = Path("results/embedding"),
    as_json: Json = False,
) -> None:
    """Embedding look-ups fused with their all-to-all, beside EmbeddingBag, one batched kernel, and its two streams."""
    with refusing_bad_input(as_json=as_json):
        from stretto.bench.embedding import Case, Setting, bench_embedding
        from stretto.bench.interleaved import Effort

        if dtype not in ("float32", "float16", "bfloat16"):
            raise ValueError(f"--dtype is float32, float16 or bfloat16, not {dtype!r}")
        setting = Setting(
            tuple(Case.parse(text) for text in cases.replace(",", " ").split()),
            tuple(studies.replace(",", " ").split()),
            rows,
            dtype,
            graph,
            backward,
            not jagged,
            tuple(skip.replace(",", " ").split()),
            Effort(rounds, replays),
        )
        found = bench_embedding(_count(ranks), out, setting)
        if as_json:
            print_json({"rows": found})


@app.command()
def ops(
    ranks: Ranks = None,
    only: Annotated[str, typer.Option(help="gather, scatter, reduce, with commas.")] = "gather,scatter,reduce",
    cases: Annotated[
        str | None, typer.Option(help="Models whose shapes are taken, with commas (default: all; ablations: flux).")
    ] = None,
    ms: Annotated[str | None, typer.Option(help="Rows of the whole, with commas (default: each case's own).")] = None,
    modes: Annotated[str, typer.Option(help="graph, eager, with commas.")] = "graph,eager",
    implementation: Annotated[str, typer.Option(help="Of Stretto's calls: auto, kernel, library.")] = "auto",
    dtype: Annotated[str, typer.Option(help="Of operands: bf16, or fp8 with a scale a row.")] = "bf16",
    tune: Annotated[
        bool, typer.Option(help="Measure each shape's plans first, and keep the times for runs on this machine.")
    ] = False,
    ablations: Annotated[bool, typer.Option(help="Vary one choice at a time instead.")] = False,
    out: Out = Path("results/operators"),
    as_json: Json = False,
) -> None:
    """Overlapped operators beside the GEMM alone, GEMM and NCCL, and torch's async tensor parallelism.

    Rows are added to those that the folder has, and written as they come.
    """
    with refusing_bad_input(as_json=as_json):
        from stretto.bench.operators import CASES, Setting, bench_operators
        from stretto.bench.operators_ablations import bench_operator_ablations

        chosen = tuple(cases.split(",")) if cases else ("flux",) if ablations else tuple(CASES)
        setting = Setting(
            operators=tuple(only.split(",")),
            cases=chosen,
            ms=() if ms is None else tuple(_numbers(ms, "--ms")),
            modes=tuple(modes.split(",")),
            tunes=tune,
            implementation=implementation,
            dtype=dtype,
        )
        bench = bench_operator_ablations if ablations else bench_operators
        rows = bench(_gpus(ranks), out, setting)
        if as_json:
            print_json({"rows": rows})


def _sizes(smallest: int, largest: int, step: int) -> list[int]:
    """Sizes in bytes, each `step` times the one before it."""
    if step < 2 or smallest < 64 or largest < smallest:
        raise ValueError(f"sizes go from {smallest} (at least 64) to {largest} by a factor of {step} (at least 2)")
    sizes = []
    while smallest <= largest:
        sizes.append(smallest)
        smallest *= step
    return sizes


def _gpus(ranks: int | None) -> int:
    """The ranks of a bench that takes a GPU each. ValueError for more than there are."""
    import torch

    there = torch.cuda.device_count()
    if there < 2 or (ranks is not None and not 2 <= ranks <= there):
        raise ValueError(f"collectives need 2 GPUs or more, one a rank; there are {there}, and {ranks or there} ranks")
    return ranks or there


@app.command("two-level")
def two_level(
    ranks_per_node: Annotated[int, typer.Option(help="Ranks in each of the namespaces.")] = 2,
    nodes: Annotated[int, typer.Option(help="Network namespaces.")] = 4,
    bandwidth: Annotated[float, typer.Option(help="Of a node's link, Mbit/s.")] = 50.0,
    loopback: Annotated[float, typer.Option(help="Inside a node, Mbit/s.")] = 200.0,
    trunk: Annotated[float, typer.Option(help="Of the link between the halves of the nodes, Mbit/s.")] = 50.0,
    delay: Annotated[float, typer.Option(help="Of a message between nodes, ms.")] = 40.0,
    smallest: Annotated[int, typer.Option(help="Bytes a rank of the smallest collective.")] = 4096,
    sizes: Annotated[int, typer.Option(help="How many sizes, each twice the one before.")] = 8,
    repeats: Annotated[int, typer.Option(help="Runs of each; their median counts.")] = 7,
    out: Out = Path("results/two-level"),
    as_json: Json = False,
) -> None:
    """Two-level collectives between network namespaces: recursive, ring and flat beside the model (needs root)."""
    with refusing_bad_input(as_json=as_json):
        from stretto.bench.two_level import Setting, bench_two_level

        setting = Setting(nodes, ranks_per_node, bandwidth, loopback, trunk, delay, smallest, sizes, repeats)
        result = bench_two_level(setting, out)
        if as_json:
            print_json(result)


@app.command()
def dlrm(
    model: Annotated[str, typer.Option(help="small, kaggle, mlperf-v2 or paper.")] = "mlperf-v2",
    max_rows: Annotated[int | None, typer.Option(help="Cuts longer tables down (default: as they are).")] = None,
    tables: Annotated[int | None, typer.Option(help="How many tables, for paper.")] = None,
    ranks: Ranks = None,
    batch: Annotated[int, typer.Option(help="Global batch in samples.")] = 65536,
    implementations: Annotated[str, typer.Option(help="library, kernel, with commas.")] = "library,kernel",
    jagged: Annotated[bool, typer.Option(help="Bags from none to twice the pooling.")] = False,
    warm_up: WarmUp = 3,
    repeats: Repeats = 10,
    rounds: Rounds = 3,
    out: Out = Path("results/dlrm"),
    as_json: Json = False,
) -> None:
    """A DLRM's training step with its look-up and exchange fused, beside PyTorch's functions, in one job."""
    with refusing_bad_input(as_json=as_json):
        from stretto.bench.dlrm import Setting, bench_dlrm
        from stretto.models import DLRMConfig

        config = DLRMConfig.preset(model)
        if tables is not None:
            if tables < 1 or len(set(zip(config.rows, config.pooling, strict=True))) > 1:
                raise ValueError(
                    f"--tables is {tables}, but is at least 1, and for a model whose tables are alike: paper"
                )
            config = replace(config, rows=config.rows[:1] * tables, pooling=config.pooling[:1])
        config = config if max_rows is None else config.capped(max_rows)
        setting = Setting(config, batch, tuple(implementations.split(",")), jagged, warm_up, repeats, rounds)  # type: ignore[arg-type]
        rows = bench_dlrm(setting, _count(ranks), out)
        if as_json:
            print_json({"rows": rows})


def _count(ranks: int | None) -> int:
    """How many ranks to start."""
    import torch

    if ranks is not None and ranks < 1:
        raise ValueError(f"--ranks is {ranks}, but must be at least 1")
    count = ranks or torch.cuda.device_count()
    if not count:
        raise ValueError("this machine has no GPU: say how many CPU --ranks to use")
    return count


def _numbers(text: str, option: str) -> list[int]:
    return [_number(part, option) for part in text.replace(",", " ").split()]


def _number(text: str, option: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{option} has {text!r}, but takes whole numbers, at least 1")
    return int(text)
