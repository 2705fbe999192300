"""The package names the device of each tensor it makes, so that `torch.set_default_device` changes none of them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "meshwright"
FACTORIES = {
    *("arange", "as_tensor", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones", "rand"),
    *("randint", "randn", "randperm", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros"),
}


def without_device(text: str) -> Iterator[int]:
    """Yield the lines of torch's factories that are called without a device, or passed as functions."""
    tree = ast.parse(text)
    with_device = {
        call.func
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and any(word.arg in ("device", None) for word in call.keywords)
    }
    for each in ast.walk(tree):
        if isinstance(each, ast.expr) and _is_factory(each) and each not in with_device:
            yield each.lineno


def _is_factory(called: ast.expr) -> bool:
    of_torch = isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name) and called.value.id == "torch"
    return of_torch and called.attr in FACTORIES


def test_the_law_finds_a_call_without_a_device() -> None:
    calls = ["torch.zeros(3)", "torch.zeros(3, device=d)", "torch.zeros(3, **options)", "make = torch.zeros"]
    assert sorted(without_device("\n".join(calls))) == [1, 4]


def test_factories_name_their_device() -> None:
    found = [
        f"{path.relative_to(SOURCE)}:{line}"
        for path in sorted(SOURCE.rglob("*.py"))
        for line in without_device(path.read_text())
    ]
    assert found == []
