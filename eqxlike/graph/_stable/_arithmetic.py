"""Rules for differences whose digits cancel, and for quotients of exponentials that overflow."""

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
    argument_of,
    axes_of_dot,
    broadcast,
    constant_of,
    factors_in,
    factors_of,
    is_same,
    key_of,
    keys_of,
    merged,
    placed,
    seen_through,
    terms_in,
    terms_of,
    unbroadcast,
)
from ._patterns import (
    Exponential,
    SumOfExponentials,
    Table,
    erfc_of,
    exponential_of,
    exponentials_in,
    match,
    rewritten,
    shifted_terms,
    sigmoid_of,
    square_root_of,
    summed_exponential,
    summed_squares_of,
)
from ._replacements import scaled, single, times, weighted_exp
from ._rewrite import Rewrite, applied, product_of, sum_of


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
    # The power matches every product with the factor a², such as 0.5 * a * a.
    (
        lambda a, b: lax.integer_pow(a, 2) - 2 * a * b + lax.integer_pow(b, 2),
        lambda a, b: jnp.square(a - b),
    ),
    (
        lambda a, b: lax.integer_pow(a, 2) + 2 * a * b + lax.integer_pow(b, 2),
        lambda a, b: jnp.square(a + b),
    ),
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


# --- Quotients of exponentials ---


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
    own, top = [keys_of(term.exponents) for term in terms], exponential_of(above)
    keys = keys_of(top.exponents)
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
    kept = [i for i in range(len(shape)) if i not in total.reduced]
    if [i for i in below.axes if i >= 0] != kept:
        return None
    top = exponential_of(above)
    if _alike(top) != _alike(total.term) or keys_of(top.weights) != keys_of(total.term.weights):
        return None
    scale = above.constant / total.term.number

    def build(split: Split) -> Array:
        y, w = split
        terms = weighted_exp(stable.shifted_in_quotient(y, w, total.reduced), w)
        return scaled(scale, terms / jnp.sum(terms, axis=total.reduced, keepdims=True))

    return applied(build, top.split(shape))


def _alike(term: Exponential) -> tuple[set[Any], set[Any]]:
    """A key of a term. Terms with the same exponents and masks have equal keys."""
    return keys_of(term.exponents), keys_of(term.masks)


def _weighted_mean(value: Value, above: Parts, below: Part) -> Rewrite | None:
    """Matches sum(v w exp(y)) / sum(w exp(y)).

    The numerator may also be a matrix product, as in attention.
    """
    total = summed_exponential(below)
    found = next(_sums_of_terms(above, total), None) if total else None
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


def _sums_of_terms(above: Parts, total: SumOfExponentials) -> Iterator[tuple[Part, int]]:
    """Finds factors of the numerator of a weighted mean that are sum(v w exp(y)).

    Yields each such sum or matrix product, and the index of its input v w exp(y), which is summed
    over the axes of `total`.
    """
    for part in above.parts:
        step = seen_through(part.value).step
        if part.number != 1 or step.kind not in ("reduce_sum", "dot_general"):
            continue
        for place, x in enumerate(step.inputs):
            if step.kind == "reduce_sum":
                axes, rows = step.params["axes"], part.axes
            else:
                axes = tuple(step.params["dimension_numbers"][0][place])
                rows = tuple(part.axes[i] for i in axes_of_dot(step, place) if i >= 0)
            term = exponential_of(factors_of(x))
            is_alike = (x.shape, axes, rows) == (total.inner, total.reduced, total.axes)
            if is_alike and _alike(term) == _alike(total.term):
                yield part, place


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
