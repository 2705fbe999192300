"""Parser for mesh plans that a person wrote; it checks them before anything runs."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from math import prod
from typing import TypeGuard, TypeVar, cast, get_args

import numpy as np

from meshwright.layout import JsonValue, LayoutError, MeshError, ProcessMesh, Spec, parse_spec
from meshwright.pipeline import KNOWN_SCHEDULES as SCHEDULES
from meshwright.tensor import Context

from .._errors import SearchError
from ..plan_data.plan import read_text
from ..sharding.memory_saving import MemorySaving
from .mesh_plan import STAGES, MeshPlan
from .pipeline_plan import Pipelining

T = TypeVar("T")
EXAMPLE = (
    "write lines such as\n[mesh]\ndp = 4\ntp = 2\n\n"
    '[layouts]\n"0.weight" = "f32[32@tp, 8]"\n"batch_0" = "f32[16@dp, 8]"'
)
KNOWN = (
    "mesh", "layouts", "seconds", "bytes", "zero", "recompute", "accumulate", "split", "schedule", "microbatches",
    "way", "context",
)  # fmt: skip
MOST = 2**20
"""Upper bound on the ranks of a mesh in a text."""
MOST_AXES = 16


def parse_mesh_plan(text: str) -> MeshPlan:
    """Return the plan of a text in TOML or JSON: axes of the mesh with their sizes, and layouts by name.

    Raises:
        SearchError: the text is not a plan.
        LayoutError: a layout is not possible on its mesh.

    >>> plan = parse_mesh_plan('[mesh]\\ndp = 2\\n[layouts]\\nbatch_0 = "f32[8@dp, 4]"')
    >>> parse_mesh_plan(plan.text()) == plan
    True
    """
    given = read_text(text, "a plan with a text", EXAMPLE)
    for name in sorted(set(given) - set(KNOWN)):
        near = get_close_matches(name, KNOWN, n=1, cutoff=0.0)
        raise _refused(name, f"the fields are {', '.join(KNOWN)}", f"there is no such field; the closest is {near[0]}")
    mesh = _mesh(given.get("mesh"))
    layouts = _table(given.get("layouts", {}), str, "layouts", "strings such as f32[16@dp, 8]")
    numbers = [given.get(name, 0.0) for name in ("seconds", "bytes")]
    if not all(type(n) in (int, float) for n in numbers):
        raise _refused(
            f"seconds and bytes {numbers}", "a value that is not a number", "both predictions must be numbers"
        )
    pipeline = _pipeline(given, mesh)
    home = mesh if pipeline is None else mesh[STAGES, 0]
    specs = {name: _spec(name, line, home) for name, line in layouts.items()}
    return MeshPlan(mesh, specs, float(numbers[0]), float(numbers[1]), _saving(given), pipeline, _context(given))


def _pipeline(given: Mapping[str, JsonValue], mesh: ProcessMesh) -> Pipelining | None:
    """Return the pipeline of a text with split points, or None; it has as many stages as the mesh."""
    if "split" not in given:
        _check_no_pipeline(given)
        return None
    names, schedule, count = given["split"], given.get("schedule", "1F1B"), given.get("microbatches", 1)
    if not _is_list_of(str, names) or not names:
        raise _refused(
            f"split = {names!r}", "no list of names", 'split must be a list of names of modules, as ["layers.4"]'
        )
    if type(schedule) is not str or ("\n" not in schedule and schedule not in SCHEDULES):
        raise _refused(f"schedule = {schedule!r}", "no such schedule", "a schedule must be known by name, or a table")
    if type(count) is not int or count < 1:
        raise _refused(f"microbatches = {count!r}", "no positive integer", "a batch needs one microbatch or more")
    split = tuple(names)
    found = Pipelining(split, schedule, count, _stages_of_chunks(given.get("way", []), len(split) + 1))
    if mesh.sizes.get(STAGES) != found.stages:
        raise _refused(
            f"split = {names!r}", f"mesh = {mesh.sizes}", f"the split makes {found.stages} stages, along {STAGES}"
        )
    if mesh.ndim < 2:
        raise _refused(
            f"mesh = {mesh.sizes}", f"the axis {STAGES} alone", "each stage needs its own mesh, even for one rank"
        )
    return found


def _check_no_pipeline(given: Mapping[str, JsonValue]) -> None:
    """Raise SearchError if a text has fields of a pipeline, but no split."""
    for name in ("schedule", "microbatches", "way"):
        if name in given:
            raise _refused(
                f"{name} = {given[name]!r}", "no split", "a pipeline needs split, the modules at which stages begin"
            )


def _is_list_of(kind: type[T], given: JsonValue) -> TypeGuard[list[T]]:
    """True for a list whose items are exactly of a type, so that a bool is no integer."""
    return isinstance(given, list) and all(type(item) is kind for item in cast(list[JsonValue], given))


def _stages_of_chunks(given: JsonValue, chunks: int) -> tuple[int, ...]:
    """Return the stage of each chunk if a text lists them, or an empty tuple."""
    if not _is_list_of(int, given):
        raise _refused(
            f"way = {given!r}", "no list of integers", "way must be the stage of each chunk, as [0, 1, 1, 0]"
        )
    way = tuple(given)
    if way and (len(way) != chunks or {*way} != {*range(max(way) + 1)}):
        raise _refused(
            f"way = {given!r}",
            f"a split into {chunks} chunks",
            "each chunk needs a stage, and each stage needs a chunk",
        )
    return way


def _saving(given: Mapping[str, JsonValue]) -> MemorySaving:
    zero, layers, pieces = given.get("zero", 0), given.get("recompute", []), given.get("accumulate", 1)
    if type(zero) is not int or not 0 <= zero <= 3:
        raise _refused(f"zero = {zero!r}", "no such stage", "the stages of ZeRO are 1 to 3, and 0 switches it off")
    if not _is_list_of(str, layers):
        raise _refused(
            f"recompute = {layers!r}",
            "no list of names",
            'recompute must be a list of names of layers, as ["blocks.*"]',
        )
    if type(pieces) is not int or pieces < 1:
        raise _refused(f"accumulate = {pieces!r}", "no positive integer", "a batch needs one piece or more")
    return MemorySaving(zero, tuple(layers), pieces)


def _context(given: Mapping[str, JsonValue]) -> Context:
    found = given.get("context", "gather")
    if found not in get_args(Context):
        raise _refused(
            f"context = {found!r}", "no such algorithm", f"attention uses one of {', '.join(get_args(Context))}"
        )
    return found


def _table(given: JsonValue, kind: type[T], name: str, what: str) -> dict[str, T]:
    if not isinstance(given, Mapping) or not all(type(value) is kind for value in given.values()):
        raise _refused(f"{name} = {given!r}", "no such table", f"{name} must be a table of {what}, by name")
    return dict(given)


def _mesh(given: JsonValue) -> ProcessMesh:
    sizes = _table(given, int, "mesh", "numbers of ranks")
    if not sizes or min(sizes.values()) < 1 or len(sizes) > MOST_AXES or prod(sizes.values()) > MOST:
        why = f"a mesh has 1 to {MOST_AXES} axes, and at most {MOST} ranks"
        raise _refused(f"mesh = {sizes}", f"{len(sizes)} axes, {prod(sizes.values())} ranks", why)
    try:
        return ProcessMesh(np.arange(prod(sizes.values())).reshape(*sizes.values()), list(sizes))
    except MeshError as error:
        raise _refused(f"mesh = {sizes}", error.found, error.why) from error


def _spec(name: str, line: str, mesh: ProcessMesh) -> Spec:
    try:
        spec = parse_spec(line, mesh)
    except LayoutError as error:
        raise LayoutError(f"the layout of {name}: {error.asked}", error.found, error.why, error.write) from error
    if spec.layout.partial or spec.layout.varying:
        raise _refused(
            f"{name} = {line!r}", f"{spec.layout.marks().strip()}", "the layouts of a plan can only shard or replicate"
        )
    return spec


def _refused(asked: str, found: str, why: str) -> SearchError:
    return SearchError(f"a plan with {asked}", found, why, EXAMPLE)
