import sys, torch, torch.distributed as dist
from stretto import ops
from stretto.collectives import AllGather, AllReduce, ReduceScatter, algorithm, chunk
from stretto.collectives.algorithms import find
from tests.ops.joint.test_operators import multiply, ROUNDING
from tests.ops.operands import BLOCKS

WAYS = ((0, 1), (1, -1))
def send_around(value, rank, ranks, index, step):
    for hop in range(1, ranks):
        value = value.copy((rank + step * hop) % ranks, "out", index)
def add_up_to(rank, ranks, index, step):
    total = chunk((rank + step) % ranks, "in", index)
    for hop in range(2, ranks + 1):
        total = chunk((rank + step * hop) % ranks, "in", index).reduce(total)
    return total
@algorithm(lambda ranks: AllGather(ranks, 2))
def gather_both_ways(ranks):
    for rank in range(ranks):
        for half, step in WAYS:
            own = chunk(rank, "in", half).copy(rank, "out", 2 * rank + half)
            send_around(own, rank, ranks, 2 * rank + half, step)
@algorithm(lambda ranks: ReduceScatter(ranks, 2))
def scatter_both_ways(ranks):
    for rank in range(ranks):
        for half, step in WAYS:
            add_up_to(rank, ranks, 2 * rank + half, step).copy(rank, "out", half)
@algorithm(lambda ranks: AllReduce(ranks, 2 * ranks))
def reduce_both_ways(ranks):
    for rank in range(ranks):
        for half, step in WAYS:
            total = add_up_to(rank, ranks, 2 * rank + half, step).copy(rank, "out", 2 * rank + half)
            send_around(total, rank, ranks, 2 * rank + half, step)

MADE = {"all_gather_matmul": gather_both_ways, "matmul_reduce_scatter": scatter_both_ways, "matmul_all_reduce": reduce_both_ways}
R = {**ROUNDING, torch.float16: 2**-11}

def explore():
    world, rank = dist.get_world_size(), dist.get_rank()
    bad, n = [], 0
    for operator, made in MADE.items():
        schedule = made.compile(ranks=world)
        for shape in ((1, 24, 16), (2, 17, 40), (7, 33, 31), (33, 40, 24)):
            for dtype in (torch.float32, torch.float16, torch.bfloat16):
                if n % 3 != (0 if shape[0] == 1 else 1) and dtype != torch.float32: n += 1; continue
                n += 1
                for shift in (True, False):
                  rows, nn, k = shape
                  rows2 = rows * (world if operator == "matmul_reduce_scatter" else 1)
                  g = torch.Generator().manual_seed(5)
                  xs = [torch.randn(rows2, k, generator=g).to(dtype) for _ in range(world)]
                  ws = [torch.randn(nn, k, generator=g).to(dtype) for _ in range(world)]
                  b = torch.randn(nn, generator=g).to(dtype)
                  for transfer in ("copies", "programs"):
                    how = ops.KernelConfig(blocks=BLOCKS._replace(m=16), transfer=transfer, movers=3, is_shifted=shift)
                    if operator == "all_gather_matmul": want = torch.cat(xs).double() @ ws[rank].double().T
                    else: want = sum(a.double() @ w.double().T for a, w in zip(xs, ws))
                    if operator == "matmul_reduce_scatter": want = want.chunk(world)[rank]
                    want = want + b.double()
                    try:
                        out = getattr(ops, operator)(xs[rank], ws[rank], bias=b, implementation=how, schedule=schedule)
                        err = ((out.double() - want).abs().max() / want.abs().max()).item()
                        if err > (world + 1) * R[dtype]: bad.append((operator, shape, dtype, shift, transfer, err))
                    except Exception as e:
                        bad.append((operator, shape, str(dtype), shift, transfer, repr(e)[:200]))
    return n, bad

