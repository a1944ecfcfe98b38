# SPDX-License-Identifier: Apache-2.0
"""Functions of ranks whose kernels are compiled, on CPUs, where they cannot run."""

import logging

import pytest
import torch

from stretto import ops


def run_without_kernels():
    """(what ran as what, what was warned of)."""
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("stretto.ops").addHandler(handler)
    try:
        x, weight = torch.ones(4, 8), torch.ones(6, 8)
        assert torch.equal(ops.all_gather_matmul(x, weight), torch.full((8, 6), 8.0))
        assert torch.equal(ops.matmul_reduce_scatter(x, weight), torch.full((2, 6), 16.0))
        assert torch.equal(ops.matmul_all_reduce(x, weight), torch.full((4, 6), 16.0))
        with pytest.raises(ValueError, match="no kernel can run: on CPUs kernels are interpreted"):
            ops.all_gather_matmul(x, weight, implementation="kernel")
        return dict(ops.counts()), "\n".join(messages)
    finally:
        logging.getLogger("stretto.ops").removeHandler(handler)
