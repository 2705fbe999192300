"""What is looked at before each update of an optimizer, on ranks that are processes.

Modules, in reading order:

- `_settings`: which checks there are, and how often each is made
- `_tensors`: the parameters and states of an optimizer, by name
- `_numbers`: gradients that are not finite
- `_replicas`: parameters and states of which several ranks hold the same
- `_known_answers`: sums and products whose results are known, by which a lasting fault is told from a passing one
- `_eager`: the checks before `optimizer.step()`
- `_static`: the checks around a static step, which may run twice
"""

from ._eager import before_step
from ._settings import StepChecks, check_steps
from ._static import StaticChecks

__all__ = ["StaticChecks", "StepChecks", "before_step", "check_steps"]
