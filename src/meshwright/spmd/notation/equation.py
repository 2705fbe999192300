"""The notation of rules: `"... k * n k + n -> ... n"`.

A rule names the factors of every dim of every tensor operand and result.

    rule     = side "->" result {";" result}
    side     = ["given" "?"] sum {"," [sum]} ["|" given]
    sum      = product {"+" product}          linear together
    product  = operand {"*" operand}          linear in each
    operand  = {dim}                          dims, separated by blanks; none for a scalar
    dim      = name ["!"] | "..." | "1" | "(" name name ... ")"

A factor `name!` must be whole on every rank. `(a b)` is a product of factors, outermost first. `1` is a dim of size
one. `...` is any number of leading dims, aligned at the end as in broadcasting. The result is not linear in operands
right of `|` or left of `?`. A comma says that nothing is known about linearity.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from .._errors import RuleError

ELLIPSIS = "..."
NEW = "new"


@dataclass(frozen=True, slots=True)
class DimTerm:
    """One dim of an operand: its factors, outermost first; none for a dim of size one."""

    names: tuple[str, ...]

    def __repr__(self) -> str:
        if not self.names:
            return "1"
        return self.names[0] if len(self.names) == 1 else f"({' '.join(self.names)})"


Operand = tuple[DimTerm, ...]
Products = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Equation:
    """A parsed rule: operands, results, the whole factors, and the products that are linear together.

    `products` lists operand indices: the result is linear in one operand of each product, given all others.
    It is empty if nothing is known about linearity.
    """

    operands: tuple[Operand, ...]
    results: tuple[Operand, ...]
    whole: frozenset[str]
    products: Products

    def __repr__(self) -> str:
        sides = [" , ".join(" ".join(map(repr, o)) for o in side) for side in (self.operands, self.results)]
        return " -> ".join(sides)


MOST_CHARACTERS = 2000
"""Maximum length of a rule, in characters."""


@lru_cache(maxsize=4096)
def parse_rule(text: str) -> Equation:
    """Return the equation for the text of a rule. Raises RuleError that quotes the invalid part.

    >>> parse_rule("... k * n k + n -> ... n").products
    ((0, 1), (2,))
    """
    left, right = _sides(text)
    whole: set[str] = set()
    linear, given, order = _split_given(left)
    operands: list[Operand] = []
    products: list[tuple[int, ...]] = []
    known = "," not in linear
    for part in order:
        if part is given:
            operands += [_parsed_operand(o, whole, text) for o in part.split(",")]
            continue
        for product in part.replace(",", "+").rstrip("+ ").split("+"):
            start = len(operands)
            operands += [_parsed_operand(o, whole, text) for o in product.split("*")]
            products.append(tuple(range(start, len(operands))))
    results = tuple(_parsed_operand(o, whole, text) for o in right.split(";"))
    _check_names(operands, results, text)
    return Equation(tuple(operands), results, frozenset(whole), tuple(products) if known else ())


def _sides(text: str) -> tuple[str, str]:
    """Return the text of the operands and that of the results. Raises RuleError if the text does not divide so."""
    if len(text) > MOST_CHARACTERS or text.count("|") + text.count("?") > 1:
        why = f"a rule has at most {MOST_CHARACTERS} characters, and one '|' or '?'"
        raise RuleError(f"rule {text[:80]!r}", f"{len(text)} characters", why, 'write it as in "m k * k n -> m n"')
    if text.count("->") != 1:
        raise RuleError(
            f"rule {text!r}",
            f"{text.count('->')} times '->'",
            "a rule has one '->', from operands to results",
            'write it as in "m k * k n -> m n"',
        )
    left, right = text.split("->")
    if left.rstrip().endswith("+"):
        raise RuleError(f"rule {text!r}", "nothing after the last '+'", "a term is missing", "write '...' for a scalar")
    return left, right


def _split_given(left: str) -> tuple[str, str | None, list[str]]:
    """Return the linear part, the given part, and both in the order of the operands."""
    if "|" in left:
        linear, given = left.split("|")
        return linear, given, [linear, given]
    if "?" in left:
        given, linear = left.split("?")
        return linear, given, [given, linear]
    return left, None, [left]


def _parsed_operand(text: str, whole: set[str], rule: str) -> Operand:
    dims: list[DimTerm] = []
    group: list[str] | None = None
    for token in text.replace("(", " ( ").replace(")", " ) ").split():
        if token == "(":
            group = []
        elif token == ")":
            dims.append(DimTerm(tuple(group or ())))
            group = None
        elif group is not None:
            group.append(_factor_name(token, whole, rule))
        else:
            dims.append(DimTerm(() if token == "1" else (_factor_name(token, whole, rule),)))
    if group is not None:
        raise RuleError(f"rule {rule!r}", f"{text.strip()!r}", "a parenthesis is not closed", "write (a b)")
    return tuple(dims)


def _factor_name(token: str, whole: set[str], rule: str) -> str:
    name = token.removesuffix("!")
    if name != ELLIPSIS and not name.isidentifier():
        raise RuleError(f"rule {rule!r}", f"{token!r}", "a factor is named like a variable", "use m, k1 or s!")
    if token.endswith("!"):
        whole.add(name)
    return name


def _check_names(operands: list[Operand], results: tuple[Operand, ...], text: str) -> None:
    known = {ELLIPSIS} | {n for o in operands for d in o for n in d.names}
    for result in results:
        new = [n for d in result for n in d.names if n not in known and not n.startswith(NEW)]
        if new:
            raise RuleError(
                f"rule {text!r}",
                f"result factor {new[0]!r}",
                "no operand has it",
                "use a factor of an operand, or new…",
            )
