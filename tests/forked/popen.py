"""The fixture `forked_processes`, in which `subprocess` forks Python programs from a server instead of starting them.

A test asks for it unless it is about the start of a process. It changes nothing on systems other than Linux.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from .server import LONGEST

_SET_SUBREAPER = 36  # prctl(2)
_READ_AT_IMPORT = ("PYTHON", "LD_", "TORCH", "MESHWRIGHT_CHECK_RESULTS")
_READ_LATER = ("PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE", "TORCHELASTIC", "TORCHINDUCTOR_CACHE_DIR")
_start = subprocess.Popen._execute_child


@pytest.fixture(scope="session")
def fork_server() -> Iterator[Server]:
    """Return the server of this session."""
    server = Server()
    yield server
    server.close()


@pytest.fixture(scope="module")
def forked_processes(fork_server: Server) -> Iterator[None]:
    """Fork Python programs for the tests of a module."""
    with fork_server.forking():
        yield


class Server:
    """The process that forks; it starts with the first request."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._at_import = _read_at_import(os.environ)

    @contextmanager
    def forking(self) -> Iterator[None]:
        """Fork Python programs inside the block, if their arguments and environment allow it."""

        def execute_child(process: Any, args: Any, executable: Any, *rest: Any) -> None:
            preexec_fn, _, _, folder, environment, _, _, shell, *files = rest[:14]
            own_session, group = rest[-2:]
            environment = dict(os.environ if environment is None else environment)
            is_plain = preexec_fn is None and not shell and group == -1 and _is_program(args)
            if not is_plain or _read_at_import(environment) != self._at_import:
                _start(process, args, executable, *rest)
                return
            request = {
                "arguments": list(map(os.fspath, args[1:])),
                "folder": os.path.abspath(folder or os.getcwd()),
                "environment": environment,
                "own_session": own_session,
            }
            read, _, _, written, _, error = files
            process.pid = self._fork(request, (read, written, error))
            process._child_created = True
            process._close_pipe_fds(*files)

        with pytest.MonkeyPatch.context() as patch:
            if sys.platform.startswith("linux"):
                patch.setattr(subprocess.Popen, "_execute_child", execute_child)
            yield

    def _fork(self, request: dict[str, Any], files: Sequence[int]) -> int:
        asked = self._started()
        given = [number if file == -1 else file for number, file in enumerate(files)]
        with _adopting():
            socket.send_fds(asked, [json.dumps(request).encode()], given)
            pid, ended = asked.recv(LONGEST), asked.recv(LONGEST)
        assert ended == b"ended"
        return int(pid)

    def _started(self) -> socket.socket:
        if self._socket is None:
            self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(subprocess.Popen, "_execute_child", _start)
                    self._process = subprocess.Popen(
                        [sys.executable, "-m", "tests.forked.server", str(theirs.fileno())],
                        env=os.environ | {"OMP_NUM_THREADS": "1"},
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        pass_fds=[theirs.fileno()],
                        start_new_session=True,
                    )
        return self._socket

    def close(self) -> None:
        if self._socket is not None and self._process is not None:
            self._socket.close()
            self._process.wait()


def _is_program(args: Any) -> bool:
    """True for this Python with a script, a module or a text, and no other options."""
    if isinstance(args, (str, bytes)) or len(args) < 2 or args[0] != sys.executable:
        return False
    return args[1] in ("-m", "-c") or not os.fspath(args[1]).startswith("-")


def _read_at_import(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_READ_AT_IMPORT) and not name.startswith(_READ_LATER)
    }


@contextmanager
def _adopting() -> Iterator[None]:
    """Make this process the parent of processes in its tree whose parent ends."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(_SET_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_SET_SUBREAPER, 0, 0, 0, 0)
