"""The C++ kernel of products of few rows: compiled for this processor at its first use, and kept for later processes.

    MESHWRIGHT_KERNELS    "off" for no kernels of this library
    XDG_CACHE_HOME        the folder `meshwright/kernels` is there; by default in `~/.cache`
    CXX                   the compiler, beside g++, clang++ and c++

A kernel is native code. It is loaded only from a folder that belongs to the user and that nobody else can write to.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import stat
import subprocess
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from secrets import token_hex
from tempfile import TemporaryDirectory

import torch

VARIABLE = "MESHWRIGHT_KERNELS"
_SOURCE = Path(__file__).with_name("row_products.cpp")
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC")
_MOST_SECONDS = 60.0
_VECTORS = {"AVX2", "AVX512"}
_TYPES = (*[ctypes.c_void_p] * 3, *[ctypes.c_int64] * 5)

Kernel = Callable[[int, int, int, int, int, int, int, int], None]
"""`kernel(x, w, out, m, n, k, stride of x, stride of w)` writes the product of x [m, k] and w [n, k] to out [m, n]."""


@cache
def row_kernel() -> Kernel | None:
    """Return the kernel; None without a compiler or without AVX2 or AVX-512, and if kernels are off."""
    if os.environ.get(VARIABLE) == "off" or torch.backends.cpu.get_cpu_capability() not in _VECTORS:
        return None
    with suppress(OSError, AttributeError, subprocess.SubprocessError):
        return _in_folder()
    return None


def _in_folder() -> Kernel:
    """Return the kernel of the user's folder, compiled now if it is not there. Raises OSError if that fails."""
    compiler = _compiler()
    folder = _own_folder()
    if folder is None:
        with TemporaryDirectory() as apart:
            return _loaded(_compiled(compiler, Path(apart) / "kernel.so"))
    path = folder / f"row-products-{_key(compiler)}.so"
    with suppress(OSError, AttributeError):  # there is no such file, or it is broken
        return _loaded(path)
    return _loaded(_compiled(compiler, path))


def _compiler() -> str:
    names = [name for name in (os.environ.get("CXX"), "g++", "clang++", "c++") if name]
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        raise FileNotFoundError(f"none of {', '.join(names)}")
    return found


def _key(compiler: str) -> str:
    """Return a hash of everything that the compiled kernel depends on."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else [platform.processor()]
    processor = sorted({line for line in lines if line.startswith(("flags", "model name"))})
    return sha256(f"{_SOURCE.read_text()} {_FLAGS} {compiler} {processor}".encode()).hexdigest()[:16]


def _own_folder() -> Path | None:
    """Return the folder of the user's kernels, made if needed; None if it is not the user's alone."""
    try:
        cache_folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = cache_folder / "meshwright" / "kernels"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        about = folder.lstat()
    except (OSError, RuntimeError):  # there is no home, or none to write to
        return None
    is_own = stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid() and not about.st_mode & 0o022
    return folder if is_own and os.access(folder, os.W_OK) else None


def _compiled(compiler: str, path: Path) -> Path:
    """Compile the kernel, and give it its path once it is whole; return the path."""
    part = path.with_name(f".{token_hex(8)}.so")
    try:
        command = [compiler, *_FLAGS, str(_SOURCE), "-o", str(part)]
        subprocess.run(command, check=True, capture_output=True, timeout=_MOST_SECONDS)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return path


def _loaded(path: Path) -> Kernel:
    kernel = ctypes.CDLL(str(path)).row_products
    kernel.argtypes, kernel.restype = _TYPES, None
    return kernel
