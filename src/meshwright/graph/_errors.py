"""Errors about programs."""

from meshwright.layout import MeshwrightError


class CaptureError(MeshwrightError):
    """Error for Python code that cannot become part of one program."""


class SideEffectError(CaptureError):
    """Error for a forward pass that changes state other than the tensors it returns."""


class ProgramError(MeshwrightError):
    """Error for a program that breaks the invariants of programs, or text that is not a program."""


class ProgramFileError(ProgramError):
    """Error for a program that cannot be saved, or a file that holds no program."""


class RewriteError(MeshwrightError):
    """Error for an invalid rewrite, or a set of rewrites that does not terminate."""
