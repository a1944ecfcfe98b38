# SPDX-License-Identifier: Apache-2.0
"""Calls of context-parallel attention: bytes sent, torch.compile, BlockMask, low precision, and what is refused."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from tests.differences import largest
from tests.ops.attention.whole import Case, attend_whole, draw_whole, find_differences, see
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils.checkpoint import checkpoint

from stretto import ops
from stretto.ops.attention import one_rank, packed_attention
from stretto.ops.attention.block_mask import read_block_mask
from stretto.ops.attention.exchange import Arriving, HeadExchange, Peers
from stretto.ops.attention.plan import Mask, list_chunks
from stretto.parallel import Grid, count_collectives

LENGTH, RANKS = 16, 4
TOTAL = LENGTH * RANKS
ROW_BYTES = 2 * 2 * (8 + 8) * 8  # batch, KV heads, sizes of keys and values, fp64
IMPLEMENTATIONS = "all_gather", "ring", "ulysses"


def count_needed(case, rank):
    """Rows of the other ranks that a rank's positions see, by the mask of all pairs."""
    rows = [
        torch.cat([torch.arange(*each) for each in list_chunks(case.layout, peer, RANKS, case.length, case.documents)])
        for peer in range(RANKS)
    ]
    seen = see(case, TOTAL)[rows[rank]].any(0)
    return sum(int(seen[part].sum()) for peer, part in enumerate(rows) if peer != rank)


SENT = {
    "everything": Case(LENGTH, causal=False),
    "causal": Case(LENGTH),
    "a window": Case(LENGTH, layout="contiguous", window=6),
    "a window, zig-zag": Case(LENGTH, window=6),
    "documents": Case(LENGTH, layout="contiguous", documents=(0, 5, 30, 33, TOTAL)),
    "documents, zig-zag": Case(LENGTH, documents=(0, 5, 30, 33, TOTAL)),
    "documents, balanced": Case(LENGTH, layout="balanced", documents=(0, 2, 4, 40, TOTAL)),
    "documents of one rank": Case(LENGTH, layout="contiguous", documents=(0, 16, 20, 32, 48, TOTAL)),
}


def count_sent():
    """The bytes that each case sends, forward and backward, by (implementation, case)."""
    grid, rank, found = Grid(data=RANKS), dist.get_rank(), {}
    for name, case in SENT.items():
        for implementation in IMPLEMENTATIONS[:2]:
            with count_collectives(grid) as counts:
                assert largest(find_differences(case, implementation)) < 1e-10
            found[implementation, name] = [call.bytes_sent for call in counts.calls]
    return rank, found


@pytest.mark.long
def test_only_rows_that_are_seen_are_sent(ranks):
    found = dict(ranks(RANKS).run(count_sent))
    for name, case in SENT.items():
        needed = [count_needed(case, rank) for rank in range(RANKS)]
        for implementation in IMPLEMENTATIONS[:2]:
            sent = [sum(found[rank][implementation, name]) for rank in range(RANKS)]
            # Keys forward and backward, and their gradients back.
            assert sum(sent) == 3 * sum(needed) * ROW_BYTES, (implementation, name)
    assert not any(found[0]["ring", "documents of one rank"])
    assert len(found[0]["ring", "a window"]) == 3  # of one rank, in three steps


def differ_compiled():
    """Results and gradients of a compiled graph beside eager ones, and the graph's operators."""
    rank, found = dist.get_rank(), []
    for implementation in ("all_gather", "ulysses"):
        case = Case(LENGTH, "balanced", documents=(0, 7, 2 * LENGTH), has_sinks=True, sizes=(8, 4))
        *inputs, _ = draw_whole(case, 2 * LENGTH, torch.float32)
        *parts, sinks = inputs
        leaves = [*(each.chunk(2, 2)[rank].clone().requires_grad_() for each in parts), sinks.requires_grad_()]

        def attend(q, k, v, sinks, case=case, implementation=implementation):
            out = ops.context_attention(q, k, v, sinks=sinks, implementation=implementation, **case.options())
            return (2 * out).sin()

        results = []
        for function in (attend, torch.compile(attend, backend="aot_eager", fullgraph=True)):
            out = function(*leaves)
            results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
        found += [float((one - other).abs().max()) for one, other in zip(*results, strict=True)]
    return found


