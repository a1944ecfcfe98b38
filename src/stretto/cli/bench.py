"""`stretto bench`: the commands behind every figure in the README and the docs."""

from pathlib import Path
from typing import Annotated

import typer

from stretto.cli.console import Json, print_json, refusing_bad_input

app = typer.Typer(no_args_is_help=True, help="Measure what the README claims, peers beside it in the same run.")

Out = Annotated[Path, typer.Option("--out", help="Folder for the JSON and the picture.")]


@app.command()
def train(
    model: Annotated[str, typer.Option(help="A size of Table 5.1, or gpt2-small.")] = "gpt-5b",
    layers: Annotated[int | None, typer.Option(help="How many of its layers (default: all).")] = None,
    ranks: Annotated[int | None, typer.Option(help="Default: the machine's GPUs.")] = None,
    vocab: Annotated[
        int, typer.Option(help="Vocabulary; GPT-2's 50,257 padded to 64, or an odd GEMM slows the peers down.")
    ] = 50304,
    batch: Annotated[int | None, typer.Option(help="Global batch in sequences (default: 2 a rank).")] = None,
    seq_len: Annotated[int, typer.Option(help="Tokens a sequence.")] = 2048,
    warm_up: Annotated[int, typer.Option(help="Steps before timing.")] = 3,
    repeats: Annotated[int, typer.Option(help="Steps timed a round; their median counts.")] = 5,
    rounds: Annotated[int, typer.Option(help="Rounds over all runs; a run's best median counts.")] = 2,
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
        import torch

        from stretto.bench.train import Workload, bench_train
        from stretto.cluster import Cluster
        from stretto.models import GPTConfig

        count = ranks or torch.cuda.device_count()
        if not count:
            raise ValueError("this machine has no GPU: say how many CPU --ranks to use")
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


@app.command()
def published(
    batch: Annotated[int, typer.Option(help="Global batch, in sequences of 2048 tokens.")] = 8192,
    out: Out = Path("results/published"),
    as_json: Json = False,
) -> None:
    """Plans for every run of paper 003's Table 5.2, beside the FLOP/s that were published (needs no GPU)."""
    with refusing_bad_input(as_json=as_json):
        from stretto.bench.published import bench_published

        rows = bench_published(out, batch)
        if as_json:
            print_json({"rows": rows})
