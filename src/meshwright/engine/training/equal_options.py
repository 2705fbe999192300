"""Compare the options of ranks, which make the same calls only if their options are equal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from meshwright.checkpoint import World
from meshwright.comm import DisagreementError

_LONGEST = 80
"""Most characters of a value in an error."""


def check_equal_options(asked: str, options: Mapping[str, object], ranks: World) -> None:
    """Raise DisagreementError on all ranks if an option differs between ranks; every rank makes the call."""
    told: list[dict[str, str]] = ranks.gathered({name: repr(value) for name, value in options.items()})
    differing = [name for name in told[0] if len({each[name] for each in told}) > 1]
    if not differing:
        return
    raise DisagreementError(
        asked,
        "; ".join(f"{name} is {_by_rank([each[name] for each in told])}" for name in differing),
        "the ranks would make different calls, or compute different numbers",
        "pass the same options on every rank",
    )


def _by_rank(values: Sequence[str]) -> str:
    """Return each value with the first rank that has it; of long values, the part around the first difference.

    >>> _by_rank(["1.0", "1.0", "0.5"])
    '1.0 on rank 0 and 0.5 on rank 2'
    """
    distinct = list(dict.fromkeys(values))
    columns = enumerate(zip(*distinct, strict=False))
    first = next((at for at, letters in columns if len(set(letters)) > 1), min(map(len, distinct)))
    is_short = max(map(len, distinct)) <= _LONGEST
    begin = 0 if is_short else max(0, first - _LONGEST // 2)
    parts = [("… " if begin else "") + value[begin : begin + _LONGEST] for value in distinct]
    return " and ".join(f"{part} on rank {values.index(value)}" for part, value in zip(parts, distinct, strict=True))
