"""The base class of every error that Meshwright raises.

An error has four parts: what was asked, what was found, why that is not possible, and the fix.
Each package derives one class per cause; `docs/troubleshooting.md` has a paragraph for each.

    MeshwrightError
    ├── MeshError           a mesh that cannot exist, or a rank or axis that is not in it
    ├── PlacementError      a placement that the tensor or the mesh cannot have
    ├── LayoutError         a layout that contradicts itself, or text that is not one
    ├── InputError          a file or a text that a reader refuses: too large, too deep, not of its kind
    ├── PlatformError       a platform that cannot be registered
    └── (one subtree per package, named after its cause)
"""

from __future__ import annotations

import re

from ._escape import escaped

MOST_SHOWN = 20_000
"""Maximum number of printed characters of each part of an error."""


class MeshwrightError(Exception):
    """Root of all errors; prints what was asked, what was found, why not, and the fix.

    >>> print(MeshwrightError("Shard(3)", "a tensor of 2 dims", "dim 3 does not exist", "use Shard(0) or Shard(1)"))
    MeshwrightError: Shard(3)
      found: a tensor of 2 dims
      why:   dim 3 does not exist
      fix:   use Shard(0) or Shard(1)
    """

    def __init__(self, asked: str, found: str, why: str, write: str) -> None:
        super().__init__(asked, found, why, write)
        self.asked, self.found, self.why, self.write = asked, found, why, write

    def __str__(self) -> str:
        asked, found, why, write = map(_shown, (self.asked, self.found, self.why, self.write))
        return f"{type(self).__name__}: {asked}\n  found: {found}\n  why:   {why}\n  fix:   {write}"


def _shown(part: object) -> str:
    """Return the part with control characters escaped, truncated if it is very long, and further lines indented."""
    text = str(part)
    if len(text) > MOST_SHOWN:
        text = f"{text[:MOST_SHOWN]} ... ({len(text)} characters)"
    return _LINES.sub("\n    ", escaped(text, keep_lines=True))


_LINES = re.compile(r"\n {0,3}(?! )")


class MeshError(MeshwrightError, ValueError):
    """A mesh that cannot exist, or a rank or axis that is not in it."""


class PlacementError(MeshwrightError, ValueError):
    """A placement that the tensor or the mesh cannot have."""


class LayoutError(MeshwrightError, ValueError):
    """A layout that contradicts itself, or text that is not a layout."""


class InputError(MeshwrightError, ValueError):
    """A file or a text that a reader refuses: too large, nested too deep, not a regular file, or not of its kind."""


class PlatformError(MeshwrightError, ValueError):
    """A platform that cannot be used: a wrong field, a second one for a type, an incomplete transport, no device."""
