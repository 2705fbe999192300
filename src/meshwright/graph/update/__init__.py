"""Recording of the update in a training step: the optimizer's own `step` runs on fake parameters.

In reading order:

    optimizer_copy          copy of the optimizer, which runs the step on fake parameters and states
    parameter_redirection   uses of the model's parameters are redirected to the fake ones, for hooks
    step_effects            check that a step with user code changes only tensors
    optimizer_states        states as inputs of the program, and a key for equal kinds of states
    known_steps             recorded steps for later models with equal parameters and options
    recorded_step           the recorded step of some parameters
    repeated_update         the update of one parameter, repeated for all parameters of its kind
    first_states            states that can be created before the first step
    optimizer_update        `record_update`: the update of all parameters
"""

from .first_states import made_states, new_state
from .optimizer_copy import StateKey
from .optimizer_states import unsharded_state_spec
from .optimizer_update import record_update
from .recorded_step import runs_users_code

__all__ = ["StateKey", "made_states", "new_state", "record_update", "runs_users_code", "unsharded_state_spec"]
