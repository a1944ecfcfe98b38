# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters as PEFT adds them: only they have gradients and state, and they train as on one rank."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import AdaLoraConfig, LoraConfig, PeftConfig, PromptTuningConfig, get_peft_model
from torch import nn
from torch.distributed.tensor import DTensor

from stretto.axes import BATCH
from stretto.parallel import Grid, gather, layout_of, parallelize, validate
from tests.conftest import Ranks
from tests.parallel import hugging_face, moe_families
from tests.parallel.lora import PeftModel, adapters
from tests.parallel.training import distance, my_rows

MakeRanks = Callable[[int], Ranks]
STEPS = 5


def make() -> nn.Module:
    torch.manual_seed(6)
    return PeftModel(hugging_face.llama(tied=False), ("q_proj", "k_proj", "o_proj", "down_proj"))


def train(model: nn.Module, grid: Grid | None) -> dict[str, Any]:
    """Losses of the global batch and the adapters after STEPS steps; what else has a gradient or a state."""
    part, parts = (0, 1) if grid is None else (grid.coordinate(BATCH), grid.size(BATCH))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    tokens = torch.randint(61, (8, 9), generator=torch.Generator().manual_seed(7)).chunk(parts)[part]
    for _ in range(STEPS):
        output = model(input_ids=tokens, labels=tokens)
        output.loss.backward()
        with_gradient = {name for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(output.loss.item())
    return {
        "losses": losses,
        "adapters": {name: gather(p).detach() for name, p in adapters(model).items()},
        "with gradient": with_gradient,
        "with state": {name for name, p in model.named_parameters() if p in optimizer.state},
        "held": sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in model.parameters()),
    }


def train_on_grid(sizes: dict[str, int], options: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    grid = Grid(**sizes)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = parallelize(make(), grid, **options)
    return train(model, grid), [str(each.message) for each in caught]


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, {"reshard": "after_forward"}, {"recompute": "full"}], ids=str)
@pytest.mark.parametrize("sizes", [{"data": 2, "z": 2}, {"x": 2, "z": 2}], ids=str)
@pytest.mark.sampled(1)
def test_adapters_train_as_on_one_rank(sizes: dict[str, int], options: dict[str, Any], ranks: MakeRanks) -> None:
    expected = train(make(), None)
    assert expected["with gradient"] == set(expected["adapters"])
    assert expected["losses"][0] - expected["losses"][-1] > 0.05, "the adapters do not learn"
    of_ranks = ranks(4).run(train_on_grid, sizes, options)
    for seen, _ in of_ranks:
        assert seen["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        for name, value in expected["adapters"].items():
            torch.testing.assert_close(seen["adapters"][name], value, rtol=1e-4, atol=1e-5)
        assert seen["with gradient"] == seen["with state"] == set(expected["adapters"])
        assert seen["held"] < 0.51 * expected["held"]
    assert not any("deprecated" in message for message in of_ranks[0][1])
    warned = any("2 times the work" in message for message in of_ranks[0][1])
    assert warned == ("x" in sizes)


def adapt(kind: str, task: str | None) -> nn.Module:
    """A model in fp64 with adapters by PEFT itself: a Llama, or a mixture of experts with a load-balancing loss."""
    torch.manual_seed(6)
    names = ["q_proj", "v_proj", "down_proj"]
    model = hugging_face.llama(tied=False)
    if kind == "balanced":
        model = moe_families.build("mixtral")
        model.set_experts_implementation("eager")  # in fp64
        model.config.output_router_logits, model.router_aux_loss_coef = True, 1.0
    # B is not of zeros, or A would have no gradient.
    config = LoraConfig(r=4, target_modules=names, use_dora=kind == "dora", init_lora_weights=False, task_type=task)
    return get_peft_model(model.double(), config)


def distances_of_adapters(
    sizes: dict[str, int], cases: list[tuple[str, str | None]], has_logits: bool
) -> dict[str, float]:
    """How far adapters' gradients and the loss are from those of one rank, of all cases."""
    tokens = torch.randint(61, (2, 16), generator=torch.Generator().manual_seed(7))
    found = {}
    for case in cases:
        plain, grid = adapt(*case), Grid(**sizes)
        loss = plain(tokens, labels=tokens).loss
        loss.backward()
        model, rows = parallelize(adapt(*case), grid), my_rows(grid, 2)
        output = model(tokens[rows], labels=tokens[rows])
        own = output.loss
        own.backward()
        if not has_logits:
            assert output.logits is None
        found[f"{case} loss"] = abs(own.item() - loss.item())
        for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
            if theirs.requires_grad:
                found[f"{case} {name}"] = distance(gather(ours.grad, layout_of(ours)), theirs.grad)
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    "sizes", [{"context": 4}, pytest.param({"context": 2, "z": 2}, marks=pytest.mark.exhaustive)], ids=str
)
def test_adapters_over_context_have_the_gradients_of_one_rank(sizes: dict[str, int], ranks: MakeRanks) -> None:
    cases = [("lora", "CAUSAL_LM"), ("lora", None), ("dora", "CAUSAL_LM"), ("balanced", "CAUSAL_LM")]
    for found in ranks(4).run(distances_of_adapters, sizes, cases, True):
        assert {name: far for name, far in found.items() if not far < 1e-12} == {}


@pytest.mark.parametrize("sizes", [{"z": 2}, {"data": 2}], ids=str)
def test_adapted_blocks_are_gathered_beside_a_head_that_makes_no_whole_logits(
    sizes: dict[str, int], ranks: MakeRanks
) -> None:
    for found in ranks(2).run(distances_of_adapters, sizes, [("lora", "CAUSAL_LM"), ("dora", None)], False):
        assert {name: far for name, far in found.items() if not far < 1e-6} == {}  # transformers' norms are in fp32


@pytest.mark.parametrize(
    "config",
    [
        PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"),
        LoraConfig(target_modules=["q_proj"], alora_invocation_tokens=[3], task_type="CAUSAL_LM"),
    ],
    ids=["prompt tuning", "activated LoRA"],
)
def test_adapters_that_see_whole_sequences_are_refused_over_context(config: PeftConfig) -> None:
    model = get_peft_model(hugging_face.llama(tied=False), config)
    with pytest.raises(ValueError, match=r"LlamaForCausalLM has adapters of PEFT .* such as LoRA, would do"):
        validate(model, {"context": 2})


def test_adapters_with_a_penalty_of_all_parameters_are_refused() -> None:
    adalora = AdaLoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", total_step=10)
    model = get_peft_model(hugging_face.llama(tied=False), adalora)
    for axis in ("data", "x", "y", "z"):
        with pytest.raises(ValueError, match=r"AdaLoRA adds a penalty of all .*: adapt the model by LoRA"):
            validate(model, {axis: 2})


class ParamWrapper(nn.Module):
    """What PEFT puts around a module of which it adapts a parameter."""

    def __init__(self, base_layer: nn.Module, parameter_name: str) -> None:
        super().__init__()
        self.base_layer, self.parameter_name = base_layer, parameter_name


def test_adapters_of_experts_that_ranks_would_divide_are_refused():
    model = moe_families.build("mixtral")
    mlp = model.model.layers[0].mlp
    mlp.experts = ParamWrapper(mlp.experts, "down_proj")
    with pytest.raises(ValueError, match=r"adapt down_proj of model\.layers\.0\.mlp\.experts\.base_layer, .* expert=1"):
        validate(model, {"data": 2, "expert": 2})
