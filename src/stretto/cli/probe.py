# SPDX-License-Identifier: Apache-2.0
"""`stretto probe`: measures this machine into a cluster file."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stretto.atomic_files import require_writable
from stretto.cli.commands import refuse_options
from stretto.cli.console import Json, print_json, refusing_bad_input

if TYPE_CHECKING:
    from stretto.cluster import Cluster


def probe(
    call: typer.Context,
    out: Annotated[Path, typer.Option(help="The cluster file to write.")] = Path("cluster.toml"),
    ranks: Annotated[
        int | None, typer.Option(help="Number of processes (default: the number of GPUs, or of cores without GPUs).")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="bf16, fp16, fp32 or fp64 (default: bf16 on GPUs, fp32 without).")
    ] = None,
    model: Annotated[
        list[str] | None, typer.Option(help="Also measure this model's matrix products (see `stretto plan --model`).")
    ] = None,
    batch: Annotated[list[int] | None, typer.Option(help="The model's global batch sizes, in sequences.")] = None,
    seq_len: Annotated[int, typer.Option(help="The model's tokens per sequence.")] = 2048,
    as_json: Json = False,
) -> None:
    """Measure this machine's links and matrix products into a cluster file, for `stretto plan`.

    Every group of ranks that a grid can make inside the node, with small and large messages, all groups at once; a
    table of matrix products; attention; memory; copies between pinned host memory and each GPU, in either direction and
    in both; the host's time to launch a block's kernels. On GPUs over NCCL, without them over gloo between processes.
    """
    with refusing_bad_input(as_json=as_json):
        if dtype not in (None, "bf16", "fp16", "fp32", "fp64"):
            raise ValueError(f"--dtype is {dtype!r}, but must be bf16, fp16, fp32 or fp64")
        if not model:
            refuse_options(call, "probe without --model", "batch", "seq_len")
        require_writable(out, "--out")

        from stretto.cluster import Cluster
        from stretto.cluster.detection import count_gpus
        from stretto.cluster.probe import require_links
        from stretto.planner.compute import matmul_shapes

        gpus = count_gpus()
        count = ranks if ranks is not None else gpus or Cluster.detect().gpus_per_node
        require_links(count, gpus)
        shapes = matmul_shapes(model or [], batch or [], seq_len, count)

        cluster = _measure(count, dtype or ("bf16" if gpus else "fp32"), shapes)
        cluster.save(out)
    if as_json:
        print_json(asdict(cluster) | {"sources": dict(cluster.sources), "out": out})
    else:
        print(cluster.describe())
        print(f"written to {out}: stretto plan --cluster {out} ...")


def _measure(ranks: int, dtype: str, shapes: Sequence[tuple[int, int, int]] = ()) -> "Cluster":
    """Measure this machine with a process a GPU, or on the CPU's cores over gloo."""
    from stretto.bench.harness import run_ranks  # imports torch
    from stretto.cluster import Cluster
    from stretto.cluster.probe import assemble

    return assemble(Cluster.detect(), ranks, dtype, run_ranks(ranks, _measure_rank, ranks, dtype, tuple(shapes)))


def _measure_rank(ranks: int, dtype: str, shapes: tuple[tuple[int, int, int], ...]) -> dict[str, Any]:
    from stretto.bench.harness import time_steps
    from stretto.bench.host_times import measure_host_times
    from stretto.cluster.probe import measure
    from stretto.parallel import Grid

    grid = Grid(data=ranks)
    return measure(grid.device, dtype, shapes, time_steps) | {"host": measure_host_times(grid, dtype)}
