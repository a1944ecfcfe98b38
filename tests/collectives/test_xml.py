# SPDX-License-Identifier: Apache-2.0
"""Files of schedules: what is written is read again, what others write is read, and what is no schedule is refused."""

import os
import random
from dataclasses import replace

import pytest
from tests.collectives.schedules import block, schedule, step

from stretto.collectives import (
    AllGather,
    AllReduce,
    ScheduleFileError,
    chunk,
    compile_program,
    from_xml,
    read_schedule,
    to_xml,
    trace,
    verify,
    write_schedule,
)
from stretto.collectives.algorithms import ALGORITHMS, hierarchical_all_reduce, ring_all_reduce
from stretto.collectives.limits import LIMITS, exceeded_limits
from stretto.collectives.xml import read_ranks

# In the manner of files that runtimes ship: a comment first, unknown attributes, unused buffers of size 0, -1 for
# what a step does not use, a step's unused place filled all the same.
SHIPPED = """<!-- a comment -->
<algo name="pairs" proto="LL" nchannels="1" nchunksperloop="2" ngpus="2" coll="allgather" inplace="1" outofplace="0" \
maxcount="1" minBytes="0" maxBytes="8192">
  <gpu id="0" i_chunks="0" o_chunks="2" s_chunks="0">
    <tb id="0" send="1" recv="1" chan="0">
      <step s="0" type="s" srcbuf="o" srcoff="0" dstbuf="o" dstoff="0" cnt="1" depid="-1" deps="-1" hasdep="0"/>
      <step s="1" type="r" srcbuf="o" srcoff="1" dstbuf="o" dstoff="1" cnt="1" depid="-1" deps="-1" hasdep="0"/>
    </tb>
  </gpu>
  <gpu id="1" i_chunks="0" o_chunks="2" s_chunks="0">
    <tb id="0" send="0" recv="0" chan="0">
      <step s="0" type="s" srcbuf="o" srcoff="1" dstbuf="o" dstoff="1" cnt="1" depid="-1" deps="-1" hasdep="0"/>
      <step s="1" type="r" srcbuf="o" srcoff="0" dstbuf="o" dstoff="0" cnt="1" depid="-1" deps="-1" hasdep="0"/>
    </tb>
  </gpu>
</algo>
"""


def test_a_file_in_a_runtimes_manner_is_read_and_verified():
    read = from_xml(SHIPPED)
    assert (read.name, read.protocol, read.in_place, read.out_of_place) == ("pairs", "LL", True, False)
    assert (read.collective.name, read.collective.ranks, read.max_bytes) == ("allgather", 2, 8192)
    assert read.attributes == (("maxcount", "1"),)
    assert verify(read).ok
    assert 'maxcount="1"' in to_xml(read)


def test_written_xml_has_all_attributes_that_runtimes_need():
    text = to_xml(ring_all_reduce.compile(ranks=2, min_bytes=1024, max_bytes=2048, protocol="LL128"))
    lines = text.splitlines()
    assert lines[0] == (
        '<algo name="ring-all-reduce" proto="LL128" nchannels="1" nchunksperloop="2" ngpus="2" coll="allreduce" '
        'inplace="1" outofplace="0" minBytes="1024" maxBytes="2048">'
    )
    assert lines[1] == '  <gpu id="0" i_chunks="2" o_chunks="2" s_chunks="0">'
    assert lines[2] == '    <tb id="0" send="1" recv="1" chan="0">'
    assert lines[3] == (
        '      <step s="0" type="s" srcbuf="i" srcoff="1" dstbuf="o" dstoff="-1" cnt="1" '
        'depid="-1" deps="-1" hasdep="0"/>'
    )


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_written_schedules_are_read_again(name, tmp_path):
    size = {"nodes": 2, "gpus": 3} if "nodes" in ALGORITHMS[name].parameters else {"ranks": 8}
    made = ALGORITHMS[name].compile(instances=2, **size)
    write_schedule(made, tmp_path / "made.xml")
    read = read_schedule(str(tmp_path / "made.xml"))
    assert read.ranks == made.ranks
    for attribute in ("name", "protocol", "in_place", "out_of_place", "min_bytes", "max_bytes"):
        assert getattr(read, attribute) == getattr(made, attribute)
    assert read.collective.name == made.collective.name
    assert verify(read).ok


