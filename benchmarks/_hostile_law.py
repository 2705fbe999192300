"""Functions of the package that open a file or parse a text, found in its source, and those without a hostile case."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "meshwright"
OPENS = frozenset({
    "open", "read_text", "read_bytes", "read_file", "read_text_file", "decoded_text", "read_json", "read_toml",
    "json.load", "json.loads", "tomllib.load", "tomllib.loads", "safe_open", "load_file", "fromhex", "frombuffer",
    "pickle.load", "pickle.loads", "torch.load", "np.load", "literal_eval", "read_object", "read_text_or_none",
})  # fmt: skip
"""Calls that open a file or parse a text, by the end of their names."""

EXEMPT = {
    "layout._bounded_file": "the bounded reader itself",
    "layout._bounded_text": "the bounded parsers themselves",
    "cli.ranks.measure": "files of /proc",
    "cli.commands.doctor_devices": "files of /sys",
    "cli.commands.profile": "the file that the command's own processes wrote",
    "cli.commands.run": "the user's own script, which is run",
    "cli.commands.main": "the null device",
    "cli.console.language_model:files_beside": "ordinary files, which are copied as they are",
    "cli.commands.checkpoint": "prints what the readers of checkpoints return",
    "conformance": "files of the package and of the command's own processes",
    "comm": "peers that have the token of the job, and files of the system; SECURITY.md says so",
    "engine.static.program_cache:_sum": "source files of the package",
    "engine.training.log_file": "the log, which is appended to",
    "engine.static.program_files:_saved_kernels": "the file that it wrote itself",
    "layout._whole_file:write_whole": "files that are written",
    "graph.execution.kernel_files": "flags of the processor in /proc",
    "graph.execution.matrix_products": "flags of the processor in /proc",
    "graph.guards.guards:_set_generators": "states in memory",
    "checkpoint.formats.dcp_writer:_write": "files that are written",
    "checkpoint.operations.state_differences:compare_state": "messages between the ranks of the job",
    "checkpoint.operations.folder_lock": "lock files, of which a few bytes are read for a message",
    "checkpoint.formats.format_interface:write_new": "files that are written",
    "checkpoint.formats.safetensors_file:write_file": "files that are written",
    "checkpoint.operations.save:_report": "messages between the ranks of the job",
    "checkpoint.formats.saved_state:table_of": "tensors in memory",
    "checkpoint.operations.step_folders:sync_folder": "folders, to write their names to the disk",
    "checkpoint.contents.rank_world:gathered": "messages between the ranks of the job",
    "models._corpus": "source files of Python",
    "search.scheduling.cp_sat": "the answer of the solver's own process",
    "search.scheduling.cp_sat_worker": "the question of the parent process",
    "tensor": "tensors in memory",
    "quantize.products.most_rows": "a table of the user, in a folder that nobody else can write to",
    "tensor.execution.native_kernel": "the source of the kernel, and flags of the processor in /proc",
    "engine.training.random_states:_bytes": "bytes in memory",
    "engine.training.random_states:_set": "called after check_random",
    "engine.training.random_states:put_back_random": "called after check_random",
}
"""Modules, packages or functions that open files but read no foreign input, and why."""


def functions() -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield every function of the package, by `package.module:function`."""
    for path in sorted(PACKAGE.rglob("*.py")):
        module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                yield f"{module}:{node.name}", node


def found_readers() -> Iterator[str]:
    """Yield `package.module:function` for every function that opens or parses, by its calls or its name."""
    for name, function in functions():
        if _opens(function) or _parses(function.name):
            yield name


def _parses(name: str) -> bool:
    return name.startswith("parse_") or name.endswith("_from_toml")


def _opens(function: ast.FunctionDef) -> bool:
    calls = (ast.unparse(node.func) for node in ast.walk(function) if isinstance(node, ast.Call))
    return any(name in OPENS or name.rpartition(".")[2] in OPENS for name in calls)


def uncovered(covers: frozenset[str]) -> list[str]:
    """Return the readers that are neither covered by cases nor exempt."""
    return [name for name in found_readers() if name not in covers and not _is_exempt(name)]


def _is_exempt(name: str) -> bool:
    module = name.partition(":")[0]
    parts = module.split(".")
    return name in EXEMPT or any(".".join(parts[: at + 1]) in EXEMPT for at in range(len(parts)))
