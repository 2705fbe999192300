"""What the reference shows of the source, and its docstrings as Markdown; `make docs` reads the source with it."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Module, Object

_EXAMPLE = re.compile(r"^ *>>> .*\n?(?:(?!\n).+\n?)*", re.MULTILINE)

LONGEST_VALUE = 100


class ReferenceNames(Extension):
    """Leaves out what says nothing more, and fences the examples of docstrings."""

    def on_package(self, *, pkg: Module, **kwargs: Any) -> None:
        tidy(pkg)
        for room in pkg.modules.values():
            if room.exports:
                room.exports = [name for name in room.exports if not is_at_the_door(pkg, room, str(name))]


def is_at_the_door(door: Module, room: Module, name: str) -> bool:
    """Whether `name` of a room is what `import meshwright` gives by that name; it has its place there."""
    given = door.members.get(name)
    if given is None:
        return False
    return given.target_path == f"{room.path}.{name}" if given.is_alias else given.is_module


def tidy(inside: Object) -> None:
    if inside.docstring is not None:
        inside.docstring.value = fenced(inside.docstring.value)
    if inside.is_attribute and len(str(inside.value)) > LONGEST_VALUE:
        inside.value = None
    for name, member in list(inside.members.items()):
        if member.is_alias:
            continue
        if says_nothing(member, inside):
            inside.del_member(name)
        else:
            tidy(member)


def says_nothing(member: Object, inside: Object) -> bool:
    """Whether a member of a class is of Python's own making, or told by the signature of its class."""
    if not inside.is_class or member.has_docstring:
        return False
    if member.name.startswith("__"):
        return member.name not in ("__new__", "__init__")
    is_dataclass = any("dataclass" in str(decorator.value) for decorator in inside.decorators)
    return is_dataclass and member.is_attribute and "property" not in member.labels


def fenced(text: str) -> str:
    r"""The text with its examples, each up to the next empty line, in fences.

    >>> print(fenced("A fact.\n\n>>> 1 + 1\n2\n"))
    A fact.
    <BLANKLINE>
    ```pycon
    >>> 1 + 1
    2
    ```
    """
    return _EXAMPLE.sub(lambda found: f"```pycon\n{found[0].rstrip()}\n```\n", text).rstrip()
