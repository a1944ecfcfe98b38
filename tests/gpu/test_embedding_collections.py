# SPDX-License-Identifier: Apache-2.0
"""Models with embedding collections train on GPUs as on one CPU, by PyTorch's functions and by the fused operator."""

import pytest

from stretto.recommendation.pooled_exchange import _find_operators
from tests.gpu.sharing import GpuRanks
from tests.recommendation import embedding_models

pytestmark = pytest.mark.ranks(2, own=(1, 2, 4), among=(1, 2, 3, 4))


def test_training_by_pytorchs_functions_is_that_of_one_cpu(gpu_pool: GpuRanks, world: int) -> None:
    gpu_pool.run(world, embedding_models.compare, "cuda", 1e-9, timeout=60)


@pytest.mark.skipif(_find_operators() is None, reason="no Triton")
def test_a_step_by_the_fused_operator_is_that_of_one_cpu(gpu_pool: GpuRanks, world: int) -> None:
    gpu_pool.run(world, embedding_models.compare_kernel, "cuda", timeout=120)


def test_what_one_gpu_is_given_wrongly_all_refuse_and_go_on(gpu_pool: GpuRanks, world: int) -> None:
    if world > 1:
        messages = gpu_pool.run(world, embedding_models.refuse_and_go_on, "cuda", timeout=60)
        assert "feature 'country' of table 't2'" in messages[1][0]


def test_ids_that_are_sent_ahead_on_a_stream_of_their_own_give_the_same_bits(gpu_pool: GpuRanks, world: int) -> None:
    if world == 2:
        gpu_pool.run(world, embedding_models.prefetch, "cuda", timeout=60)
