"""Rules for quotients of exponentials that overflow, and for quotients of two zeros."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from . import _replacements as stable
from ._expressions import (
    Part,
    Parts,
    Step,
    Value,
    axes_of_dot,
    broadcast,
    factors_of,
    key_of,
    merged,
    placed,
    seen_through,
    terms_in,
    terms_of,
)
from ._patterns import (
    Exponential,
    Formula,
    SumOfExponentials,
    Table,
    applied,
    exponential_of,
    exponentials_in,
    first_match,
    lifted,
    match,
    product_of,
    rewritten,
    shifted_terms,
    sigmoid_of,
    sum_of,
    summed_exponential,
)
from ._replacements import scaled, single, times, weighted_exp
from ._rewrite import Rewrite

Split = tuple[Any, Any]
"""Exponent and weight of an `Exponential`. None stands for an exponent of zero, and for a weight of
one.
"""


def quotient_of_exponentials(step: Step) -> Rewrite | None:
    """Matches a sigmoid, softmax, tanh or softmax-weighted mean written with exponentials."""
    value = step.output
    if not terms_of(value).constant and (found := sigmoid_of(value)) is not None:
        y, scale = found
        return Rewrite((y,), lambda y: stable.sigmoid(scaled(scale, y)))
    if (tanh := rewritten(TANHS, value, value.shape)) is not None:
        return tanh
    product = factors_of(value)
    for total in product.parts:
        if total.number >= 0:
            continue
        rest = tuple(part for part in product.parts if part is not total)
        for rule in QUOTIENTS if total.number == -1 else QUOTIENTS[-2:]:
            if (found := rule(value, Parts(product.constant, rest), total)) is not None:
                return found
    return None


TANHS: Table = (
    (lambda y: (lax.exp(y) - 1) / (lax.exp(y) + 1), lambda y: stable.tanh(y / 2)),
    (lambda y: lax.sinh(y) / lax.cosh(y), stable.tanh),
)


def _multiplied_sigmoid(value: Value, above: Parts, below: Part) -> Rewrite | None:
    """Matches a / (1 + exp(-y)) and a exp(y) / (n exp(y) + m exp(z))."""
    shape = value.shape
    found = exponentials_in(terms_in(dataclasses.replace(below, number=1.0)))
    terms = [term for term in found if isinstance(term, Exponential) and not term.masks]
    if len(found) != 2 or len(terms) != 2 or any(x.weights or x.number <= 0 for x in terms):
        return None
    own, top = [_keys(term.exponents) for term in terms], exponential_of(above)
    keys = _keys(top.exponents)
    if keys not in own or top.masks:
        return None
    first, second = terms if keys == own[0] else terms[::-1]
    ratio, scale = second.number / first.number, above.constant / first.number

    def build(first: Split, second: Split, weight: Array | None) -> Array:
        (y, _), (z, _) = first, second
        y = -z if y is None else y if z is None else y - z
        if weight is None and ratio == 1 and abs(scale) <= 2:
            return scaled(scale, stable.sigmoid(y))
        weight = jnp.ones_like(y) if weight is None else weight
        return stable.times_sigmoid(scaled(scale, weight), y, ratio)

    return applied(build, first.split(shape), second.split(shape), product_of(top.weights, shape))


def _softmax(value: Value, above: Parts, below: Part) -> Rewrite | None:
    """Matches w exp(y) / sum(w exp(y)). The rewrite subtracts the largest exponent."""
    total, shape = summed_exponential(below), value.shape
    if total is None or total.inner != shape:
        return None
    if [i for i in below.axes if i >= 0] != [
        i for i in range(len(shape)) if i not in total.reduced
    ]:
        return None
    top = exponential_of(above)
    if _alike(top) != _alike(total.term) or _keys(top.weights) != _keys(total.term.weights):
        return None
    scale = above.constant / total.term.number

    def build(split: Split) -> Array:
        y, w = split
        terms = weighted_exp(stable.shifted_in_quotient(y, w, total.reduced), w)
        return scaled(scale, terms / jnp.sum(terms, axis=total.reduced, keepdims=True))

    return applied(build, top.split(shape))


def _alike(term: Exponential) -> tuple[set[Any], set[Any]]:
    """A key of a term. Terms with the same exponents and masks have equal keys."""
    masks = {(key_of(mask.value), mask.axes, is_kept) for mask, is_kept in term.masks}
    return _keys(term.exponents), masks


def _keys(parts: Sequence[Part]) -> set[Any]:
    return {(key_of(part.value), part.number, part.axes) for part in parts}


def _weighted_mean(value: Value, above: Parts, below: Part) -> Rewrite | None:
    """Matches sum(v w exp(y)) / sum(w exp(y)).

    The numerator may also be a matrix product, as in attention.
    """
    total = summed_exponential(below)
    places = ((part, _place_of_terms(part, total)) for part in above.parts if total is not None)
    found = next(((part, place) for part, place in places if place is not None), None)
    if total is None or found is None:
        return None
    part, place = found
    step, shape = seen_through(part.value).step, value.shape
    term = exponential_of(factors_of(step.inputs[place]))
    extra = step.inputs[:place] + step.inputs[place + 1 :]
    others = [each for each in above.parts if each is not part]
    scale = above.constant * term.number / total.term.number

    def build(below_split: Split, above_split: Split, factor: Array | None, *extra: Array) -> Array:
        y, w = below_split
        y = stable.shifted_in_quotient(y, w, total.reduced)
        terms, above_terms = weighted_exp(y, w), weighted_exp(y, above_split[1])
        mean = step.eqn.primitive.bind(*extra[:place], above_terms, *extra[place:], **step.params)
        mean = broadcast(mean, part.axes, shape)
        mean = mean / broadcast(jnp.sum(terms, axis=total.reduced), below.axes, shape)
        return scaled(scale, times(mean, factor))

    splits = (each.split(total.inner) for each in (total.term, term))
    return applied(build, *splits, product_of(others, shape), *extra)


def _place_of_terms(part: Part, total: SumOfExponentials) -> int | None:
    """Finds v w exp(y) in the numerator of a weighted mean.

    `part` is a sum or matrix product. Returns the index of the input of `part` that is v w exp(y)
    and is summed over the axes of `total`. Returns None if there is no such input.
    """
    step = seen_through(part.value).step
    if part.number != 1 or step.kind not in ("reduce_sum", "dot_general"):
        return None
    for place, x in enumerate(step.inputs):
        if step.kind == "reduce_sum":
            axes, rows = step.params["axes"], part.axes
        else:
            axes = tuple(step.params["dimension_numbers"][0][place])
            rows = tuple(part.axes[i] for i in axes_of_dot(step, place) if i >= 0)
        term = exponential_of(factors_of(x))
        is_alike = (x.shape, axes, rows) == (total.inner, total.reduced, total.axes)
        if is_alike and _alike(term) == _alike(total.term):
            return place
    return None


def _hyperbolic_secant(value: Value, above: Parts, below: Part) -> Rewrite | None:
    """Matches a / cosh(y) ** k and a / (n exp(y) + n exp(-y)) ** k."""
    found = match(lax.cosh, below.value)
    if found is None or found.factor < 0:
        return None
    scale = above.constant * found.factor**below.number

    def build(y: Array, x: Array | None) -> Array:
        x = jnp.ones_like(y) if x is None else x
        return stable.times_sech(scaled(scale, x), y, -below.number)

    y = sum_of(placed(found.holes, below.axes), value.shape)
    return applied(build, y, product_of(above.parts, value.shape))


def _shifted_quotient(value: Value, above: Parts, below: Part) -> Rewrite | None:
    """Matches a exp(x) / (n exp(y) + m exp(z)) ** k. The rewrite subtracts the largest exponent."""
    power = -below.number
    top, shape, inner = exponential_of(above), value.shape, below.value.shape
    if (total := summed_exponential(below)) is not None:
        terms = [total.term] if total.term.may_overflow else []
    else:
        terms = exponentials_in(terms_of(below.value))
        terms = terms if len(terms) > 1 and any(each.may_overflow for each in terms) else []
    if not terms or any(term.number <= 0 for term in terms):
        return None

    def build(divisor: tuple[Array, Array], top: Split) -> Array:
        large, divided = (broadcast(each, below.axes, shape) for each in divisor)
        y, w = top
        large = scaled(power, large)
        y = -large if y is None else y - large
        if w is None and abs(above.constant) > 2:
            w = jnp.ones_like(y)
        found = weighted_exp(y, above.constant if w is None else scaled(above.constant, w))
        return found / stable.power_of(divided, power)

    if total is not None:
        term, axes = total.term, total.reduced

        def along(split: Split) -> tuple[Array, Array]:
            large, exps = stable.shifted_along(*split, axes)
            return lax.squeeze(large, axes), scaled(term.number, jnp.sum(exps, axis=axes))

        divisor = applied(along, term.split(total.inner))
    else:
        terms = shifted_terms(terms, inner)
        divisor = applied(lambda found: (found[0], functools.reduce(jnp.add, found[1])), terms)
    return applied(build, divisor, top.split(shape))


QUOTIENTS = (_multiplied_sigmoid, _softmax, _weighted_mean, _hyperbolic_secant, _shifted_quotient)
"""Functions that match quotients. The first three match only divisors to the power one."""

AT_ZERO: tuple[tuple[Formula, Formula, int, float], ...] = (
    (lax.expm1, stable.expm1, 1, 1.0),
    (lax.log1p, stable.log1p, 1, 1.0),
    (lax.tanh, stable.tanh, 1, 1.0),
    *((f, f, 1, 1.0) for f in (lax.sin, lax.tan, lax.sinh, lax.asin, lax.atan, lax.asinh)),
    (lax.atanh, stable.atanh, 1, 1.0),
    (lax.erf, lambda y: math.sqrt(math.pi) / 2 * lax.erf(y), 1, 2 / math.sqrt(math.pi)),
    (lambda y: lax.log(1 + y), stable.log1p, 1, 1.0),
    (lambda y: lax.exp(y) - 1, stable.expm1, 1, 1.0),
    (lambda y: lax.sqrt(1 + y) - 1, lambda y: 2 * y / (1 + jnp.sqrt(1 + y)), 1, 0.5),
    (lambda y: 1 - lax.cos(y), stable.one_minus_cos, 2, 0.5),
    (lambda y: lax.cosh(y) - 1, lambda y: 2 * jnp.square(jnp.sinh(y / 2)), 2, 0.5),
    (lambda y: lax.exp(y) - 1 - y, stable.excess_of_exp, 2, 0.5),
)
"""Each row is `(g, f, order, number)` with `g(y) = order * number * f(y)`.

