"""Frames and tracebacks give the lines of the user's files and the modules of the user's model."""

from __future__ import annotations

import inspect
import sys
from functools import partial

import pytest
import torch
from torch import nn

from meshwright.layout import module_path, user_frame, user_line, user_place


def line_here() -> str:
    frame = inspect.currentframe().f_back
    return f"{__file__}:{frame.f_lineno}"


def test_the_caller_is_a_line_of_the_user():
    assert user_frame() == line_here()


def test_frames_of_libraries_are_skipped():
    """The nearest user's line is the call of torch; frames of torch are between this line and the function."""
    namespace = {"__name__": "torch.somewhere"}
    exec("def call(f): return f()", namespace)
    assert namespace["call"](partial(user_frame, None)) == line_here()


@pytest.mark.parametrize("name", ["torch", "torch.nn", "meshwright.tensor", "contextlib", "threading", "functools"])
def test_lines_of_libraries_are_not_the_users(name):
    namespace = {"__name__": name, "sys": sys}
    exec("def frame(): return sys._getframe()", namespace)
    assert user_frame(namespace["frame"]()) == line_here()  # the nearest caller in a file of the user


@pytest.mark.parametrize("name", ["torchvision", "meshwright_extra", "meshwright.models.llama", "__main__"])
def test_lines_of_other_modules_are_the_users(name):
    namespace = {"__name__": name, "sys": sys}
    exec(compile("def frame():\n    return sys._getframe()", "mine.py", "exec"), namespace)
    assert user_frame(namespace["frame"]()) == "mine.py:2"


def test_generated_code_has_no_line_of_the_user():
    namespace = {"__name__": "mine", "sys": sys}
    exec(compile("def frame(): return sys._getframe()", "<eval_with_key>.3", "exec"), namespace)
    assert user_frame(namespace["frame"]()) == line_here()


class Inner(nn.Module):
    def __init__(self, do) -> None:
        super().__init__()
        self.do = do

    def forward(self, x: torch.Tensor) -> object:
        return self.do()


class Outer(nn.Module):
    def __init__(self, do) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Inner(lambda: None), Inner(do)])

    def forward(self, x: torch.Tensor) -> object:
        return [layer(x) for layer in self.layers][-1]


def test_the_path_of_the_innermost_module():
    x = torch.zeros(())
    assert Outer(module_path)(x) == "layers.1"
    assert Inner(module_path)(x) == "Inner"
    assert module_path() == ""


def test_a_traceback_names_line_and_module():
    def fail() -> None:
        raise ValueError("here")

    with pytest.raises(ValueError, match="here") as caught:
        Outer(fail)(torch.zeros(()))
    line = f"{__file__}:{inspect.getsourcelines(fail)[1] + 1}"
    assert user_line(caught.tb) == line
    assert user_place(caught.tb) == f"{line} in layers.1"


def test_without_a_module_the_line_is_enough():
    with pytest.raises(ZeroDivisionError) as caught:
        1 / 0  # noqa: B018 - the error is the point
    assert user_place(caught.tb) == user_line(caught.tb) != ""
    assert user_line(None) == user_place(None) == ""


class Direct(nn.Module):
    """A module that calls the `forward` of its part directly, so that only one frame holds the part."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Inner(module_path)

    def forward(self, x: torch.Tensor) -> object:
        return self.part.forward(x)


def test_a_direct_call_of_forward_is_found() -> None:
    assert Direct()(torch.zeros(())) == "part"
    assert Inner(module_path).forward(torch.zeros(())) == "Inner"
