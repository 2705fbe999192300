"""Plans of training and generation: the sizes of a model, and the search for a layout of each phase."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from torch import nn

from meshwright.comm import current_communicator
from meshwright.cost import Cluster
from meshwright.layout import JsonValue
from meshwright.search import (
    GenerationSizes,
    PhasePlan,
    SearchError,
    Transformer,
    plan_phases,
    progress_bar,
    transformer_of,
)

PHASES = ("train", "generate")
ASKED = "mw.plan with phases"


def plan_both_phases(
    model: object,
    generation: GenerationSizes | None,
    machines: Cluster,
    ranks: int | None,
    stages: int | None,
    unused: Mapping[str, object],
) -> tuple[PhasePlan, ...]:
    """Return the plans of both phases, fastest first. Raises SearchError for `unused` arguments that are given."""
    if wrong := ", ".join(name for name, value in unused.items() if value is not None):
        raise SearchError(
            ASKED,
            f"the arguments {wrong}",
            "a plan of both phases follows from the sizes of the model and of the generation",
            f"leave out {wrong}",
        )
    if not isinstance(generation, GenerationSizes):
        raise SearchError(
            ASKED,
            f"generation={generation!r:.60}",
            "the time of generation follows from the number and the lengths of prompts and samples",
            "pass generation=meshwright.search.GenerationSizes(prompts=64, prompt_tokens=512, new_tokens=1024)",
        )
    devices = ranks or machines.devices or current_communicator().size
    with progress_bar(f"plans of two phases for {devices} ranks") as on_step:
        given: dict[str, JsonValue] = {} if stages is None else {"pp": stages}
        return plan_phases(sizes_of(model), machines, devices, generation, on_step=on_step, **given)


def check_phases(phases: object) -> bool:
    """True for training and generation, False for training alone. Raises SearchError for other phases."""
    found = tuple(cast("list[object]", phases)) if isinstance(phases, list) else phases
    if found in (PHASES, PHASES[:1]):
        return found == PHASES
    raise SearchError(
        f"mw.plan with phases={phases!r:.60}",
        "other phases, or another order",
        "a step generates and then trains on the result, and a plan without generation is one of training",
        f"pass phases={PHASES!r}, or leave phases out",
    )


def sizes_of(model: object) -> Transformer:
    """Return the sizes of a model of transformers, of its configuration, or of the same as a mapping.

    Raises:
        SearchError: the model has no configuration, or its layers do not follow from sizes.
    """
    if isinstance(model, Transformer):
        return model
    config: Any = getattr(model, "config", None) if isinstance(model, nn.Module) else model
    found = config.to_dict() if hasattr(config, "to_dict") else config
    if isinstance(found, Mapping):
        return transformer_of({str(name): value for name, value in found.items()})
    raise SearchError(
        f"{ASKED} for a {type(model).__name__}",
        "no configuration of transformers",
        "the time of both phases follows from the sizes of a transformer, which a configuration names",
        "pass a model of transformers, its configuration, or meshwright.search.Transformer(...)",
    )
