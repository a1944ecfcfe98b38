# SPDX-License-Identifier: Apache-2.0
"""GPT's attention equals its formulas, head by head, however queries share keys and wherever it is sharded."""

from unittest import mock

import pytest
import torch
from tests.parallel.training import my_rows
from torch import Tensor

from stretto.models import GPT, GPTConfig
from stretto.models.gpt import Attention
from stretto.parallel import Grid, gather, layout_of, parallelize
from stretto.parallel.layers.fused import rotary_angles

SEED = 5


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of one head [batch, seq, head_dim]: (x, y) pairs as complex numbers."""
    half = x.shape[-1] // 2
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.complex(cos, sin)
    return torch.cat((turned.real, turned.imag), -1)


def attend(attention: Attention, x: Tensor, angles: tuple[Tensor, Tensor] | None) -> Tensor:
    """One head after the other; the rows of a group's weight are its queries, its key and its value."""
    d, queries = attention.head_dim, attention.queries_per_group
    weight, bias = attention.qkv.weight, attention.qkv.bias

    def project(place: int) -> Tensor:
        rows = slice(place * d, (place + 1) * d)
        return torch.einsum("bsh,dh->bsd", x, weight[rows]) + (0 if bias is None else bias[rows])

    future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
    heads = []
    for group in range(weight.shape[0] // d // (queries + 2)):
        first = group * (queries + 2)
        key, value = project(first + queries), project(first + queries + 1)
        for number in range(queries):
            query, own_key = project(first + number), key
            if angles is not None:
                cos, sin = (angle.to(x.dtype) for angle in angles)
                query, own_key = turn(query, cos, sin), turn(key, cos, sin)
            scores = torch.einsum("bqd,bkd->bqk", query, own_key) / d**0.5
            heads.append(scores.masked_fill(future, -torch.inf).softmax(-1) @ value)
    y = torch.einsum("bsh,oh->bso", torch.cat(heads, -1), attention.out.weight)
    return y if attention.out.bias is None else y + attention.out.bias


@pytest.mark.parametrize("positions", ["rotary", "learned"])
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
@pytest.mark.parametrize(("batch", "seq_len", "head_dim"), [(2, 5, 6), (1, 7, 2), (3, 1, 10)])
def test_attention_equals_its_formulas(kv_heads, positions, batch, seq_len, head_dim):
    print(f"seed {SEED}")
    torch.manual_seed(SEED)
    config = GPTConfig(
        layers=1, hidden=6 * head_dim, heads=6, kv_heads=kv_heads, vocab=7, max_seq_len=9, positions=positions
    )
    attention = Attention(config).double()
    angles = rotary_angles(torch.arange(seq_len), head_dim) if positions == "rotary" else None
    x = torch.randn(batch, seq_len, config.hidden, dtype=torch.float64, requires_grad=True)
    inputs = [x, *attention.parameters()]
    right, found = attend(attention, x, angles), attention(x, angles)
    torch.testing.assert_close(found, right, rtol=0, atol=1e-12)
    weights = torch.randn_like(right)
    expected = torch.autograd.grad((right * weights).sum(), inputs)
    for mine, other in zip(torch.autograd.grad((found * weights).sum(), inputs), expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-11)
    attention.bfloat16()
    low = attention(x.detach().bfloat16(), angles)
    assert (low.double() - right).abs().max() < 0.05 * right.abs().max()


CONFIG = GPTConfig(
    layers=2, hidden=24, heads=4, kv_heads=2, vocab=13, max_seq_len=7, ffn=20, positions="rotary", activation="swiglu"
)


def train(sizes: dict[str, int] | None, shards: bool = False) -> dict[str, Tensor]:
    """Whole gradients of one step, and the loss; on one rank by the formulas above."""
    torch.manual_seed(SEED)
    model = GPT(CONFIG).double()
    text = torch.randint(CONFIG.vocab, (2, CONFIG.max_seq_len))
    if sizes is None:
        with mock.patch.object(Attention, "forward", attend):
            loss = model(text[:, :-1], text[:, 1:])
    else:
        grid = Grid(**sizes)
        model = parallelize(model, grid, shard_sequence=shards)
        text = text[my_rows(grid, 2)]
        loss = model(text[:, :-1], text[:, 1:])
    loss.backward()
    found = {name: gather(p.grad, layout_of(p)) if sizes else p.grad for name, p in model.named_parameters()}
    return {"loss": loss.detach()} | found


@pytest.mark.parametrize(
    ("sizes", "shards"),
    [
        ({"x": 2}, True),
        pytest.param({"x": 2}, False, marks=pytest.mark.long),
        pytest.param({"z": 2}, False, marks=pytest.mark.long),
        pytest.param({"y": 2}, False, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_attention_on_a_grid_equals_its_formulas(ranks, sizes, shards):
    print(f"seed {SEED}")
    right = train(None)
    for found in ranks(2).run(train, sizes, shards):
        for name, value in right.items():
            torch.testing.assert_close(
                found[name], value, rtol=1e-9, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
            )
