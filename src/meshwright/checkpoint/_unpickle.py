"""The data in a pickle, found without running what is in it.

Some formats of torch are pickles. This is an interpreter of the instructions that data needs: numbers, texts,
containers, and names that the caller has given a meaning. Every other instruction or name is refused. It keeps no
memory but what it makes, which is counted, and calls nothing itself.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Mapping
from typing import Any

from ._budget import Budget

COST = 160
"""Bytes of memory that an instruction takes, at most, beside the text that it holds."""
_MARK = object()
Names = Mapping[tuple[str, str], Any]
"""(module, name) → what stands for it."""


class Meaning:
    """A name of a pickle: `call` gives what stands for the object that it makes."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call


class Record:
    """An object of a class that is not loaded: its fields."""

    __slots__ = ("fields",)

    def __init__(self) -> None:
        self.fields: Any = None

    def get(self, name: str) -> Any:
        """Return a field, or None."""
        return self.fields.get(name) if isinstance(self.fields, dict) else None


def unpickled(data: bytes, budget: Budget, names: Names, outside: Callable[[Any], Any] | None = None) -> Any:
    """Return what a pickle describes. `outside` gives the objects that it refers to.

    Raises ValueError, or another Exception, for a pickle with anything but data; CheckpointFileError beyond the bound.
    """
    return _Machine(data, budget, names, outside).run()


class _Machine:
    """The state of the interpreter."""

    def __init__(self, data: bytes, budget: Budget, names: Names, outside: Callable[[Any], Any] | None) -> None:
        self.data, self.at, self.budget, self.names, self.outside = data, 0, budget, names, outside
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        """Follow the instructions until the last one; count them in blocks."""
        count = 0
        while True:
            code = self.data[self.at]
            if code == _STOP:
                (value,) = self.stack
                return value
            act = _CODES.get(code)
            if act is None:
                raise ValueError(f"it has the instruction {code:#04x} at byte {self.at}, which no data need")
            self.at += 1
            act(self)
            count += 1
            if count % 1024 == 1:
                self.budget.spend(COST * 1024 if count > 1 else COST, f"{count} instructions")

    def take(self, count: int) -> bytes:
        """Return the next bytes."""
        if count > len(self.data) - self.at:
            raise ValueError(f"it ends in a text of {count} bytes")
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, form: str) -> int:
        """Return the next bytes as a number."""
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def text(self, form: str) -> bytes:
        """Return the next bytes, whose number comes first."""
        found = self.take(self.number(form))
        self.budget.spend(len(found), "a text")
        return found

    def line(self) -> str:
        """Return the text up to the next line's beginning."""
        end = self.data.index(b"\n", self.at)
        return self.take(end + 1 - self.at)[:-1].decode()

    def marked(self) -> list[Any]:
        """Return what was put on the stack since the last mark."""
        at = len(self.stack) - 1
        while self.stack[at] is not _MARK:
            if not at:
                raise ValueError("it has no mark")
            at -= 1
        found = self.stack[at + 1 :]
        del self.stack[at:]
        return found

    def name(self, module: Any, name: Any) -> Any:
        """Return what stands for a name."""
        if (module, name) not in self.names:
            raise ValueError(f"it names {str(module)[:80]}.{str(name)[:80]}, which no such file needs")
        return self.names[module, name]


def _put(read: Callable[[_Machine], Any]) -> Callable[[_Machine], None]:
    return lambda m: m.stack.append(read(m))


def _pack(count: int) -> Callable[[_Machine], None]:
    """Make a tuple of the last `count` values."""

    def act(m: _Machine) -> None:
        values = tuple(m.stack[-count:])
        if len(values) < count:
            raise ValueError("it takes more values than there are")
        m.stack[-count:] = [values]

    return act


def _keep(read: Callable[[_Machine], int]) -> Callable[[_Machine], None]:
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


