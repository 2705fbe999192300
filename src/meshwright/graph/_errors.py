"""Errors about programs."""

from __future__ import annotations

from meshwright.layout import MeshwrightError, user_frame


class CaptureError(MeshwrightError):
    """Error for Python code that cannot become part of one program."""


def capture_error(found: str, why: str, write: str) -> CaptureError:
    """Return the error for the user's line that runs during a capture."""
    return CaptureError(f"capturing {user_frame() or 'the forward pass'}", found, why, write)


class HiddenTensorError(CaptureError):
    """Error for a derivative inside the forward pass that reads a tensor which an operator computes for itself."""


class SideEffectError(CaptureError):
    """Error for a forward pass that changes state other than the tensors it returns."""


class ProgramError(MeshwrightError):
    """Error for a program that breaks the invariants of programs, or text that is not a program."""


class ProgramFileError(ProgramError):
    """Error for a program that cannot be saved, or a file that holds no program."""


class RewriteError(MeshwrightError):
    """Error for an invalid rewrite, or a set of rewrites that does not terminate."""