def test_copies_before_the_steps_are_part_of_the_schedule():
    text = SHIPPED.replace('inplace="1" outofplace="0"', 'inplace="0"').replace('i_chunks="0"', 'i_chunks="1"')
    assert "holds nothing" in verify(from_xml(text)).errors[0]
    for rank in (0, 1):
        opening = f'<gpu id="{rank}" i_chunks="1" o_chunks="2" s_chunks="0">'
        text = text.replace(opening, opening + f'<copy i_off="0" o_off="{rank}"/>')
    read = from_xml(text)
    assert read.ranks[1].copies == ((0, 1),)
    assert verify(read).ok
    assert from_xml(to_xml(read)).ranks == read.ranks


def test_files_of_other_tools_are_read():
    text = SHIPPED.replace('maxcount="1"', 'redop="nop"').replace('"8192"', f'"{2**63 - 1}"')
    read = from_xml(text)
    assert (read.reduction, read.max_bytes) == (None, 2**63 - 1)


def test_names_survive_and_do_no_harm():
    made = schedule(AllReduce(1, 1, in_place=True), [])
    nasty = "a\"b<c>&d'é "
    assert from_xml(to_xml(replace(made, name=nasty))).name == nasty


ENTITIES = '<!DOCTYPE a [<!ENTITY b "bb"><!ENTITY c "&b;&b;&b;">]>'


@pytest.mark.parametrize(
    ("before", "after", "why"),
    [
        (SHIPPED, "", "no element found"),
        (SHIPPED, "\x00", "not XML"),
        (
            SHIPPED,
            ' {"name": "a plan", "gpus": []}',
            "plans of MSCCL++ are, which are not supported",
        ),
        ("<!-- a comment -->", ENTITIES, "no document type"),
        ("<!-- a comment -->", '<!DOCTYPE a SYSTEM "file:///etc/passwd">', "no document type"),
        ("</algo>", "", "not XML"),
        ("<algo ", "<algorithm ", "<algorithm> is no part of a schedule"),
        ("<tb ", "<block ", "<block> inside <gpu> is no part of a schedule"),
        ('id="1"', 'id="0"', "gpu 0 is there twice"),
        ('id="1"', 'id="2"', "id is 2, but must be from 0 to 1"),
        ('ngpus="2"', 'ngpus="4"', "needs a multiple of 4 chunks a loop, not 2"),
        ('ngpus="2"', 'ngpus="1000000000"', "ngpus is 1000000000, but must be from 1 to 4096"),
        ('nchunksperloop="2"', 'nchunksperloop="1000000000"', "nchunksperloop is 1000000000"),
        ('s_chunks="0"', 's_chunks="1000000000"', "s_chunks is 1000000000"),
        ('cnt="1"', 'cnt="1000000000"', "cnt is 1000000000"),
        ('cnt="1"', 'cnt="-1"', "cnt is -1, but must be from 0"),
        ('cnt="1"', 'cnt="1.0"', "cnt is a whole number, not '1.0'"),
        ('cnt="1"', 'cnt="１"', "cnt is a whole number"),
        (' cnt="1"', "", "gpu 0, thread block 0, step 0: cnt is missing"),
        ('srcoff="0"', 'srcoff="-2"', "srcoff is -2, but must be from -1"),
        ('srcbuf="o"', 'srcbuf="x"', "srcbuf is one of i, o, s, not 'x'"),
        ('type="s"', 'type="send"', "type is one of s, r, rcs"),
        (' s="1"', ' s="3"', "gpu 0, thread block 0, step 1: s is 3, but this is its step 1"),
        ('send="1"', 'send="7"', "send is 7, but must be from -1 to 1"),
        ('send="1"', 'send="0"', "send is the gpu itself"),
        ('<tb id="0"', '<tb id="1"', "gpu 0 has 1 thread blocks, but none with id 0"),
        ('depid="-1"', 'depid="0"', "depid and deps are both -1 or both not"),
        ('chan="0"', 'chan="-1"', "chan is -1"),
        ('proto="LL"', 'proto="LL3"', "proto is one of Simple, LL, LL128, not 'LL3'"),
        ('coll="allgather"', 'coll=""', "coll is missing"),
        ('inplace="1" outofplace="0"', 'inplace="0" outofplace="0"', "meant for no call"),
        ('maxcount="1"', 'redop="avg"', "redop is one of sum, max, min, prod or nop, not 'avg'"),
        ("<algo ", "words <algo ", "not XML"),
        ("<tb ", "words <tb ", "'words' is no part of a schedule"),
        ("<!-- a comment -->", '<?xml version="1.0" encoding="klingon"?>', "not XML: unknown encoding"),
    ],
)
def test_an_invalid_schedule_raises_one_line_with_the_place(before, after, why):
    text = SHIPPED.replace(before, after, 1)
    assert text != SHIPPED
    with pytest.raises(ScheduleFileError) as caught:
        from_xml(text, "file.xml")
    message = str(caught.value)
    assert why in message
    assert message.startswith("file.xml")
    assert "\n" not in message


