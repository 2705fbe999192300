"""Check on simulated ranks that all ranks pass parts of one tensor to `from_local`.

Processes detect this at the first collective, by the number of the tensor (`computation_numbers`).
"""

from __future__ import annotations

from meshwright.comm import SimulatedCommunicator, current_communicator
from meshwright.layout import Spec

from .._errors import LocalShapeError

_MADE = "tensors made of parts"


def check_same_on_ranks(spec: Spec) -> None:
    """Raise LocalShapeError if another simulated rank, in the same call, made parts of another tensor."""
    here = current_communicator()
    if not isinstance(here, SimulatedCommunicator) or here.size == 1:
        return
    key = (_MADE, spec.mesh, here.rank)
    count = here.shared[key] = here.shared.get(key, 0) + 1
    call = (_MADE, spec.mesh, "call", count)
    other, seen = here.shared.pop(call, (spec, 0))
    if seen + 1 < spec.mesh.size:
        here.shared[call] = (other, seen + 1)
    if other.shape != spec.shape or other.dtype != spec.dtype:
        raise LocalShapeError(
            f"from_local on rank {here.rank}",
            f"{spec!r} here, and {other!r} on another rank",
            "without a global shape, every rank must give a part of the same shape and dtype",
            "pass shape=(…), the global shape, if parts are uneven",
        )
