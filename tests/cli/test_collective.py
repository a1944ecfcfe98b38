# SPDX-License-Identifier: Apache-2.0
"""`stretto collective`, by what it prints, writes and exits with."""

import importlib
import json
import re

import pytest
from typer.testing import CliRunner

from stretto.cli import app
from stretto.collectives import read_schedule, verify
from stretto.collectives.executor import ExecutionError

EVERYTHING = {
    "ok",
    "postcondition",
    "deadlock_free",
    "slots",
    "min_slots",
    "races",
    "replica_consistent",
    "roundings",
    "writes_input",
    "steps",
    "errors",
}


def run(*args):
    return CliRunner().invoke(app, ["collective", *map(str, args)])


@pytest.fixture
def ring(tmp_path):
    file = tmp_path / "ring.xml"
    assert run("compile", "ring-all-reduce", "--ranks", 4, "--instances", 2, "-o", file).exit_code == 0
    return file


def test_the_list_names_every_algorithm_with_its_source():
    result = run("list", "--json")
    rows = json.loads(result.stdout)["algorithms"]
    assert {"name", "parameters", "summary", "source"} == set(rows[0])
    assert all(row["summary"] and row["source"] for row in rows)
    assert "ring-all-reduce  (ranks, channels, order)" in run("list").stdout


def test_xml_goes_to_standard_output_and_words_to_standard_error(tmp_path):
    result = run("compile", "hierarchical-all-reduce", "--nodes", 2, "--gpus", 2, "--set", "parallel=2")
    assert result.exit_code == 0
    assert result.stdout.startswith("<algo ")
    assert "verified" in result.stderr
    (tmp_path / "out.xml").write_text(result.stdout)
    assert verify(read_schedule(tmp_path / "out.xml")).ok


def test_no_xml_is_printed_before_the_verdict(monkeypatch):
    printed = []
    commands = importlib.import_module("stretto.cli.collective")
    monkeypatch.setattr(commands, "describe", lambda *_: printed.append("verdict") or "verdict")
    monkeypatch.setattr(commands, "write", lambda *_: printed.append("XML"))
    assert run("compile", "ring-all-reduce", "--ranks", 2).exit_code == 0
    assert printed == ["verdict", "XML"]


def test_an_algorithms_missing_parameters_are_named_all_at_once():
    result = run("compile", "hierarchical-all-reduce")
    assert "hierarchical-all-reduce needs 'nodes' and 'gpus': it takes nodes, gpus, parallel" in result.stderr


@pytest.mark.long
def test_algorithms_are_verified_and_drawn_by_their_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run("verify", "hierarchical-all-reduce", "--nodes", 2, "--gpus", 2, "--set", "parallel=2", "--json")
    assert (result.exit_code, json.loads(result.stdout)["ok"]) == (0, True)
    assert run("verify", "ring-all-reduce", "--ranks", 40, "--limits", "rccl").exit_code == 1
    drawn = run("show", "ring-all-reduce", "--ranks", 3, "--instances", 2)
    assert (drawn.exit_code, drawn.stdout) == (0, "ring-all-reduce.png\n")
    assert (tmp_path / "ring-all-reduce.png").read_bytes().startswith(b"\x89PNG")
    own = tmp_path / "own.py"
    own.write_text(
        "from stretto.collectives import AllGather, algorithm, chunk\n"
        "@algorithm(lambda ranks: AllGather(ranks))\n"
        "def mine(ranks):\n"
        "    chunk(0, 'in', 0).copy(1, 'out', 0)\n"
    )
    assert run("verify", f"{own}:mine", "--ranks", 2).exit_code == 1
    assert run("show", f"{own}:mine", "--ranks", 2).stdout == "mine.png\n"


@pytest.mark.long
def test_the_ranks_of_a_file_are_selected_by_only(ring, tmp_path):
    assert run("show", ring, "--only", "2-9").stderr == "stretto: the schedule has ranks 0 to 3\n"
    assert run("show", ring, "--only", "1-2", "-o", tmp_path / "shown.svg").exit_code == 0
    assert set(re.findall("rank [0-9]", (tmp_path / "shown.svg").read_text())) == {"rank 1", "rank 2"}
    assert run("show", "ring-all-reduce", "--ranks", "1-2").exit_code == 2