The function g is zero at zero. Near zero, f(y) is close to `y ** order / order`.
"""


def quotient_at_zero(step: Step) -> Rewrite | None:
    """Matches f(x) / x, x / f(x) and f(x) / x², where f(0) = 0.

    The gradients of these quotients lose digits near zero, because their terms cancel.
    """
    product, shape = factors_of(step.output), step.output.shape
    found = (_over_power_of(part, product, shape) for part in product.parts)
    return next((rewrite for rewrite in found if rewrite is not None), None)


def _over_power_of(part: Part, product: Parts, shape: tuple[int, ...]) -> Rewrite | None:
    row = first_match(AT_ZERO, part.value) if abs(part.number) == 1 else None
    if row is None:
        return None
    (factor, holes), function, order, number = row
    (hole,) = placed(holes, part.axes)
    y, rate = hole.value, hole.number
    sign, inner = int(part.number), factors_of(y)
    powers = [
        dataclasses.replace(each, number=each.number * order * sign)
        for each in placed(inner.parts, hole.axes)
    ]
    others = [each for each in product.parts if each is not part]
    numbers = {(key_of(each.value), each.axes): each.number for each in others}
    divides = [numbers.get((key_of(x.value), x.axes), 0) / x.number <= -1 for x in powers]
    if not divides or not all(divides):
        return None
    rest = tuple(merged((*others, *powers)))
    scale = product.constant * (factor * number * (rate * inner.constant) ** order) ** sign

    def build(y: Array, factor: Array | None) -> Array:
        found = stable.over_power(function, scaled(rate, single(y)), order, sign)
        return scaled(scale, times(found, factor))

    found = applied(build, lifted(hole, shape), product_of(rest, shape))
    return dataclasses.replace(found, within=(part.value,))
