"""What can go wrong with a program."""

from meshwright.layout import MeshwrightError


class CaptureError(MeshwrightError):
    """Python code that cannot become part of one program."""


class SideEffectError(CaptureError):
    """A forward pass that changes something outside of the tensors it returns."""


class ProgramError(MeshwrightError):
    """A program that breaks the laws of programs, or text that is none."""


class ProgramFileError(ProgramError):
    """A program that cannot be saved, or a file that holds no program."""


class RewriteError(MeshwrightError):
    """A rewrite that cannot be, or a set of them that does not come to an end."""
