# SPDX-License-Identifier: Apache-2.0
"""Linear attention on parts of sequences gives what it gives on whole ones, documents apart or not, and gradients."""

import inspect
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.nemotron_h import modeling_nemotron_h as nemotron
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from stretto.parallel import Grid, cut_sequences
from stretto.parallel.context.linear_attention import LinearAttentionParts
from tests.differences import largest
from tests.parallel.hugging_face import Fp32IsFp64

ROWS, LENGTH, HEADS, KEY, VALUE = 2, 16, 4, 4, 6
# In the second row the second document begins at a rank's first token, and the next ones are shorter than the filter.
DOCUMENTS = [[3, 11, 2], [4, 1, 2, 9]]

# transformers' own operators, which know no documents: here each document is scanned by itself, as kernels do.
CONVOLVE = inspect.unwrap(qwen.causal_conv1d_fn)
DELTA_RULES = {
    "gated": inspect.unwrap(qwen.torch_chunk_gated_delta_rule),
    "of channels": inspect.unwrap(kimi.chunk_kimi_delta_attention),
}
GROUPED = {"gated": 2, "of channels": 1, "state space": 2}
STATE_SPACE = inspect.unwrap(nemotron.mamba2_chunk_scan)


def segments(numbers: Tensor) -> Iterator[tuple[int, slice]]:
    """The row and place of each run of a number."""
    for row, each in enumerate(numbers):
        lengths = each.unique_consecutive(return_counts=True)[1]
        ends = lengths.cumsum(0).tolist()
        yield from ((row, slice(*place)) for place in pairwise([0, *ends]))


def convolve(x: Tensor, weight: Tensor, bias: Tensor, seq_idx: Tensor | None = None, **options: Any) -> Tensor:
    if seq_idx is None:
        return CONVOLVE(x, weight, bias, **options)
    found = torch.empty_like(x)
    for row, place in segments(seq_idx):
        found[row : row + 1, :, place] = CONVOLVE(x[row : row + 1, :, place], weight, bias, **options)
    return found


def delta_rule(kind: str) -> Callable[..., Any]:
    def scan(
        *given: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None = None,
        seq_idx: Tensor | None = None,  # of whole sequences; cu_seqlens of parts
        cu_seqlens: Tensor | None = None,
        **more: Any,
    ) -> Any:
        if seq_idx is not None:
            outputs = torch.empty_like(given[2])
            for row, place in segments(seq_idx):
                query, key, value, decay, rate = (each[row : row + 1, place] for each in (*given, g, beta))
                outputs[row : row + 1, place] = DELTA_RULES[kind](query, key, value, g=decay, beta=rate, **more)[0]
            return outputs, None
        if cu_seqlens is None:
            return DELTA_RULES[kind](*given, g=g, beta=beta, initial_state=initial_state, **more)
        assert len(beta) == 1  # as kernels want it
        parts = []
        for document, (start, end) in enumerate(pairwise(cu_seqlens)):
            query, key, value, decay, rate = (each[:, start:end] for each in (*given, g, beta))
            state = None if initial_state is None else initial_state[document : document + 1]
            parts.append(DELTA_RULES[kind](query, key, value, g=decay, beta=rate, initial_state=state, **more))
        outputs, states = zip(*parts, strict=True)
        return torch.cat(outputs, 1), None if states[0] is None else torch.cat(states)

    return scan


def state_space(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, seq_idx: Tensor | None = None, **options: Any
) -> Any:
    options = {"chunk_size": 8, **options}
    if seq_idx is None:
        return STATE_SPACE(x, dt, A, B, C, **options)
    outputs, states = torch.empty_like(x), {}
    for row, place in segments(seq_idx):
        given = [each[row : row + 1, place] for each in (x, dt)] + [A] + [each[row : row + 1, place] for each in (B, C)]
        found, states[row] = STATE_SPACE(*given, **options | {"return_final_states": True})
        outputs[row : row + 1, place] = found
    return (outputs, torch.cat(list(states.values()))) if options.get("return_final_states") else outputs


def layer(parts: LinearAttentionParts | None, kind: str, inputs: dict[str, Tensor], seq_idx: Tensor | None) -> Tensor:
    """A layer's convolution and scan: on parts, or plainly on whole sequences."""

    def run(name: str, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if seq_idx is not None:
            options["seq_idx"] = seq_idx
        return function(*args, **options) if parts is None else getattr(parts, name)(function, *args, **options)

    mixed = run("convolve", convolve, inputs["mixed"].transpose(1, 2), inputs["weight"], inputs["bias"]).transpose(1, 2)
    heads = HEADS // GROUPED[kind]  # of keys, which the function repeats
    value, query, key = mixed.split((HEADS * VALUE, heads * KEY, heads * KEY), -1)
    value, query, key = (each.unflatten(-1, (-1, size)) for each, size in ((value, VALUE), (query, KEY), (key, KEY)))
    if kind == "state space":
        options = {"D": inputs["A"], "dt_bias": inputs["A"], "dt_softplus": True, "dt_limit": (0.2, 5.0)}
        given = value, inputs["dt"], -inputs["A"].exp(), key, query
        return run("scan_state_space", state_space, *given, **options)
    decay = inputs["decays"] if kind == "of channels" else inputs["dt"]
    options = {"g": -decay.exp(), "beta": inputs["dt"].sigmoid(), "use_qk_l2norm_in_kernel": True}
    return run("scan_delta_rule", delta_rule(kind), query, key, value, **options)[0]


def distances(kind: str) -> list[float]:
    """How far outputs and gradients are from those of whole sequences, of one document a row and of several."""
    grid = Grid(context=4)
    parts = LinearAttentionParts(grid.group("context"))
    generator, found = torch.Generator().manual_seed(3), []
    begins = [[sum(row[:index]) for index, length in enumerate(row) for _ in range(length)] for row in DOCUMENTS]
    width = HEADS * VALUE + 2 * HEADS // GROUPED[kind] * KEY
    sequences = {"mixed": (width,), "dt": (HEADS,), "decays": (HEADS, KEY), "factors": (HEADS, VALUE)}
    shapes = {name: (ROWS, LENGTH, *sizes) for name, sizes in sequences.items()}
    shapes |= {"A": (HEADS,), "weight": (width, 4), "bias": (width,)}

    def cut(whole: Tensor) -> Tensor:
        return cut_sequences(whole, grid, layout="contiguous")

    for seq_idx in (None, torch.tensor(begins, dtype=torch.int32)):
        whole = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
        own = {name: cut(each) if name in sequences else each for name, each in whole.items()}
        results = []
        for inputs, run, numbers in ((whole, None, seq_idx), (own, parts, None if seq_idx is None else cut(seq_idx))):
            leaves = {name: each.clone().requires_grad_(name != "factors") for name, each in inputs.items()}
            with Fp32IsFp64():
                outputs = layer(run, kind, leaves, numbers)
            (outputs * leaves["factors"]).sum().backward()
            results.append((outputs, {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}))
        (expected, right), (outputs, ours) = results
        found.append((outputs - cut(expected)).abs().max().item())
        for name, gradient in right.items():
            if name not in sequences:
                dist.all_reduce(ours[name])
            found.append((ours[name] - (cut(gradient) if name in sequences else gradient)).abs().max().item())
    return found


@pytest.mark.parametrize("kind", ["gated", pytest.param("of channels", marks=pytest.mark.long), "state space"])
def test_parts_of_sequences_give_the_outputs_and_gradients_of_whole_ones(ranks, kind):
    for found in ranks(4).run(distances, kind):
        assert len(found) == (10 if kind == "gated" else 12)
        assert largest(found) < 1e-12
