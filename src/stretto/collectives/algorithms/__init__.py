"""The algorithms: each a short program with its source. `find` has them by name."""

from stretto.collectives.algorithm import Algorithm
from stretto.collectives.algorithms.all_pairs import direct_all_gather, one_shot_all_reduce, two_shot_all_reduce
from stretto.collectives.algorithms.dgx1 import dgx1_all_gather
from stretto.collectives.algorithms.exchange import all_to_next, direct_all_to_all, two_step_all_to_all
from stretto.collectives.algorithms.hierarchical import (
    hierarchical_all_gather,
    hierarchical_all_reduce,
    hierarchical_reduce_scatter,
)
from stretto.collectives.algorithms.recursive import (
    recursive_doubling_all_gather,
    recursive_halving_all_reduce,
    recursive_halving_reduce_scatter,
)
from stretto.collectives.algorithms.ring import ring_all_gather, ring_all_reduce, ring_reduce_scatter
from stretto.collectives.algorithms.trees import binomial_broadcast, binomial_reduce

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
    """The algorithm of this name, with dashes or underscores; ValueError with the nearest names for another."""
    found = ALGORITHMS.get(name.replace("_", "-"))
    if found is None:
        raise ValueError(f"there is no algorithm {name!r}: there are {', '.join(ALGORITHMS)}")
    return found
