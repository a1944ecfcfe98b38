# SPDX-License-Identifier: Apache-2.0
"""GPT: a pre-norm, decoder-only transformer (Singh, section 5.2.1 and Table 5.1).

The model knows nothing about ranks. Four conventions let `stretto.parallelize` shard it: attention infers the number of
heads (-1 in shapes); it takes batch size and sequence length from the linear's output (`takes_sharded_sequence`); the
forward takes `positions`, and attention calls `attend`, so that sequences can be cut; and `GPT.parallel_plan` gives the
role of each submodule as plain data.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stretto.execution import IGNORED_TARGET
from stretto.models.gpt_config import GPTConfig
from stretto.models.moe import Experts, MoE, Router, SharedExpert
from stretto.parallel.layers.fused import Angles, rotary_angles, rotate_heads, swiglu


class Attention(nn.Module):
    """Causal self-attention. One linear computes queries, keys and values.

    Its output features are grouped by KV head: the group's queries, its key, its value, each of head_dim features. A
    rank that owns whole groups therefore owns all that its heads need. `attend` computes attention from queries, keys
    and values: on a grid with context, `parallelize` replaces it by one over all ranks' keys and values.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.queries_per_group = config.heads // config.num_kv_heads
        width = (config.heads + 2 * config.num_kv_heads) * config.head_dim
        self.qkv = nn.Linear(config.hidden, width, bias=config.bias)
        self.attend = causal_attention
        self.out = nn.Linear(config.hidden, config.hidden, bias=config.bias)

    def forward(self, x: Tensor, angles: Angles | None, seen: Mapping[str, Any] | None = None) -> Tensor:
        groups = self.qkv(x).unflatten(-1, (-1, self.queries_per_group + 2, self.head_dim))
        if angles is not None:
            heads = rotate_heads(groups, angles, self.queries_per_group)
        else:
            parts = groups.split((self.queries_per_group, 1, 1), dim=-2)
            heads = (parts[0].flatten(2, 3), parts[1].flatten(2, 3), parts[2].flatten(2, 3))
        # The output has the query's strides: heads of a token are contiguous, so that flattening it copies nothing.
        query, key, value = (part.transpose(1, 2) for part in heads)
        attended = self.attend(query, key, value, **(seen or {}))
        return self.out(attended.transpose(1, 2).flatten(2))


def causal_attention(query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None = None) -> Tensor:
    """Causal attention of [batch, heads, seq, head_dim]; queries of several heads may share one of key and value.

    documents: where those of all rows begin, one after another, and the end of the last (`find_starts`): a query sees
    its own. Memory is linear in seq.
    """
    if documents is not None:
        from stretto.ops.attention import packed_attention

        return packed_attention(query, key, value, documents)
    shares = query.shape[1] > key.shape[1]
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=shares)


