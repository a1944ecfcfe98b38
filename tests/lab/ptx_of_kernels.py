# SPDX-License-Identifier: Apache-2.0
"""Prints what kernels do with memory, as PTX, to compare two sources: `python -m tests.lab.ptx_of_kernels`.

The kernels are those that end a call by themselves, or join parts of a tile.
"""

import json
import re

from tests.ops import test_machine_code as ops
from tests.tiles import test_machine_code as tiles

from stretto.tiles.compile_only import compile_kernel

MEMORY = re.compile(r"bar\.sync|(ld|st|atom|red)\.\S*(global|shared|volatile)|cp\.async|fence|membar|mbarrier")


def list_accesses(lines):
    """The instructions that access memory or order accesses, whatever registers they take."""
    return [re.sub(r"%\w+", "register", line.strip()) for line in lines if MEMORY.search(line)]


def main():
    arguments = tiles.launches()["exchange_packets"]
    ptx = compile_kernel(tiles.kernels.exchange_packets, arguments, {}, "sm_90")["ptx"]
    found = {"exchange_packets": list_accesses(ptx.splitlines())}
    for form in ("one-shot", "two-shots", "scatter"):
        found[form] = list_accesses(ops.to_ptx("exchange", blocks=ops.FEW_ROWS, form=form))
    found["one-shot, shared"] = list_accesses(ops.to_ptx("exchange", blocks=ops.FEW_ROWS, shares=True))
    found["gather, shared"] = list_accesses(ops.to_ptx("gather", shares=ops.SHARED, transfer="programs"))
    found["scatter by tiles"] = list_accesses(ops.to_ptx("scatter"))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
