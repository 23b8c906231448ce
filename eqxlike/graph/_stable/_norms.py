"""Rules for norms and other formulas whose value or derivative is NaN at zero."""

import dataclasses
import math

import jax.numpy as jnp
from jax import Array

from ._expressions import (
    Part,
    Step,
    Value,
    all_axes,
    argument_of,
    constant_of,
    factors_of,
    is_same,
    key_of,
    seen_through,
    terms_of,
    unbroadcast,
)
from ._functions import applied, lifted, product_of, square_root_of, summed_squares_of
from ._replacements import length, safe_sqrt, scaled
from ._rewrite import Rewrite


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
    return Rewrite((total,), safe_sqrt)


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
    found = [square_root_of(part.value) for part in terms.parts]
    operands = [root for root in found if root is not None]
    if len(operands) != len(found):
        return None

    def build(*roots: Array) -> Array:
        constant = [jnp.full_like(roots[0], math.sqrt(terms.constant))] if terms.constant else []
        return length([*roots, *constant])

    squares = zip(terms.parts, operands, strict=True)
    roots = (dataclasses.replace(part, value=root) for part, root in squares)
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
