"""Rule for `where(c, f(x), other)`, whose gradient may be NaN where f(x) is not chosen.

Where f(x) is not chosen, the gradient multiplies the derivative of f(x) by zero. If the derivative
is infinite, the result is 0 * inf, which is NaN. The rule replaces the operand of f by a harmless
number wherever f(x) is not chosen.
"""

import math

import jax
import jax.numpy as jnp
from jax import Array

from ._expressions import INPUT, Step, Value, constant_of, seen_through
from ._patterns import GUARDS, is_at_most_zero, is_positive, shifted_by_maximum
from ._rewrite import Rewrite

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
    return not any(f" {kind}" in text for kind in MIXING)


MIXING = ("reduce_", "dot_general", "cum", "sort", "arg", "conv_")


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
