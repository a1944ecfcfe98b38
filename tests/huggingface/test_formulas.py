# SPDX-License-Identifier: Apache-2.0
"""A norm's formula is found by trying it, so that a class that computes something else is refused."""

import pytest
import torch
from torch import Tensor, nn

from stretto.huggingface.formulas import NormKind, norm_kind


class OffsetRMSNorm(nn.Module):
    """Gemma's: the weight is stored less one."""

    def __init__(self) -> None:
        super().__init__()
        self.eps = 1e-6
        self.weight = nn.Parameter(torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * (1 + self.weight)


class ClampedRMSNorm(OffsetRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).clamp(-0.5, 0.5)


class LiteralRMSNorm(nn.Module):
    """Its eps is in its code alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 2e-5) * self.weight


class NamedRMSNorm(LiteralRMSNorm):
    def __init__(self) -> None:
        super().__init__()
        self.norm_epsilon = 3e-5

    def forward(self, x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + self.norm_epsilon) ** -0.5 * self.weight


class GatedRMSNorm(OffsetRMSNorm):
    def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) * gate


def test_torch_norms_are_known() -> None:
    assert norm_kind(nn.LayerNorm(16, eps=1e-3), "norm") == NormKind(True, 1e-3)
    assert norm_kind(nn.RMSNorm(16), "norm") == NormKind(False, None)


def test_a_weight_offset_is_found_also_on_the_meta_device() -> None:
    assert norm_kind(OffsetRMSNorm(), "norm") == NormKind(False, 1e-6, 1.0)
    assert norm_kind(OffsetRMSNorm().to("meta"), "norm") == NormKind(False, 1e-6, 1.0)


def test_an_eps_is_found_by_any_name_and_in_code() -> None:
    assert norm_kind(LiteralRMSNorm(), "norm") == NormKind(False, 2e-5)
    assert norm_kind(NamedRMSNorm(), "norm") == NormKind(False, 3e-5)


@pytest.mark.parametrize("module", [ClampedRMSNorm(), GatedRMSNorm(), nn.GroupNorm(2, 16), nn.LayerNorm((4, 4))])
def test_a_norm_of_another_formula_is_refused_by_name(module: nn.Module) -> None:
    with pytest.raises(ValueError, match=r"blocks\.3\.norm"):
        norm_kind(module, "blocks.3.norm")
