# SPDX-License-Identifier: Apache-2.0
"""Models and grids of the benches of training, by name."""

import pytest

from lab.training.models import LLAMA_7B, model_config, parse_grids


def test_the_default_model_has_the_parameters_that_it_is_named_after():
    layer = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336 + 2 * 4096
    assert 32 * layer + 2 * 32_000 * 4096 + 4096 == pytest.approx(7.24e9, rel=1e-3)
    assert (LLAMA_7B.layers, model_config("llama-7b", 2, 512).layers) == (32, 2)


def test_grids_are_read_as_people_write_them():
    assert parse_grids("z=4,x=2 z=2", 4) == [
        {"pipe": 1, "data": 1, "x": 1, "y": 1, "z": 4},
        {"pipe": 1, "data": 1, "x": 2, "y": 1, "z": 2},
    ]
    with pytest.raises(ValueError, match="the grid x=2 has 2 ranks, but 4 are used"):
        parse_grids("x=2", 4)
    with pytest.raises(ValueError, match="'w=4' is not a grid; write grids as"):
        parse_grids("w=4", 4)
    with pytest.raises(ValueError, match="no model is named 'llama-8b'"):
        model_config("llama-8b", None, 512)
