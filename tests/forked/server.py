"""Process that imports torch once, and forks for each program that it is asked for.

A request is the arguments, the environment and the working directory of a program, with its three standard files. The
answer is the number of the new process. The process between the server and the program ends at once, so that the
process that asks, a subreaper, becomes the parent of the program.
"""

from __future__ import annotations

import gc
import io
import json
import os
import runpy
import socket
import sys
from importlib import import_module
from types import ModuleType
from typing import Any

IMPORTED = (
    "torch",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "meshwright.engine",
    "meshwright.models",
    "meshwright.cli",
)
LONGEST = 1 << 17
"""Bytes of a request."""


def next_program(asked: socket.socket) -> dict[str, Any] | None:
    """Serve requests; return None at the end of the server, and the request in each process that is to carry it out."""
    while True:
        data, files, *_ = socket.recv_fds(asked, LONGEST, 3)
        if not data:
            return None
        between = os.fork()
        if not between:
            pid = os.fork()
            if pid:
                asked.send(str(pid).encode())
                os._exit(0)
            asked.close()
            for number, file in enumerate(files):
                os.dup2(file, number)
                os.close(file)
            return json.loads(data)
        os.waitpid(between, 0)
        asked.send(b"ended")
        for file in files:
            os.close(file)


def carry_out(request: dict[str, Any]) -> None:
    """Run the program of a request as the main module of this process."""
    if request["own_session"]:
        os.setsid()
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [path for path in paths if path and path not in sys.path]
    _open_standard_files()
    first, *rest = request["arguments"]
    if first == "-m":
        sys.path[0] = request["folder"]
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    if first == "-c":
        sys.path[0] = ""
        sys.argv = ["-c", *rest[1:]]
        _run(rest[0], "<string>")
        return
    sys.path[0] = os.path.dirname(os.path.realpath(first))
    sys.argv = [first, *rest]
    with io.open_code(first) as file:
        _run(file.read(), first)


def _open_standard_files() -> None:
    """Make the standard streams of Python for the new files, as the interpreter does."""
    at_once = bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = sys.__stdin__ = open(0, closefd=False)
    sys.stdout = sys.__stdout__ = io.TextIOWrapper(open(1, "wb", closefd=False), write_through=at_once)
    sys.stderr = sys.__stderr__ = io.TextIOWrapper(
        open(2, "wb", closefd=False), errors="backslashreplace", line_buffering=True, write_through=at_once
    )


def _run(code: str | bytes, name: str) -> None:
    main = ModuleType("__main__")
    sys.modules["__main__"] = main
    if name != "<string>":
        main.__file__ = name
    exec(compile(code, name, "exec", dont_inherit=True), main.__dict__)


if __name__ == "__main__":
    for imported in IMPORTED:
        import_module(imported)
    gc.collect()
    gc.freeze()
    program = next_program(socket.socket(fileno=int(sys.argv[1])))
    if program is not None:
        carry_out(program)
