"""The figures that this project promises, each measured by `python -m benchmarks NAME`.

A benchmark is a module with `run(quick: bool = False) -> dict`. The dict has

    value     what was measured: a number, or a dict of named numbers
    goal      what was promised, in words
    ok        whether the promise is kept
    rival     optional: the rival's value from the same run, or {"name": ..., "value": ...}
    details   optional: anything else

and its docstring's first line says what is measured.
"""

import os

os.environ.setdefault("MESHWRIGHT_PROGRAMS", "off")  # what an earlier run recorded is not what this one finds
