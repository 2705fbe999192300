"""Cached plans: a call with other numbers, or under another setting of torch, does not get an earlier call's plan.

    python -m benchmarks.plans                all entries of `op_db`, and all functions of `torch.nn.functional`
    python -m benchmarks.plans --op add       one entry, every failure

Every sample of torch's `op_db`, and a call of every function of `torch.nn.functional`, runs with several values for
each of its floats, bools and integers. Each value makes the first plan once. Every call must give one device's numbers.
The same holds for settings (autocast, the default dtype, and so on) that are on for every second call.
"""

from __future__ import annotations

import argparse
import inspect
import json
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_flatten, tree_map

import meshwright as mw
from benchmarks import _samples
from benchmarks._samples import Entry
from meshwright.comm import current_communicator
from meshwright.tensor.core.dist_tensor import PLANS
from meshwright.tensor.execution.dispatch import _VALUED

VALUES = (0.5, 0.0, 1.0, -0.0, 2.0, float("inf"), float("nan"), -1.5)
FEW = (0.5, 0.0, 1.0, float("inf"))
MARKS = ("S", "P")
LINE = mw.ProcessMesh([0, 1], ["x"])
SAMPLES = 4
EXCUSED = {
    ("inf", "addmm"): "a matrix product of one row multiplies with alpha before it adds up, one of many rows after",
    ("inf", "nn.functional.rrelu (in place)"): "on a tensor without elements torch checks bounds on no device but meta",
    ("nan", "linalg.norm"): "the norm of order NaN of no elements is 0 on one device, and NaN of no norms",
}
"""(value, first words of the entry) → reason why the numbers may differ."""


@dataclass(frozen=True)
class Failure:
    """A call that does not give one device's numbers."""

    entry: str
    what: str
    layout: str
    message: str


@dataclass(frozen=True)
class Call:
    """A call of an entry with flat arguments."""

    entry: Entry
    flat: tuple[Any, ...]
    spec: Any

    def with_value(self, at: int, value: float | int | bool) -> Call:
        return Call(self.entry, (*self.flat[:at], value, *self.flat[at + 1 :]), self.spec)

    def truth(self) -> Any:
        """Return the result of one device, or the exception that it raises."""
        return self.perform([_samples.fresh(v) for v in self.flat])

    def perform(self, values: Sequence[Any]) -> Any:
        _samples.seed_all(3)
        try:
            return _samples.detached(self.entry.call(values, self.spec))
        except Exception as error:
            return error

    def on_rank(self, mark: str) -> Any:
        """Return the result for distributed arguments, as whole tensors."""
        return tree_map(_whole, self.perform([_laid(v, mark, at) for at, v in enumerate(self.flat)]))


def forget() -> None:
    """Drop all plans, and all records of their signatures."""
    PLANS.clear()
    _VALUED.clear()


def _laid(value: Any, mark: str, at: int) -> Any:
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return value
    value = _samples.fresh(value).detach()
    if mark == "S" and value.ndim:
        return mw.shard_tensor(value, LINE, [mw.Shard(0)])
    if mark == "P" and value.dtype is not torch.bool and value.numel():
        term = _samples.exact_terms(value, LINE.size, at)[current_communicator().rank]
        return mw.dtensor_from_local(term.clone(), LINE, [mw.Partial("sum")])
    return mw.shard_tensor(value, LINE, [mw.Replicate()])


def _whole(x: Any) -> Any:
    return mw.unshard_dtensor(x) if isinstance(x, mw.DistTensor) else x


def _differ(found: Any, wanted: Any) -> str | None:
    if isinstance(found, Exception) and isinstance(wanted, Exception):
        return None
    if isinstance(found, Exception):
        return f"raised {type(found).__name__}: {str(found)[:200]}"
    if isinstance(wanted, Exception):
        return f"did not raise {str(wanted)[:100]}"
    return _samples.differ(found, wanted)


@dataclass(frozen=True)
class Functional:
    """A function of `torch.nn.functional`, with arguments that follow from its signature."""

    name: str
    variant_test_name = ""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(F, self.name)(*args, **kwargs)

    def arguments(self) -> dict[str, Any] | None:
        """Return a tensor for each argument without a default, and all defaults; some tensors require gradients."""
        rng = torch.Generator().manual_seed(0)
        given: dict[str, Any] = {}
        for name, parameter in inspect.signature(getattr(F, self.name)).parameters.items():
            if name in ("training", "train"):
                given[name] = True
            elif parameter.default is parameter.empty and "Tensor" in str(parameter.annotation):
                given[name] = torch.rand(4, 6, generator=rng) + 0.1
            elif parameter.default is parameter.empty:
                given[name] = {"float": 0.5, "int": 1}.get(str(parameter.annotation))
            elif isinstance(parameter.default, (bool, int, float)) and name != "inplace":
                given[name] = parameter.default
        return None if any(v is None for v in given.values()) or not given else given


