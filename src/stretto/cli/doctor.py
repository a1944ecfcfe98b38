# SPDX-License-Identifier: Apache-2.0
"""`stretto doctor`: reports what works on this machine, and what falls back because something is missing."""

import importlib
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from stretto.cli.commands import allow_only
from stretto.cli.console import Json, print_json, refusing_bad_input
from stretto.quantities import counted, require_least

if TYPE_CHECKING:
    from stretto.cluster import Cluster
    from stretto.launch.preflight import PreflightReport

KERNEL = 'extern "C" __global__ void nothing() {}'
MINIMUMS = {"torch": (2, 11), "triton": (3, 6)}


class Finding(NamedTuple):
    """One finding. state: "ok" or "missing"; if missing, `so` says what is used in its place."""

    what: str
    state: str
    found: str
    so: str = ""


def doctor(
    call: typer.Context,
    kernels: Annotated[
        bool, typer.Option("--kernels", help="Call kernels at random for half a minute, and check all results.")
    ] = False,
    preflight: Annotated[
        bool, typer.Option("--preflight", help="Measure all ranks' products, links, files, clocks; name what is slow.")
    ] = False,
    ranks: Annotated[
        int | None,
        typer.Option(help="Processes, which share GPUs with --kernels (default: 2, and all GPUs for --preflight)."),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(help="Of --preflight: a cluster or its file, to whose rates this machine's are compared."),
    ] = None,
    folder: Annotated[Path, typer.Option(help="Of --preflight: where the rate of files is measured.")] = Path("."),
    as_json: Json = False,
) -> None:
    """Check this machine: versions, GPUs, their links, host memory, compilers; and which features use a fallback.

    Compiles the backend's C++ part where that has not been done. Starts ranks and measures only with --kernels or
    --preflight. In a rank that torchrun, srun or another launcher has started, --preflight measures with all its ranks.
    """
    with refusing_bad_input(as_json=as_json):
        if kernels:
            allow_only(call, "--kernels", "kernels", "ranks")
        elif not preflight:
            allow_only(call, "doctor without --kernels or --preflight")
    if kernels:
        _check_kernels(2 if ranks is None else ranks, as_json=as_json)
        return
    if preflight:
        _measure_ranks(ranks, cluster, folder, as_json=as_json)
        return
    findings = [finding for look in LOOKS for finding in _found(look)]
    if as_json:
        print_json({"findings": [finding._asdict() for finding in findings]})
        return
    width = max(len(finding.what) for finding in findings)
    for finding in findings:
        print(f"{finding.what:{width}}  {'-' if finding.state == 'missing' else '+'} {finding.found}")
        if finding.so:
            print(f"{'':{width}}    so {finding.so}")


def _check_kernels(ranks: int, *, as_json: bool) -> None:
    """Call the kernels of collectives and operators, with results known to the bit."""
    with refusing_bad_input(as_json=as_json):
        require_least(2, ranks=ranks)

        from stretto.bench.kernel_check import check_kernels

        report = check_kernels(ranks, seconds=30.0)
    if as_json:
        print_json(asdict(report))
    else:
        for name, count in report.wrong.items():
            print(f"{name}: {count:,} wrong")
        counts = f"{counted(report.results, 'result')} on {counted(report.ranks, 'rank')} ({report.device})"
        print(f"{counts}, seed {report.seed}: {sum(report.wrong.values()):,} wrong")
    if report.wrong:
        raise typer.Exit(1)


