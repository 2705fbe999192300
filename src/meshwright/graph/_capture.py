"""Capturing a model: one forward pass on fake whole tensors, as a program of the operators that autograd would see.

Nothing is computed and nothing is allocated for parameters, buffers and batches. Tensors that the forward pass makes
of nothing (`torch.arange`) are real when they are small, so that what a model keeps of them is worth keeping.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.layout import MeshwrightError, Spec
from meshwright.tensor import DistTensor, Mark, capturing, operators_recorded

from ._dynamic import DynamicSizes, Fits, sizes_hold
from ._effects import draws, writes_to
from ._errors import CaptureError, SideEffectError
from ._interception import check_hooks, intercepted
from ._node import Origin, Value
from ._program import Program
from ._recording import Recording
from ._side_effects import unchanged
from ._where import user_frame, user_line
from .torch_hooks import DataDependent, FakeMode, FakeTensor, Operator, ShapeEnv, interception_off, unrecorded


@dataclass(frozen=True, slots=True)
class Slot:
    """A parameter or buffer: its first name, all places where modules hold it, how it lies if it is marked."""

    name: str
    tensor: Tensor
    places: tuple[tuple[dict[str, Any], str], ...]
    is_parameter: bool

    @property
    def spec(self) -> Spec | None:
        return self.tensor.spec if isinstance(self.tensor, DistTensor) else None


@dataclass(frozen=True, slots=True)
class Capture:
    """A captured forward pass: its program, what stands for what, and the symbols that are inputs."""

    program: Program
    slots: tuple[Slot, ...]
    mode: FakeMode = field(repr=False)
    symbols: Mapping[Value, Any] = field(repr=False)

    def fits(self) -> Fits:
        """Tells whether a batch has sizes that what was recorded so far is right for."""
        sources = {i.value: i.source for i in self.program.inputs if i.role == "size"}
        return sizes_hold(self.mode, self.symbols, sources)


def slots_of(module: nn.Module) -> tuple[Slot, ...]:
    """Parameters and buffers, each once under its first name."""
    found: dict[int, tuple[str, Tensor, bool, list[tuple[dict[str, Any], str]]]] = {}
    for path, part in module.named_modules():
        for table, is_parameter in ((part._parameters, True), (part._buffers, False)):
            for key, value in table.items():
                if value is None:
                    continue
                name = f"{path}.{key}" if path else key
                found.setdefault(id(value), (name, value, is_parameter, []))[3].append((table, key))
    return tuple(Slot(name, x, tuple(places), is_p) for name, x, is_p, places in found.values())


def capture(
    module: nn.Module,
    call: Callable[..., Any],
    batch: Sequence[Any],
    dynamic: Mapping[int, Collection[int]] | None = None,
) -> Capture:
    """The program of `call(*batch)`, which runs `module`: parameters, buffers and batch are its inputs.

    `dynamic` are the dims, by leaf of the batch, whose sizes may be others in later calls: they are symbolic.
    `call` may return any tree of tensors. Raises CaptureError, with the user's source line, for what cannot become
    part of one program, and SideEffectError for a forward pass that changes what is no tensor.
    """
    check_hooks(module)
    slots = slots_of(module)
    recording = Recording(above=True)
    mode = FakeMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    stage = _Stage(module, mode, recording, DynamicSizes(mode, recording, dynamic or {}))
    fakes = [stage.given(s.tensor, "parameter" if s.is_parameter else "buffer", s.name, s.spec) for s in slots]
    args = _given_batch(stage, tuple(batch), count())
    with _swapped(slots, fakes), unchanged(module):
        with stage.watching():
            out = _called(call, args)
        assigned = _assigned(slots, fakes)
    outputs = recording.tree_of(out)
    values = {id(f): recording.inputs[i].value for i, f in enumerate(fakes)}
    writes = dict(recording.written()) | {values[id(old)]: recording.value_of(new) for old, new in assigned}
    return Capture(Program(tuple(recording.inputs), tuple(recording.nodes), outputs, tuple(writes.items())), slots, mode, stage.sizes.values)


def _assigned(slots: Sequence[Slot], fakes: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Buffers that the forward pass set anew, each with the tensor that it is now."""
    found: list[tuple[Tensor, Tensor]] = []
    for slot, fake in zip(slots, fakes, strict=True):
        for table, key in slot.places:
            new = table.get(key)
            if new is fake:
                continue
            if slot.is_parameter or not isinstance(new, Tensor) or new.shape != fake.shape or new.dtype != fake.dtype:
                raise SideEffectError(
                    "to capture the forward pass", f"{slot.name} is replaced by {type(new).__name__}",
                    "a program keeps its parameters, and the shapes and dtypes of its buffers",
                    "a buffer of one shape, written to by tensor operations",
                )  # fmt: skip
            found.append((fake, new))
    return found


