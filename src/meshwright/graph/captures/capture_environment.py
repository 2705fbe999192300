"""Environment for the capture of a forward pass: fake unsharded tensors, and recording of all operations on them."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from math import prod
from traceback import walk_tb
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.layout import MeshwrightError, Spec, TorchValue, autocast_modes, user_frame, user_line
from meshwright.tensor import (
    STAGE_SPLIT,
    DistTensor,
    ReshardMark,
    StageArrival,
    attention_algorithm,
    capturing,
    leaves_in,
    map_tensors,
    note_spec,
    operators_recorded,
    returns_dtype,
    tensors_in,
    transforming,
)

from .._errors import CaptureError, capture_error
from ..guards import check_not_kept, unobserved, unobserved_if_torchs
from ..program.effects import is_random_operator, writes_to
from ..program.node import Node, Origin
from ..program.program import Role
from ..recording.dynamic_sizes import DynamicSizes
from ..recording.recording import Recording, written_by
from ..torch_hooks import (
    DataDependent,
    FakeMode,
    FakeTensor,
    Operator,
    failures_told,
    faked,
    interception_off,
    unrecorded,
)
from .constant_masks import masks_of, with_positions
from .external_writes import ExternalTensors, takes_view
from .interception import intercepted

WITHOUT_NUMBERS = "use tensor operations (torch.where, masks) instead of .item(), bool() and int() of tensors"

LARGE = 2**30
"""Bytes above which a value is not computed, even if it depends on constants alone. Python cannot read such a value.

Masks of block-sparse attention (BigBird) have gigabytes for a batch of many long sequences.
"""
WIDEST = 16
"""Bytes of the widest number."""

_READERS = {
    "torch.distributions": "pass validate_args=False to the distribution, whose check of its arguments reads numbers",
    "torch.nn.modules.batchnorm": "set momentum to a number, because a BatchNorm with momentum=None reads its counter",
}
"""Modules of torch with code that reads numbers of tensors, and how to avoid it."""

_WITHOUT_MEMORY = ('set the storage of a tensor on device "meta"', "Cannot access storage of")
"""Texts of torch's errors for code that accesses the memory of a fake tensor."""

_OF_TRANSFORM = ("TensorWrapper", "BatchedTensor")
"""The names of the wrappers of `torch.func`, as torch's errors give them."""

_IN_TRANSFORM = (
    "inside a transform, tensors are wrappers of torch, which programs do not have",
    "use torch.autograd.grad(..., create_graph=True) instead of torch.func.grad; or, without a pipeline, pass "
    "Strategy(full_graph=False), which runs code that cannot be captured in Python",
)
"""The reason and the fix in the error for a transform of `torch.func`."""


def called(call: Callable[..., TorchValue], args: Sequence[TorchValue]) -> TorchValue:
    """Return `call(*args)`. Errors that fake tensors cause are converted to CaptureError."""
    try:
        with failures_told():
            return call(*args)
    except MeshwrightError:
        raise
    except (*DataDependent, TypeError) as error:
        if isinstance(error, TypeError) and FakeTensor.__name__ not in str(error):  # a fake tensor used as a number
            raise
        raise _error_at(
            error,
            str(error).split("\n")[0],
            "Python needs a tensor's numbers there, but a captured tensor has none",
            _without_numbers(error),
        ) from error
    except RuntimeError as error:
        if not any(text in str(error) for text in _WITHOUT_MEMORY):
            raise
        raise _error_without_memory(error) from error
    except AttributeError as error:
        if not isinstance(error.obj, FakeTensor) or not hasattr(DistTensor, error.name or ""):
            raise
        raise _error_at(
            error,
            f".{error.name} of a tensor",
            "a model is captured as for one device; layouts are decided later",
            "use mw.reshard(x, mesh, placements) to set a layout, and mw.local_map for a function of local parts",
        ) from error


def _error_without_memory(error: RuntimeError) -> CaptureError:
    """Return the error for a call that needs the memory of a fake tensor."""
    if any(name in str(error) for name in _OF_TRANSFORM):
        return _error_at(error, "a call inside a transform of torch.func", *_IN_TRANSFORM)
    return _error_at(
        error,
        str(error).split("\n")[0],
        "while a model is captured, tensors have no memory to copy or share",
        "use x.clone() instead of copy.copy, copy.deepcopy and set_, and use dense tensors",
    )