def test_options_reach_the_schedule(tmp_path):
    file = tmp_path / "f.xml"
    sizes = ("--min-bytes", 1024, "--max-bytes", 2048)
    assert run("compile", "ring_all_gather", "--ranks", 3, "--protocol", "LL", "--out-of-place", *sizes, "-o", file)
    read = read_schedule(file)
    assert (read.protocol, read.in_place, read.out_of_place) == ("LL", False, True)
    assert (read.min_bytes, read.max_bytes) == (1024, 2048)


def test_verify_prints_one_object_and_exits_with_0(ring):
    result = run("verify", ring, "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert set(found) == EVERYTHING
    assert found["ok"]
    assert (found["postcondition"], found["deadlock_free"], found["replica_consistent"]) == (True, True, True)
    assert (found["races"], found["errors"]) == ([], [])


def test_an_incorrect_schedule_exits_with_1_and_the_place_is_reported(ring):
    ring.write_text(ring.read_text().replace('type="rrcs"', 'type="rcs"', 1))
    result = run("verify", ring, "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert not found["ok"]
    assert not found["postcondition"]
    assert "out[" in found["errors"][0]
    words = run("verify", ring)
    assert words.exit_code == 1
    assert words.stdout.rstrip().endswith("NOT verified")


def test_several_schedules_are_verified_at_once(ring):
    broken = ring.with_name("broken.xml")
    broken.write_text(ring.read_text().replace('type="rrcs"', 'type="rcs"', 1))
    result = run("verify", ring, broken, ring, "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert (found["ok"], {name: each["ok"] for name, each in found["schedules"].items()}) == (
        False,
        {str(ring): True, str(broken): False},
    )
    assert found["schedules"][str(broken)]["errors"]
    words = run("verify", broken, ring)
    assert words.exit_code == 1
    assert words.stdout.count("NOT verified") == 1
    assert words.stdout.rstrip().endswith("verified")
    assert run("verify", ring, ring).exit_code == 0
    assert run("verify", ring, "missing.xml").exit_code == 2


def test_slots_waivers_and_limits_are_options(ring):
    assert run("verify", ring, "--slots", 1).exit_code == 1
    assert "deadlock with 1 FIFO slots" in run("verify", ring, "--slots", 1).stdout
    assert run("verify", ring, "--limits", "rccl").exit_code == 0
    assert run("verify", ring, "--limits", "nccl").exit_code == 2
    assert run("verify", ring, "--waive", "races").exit_code == 2
    assert run("verify", ring, "--waive", "replica_consistency").exit_code == 0
    long = ring.with_name("long.xml")
    assert run("compile", "ring-all-reduce", "--ranks", 40, "-o", long).exit_code == 0
    result = run("verify", long, "--limits", "rccl", "--json")
    assert result.exit_code == 1
    assert "rank 0, thread block 0 has 79 steps; rccl has at most 64" in json.loads(result.stdout)["errors"]


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (("verify", __file__), "not XML"),
        (("compile", "ring-all-reduce", "--ranks", 0), "a collective has 1 to 4096 ranks, not 0"),
        (("compile", "ring-all-reduce", "--ranks", -4), "not -4"),
        (("compile", "ring-all-reduce", "--ranks", 4, "--nodes", 2), "has no parameter 'nodes'"),
        (("compile", "ring-all-reduce", "--ranks", 4, "--instances", 0), "at least 1 instance"),
        (("compile", "ring-all-reduce", "--ranks", 4, "--set", "channels"), "--set takes NAME=NUMBER, not 'channels'"),
        (("compile", "ring-all-reduce", "--ranks", 99, "--limits", "rccl"), "rccl has at most 64"),
        (("compile", "ring-all-reduce", "--ranks", 4, "--set", "channels=0"), "at least 1 channel, not 0"),
        (("compile", "ring-all-reduce", "--ranks", 4, "--set", "in_place=5"), "there is an option for in_place"),
        (("compile", "ring-all-reduce", "--ranks", 4, "--set", "channels=--5"), "--set takes NAME=NUMBER"),
        (("compile", "ring-all-reduce", "--ranks", 4, "--set", "min_bytes=5"), "min_bytes is no parameter of an"),
        (("compile", "hierarchical-all-reduce", "--nodes", -2, "--gpus", -2), "at least 1 of nodes, not -2"),
        (("compile", "all-to-next", "--nodes", 2, "--gpus", 2, "--in-place"), "leaves no choice of in_place"),
        (("run", "ring.xml", "--ranks", 4), "ring.xml is compiled: leave out"),
        (("run", "ring.xml", "--protocol", "LL"), "ring.xml is compiled: leave out"),
        (("compile", "hierarchical-all-reduce", "--nodes", 2, "--gpus", 2, "--ranks", 5), "are not 5 ranks"),
        (("show", "/"), "/: is not a regular file"),
        (("import-msccl", "--yes", "/dev/zero"), "/dev/zero: is not a regular file"),
    ],
)
def test_bad_input_is_refused_with_2_and_a_line(args, why):
    result = run(*args)
    assert result.exit_code == 2
    assert why in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_a_file_over_the_limit_is_refused(ring):
    result = run("verify", ring, "--max-file-bytes", 100)
    assert result.exit_code == 2
    assert "larger than 100 bytes" in result.stderr


