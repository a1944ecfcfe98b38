# SPDX-License-Identifier: Apache-2.0
"""The shapes of DLRMs, including MLPerf's. Imports no torch: configurations are read without it."""

from dataclasses import dataclass, fields, replace
from typing import Any

from stretto.quantities import require_least
from stretto.suggestions import did_you_mean, require_fields, require_known_options


@dataclass(frozen=True)
class DLRMConfig:
    """The shape of a DLRM. A sample has `dense` features, and for each table a bag of row numbers.

    rows: of each table. dim: the embedding dimension of every table. pooling: the mean number of rows in a bag, of each
    table or one for all; it sizes the data and balances tables over ranks. bottom, top: layer widths of the MLPs; the
    bottom MLP ends with `dim`, the top MLP with 1, the logit. Raises ValueError when the numbers do not fit together.
    """

    rows: tuple[int, ...]
    dim: int
    bottom: tuple[int, ...]
    top: tuple[int, ...]
    pooling: tuple[int, ...] = (1,)
    dense: int = 13

    def __post_init__(self) -> None:
        require_fields(self, "model.")
        for name in ("rows", "bottom", "top", "pooling"):
            values = tuple(getattr(self, name))
            object.__setattr__(self, name, values)
            if not values:
                raise ValueError(f"model.{name} is empty, but must have at least one number")
            require_least(1, "model.", **{f"{name}[{place}]": value for place, value in enumerate(values)})
        require_least(1, "model.", dim=self.dim, dense=self.dense)
        if len(self.pooling) == 1:
            object.__setattr__(self, "pooling", self.pooling * len(self.rows))
        if len(self.pooling) != len(self.rows):
            raise ValueError(
                f"model.pooling has {len(self.pooling)} numbers, but model.rows has {len(self.rows)}: "
                "give one for each table, or one for all"
            )
        for name, wanted in (("bottom", self.dim), ("top", 1)):
            if (last := getattr(self, name)[-1]) != wanted:
                reason = "the width of a table's vectors, model.dim" if name == "bottom" else "the logit"
                raise ValueError(f"model.{name} ends with {last}, but must end with {wanted}, {reason}")

    @property
    def tables(self) -> int:
        """The number of tables."""
        return len(self.rows)

    @property
    def interactions(self) -> int:
        """The number of dot products: of all pairs among the tables' vectors and the bottom MLP's vector."""
        return self.tables * (self.tables + 1) // 2

    def capped(self, max_rows: int) -> "DLRMConfig":
        """Limit every table to `max_rows` rows, for machines that cannot hold the whole tables."""
        require_least(1, "model.", max_rows=max_rows)
        return replace(self, rows=tuple(min(rows, max_rows) for rows in self.rows))

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> "DLRMConfig":
        """Make a named shape: small, kaggle, mlperf-v2 or paper; `overrides` replace single fields."""
        if name not in DLRM_PRESETS:
            near = did_you_mean(name, DLRM_PRESETS) or "."
            raise ValueError(f"no DLRM is named {name!r}{near} Known: {', '.join(DLRM_PRESETS)}")
        require_known_options("a DLRM", overrides, sorted(field.name for field in fields(cls)))
        return replace(DLRM_PRESETS[name], **overrides)


# MLPerf's DLRM-v2: rows of the tables of Criteo's 1 TB click logs (at most 40 million), and the rows of its bags.
MLPERF_ROWS = (
    40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282, 10, 2_209, 11_938,
    155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36,
)  # fmt: skip
MLPERF_POOLING = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
# The numbers of distinct categories in the Kaggle challenge's data, as the published DLRM counts them.
KAGGLE_ROWS = (
    1_460, 583, 10_131_227, 2_202_608, 305, 24, 12_517, 633, 3, 93_145, 5_683, 8_351_593, 3_194, 27, 14_992, 5_461_306,
    10, 5_652, 2_173, 4, 7_046_547, 18, 15, 286_181, 105, 142_572,
)  # fmt: skip

DLRM_PRESETS: dict[str, DLRMConfig] = {
    "small": DLRMConfig(
        rows=(1000, 20, 500, 3, 200, 100, 1000, 50),
        dim=16,
        bottom=(64, 16),
        top=(64, 32, 1),
        pooling=(3, 1, 7, 1, 12, 2, 5, 1),
    ),
    "kaggle": DLRMConfig(rows=KAGGLE_ROWS, dim=16, bottom=(512, 256, 64, 16), top=(512, 256, 1)),
    # The interaction is a dot product, as in MLPerf's first DLRM; v2 has a low-rank DCN instead.
    "mlperf-v2": DLRMConfig(
        rows=MLPERF_ROWS, dim=128, bottom=(512, 256, 128), top=(1024, 1024, 512, 256, 1), pooling=MLPERF_POOLING
    ),
    # Punniyamurthy et al., section 4.1 and table 2: dimension 256, 70 rows in a bag. The number of rows is not given.
    "paper": DLRMConfig(rows=(1_000_000,) * 64, dim=256, bottom=(512, 256), top=(512, 256, 1), pooling=(70,)),
}
