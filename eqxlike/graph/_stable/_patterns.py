"""Pattern matching: tests whether a value is a multiple of a formula.

A formula is a Python function of one or two numbers. It is traced once; the traced value is called
the pattern, and its inputs are called holes. Matching finds the values that fill the holes. Pattern
and value are compared as sums, products and functions, so a formula may be written in different
ways.
"""

import dataclasses
import functools
import inspect
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
from jax import Array, lax

from ._expressions import (
    INPUT,
    Axes,
    Part,
    Parts,
    Value,
    all_axes,
    argument_of,
    factors_of,
    is_same,
    key_of,
    once,
    placed,
    seen_through,
    steps_of,
    terms_of,
    unbroadcast,
)

Formula = Callable[..., Array]
Holes = dict[Value, Part]
Binding = tuple[float, Holes]


class Found(NamedTuple):
    """A match: the value is `factor * formula(*holes)`.

    Each hole is filled with a number times a value of the program.
    """

    factor: float
    holes: tuple[Part, ...]


def match(formula: Formula, value: Value | Parts) -> Found | None:
    """Matches a multiple of a formula. The value to match may also be a sum (`Parts`)."""
    pattern, names = _traced(formula)
    if pattern.step.kind in SPELLINGS:
        return spelled(pattern.step.kind, value)
    if isinstance(value, Parts):
        matches = _match_sum(terms_of(pattern), value, {})
    else:
        matches = _match(pattern, value, all_axes(value), {})
    for factor, holes in matches:
        return Found(factor, tuple(holes[name] for name in names))
    return None


@functools.cache
def _traced(formula: Formula) -> tuple[Value, list[Value]]:
    parameters = inspect.signature(formula).parameters.values()
    arguments = [each for each in parameters if each.default is each.empty]
    closed = jax.make_jaxpr(formula)(*[jax.ShapeDtypeStruct((), "float32")] * len(arguments))
    holes = [Value(each, INPUT) for each in closed.in_avals]
    _, (output,) = steps_of(closed, holes)
    return seen_through(output), holes


def _match(pattern: Value, value: Value, axes: Axes, holes: Holes) -> Iterator[Binding]:
    value, inner = unbroadcast(value)
    axes = tuple(axes[i] if i >= 0 else -1 for i in inner)
    total, product = terms_of(pattern), factors_of(pattern)
    if total.constant or len(total.parts) > 1:
        found = terms_of(value)
        yield from _match_sum(total, Parts(found.constant, placed(found.parts, axes)), holes)
    elif all(part.value.step is INPUT for part in total.parts):
        yield from _bind(pattern, Part(1.0, value, axes), holes)
    elif product.parts[0].value is not pattern:
        yield from _match_product(product, factors_of(value), axes, holes)
    elif pattern.step.kind in SPELLINGS:
        if (found := spelled(pattern.step.kind, value)) is not None:
            (hole,) = placed(found.holes, axes)
            holes_found = _bind(pattern.step.inputs[0], hole, holes)
            yield from ((found.factor, each) for _, each in holes_found)
    elif pattern.step.kind == value.step.kind:
        yield from (
            each
            for each in _match(pattern.step.inputs[0], value.step.inputs[0], axes, holes)
            if each[0] == 1
        )


def _match_sum(pattern: Parts, total: Parts, holes: Holes) -> Iterator[Binding]:
    if bool(pattern.constant) != bool(total.constant) or len(pattern.parts) != len(total.parts):
        return
    factor = total.constant / pattern.constant if pattern.constant else None
    for order in itertools.permutations(total.parts):
        yield from _match_terms(list(zip(pattern.parts, order, strict=True)), factor, holes)


def _match_terms(pairs: list[Any], factor: float | None, holes: Holes) -> Iterator[Binding]:
    if not pairs:
        assert factor is not None
        yield factor, holes
        return
    (mine, theirs), *rest = pairs
    number = theirs.number / mine.number
    if mine.value.step is INPUT and factor is not None:
        part = Part(number / factor, theirs.value, theirs.axes)
        matches = ((factor / number, found) for _, found in _bind(mine.value, part, holes))
    else:
        matches = _match(mine.value, theirs.value, theirs.axes, holes)
    for own, found in matches:
        if factor is None or math.isclose(own * number, factor, rel_tol=1e-12):
            yield from _match_terms(rest, own * number, found)


