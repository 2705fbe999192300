"""Sizes of a generation, and layouts of the model that generates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

from .._errors import SearchError, check_sizes
from ..transformer_plans.candidates import stays_in_a_node, tensor_sizes
from ..transformer_plans.sizes import Transformer

WAVES = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of parts into which a replica may divide its rows, so that each has less cache."""


@dataclass(frozen=True, slots=True)
class GenerationSizes:
    """Sizes of the generation in a step: `samples` rows of `new_tokens` tokens for each of `prompts` prompts.

    A prompt has `prompt_tokens` tokens. These are the arguments of `sampler.generate(prompts, new_tokens, n=samples)`.

    >>> GenerationSizes(prompts=64, prompt_tokens=512, new_tokens=1024, samples=8).rows
    512

    Raises:
        SearchError: a size is no positive whole number, or too large.
    """

    prompts: int
    prompt_tokens: int
    new_tokens: int
    samples: int = 1

    def __post_init__(self) -> None:
        sizes = asdict(self)
        wrong = [f"{name} = {n!r}" for name, n in sizes.items() if not isinstance(n, int) or n < 1]
        if wrong:
            raise SearchError(
                "the sizes of a generation",
                ", ".join(wrong),
                "sizes are positive whole numbers",
                "write GenerationSizes(prompts=64, prompt_tokens=512, new_tokens=1024, samples=8)",
            )
        check_sizes("the sizes of a generation", **sizes)
        check_sizes("a generation", rows=self.rows, positions=self.positions)

    @property
    def rows(self) -> int:
        """Number of sequences of a step."""
        return self.prompts * self.samples

    @property
    def positions(self) -> int:
        """Number of tokens of a whole sequence."""
        return self.prompt_tokens + self.new_tokens


@dataclass(frozen=True, slots=True)
class SamplerLayout:
    """Layout of the model that generates: `replicas`, each on `tp` ranks. Rows are divided over the replicas.

    A replica computes its rows in `waves` of equal size, one after the other.

    >>> SamplerLayout(4, 2), SamplerLayout(1, 8, waves=2)
    (4 replicas of 2 ranks, 1 replica of 8 ranks in 2 waves)
    """

    replicas: int
    tp: int
    waves: int = 1

    @property
    def ranks(self) -> int:
        return self.replicas * self.tp

    def rows(self, generation: GenerationSizes) -> int:
        """Return the rows that the fullest replica computes at a time."""
        return -(-generation.rows // (self.replicas * self.waves))

    def prompts(self, generation: GenerationSizes) -> int:
        """Return the largest number of different prompts among these rows, which are neighbours."""
        rows, samples = self.rows(generation), generation.samples
        is_even = rows % samples == 0 or samples % rows == 0
        most = max(1, rows // samples) if is_even else -(-(rows - 1) // samples) + 1
        return min(most, generation.prompts)

    def __repr__(self) -> str:
        waves = f" in {self.waves} waves" if self.waves > 1 else ""
        return f"{self.replicas} replica{'s' * (self.replicas > 1)} of {self.tp} rank{'s' * (self.tp > 1)}{waves}"


def sampler_layouts(
    model: Transformer, ranks: int, per_node: int, generation: GenerationSizes
) -> Iterator[SamplerLayout]:
    """Yield the layouts on all `ranks`; the ranks of a replica share a node and divide the heads evenly."""
    for tp in tensor_sizes(model, per_node, {}):
        if not stays_in_a_node(tp, ranks, per_node):
            continue
        most = SamplerLayout(ranks // tp, tp).rows(generation) if ranks % tp == 0 else 0
        yield from (SamplerLayout(ranks // tp, tp, waves) for waves in WAVES if waves <= most)


def check_model(model: Transformer) -> None:
    """Raise SearchError for a model whose generation has no price yet."""
    parts = {
        "experts": model.experts,
        "latent attention": model.latent,
        "tokens predicted ahead": model.ahead,
        "attention to later tokens": not model.causal,
    }
    if found := [name for name, part in parts.items() if part]:
        raise SearchError(
            "a plan with the phases train and generate",
            f"a model with {' and '.join(found)}",
            "the time of its decode step and the move of its weights are not predicted yet",
            "plan training alone: leave phases out",
        )
