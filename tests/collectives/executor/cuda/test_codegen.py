# SPDX-License-Identifier: Apache-2.0
"""The kernels' CUDA C++ compiles for every architecture, without a GPU, and its PTX orders memory as it says."""

import re

import pytest

from stretto.collectives.algorithms import find
from stretto.collectives.executor.cuda.copy_engine.lowering import find_zero_copy, lower_to_copies
from stretto.collectives.executor.cuda.fused import codegen
from stretto.collectives.executor.cuda.fused.codegen import parameter_names, write_level_source, write_source
from stretto.collectives.executor.cuda.fused.program import lower_to_fused_program
from stretto.collectives.executor.cuda.interpreter import write_interpreter
from stretto.collectives.executor.cuda.nvrtc import compile_source, load_or_compile
from stretto.collectives.executor.cuda.variant import ELEMENTS, OPERATIONS, Variant, read_sources, write_macros

ARCHITECTURES = ("sm_80", "sm_90a", "sm_100a")


def source(algorithm, variant, *, ranks=4, rank=1, in_place=False):
    schedule = find(algorithm).compile(ranks=ranks, in_place=in_place)
    return write_source(lower_to_fused_program(schedule, in_place=in_place), rank, 1, variant)


def ptx(algorithm, variant):
    return compile_to_ptx(source(algorithm, variant))


def compile_to_ptx(text):
    """The PTX, by NVRTC itself: cuda.core wants a driver for it."""
    from cuda.bindings import nvrtc

    _, program = nvrtc.nvrtcCreateProgram(text.encode(), b"", 0, [], [])
    (compiled,) = nvrtc.nvrtcCompileProgram(program, 2, [b"--gpu-architecture=compute_90", b"--std=c++17"])
    assert compiled == nvrtc.nvrtcResult.NVRTC_SUCCESS
    text = b" " * nvrtc.nvrtcGetPTXSize(program)[1]
    nvrtc.nvrtcGetPTX(program, text)
    return text.decode()


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("protocol", ["LL", "LL128", "Simple"])
def test_it_compiles_for_every_architecture(arch, protocol):
    for algorithm in ("two-shot-all-reduce", "ring-all-reduce", "binomial-broadcast"):
        assert compile_source(source(algorithm, Variant("bfloat16", "sum", protocol)), arch)[:4] == b"\x7fELF"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("protocol", ["LL", "LL128", "Simple"])
def test_the_interpreter_compiles_for_every_architecture(arch, protocol):
    text = write_interpreter(4, Variant("bfloat16", "avg", protocol), between_nodes=True)
    assert compile_source(text, arch)[:4] == b"\x7fELF"


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_kernels_for_copy_engines_compile_for_every_architecture(arch):
    variant = Variant("bfloat16", "sum", "Simple", 4)
    fused = lower_to_fused_program(find("two-shot-all-reduce").compile(ranks=4, in_place=False), in_place=False)
    program = fused.ranks[1]
    around = write_macros(variant, 4, 1) + read_sources("ptx.cu", "primitives.cu", "copy_engine/flags.cu")
    assert compile_source(around, arch)[:4] == b"\x7fELF"
    for zero_copy in ({}, find_zero_copy(fused)):
        for number, level in enumerate(lower_to_copies(program, "two-shot", zero_copy)):
            if level.kernel is not None:
                text = write_level_source(fused, program, number, level.kernel, 1, variant, level.awaits)
                assert compile_source(text, arch)[:4] == b"\x7fELF"


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", ELEMENTS)
def test_it_compiles_for_every_dtype_and_reduction(dtype):
    for reduction in OPERATIONS:
        assert compile_source(source("one-shot-all-reduce", Variant(dtype, reduction, "LL", 2)), "sm_90a")


def test_simple_publishes_after_a_barrier_of_the_block_and_a_fence_of_the_system():
    text = ptx("direct-all-gather", Variant("bfloat16", "sum", "Simple"))
    release = text.index("st.release.sys.global.u64")
    before = text[:release]
    # The barrier also tells whether any thread has given up a wait: then no flag is raised.
    assert before.rindex("fence.acq_rel.sys") > before.rindex("bar.red.or.pred") > before.rindex("st.global.v2.u64")
    # The reader waits by acquire, and the whole block behind a barrier, before it reads a mailbox.
    acquire = text.index("ld.acquire.sys.global.u64")
    assert "bar.red.or.pred" in text[acquire : text.index("ld.relaxed.sys.global.b128", acquire)]


def test_ll_writes_data_and_flag_in_one_store_and_reads_them_in_one_load():
    text = ptx("one-shot-all-reduce", Variant("bfloat16", "sum", "LL"))
    assert len(re.findall(r"st\.relaxed\.sys\.global\.b128", text)) >= 3
    assert len(re.findall(r"ld\.relaxed\.sys\.global\.b128", text)) >= 3
    assert "fence" not in text  # none is needed, and one would cost a microsecond


