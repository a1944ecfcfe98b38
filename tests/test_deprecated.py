# SPDX-License-Identifier: Apache-2.0
"""Old names go on working for one release, and say what they are now."""

import importlib

import pytest

from stretto.deprecated import alias

RENAMED = {
    ("stretto.cluster", "Transfer"): "MeasuredCollective",
    ("stretto.collectives.backend", "Installed"): "InstalledSchedule",
    ("stretto.collectives.backend", "counts"): "call_counts",
    ("stretto.collectives.two_level", "Call"): "TwoLevelCall",
    ("stretto.collectives.two_level", "Transfer"): "MessageWork",
    ("stretto.memory", "tell"): "store_all_gather",
    ("stretto.planner", "Plan"): "GridPlan",
    ("stretto.report", "Run"): "RunRecord",
    ("stretto.collectives.executor.cuda", "LaneKernel"): "FusedScheduleKernel",
    ("stretto.collectives.executor.cuda", "Workspace"): "CollectiveWorkspace",
    ("stretto.collectives.selection", "BY_COPIES_FROM"): "COPY_ENGINE_MIN_BYTES",
    ("stretto.collectives.selection", "WAYS"): "CHOICES",
    ("stretto.collectives.selection", "Way"): "AlgorithmChoice",
    ("stretto.collectives.selection", "default_way"): "default_choice",
    ("stretto.collectives.selection", "find_ways"): "find_choices",
    ("stretto.tiles", "open_lane"): "open_side_stream",
    ("stretto.tuning", "Store"): "TuningStore",
}


@pytest.mark.parametrize(("module", "old"), RENAMED)
def test_an_old_name_is_the_new_one_with_a_warning(module, old):
    new = RENAMED[module, old]
    owner = importlib.import_module(module)
    with pytest.warns(DeprecationWarning, match=rf"{module}\.{old} is now {module}\.{new}"):
        found = getattr(owner, old)
    assert found is getattr(owner, new)


def test_an_alias_may_be_of_something_elsewhere():
    find = alias("stretto.old", {"Gone": "stretto.tuning.TuningStore"})
    with pytest.warns(DeprecationWarning, match=r"stretto\.old\.Gone is now stretto\.tuning\.TuningStore"):
        assert find("Gone") is importlib.import_module("stretto.tuning").TuningStore
    with pytest.raises(AttributeError, match="has no attribute 'Other'"):
        find("Other")
