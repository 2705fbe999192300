"""Checkpoints: files with tensors, their names and layouts, which can be loaded into any other layout or mesh."""

from ._catalogue import Catalogue, Entry, FileFacts, Piece
from ._convert import convert
from ._errors import (
    CheckpointError,
    CheckpointFileError,
    CheckpointWarning,
    FolderInUseError,
    ReadTimeoutError,
    WriteTimeoutError,
)
from ._fit import LoadReport
from ._format import Format
from ._load import load, read_whole
from ._lock import hold_folder
from ._open import FORMATS, format_of, open_checkpoint, open_together, verify
from ._save import Saving, save
from ._state import Held
from ._steps import latest, step_name, steps_in
from ._values import decoded, encoded
from ._world import World, world

__all__ = [
    "FORMATS",
    "Catalogue",
    "CheckpointError",
    "CheckpointFileError",
    "CheckpointWarning",
    "Entry",
    "FileFacts",
    "FolderInUseError",
    "Format",
    "Held",
    "LoadReport",
    "Piece",
    "ReadTimeoutError",
    "Saving",
    "World",
    "WriteTimeoutError",
    "convert",
    "decoded",
    "encoded",
    "format_of",
    "hold_folder",
    "latest",
    "load",
    "open_checkpoint",
    "open_together",
    "read_whole",
    "save",
    "step_name",
    "steps_in",
    "verify",
    "world",
]
