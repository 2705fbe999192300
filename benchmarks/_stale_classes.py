"""Kinds of change: attributes of classes, inherited and computed ones, and classes that are exchanged."""

from __future__ import annotations

from typing import Any

from ._stale_case import Case, Net, Run, attribute, item, kind, kind_on_mesh, reads


@kind
def class_attribute_of_the_model(run: Run) -> Case:
    class Model(Net):
        factor = 1.0

        def scale(self) -> float:
            return self.factor

    return Case(Model(), attribute(Model, "factor"))


@kind
def class_attribute_that_is_inherited(run: Run) -> Case:
    class Base(Net):
        factor = 1.0

    class Model(Base):
        def scale(self) -> float:
            return self.factor

    return Case(Model(), attribute(Base, "factor"))


@kind
def class_attribute_that_a_subclass_gets(run: Run) -> Case:
    class Base(Net):
        factor = 1.0

    class Model(Base):
        def scale(self) -> float:
            return self.factor

    return Case(Model(), attribute(Model, "factor"))


@kind
def class_attribute_by_type(run: Run) -> Case:
    class Model(Net):
        factor = 1.0

        def scale(self) -> float:
            return type(self).factor

    return Case(Model(), attribute(Model, "factor"))


@kind
def class_attribute_by_dunder_class(run: Run) -> Case:
    class Model(Net):
        factor = 1.0

        def scale(self) -> float:
            return self.__class__.factor

    return Case(Model(), attribute(Model, "factor"))


@kind
def class_attribute_by_super(run: Run) -> Case:
    class Base(Net):
        factor = 1.0

    class Model(Base):
        factor = 7.0

        def scale(self) -> float:
            return super().factor

    return Case(Model(), attribute(Base, "factor"))


@kind
def class_attribute_by_a_classmethod(run: Run) -> Case:
    class Model(Net):
        factor = 1.0

        @classmethod
        def of_class(cls) -> float:
            return cls.factor

        def scale(self) -> float:
            return self.of_class()

    return Case(Model(), attribute(Model, "factor"))


@kind
def class_attribute_by_the_name_of_the_class(run: Run) -> Case:
    class Defaults:
        scale = 1.0

    return reads(run, lambda self: Defaults.scale, attribute(Defaults, "scale"))


@kind
def attribute_of_a_metaclass(run: Run) -> Case:
    class Meta(type):
        scale = 1.0

    class Defaults(metaclass=Meta):
        pass

    return reads(run, lambda self: Defaults.scale, attribute(Meta, "scale"))


@kind
def class_of_the_model_reassigned(run: Run) -> Case:
    class Double(Net):
        def scale(self) -> float:
            return 2.0

    model = Net()

    def change(factor: float) -> None:
        model.__class__ = Net if factor == 1 else Double

    return Case(model, change)


@kind
def base_of_a_class_reassigned(run: Run) -> Case:
    class Single:
        factor = 1.0

    class Double:
        factor = 2.0

    class Settings(Single):
        pass

    def change(factor: float) -> None:
        Settings.__bases__ = (Single if factor == 1 else Double,)

    return reads(run, lambda self: Settings.factor, change)


@kind_on_mesh
def attribute_behind_a_property_of_the_model(run: Run) -> Case:
    class Model(Net):
        @property
        def factor(self) -> float:
            return self.raw

        def scale(self) -> float:
            return self.factor

    model = Model(raw=1.0)
    return Case(model, attribute(model, "raw"))


@kind
def property_of_the_model_replaced(run: Run) -> Case:
    class Model(Net):
        factor = property(lambda self: 1.0)

        def scale(self) -> float:
            return self.factor

    return Case(Model(), lambda factor: setattr(Model, "factor", property(lambda self: factor)))


class Described:
    """A descriptor that keeps its value under another name."""

    def __get__(self, owner: Any, kind: Any = None) -> float:
        return vars(owner)["described"]

    def __set__(self, owner: Any, value: float) -> None:
        vars(owner)["described"] = value


class Stored:
    """A descriptor that keeps its value itself."""

    def __init__(self) -> None:
        self.value = 1.0

    def __get__(self, owner: Any, kind: Any = None) -> float:
        return self.value


@kind
def value_behind_a_descriptor(run: Run) -> Case:
    class Model(Net):
        factor = Described()

        def scale(self) -> float:
            return self.factor

    model = Model(factor=1.0)
    return Case(model, attribute(model, "factor"))


@kind
def value_inside_a_descriptor(run: Run) -> Case:
    stored = Stored()

    class Model(Net):
        factor = stored

        def scale(self) -> float:
            return self.factor

    return Case(Model(), attribute(stored, "value"))


@kind
def attribute_by_a_getattr_of_the_model(run: Run) -> Case:
    class Model(Net):
        def __getattr__(self, name: str) -> Any:
            return self.table[name] if name == "factor" else super().__getattr__(name)

        def scale(self) -> float:
            return self.factor

    model = Model(table={"factor": 1.0})
    return Case(model, item(model.table, "factor"))
