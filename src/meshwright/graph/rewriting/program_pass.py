"""Passes: frozen dataclasses that map a program to a program, with a name, options as fields and recorded changes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, is_dataclass
from typing import ClassVar, Literal, TypeVar

from meshwright.layout import TorchValue

from .._errors import RewriteError
from ..analysis.verify import verify
from ..program.node import map_values
from ..program.node_text import type_text
from ..program.program import Change, Program
from .rewrite_driver import rewrite
from .rewrite_rule import AnyRewrite

P = TypeVar("P", bound="type[Pass]")


@dataclass(frozen=True)
class Pass(ABC):
    """A transformation of programs. `run` returns the new program; calling the pass also verifies both programs.

    `deep` runs every operator of the new program on fake tensors to check the stated shapes and dtypes. `on` says which
    programs the pass is for: "captured" (the model on one device) or "recorded" (the program of each rank). A pass with
    `keeps_sums` keeps the order of every sum, so it may run inside `mw.same_numbers()`.
    """

    name: ClassVar[str] = ""
    on: ClassVar[Literal["captured", "recorded"]] = "recorded"
    keeps_sums: ClassVar[bool] = False

    @abstractmethod
    def run(self, program: Program) -> Program:
        """Return the new program, or `program` itself if there is nothing to do."""

    def __call__(self, program: Program, deep: bool = False) -> Program:
        """Return the new program after verification, with its changes recorded.

        Raises:
            RewriteError: the pass changed the types of the inputs, outputs or writes.
        """
        verify(program)
        out = self.run(program)
        if out is program:
            return out
        verify(out, by=repr(self), deep=deep)
        if _interface(out) != _interface(program):
            raise RewriteError(
                f"{self!r}",
                f"{_interface(out)}, before {_interface(program)}",
                "a pass must keep the types of a program's inputs, results and writes",
                "call draft.replace(old, new) with values of the same type",
            )
        return out if len(out.changes) > len(program.changes) else out.with_changes(Change(self.name, f"{self!r}"))


def _interface(program: Program) -> tuple[list[tuple[str, str]], TorchValue]:
    """Return the types of the inputs, results and writes of a program; passes may add and remove constants."""
    types = map_values(type_text, (program.outputs, [v for _, v in program.writes]))
    return [(i.name, type_text(i.value)) for i in program.inputs if i.role != "constant"], types


def apply_passes(program: Program, passes: Sequence[Pass], deep: bool = False) -> Program:
    """Return the program after all passes, in order."""
    for each in passes:
        program = each(program, deep)
    return program


def _check_name_is_free(asked: str, name: str, taken: bool) -> None:
    if taken:
        raise RewriteError(
            f"{asked}({name!r})",
            "another entry with this name",
            "names identify what changed a program",
            "choose another name",
        )


_PASSES: dict[str, type[Pass]] = {}
_RULES: dict[str, list[AnyRewrite]] = {}


def register_pass(cls: P) -> P:
    """Register a pass under its name. It must be a frozen dataclass derived from `Pass`.

    Raises:
        RewriteError: the class is no frozen dataclass, or has no name or the name of another pass.
    """
    if not (is_dataclass(cls) and cls.__dataclass_params__.frozen and cls.name):  # pyright: ignore[reportAttributeAccessIssue] - of any dataclass
        raise RewriteError(
            f"register_pass({cls.__name__})",
            f"name {cls.name!r}",
            "a pass must have a name and be comparable",
            'write @register_pass, below it @dataclass(frozen=True), and name: ClassVar[str] = "..."',
        )
    _check_name_is_free(
        "register_pass",
        cls.name,
        _PASSES.get(cls.name) is not None and _PASSES[cls.name].__qualname__ != cls.__qualname__,
    )
    _PASSES[cls.name] = cls
    return cls


def registered_passes() -> dict[str, type[Pass]]:
    """Return the registered passes by name."""
    return dict(_PASSES)


def register_rewrite(rule: AnyRewrite, into: str = "own") -> AnyRewrite:
    """Add a rule to the set `into`, which the pass of that name applies ("own": `OwnRules`).

    Raises:
        RewriteError: the set has another rule of that name.
    """
    rules = _RULES.setdefault(into, [])
    _check_name_is_free("register_rewrite", rule.name, any(r.name == rule.name for r in rules))
    rules.append(rule)
    return rule


def registered_rewrites(of: str = "own") -> tuple[AnyRewrite, ...]:
    """Return the rules of a set in the order of registration."""
    return tuple(_RULES.get(of, ()))


@dataclass(frozen=True)
class RulePass(Pass):
    """A pass that applies the rules of the set with its name."""

    def applied(self) -> tuple[AnyRewrite, ...]:
        """Return the rules in the order of registration."""
        return registered_rewrites(self.name)

    def run(self, program: Program) -> Program:
        return rewrite(program, self.applied(), by=self.name)


@register_pass
@dataclass(frozen=True)
class OwnRules(RulePass):
    """Pass that applies the rules of the set `rules`."""

    name: ClassVar[str] = "own"
    rules: str = "own"

    def applied(self) -> tuple[AnyRewrite, ...]:
        return registered_rewrites(self.rules)