def _without_numbers(error: Exception) -> str:
    """Return how to avoid the reading of numbers that raised `error`."""
    names = [str(frame.f_globals.get("__name__")) for frame, _ in walk_tb(error.__traceback__)]
    found = (write for module, write in _READERS.items() for name in names if name.startswith(module))
    return next(found, WITHOUT_NUMBERS)


def _error_at(error: Exception, found: str, why: str, write: str) -> CaptureError:
    """Return the error for the user's line that raised `error`."""
    return CaptureError(f"capturing {user_line(error.__traceback__) or 'the forward pass'}", found, why, write)


def _check_whole(leaves: Sequence[Any]) -> None:
    for x in leaves:
        if isinstance(x, DistTensor):
            raise capture_error(
                f"a distributed tensor {x.spec!r} from outside the model",
                "a model is captured as for one device: only parameters, buffers and batch may be distributed",
                "make the tensor a buffer of the model (for the loss: model.loss = loss), or a part of the batch",
            )


def _too_long(nodes: Sequence[Node], most: int) -> CaptureError:
    """Return the error for a program of more than `most` operators; it names the line and layer with most of them."""
    lines = Counter((node.origin.where, node.origin.layer) for node in nodes)
    (where, layer), count = lines.most_common(1)[0]
    return CaptureError(
        f"capturing a forward pass of at most {most} operators",
        f"{count} of the first {len(nodes)} from {where or 'one line'} in {layer or 'the model'}",
        "each step of a Python loop adds operators, in every layer, and a search visits all of them",
        "write the loop as one operator (torch.cumsum, chunks as in Mamba-2), or call mw.suggest with short sequences: "
        "its patterns hold for all lengths",
    )


