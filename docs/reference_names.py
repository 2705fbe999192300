"""Extension of griffe that selects the names in the reference and turns docstrings into Markdown, for `make docs`."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Module, Object

_NAME = re.compile(r"(?!None$|True$|False$|inf$)[A-Za-z_][\w.]*")
_PRIVATE = re.compile(r"(?:\w+\.)*_[a-zA-Z]\w*(?:\.\w+)*")
_EXAMPLE = re.compile(r"^ *>>> .*\n?(?:(?!\n).+\n?)*", re.MULTILINE)

LONGEST_VALUE = 100


class ReferenceNames(Extension):
    """Remove names and values that a reader does not need, and fence the examples of docstrings."""

    def on_package(self, *, pkg: Module, **kwargs: Any) -> None:
        tidy(pkg)
        for package in pkg.modules.values():
            if package.exports:
                package.exports = [name for name in package.exports if not is_public(pkg, package, str(name))]


def is_public(top: Module, package: Module, name: str) -> bool:
    """True if `name` of a package is the name in `meshwright` itself, whose pages document it."""
    given = top.members.get(name)
    if given is None:
        return False
    return given.target_path == f"{package.path}.{name}" if given.is_alias else given.is_module


def tidy(inside: Object) -> None:
    if inside.docstring is not None:
        inside.docstring.value = fenced(inside.docstring.value)
    if inside.is_attribute and hides_value(str(inside.value), is_of_object=inside.parent.is_class):
        inside.value = None
    for name, member in list(inside.members.items()):
        if member.is_alias:
            continue
        if says_nothing(member, inside):
            inside.del_member(name)
        else:
            tidy(member)


def hides_value(value: str, is_of_object: bool) -> bool:
    """True if the value of an attribute tells a reader nothing: it is long, private, or the name of an argument.

    >>> hides_value("out_shapes", is_of_object=True), hides_value("inf", is_of_object=True)
    (True, False)
    >>> hides_value("_sources.get", is_of_object=False), hides_value("RowwiseParallel", is_of_object=False)
    (True, False)
    """
    if len(value) > LONGEST_VALUE or _PRIVATE.fullmatch(value):
        return True
    return is_of_object and _NAME.fullmatch(value) is not None


def says_nothing(member: Object, inside: Object) -> bool:
    """True if a member of a class is made by Python, or is part of the signature of its class."""
    if not inside.is_class or member.has_docstring:
        return False
    if member.name.startswith("__"):
        return member.name not in ("__new__", "__init__")
    is_dataclass = any("dataclass" in str(decorator.value) for decorator in inside.decorators)
    return is_dataclass and member.is_attribute and "property" not in member.labels


def fenced(text: str) -> str:
    r"""Return the text with its examples, each up to the next empty line, in fences.

    >>> print(fenced("A fact.\n\n>>> 1 + 1\n2\n"))
    A fact.
    <BLANKLINE>
    ```pycon
    >>> 1 + 1
    2
    ```
    """
    return _EXAMPLE.sub(lambda found: f"```pycon\n{found[0].rstrip()}\n```\n", text).rstrip()
