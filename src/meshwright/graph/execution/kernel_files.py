"""Kernel files: a program compiled ahead of time by Inductor, for the machine that compiles it.

Kernels can be saved for a program without communication, with static sizes, whose kernels overwrite no input. A kernel
file is native code: load only files that you made.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from secrets import token_hex
from typing import NoReturn

import torch

from meshwright.comm import Communicator

from .._errors import ProgramFileError
from ..analysis.live_memory import written_inputs
from ..program.node import Value, tensor_dtype
from ..program.program import Program, communication
from ..torch_hooks import load_package, package_graph
from .fx_runner import to_fx
from .inductor import compiled
from .scatter_options import options_for


def machine() -> str:
    """Return a text that identifies the target of kernels: the torch version and the kind of processor."""
    flags = Path("/proc/cpuinfo")
    lines = [line for line in flags.read_text().splitlines() if line.startswith("flags")] if flags.exists() else []
    kind = sha256("".join(lines[:1]).encode()).hexdigest()[:16]
    return f"torch {torch.__version__} {platform.machine()} {torch.backends.cpu.get_cpu_capability()} {kind}"


def save_kernels(program: Program, here: Communicator, path: str | os.PathLike[str]) -> bool:
    """Write the kernels of the program to a file.

    Returns False and writes no file if the kernels of this program can only be compiled where it runs.

    Raises:
        ProgramFileError: kernels cannot be compiled on this machine.
    """
    if not _is_packaged(program):
        return False
    beside = Path(path).absolute().with_name(f".{token_hex(8)}.pt2")
    made: list[bool] = []

    def package(part: Program, numbers: dict[Value, int]) -> Callable[..., NoReturn]:
        made.append(not written_inputs(part) and all(i.value.is_tensor for i in part.inputs))
        if made[0]:
            examples = [
                torch.empty(i.value.shape, dtype=tensor_dtype(i.value), device=i.value.device) for i in part.inputs
            ]
            module = to_fx(part, numbers=numbers, results=part.outputs)
            package_graph(module, examples, str(beside), options_for(part))
        return _no_call

    try:
        compiled(program, here, make=package)
        if made != [True]:
            return False
        os.replace(beside, path)
    except RuntimeError as error:
        raise ProgramFileError(
            "saving kernels",
            str(error).split("\n")[0],
            "Inductor needs a C++ compiler to make kernels",
            "call dist_model.save(folder) without kernels: Inductor then makes them where the program runs",
        ) from error
    finally:
        beside.unlink(missing_ok=True)
    return True


def with_kernels(program: Program, here: Communicator, path: str | os.PathLike[str]) -> Program:
    """Return the program in the form of `compiled`, with the kernels in the file."""
    call = load_package(os.fspath(path))
    return compiled(program, here, make=lambda part, numbers: call)


def _is_packaged(program: Program) -> bool:
    """True if all sizes are static, all values are on the CPU, and ranks do not communicate."""
    values = [*program.producers, *(i.value for i in program.inputs)]
    known = all(isinstance(n, int) for v in values for n in v.shape) and all(v.device == "cpu" for v in values)
    return known and next(communication(program), None) is None


def _no_call(*args: object) -> NoReturn:
    raise AssertionError("kernels that were made for a file are not called")
