"""Kernels compiled for GPUs that are not there, and what to look for in their machine code."""

import re
import subprocess

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
ZERO = r"and\.b32 +%r\d+, %r\d+, 0;"


def make_channel(mode="broadcast"):
    """What a kernel is given of a channel between 4 ranks, made by hand: nothing is run here."""
    constants = (tl.constexpr(value) for value in (WORLD, 2 * WORLD, 16, mode))
    words = torch.zeros(256, dtype=torch.int32)
    longs = torch.zeros(8, dtype=torch.int64)
    return tiles.Channel(2, *constants, 0, words, longs, words, longs, words, words)


def compile_to_ptx(kernel, arguments, target="sm_90", **options):
    """The kernel's PTX, its instructions one a line."""
    return [line.strip() for line in compile_kernel(kernel, arguments, options, target)["ptx"].splitlines()]


def find_spills(lines, folder):
    """The bytes of registers that ptxas spills."""
    return sum(int(number) for number in re.findall(r"(\d+) bytes spill stores", _assemble(lines, folder)))


def count_registers(lines, folder):
    """The registers of a thread, as ptxas hands them out: in eights."""
    return -(-int(re.search(r"Used (\d+) registers", _assemble(lines, folder))[1]) // 8) * 8


def _assemble(lines, folder):
    """What ptxas says."""
    assembler = get_ptxas(90).path  # Triton has several, and which it takes for an architecture depends on its version
    source = folder / "kernel.ptx"
    source.write_text("\n".join(lines))
    command = [assembler, "-v", "--gpu-name=sm_90a", source, "-o", folder / "kernel.cubin"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stderr


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
    """Whether a line of this pattern is among those that the register's value is made by, in any number of steps.

    Registers only, on whichever way through the program; what goes through shared memory is not followed.
    """
    return any(re.search(pattern, lines[number]) for number in find_makers(lines, register))


def find_makers(lines, register):
    """The numbers of all lines that the register's value is made by, in any number of steps."""
    writers = {}
    for number, line in enumerate(lines):
        written, _, read = line.partition(",")
        match = re.match(r"(?:@!?%p\d+\s+)?[a-z][\w.:]*\s+(?:\{ *)?(%\w+)", written)
        if match and not re.match(r"(@!?%p\d+\s+)?(st\.|cp\.async|bra|bar|red\.)", line):
            writers.setdefault(match[1], []).append((number, re.findall(r"%(?:rd|rs|r|f|p)\d+", read)))
    seen, left, makers = set(), [register], []
    while left:
        current = left.pop()
        if current in seen:
            continue
        seen.add(current)
        for number, inputs in writers.get(current, ()):
            makers.append(number)
            left.extend(inputs)
    return makers


def follows_acquire(lines, zero):
    """Whether what this line makes its zero of was read with acquire: by each thread, or by one before a barrier."""
    register = re.search(r"and\.b32 +%r\d+, (%r\d+), 0", lines[zero])[1]
    makers = find_makers(lines, register)
    direct = [lines[number] for number in makers if f" {register}," in lines[number]]
    if any(line.startswith("ld.acquire") for line in direct):
        return all(re.match(r"ld\.acquire|and\.b32", line) for line in direct)
    reads = [number for number in makers if lines[number].startswith("ld.shared")]
    return bool(reads) and all(
        re.search(rf"{ACQUIRE}.*bar\.sync", " ".join(lines[max(read - 15, 0) : read])) for read in reads
    )
