"""Level 1: every operator that has a rule, in each floating-point type of the device, against the CPU.

The table of calls is `operator_samples.txt`, one line each: `operator: arguments`. In the arguments, `x` is normal, `f`
the same in single precision, `p` is between 0.1 and 0.9, `i(n, ...)` are integers below n, `b` is true or false, `c`
complex, `ends(...)` are the ends of groups. The tests of the rules walk the same table. Sizes of 4 and 5 make uneven
and empty pieces on three ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from meshwright.layout import read_text_file

from ..results.check import Check, NotRun, Target, WrongResult
from .comparison import TOLERANCE, expect_close, tensors_in

SAMPLES = Path(__file__).with_name("operator_samples.txt")
GONE = {"cholesky", "qr"}
"""Operators that torch 2.15 has removed."""
UP_TO_SIGN = {"linalg_qr", "qr", "linalg_svd", "_linalg_svd", "linalg_eigh", "linalg_eig", "linalg_eigvals"}
"""Operators that define their results only up to signs or order."""
WITH_TIES = {
    *("max", "min", "argmax", "argmin", "median", "nanmedian", "mode", "kthvalue", "sort", "argsort", "topk"),
    *("cummax", "cummin", "aminmax"),
}
"""Operators that may return any of several indices if numbers are equal."""
WITHOUT_VALUES = {"empty_like", "new_empty"}
"""Operators that leave the memory of their results as it is."""
ONLY_CPU = {"_weight_int4pack_mm_for_cpu"}
WITH_INPUT_DTYPE = {"_softmax_backward_data", "_log_softmax_backward_data"}
"""Operators with the dtype of their input as an argument."""
RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
"""Operators whose kernels of cuDNN 9 differ by up to 6e-5 in single precision, measured on an H200."""
IN_SINGLE = {"hardsigmoid", "hardswish"}
"""Operators whose kernels of CUDA round constants to single precision, in torch 2.11 too."""
WITH_OWN_SUMS = {"native_layer_norm", "native_group_norm"}
"""Operators that return means of 16-bit numbers in 16 bits on the CPU, and in 32 bits on other devices."""
WIDER = {**dict.fromkeys(IN_SINGLE, TOLERANCE[torch.float32]), **dict.fromkeys(RECURRENT, 2e-4)}
"""Least tolerance of an operator."""
FIRST_RESULT = {"embedding_bag"}
"""Operators whose other results depend on the device."""
WIDE = {torch.float64: torch.complex128, torch.float32: torch.complex64}
HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class OperatorCall:
    """A call of an operator with tensors on the CPU, in double precision."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def mapped(self, change: Callable[[Tensor], Tensor]) -> OperatorCall:
        """Return the call with other tensors."""
        args = tuple(_mapped(each, change) for each in self.args)
        return OperatorCall(self.op, args, {name: _mapped(each, change) for name, each in self.kwargs.items()})

    @property
    def tensors(self) -> list[Tensor]:
        return tensors_in([*self.args, *self.kwargs.values()])

    def run(self) -> list[Tensor]:
        return tensors_in(self.op(*self.args, **self.kwargs))


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple | list):
        items: Sequence[Any] = value
        return [_mapped(item, change) for item in items]
    return value


def sample_lines() -> list[tuple[str, str]]:
    """Return operator and arguments of every sample of an operator that this torch has."""
    pairs = (line.partition(": ") for line in read_text_file(SAMPLES).splitlines())
    gone = {name for name in GONE if not hasattr(torch.ops.aten, name)}
    return [(name, arguments) for name, _, arguments in pairs if name not in gone]


def build_call(name: str, arguments: str) -> OperatorCall:
    """Return the call of a sample; equal samples have equal numbers."""
    torch.manual_seed(sum(map(ord, name + arguments)))
    args, kwargs = eval(f"call({arguments})", dict(_NAMES))  # the table is code of this package, and never input
    return OperatorCall(operator_named(name), args, kwargs)


def operator_named(name: str) -> Any:
    """Return an overload by its name, `add.Tensor`, or the first overload of `neg`."""
    packet, _, which = name.partition(".")
    found = getattr(torch.ops.aten, packet)
    return getattr(found, which or ("default" if "default" in found.overloads() else found.overloads()[0]))


def _normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, device="cpu")


def _positive(x: Tensor) -> Tensor:
    return x @ x.mT + torch.diag(torch.arange(1.0, 1 + x.shape[-1], dtype=x.dtype, device="cpu"))