def _given_batch(stage: _Stage, x: Any, number: Iterator[int]) -> Any:
    """The batch with fake tensors; each is an input whose source is its number among the leaves of the batch."""
    if isinstance(x, (tuple, list)):
        items = [_given_batch(stage, v, number) for v in x]
        return type(x)(*items) if hasattr(x, "_fields") else type(x)(items)
    if isinstance(x, Mapping):
        return {k: _given_batch(stage, v, number) for k, v in x.items()}
    at = next(number)
    if isinstance(x, Tensor):
        return stage.given(x, "batch", f"batch_{at}", x.spec if isinstance(x, DistTensor) else None, at)
    return x


def _called(call: Callable[..., Any], args: Sequence[Any]) -> Any:
    try:
        return call(*args)
    except MeshwrightError:
        raise
    except DataDependent as error:
        raise CaptureError(
            f"to capture {user_line(error.__traceback__) or 'the forward pass'}", str(error).split("\n")[0],
            "Python needs a tensor's numbers there, and while a model is captured there are none", WITHOUT_NUMBERS,
        ) from error  # fmt: skip
    except AttributeError as error:
        if not isinstance(error.obj, FakeTensor) or not hasattr(DistTensor, error.name):
            raise
        raise CaptureError(
            f"to capture {user_line(error.__traceback__) or 'the forward pass'}", f".{error.name} of a tensor",
            "a model is captured as for one device: how its tensors lie is decided later",
            "mw.reshard(x, mesh, placements) to say how x is to lie, mw.local_map for a function of local parts",
        ) from error  # fmt: skip


WITHOUT_NUMBERS = "tensor operations (torch.where, masks) instead of .item(), bool() and int() of tensors"


def _check_whole(leaves: Sequence[Any]) -> None:
    for x in leaves:
        if isinstance(x, DistTensor):
            raise CaptureError(
                f"to capture {user_frame() or 'the forward pass'}", f"a distributed tensor {x.spec!r} of the caller's own",
                "a model is captured as for one device, and only its parameters, buffers and batch are taken for whole",
                "register_buffer for a tensor that the module keeps, or the tensor as part of the batch",
            )  # fmt: skip