def _measure_ranks(ranks: int | None, cluster: str | None, folder: Path, *, as_json: bool) -> None:
    """Measure the machines of all ranks, and end with status 1 if anything is slow."""
    with refusing_bad_input(as_json=as_json):
        from stretto.atomic_files import require_writable_folder
        from stretto.cluster import Cluster
        from stretto.cluster.detection import count_gpus
        from stretto.cluster.local_ranks import is_rank

        if not folder.is_dir():  # one that the check made would be measured on another file system
            raise ValueError(f"--folder is {str(folder)!r}, which is not a folder; . would do")
        require_writable_folder(folder, "--folder")
        known = None if cluster is None else Cluster.find(cluster)
        gpus = count_gpus()
        count = ranks if ranks is not None else gpus or 2
        if count < 1 or (gpus and count > gpus and not is_rank()):
            raise ValueError(f"--ranks is {count}, but must be 1 to the number of GPUs; {gpus or 2} would do")
        if is_rank():
            report = _preflight_rank(known, folder)
        else:
            from stretto.bench.harness import run_ranks

            report = run_ranks(count, _preflight_rank, known, folder)
    if report.rank == 0:
        if as_json:
            print_json(asdict(report))
        else:
            print("\n".join(report.lines()))
    if report.faults:
        raise typer.Exit(1)


def _preflight_rank(cluster: "Cluster | None", folder: Path) -> "PreflightReport":
    import torch.distributed as dist

    from stretto.launch.preflight import check_machines
    from stretto.parallel import Grid

    grid = Grid(data=int(os.environ["WORLD_SIZE"]))
    report = check_machines(grid.device, folder=folder, cluster=cluster)
    dist.barrier()  # or a rank could end while others still use its connections
    dist.destroy_process_group()
    return report


def _found(look: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """Return what a look finds, as far as it gets: without torch, or with little memory, the others still report."""
    try:
        yield from look()
    except (ImportError, MemoryError, OSError, RuntimeError) as error:
        what = look.__name__.strip("_").replace("_", " ")
        yield Finding(what, "missing", f"cannot be looked at: {error or 'memory does not suffice'}")


def _python() -> Iterator[Finding]:
    yield Finding("Python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    for name, without in (
        ("torch", "nothing runs"),
        ("triton", "overlapped operators and tiles are not there; pip install triton, on Linux"),
    ):
        yield _package(name, without, MINIMUMS[name])


def _package(name: str, without: str, least: tuple[int, ...] = ()) -> Finding:
    try:
        version = str(importlib.import_module(name).__version__)
    except ImportError as error:
        return Finding(name, "missing", str(error), without)
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())
    if numbers < least:
        wanted = ".".join(map(str, least))
        return Finding(name, "missing", f"{version}, which is older than {wanted}", f"{without} with this version")
    return Finding(name, "ok", version)


def _gpus() -> Iterator[Finding]:
    import torch

    count = torch.cuda.device_count()
    if not count:
        yield Finding(
            "GPUs",
            "missing",
            "none that torch sees",
            "ranks are processes over gloo, schedules run on the host, kernels are interpreted (TRITON_INTERPRET=1)",
        )
        return
    from stretto.memory.network.interfaces import find_gin_obstacle

    for index in range(count):
        about = torch.cuda.get_device_properties(index)
        yield Finding(
            f"GPU {index}", "ok", f"{about.name}, sm_{about.major}{about.minor}, {about.total_memory / 2**30:.0f} GiB"
        )
    yield Finding("NCCL", "ok", ".".join(map(str, torch.cuda.nccl.version())))
    yield Finding("puts by NCCL", "missing", find_gin_obstacle(), "puts between nodes go over sockets, by the proxy")
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    apart = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    if apart:
        yield Finding(
            "peer access",
            "missing",
            f"not between GPUs {apart[0][0]} and {apart[0][1]}" + (f" and {len(apart) - 1} more" if apart[1:] else ""),
            "collectives run on NCCL, and operators are a library's GEMM and NCCL's collective",
        )
    elif pairs:
        yield Finding("peer access", "ok", "every GPU reaches every other's memory")
        yield from _links(count)


def _links(count: int) -> Iterator[Finding]:
    import torch

    from stretto.memory.copy_engine import are_linked

    gpus = [str(torch.cuda.get_device_properties(index).uuid) for index in range(count)]
    if all(are_linked(gpu, gpus) for gpu in gpus):
        yield Finding("NVLink", "ok", "between every two GPUs")
    else:
        yield Finding(
            "NVLink",
            "missing",
            "not between every two GPUs, or NVML does not say",
            "schedules do without LL128, and NCCL, not copy engines, carries what z sends",
        )


