"""Build of the C++ part, and its import.

The result is kept in `out/device/KEY`, where KEY is a hash of the sources and of the versions of torch and Python. So
only a change of a source builds again.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import torch

SOURCES = Path(__file__).parent / "csrc"
OUT = Path(__file__).parents[2] / "out" / "device"
NAME = "_test_device"
_FLAGS = ["-O1", "-std=c++20", "-fvisibility=hidden", "-Wall", "-Wno-unused-parameter", "-Wno-stringop-overflow"]


def _key() -> str:
    """Return a hash of everything that the result depends on."""
    digest = hashlib.sha256(f"{torch.__version__} {sys.version} {_FLAGS}".encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def build() -> Path:
    """Return the path of the extension; compile it unless this was done before. Takes less than a minute."""
    folder = OUT / _key()
    library = folder / f"{NAME}.so"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "build.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            _compile(folder)
            (folder / "done").touch()
    return library


def _compile(folder: Path) -> None:
    from torch.utils import cpp_extension  # takes long to import, and only a build needs it

    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # ninja of the environment
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
