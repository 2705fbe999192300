"""No kind of change between steps of a static training may give the old number: a short run of the figure `stale`."""

from __future__ import annotations

import pytest

from benchmarks import stale
from benchmarks._stale_case import Kind

pytest.importorskip("transformers")
pytest.importorskip("peft")

FACTORS = (1.0, 1.0, 2.0, 2.0)
"""One change, before the third step. The figure also changes the setting back."""

KNOWN = set(
    """\
attribute of a function
attribute of a metaclass
attribute of a module that is no submodule
attribute of a parameter
attribute of a teacher
attribute of a tensor
attribute of a thread local
attribute of an optimizer
backend of attention
backend of attention read in forward
backward replaced
base of a numpy view
cache cleared
cache refilled
callable object in a list
cell of a hook
class attribute by super
class attribute by type
class attribute of a piece
class attribute of a recomputed layer
class attribute of an optimizer
class attribute of the model
class attribute that a subclass gets
class attribute that is inherited
class attribute with merged gradients
class of a configuration reassigned
class of the model reassigned
class weights replaced
code of a function
constant of a module of python
constant that a function of python reads
context variable
count of itertools
cycle of itertools
default attention of a modeling file replaced
default device
default of a dict with missing
defaults of a function
deterministic algorithms
dict with attributes
dispatch mode around the step
dunder call of a class replaced
element of a large numpy array
element of a numpy array
entry of a table of attentions
entry of a weak dictionary
environment variable
environment variable by getenv
environment variable that is there or not
field of a ctypes structure
file that is there or not
flag of a backend
forward hook replaced under its number
forward replaced on the class
function mode around the step
function of a modeling file replaced
function of a module of python replaced
function of another module replaced
function of torch replaced
function registered for a type
generator of the model seeded
global backward hook added
global by an imported module
global by eval
global by globals
global by the table of modules
global forward hook added
global forward pre hook added
global function replaced
global step pre hook added
gradient left by the user
gradients off around an evaluation
inference mode around an evaluation
initial seed read in forward
item of a user defined mapping
keyword defaults of a function
keywords of a partial in place
level of a logger
list inside a partial
loss of a trainer swapped
map below a chain map
method of a piece replaced on its class
method of an installed class replaced
method replaced on the class
module imported in forward
module in the table of modules replaced
name imported from a module in forward
name in builtins
next of a generator
next of an iterator
number of a tensor written by numpy
option of a config parser
partial method
precision of decimals
precision of float32 products
property of the model replaced
random number of a generator of the model
random number of a numpy generator
saved tensors hooks around the step
set below an object of the standard library
settings that an optimizer reads
sign of zero
slot of an object in a dict
state behind a hook that is a method
state of a forward hook
state of a global forward hook
state of a hook of a parameter
state of a hook of a piece
state of a step pre hook
static method replaced
step of an optimizer replaced
target of a weak reference
teacher replaced
text in a file
time of the clock
user dict value
value eight levels deep
value in memory that processes share
weak reference whose target dies
wrapped function replaced
""".splitlines()
)
"""Kinds that are stale, or raise an error that is not a MeshwrightError. A kind that is mended leaves this list."""


def marked(kind: Kind) -> object:
    known = pytest.mark.xfail(strict=True, raises=AssertionError, reason="stale, or raises an unclear error")
    return pytest.param(kind, id=kind.name, marks=[known] if kind.name in KNOWN else [])


@pytest.mark.parametrize("kind", [marked(kind) for kind in stale.KINDS.values() if not kind.by_loss])
def test_a_change_is_seen_or_refused(kind: Kind) -> None:
    found = stale.examine(kind, FACTORS)
    if found.outcome == stale.BROKEN:
        raise ValueError(found.message)
    assert found.outcome in (stale.RIGHT, stale.REFUSED), found.message


def test_every_known_kind_is_in_the_table() -> None:
    assert stale.KINDS.keys() >= KNOWN