@pytest.mark.long
def test_a_compiled_graph_has_the_operator(ranks):
    for found in ranks(2).run(differ_compiled):
        assert len(found) == 10
        assert largest(found) < 1e-5


def check_operators():
    case = Case(LENGTH, documents=(0, 7, LENGTH), has_sinks=True, sizes=(8, 4))
    q, k, v, sinks, grad = draw_whole(case, LENGTH)
    documents = case.options()["documents"]
    settings = dist.group.WORLD.group_name, 1, True, 0.3, "zigzag", None, "all_gather"
    leaves = [each.requires_grad_() for each in (q, k, v, sinks)]
    torch.library.opcheck(torch.ops.stretto.context_attention.default, (*leaves, documents, *settings))
    out, lse = torch.ops.stretto.context_attention(*leaves, documents, *settings)
    arguments = grad, *leaves[:3], out, lse, sinks, documents, *settings
    arguments = [each.detach() if isinstance(each, torch.Tensor) else each for each in arguments]
    torch.library.opcheck(torch.ops.stretto.context_attention_backward.default, tuple(arguments))
    torch.library.opcheck(
        torch.ops.stretto.exchange_heads.default, (leaves[0], documents, settings[0], 1, "balanced", True)
    )
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        torch.ops.stretto.context_attention(*leaves, documents, *settings)
    return counter.get_total_flops()


@pytest.mark.long
def test_operators_are_torchs(ranks):
    assert ranks(1).run(check_operators) == [2 * 2 * 4 * LENGTH * LENGTH * (8 + 4)]


@pytest.mark.parametrize(
    "expected",
    [
        Mask(),
        Mask(True),
        Mask(True, 5),
        Mask(False, None, (0, 1, 100, 333, 400)),
        Mask(True, None, (0, 1, 100, 333, 400)),
        Mask(True, 40, (0, 10, 120, 400)),
    ],
)
def test_a_block_mask_is_read(expected):
    case = Case(causal=expected.causal, window=expected.window, documents=expected.documents)
    mask = create_block_mask(lambda b, h, query, key: see(case, 400)[query, key], None, None, 400, 400, device="cpu")
    found = read_block_mask(mask)
    if found["documents"] is not None:
        found = found | {"documents": tuple(found["documents"].tolist())}
    assert Mask(**found) == expected


