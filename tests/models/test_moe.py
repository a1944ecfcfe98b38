# SPDX-License-Identifier: Apache-2.0
"""Routers and experts: what they choose and compute, by formulas written out token by token."""

import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stretto.models import GPT, GPTConfig
from stretto.models.moe import Experts, MoE, Router, RouterOptions, scale_losses, update_biases

HIDDEN, EXPERTS = 12, 8


def make_router(k: int = 2, seed: int = 0, **options: Any) -> Router:
    torch.manual_seed(seed)
    router = Router(HIDDEN, EXPERTS, k, RouterOptions(**options)).double()
    nn.init.normal_(router.weight, std=0.5)
    return router


def tokens(*shape: int, seed: int = 1) -> Tensor:
    torch.manual_seed(seed)
    return torch.randn(*shape, HIDDEN, dtype=torch.float64)


def best_by_hand(scores: list[float], count: int) -> list[int]:
    return sorted(range(len(scores)), key=lambda expert: (-scores[expert], expert))[:count]


# What is chosen.


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_a_token_gets_the_experts_with_the_best_scores_and_their_weights(scores: Any, normalize: bool) -> None:
    router, x = make_router(3, scores=scores, normalize=normalize, scale=2.5), tokens(20)
    logits, weights, ids = router(x)
    for row in range(20):
        of_token = [sum(map(float.__mul__, x[row].tolist(), weight)) for weight in router.weight.tolist()]
        assert logits[row].tolist() == pytest.approx(of_token)
        total = sum(map(math.exp, of_token))
        values = [math.exp(z) / total if scores == "softmax" else 1 / (1 + math.exp(-z)) for z in of_token]
        chosen = best_by_hand(values, 3)
        assert ids[row].tolist() == chosen
        divisor = sum(values[expert] for expert in chosen) if normalize else 1.0
        assert weights[row].tolist() == pytest.approx([2.5 * values[expert] / divisor for expert in chosen])


def test_of_equal_scores_the_lower_experts_win() -> None:
    router = make_router(3)
    nn.init.zeros_(router.weight)
    assert router(tokens(5))[2].tolist() == [[0, 1, 2]] * 5
    router.weight.data[6] = router.weight.data[4] = 1.0
    assert router(torch.ones(1, HIDDEN, dtype=torch.float64))[2].tolist() == [[4, 6, 0]]


def test_groups_are_chosen_by_their_two_best_experts() -> None:
    router = make_router(2, scores="sigmoid", groups=4, groups_per_token=2)
    # Scores by expert, in groups of two: the single best expert is in a group whose sum is the lowest.
    logits = torch.logit(torch.tensor([0.95, 0.01, 0.5, 0.55, 0.6, 0.58, 0.5, 0.5], dtype=torch.float64))
    router.weight.data = logits.unsqueeze(1).repeat(1, HIDDEN) / HIDDEN
    assert router(torch.ones(1, HIDDEN, dtype=torch.float64))[2].tolist() == [[4, 5]]


def test_a_bias_changes_the_choice_and_not_the_weights() -> None:
    router = make_router(1, scores="sigmoid", normalize=False, balance="bias")
    x = tokens(6)
    assert router.expert_bias is not None
    router.expert_bias[5] = 100.0
    logits, weights, ids = router(x)
    assert ids.tolist() == [[5]] * 6
    assert torch.equal(weights, logits.sigmoid()[:, 5:6])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_scores_are_computed_in_fp32_at_least_also_under_autocast(dtype: torch.dtype) -> None:
    router, x = make_router(), tokens(4).to(dtype)
    router.to(dtype)
    wanted = x.float() @ router.weight.float().T
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits, weights, _ = router(x)
    assert logits.dtype == weights.dtype == torch.float32
    torch.testing.assert_close(logits, wanted)
    assert make_router()(tokens(4))[0].dtype == torch.float64


