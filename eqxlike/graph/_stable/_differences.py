"""Rules for differences whose digits cancel."""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
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
    constant_of,
    factors_of,
    is_same,
    key_of,
    merged,
    placed,
    seen_through,
    terms_of,
    unbroadcast,
)
from ._functions import (
    applied,
    exponential_of,
    lifted,
    product_of,
    rewritten,
    square_root_of,
    sum_of,
    summed_squares_of,
)
from ._patterns import Formula, erfc_of, match
from ._replacements import scaled, single
from ._rewrite import Rewrite


def difference_from_one(step: Step) -> Rewrite | None:
    """Matches 1 - f(x), where f is exp, sigmoid, tanh, tanh², erf, a normal cdf, cos or sqrt."""
    total, shape = terms_of(step.output), step.output.shape
    if len(total.parts) != 1 or not total.constant:
        return None
    (part,) = total.parts
    c, n = total.constant, part.number
    if n == -c and (root := _difference_of_root(part, c, shape)) is not None:
        return root
    for formula, function in FROM_ONE:
        if (found := match(formula, total)) is not None:
            return rewritten(found, function, shape)
    if (erfc := erfc_of(total)) is None:
        return None
    y, rate, factor = erfc
    return applied(lambda y: factor * stable.erfc(single(y), rate), sum_of((y,), shape))


FROM_ONE: tuple[tuple[Formula, Formula], ...] = (
    (lambda y: lax.exp(y) - 1, stable.expm1),
    (lambda y: 1 - lax.cos(y), stable.one_minus_cos),
    (lambda y: 1 - lax.logistic(y), lambda y: stable.sigmoid(-y)),
    (lambda y: 1 - lax.tanh(y) ** 2, stable.one_minus_tanh_squared),
    (lambda y: 1 - lax.tanh(y), lambda y: 2 * stable.sigmoid(-2 * y)),
    (lambda y: 1 + lax.tanh(y), lambda y: 2 * stable.sigmoid(2 * y)),
)
"""Pairs of a difference from one, and a function that computes the difference without cancellation.
"""


def _difference_of_root(part: Part, c: float, shape: tuple[int, ...]) -> Rewrite | None:
    """Rewrites c (1 - sqrt(1 + x)) as -c x / (1 + sqrt(1 + x)) for small x."""
    value = seen_through(part.value)
    is_power = value.step.kind == "pow" and constant_of(value.step.inputs[1]) == 0.5
    if value.step.kind != "sqrt" and not is_power:
        return None
    radicand = value.step.inputs[0]
    total = terms_of(radicand)
    if total.constant != 1 or not total.parts:
        return None

    def build(root: Array, x: Array) -> Array:
        is_small = jnp.abs(x) < 1
        small = jnp.where(is_small, x, 0)
        found = jnp.where(is_small, -small / (1 + jnp.sqrt(1 + small)), 1 - root)
        return broadcast(scaled(c, found), part.axes, shape)

    return applied(build, value, sum_of(total.parts, radicand.shape))


def difference_of_squares(step: Step) -> Rewrite | None:
    """Rewrites differences of squares as products and squares.

    a² - b² becomes (a - b) (a + b), a² - 2ab + b² becomes (a - b)², and E[x²] - E[x]² becomes
    E[(x - E[x])²].
    """
    total, shape = terms_of(step.output), step.output.shape
    if len(total.parts) == 3 and not total.constant:
        return _square_of_difference(total, shape)
    if len(total.parts) == 2 and total.constant:
        return _square_of_shifted(total, shape)
    if len(total.parts) != 2 or total.constant:
        return None
    first, second = sorted(total.parts, key=lambda part: -part.number)
    if not first.number > 0 > second.number:
        return None
    if (found := _variance(first, second)) is not None:
        x, axes, kept = found
        total = applied(lambda x: first.number * stable.squared_deviations(x, axes), x)
        return applied(lambda total: broadcast(total, kept, shape), total)
    a, b = (square_root_of(part.value) for part in (first, second))
    if a is None or b is None or not math.isclose(first.number, -second.number):
        return None
    roots = (dataclasses.replace(first, value=a), dataclasses.replace(second, value=b))
    return applied(
        lambda a, b: scaled(first.number, (a - b) * (a + b)),
        *(lifted(root, shape) for root in roots),
    )


