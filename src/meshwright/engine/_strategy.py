"""What a static program is to be made into: one typed place for all options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.graph import Pass
from meshwright.layout import Spec


@dataclass(frozen=True)
class Strategy:
    """The options of `to_static`; `passes` are applied to the recorded program, behind those that options name."""

    passes: tuple[Pass, ...] = ()
    layouts: Mapping[str, Spec] | None = None