def test_a_block_mask_of_whole_blocks_or_one_position_is_read():
    mask = create_block_mask(lambda b, h, query, key: query // 256 == key // 256, None, None, 512, 512, device="cpu")
    assert read_block_mask(mask)["documents"].tolist() == [0, 256, 512]
    mask = create_block_mask(lambda b, h, query, key: query - key < 3, None, None, 1, 1, device="cpu")
    assert read_block_mask(mask) == {"causal": True, "window": None, "documents": None}


@pytest.mark.parametrize(
    "seen",
    [
        lambda query, key: (key <= query) & ((query - key) % 7 != 5),
        lambda query, key: (key <= query) | (key < 9),
        lambda query, key: (query - key).abs() < 4,
        lambda query, key: (key <= query) & (query - key < torch.where(query < 200, 5, 6)),
        lambda query, key: (key <= query) & ((query < 256) | (key >= 128)),
    ],
)
def test_another_block_mask_is_refused(seen):
    mask = create_block_mask(lambda b, h, query, key: seen(query, key), None, None, 400, 400, device="cpu")
    with pytest.raises(ValueError, match="takes a block_mask that is causal"):
        read_block_mask(mask)


def attend_by_block_mask():
    rank = dist.get_rank()
    case = Case(LENGTH, window=9, documents=(0, 7, 2 * LENGTH))
    q, k, v, *_ = draw_whole(case, 2 * LENGTH)
    total = 2 * LENGTH
    mask = create_block_mask(lambda b, h, i, j: see(case, total)[i, j], None, None, total, total, device="cpu")
    rows = torch.cat([torch.arange(*each) for each in list_chunks("zigzag", rank, 2, LENGTH)])
    out = ops.ring_attention(*(each[:, :, rows] for each in (q, k, v)), layout="zigzag", **read_block_mask(mask))
    return float((out - attend_whole(q, k, v, None, case)[:, :, rows]).abs().max())


def test_a_block_mask_stands_for_its_options(ranks):
    assert largest(ranks(2).run(attend_by_block_mask)) < 1e-10


def differ_in_16_bits():
    case = Case(LENGTH, documents=(0, 7, 2 * LENGTH), has_sinks=True)
    return [
        largest(find_differences(case, implementation, dtype))
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
        for implementation in IMPLEMENTATIONS
    ]


def test_lower_precision(ranks):
    for found in ranks(2).run(differ_in_16_bits):
        assert largest(found[:3]) < 0.1
        assert largest(found[3:6]) < 0.01
        assert largest(found[6:]) < 1e-5


REFUSED = {
    r"window must be 1 or more positions and needs causal=True, not 4": {"window": 4},
    r"window must be 1 or more positions and needs causal=True, not 3.5": {"window": 3.5, "causal": True},
    r"causal must be True or False, not 'no'": {"causal": "no"},
    r"documents must be a dense tensor, not \[0, 16\] of type list: torch.as_tensor makes one": {"documents": [0, 16]},
    r"scale must be a finite number, or None for 1 / sqrt\(size\), not nan": {"scale": float("nan")},
    r"scale must be a finite number, .* not '1'": {"scale": "1"},
    r"scale must be a finite number, .* not tensor\(0.5000": {"scale": torch.tensor(0.5)},
    r"takes tensors that are not empty, not \[1, 4, 8, 8\], \[1, 0, 8, 8\]": {"kv_heads": 0},
    r"sinks must be a dense tensor, not one of layout torch.sparse_coo": {"sinks": torch.zeros(4).to_sparse()},
    r"sinks must be a dense tensor, not \[1.0, 2.0\]": {"sinks": [1.0, 2.0]},
    r"layout must be one of contiguous, zigzag, balanced, not 'zig'": {"layout": "zig"},
    r'layout="balanced" is of causal attention: give causal=True': {"layout": "balanced"},
    r"7 positions make none: pad to 8 or use layout=\"contiguous\"": {"layout": "zigzag", "length": 7},
    r"documents are int32 or int64 \[documents \+ 1\], where each begins and the length 16": {
        "documents": torch.zeros(3)
    },
    r"documents begin at 0, in ascending order, and end with the length 16 .* not \[0, 9, 15\]": {
        "documents": torch.tensor([0, 9, 15])
    },
    r"implementation must be one of auto, all_gather, ring, ulysses, not 'flash'": {"implementation": "flash"},
    r"sinks must be \[4\] floating-point numbers on cpu, not torch.float32 \[3\]": {"sinks": torch.zeros(3)},
    r"3 KV heads do not divide 4 heads": {"kv_heads": 3},
    r"no number of 2 ranks divides 4 heads and 1 KV heads: use all_gather_attention": {
        "implementation": "ulysses", "kv_heads": 1
    },
    r"takes .*float64, not torch.int32: convert": {"dtype": torch.int32},
}  # fmt: skip


def refuse():
    for pattern, options in REFUSED.items():
        options = dict(options)
        length, kv_heads = options.pop("length", 8), options.pop("kv_heads", 2)
        dtype = options.pop("dtype", torch.float32)
        q, k = torch.zeros(1, 4, length, 8, dtype=dtype), torch.zeros(1, kv_heads, length, 8, dtype=dtype)
        with pytest.raises(ValueError, match=pattern):
            ops.context_attention(q, k, k, **options)
    q = torch.zeros(2, 4, 8, 8)
    with pytest.raises(ValueError, match="2 rows of 8 positions begin documents of their own, but none begins at 8"):
        packed_attention(q, q, q, torch.tensor([0, 5, 16]))


def differ_between_ranks():
    rank, messages = dist.get_rank(), []
    for length, options in (
        (8 + 2 * rank, {}),
        (8 + 2 * rank, {"implementation": "ulysses"}),
        (8, {"layout": ["contiguous", "zigzag"][rank]}),
        (8, {"documents": torch.tensor([0, 4 + rank, 16])}),
    ):
        q = torch.zeros(1, 2, length, 8)
        with pytest.raises(ValueError, match="ranks of a group make the same calls") as error:
            ops.context_attention(q, q, q, **options)
        messages.append(str(error.value))
    return messages


def test_refusals(ranks):
    ranks(2).run(refuse)
    for found in ranks(2).run(differ_between_ranks):
        assert len(found) == 4


def list_wrapped():
    """The kinds of collectives that a caller wraps, forward and then backward too, of each implementation."""
    q, k = torch.randn(1, 2, LENGTH, 8, requires_grad=True), torch.randn(1, 2, LENGTH, 8)
    found = []
    for implementation in IMPLEMENTATIONS:
        kinds = []

        def wrap(kind, make, kinds=kinds):
            kinds.append(kind)
            return make()

        out = ops.context_attention(q, k, k, implementation=implementation, wrap_collective=wrap)
        forward = len(kinds)
        out.sum().backward()
        found.append((set(kinds), forward, len(kinds)))
    return found


def test_a_caller_wraps_each_collective(ranks):
    # Keys; then keys and gradients. Ulysses: q, k and v, and the output; then their gradients.
    expected = [({"all_to_all"}, 1, 3), ({"all_to_all"}, 1, 3), ({"all_to_all"}, 2, 4)]
    assert ranks(2).run(list_wrapped) == [expected] * 2


def count_left(ways):
    """Collectives that nothing has waited for, which keep their memory, after passes that compute attention again."""
    whole = [torch.randn(2, 8, 6, 4, requires_grad=True) for _ in range(3)]
    for way in ways:
        checkpoint(partial(ops.context_attention, implementation=way), *whole, use_reentrant=False).sum().backward()
    return torch._C._distributed_c10d._get_work_registry_size()


def test_recomputation_that_ends_early_leaves_no_collective_behind(ranks):
    assert ranks(2).run(count_left, ("all_gather", "ring", "ulysses")) == [0, 0]


def order_by_heads():
    """What Ulysses does, forward and backward, in its order: "send", "await" and the kernels' calls."""
    events, (start, finish) = [], (HeadExchange._exchange, HeadExchange.finish)

    def noted(name, function):
        return lambda *arguments: (events.append(name), function(*arguments))[1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HeadExchange, "_exchange", noted("send", start))
        patch.setattr(HeadExchange, "finish", noted("await", finish))
        for name in ("attend", "differentiate"):
            patch.setattr(one_rank, name, noted(name, getattr(one_rank, name)))
        q, k = torch.randn(1, 8, LENGTH, 8, requires_grad=True), torch.randn(1, 4, LENGTH, 8, requires_grad=True)
        ops.ulysses_attention(q, k, k).sum().backward()
    return " ".join(events)


def order_while_projecting():
    """What Ulysses does of functions that make q, k and v, in its order, and its results and gradients beside those of
    tensors: each with the output's projection and without, with a tensor in place of a function."""
    events, found = [], []
    heads, start = HeadExchange, HeadExchange._exchange
    shapes = (2, LENGTH, 24), (64, 24), (32, 24), (32, 24), (8,), (24, 64)
    leaves = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    for leaf in leaves:
        dist.broadcast(leaf, 0)
        leaf.requires_grad_()
    x, *weights, sinks, output = leaves
    options = {"causal": True, "layout": "zigzag", "sinks": sinks, "scale": -0.2, "documents": torch.tensor([0, 9, 32])}

    def project(number):
        events.append("qkv"[number])
        return torch.nn.functional.linear(x, weights[number]).unflatten(2, (-1, 8)).transpose(1, 2)

    def differentiate(out):
        return [out, *torch.autograd.grad(out.square().sum(), leaves)]

    made = [partial(project, number) for number in range(3)]
    plain = ops.ulysses_attention(*(make() for make in made), **options)
    right = differentiate(torch.nn.functional.linear(plain.transpose(1, 2).flatten(2), output))
    events.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heads, "_exchange", lambda *arguments: (events.append("send"), start(*arguments))[1])
        out = ops.ulysses_attention(*made, kv_heads=4, output=output, **options)
        order = " ".join(events)
    for one, two in zip(differentiate(out), right, strict=True):
        found.append(float((one - two).abs().max() / two.abs().max()))
    out = ops.ulysses_attention(made[0], made[1](), made[2], **options)
    found.append(float((out - plain).abs().max()))
    for wrong in ({}, {"kv_heads": 3}, {"kv_heads": 2}, {"kv_heads": 4, "output": output[:, :60]}):
        with pytest.raises(ValueError, match=r"kv_heads|weight"):
            ops.ulysses_attention(*made, **wrong)
    return order, largest(found)


