"""What a static program is to be made into: one typed place for all options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from meshwright.graph import Pass
from meshwright.layout import Spec


@dataclass(frozen=True)
class Sharding:
    """ZeRO: optimizer states (stage 1), gradients (2) and parameters (3) cut along the axes that cut the batch.

    `axes` names other mesh axes; tensors of fewer than `least` elements stay whole.
    """

    enable: bool = False
    stage: Literal[1, 2, 3] = 1
    axes: tuple[str, ...] | None = None
    least: int = 1024


@dataclass(frozen=True)
class Strategy:
    """The options of `to_static`; `passes` come behind those that options name, each for its kind of program."""

    sharding: Sharding = field(default_factory=Sharding)
    passes: tuple[Pass, ...] = ()
    compiler: Literal["none", "inductor"] = "none"
    max_programs: int = 16
    full_graph: bool = True
    layouts: Mapping[str, Spec] | None = None

    def passes_on(self, program: Literal["captured", "recorded"]) -> tuple[Pass, ...]:
        """Those of `passes` that are for the captured, or for the recorded program."""
        return tuple(each for each in self.passes if each.on == program)