class CaptureEnvironment:
    """Environment in which a forward pass is captured."""

    def __init__(
        self,
        module: nn.Module,
        mode: FakeMode,
        recording: Recording,
        sizes: DynamicSizes,
        most: int | None = None,
        in_parts: bool = False,
    ) -> None:
        self.module, self.mode, self.recording, self.sizes, self.most = module, mode, recording, sizes, most
        self.in_parts = in_parts
        self.path: list[str] = [""]
        self.asked: list[Tensor] = []
        self.outside = ExternalTensors(mode)
        self.in_node = False
        recording.origin = self.origin

    def given(self, x: Tensor, role: Role, name: str, spec: Spec | None, leaf: int | None = None) -> Tensor:
        """Return a fake unsharded tensor for `x`, which becomes an input of the program.

        `leaf` is the index of `x` among the leaves of the batch, if it is one.
        """
        shape = tuple(x.shape) if leaf is None else self.sizes.of(x, leaf)
        if spec is not None and leaf is not None:
            spec = Spec(spec.mesh, spec.layout, shape, spec.dtype)
        with self.mode:
            fake = torch.empty(shape, dtype=x.dtype, device=_device(x))
        fake.requires_grad_(x.requires_grad)
        for key in vars(x).keys() - vars(fake).keys():
            if not key.startswith("_"):
                setattr(fake, key, vars(x)[key])
        if isinstance(x, nn.Parameter):
            fake._is_param = True
        note_spec(fake, spec)
        self.recording.add_input(fake, role, name, spec, leaf, role == "parameter" and not x.requires_grad)
        return fake

    def origin(self) -> Origin:
        return Origin(
            "forward", self.path[-1], user_frame(), torch.is_grad_enabled(), _autocast(), attention_algorithm()
        )

    @contextmanager
    def watching(self) -> Generator[None]:
        """Record operators, marks and users' autograd functions inside the context."""
        with ExitStack() as stack, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The .grad attribute")  # raised when a tensor is faked
            for name, part in self.module.named_modules():
                enter = part.register_forward_pre_hook(self._entering(name))
                leave = part.register_forward_hook(lambda *_: self._left(), always_call=True)
                stack.callback(enter.remove)
                stack.callback(leave.remove)
            stack.enter_context(capturing(self.opaque))
            stack.enter_context(intercepted(self.opaque))
            stack.enter_context(operators_recorded(unobserved(self.note), self.run, self.in_parts))
            yield

    def _entering(self, name: str) -> Callable[..., None]:
        return lambda *_: self.path.append(name)

    def _left(self) -> None:
        self.path.pop()

    def run(self, op: Operator, args: tuple[TorchValue, ...], kwargs: dict[str, TorchValue]) -> TorchValue:
        """Run an operator. Random operators, and those with symbolic sizes or large results, return fake tensors."""
        args = self._without_masks(op, args)
        leaves = list(leaves_in((args, kwargs)))
        _check_whole(leaves)
        check_not_kept(leaves, op)
        with interception_off():
            self.outside.note(written_by(op, args, kwargs), self.recording.made)
            if self.outside.stands_in(op, (args, kwargs)):
                return unobserved(self.outside.run)(op, args, kwargs)
        if op is torch.ops.aten.lift_fresh.default and not isinstance(args[0], FakeTensor):
            return self.outside.lifted(args[0])
        if is_random_operator(op) and 0 in writes_to(op) and not isinstance(args[0], FakeTensor):
            return args[0]  # its content is unknown before the program runs
        is_sized = not (self.sizes.dynamic and any(isinstance(a, torch.SymInt) for a in leaves))
        is_large = self._is_large(op, args, kwargs, leaves)
        if is_large:
            args, kwargs = map_tensors(self._faked, (args, kwargs))
        is_real = is_sized and not is_large and not is_random_operator(op)
        with self._in_one_node(), nullcontext() if is_real else self.mode:
            return unobserved_if_torchs(op)(*args, **kwargs)

    def _is_large(
        self, op: Operator, args: tuple[TorchValue, ...], kwargs: dict[str, TorchValue], leaves: Sequence[Any]
    ) -> bool:
        """True if an operator on real tensors would make a value of more than `LARGE` bytes."""
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        if any(isinstance(x, FakeTensor) or x.requires_grad for x in tensors) or not _may_be_large(leaves):
            return False
        if writes_to(op) or takes_view(op, args):
            return False
        fake_args, fake_kwargs = map_tensors(self._faked, (args, kwargs))
        with unrecorded(), self.mode, torch.no_grad():
            try:
                out = op(*fake_args, **fake_kwargs)
            except Exception:  # it needs numbers, has no form for fake tensors, or also fails on the real ones
                return False
            return any(x.untyped_storage().nbytes() > LARGE for x in tensors_in(out))

    def _faked(self, x: Tensor) -> Tensor:
        return faked(self.mode, x)

    @contextmanager
    def _in_one_node(self) -> Generator[None]:
        """Record no autograd functions inside the context: they are parts of the node that is recorded there."""
        before, self.in_node = self.in_node, True
        try:
            yield
        finally:
            self.in_node = before

    def _without_masks(self, op: Operator, args: tuple[TorchValue, ...]) -> tuple[TorchValue, ...]:
        """Return the arguments with constant masks replaced by positions; the masks count as read."""
        with interception_off():
            return with_positions(args, self._read_if_constant) if masks_of(op, args) else args

    def _read_if_constant(self, x: Tensor) -> bool:
        """True if the numbers of `x` are those of constants; these then count as read by Python code."""
        behind = None if self.outside.was_written(x) else self.recording.constants_behind(self.recording.value_of(x))
        self.asked += behind or ()
        return behind is not None

    def note(self, op: Operator, args: TorchValue, kwargs: TorchValue, out: TorchValue) -> None:
        if transforming():
            raise capture_error(f"{op} inside a transform of torch.func", *_IN_TRANSFORM)
        if any(isinstance(leaf, torch.Generator) for leaf in leaves_in((args, kwargs))):
            raise capture_error(
                f"{op} with its own generator",
                "a program draws from torch's default generator, and would not advance another one",
                "leave out `generator=`, and call torch.manual_seed(seed)",
            )
        with interception_off():
            if returns_dtype(op):
                return  # no elements decide it
            if isinstance(out, (bool, int, float)) and self._is_answered(op, args, kwargs):
                return
            if self._is_sized_by_constants(op, args, kwargs):
                return  # its result is a constant of the program, because fake tensors have no such shape
            if op is STAGE_SPLIT:  # x[:] of a model, which starts no chunk
                op, args = torch.ops.aten.permute.default, (args[0], list(range(args[0].dim())))
            args = self._without_masks(op, args)
            self.recording.note(op, args, kwargs, out)
            if self.most is not None and len(self.recording.nodes) > self.most:
                raise _too_long(self.recording.nodes, self.most)

    def _is_sized_by_constants(self, op: Operator, args: TorchValue, kwargs: TorchValue) -> bool:
        """True for an operator whose result's shape depends on the elements of its operands, if all are constants."""
        tensors = list(tensors_in((args, kwargs)))
        if not tensors or any(isinstance(x, FakeTensor) for x in tensors):
            return False
        if not all(self.recording.is_constant(self.recording.value_of(x)) for x in tensors):
            return False
        return _needs_numbers(op, args, kwargs) and self._is_answered(op, args, kwargs)

    def _is_answered(self, op: Operator, args: TorchValue, kwargs: TorchValue) -> bool:
        """True if Python code reads elements of constants only.

        Raises CaptureError if the elements may differ between runs, and for an assignment `x.data = y`.
        """
        if op._schema.name == "aten::_has_compatible_shallow_copy_type":
            raise capture_error(
                "an assignment x.data = y",
                "x would share the memory of y from then on, but a program keeps the memory of its tensors",
                "write x.copy_(y), under torch.no_grad() if x is a parameter",
            )
        values = [self.recording.value_of(x) for x in tensors_in((args, kwargs))]
        behind = [self.recording.constants_behind(v) for v in values]
        written = any(map(self.outside.was_written, tensors_in((args, kwargs))))
        if written or None in behind:
            raise capture_error(
                f"{op._schema.name} of a tensor without numbers",
                "Python needs a tensor's numbers there, but a captured tensor has none",
                WITHOUT_NUMBERS,
            )
        self.asked += [x for constants in behind for x in constants or ()]
        return bool(values)

    def opaque(
        self, op: Callable[..., Any], args: tuple[TorchValue, ...], shown: Callable[[], TorchValue]
    ) -> TorchValue:
        """Record a call as one node; `shown()` returns its result as fake unsharded tensors.

        Nested calls, such as a user's function that another one calls, are part of the node.
        """
        if self.in_node:
            return shown()
        with self._in_one_node(), unrecorded(), self.mode:
            out = shown()
        with unrecorded(), self.mode:
            if isinstance(op, ReshardMark) and not isinstance(op, StageArrival):
                note_spec(out, Spec(op.mesh, op.layout, out.shape, out.dtype))
        with interception_off():
            self.recording.note(op, args, {}, out)
        return out


