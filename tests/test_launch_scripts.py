# SPDX-License-Identifier: Apache-2.0
"""The scripts of examples/clusters: their syntax and fields, and the environment in which each starts the ranks."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml

from stretto.cluster.local_ranks import count_local_ranks, find_local_rank, is_rank
from tests.train import runs

FOLDER = Path(__file__).parents[1] / "examples" / "clusters"
SRUN = """#!/usr/bin/env python3
import os, subprocess, sys
nodes, tasks = 2, 2
started = []
for rank in range(nodes * tasks):
    own = {"SLURM_PROCID": rank, "SLURM_LOCALID": rank % tasks, "SLURM_NODEID": rank // tasks}
    own |= {"SLURM_NTASKS": 4, "SLURM_STEP_NUM_TASKS": 4, "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}
    started.append(subprocess.Popen(sys.argv[2:], env=os.environ | {k: str(v) for k, v in own.items()}))
sys.exit(max(each.wait() for each in started))
"""
SHOWS = """#!/usr/bin/env python3
import json, os, sys
path = os.path.join(os.environ["SHOWN"], str(os.getpid()))
json.dump([sys.argv[1:], dict(os.environ)], open(path + ".part", "w"))
os.rename(path + ".part", path + ".json")
"""


def install(folder: Path, **programs: str) -> dict[str, str]:
    """Programs on PATH in place of a cluster's; returns the environment."""
    (folder / "bin").mkdir()
    (folder / "shown").mkdir()
    for name, text in programs.items():
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    path = f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return os.environ | {"PATH": path, "SHOWN": str(folder / "shown")}


def shown(folder: Path) -> list[tuple[list[str], dict[str, str]]]:
    return [json.loads(path.read_text()) for path in (folder / "shown").glob("*.json")]


def run_slurm(folder: Path, *arguments: str, **programs: str) -> None:
    environment = install(folder, srun=SRUN, scontrol="#!/bin/sh\necho localhost\nsleep 0.2\necho other\n", **programs)
    environment |= {"SLURM_JOB_NODELIST": "localhost,other", "SLURM_JOB_ID": str(os.getpid())}
    subprocess.run(["bash", str(FOLDER / "slurm.sh"), *arguments], env=environment, check=True, cwd=folder)


def test_slurm_starts_each_task_as_a_rank(tmp_path: Path) -> None:
    subprocess.run(["bash", "-n", str(FOLDER / "slurm.sh")], check=True)
    options = re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", (FOLDER / "slurm.sh").read_text(), re.MULTILINE)
    assert {"nodes", "ntasks-per-node", "gpus-per-node", "signal", "requeue"} <= {name for name, _ in options}
    run_slurm(tmp_path, "a b.toml", "--set", "out=x y", stretto=SHOWS)
    found = sorted(shown(tmp_path), key=lambda each: int(each[1]["RANK"]))
    assert [int(variables["RANK"]) for _, variables in found] == [0, 1, 2, 3]
    for rank, (arguments, variables) in enumerate(found):
        assert arguments == ["train", "a b.toml", "--set", "out=x y", "--set", "train.resume=latest"]
        assert is_rank(variables)
        assert (find_local_rank(variables), count_local_ranks(variables)) == (rank % 2, 2)
        assert (variables["WORLD_SIZE"], variables["MASTER_ADDR"]) == ("4", "localhost")
        assert 1024 < int(variables["MASTER_PORT"]) < 65536


@pytest.mark.exhaustive
def test_slurms_script_trains(tmp_path: Path) -> None:
    config = runs.configure(tmp_path / "run", "grid.data=2", "grid.z=2", "train.steps=2")
    runs.write_config(config)
    stretto = f'#!/bin/sh\nexec {sys.executable} -m stretto "$@"\n'
    run_slurm(tmp_path, str(config.out / "config.toml"), stretto=stretto)
    assert [line["step"] for line in runs.metrics_of(config.out)] == [1, 2]


FIELDS: dict[str, Any] = {  # of JobSet's and the Job's schemas, what the script has
    "apiVersion": "jobset.x-k8s.io/v1alpha2",
    "kind": "JobSet",
    "metadata": {"name": str},
    "spec": {
        "failurePolicy": {"maxRestarts": int},
        "network": {"enableDNSHostnames": bool, "publishNotReadyAddresses": bool},
        "replicatedJobs": [{"name": str, "replicas": int, "template": {"spec": {
            "parallelism": int, "completions": int, "completionMode": "Indexed", "backoffLimit": int,
            "template": {"spec": {
                "restartPolicy": "Never", "terminationGracePeriodSeconds": int,
                "containers": [{
                    "name": str, "image": str, "command": [str], "args": [str], "env": [{"name": str, "value": str}],
                    "ports": [{"containerPort": int}], "resources": {"limits": {"nvidia.com/gpu": str}},
                    "volumeMounts": [{"name": str, "mountPath": str}],
                }],
                "volumes": [{
                    "name": str, "configMap": {"name": str}, "persistentVolumeClaim": {"claimName": str},
                    "emptyDir": {"medium": "Memory"},
                }],
            }},
        }}}],
    },
}  # fmt: skip


def assert_fits(value: Any, schema: Any, where: str = "") -> None:
    """Every field is one of the schema's, and of its type or value."""
    match schema:
        case dict():
            assert isinstance(value, dict), where
            assert value.keys() <= schema.keys(), where
            for name, each in value.items():
                assert_fits(each, schema[name], f"{where}.{name}")
        case list():
            assert isinstance(value, list), where
            assert value, where
            for each in value:
                assert_fits(each, schema[0], f"{where}[]")
        case type():
            assert type(value) is schema, where
        case _:
            assert value == schema, where


def test_jobset_has_the_fields_of_its_schema_and_starts_torchrun_on_each_node(tmp_path: Path) -> None:
    document = yaml.safe_load((FOLDER / "jobset.yaml").read_text())
    assert_fits(document, FIELDS)
    (job,) = document["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    variables = {each["name"]: each["value"] for each in container["env"]}
    assert spec["parallelism"] == spec["completions"] == int(variables["NODES"])
    assert container["resources"]["limits"]["nvidia.com/gpu"] == variables["GPUS"]
    name = document["metadata"]["name"]
    assert variables["MASTER"] == f"{name}-{job['name']}-0-0.{name}"  # JobSet: <set>-<job>-<replica>-<pod>.<subdomain>
    assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in pod["volumes"]}
    environment = install(tmp_path, torchrun=SHOWS) | variables | {"JOB_COMPLETION_INDEX": "1"}
    subprocess.run([*container["command"], *container["args"]], env=environment, check=True)
    ((arguments, _),) = shown(tmp_path)
    assert " ".join(arguments) == (
        "--nnodes 2 --nproc-per-node 8 --node-rank 1 --master-addr stretto-ranks-0-0.stretto --master-port 29500 "
        "-m stretto train /config/train.toml --set train.resume=latest"
    )


class Call:
    """A method of an actor of a Ray that has one process; `remote` calls it when its result is wanted."""

    def __init__(self, call: Any) -> None:
        self.remote = lambda *arguments: lambda: call(*arguments)


def stand_in_for_ray(monkeypatch: pytest.MonkeyPatch, asked: list[Any]) -> None:
    def remote(kind: type) -> Any:
        def make(**options: Any) -> Any:
            asked.append(options)
            actor = kind()
            names = [name for name in vars(kind) if not name.startswith("_")]
            made = SimpleNamespace(**{name: Call(getattr(actor, name)) for name in names})
            return SimpleNamespace(remote=lambda: made)

        return SimpleNamespace(options=make)

    def get(wanted: Any) -> Any:
        return [get(each) for each in wanted] if isinstance(wanted, list) else wanted()

    modules = {name: ModuleType(name) for name in ("ray", "ray.util", "ray.util.placement_group")}
    modules["ray.util.scheduling_strategies"] = ModuleType("ray.util.scheduling_strategies")
    vars(modules["ray"]).update(init=lambda: None, remote=remote, get=get, util=modules["ray.util"])
    vars(modules["ray.util"]).update(get_node_ip_address=lambda: "127.0.0.1")
    ready = SimpleNamespace(ready=lambda: lambda: None)
    vars(modules["ray.util.placement_group"]).update(placement_group=lambda *args, **kw: asked.append(args) or ready)
    vars(modules["ray.util.scheduling_strategies"]).update(
        PlacementGroupSchedulingStrategy=lambda group, placement_group_bundle_index: placement_group_bundle_index
    )
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)


def test_ray_starts_torchrun_in_an_actor_on_each_node(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    started: list[list[str]] = []
    stand_in_for_ray(monkeypatch, asked)
    monkeypatch.setattr(sys, "argv", ["ray_train.py", "--nodes", "2", "--gpus", "8", "a.toml", "--set", "out=x"])
    monkeypatch.setattr(
        subprocess, "run", lambda command, **_: started.append(command) or SimpleNamespace(returncode=len(started) - 1)
    )
    with pytest.raises(SystemExit) as ended:
        exec(compile((FOLDER / "ray_train.py").read_text(), "ray_train.py", "exec"), {"__name__": "__main__"})
    assert ended.value.code == 1  # as the node that failed
    assert asked[0][0] == [{"GPU": 8}] * 2
    assert [options["scheduling_strategy"] for options in asked[1:]] == [0, 1]
    assert all(options["num_gpus"] == 8 for options in asked[1:])
    port = next(each for each in started[0] if each.startswith("--master-port"))
    for number, command in enumerate(started):
        assert command[1:] == [
            "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=8", f"--node-rank={number}",
            "--master-addr=127.0.0.1", port, "-m", "stretto", "train", "a.toml", "--set", "out=x", "--set",
            "train.resume=latest",
        ]  # fmt: skip


@pytest.mark.exhaustive
def test_rays_script_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One node with a rank on the CPU."""
    stand_in_for_ray(monkeypatch, [])
    config = runs.configure(tmp_path / "run", "train.steps=2")
    runs.write_config(config)
    monkeypatch.setattr(sys, "argv", ["ray_train.py", "--gpus", "0", str(config.out / "config.toml")])
    with pytest.raises(SystemExit) as ended:
        exec(compile((FOLDER / "ray_train.py").read_text(), "ray_train.py", "exec"), {"__name__": "__main__"})
    assert ended.value.code == 0
    assert [line["step"] for line in runs.metrics_of(config.out)] == [1, 2]
