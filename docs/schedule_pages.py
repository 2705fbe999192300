"""Writes `concepts/schedules.md`, a picture per schedule and one of a layout: `make pictures`."""

from __future__ import annotations

from pathlib import Path

from meshwright.layout import ProcessMesh
from meshwright.pipeline import KNOWN_SCHEDULES, KnownSchedule, Schedule, Times, peaks, simulate_schedule, timeline_svg
from meshwright.report import show

DOCS = Path(__file__).parent
PAGE, PICTURES = DOCS / "concepts" / "schedules.md", DOCS / "pictures"
RANKS, MICROBATCHES, CHUNKS = 4, 8, 2
HEAD = f"""# The known schedules, each with its picture

The examples have {RANKS} ranks, {MICROBATCHES} microbatches, and {CHUNKS} chunks per rank if a schedule uses them.
F, B and W of one microbatch take 1 each, for all chunks of a rank together. *Makespan* and *span* are in these units.
*Held* is the peak number of microbatches on each rank. `meshwright schedule NAME` draws the same picture in a terminal.
To choose a schedule, see [schedules as tables](pipeline.md). `make pictures` writes this page.
"""


def files() -> dict[Path, str]:
    """What the files hold."""
    found = {
        PICTURES / f"{slug(name)}.svg": timeline_svg(simulate_schedule(table(k), times(k)))
        for name, k in KNOWN_SCHEDULES.items()
    }
    layout = show("f32[5@dp, 8@tp]", ProcessMesh([[0, 1], [2, 3]], ["dp", "tp"]))._repr_svg_()
    page = "\n".join([HEAD, *(section(k) for k in KNOWN_SCHEDULES.values())])
    return {PAGE: page, PICTURES / "layout.svg": layout, **found}


def table(k: KnownSchedule) -> Schedule:
    return k.build(RANKS, MICROBATCHES, CHUNKS)


def times(k: KnownSchedule) -> Times:
    """One unit for all of a rank's share of a pass."""
    made = table(k)
    share = made.ranks / len(made.ways[0])
    return Times(share, share, share)


def section(k: KnownSchedule) -> str:
    made = table(k)
    line = simulate_schedule(made, times(k))
    share = made.ranks / len(made.ways[0])
    held = ", ".join(f"{p * share:g}" for p in peaks(made))
    said = (k.make.__doc__ or "").splitlines()[0]
    source = "" if k.source in said else f" ({k.source})"
    return (
        f"## {k.name}\n\n{said}{source}\n\n"
        f"![{k.name}](../pictures/{slug(k.name)}.svg)\n\n"
        f"Makespan {line.makespan:g}, span {line.span:g}, held {held}.\n"
    )


def slug(name: str) -> str:
    return name.lower().replace(",", "").replace(" ", "-")


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    for path, text in files().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
