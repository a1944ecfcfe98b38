# SPDX-License-Identifier: Apache-2.0
"""State dicts of a parallelized model: its own, and that of the model that it was."""

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from stretto.parallel import Grid, gather, parallelize
from tests.parallel.training import Sizes


class Fused(nn.Module):
    """Every way in which a parameter is cut: vocabularies that x does not divide, fused segments, rowwise, tied.

    A bias stands on the model too, as BERT's does.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.lookup, self.places = nn.Embedding(13, 8), nn.Embedding(5, 8)
        self.qkv, self.out, self.norm = nn.Linear(8, 24), nn.Linear(8, 8), nn.LayerNorm(8)
        self.head = nn.Linear(8, 13)
        self.head.weight = self.lookup.weight
        self.bias = self.head.bias
        self.register_buffer("scale", torch.randn(3))
        nn.init.normal_(self.norm.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(self.lookup(tokens) + self.places(tokens % 5))).chunk(3, -1)
        return self.head(self.out(q * k + v))


ROLES = {
    "lookup": "embedding",
    "places": "positions",
    "qkv": {"role": "colwise", "segments": 3},
    "out": "rowwise",
    "norm": "norm",
    "head": "head",
}


def loaded(sizes: Sizes) -> tuple[bool, bool, list[str]]:
    """True if a plain model's state dict, and its own, arrive whole; and the error for one of another shape."""
    grid = Grid(**dict(zip(("data", "x", "y", "z"), sizes, strict=True)))
    plain, model = Fused(1), parallelize(Fused(2), grid, roles=ROLES)

    def is_equal() -> bool:
        named = dict(plain.named_parameters())
        entries = model.state_dict()  # of fused parameters, too
        return torch.equal(model.scale, plain.scale) and all(
            torch.equal(gather(parameter), named[name]) and torch.equal(gather(entries[name]), named[name])
            for name, parameter in model.named_parameters()
        )

    model.load_state_dict(plain.state_dict())
    from_plain = is_equal()
    own = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(Fused(3).state_dict())
    model.load_state_dict(own)
    messages = []
    for value in (torch.zeros(13, 7), torch.zeros(7, 4)):
        with pytest.raises(RuntimeError) as caught:
            model.load_state_dict(plain.state_dict() | {"lookup.weight": value})
        messages.append(str(caught.value))
    return from_plain, is_equal(), messages


@pytest.mark.sampled(1)
@pytest.mark.parametrize("sizes", [(1, 2, 1, 2), (1, 2, 2, 1), (2, 1, 2, 1)], ids=str)
def test_a_plain_models_state_dict_is_loaded_part_by_part(ranks, sizes):
    for from_plain, from_own, messages in ranks(4).run(loaded, sizes):
        assert from_plain
        assert from_own
        assert all("size mismatch for lookup.weight" in message for message in messages)


def load_another_grids() -> tuple[str, bool]:
    """The error for shards of another grid, and whether whole tensors that were gathered from them arrive."""
    first, second = parallelize(Fused(1), Grid(x=2), roles=ROLES), parallelize(Fused(2), Grid(z=2), roles=ROLES)
    shards = first.state_dict()
    with pytest.raises(ValueError) as caught:
        second.load_state_dict(shards)
    second.load_state_dict(
        {name: gather(p) for name, p in first.named_parameters(remove_duplicate=False)}, strict=False
    )
    named = dict(Fused(1).named_parameters())
    return str(caught.value), all(torch.equal(gather(p), named[name]) for name, p in second.named_parameters())


def test_shards_of_another_grid_are_refused_with_what_to_load_instead(ranks):
    for message, is_equal in ranks(2).run(load_another_grids):
        assert "bias is sharded over x=2, and the model's over z=2" in message
        assert "stretto.parallel.gather" in message
        assert is_equal


def converted() -> tuple[bool, float]:
    """Of a bias in two places, after a conversion: whether it is still one, and how far its gradient is."""
    grid, tokens = Grid(x=2), torch.arange(8).view(2, 4)
    plain, model = Fused(1).double(), parallelize(Fused(1), grid, roles=ROLES).double()
    plain(tokens).square().sum().backward()
    model(tokens).square().sum().backward()
    with torch.no_grad():
        model.bias.to_local().copy_(model.bias.grad.to_local())
    return model.bias is model.head.bias, (gather(model.bias) - plain.bias.grad).abs().max().item()


def test_a_parameter_that_a_module_without_a_role_holds_too_stays_one(ranks):
    for is_one, far in ranks(2).run(converted):
        assert is_one
        assert far < 1e-6


def whole_sizes(sizes: Sizes) -> dict[str, tuple[int, int]]:
    """The sizes that a model reads from its modules."""
    model = parallelize(Fused(1), Grid(**dict(zip(("data", "x", "y", "z"), sizes, strict=True))), roles=ROLES)
    linears = {name: getattr(model, name) for name in ("qkv", "out", "head")}
    embeddings = {name: getattr(model, name) for name in ("lookup", "places")}
    found = {name: (linear.in_features, linear.out_features) for name, linear in linears.items()}
    return found | {name: (one.num_embeddings, one.embedding_dim) for name, one in embeddings.items()}


def sizes_of_transposed() -> tuple[int, int]:
    """As above, of a linear that stores its weight [in, out]."""
    block = nn.Sequential(Conv1D(24, 8))
    model = parallelize(block, Grid(x=2, y=2), roles={"0": {"role": "colwise", "segments": 3}})
    assert model[0](torch.ones(2, 4)).shape == (2, 12)
    return model[0].in_features, model[0].out_features


def test_a_linear_stored_by_inputs_has_its_sizes_too(ranks):
    assert ranks(4).run(sizes_of_transposed) == [(8, 24)] * 4


def test_modules_show_their_original_sizes(ranks):
    expected = {"qkv": (8, 24), "out": (8, 8), "head": (8, 13), "lookup": (13, 8), "places": (5, 8)}
    assert ranks(4).run(whole_sizes, (1, 2, 2, 1)) == [expected] * 4