_NAMES: dict[str, Any] = {
    "torch": torch,
    "x": _normal,
    "p": lambda *s: torch.rand(s, dtype=torch.float64, device="cpu") * 0.8 + 0.1,
    "i": lambda n, *s: torch.randint(0, n, s, device="cpu"),
    "i8": lambda *s: torch.randint(-9, 9, s, dtype=torch.int8, device="cpu"),
    "f": lambda *s: torch.randn(s, device="cpu"),
    "f8": lambda *s: torch.randint(-2, 3, s, device="cpu").to(torch.float8_e4m3fn),
    "one": lambda *s: torch.ones(s, device="cpu"),
    "ends": lambda *s: torch.tensor(s, dtype=torch.int32, device="cpu"),
    "b": lambda *s: torch.rand(s, device="cpu") < 0.6,
    "c": lambda *s: torch.randn(s, dtype=torch.complex128, device="cpu"),
    "same": lambda *s: torch.randint(0, 2, s, device="cpu").double(),
    "tri": lambda *s: torch.ones(s, dtype=torch.bool, device="cpu").tril(),
    "spd": lambda b, n: _positive(torch.randn(b, n, n, dtype=torch.float64, device="cpu")),
    "pack4": lambda n, k: torch.ops.aten._convert_weight_to_int4pack_for_cpu(
        torch.randint(7, 10, (n, k), device="cpu").int(), 1
    ),
    "call": lambda *args, **kwargs: (args, kwargs),
}


def check_operator(name: str, calls: Sequence[tuple[str, str]], target: Target) -> str:
    """Compare all sample calls of an operator, and their gradients, with the CPU; return the dtypes that were compared.

    A dtype is left out if the CPU refuses the call too. A device may refuse all dtypes but float32: this costs no wrong
    numbers.
    """
    if name in ONLY_CPU and target.device.type != "cpu":
        raise NotRun("an operator of the CPU")
    compared: dict[str, None] = {}
    refused: dict[str, None] = {}
    for overload, arguments in calls:
        call = build_call(overload, arguments)
        for dtype in _dtypes_of(call, target):
            title = f"{overload}({arguments}) in {_short(dtype)}"
            try:
                if _compare(name, call, dtype, target.device, title):
                    compared[_short(dtype)] = None
            except (RuntimeError, TypeError) as error:  # the class depends on the device
                if dtype is torch.float32 or not _is_refusal(error):
                    raise
                refused[_short(dtype)] = None
    if not compared and not refused:
        raise NotRun("the CPU of this build of torch refuses the operator")
    return ", ".join(compared) + (f"; refused: {', '.join(refused)}" if refused else "")


def _short(dtype: torch.dtype | None) -> str:
    return "its own types" if dtype is None else str(dtype).removeprefix("torch.")


def _dtypes_of(call: OperatorCall, target: Target) -> tuple[torch.dtype | None, ...]:
    """Return the dtypes to try; None if the operator has no floating-point operand whose type could change."""
    return target.dtypes if any(_is_wide(x) for x in call.tensors) else (None,)


def _is_wide(x: Tensor) -> bool:
    """True for floating-point and complex numbers of at least 32 bits."""
    return x.dtype.is_complex or (x.dtype.is_floating_point and x.dtype.itemsize >= 4)


def _is_refusal(error: Exception) -> bool:
    text = str(error).lower()
    words = (
        "not implemented for",
        "not supported",
        "unsupported",
        "expected",
        "only support",
        "must be",
        "should be",
        "needs to be",
        "not available",
    )
    return isinstance(error, NotImplementedError) or any(word in text for word in words)


def _compare(name: str, call: OperatorCall, dtype: torch.dtype | None, device: torch.device, title: str) -> bool:
    """Compare one call in one dtype, and its gradients; return False if the CPU refuses it too."""
    rounded = call if dtype is None else _call_in_dtype(name, call, dtype)
    expected = _on_cpu(name, rounded)
    if expected is None:
        return False
    found = _results(name, rounded, device, expected.has_gradients)
    if len(found) != len(expected.tensors):
        raise WrongResult(f"{title}: {len(found)} results and gradients instead of {len(expected.tensors)}")
    exact = None if dtype in (None, torch.float64) else _on_cpu(name, rounded.mapped(_in_double))
    has_exact = exact is not None and len(exact.tensors) == len(found)
    has_ties = name in WITH_TIES and _has_equal_numbers(rounded)
    tolerance = WIDER.get(name, 0.0) or _tolerance_of_types(rounded)
    for at, (x, goal) in enumerate(zip(found, expected.tensors, strict=True)):
        if not (has_ties and not goal.dtype.is_floating_point):
            near = x.to(goal.dtype) if name in WITH_OWN_SUMS and goal.dtype in HALF else x
            expect_close(near, goal, title, exact.tensors[at] if has_exact and exact is not None else None, tolerance)
    return True