def test_heads_travel_while_others_are_projected(ranks):
    for order, difference in ranks(2).run(order_while_projecting):
        assert order == "q send k send v send send send"
        assert difference < 1e-10


def test_half_of_the_heads_travel_while_the_other_half_attends(ranks):
    forward = "send send await attend send await attend send await await"
    backward = "send send await differentiate send await differentiate send await await"
    assert ranks(2).run(order_by_heads) == [f"{forward} {backward}"] * 2


class _NotedStream:
    """In place of a GPU's side stream: notes what runs on it."""

    def __init__(self, events):
        self.events = events

    def __enter__(self):
        self.events.append("(")

    def __exit__(self, *_):
        self.events.append(")")

    def join(self):
        self.events.append("join")


def order_beside():
    """What a rank does, forward and backward, where kernels of others' keys have a stream of their own."""
    events = []

    def noted(name, function):
        return lambda *arguments: (events.append(name), function(*arguments))[1]

    def fork(peers, steps, device):
        events.append("fork")
        return _NotedStream(events)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Peers, "fork", fork)
        patch.setattr(Peers, "start_back", noted("return", Peers.start_back))
        patch.setattr(Arriving, "wait", noted("await", Arriving.wait))
        for name in ("attend", "differentiate", "merge_parts"):
            patch.setattr(one_rank, name, noted(name, getattr(one_rank, name)))
        differences = find_differences(Case(kv_heads=4, documents=(0, 5, 16), has_sinks=True), "all_gather")
    return largest(differences), " ".join(events)


