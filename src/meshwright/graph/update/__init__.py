"""The update in a recorded step: an optimizer's own `step` on fake parameters, as part of a program.

In reading order:

    _twin           a copy of the optimizer, which makes the step
    _standing       parameters of the model that stand in for fake ones, so that hooks work on those
    _step_effects   what a step with code of the user may not change
    _states         states while a step is recorded
    _recorded       the recorded step of some parameters
    _repeat         the update of one parameter, repeated for all of its kind
    _first_states   states that are made before the first step
    _update         the update of all parameters
"""

from ._first_states import made_states, new_state
from ._recorded import runs_users_code
from ._states import lies_as
from ._twin import StateKey
from ._update import record_update

__all__ = ["StateKey", "lies_as", "made_states", "new_state", "record_update", "runs_users_code"]
