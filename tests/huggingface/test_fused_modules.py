# SPDX-License-Identifier: Apache-2.0
"""Modules of transformers that fused kernels replace: which they are, and that a model computes what it did."""

from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend
from transformers.activations import NewGELUActivation
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from stretto.execution import ExecutionOptions
from stretto.parallel import Grid, gather, parallelize
from stretto.parallel.fused_modules import fuse_modules
from stretto.parallel.layers import attention_backend
from stretto.parallel.layers.attention_backend import AttentionTuner
from stretto.parallel.layout import layout_of
from tests.differences import largest
from tests.ops.moe.oracle import draw
from tests.parallel import hugging_face
from tests.parallel.training import distance, my_rows

TOKENS = torch.arange(4 * 12).view(4, 12) * 7 % hugging_face.VOCAB
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MODELS = {
    "llama": (partial(hugging_face.causal_lm, "llama"), {"RMSNorm": 5, "MLP": 2, "Attention": 2}),
    "mistral": (partial(hugging_face.causal_lm, "mistral"), {"RMSNorm": 5, "MLP": 2, "Attention": 2}),
    "qwen3": (partial(hugging_face.causal_lm, "qwen3"), {"RMSNorm": 9, "MLP": 2, "Attention": 2}),
    "gemma2": (partial(hugging_face.causal_lm, "gemma2"), {"RMSNorm": 9, "MLP": 2, "Attention": 2}),
    "gemma3": (partial(hugging_face.causal_lm, "gemma3_text"), {"RMSNorm": 13, "MLP": 2, "Attention": 2}),
    "qwen3_moe": (partial(hugging_face.causal_lm, "qwen3_moe", **EXPERTS), {"RMSNorm": 9, "Attention": 2}),
    "gpt2": (partial(hugging_face.gpt2, tied=True), {"NewGELUActivation": 2}),
}
"""Models of two layers, and how many modules of which kinds are replaced."""
NO_TUNER = AttentionTuner(False, torch.device("cpu"), None)
FUNCTIONS = {
    "RMSNorm": ("stretto.parallel.layers.norm.rms_norm", "stretto.parallel.fused_modules.rms_norm"),
    "SiLU": ("stretto.parallel.fused_modules.swiglu",),
    "Attention": ("stretto.ops.rotary.rotate_halves",),
}


def replaced(model: nn.Module) -> dict[str, int]:
    """How many modules have another forward than their class, by the ends of the classes' names; of layers, which may
    checkpoint themselves, and of models, which look for packed documents, none are counted."""
    changed = [type(module).__name__ for module in model.modules() if "forward" in vars(module)]
    names = [name for name in changed if not name.endswith(("DecoderLayer", "ForCausalLM"))]
    kinds = "RMSNorm", "MLP", "Attention", "NewGELUActivation"
    return dict(Counter(next(kind for kind in kinds if name.endswith(kind)) for name in names))


@pytest.mark.parametrize("name", MODELS)
def test_modules_are_known_by_what_they_compute(name):
    make, expected = MODELS[name]
    model = make()
    fuse_modules(model, NO_TUNER)
    assert replaced(model) == expected


def train(model: nn.Module, ids: Tensor) -> tuple[Tensor, list[Tensor]]:
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.detach(), [
        gather(parameter.grad, layout_of(parameter)) if isinstance(parameter, DTensor) else parameter.grad
        for parameter in model.parameters()
    ]


def as_on_gpus() -> Any:
    return mock.patch(
        "stretto.parallel.builder.fuses",
        lambda request, is_pretrained: is_pretrained and request.options.fused == "auto",
    )


def disagreements(sizes: Mapping[str, int], by_blocks: bool) -> dict[str, Any]:
    """Of each model that is wrong: how far loss and gradients are, and how often each fused function was called."""
    grid, found = Grid(**sizes), {}
    for name, (make, expected) in MODELS.items():
        torch.manual_seed(0)
        loss, gradients = train(make(), TOKENS)
        torch.manual_seed(0)
        blocks = ["transformer.h.*" if name == "gpt2" else "model.layers.*"] if by_blocks else None
        with ExitStack() as stack:
            calls = {
                kind: [stack.enter_context(mock.patch(path, wraps=_find(path))) for path in paths]
                for kind, paths in FUNCTIONS.items()
            }
            with as_on_gpus():
                model = parallelize(make(), grid, blocks=blocks)
            ours, of_ours = train(model, TOKENS[my_rows(grid, len(TOKENS))])
        counts = {kind: sum(one.call_count for one in mocks) for kind, mocks in calls.items()}
        right = {"RMSNorm": expected.get("RMSNorm", 0), "Attention": expected.get("Attention", 0)}
        right["SiLU"] = 0 if name.startswith("gemma") else expected.get("MLP", 0)
        far = largest([distance(ours, loss), *map(distance, of_ours, gradients)])
        if not far <= 1e-5 or counts != right:
            found[name] = far, counts
    return found


