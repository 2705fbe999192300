"""Search for all slots that code can read: those reachable from some roots by names that appear in the code.

Code reads its globals, the cells and defaults of its function, its arguments, and attributes and items of objects that
it has read. So any value that it reads, other than fresh results, is reachable from the roots or from the globals of
the executed code, by names in this code. All elements of containers are followed; of an object, the attributes with
such names. Depth and size are unlimited. The search runs no user code: properties and `__getattr__` count as code.

It is used after a recording, with the executed code (`Executed`), to find the state that a program depends on; and
before a recording, with all code that could run, to find the state that a forward pass may change.
"""

from __future__ import annotations

import builtins
import gc
import logging
import sys
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from threading import local
from types import (
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any, cast

from torch import Tensor, nn
from torch.optim import Optimizer

from .executed import Executed, named_by
from .object_kinds import (
    MEMBERS,
    MRO,
    NAMING,
    SPECIAL,
    built_in_names,
    cached_results,
    decimal_context,
    getter_of,
    global_hooks,
    held_variables,
    is_background_type,
    is_followed,
    is_namespace,
    is_stateless,
    names_of_torch,
    slot_of,
    variables_named,
)
from .slots import (
    CELL,
    OF_FUNCTION,
    ContainerSlot,
    GetterSlot,
    NamespaceSlot,
    Slot,
    content,
    is_container,
    is_plain,
)
from .trusted_libraries import is_installed_file, is_trusted, is_trusted_file, is_trusted_module

NUMBERED_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
LAYER_HOOKS = (
    *NUMBERED_HOOKS,
    *("_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called"),
)
_ALL_ITEMS = frozenset({"items", "keys", "values", "copy"})
TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
APART = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", *LAYER_HOOKS})
"""Tables of a module that are compared separately, as tensors and submodules."""
FOLLOWING = frozenset({"_flat_weights", "_flat_weight_refs"})
"""Attributes that torch's recurrent layers renew by themselves when they are called with other parameters."""
OWN = frozenset({"_spec", "_is_param", "_shared", "_exposed", "_grad_layout", "_number", "_maker"})
"""Attributes of tensors that this package sets."""
OPTIMIZER = frozenset(
    {
        *("state", "param_groups", "defaults", "step", "_step_count", "_opt_called", "_zero_grad_profile_name"),
        *STEP_HOOKS,
    }
)
"""Attributes of an optimizer that are compared separately, or that learning rate schedulers increment."""
READ = frozenset({"state", "param_groups", "defaults"})
"""Attributes of an optimizer that a forward pass may read."""
_IMPORT = frozenset({"__loader__", "__spec__"})
"""Attributes of Python modules that describe their import."""
_APART: dict[type, Set[str]] = {Optimizer: OPTIMIZER, Tensor: OWN, ModuleType: _IMPORT}
_PROTOCOLS = frozenset(
    f"__{name}__"
    for name in (
        "call getitem setitem delitem contains len iter next bool int float index getattr getattribute get set "
        "missing enter exit new init post_init eq hash add radd iadd sub rsub isub mul rmul imul matmul rmatmul "
        "truediv rtruediv floordiv rfloordiv mod rmod pow rpow neg abs lt le gt ge ne and or xor invert "
        "torch_function torch_dispatch array instancecheck subclasscheck"
    ).split()
)
"""Methods that operators and built-in functions call; their names do not appear in code."""
_CALLED = frozenset({"forward", "step", "backward", "setup_context", "jvp", "vjp"})
"""Names by which torch's code calls other code."""


@dataclass(frozen=True, slots=True)
class NameFilter:
    """Predicate on attribute names: True for names that appear in the code, or that the code may compute.

    A computed name contains one of `parts`, strings in code that computes names, or is one of `texts`, strings in data.
    """

    names: set[str]
    parts: dict[str, None]
    texts: set[str]
    _compared: dict[str, int] = field(default_factory=dict[str, int])
    """Name → number of parts that it was compared with and contains none of; -1 if it contains one."""

    def __call__(self, key: str) -> bool:
        if key in self.names or key in _PROTOCOLS:
            return True
        return bool(self.parts) and (key in self.texts or self._contains_part(key))

    def _contains_part(self, key: str) -> bool:
        done = self._compared.get(key, 0)
        if 0 <= done < len(self.parts):
            contains = any(part in key for part in islice(self.parts, done, None))
            done = self._compared[key] = -1 if contains else len(self.parts)
        return done < 0


def without_scheduler_names(owner: object, counts: Callable[[str], bool]) -> Callable[[str], bool]:
    """Return `counts` without the names that learning rate schedulers set on an optimizer."""
    return partial(_counts_beside_schedules, counts) if isinstance(owner, Optimizer) else counts


def _counts_beside_schedules(counts: Callable[[str], bool], key: str) -> bool:
    return key not in OPTIMIZER and counts(key)


def any_name(key: str) -> bool:
    return True


class _Space:
    """A namespace whose entries are followed by name, and the entries followed so far."""

    def __init__(self, held: Mapping[str, Any], label: str, owner: object, whole: bool, trusted: bool) -> None:
        self.held, self.label, self.owner, self.whole = held, label, owner, whole
        self.trusted = trusted
        self.keys: dict[str, None] = {}
        self.followed: tuple[object, ...] | None = None
        self.apart = next((names for kind, names in _APART.items() if isinstance(owner, kind)), APART)

    def read(self) -> None:
        """Include the attributes that an optimizer changes in its steps, if code names them."""
        self.apart, self.whole = self.apart - READ, False


class Reach:
    """A search from the roots; `slots` yields the slots that it found. `ran` is the executed code, None for all code.

    Numbers that an optimizer changes in its steps, such as learning rates, are inputs of a program and get no slots.
    With `reads_optimizers` they do, since a forward pass or a loss may read them.
    """

    def __init__(self, roots: Mapping[str, Any], ran: Executed | None = None, reads_optimizers: bool = False) -> None:
        self.ran, self.reads_optimizers, self.meets_optimizers = ran, reads_optimizers, False
        self.counts = NameFilter(set(_CALLED), {}, set())
        self.names, self.parts, self.texts = self.counts.names, self.counts.parts, self.counts.texts
        self.whole: set[str] = set()
        self._seen: dict[int, object] = {}
        self._codes: set[int] = set()
        self._spaces: dict[int, _Space] = {}
        self._globals: dict[int, tuple[dict[str, Any], dict[str, None]]] = {}
        self._built_in: tuple[Mapping[str, Any], dict[str, None]] = (vars(builtins), {})
        self._modules: dict[str, None] = {}
        self._other_slots: list[Slot] = []
        self.modules: list[tuple[str, nn.Module]] = []
        self._queue: deque[tuple[object, str]] = deque()
        self._weak: set[int] = set()
        self.variables: Set[str] | None = None
        self._takes_all_variables = False
        for code, namespace in ran.codes.values() if ran is not None else ():
            self._add_code(code, namespace)
        for tensor in ran.asked if ran is not None else ():
            self._other_slots.append(ContainerSlot("a tensor whose numbers Python read", tensor))
        for table in global_hooks():
            self._other_slots.append(ContainerSlot("global hooks", table))
            self._push_hooks(table, "global hooks")
        for name, root in roots.items():
            self._queue.append((root, "" if isinstance(root, nn.Module) else f"{name}."))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # from deprecated attributes of modules
            self._walk()

    def slots(self) -> Iterator[Slot]:
        """Yield every slot that was found, with its current value."""
        for held, keys in self._globals.values():
            yield NamespaceSlot("", held, tuple(keys), None)
        yield NamespaceSlot("builtins.", self._built_in[0], tuple(self._built_in[1]), None)
        yield NamespaceSlot("sys.modules.", sys.modules, tuple(self._modules), None)
        yield from self._environment()
        for space in self._spaces.values():
            owner = None if id(space.owner) in self._weak else space.owner
            yield NamespaceSlot(space.label, space.held, tuple(space.keys), self._counts(space), owner)
        yield from self._other_slots

    def reads_states(self) -> bool:
        """True if the code names the states of a reachable optimizer."""
        return any(isinstance(space.owner, Optimizer) and "state" in space.keys for space in self._spaces.values())

    def _environment(self) -> Iterator[Slot]:
        """Yield the environment variables that the code may name, or all of them if it iterates over them."""
        if self.variables is None:
            return
        if self._takes_all_variables:
            yield ContainerSlot("os.environ", held_variables())
        else:
            yield GetterSlot("os.environ", tuple(sorted({*self.variables, *self.texts})), variables_named)

    def _counts(self, space: _Space) -> Callable[[str], bool] | None:
        """Return the predicate for new names in a namespace; None if new names do not count."""
        if isinstance(space.owner, ModuleType) or space.trusted:
            return None
        return without_scheduler_names(space.owner, any_name if space.whole else self.counts)

    # --- the search ----------------------------------------------------------------------------------------------

    def _walk(self) -> None:
        known = -1
        while self._queue or known != len(self.names) + len(self.parts) + len(self.texts):
            known = len(self.names) + len(self.parts) + len(self.texts)
            while self._queue:
                self._visit(*self._queue.popleft())
            for space in list(self._spaces.values()):
                self._follow(space)

    def _push(self, value: object, label: str) -> None:
        self.meets_optimizers |= isinstance(value, Optimizer) and not label.startswith("optimizer.")
        if not is_plain(value) and id(value) not in self._seen:
            self._queue.append((value, label))
        elif type(value) is str and value.isidentifier():
            self.texts.add(value)

    def _follow(self, space: _Space) -> None:
        """Push the entries of a namespace whose names count now."""
        held = space.held
        counted = len(held), len(self.names), len(self.parts), len(self.texts), space.whole, space.apart
        if counted == space.followed:
            return
        space.followed = counted
        names = held.keys() if space.whole or len(held) < len(self.names) or self.parts else self.names & held.keys()
        for key in list(names):
            counts = key in self.names if space.trusted else space.whole or self.counts(key)
            if counts and key not in space.keys and key not in space.apart:
                space.keys[key] = None
                if not space.trusted or is_followed(held[key]):
                    self._push(held[key], f"{space.label}{key}")

    def _visit(self, value: object, label: str) -> None:
        if id(value) in self._seen or is_background_type(type(value)):
            return
        self._seen[id(value)] = value
        if isinstance(value, Tensor):
            if vars(value):
                self._add_namespace(value, vars(value), f"{label}.")
        elif isinstance(value, type):
            self._follow_class(value)
        elif isinstance(value, FunctionType):
            self._follow_function(value, label)
        elif isinstance(value, ModuleType):
            self._follow_module(value)
        elif isinstance(value, nn.Module):
            self._follow_layer(value, label)
        else:
            self._follow_object(value, label)

    def _add_code(self, code: CodeType, namespace: dict[str, Any]) -> None:
        """Add the names of the code, and follow the globals that it reads."""
        if id(code) in self._codes:
            return
        self._codes.add(id(code))
        self._seen.setdefault(id(code), code)
        named = named_by(code)
        self.names |= named.names
        self.parts.update(dict.fromkeys(named.parts))
        module = str(namespace.get("__name__"))
        if not named.names.isdisjoint(("Decimal", "decimal")):
            self._other_slots.append(GetterSlot("decimal.getcontext()", None, decimal_context))
        if named.variables is not None:
            self.variables = named.variables | (self.variables or set())
            self._takes_all_variables |= not named.names.isdisjoint(_ALL_ITEMS)
        if named.whole:
            self.whole.add(module.partition(".")[0])
        held, keys = self._globals.setdefault(id(namespace), (namespace, {}))
        built_in = built_in_names(namespace)
        for name in named.names:
            if name in held or name in built_in:
                keys[name] = None
                self._push(held.get(name), name)
            if name not in held and name in built_in:
                self._built_in[1][name] = None
            self._follow_import(name, namespace)

    def _follow_import(self, name: str, namespace: dict[str, Any]) -> None:
        """Follow a module that the code imports inside a function."""
        package = namespace.get("__package__")
        for full in (name, f"{package}.{name}"):
            module = sys.modules.get(full)
            if module is not None:
                self._modules[full] = None
                self._push(module, f"{full}.")

    def _follow_function(self, value: FunctionType, label: str) -> None:
        code = value.__code__
        for name in ("__wrapped__", "registry"):
            if name in vars(value):
                self._push(vars(value)[name], f"{label}.{name}")
        if self.ran is None and not is_installed_file(code.co_filename):
            self._add_code(code, value.__globals__)
        if id(code) not in self._codes:
            return
        for at, held in enumerate(value.__closure__ or ()):
            self._add_getter(code.co_freevars[at], held, CELL)
        for kind, get in OF_FUNCTION.items():
            self._add_getter(f"{label}.{kind}", value, get)
        if vars(value):
            self._add_namespace(value, vars(value), f"{label}.")

    def _follow_module(self, value: ModuleType) -> None:
        trusted = is_trusted_module(value.__name__)
        self._add_namespace(value, vars(value), f"{value.__name__}.", trusted)

    def _follow_class(self, value: type) -> None:
        for kind in value.__mro__:
            if kind is not object and id(kind) not in self._spaces:
                self._seen.setdefault(id(kind), kind)
                self._add_namespace(kind, vars(kind), f"{kind.__name__}.", is_trusted(kind))
                if not is_trusted(kind):
                    self._add_getter(f"{kind.__name__}.__mro__", kind, MRO)
        if not is_trusted(type(value)):
            self._follow_class(type(value))

    def _follow_layer(self, value: nn.Module, label: str) -> None:
        """Follow a layer: its submodules, hooks, tensors, and attributes that its own or torch's code may read."""
        self.modules.append((f"{label.removesuffix('.')}." if label else "", value))
        self._follow_class(type(value))
        prefix = f"{label.removesuffix('.')}." if label else ""
        space = self._add_namespace(value, vars(value), prefix)
        for key in names_of_torch(type(value)) & vars(value).keys() - FOLLOWING:
            space.keys[key] = None
            self._push(value.__dict__[key], f"{prefix}{key}")
        for key, part in value._modules.items():
            self._push(part, f"{prefix}{key}")
        for table in LAYER_HOOKS:
            self._push_hooks(value.__dict__.get(table), f"{prefix}{table}")
        for key, tensor in (*value._parameters.items(), *value._buffers.items()):
            if tensor is not None and vars(tensor):
                self._add_namespace(tensor, vars(tensor), f"{prefix}{key}.")
        for key, parameter in value._parameters.items():
            for table in TENSOR_HOOKS:
                self._push_hooks(getattr(parameter, table, None), f"{prefix}{key}.{table}")

    def _push_hooks(self, table: Mapping[Any, Any] | None, label: str) -> None:
        for hook in (table or {}).values():
            self._push(hook, label)

    def _add_namespace(self, owner: object, held: Mapping[str, Any], label: str, trusted: bool = False) -> _Space:
        top = (owner if isinstance(owner, type) else type(owner)).__module__.partition(".")[0]
        found = self._spaces.get(id(owner))
        if found is None:
            whole = top in self.whole and not isinstance(owner, (type, ModuleType, FunctionType))
            found = self._spaces[id(owner)] = _Space(held, label, owner, whole, trusted)
            self._follow(found)
        return found

    def _follow_object(self, value: object, label: str) -> None:
        if is_container(value):
            self._follow_container(value, label)
        elif isinstance(value, (tuple, frozenset)):
            self._push_items(enumerate(cast("tuple[Any, ...]", value)), label)
        elif isinstance(value, NAMING):
            self.names.update(word for text in value.__reduce__()[1] for word in str(text).split("."))
        elif (get := getter_of(value)) is not None:
            self._follow_content(value, get, label)
        elif isinstance(value, (MappingProxyType, *MEMBERS)):
            self._follow_callable(value, label)
        elif is_namespace(value) or not is_stateless(type(value)):
            self._follow_attributes(value, label)

    def _follow_callable(self, value: object, label: str) -> None:
        """Follow the members of a callable, or the dict behind a view."""
        if isinstance(value, MappingProxyType):
            self._push_all(gc.get_referents(value), label)
            return
        if isinstance(value, MethodType) and self._is_idle(value.__func__):
            return
        members = next(names for kind, names in MEMBERS.items() if isinstance(value, kind))
        self._push_members(value, members, label)

    def _is_idle(self, function: object) -> bool:
        """True for a function that did not run, so that it read nothing of the object that it is bound to."""
        if not isinstance(function, FunctionType) or is_trusted_file(function.__code__.co_filename):
            return False
        return self.ran is not None and function.__code__ not in self.ran and "__self__" not in self.names

    def _follow_content(self, value: object, get: Callable[[Any], Any], label: str) -> None:
        """Follow the current content of a context variable, weak reference, cache or generator."""
        if (
            get is not cached_results or self.ran is not None
        ):  # a first pass may fill caches: cached results do not change
            self._add_getter(label, value, get)
        self._push_members(value, ("__wrapped__",), label)
        if self.ran is not None and id(getattr(value, "gi_frame", None)) in self.ran.resumed:
            self.ran.outside.append(f"next() of the generator {label}")
        if isinstance(value, weakref.ref) and (target := cast("weakref.ref[Any]", value)()) is not None:
            self._weak.add(id(target))
            self._push(target, label)

    def _follow_attributes(self, value: object, label: str) -> None:
        """Follow the attributes of an object whose class is not trusted, or holds state of users."""
        kind = type(value)
        self._follow_class(kind)
        held = getattr(value, "__dict__", None)
        if isinstance(held, dict):
            space = self._add_namespace(value, cast(dict[str, Any], held), f"{kind.__name__}.")
            if isinstance(value, logging.Logger):
                space.apart = frozenset(vars(value)) - {"level", "disabled", "parent"}
                space.keys |= dict.fromkeys(("level", "disabled", "parent"))
                self._push(value.parent, "Logger.")
                return
            space.whole = space.whole or (is_trusted(kind) and not is_namespace(value))
            if self.reads_optimizers and isinstance(value, Optimizer):
                space.read()
            self._follow(space)
        if isinstance(value, Optimizer):
            for table in STEP_HOOKS:
                self._push_hooks(getattr(value, table), f"{label}{table}")
        for base in kind.__mro__:
            if not is_trusted(base) or isinstance(value, local):
                self._read_descriptors(value, base)

    def _read_descriptors(self, value: object, base: type) -> None:
        """Add the `__slots__` members of an object."""
        for name, member in vars(base).items():
            if isinstance(member, (MemberDescriptorType, GetSetDescriptorType)) and name not in SPECIAL:
                self._add_getter(f"{type(value).__name__}.{name}", value, partial(slot_of, member))

    def _follow_container(self, value: object, label: str) -> None:
        label = label.removesuffix(".")
        self._other_slots.append(ContainerSlot(label, value))
        if isinstance(value, dict):
            self._push_items(dict.items(cast(dict[Any, Any], value)), label)
        elif isinstance(value, (list, deque)):
            held = content(value)
            if not all(map(is_plain, held)):
                self._push_items(enumerate(held), label)
        elif isinstance(value, (set, frozenset)):
            self._push_all(cast("set[Any]", value), label)
        if not is_trusted(type(value)):
            self._follow_class(type(value))
            held = getattr(value, "__dict__", None)
            if held is not None:
                self._add_namespace(value, held, f"{type(value).__name__}.")

    def _push_items(self, items: Iterable[tuple[object, object]], label: str) -> None:
        for key, item in items:
            self._push(key, label)
            self._push(item, f"{label}[{key!r}]" if is_plain(key) else label)

    def _push_all(self, values: Iterable[object], label: str) -> None:
        for value in values:
            self._push(value, label)

    def _push_members(self, value: object, names: Iterable[str], label: str) -> None:
        for name in names:
            found = getattr(value, name, None)
            if found is not None:
                self._push(found, label)

    def _add_getter(self, label: str, owner: object, get: Callable[[Any], Any]) -> None:
        slot = GetterSlot(label, owner, get)
        self._other_slots.append(slot)
        self._push(slot.known, label)
