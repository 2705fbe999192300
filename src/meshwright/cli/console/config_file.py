"""Read the settings of a command from a file: TOML, or a Python function that returns them."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from difflib import get_close_matches
from typing import Any

from meshwright.cli.console.parser import AXES, Parser, UsageError
from meshwright.cli.console.user_function import call_function, names_function
from meshwright.layout import InputError, read_text_file, read_toml

_FILE = "pass a TOML file, or file.py:function"
SAME = {"sequence": "seq"}
"""Names of fields → names of options with the same meaning, for commands that have only the latter."""


def with_config(parser: Parser, words: Sequence[str]) -> None:
    """Make the settings of the `--config` file the defaults of the parser's options; the command line overrides them.

    Raises:
        UsageError: the command has no such option (the message names the closest match), or a value is invalid.
    """
    source = _config_argument(words)
    if source is None:
        return
    taken = {word.partition("=")[0] for word in words}
    found = read_config(source)
    for name, value in found.items():
        action = _action(parser, source, name)
        if twice := parser.rivals(action) & {f"--{other}" for other in found}:
            why = f"{source}: {name} is not allowed with {twice.pop()}"
            raise UsageError(f"{parser.prog}: {why}\n  fix: pass one of them")
        if not parser.rivals(action) & taken:
            _set_default(parser, action, _value(parser, source, action, value))


def _action(parser: Parser, source: str, name: str) -> argparse.Action:
    """Return the option of that name. Raises UsageError if there is none."""
    known = {action.dest: action for action in parser.actions if action.dest not in ("help", "config")}
    plain = name.replace("-", "_")
    found = known.get(plain) or known.get(SAME.get(plain, ""))
    if found is None:
        near = get_close_matches(plain, known, n=1, cutoff=0.0)[0].replace("_", "-")
        raise UsageError(f"{parser.prog}: {source}: there is no option {name}\n  fix: write {near}")
    return found


def _set_default(parser: Parser, action: argparse.Action, value: Any) -> None:
    """Make the value the option's default; for a flag that is set, add a `--no-` option to take it back."""
    action.default, action.required = value, False
    if not action.option_strings:
        action.nargs = "?"
    if value is True:
        name = action.dest.replace("_", "-")
        parser.add_argument(
            f"--no-{name}", dest=action.dest, action="store_false", default=True, help=argparse.SUPPRESS
        )


def _config_argument(words: Sequence[str]) -> str | None:
    """Return the argument of `--config`, or None."""
    for at, word in enumerate(words):
        if word.startswith("--config="):
            return word.partition("=")[2]
        if word == "--config" and at + 1 < len(words):
            return words[at + 1]
    return None


def read_config(source: str) -> dict[str, Any]:
    """Return names and values: of a TOML file, or of the dataclass or mapping that `file.py:function` returns."""
    if names_function(source):
        return flat_settings(call_function(source), source)
    try:
        return flat_settings(read_toml(read_text_file(source)), source)
    except InputError as error:
        fix = "write lines of TOML, such as steps = 100" if "TOML" in error.asked else _FILE
        raise UsageError(f"meshwright: {source}: {error.found}\n  why: {error.why}\n  fix: {fix}") from error


def flat_settings(value: Any, source: str) -> dict[str, Any]:
    """Return names and values: of a mapping, or of a dataclass's non-default fields, nested ones too.

    >>> flat_settings({"steps": 3, "mesh": {"dp": 2}}, "a.toml")
    {'steps': 3, 'mesh': {'dp': 2}}
    """
    if isinstance(value, Mapping):
        return {str(name): x for name, x in value.items()}
    if not is_dataclass(value) or isinstance(value, type):
        raise UsageError(
            f"meshwright: {source} returns a {type(value).__name__}\n  fix: return a dataclass, or a dict of options"
        )
    found: dict[str, Any] = {}
    for field in fields(value):
        held = getattr(value, field.name)
        usual = field.default_factory() if field.default_factory is not MISSING else field.default
        if is_dataclass(held):
            found |= flat_settings(held, source)
        elif held != usual:
            found[field.name] = held
    return found


def _value(parser: Parser, source: str, action: argparse.Action, value: Any) -> Any:
    """Return the value as the command line would parse it. Raises UsageError for an invalid one."""
    if isinstance(action.const, bool):
        if isinstance(value, bool):
            return value
        found = f"{source}: {action.dest} = {value!r}"
        raise UsageError(f"{parser.prog}: {found}\n  fix: write {action.dest} = true, or false")
    if action.dest == "mesh" and isinstance(value, (list, tuple)) and len(value) == len(AXES):
        value = dict(zip(AXES, value, strict=True))
    text = _as_argument(value)
    try:
        made = action.type(text) if callable(action.type) else text
    except (argparse.ArgumentTypeError, ValueError) as error:
        raise UsageError(
            f"{parser.prog}: {source}: {action.dest} = {value!r}: {error}\n  fix: see {parser.prog} --help"
        ) from error
    if action.choices is not None and made not in action.choices:
        raise UsageError(
            f"{parser.prog}: {source}: {action.dest} = {value!r}\n  fix: pass one of {', '.join(action.choices)}"
        )
    return made


def _as_argument(value: Any) -> str:
    """Return a value as it is written on a command line.

    >>> _as_argument({"dp": 2, "tp": 4}), _as_argument([1, 2]), _as_argument(True)
    ('dp=2,tp=4', '1,2', 'true')
    """
    if isinstance(value, Mapping):
        return ",".join(f"{name}={_as_argument(x)}" for name, x in value.items())
    if isinstance(value, (list, tuple)):
        return ",".join(map(_as_argument, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