def _call_in_dtype(name: str, call: OperatorCall, dtype: torch.dtype) -> OperatorCall:
    """Return the call with wide operands in this dtype."""
    args = tuple(dtype if isinstance(each, torch.dtype) and name in WITH_INPUT_DTYPE else each for each in call.args)
    return OperatorCall(call.op, args, call.kwargs).mapped(lambda x: _in_dtype(x, dtype))


def _tolerance_of_types(call: OperatorCall) -> float:
    """Return the tolerance of the narrowest floating-point type among the arguments that are types; 0 without one."""
    types = [each for each in (*call.args, *call.kwargs.values()) if isinstance(each, torch.dtype)]
    return max((TOLERANCE.get(each, 0.0) for each in types), default=0.0)


def _in_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the tensor in this dtype; 16 bits have no complex numbers, so that those stay in 64 bits."""
    if not _is_wide(x):
        return x
    return x.to(WIDE.get(dtype, torch.complex64) if x.dtype.is_complex else dtype)


@dataclass(frozen=True, slots=True)
class _Expected:
    """Results of the CPU, and then the gradients of all operands that have one."""

    tensors: list[Tensor]
    has_gradients: bool


def _on_cpu(name: str, call: OperatorCall) -> _Expected | None:
    """Return what the CPU computes, without gradients if torch has none; None if the CPU refuses the call."""
    for has_gradients in (True, False):
        try:
            return _Expected(_results(name, call, torch.device("cpu"), has_gradients), has_gradients)
        except Exception:  # torch refuses by errors of many classes, and a crash ends the process
            continue
    return None


def _results(name: str, call: OperatorCall, device: torch.device, has_gradients: bool) -> list[Tensor]:
    """Return the results, and then the gradients of all operands that have one, on the CPU."""
    moved = call.mapped(lambda x: x.to(device, copy=True))
    operands = [x.requires_grad_() for x in moved.tensors if has_gradients and _can_have_gradient(x)]
    values = moved.run()
    results = [value.detach().cpu() for value in values]
    if name in FIRST_RESULT:
        results = results[:1]
    if name in WITHOUT_VALUES:
        return [torch.zeros_like(x) for x in results]
    if name in UP_TO_SIGN:
        return [x.abs().sort().values if name == "linalg_eigvals" else x.abs() for x in results]
    return [*results, *_gradients(values, operands)]


def _gradients(values: Sequence[Tensor], operands: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients of all operands that have one, on the CPU."""
    losses = [_weighted(x) for x in values if x.requires_grad]
    if not losses:
        return []
    found = torch.autograd.grad(sum(losses[1:], losses[0]), operands, allow_unused=True)
    gradients = cast(Sequence[Tensor | None], found)
    return [x.cpu() for x in gradients if x is not None]


def _can_have_gradient(x: Tensor) -> bool:
    return (x.dtype.is_floating_point or x.dtype.is_complex) and x.dtype.itemsize > 1


def _weighted(x: Tensor) -> Tensor:
    """Return the sum of the elements, each with its own weight."""
    flat = torch.view_as_real(x.resolve_conj()).flatten() if x.dtype.is_complex else x.flatten()
    weights = torch.arange(flat.numel(), device="cpu").add(1).cos().to(flat.device, flat.dtype)
    return (flat * weights).sum()


def _in_double(x: Tensor) -> Tensor:
    """Return the tensor in double precision, if it has at least 16 bits."""
    if x.dtype.is_complex:
        return x.to(torch.complex128)
    return x.double() if x.dtype.is_floating_point and x.dtype.itemsize > 1 else x


def _has_equal_numbers(call: OperatorCall) -> bool:
    return any(x.unique().numel() < x.numel() for x in call.tensors if not x.dtype.is_complex)


def operator_checks() -> Iterator[Check]:
    """Yield one check for each operator, in the order of the table."""
    calls: dict[str, list[tuple[str, str]]] = {}
    for name, arguments in sample_lines():
        calls.setdefault(name.partition(".")[0], []).append((name, arguments))
    for name, lines in calls.items():
        yield Check(1, name, partial(check_operator, name, lines), limit=30.0)


OPERATORS = tuple(operator_checks())
