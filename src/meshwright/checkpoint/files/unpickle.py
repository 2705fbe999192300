"""Read the data in a pickle without running the code in it.

Some formats of torch are pickles. This module interprets the instructions that data needs: numbers, texts, containers,
and names to which the caller has given a meaning. Every other instruction or name is refused. All memory that the
interpreter allocates is counted, and it calls only the functions that the caller has given.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from meshwright.layout import TorchValue

from .memory_budget import Budget

COST = 160
"""Most bytes of memory of an instruction, beside the text that it holds."""
_MARK = object()
Names = Mapping[tuple[str, str], Any]
"""(module, name) → its meaning."""


class PickledName:
    """The meaning of a name in a pickle: `call` returns the replacement of the object that it would create."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call


class PickledRecord:
    """The fields of an object whose class is not loaded."""

    __slots__ = ("fields",)

    def __init__(self) -> None:
        self.fields: TorchValue = None

    def get(self, name: str) -> TorchValue:
        """Return a field, or None."""
        return self.fields.get(name) if isinstance(self.fields, dict) else None


def unpickle_data(data: bytes, budget: Budget, names: Names, outside: Callable[[Any], Any] | None = None) -> TorchValue:
    """Return the value in a pickle. `outside` returns the external objects that the pickle refers to.

    Raises:
        ValueError: the pickle has anything but data (other exceptions are possible for damaged ones).
        CheckpointFileError: it exceeds the memory bound.
    """
    return _Machine(data, budget, names, outside).run()


class _Machine:
    """The state of the interpreter."""

    def __init__(self, data: bytes, budget: Budget, names: Names, outside: Callable[[Any], Any] | None) -> None:
        self.data, self.at, self.budget, self.names, self.outside = data, 0, budget, names, outside
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> TorchValue:
        """Run the instructions until the last one; they are counted in blocks."""
        count = 0
        while True:
            code = self.data[self.at]
            if code == _STOP:
                (value,) = self.stack
                return value
            act = _CODES.get(code)
            if act is None:
                raise ValueError(f"it has the instruction {code:#04x} at byte {self.at}, which data do not need")
            self.at += 1
            act(self)
            count += 1
            if count % 1024 == 1:
                self.budget.spend(COST * 1024 if count > 1 else COST, f"{count} instructions")

    def take(self, count: int) -> bytes:
        """Return the next bytes."""
        if count > len(self.data) - self.at:
            raise ValueError(f"it ends inside a text of {count} bytes")
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, form: str) -> int:
        """Return the next bytes as a number."""
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def text(self, form: str) -> bytes:
        """Return the next bytes, whose length comes first."""
        found = self.take(self.number(form))
        self.budget.spend(len(found), "a text")
        return found

    def line(self) -> str:
        """Return the text up to the end of the line."""
        end = self.data.index(b"\n", self.at)
        return self.take(end + 1 - self.at)[:-1].decode()

    def marked(self) -> list[Any]:
        """Return the values that were pushed on the stack since the last mark."""
        at = len(self.stack) - 1
        while self.stack[at] is not _MARK:
            if not at:
                raise ValueError("it has no mark")
            at -= 1
        found = self.stack[at + 1 :]
        del self.stack[at:]
        return found

    def name(self, module: str, name: str) -> TorchValue:
        """Return the meaning of a name. Raises ValueError for a name without one."""
        if (module, name) not in self.names:
            raise ValueError(f"it names {module[:80]}.{name[:80]}, which such a file does not need")
        return self.names[module, name]


def _pushing(read: Callable[[_Machine], Any]) -> Callable[[_Machine], None]:
    return lambda m: m.stack.append(read(m))


def _pack(count: int) -> Callable[[_Machine], None]:
    """Return an action that makes a tuple of the last `count` values."""

    def act(m: _Machine) -> None:
        values = tuple(m.stack[-count:])
        if len(values) < count:
            raise ValueError("it uses more values than it has")
        m.stack[-count:] = [values]

    return act


def _memoizing(read: Callable[[_Machine], int]) -> Callable[[_Machine], None]:
    def act(m: _Machine) -> None:
        m.memo[read(m)] = m.stack[-1]

    return act


def _append(m: _Machine, values: list[Any]) -> None:
    target = m.stack[-1]
    if type(target) is not list:
        raise ValueError(f"it appends to a {type(target).__name__}")
    target.extend(values)


def _set(m: _Machine, values: list[Any]) -> None:
    target = m.stack[-1]
    if type(target) is not dict:
        raise ValueError(f"it sets items of a {type(target).__name__}")
    for key, value in zip(values[::2], values[1::2], strict=True):
        target[checked_key(key)] = value