def test_gradients_of_others_keys_are_made_on_a_stream_that_is_joined_beside_those_of_own_ones(ranks):
    forward = "attend await attend merge_parts"
    backward = "fork differentiate ( await differentiate return ) join await"
    for difference, events in ranks(2).run(order_beside):
        assert difference < 1e-10
        assert events == f"{forward} {backward}"


def note_layouts():
    """Strides of the results and gradients that kernels are given, for gradients of three layouts."""
    found, differentiate = [], one_rank.differentiate

    def note(grad, q, k, v, out, *others):
        found[-1].add((grad.stride(), out.stride()))
        return differentiate(grad, q, k, v, out, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(one_rank, "differentiate", note)
        for lay_out in (
            torch.Tensor.contiguous,
            lambda grad: grad.transpose(1, 2).contiguous().transpose(1, 2),
            lambda grad: grad.transpose(0, 3).contiguous().transpose(0, 3),
        ):
            found.append(set())
            q, k, v, _, grad = draw_whole(Case(), Case().length)
            out = ops.context_attention(*(each.requires_grad_() for each in (q, k, v)), causal=True, layout="zigzag")
            out.backward(lay_out(grad))
    return found


def test_kernels_are_given_gradients_in_one_layout_whatever_the_callers(ranks):
    """torch keeps cuDNN's graphs of backward passes by the layouts of queries, keys and values alone."""
    for first, *others in ranks(2).run(note_layouts):
        assert first
        assert others == [first, first]
