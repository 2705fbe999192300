"""`write_toml`: plain values as a text in TOML."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import tomli_w

from ._errors import InputError


def write_toml(values: Mapping[str, object], comments: Iterable[str] = ()) -> str:
    """Return values as TOML that `read_toml` reads, with lines of comments before them.

    Raises:
        InputError: a value is no number, text, truth value, list or mapping, and so TOML cannot hold it.

    >>> print(write_toml({"zero": 1, "mesh": {"dp": 2}}, ["a plan"]), end="")
    # a plan
    zero = 1
    <BLANKLINE>
    [mesh]
    dp = 2
    """
    head = "".join(f"# {''.join(c if c.isprintable() else ' ' for c in comment)}\n" for comment in comments)
    try:
        return head + tomli_w.dumps(values)
    except TypeError as error:
        raise InputError(
            "a text in TOML",
            str(error),
            "TOML holds numbers, texts, truth values, and lists and tables of them",
            "use a value of such a type",
        ) from error
