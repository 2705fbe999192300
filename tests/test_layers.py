"""Laws of the architecture: packages and subpackages import downwards only, and stay small enough to read.

Each law is a function from one source file to the offences in it, so the laws themselves are tested on small texts.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "meshwright"

LAYERS = [
    {"layout"},
    {"spmd", "reshard"},
    {"cost", "comm"},
    {"tensor", "checkpoint"},
    {"graph", "fixed_order"},
    {"passes", "pipeline", "quantize"},
    {"search", "weights"},
    {"engine"},
    {"generate", "models", "report"},
    {"conformance"},
    {"cli"},
]
LAYER = {package: number for number, packages in enumerate(LAYERS) for package in packages}
API = "engine"  # `import meshwright as mw` reaches what this package provides

SUBPACKAGES = {
    "spmd": ["notation", "forms", "rules", "derivation"],
    "comm": ["streams", "communicators", "simulation", "launcher", "transport", "checking", "process"],
    "tensor": [
        "core", "capture", "conversion", "planning", "views", "autograd", "handlers", "execution",
    ],
    "checkpoint": ["files", "contents", "formats", "operations"],
    "graph": [
        "program", "analysis", "completion", "recording", "guards", "files", "captures", "replay", "update",
        "rewriting", "execution",
    ],
    "passes": ["strategies", "operators", "communication", "memory"],
    "pipeline": ["table", "simulation", "schedules", "partition", "runtime"],
    "quantize": ["products", "layers", "calibration", "conversion", "checkpoints", "training"],
    "search": [
        "plan_data", "scheduling", "transformer_plans", "transformer_accounts", "phase_plans", "sharding", "stages",
        "module_plans",
    ],
    "engine": ["checks", "marks", "eager", "recording", "static", "training", "planning", "diagnostics"],
    "conformance": ["results", "checks", "workers"],
    "cli": ["console", "ranks", "commands"],
}  # fmt: skip
"""Subpackages of each package, the lowest first. Modules beside them are below all of them."""

FORBIDDEN_NAMES = {"utils", "common", "helpers", "misc"}
MOST_CODE_LINES = 500
MOST_MODULES, MOST_LINES = 20, 3500
"""Upper bounds for one package or subpackage."""
STREAM_WAITS = {"wait_event", "wait_stream", "record_stream"}
HOST_WAITS = {
    "cli/ranks/measure.py",
    "comm/streams/host_copy.py",
    "comm/streams/stream_times.py",
    "engine/eager/master_weights.py",
}
"""Files in which the host waits for a device: for measured times, and before it reads copies in pinned memory."""
CHECKS_OF_WAITS = "conformance/checks/device.py"
"""File that checks whether waits of streams and events work."""
PLATFORMS = "layout/_platform.py"
"""File with the built-in platforms; all other code asks a platform."""
DEVICE_NAMES = re.compile(r"\b(cuda|nccl)\b")
# What a package must not know of torch (DESIGN: the table of packages).
BLIND_TO = {"layout": "torch.distributed", "spmd": "torch.distributed", "reshard": "torch.distributed"}


@dataclass(frozen=True)
class Import:
    """One imported module, and the names taken from it; `inside` is True in a function body."""

    module: str
    names: tuple[str, ...]
    line: int
    inside: bool

    @property
    def modules(self) -> tuple[str, ...]:
        """Return every dotted name that the statement may load: `from a import b` may be module `a.b`."""
        return (self.module, *(f"{self.module}.{name}" for name in self.names))


@dataclass(frozen=True)
class Source:
    """One file of the package: its path below the package, and its text."""

    path: str
    text: str

    @property
    def package(self) -> str:
        """Return the package of the file; "" for the files beside the packages."""
        return self.path.split("/")[0] if "/" in self.path else ""

    @property
    def subpackage(self) -> str:
        """Return the subpackage of the file; "" for the files beside the subpackages."""
        parts = self.path.split("/")
        return parts[1] if len(parts) > 2 else ""

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def imports(self) -> tuple[Import, ...]:
        inside = {
            id(node)
            for function in ast.walk(self.tree)
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            for node in ast.walk(function)
        }
        return tuple(
            Import(module, names, node.lineno, id(node) in inside)
            for node in ast.walk(self.tree)
            for module, names in self._imported(node)
        )

    def _imported(self, node: ast.AST) -> Iterator[tuple[str, tuple[str, ...]]]:
        if isinstance(node, ast.Import):
            yield from ((alias.name, ()) for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            folder = ("meshwright/" + self.path).split("/")[: -node.level] if node.level else []
            module = ".".join([*folder, *filter(None, [node.module])])
            yield module, tuple(alias.name for alias in node.names)

    @cached_property
    def packages(self) -> tuple[tuple[str, str, Import], ...]:
        """Return (package or "" for the API, module inside it, import) of each import from this library."""
        found: list[tuple[str, str, Import]] = []
        for item in self.imports:
            head, _, rest = item.module.partition(".")
            if head != "meshwright":
                continue
            if rest:
                found.append((*rest.partition(".")[::2], item))
            else:
                found += [(name if name in LAYER else "", "", item) for name in item.names or ("",)]
        return tuple(found)


Law = Callable[[Source], Iterator[str]]


def imports_downwards(source: Source) -> Iterator[str]:
    if source.package not in LAYER:
        return
    for other, _, item in source.packages:
        if other != source.package and LAYER.get(other or API, len(LAYERS)) >= LAYER[source.package]:
            yield f"{item.line}: {source.package} imports {other or 'meshwright'}, which is not below it"


def imports_from_the_api(source: Source) -> Iterator[str]:
    for other, behind, item in source.packages:
        private = [name for name in item.names if name.startswith("_") and not name.startswith("__")]
        if other and other != source.package and (behind or private):
            yield f"{item.line}: {item.module} {' '.join(private)} is private to {other}"


def imports_downwards_inside(source: Source) -> Iterator[str]:
    """Yield imports that are not of earlier subpackages; modules beside subpackages may import none of them."""
    order = SUBPACKAGES.get(source.package, [])
    if not order or source.path == f"{source.package}/__init__.py":
        return
    own = order.index(source.subpackage) if source.subpackage in order else -1
    for package, inside, item in source.packages:
        names = [inside.partition(".")[0]] if inside else [name for name in item.names if name in order]
        above = [name for name in names if name in order and order.index(name) > own]
        for name in above if package == source.package else ():
            yield f"{item.line}: {source.subpackage or source.package} imports {name}, which is above it"


def imports_at_the_top(source: Source) -> Iterator[str]:
    if source.package == "cli":  # `meshwright --help` must not wait for torch
        return
    for other, _, item in source.packages:
        if item.inside and source.package and other != source.package:
            yield f"{item.line}: {item.module} is imported inside a function"


def has_a_name_that_says_something(source: Source) -> Iterator[str]:
    names = {Path(source.path).stem.strip("_"), *Path(source.path).parent.parts}
    for name in sorted(names & FORBIDDEN_NAMES):
        yield f"1: {name} says nothing about what the file knows"


def is_short_enough(source: Source) -> Iterator[str]:
    if (lines := count_code_lines(source)) > MOST_CODE_LINES:
        yield f"1: {lines} lines of code, at most {MOST_CODE_LINES}"


def hides_private_torch(source: Source) -> Iterator[str]:
    if source.path.endswith("/torch_hooks.py"):
        return
    for item in source.imports:
        for module in item.modules:
            if is_private_torch(module):
                yield f"{item.line}: {module} belongs in torch_hooks.py"
                break
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and is_private_torch(ast.unparse(node)):
            yield f"{node.lineno}: {ast.unparse(node)} belongs in torch_hooks.py"


def knows_no_more_of_torch(source: Source) -> Iterator[str]:
    for item in source.imports:
        unseen = BLIND_TO.get(source.package)
        if unseen and any(f"{module}.".startswith(f"{unseen}.") for module in item.modules):
            yield f"{item.line}: {source.package} must not know {unseen}"


def waits_in_one_place(source: Source) -> Iterator[str]:
    """Yield waits of streams and of the host outside the subpackage whose waits are named and tested."""
    if source.path.startswith("comm/streams/") or source.path == CHECKS_OF_WAITS:
        return
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Attribute):
            continue
        if node.attr in STREAM_WAITS or (node.attr == "synchronize" and source.path not in HOST_WAITS):
            yield f"{node.lineno}: {ast.unparse(node)} belongs in comm/streams"


def names_devices_in_one_file(source: Source) -> Iterator[str]:
    """Yield uses of `torch.cuda`, and texts with the names of CUDA or NCCL in torch that are no docstrings."""
    if source.path == PLATFORMS:
        return
    docstrings = {id(node.value) for node in ast.walk(source.tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            if DEVICE_NAMES.search(node.value):
                yield f"{node.lineno}: {node.value!r} belongs in {PLATFORMS}"
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.cuda":
            yield f"{node.lineno}: torch.cuda belongs in {PLATFORMS}"
    for item in source.imports:
        if "torch.cuda" in item.modules:
            yield f"{item.line}: torch.cuda belongs in {PLATFORMS}"


LAWS: list[Law] = [
    imports_downwards,
    imports_downwards_inside,
    imports_from_the_api,
    imports_at_the_top,
    has_a_name_that_says_something,
    is_short_enough,
    hides_private_torch,
    knows_no_more_of_torch,
    waits_in_one_place,
    names_devices_in_one_file,
]


def is_private_torch(name: str) -> bool:
    """True if the last part of a dotted name below torch is private; operator names (`torch.ops…`) are data."""
    parts = name.split(".")
    if parts[0] != "torch" or parts[:2] == ["torch", "ops"]:
        return False
    return any(part.startswith("_") and not part.startswith("__") for part in parts[1:])


def count_code_lines(source: Source) -> int:
    """Return the number of lines that hold a token other than a comment or a docstring."""
    texts = {
        line
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    silent = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    tokens = tokenize.generate_tokens(io.StringIO(source.text).readline)
    lines = {line for token in tokens if token.type not in silent for line in range(token.start[0], token.end[0] + 1)}
    return len(lines - texts)


@cache
def package() -> list[Source]:
    return [Source(path.relative_to(PACKAGE).as_posix(), path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))]


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_the_package_keeps_the_law(law: Law) -> None:
    offences = [f"{source.path}:{offence}" for source in package() for offence in law(source)]
    assert not offences, "\n".join(offences)


def folders() -> list[Path]:
    """Return every package and subpackage."""
    return sorted(path.parent for path in PACKAGE.rglob("__init__.py") if path.parent != PACKAGE)


def test_each_package_has_a_layer() -> None:
    assert {path.name for path in folders() if path.parent == PACKAGE} <= set(LAYER)


def test_each_subpackage_has_an_order() -> None:
    found = {path.relative_to(PACKAGE).as_posix() for path in folders() if path.parent != PACKAGE}
    assert found == {f"{package}/{name}" for package, names in SUBPACKAGES.items() for name in names}


@pytest.mark.parametrize("folder", folders(), ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_a_package_is_small_enough_to_read(folder: Path) -> None:
    modules = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
    lines = sum(len(path.read_text().splitlines()) for path in modules)
    assert len(modules) <= MOST_MODULES
    assert lines <= MOST_LINES


@pytest.mark.parametrize("folder", folders(), ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_the_docstring_of_a_package_lists_its_parts(folder: Path) -> None:
    """Subpackages are named in the docstring of their package, and modules in that of their subpackage."""
    modules = {path.stem for path in folder.glob("*.py") if not path.stem.startswith("_")} - {"torch_hooks"}
    inside = {path.parent.name for path in folder.glob("*/__init__.py")} or modules
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    named = {line.split()[0] for line in text.splitlines() if line.strip()}
    assert inside <= named, f"not in the docstring: {', '.join(sorted(inside - named))}"


@pytest.mark.parametrize(
    ("law", "path", "text"),
    [
        (imports_downwards, "layout/_mesh.py", "from meshwright.spmd import Rule"),
        (imports_downwards, "spmd/notation/rule.py", "from ...reshard import plan"),
        (imports_downwards, "tensor/_dist.py", "import meshwright as mw"),
        (imports_downwards, "layout/_mesh.py", "from meshwright import engine"),
        (imports_from_the_api, "spmd/notation/rule.py", "from meshwright.layout._mesh import ProcessMesh"),
        (imports_from_the_api, "spmd/notation/rule.py", "from meshwright.layout import _mesh"),
        (imports_from_the_api, "spmd/notation/rule.py", "import meshwright.layout._mesh"),
        (imports_downwards_inside, "graph/program/node.py", "from ..execution.fx_runner import run"),
        (imports_downwards_inside, "graph/_errors.py", "from .program.node import Node"),
        (imports_downwards_inside, "graph/program/node.py", "from meshwright.graph import execution"),
        (imports_at_the_top, "comm/_run.py", "def f():\n    from meshwright.layout import Shard"),
        (has_a_name_that_says_something, "spmd/_utils.py", ""),
        (has_a_name_that_says_something, "spmd/helpers/_rule.py", ""),
        (is_short_enough, "spmd/notation/rule.py", "x = 1\n" * 501),
        (hides_private_torch, "comm/_run.py", "from torch._C import Graph"),
        (hides_private_torch, "comm/_run.py", "from torch.distributed import _functional_collectives"),
        (hides_private_torch, "comm/_run.py", "import torch\ntorch._C._get_tracing_state()"),
        (knows_no_more_of_torch, "layout/_mesh.py", "from torch import distributed"),
        (waits_in_one_place, "comm/process/x.py", "stream.wait_event(event)"),
        (waits_in_one_place, "tensor/x.py", "torch.accelerator.synchronize()"),
        (names_devices_in_one_file, "tensor/x.py", "torch.cuda.synchronize()"),
        (names_devices_in_one_file, "tensor/x.py", "from torch import cuda"),
        (names_devices_in_one_file, "tensor/x.py", "from torch.cuda import Stream"),
        (names_devices_in_one_file, "tensor/x.py", "device = 'cuda'"),
        (names_devices_in_one_file, "tensor/x.py", "backend = f'nccl:{rank}'"),
    ],
)
def test_a_law_finds_an_offence(law: Law, path: str, text: str) -> None:
    assert list(law(Source(path, text)))


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("spmd/notation/rule.py", "from meshwright.layout import Shard\nfrom meshwright.spmd._text import parse"),
        ("spmd/notation/rule.py", "from ._text import parse\nfrom . import _text"),
        ("graph/execution/fx_runner.py", "from .inductor import compiled\nfrom ..program.node import Node"),
        ("graph/__init__.py", "from .execution.fx_runner import run"),
        ("models/_llama.py", "import meshwright as mw\nfrom meshwright import Shard"),
        ("cli/commands/main.py", "def f():\n    from meshwright.models import train"),
        ("comm/torch_hooks.py", "from torch._C import Graph"),
        ("tensor/_dist.py", "import torch\ntorch.ops.aten._softmax\ntorch.Tensor.__add__"),
        ("layout/_platform.py", "cuda = Platform('cuda', transport='nccl')"),
        ("tensor/_dist.py", 'def f(x):\n    """Return if `x` is on `cuda`."""\n    return x.is_cuda'),
        ("tensor/_dist.py", '"""Text."""\n' + "# note\n\n" * 600 + "x = 1"),
    ],
)
def test_the_laws_accept_good_code(path: str, text: str) -> None:
    assert not [offence for law in LAWS for offence in law(Source(path, text))]