def _match_product(pattern: Parts, product: Parts, axes: Axes, holes: Holes) -> Iterator[Binding]:
    if len(pattern.parts) != len(product.parts):
        return
    for order in itertools.permutations(placed(product.parts, axes)):
        if [part.number for part in order] != [part.number for part in pattern.parts]:
            continue
        matches = [(product.constant / pattern.constant, holes)]
        for mine, theirs in zip(pattern.parts, order, strict=True):
            matches = [
                (factor * own**mine.number, found)
                for factor, holes in matches
                for own, found in _match(mine.value, theirs.value, theirs.axes, holes)
                if own > 0 or mine.number == int(mine.number)
            ]
        yield from matches


def _bind(pattern: Value, part: Part, holes: Holes) -> Iterator[Binding]:
    """Fills the hole of a pattern with `part`. The pattern is a number times the hole."""
    (own,) = terms_of(pattern).parts
    part = Part(part.number / own.number, part.value, part.axes)
    if own.value not in holes or _linear(holes[own.value]) == _linear(part):
        yield 1.0, {own.value: part, **holes}


def _linear(part: Part) -> Any:
    total = terms_of(part.value)
    terms = placed(total.parts, part.axes)
    numbers = {(key_of(each.value), each.axes): part.number * each.number for each in terms}
    return part.number * total.constant, numbers


SPELLINGS: dict[str, tuple[Formula, ...]] = {
    "logistic": (
        lambda y: 1 / (1 + lax.exp(-y)),
        lambda y: lax.exp(y) / (1 + lax.exp(y)),
        lambda y: 0.5 + 0.5 * lax.tanh(y / 2),
        lambda y: 1 - lax.logistic(-y),
    ),
    "erfc": (
        lambda y: 1 - lax.erf(y),
        lambda y: 1 + lax.erf(-y),
        lambda y: 2 - lax.erfc(-y),
    ),
    "cosh": (lambda y: 0.5 * lax.exp(y) + 0.5 * lax.exp(-y),),
    "sinh": (lambda y: 0.5 * lax.exp(y) - 0.5 * lax.exp(-y),),
}
"""For each primitive, other formulas that compute the same function."""


def spelled(kind: str, value: Value | Parts) -> Found | None:
    """Matches a multiple of the function `kind`, which may be written as any of its `SPELLINGS`."""
    if isinstance(value, Value):
        value, total = seen_through(value), terms_of(value)
        if not total.constant and len(total.parts) == 1 and total.parts[0].value is not value:
            (part,) = total.parts
            found = spelled(kind, part.value)
            return found and Found(part.number * found.factor, placed(found.holes, part.axes))
        if value.step.kind == kind:
            return Found(1.0, (Part(1.0, value.step.inputs[0], all_axes(value)),))
        if kind == "erfc" and value.step.kind == "select_n":
            return _cdf_of_jax(value)
        if value.step.kind not in ("div", "integer_pow", "mul", "add", "sub"):
            return None
    matches = (match(formula, value) for formula in SPELLINGS[kind])
    return next((found for found in matches if found is not None), None)


def _cdf_of_jax(value: Value) -> Found | None:
    """Matches the `where` in JAX's `norm.cdf`.

    This `where` computes 1 + erf(y) near zero, and erfc(|y|) or 2 - erfc(|y|) elsewhere.
    """
    near, far = sorted(map(seen_through, value.step.inputs[1:]), key=lambda x: x.step.kind)[:2]
    found = spelled("erfc", near) if near.step.kind == "add" else None
    if found is None or far.step.kind != "select_n":
        return None
    sizes = [argument_of(each, "erfc") for each in far.step.inputs[1:]]
    inner = [argument_of(size, "abs") for size in sizes if size is not None]
    is_same_y = any(y is not None and is_same(y, found.holes[0].value) for y in inner)
    return found if is_same_y else None


@once
def sigmoid_of(value: Value) -> tuple[Value, float] | None:
    """Returns `(y, scale)` if `value` is `sigmoid(scale * y)` in any spelling, otherwise None."""
    found = spelled("logistic", value)
    if found is None or found.factor != 1 or found.holes[0].axes != all_axes(value):
        return None
    return found.holes[0].value, found.holes[0].number


def erfc_of(value: Value | Parts) -> tuple[Part, float, float] | None:
    """Returns `(y, rate, factor)` if `value` is `factor * erfc(sqrt(rate) * y)` in any spelling.

    Otherwise returns None. `y` is returned without the factor sqrt(rate), because the product would
    be rounded. For a normal cdf the rate is 1/2.
    """
    found = spelled("erfc", value)
    if found is None or found.factor <= 0:
        return None
    (hole,) = found.holes
    product = factors_of(hole.value)
    if [part.number for part in product.parts] == [1]:
        if math.isclose(product.constant * math.sqrt(2), 1, rel_tol=1e-6):
            (own,) = placed(product.parts, hole.axes)
            return dataclasses.replace(own, number=hole.number), 0.5, found.factor
    return hole, 1.0, found.factor