def test_16_bit_models_keep_biases_in_fp32() -> None:
    router = make_router(balance="bias").float()
    router.expert_bias += 1e-3 * torch.arange(EXPERTS)  # type: ignore[operator]
    before = router.expert_bias.clone()
    assert torch.equal(router.bfloat16().expert_bias, before)
    assert router.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_it_chooses_as_transformers_router_with_the_same_weights(family: str) -> None:
    pytest.importorskip("transformers")
    if family == "mixtral":
        from transformers.models.mixtral.modeling_mixtral import MixtralConfig, MixtralTopKRouter

        theirs: Any = MixtralTopKRouter(MixtralConfig(hidden_size=64, num_local_experts=16, num_experts_per_tok=2))
        options = RouterOptions()
    else:
        from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Config, DeepseekV3TopkRouter

        config = DeepseekV3Config(
            hidden_size=64,
            n_routed_experts=16,
            num_experts_per_tok=4,
            n_group=4,
            topk_group=2,
            routed_scaling_factor=2.5,
        )
        theirs = DeepseekV3TopkRouter(config)
        options = RouterOptions("sigmoid", scale=2.5, groups=4, groups_per_token=2, balance="bias")
    ours = Router(64, 16, theirs.top_k, options)
    torch.manual_seed(3)
    nn.init.normal_(theirs.weight)
    ours.weight.data = theirs.weight.data.clone()
    if ours.expert_bias is not None:
        nn.init.normal_(theirs.e_score_correction_bias, std=0.1)
        ours.expert_bias.copy_(theirs.e_score_correction_bias)
    x = torch.randn(2, 50, 64)
    logits, weights, ids = ours(x)
    their_logits, their_weights, their_ids = theirs(x)
    torch.testing.assert_close(logits, their_logits)
    order, their_order = ids.argsort(1), their_ids.argsort(1)
    assert torch.equal(ids.gather(1, order), their_ids.gather(1, their_order))
    torch.testing.assert_close(weights.gather(1, order), their_weights.gather(1, their_order))


# The losses: their gradients are those of the written formulas.


def switch_loss(router: Router, x: Tensor, ids: Tensor) -> Tensor:
    """Fedus et al., equations 4 to 6: E x sum of f_e P_e, where f_e counts all choices."""
    shares = (x.flatten(0, -2) @ router.weight.T).softmax(-1)
    load = [(ids == expert).double().mean() for expert in range(EXPERTS)]
    return EXPERTS * sum(load[expert] * shares[:, expert].mean() for expert in range(EXPERTS))  # type: ignore[return-value]


def sequence_loss(router: Router, x: Tensor, ids: Tensor) -> Tensor:
    """DeepSeek-V3, equations 17 to 20, in the mean over sequences; scores are sigmoids."""
    losses, k = [], ids.shape[1]
    for sequence, chosen in zip(x, ids.unflatten(0, x.shape[:2]), strict=True):
        scores = (sequence @ router.weight.T).sigmoid()
        mean = (scores / scores.sum(-1, keepdim=True)).mean(0)
        load = [EXPERTS / (k * len(sequence)) * (chosen == expert).sum() for expert in range(EXPERTS)]
        losses.append(sum(load[expert] * mean[expert] for expert in range(EXPERTS)))
    return torch.stack(losses).mean()  # type: ignore[arg-type]


def z_loss(router: Router, x: Tensor, ids: Tensor) -> Tensor:
    """Zoph et al., equation 5."""
    return (x.flatten(0, -2) @ router.weight.T).exp().sum(-1).log().square().mean()


LOSSES: dict[str, tuple[dict[str, Any], Any]] = {
    "switch": ({"balance": "switch", "balance_loss": 0.3}, switch_loss),
    "sequence": ({"balance": "sequence", "balance_loss": 0.3, "scores": "sigmoid"}, sequence_loss),
    "bias and sequence": ({"balance": "bias", "balance_loss": 0.3, "scores": "sigmoid"}, sequence_loss),
    "z": ({"z_loss": 0.3}, z_loss),
}


def gradient_of_loss_alone(router: Router, x: Tensor) -> Tensor:
    """The gradient that the router adds by itself: of its weights' sum, which normalization makes a constant."""
    router.weight.grad = None
    router(x)[1].sum().backward()
    assert router.weight.grad is not None
    return router.weight.grad


@pytest.mark.parametrize("name", LOSSES)
def test_a_losss_gradient_is_that_of_its_formula(name: str) -> None:
    options, formula = LOSSES[name]
    router, x = make_router(**options), tokens(3, 5)
    router.loss_scale = 0.25
    found = gradient_of_loss_alone(router, x)
    loss = formula(router, x, router.eval()(x)[2])
    (wanted,) = torch.autograd.grad(0.3 * loss, router.weight)
    torch.testing.assert_close(found, 0.25 * wanted, rtol=1e-10, atol=1e-14)
    assert wanted.abs().max() > 1e-4
    statistics = update_biases(router)
    assert statistics is not None
    assert statistics.losses.sum().item() == pytest.approx(0.3 * loss.item())