def test_a_program_that_is_not_verified_is_not_written(tmp_path):
    own = tmp_path / "own.py"
    own.write_text(
        "from stretto.collectives import AllGather, algorithm, chunk\n"
        "@algorithm(lambda ranks: AllGather(ranks))\n"
        "def lazy(ranks):\n"
        "    chunk(0, 'in', 0).copy(1, 'out', 0)\n"
    )
    result = run("compile", f"{own}:lazy", "--ranks", 2, "-o", tmp_path / "own.xml")
    assert result.exit_code == 1
    assert "out[1] of rank 0 holds nothing, but in[0] of rank 1 is wanted" in result.stderr
    assert not (tmp_path / "own.xml").exists()


@pytest.mark.long
def test_a_schedule_is_drawn(ring, tmp_path):
    result = run("show", ring)
    assert result.exit_code == 0
    assert (tmp_path / "ring.png").read_bytes().startswith(b"\x89PNG")
    assert run("show", ring, "-o", tmp_path / "some.svg", "--only", "1-2").exit_code == 0
    picture = (tmp_path / "some.svg").read_text()
    assert picture.lstrip().startswith("<?xml")
    assert run("show", ring, "-o", tmp_path / "some.pdf").exit_code == 2
    assert run("show", ring, "--only", "two").exit_code == 2


def test_a_script_is_run_after_the_user_has_agreed_and_until_it_changes(tmp_path, monkeypatch):
    monkeypatch.setenv("STRETTO_CACHE", str(tmp_path / "cache"))
    script = tmp_path / "script.py"
    script.write_text("open('ran', 'a').close(); raise SystemExit('it has run')\n")
    monkeypatch.chdir(tmp_path)
    refused = run("import-msccl", script)
    assert (refused.exit_code, (tmp_path / "ran").exists()) == (2, False)
    assert "is a Python program, which import-msccl runs with your rights: read it, then run" in refused.stderr
    assert f"stretto collective import-msccl --yes {script}" in refused.stderr
    assert "it has run" in run("import-msccl", "--yes", script).stderr
    assert "it has run" in run("import-msccl", script).stderr
    script.write_text(script.read_text() + "# changed\n")
    assert "runs with your rights" in run("import-msccl", script).stderr
    assert "runs with your rights" in " ".join(run("import-msccl", "--help").stdout.split())


def test_a_script_for_msccl_tools_is_imported(tmp_path, monkeypatch):
    monkeypatch.setenv("STRETTO_CACHE", str(tmp_path / "cache"))
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "from msccl.language import *\n"
        "from msccl.topologies import *\n"
        "from msccl.language.collectives import AllGather\n"
        "n = int(sys.argv[1])\n"
        "for name in sys.argv[2:] or ['one']:\n"
        "    with MSCCLProgram(name, fully_connected(n), AllGather(n, 1, True), 1):\n"
        "        for r in range(n):\n"
        "            for s in range(1, n):\n"
        "                chunk(r, Buffer.input, 0).copy((r + s) % n, Buffer.output, r)\n"
        "        XML()\n"
        "        assert Check()\n"
    )
    printed = run("import-msccl", "--yes", script, 3)
    assert printed.exit_code == 0
    assert printed.stdout.count("<algo ") == 1
    assert run("import-msccl", script, 3, "-o", tmp_path / "last.xml").exit_code == 0
    assert run("import-msccl", "-o", tmp_path / "first.xml", script, 3).exit_code == 0
    assert (tmp_path / "last.xml").read_text() == (tmp_path / "first.xml").read_text() == printed.stdout
    several = run("import-msccl", script, 3, "a", "b/c")
    assert several.exit_code == 2
    assert "makes 2 programs: name a folder for them with -o" in several.stderr
    assert run("import-msccl", "-o", tmp_path / "folder", script, 3, "a", "b/c").exit_code == 0
    assert sorted(path.name for path in (tmp_path / "folder").iterdir()) == ["0-a.xml", "1-b-c.xml"]
    assert run("import-msccl", script, "--", 3, "-o", "x").exit_code == 2