def _square_of_difference(total: Parts, shape: tuple[int, ...]) -> Rewrite | None:
    """Rewrites a² ± 2ab + b² as (a ± b)².

    Reports |a|² - 2 a·b + |b|², as in pairwise distances, but does not rewrite this formula.
    """
    products = [_lifted(factors_of(part.value), part.number, part.axes) for part in total.parts]
    squares = [each for each in products if [part.number for part in each.parts] == [2]]
    mixed = [each for each in products if [part.number for part in each.parts] == [1, 1]]
    if len(squares) == 2 and len(mixed) == 1:
        n, ratio = squares[0].constant, mixed[0].constant / squares[0].constant
        first, second = (each.parts[0] for each in squares)
        found = {(key_of(part.value), part.axes) for part in mixed[0].parts}
        expected = {(key_of(part.value), part.axes) for part in (first, second)}
        if squares[1].constant != n or abs(ratio) != 2 or found != expected:
            return None

        def build(a: Array, b: Array) -> Array:
            return scaled(n, jnp.square(a + scaled(ratio / 2, b)))

        return applied(build, lifted(first, shape), lifted(second, shape))
    norms = [summed_squares_of(part.value) for part in total.parts]
    dots = [part for part in total.parts if part.value.step.kind == "dot_general"]
    if norms.count(None) != 1 or len(dots) != 1:
        return None
    factors = [factors_of(each) for each in dots[0].value.step.inputs]
    number = dots[0].number * math.prod(each.constant for each in factors)
    values = [each.parts[0].value for each in factors if len(each.parts) == 1]
    numbers = {part.number for part in total.parts if part is not dots[0]}
    if numbers != {-number / 2} or len(values) != 2:
        return None
    keys = [sorted(str(key_of(unbroadcast(x)[0])) for x in each if x) for each in (norms, values)]
    return Rewrite() if keys[0] == keys[1] else None


def _square_of_shifted(total: Parts, shape: tuple[int, ...]) -> Rewrite | None:
    """Rewrites n x² + m x + c as n (x + m / 2n)² if the two formulas are equal."""
    squares = [part for part in total.parts if square_root_of(part.value) is not None]
    if len(squares) != 1:
        return None
    (square,), (linear,) = squares, (part for part in total.parts if part not in squares)
    x, n, shift = square_root_of(square.value), square.number, linear.number / (2 * square.number)
    is_square = math.isclose(n * shift**2, total.constant, rel_tol=1e-12)
    if x is None or not is_square or not is_same(x, linear.value) or square.axes != linear.axes:
        return None
    return Rewrite((x,), lambda x: scaled(n, jnp.square(broadcast(x, square.axes, shape) + shift)))


def _variance(first: Part, second: Part):
    """Matches a variance E[x²] - E[x]², where `first` is E[x²] and `second` is -E[x]².

    **Returns:** x, the axes over which the mean is taken, and the `Axes` of the mean in the
    difference.
    """
    squares = argument_of(first.value, "reduce_sum")
    if squares is None or (x := square_root_of(seen_through(squares))) is None:
        return None
    axes = first.value.step.params["axes"]
    mean = factors_of(second.value)
    if [part.number for part in mean.parts] != [2]:
        return None
    other = argument_of(mean.parts[0].value, "reduce_sum")
    if other is None or not is_same(other, x) or mean.parts[0].value.step.params["axes"] != axes:
        return None
    count = math.prod(x.shape[axis] for axis in axes)
    if not math.isclose(-second.number * mean.constant * count, first.number, rel_tol=1e-6):
        return None
    inner = mean.parts[0].axes
    kept = tuple(second.axes[axis] if axis >= 0 else -1 for axis in inner)
    return (x, axes, first.axes) if kept == first.axes else None


def excess_of_exponential(step: Step) -> Rewrite | None:
    """Matches t - 1 - log(t) plus other terms, as in the KL divergence of normal distributions.

    For example, t may be exp(y) and log(t) may be y. Or t may be a ratio of variances, and log(t)
    may be the difference of two log variances. t may also be a part of a quotient, as s² / r² is a
    part of (s² + m²) / r².
    """
    if any(_excess_in(terms_of(each)) for each in step.inputs):
        return None  # An input already contains the formula, so the input is rewritten instead.
    excess = _excess_in(terms_of(step.output))
    if excess is None:
        return None
    term, shape = exponential_of(excess.product), step.output.shape

    def build(split: tuple[Array | None, Array | None], *others: Array) -> Array:
        total = scaled(excess.number, _excess_of(term.number, *split, excess.is_of_size))
        for each, product in zip(excess.others, others, strict=True):
            total = total + scaled(each.constant, product)
        return total

    others = (product_of(each.parts, shape) for each in excess.others)
    return applied(build, term.split(shape), *others)


class _Excess(NamedTuple):
    """A sum `number * (t - 1 - log(t)) + others`.

    - `product`: t, expanded to a product.
    - `is_of_size`: whether the sum contains log|t| instead of log(t).
    """

    number: float
    product: Parts
    others: list[Parts]
    is_of_size: bool


MAX_TERMS = 12


