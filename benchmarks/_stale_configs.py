"""Kinds of change: attributes of configuration objects, user-defined and of installed libraries."""

from __future__ import annotations

import argparse
import configparser
import dataclasses
from enum import Enum, IntEnum
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import attrs
import pydantic

from ._stale_case import Case, Run, attribute, by_loss_too, kind, kind_on_mesh, reads, replaces


@dataclasses.dataclass
class Config:
    """A configuration as in typical training scripts."""

    scale: float = 1.0
    inner: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    """A configuration that is replaced as a whole."""

    scale: float = 1.0


class Slotted:
    """A configuration without a dict."""

    __slots__ = ("scale",)

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale


@attrs.define
class Attrs:
    """A configuration of attrs."""

    scale: float = 1.0


class Named(NamedTuple):
    """A configuration that is a tuple."""

    scale: float = 1.0


class Inner(pydantic.BaseModel):
    """A part of a pydantic configuration."""

    scale: float = 1.0


class Validated(pydantic.BaseModel):
    """A pydantic configuration."""

    inner: Inner = Inner()


@by_loss_too
@kind_on_mesh
def dataclass_attribute(run: Run) -> Case:
    config = Config()
    return reads(run, lambda self: self.config.scale, attribute(config, "scale"), config=config)


@by_loss_too
@kind
def dataclass_five_objects_deep(run: Run) -> Case:
    last = Config()
    config = Config(inner=Config(inner=Config(inner=Config(inner=last))))
    return reads(run, lambda self: self.config.inner.inner.inner.inner.scale, attribute(last, "scale"), config=config)


@by_loss_too
@kind
def objects_that_refer_to_each_other(run: Run) -> Case:
    parent, child = Config(), Config()
    parent.inner, child.inner = child, parent
    return reads(run, lambda self: self.config.inner.inner.scale, attribute(parent, "scale"), config=parent)


@by_loss_too
@kind
def frozen_dataclass_replaced(run: Run) -> Case:
    return replaces(run, lambda self: self.config.scale, "config", Frozen)


@by_loss_too
@kind
def frozen_dataclass_in_a_list_replaced(run: Run) -> Case:
    configs = [Frozen()]

    def change(factor: float) -> None:
        configs[0] = dataclasses.replace(configs[0], scale=factor)

    return reads(run, lambda self: self.configs[0].scale, change, configs=configs)


@by_loss_too
@kind
def frozen_dataclass_changed_by_force(run: Run) -> Case:
    config = Frozen()
    return reads(run, lambda self: self.config.scale, lambda f: object.__setattr__(config, "scale", f), config=config)


@by_loss_too
@kind_on_mesh
def slot_of_an_object(run: Run) -> Case:
    config = Slotted()
    return reads(run, lambda self: self.config.scale, attribute(config, "scale"), config=config)


@by_loss_too
@kind
def slot_of_an_object_in_a_dict(run: Run) -> Case:
    config = Slotted()
    return reads(run, lambda self: self.configs["a"].scale, attribute(config, "scale"), configs={"a": config})


@by_loss_too
@kind
def attrs_attribute(run: Run) -> Case:
    config = Attrs()
    return reads(run, lambda self: self.config.scale, attribute(config, "scale"), config=config)


@by_loss_too
@kind
def named_tuple_replaced(run: Run) -> Case:
    return replaces(run, lambda self: self.config.scale, "config", Named)


@by_loss_too
@kind_on_mesh
def pydantic_attribute(run: Run) -> Case:
    config = Validated(inner=Inner())
    return reads(run, lambda self: self.config.inner.scale, attribute(config.inner, "scale"), config=config)


@by_loss_too
@kind
def argparse_namespace(run: Run) -> Case:
    args = argparse.Namespace(scale=1.0)
    return reads(run, lambda self: self.args.scale, attribute(args, "scale"), args=args)


@by_loss_too
@kind
def simple_namespace_in_a_namespace(run: Run) -> Case:
    inner = SimpleNamespace(scale=1.0)
    return reads(run, lambda self: self.args.model.scale, attribute(inner, "scale"), args=SimpleNamespace(model=inner))


@by_loss_too
@kind
def namespace_read_as_a_dict(run: Run) -> Case:
    args = argparse.Namespace(scale=1.0)
    return reads(run, lambda self: vars(self.args)["scale"], attribute(args, "scale"), args=args)


@by_loss_too
@kind
def option_of_a_config_parser(run: Run) -> Case:
    parser = configparser.ConfigParser()
    parser["model"] = {"scale": "1.0"}

    def change(factor: float) -> None:
        parser["model"]["scale"] = str(factor)

    return reads(run, lambda self: self.parser.getfloat("model", "scale"), change, parser=parser)


@by_loss_too
@kind
def attribute_of_a_member_of_an_enum(run: Run) -> Case:
    class Mode(Enum):
        FAST = "fast"

    Mode.FAST.scale = 1.0  # pyright: ignore[reportAttributeAccessIssue] - members can have attributes
    return reads(run, lambda self: self.how.scale, attribute(Mode.FAST, "scale"), how=Mode.FAST)


class Level(IntEnum):
    """Factors with names."""

    ONE = 1
    TWO = 2
    THREE = 3


@by_loss_too
@kind
def another_member_of_an_enum(run: Run) -> Case:
    return replaces(run, lambda self: float(self.level), "level", lambda factor: Level(int(factor)))


@by_loss_too
@kind
def name_of_a_member_of_an_enum(run: Run) -> Case:
    return replaces(run, lambda self: float(Level[self.level]), "level", lambda factor: Level(int(factor)).name)


@by_loss_too
@kind
def class_that_is_a_configuration(run: Run) -> Case:
    class Settings:
        scale = 1.0

    return reads(run, lambda self: self.settings.scale, attribute(Settings, "scale"), settings=Settings)


@by_loss_too
@kind
def module_that_is_a_configuration(run: Run) -> Case:
    settings: Any = ModuleType("stale_settings")
    settings.scale, settings.__file__ = 1.0, __file__
    return reads(run, lambda self: self.settings.scale, attribute(settings, "scale"), settings=settings)


# --- transformers ----------------------------------------------------------------------------------------------------


@by_loss_too
@kind_on_mesh
def transformers_config(run: Run) -> Case:
    from transformers import PretrainedConfig

    config: Any = PretrainedConfig()
    config.scale = 1.0
    return reads(run, lambda self: self.config.scale, attribute(config, "scale"), config=config)


@by_loss_too
@kind
def nested_transformers_config(run: Run) -> Case:
    from transformers import LlavaConfig

    config: Any = LlavaConfig()
    config.text_config.rms_norm_eps = 1.0
    change = attribute(config.text_config, "rms_norm_eps")
    return reads(run, lambda self: self.config.text_config.rms_norm_eps, change, config=config)


@by_loss_too
@kind
def transformers_generation_config(run: Run) -> Case:
    from transformers import GenerationConfig

    config: Any = GenerationConfig(temperature=1.0)
    return reads(
        run, lambda self: self.generation_config.temperature, attribute(config, "temperature"), generation_config=config
    )
