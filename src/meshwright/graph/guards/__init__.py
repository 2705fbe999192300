"""Guards of a recorded program: comparisons of everything that Python code read while it was recorded.

In reading order:

    _trusted    libraries whose code is trusted: values that they read are not guarded
    _executed   the code that runs while a program is recorded
    _slots      slots (attributes, items, variables) that hold the values that code reads
    _kinds      kinds of objects, and the references that are followed from each
    _reach      all slots that code can read, starting from some roots
    _fast       fast comparison of all slots at once
    _guards     the guards of a program; detection of calls that change state each time
    _describe   text descriptions of values
"""

from ._describe import class_text, code_text, described
from ._executed import Executed, executed_code, observed, unobserved, unobserved_if_torchs
from ._guards import Comparison, Guards, side_effect, steady
from ._kinds import global_hooks
from ._reach import OPTIMIZER, OWN, STEP_HOOKS
from ._trusted import is_trusted, is_trusted_call

__all__ = [
    "OPTIMIZER", "OWN", "STEP_HOOKS", "Comparison", "Executed", "Guards", "class_text", "code_text", "described",
    "executed_code", "global_hooks", "is_trusted", "is_trusted_call", "observed", "side_effect", "steady",
    "unobserved", "unobserved_if_torchs",
]  # fmt: skip
