# SPDX-License-Identifier: Apache-2.0
"""Names from before this release: each is found by its old name, and warns with the new one."""

import pytest

from stretto import axes, parallel
from stretto.parallel import Overlap, Role


@pytest.mark.parametrize(
    ("old", "new"),
    [("Collective", "CollectiveCall"), ("Layout", "ParameterLayout"), ("deferred_reduction", "no_sync")],
)
def test_an_old_name_is_the_new_one_and_warns(old, new):
    with pytest.warns(DeprecationWarning, match=f"{old} is now .*{new}"):
        assert getattr(parallel, old) is getattr(parallel, new)


def test_the_names_of_the_axes_are_in_stretto_axes_and_their_old_name_warns():
    with pytest.warns(DeprecationWarning, match="stretto.parallel.AXES is now stretto.axes.NAMES"):
        assert parallel.AXES is axes.NAMES


@pytest.mark.parametrize(("old", "new"), [("normal", "colwise"), ("swapped", "rowwise")])
def test_an_old_role_is_the_new_one_and_warns(old, new):
    for value in (old, {"role": old}):
        with pytest.warns(DeprecationWarning, match=f"role '{old}' is now '{new}'"):
            assert Role.parse(value) == Role(new)


def test_overlap_none_is_what_overlap_false_means_and_warns():
    with pytest.warns(DeprecationWarning, match="overlap=False"):
        assert Overlap.none() == Overlap.parse(False)
