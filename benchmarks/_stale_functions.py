"""Kinds of change: closures, defaults, partial calls and callable objects."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, partialmethod
from types import SimpleNamespace
from typing import Any

from ._stale_case import Case, Net, Run, attribute, constant, item, kind, kind_on_mesh, reads, replaces

# --- closures and defaults -------------------------------------------------------------------------------------------


@kind
def cell_of_a_closure(run: Run) -> Case:
    factor = 1.0

    def change(to: float) -> None:
        nonlocal factor
        factor = to

    return reads(run, lambda self: factor, change)


@kind
def cell_two_functions_out(run: Run) -> Case:
    factor = 1.0

    def change(to: float) -> None:
        nonlocal factor
        factor = to

    def outer() -> Callable[[], float]:
        def inner() -> float:
            return factor

        return inner

    scale = outer()
    return reads(run, lambda self: scale(), change)


@kind
def cell_that_a_setter_writes(run: Run) -> Case:
    def made() -> tuple[Callable[[], float], Callable[[float], None]]:
        factor = 1.0

        def read() -> float:
            return factor

        def write(to: float) -> None:
            nonlocal factor
            factor = to

        return read, write

    read, write = made()
    return reads(run, lambda self: self.read(), write, read=read)


@kind
def contents_of_a_cell_set(run: Run) -> Case:
    scale = constant(1.0)
    cells: Any = scale.__closure__
    return reads(run, lambda self: scale(), attribute(cells[0], "cell_contents"))


@kind
def dict_in_a_closure(run: Run) -> Case:
    settings = {"scale": 1.0}
    return reads(run, lambda self: settings["scale"], item(settings, "scale"))


@kind
def defaults_of_a_function(run: Run) -> Case:
    def scale(factor: float = 1.0) -> float:
        return factor

    return reads(run, lambda self: scale(), lambda factor: setattr(scale, "__defaults__", (factor,)))


@kind
def keyword_defaults_of_a_function(run: Run) -> Case:
    def scale(*, factor: float = 1.0) -> float:
        return factor

    return reads(run, lambda self: scale(), lambda factor: setattr(scale, "__kwdefaults__", {"factor": factor}))


@kind
def list_that_is_a_default(run: Run) -> Case:
    def scale(factors: Any = [1.0]) -> float:  # noqa: B006
        return factors[0]

    factors: Any = scale.__defaults__
    return reads(run, lambda self: scale(), item(factors[0], 0))


@kind
def code_of_a_function(run: Run) -> Case:
    def single() -> float:
        return 1.0

    def double() -> float:
        return 2.0

    def scale() -> float:
        return 1.0

    return reads(
        run, lambda self: scale(), lambda f: setattr(scale, "__code__", (single if f == 1 else double).__code__)
    )


@kind
def attribute_of_a_function(run: Run) -> Case:
    def scale() -> float:
        return scale.factor  # pyright: ignore[reportFunctionMemberAccess]

    scale.factor = 1.0  # pyright: ignore[reportFunctionMemberAccess]
    return reads(run, lambda self: scale(), attribute(scale, "factor"))


# --- partial calls and callable objects ------------------------------------------------------------------------------


def times(factor: float, *, more: float = 1.0) -> float:
    """Return a product."""
    return factor * more


@kind_on_mesh
def arguments_of_a_new_partial(run: Run) -> Case:
    return replaces(run, lambda self: self.by(), "by", lambda factor: partial(times, factor))


@kind
def keywords_of_a_new_partial(run: Run) -> Case:
    return replaces(run, lambda self: self.by(1.0), "by", lambda factor: partial(times, more=factor))


@kind
def keywords_of_a_partial_in_place(run: Run) -> Case:
    by = partial(times, more=1.0)
    return reads(run, lambda self: self.by(1.0), item(by.keywords, "more"), by=by)


@kind
def list_inside_a_partial(run: Run) -> Case:
    factors = [1.0]
    return reads(run, lambda self: self.by(), item(factors, 0), by=partial(sum, factors))


@kind
def object_inside_a_partial_of_a_library_function(run: Run) -> Case:
    settings = SimpleNamespace(scale=1.0)
    return reads(run, lambda self: self.by(), attribute(settings, "scale"), by=partial(getattr, settings, "scale"))


@kind
def partial_method(run: Run) -> Case:
    class Model(Net):
        def times(self, factor: float) -> float:
            return factor

        scaled = partialmethod(times, 1.0)

        def scale(self) -> float:
            return self.scaled()

    def change(factor: float) -> None:
        Model.scaled = partialmethod(Model.times, factor)

    return Case(Model(), change)


@kind
def lambda_over_an_object(run: Run) -> Case:
    settings = SimpleNamespace(scale=1.0)
    return reads(run, lambda self: self.read(), attribute(settings, "scale"), read=lambda: settings.scale)


class Schedule:
    """A callable with a setting."""

    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor

    def __call__(self) -> float:
        return self.factor

    def read(self) -> float:
        return self.factor


@kind
def attribute_of_a_callable_object(run: Run) -> Case:
    schedule = Schedule()
    return reads(run, lambda self: self.schedule(), attribute(schedule, "factor"), schedule=schedule)


@kind
def attribute_behind_a_bound_method(run: Run) -> Case:
    schedule = Schedule()
    return reads(run, lambda self: self.read(), attribute(schedule, "factor"), read=schedule.read)


@kind
def bound_method_of_another_object(run: Run) -> Case:
    return replaces(run, lambda self: self.read(), "read", lambda factor: Schedule(factor).read)


@kind
def callable_object_in_a_list(run: Run) -> Case:
    schedules = [Schedule()]
    return reads(run, lambda self: self.schedules[0](), attribute(schedules[0], "factor"), schedules=schedules)


@kind
def dunder_call_of_a_class_replaced(run: Run) -> Case:
    class Local(Schedule):
        pass

    return reads(run, lambda self: self.schedule(), lambda f: setattr(Local, "__call__", constant(f)), schedule=Local())
