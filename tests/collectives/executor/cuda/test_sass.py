# SPDX-License-Identifier: Apache-2.0
"""The kernels' machine code reads no register before it has been zeroed, which a fault of ptxas had made possible."""

import pytest
from tests.sass import disassemble, find_early_reads, parse

from stretto.collectives.algorithms import ALGORITHMS
from stretto.collectives.executor.cuda.fused.codegen import write_source
from stretto.collectives.executor.cuda.fused.program import lower_to_fused_program
from stretto.collectives.executor.cuda.interpreter import write_interpreter
from stretto.collectives.executor.cuda.nvrtc import compile_source
from stretto.collectives.executor.cuda.variant import Variant
from stretto.collectives.executor.layout import find_layout


def find_in(source, folder, target="sm_90"):
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(compile_source(source, target))
    code = disassemble(cubin)
    assert sum(one is not None for one in code) > 20
    return list(find_early_reads(code))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", ["int8", "int16", "bfloat16", "float32", "int64"])
@pytest.mark.parametrize("protocol", ["LL", "LL128", "Simple"])
@pytest.mark.parametrize("unroll", [1, 4])
def test_fused_kernels_read_nothing_before_it_is_zeroed(protocol, dtype, unroll, tmp_path):
    fused = lower_to_fused_program(ALGORITHMS["ring-all-reduce"].compile(ranks=3, in_place=False), in_place=False)
    chunks = find_layout(fused.collective, 0, None).block_chunks
    assert not find_in(write_source(fused, 2, chunks, Variant(dtype, "sum", protocol, unroll)), tmp_path)


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", ["int8", "int16", "bfloat16", "float32", "int64"])
@pytest.mark.parametrize("protocol", ["LL", "LL128", "Simple"])
def test_the_interpreter_reads_nothing_before_it_is_zeroed(protocol, dtype, tmp_path):
    assert not find_in(write_interpreter(3, Variant(dtype, "sum", protocol)), tmp_path)


def test_a_read_is_early_if_writes_under_predicates_do_not_take_place():
    """The end of a tensor as ptxas 13.0 had compiled it: R82 held an address, which became a part of the sum."""
    code = [
        parse("CS2R R82, SRZ", 2),
        parse("@P6 IMAD.WIDE.U32 R82, R77, 0x10000, RZ", 3),
        parse("LOP3.LUT R86, R92, R86, R82, 0xfe, !PT", 2),
    ]
    (found,) = find_early_reads(code)
    assert "after 5 cycles: LOP3.LUT R86" in found
    assert not list(find_early_reads(code, cycles=5))
    assert list(find_early_reads([code[0], parse("ST.E.64 desc[UR4][R2.64], R82", 1)]))
    # What is certainly written anew, or lies behind a branch or a label, is not looked at.
    for between in (parse("IMAD.WIDE.U32 R82, R77, 0x10000, RZ", 3), parse("BRA `(.L_x_1)", 5), None):
        assert not list(find_early_reads([code[0], between, code[2]]))
