"""Kinds of change: elements of arrays and bytes, and values that are replaced."""

from __future__ import annotations

import ctypes
import multiprocessing
from array import array
from decimal import Decimal, localcontext
from decimal import getcontext as decimal_context
from fractions import Fraction
from typing import Any

import numpy as np

from ._stale_case import Case, Run, attribute, by_loss_too, item, kind, kind_on_mesh, reads, replaces


@by_loss_too
@kind_on_mesh
def element_of_a_numpy_array(run: Run) -> Case:
    scales = np.ones(3)
    return reads(run, lambda self: float(self.scales[1]), item(scales, 1), scales=scales)


@by_loss_too
@kind
def element_of_a_large_numpy_array(run: Run) -> Case:
    scales = np.ones((100, 100))
    return reads(run, lambda self: float(self.scales[70, 70]), item(scales, (70, 70)), scales=scales)


@by_loss_too
@kind
def base_of_a_numpy_view(run: Run) -> Case:
    scales = np.ones(3)
    return reads(run, lambda self: float(self.view[0]), item(scales, 1), view=scales[1:])


@by_loss_too
@kind
def numpy_scalar_replaced(run: Run) -> Case:
    return replaces(run, lambda self: float(self.factor), "factor", np.float64)


@by_loss_too
@kind
def bytes_replaced(run: Run) -> Case:
    return replaces(run, lambda self: float(self.levels[0]), "levels", lambda factor: bytes([int(factor)]))


@by_loss_too
@kind
def element_of_a_bytearray(run: Run) -> Case:
    levels = bytearray(b"\1\1")

    def change(factor: float) -> None:
        levels[1] = int(factor)

    return reads(run, lambda self: float(self.levels[1]), change, levels=levels)


@by_loss_too
@kind
def buffer_behind_a_memoryview(run: Run) -> Case:
    levels = bytearray(b"\1\1")

    def change(factor: float) -> None:
        levels[1] = int(factor)

    return reads(run, lambda self: float(self.levels[1]), change, levels=memoryview(levels))


@by_loss_too
@kind
def element_of_an_array(run: Run) -> Case:
    scales = array("d", [1.0, 1.0])
    return reads(run, lambda self: self.scales[1], item(scales, 1), scales=scales)


class Point(ctypes.Structure):
    _fields_ = (("scale", ctypes.c_double),)


@by_loss_too
@kind
def field_of_a_ctypes_structure(run: Run) -> Case:
    point = Point(1.0)
    return reads(run, lambda self: self.point.scale, attribute(point, "scale"), point=point)


@by_loss_too
@kind
def value_in_memory_that_processes_share(run: Run) -> Case:
    shared = multiprocessing.Value("d", 1.0, lock=False)
    return reads(run, lambda self: self.shared.value, attribute(shared, "value"), shared=shared)


# --- values that are replaced ----------------------------------------------------------------------------------------


@by_loss_too
@kind_on_mesh
def number_that_is_an_attribute(run: Run) -> Case:
    return replaces(run, lambda self: self.factor, "factor", float)


@by_loss_too
@kind
def number_that_becomes_a_bool(run: Run) -> Case:
    """Return a training with 1 or True, which are equal and differ only in type."""
    return replaces(
        run, lambda self: 1.0 if type(self.factor) is int else 2.0, "factor", lambda factor: 1 if factor == 1 else True
    )


@by_loss_too
@kind
def text_that_switches(run: Run) -> Case:
    def read(self: Any) -> float:
        match self.how:
            case "double":
                return 2.0
            case _:
                return 1.0

    return replaces(run, read, "how", lambda factor: "same" if factor == 1 else "double")


@by_loss_too
@kind
def none_that_becomes_a_number(run: Run) -> Case:
    return replaces(
        run, lambda self: 1.0 if self.cap is None else self.cap, "cap", lambda factor: None if factor == 1 else factor
    )


@by_loss_too
@kind
def sign_of_zero(run: Run) -> Case:
    """Return a training with 0.0 or -0.0, which are equal and differ only in sign."""
    return replaces(
        run, lambda self: 1.5 + np.copysign(0.5, self.zero), "zero", lambda factor: 0.0 if factor == 1 else -0.0
    )


@by_loss_too
@kind
def decimal_replaced(run: Run) -> Case:
    return replaces(run, lambda self: float(self.factor), "factor", Decimal)


@by_loss_too
@kind
def fraction_replaced(run: Run) -> Case:
    return replaces(run, lambda self: float(self.factor), "factor", Fraction)


@by_loss_too
@kind
def precision_of_decimals(run: Run) -> Case:
    run.enter_context(localcontext())

    def change(factor: float) -> None:
        decimal_context().prec = 28 if factor == 1 else 1

    return reads(run, lambda self: float(Decimal(5) / Decimal(3)), change)
