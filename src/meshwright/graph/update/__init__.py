"""Recording of the update in a training step: the optimizer's own `step` runs on fake parameters.

In reading order:

    _twin           a copy of the optimizer, which runs the step
    _standing       redirection of the model's parameters to fake ones, so that hooks work on the fake ones
    _step_effects   check that a step with user code changes no other state
    _states         states during the recording of a step
    _recorded       the recorded step of some parameters
    _repeat         repetition of the update of one parameter for all parameters of its kind
    _first_states   states that are created before the first step
    _update         the update of all parameters
"""

from ._first_states import made_states, new_state
from ._recorded import runs_users_code
from ._states import lies_as
from ._twin import StateKey
from ._update import record_update

__all__ = ["StateKey", "lies_as", "made_states", "new_state", "record_update", "runs_users_code"]
