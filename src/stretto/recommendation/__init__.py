# SPDX-License-Identifier: Apache-2.0
"""Recommendation models: DLRM, whose embedding tables are distributed over ranks.

`DLRM` and `DLRMConfig` are the model in plain PyTorch. `distribute_tables` places tables on ranks, whole by
`place_tables`, or also cut and replicated by `plan_tables`, and replicates the MLPs. data: click logs. training: what
`stretto train` runs for `model.kind = "dlrm"`. simulation: a step on any network, without a GPU.

Names are imported on first use: configurations and `simulation` also work on a machine without torch.
"""

from typing import TYPE_CHECKING

from stretto.lazy import attach

if TYPE_CHECKING:
    from stretto.recommendation.model import DLRM
    from stretto.recommendation.model_config import DLRMConfig
    from stretto.recommendation.placement import TablePlacement, TableSize, place_tables
    from stretto.recommendation.table_planner import TablePlan, TableRates, plan_tables
    from stretto.recommendation.table_state import distributed_state
    from stretto.recommendation.tables import ShardedTables, distribute_tables

_HOMES = {
    "DLRM": "model",
    "DLRMConfig": "model_config",
    "ShardedTables": "tables",
    "TablePlacement": "placement",
    "TablePlan": "table_planner",
    "TableRates": "table_planner",
    "TableSize": "placement",
    "distribute_tables": "tables",
    "distributed_state": "table_state",
    "place_tables": "placement",
    "plan_tables": "table_planner",
}
__all__ = [
    "DLRM",
    "DLRMConfig",
    "ShardedTables",
    "TablePlacement",
    "TablePlan",
    "TableRates",
    "TableSize",
    "distribute_tables",
    "distributed_state",
    "place_tables",
    "plan_tables",
]

__getattr__, __dir__ = attach(__name__, {name: f"stretto.recommendation.{home}" for name, home in _HOMES.items()})