def _find(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(__import__(module, fromlist=[name]), name)


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("sizes", "by_blocks"), [({"z": 2}, False), ({"x": 2}, False), ({"data": 2}, False), ({"z": 2}, True)], ids=str
)
def test_models_on_a_grid_compute_what_they_did(ranks, sizes, by_blocks):
    assert ranks(2).run(disagreements, sizes, by_blocks) == [{}, {}]


SECONDS = {
    SDPBackend.CUDNN_ATTENTION: (1.0, 9.0),  # of each rank
    SDPBackend.FLASH_ATTENTION: (2.0, 3.0),
    SDPBackend.EFFICIENT_ATTENTION: (float("inf"), 1.0),
    None: (3.9, 3.9),
}


def choose_attention() -> list[Any]:
    """The kernels that torch is to try in the first two steps of a tuned model, and how far its second loss is."""
    grid = Grid(data=2)
    torch.manual_seed(0)
    plain = hugging_face.causal_lm("llama")
    torch.manual_seed(0)
    ids, rank = TOKENS[my_rows(grid, len(TOKENS))], grid.coordinate("data")
    with (
        as_on_gpus(),
        mock.patch.object(attention_backend, "_time", lambda call, choice, device: SECONDS[choice][rank]),
        mock.patch.object(attention_backend, "sdpa_kernel", wraps=attention_backend.sdpa_kernel) as select,
    ):
        model = parallelize(hugging_face.causal_lm("llama"), grid, tune_matmuls=True)
        calls = []
        for _ in range(2):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            calls.append([call.args[0][0].name for call in select.call_args_list])
    return [*calls, distance(loss, plain(input_ids=TOKENS, labels=TOKENS).loss)]


def test_tuned_attention_is_computed_by_the_kernel_whose_slowest_rank_is_the_fastest(ranks):
    for first, second, far in ranks(2).run(choose_attention):
        assert first == []
        assert second == ["FLASH_ATTENTION"] * 2
        assert far < 1e-5


def test_attention_is_timed_and_what_no_kernel_takes_is_not_chosen():
    tuner = AttentionTuner(True, torch.device("cpu"), None)
    query, key = draw(1, 1, 4, 8, 16).float(), draw(2, 1, 2, 8, 16).float()
    with tuner.select(query, key, key, is_causal=True):
        pass
    (call,) = tuner._seen
    with (
        mock.patch.object(F, "scaled_dot_product_attention", wraps=F.scaled_dot_product_attention) as timed,
        mock.patch.object(torch.autograd, "grad", wraps=torch.autograd.grad) as differentiated,
    ):
        assert 0 < attention_backend._time(call, None, torch.device("cpu")) < 9
    timed_shapes = [tuple(each.shape for each in made.args) for made in timed.call_args_list]
    assert timed_shapes
    assert call.shapes not in timed_shapes  # whose backward graphs of cuDNN are the model's
    for made in differentiated.call_args_list:  # as a model's gradients, whose lengths may be these at other steps
        assert made.args[2].transpose(1, 2).is_contiguous()
    assert attention_backend._time(call, SDPBackend.CUDNN_ATTENTION, torch.device("cpu")) == float("inf")


class Clamped(LlamaRMSNorm):
    """As a family that has changed Llama's norm under its name."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states).clamp(max=0.5)


Clamped.__module__ = LlamaRMSNorm.__module__


class Gated(LlamaRMSNorm):
    """As Mamba-2's."""

    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        return super().forward(hidden_states if gate is None else hidden_states * F.silu(gate))  # type: ignore[no-any-return]


Gated.__module__ = LlamaRMSNorm.__module__


