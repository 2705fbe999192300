"""C++ kernels: compiled once for the user, and loaded only from a folder of the user's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.tensor import native_kernel
from meshwright.tensor.execution import row_kernel

SOURCE = Path(row_kernel.__file__).with_name("row_products.cpp")
pytestmark = pytest.mark.skipif(native_kernel(SOURCE) is None, reason="no compiler")


def _raise_no_home() -> Path:
    raise RuntimeError("Could not determine home directory.")


def test_a_kernel_is_compiled_once_for_the_user_and_not_without_a_compiler(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def files() -> list[Path]:
        assert native_kernel(SOURCE) is not None
        return list(tmp_path.glob("meshwright/kernels/*"))

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = files()
    made = first[0].stat().st_mtime_ns
    assert files() == first
    assert first[0].stat().st_mtime_ns == made
    first[0].unlink()
    first[0].write_bytes(b"a broken file")
    assert files() == first
    first[0].parent.chmod(0o777)  # others may have put a kernel there
    first[0].write_bytes(b"no kernel")
    assert files() == first
    with monkeypatch.context() as patch:
        patch.delenv("XDG_CACHE_HOME")
        patch.setattr(Path, "home", _raise_no_home)
        assert native_kernel(SOURCE) is not None
    for name, value in (("PATH", str(tmp_path)), ("MESHWRIGHT_KERNELS", "off")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            patch.delenv("CXX", raising=False)
            assert native_kernel(SOURCE) is None


def test_code_that_does_not_compile_or_has_no_function_of_its_name_is_no_kernel(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for text in ("#error no vectors", 'extern "C" void other() {}'):
        (tmp_path / "sums.cpp").write_text(text)
        assert native_kernel(tmp_path / "sums.cpp") is None
