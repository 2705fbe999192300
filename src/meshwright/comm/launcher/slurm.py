"""Rank and addresses of a task that `srun` started, under the names of torchrun's variables.

Slurm says how many tasks a step has, which of them this process is, and on which nodes they are. It gives no port, so
the port is a function of the job and the step, which is the same on all tasks (Slurm, srun(1), "output environment
variables").
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from zlib import crc32

LOOPBACK = ("127.0.0.1", "localhost", "::1")
TASKS = "SLURM_STEP_NUM_TASKS"
NEEDED = (TASKS, "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NODELIST", "SLURM_JOB_ID")
FIRST_PORT, PORTS = 61_000, 4_000
"""Ports above those that Linux gives to outgoing connections."""
_ELEMENT = re.compile(r"(?:[^,\[]|\[[^\]]*\])+")
_NUMBERS = re.compile(r"\[([^\],-]+)[^\]]*\]")


def variables_of_task(env: Mapping[str, str]) -> dict[str, str]:
    """Return torchrun's variables for one of several tasks of a step; none for any other process."""
    if any(name not in env for name in NEEDED) or env[TASKS] == "1":
        return {}
    job, step = env["SLURM_JOB_ID"], env.get("SLURM_STEP_ID", "0")
    on_one_node = env.get("SLURM_STEP_NUM_NODES") == "1"
    return {
        "RANK": env["SLURM_PROCID"],
        "LOCAL_RANK": env["SLURM_LOCALID"],
        "WORLD_SIZE": env[TASKS],
        "MASTER_ADDR": LOOPBACK[0] if on_one_node else first_host(env["SLURM_STEP_NODELIST"]),
        "MASTER_PORT": str(FIRST_PORT + crc32(f"{job}.{step}".encode()) % PORTS),
        "TORCHELASTIC_RUN_ID": f"{job}.{step}",
        "TORCHELASTIC_RESTART_COUNT": env.get("SLURM_RESTART_COUNT", "0"),
    }


def first_host(nodes: str) -> str:
    """Return the first node of a list as Slurm writes it; task 0 runs there.

    >>> [first_host(nodes) for nodes in ("gpu[07-09,12],cpu1", "node1,node2", "rack[1-2]n[3,5]")]
    ['gpu07', 'node1', 'rack1n3']
    """
    found = _ELEMENT.match(nodes)
    return _NUMBERS.sub(r"\1", found[0]) if found else nodes