def _excess_in(total: Parts) -> _Excess | None:
    if not 2 <= len(total.parts) <= MAX_TERMS:
        return None
    terms = [_lifted(factors_of(part.value), part.number, part.axes) for part in total.parts]
    logs = [list(_logs_in(part)) for part in total.parts]
    for i, term in enumerate(terms):
        for summands in ([term], *_distributed(term)):
            for j, each in enumerate(summands):
                own, own_constant = _counted(_logs_of(dataclasses.replace(each, constant=1.0), 1.0))
                keys = [_counted(log)[0].keys() for log in logs]
                used = [k for k, key in enumerate(keys) if k != i and key and key <= own.keys()]
                found, constant = _counted(itertools.chain(*(logs[k] for k in used)))
                if not own or found.keys() != own.keys():
                    continue
                ratios = [-number / own[key] for key, number in found.items()]
                n, others = ratios[0], summands[:j] + summands[j + 1 :]
                if not each.constant / n > 0 or not np.allclose(ratios, n, 1e-6):
                    continue
                constant += total.constant + sum(x.constant for x in others if not x.parts)
                expected = -n * (1 + math.log(each.constant / n) + own_constant)
                # The tolerance allows for logarithms of constants that JAX rounded to float32.
                tolerance = 1e-12 if expected == -n else 1e-6
                if math.isclose(constant, expected, rel_tol=tolerance):
                    others += [terms[k] for k in range(len(terms)) if k != i and k not in used]
                    others = [other for other in others if other.parts]
                    product = Parts(each.constant / n, each.parts)
                    is_of_size = any(_is_log_of_size(total.parts[k].value) for k in used)
                    return _Excess(n, product, others, is_of_size)
    return None


def _is_log_of_size(value: Value) -> bool:
    x = argument_of(value, "log")
    factors = factors_of(x).parts if x is not None else ()
    return any(argument_of(part.value, "abs") is not None for part in factors)


def _lifted(product: Parts, number: float, axes: Axes) -> Parts:
    return Parts(number * product.constant, placed(product.parts, axes))


def _distributed(product: Parts) -> Iterator[list[Parts]]:
    """Distributes a product over a factor that is a sum.

    Yields a list of products for each factor that is a sum. The products in a list add up to
    `product`.
    """
    for i, part in enumerate(product.parts):
        inner = terms_of(part.value)
        if part.number != 1 or len(inner.parts) + (inner.constant != 0) < 2:
            continue
        rest = product.parts[:i] + product.parts[i + 1 :]
        summands = [Parts(product.constant * inner.constant, rest)] if inner.constant else []
        for each in placed(inner.parts, part.axes):
            term = _lifted(factors_of(each.value), product.constant * each.number, each.axes)
            summands.append(Parts(term.constant, tuple(merged((*term.parts, *rest)))))
        yield summands


def _logs_in(part: Part) -> Iterator[tuple[Any, float]]:
    """Expands a term, which may be the logarithm of a product, to pairs (key, coefficient).

    The key identifies the value that the coefficient multiplies. The key of a constant is None.
    """
    x = argument_of(part.value, "log")
    if x is None:
        yield (key_of(part.value), part.axes), part.number
    elif (product := factors_of(x)).constant > 0:
        yield from _logs_of(_lifted(product, 1.0, part.axes), part.number)


def _logs_of(product: Parts, number: float) -> Iterator[tuple[Any, float]]:
    """Expands `number * log(product)` to pairs (key, coefficient), as in `_logs_in`."""
    yield None, number * math.log(product.constant)
    for part in product.parts:
        power = number * part.number
        if (y := argument_of(part.value, "exp")) is None:
            size = argument_of(part.value, "abs")
            yield ("log", key_of(size or part.value), part.axes), power
            continue
        exponents = terms_of(y)
        yield None, power * exponents.constant
        for each in placed(exponents.parts, part.axes):
            yield from _logs_in(dataclasses.replace(each, number=power * each.number))


def _counted(terms: Iterable[tuple[Any, float]]) -> tuple[dict[Any, float], float]:
    """Adds up the coefficients of each key.

    **Returns:** the sums that are not zero, as a dict by key, and the sum of the constants.
    """
    numbers: dict[Any, float] = {}
    for key, number in terms:
        numbers[key] = numbers.get(key, 0.0) + number
    constant = numbers.pop(None, 0.0)
    return {key: number for key, number in numbers.items() if number}, constant


def _excess_of(number: float, y: Any, weight: Any, is_of_size: bool) -> Array:
    """Computes t - 1 - log(t), or t - 1 - log|t|, for t = number * weight * exp(y)."""
    if weight is None:
        return stable.excess_of_exp(y + math.log(number) if number != 1 else y)
    t = scaled(number, weight if y is None else weight * jnp.exp(y))
    return stable.excess_of_size(t if is_of_size else jnp.where(t < 0, jnp.nan, t))
