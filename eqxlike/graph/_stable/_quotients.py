"""Quotients of exponentials, which overflow before they are divided."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from . import _replacements as stable
from ._expressions import (
    Axes,
    Part,
    Parts,
    Step,
    Value,
    argument_of,
    broadcast,
    factors_of,
    is_same,
    key_of,
    merged,
    placed,
    seen_through,
    terms_of,
)
from ._functions import (
    Exponential,
    all_axes,
    applied,
    exponential_of,
    exponentials_in,
    lifted,
    opposites_in,
    power_of,
    product_of,
    shifted_along,
    shifted_in_quotient,
    shifted_terms,
    sigmoid_of,
    times,
    weighted_exp,
)
from ._replacements import scaled, single
from ._rewrite import Rewrite

Split = tuple[Array | None, Array | None]
"""The exponent and the weight of an `Exponential`."""


def quotient_of_exponentials(step: Step) -> Rewrite | None:
    """A sigmoid, softmax, tanh, or mean with such weights, that is written with exponentials."""
    value = step.output
    if (found := sigmoid_of(value)) is not None:
        y, scale = found
        return Rewrite((y,), lambda y: stable.sigmoid(scaled(scale, y)))
    product = factors_of(value)
    for total in product.parts:
        if total.number >= 0:
            continue
        rest = tuple(part for part in product.parts if part is not total)
        if (found := _quotient(value, Parts(product.constant, rest), total)) is not None:
            return found
    return None


def _quotient(value: Value, above: Parts, below: Part) -> Rewrite | None:
    if below.number == -1:
        if len(above.parts) == 1:
            if (found := _tanh(value, above.parts[0], below, above.constant)) is not None:
                return found
        for rule in (_multiplied_sigmoid, _softmax, _weighted_mean):
            if (found := rule(value, above, below)) is not None:
                return found
    return _hyperbolic_secant(value, above, below) or _shifted_quotient(value, above, below)


def _multiplied_sigmoid(value: Value, above: Parts, below: Part) -> Rewrite | None:
    """The quotients a / (1 + exp(-y)) and a exp(y) / (n exp(y) + m exp(z))."""
    shape, total = value.shape, terms_of(below.value)
    found = exponentials_in(dataclasses.replace(total, parts=placed(total.parts, below.axes)))
    terms = [term for term in found if isinstance(term, Exponential) and not term.masks]
    if len(found) != len(terms) or len(terms) != 2:
        return None
    if any(term.weights or term.number <= 0 for term in terms):
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
    """The quotient w exp(y) / sum(w exp(y)) with its largest term taken off."""
    total = _reduced(below.value)
    kept = tuple(axis for axis in range(len(value.shape)) if total and axis not in total.axes)
    if total is None or total.shape != value.shape or _kept(below) != kept:
        return None
    top = exponential_of(above)
    if not _is_same_product(top, total.term):
        return None
    scale = above.constant / total.term.number

    def build(split: Split) -> Array:
        y, w = split
        terms = weighted_exp(shifted_in_quotient(y, w, total.axes), w)
        return scaled(scale, terms / jnp.sum(terms, axis=total.axes, keepdims=True))

    return applied(build, top.split(value.shape))


def _kept(part: Part) -> Axes:
    return tuple(axis for axis in part.axes if axis >= 0)


class _Reduced(NamedTuple):
    """The sum along axes of an array of exponentials, none of which was shifted."""

    term: Exponential
    shape: tuple[int, ...]
    axes: Axes


def _reduced(value: Value) -> _Reduced | None:
    terms = argument_of(value, "reduce_sum")
    if terms is None:
        return None
    term = exponential_of(factors_of(terms))
    if not term.may_underflow or not term.number > 0:
        return None
    return _Reduced(term, terms.shape, seen_through(value).step.params["axes"])


def _is_same_product(first: Exponential, second: Exponential) -> bool:
    same = [(_keys(each.exponents), _keys(each.weights)) for each in (first, second)]
    return _is_equally_masked(first, second) and same[0] == same[1]


def _is_equally_masked(first: Exponential, second: Exponential) -> bool:
    pair = [
        {(key_of(mask.value), mask.axes, kept) for mask, kept in x.masks} for x in (first, second)
    ]
    return pair[0] == pair[1]


def _keys(parts: Sequence[Part]) -> set[Any]:
    return {(key_of(part.value), part.number, part.axes) for part in parts}


def _weighted_mean(value: Value, above: Parts, below: Part) -> Rewrite | None:
    """sum(v w exp(y)) / sum(w exp(y)), also as a product of matrices: attention."""
    total = _reduced(below.value)
    if total is None:
        return None
    found = (_mean_by(part, value, above, below, total) for part in above.parts)
    return next((rewrite for rewrite in found if rewrite is not None), None)


def _mean_by(
    part: Part, value: Value, above: Parts, below: Part, total: _Reduced
) -> Rewrite | None:
    step, shape = seen_through(part.value).step, value.shape
    place = _place_of_terms(part, below, total)
    if place is None:
        return None
    term = exponential_of(factors_of(step.inputs[place]))
    extra = step.inputs[:place] + step.inputs[place + 1 :]
    others = [each for each in above.parts if each is not part]
    scale = above.constant * term.number / total.term.number

    def build(below_split: Split, above_split: Split, factor: Array | None, *extra: Array) -> Array:
        y, w = below_split
        y = shifted_in_quotient(y, w, total.axes)
        terms, above_terms = weighted_exp(y, w), weighted_exp(y, above_split[1])
        mean = step.eqn.primitive.bind(*extra[:place], above_terms, *extra[place:], **step.params)
        mean = broadcast(mean, part.axes, shape)
        mean = mean / broadcast(jnp.sum(terms, axis=total.axes), below.axes, shape)
        return scaled(scale, times(mean, factor))

    splits = (each.split(total.shape) for each in (total.term, term))
    return applied(build, *splits, product_of(others, shape), *extra)


def _place_of_terms(part: Part, below: Part, total: _Reduced) -> int | None:
    """Which input of a sum or a product holds v w exp(y), added as w exp(y) is."""
    step = seen_through(part.value).step
    if part.number != 1 or step.kind not in ("reduce_sum", "dot_general"):
        return None
    for place, x in enumerate(step.inputs):
        if step.kind == "reduce_sum":
            axes, rows = step.params["axes"], part.axes
        else:
            contracted, batch = step.params["dimension_numbers"]
            axes = tuple(contracted[place])
            lies = _rows_of_dot(x, step.inputs[1 - place], place, contracted, batch)
            rows = tuple(part.axes[i] for i in lies)
        term = exponential_of(factors_of(x))
        is_alike = (x.shape, axes, rows) == (total.shape, total.axes, below.axes)
        is_alike = is_alike and _is_equally_masked(term, total.term)
        if is_alike and _keys(term.exponents) == _keys(total.term.exponents):
            return place
    return None


def _rows_of_dot(x: Value, other: Value, place: int, contracted: Any, batch: Any) -> list[int]:
    """On which axes of a product the axes of `x` lie that are not contracted."""
    own, others = contracted[place], contracted[1 - place]
    num_batch, num_free = len(batch[0]), len(other.shape) - len(others) - len(batch[0])
    first_free = num_batch + (num_free if place else 0)
    free = [i for i in range(len(x.shape)) if i not in own and i not in batch[place]]
    lies = {axis: i for i, axis in enumerate(batch[place])}
    lies |= {axis: first_free + i for i, axis in enumerate(free)}
    return [lies[i] for i in range(len(x.shape)) if i in lies]


def _hyperbolic_secant(value: Value, above: Parts, below: Part) -> Rewrite | None:
    """The quotients a / cosh(y) ** k and a / (n exp(y) + n exp(-y)) ** k."""
    y, shape = argument_of(below.value, "cosh"), value.shape
    first = Exponential(0.5, (Part(1.0, y, all_axes(y)),)) if y is not None else None
    first = first or opposites_in(terms_of(below.value))
    if first is None or first.number < 0:
        return None
    scale = above.constant * (2 * first.number) ** below.number

    def build(split: Split, x: Array | None) -> Array:
        y = broadcast(split[0], below.axes, shape)
        x = jnp.ones_like(y) if x is None else x
        return stable.times_sech(scaled(scale, x), y, -below.number)

    return applied(build, first.split(below.value.shape), product_of(above.parts, shape))


def _shifted_quotient(value: Value, above: Parts, below: Part) -> Rewrite | None:
    """A quotient a exp(x) / (n exp(y) + m exp(z)) ** k, with the largest exponent taken off."""
    power = -below.number
    top, shape, inner = exponential_of(above), value.shape, below.value.shape
    if (total := _reduced(below.value)) is not None:
        terms = [total.term] if total.term.may_overflow else []
    else:
        terms = exponentials_in(terms_of(below.value))
        terms = terms if len(terms) > 1 and any(each.may_overflow for each in terms) else []
    if not terms or any(term.number <= 0 for term in terms):
        return None

    def along(split: Split) -> tuple[Array, Array]:
        large, exps = shifted_along(*split, total.axes)
        large = lax.squeeze(large, total.axes)
        return large, scaled(total.term.number, jnp.sum(exps, axis=total.axes))

    def apart(found: tuple[Array, list[Array]]) -> tuple[Array, Array]:
        return found[0], functools.reduce(jnp.add, found[1])

    def build(divisor: tuple[Array, Array], top: Split) -> Array:
        large, divided = (broadcast(each, below.axes, shape) for each in divisor)
        y, w = top
        large = scaled(power, large)
        y = -large if y is None else y - large
        if w is None and abs(above.constant) > 2:
            w = jnp.ones_like(y)
        found = weighted_exp(y, above.constant if w is None else scaled(above.constant, w))
        return found / power_of(divided, power)

    if total is None:
        divisor = applied(apart, shifted_terms(terms, inner))
    else:
        divisor = applied(along, total.term.split(total.shape))
    return applied(build, divisor, top.split(shape))


def _tanh(value: Value, above: Part, below: Part, constant: float) -> Rewrite | None:
    """(exp(y) - exp(-y)) / (exp(y) + exp(-y)), (1 - exp(-y)) / (1 + exp(-y)), sinh(y) / cosh(y)."""
    if above.axes != all_axes(value) or below.axes != all_axes(value):
        return None
    y, other = argument_of(above.value, "sinh"), argument_of(below.value, "cosh")
    if y is not None and other is not None and is_same(y, other):
        return Rewrite((y,), lambda y: scaled(constant, stable.tanh(y)))
    tops, bottoms = (_exponents(part.value) for part in (above, below))
    if tops is None or bottoms is None or tops.keys() != bottoms.keys() or len(tops) != 2:
        return None
    (first, (y, n)), (second, (z, m)) = tops.items()
    if n != -m or any(number != abs(n) for _, number in bottoms.values()):
        return None
    # The exponents are opposite, or one is zero.
    if first and second and first[0] == second[0] and first[1] == -second[1]:
        scale = 1.0
    elif None in (y, z):
        scale = 0.5
    else:
        return None
    y, scale = (y, math.copysign(scale, n)) if y is not None else (z, -math.copysign(scale, n))
    return y and Rewrite((y,), lambda y: scaled(constant, stable.tanh(scaled(scale, y))))


def _exponents(value: Value) -> dict[Any, tuple[Value | None, float]] | None:
    """The terms n exp(y) of a sum: (y, n) by what y is, and (None, n) for a constant n."""
    total = terms_of(value)
    found: dict[Any, tuple[Value | None, float]] = {}
    for part in total.parts:
        y = argument_of(part.value, "exp")
        if y is None or part.axes != all_axes(value):
            return None
        inner = terms_of(y)
        if len(inner.parts) != 1 or inner.constant:
            return None
        found[key_of(inner.parts[0].value), inner.parts[0].number] = (y, part.number)
    if total.constant:
        found[()] = (None, total.constant)
    return found


FUNCTIONS: dict[str, Callable[[Array], Array]] = {
    "expm1": stable.expm1,
    "log1p": stable.log1p,
    "tanh": stable.tanh,
    "sin": jnp.sin,
    "tan": jnp.tan,
    "sinh": jnp.sinh,
    "asin": jnp.arcsin,
    "atan": jnp.arctan,
    "asinh": jnp.arcsinh,
    "atanh": stable.atanh,
    "erf": lambda y: math.sqrt(math.pi) / 2 * lax.erf(y),
}
"""Functions that are zero at zero, divided by their derivative at zero."""


def quotient_at_zero(step: Step) -> Rewrite | None:
    """A quotient f(x) / x, x / f(x) or f(x) / x² of two zeros whose gradient cancels."""
    product, shape = factors_of(step.output), step.output.shape
    found = (_over_power_of(part, product, shape) for part in product.parts)
    return next((rewrite for rewrite in found if rewrite is not None), None)


def _over_power_of(part: Part, product: Parts, shape: tuple[int, ...]) -> Rewrite | None:
    found = _function_at_zero(part.value) if abs(part.number) == 1 else None
    if found is None:
        return None
    y, rate, function, order, number = found
    sign, inner = int(part.number), factors_of(y)
    powers = [
        dataclasses.replace(each, number=each.number * order * sign)
        for each in placed(inner.parts, part.axes)
    ]
    others = [each for each in product.parts if each is not part]
    numbers = {(key_of(each.value), each.axes): each.number for each in others}
    divides = [numbers.get((key_of(x.value), x.axes), 0) / x.number <= -1 for x in powers]
    if not divides or not all(divides):
        return None
    rest = tuple(merged((*others, *powers)))
    scale = product.constant * (number * (rate * inner.constant) ** order) ** sign

    def build(y: Array, factor: Array | None) -> Array:
        found = stable.over_power(function, scaled(rate, single(y)), order, sign)
        return scaled(scale, times(found, factor))

    y = lifted(dataclasses.replace(part, value=y), shape)
    found = applied(build, y, product_of(rest, shape))
    return dataclasses.replace(found, within=(part.value,))


def _function_at_zero(
    value: Value,
) -> tuple[Value, float, Callable[[Array], Array], int, float] | None:
    """x, a, a function of y = a x close to y ** order / order near 0, the order, and a factor."""
    step = seen_through(value).step
    if step.kind in FUNCTIONS:
        number = 2 / math.sqrt(math.pi) if step.kind == "erf" else 1.0
        return step.inputs[0], 1.0, FUNCTIONS[step.kind], 1, number
    if step.kind == "log":
        part = _added_to_one(step.inputs[0])
        return part and (part.value, part.number, stable.log1p, 1, 1.0)
    total = terms_of(value)
    if any(part.axes != all_axes(value) for part in total.parts):
        return None
    number = -total.constant
    if [part.number for part in total.parts] == [number]:
        (part,) = total.parts
        if (y := argument_of(part.value, "exp")) is not None:
            return y, 1.0, stable.expm1, 1, number
        if (y := argument_of(part.value, "cos")) is not None:
            return y, 1.0, stable.one_minus_cos, 2, -number / 2
        if (y := argument_of(part.value, "cosh")) is not None:
            return y, 1.0, lambda y: 2 * jnp.square(jnp.sinh(y / 2)), 2, number / 2
        radicand = argument_of(part.value, "sqrt")
        if radicand is not None and (inner := _added_to_one(radicand)) is not None:
            y, rate = inner.value, inner.number
            return y, rate, lambda y: 2 * y / (1 + jnp.sqrt(1 + y)), 1, number / 2
    if len(total.parts) == 2:
        for first, second in (total.parts, total.parts[::-1]):
            y = argument_of(first.value, "exp")
            if y is None or first.number != number:
                continue
            rate, inner = -second.number / number, terms_of(y)
            same = _keys(inner.parts) == _keys((dataclasses.replace(second, number=rate),))
            if same and not inner.constant:
                return second.value, rate, stable.excess_of_exp, 2, number / 2
    return None


def _added_to_one(value: Value) -> Part | None:
    """The term a x of a value 1 + a x."""
    total = terms_of(value)
    if total.constant != 1 or [part.axes for part in total.parts] != [all_axes(value)]:
        return None
    return total.parts[0]
