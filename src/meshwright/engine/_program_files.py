"""Programs of a model in a folder: saved once recorded, and taken from there instead of being recorded again.

Every rank has a folder of its own in it, with one file per program and an index, `programs.json`: for which kinds of
batch each program is, and what the model was when they were recorded. Files of programs are named by what they hold,
so that an index never speaks of a file that holds another program.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from meshwright.comm import current
from meshwright.graph import (
    Holds,
    Input,
    Program,
    Slot,
    holds_of,
    lies_as,
    load_program,
    no_program,
    read_json,
    save_program,
    slots_of,
    told,
    write_whole,
    written_inputs,
)
from meshwright.layout import Spec
from meshwright.tensor import DistTensor, lay, local_parts

from ._apart import lie_apart
from ._description import code_of, lies_text
from ._errors import StaticError
from ._strategy import Strategy
from ._variants import Dynamic, Variant, Variants

KIND = "meshwright programs"
FORMAT = 1
INDEX = "programs.json"


@dataclass(slots=True)
class Shelf:
    """Programs that were loaded and not asked for yet; `taken` counts those that were."""

    variants: list[tuple[list[str], Variant[Program]]] = field(default_factory=list[Any])
    taken: int = 0

    def take(self, key: Sequence[str], sizes: Any, leaves: Sequence[Any], held: Sequence[Any]) -> Variant[Program] | None:
        """The program for such a batch, if there is one; what it writes over in place lies in memory of its own."""
        for at, (known, variant) in enumerate(self.variants):
            if known == list(key) and variant.takes(sizes, leaves):
                if written_inputs(variant.program) and not lie_apart(held):
                    continue
                del self.variants[at]
                self.taken += 1
                return variant
        return None


@dataclass(frozen=True, slots=True)
class Model:
    """What programs are recorded of."""

    network: nn.Module
    loss: Any
    optimizer: Optimizer | None
    strategy: Strategy

    def text(self) -> dict[str, str]:
        """What must be the same where programs are to be used."""
        plan = replace(self.strategy, compiler="none", max_programs=1)
        return {
            **code_of(self.network, self.loss, self.optimizer),
            "strategy": re.sub(r" at 0x\w+", "", repr(plan)),
            **{f"tensor {s.name}": _whole_text(s.tensor) for s in slots_of(self.network)},
        }


def key_text(key: Any, kinds: Any, settings: Mapping[int, str]) -> list[str] | None:
    """What two calls must share beside sizes, in text; None where what was switched then is not known any more."""
    mode, setting, *rest = key
    if setting not in settings:
        return None
    return [mode, settings[setting], *map(repr, rest), repr(kinds)]


def save_programs(folder: Any, model: Model, variants: Variants[Any], settings: Mapping[int, str]) -> None:
    """Writes every program that can still be asked for, then the index; files of earlier programs are removed."""
    place = _place(folder)
    place.mkdir(parents=True, exist_ok=True)
    rows = [_saved(place, key, v) for key, v in _asked_for(variants, settings)]
    here = current()
    index = {
        "kind": KIND, "format": FORMAT, "ranks": here.size, "rank": here.rank, "model": model.text(), "programs": rows,
    }  # fmt: skip
    text = json.dumps(index, indent=1)
    write_whole(place / INDEX, json.dumps({"sha256": _sum(text), "index": text}).encode())
    for old in {p.name for p in place.glob("program-*.safetensors")} - {row["file"] for row in rows}:
        (place / old).unlink(missing_ok=True)


def _asked_for(variants: Variants[Any], settings: Mapping[int, str]) -> Iterator[tuple[list[str], Variant[Any]]]:
    for (key, kinds), found in variants.known.items():
        text = key_text(key, kinds, settings)
        if text is not None:
            yield from ((text, variant) for variant in found)


def _saved(place: Path, key: list[str], variant: Variant[Any]) -> dict[str, Any]:
    assert isinstance(variant.holds, Holds)
    beside = place / f".program.{os.getpid()}"
    checksum = save_program(variant.program.program, beside)
    name = f"program-{checksum[:16]}.safetensors"
    os.replace(beside, place / name)
    return {
        "file": name,
        "key": key,
        "sizes": [list(shape) for shape in variant.sizes],
        "dynamic": [[leaf, sorted(dims)] for leaf, dims in variant.dynamic.items()],
        "holds": variant.holds.as_data(),
    }


def load_programs(folder: Any, model: Model) -> tuple[Shelf, dict[str, Spec]]:
    """The programs of a folder, and how the values of parameters and buffers lie in them, by name.

    The model's tensors are laid like that. Raises ProgramFileError for files that hold none, and StaticError for
    programs of another model; both before anything is changed.
    """
    path = _place(folder) / INDEX
    try:
        outer = path.read_bytes()
    except OSError as error:
        raise no_program(path, f"{error.strerror}; programs are saved for each of the ranks that there were") from error
    index = told(path, lambda: _index(outer))
    _check(path, index, model)
    found = told(path, lambda: [_variant(path, row) for row in index["programs"]])
    inputs = [i for _, v in found for i in v.program.inputs if i.role in ("parameter", "buffer")]
    slots = slots_of(model.network)
    homes = _homes(path, inputs, slots)
    for slot in slots:
        _lay(slot, homes.get(slot.name), model.optimizer)
    return Shelf(found), {i.value.name: i.spec for i in inputs if i.spec is not None}


def _index(data: bytes) -> dict[str, Any]:
    outer = read_json(data)
    if _sum(outer["index"]) != outer["sha256"]:
        raise ValueError("its checksum is another one: the file was changed")
    index = read_json(outer["index"])
    if index["kind"] != KIND or index["format"] > FORMAT:
        raise ValueError(f"it is {index['kind']!r} of format {index['format']}, this reads formats up to {FORMAT}")
    return index


def _check(path: Path, index: Mapping[str, Any], model: Model) -> None:
    """Raises StaticError where the programs are those of another model, or of other ranks."""
    here, now = current(), model.text()
    now = {**now, "rank": f"{here.rank} of {here.size}"}
    before = {**index["model"], "rank": f"{index['rank']} of {index['ranks']}"}
    for what in dict.fromkeys((*before, *now)):
        if before.get(what) != now.get(what):
            raise _other(path, what, before.get(what, "not there"), now.get(what, "not there"))


def _other(path: Path, what: str, before: str, now: str) -> StaticError:
    return StaticError(
        f"dist_model.load({str(path.parent.parent)!r})", f"{what} was {before}, and is {now}",
        "a program is right for the model, and for the ranks, that it was recorded of",
        "a folder that such a model saved on as many ranks; without load(), programs are recorded at the first calls",
    )  # fmt: skip


def _variant(path: Path, row: Mapping[str, Any]) -> tuple[list[str], Variant[Program]]:
    name: str = row["file"]
    if not re.fullmatch(r"program-[0-9a-f]{16}\.safetensors", name):
        raise ValueError(f"{name!r} is no name of a program's file")
    sizes = tuple(tuple(map(int, shape)) for shape in row["sizes"])
    dynamic: Dynamic = {int(leaf): frozenset(map(int, dims)) for leaf, dims in row["dynamic"]}
    program = load_program(path.parent / name)
    return list(row["key"]), Variant(program, sizes, dynamic, holds_of(row["holds"]))


def _homes(path: Path, inputs: Sequence[Input], slots: Sequence[Slot]) -> dict[str, Spec]:
    """Name of a parameter or buffer → how programs take it; marks that say otherwise are refused."""
    homes = {i.name: i.spec for i in inputs if i.spec is not None}
    for slot in slots:
        wanted = homes.get(slot.name)
        if slot.spec is not None and slot.spec is not wanted:
            raise _other(path, slot.name, repr(wanted), repr(slot.spec))
    return homes


def _lay(slot: Slot, spec: Spec | None, optimizer: Optimizer | None) -> None:
    """The tensor, and the states that belong to it, become the parts that programs take."""
    if spec is None or isinstance(slot.tensor, DistTensor):
        return
    like = Input(_value_like(slot), "parameter", slot.name, spec)
    states = optimizer.state.get(slot.tensor, {}) if optimizer is not None else {}
    for key, value in states.items():
        home = lies_as(value, like) if isinstance(value, Tensor) else None
        if home is not None:
            states[key] = lay(value, home)
    lay(slot.tensor, spec)
