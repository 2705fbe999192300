"""Guards of a recorded program: comparisons of everything that Python code read while it was recorded.

In reading order:

    trusted_libraries    libraries whose code is trusted: values that they read are not guarded
    executed             collection of the code that runs while a program is recorded
    kept_tensors         tensors that a captured pass leaves in attributes
    slots                slots that hold values read by code, with their stored values
    object_kinds         kinds of objects: which references are followed and which values are read
    reachable_slots      search for all slots that code can read, from some roots
    fast_comparison      comparison of all slots at once, by identity
    object_equivalence   test if two objects are alike wherever the code that ran can read
    guards               `Guards` of a program, and the check that a further call would do the same
    value_descriptions   texts by which another process can detect if its values are equal
"""

from .executed import Executed, executed_code, observed, unobserved, unobserved_if_torchs
from .fast_comparison import FastComparison
from .guards import Guards, PassComparison, ReadSlots, RepeatableCall, check_repeatable, side_effect
from .kept_tensors import check_not_kept
from .object_kinds import global_hooks
from .reachable_slots import OPTIMIZER, OWN, STEP_HOOKS
from .slots import is_plain
from .trusted_libraries import is_installed_file, is_trusted, is_trusted_call
from .value_descriptions import class_text, code_text, described

__all__ = [
    "OPTIMIZER",
    "OWN",
    "STEP_HOOKS",
    "Executed",
    "FastComparison",
    "Guards",
    "PassComparison",
    "ReadSlots",
    "RepeatableCall",
    "check_not_kept",
    "check_repeatable",
    "class_text",
    "code_text",
    "described",
    "executed_code",
    "global_hooks",
    "is_installed_file",
    "is_plain",
    "is_trusted",
    "is_trusted_call",
    "observed",
    "side_effect",
    "unobserved",
    "unobserved_if_torchs",
]  # fmt: skip
