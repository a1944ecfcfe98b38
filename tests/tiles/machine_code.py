# SPDX-License-Identifier: Apache-2.0
"""Kernels compiled for GPUs that are not there, and what to look for in their machine code."""

import re
import subprocess
from functools import cached_property
from pathlib import Path

import torch
import triton.language as tl
from triton.backends.nvidia.compiler import get_ptxas

from stretto import tiles
from stretto.tiles.compile_only import compile_kernel

WORLD = 4
PRODUCER = tiles.shard_tiles(1024, WORLD, 128, channels=2)
CONSUMER = tiles.whole_tiles(1024, WORLD, 128, columns=8, channels=2, channel_rows=512)
ACQUIRE = r"(ld|atom)\.global\.(sys\.acquire|acquire\.sys)|ld\.acquire\.sys\.global"
RELEASE = r"(atom|red)\.global\.(sys\.release|release\.sys)"
REGISTER = re.compile(r"%(?:rd|rs|r|f|p)\d+")
WRITES = re.compile(r"(?:@!?%p\d+\s+)?[a-z][\w.:]*\s+(?:\{ *)?(%\w+)")
WRITES_NOTHING = re.compile(r"(@!?%p\d+\s+)?(st\.|cp\.async|bra|bar|red\.)")
ZERO = r"and\.b32 +%r\d+, %r\d+, 0;"


def make_channel(mode="broadcast"):
    """Return what a kernel is given of a channel between 4 ranks, made by hand: nothing is run here."""
    constants = (tl.constexpr(value) for value in (WORLD, 2 * WORLD, 16, mode))
    words = torch.zeros(256, dtype=torch.int32)
    longs = torch.zeros(8, dtype=torch.int64)
    return tiles.Channel(2, *constants, 0, words, longs, words, words, words)


class Ptx(list):
    """A kernel's instructions, one a line, beside the `cubin` that was assembled from them (None for AMD GPUs)."""

    cubin = None

    @cached_property
    def writers(self):
        """The instructions that write each register: (line, registers that it reads)."""
        writers = {}
        for number, line in enumerate(self):
            written, _, read = line.partition(",")
            match = WRITES.match(written)
            if match and not WRITES_NOTHING.match(line):
                writers.setdefault(match[1], []).append((number, REGISTER.findall(read)))
        return writers


def compile_to_ptx(kernel, arguments, target="sm_90", **options):
    """The kernel's PTX, its instructions one a line."""
    forms = compile_kernel(kernel, arguments, options, target)
    lines = Ptx(line.strip() for line in forms["ptx"].splitlines())
    lines.cubin = forms.get("cubin")
    return lines


def find_spills(lines, folder):
    """The bytes of registers that are stored to local memory, as ptxas counts them: of each store, where it stands."""
    stores = re.findall(r"\bSTL(?:\.(64|128))? ", _dump(lines, folder, "-sass"))
    return sum(int(bits or 32) // 8 for bits in stores)


def find_spills_in_products(lines, folder):
    """The instructions that load or store spilled registers within the innermost loops that multiply."""
    code = re.findall(r"/\*([0-9a-f]{4,})\*/ +(.*?) *;", _dump(lines, folder, "-sass"))
    code = [(int(address, 16), text) for address, text in code]
    loops = []
    for address, text in code:
        branch = re.search(r"\bBRA (?:U?P\d, )?0x([0-9a-f]+)", text)
        if branch and int(branch[1], 16) < address:
            body = [text for at, text in code if int(branch[1], 16) <= at <= address]
            if any(re.search(r"\b(H|HG|QG|I|IG)MMA", text) for text in body):
                loops.append((int(branch[1], 16), address, body))
    assert loops, "there is no loop of products"
    inner = [one for one in loops if not any(one[0] <= a and b <= one[1] and (a, b) != one[:2] for a, b, _ in loops)]
    return [text for _, _, body in inner for text in body if re.search(r"\b(LDL|STL)", text)]


def count_registers(lines, folder):
    """The registers of a thread, as GPUs hand them out: in eights."""
    registers = int(re.search(r"\bREG:(\d+)", _dump(lines, folder, "-res-usage"))[1])
    return -(-registers // 8) * 8


def _dump(lines, folder, option):
    """Return what cuobjdump prints of the assembled kernel."""
    program = Path(get_ptxas(90).path).with_name("cuobjdump")
    (folder / "kernel.cubin").write_bytes(lines.cubin)
    return subprocess.run([program, option, folder / "kernel.cubin"], capture_output=True, text=True, check=True).stdout


def find(lines, pattern, start=0):
    """The number of the first line from `start` on that the pattern is found in."""
    for number in range(start, len(lines)):
        if re.search(pattern, lines[number]):
            return number
    raise AssertionError(f"no line from {start} on has {pattern!r}:\n" + "\n".join(lines))


def addresses(lines, pattern):
    """(line, register) of the global addresses that instructions of this pattern read: the last in brackets."""
    found = []
    for number, line in enumerate(lines):
        if re.search(pattern, line):
            found.append((number, re.findall(r"\[ *(%rd\d+)", line)[-1]))
    return found


def depends_on(lines, register, pattern):
    """True if a line of this pattern is among those that the register's value is made by, in any number of steps.

    Registers only, on whichever way through the program; what goes through shared memory is not followed.
    """
    return any(re.search(pattern, lines[number]) for number in find_makers(lines, register))


def find_makers(lines, register):
    """The numbers of all lines that the register's value is made by, in any number of steps."""
    seen, left, makers = set(), [register], []
    while left:
        current = left.pop()
        if current in seen:
            continue
        seen.add(current)
        for number, inputs in lines.writers.get(current, ()):
            makers.append(number)
            left.extend(inputs)
    return makers


def follows_acquire(lines, zero):
    """True if what this line makes its zero of was read with acquire: by each thread, or by one before a barrier."""
    register = re.search(r"and\.b32 +%r\d+, (%r\d+), 0", lines[zero])[1]
    makers = find_makers(lines, register)
    direct = [lines[number] for number in makers if f" {register}," in lines[number]]
    if any(line.startswith("ld.acquire") for line in direct):
        return all(re.match(r"ld\.acquire|and\.b32", line) for line in direct)
    reads = [number for number in makers if lines[number].startswith("ld.shared")]
    return bool(reads) and all(
        re.search(rf"{ACQUIRE}.*bar\.sync", " ".join(lines[max(read - 15, 0) : read])) for read in reads
    )
