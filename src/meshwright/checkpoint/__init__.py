"""Checkpoints: files, and the names and layouts of the tensors in them. Loaded into any other layout or mesh."""

from ._catalogue import Catalogue, Entry, FileFacts, Piece
from ._convert import convert
from ._errors import CheckpointError, CheckpointFileError
from ._format import Format
from ._load import load, read_whole
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
    "Entry",
    "FileFacts",
    "Format",
    "Held",
    "Piece",
    "Saving",
    "World",
    "convert",
    "decoded",
    "encoded",
    "format_of",
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
