"""Checks before each update of an optimizer, on ranks that are processes.

step_checks        the available checks, and the frequency of each
named_tensors      the parameters and states of an optimizer, by name
finite_gradients   find gradients with elements that are not finite, and agree on them
comparison_steps   the steps at which replicas are compared, and the comparison
initial_values     compare the whole parameters that ranks distributed, before the first update
replicas           compare parts that several ranks hold, by sums of their bits
known_answers      compute sums and products with known results, to find a persistent fault
before_step        the checks before `optimizer.step()` in a user's own loop
static_checks      the checks around a step of a static program, which may be repeated
"""

from .before_step import before_step
from .static_checks import StaticChecks
from .step_checks import StepChecks, check_steps

__all__ = ["StaticChecks", "StepChecks", "before_step", "check_steps"]
