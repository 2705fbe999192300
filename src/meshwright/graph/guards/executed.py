"""Collection of the code that runs while a program is recorded: this code read everything that must be guarded."""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from dis import get_instructions
from functools import lru_cache
from inspect import CO_GENERATOR
from types import BuiltinFunctionType, CodeType, FrameType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from meshwright.layout import TorchValue

from ..torch_hooks import Operator
from .trusted_libraries import is_installed_file, is_trusted_file, is_trusted_module

P = ParamSpec("P")
T = TypeVar("T")

_BY_NAME = frozenset({"getattr", "hasattr", "attrgetter", "methodcaller", "__getattribute__", "__getattr__"})
_IN_TEXT = frozenset(
    {"globals", "locals", "eval", "exec", "import_module", "__import__", "modules", "vars", "__dict__"}
)
_ENVIRONMENT = frozenset({"environ", "environb", "getenv"})
_WHOLE = frozenset({"__dict__", "vars", "dir", "asdict", "astuple", "fields", "__slots__", "__getstate__", "deepcopy"})


@dataclass(slots=True)
class Executed:
    """Executed code objects that are not trusted, each with its globals."""

    codes: dict[int, tuple[CodeType, dict[str, Any]]] = field(default_factory=dict[int, Any])
    asked: list[Tensor] = field(default_factory=list[Tensor])
    """Tensors whose elements Python code read."""
    resumed: set[int] = field(default_factory=set[int])
    """The frames of generators that ran, by id."""
    forward: dict[int, tuple[CodeType, dict[str, Any]]] = field(default_factory=dict[int, Any])
    """The code that ran before the update: of the forward pass, the loss, and hooks of tensors."""
    outside: list[str] = field(default_factory=list[str])
    """Calls whose results depend on what no guard can compare: the clock, files, generators that were begun before."""
    asks_thread: bool = False
    """True if the code asked for the number of its thread, which tells a simulated rank."""

    def __contains__(self, code: CodeType) -> bool:
        return id(code) in self.codes

    def add(self, code: CodeType, namespace: dict[str, Any]) -> None:
        self.codes.setdefault(id(code), (code, namespace))

    def update(self, other: Executed) -> None:
        self.codes.update(other.codes)
        self.forward.update(other.forward)
        known = set(map(id, self.asked))
        self.asked += [x for x in other.asked if id(x) not in known]
        self.outside += other.outside
        self.resumed |= other.resumed

    def copy(self) -> Executed:
        """Return the same code, and the same tensors whose numbers were read."""
        return Executed(dict(self.codes), list(self.asked), forward=dict(self.forward))

    def before_update(self) -> None:
        """Note that the code that ran up to now does not belong to the optimizer."""
        self.forward = dict(self.codes)

    def only_forward(self) -> Executed:
        """Return the code that ran before the update."""
        return Executed(self.forward)

    def installed(self) -> Iterator[CodeType]:
        """Yield the code of installed packages."""
        return (code for code, _ in self.codes.values() if is_installed_file(code.co_filename))


@dataclass(frozen=True, slots=True)
class ReadNames:
    """The names by which code can read attributes.

    `names` appear in the code. `parts` are strings in code that computes names: any name that contains one counts.
    `whole` is True for code that reads all attributes at once. `variables` are strings in code that reads the
    environment, which may be names of variables; None for other code.
    """

    names: frozenset[str]
    parts: frozenset[str]
    whole: bool
    variables: frozenset[str] | None


def named_by(code: CodeType) -> ReadNames:
    """Return the names that appear in the code and in the functions that it defines."""
    names, texts = set[str](), set[str]()
    for part in _nested(code):
        names.update(part.co_names)
        texts.update(word for text in _texts(part.co_consts) for word in _WORD.findall(text))
    computed = not names.isdisjoint(_BY_NAME)
    whole = not names.isdisjoint(_WHOLE)
    if not names.isdisjoint(_IN_TEXT):
        names |= texts
    variables = None if names.isdisjoint(_ENVIRONMENT) else frozenset(texts)
    return ReadNames(frozenset(names), frozenset(texts) if computed else frozenset(), whole, variables)


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)


def _texts(constants: Iterable[object]) -> Iterator[str]:
    for constant in constants:
        if isinstance(constant, str):
            if len(constant) <= _LONGEST:
                yield constant
        elif isinstance(constant, (tuple, frozenset)):
            yield from _texts(constant)


_LONGEST = 200
_WORD = re.compile(r"[^\W\d]\w*|_\w*")


_CLOCKS = ("time", "perf_counter", "monotonic", "process_time", "thread_time")
_CLOCK = frozenset({*_CLOCKS, *(f"{name}_ns" for name in _CLOCKS), "now", "utcnow", "today", "localtime", "gmtime"})
_FILES = frozenset({"open", "stat", "lstat", "listdir", "scandir", "access", "read_bytes", "readlink"})
_SEEDS = frozenset({"initial_seed", "seed", "urandom", "getrandbits"})
_MEMORIES = frozenset({"frombuffer", "_from_dlpack"})
"""Functions of torch that return a tensor in memory of another object, and call no operator that can be recorded."""
_THREAD = frozenset({"get_ident", "get_native_id"})
_NUMBERS = frozenset({"item", "tolist", "numpy", "__array__", "__bool__", "__float__", "__int__", "__index__"})
_WATCHED = _CLOCK | _FILES | _SEEDS | _MEMORIES | _NUMBERS | _THREAD
_BETWEEN = (
    *("pathlib.py", "genericpath.py", "posixpath.py", "ntpath.py", "os.py", "_local.py"),
    *("random.py", "secrets.py", "uuid.py", "dlpack.py"),
)
"""Files of the standard library and of torch that make system calls for their caller."""