def edges():
    found = []
    def note(name, run):
        try: found.append((name, "ok", str(run())[:150]))
        except Exception as e: found.append((name, type(e).__name__, str(e)[:230]))
    world, rank = dist.get_world_size(), dist.get_rank()
    x, w = torch.ones(4*world, 16), torch.ones(8, 16)
    note("noncontig x", lambda: ops.all_gather_matmul(torch.ones(16, 4).t(), w, schedule="ring-all-gather").shape)
    note("strided w", lambda: ops.all_gather_matmul(x, torch.ones(8, 32)[:, ::2], schedule="ring-all-gather").shape)
    note("empty rows", lambda: ops.all_gather_matmul(torch.ones(0, 16), w, schedule="ring-all-gather").shape)
    note("empty n", lambda: ops.matmul_all_reduce(x, torch.ones(0, 16), schedule="ring-all-reduce").shape)
    note("empty k", lambda: ops.matmul_reduce_scatter(torch.ones(4*world, 0), torch.ones(8, 0), schedule="ring-reduce-scatter").sum())
    note("fp64", lambda: ops.all_gather_matmul(x.double(), w.double(), schedule="ring-all-gather").dtype)
    note("mixed", lambda: ops.all_gather_matmul(x, w.half(), schedule="ring-all-gather").dtype)
    note("reduce_dtype", lambda: (ops.matmul_reduce_scatter(x.half(), w.half(), schedule="ring-reduce-scatter", reduce_dtype=torch.float32)).sum())
    note("list", lambda: [p.sum().item() for p in ops.all_gather_matmul(x, [w, w[:4]], schedule="ring-all-gather")])
    note("3d", lambda: ops.all_gather_matmul(x.view(4*world,1,16), w, schedule="ring-all-gather").shape)
    note("list, out", lambda: ops.all_gather_matmul(x, w, schedule="ring-all-gather", out=torch.empty(4*world*world, 8)).sum())
    note("rs indivisible", lambda: ops.matmul_reduce_scatter(torch.ones(4*world+1, 16), w, schedule="ring-reduce-scatter").shape)
    note("wrong type", lambda: ops.all_gather_matmul(x, w, schedule=3))
    note("algorithm object", lambda: ops.all_gather_matmul(x, w, schedule=gather_both_ways))
    note("empty name", lambda: ops.all_gather_matmul(x, w, schedule=""))
    note("movers many", lambda: ops.matmul_all_reduce(x, w, schedule="ring-all-reduce", implementation=ops.KernelConfig(blocks=BLOCKS, transfer="programs", movers=1000)).sum())
    note("packets", lambda: ops.matmul_all_reduce(x, w, schedule="ring-all-reduce", implementation=ops.KernelConfig(blocks=BLOCKS, exchange="packets")).sum())
    note("odd tiles", lambda: ops.matmul_all_reduce(x, w, schedule="ring-all-reduce", implementation=ops.KernelConfig(blocks=BLOCKS._replace(n=48), transfer="programs")).sum())
    note("pull rs", lambda: ops.matmul_all_reduce(x, w, schedule="ring-all-reduce", implementation=ops.KernelConfig(blocks=BLOCKS, transfer="copies", direction="pull")).sum())
    note("pull ag", lambda: ops.all_gather_matmul(x, w, schedule="ring-all-gather", implementation=ops.KernelConfig(blocks=BLOCKS, transfer="copies", direction="pull", is_shifted=False)).sum())
    note("LIBRARY cfg", lambda: ops.all_gather_matmul(x, w, schedule="ring-all-gather", implementation=ops.KernelConfig(implementation="library")).sum())
    alone = [dist.new_group([r]) for r in range(world)][rank]
    for op, s in (("all_gather_matmul","ring-all-gather"),("matmul_reduce_scatter","ring-reduce-scatter"),("matmul_all_reduce","ring-all-reduce"),("matmul_all_reduce","two-shot-all-reduce"),("all_gather_matmul","direct-all-gather"),("all_gather_matmul","recursive-doubling-all-gather")):
        note(f"one rank {s}", lambda: getattr(ops, op)(x, w, alone, schedule=s).sum())
    note("user's on one rank", lambda: ops.matmul_all_reduce(x, w, alone, schedule=reduce_both_ways.compile(ranks=1)).sum())
    return found
