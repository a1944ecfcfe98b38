# SPDX-License-Identifier: Apache-2.0
"""Settings of `stretto bench ops` and `stretto tune operators`: operators, shapes of models, numbers of rows."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated

from stretto.bench.settings import Modes, Option, Tuning, require_known
from stretto.quantities import require_least

OPERATORS = {
    "gather": "all_gather_matmul",
    "gathered": "all_gather_matmul_gathered",
    "scatter": "matmul_reduce_scatter",
    "reduce": "matmul_all_reduce",
}
MODES = ("graph", "eager")
DTYPES = ("bf16", "fp8")
CASES: Mapping[str, tuple[int, int]] = {
    "flux": (49152, 12288),
    "llama-7b": (11008, 4096),
    "llama-3.1-8b": (14336, 4096),
    "llama-3.1-70b": (28672, 8192),
    "llama-3.1-405b": (53248, 16384),
    "qwen2-72b": (29568, 8192),
    "attention-4096": (4096, 4096),
    "attention-8192": (8192, 8192),
}
"""(intermediate, hidden) of an MLP, or of attention's output projection: the first is n of a gather, else k."""

FLUX_ROWS = (64, 512, 1024, 2048, 4096, 8192)
MANY_ROWS = (8192,)
FEW_ROWS = (1, 8, 16, 64)


@dataclass(frozen=True)
class OperatorShapes:
    """Operators, shapes of models, and the dtype of operands. Raises ValueError for unknown names.

    cases: names in `CASES` (empty: all). ms: rows of the whole matrix (empty: each case's own). dtype: fp8 is scaled by
    rows and columns and has bf16 results.
    """

    operators: Annotated[
        tuple[str, ...], Option("gather, gathered (which returns the rows), scatter, reduce.", "--only")
    ] = tuple(OPERATORS)
    cases: Annotated[tuple[str, ...], Option("Models whose shapes are taken, with commas (default: all).")] = ()
    ms: Annotated[tuple[int, ...], Option("Rows of the whole, with commas (default: each case's own).")] = ()
    dtype: Annotated[str, Option("Dtype of operands: bf16, or fp8 with a scale a row.")] = "bf16"

    def __post_init__(self) -> None:
        require_known("operator", self.operators, OPERATORS)
        require_known("case", self.cases, CASES)
        require_known("dtype", (self.dtype,), DTYPES)
        if self.dtype == "fp8" and self.operators == ("gathered",):
            raise ValueError("gathered has no fp8 form: gather has one")

    def shapes(self) -> Iterator[tuple[str, str, int]]:
        """(operator, case, rows of the whole) of each row of the bench."""
        for name in self.operators:
            if name == "gathered" and self.dtype == "fp8":  # it is for training
                continue
            for case in self.cases or tuple(CASES):
                for m in self.rows_of(name, case):
                    yield name, case, m

    def rows_of(self, operator: str, case: str) -> tuple[int, ...]:
        """The numbers of rows to measure."""
        if self.ms:
            return self.ms
        if operator == "reduce":
            return FEW_ROWS
        if case.startswith("attention"):
            return ()
        return FLUX_ROWS if case == "flux" else MANY_ROWS


@dataclass(frozen=True)
class OperatorsSetting(OperatorShapes):
    """Settings of `stretto bench ops`, in which modes and with which implementation of Stretto's calls."""

    modes: Modes = MODES
    implementation: Annotated[str, Option("Implementation of Stretto's calls: auto, kernel, library.")] = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_known("mode", self.modes, MODES)
        require_known("implementation", (self.implementation,), ("auto", "kernel", "library"))

    @property
    def file_name(self) -> str:
        """The name of the results' files, without an extension."""
        return "operators" if self.dtype == "bf16" else f"operators-{self.dtype}"


@dataclass(frozen=True)
class OperatorsTuning(Tuning, OperatorShapes):
    """Settings of `stretto tune operators`."""

    def calls(self, ranks: int) -> Iterator[tuple[str, int, int, int, bool]]:
        """(operator, a rank's m, n and k, whether the weight is a transpose) of each call that is measured.

        Backward passes multiply by the transpose of the other operator's weight, which is of the same shape.
        """
        for name, case, m in self.shapes():
            shape = local_shape(name, case, m, ranks)
            yield OPERATORS[name], *shape, False
            if name in ("gathered", "scatter") and self.dtype != "fp8":
                yield OPERATORS[name], *shape, True

    def problems(self, ranks: int) -> list[str]:
        """Names of the calls that are measured, with a rank's m, n and k."""
        return [
            f"{operator} {m} x {n} x {k} {self.dtype}{' transposed' * transposed}"
            for operator, m, n, k, transposed in self.calls(ranks)
        ]