def _notice_call(found: Executed, frame: FrameType, function: BuiltinFunctionType) -> None:
    """Note a call of a function in C that reads numbers of a tensor, a clock, a file, a seed, memory, or a thread."""
    name, owner = function.__name__, getattr(function, "__self__", None)
    if isinstance(owner, Tensor):
        if name in _NUMBERS and type(owner) is Tensor:
            found.asked.append(owner)
        return
    if name in _THREAD:
        found.asks_thread = True
        return
    caller: FrameType | None = frame
    while caller is not None and caller.f_code.co_filename.endswith(_BETWEEN):
        caller = caller.f_back
    direct = caller is frame or name in _FILES | _SEEDS | _MEMORIES
    if caller is None or not direct or name in _NUMBERS or is_installed_file(caller.f_code.co_filename):
        is_seed = name in _SEEDS and isinstance(owner, torch.Generator)
        if not is_seed:
            return
    of = owner if isinstance(owner, type) else type(owner)
    module = getattr(function, "__module__", None) or of.__name__
    found.outside.append(f"{module}.{name}()")


_IMPORTING = frozenset({"<module>", "_find_and_load"})
"""Functions that run during an import: the module's code, and Python's finder, which may call import hooks."""


class _Profile:
    """Profile function that collects the code that a thread runs, and calls whose results no guard can compare."""

    def __init__(self, before: Callable[[FrameType, str, Any], Any] | None) -> None:
        self.found, self._before = Executed(), before
        self._seen: dict[int, CodeType] = {}
        self._muted: list[FrameType] = []
        self._of_collector = set(map(_code_id, gc.callbacks))
        self._resumed: list[FrameType] = []

    @property
    def is_shared(self) -> bool:
        """True if another profile function must see all calls."""
        return self._before is not None

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        if event == "call":
            self._call(frame)
        elif event == "c_call":
            if arg.__name__ in _WATCHED and not self._muted:
                _notice_call(self.found, frame, arg)
        elif event == "return" and self._muted and frame is self._muted[-1]:
            self._muted.pop()
        if self._before is not None:
            self._before(frame, event, arg)

    def _call(self, frame: FrameType) -> None:
        code = frame.f_code
        if code.co_name in _IMPORTING or id(code) in self._of_collector:
            self._muted.append(frame)
        if self._muted:
            return
        if code.co_flags & CO_GENERATOR:
            self._resumed.append(frame)  # keep the frame, so that no other frame gets its id
            self.found.resumed.add(id(frame))
        if id(code) not in self._seen:
            self._seen[id(code)] = code
            if not _is_trusted(frame):
                self.found.add(code, frame.f_globals)


def _is_trusted(frame: FrameType) -> bool:
    """True for code of a trusted library, including code compiled from a string, such as dataclass methods."""
    name = frame.f_code.co_filename
    if name == "<string>":
        return is_trusted_module(str(frame.f_globals.get("__name__", "")))
    return is_trusted_file(name)


def _code_id(callback: object) -> int:
    """Return the id of the code of a function or method; 0 for another object."""
    return id(code) if (code := getattr(callback, "__code__", None)) is not None else 0


@contextmanager
def executed_code() -> Generator[Executed]:
    """Collect the code that this thread runs inside the context, except code run by imports and the garbage collector.

    An active Python profiler keeps running; a C profiler is paused.
    """
    outer: Any = sys.getprofile()
    profile = _Profile(outer if callable(outer) else None)
    sys.setprofile(profile)
    try:
        yield profile.found
    finally:
        if outer is None or callable(outer):
            sys.setprofile(outer)
        else:
            sys.setprofile(None)
            outer.enable()


def unobserved(call: Callable[P, T]) -> Callable[P, T]:
    """Return a function that runs `call` without collecting code, for calls that run no user code.

    Every Python call has the overhead of the profile function, and an operator on fake tensors makes thousands of them.
    """

    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        profile: Any = sys.getprofile()
        if type(profile) is not _Profile or profile.is_shared:
            return call(*args, **kwargs)
        sys.setprofile(None)
        try:
            return call(*args, **kwargs)
        finally:
            sys.setprofile(profile)

    return run


def unobserved_if_torchs(op: Callable[..., TorchValue]) -> Callable[..., TorchValue]:
    """Return the operator, unobserved if it is torch's own: a user's operator may run user code."""
    return unobserved(op) if isinstance(op, Operator) and op.namespace in _NAMESPACES else op


_NAMESPACES = frozenset({"aten", "prims"})
_STORES = frozenset({"STORE_ATTR", "DELETE_ATTR", "STORE_GLOBAL", "DELETE_GLOBAL", "STORE_SUBSCR", "DELETE_SUBSCR"})
_CHANGING = frozenset(
    {
        *("append", "extend", "insert", "pop", "popitem", "remove", "clear", "update", "setdefault", "add", "discard"),
        *(
            "appendleft",
            "popleft",
            "sort",
            "reverse",
            "setattr",
            "delattr",
            "__setattr__",
            "__setitem__",
            "next",
            "send",
        ),
    }
)


@lru_cache(maxsize=16384)
def writes(code: CodeType) -> bool:
    """True for code that may change an object, by a store instruction or by a method with a name of a mutator."""
    if not _CHANGING.isdisjoint(code.co_names):
        return True
    return any(i.opname in _STORES for i in get_instructions(code))


@contextmanager
def observed(ran: Executed, wanted: bool = True) -> Generator[None]:
    """Add the code that runs inside the context to `ran` if `wanted` is True."""
    if not wanted:
        yield
        return
    with executed_code() as found:
        yield
    ran.update(found)
