"""The command line: `meshwright --help` lists the commands.

Nothing here imports torch before a command runs, so that `--help` answers at once.

commands   find and run the command of a command line; one module for each command
console    parse command lines, read and write files, print answers, return exit codes
ranks      code that runs on each rank of `run`, `profile` and `doctor`
"""

from meshwright.cli.commands.main import main

__all__ = ["main"]