def functionals() -> list[Entry]:
    """Return all Python functions of `torch.nn.functional` that have a value for such arguments on one device."""
    names = [n for n, f in vars(F).items() if inspect.isfunction(f) and not n.startswith("_")]
    found = [Entry(Functional(name)) for name in sorted(names)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        firsts = [next(calls(entry, 1), None) for entry in found]
        fine = [call is not None and not isinstance(call.truth(), Exception) for call in firsts]
    return [entry for entry, is_fine in zip(found, fine, strict=True) if is_fine]


def calls(entry: Entry, samples: int) -> Iterator[Call]:
    """Yield calls of the entry with different descriptions, without gradients."""
    if isinstance(entry.op, Functional):
        given = entry.op.arguments()
        if given is not None:
            first = next(iter(given))
            flat, spec = tree_flatten((given.pop(first), (), given))
            yield Call(entry, tuple(flat), spec)
        return
    seen: set[str] = set()
    for sample in _samples._samples(entry):
        flat, spec = tree_flatten((sample.input, tuple(sample.args), dict(sample.kwargs)))
        look = _samples._description(sample)
        if look in seen or (entry.kind == "in place" and sample.broadcasts_input):
            continue
        seen.add(look)
        yield Call(entry, tuple(v.detach() if isinstance(v, torch.Tensor) else v for v in flat), spec)
        if len(seen) == samples:
            return


# --- numbers -----------------------------------------------------------------------------------------------------


def check_numbers(entry: Entry, values: Sequence[float] = VALUES, samples: int = SAMPLES) -> Iterator[Failure]:
    """Yield the failures among calls that differ in one number."""
    for call in calls(entry, samples):
        for at, value in enumerate(call.flat):
            choices = _choices(value, values)
            others = [call.with_value(at, choice) for choice in choices]
            wanted = [other.truth() for other in others]
            for mark in MARKS if choices else ():
                for first in range(len(choices)):
                    order = [first, *(k for k in range(len(choices)) if k != first)]
                    forget()
                    yield from _number_failures(others, wanted, choices, mark, order)


def _choices(value: Any, floats: Sequence[float]) -> Sequence[float | int | bool]:
    """Return other values for a number; a whole number may be a dim or a size."""
    if type(value) is bool:
        return (False, True)
    if type(value) is int:
        return (value, value + 1, value - 1)
    return floats if type(value) is float else ()


def _number_failures(
    others: Sequence[Call], wanted: Sequence[Any], values: Sequence[float], mark: str, order: Sequence[int]
) -> Iterator[Failure]:
    name = others[0].entry.name
    try:
        found = mw.simulate(lambda: [others[k].on_rank(mark) for k in order], LINE.size)[0]
    except Exception as error:
        yield Failure(name, "several numbers", mark, f"{type(error).__name__}: {error}")
        return
    for k, one in zip(order, found, strict=True):
        message = _differ(one, wanted[k])
        if message and not any(str(values[k]) == value and name.startswith(start) for value, start in EXCUSED):
            yield Failure(name, f"the number {values[k]}", mark, message)


# --- settings ----------------------------------------------------------------------------------------------------


@contextmanager
def _default_dtype() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


Setting = Callable[[], AbstractContextManager[Any]]
SETTINGS: dict[str, Setting] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "default dtype": _default_dtype,
    "deterministic": _deterministic,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "default device": lambda: torch.device("cpu"),
    "without oneDNN": lambda: torch.backends.mkldnn.flags(enabled=False),
    "attention in plain operators": lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
}


def check_settings(
    entry: Entry, settings: Sequence[str] = tuple(SETTINGS), samples: int = SAMPLES
) -> Iterator[Failure]:
    """Yield the failures among calls that are made with and without a setting, in turns."""
    for call in calls(entry, samples):
        usual = call.truth()
        for name in settings:
            with SETTINGS[name]():
                special = call.truth()
            forget()
            for on in (False, True, False, True):
                message = _under_setting(call, SETTINGS[name] if on else None, special if on else usual)
                if message and not _is_noise(call, name, on):
                    yield Failure(entry.name, name, "S", f"{'with' if on else 'without'} it: {message}")


def _under_setting(call: Call, setting: Setting | None, wanted: Any) -> str | None:
    def on_rank() -> Any:
        if setting is None:
            return call.on_rank("S")
        with setting():
            return call.on_rank("S")

    try:
        if setting is None:
            return _differ(mw.simulate(on_rank, LINE.size)[0], wanted)
        with setting():
            return _differ(mw.simulate(on_rank, LINE.size)[0], wanted)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]}"


def _is_noise(call: Call, name: str, on: bool) -> bool:
    """True if a call without an earlier plan differs as well, so that plans are not the cause."""
    forget()
    with SETTINGS[name]():
        special = call.truth()
    return _under_setting(call, SETTINGS[name] if on else None, special if on else call.truth()) is not None


# --- the figure --------------------------------------------------------------------------------------------------


def entries(kinds: Sequence[str] = ("function", "in place")) -> list[Entry]:
    return [e for e in _samples.entries(kinds) if e.dtype is not None and e.op.name not in _samples.LEFT_OUT]


def failures_of(entry: Entry, quick: bool = False) -> list[Failure]:
    """Return the failures of one entry."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = [*check_numbers(entry, FEW if quick else VALUES, 1 if quick else SAMPLES)]
        if entry.kind == "function":
            found += check_settings(entry, samples=1)
    return found


def run(quick: bool = False) -> dict[str, Any]:
    """Return the figure: the number of calls that get another call's plan."""
    torch.set_num_threads(1)
    start = time.perf_counter()
    chosen = [*functionals(), *entries()[:: 10 if quick else 1]]
    failures = [f for entry in chosen for f in failures_of(entry, quick)]
    return {
        "name": "plans",
        "value": len(failures),
        "goal": 0,
        "ok": not failures,
        "rival": None,
        "details": {
            "entries": len(chosen),
            "values": [str(v) for v in (FEW if quick else VALUES)],
            "settings": list(SETTINGS),
            "excused": {" ".join(key): why for key, why in EXCUSED.items()},
            "failures": [vars(f) for f in failures[:40]],
            "seconds": round(time.perf_counter() - start),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="every tenth entry, fewer values")
    parser.add_argument("--op", help="one entry")
    args = parser.parse_args()
    if args.op:
        found = [f for e in [*functionals(), *entries()] if args.op in (e.name, e.op.name) for f in failures_of(e)]
        print("\n".join(map(str, found)) or "right")
    else:
        print(json.dumps(run(args.quick)))


if __name__ == "__main__":
    main()
