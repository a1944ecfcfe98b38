# SPDX-License-Identifier: Apache-2.0
"""Compiled blocks and models: each block is one graph, on any grid, with roles and without, and nothing is logged."""

import logging
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from stretto.models import GPT
from stretto.parallel import Grid, checkpoint_activations, gather, no_sync, parallelize
from stretto.parallel.layers.linear_plan import ShardedTokens
from stretto.parallel.layout import layout_of
from stretto.parallel.state import require_state
from tests.differences import largest
from tests.parallel.hugging_face import launched_by_host
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

    def end_pass(self) -> None:
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
    return len(graphs), breaks, largest(distance(gather(one.grad).float(), other.grad) for one, other in pairs), 0


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("make_model", [make_gpt, make_qwen])
def test_a_block_on_one_rank_is_one_graph(ranks, make_model):
    ((graphs, breaks, far, _),) = ranks(1).run(compile_blocks, make_model, "as it is")
    assert (graphs, breaks) == (1, 0)  # both blocks are of one kind
    assert far < 1e-5


@pytest.mark.long
def test_a_block_that_casts_weights_is_one_graph(ranks):
    ((graphs, breaks, far, _),) = ranks(1).run(compile_blocks, make_gpt, "wider")
    assert (graphs, breaks) == (1, 0)
    assert far < 1e-5


@pytest.mark.parametrize("how", ["recomputed", "recomputed together"])
def test_operations_that_cannot_be_traced_break_the_graph(ranks, how):
    ((graphs, _, far, _),) = ranks(1).run(compile_blocks, make_gpt, how)
    assert graphs != 1
    assert far < 1e-5


@pytest.mark.long
def test_a_sink_takes_every_gradient_of_a_compiled_model(ranks):
    ((_, _, _, taken),) = ranks(1).run(compile_blocks, make_gpt, "sink")
    assert taken == len(list(make_gpt().parameters()))


def wrappers_of_a_compiled_step() -> list[str]:
    """Files of torch.library's wrappers in Python that run in a step of compiled blocks."""
    torch._dynamo.reset()
    model = parallelize(make_gpt(), Grid(), dtype=torch.float64)
    for block in model.get_submodule("blocks").children():
        block.compile(backend="eager")
    loss_of(model).backward()
    files = set()
    sys.setprofile(lambda frame, event, _: files.add(frame.f_code.co_filename))
    try:
        loss_of(model).backward()
    finally:
        sys.setprofile(None)
    assert any(file.endswith("graph_functions.py") for file in files)
    return [file for file in files if file.endswith(("_library/custom_ops.py", "_library/autograd.py"))]


def test_operators_of_compiled_blocks_run_without_wrappers_in_python(ranks):
    assert ranks(1).run(wrappers_of_a_compiled_step) == [[]]


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
        found += [name for name, gradient in seen[0].items() if not distance(seen[1][name], gradient) <= 1e-5]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter[0].mul_(2)
                parameter.data = parameter.data * 1.1
    return found


@pytest.mark.long
def test_a_compiled_model_on_two_ranks_has_the_gradients_of_the_model(ranks):
    assert ranks(2).run(differences_of_compiled_model) == [[], []]


def make_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, num_hidden_layers=2, use_cache=False, **sizes))


def make_gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
    drops = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, use_cache=False, **sizes, **drops))


def make_repeating() -> nn.Module:
    """A Llama whose layers call the same linears twice on the same input."""
    model = make_llama()
    for layer in model.get_submodule("model.layers").children():
        mlp: Any = layer.mlp
        mlp.forward = lambda x, own=mlp.forward: own(x) + own(x)
    return model


def make_deepseek() -> nn.Module:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    heads = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
    more = {"moe_intermediate_size": 8, "first_k_dense_replace": 0, "use_cache": False}
    return DeepseekV3ForCausalLM(
        DeepseekV3Config(vocab_size=VOCAB, num_hidden_layers=2, **sizes, **heads, **experts, **more)
    )


