"""Rules for differences whose digits cancel, and for norms and products that are NaN at zero."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from . import _replacements as stable
from ._expressions import (
    Part,
    Parts,
    Step,
    Value,
    all_axes,
    argument_of,
    broadcast,
    constant_of,
    factors_in,
    factors_of,
    is_same,
    key_of,
    merged,
    seen_through,
    terms_in,
    terms_of,
    unbroadcast,
)
from ._patterns import (
    Table,
    applied,
    erfc_of,
    exponential_of,
    lifted,
    product_of,
    rewritten,
    square_root_of,
    sum_of,
    summed_squares_of,
)
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
    if (found := rewritten(FROM_ONE, total, shape)) is not None:
        return found
    if (erfc := erfc_of(total)) is None:
        return None
    y, rate, factor = erfc
    return applied(lambda y: factor * stable.erfc(single(y), rate), sum_of((y,), shape))


FROM_ONE: Table = (
    (lambda y: lax.exp(y) - 1, stable.expm1),
    (lambda y: 1 - lax.cos(y), stable.one_minus_cos),
    (lambda y: 1 - lax.logistic(y), lambda y: stable.sigmoid(-y)),
    (lambda y: 1 - lax.tanh(y) ** 2, stable.one_minus_tanh_squared),
    (lambda y: 1 - lax.tanh(y), lambda y: 2 * stable.sigmoid(-2 * y)),
    (lambda y: 1 + lax.tanh(y), lambda y: 2 * stable.sigmoid(2 * y)),
)


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
    if len(total.parts) == 2 and total.constant:
        return _square_of_shifted(total, shape)
    if total.constant or not 2 <= len(total.parts) <= 3:
        return None
    if (variance := _variance(total, shape)) is not None:
        return variance
    return rewritten(SQUARES, total, shape) or _squared_distances(total)


SQUARES: Table = (
    (lambda a, b: lax.square(a) - lax.square(b), lambda a, b: (a - b) * (a + b)),
    (lambda a, b: lax.square(a) - 2 * a * b + lax.square(b), lambda a, b: jnp.square(a - b)),
    (lambda a, b: lax.square(a) + 2 * a * b + lax.square(b), lambda a, b: jnp.square(a + b)),
)


def _squared_distances(total: Parts) -> Rewrite | None:
    """Reports |a|² - 2 a·b + |b|², as in pairwise distances, but does not rewrite this formula."""
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


def _variance(total: Parts, shape: tuple[int, ...]) -> Rewrite | None:
    """Rewrites a multiple of E[x²] - E[x]² as the same multiple of E[(x - E[x])²]."""
    if len(total.parts) != 2:
        return None
    first, second = sorted(total.parts, key=lambda part: -part.number)
    squares, square = argument_of(first.value, "reduce_sum"), factors_in(second)
    if squares is None or [part.number for part in square.parts] != [2]:
        return None
    x, (mean,) = square_root_of(seen_through(squares)), square.parts
    other = argument_of(mean.value, "reduce_sum")
    if x is None or other is None or not is_same(other, x) or mean.axes != first.axes:
        return None
    n, axes = first.number, first.value.step.params["axes"]
    count = math.prod(x.shape[axis] for axis in axes)
    is_variance = n > 0 and math.isclose(-square.constant * count, n, rel_tol=1e-6)
    if mean.value.step.params["axes"] != axes or not is_variance:
        return None
    variance = Rewrite((x,), lambda x: n * stable.squared_deviations(x, axes))
    return applied(lambda variance: broadcast(variance, first.axes, shape), variance)


def excess_of_exponential(step: Step) -> Rewrite | None:
    """Matches t - 1 - log(t) plus other terms, as in the KL divergence of normal distributions.

    For example, t may be exp(y) and log(t) may be y. Or t may be a ratio of variances, and log(t)
    may be the difference of two log variances. t may also be a part of a quotient, as s² / r² is a
    part of (s² + m²) / r².
    """
    if any(_excess_in(each) for each in step.inputs):
        return None  # An input already contains the formula, so the input is rewritten instead.
    return _excess_in(step.output)


MAX_TERMS = 12


def _excess_in(value: Value) -> Rewrite | None:
    total = terms_of(value)
    if not 2 <= len(total.parts) <= MAX_TERMS:
        return None
    terms = list(map(factors_in, total.parts))
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
                    return _excess(n, product, is_of_size, others, value.shape)
    return None


def _is_log_of_size(value: Value) -> bool:
    x = argument_of(value, "log")
    factors = factors_of(x).parts if x is not None else ()
    return any(argument_of(part.value, "abs") is not None for part in factors)


def _excess(
    n: float, product: Parts, is_of_size: bool, others: Sequence[Parts], shape: tuple[int, ...]
) -> Rewrite:
    """A rewrite that computes n (t - 1 - log(t)) plus other products, where t is `product`.

    If `is_of_size`, the logarithm is log|t|.
    """
    term = exponential_of(product)

    def build(split: tuple[Array | None, Array | None], *arrays: Array) -> Array:
        y, weight = split
        if weight is None:
            assert y is not None
            found = stable.excess_of_exp(y + math.log(term.number) if term.number != 1 else y)
        else:
            t = scaled(term.number, weight if y is None else weight * jnp.exp(y))
            found = stable.excess_of_size(t if is_of_size else jnp.where(t < 0, jnp.nan, t))
        products = (scaled(each.constant, x) for each, x in zip(others, arrays, strict=True))
        return functools.reduce(jnp.add, products, scaled(n, found))

    return applied(build, term.split(shape), *(product_of(each.parts, shape) for each in others))


def _distributed(product: Parts) -> Iterator[list[Parts]]:
    """Distributes a product over a factor that is a sum.

    Yields a list of products for each factor that is a sum. The products in a list add up to
    `product`.
    """
    for i, part in enumerate(product.parts):
        inner = terms_in(part)
        if part.number != 1 or len(inner.parts) + (inner.constant != 0) < 2:
            continue
        rest = product.parts[:i] + product.parts[i + 1 :]
        summands = [Parts(product.constant * inner.constant, rest)] if inner.constant else []
        for each in inner.parts:
            term = factors_in(dataclasses.replace(each, number=product.constant * each.number))
            summands.append(Parts(term.constant, tuple(merged((*term.parts, *rest)))))
        yield summands


def _logs_in(part: Part) -> Iterator[tuple[Any, float]]:
    """Expands a term, which may be the logarithm of a product, to pairs (key, coefficient).

    The key identifies the value that the coefficient multiplies. The key of a constant is None.
    """
    x = argument_of(part.value, "log")
    if x is None:
        yield (key_of(part.value), part.axes), part.number
    elif (product := factors_in(Part(1.0, x, part.axes))).constant > 0:
        yield from _logs_of(product, part.number)


def _logs_of(product: Parts, number: float) -> Iterator[tuple[Any, float]]:
    """Expands `number * log(product)` to pairs (key, coefficient), as in `_logs_in`."""
    yield None, number * math.log(product.constant)
    for part in product.parts:
        power = number * part.number
        if (y := argument_of(part.value, "exp")) is None:
            size = argument_of(part.value, "abs")
            yield ("log", key_of(size or part.value), part.axes), power
            continue
        exponents = terms_in(Part(power, y, part.axes))
        yield None, exponents.constant
        for each in exponents.parts:
            yield from _logs_in(each)


def _counted(terms: Iterable[tuple[Any, float]]) -> tuple[dict[Any, float], float]:
    """Adds up the coefficients of each key.

    **Returns:** the sums that are not zero, as a dict by key, and the sum of the constants.
    """
    numbers: dict[Any, float] = {}
    for key, number in terms:
        numbers[key] = numbers.get(key, 0.0) + number
    constant = numbers.pop(None, 0.0)
    return {key: number for key, number in numbers.items() if number}, constant


def norm_at_zero(step: Step) -> Rewrite | None:
    """Matches the root of a sum of squares. In the rewrite, the gradient at zero is zero."""
    total = _radicand(step)
    if total is None or (constant_of(total) is not None):
        return None
    terms = terms_of(total)
    found = [summed_squares_of(part.value) for part in terms.parts]
    is_sum_of_squares = not terms.constant and all(part.number > 0 for part in terms.parts)
    if not found or None in found or not is_sum_of_squares:
        return None
    if all(seen_through(x).step.kind == "stop_gradient" for x in found if x is not None):
        return None
    return Rewrite((total,), stable.safe_sqrt)


def _radicand(step: Step) -> Value | None:
    """The argument of a square root, or None if `step` is not a square root."""
    is_root = step.kind == "sqrt" or constant_of(step.inputs[-1]) == 0.5
    return seen_through(step.inputs[0]) if is_root else None


def hypotenuse(step: Step) -> Rewrite | None:
    """Rewrites sqrt(x² + y²) so that the squares neither overflow nor underflow."""
    total = _radicand(step)
    if total is None:
        return None
    terms = terms_of(total)
    num_terms = len(terms.parts) + (terms.constant != 0)
    if num_terms < 2 or terms.constant < 0 or any(part.number != 1 for part in terms.parts):
        return None
    if len(terms.parts) == 1 and terms.constant < EPSILON:
        return None
    roots = [
        dataclasses.replace(part, value=root)
        for part in terms.parts
        if (root := square_root_of(part.value)) is not None
    ]
    if len(roots) != len(terms.parts):
        return None

    def build(*roots: Array) -> Array:
        constant = [jnp.full_like(roots[0], math.sqrt(terms.constant))] if terms.constant else []
        return stable.length([*roots, *constant])

    return applied(build, *(lifted(root, step.output.shape) for root in roots))


EPSILON = 1e-3
"""A smaller constant under a square root is assumed to be a guard, which keeps the gradient finite
at zero.
"""


def direction_of_zero(step: Step) -> Rewrite | None:
    """Rewrites x / |x| and x·y / (|x| |y|), so that they are zero if a norm is zero."""
    product, shape = factors_of(step.output), step.output.shape
    above = [part for part in product.parts if part.number > 0]
    norms, others = [], []
    for part in product.parts:
        x = summed_squares_of(part.value) if part.number == -0.5 else None
        is_norm = x is not None and any(_vanishes_with(each.value, x) for each in above)
        (norms if is_norm else others).append(part)
    if not norms:
        return None

    def build(found: Array, *totals: Array) -> Array:
        is_zero = found == 0
        for total in totals:
            found = found / jnp.sqrt(jnp.where(is_zero & (total == 0), 1, total))
        return scaled(product.constant, found)

    return applied(build, product_of(others, shape), *(lifted(part, shape) for part in norms))


def _vanishes_with(value: Value, x: Value, depth: int = 4) -> bool:
    """Returns True if x is a factor of a value, or of each term of the value."""
    if is_same(value, x):
        return True
    step = seen_through(value).step
    if depth == 0 or step.kind not in ("reduce_sum", "dot_general", "mul"):
        return False
    return any(_vanishes_with(unbroadcast(each)[0], x, depth - 1) for each in step.inputs)


def _log_factor(value: Value) -> tuple[Part, Value, list[Part]] | None:
    """The logarithm in a product, its argument, and the other factors of the product.

    Returns None unless exactly one factor is a logarithm.
    """
    parts = factors_of(value).parts
    logs = [part for part in parts if argument_of(part.value, "log") is not None]
    if len(logs) != 1 or logs[0].number != 1 or logs[0].axes != all_axes(value):
        return None
    x = seen_through(logs[0].value).step.inputs[0]
    return logs[0], x, [part for part in parts if part is not logs[0]]


def product_with_own_log(step: Step) -> Rewrite | None:
    """Rewrites x log(x), so that it is zero at zero."""
    if (found := _log_factor(step.output)) is None:
        return None
    log, x, others = found
    inside, outside = (
        {(key_of(part.value), part.number, part.axes) for part in parts}
        for parts in (factors_of(x).parts, others)
    )
    if inside != outside or not inside:
        return None
    scale = factors_of(step.output).constant / factors_of(x).constant
    if log.value.rewrite is not None:
        own = (x, log.value)
        return Rewrite(own, lambda x, log: scaled(scale, x * jnp.where(x == 0, 0, log)))

    def build(x: Array) -> Array:
        safe = jnp.where(x == 0, 1, x)
        return scaled(scale, safe * jnp.log(safe))

    return Rewrite((x,), build)


def quotient_of_itself(step: Step) -> Rewrite | None:
    """Rewrites x / x, so that it is one at zero."""
    x, y = step.inputs
    if constant_of(x) is not None or x.shape != y.shape or not is_same(x, y):
        return None
    return Rewrite((x,), lambda x: jnp.where(jnp.isfinite(x), 1.0, jnp.nan))


def power_by_logarithm(step: Step) -> Rewrite | None:
    """Rewrites exp(y log(x)) as x ** y, because exp(y log(x)) loses digits for large y log(x)."""
    (product,) = step.inputs
    if (found := _log_factor(product)) is None:
        return None
    _, x, others = found
    c = factors_of(product).constant

    def build(x: Array, y: Array | None) -> Array:
        y = jnp.full_like(x, c) if y is None else scaled(c, y)
        is_known = (x >= 0) & ~jnp.isnan(y)
        return jnp.where(is_known, jnp.power(jnp.where(is_known, x, 1), y), jnp.nan)

    return applied(build, x, product_of(others, product.shape))
