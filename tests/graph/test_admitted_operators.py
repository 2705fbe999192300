"""Operators that a file may name: a law for all registered operators, and attacks by name."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save

from meshwright.graph import (
    Program,
    ProgramFileError,
    capture,
    is_admitted,
    libraries_of,
    load_program,
    save_program,
)
from meshwright.graph.files.admitted_operators import NAMESPACES, OWN, TYPES, WORDS
from meshwright.graph.files.program_file import KIND, _checksum
from meshwright.graph.torch_hooks import Operator
from meshwright.spmd.rules.rule_table import RULES

DANGEROUS = re.compile(
    r"from_file|save|load|print|warn|seed|record_stream|backward$|torchbind|_call|rpc|symm|all_reduce|all_gather"
    r"|all_to_all|broadcast_|isend|irecv|barrier|set_data|requires_grad_|_test_|set_$|grad_enabled|to_here|owner"
)
HARMLESS = re.compile(
    r"resize_as_sparse_|sym_|_?[a-z0-9_]*_backward(_.*)?|_no_grad_.*|_standard_gamma_grad|_dirichlet_grad|.*broadcast_in_dim"
    r"|broadcast_tensors|_?(sparse_)?broadcast_to(_copy)?"
)
"""Derivatives, and functions whose names only look like others."""


def registered() -> Iterator[Operator]:
    """Yield every operator that torch has, in every library."""
    for schema in torch._C._jit_get_all_schemas():
        library, name = schema.name.split("::")
        found: Any = getattr(getattr(torch.ops, library), name, None)
        overload = getattr(found, schema.overload_name or "default", None)
        if isinstance(overload, Operator):
            yield overload


OPERATORS = list(registered())
ADMITTED = [op for op in OPERATORS if is_admitted(op)]


def kinds_of(op: Operator) -> set[str]:
    kinds = {str(a.type) for a in (*op._schema.arguments, *op._schema.returns)}
    return {re.sub(r"^(?:(?:List|Optional)\[)*|\]*$", "", kind) for kind in kinds}


def test_every_operator_is_admitted_or_refused_by_its_schema() -> None:
    by_library = Counter(op._schema.name.split("::")[0] for op in ADMITTED)
    assert set(by_library) == {*NAMESPACES, "meshwright"}
    assert by_library["aten"] > 2500
    assert by_library["prims"] > 100
    assert by_library["meshwright"] == len(OWN) == 1
    assert len(OPERATORS) - len(ADMITTED) > 500
    for op in ADMITTED:
        assert kinds_of(op) <= TYPES, op
        assert {a.name for a in op._schema.arguments if "str" in str(a.type)} <= WORDS, op


def test_no_admitted_operator_has_a_dangerous_name() -> None:
    names = {op._schema.name.split("::")[1] for op in ADMITTED}
    assert sorted(n for n in names if DANGEROUS.search(n) and not HARMLESS.fullmatch(n)) == []


def test_operators_with_rules_are_admitted() -> None:
    rules = {name for name in RULES if name.count(".") == 1 and name.startswith("aten.")}
    admitted = {op._schema.name.replace("::", ".") for op in ADMITTED}
    assert len(rules) > 400
    assert sorted(rules - admitted - {"aten.broadcast_shapes"}) == []


def test_libraries_are_admitted_by_name() -> None:
    op = torch.ops.quantized.add.default
    assert not is_admitted(op)
    assert is_admitted(op, ["quantized"])
    assert is_admitted(op, ["quantized.add"])
    assert not is_admitted(op, ["quantized.mul", "add"])
    assert libraries_of([op, torch.ops.aten.add.Tensor, len]) == {"quantized"}


@pytest.fixture
def program() -> Program:
    net = torch.nn.Linear(3, 3)
    return capture(net, net, [torch.ones(2, 3)]).program


def with_operator(path: Path, name: str) -> None:
    """Change the operator of the first node of a saved program, with checksums that are right."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    content = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["program"])
    content["nodes"][0][0] = {"op": name}
    text, tensors = json.dumps(content), load(data)
    path.write_bytes(save(tensors, {"kind": KIND, "program": text, "sha256": _checksum(text, tensors)}))


REFUSED = [op for op in OPERATORS if not is_admitted(op) and "\0" not in str(op)]


def test_no_refused_operator_can_be_loaded(program: Program, tmp_path: Path) -> None:
    path = tmp_path / "program"
    save_program(program, path)
    for op in REFUSED[::7]:
        with_operator(path, str(op))
        with pytest.raises(ProgramFileError, match="not known to be a function of tensors only"):
            load_program(path)


@pytest.mark.parametrize("name", ["aten.from_file.default", "aten.set_.source_Tensor", "prims.device_put"])
def test_a_crafted_file_opens_nothing(name: str, program: Program, tmp_path: Path) -> None:
    path, victim = tmp_path / "program", tmp_path / "victim"
    victim.write_text("mine")
    save_program(program, path)
    with_operator(path, name)
    with pytest.raises(ProgramFileError):
        load_program(path, operators=["mylib"])
    assert victim.read_text() == "mine"