def test_what_computes_something_else_or_is_not_the_classs_own_stays():
    model = hugging_face.causal_lm("llama")
    model.model.norm = Clamped(32)
    model.model.layers[0].mlp.forward = own = lambda x: 2 * x
    fuse_modules(model, NO_TUNER)
    assert replaced(model) == {"RMSNorm": 4, "MLP": 2, "Attention": 2}
    assert model.model.layers[0].mlp.forward is own
    seen, mlp = [], model.model.layers[1].mlp
    mlp.act_fn.register_forward_hook(lambda module, args, output: seen.append(output) or 0 * output)
    assert not mlp(torch.ones(1, 32)).any()
    assert len(seen) == 1


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_training_keeps_no_cache_unless_it_is_asked_to(name):
    model = MODELS[name][0]().train()
    expected = model(input_ids=TOKENS, labels=TOKENS).loss
    fuse_modules(model, NO_TUNER)
    found = model(input_ids=TOKENS, labels=TOKENS)
    with pytest.raises(ValueError, match="use_cache=True"):
        model(input_ids=TOKENS, past_key_values=found.past_key_values)
    assert model(input_ids=TOKENS, return_dict=False)[1].get_seq_length() == TOKENS.shape[1]
    torch.testing.assert_close(found.loss, expected)
    assert model(input_ids=TOKENS, use_cache=True).past_key_values.get_seq_length() == TOKENS.shape[1]
    with torch.no_grad():
        assert model(input_ids=TOKENS).past_key_values.get_seq_length() == TOKENS.shape[1]
    packed = torch.arange(6).repeat(2).expand(4, 12)  # two sequences a row, which only transformers' own mask parts
    torch.testing.assert_close(
        model(input_ids=TOKENS, position_ids=packed, use_cache=False).logits[:, 6:],
        model(input_ids=TOKENS[:, 6:]).logits,
    )
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    torch.testing.assert_close(model(input_ids=TOKENS, labels=TOKENS).loss, expected)


def test_a_norm_that_is_given_a_gate_computes_with_it():
    norm = Gated(32)
    x, gate = draw(2, 3, 32), draw(2, 3, 32)
    expected, alone, by_name = norm(x, gate), norm(x), norm(hidden_states=x)
    fuse_modules(nn.ModuleList([norm]), NO_TUNER)
    assert "forward" in vars(norm)
    for one, other in ((norm(x, gate), expected), (norm(x), alone), (norm(hidden_states=x), by_name)):
        torch.testing.assert_close(one, other)


def test_a_gelu_by_tanh_is_torchs():
    model = nn.Sequential(NewGELUActivation())
    fuse_modules(model, NO_TUNER)
    x = draw(1, 20).double()
    assert torch.equal(model(x), F.gelu(x, approximate="tanh"))


def parallelize_in_three_ways() -> list[int]:
    """Modules with another forward in a model that CPUs compute, in one that does not want to fuse, and in one of
    another library; and ValueError for True."""
    found = []
    for is_patched, options in ((False, {}), (True, {"fused": False})):
        with as_on_gpus() if is_patched else ExitStack():
            model = parallelize(hugging_face.causal_lm("llama"), Grid(), **options)
        assert not any(getattr(module, "is_fused", False) for module in model.modules())
        found.append(sum(replaced(model).values()))
    with pytest.raises(ValueError, match="fused is True, but must be 'auto' or False"):
        ExecutionOptions(fused=True)
    return found


def test_cpus_and_who_does_not_want_it_keep_their_modules(ranks):
    assert ranks(1).run(parallelize_in_three_ways) == [[0, 0]]


def compile_layers() -> list[tuple[list[str], float]]:
    """Graphs of compiled layers, by the names of their operators, and the loss: plain, and where modules are fused."""
    found = []
    for is_patched in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        with as_on_gpus() if is_patched else ExitStack():
            model = parallelize(hugging_face.causal_lm("qwen3"), Grid())
        graphs = []

        def keep(graph: torch.fx.GraphModule, inputs: Any, graphs: list[str] = graphs) -> Any:
            graphs.append(" ".join(str(node.target) for node in graph.graph.nodes if node.op == "call_function"))
            return graph

        for layer in model.model.layers:
            layer.compile(backend=keep, fullgraph=True)
        found.append((graphs, float(train(model, TOKENS)[0])))
    return found


@pytest.mark.long
def test_compiled_layers_are_the_graphs_of_their_own_modules(ranks):
    (((graphs, loss), (fused_graphs, fused_loss)),) = ranks(1).run(compile_layers)
    assert len(graphs) == 2
    assert fused_graphs == graphs
    assert "stretto" not in " ".join(graphs)
    assert fused_loss == loss
