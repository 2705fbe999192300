"""All calls that reach the memory of a tensor in torch, NumPy, safetensors and Python, found by walking their names.

A `Way` is a function of `lay`. `lay` returns a tensor unchanged on one device, and distributes it on a mesh. The result
of a way and the tensors that it may have written to must be the same in both cases, or the way must raise an error.
Arguments come from a list of candidates, and the candidates that one device accepts are kept. So a member that a later
torch adds becomes a way without a change here.
"""

from __future__ import annotations

import copy
import ctypes
import inspect
import io
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import safetensors.torch
import torch
import torch.utils.data
from torch import Tensor, nn

import meshwright.tensor  # noqa: F401 - replaces functions of torch that are walked below

Lay = Callable[[Tensor], Any]


@dataclass(frozen=True)
class Way:
    """A call that may reach the memory of a tensor."""

    group: str
    name: str
    call: Callable[[Lay], Any]

    def __str__(self) -> str:
        return f"{self.group}: {self.name}"


def value(rows: int = 3) -> Tensor:
    """Return a matrix of numbers between 0 and 1, where most functions are defined."""
    return torch.arange(1.0, 1.0 + 2 * rows).view(rows, 2) / (2 * rows + 2)


NAMED: dict[str, Callable[[], Tensor]] = {
    "x": value,
    "y": lambda: value() * 0.5 + 0.2,
    "mask": lambda: value() > 0.4,
    "index": lambda: torch.tensor([[0, 1], [1, 0], [2, 1]]),
    "row": lambda: torch.tensor([0.5, 0.25]),
    "number": lambda: torch.tensor(0.5),
    "count": lambda: torch.tensor(2),
}
"""Name in a list of candidate arguments → the tensor in its place; other arguments are passed as they are."""
CANDIDATES: list[tuple[Any, ...]] = [
    (), ("y",), (0,), (1,), (0, 1), (2.0,), ("y", "y"), (0, "index"), (0, "index", "y"), (torch.float64,), ((2, 3),),
    ("mask",), ("mask", 1.0), ("mask", "y"), ([0],), (abs,), ("y", max), ("index",), ("number",), ("count",), ("row",),
]  # fmt: skip
"""Candidate arguments of methods, beside the tensor itself."""
FUNCTION_CANDIDATES: list[tuple[Any, ...]] = [
    ("x",), (["x", "y"],), ("x", "y"), ("x", 0), ("number",), ("count",), ("count", "count"), (("count", 2),),
    ((2,), "number"), (0, "count"), (0.0, "number", 3), ("index.T", "row3", (3, 2)), ("x", "count"), ("x", "number"),
]  # fmt: skip
"""Arguments of functions."""
NAMED |= {"index.T": lambda: torch.tensor([[0, 1, 2], [1, 0, 1]]), "row3": lambda: torch.tensor([0.5, 0.25, 1.0])}
KEPT = 2
"""Number of argument lists that are tried for each member, among those that one device accepts."""

_OF_PYTHON = {
    "__class__", "__delattr__", "__dict__", "__dir__", "__doc__", "__getattribute__", "__init__", "__init_subclass__",
    "__module__", "__new__", "__setattr__", "__subclasshook__", "__torch_dispatch__", "__torch_function__",
    "__weakref__", "__annotations__", "__getstate__", "__sizeof__", "__dlpack_c_exchange_api__",
}  # fmt: skip
"""Members that concern the Python object and not the tensor."""
_LOCAL_BY_CONTRACT = {"__repr__", "__str__", "__hash__", "_cdata", "_clear_non_serializable_cached_data"}
"""Members that describe the object in this process; their text names the rank and the part."""


def given(arguments: tuple[Any, ...], lay: Lay) -> tuple[Any, ...]:
    """Return the arguments with new tensors in place of names."""
    return tuple(_given(a, lay) for a in arguments)


def _given(argument: Any, lay: Lay) -> Any:
    if isinstance(argument, str):
        return lay(NAMED[argument]())
    if isinstance(argument, (list, tuple)):
        return type(argument)(_given(a, lay) for a in argument)
    return argument


def plainly(x: Tensor) -> Tensor:
    return x


