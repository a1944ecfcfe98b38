# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's machine code: instructions with the cycles that the assembler has each one wait for (sm_70 to sm_120).

ptxas schedules instructions of fixed latency by stall counts: bits 105 to 108 of an instruction's 128 are the cycles
before its warp may issue the next one. `find_early_reads` finds where these are too few.
"""

import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import triton

DISASSEMBLER = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
ZEROING_CYCLES = 10
"""A read so soon after a CS2R is suspect: 5 cycles were too few on an H100; ptxas leaves 6 or more where it counts."""
_WINDOW = 40  # instructions after which any result is there
_FIRST = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;?\s*/\* 0x[0-9a-f]{16} \*/")
_SECOND = re.compile(r"\s*/\* 0x([0-9a-f]{16}) \*/")
_REGISTER = re.compile(r"(?<![A-Z])R(\d+)(\.64)?")
_ENDS = ("BRA", "RET", "CALL", "EXIT", "BSYNC", "BRX", "JMP")
_WITHOUT_RESULT = ("ST", "RED", "BAR", "MEMBAR", "BSSY", "WARPSYNC", "ERRBAR", "CCTL", "DEPBAR", "NOP", *_ENDS)


@dataclass(frozen=True)
class Instruction:
    """One instruction; `stall`: cycles before the warp's next one."""

    text: str
    predicate: str
    operation: str
    operands: tuple[str, ...]
    stall: int

    @property
    def written(self) -> frozenset[int]:
        if self.operation.startswith((*_WITHOUT_RESULT, "ISETP", "FSETP", "DSETP", "HSETP")) or not self.operands:
            return frozenset()
        found = re.match(r"R(\d+)", self.operands[0])
        return frozenset() if found is None else frozenset(range(int(found[1]), int(found[1]) + self._width()))

    @property
    def read(self) -> frozenset[int]:
        has_result = bool(self.written)
        found = set()
        for operand in self.operands[has_result:]:
            for number, is_pair in _REGISTER.findall(operand):
                found |= {int(number), int(number) + bool(is_pair)}
        last = re.match(r"R(\d+)", self.operands[-1]) if self.operands else None
        if last is not None and (self.operation.startswith("ST") or ".WIDE" in self.operation):
            found |= set(range(int(last[1]), int(last[1]) + self._width()))
        if self.operation.startswith("RET"):
            found |= {number + 1 for number in found}
        return frozenset(found)

    def _width(self) -> int:
        if ".128" in self.operation:
            return 4
        return 2 if ".64" in self.operation or self.operation.startswith(("CS2R", "IMAD.WIDE")) else 1


def disassemble(cubin: Path) -> list[Instruction | None]:
    """The instructions of all functions in order, None at each label."""
    command = [str(DISASSEMBLER), "-c", "-hex", str(cubin)]
    code: list[Instruction | None] = []
    text = None
    for line in subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines():
        if found := _FIRST.match(line):
            text = found[1]
        elif (found := _SECOND.match(line)) and text is not None:
            code.append(parse(text, int(found[1], 16) >> 41 & 15))
            text = None
        elif line.startswith((".", "$")):
            code.append(None)
    return code


def find_early_reads(code: Sequence[Instruction | None], cycles: int = ZEROING_CYCLES) -> Iterator[str]:
    """Find reads of a register less than `cycles` after CS2R zeroes it, if writes under predicates do not take place.

    Within straight code: at labels and branches the search ends.
    """
    for number, zeroing in enumerate(code):
        if zeroing is None or zeroing.operation != "CS2R" or zeroing.operands[-1] != "SRZ":
            continue
        zeroed, passed = zeroing.written, zeroing.stall
        for later in code[number + 1 : number + _WINDOW]:
            if later is None:
                break
            if zeroed & later.read:
                if passed < cycles:
                    yield f"{zeroing.text} is read after {passed} cycles: {later.text}"
                break
            if not later.predicate:
                zeroed -= later.written
            if not zeroed or later.operation.startswith(_ENDS):
                break
            passed += max(later.stall, 1)


def parse(text: str, stall: int) -> Instruction:
    """An instruction by its text, as nvdisasm writes it."""
    found = re.match(r"(@!?U?P\w+\s+)?(\S+)\s*(.*)", text)
    assert found is not None
    operands = tuple(part.strip() for part in re.split(r",(?![^\[]*\])", found[3])) if found[3] else ()
    return Instruction(text, (found[1] or "").strip(), found[2], operands, stall)