@pytest.mark.parametrize("name", LOSSES)
def test_ranks_that_have_parts_of_the_tokens_add_up_to_the_whole_gradient(name: str) -> None:
    router, x = make_router(**LOSSES[name][0], seed=4), tokens(4, 5)
    whole = gradient_of_loss_alone(router, x).clone()
    counts = [(router.eval()(part)[2].flatten()).bincount(minlength=EXPERTS) for part in x.split((3, 1))]
    router.train().sum_over_ranks = lambda _: counts[0] + counts[1]
    parts = [gradient_of_loss_alone(router, part).clone() for part in x.split((3, 1))]
    torch.testing.assert_close(parts[0] + parts[1], whole, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("name", ["sequence", "z"])
def test_micro_batches_weighted_by_their_shares_add_up_to_the_whole_gradient(name: str) -> None:
    router, x = make_router(**LOSSES[name][0], seed=5), tokens(4, 5)
    whole = gradient_of_loss_alone(router, x).clone()
    total = torch.zeros_like(whole)
    for part in x.split((1, 3)):
        scale_losses(router, len(part) / 4)
        total += gradient_of_loss_alone(router, part)
    torch.testing.assert_close(total, whole, rtol=1e-10, atol=1e-14)


def test_balanced_tokens_have_a_switch_loss_of_its_coefficient() -> None:
    router = make_router(1, balance="switch", balance_loss=0.5, normalize=False)
    router.weight.data = torch.eye(EXPERTS, HIDDEN, dtype=torch.float64) * 1e-9
    router(torch.eye(EXPERTS, HIDDEN, dtype=torch.float64))
    statistics = update_biases(router)
    assert statistics is not None
    assert statistics.counts.tolist() == [[1.0] * EXPERTS]
    assert statistics.losses.tolist() == [pytest.approx([0.5, 0.0])]


def test_losses_are_means_over_tokens_of_whatever_number_of_experts_a_token() -> None:
    model = nn.ModuleList(make_router(per_token, z_loss=1.0) for per_token in (1, 3))
    x = tokens(4, 5)
    logits = [router(x)[0] for router in model]
    statistics = update_biases(model)
    assert statistics is not None
    wanted = torch.stack([each.logsumexp(-1).square().mean() for each in logits]).detach()
    torch.testing.assert_close(statistics.losses[:, 1], wanted)


def test_a_loss_over_sequences_raises_with_the_shape_that_it_needs() -> None:
    router = make_router(balance="sequence", balance_loss=1.0)
    assert router.needs_whole_sequences
    with pytest.raises(ValueError, match=r"\[batch, seq, hidden\], and x is \[15, 12\]"):
        router(tokens(15))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_passes_without_gradients_are_counted_with_those_that_have_some(mode: Any) -> None:
    router, x = make_router(balance="switch", balance_loss=0.3), tokens(3, 5)
    with mode():
        router(x)
    router(x)[1].sum().backward()
    statistics = update_biases(router)
    assert statistics is not None
    chosen = router.eval()(x)[2].flatten().bincount(minlength=EXPERTS)
    assert statistics.counts.tolist() == [(2 * chosen).tolist()]


# The bias.


def test_biases_move_towards_the_mean_load_once_a_step_whatever_the_micro_batches() -> None:
    x = tokens(16, 3)
    biases = []
    for micro_batches in (1, 8):
        router = make_router(balance="bias", bias_rate=0.01)
        for part in x.chunk(micro_batches):
            router(part)
        counts = [int((router.eval()(x)[2] == expert).sum()) for expert in range(EXPERTS)]
        update_biases(router)
        mean = sum(counts) / EXPERTS
        wanted = [0.01 * ((mean > count) - (mean < count)) for count in counts]
        assert router.expert_bias is not None
        assert router.expert_bias.tolist() == pytest.approx(wanted)
        assert {0.01, -0.01} <= {round(bias, 9) for bias in wanted}
        biases.append(router.expert_bias)
    assert torch.equal(*biases)


def test_biases_even_out_a_skewed_router() -> None:
    router, x = make_router(balance="bias", bias_rate=0.02), tokens(512)
    router.weight.data[0] = 0.0
    router.weight.data[:, 0] = 0.0
    router.weight.data[0, 0] = 0.5
    x[:, 0] = 5.0  # expert 0 is chosen by almost all
    loads = []
    for _ in range(60):
        router(x)
        statistics = update_biases(router)
        assert statistics is not None
        loads.append(float(statistics.counts.max() / statistics.counts.mean()))
    assert loads[0] > 3
    assert loads[-1] < 1.5
    torch.testing.assert_close(statistics.biases[0], router.expert_bias, check_dtype=False)


def test_evaluation_counts_drops_and_loses_nothing() -> None:
    options = {"balance": "bias", "balance_loss": 1.0, "z_loss": 1.0, "capacity_factor": 0.25, "scores": "sigmoid"}
    router, x = make_router(**options).eval(), tokens(2, 8)
    _, weights, ids = router(x)
    assert update_biases(router) is None
    assert (ids < EXPERTS).all()
    assert (weights > 0).all()
    router.train()(x)
    statistics = update_biases(router)
    assert statistics is not None
    assert statistics.counts.sum() == 2 * 16


# Capacity.


def kept_by_hand(ids: Tensor, capacity: int) -> list[list[bool]]:
    taken, kept = [0] * EXPERTS, []
    for row in ids.tolist():
        kept.append([taken[expert] < capacity for expert in row])
        for expert in row:
            taken[expert] += 1
    return kept


@pytest.mark.parametrize("factor", [0.1, 0.5, 1.0, 1.1, 8.0])
def test_an_expert_takes_its_first_tokens_up_to_the_capacity(factor: float) -> None:
    router, x = make_router(capacity_factor=factor, seed=6), tokens(20)
    ids = router.eval()(x)[2]
    _, weights, found = router.train()(x)
    capacity = math.ceil(Fraction(str(factor)) * 20 * 2 / EXPERTS)
    kept = torch.tensor(kept_by_hand(ids, capacity))
    assert torch.equal(found, ids.masked_fill(~kept, EXPERTS))
    assert torch.equal(weights == 0, ~kept)
    statistics = update_biases(router)
    assert statistics is not None
    assert statistics.dropped.sum() == (~kept).sum()
    assert torch.equal(statistics.counts[0], ids.flatten().bincount(minlength=EXPERTS).double())


def test_ranks_fill_the_slots_in_their_order() -> None:
    router, x = make_router(capacity_factor=0.75, seed=7), tokens(20)
    whole = router(x)[2]
    parts = x.split((8, 0, 12))
    counts = [router.eval()(part)[2].flatten().bincount(minlength=EXPERTS) for part in parts]
    router.train().sum_over_ranks = lambda _: sum(counts)  # type: ignore[assignment,return-value]
    found = []
    for rank, part in enumerate(parts):
        router.sum_over_earlier_ranks = lambda own, rank=rank: sum(counts[:rank], torch.zeros_like(own))  # type: ignore[misc]
        found.append(router(part)[2])
    assert torch.equal(torch.cat(found), whole)
    assert (whole == EXPERTS).any()


# Experts.


def expert_by_hand(experts: Experts, expert: int, x: Tensor) -> Tensor:
    if experts.is_gated:
        gate, up = experts.gate_up_proj[expert].chunk(2)
        return experts.down_proj[expert] @ (F.silu(gate @ x) * (up @ x))
    return experts.down_proj[expert] @ F.gelu(experts.up_proj[expert] @ x, approximate="tanh")


@pytest.mark.parametrize("is_gated", [True, False])
def test_experts_add_up_their_weighted_outputs(is_gated: bool) -> None:
    torch.manual_seed(8)
    experts = Experts(HIDDEN, 10, 5, is_gated=is_gated).double()
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.3)
    x = tokens(7).requires_grad_()
    ids = torch.tensor([[0, 3], [3, 0], [4, 5], [5, 5], [3, 1], [0, 1], [1, 3]])  # nobody's: 2; dropped: 5
    weights = torch.rand(7, 2, dtype=torch.float64).requires_grad_()
    wanted = torch.stack(
        [
            sum(
                (weights[row, place] * expert_by_hand(experts, int(ids[row, place]), x[row]) for place in range(2)
                 if ids[row, place] < 5), torch.zeros(HIDDEN, dtype=torch.float64),
            )
            for row in range(7)
        ]
    )  # fmt: skip
    inputs = (x, weights, *experts.parameters())
    found = experts(x, ids, weights)
    torch.testing.assert_close(found, wanted)
    cotangent = torch.randn_like(wanted)
    for ours, theirs in zip(
        torch.autograd.grad(found, inputs, cotangent), torch.autograd.grad(wanted, inputs, cotangent), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_no_tokens_are_fine_and_leave_experts_without_gradients() -> None:
    experts = Experts(HIDDEN, 4, 3, is_gated=True)
    y = experts(torch.zeros(0, HIDDEN), torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0, 2))
    assert y.shape == (0, HIDDEN)


