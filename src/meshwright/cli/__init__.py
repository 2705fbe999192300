"""The command line: `meshwright --help` lists the commands.

Nothing here imports torch before a command runs, so that `--help` answers at once.
"""

from meshwright.cli._main import main

__all__ = ["main"]
