# SPDX-License-Identifier: Apache-2.0
"""Compiled blocks: on one rank each is one graph, unless something has to happen that a graph would not have."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stretto.models import GPT
from stretto.parallel import Grid, checkpoint_activations, gather, parallelize
from stretto.parallel.state import require_state
from tests.parallel.test_parity import gpt
from tests.parallel.training import distance

VOCAB, TOKENS = 61, torch.arange(2 * 17).view(2, 17) * 7 % 61


def make_gpt() -> nn.Module:
    return GPT(gpt(layers=2, positions="rotary", activation="swiglu", norm="rmsnorm"))


def make_qwen() -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(vocab_size=VOCAB, num_hidden_layers=2, use_cache=False, **sizes, **experts)
    )


def loss_of(model: nn.Module) -> Tensor:
    if isinstance(model, GPT):
        return model(TOKENS[:, :-1], TOKENS[:, 1:])
    return model(input_ids=TOKENS, labels=TOKENS).loss


class Sink:
    """Takes gradients as optimizer state apart does."""

    def __init__(self) -> None:
        self.taken: list[nn.Parameter] = []

    def add(self, parameter: nn.Parameter, shard: Tensor) -> None:
        self.taken.append(parameter)

    def complete(self, parameter: nn.Parameter) -> None:
        pass

    def finish(self) -> None:
        pass


def compile_blocks(make_model: Callable[[], nn.Module], how: str) -> tuple[int, int, float, int]:
    """Graphs and graph breaks of a compiled model on one rank, how far gradients are from the plain model's, and how
    many parameters' gradients a sink was given."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = make_model()
    torch.manual_seed(0)
    model = parallelize(make_model(), Grid(), dtype=torch.float64 if how == "wider" else None)
    sink = Sink()
    if how.startswith("recomputed"):
        checkpoint_activations(model, "full" if how == "recomputed" else "every:2")
    elif how == "sink":
        require_state(model, "this test").gradient_reducer.send_to(sink)
    graphs = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.utils.counters.clear()
    for name, module in model.named_modules():
        if name.rpartition(".")[0].endswith(("layers", "blocks")):
            module.compile(backend=count)
    loss_of(plain).backward()
    loss_of(model).backward()
    breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
    if how == "sink":
        return len(graphs), breaks, 0.0, len({id(parameter) for parameter in sink.taken})
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return len(graphs), breaks, max(distance(gather(one.grad).float(), other.grad) for one, other in pairs), 0


@pytest.mark.sampled(quick=1)
@pytest.mark.parametrize("make_model", [make_gpt, make_qwen])
def test_a_block_on_one_rank_is_one_graph(ranks, make_model):
    ((graphs, breaks, far, _),) = ranks(1).run(compile_blocks, make_model, "as it is")
    assert (graphs, breaks) == (1, 0)  # both blocks are of one kind
    assert far < 1e-5


@pytest.mark.parametrize("how", ["recomputed", "recomputed together", pytest.param("wider", marks=pytest.mark.long)])
def test_operations_that_cannot_be_traced_break_the_graph(ranks, how):
    ((graphs, _, far, _),) = ranks(1).run(compile_blocks, make_gpt, how)
    assert graphs != 1
    assert far < 1e-5


@pytest.mark.long
def test_a_sink_takes_every_gradient_of_a_compiled_model(ranks):
    ((_, breaks, _, taken),) = ranks(1).run(compile_blocks, make_gpt, "sink")
    assert breaks > 0
    assert taken == len(list(make_gpt().parameters()))


def differences_of_compiled_model() -> list[str]:
    """Return which gradients of a compiled model on two ranks differ from the model's, before and after an edit."""
    grid, found = Grid(z=2), []
    model = parallelize(make_gpt(), grid)
    compiled = torch.compile(model, backend="aot_eager")
    for _ in range(2):
        seen = []
        for each in (model, compiled):
            model.zero_grad()
            each(TOKENS[:, :-1], TOKENS[:, 1:]).backward()
            seen.append({name: gather(p.grad) for name, p in model.named_parameters()})
        found += [name for name, gradient in seen[0].items() if distance(seen[1][name], gradient) > 1e-5]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter[0].mul_(2)
                parameter.data = parameter.data * 1.1
    return found


@pytest.mark.long
def test_a_compiled_model_on_two_ranks_has_the_gradients_of_the_model(ranks):
    assert ranks(2).run(differences_of_compiled_model) == [[], []]
