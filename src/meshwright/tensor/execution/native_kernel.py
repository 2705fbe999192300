"""C++ kernels of this library: compiled for this processor at their first use, and kept for later processes.

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
from hashlib import sha256
from pathlib import Path
from secrets import token_hex
from tempfile import TemporaryDirectory

from meshwright.layout import TorchValue

VARIABLE = "MESHWRIGHT_KERNELS"
_FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-std=c++17", "-shared", "-fPIC")
_MOST_SECONDS = 60.0


def native_kernel(source: Path, *types: type) -> Callable[..., None] | None:
    """Return the function of a C++ file that has the name of the file, for arguments of these types of ctypes.

    Returns None without a compiler, for code that does not compile, and if kernels are off.
    """
    if os.environ.get(VARIABLE) == "off":
        return None
    with suppress(OSError, AttributeError, subprocess.SubprocessError):
        kernel = _in_folder(source)
        kernel.argtypes, kernel.restype = types, None
        return kernel
    return None


def _in_folder(source: Path) -> TorchValue:
    """Return the kernel of the user's folder, compiled now if it is not there. Raises OSError if that fails."""
    compiler = _compiler()
    folder = kernel_folder()
    if folder is None:
        with TemporaryDirectory() as apart:
            return _loaded(_compiled(compiler, source, Path(apart) / "kernel.so"), source.stem)
    path = folder / f"{source.stem.replace('_', '-')}-{_key(compiler, source)}.so"
    with suppress(OSError, AttributeError):  # there is no such file, or it is broken
        return _loaded(path, source.stem)
    return _loaded(_compiled(compiler, source, path), source.stem)


def _loaded(path: Path, name: str) -> TorchValue:
    return getattr(ctypes.CDLL(str(path)), name)


def _compiler() -> str:
    names = [name for name in (os.environ.get("CXX"), "g++", "clang++", "c++") if name]
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        raise FileNotFoundError(f"none of {', '.join(names)}")
    return found


def _key(compiler: str, source: Path) -> str:
    """Return a hash of everything that a compiled kernel depends on."""
    return sha256(f"{source.read_text()} {_FLAGS} {compiler} {processor()}".encode()).hexdigest()[:16]


def processor() -> list[str]:
    """Return the name and the instructions of this processor."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else [platform.processor()]
    return sorted({line for line in lines if line.startswith(("flags", "model name"))})


def kernel_folder() -> Path | None:
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


def _compiled(compiler: str, source: Path, path: Path) -> Path:
    """Compile a kernel, and give it its path once it is whole; return the path."""
    part = path.with_name(f".{token_hex(8)}.so")
    try:
        command = [compiler, *_FLAGS, str(source), "-o", str(part)]
        subprocess.run(command, check=True, capture_output=True, timeout=_MOST_SECONDS)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return path
