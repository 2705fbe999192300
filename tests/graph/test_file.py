"""Program files: loaded programs equal saved ones to the bit, and invalid files are refused quickly."""

from __future__ import annotations

import json
import math
import random
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from safetensors.torch import load, save
from torch import Tensor, nn

import meshwright as mw
from meshwright.comm import current_communicator
from meshwright.engine import DistModel
from meshwright.graph import (
    Input,
    Node,
    Program,
    ProgramError,
    ProgramFileError,
    SizeConditions,
    Value,
    capture,
    compiled,
    load_program,
    map_values,
    read_size_conditions,
    runner,
    save_program,
)
from meshwright.graph.files.decode import Decoder
from meshwright.graph.files.encode import Encoder
from meshwright.graph.files.program_file import _checksum
from meshwright.graph.program.node import Conversion, Start, Wait
from meshwright.graph.recording.size_expressions import CONDITIONS, ExpressionError, Rows, evaluate_rows
from meshwright.layout import Layout, Product, Spec
from meshwright.models import Llama, LlamaConfig, mark
from meshwright.reshard import AllReduce, Exchange, View
from meshwright.tensor import local_parts

aten = torch.ops.aten
GRID = mw.ProcessMesh([[0, 1], [2, 3]], ["dp", "tp"])


class Mlp(nn.Module):
    """A model with dropout, whose operator writes, and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(F.gelu(self.up(x)), 0.1)
        return (self.down(x) * torch.tensor([1.0, 2.0, 3.0, 4.0])).flatten(0, -2).square().mean()


def mlp() -> DistModel:
    torch.manual_seed(0)
    model = Mlp()
    model.up.weight = mw.shard_tensor(model.up.weight, GRID, [mw.Replicate(), mw.Shard(0)])
    return mw.to_static(model, None, None, torch.optim.AdamW(model.parameters(), lr=1e-2))


def rows(n: int = 8) -> tuple[Tensor, ...]:
    x = torch.randn(n, 8, generator=torch.Generator().manual_seed(n))
    return (mw.shard_tensor(x, GRID, [mw.Shard(0)]),)


def llama() -> DistModel:
    model = Llama(LlamaConfig(64, 32, 2, 4, 4, 64))
    mark(model, mw.ProcessMesh([[[0, 1], [2, 3]]], ["pp", "dp", "tp"]))
    return mw.to_static(model, None, None, torch.optim.AdamW(model.parameters(), lr=1e-2))


def tokens() -> tuple[Tensor, ...]:
    found = torch.randint(64, (4, 9), generator=torch.Generator().manual_seed(0))
    return found[:, :-1], found[:, 1:]


def loaded(program: Program, folder: Path) -> Program:
    folder /= f"{current_communicator().rank}"
    folder.mkdir(exist_ok=True)
    return loaded_here(program, folder)


def check_same(found: Program, program: Program) -> None:
    """Check that two programs are equal except for the names of values."""
    assert found.text(where=True) == program.text(where=True)
    assert found.changes == program.changes
    assert found.rank == program.rank
    assert str(found.layouts) == str(program.layouts)
    for a, b in zip(found.inputs, program.inputs, strict=True):
        assert (a.role, a.name, repr(a.spec)) == (b.role, b.name, repr(b.spec))
        assert torch.equal(a.source, b.source) if isinstance(b.source, Tensor) else a.source == b.source
    for a, b in zip(found.nodes, program.nodes, strict=True):
        assert (repr(a.op), a.origin, map_values(repr, a.args)) == (repr(b.op), b.origin, map_values(repr, b.args))


def numbers_of(program: Program, given: list[Any]) -> list[Any]:
    """Return the results of the program for copies of the inputs."""
    torch.manual_seed(1)
    with local_parts():
        out, written = runner(program)(*[x.clone() if isinstance(x, Tensor) else x for x in given])
    return [out["out"], *out["state"].values(), *written]


@pytest.mark.parametrize(("make", "batch"), [(mlp, rows), (llama, tokens)], ids=["mlp", "llama"])
def test_a_training_step_is_saved_and_loaded(make: Callable[[], DistModel], batch: Any, tmp_path: Path) -> None:
    def go() -> None:
        model = make()
        for _ in range(2):  # without states, with states
            model(*batch())
            compiled_step: Any = model._latest
            found = loaded(model.program, tmp_path)
            check_same(found, model.program)
            assert str(found) == str(model.program)
            with local_parts():
                given = [fetch(list(batch())) for fetch in compiled_step.fetch]
            before, after = numbers_of(model.program, given), numbers_of(found, given)
            assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))

    mw.simulate(go, 4)


def test_a_program_for_many_sizes_is_saved_and_loaded(tmp_path: Path) -> None:
    def go() -> None:
        model = mlp()
        for n in (8, 8, 12):
            model(*rows(n))
        found = loaded(model.program, tmp_path)
        check_same(found, model.program)
        assert any(not isinstance(n, int) for i in found.inputs for n in i.value.shape)
        holds: list[SizeConditions] = [v.holds for known in model._variants.known.values() for v in known]
        for n in (12, 4, 40):
            given = [fetch(list(rows(n))) for fetch in model._latest.fetch]
            before, after = numbers_of(model.program, given), numbers_of(found, given)
            assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
        for each in holds:
            again = read_size_conditions(json.loads(json.dumps(each.as_data())))
            assert [again([x]) for n in range(1, 30) for x in rows(n)] == [
                each([x]) for n in range(1, 30) for x in rows(n)
            ]

    mw.simulate(go, 4)


def test_a_captured_program_is_saved_and_loaded(tmp_path: Path) -> None:
    class Marked(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return mw.reshard(x.relu(), GRID, [mw.Shard(0)]).sum(-1)

    def go() -> None:
        program = capture(model := Marked(), model, (torch.ones(4, 3),)).program
        check_same(loaded(program, tmp_path), program)

    mw.simulate(go, 4)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


def test_python_code_is_refused_by_name(tmp_path: Path) -> None:
    class Own(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Square.apply(x.relu())

    def go() -> None:
        program = capture(model := Own(), model, (torch.ones(4, 3),)).program
        with pytest.raises(ProgramFileError, match=r"Square.apply is a UserFunction") as caught:
            save_program(program, tmp_path / "own")
        assert "test_file.py" in caught.value.found
        assert "torch.library.custom_op" in caught.value.write

    mw.simulate(go, 1)
    assert list(tmp_path.iterdir()) == []


def test_kernels_are_refused(tmp_path: Path) -> None:
    program = mw.simulate(lambda: compiled(small(), current_communicator()), 1)[0]
    with pytest.raises(ProgramFileError, match="before kernels are compiled"):
        save_program(program, tmp_path / "kernels")


def small() -> Program:
    """Return the program %a * 2 + %c, with a constant %c."""
    x, c = Value("x", (2, 3), torch.float32), Value("c", (3,), torch.float32)
    y, z = Value("y", (2, 3), torch.float32), Value("z", (2, 3), torch.float32)
    inputs = (Input(x, "batch", "x", None, 0), Input(c, "constant", "c", None, torch.tensor([1.0, math.inf, 3.0])))
    return Program(inputs, (Node(aten.mul.Tensor, (x, 2), {}, y), Node(aten.add.Tensor, (y, c), {}, z)), {"out": z})


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63),
    st.floats(),
    st.complex_numbers(),
    st.text(max_size=3),
    st.sampled_from([torch.float32, torch.bool, torch.bfloat16, torch.strided, torch.channels_last]),
    st.sampled_from([torch.device("cpu"), torch.device("cuda", 1), torch.Size([2, 3]), slice(None, 3, 1)]),
)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(
            st.one_of(st.text(max_size=2), st.tuples(st.text(max_size=2), st.integers())), inner, max_size=3
        ),
    ),
    max_leaves=8,
)


@given(TREES)
@settings(max_examples=300, deadline=None)
def test_any_argument_parses_back(tree: Any) -> None:
    data = json.loads(json.dumps(Encoder().tree(tree), allow_nan=False))
    assert repr(Decoder({}).tree(data)) == repr(tree)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.bool, torch.int8, torch.complex64])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_constants_of_all_kinds(dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path) -> None:
    c = Value("c", shape, dtype)
    x = torch.randn(6).resize_(shape).to(dtype)
    program = Program((Input(c, "constant", "c", None, x),), (), [c])
    save_program(program, tmp_path / "p")
    assert torch.equal(load_program(tmp_path / "p").inputs[0].source, x)


def test_specs_with_factors_are_kept() -> None:
    layout = Layout((Product(((3, ()), (4, ("tp",)))), ("dp",)), varying=())
    spec = Spec(GRID, layout, (12, 8), torch.float32)
    encoder = Encoder()
    for step in (View(spec), Exchange(spec)):
        data = json.loads(json.dumps([encoder._step(step), encoder.spec_rows, [[[2, 2], [0, 1, 2, 3], ["dp", "tp"]]]]))
        decoder = Decoder({}, meshes=[GRID])
        decoder.specs = [decoder._spec(*row) for row in data[1]]
        assert decoder._step(data[0]) == step


@pytest.mark.parametrize("kind", [None, Start, Wait], ids=["whole", "begun", "ended"])
def test_resharding_steps_are_saved_unchanged(kind: Any, tmp_path: Path) -> None:
    spec = Spec(GRID, Layout((("dp",), ()), (("tp", "sum"),)), (4, 3), torch.float32)
    carry = Conversion(AllReduce(("tp",)), spec)
    op = carry if kind is None else kind(carry)
    x, y = Value("x", (2, 3), torch.float32), Value("y", (2, 3), torch.float32)
    node = Node(op, (x, x) if isinstance(op, Wait) else (x,), {}, y)
    program = Program((Input(x, "batch", "x", spec, 0),), (node,), {"out": y})
    check_same(loaded_here(program, tmp_path), program)
    with pytest.raises(ProgramFileError, match="must take"):
        save_program(replace(program, nodes=(replace(node, args=(x, 1, x)),)), tmp_path / "q")


def loaded_here(program: Program, folder: Path) -> Program:
    save_program(program, folder / "p")
    return load_program(folder / "p")


def test_a_file_is_written_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "p"
    save_program(small(), path)
    before = path.read_bytes()

    def fails(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("os.fsync", fails)
    with pytest.raises(OSError, match="no space"):
        save_program(replace(small(), rank=1), path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def text_of(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
    return json.loads(header["__metadata__"]["program"])


def rewritten(path: Path, text: str, tensors: dict[str, Tensor] | None = None) -> Path:
    """Return a file with another text, and the right checksum for it."""
    given = load(path.read_bytes()) if tensors is None else tensors
    metadata = {"kind": "meshwright program", "program": text, "sha256": _checksum(text, given)}
    edited = path.with_suffix(".edited")
    edited.write_bytes(save(given, metadata))
    return edited


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_program(small(), tmp_path / "p.safetensors")
    return tmp_path / "p.safetensors"


def put(*places: Any) -> Callable[[Any], None]:
    """Return a function that sets a value at a place in the data."""
    *way, last, new = places

    def edit(data: Any) -> None:
        for at in way:
            data = data[at]
        data[last] = new

    return edit


EDITS: dict[str, tuple[Callable[[Any], None], str]] = {
    "a newer format": (put("format", 5), "format 5"),
    "an operator that is not there": (put("nodes", 0, 0, {"op": "aten.teleport.default"}), "aten.teleport.default"),
    "an operator without an overload": (put("nodes", 0, 0, {"op": "aten.mul"}), "aten.mul"),
    "a function of torch.ops": (put("nodes", 0, 0, {"op": "load_library.__call__.x"}), "no operator"),
    "a way out of torch.ops": (put("nodes", 0, 0, {"op": "aten.__class__.mro"}), "no operator"),
    "a function of Python": (put("nodes", 0, 0, {"python": "eval"}), "eval"),
    "an operator of another kind": (put("nodes", 0, 0, {"pickle": ["a", "b"]}), "pickle"),
    "a step that is none": (put("nodes", 0, 0, {"carry": ["Teleport(dp)", 0]}), "Teleport"),
    "a value that is not there": (put("nodes", 0, 1, [{"%": 17}]), "range"),
    "a value from behind": (put("nodes", 0, 1, [{"%": -1}]), "-1"),
    "a value that is read too early": (put("nodes", 0, 1, [{"%": 3}, 2]), "before it is computed"),
    "an argument of another kind": (put("nodes", 0, 1, [{"exec": "1"}]), "exec"),
    "a dtype that is none": (put("values", 0, 1, "load"), "torch.load"),
    "a device that is none": (put("values", 0, 3, "moon"), "moon"),
    "a size below zero": (put("values", 0, 2, [-1]), "-1"),
    "a huge size": (put("values", 0, 2, [10**30]), "1000000"),
    "a size that is a truth": (put("values", 0, 2, [True]), "True"),
    "a constant of another shape": (put("values", 1, 2, [4]), "constant"),
    "a constant without a tensor": (put("inputs", 1, 4, {"tensor": "constant_9"}), "constant_9"),
    "an input from nowhere": (put("inputs", 0, 4, None), "the source of the input"),
    "a role that is none": (put("inputs", 0, 1, "guest"), "guest"),
    "a mesh of too few ranks": (put("meshes", [[[2, 2], [0, 1, 2], ["a", "b"]]]), "shape|invalid"),
    "a phase that is none": (put("origins", 0, 0, "sideways"), "sideways"),
    "a row that is none": (put("sizes", [["Pow", 10, 1000000]]), "Pow"),
    "rows that grow": (put("sizes", [["Add", 2, 2], *[["Mul", f"e{n}", f"e{n}"] for n in range(40)]]), "too large"),
    "a list where an object belongs": (put("symbols", []), "items"),
    "no nodes": (lambda data: data.pop("nodes"), "nodes"),
}


@pytest.mark.parametrize("case", EDITS)
def test_an_edited_file_is_refused(case: str, saved: Path) -> None:
    edit, told = EDITS[case]
    data = text_of(saved)
    edit(data)
    with pytest.raises(ProgramFileError, match=told) as caught:
        load_program(rewritten(saved, json.dumps(data)))
    assert all((caught.value.asked, caught.value.found, caught.value.why, caught.value.write))
    assert isinstance(caught.value, ProgramError)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "NaN", "[" * 100_000, "9" * 100_000, '{"format": "1"}'])
def test_invalid_program_text_is_refused(text: str, saved: Path) -> None:
    with pytest.raises(ProgramFileError):
        load_program(rewritten(saved, text))


def test_an_invalid_file_is_refused(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(ProgramFileError, match="No such file"):
        load_program(tmp_path / "missing")
    other = tmp_path / "other"
    other.write_bytes(save({"x": torch.ones(2)}))
    with pytest.raises(ProgramFileError, match="without a program"):
        load_program(other)
    other.write_bytes(struct.pack("<Q", 2**60) + b"{}")
    with pytest.raises(ProgramFileError):
        load_program(other)


def test_a_changed_byte_is_found(saved: Path) -> None:
    data, wanted = saved.read_bytes(), str(load_program(saved))
    chance = random.Random(0)
    for at in (*chance.sample(range(len(data)), 150), *range(len(data) - 12, len(data))):
        changed = bytearray(data)
        changed[at] ^= 1 << chance.randrange(8)
        saved.write_bytes(changed)
        try:
            assert str(load_program(saved)) == wanted  # a byte without meaning
            assert torch.equal(load_program(saved).inputs[1].source, small().inputs[1].source)
        except ProgramFileError:
            continue
    for length in range(0, len(data), 37):
        saved.write_bytes(data[:length])
        with pytest.raises(ProgramFileError):
            load_program(saved)


def test_loading_any_edited_file_ends_quickly(tmp_path: Path) -> None:
    """Parts of the data of a large program, exchanged with each other."""

    def go() -> None:
        model = mlp()
        for n in (8, 8, 12):
            model(*rows(n))
        if current_communicator().rank == 0:
            save_program(model.program, tmp_path / "p.safetensors")

    mw.simulate(go, 4)
    path, chance = tmp_path / "p.safetensors", random.Random(0)
    tensors, text = load(path.read_bytes()), json.dumps(text_of(path))
    strange: list[Any] = [None, True, -1, 2**70, 1e300, "", "e0", "dp", [], {}, {"%": 0}, {"()": [1]}, {"slice": [0]}]
    refused = 0
    for _ in range(400):
        data = json.loads(text)
        for _ in range(chance.choice([1, 1, 3])):
            holder, key = chance.choice(list(places_in(data)))
            other, at = chance.choice(list(places_in(data)))
            holder[key] = chance.choice([*strange, other[at]])
        try:
            load_program(rewritten(path, json.dumps(data), tensors))
        except ProgramFileError:
            refused += 1
    assert refused > 200


def places_in(data: Any) -> Any:
    """Yield every (container, key) in the data."""
    for key in list(data) if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ():
        yield data, key
        yield from places_in(data[key])


def test_rows_compute_the_saved_expressions() -> None:
    import sympy

    x, y = sympy.symbols("x y", positive=True, integer=True)
    rows = Rows(str, CONDITIONS)
    names = [rows.of(e) for e in (x + 2 * y, x * x * y, sympy.Eq(x, 3), sympy.Or(x > 5, sympy.Ne(y, 2)))]
    found = evaluate_rows(rows.rows, {"x": 3, "y": 2}, CONDITIONS)
    assert [found[n] for n in names] == [7, 18, True, False]
    with pytest.raises(ExpressionError, match="sin"):
        Rows(str).of(sympy.sin(x))
