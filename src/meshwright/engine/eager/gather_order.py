"""The order in which units of parameters are used: it says which units stay whole, and which one is gathered next.

At most two units are whole at once, apart from those that are used around the current one: the current unit, and the
one that is gathered ahead. The prediction is the order of the step before, in the forward and in the backward pass.
All ranks make the same predictions, since they run the same modules.
"""

from __future__ import annotations

from typing import Protocol

import torch

from meshwright.tensor import in_backward

from ..torch_hooks import call_after_backward

_MOST_USES = 10_000
"""Uses of a pass that are recorded; passes without an end would fill the memory."""


class GatheredUnit(Protocol):
    """Parameters that are gathered together."""

    around: tuple[GatheredUnit, ...]
    """The units that were in use when the latest forward pass began to use this one."""

    @property
    def is_open(self) -> bool:
        """True while the modules of the unit run."""
        ...

    def start(self) -> None:
        """Begin to gather, unless the unit is whole or on its way."""
        ...

    def gather(self) -> None:
        """Gather the unit, unless it is whole and its parameters were not written to since."""
        ...

    def free(self) -> None:
        """Drop the gathered parameters."""
        ...

    def close(self) -> None:
        """Give modules that have run their own parameters back."""
        ...


class UseSequence:
    """The units used in one direction, in this step and in the one before."""

    def __init__(self) -> None:
        self._last: list[GatheredUnit] = []
        self._now: list[GatheredUnit] = []
        self._matches = True

    def begin(self) -> None:
        """Begin a step; a step without uses does not count."""
        if self._now:
            self._last, self._now = self._now, []
        self._matches = True

    def add(self, unit: GatheredUnit) -> GatheredUnit | None:
        """Record a use. Return the unit that followed in the last step; None if the steps differ so far."""
        at = len(self._now)
        if at < _MOST_USES:
            self._now.append(unit)
        self._matches = self._matches and at < len(self._last) and self._last[at] is unit
        return self._last[at + 1] if self._matches and at + 1 < len(self._last) else None


class GatherOrder:
    """The units of a model that are whole or on their way, and the order of their uses."""

    def __init__(self) -> None:
        self._forward, self._backward = UseSequence(), UseSequence()
        self._whole: list[GatheredUnit] = []
        self._current: GatheredUnit | None = None
        self._closed: GatheredUnit | None = None
        self._is_watching = False
        self._depth = 0

    @property
    def is_running(self) -> bool:
        """True while the model runs."""
        return self._depth > 0

    def before_model(self, *_: object) -> None:
        """Begin the forward pass of a step: nothing stays whole from the step before."""
        self._depth += 1
        if self._depth > 1 or in_backward():
            return
        self._free_all_but()
        self._forward.begin()
        self._backward.begin()
        self._closed, self._is_watching = None, False

    def behind_model(self, *_: object) -> None:
        """End the forward pass: the unit that was closed last stays whole, if a backward pass may follow."""
        self._depth = max(0, self._depth - 1)
        if self._depth:
            return
        for unit in list(self._whole):
            unit.close()
        stays = self._closed if torch.is_grad_enabled() else None
        self._free_all_but(*(() if stays is None else (stays,)))

    def use(self, unit: GatheredUnit) -> None:
        """Gather a unit for its next use, free those that are used up, and begin to gather the next one.

        A backward pass through the current unit may use those around it in between.
        """
        if unit is self._current:
            return
        if self._current is not None and unit in self._current.around:
            self._add(unit)
            unit.gather()
            return
        backward = in_backward()
        open_units = tuple(each for each in self._whole if each.is_open)
        if backward:
            self._watch_end()
        else:
            unit.around = open_units
        self._free_all_but(unit, *unit.around, *open_units)
        self._current = unit
        if not (backward or self.is_running):
            unit.free()
        self._add(unit)
        unit.gather()
        following = self._following(unit, backward)
        if following is not None and following not in self._whole:
            self._add(following)
            following.start()

    def _following(self, unit: GatheredUnit, backward: bool) -> GatheredUnit | None:
        if backward:
            return self._backward.add(unit)
        return self._forward.add(unit) if self.is_running else None

    def closed(self, unit: GatheredUnit) -> None:
        """Note that the modules of a unit have run."""
        self._closed = unit
        if self._current is unit:
            self._current = None

    def _add(self, unit: GatheredUnit) -> None:
        if unit not in self._whole:
            self._whole.append(unit)

    def _free_all_but(self, *units: GatheredUnit) -> None:
        for unit in self._whole:
            if unit not in units:
                unit.free()
        self._whole = [unit for unit in self._whole if unit in units]
        self._current = None

    def _watch_end(self) -> None:
        """Free all units at the end of the backward pass that is running."""
        if not self._is_watching:
            self._is_watching = True
            call_after_backward(self._end_backward)

    def _end_backward(self) -> None:
        self._is_watching = False
        self._free_all_but(*[unit for unit in self._whole if unit.is_open])
