# SPDX-License-Identifier: Apache-2.0
"""The table of cases that `python -m lab checkouts` measures; each checkout's ranks build them from it."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BEFORE, AFTER = "before", "after"
MODES = ("graph", "eager")
_SIZES = {"1 KB": 1 << 10, "64 KB": 64 << 10, "1 MB": 1 << 20, "16 MB": 16 << 20}
_EAGER_SIZES = ("1 KB", "1 MB")  # sizes at which the host's time shows
_COLLECTIVES = {
    "allreduce": "two-shot-all-reduce",
    "allgather": "direct-all-gather",
    "reducescatter": "direct-reduce-scatter",
    "alltoall": "direct-all-to-all",
}
_UNROLLS = {"LL": 1, "LL128": 1, "Simple": 4, "Copy": 4}
_FILLING = 64 << 10  # bytes from which a fused schedule has blocks for all multiprocessors of a rank's share
_LARGE = 1 << 20  # bytes beyond which a call is long enough to be timed by itself
_N, _K = 4096, 1024
_PACKETS = {"exchange": "packets"}
_PLANS: tuple[tuple[str, str, dict[str, Any], tuple[int, ...]], ...] = (
    ("all_gather_matmul", "programs", {"transfer": "programs"}, (16, 512, 2048)),
    ("all_gather_matmul", "copies", {"transfer": "copies"}, (512, 2048)),
    ("matmul_reduce_scatter", "packets", _PACKETS, (16,)),
    ("matmul_reduce_scatter", "tiles by programs", {"transfer": "programs"}, (512, 2048)),
    ("matmul_reduce_scatter", "tiles by copies", {"transfer": "copies"}, (2048,)),
    ("matmul_all_reduce", "one shot", _PACKETS | {"shots": 1}, (16,)),
    ("matmul_all_reduce", "two shots", _PACKETS | {"shots": 2}, (16, 512)),
)
"""Operator, name of a configuration, the fields that it sets, and rows of the whole matrix.

There is no all-reduce by tiles: its second half is the library's all-gather, which gloo would run here."""


@dataclass(frozen=True)
class CheckoutCase:
    """One call to time, in one mode ("graph": replays of a CUDA graph; "eager": calls from the host).

    kind and options: what `checkouts.worker` builds it from; options["calls"]: calls in a row, or in a graph.
    is_bounded: whether its kernel fills the GPU and waits for other ranks, where ranks share the GPU. Such cases are
    listed apart, since a change may bound how many blocks their kernels take.
    """

    name: str
    kind: str
    mode: str
    options: dict[str, Any]
    is_bounded: bool = False

    def describe(self) -> dict[str, Any]:
        """The fields of the command from which a rank builds the case."""
        return {"kind": self.kind, "mode": self.mode, "options": self.options}


def list_cases(ranks: int = 4) -> list[CheckoutCase]:
    """All cases for a number of ranks. Those that compile fast come first, so that a short run measures them too.

    A single rank has no peer to communicate with: its only case is a training step.
    """
    if ranks == 1:
        return [_make_training_case("training step", layers=8, hidden=512, seq_len=256)]
    return [*_list_collectives(), *_list_tiles(), *_list_embeddings(), *_list_operators()]


def _list_collectives() -> Iterator[CheckoutCase]:
    for mode in MODES:
        for collective, algorithm in _COLLECTIVES.items():
            for protocol, unroll in _UNROLLS.items():
                for name in _SIZES if mode == "graph" else _EAGER_SIZES:
                    size = _SIZES[name]
                    options = {"collective": collective, "algorithm": algorithm, "protocol": protocol, "unroll": unroll}
                    options |= {"size": size, "calls": 4 if size <= _LARGE else 1}
                    title = f"{collective} {protocol} {name} {mode}"
                    is_bounded = protocol != "Copy" and size >= _FILLING
                    yield CheckoutCase(title, "collective", mode, options, is_bounded)


def _list_tiles() -> Iterator[CheckoutCase]:
    for transfer in ("push", "copies"):
        for rows in (16, 1024):
            for mode in MODES:
                options = {"transfer": transfer, "rows": rows, "columns": 1024, "calls": 4}
                yield CheckoutCase(f"tiles by {transfer}, {rows} rows {mode}", "tiles", mode, options)


def _list_embeddings() -> Iterator[CheckoutCase]:
    shape = {"tables": 4, "rows": 10_000, "dim": 128, "pooling": 8, "batch": 2048}
    for part in ("forward", "update", "backward"):
        for mode in MODES:
            if part != "backward" or mode == "eager":  # autograd is called by the host
                options = {"part": part, **shape, "calls": 2}
                # Programs that push gradients wait for room at their owners.
                is_bounded = part != "forward"
                yield CheckoutCase(f"embedding {part} {mode}", "embedding", mode, options, is_bounded)


def _list_operators() -> Iterator[CheckoutCase]:
    for operator, name, plan, rows in _PLANS:
        for m in rows:
            for mode in MODES:
                options = {"operator": operator, "m": m, "n": _N, "k": _K, "dtype": "bfloat16", "plan": plan}
                title = f"{operator} {name} m={m} {mode}"
                yield CheckoutCase(title, "operator", mode, options | {"calls": 4}, is_bounded=True)


def _make_training_case(name: str, **sizes: int) -> CheckoutCase:
    """A step of a small GPT by itself, limited by the host: launching takes longer than the kernels run."""
    return CheckoutCase(f"{name} eager", "training", "eager", sizes | {"calls": 1})


CPU_TRAINING_CASES = [_make_training_case("tiny training step", layers=1, hidden=32, seq_len=16)]
_TINY = {"m": 4, "n": 32, "k": 32, "dtype": "float32", "plan": _PACKETS | {"shots": 1}, "calls": 1}
CPU_CASES = [
    CheckoutCase(
        "tiles by push, 16 rows eager", "tiles", "eager", {"transfer": "push", "rows": 16, "columns": 32, "calls": 1}
    ),
    CheckoutCase(
        "matmul_all_reduce one shot m=4 eager", "operator", "eager", {"operator": "matmul_all_reduce"} | _TINY, True
    ),
]
"""Two small cases for CPU ranks, whose kernels are interpreted."""


def find_source(name: str, path: Path) -> Path:
    """The folder of a checkout that holds the package. ValueError where there is none. name: the option's."""
    for folder in (path, path / "src"):
        if (folder / "stretto" / "__init__.py").is_file():
            return folder.resolve()
    raise ValueError(f"--{name} is {str(path)!r}, which holds no package stretto: give a checkout, or its src")
