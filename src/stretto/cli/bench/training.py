"""What steps of training take: on every grid, beside peers, and beside what the planner predicted."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from stretto.cli.bench.options import (
    Layers,
    Out,
    Ranks,
    Repeats,
    Rounds,
    SeqLen,
    Vocab,
    WarmUp,
    count_ranks,
    parse_number,
    parse_numbers,
)
from stretto.cli.console import Json, print_json, refusing_bad_input


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
        from stretto.bench.training.runs import TrainingWorkload
        from stretto.bench.training.throughput import bench_train
        from stretto.cluster import Cluster
        from stretto.models import GPTConfig

        count = count_ranks(ranks)
        overrides = {} if layers is None else {"layers": layers}
        config = GPTConfig.preset(model, max_seq_len=seq_len, vocab=vocab, **overrides)
        workload = TrainingWorkload(
            config, 2 * count if batch is None else batch, seq_len, warm_up, repeats, rounds, checkpointing, reduce_fp32
        )
        rows = bench_train(workload, count, out, Cluster.detect().gpu.peak_flops.bf16, peers)
        if as_json:
            print_json({"rows": rows})


def parity(
    ranks: Annotated[int, typer.Option(help="Largest number of ranks; its powers of two below are run too.")] = 8,
    out: Out = Path("results/parity"),
    as_json: Json = False,
) -> None:
    """Five steps on every grid of 1, 2, 4 ... ranks, compared with plain PyTorch on one (CPU, fp64 and fp32)."""
    with refusing_bad_input(as_json=as_json):
        from stretto.bench.training.parity import bench_parity

        rows = bench_parity(ranks, out)
        if as_json:
            print_json({"rows": rows})


def published(
    batch: Annotated[int, typer.Option(help="Global batch, in sequences of 2048 tokens.")] = 8192,
    out: Out = Path("results/published"),
    as_json: Json = False,
) -> None:
    """Plans for every run of Singh's dissertation (Table 5.2), beside the published FLOP/s (needs no GPU)."""
    with refusing_bad_input(as_json=as_json):
        from stretto.bench.plan.published import bench_published

        rows = bench_published(out, batch)
        if as_json:
            print_json({"rows": rows})


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
        from stretto.bench.training.peers import bench_peers, model_config
        from stretto.bench.training.runs import TrainingWorkload

        count = count_ranks(ranks)
        sizes = sorted({1, 2, count, 2 * count}) if batches is None else parse_numbers(batches, "--batches")
        configs = {name: model_config(name, layers, seq_len) for name in models.replace(",", " ").split()}
        rows = []
        for name, config in configs.items():
            measured = bench_peers(
                name,
                TrainingWorkload(config, sizes[0], seq_len, warm_up, repeats, rounds),
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
        from stretto.bench.training.overlap import bench_overlap
        from stretto.bench.training.peers import model_config
        from stretto.bench.training.runs import TrainingWorkload

        count = count_ranks(ranks)
        config = model_config(model, layers, seq_len)
        workload = TrainingWorkload(config, 2 * count if batch is None else batch, seq_len, warm_up, repeats, rounds)
        rows = bench_overlap(model, workload, count, grids, out)
        if as_json:
            print_json({"rows": rows})


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
        from stretto.bench.plan.run import DTYPES, Planned, bench_plan, write_predictions
        from stretto.bench.training.peers import model_config
        from stretto.bench.training.runs import TrainingWorkload
        from stretto.cluster import Cluster

        if (predict is None) != (cluster is None):
            raise ValueError("--predict FILE and --cluster go together: predictions are made for a cluster")
        if shard_sequence and predict is None:
            raise ValueError("--shard-sequence goes with --predict: what the file predicts is measured")
        if dtype not in DTYPES:
            raise ValueError(f"--dtype is {' or '.join(DTYPES)}, not {dtype!r}")
        count, planned = count_ranks(ranks), []
        for spec in models.replace(",", " ").split():
            name, _, layers = spec.partition(":")
            config = model_config(name, parse_number(layers, "the layers in --models") if layers else None, seq_len)
            config = replace(config, vocab=vocab)
            for batch in parse_numbers(batches, "--batches"):
                work = TrainingWorkload(config, batch, seq_len, warm_up, repeats, rounds, dtype=dtype)
                planned.append(Planned(name, work, count))
        if predict is not None and cluster is not None:
            result = write_predictions(planned, Cluster.find(cluster), predict, shards_sequence=shard_sequence)
            print(f"predictions written to {predict}", file=sys.stderr)
        else:
            result = bench_plan(planned, predictions, out, again=again)
        if as_json:
            print_json(result)


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
        from stretto.bench.training.dlrm import DlrmSetting, bench_dlrm
        from stretto.models import DLRMConfig

        config = DLRMConfig.preset(model)
        if tables is not None:
            if tables < 1 or len(set(zip(config.rows, config.pooling, strict=True))) > 1:
                raise ValueError(
                    f"--tables is {tables}, but is at least 1, and for a model whose tables are alike: paper"
                )
            config = replace(config, rows=config.rows[:1] * tables, pooling=config.pooling[:1])
        config = config if max_rows is None else config.capped(max_rows)
        setting = DlrmSetting(config, batch, tuple(implementations.split(",")), jagged, warm_up, repeats, rounds)  # type: ignore[arg-type]
        rows = bench_dlrm(setting, count_ranks(ranks), out)
        if as_json:
            print_json({"rows": rows})
