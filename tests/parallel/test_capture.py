# SPDX-License-Identifier: Apache-2.0
"""What can be tested of a captured step without a GPU; tests/gpu/test_trainer.py runs them."""

import pytest
import torch

from stretto.parallel import CapturedStep


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_captured_step_without_a_gpu_raises():
    with pytest.raises(ValueError, match="a CUDA graph needs a GPU, and there is none"):
        CapturedStep(lambda: ())