@pytest.mark.parametrize("protocol", ["LL", "LL128", "Simple"])
def test_whether_a_wait_was_given_up_is_kept_in_registers_and_known_from_the_kernels_start(protocol):
    text = ptx("one-shot-all-reduce", Variant("bfloat16", "sum", protocol))
    body = text[text.index(".entry run") :]
    body = body[: body.index("\n}")]
    assert ".local" not in body
    first_store = "st.global.v2.u64" if protocol == "Simple" else "st.relaxed.sys.global.b128"
    assert body.index("ld.volatile.global.u32") < body.index(first_store)


def test_ll128_reads_a_line_by_a_whole_warp():
    text = ptx("one-shot-all-reduce", Variant("bfloat16", "sum", "LL128"))
    assert re.search(r"vote\.sync\.all|activemask|vote", text)
    assert len(re.findall(r"ld\.relaxed\.sys\.global\.b128", text)) >= 3


def test_the_interpreter_counts_a_step_for_other_thread_blocks_after_a_barrier_and_a_fence():
    text = compile_to_ptx(write_interpreter(4, Variant("float32", "sum", "LL")))
    counted = text.rindex("st.volatile.global.u64")
    before = text[:counted]
    fence = max(before.rfind(words) for words in ("membar.gl", "fence.acq_rel.gpu", "fence.sc.gpu"))
    assert fence > before.rindex("bar.sync") > 0
    # The thread that waits for the count does so by acquire, and the others wait for that thread.
    assert "bar.sync" in text[text.index("ld.acquire.sys.global.u64") : counted]


def test_the_interpreter_puts_after_a_barrier_and_publishes_a_descriptors_other_words_before_its_first_one():
    text = compile_to_ptx(write_interpreter(4, Variant("float32", "sum", "LL"), between_nodes=True))
    posts = [found.start() for found in re.finditer(r"atom\S*\.add\.u64", text)]
    assert len(posts) == 2  # a message and a credit
    for post in posts:
        release = text.index("st.release.sys.global.u64", post)
        events = re.findall(r"st\.volatile\.\S*u64|fence\.acq_rel\.sys|bar\.\S+", text[post:release])
        assert events[-4:] == ["st.volatile.u64"] * 3 + ["fence.acq_rel.sys"]
        assert "bar.red.or.pred" in text[text.rindex("bar.", 0, post) : post]
    # Counts of what was put are read by acquire.
    assert text.count("ld.acquire.sys.global.u32") == 2


def test_sums_of_16_bits_are_made_in_fp32_and_rounded_once():
    text = ptx("one-shot-all-reduce", Variant("bfloat16", "sum", "LL"))
    body = text[text.index(".entry run") :]
    # Four elements in a vector of 8 bytes: three additions each, and each is rounded once.
    assert len(re.findall(r"add\.f32|add\.rn\.f32", body)) == 12
    assert len(re.findall(r"cvt\.rn\.bf16\.f32", body)) == 4


def test_parameters_are_named_in_the_kernels_order():
    text = source("one-shot-all-reduce", Variant("float32", "sum", "LL"))
    head = text[text.index("run(") + 4 : text.index(") {", text.index("run("))]
    assert [part.split()[-1].strip("*") for part in head.split(", ")] == parameter_names(4)


def test_a_compiled_kernel_is_kept_and_read_again(tmp_path, monkeypatch):
    monkeypatch.setenv("STRETTO_CACHE", str(tmp_path))
    text = source("one-shot-all-reduce", Variant("float32", "sum", "LL"))
    first = load_or_compile(text, "sm_90a")
    (kept,) = (tmp_path / "kernels").iterdir()
    kept.write_bytes(b"from disk")
    assert first != load_or_compile(text, "sm_90a") == b"from disk"
    assert load_or_compile(text, "sm_80") != b"from disk"


def test_a_folder_that_cannot_be_written_costs_a_warning_only(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("STRETTO_CACHE", str(tmp_path / "file"))
    assert load_or_compile(source("one-shot-all-reduce", Variant("float32", "sum", "LL")), "sm_90a")
    assert "a compiled kernel is not kept" in caplog.text


@pytest.mark.parametrize("algorithm", ["direct-all-gather", "one-shot-all-reduce", "binomial-broadcast"])
def test_a_block_with_fewer_threads_than_messages_and_peers_waits_for_and_tells_all(monkeypatch, algorithm):
    monkeypatch.setattr(codegen, "MIN_THREADS", 4)  # stands for 128 threads and more than 128 ranks
    text = source(algorithm, Variant("float32", "sum", "Simple", 1), ranks=8, rank=0)
    kernel = text[text.index('extern "C" __global__') :]
    numbers = [(int(number), rest) for number, rest in re.findall(r"threadIdx\.x == (\d+)( % blockDim\.x)?", kernel)]
    assert max(number for number, _ in numbers) >= 6
    assert all(bool(rest) == (number >= 4) for number, rest in numbers)
