"""Benchmarks: each figure is measured by `python -m benchmarks NAME`.

A benchmark is a module with `run(quick: bool = False) -> dict`. The dict has

    value     the measured number, or a dict of named numbers
    goal      the goal, in words
    ok        True if the goal is reached
    rival     optional: the rival's value from the same run, or {"name": ..., "value": ...}
    details   optional: anything else

The first line of the module's docstring says what is measured.
"""

import os

os.environ.setdefault("MESHWRIGHT_PROGRAMS", "off")  # do not load programs that an earlier run recorded
