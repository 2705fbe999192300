"""Program files: one safetensors file holds the program as JSON text and its constants as tensors.

A file is written under a temporary name in the same directory, and renamed once it is complete. A reader verifies the
checksum and looks up every name in a table: reading a file runs no code.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping
from hashlib import sha256
from typing import TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from meshwright.layout import InputError, JsonValue, MeshwrightError, read_file, read_json, write_whole

from .._errors import ProgramFileError
from ..analysis.verify import verify
from ..program.program import Program
from .admitted_operators import libraries_of
from .decode import Decoder
from .encode import program_data

KIND = "meshwright program"
LONGEST = 48 * 2**20
"""Maximum size of a file's header in bytes. The header holds the program as an escaped JSON string."""
MOST_PROGRAM = 24 * 2**20
"""Maximum length of a program as JSON, in characters."""
MOST_VALUES = 2_000_000
"""Maximum number of values in a program as JSON."""
DEPTH = 128
"""Maximum nesting depth of a program as JSON."""
MOST_FILE = 4 * 2**30
"""Maximum size of a file in bytes, constants included."""

T = TypeVar("T")
FilePath = str | os.PathLike[str]


def save_program(program: Program, path: FilePath, read_back: bool = True) -> str:
    """Write the program and its constants to one file; return the file's checksum.

    With `read_back`, the text is decoded before it is written, to make sure that it can be read.

    Raises:
        ProgramFileError: the program contains Python code that is in no table, or is too large. No file is written.
    """
    program_as_data, tensors = program_data(program)
    text = json.dumps(program_as_data, allow_nan=False, separators=(",", ":"))
    if read_back:
        decoded(path, text, tensors, libraries_of([node.op for node in program.nodes]))
    checksum = _checksum(text, tensors)
    metadata = {"kind": KIND, "program": text, "sha256": checksum}
    data = save(tensors, metadata)
    if int.from_bytes(data[:8], "little") > LONGEST or len(text) > MOST_PROGRAM or len(data) > MOST_FILE:
        raise ProgramFileError(
            "saving a program",
            f"a text of {len(text)} characters, a file of {len(data)} bytes",
            f"the text may have at most {MOST_PROGRAM} characters, and the file at most {MOST_FILE} bytes",
            "save smaller programs, such as one for each layer of the model",
        )
    write_whole(path, data)
    return checksum


def _decode_each(checksum: str, decode: Callable[[], Program]) -> Program:
    return decode()


def load_program(
    path: FilePath,
    share: Callable[[str, Callable[[], Program]], Program] = _decode_each,
    operators: Collection[str] = (),
) -> Program:
    """Return the program in a file that `save_program` wrote.

    The program may use operators of torch that are functions of tensors (`admitted_operators.py`), and the given
    `operators` of other libraries: "mylib" for a whole library, or "mylib.scale" for one operator.
    `share(checksum, decode)` returns `decode()`, or the program that was decoded before for this checksum.

    Raises:
        ProgramFileError: the file holds no valid program.
    """
    metadata, tensors = _read(path)
    text = metadata["program"]
    if not isinstance(text, str) or _checksum(text, tensors) != metadata["sha256"]:
        raise program_file_error(path, "its checksum does not match: the file was changed, or not copied completely")
    return share(metadata["sha256"], lambda: decoded(path, text, tensors, operators))


def decoded(path: FilePath, text: str, tensors: Mapping[str, Tensor], operators: Collection[str] = ()) -> Program:
    """Return the program that the JSON text describes. Raises ProgramFileError for any other text."""

    def decode() -> Program:
        data = read_json(text, MOST_PROGRAM, MOST_VALUES, DEPTH)
        return verify(Decoder(tensors, operators).program(data))

    return convert_file_errors(path, decode)


def convert_file_errors(path: FilePath, act: Callable[[], T]) -> T:
    """Return `act()`. Errors that it raises for malformed data are converted to ProgramFileError."""
    try:
        return act()
    except MeshwrightError as error:
        raise program_file_error(path, f"{error.asked}: {error.found}: {error.why}") from error
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError, AssertionError) as error:
        raise program_file_error(path, str(error).split("\n")[0] or type(error).__name__) from error


def program_file_error(path: FilePath, why: str) -> ProgramFileError:
    return ProgramFileError(
        f"loading {os.fspath(path)}",
        "no readable program",
        why,
        "pass a file that save_program wrote with this version of Meshwright or an older one",
    )


def _read(path: FilePath) -> tuple[dict[str, JsonValue], dict[str, Tensor]]:
    """Return the metadata and the tensors of a file. Raises ProgramFileError if it is no program file."""
    try:
        data = read_file(path, MOST_FILE)
        length = int.from_bytes(data[:8], "little")
        if length > LONGEST:
            raise program_file_error(
                path, f"its header has {length} bytes, but that of a program has at most {LONGEST}"
            )
        tensors = load(data)
    except InputError as error:
        raise program_file_error(path, f"{error.found}: {error.why}") from error
    except (SafetensorError, ValueError, RuntimeError, OverflowError) as error:
        raise program_file_error(path, str(error)) from error
    metadata: JsonValue = convert_file_errors(path, lambda: read_json(data[8 : 8 + length], LONGEST)).get(
        "__metadata__"
    )
    if metadata is None or metadata.get("kind") != KIND or not metadata.keys() >= {"program", "sha256"}:
        raise program_file_error(path, "it is a safetensors file without a program")
    return metadata, tensors


def _checksum(text: str, tensors: Mapping[str, Tensor]) -> str:
    """Return the sha256 of the text and of all tensors: names, dtypes, shapes and elements."""
    found = sha256(text.encode())
    for name in sorted(tensors):
        x = tensors[name]
        found.update(f"\n{name} {x.dtype} {tuple(x.shape)}\n".encode())
        found.update(x.reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