def checked_key(key: TorchValue) -> Hashable:
    """Return a key of a dict. Raises ValueError for one that is nested: hashing it may take all of C's stack."""
    plain = (str, int, float, bool, bytes, type(None), PickledRecord)
    if isinstance(key, plain) or (type(key) is tuple and all(isinstance(k, plain) for k in key)):
        return key
    raise ValueError(f"it has a {type(key).__name__} as a key")


def _call(m: _Machine) -> None:
    arguments, what = m.stack.pop(), m.stack.pop()
    if not isinstance(what, PickledName) or type(arguments) is not tuple:
        raise ValueError(f"it calls a {type(what).__name__}")
    m.stack.append(what.call(*arguments))


def _build(m: _Machine) -> None:
    """Set the fields of a record. Raises ValueError for any other object."""
    state = m.stack.pop()
    target = m.stack[-1]
    if not isinstance(target, PickledRecord):
        raise ValueError(f"it sets the state of a {type(target).__name__}")
    target.fields = state


def _stack_name(m: _Machine) -> TorchValue:
    name, module = m.stack.pop(), m.stack.pop()
    if not isinstance(name, str) or not isinstance(module, str):
        raise ValueError("it has a name that is not text")
    return m.name(module, name)


def _outside(m: _Machine) -> TorchValue:
    if m.outside is None:
        raise ValueError("it refers to an object outside the file")
    return m.outside(m.stack.pop())


def _pairs(m: _Machine) -> list[Any]:
    value, key = m.stack.pop(), m.stack.pop()
    return [key, value]


def _number_of(data: bytes) -> int:
    if len(data) > 1024:
        raise ValueError(f"it has a number of {len(data)} bytes")
    return int.from_bytes(data, "little", signed=True)


_ACTS: dict[bytes, Callable[[_Machine], Any]] = {
    pickle.PROTO: lambda m: m.take(1),
    pickle.FRAME: lambda m: m.take(8),
    pickle.MARK: _pushing(lambda m: _MARK),
    pickle.POP: lambda m: m.stack.pop(),
    pickle.NONE: _pushing(lambda m: None),
    pickle.NEWTRUE: _pushing(lambda m: True),
    pickle.NEWFALSE: _pushing(lambda m: False),
    pickle.BININT: _pushing(lambda m: m.number("<i")),
    pickle.BININT1: _pushing(lambda m: m.number("<B")),
    pickle.BININT2: _pushing(lambda m: m.number("<H")),
    pickle.LONG1: _pushing(lambda m: _number_of(m.text("<B"))),
    pickle.BINFLOAT: _pushing(lambda m: m.number(">d")),
    pickle.SHORT_BINUNICODE: _pushing(lambda m: m.text("<B").decode("utf-8", "surrogatepass")),
    pickle.BINUNICODE: _pushing(lambda m: m.text("<I").decode("utf-8", "surrogatepass")),
    pickle.BINUNICODE8: _pushing(lambda m: m.text("<Q").decode("utf-8", "surrogatepass")),
    pickle.SHORT_BINBYTES: _pushing(lambda m: m.text("<B")),
    pickle.BINBYTES: _pushing(lambda m: m.text("<I")),
    pickle.BINBYTES8: _pushing(lambda m: m.text("<Q")),
    pickle.EMPTY_TUPLE: _pushing(lambda m: ()),
    pickle.EMPTY_LIST: _pushing(lambda m: []),
    pickle.EMPTY_DICT: _pushing(lambda m: {}),
    pickle.TUPLE: _pushing(lambda m: tuple(m.marked())),
    pickle.TUPLE1: _pack(1),
    pickle.TUPLE2: _pack(2),
    pickle.TUPLE3: _pack(3),
    pickle.APPEND: lambda m: _append(m, [m.stack.pop()]),
    pickle.APPENDS: lambda m: _append(m, m.marked()),
    pickle.SETITEM: lambda m: _set(m, _pairs(m)),
    pickle.SETITEMS: lambda m: _set(m, m.marked()),
    pickle.GLOBAL: _pushing(lambda m: m.name(m.line(), m.line())),
    pickle.STACK_GLOBAL: _pushing(_stack_name),
    pickle.REDUCE: _call,
    pickle.NEWOBJ: _call,
    pickle.BUILD: _build,
    pickle.BINPERSID: _pushing(_outside),
    pickle.BINGET: _pushing(lambda m: m.memo[m.number("<B")]),
    pickle.LONG_BINGET: _pushing(lambda m: m.memo[m.number("<I")]),
    pickle.BINPUT: _memoizing(lambda m: m.number("<B")),
    pickle.LONG_BINPUT: _memoizing(lambda m: m.number("<I")),
    pickle.MEMOIZE: _memoizing(lambda m: len(m.memo)),
}
"""Instruction → its action."""
_CODES = {code[0]: act for code, act in _ACTS.items()}
_STOP = pickle.STOP[0]
