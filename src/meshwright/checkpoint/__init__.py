"""Checkpoints: files with tensors, their names and layouts, which can be loaded into any other layout or mesh.

files        file operations, JSON, pickles and archives, with bounds on time and memory
contents     tensors of a checkpoint, their parts, and the ranks that hold them
formats      Meshwright's format, safetensors of model hubs, and torch's distributed checkpoints
operations   save, load, open, verify and convert a checkpoint
"""

from ._errors import (
    CheckpointError,
    CheckpointFileError,
    CheckpointWarning,
    FolderInUseError,
    NewerFormatError,
    ReadTimeoutError,
    WriteTimeoutError,
)
from .contents.catalogue import Catalogue, FileFacts, TensorEntry, TensorPiece
from .contents.rank_world import World, current_world
from .files.file_operations import write_seconds
from .files.json_values import decode_value, encode_value
from .formats.format_interface import Format, SaveJob, write_new
from .formats.saved_state import HeldTensor
from .operations.convert import convert
from .operations.folder_lock import hold_folder
from .operations.load import load, read_whole
from .operations.open_checkpoint import FORMATS, format_of, open_checkpoint, open_together, verify
from .operations.save import Saving, save
from .operations.state_differences import LoadReport, difference_of
from .operations.step_folders import is_step, latest_step, step_name, steps_in

__all__ = [
    "FORMATS",
    "Catalogue",
    "CheckpointError",
    "CheckpointFileError",
    "CheckpointWarning",
    "FileFacts",
    "FolderInUseError",
    "Format",
    "HeldTensor",
    "LoadReport",
    "NewerFormatError",
    "ReadTimeoutError",
    "SaveJob",
    "Saving",
    "TensorEntry",
    "TensorPiece",
    "World",
    "WriteTimeoutError",
    "convert",
    "current_world",
    "decode_value",
    "difference_of",
    "encode_value",
    "format_of",
    "hold_folder",
    "is_step",
    "latest_step",
    "load",
    "open_checkpoint",
    "open_together",
    "read_whole",
    "save",
    "step_name",
    "steps_in",
    "verify",
    "write_new",
    "write_seconds",
]