# The model.


def make_config(**options: Any) -> GPTConfig:
    return GPTConfig(
        **{"layers": 4, "hidden": 16, "heads": 2, "vocab": 30, "max_seq_len": 8, "num_experts": 4} | options
    )


def test_shared_experts_add_what_every_token_passes_scaled_by_their_gate() -> None:
    torch.manual_seed(9)
    moe = MoE(make_config(shared_ffn=6, shared_expert_gate=True, activation="swiglu")).double()
    x = torch.randn(2, 3, 16, dtype=torch.float64)
    assert moe.shared is not None
    assert moe.shared.output_gate is not None
    both = moe(x)
    shared = moe.shared
    by_hand = shared.down(F.silu(shared.gate(x)) * shared.up(x)) * torch.sigmoid(shared.output_gate(x))
    moe.shared = None
    torch.testing.assert_close(both - moe(x), by_hand)


@pytest.mark.parametrize(
    ("pattern", "blocks"),
    [("all", [0, 1, 2, 3]), ("every:2", [1, 3]), ("from:1", [1, 2, 3]), ((0, 2), [0, 2]), ([3, 3], [3])],
)
def test_blocks_with_experts_and_dense_ones_in_any_pattern(pattern: Any, blocks: list[int]) -> None:
    config = make_config(moe_layers=pattern)
    with torch.device("meta"):
        model = GPT(config)
    assert [number for number, block in enumerate(model.blocks) if isinstance(block.mlp, MoE)] == blocks
    assert config.moe_blocks == tuple(blocks)