def test_a_file_over_the_limit_is_refused_before_it_is_read(tmp_path):
    large = tmp_path / "large.xml"
    large.write_text(SHIPPED)
    with pytest.raises(ScheduleFileError, match="larger than 100 bytes"):
        read_schedule(large, max_bytes=100)


def test_500_damaged_files_are_read_or_refused_and_nothing_else():
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    whole = to_xml(hierarchical_all_reduce.compile(nodes=2, gpus=2)).encode()
    read = 0
    for _ in range(500):
        text = bytearray(whole)
        for _ in range(rng.randint(1, 8)):
            at = rng.randrange(len(text))
            match rng.randrange(4):
                case 0:
                    text[at] = rng.randrange(256)
                case 1:
                    del text[at : at + rng.randrange(40)]
                case 2:
                    text[at:at] = text[at : at + rng.randrange(200)]
                case 3:
                    text[at : at + 1] = rng.choice([b"9", b"-1", b"99999999999", b"<", b"&", b'"', b"\xff"])
        refused = why_not(bytes(text))
        assert "\n" not in refused
        read += not refused
    assert read < 500


def why_not(text: bytes) -> str:
    """Why a text is refused; empty where it is read, and then verified, whatever comes of it."""
    try:
        verify(from_xml(text))
    except ScheduleFileError as error:
        return str(error)
    return ""


def test_differences_in_a_runtimes_interpretation_are_reported_on_request():
    copy = step("cpy", ("in", 0), ("scratch", 0), awaited=True)
    twice = [step("re", ("scratch", 0), ("in", 0), size=2), step("re", ("scratch", 2), ("in", 0), size=1)]
    nops = [step("nop", waits_for=(0, 0), awaited=True), step("cpy", ("scratch", 0), ("in", 1))]
    made = schedule(AllReduce(1, 4), [block(copy), block(*twice), block(*nops)])
    made = replace(made, ranks=(made.ranks[0]._replace(copies=((0, 1),)),))
    assert exceeded_limits(made, LIMITS["rccl"]) == [
        "rank 0, copies before the first step; rccl does not do them",
        "rank 0, thread block 1, step 0: rccl takes it and the next reduction for one of 1 chunks",
        "rank 0, thread block 2, step 0: other steps wait for a nop, whose end rccl never publishes",
        "rank 0, thread block 2, step 0: rccl takes a nop only before a step that waits itself",
    ]


def test_copies_of_chunks_onto_themselves_are_nothing_that_a_runtime_would_leave_out():
    def read(how):
        text = SHIPPED.replace('inplace="1" outofplace="0"', how).replace('i_chunks="0"', 'i_chunks="1"')
        for rank in (0, 1):
            opening = f'<gpu id="{rank}" i_chunks="1" o_chunks="2" s_chunks="0">'
            text = text.replace(opening, opening + f'<copy i_off="0" o_off="{rank}"/>')
        return from_xml(text)

    assert exceeded_limits(read('inplace="1"'), LIMITS["rccl"]) == []
    for how in ('inplace="0"', 'inplace="1" outofplace="1"'):
        assert exceeded_limits(read(how), LIMITS["rccl"]) == [
            f"rank {rank}, copies before the first step; rccl does not do them" for rank in (0, 1)
        ]


def test_a_file_without_a_name_for_its_collective_takes_the_one_that_is_given():
    text = SHIPPED.replace('coll="allgather" ', "")
    with pytest.raises(ScheduleFileError, match="coll is missing: give the collective that it is"):
        from_xml(text)
    read = from_xml(text, collective=AllGather(2))
    assert verify(read).ok
    assert from_xml(to_xml(read)).collective.name == "allgather"


def test_the_compiler_writes_no_reductions_that_a_runtime_would_merge():
    with trace(AllReduce(1, 2)) as traced:
        sums = chunk(0, "in", 0, 2).copy(0, "scratch", 0).reduce(chunk(0, "in", 0, 2).copy(0, "scratch", 2))
        sums.split(2)[0].reduce(chunk(0, "in", 0).copy(0, "scratch", 4))
    made = compile_program(traced.program, name="sums")
    assert [step.size for step in made.ranks[0].thread_blocks[0].steps if step.type.reduces] == [2, 1]
    assert exceeded_limits(made, LIMITS["rccl"]) == []


