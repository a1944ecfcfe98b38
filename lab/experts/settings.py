# SPDX-License-Identifier: Apache-2.0
"""Settings of `python -m lab experts` and `python -m lab moe-layers`."""

from dataclasses import dataclass
from typing import Annotated, Any

from stretto.bench.settings import Option, Repeats, Rounds, SeqLen, Vocab, WarmUp, require_known, require_least
from stretto.models.gpt_config import GPTConfig


@dataclass(frozen=True)
class ExpertsSetting:
    """The training of `python -m lab experts`, and its links. Raises ValueError for settings that cannot work.

    As in Singh's figure 7.5, every second block has experts, as many as data has ranks (equation 7.1), and a token
    passes one. Links are in MB/s: of x, whose ranks are in one node there, and of all others.
    """

    data: Annotated[int, Option("Ranks along data, and experts: each of these ranks has one.")] = 2
    x: Annotated[int, Option("Ranks along x, which have the same tokens.")] = 4
    link: Annotated[float, Option("Bandwidth between nodes in MB/s, for all axes but x.")] = 0.125
    node_link: Annotated[float, Option("Bandwidth within a node in MB/s, for x.")] = 0.75
    layers: Annotated[int, Option("Transformer blocks; every second one has experts.")] = 2
    hidden: Annotated[int, Option("Width of a token's vector; heads are of 16.")] = 64
    batch: Annotated[int, Option("Sequences of a step.")] = 8
    seq_len: SeqLen = 128
    warm_up: WarmUp = 0
    repeats: Repeats = 2
    rounds: Rounds = 1

    def __post_init__(self) -> None:
        numbers = {"hidden": self.hidden, "batch": self.batch, "seq_len": self.seq_len}
        require_least(1, repeats=self.repeats, rounds=self.rounds, **numbers)
        require_least(2, data=self.data, x=self.x, layers=self.layers)
        require_least(0, warm_up=self.warm_up)
        for name, rate in (("link", self.link), ("node_link", self.node_link)):
            if rate <= 0:
                raise ValueError(f"{name} is {rate} MB/s, but must be more than 0; 1 would do")
        if self.layers % 2:
            raise ValueError(
                f"layers is {self.layers}, but blocks alternate, so that it must be even; {self.layers + 1} would do"
            )
        if self.hidden % 16 or self.hidden // 16 % self.x:
            raise ValueError(
                f"hidden is {self.hidden}, but must be 16 times a number of heads that x = {self.x} divides; "
                f"{16 * self.x} would do"
            )
        if self.batch % self.data:
            raise ValueError(
                f"batch is {self.batch}, which data = {self.data} does not divide; "
                f"{-(-self.batch // self.data) * self.data} would do"
            )

    @property
    def ranks(self) -> int:
        """How many processes are started."""
        return self.data * self.x

    @property
    def grid(self) -> dict[str, int]:
        """The sizes of the grid's axes."""
        return {"data": self.data, "x": self.x, "expert": self.data}

    @property
    def model(self) -> GPTConfig:
        """The GPT that is trained."""
        return GPTConfig(
            self.layers,
            self.hidden,
            self.hidden // 16,
            vocab=256,
            max_seq_len=self.seq_len,
            num_experts=self.data,
            experts_per_token=1,
            moe_layers="every:2",
        )


PEERS = ("auto", "transformers", "torch")
TINY: dict[str, int] = {"hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "experts": 8, "k": 2, "width": 32}


@dataclass(frozen=True)
class MoeLayersSetting:
    """The layers that `python -m lab moe-layers` trains. Raises ValueError for settings that cannot work.

    The model is Qwen3-30B-A3B, of as many layers. peer: transformers' own model, or one in plain PyTorch that computes
    experts in the same way; auto takes transformers', where it is installed.
    """

    layers: Annotated[int, Option("How many layers of Qwen3-30B-A3B, which has 48.")] = 8
    seq_len: SeqLen = 4096
    batch: Annotated[int, Option("Sequences of a step.")] = 1
    vocab: Vocab = 151_936
    peer: Annotated[str, Option("transformers, torch, or auto.")] = "auto"
    compiled: Annotated[bool, Option("Also with compiled layers.")] = True
    has_masters: Annotated[
        bool, Option("Also fp32 weights, whose memory the planner predicts.", "--masters/--no-masters")
    ] = True
    steps_optimizer: Annotated[bool, Option("A step of fused AdamW too.", "--optimizer/--no-optimizer")] = False
    warm_up: WarmUp = 3
    repeats: Repeats = 10
    rounds: Rounds = 3
    on_cpu: Annotated[bool, Option("A tiny model on the CPU, to try the command.", "--cpu")] = False

    def __post_init__(self) -> None:
        numbers = {"layers": self.layers, "seq_len": self.seq_len, "batch": self.batch, "vocab": self.vocab}
        require_least(1, repeats=self.repeats, rounds=self.rounds, **numbers)
        require_least(0, warm_up=self.warm_up)
        require_known("peer", [self.peer], PEERS)

    def shape(self) -> dict[str, Any]:
        """The sizes of a layer, by the names of `TINY`."""
        if self.on_cpu:
            return TINY
        whole = {"hidden": 2048, "heads": 32, "kv_heads": 4, "head_dim": 128, "experts": 128, "k": 8, "width": 768}
        assert whole.keys() == TINY.keys()
        return whole