class _Stage:
    """The setting in which a forward pass is captured."""

    def __init__(self, module: nn.Module, mode: FakeMode, recording: Recording, sizes: DynamicSizes) -> None:
        self.module, self.mode, self.recording, self.sizes = module, mode, recording, sizes
        self.path: list[str] = [""]
        recording.origin = self.origin

    def given(self, x: Tensor, role: Any, name: str, spec: Spec | None, source: Any = None) -> Tensor:
        """A fake whole tensor in the place of `x`."""
        shape = self.sizes.of(x, source) if role == "batch" else tuple(x.shape)
        if spec is not None and role == "batch":
            spec = Spec(spec.mesh, spec.layout, shape, spec.dtype)
        with self.mode:
            fake = torch.empty(shape, dtype=x.dtype, device=_device(x))
        fake.requires_grad_(x.requires_grad)
        if isinstance(x, nn.Parameter):
            fake._is_param = True  # pyright: ignore[reportAttributeAccessIssue]
        fake._lies = spec  # pyright: ignore[reportAttributeAccessIssue]
        self.recording.add_input(fake, role, name, spec, source)
        return fake

    def origin(self) -> Origin:
        return Origin("forward", self.path[-1], user_frame(), torch.is_grad_enabled(), _autocast())

    @contextmanager
    def watching(self) -> Generator[None]:
        """Inside, operators, marks and users' autograd functions are recorded."""
        with ExitStack() as stack:
            for name, part in self.module.named_modules():
                enter = part.register_forward_pre_hook(self._entering(name))
                leave = part.register_forward_hook(lambda *_: self._left(), always_call=True)
                stack.callback(enter.remove)
                stack.callback(leave.remove)
            stack.enter_context(capturing(self.opaque))
            stack.enter_context(intercepted(self.opaque))
            stack.enter_context(operators_recorded(self.note, self.run))
            yield

    def _entering(self, name: str) -> Callable[..., None]:
        return lambda *_: self.path.append(name)

    def _left(self) -> None:
        self.path.pop()

    def run(self, op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Carries an operator out; one that draws, or makes a tensor of symbolic sizes, makes a fake one."""
        leaves = list(_plain_leaves((args, kwargs)))
        _check_whole(leaves)
        if draws(op) and isinstance(args[0], Tensor) and 0 in writes_to(op) and not isinstance(args[0], FakeTensor):
            return args[0]  # what it holds is not known before the program runs
        if not draws(op) and not (self.sizes.dynamic and any(isinstance(a, torch.SymInt) for a in leaves)):
            return op(*args, **kwargs)
        with self.mode:
            return op(*args, **kwargs)

    def note(self, op: Operator, args: Any, kwargs: Any, out: Any) -> None:
        with interception_off():
            if isinstance(out, (bool, int, float)) and self._is_answered(op, args, kwargs):
                return
            self.recording.note(op, args, kwargs, out)

    def _is_answered(self, op: Operator, args: Any, kwargs: Any) -> bool:
        """True for what is asked of constants; raises CaptureError where the answer will be another one."""
        values = [self.recording.value_of(a) for a in _plain_leaves((args, kwargs)) if isinstance(a, Tensor)]
        if values and not all(self.recording.is_constant(v) for v in values):
            raise CaptureError(
                f"to capture {user_frame() or 'the forward pass'}", f"{op._schema.name} of a tensor that is not known yet",
                "Python needs a tensor's numbers there, and while a model is captured there are none", WITHOUT_NUMBERS,
            )  # fmt: skip
        return bool(values)

    def opaque(self, op: Callable[..., Any], args: tuple[Any, ...], shown: Callable[[], Any]) -> Any:
        """A call that is recorded as one node; `shown` gives what it returns, of whole tensors."""
        with unrecorded(), self.mode:
            out = shown()
            if isinstance(op, Mark):
                out._lies = Spec(op.mesh, op.layout, out.shape, out.dtype)
        with interception_off():
            self.recording.note(op, args, {}, out)
        return out


def _plain_leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, (tuple, list)):
        for item in tree:
            yield from _plain_leaves(item)
    elif isinstance(tree, dict):
        yield from _plain_leaves(tuple(tree.values()))
    else:
        yield tree


def _device(x: Tensor) -> torch.device:
    """Where the tensor will be: meta tensors stand for what is not there yet, on the default device."""
    return torch.get_default_device() if x.device.type == "meta" else x.device


def _autocast() -> tuple[str, torch.dtype] | None:
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            return device, torch.get_autocast_dtype(device)
    return None


@contextmanager
def _swapped(slots: Sequence[Slot], fakes: Sequence[Tensor]) -> Generator[None]:
    """Inside, modules hold the fake tensors."""
    try:
        for slot, fake in zip(slots, fakes, strict=True):
            for table, key in slot.places:
                table[key] = fake
        yield
    finally:
        for slot in slots:
            for table, key in slot.places:
                table[key] = slot.tensor

