"""All-reduce kernels written by hand for one purpose (bf16, sum, LL), to see what a compiled schedule costs over them.

They have neither time limits nor reports, and take sizes that divide evenly: what a kernel author would try first.
"""

from importlib.resources import files

from torch import Tensor

from stretto.collectives.executor.cuda.workspace import CollectiveWorkspace


class HandwrittenAllReduce:
    """One-shot or two-shot by LL. Shares the workspace's memory and epochs, so that it may be mixed with other kernels.

    shots: 1 or 2. The whole array is bf16 and a multiple of 8 bytes a rank.
    """

    def __init__(self, workspace: CollectiveWorkspace, shots: int) -> None:
        world, rank = workspace.world_size, workspace.rank
        names = [f"peer_{peer}" for peer in range(world)]
        source = (
            f"#define WORLD {world}\n#define RANK {rank}\n#define SHOTS {shots}\n"
            f"#define PEERS {', '.join(names)}\n"
            f"#define PEERS_PARAMETERS {', '.join(f'char* {name}' for name in names)}\n"
            + files(__package__).joinpath("handwritten.cu").read_text(encoding="utf-8")
        )
        self._function = workspace.load(source, ["input", "output", "epochs", "count", "half", *names])
        region = workspace.regions["LL"]
        self._capacity, self._shots, self._world = region.size, shots, world
        self._function.set("epochs", workspace.state.data_ptr())
        self._function.set("half", workspace.half)
        for name, address in zip(names, workspace.peers, strict=True):
            self._function.set(name, address + region.start)

    def fits(self, num_bytes: int) -> bool:
        """Whether the mailboxes are large enough."""
        return (
            num_bytes % (8 * self._world) == 0
            and 2 * num_bytes * (self._world if self._shots == 1 else 2) <= self._capacity
        )

    def __call__(self, input: Tensor, output: Tensor) -> None:
        """Sum `input` (bf16) over the ranks into `output`."""
        count = input.numel() * 2 // 8
        lanes = count if self._shots == 1 else count // self._world
        self._function.set("input", input.data_ptr())
        self._function.set("output", output.data_ptr())
        self._function.set("count", count)
        threads = 128 if lanes <= 128 * 128 else 512
        self._function.launch(max(1, min(-(-lanes // threads), 128)), threads)
