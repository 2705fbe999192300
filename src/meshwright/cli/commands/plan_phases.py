"""`meshwright plan --phases train,generate` finds a layout for each phase of a step that generates and trains."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from meshwright.cli.console.files import write_text
from meshwright.cli.console.output import print_json, print_text
from meshwright.cli.console.parser import UsageError
from meshwright.cost import Cluster
from meshwright.search import GenerationSizes, PhasePlan, Transformer, plan_phases, progress_bar

GENERATION = ("prompts", "prompt_tokens", "new_tokens")
TRAINING = ("batch", "sequence")


def check_options(settings: argparse.Namespace) -> None:
    """Raise UsageError if a size of the asked phases is missing, or one is given that the phases do not have."""
    generates = settings.phases == ("train", "generate")
    needed, others = (GENERATION, TRAINING) if generates else (TRAINING, (*GENERATION, "samples"))
    extra = _unused_options(settings, others)
    missing = [_option(name) for name in needed if getattr(settings, name) is None]
    asked = f"meshwright plan: --phases {','.join(settings.phases)}"
    if extra:
        leave = f"leave out {', '.join(extra)}"
        fix = f"{leave}: all sequences are generated" if generates else f"pass --phases train,generate, or {leave}"
        raise UsageError(f"{asked} with {extra[0]}\n  fix: {fix}")
    if missing:
        raise UsageError(f"{asked} without {missing[0]}\n  fix: pass {', '.join(missing)}")


def _unused_options(settings: argparse.Namespace, others: Sequence[str]) -> list[str]:
    """Return the options that are set, of these."""
    given = [f"--given {name}" for name in others if name in settings.given]
    return [_option(name) for name in others if getattr(settings, name) is not None] + given


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def print_phase_plans(settings: argparse.Namespace, model: Transformer, machines: Cluster, ranks: int) -> int:
    """Print the best plan of both phases, and the runner-up."""
    sizes = GenerationSizes(settings.prompts, settings.prompt_tokens, settings.new_tokens, settings.samples or 1)
    with progress_bar(f"plans of two phases for {ranks} ranks", silent=settings.json) as on_step:
        best, *others = plan_phases(
            model, machines, ranks, sizes, settings.precision, on_step=on_step, **settings.given
        )
    if settings.out:
        write_text(settings.out, best.train.text())
    if settings.json:
        print_json({**best.data(), "next": [_summary(plan) for plan in others]})
    else:
        print_text(best.explain(others))
    return 0


def _summary(plan: PhasePlan) -> dict[str, object]:
    """Return a plan that is not the best, for programs."""
    return {name: value for name, value in plan.data().items() if name != "assumes"}
