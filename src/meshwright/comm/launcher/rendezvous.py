"""Rendezvous of the processes of one run."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from .._errors import CommError, NoCommunicatorError
from ..torch_hooks import PrefixStore, Store, TCPStore, default_store
from .slurm import LOOPBACK, TASKS, variables_of_task

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
OTHER_LAUNCHERS = (TASKS, "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
"""Variables in which launchers without torchrun's variables give the number of processes."""


@dataclass(frozen=True, slots=True)
class RankAddress:
    """Rank and addresses of a process in its run, from the environment variables of torchrun or of Slurm."""

    rank: int
    size: int
    local_rank: int
    host: str
    port: int
    store_is_elsewhere: bool
    attempt: str

    @property
    def loopback(self) -> bool:
        """True if the whole run is on this machine, so that no port needs to be open beyond it."""
        return self.host in LOOPBACK


def read_rank_address(env: Mapping[str, str] | None = None) -> RankAddress:
    """Return the place that the launcher gave this process; a process started alone is the only rank.

    The variables of torchrun come first: those of Slurm only count for a task without RANK and WORLD_SIZE.

    Raises:
        NoCommunicatorError: the environment shows that there are other processes, but not their address, or a variable
            is no number.
    """
    env = os.environ if env is None else env
    if "RANK" not in env and "WORLD_SIZE" not in env:
        env = {**variables_of_task(env), **env}
    lacking = [name for name in VARIABLES if name not in env]
    crowd = [f"{name} is {env[name]}" for name in OTHER_LAUNCHERS if env.get(name, "1") != "1"]
    if len(lacking) == len(VARIABLES) and not crowd:
        return RankAddress(0, 1, 0, LOOPBACK[0], 0, False, "alone/0")
    if lacking:
        raise NoCommunicatorError(
            "this process as one rank of a run",
            "; ".join([f"no {', '.join(lacking)} in its environment", *crowd]),
            "a rank must know its number and the address of rank 0",
            "start the script with `meshwright run --ranks N script.py`, torchrun or srun, or set "
            f"{', '.join(VARIABLES)} in each process",
        )
    return RankAddress(
        rank=_number(env, "RANK"),
        size=_number(env, "WORLD_SIZE"),
        local_rank=_number(env, "LOCAL_RANK" if "LOCAL_RANK" in env else "RANK"),
        host=env["MASTER_ADDR"],
        port=_number(env, "MASTER_PORT"),
        store_is_elsewhere=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=f"{env.get('TORCHELASTIC_RUN_ID', 'run')}/{env.get('TORCHELASTIC_RESTART_COUNT', '0')}",
    )


def _number(env: Mapping[str, str], name: str) -> int:
    if not env[name].strip().isdecimal():
        raise NoCommunicatorError(
            f"a number in the environment variable {name}",
            repr(env[name]),
            "a rank must know its number and the address of rank 0",
            f"correct {name}, or let a launcher set it: `meshwright run --ranks N script.py`, torchrun or srun",
        )
    return int(env[name])


def open_store(place: RankAddress, limit: timedelta) -> Store:
    """Return the run's key-value store.

    Its keys have the attempt as prefix: a restart never reads the keys of a dead run.
    """
    store = default_store() or _connect(place, limit)
    return PrefixStore(f"meshwright/{place.attempt}", store)


def listen(host: str, port: int = 0) -> socket.socket:
    """Return a socket that listens on one interface only."""
    server = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind((host, port))
    server.listen(1024)
    return server


def host_store(host: str, port: int, size: int, limit: timedelta) -> TCPStore:
    """Return a store that this process serves on `host`; on loopback it listens on no other interface.

    Raises:
        CommError: the port cannot be used, because another job uses it, say.
    """
    try:
        if host not in LOOPBACK:
            return TCPStore(host, port, size, True, limit, wait_for_workers=False)
        server = listen("127.0.0.1", port)
        port = server.getsockname()[1]
        return TCPStore("127.0.0.1", port, size, True, limit, wait_for_workers=False, master_listen_fd=server.detach())
    except (OSError, RuntimeError) as error:
        raise CommError(
            f"to serve the store of this run at {host}:{port}",
            f"{type(error).__name__}: {error}",
            "two jobs cannot share a port",
            "set MASTER_PORT to a free port, let `meshwright run` or torchrun --standalone choose one, or end the job "
            "that uses it",
        ) from error


def _connect(place: RankAddress, limit: timedelta) -> TCPStore:
    if place.rank == 0 and not place.store_is_elsewhere:
        return host_store(place.host, place.port, place.size, limit)
    host = "127.0.0.1" if place.loopback else place.host
    return TCPStore(host, place.port, place.size, False, limit)
