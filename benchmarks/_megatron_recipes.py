"""Settings of the recipes of Megatron-Bridge, which its tables of results do not show.

`megatron_recipes.json` has them by model, device, precision and release, with their source.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from meshwright.search import Software

RECIPES = Path(__file__).with_name("megatron_recipes.json")
SOURCE = "NVIDIA-NeMo/Megatron-Bridge"
EXPOSED_EXCHANGE = 0.63
"""Fraction of the exchange of experts that is not hidden if it runs beside other work.

The source measured 36.55 % of it hidden, on 16 H100 (skills/nemo-mbridge-perf-expert-parallel-overlap).
"""
NARROW_ATTENTION = 1.25
"""Rate of attention on 8-bit numbers, relative to 16-bit numbers."""
DEGREES = ("tp", "pp", "vpp", "cp", "ep", "micro_batch")
ONCE = frozenset({"DeepEP", "HybridEP"})
"""Programs that send a token once to a rank, and once to a node."""


@dataclass(frozen=True)
class Recipe:
    """Settings of one recipe; `settings` has only those that differ from the defaults."""

    settings: Mapping[str, Any]

    @property
    def recomputes(self) -> bool:
        return bool(self.settings.get("repeated") or self.settings.get("recomputed_layers"))

    def applied(self, base: Software, layers: int) -> Software:
        """Return the software with the settings of the recipe, for a model of so many layers."""
        s = self.settings
        found = replace(
            base,
            once=s.get("dispatcher") in ONCE,
            fused_experts=s.get("fused_experts", False),
            gated_gradient=s.get("gated_gradient", 1.0),
            narrow_head=s.get("narrow_head", False),
            graphs=frozenset(s.get("graphs", ())),
            offloaded=s.get("offloaded_layers", 0) / layers,
            repeated=frozenset(s.get("repeated", ())),
        )
        if s.get("recomputed_layers"):
            found = replace(found, selective=s["recomputed_layers"] / layers)
        if s.get("overlaps_experts"):
            found = replace(found, exchange=EXPOSED_EXCHANGE)
        if s.get("narrow_attention"):
            found = replace(found, attention=NARROW_ATTENTION)
        return found if s.get("overlaps_gradients", True) else replace(found, exposed=1.0)


def recipe_of(row: Mapping[str, Any]) -> Recipe:
    """Return the recipe of a row: with its plan, or else the most similar one, of the nearest release.

    It has no settings if there is no recipe for the model on the device.
    """
    model, gpu, train = _plain(row["model"]["name"]), row["hardware"]["gpu"].split("-")[0], row["train"]
    own = [r for r in _recipes() if _plain(r["model"]) == model and r["gpu"] == gpu]
    own = [r for r in own if train["precision"] in r["precision"]] or own

    def apart(recipe: Mapping[str, Any]) -> tuple[bool, tuple[int, bool], int, bool]:
        differences = _differences(recipe, row)
        batch = recipe.get("plan", {}).get("global_batch") != train["global_batch"]
        return differences > 0, _releases_apart(recipe["releases"], train.get("release")), differences, batch

    return Recipe(min(own, key=apart, default={}))


@cache
def _recipes() -> Sequence[Mapping[str, Any]]:
    return json.loads(RECIPES.read_text())["recipes"]


def _plain(name: str) -> str:
    return "".join(c for c in name.casefold() if c.isalnum())


def _releases_apart(releases: Sequence[str], release: str | None) -> tuple[int, bool]:
    """Return the number of releases between a recipe and a row; an older recipe is nearer than a newer one."""
    order = sorted({name for r in _recipes() for name in r["releases"]})
    if release not in order:
        return len(order), False
    apart = [order.index(release) - order.index(name) for name in releases]
    nearest = min(apart, key=lambda n: (abs(n), n < 0))
    return abs(nearest), nearest < 0


def _differences(recipe: Mapping[str, Any], row: Mapping[str, Any]) -> int:
    """Return the number of degrees in which the plan of a recipe differs from that of a row."""
    own = {**row["parallel"], "micro_batch": row["train"]["micro_batch"]}
    return sum((own.get(name) or 1) != recipe["plan"][name] for name in DEGREES if "plan" in recipe)
