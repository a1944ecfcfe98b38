# SPDX-License-Identifier: Apache-2.0
"""Ten algorithms and each dense operator: those of its collective are joined with it and proved, others refused."""

import pytest
from tests.collectives.joint.named_algorithms import KINDS, NAMES, OTHERS, TWO_LEVEL, make_other, make_schedule

from stretto.collectives import verify
from stretto.collectives.joint import join, pull, require_collective, verify_joint


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8])
def test_each_algorithm_is_proved_inside_the_operators_of_its_collective(ranks):
    for operator in KINDS:
        for name in NAMES:
            schedule = make_schedule(name, operator, ranks)
            if schedule is None:
                assert (name, ranks in TWO_LEVEL) == ("two levels", False)
                continue
            assert verify(schedule).ok, (name, operator)
            require_collective(operator, schedule, ranks)
            rows = 13 * ranks if operator == "matmul_reduce_scatter" else 13  # chunks are ragged
            joint = join(operator, schedule, rows, 4)
            assert verify_joint(joint) == [], (name, operator)
            if joint.is_gather:
                assert verify_joint(pull(joint)) == [], (name, operator)
            else:
                with pytest.raises(ValueError, match=f"{operator} adds up what comes"):
                    pull(joint)


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8])
def test_algorithms_of_other_collectives_are_refused_by_name(ranks):
    for operator in KINDS:
        for name in OTHERS:
            schedule = make_other(name, ranks)
            assert verify(schedule).ok
            with pytest.raises(ValueError, match=f"{operator} takes a schedule of an .*, and {name} is one of"):
                require_collective(operator, schedule, ranks)