def _network() -> Iterator[Finding]:
    """Return which network interface each GPU's rank would use."""
    from stretto.cluster.nics import VARIABLE, choose_nics, list_gpus

    gpus = list_gpus()
    without = f"ranks on other machines cannot be reached ({VARIABLE} names interfaces)"
    try:
        chosen = choose_nics(max(len(gpus), 1))
    except ValueError as error:
        yield Finding("network", "missing", str(error), without)
        return
    if not chosen:
        yield Finding("network", "missing", "no interface that is up", without)
    for nic in dict.fromkeys(chosen):
        near = [str(place) for place, other in enumerate(chosen) if other == nic]
        of = f"for GPU{'s' if near[1:] else ''} {', '.join(near)}" if gpus else "for all ranks"
        yield Finding(f"network {nic.name}", "ok", f"{nic.describe()}, {of}")


def _host_memory() -> Iterator[Finding]:
    """Return how much optimizer state host memory could hold, and how much of that a rank could pin, one rank a GPU."""
    import torch

    from stretto.cluster.host_memory import host_memory_available, host_memory_limit

    try:
        limit, left = host_memory_limit(), host_memory_available()
    except OSError as error:
        yield Finding("host memory", "missing", str(error), "whether optimizer state fits into it is not checked")
        return
    there = f"{limit.bytes / 1e9:,.1f} GB ({limit.source}), {left.bytes / 1e9:,.1f} GB left for optimizer state"
    if ranks := torch.cuda.device_count():
        each = f"each of {ranks} ranks" if ranks > 1 else "a rank"
        there += f"; {each} may pin {left.bytes / ranks / 1e9:,.1f} GB"
    else:
        there += "; without a GPU a rank pins none"
    yield Finding("host memory", "ok", there)


def _compilers() -> Iterator[Finding]:
    from stretto.collectives.backend.native import CompilerError, find_library
    from stretto.collectives.executor.cuda.nvrtc import compile_source

    try:
        compile_source(KERNEL, "sm_90")
        yield Finding("NVRTC", "ok", "compiles CUDA C++")
    except (ImportError, RuntimeError) as error:
        yield Finding("NVRTC", "missing", str(error), "on GPUs all collectives run on NCCL")
    try:
        yield Finding("backend", "ok", f"compiled: {find_library()}")
    except CompilerError as error:
        yield Finding("backend", "missing", str(error), 'torch.distributed has no backend "stretto"')


def _places() -> Iterator[Finding]:
    from stretto.native_code import cache_folder

    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        yield Finding("cache", "ok", str(folder))
    except OSError as error:
        without = "what is measured and compiled is lost when the process ends; set STRETTO_CACHE to another folder"
        yield Finding("cache", "missing", f"{folder}: {error.strerror}", without)
    if sys.platform == "linux" and hasattr(os, "memfd_create"):
        yield Finding("shared memory", "ok", "between processes, by memfd")
    else:
        without = "ranks on CPUs have gloo alone: schedules and interpreted kernels need Linux"
        yield Finding("shared memory", "missing", f"no memfd on {platform.system()}", without)


def _extras() -> Iterator[Finding]:
    for name, without in (
        ("matplotlib", "no pictures are drawn (pip install 'stretto[plots]')"),
        ("tokenizers", "text is read as bytes (pip install 'stretto[tokenizers]')"),
        ("transformers", "Hugging Face's models are not there (pip install 'stretto[huggingface]')"),
        ("pyarrow", "Parquet files and saved data sets are refused (pip install 'stretto[data]')"),
        ("tensorboard", "train.tensorboard is refused (pip install 'stretto[tensorboard]')"),
        ("google.protobuf", "Chakra traces are refused (pip install 'stretto[chakra]')"),
    ):
        yield _package(name, without)


LOOKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    _python,
    _gpus,
    _network,
    _host_memory,
    _compilers,
    _places,
    _extras,
)
