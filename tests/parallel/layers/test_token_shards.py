# SPDX-License-Identifier: Apache-2.0
"""An input that linears gather once is theirs for as long as it lives as it is."""

import torch

from stretto.parallel.layers.token_shards import TokenShards


def test_linears_share_a_gathered_input_until_it_is_changed_or_freed():
    shards = TokenShards(None)
    x, other = torch.zeros(2, 3), torch.zeros(2, 3)
    gathered = shards.gathered_input(x)
    gathered.rows = torch.ones(4, 3)
    assert shards.gathered_input(other).rows is None
    assert shards.gathered_input(x) is gathered
    x.add_(1)
    assert shards.gathered_input(x).rows is None
    del x, other
    assert not shards._gathered
