"""Rules for formulas whose value or gradient is NaN: at zero, or where a branch is not taken.

The gradient of `where(c, f(x), other)` multiplies the derivative of f(x) by zero where f(x) is not
chosen. If the derivative is infinite, the result is 0 * inf, which is NaN. The rule replaces the
operand of f by a harmless number wherever f(x) is not chosen.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import Array, lax

from . import _replacements as stable
from ._expressions import (
    INPUT,
    Part,
    Parts,
    Step,
    Value,
    all_axes,
    argument_of,
    constant_of,
    factors_of,
    is_same,
    key_of,
    keys_of,
    merged,
    placed,
    seen_through,
    terms_of,
    unbroadcast,
)
from ._patterns import (
    GUARDS,
    Formula,
    first_match,
    is_at_most_zero,
    is_positive,
    shifted_by_maximum,
    square_root_of,
    summed_squares_of,
)
from ._replacements import scaled, single, times
from ._rewrite import Rewrite, applied, lifted, product_of


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
    if not others or keys_of(others) != keys_of(factors_of(x).parts):
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


# --- Quotients of two zeros ---


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


# --- Branches that are not taken ---


HARMLESS = {
    **dict.fromkeys(("log", "sqrt", "rsqrt", "cbrt", "lgamma", "digamma"), (0, 1.0)),
    **dict.fromkeys(("exp", "exp2", "expm1", "sinh", "cosh", "tan", "log1p"), (0, 0.0)),
    **dict.fromkeys(("asin", "acos", "atanh", "erf_inv"), (0, 0.0)),
    "acosh": (0, 2.0),
    "div": (1, 1.0),
    "pow": (0, 1.0),
    "integer_pow": (0, 1.0),
}
"""Maps each operation whose derivative may be infinite to a pair. The pair has the index of the
input that makes the derivative infinite, and a safe value for that input.
"""

THROUGH = frozenset(
    (
        *("add", "sub", "mul", "div", "neg", "abs", "square", "integer_pow", "pow", "max", "min"),
        *("exp", "exp2", "expm1", "log", "log1p", "sqrt", "rsqrt", "cbrt", "logistic", "tanh"),
        *("sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh"),
        *("erf", "erfc", "erf_inv", "lgamma", "digamma", "convert_element_type"),
    )
)
"""Elementwise operations that may be computed again with harmless numbers."""


def branch_not_taken(step: Step) -> Rewrite | None:
    """Rewrites `where`: computes a branch with harmless numbers where that branch is not chosen."""
    condition, *branches = step.inputs
    if len(branches) != 2 or condition.dtype != bool or condition.shape != step.output.shape:
        return None
    if any(math.isinf(constant_of(each) or 0) for each in branches):
        return None  # The result may be infinite. Then its derivative does not matter.
    branches = [_copied(branch) for branch in branches]
    sources = ancestors_of(condition)
    # A condition that depends only on integers, such as a mask made from labels, does not test
    # whether the operand of a branch is in a safe range.
    inputs = (each for each in sources if each.step is INPUT)
    if not any(jnp.issubdtype(each.dtype, jnp.floating) for each in inputs):
        return None
    regions = [_region(branch, sources) for branch in branches]
    computed = dict.fromkeys(value for values, _ in regions for value in values)
    if not computed:
        return None
    read = [condition, *branches, *(each for value in computed for each in _sources(value))]
    given = [each for each in dict.fromkeys(read) if each not in computed]

    def build(*arrays: Array) -> Array:
        known = dict(zip(given, arrays, strict=True))
        is_chosen = known[condition]
        other = _computed(branches[0], regions[0], known, ~is_chosen)
        chosen = _computed(branches[1], regions[1], known, is_chosen)
        return jnp.where(is_chosen, chosen, other)

    return Rewrite(tuple(given), build, within=tuple(computed))


def _copied(value: Value) -> Value:
    return seen_through(value, casts=False)


Region = tuple[tuple[Value, ...], dict[Value, float]]
"""The part of a branch to compute again with harmless numbers. It is a pair:

