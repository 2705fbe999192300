"""A plan of two phases, training and generation, as data and as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np

from meshwright.layout import JsonValue, ProcessMesh

from ..plan_data.plan import Plan
from ..plan_data.text_table import text_table
from ..plan_data.units import count, seconds, share, size
from .generation import GenerationSizes, SamplerLayout
from .generation_time import GenerationSeconds
from .weight_moves import WeightMove

USUAL = asdict(Plan())
TRAINED = "pp", "dp", "cp", "tp"


@dataclass(frozen=True)
class PhasePlan:
    """A plan for steps that generate sequences, train on them, and move the weights: a layout for each phase.

    `train` is the plan of training, and `sampler` the layout of the model that generates. `training_bytes` and
    `generation_bytes` are those of the fullest rank in each phase, by kind. `assumptions` are sentences. All numbers
    are predictions.
    """

    train: Plan
    sampler: SamplerLayout
    generation: GenerationSizes
    training_seconds: float
    generated: GenerationSeconds
    move: WeightMove
    training_bytes: Mapping[str, float] = field(repr=False)
    generation_bytes: Mapping[str, float] = field(repr=False)
    memory_limit: float
    assumptions: tuple[str, ...] = field(default=(), repr=False)

    @property
    def seconds_of(self) -> dict[str, float]:
        """Seconds of a whole step, by part."""
        generated = self.generated
        return {
            "training": self.training_seconds,
            "prompts": generated.prefill,
            "decode": generated.decode,
            "weights": self.move.seconds,
        }

    @property
    def seconds(self) -> float:
        """Seconds of a whole step."""
        return sum(self.seconds_of.values())

    @property
    def nbytes(self) -> float:
        """Bytes of the fullest rank in the phase that needs more."""
        return max(sum(self.training_bytes.values()), sum(self.generation_bytes.values()))

    @property
    def batch_size(self) -> int:
        """Number of rows that the sampler computes at a time, on all replicas: `generate(..., batch_size=...)`."""
        return self.sampler.rows(self.generation) * self.sampler.replicas

    @property
    def train_mesh(self) -> ProcessMesh:
        """The mesh of training, with the axes `dp` and those of more than one rank among pp, cp and tp."""
        sizes = {name: getattr(self.train, name) for name in TRAINED}
        return _mesh({name: n for name, n in sizes.items() if n > 1 or name == "dp"})

    @property
    def sampler_mesh(self) -> ProcessMesh:
        """The mesh of the sampler, with the axes `dp` for its replicas and `tp`, if it has more than one rank."""
        return _mesh({"dp": self.sampler.replicas, **({"tp": self.sampler.tp} if self.sampler.tp > 1 else {})})

    @property
    def layouts(self) -> tuple[int, ...]:
        """Degrees of both phases, and the stage of ZeRO."""
        train = self.train
        return train.dp, train.tp, train.pp, train.cp, train.zero, self.sampler.replicas, self.sampler.tp

    @property
    def how(self) -> str:
        return f"training with {_decided(self.train)}; generation on {self.sampler!r}"

    def __str__(self) -> str:
        return f"{self.how}: {seconds(self.seconds)} per step, {size(self.nbytes)} per rank"

    def explain(self, others: Sequence[PhasePlan] = ()) -> str:
        """Return the plan as text: seconds and bytes by part, what is assumed, and the first of the `others`."""
        whole, generated = self.seconds, self.generated
        notes = {
            "training": f"{self.generation.rows:,} sequences of {self.generation.positions:,} tokens",
            "prompts": f"{self.generation.prompts:,} prompts of {self.generation.prompt_tokens:,} tokens",
            "decode": f"{generated.steps:,} steps of {seconds(generated.step)}",
            "weights": self._move_text(),
        }
        rows = [(f"  {name}", seconds(x), share(x, whole), notes[name]) for name, x in self.seconds_of.items()]
        return "\n".join(
            [
                f"training:    {_decided(self.train)}",
                f"generation:  {self.sampler!r}",
                "",
                f"{seconds(whole)} per step",
                *text_table(rows, {1, 2}),
                "",
                f"{size(self.nbytes)} of {size(self.memory_limit)} on the fullest rank",
                *_bytes_lines("while training", self.training_bytes),
                *_bytes_lines("while generating", self.generation_bytes),
                "",
                "assumed:",
                *(f"  {text}" for text in self.assumptions),
                *self._runner_up(others),
            ]
        )

    def data(self) -> dict[str, JsonValue]:
        """Return the plan for programs."""
        return {
            "train": {
                "plan": asdict(self.train),
                "seconds": self.training_seconds,
                "bytes of": dict(self.training_bytes),
            },
            "generate": {
                **asdict(self.sampler),
                **asdict(self.generation),
                **asdict(self.generated),
                "batch_size": self.batch_size,
                "decode": self.generated.decode,
                "bytes of": dict(self.generation_bytes),
            },
            "weights": asdict(self.move),
            "seconds": self.seconds,
            "bytes": self.nbytes,
            "memory": self.memory_limit,
            "fits": self.nbytes <= self.memory_limit,
            "assumes": list(self.assumptions),
        }

    def _move_text(self) -> str:
        if self.move.is_shared:
            return "the sampler uses the trainer's memory"
        return f"{size(self.move.received)} received by the busiest rank, in {count(self.move.rounds)} exchanges"

    def _runner_up(self, others: Sequence[PhasePlan]) -> list[str]:
        """Return the lines on the first other plan, with the parts in which it is slower or faster."""
        if not others:
            return []
        other = others[0]
        mine, theirs = self.seconds_of, other.seconds_of
        changed = [(name, theirs[name] - mine[name]) for name in mine if abs(theirs[name] - mine[name]) > 0]
        parts = ", ".join(f"{name} {'+' if x > 0 else ''}{seconds(x)}" for name, x in changed) or "equally fast"
        return ["", f"the runner-up takes {other.seconds / self.seconds:.3f} of the time: {other.how}", f"  {parts}"]


def _mesh(sizes: Mapping[str, int]) -> ProcessMesh:
    shape = tuple(sizes.values())
    return ProcessMesh(np.arange(int(np.prod(shape))).reshape(shape), list(sizes))


def _decided(plan: Plan) -> str:
    """Return the fields of a plan that are not the usual ones; the sizes of the batch follow from the generation."""
    derived = ("batch", "sequence")
    told = [f"{name} = {x}" for name, x in asdict(plan).items() if x != USUAL[name] and name not in derived]
    return ", ".join(told) or "one rank"


def _bytes_lines(title: str, parts: Mapping[str, float]) -> list[str]:
    rows = [(f"    {name}", size(nbytes)) for name, nbytes in parts.items() if nbytes]
    return [f"  {title}: {size(sum(parts.values()))}", *text_table(rows, {1})]
