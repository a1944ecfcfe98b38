# SPDX-License-Identifier: Apache-2.0
"""The algorithms: each a short program with its source. `find` has them by name."""

import importlib.util
from pathlib import Path

from stretto.collectives.algorithm import Algorithm
from stretto.collectives.algorithms.all_pairs import (
    direct_all_gather,
    direct_reduce_scatter,
    one_shot_all_reduce,
    two_shot_all_reduce,
)
from stretto.collectives.algorithms.exchange import all_to_next, direct_all_to_all, two_step_all_to_all
from stretto.collectives.algorithms.hierarchical import (
    dgx1_all_gather,
    hierarchical_all_gather,
    hierarchical_all_reduce,
    hierarchical_reduce_scatter,
)
from stretto.collectives.algorithms.recursive import (
    binomial_broadcast,
    binomial_reduce,
    recursive_doubling_all_gather,
    recursive_halving_all_reduce,
    recursive_halving_reduce_scatter,
)
from stretto.collectives.algorithms.ring import ring_all_gather, ring_all_reduce, ring_reduce_scatter
from stretto.suggestions import did_you_mean, did_you_mean_file, name_known

ALGORITHMS: dict[str, Algorithm] = {
    each.name: each
    for each in (
        ring_all_reduce,
        one_shot_all_reduce,
        two_shot_all_reduce,
        recursive_halving_all_reduce,
        hierarchical_all_reduce,
        ring_all_gather,
        direct_all_gather,
        recursive_doubling_all_gather,
        hierarchical_all_gather,
        dgx1_all_gather,
        ring_reduce_scatter,
        direct_reduce_scatter,
        recursive_halving_reduce_scatter,
        hierarchical_reduce_scatter,
        direct_all_to_all,
        two_step_all_to_all,
        all_to_next,
        binomial_broadcast,
        binomial_reduce,
    )
}


def find(name: str) -> Algorithm:
    """The algorithm of this name, with dashes or underscores. ValueError, with all names, for any other."""
    found = ALGORITHMS.get(name.replace("_", "-"))
    if found is None:
        raise ValueError(f"there is no algorithm {name!r}{name_known(name, ALGORITHMS)}")
    return found


def load(file: Path, function: str) -> Algorithm:
    """The algorithm that a Python file defines under this name. The file is run: it is code that the user chose.

    ValueError for a file that is not there, does not run, or has no such algorithm.
    """
    spec = importlib.util.spec_from_file_location(f"{file.stem} of the user", file)
    if spec is None or spec.loader is None or not file.is_file():
        raise ValueError(f"{file} is no Python file{'' if file.exists() else did_you_mean_file(file, ('.py',))}")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever the user's code raises is the user's to read
        raise ValueError(f"{file} does not run: {type(error).__name__}: {error}") from error
    found = getattr(module, function, None)
    if not isinstance(found, Algorithm):
        names = [name for name, value in vars(module).items() if isinstance(value, Algorithm)]
        has = f"it has {', '.join(names)}" if names else "decorate a function with @algorithm"
        raise ValueError(f"{file} has no algorithm {function!r}: {has}{did_you_mean(function, names)}")
    return found
