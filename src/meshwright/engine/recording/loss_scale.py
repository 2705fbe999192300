"""The loss scale of a static model, which its programs read and update, in the format of torch's `GradScaler`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from meshwright.graph import HELD, Scaling


class LossScale:
    """The factor of the loss, equal on every rank; training steps reduce it and increase it.

    `state_dict` has the format of a `torch.amp.GradScaler` with the same options, so each can resume from the other.
    """

    def __init__(self, scale: float, how: Scaling) -> None:
        self.how = how
        self._start: dict[str, float] = {"scale": scale, "growth": 0}
        self._held: dict[str, Tensor] = {}

    def get_scale(self) -> float:
        """Return the factor of the next step's loss."""
        return float(self._number("scale"))

    def held(self, key: str, device: str) -> Tensor:
        """Return the tensor that programs read and write: "scale", or "growth", the steps since the scale changed."""
        if key not in self._held:
            self._held[key] = torch.full((), self._start[key], dtype=HELD[key], device=device)
        return self._held[key]

    def state_dict(self) -> dict[str, Any]:
        return {
            "scale": self.get_scale(),
            "growth_factor": self.how.growth,
            "backoff_factor": self.how.backoff,
            "growth_interval": self.how.interval,
            "_growth_tracker": int(self._number("growth")),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the scale and the count of steps; the rules of the scale stay those of the strategy."""
        self._start = {"scale": float(state["scale"]), "growth": int(state["_growth_tracker"])}
        for key, x in self._held.items():
            x.fill_(self._start[key])

    def _number(self, key: str) -> float:
        return self._held[key].item() if key in self._held else self._start[key]
