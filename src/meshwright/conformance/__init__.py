"""Conformance: judge a device by checks that anybody can run.

A check compares the device with the CPU, or ranks on the device with one device. Checks run in processes of their own,
so a check that hangs or crashes costs only itself.

results   checks and their results, as data
checks    the checks of each level
workers   processes that run checks
"""

from .checks.level_table import CHECKS, LEVELS
from .checks.operators import GONE as GONE_OPERATORS
from .checks.operators import OperatorCall, build_call, operator_named, sample_lines
from .results.check import Check, NotRun, Target, WrongResult
from .results.latest import LatestResult, keep_results, latest_results
from .results.result import Facts, Report, Result
from .results.uses import Use, uses_of
from .workers.supervisor import Options, counted, run_checks

__all__ = [
    "CHECKS",
    "GONE_OPERATORS",
    "LEVELS",
    "Check",
    "Facts",
    "LatestResult",
    "NotRun",
    "OperatorCall",
    "Options",
    "Report",
    "Result",
    "Target",
    "Use",
    "WrongResult",
    "build_call",
    "counted",
    "keep_results",
    "latest_results",
    "operator_named",
    "run_checks",
    "sample_lines",
    "uses_of",
]
