"""Build of the C++ part, and its import.

The result is kept in `out/device/KEY`, where KEY is a hash of the sources and of the versions of torch and Python. So
only a change of a source builds again. `make clean` removes all of them.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType

import torch

ROOT = Path(__file__).parents[2]
SOURCES = Path(__file__).parent / "csrc"
OUT = ROOT / "out" / "device"
NAME = "_test_device"
_FLAGS = ["-O1", "-std=c++20", "-fvisibility=hidden", "-Wall", "-Wno-unused-parameter", "-Wno-stringop-overflow"]


def _key() -> str:
    """Return a hash of everything that the result depends on."""
    digest = hashlib.sha256(f"{torch.__version__} {sys.version} {_FLAGS}".encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def build() -> Path:
    """Return the path of the extension; compile it unless this was done before: a minute of processor time.

    Raises:
        RuntimeError: the sources do not compile, or the compiler or ninja is missing.
    """
    library = OUT / _key() / f"{NAME}.so"
    library.parent.mkdir(parents=True, exist_ok=True)
    with (library.parent / "build.lock").open("w") as held:  # one process compiles, and the others wait for it
        fcntl.flock(held, fcntl.LOCK_EX)
        if not library.exists():
            with TemporaryDirectory(dir=library.parent) as folder:
                _compile_apart(Path(folder))
                (Path(folder) / library.name).rename(library)
    return library


def _compile_apart(folder: Path) -> None:
    """Compile into a folder, in a process of its own: torch's function also loads the result, with all its kernels."""
    command = [sys.executable, "-m", "tests.device.build", str(folder)]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"  # ninja of the environment
    env = {**os.environ, "PATH": path}
    done = subprocess.run(command, cwd=ROOT, env=env, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(
            f"the test device was not built: its compilation ended with code {done.returncode}\n"
            f"{done.stdout}{done.stderr}\n"
            "fix: correct the sources in tests/device/csrc, if the compiler complains about them; else install g++ and "
            "ninja (`make setup`), or name another compiler in the environment variable CXX"
        )


def _compile(folder: Path) -> None:
    from torch.utils import cpp_extension  # takes long to import, and only a build needs it

    cpp_extension.load(
        NAME,
        [str(path) for path in sorted(SOURCES.glob("*.cpp"))],
        extra_cflags=_FLAGS,
        build_directory=str(folder),
        is_python_module=False,
    )


def load() -> ModuleType:
    """Return the extension module; importing it registers the device."""
    if NAME in sys.modules:
        return sys.modules[NAME]
    spec = importlib.util.spec_from_file_location(NAME, build())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[NAME] = module
    return module


if __name__ == "__main__":
    _compile(Path(sys.argv[1]))