class NamedGPT(GPT):
    """A GPT that is called as transformers' models are."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:  # type: ignore[override]
        return SimpleNamespace(loss=super().forward(input_ids[:, :-1], labels[:, 1:]))


def make_experts() -> nn.Module:
    sizes = {"num_experts": 4, "experts_per_token": 2, "expert_ffn": 16, "shared_ffn": 16, "shared_expert_gate": True}
    balance = {"balance": "switch", "balance_loss": 0.1, "z_loss": 0.01}
    return NamedGPT(gpt(layers=2, positions="rotary", activation="swiglu", norm="rmsnorm", **sizes, **balance))


def make_checkpointed() -> nn.Module:
    model: Any = make_llama()
    model.gradient_checkpointing_enable()
    return model  # type: ignore[no-any-return]


class Messages(logging.Handler):
    """Collects what a user's console would show of torch.compile: warnings, and log lines from WARNING on."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record.getMessage())


def compile_like_a_user(
    make_model: Callable[[], nn.Module],
    sizes: dict[str, int],
    what: str,
    options: dict[str, Any],
    backend: str = "eager",
) -> tuple[int, int, float, list[str]]:
    """Train a compiled model for some passes, of two batches each: returns graphs, graph breaks, the largest distance
    of a gradient from the plain model's, and messages. what: "layers", "frozen layers" (some weights) or "model"."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = make_model()
    torch.manual_seed(0)
    grid, tokens = Grid(**sizes), TOKENS[:, :16] if "shard_sequence" in options else TOKENS
    given, is_small = {**options}, bool(options.get("launched_by_host"))
    given.pop("launched_by_host", None)
    with launched_by_host() if is_small else nullcontext():
        model = parallelize(make_model(), grid, **given)
    assert len(require_state(model, "this test").block_shards) >= 2 * is_small
    parts, part = grid.size("data") * grid.size("z"), grid.coordinate("data") * grid.size("z") + grid.coordinate("z")
    graphs, compiler = [], torch._dynamo.lookup_backend(backend)

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return compiler(graph, inputs)

    def accumulate(called: nn.Module, first: Any, place: slice) -> None:
        for number, rows in enumerate(tokens.chunk(2) if parts == 1 else (tokens, tokens.flip(1))):
            with first if number == 0 else nullcontext():
                called(input_ids=rows[place], labels=rows[place]).loss.backward()

    torch._dynamo.utils.counters.clear()
    messages, far = Messages(), []
    for name in ("torch", "torch._dynamo"):
        logging.getLogger(name).addHandler(messages)
    with warnings.catch_warnings(record=True) as warned:
        called = torch.compile(model, backend=count) if what == "model" else model
        for name, module in model.named_modules():
            if "layers" in what and name.rpartition(".")[0].endswith((".layers", ".h", "blocks")):
                module.compile(backend=count)
        for step in range(2):
            for each in (model, plain):
                each.zero_grad()
                for name, parameter in each.named_parameters():
                    parameter.requires_grad_(what != "frozen layers" or step == 1 or "1" not in name)
            mine = slice(None) if parts == 1 else slice(part, None, parts)
            accumulate(called, no_sync(model) if step else nullcontext(), mine)
            accumulate(plain, nullcontext(), slice(None))
            for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
                assert (one.grad is None) == (other.grad is None), name
                if one.grad is not None:
                    far.append(distance(gather(one.grad, layout_of(one)).float(), other.grad))
        with torch.no_grad() if "layers" in what else nullcontext():  # a whole model would be compiled once more
            loss = called.eval()(input_ids=tokens[mine], labels=tokens[mine]).loss
            far.append(distance(loss.float(), plain.eval()(input_ids=tokens, labels=tokens).loss))
    for name in ("torch", "torch._dynamo"):
        logging.getLogger(name).removeHandler(messages)
    breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
    return len(graphs), breaks, largest(far), [*messages.found, *(str(each.message) for each in warned)]


BY_BLOCKS = {"blocks": ["model.layers.*"]}
SMALL = {"launched_by_host": True}


# AOTAutograd, which takes as long as Dynamo, traces each operation's formula of the backward pass once.
@pytest.mark.long
@pytest.mark.parametrize(
    ("make_model", "sizes", "options", "backend"),
    [
        pytest.param(make_llama, {"z": 2}, {}, "aot_eager", marks=pytest.mark.exhaustive),  # the repeating one does
        pytest.param(make_llama, {"z": 2}, BY_BLOCKS, "aot_eager", marks=pytest.mark.exhaustive),
        pytest.param(  # the experts' block is compiled on one rank
            make_qwen, {"z": 2, "expert": 2}, {"expert_rows": 300}, "aot_eager", marks=pytest.mark.exhaustive
        ),
        pytest.param(make_deepseek, {"z": 2, "expert": 2}, {}, "aot_eager", marks=pytest.mark.exhaustive),
        pytest.param(make_deepseek, {"x": 2}, {}, "eager", marks=pytest.mark.exhaustive),
        pytest.param(make_experts, {"z": 2, "expert": 2}, {}, "eager", marks=pytest.mark.exhaustive),
        pytest.param(make_qwen, {"x": 2}, {"shard_sequence": True}, "eager", marks=pytest.mark.exhaustive),
        pytest.param(
            make_qwen, {"y": 2}, {}, "aot_eager", marks=pytest.mark.exhaustive
        ),  # norms and routers exchange over y
        pytest.param(make_llama, {"data": 2}, {"reshard": "after_forward"}, "aot_eager", marks=pytest.mark.exhaustive),
        pytest.param(make_llama, {"z": 2}, {**BY_BLOCKS, "reshard": "after_forward"}, "eager", marks=pytest.mark.long),
        pytest.param(make_llama, {"z": 2}, SMALL, "eager", marks=pytest.mark.long),
        pytest.param(make_gpt2, {"z": 2}, {**SMALL, "dtype": torch.float64}, "aot_eager", marks=pytest.mark.exhaustive),
        pytest.param(make_gpt2, {"x": 2}, {}, "aot_eager", marks=pytest.mark.exhaustive),
        pytest.param(make_repeating, {"z": 2}, {}, "eager", marks=pytest.mark.exhaustive),
        pytest.param(make_gpt2, {"z": 2}, {"dtype": torch.float64}, "aot_eager", marks=pytest.mark.exhaustive),
        *[
            pytest.param(make_model, sizes, {}, "aot_eager", marks=pytest.mark.exhaustive)
            for make_model, sizes in [
                (make_deepseek, {"x": 2}),
                (make_experts, {"z": 2, "expert": 2}),
                (make_repeating, {"z": 2}),
            ]
        ],
    ],
)
def test_layers_of_one_kind_are_one_graph_that_logs_nothing(ranks, make_model, sizes, options, backend):
    for graphs, breaks, far, messages in ranks(2).run(
        compile_like_a_user, make_model, sizes, "layers", options, backend
    ):
        assert (graphs, breaks, messages) == (2, 0, [])  # one that trains, and one that evaluates
        assert far < 1e-5


def gathers_of_sharded_tokens(is_compiled: bool) -> int:
    """Return how often a forward pass of a Llama of two layers gathers tokens for its linears."""
    torch._dynamo.reset()
    model = parallelize(make_llama(), Grid(x=2), shard_sequence=True)
    if is_compiled:
        for layer in model.get_submodule("model.layers").children():
            layer.compile(backend="eager")
    with patch.object(ShardedTokens, "gather", autospec=True, side_effect=ShardedTokens.gather) as gather:
        model(input_ids=TOKENS[:, :16])
    return gather.call_count


@pytest.mark.long
@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
def test_linears_share_tokens_that_one_of_them_has_gathered(ranks, is_compiled):
    assert ranks(2).run(gathers_of_sharded_tokens, is_compiled) == [4, 4]


@pytest.mark.exhaustive
def test_compiled_layers_that_checkpoint_themselves_are_graphs_inside_of_their_checkpoints(ranks):
    for graphs, _, far, messages in ranks(2).run(compile_like_a_user, make_checkpointed, {"z": 2}, "layers", {}):
        assert (graphs, messages) == (3, [])  # without gradients, with them when it is computed again, and evaluating
        assert far < 1e-5


ALL = pytest.mark.parametrize("options", [{}, BY_BLOCKS, SMALL], ids=["roles", "blocks", "small blocks"])


@pytest.mark.exhaustive
@ALL
def test_weights_may_be_frozen_between_steps_of_compiled_layers(ranks, options):
    for _, breaks, far, messages in ranks(2).run(compile_like_a_user, make_llama, {"z": 2}, "frozen layers", options):
        assert (breaks, messages) == (0, [])
        assert far < 1e-5


@pytest.mark.exhaustive
@ALL
def test_a_whole_compiled_model_logs_nothing(ranks, options):
    for _, _, far, messages in ranks(2).run(compile_like_a_user, make_llama, {"z": 2}, "model", options):
        assert messages == []
        assert far < 1e-5
