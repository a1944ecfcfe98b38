# SPDX-License-Identifier: Apache-2.0
"""gpt-fast's recipe as a peer: a plain Llama with a static cache, whose step is compiled with mode="reduce-overhead".

https://github.com/pytorch-labs/gpt-fast: queries, keys and values are one product, the cache is written by index, and
attention is torch's, masked to the positions up to a token's own.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class PlainDecoder(nn.Module):
    """Decodes a batch with the weights of a transformers model of Llama's form; its cache has `length` positions.

    ValueError for models that have more than Llama has (biases, norms of heads, experts).
    """

    angles: Tensor
    mask: Tensor

    def __init__(self, model: Any, batch: int, length: int) -> None:
        super().__init__()
        first, config = model.model.layers[0], model.config
        linears = [first.self_attn.q_proj, first.self_attn.o_proj, getattr(first.mlp, "down_proj", None)]
        has_more = any(not isinstance(each, nn.Linear) or each.bias is not None for each in linears)
        if has_more or hasattr(first.self_attn, "q_norm"):
            raise ValueError(f"gpt-fast's recipe is for models of Llama's form, not {type(model).__name__}")
        heads = config.num_attention_heads, config.num_key_value_heads
        self.blocks = nn.ModuleList(_DecoderBlock(layer, *heads, batch, length) for layer in model.model.layers)
        self.embedding, self.norm, self.head = model.model.embed_tokens, model.model.norm, model.lm_head
        places = torch.arange(length, device=model.device)[None]
        cos, sin = model.model.rotary_emb(self.embedding.weight, places)
        self.register_buffer("angles", torch.stack((cos[0], sin[0])))
        self.register_buffer("mask", torch.ones(length, length, dtype=torch.bool, device=model.device).tril())

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        """The best tokens [batch, 1] after ids [batch, tokens] at positions [tokens]."""
        x, (cos, sin), mask = self.embedding(ids), self.angles[:, positions], self.mask[positions][None, None]
        for block in self.blocks:
            x = block(x, positions, cos, sin, mask)
        return self.head(self.norm(x[:, -1:])).argmax(-1)


class _DecoderBlock(nn.Module):
    qkv: Tensor
    keys: Tensor
    values: Tensor

    def __init__(self, layer: Any, heads: int, kv_heads: int, batch: int, length: int) -> None:
        super().__init__()
        self.layer, self.sizes, self.head_dim = layer, (heads, kv_heads, kv_heads), layer.self_attn.head_dim
        weights = [getattr(layer.self_attn, f"{name}_proj").weight.detach() for name in "qkv"]
        self.register_buffer("qkv", torch.cat(weights))
        for name in ("keys", "values"):
            self.register_buffer(name, weights[0].new_zeros(batch, kv_heads, length, self.head_dim))

    def forward(self, x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        layer, (batch, tokens, _) = self.layer, x.shape
        heads = F.linear(layer.input_layernorm(x), self.qkv).view(batch, tokens, -1, self.head_dim).transpose(1, 2)
        query, key, value = heads.split(self.sizes, 1)
        self.keys.index_copy_(2, positions, _rotate(key, cos, sin))
        self.values.index_copy_(2, positions, value)
        out = F.scaled_dot_product_attention(
            _rotate(query, cos, sin), self.keys, self.values, attn_mask=mask, enable_gqa=True
        )
        x = x + layer.self_attn.o_proj(out.transpose(1, 2).reshape(batch, tokens, -1))
        return x + layer.mlp(layer.post_attention_layernorm(x))


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = heads.chunk(2, -1)
    return heads * cos + torch.cat((-second, first), -1) * sin
