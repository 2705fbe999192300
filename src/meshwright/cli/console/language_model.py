"""The model, the text and the tokenizer that a command line names; torch is imported when a command needs it."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from meshwright.cli.console.files import read_object, read_text
from meshwright.cli.console.parser import UsageError
from meshwright.cli.console.user_function import call_function, names_function

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template.jinja", "generation_config.json",
)  # fmt: skip
"""The files beside a model's weights that a program needs to generate text."""
BYTES = 256
"""Number of tokens if each byte of a text is one."""
WRITE = "  fix: pass a folder with config.json and safetensors files, or file.py:function, which returns a module"


def build_model(path: str, empty: bool = False) -> Any:
    """Return the module of a folder of transformers, or of `file.py:function`; an `empty` one is on the meta device.

    A function may return a tuple whose first element is the module. The random numbers of its weights have the seed 0.

    Raises:
        UsageError: there is no model.
        FunctionFailed: the function raised an error.
    """
    if not names_function(path):
        return _empty_of_folder(path) if empty else _of_folder(path)
    import torch

    torch.manual_seed(0)
    made = call_function(path)
    model = made[0] if isinstance(made, tuple) and made else made
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"meshwright quantize: {path} returns a {type(made).__name__}\n{WRITE}")
    return model


def _empty_of_folder(folder: str) -> Any:
    import torch

    classes = _classes(folder)
    config = _from(folder, lambda: classes.AutoConfig.from_pretrained(folder, local_files_only=True))
    with torch.device("meta"):
        return _from(folder, lambda: classes.AutoModelForCausalLM.from_config(config))


def _of_folder(folder: str) -> Any:
    classes = _classes(folder)
    read = classes.AutoModelForCausalLM.from_pretrained
    return _from(folder, lambda: read(folder, dtype="auto", local_files_only=True))


def _classes(folder: str) -> Any:
    """Return the package transformers; raise UsageError if there is no model that may be quantized."""
    if not Path(folder).is_dir():
        raise UsageError(f"meshwright quantize: {folder}: there is no such folder\n{WRITE}")
    config = read_object(str(Path(folder) / "config.json"), WRITE.strip().removeprefix("fix: "))
    if "quantization_config" in config:
        raise UsageError(
            f"meshwright quantize: the model in {folder} is quantized already\n"
            "  fix: pass the folder of the original model"
        )
    try:
        import transformers
    except ImportError as error:
        raise UsageError(
            "meshwright quantize: the package transformers, which defines the modules, is missing\n"
            "  fix: run pip install 'meshwright[hf]', or pass file.py:function"
        ) from error
    transformers.utils.logging.disable_progress_bar()
    return transformers


def _from(folder: str, read: Any) -> Any:
    """Return what transformers reads from a folder."""
    try:
        return read()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        said = (str(error).splitlines() or [type(error).__name__])[0]
        raise UsageError(f"meshwright quantize: {folder}: {said}\n{WRITE}") from error


def read_batches(settings: argparse.Namespace) -> list[Any]:
    """Return the batches of `--data`: those of a function, or the sequences of a text, each a tensor [1, sequence].

    Raises:
        UsageError: the file does not exist, or has too little text.
        FunctionFailed: the function raised an error.
    """
    if names_function(settings.data):
        made = call_function(settings.data)
        if not isinstance(made, Iterable) or isinstance(made, (str, bytes, dict)):
            raise UsageError(
                f"meshwright quantize: {settings.data} returns a {type(made).__name__}\n"
                "  fix: return a list of batches: tensors, tuples of arguments, or dicts of keyword arguments"
            )
        found = list(made)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
        return _enough(found, settings.data, "batches", "return at least two batches")
    import torch

    tokens = torch.tensor(_tokens(settings.model, read_text(settings.data)), dtype=torch.long, device="cpu")
    length = settings.sequence
    found = [tokens[at : at + length].unsqueeze(0) for at in range(0, len(tokens) - length + 1, length)]
    what = f"sequences of {length} tokens ({len(tokens)} tokens in all)"
    return _enough(found, settings.data, what, "pass a longer text, or a smaller --sequence")


def _enough(batches: list[Any], path: str, what: str, fix: str) -> list[Any]:
    """Return the batches. Raises UsageError for fewer than two: one is for calibration, one for the perplexity."""
    if len(batches) < 2:
        raise UsageError(
            f"meshwright quantize: {path}: {len(batches)} {what}\n"
            f"  why: one batch is for calibration, and another one for the perplexity\n  fix: {fix}"
        )
    return batches


def _tokens(model: str, text: str) -> list[int]:
    """Return the tokens of a text, by the tokenizer in the model's folder; without one, the bytes."""
    folder = Path(model)
    if names_function(model) or not any((folder / name).is_file() for name in TOKENIZER_FILES[:3]):
        return list(text.encode())
    classes = _classes(model)
    tokenizer = _from(model, lambda: classes.AutoTokenizer.from_pretrained(model, local_files_only=True))
    return tokenizer(text, verbose=False)["input_ids"]


def files_beside(model: str) -> dict[str, bytes]:
    """Return the files of the tokenizer in the model's folder by name."""
    if names_function(model):
        return {}
    found = [Path(model) / name for name in TOKENIZER_FILES]
    return {path.name: path.read_bytes() for path in found if path.is_file()}