def checked_key(key: Any) -> Any:
    """Return a key of a dict. Raises ValueError for one that is nested: hashing it may take all of C's stack."""
    plain = (str, int, float, bool, bytes, type(None), Record)
    if isinstance(key, plain) or (type(key) is tuple and all(isinstance(k, plain) for k in key)):
        return key
    raise ValueError(f"it has a {type(key).__name__} as a key")


def _call(m: _Machine) -> None:
    arguments, what = m.stack.pop(), m.stack.pop()
    if not isinstance(what, Meaning) or type(arguments) is not tuple:
        raise ValueError(f"it calls a {type(what).__name__}")
    m.stack.append(what.call(*arguments))


def _build(m: _Machine) -> None:
    """Give a record its fields; state of any other object is left out only where it is empty."""
    state = m.stack.pop()
    target = m.stack[-1]
    if not isinstance(target, Record):
        raise ValueError(f"it sets the state of a {type(target).__name__}")
    target.fields = state


def _stack_name(m: _Machine) -> Any:
    name, module = m.stack.pop(), m.stack.pop()
    if not isinstance(name, str) or not isinstance(module, str):
        raise ValueError("it names something that is no text")
    return m.name(module, name)


def _outside(m: _Machine) -> Any:
    if m.outside is None:
        raise ValueError("it names an object outside of it")
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
    pickle.MARK: _put(lambda m: _MARK),
    pickle.POP: lambda m: m.stack.pop(),
    pickle.NONE: _put(lambda m: None),
    pickle.NEWTRUE: _put(lambda m: True),
    pickle.NEWFALSE: _put(lambda m: False),
    pickle.BININT: _put(lambda m: m.number("<i")),
    pickle.BININT1: _put(lambda m: m.number("<B")),
    pickle.BININT2: _put(lambda m: m.number("<H")),
    pickle.LONG1: _put(lambda m: _number_of(m.text("<B"))),
    pickle.BINFLOAT: _put(lambda m: m.number(">d")),
    pickle.SHORT_BINUNICODE: _put(lambda m: m.text("<B").decode("utf-8", "surrogatepass")),
    pickle.BINUNICODE: _put(lambda m: m.text("<I").decode("utf-8", "surrogatepass")),
    pickle.BINUNICODE8: _put(lambda m: m.text("<Q").decode("utf-8", "surrogatepass")),
    pickle.SHORT_BINBYTES: _put(lambda m: m.text("<B")),
    pickle.BINBYTES: _put(lambda m: m.text("<I")),
    pickle.BINBYTES8: _put(lambda m: m.text("<Q")),
    pickle.EMPTY_TUPLE: _put(lambda m: ()),
    pickle.EMPTY_LIST: _put(lambda m: []),
    pickle.EMPTY_DICT: _put(lambda m: {}),
    pickle.TUPLE: _put(lambda m: tuple(m.marked())),
    pickle.TUPLE1: _pack(1),
    pickle.TUPLE2: _pack(2),
    pickle.TUPLE3: _pack(3),
    pickle.APPEND: lambda m: _append(m, [m.stack.pop()]),
    pickle.APPENDS: lambda m: _append(m, m.marked()),
    pickle.SETITEM: lambda m: _set(m, _pairs(m)),
    pickle.SETITEMS: lambda m: _set(m, m.marked()),
    pickle.GLOBAL: _put(lambda m: m.name(m.line(), m.line())),
    pickle.STACK_GLOBAL: _put(_stack_name),
    pickle.REDUCE: _call,
    pickle.NEWOBJ: _call,
    pickle.BUILD: _build,
    pickle.BINPERSID: _put(_outside),
    pickle.BINGET: _put(lambda m: m.memo[m.number("<B")]),
    pickle.LONG_BINGET: _put(lambda m: m.memo[m.number("<I")]),
    pickle.BINPUT: _keep(lambda m: m.number("<B")),
    pickle.LONG_BINPUT: _keep(lambda m: m.number("<I")),
    pickle.MEMOIZE: _keep(lambda m: len(m.memo)),
}
"""Instruction → what it does."""
_CODES = {code[0]: act for code, act in _ACTS.items()}
_STOP = pickle.STOP[0]