def _may_be_large(leaves: Sequence[Any]) -> bool:
    """True if a result may have more than `LARGE` bytes.

    The product of all sizes and numbers of elements bounds it, or the square of one of them (`eye`, `diag`).
    """
    sizes = [x.numel() if isinstance(x, Tensor) else abs(x) if type(x) is int else 1 for x in leaves]
    most = max(prod(max(size, 1) for size in sizes), max(sizes, default=1) ** 2)
    return most * WIDEST > LARGE


def _needs_numbers(op: Operator, args: TorchValue, kwargs: TorchValue) -> bool:
    """True if torch cannot infer the shape of the result without the elements of the operands."""

    def numberless(x: Tensor) -> Tensor:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)

    with unrecorded(), FakeMode(), torch.no_grad():
        try:
            op(*map_tensors(numberless, args), **map_tensors(numberless, kwargs))
        except DataDependent:
            return True
        except Exception:  # torch refuses fake tensors with various errors
            return False
    return False


def _device(x: Tensor) -> torch.device:
    """Return the device of the tensor; for a meta tensor, which is not allocated yet, the default device."""
    return torch.get_default_device() if x.device.type == "meta" else x.device


def _autocast() -> tuple[str, torch.dtype] | None:
    return next(iter(autocast_modes()), None)