def accepted(call: Callable[..., Any], candidates: list[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    """Yield the first lists of arguments that `call` accepts on one device."""
    found = 0
    for arguments in candidates:
        try:
            torch.manual_seed(0)
            call(*given(arguments, plainly))
        except Exception:  # the call may refuse with any error
            continue
        yield arguments
        found += 1
        if found == KEPT:
            return


def _is_undetermined(name: str) -> bool:
    """True for functions that return uninitialized memory, or an address among numbers."""
    return "empty" in name or name.startswith("fbgemm_")


def members() -> Iterator[str]:
    skipped = _OF_PYTHON | _LOCAL_BY_CONTRACT
    return (name for name in dir(Tensor) if name not in skipped and not _is_undetermined(name))


def attributes() -> Iterator[Way]:
    for name in members():
        if not callable(getattr(Tensor, name, None)):
            yield Way("attribute", name, lambda lay, n=name: _with(lay(value()), lambda x: getattr(x, n)))


def _with(x: Any, read: Callable[[Any], Any]) -> tuple[Any, Any]:
    """Return the result of reading `x`, and `x` afterwards."""
    return read(x), x


def methods() -> Iterator[Way]:
    """Yield methods of a distributed tensor, and of a plain tensor with distributed arguments."""
    for name in members():
        member = getattr(Tensor, name, None)
        if not callable(member) or name in ("backward", "__deepcopy__"):
            continue
        for arguments in accepted(lambda *a, n=name: getattr(value(), n)(*a), CANDIDATES):
            text = f"{name}({', '.join(map(str, arguments))})"
            yield Way("method", text, lambda lay, n=name, a=arguments: _called(lay(value()), n, given(a, lay)))
            if any(isinstance(a, str) for a in arguments):
                call = lambda lay, n=name, a=arguments: _called(value(), n, given(a, lay))  # noqa: E731
                yield Way("method of a plain tensor", text, call)


def _called(x: Any, name: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    torch.manual_seed(0)
    return getattr(x, name)(*arguments), x, arguments


def setters() -> Iterator[Way]:
    """Yield `x.name = y.name` for every attribute of a tensor that can be set."""
    for name in members():
        descriptor = getattr(Tensor, name, None)
        if callable(descriptor) or not hasattr(descriptor, "__set__") or name.startswith("__"):
            continue
        for x, y in (("laid out", "laid out"), ("laid out", "plain"), ("plain", "laid out")):
            yield Way("setter", f"{x} x.{name} = of {y} y", lambda lay, n=name, x=x, y=y: _set(lay, n, x, y))


def _set(lay: Lay, name: str, x: str, y: str) -> Any:
    target, source = (lay(v) if kind == "laid out" else v for v, kind in ((value(), x), (value() + 1, y)))
    setattr(target, name, source if name in ("data", "grad") else getattr(source, name))
    return target, getattr(target, name)


class _Asked(Exception):
    """Signal that a function called `__torch_function__`."""


class _Probe(Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _Asked


def _asks(function: Callable[..., Any], arguments: tuple[Any, ...]) -> bool:
    def probe(x: Tensor) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return x.as_subclass(_Probe)

    try:
        function(*given(arguments, probe))
    except _Asked:
        return True
    except Exception:  # the function raised an error before it called `__torch_function__`
        return False
    return False


_MODULES: dict[str, Any] = {
    "torch": torch, "torch.nn.functional": nn.functional, "torch.nested": torch.nested, "torch.sparse": torch.sparse,
    "torch.utils.dlpack": torch.utils.dlpack, "torch.linalg": torch.linalg, "torch.special": torch.special,
    "torch.fft": torch.fft, "torch.autograd": torch.autograd, "torch.nn.init": nn.init, "torch.random": torch.random,
    "torch.testing": torch.testing, "torch.nn.utils": nn.utils,
}  # fmt: skip
_NOT_CALLED = {
    "set_", "seed", "manual_seed", "initial_seed", "fork", "compile", "exit", "import", "load", "hub", "export", "save",
    "use_deterministic", "get_file_path", "vmap", "wait", "is_warn_always", "get_", "unify", "_", "cond", "while_loop",
    "has_torch_function",
}  # fmt: skip
"""Prefixes of names of functions that change the process, or take functions or files."""


def functions() -> Iterator[Way]:
    """Yield functions of torch that never call `__torch_function__` for one of their tensors."""
    for owner, module in _MODULES.items():
        for name, function in sorted(vars(module).items()):
            skipped = name.startswith(tuple(_NOT_CALLED)) or _is_undetermined(name) or inspect.isclass(function)
            if not callable(function) or skipped:
                continue
            for arguments in accepted(function, FUNCTION_CANDIDATES):
                if not _asks(function, arguments):
                    text = f"{owner}.{name}({', '.join(map(str, arguments))})"
                    yield Way("function", text, lambda lay, f=function, a=arguments: _applied(f, given(a, lay)))


def _applied(function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[Any, Any]:
    torch.manual_seed(0)
    return function(*arguments), arguments


def read_address(x: Any, at: int) -> list[int]:
    """Return the bytes at an address, as many as `x` has, read as C code would."""
    return list(ctypes.string_at(at, x.numel() * x.element_size()))


def read_strided(x: Any) -> list[list[float]]:
    """Return the elements of a matrix, read by its address and its strides as C code would."""
    numbers = np.frombuffer(bytes(read_address(x, x.data_ptr())), np.float32)
    rows, columns = x.stride()
    return [[float(numbers[i * rows + j * columns]) for j in range(x.shape[1])] for i in range(x.shape[0])]


def _saved(lay: Lay) -> Any:
    buffer = io.BytesIO()
    torch.save({"x": lay(value())}, buffer)
    buffer.seek(0)
    return torch.load(buffer)


class _Two(nn.Module):
    """A module with tied weights."""

    def __init__(self, lay: Lay) -> None:
        super().__init__()
        self.weight = nn.Parameter(lay(value()))
        self.same = self.weight


def _save_model(lay: Lay) -> Any:
    with TemporaryDirectory() as folder:
        safetensors.torch.save_model(_Two(lay), f"{folder}/m.safetensors")
        return safetensors.torch.load_file(f"{folder}/m.safetensors")


def _save_file(lay: Lay) -> Any:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "x.safetensors"
        safetensors.torch.save_file({"x": lay(value()), "i": lay(NAMED["index"]())}, path)
        return safetensors.torch.load_file(path)


def _swapped(lay: Lay) -> Any:
    x, y = lay(value()), value(4)
    torch.utils.swap_tensors(x, y)
    return x, y


def _stored_typed(x: Any) -> Any:
    return list(x.storage())


def _written(lay: Lay, write: Callable[[Any], Any]) -> Any:
    x = lay(value())
    write(x)
    return x


def _aliased(lay: Lay, call: Callable[[Any], Any]) -> Any:
    """Return the tensor after a write to the result of `call`, which may share the tensor's memory."""
    return _written(lay, lambda x: call(x).fill_(7.0))


def _array_written(array: Any) -> None:
    array[...] = 7.0


def _freed(x: Any) -> Any:
    x.untyped_storage().resize_(0)
    return x.untyped_storage().nbytes()


def _read_again(x: Any) -> Any:
    first = read_address(x, x.data_ptr())
    x.add_(1.0)
    return first, read_address(x, x.data_ptr())


def _read_after_data(x: Any) -> Any:
    data = x.data
    first = read_address(x, x.data_ptr())
    data.add_(1.0)
    second = read_address(x, x.data_ptr())
    x.data.add_(1.0)
    return first, second, read_address(x, x.data_ptr())


def _tied(x: Any) -> Any:
    """Return, for each pair of tensors made from `x`, True if their addresses agree; then the same for storages."""
    several = [x.detach(), x.detach(), x, x.clone(), x.view(-1)]
    addresses = [t.data_ptr() for t in several]
    storages = [t.untyped_storage().data_ptr() for t in several]
    return [[a == b for b in found] for found in (addresses, storages) for a in found]


def _distances(x: Any) -> Any:
    """Return the distances of the addresses of views from that of `x`, whose address is read last."""
    views = (x.detach(), x.t(), x[:, 1], x[2:], x[1:][:, 1], x.view(-1)[3:], x.data)
    addresses = [view.data_ptr() for view in views]
    return [address - x.data_ptr() for address in addresses]


def _offsets(x: Any) -> Any:
    views = (x, x.t(), x[:, 1], x[2:], x[1:][:, 1], x.view(-1)[3:], x.t()[1], x.detach()[3])
    return [view.storage_offset() for view in views]


def _same_memory(x: Any) -> Any:
    return [x.is_set_to(other) for other in (x, x[:], x.detach(), x.t(), x.clone())]


def _stored_view(lay: Lay) -> Any:
    """Return the bytes of the storages of views of a tensor and of a transposed one."""
    x, y = lay(value(4)), lay(value(4)).t().clone()
    return [list(bytes(view.untyped_storage())) for view in (x[:, 1], x[1:], y[1:], y[:, 1], y[:, 1:][1])]


def _laid_out(x: Any) -> Any:
    array = x.numpy()
    return list(array.strides), array.ravel("K").tolist()


def _end(x: Any) -> Any:
    return x.view(-1)[-1].data_ptr() - x.data_ptr(), x.untyped_storage().nbytes()


def _exchanged(x: Any) -> Any:
    """Return the memory that C code would reach by `__dlpack_c_exchange_api__`, or else by `__dlpack__`."""
    if type(x) is Tensor:
        return "the memory"
    return "the memory" if getattr(type(x), "__dlpack_c_exchange_api__", None) is None else "the part"


def _stale(x: Any) -> Any:
    view = x[1:]
    x.add_(1.0)
    return view


def _data_of_plain(lay: Lay) -> Any:
    x = torch.zeros(3, 2)
    x.data = lay(value())
    return x, x + 1


def _data_of_parameter(lay: Lay) -> Any:
    x = nn.Parameter(torch.zeros(3, 2))
    x.data = lay(value())
    (x * x).sum().backward()
    return x, x.grad, isinstance(x, nn.Parameter)


def _data_of(lay: Lay, new: Tensor) -> Any:
    x = lay(value())
    x.data = new
    return x, x + 1, tuple(x.shape)


def _assigned(lay: Lay) -> Any:
    module = nn.Linear(2, 3, bias=False)
    module.load_state_dict({"weight": lay(value())}, assign=True)
    return module.weight


def _computed(lay: Lay) -> Any:
    """Return a computed tensor, which has an autograd node."""
    return lay(value().requires_grad_()).exp()


def _no_change(*grads: Any) -> None:
    """Leave the gradients of a node as they are."""


def _of_edge(x: Tensor) -> Any:
    """Return the gradient at the gradient edge of a tensor."""
    return torch.autograd.grad(x.exp().sum(), torch.autograd.graph.get_gradient_edge(x))


MEMORY: dict[str, Callable[[Lay], Any]] = {
    "numpy.asarray(x)": lambda lay: np.asarray(lay(value())),
    "numpy.array(x)": lambda lay: np.array(lay(value())),
    "numpy.add(x, 1)": lambda lay: np.add(lay(value()), 1),
    "numpy.stack([x, x])": lambda lay: np.stack([lay(value()), lay(value())]),
    "numpy.float64(x.sum())": lambda lay: np.float64(lay(value()).sum()),
    "x.numpy()": lambda lay: lay(value()).numpy(),
    "x.numpy(force=True)": lambda lay: lay(value().requires_grad_()).numpy(force=True),
    "numpy.asarray(x)[...] = 7": lambda lay: _written(lay, lambda x: _array_written(np.asarray(x))),
    "x.numpy()[...] = 7": lambda lay: _written(lay, lambda x: _array_written(x.numpy())),
    "x.__array_interface__": lambda lay: lay(value()).__array_interface__,
    "memoryview(x)": lambda lay: memoryview(lay(value())),
    "bytes(x)": lambda lay: bytes(lay(value())),
    "bytearray(x)": lambda lay: bytearray(lay(value())),
    "torch.frombuffer(x)": lambda lay: torch.frombuffer(lay(value()), dtype=torch.float32),
    "the address x.data_ptr()": lambda lay: _with(lay(value()), lambda x: read_address(x, x.data_ptr())),
    "the address of a view": lambda lay: _with(lay(value())[1:], lambda x: read_address(x, x.data_ptr())),
    "the address of a transpose": lambda lay: _with(lay(value()).t(), read_strided),
    "the address after a write": lambda lay: _read_again(lay(value())),
    "the address after x.data was written": lambda lay: _read_after_data(lay(value())),
    "bytes of x.untyped_storage()": lambda lay: lay(value()).untyped_storage().tolist(),
    "x.untyped_storage().fill_(0)": lambda lay: _written(lay, lambda x: x.untyped_storage().fill_(0)),
    "x.untyped_storage().resize_(0)": lambda lay: _with(lay(value()), _freed)[0],
    "x.untyped_storage()[0] = 1": lambda lay: _written(lay, lambda x: x.untyped_storage().__setitem__(0, 1)),
    "x.storage()": lambda lay: _stored_typed(lay(value())),
    "x.grad_fn._saved_result": lambda lay: _computed(lay).grad_fn._saved_result,
    "x.grad_fn(gradient)": lambda lay: _computed(lay).grad_fn(lay(value())),
    "x.grad_fn.register_hook": lambda lay: _computed(lay).grad_fn.register_hook(_no_change),
    "x.grad_fn.register_prehook": lambda lay: _computed(lay).grad_fn.register_prehook(_no_change),
    "x.grad_fn.name()": lambda lay: _computed(lay).grad_fn.name(),
    "torch.autograd.grad(loss, edge)": lambda lay: _of_edge(lay(value().requires_grad_())),
    "torch.autograd.backward(edge, gradient)": lambda lay: torch.autograd.backward(
        [torch.autograd.graph.get_gradient_edge(_computed(lay))], [value()]
    ),
    "addresses of tied tensors": lambda lay: _tied(lay(value())),
    "the end address of a tensor": lambda lay: _end(lay(value())),
    "distances of addresses": lambda lay: _distances(lay(value(4))),
    "x.storage_offset() of views": lambda lay: _offsets(lay(value(4))),
    "x.is_set_to(x[:])": lambda lay: _same_memory(lay(value())),
    "bytes of the storage of a view": _stored_view,
    "x.numpy() of a transpose": lambda lay: _laid_out(lay(value()).t()),
    "torch.from_dlpack(x)": lambda lay: torch.from_dlpack(lay(value())),
    "torch.from_dlpack(x).fill_(7)": lambda lay: _written(lay, lambda x: torch.from_dlpack(x).fill_(7)),
    "torch.from_dlpack(x, copy=True)": lambda lay: torch.from_dlpack(lay(value()), copy=True),
    "numpy.from_dlpack(x)": lambda lay: np.from_dlpack(lay(value())),
    "torch.utils.dlpack.to_dlpack(x)": lambda lay: _written(
        lay, lambda x: torch.from_dlpack(torch.utils.dlpack.to_dlpack(x)).fill_(7)
    ),
    "x.__dlpack__(copy=False)": lambda lay: torch.from_dlpack(lay(value()).__dlpack__(copy=False)),
    "type(x).__dlpack_c_exchange_api__": lambda lay: _exchanged(lay(value())),
    "pickle.dumps(x)": lambda lay: pickle.loads(pickle.dumps(lay(value()))),
    "torch.save({'x': x})": _saved,
    "ForkingPickler.dumps(x)": lambda lay: ForkingPickler.loads(ForkingPickler.dumps(lay(value()))),
    "copy.copy(x)": lambda lay: copy.copy(lay(value())),
    "copy.deepcopy(x)": lambda lay: copy.deepcopy(lay(value())),
    "copy.deepcopy(view)": lambda lay: copy.deepcopy(_stale(lay(value()))),
    "copy.deepcopy(module)": lambda lay: dict(copy.deepcopy(_Two(lay)).named_parameters(remove_duplicate=False)),
    "module.state_dict()": lambda lay: dict(_Two(lay).state_dict()),
    "safetensors.torch.save": lambda lay: safetensors.torch.load(safetensors.torch.save({"x": lay(value())})),
    "safetensors.torch.save_file": _save_file,
    "safetensors.torch.save_model": _save_model,
    "torch.utils.swap_tensors(x, y)": _swapped,
    "default_collate([x, x])": lambda lay: torch.utils.data.default_collate([lay(value()), lay(value())]),
    "default_convert(x)": lambda lay: torch.utils.data.default_convert(lay(value())),
    "a DataLoader of x": lambda lay: list(torch.utils.data.DataLoader(lay(value()), batch_size=2)),  # pyright: ignore
    "a TensorDataset of x": lambda lay: torch.utils.data.TensorDataset(lay(value()))[1],
    "x.share_memory_()": lambda lay: lay(value()).share_memory_(),
    "nn.Parameter(x)": lambda lay: nn.Parameter(lay(value())),
    "nn.Buffer(x)": lambda lay: nn.Buffer(lay(value())),
    "torch.Tensor(x)": lambda lay: torch.Tensor(lay(value())),
    "torch.FloatTensor(x)": lambda lay: torch.FloatTensor(lay(value())),
    "plain.new(x)": lambda lay: value().new(lay(value())),
    "x.set_(plain)": lambda lay: lay(value()).set_(torch.zeros(3, 2)),
    "x.set_(x)": lambda lay: lay(value()).set_(lay(value() * 2)),
    "x.set_()": lambda lay: lay(value()).set_(),
    "x.set_(storage)": lambda lay: lay(value()).set_(torch.zeros(12).untyped_storage()),
    "plain.set_(x)": lambda lay: torch.empty(0).set_(lay(value())),
    "plain.data = x": _data_of_plain,
    "parameter.data = x": _data_of_parameter,
    "module._apply": lambda lay: nn.Linear(2, 3)._apply(lambda t: lay(t.detach() * 0 + 1)).weight,
    "x.data = another shape": lambda lay: _data_of(lay, value(4)),
    "x.data = fewer dims": lambda lay: _data_of(lay, torch.ones(3)),
    "module.load_state_dict(assign=True)": _assigned,
    "[*x]": lambda lay: [*lay(value())],
    "0.5 in x": lambda lay: 0.5 in lay(value()),
    "f'{x.sum():.3f}'": lambda lay: f"{lay(value()).sum():.3f}",
    "range(count)": lambda lay: list(range(lay(torch.tensor(2)))),
    "[0, 1, 2][count]": lambda lay: [0, 1, 2][lay(torch.tensor(2))],
    "torch.tensor([number, number])": lambda lay: torch.tensor([lay(torch.tensor(0.5)), lay(torch.tensor(1.5))]),
    "plain[index]": lambda lay: value()[lay(torch.tensor([0, 2]))],
    "plain[count]": lambda lay: value()[lay(torch.tensor(2))],
    "plain[index] = x": lambda lay: _written(plainly, lambda p: p.__setitem__(lay(torch.tensor([0, 1, 2])), value())),
    "plain[0, 0] = number": lambda lay: _written(plainly, lambda p: p.__setitem__((0, 0), lay(torch.tensor(9.0)))),
    "plain.add(plain, alpha=number)": lambda lay: value().add(value(), alpha=lay(torch.tensor(2.0))),
    "plain.view(count, -1)": lambda lay: value().view(lay(torch.tensor(2)), -1),
    "plain.split(count)": lambda lay: value().split(lay(torch.tensor(2))),
    "plain.topk(count)": lambda lay: value().topk(lay(torch.tensor(2)))[0],
    "torch.as_tensor(x).fill_(7)": lambda lay: _aliased(lay, torch.as_tensor),
    "torch.asarray(x).fill_(7)": lambda lay: _aliased(lay, torch.asarray),
    "torch.tensor(x).fill_(7)": lambda lay: _aliased(lay, torch.tensor),
    "x.detach().fill_(7)": lambda lay: _aliased(lay, lambda x: x.detach()),
    "x.data.fill_(7)": lambda lay: _aliased(lay, lambda x: x.data),
    "torch.tensor(data=x)": lambda lay: torch.tensor(data=lay(value())),
    "torch.as_tensor(data=x)": lambda lay: torch.as_tensor(data=lay(value()), dtype=torch.float64),
    "torch.asarray(obj=x)": lambda lay: torch.asarray(obj=lay(value()), dtype=torch.float64),
    "plain.new_tensor(data=x)": lambda lay: value().new_tensor(data=lay(value())),
    "torch.asarray of a parameter": lambda lay: torch.asarray(lay(value()).requires_grad_()),
    "torch.tensor of a parameter": lambda lay: torch.tensor(lay(value()).requires_grad_()),
}
"""Ways by other libraries and by Python's own protocols."""


def memory() -> Iterator[Way]:
    for name, call in MEMORY.items():
        yield Way("memory", name, call)


def ways() -> Iterator[Way]:
    """Yield all ways except the collectives, which need a process group."""
    for group in (attributes, methods, setters, functions, memory):
        yield from group()
