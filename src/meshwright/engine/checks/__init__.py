"""Checks before each update of an optimizer, on ranks that are processes.

Modules, in reading order:

- `_settings`: the available checks, and how often each is made
- `_tensors`: the parameters and states of an optimizer, by name
- `_numbers`: gradients that are not finite
- `_rhythm`: the steps at which replicas are compared
- `_first_values`: whole parameters that ranks have distributed, compared before the first update
- `_replicas`: parameters and states that are replicated on several ranks
- `_known_answers`: sums and products with known results, to tell a persistent fault from a transient one
- `_eager`: the checks before `optimizer.step()`
- `_static`: the checks around a static step, which may run twice
"""

from ._eager import before_step
from ._settings import StepChecks, check_steps
from ._static import StaticChecks

__all__ = ["StaticChecks", "StepChecks", "before_step", "check_steps"]
