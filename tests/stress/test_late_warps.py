# SPDX-License-Identifier: Apache-2.0
"""Kernels with late warps: the changed code is whole, and warps may sleep before every access to global memory."""

import re

import pytest
from tests.stress import late_warps
from tests.tiles.machine_code import make_channel


@pytest.fixture
def change_stages(monkeypatch, tmp_path):
    from triton import knobs

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(knobs.runtime, "add_stages_inspection_hook", late_warps._change_stages)


def test_a_warp_may_sleep_before_each_access_of_a_triton_kernel_to_global_memory(change_stages):
    from stretto.tiles import signals
    from stretto.tiles.compile_only import compile_kernel

    forms = compile_kernel(signals.wait_for_channel, (make_channel(), 1, 2), {}, "sm_90")
    lines = [line.strip() for line in forms["ptx"].splitlines() if line.strip()]
    accesses = [number for number, line in enumerate(lines) if re.search(r"\b(ld|st|red|atom)\.[\w.:]*global", line)]
    assert accesses
    for number in accesses:
        assert lines[number - 1] == "}"
        assert "nanosleep.u32 50000" in lines[number - 2]
    assert forms["cubin"]  # the assembler took it


def test_amd_kernels_are_left_as_they_are(change_stages):
    from stretto.tiles import signals
    from stretto.tiles.compile_only import compile_kernel

    assert "sleep 50000" not in compile_kernel(signals.wait_for_channel, (make_channel(), 1, 2), {}, "gfx942")["amdgcn"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["fused", "interpreted", "copied"])
def test_the_threads_of_a_collectives_kernel_sleep_where_it_begins(name):
    pytest.importorskip("cuda.core")
    from stretto.collectives.algorithms import find
    from stretto.collectives.executor.cuda.fused.codegen import write_source
    from stretto.collectives.executor.cuda.fused.program import lower_to_fused_program
    from stretto.collectives.executor.cuda.interpreter import write_interpreter
    from stretto.collectives.executor.cuda.nvrtc import compile_source
    from stretto.collectives.executor.cuda.variant import Variant, read_sources, write_macros

    variant = Variant("float16", "sum", "Simple")
    fused = lower_to_fused_program(find("two-shot-all-reduce").compile(ranks=2), in_place=True)
    match name:
        case "fused":
            source = write_source(fused, 0, 2, variant)
        case "interpreted":
            source = write_interpreter(2, variant)
        case _:
            source = write_macros(variant, 2, 0) + read_sources("ptx.cu", "primitives.cu", "copy_engine/flags.cu")
    changed = late_warps.delay_source(source)
    bodies = re.findall(r"__global__ void[^{;]*\{(.*)", changed)
    assert bodies
    assert all(body.startswith(" be_late();") for body in bodies)
    assert (
        changed.count("be_late();") == len(bodies) + 3
    )  # loads and stores of the user's tensors, and the call's number
    assert compile_source(changed, "sm_90") != compile_source(source, "sm_90")


def test_a_source_without_a_place_for_it_is_refused():
    with pytest.raises(ValueError, match="no kernel whose threads could be late"):
        late_warps.delay_source("int nothing;")
