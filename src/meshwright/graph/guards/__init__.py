"""Guards of a recorded program: comparisons of everything that Python code read while it was recorded.

In reading order:

    _trusted    libraries whose code is trusted: values that they read are not guarded
    _executed   the code that runs while a program is recorded
    _slots      places that hold what code reads, and their values
    _kinds      kinds of objects, and what is followed of each
    _reach      every place that code can read, from some roots
    _fast       all places compared at once
    _twins      objects that are alike wherever code can read
    _guards     the guards of a program; calls that change something each time
    _describe   texts for values
"""

from ._describe import class_text, code_text, described
from ._executed import Executed, executed_code, observed, unobserved, unobserved_if_torchs
from ._guards import Comparison, Guards, Places, side_effect, steady
from ._kinds import global_hooks
from ._reach import OPTIMIZER, OWN, STEP_HOOKS
from ._slots import is_plain
from ._trusted import is_trusted, is_trusted_call

__all__ = [
    "OPTIMIZER", "OWN", "STEP_HOOKS", "Comparison", "Executed", "Guards", "Places", "class_text", "code_text",
    "described", "executed_code", "global_hooks", "is_plain", "is_trusted", "is_trusted_call", "observed",
    "side_effect", "steady", "unobserved", "unobserved_if_torchs",
]  # fmt: skip