@dataclass(frozen=True)
class AttentionTuning(Tuning):
    """Settings of `stretto tune attention`: causal, bf16, cut zig-zag."""

    sequences: Annotated[tuple[int, ...], Option("Lengths of the whole sequence, with commas.")] = (
        16384,
        65536,
        262144,
    )
    heads: Annotated[int, Option("Heads of queries.")] = 32
    kv_heads: Annotated[int, Option("Heads of keys and values.")] = 8
    size: Annotated[int, Option("Numbers of a head.")] = 128
    batch: Annotated[int, Option("Sequences.")] = 1

    def __post_init__(self) -> None:
        require_least(1, heads=self.heads, kv_heads=self.kv_heads, size=self.size, batch=self.batch)

    def problems(self, ranks: int) -> list[str]:
        """Names of the measured calls, forward and with gradients. ValueError for lengths that are no chunks."""
        for length in self.sequences:
            if length < 1 or length % (2 * ranks):
                raise ValueError(
                    f"{length} tokens are no 2 x {ranks} equal chunks: {-(-length // (2 * ranks)) * 2 * ranks} are"
                )
        shape = f"{self.batch} x {self.heads}/{self.kv_heads} x {self.size}"
        return [f"attention {shape} of {length}{kind}" for length in self.sequences for kind in ("", " training")]


def local_shape(name: str, case: str, m: int, world: int) -> tuple[int, int, int]:
    """(m, n, k): global rows, and a rank's weight [n, k], its sharded dim rounded down to a multiple of 16 for TMA."""
    sharded, whole = CASES[case]
    part = sharded // world // 16 * 16
    return (m, part, whole) if name in ("gather", "gathered") else (m, whole, part)


EXPERTS: Mapping[str, tuple[int, int, int, int]] = {
    "mixtral-8x7b": (4096, 14336, 8, 2),
    "mixtral-8x22b": (6144, 16384, 8, 2),
    "qwen2-57b-a14b": (3584, 2560, 64, 8),
    "qwen3-30b-a3b": (2048, 768, 128, 8),
}


@dataclass(frozen=True)
class ExpertShape:
    """The shape of a layer of experts: hidden and intermediate size, experts, and how many a token takes."""

    hidden: int
    intermediate: int
    experts: int
    top_k: int

    @classmethod
    def parse(cls, text: str) -> "ExpertShape":
        """Parse "4096x14336x8x2", or a name in `EXPERTS`. Raises ValueError for others."""
        parts = EXPERTS[text] if text in EXPERTS else text.split("x")
        if len(parts) != 4 or not all(isinstance(part, int) or part.isdecimal() for part in parts):
            raise ValueError(f"a case is HIDDENxINTERMEDIATExEXPERTSxTOP_K or of {', '.join(EXPERTS)}, not {text!r}")
        shape = cls(*map(int, parts))
        if min(shape.hidden, shape.intermediate) < 8 or not 1 <= shape.top_k <= shape.experts:
            raise ValueError(f"a case has sizes of 8 or more, and 1 to EXPERTS experts a token, not {text!r}")
        return shape

    def __str__(self) -> str:
        """The form that `parse` reads."""
        return f"{self.hidden}x{self.intermediate}x{self.experts}x{self.top_k}"


@dataclass(frozen=True)
class ExpertsTuning(Tuning):
    """Settings of `stretto tune experts`: tensor-parallel experts, whose columns all ranks divide."""

    cases: Annotated[
        tuple[ExpertShape, ...], Option(f"HIDDENxINTERMEDIATExEXPERTSxTOP_K or {', '.join(EXPERTS)}, with commas.")
    ] = tuple(ExpertShape(*sizes) for sizes in EXPERTS.values())
    ms: Annotated[tuple[int, ...], Option("Tokens of all ranks, with commas.")] = MANY_ROWS

    def __post_init__(self) -> None:
        for m in self.ms:
            require_least(1, ms=m)

    def calls(self, ranks: int) -> Iterator[tuple[ExpertShape, str, int, int, int, bool]]:
        """(case, operator, m, a rank's n and k, whether the weight is a transpose) of each product of a step."""
        for case in self.cases:
            inner = case.intermediate // ranks
            for m in self.ms:
                yield case, "all_gather_moe", m, 2 * inner, case.hidden, False
                yield case, "moe_reduce_scatter", m, case.hidden, inner, False
                yield case, "all_gather_moe", m, inner, case.hidden, True
                yield case, "moe_reduce_scatter", m, case.hidden, 2 * inner, True

    def problems(self, ranks: int) -> list[str]:
        """Names of the calls that are measured, with a rank's m, n and k."""
        return [
            f"{operator} {m} x {n} x {k} of {case}{' transposed' * transposed}"
            for case, operator, m, n, k, transposed in self.calls(ranks)
        ]
