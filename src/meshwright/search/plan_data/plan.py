"""Plan of a training step on a cluster, written by a person or found by a search."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from difflib import get_close_matches
from typing import Literal, get_args

from meshwright.layout import InputError, JsonValue, read_json, read_toml, write_toml

from .._errors import SearchError, check_sizes

Recompute = Literal["none", "selective", "full"]
_KINDS = {"int": "an integer", "bool": "true or false", "str": "a string"}
EXAMPLE = "write lines such as\ndp = 8\ntp = 4\nbatch = 256"


@dataclass(frozen=True, slots=True)
class Plan:
    """Degrees of parallelism and other choices for a training step.

    `ep` ranks out of dp * cp * tp share a layer's experts. `chunks` is the number of chunks per pipeline rank, `zero`
    the stage of ZeRO (arXiv 1910.02054), `microbatch` the number of sequences in a microbatch. A step has `batch`
    sequences over all ranks, each of `sequence` tokens.

    >>> Plan(dp=4, tp=2, batch=32).ranks, Plan(dp=4, tp=2, batch=32).microbatches
    (8, 8)

    Raises:
        SearchError: a degree is below 1 or too large, or `zero` or `recompute` has an unknown value.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    chunks: int = 1
    zero: int = 0
    sequence_parallel: bool = False
    schedule: str = "1F1B"
    microbatch: int = 1
    batch: int = 1
    sequence: int = 2048
    recompute: Recompute = "none"
    precision: str = "bf16"

    def __post_init__(self) -> None:
        least = {"dp", "tp", "pp", "cp", "ep", "chunks", "microbatch", "batch", "sequence"}
        low = [f.name for f in fields(self) if f.name in least and getattr(self, f.name) < 1]
        if low or self.zero not in (0, 1, 2, 3):
            raise SearchError(
                "a plan",
                f"{', '.join(f'{n} = {getattr(self, n)}' for n in [*low, 'zero'])}",
                "degrees must be at least 1, and ZeRO has the stages 0 to 3",
                "write Plan(dp=8, zero=1, batch=64)",
            )
        check_sizes("a plan", **{name: getattr(self, name) for name in least})
        if self.recompute not in get_args(Recompute):
            raise _refused(
                f"recompute = {self.recompute!r}",
                "no such setting",
                f"the settings are {', '.join(get_args(Recompute))}",
            )

    @property
    def ranks(self) -> int:
        return self.dp * self.tp * self.pp * self.cp

    @property
    def microbatches(self) -> int:
        """Number of microbatches that one rank runs in a step."""
        return max(1, round(self.batch / (self.microbatch * self.dp)))

    def text(self) -> str:
        """Return the plan as lines of TOML that `parse_plan` reads.

        >>> parse_plan(Plan(dp=4, schedule="ZB-1p").text()) == Plan(dp=4, schedule="ZB-1p")
        True
        """
        return write_toml(asdict(self))


def differences(best: Plan, other: Plan) -> str:
    """Return the fields in which `other` differs from `best`, with their values, as text."""
    one, two = asdict(best), asdict(other)
    return ", ".join(f"{name} = {two[name]}" for name in one if one[name] != two[name])


def parse_plan(text: str) -> Plan:
    """Return the plan of a text in TOML or JSON; fields that are left out have their defaults.

    Raises:
        SearchError: the text is neither TOML nor JSON, or has a name or a value that a plan cannot have.
    """
    return plan_of(read_text(text, "a plan with a text", EXAMPLE))


def read_text(text: str, asked: str, write: str) -> dict[str, JsonValue]:
    """Return the table that a text in TOML or JSON contains.

    Raises:
        SearchError: the text is neither TOML nor JSON.
    """
    try:
        return read_json(text) if text.lstrip().startswith("{") else read_toml(text)
    except InputError as error:
        raise SearchError(asked, error.found, f"the text is neither TOML nor JSON: {error.why}", write) from error


def plan_of(given: Mapping[str, JsonValue]) -> Plan:
    """Return the plan with the given fields; fields that are left out have their defaults.

    Raises:
        SearchError: a plan has no field of a name, or a value is of another type or out of range.
    """
    kinds = {f.name: f.type for f in fields(Plan)}
    if unknown := sorted(set(given) - set(kinds)):
        near = get_close_matches(unknown[0], kinds, n=1, cutoff=0.0)[0]
        raise _refused(
            ", ".join(unknown), f"the fields are {', '.join(kinds)}", f"there is no such field; the closest is {near}"
        )
    for name, value in given.items():
        kind = "str" if kinds[name] == "Recompute" else kinds[name]
        if type(value).__name__ != kind:
            raise _refused(f"{name} = {value!r}", f"a {type(value).__name__}", f"{name} must be {_KINDS[str(kind)]}")
    return Plan(**given)


def _refused(asked: str, found: str, why: str) -> SearchError:
    return SearchError(f"a plan with {asked}", found, why, EXAMPLE)