- The results of the operations that may fail, and all values between these results and the result
  of the branch. The values are in the order of computation.
- A safe number for each operand of the operations that may fail.
"""


def _computed(branch: Value, region: Region, known: dict[Value, Array], is_chosen: Array) -> Array:
    """Computes `branch`, with harmless numbers where `is_chosen` is False."""
    values, harmless = region
    known = dict(known)
    for value in values:
        inputs = []
        for each in _sources(value):
            array = known[each]
            if each in harmless:
                array = jnp.where(is_chosen, array, jnp.asarray(harmless[each], array.dtype))
            inputs.append(array)
        if value.rewrite is not None:
            known[value] = value.rewrite.computed(inputs, value)
        else:
            known[value] = value.step.eqn.primitive.bind(*inputs, **value.step.params)
    return known[branch]


def _sources(value: Value) -> list[Value]:
    sources = value.rewrite.operands if value.rewrite is not None else value.step.inputs
    return [_copied(each) for each in sources]


MAX_DEPTH = 100


def _region(branch: Value, sources: set[Value]) -> Region:
    """Finds the region of a branch.

    An operation gets a harmless number if `_may_fail` is True and its operand depends on one of
    `sources`, the values on which the condition depends.
    """
    order: dict[Value, bool] = {}
    harmless: dict[Value, float] = {}

    def visit(value: Value, depth: int = 0) -> bool:
        value = _copied(value)
        if value not in order:
            step = value.step
            if step.kind not in THROUGH or value.shape != branch.shape or depth > MAX_DEPTH:
                return False
            if value.rewrite is not None and not _is_elementwise(value):
                return False
            found = [visit(each, depth + 1) for each in step.inputs]
            if _may_fail(step):
                index, number = HARMLESS[step.kind]
                operand = _copied(step.inputs[index])
                if not ancestors_of(operand).isdisjoint(sources):
                    harmless[operand] = number
                    found.append(True)
            order[value] = any(found)
        return order[value]

    visit(branch)
    return tuple(value for value, is_inside in order.items() if is_inside), harmless


def _is_elementwise(value: Value) -> bool:
    """Returns True if the rewrite of a value contains only elementwise operations."""
    structs = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in value.rewrite.operands]
    text = str(jax.make_jaxpr(lambda *arrays: value.rewrite.computed(arrays, value))(*structs))
    mixing = ("reduce_", "dot_general", "cum", "sort", "arg", "conv_")
    return not any(f" {kind}" in text for kind in mixing)


def _may_fail(step: Step) -> bool:
    """Returns True if the derivative of an operation may be infinite."""
    if step.kind not in HARMLESS:
        return False
    operand = step.inputs[HARMLESS[step.kind][0]]
    if operand.shape != step.output.shape or constant_of(operand) is not None:
        return False
    if _is_guarded(operand):
        return False
    match step.kind:
        case "integer_pow":
            return step.params["y"] < 0
        case "pow":
            exponent = constant_of(step.inputs[1])
            return exponent is None or exponent < 1
        case "exp" | "exp2" | "expm1" | "sinh" | "cosh":
            return not is_at_most_zero(operand) and not shifted_by_maximum(operand)
    return not is_positive(operand)


def _is_guarded(value: Value, depth: int = 0) -> bool:
    """Returns True if a value depends on inputs only through `where`, `max`, `min` or `clamp`."""
    step = _copied(value).step
    if depth > 8:
        return False
    if step.kind in GUARDS:
        return True
    inputs = [each for each in step.inputs if constant_of(each) is None]
    return (
        step.kind in THROUGH
        and bool(inputs)
        and all(_is_guarded(each, depth + 1) for each in inputs)
    )


def ancestors_of(value: Value, limit: int = 200) -> set[Value]:
    """Up to `limit` values on which a value depends.

    The value itself is included. Constants are not included.
    """
    found: set[Value] = set()
    waiting = [value]
    while waiting and len(found) < limit:
        value = _copied(waiting.pop())
        if value not in found and value.constant is None:
            found.add(value)
            waiting += value.step.inputs
    return found