def test_a_collective_runs_on_processes_and_every_number_is_checked(ring):
    result = run("run", ring, "--bytes", "10K", "--dtype", "bf16", "--reduction", "max", "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert (found["ranks"], found["bytes"], found["wrong"]) == (4, 10240, 0)
    assert found["seconds"] > 0


ONE_STEP = """<algo name="one-step" proto="LL" nchannels="1" nchunksperloop="1" ngpus="3" coll="allreduce" \
inplace="1" outofplace="1">
"""


def one_step(rank: int) -> str:
    """Each of three ranks adds what the others send it to its own, so that every rank adds in another order."""
    text = f'<gpu id="{rank}" i_chunks="1" o_chunks="1" s_chunks="2">\n'
    unwaited = 'depid="-1" deps="-1"'
    for block, peer in enumerate(((rank + 1) % 3, (rank + 2) % 3)):
        text += f'<tb id="{block}" send="{peer}" recv="{peer}" chan="0">\n'
        text += f'<step s="0" type="s" srcbuf="i" srcoff="0" dstbuf="s" dstoff="0" cnt="1" {unwaited} hasdep="0"/>\n'
        text += (
            f'<step s="1" type="r" srcbuf="i" srcoff="0" dstbuf="s" dstoff="{block}" cnt="1" {unwaited} hasdep="1"/>\n'
        )
        text += "</tb>\n"
    text += '<tb id="2" send="-1" recv="-1" chan="0">\n'
    sums = (("nop", "i", 0, 0), ("cpy", "i", 0, 1), ("re", "s", 0, None), ("re", "s", 1, None))
    for step, (type, buffer, source, block) in enumerate(sums):
        wait = unwaited if block is None else f'depid="{block}" deps="1"'
        text += f'<step s="{step}" type="{type}" srcbuf="{buffer}" srcoff="{source}" dstbuf="o" dstoff="0" cnt="1" '
        text += f'{wait} hasdep="0"/>\n'
    return text + "</tb>\n</gpu>\n"


def test_a_file_whose_order_of_additions_is_waived_runs_in_place_and_out_of_place(tmp_path):
    file = tmp_path / "one_step.xml"
    file.write_text(ONE_STEP + "".join(map(one_step, range(3))) + "</algo>\n")
    refused = run("run", file)
    assert refused.exit_code == 1
    assert "order of additions  differs between ranks" in refused.stderr
    assert refused.stderr.splitlines()[-3].endswith("--waive replica_consistency accepts that")
    for how in ("--in-place", "--out-of-place"):
        result = run("run", file, "--waive", "replica_consistency", how, "--bytes", "1K", "--json")
        assert result.exit_code == 0, result.stderr
        assert json.loads(result.stdout)["wrong"] == 0
    file.write_text(file.read_text().replace('outofplace="1"', 'outofplace="0"'))
    result = run("run", file, "--waive", "replica_consistency", "--out-of-place")
    assert result.exit_code == 2
    assert "the schedule one-step runs in place" in result.stderr


def test_more_ranks_than_a_machine_has_room_for_are_refused_before_a_process_starts(tmp_path):
    file = tmp_path / "wide.xml"
    ranks = "".join(f'<gpu id="{rank}" i_chunks="0" o_chunks="0" s_chunks="0"></gpu>\n' for rank in range(300))
    file.write_text(
        '<algo name="wide" proto="LL" nchannels="1" nchunksperloop="0" ngpus="300" coll="allreduce" inplace="1">\n'
        f"{ranks}</algo>\n"
    )
    assert run("verify", file).exit_code == 0
    result = run("run", file)
    assert result.exit_code == 2
    assert "300 ranks are too many processes to be tried on one machine: at most 256" in result.stderr


def test_an_unverified_schedule_is_not_run(ring):
    ring.write_text(ring.read_text().replace('type="rrcs"', 'type="rcs"', 1))
    result = run("run", ring)
    assert result.exit_code == 1
    assert "not run: the schedule is not verified" in result.stderr


@pytest.mark.parametrize(
    ("option", "why"),
    [
        (("--bytes", "1X"), "'1X' is no size: write 4096, 64KiB, 1MiB (2^20 bytes) or 1MB (10^6)"),
        (("--bytes", "3"), "3 is less than one element of fp32 for each chunk; 8 bytes would do"),
        (("--bytes", "0"), "0 is less than one element"),
        (("--bytes", "-1"), "'-1' is no size"),
        (("--bytes", "999999G"), "is too large to be tried on processes"),
        (("--reduction", "avg"), "the reductions are sum, max, min, prod, not 'avg'"),
    ],
)
def test_trials_that_cannot_be_are_refused(option, why):
    result = run("run", "ring-all-reduce", "--ranks", 2, *option)
    assert result.exit_code == 2
    assert why in result.stderr


def test_a_users_program_prints_to_standard_error_and_fails_in_words(tmp_path):
    own = tmp_path / "own.py"
    own.write_text(
        "import sys\n"
        "from stretto.collectives import AllGather, algorithm, chunk\n"
        "print('hello')\n"
        "@algorithm(lambda ranks: AllGather(ranks))\n"
        "def good(ranks):\n"
        "    print('hello again')\n"
        "    for r in range(ranks):\n"
        "        chunk(r, 'in', 0).copy((r + 1) % ranks, 'out', r)\n"
        "@algorithm(lambda ranks: AllGather(ranks))\n"
        "def leaves(ranks):\n"
        "    sys.exit(0)\n"
        "@algorithm(lambda ranks: AllGather(ranks))\n"
        "def broken(ranks):\n"
        "    1 / 0\n"
        "@algorithm(lambda ranks: AllGather(ranks))\n"
        "def wordy(ranks):\n"
        "    raise ValueError('two\\nlines')\n"
        "@algorithm(lambda ranks: AllGather(ranks))\n"
        "def silent(ranks):\n"
        "    raise ValueError\n"
        "@algorithm(lambda ranks: AllGather(ranks))\n"
        "def misled(ranks):\n"
        "    chunk(0, 'in', 0, ch=5)\n"
        "    chunk(0, 'in', 0).copy(1, 'out', '0' + 1)\n"
    )
    result = run("compile", f"{own}:good", "--ranks", 2)
    assert result.exit_code == 0
    assert result.stdout.startswith("<algo ")
    assert "hello again" in result.stderr
    for name, line, why in (("leaves", 11, "SystemExit: 0"), ("broken", 14, "ZeroDivisionError")):
        result = run("compile", f"{own}:{name}", "--ranks", 2)
        assert result.exit_code == 2
        assert f"own.py:{line}: {why}" in result.stderr
        assert result.stdout == ""
    assert run("compile", f"{own}:wordy", "--ranks", 2).stderr.splitlines() == ["hello", "stretto: two lines"]
    assert "own.py:20: ValueError: " in run("compile", f"{own}:silent", "--ranks", 2).stderr
    assert "own.py:23: TypeError: " in run("compile", f"{own}:misled", "--ranks", 2).stderr


def test_a_name_out_of_a_file_begins_no_line_and_steers_no_terminal(ring):
    ring.write_text(ring.read_text().replace('name="ring-all-reduce"', 'name="a&#10;verified&#x9b;&#x202e;é"', 1))
    lines = run("verify", ring).stdout.splitlines()
    assert lines[0].startswith(r"a\nverified\x9b\u202eé: allreduce of 4 ranks")
    assert lines.count("verified") == 1


def test_a_process_that_dies_ends_the_run_in_words(ring, monkeypatch):
    def die(*args, **options):
        raise ExecutionError("ring stops:\n  rank 0 waits for rank 1")

    monkeypatch.setattr("stretto.collectives.host_benchmark.run_on_processes", die)
    result = run("run", ring, "--json")
    assert result.exit_code == 1
    assert result.stderr == "stretto: not run to its end: ring stops: rank 0 waits for rank 1\n"
    assert "not run to its end" in json.loads(result.stdout)["error"]


def test_a_picture_does_not_replace_the_schedule(ring):
    same = ring.rename(ring.with_suffix(".png"))
    before = same.read_bytes()
    result = run("show", same)
    assert result.exit_code == 2
    assert "is the schedule itself" in result.stderr
    assert same.read_bytes() == before


def test_a_size_means_the_same_to_every_command_and_what_is_rounded_is_said(ring):
    for size, count in (("1MB", 10**6), ("1MiB", 2**20), ("1M", 2**20)):
        result = run("simulate", ring, "--cluster", "dgx-h200", "--bytes", size, "--json")
        assert json.loads(result.stdout)["bytes"] == count
    result = run("run", "ring-all-reduce", "--ranks", 2, "--bytes", "1001")
    assert "1,000 bytes (1,001 in whole chunks) of fp32" in result.stdout