class MLP(nn.Module):
    """Two linears around a GELU, or three around a SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden, config.ffn_width, bias=config.bias)
        if config.activation == "swiglu":
            self.gate = nn.Linear(config.hidden, config.ffn_width, bias=config.bias)
        self.is_gated = config.activation == "swiglu"
        self.down = nn.Linear(config.ffn_width, config.hidden, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(x)
        return self.down(swiglu(self.gate(x), up) if self.is_gated else F.gelu(up, approximate="tanh"))


class TransformerBlock(nn.Module):
    """A pre-norm transformer block: x + attention(norm(x)), then x + mlp(norm(x)).

    has_experts: the MLP is a mixture of experts.
    """

    def __init__(self, config: GPTConfig, *, has_experts: bool = False) -> None:
        super().__init__()
        self.attention_norm = _norm(config)
        self.attention = Attention(config)
        self.mlp_norm = _norm(config)
        self.mlp = MoE(config) if has_experts else MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, angles: Angles | None, seen: Mapping[str, Any] | None = None) -> Tensor:
        options = () if seen is None else (seen,)
        x = x + self.dropout(self.attention(self.attention_norm(x), angles, *options))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class NextTokenLoss(nn.Module):
    """The sum of the valid targets' cross-entropies, divided by `num_targets` (default: the number of valid ones).

    Takes logits [batch, seq, vocab] and targets [batch, seq], int64, where -100 marks invalid ones. Returns a scalar.
    """

    def forward(self, logits: Tensor, targets: Tensor, num_targets: Tensor | int | None = None) -> Tensor:
        if logits.dtype in (torch.bfloat16, torch.float16):
            logits = logits.float()
        total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED_TARGET, reduction="sum")
        return total / (num_targets if num_targets is not None else (targets != IGNORED_TARGET).sum())


class GPT(nn.Module):
    """A decoder-only language model.

    `model(tokens)`, int64 [batch, seq], returns logits [batch, seq, vocab]. `model(tokens, targets)` returns the mean
    loss over the valid targets (those that are not -100), or their sum divided by `num_targets` if that is given: with
    gradient accumulation the divisor is the whole batch's number of targets, which a micro-batch cannot count.
    `positions`, int64 [seq] or [batch, seq], are the tokens' places in their sequences (default: 0, 1, ...).
    `documents`, int64 [batch, seq], are their places in their documents, if sequences pack several: a token attends to
    its own document alone. On a GPU they are read, which waits for it; they may be on the CPU.
    `seen`: what `attend` is given besides, in place of these documents' starts.
    """

    takes_sharded_sequence = True
    takes_balanced_documents = True  # with targets, which are cut with them

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.hidden)
        if config.positions == "learned":
            self.positions = nn.Embedding(config.max_seq_len, config.hidden)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(
            TransformerBlock(config, has_experts=number in config.moe_blocks) for number in range(config.layers)
        )
        self.norm = _norm(config)
        self.head = nn.Linear(config.hidden, config.vocab, bias=False)
        self.loss = NextTokenLoss()
        for block in self.blocks:
            assert isinstance(block, TransformerBlock)
            block.attention.out.is_residual = True  # type: ignore[assignment]
            for module in block.mlp.modules():
                if isinstance(module, MLP | SharedExpert):
                    module.down.is_residual = True  # type: ignore[assignment]
        self.apply(self._init_weights)
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        num_targets: Tensor | int | None = None,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        seen: Mapping[str, Any] | None = None,
    ) -> Tensor:
        seq_len = tokens.shape[1]
        if seq_len > self.config.max_seq_len:
            raise ValueError(f"{seq_len} tokens are more than max_seq_len, {self.config.max_seq_len}")
        x = self.embedding(tokens)
        angles = None
        if positions is None:
            positions = torch.arange(seq_len, device=tokens.device)
        if self.config.positions == "learned":
            x = x + self.positions(positions if documents is None else documents.to(x.device, non_blocking=True))
        else:  # of the whole sequence also with documents: products depend on the distance of two tokens alone
            angles = rotary_angles(positions, self.config.head_dim)
        x = self.dropout(x)
        if documents is not None and seen is None:
            from stretto.ops.attention import find_starts

            starts = find_starts(documents)
            seen = {"documents": starts} if len(starts) > len(tokens) + 1 else None
        for block in self.blocks:
            x = block(x, angles) if seen is None else block(x, angles, seen)
        logits = self.head(self.norm(x))
        return logits if targets is None else self.loss(logits, targets, num_targets)

    def _init_weights(self, module: nn.Module) -> None:
        """Initialize as GPT-2: N(0, 0.02), scaled by 1 / sqrt(2 x layers) where outputs add to the residual stream."""
        residual_std = 0.02 * (2 * self.config.layers) ** -0.5
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=residual_std if getattr(module, "is_residual", False) else 0.02)
        elif isinstance(module, Experts | Router):
            module.reset_parameters()
            if isinstance(module, Experts):
                nn.init.normal_(module.down_proj, std=residual_std)
        elif isinstance(module, nn.LayerNorm | nn.RMSNorm):
            nn.init.ones_(module.weight)
        if getattr(module, "bias", None) is not None:
            nn.init.zeros_(module.bias)  # type: ignore[arg-type]

    def parallel_plan(self) -> dict[str, Any]:
        """Map name patterns of submodules to their roles for `stretto.parallelize`, as data that mentions no rank."""
        queries, head_dim = self.config.heads // self.config.num_kv_heads, self.config.head_dim
        groups: dict[str, Any] = {"role": "colwise", "unit": (queries + 2) * head_dim, "unit_name": "attention heads"}
        if queries > 1:  # several ranks may use one key and value
            groups |= {"unit_name": "KV heads", "shared": 2 * head_dim, "shared_by": "queries_per_group"}
        return {
            "embedding": "embedding",
            "positions": "positions",
            "dropout": "dropout",
            "blocks.*.attention.qkv": groups,
            "blocks.*.attention.out": "rowwise",
            "blocks.*.mlp.up": "colwise",
            "blocks.*.mlp.gate": "colwise",
            "blocks.*.mlp.down": "rowwise",
            "blocks.*.mlp.router": "router",
            "blocks.*.mlp.experts": "experts",
            "blocks.*.mlp.shared.up": "colwise",
            "blocks.*.mlp.shared.gate": "colwise",
            "blocks.*.mlp.shared.down": "rowwise",
            "blocks.*.mlp.shared.output_gate": "router",
            "blocks.*.attention_norm": "norm",
            "blocks.*.mlp_norm": "norm",
            "blocks.*.dropout": "dropout",
            "norm": "norm",
            "head": "head",
            "loss": "loss",
        }


@torch.no_grad()
def generate(
    model: GPT, prompt_tokens: Sequence[int], steps: int, *, temperature: float = 1.0, seed: int = 0
) -> list[int]:
    """Generate `steps` tokens after the prompt, with a model in one process. Returns the prompt and the new tokens.

    A token is sampled with probability softmax(logits / temperature); temperature 0 takes the most probable one. The
    model sees the last `max_seq_len` tokens. Raises ValueError for an empty prompt or a negative temperature.
    """
    if not prompt_tokens:
        raise ValueError("the prompt is empty: give at least one token")
    if not temperature >= 0:
        raise ValueError(f"the temperature is {temperature}, but must be at least 0")
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    was_training = model.training
    model.eval()
    tokens = torch.tensor([list(prompt_tokens)], dtype=torch.int64, device=device)
    for _ in range(steps):
        logits = model(tokens[:, -model.config.max_seq_len :])[0, -1].float()
        if temperature == 0:
            drawn = logits.argmax().view(1, 1)
        else:
            drawn = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator).view(1, 1)
        tokens = torch.cat((tokens, drawn), dim=1)
    model.train(was_training)
    return tokens[0].tolist()


def _norm(config: GPTConfig) -> nn.Module:
    if config.norm == "rmsnorm":
        return nn.RMSNorm(config.hidden, eps=1e-5)
    return nn.LayerNorm(config.hidden, bias=config.bias)