def test_experts_start_as_gpt2s_linears() -> None:
    torch.manual_seed(10)
    config = make_config(layers=8, hidden=64, num_experts=8, shared_ffn=64, balance="bias")
    mlp = GPT(config).blocks[0].mlp
    assert mlp.experts.up_proj.std().item() == pytest.approx(0.02, rel=0.05)
    assert mlp.router.weight.std().item() == pytest.approx(0.02, rel=0.2)
    for parameter in (mlp.experts.down_proj, mlp.shared.down.weight):
        assert parameter.std().item() == pytest.approx(0.02 / 4, rel=0.05)


def test_a_model_with_one_expert_is_the_dense_model() -> None:
    dense = GPT(make_config(num_experts=None, bias=False)).double()
    routed = GPT(make_config(num_experts=1, experts_per_token=1, bias=False, balance="none")).double()
    weights = dict(dense.named_parameters())
    for name, parameter in routed.named_parameters():
        twin = name.replace("experts.up_proj", "up.weight").replace("experts.down_proj", "down.weight")
        if "router" not in name:
            parameter.data = weights[twin].data.view_as(parameter).clone()
    x = torch.randint(30, (2, 8))
    torch.testing.assert_close(routed(x), dense(x))


REFUSALS = {
    "experts_per_token is 5, but model.num_experts is only 4; .* would do is 4": {"experts_per_token": 5},
    "expert_groups is 3, which does not divide .* 4; .* would do is (2|4)": {"expert_groups": 3},
    "groups_per_token is 1, but must be from 2": {"expert_groups": 4},
    "capacity_factor is 0, with which an expert has no slot": {"capacity_factor": 0},
    "moe_layers is 'every:5', which is no block of 4": {"moe_layers": "every:5"},
    "moe_layers is 'some', but must be 'all'": {"moe_layers": "some"},
    "moe_layers has 4, but the model's blocks are 0 to 3": {"moe_layers": (1, 4)},
    "normalize_expert_weights is true, but with one": {"experts_per_token": 1, "normalize_expert_weights": True},
    "shared_expert_gate is true, but there is no shared expert": {"shared_expert_gate": True},
    "z_loss is -1, but must be at least 0": {"z_loss": -1},
    "balance is 'even', but must be one of switch": {"balance": "even"},
    "balance_loss is 0.1, but model.balance is 'none'": {"balance": "none", "balance_loss": 0.1},
    "capacity_factor is 1.0, but belongs to a mixture": {"num_experts": None, "capacity_factor": 1.0},
}


@pytest.mark.parametrize("message", REFUSALS)
def test_impossible_models_raise_with_a_valid_value(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_config(**REFUSALS[message])
