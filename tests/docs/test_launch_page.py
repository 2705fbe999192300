"""The page about launchers: its files can be read, and its script runs with the variables of each launcher."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.run import get_args_parser

from .pages import ROOT, blocks

PAGE = ROOT / "docs" / "how-to" / "launch.md"
TRAIN, ON_RAY = (block.text for block in blocks(PAGE) if block.kind == "py")
SHELL = [block.text for block in blocks(PAGE) if block.kind == "sh"]
RANKS, NODES, PER_NODE = 2, 4, 8
OF_LAUNCHERS = re.compile(
    r"RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|MASTER_\w+|(SLURM|PET|TORCHELASTIC|MESHWRIGHT)_\w+"
)
STAND_IN_FOR_RAY = """
import os
import sys
from types import ModuleType

import torch.distributed as dist


class TorchTrainer:
    def __init__(self, work, scaling_config):
        assert scaling_config["num_workers"] == 32
        self.work = work

    def fit(self):  # in each worker: torch's own process group first
        dist.init_process_group("gloo", "env://")
        self.work()
        dist.destroy_process_group()


train = sys.modules["ray.train"] = ModuleType("ray.train")
train.ScalingConfig = dict
torch = sys.modules["ray.train.torch"] = ModuleType("ray.train.torch")
torch.TorchTrainer = TorchTrainer
"""


def free_port(_: object) -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def of_slurm(rank: int, port: int) -> dict[str, str]:
    """Return the variables of a task of `srun` on one node; the job chooses the port."""
    return {
        "SLURM_JOB_ID": str(port),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": str(RANKS),
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_NODELIST": "gpu07",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NTASKS": str(RANKS),
        "PMI_SIZE": str(RANKS),
    }


def of_pytorchjob(rank: int, port: int) -> dict[str, str]:
    """Return the variables of a pod with one process, which has no local rank."""
    pet = {"PET_NNODES": str(RANKS), "PET_NODE_RANK": str(rank)}
    return {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port), **pet}


def of_ray(rank: int, port: int) -> dict[str, str]:
    local = {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(RANKS), "NODE_RANK": "0"}
    return {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **local}


LAUNCHERS: dict[str, tuple[Callable[[int, int], dict[str, str]], str]] = {
    "srun": (of_slurm, "train.py"),
    "PyTorchJob": (of_pytorchjob, "train.py"),
    "Ray Train": (of_ray, "on_ray.py"),
}
"""Launcher → the variables of a rank, and the script."""
RUN_EACH = """
import os, runpy, sys, traceback
import meshwright as mw
mw.init_mesh  # imports torch once for all processes

def run(script, variables, output):
    os.environ.update(variables)
    file = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1), os.dup2(file, 2)
    try:
        runpy.run_path(script, run_name="__main__")
        mw.init_process().close()
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(0)

for ranks in eval(sys.argv[1]):
    started = []
    for rank in ranks:
        started.append(os.fork() or run(*rank))
    for process in started:
        os.waitpid(process, 0)
"""


def test_the_script_runs_with_the_variables_of_each_launcher(tmp_path: Path) -> None:
    """Processes are forked, because each of them would import torch for seconds."""
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "on_ray.py").write_text(STAND_IN_FOR_RAY + ON_RAY)
    plan = [
        [(script, variables(rank, port), f"{name} {rank}") for rank in range(RANKS)]
        for (name, (variables, script)), port in zip(LAUNCHERS.items(), map(free_port, LAUNCHERS), strict=True)
    ]
    own = {name: value for name, value in os.environ.items() if not OF_LAUNCHERS.fullmatch(name)}
    env = {**own, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "MESHWRIGHT_PROGRAMS": "off"}
    line = [sys.executable, "-c", RUN_EACH, repr(plan)]
    subprocess.run(line, cwd=tmp_path, env=env, check=True, timeout=100)
    for name in LAUNCHERS:
        first, second = ((tmp_path / f"{name} {rank}").read_text() for rank in range(RANKS))
        assert re.fullmatch(r"2 ranks, last loss 1\.\d{4}\n", first), first + second
        assert second == ""


def test_shell_scripts_can_be_read() -> None:
    for text in (*SHELL, (ROOT / "examples" / "launch" / "slurm.sh").read_text()):
        subprocess.run(["bash", "-n"], input=text, text=True, check=True)


def torchrun_options(words: Sequence[str], variables: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the options that torchrun reads from its command line and from variables."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    words = [re.sub(r"\$(\w+)", lambda found: os.environ[found[1]], word) for word in words]
    assert words[0] == "torchrun"
    return get_args_parser().parse_args(words[1:])


def test_torchrun_reads_the_commands_of_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    (command,) = (shlex.split(text) for text in SHELL if text.startswith("torchrun"))
    options = torchrun_options(command, {}, monkeypatch)
    assert (options.nnodes, options.nproc_per_node, options.training_script) == ("4", "8", "train.py")
    assert (options.rdzv_backend, options.rdzv_endpoint) == ("c10d", "head:29500")


def test_jobs_of_kubernetes_start_torchrun_on_each_node(monkeypatch: pytest.MonkeyPatch) -> None:
    yaml = pytest.importorskip("yaml")
    jobs = {job["kind"]: job for job in (yaml.safe_load(b.text) for b in blocks(PAGE) if b.kind == "yaml")}
    assert set(jobs) == {"PyTorchJob", "JobSet", "TrainJob"}
    for node in range(NODES):
        for command, variables in (pytorchjob(jobs["PyTorchJob"], node), jobset(jobs["JobSet"], node)):
            with monkeypatch.context() as environment:
                options = torchrun_options(command, variables, environment)
            assert (options.nnodes, options.nproc_per_node) == (str(NODES), str(PER_NODE))
            assert (options.node_rank, options.training_script) == (node, "train.py")
            assert options.master_addr in ("meshwright-master-0", "meshwright-workers-0-0.meshwright")
            assert int(options.master_port) > 0
    trainer = jobs["TrainJob"]["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"], trainer["command"]) == (4, 8, ["torchrun", "train.py"])


def pytorchjob(job: Any, node: int) -> tuple[list[str], dict[str, str]]:
    """Return the command of a node, and the variables that the training operator sets."""
    replicas = job["spec"]["pytorchReplicaSpecs"]
    count = sum(replica["replicas"] for replica in replicas.values())
    (container,) = replicas["Worker" if node else "Master"]["template"]["spec"]["containers"]
    assert container["name"] == "pytorch"  # the operator looks for the port in the container of this name
    return container["command"], {
        "PET_NNODES": str(count),
        "PET_NPROC_PER_NODE": job["spec"]["nprocPerNode"],
        "PET_NODE_RANK": str(node),
        "PET_MASTER_ADDR": f"{job['metadata']['name']}-master-0",
        "PET_MASTER_PORT": "23456",
    }


def jobset(job: Any, node: int) -> tuple[list[str], dict[str, str]]:
    """Return the command of a pod, and the variable that Kubernetes sets in an indexed job."""
    (workers,) = job["spec"]["replicatedJobs"]
    spec = workers["template"]["spec"]
    assert spec["parallelism"] == spec["completions"] == NODES
    (container,) = spec["template"]["spec"]["containers"]
    shell, option, script = container["command"]
    subprocess.run([shell, "-n"], input=script, text=True, check=True)
    assert (option, f"{job['metadata']['name']}-{workers['name']}-0-0." in script) == ("-c", True)
    return shlex.split(script), {"JOB_COMPLETION_INDEX": str(node)}