def test_the_number_of_ranks_is_read_from_the_beginning_of_a_file(tmp_path):
    path = tmp_path / "large.xml"
    for text, ranks in (
        (SHIPPED, 2),
        (SHIPPED[: SHIPPED.index("<tb")] + "<<<", 2),  # whatever is wrong further on
        (SHIPPED.replace('name="pairs"', 'name="a > b"').replace('"2" coll', "'16' coll"), 16),
        ('<?xml version="1.0"?>\n<!-- <algo ngpus="4"> -->\n' + SHIPPED[SHIPPED.index("<algo") :], 2),
        (SHIPPED.replace("ngpus", "gpus"), None),
        ('<list><algo ngpus="4"/></list>', None),
        ('<!DOCTYPE algo [<!ENTITY n "4">]><algo ngpus="&n;"/>', None),
        ("no schedule", None),
        ("", None),
    ):
        path.write_text(text)
        assert read_ranks(path) == ranks, text
    assert read_ranks(tmp_path) is None


def test_a_pipe_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ScheduleFileError, match="not a regular file"):
        read_schedule(tmp_path / "pipe")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            '<algo name="x" proto="Simple" nchannels="1" nchunksperloop="1048576" ngpus="4096" coll="allreduce" '
            'inplace="1" outofplace="0"></algo>',
            "more than 8388608 chunks in all",
        ),
        (SHIPPED.replace('s_chunks="0"', 's_chunks="1048576"'), None),
        (SHIPPED.replace('cnt="1"', 'cnt="1048576"'), None),
    ],
)
def test_small_files_that_ask_for_much_are_refused_or_quickly_done(text, why):
    if why is not None:
        with pytest.raises(ScheduleFileError, match=why):
            from_xml(text)
    else:
        verify(from_xml(text))


def test_files_whose_steps_handle_too_much_are_refused():
    steps = "".join(
        f'<step s="{s}" type="cpy" srcbuf="o" srcoff="0" dstbuf="o" dstoff="0" cnt="1048576" depid="-1" deps="-1" '
        'hasdep="0"/>'
        for s in range(17)
    )
    text = SHIPPED.replace("</gpu>", f'<tb id="1" send="-1" recv="-1" chan="0">{steps}</tb></gpu>', 1)
    with pytest.raises(ScheduleFileError, match="step 15: the steps so far handle more than 16777216 chunks"):
        from_xml(text)


def test_limits_of_a_runtime_are_checked_on_request():
    rccl = LIMITS["rccl"]
    assert exceeded_limits(ring_all_reduce.compile(ranks=8), rccl) == []
    assert exceeded_limits(ring_all_reduce.compile(ranks=64), rccl) == [
        f"rank {rank}, thread block 0 has 127 steps; rccl has at most 64" for rank in range(64)
    ]
    (over,) = exceeded_limits(schedule(AllReduce(1, 1), [block()] * 65), rccl)
    assert over == "rank 0 has 65 thread blocks; rccl has at most 64"
    wide = schedule(AllReduce(1, 99), [block(step("cpy", ("in", 0), ("scratch", 0), size=80), channel=40)], scratch=99)
    assert len(exceeded_limits(wide, rccl)) == 2
    spread = ALGORITHMS["direct-all-gather"].compile(ranks=41)
    assert "rank 0: 40 thread blocks send on channel 0; rccl has at most 32" in exceeded_limits(spread, rccl)
    (unknown,) = exceeded_limits(ALGORITHMS["all-to-next"].compile(nodes=1, gpus=2), rccl)
    assert unknown == "rccl knows no collective 'alltonext'"


@pytest.mark.parametrize("text", ["<algo name='{}'/>", "<!--{}--><algo/>", "<{}/>", "<?a {}?><algo/>"])
def test_a_tag_or_comment_without_end_is_refused_before_its_end_is_looked_for(text):
    with pytest.raises(ScheduleFileError, match=r"^long.xml:1: a tag or comment of over 4194304 bytes$"):
        from_xml(text.format("a" * (64 << 20)), "long.xml")


def test_a_name_that_no_file_can_hold_is_not_written():
    made = ALGORITHMS["ring-all-gather"].compile(ranks=2)
    for name in ("a\x00", "a\x1b[31m", "a\ud800", "a\uffff"):
        with pytest.raises(ValueError, match="has a character that XML does not"):
            to_xml(replace(made, name=name))
