"""A traced program as expressions.

A `Value` is one value of the program. A `Step` is the equation that computes it. Rules inspect
values with three functions:

- `constant_of` returns the number to which all elements are equal.
- `factors_of` expands the value to a product of powers.
- `terms_of` expands the value to a sum.

These functions look through calls and broadcasts. They return the same result for different ways to
write a formula.
"""

import dataclasses
import functools
import math
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

from ..._compat import Tracer
from .._operations import is_of_user_or_layer, line_of, scopes_in

Found = TypeVar("Found")

Axes = tuple[int, ...]
"""For each axis of a value, the corresponding axis of a larger expression, or -1 if there is no
such axis.
"""


@dataclasses.dataclass(eq=False, repr=False, slots=True)
class Value:
    """One value of a program.

    - `aval`: its abstract value.
    - `step`: the step that computes the value; `INPUT` for an input or a constant.
    - `index`: index of the value among the outputs of the step.
    - `constant`: the array if the value is a constant, otherwise None.
    - `inside`: for the output of a transparent call, the same value inside the called program.
    - `rewrite`: the `Rewrite` that replaces the value, or None.
    - `memo`: cached results of functions such as `constant_of` and `factors_of`.
    """

    aval: Any
    step: "Step"
    index: int = 0
    constant: Any = None
    inside: "Value | None" = None
    rewrite: Any = None
    memo: dict[Any, Any] = dataclasses.field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.aval.shape

    @property
    def dtype(self) -> Any:
        return self.aval.dtype


@dataclasses.dataclass(eq=False, repr=False, slots=True)
class Step:
    """One equation of a program.

    - `kind`, `params`: name and parameters of the primitive.
    - `inputs`: the values that the equation reads.
    - `outputs`: the values that the equation computes.
    - `inner`: for a transparent call, the steps of the called program.
    - `caller`: the transparent call whose program contains this step, or None.
    - `scopes`: the name scopes around the equation, outermost first.
    - `eqn`: the JAX equation.
    """

    kind: str
    params: Mapping[str, Any]
    inputs: tuple[Value, ...] = ()
    outputs: tuple[Value, ...] = ()
    inner: tuple["Step", ...] = ()
    caller: "Step | None" = None
    scopes: tuple[str, ...] = ()
    eqn: Any = None

    @property
    def output(self) -> Value:
        """The first output. Most steps have only one output."""
        return self.outputs[0]

    @property
    def source(self) -> str:
        """The line of the user's code that created the step, perhaps by calling a JAX function."""
        step = self
        while not (line := line_of(step.eqn.source_info)) and step.caller is not None:
            step = step.caller
        return line

    @property
    def is_of_user(self) -> bool:
        """Returns True if the formula of this step is in the user's code, and not in a JAX
        function. To find out, look at this step and the steps that compute its inputs. If a single
        call in the user's code created all these steps, that call is of a JAX function, and the
        formula is in this function.
        """
        steps = [step for each in self.inputs if (step := seen_through(each).step) is not INPUT]
        return not steps or any(step.instruction != self.instruction for step in steps)

    @property
    def instruction(self) -> tuple[Any, int] | None:
        """The code object and bytecode position, in user code or a layer, that created the step."""
        step: Step | None = self
        while step is not None:
            if (traceback := step.eqn.source_info.traceback) is not None:
                for code, place in zip(*traceback.raw_frames(), strict=True):
                    if is_of_user_or_layer(code.co_filename):
                        return code, place
            step = step.caller
        return None


INPUT = Step("input", {})
"""The `step` attribute of inputs and constants."""


def steps_of(
    closed: ClosedJaxpr,
    inputs: Sequence[Value],
    scopes: tuple[str, ...] = (),
    caller: Step | None = None,
) -> tuple[tuple[Step, ...], list[Value]]:
    """Builds the steps and the outputs of a program that is called with `inputs`."""
    jaxpr = closed.jaxpr
    values = dict(zip(jaxpr.invars, inputs, strict=True))
    for variable, constant in zip(jaxpr.constvars, closed.consts, strict=True):
        values[variable] = Value(variable.aval, INPUT, constant=constant)

    def read(atom: Any) -> Value:
        if isinstance(atom, Literal):
            return Value(atom.aval, INPUT, constant=atom.val)
        return values[atom]

    steps = []
    for eqn in jaxpr.eqns:
        path = scopes + scopes_in(str(eqn.source_info.name_stack))
        step = Step(eqn.primitive.name, eqn.params, tuple(map(read, eqn.invars)))
        step.caller, step.scopes, step.eqn = caller, path, eqn
        step.outputs = tuple(Value(each.aval, step, i) for i, each in enumerate(eqn.outvars))
        if (program := transparent_program(eqn)) is not None:
            step.inner, found = steps_of(program, step.inputs, path, step)
            for output, inside in zip(step.outputs, found, strict=True):
                output.inside = inside
        values |= zip(eqn.outvars, step.outputs, strict=True)
        steps.append(step)
    return tuple(steps), [read(atom) for atom in jaxpr.outvars]


def transparent_program(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """The called program if `eqn` is a transparent call, otherwise None.

    A call is transparent if it has no custom derivative, no donated arguments and no sharding.
    """
    params = eqn.params
    if eqn.primitive.name == "jit":
        shardings = (*params["in_shardings"], *params["out_shardings"])
        is_plain = all(str(each) == "UnspecifiedValue" for each in shardings)
        return params["jaxpr"] if is_plain and not any(params["donated_invars"]) else None
    return params["call_jaxpr"] if eqn.primitive.name == "closed_call" else None


def all_steps(steps: Iterable[Step]) -> Iterator[Step]:
    """Iterates over the steps. Before each step come the steps of the program that it calls."""
    for step in steps:
        yield from all_steps(step.inner)
        yield step


PICKS = (
    *("slice", "dynamic_slice", "gather", "squeeze", "reshape", "transpose", "rev"),
    *("broadcast_in_dim", "reduce_max", "reduce_min", "copy", "stop_gradient"),
)
"""Operations that select or reorder elements of their first input.

An increasing elementwise function may be applied before or after such an operation, with the same
result.
"""

SAME_NUMBERS = ("copy", "optimization_barrier", "pvary")


def seen_through(value: Value, casts: bool = True) -> Value:
    """Finds the original of a value that may be a copy.

    Copies include outputs of transparent calls, exact casts, and `select_n` with a constant
    condition. If `casts` is False, only casts to the same dtype are copies.
    """
    while True:
        if value.inside is not None and not is_determinant(value.step):
            value = value.inside
            continue
        kind, inputs = value.step.kind, value.step.inputs
        if kind == "select_n" and (which := constant_of(inputs[0])) is not None:
            value = inputs[1 + int(which)]
            continue
        is_cast = kind == "convert_element_type" and (
            _is_exact_cast(inputs[0], value) if casts else inputs[0].dtype == value.dtype
        )
        if not is_cast and (kind not in SAME_NUMBERS or len(inputs) != 1):
            return value
        value = inputs[0]


def _is_exact_cast(before: Value, after: Value) -> bool:
    """Returns True if a cast loses no digits, or undoes JAX's cast of a sum to a wider dtype.

    JAX computes sums of 16-bit arrays in float32 and casts the result back.
    """
    if before.dtype == after.dtype:
        return True
    if not all(jnp.issubdtype(each.dtype, jnp.floating) for each in (before, after)):
        return False
    return wider(before.dtype, after.dtype) == after.dtype or _is_wide_sum(before)


def wider(first: Any, second: Any) -> Any:
    """The floating-point dtype that represents all numbers of both dtypes."""
    both = [jnp.finfo(each) for each in (first, second)]
    for wide, narrow in (both, both[::-1]):
        if wide.nmant >= narrow.nmant and wide.maxexp >= narrow.maxexp:
            return wide.dtype
    return jnp.dtype(jnp.float32)


def _is_wide_sum(value: Value) -> bool:
    """Returns True if a value is a sum or mean, and its terms were cast to a wider dtype."""
    while value.step.kind in ("div", "mul", "broadcast_in_dim", "squeeze", "reshape"):
        value = value.step.inputs[0]
    if value.inside is not None:
        return _is_wide_sum(value.inside)
    if value.step.kind != "reduce_sum":
        return False
    terms = value.step.inputs[0].step
    return terms.kind == "convert_element_type" and terms.inputs[0].dtype != value.dtype


def is_determinant(step: Step) -> bool:
    """Returns True if a step is a call of `jnp.linalg.det`, which is treated as one operation."""
    return step.params.get("name") == "det" and called_function(step.eqn) == ("det", True)


def argument_of(value: Value, *kinds: str) -> Value | None:
    """The first input of the operation that computes `value`, if its primitive is one of `kinds`.

    **Arguments:**

    - `value`: a value of the program. The function looks through calls and copies.
    - `*kinds`: names of primitives, such as `"exp"`.

    **Returns:** the first input, or None if the primitive is not one of `kinds`.
    """
    value = seen_through(value)
    return value.step.inputs[0] if value.step.kind in kinds else None


def unbroadcast(value: Value) -> tuple[Value, Axes]:
    """Undoes broadcasts and transpositions.

    Adding and removing axes of length one counts as a broadcast.

    **Returns:** the value before these operations, and its `Axes`: for each axis of the returned
    value, the corresponding axis of `value`, or -1 if there is no such axis.
    """
    axes = all_axes(value)
    while True:
        value = seen_through(value)
        match value.step.kind:
            case "broadcast_in_dim":
                places = value.step.params["broadcast_dimensions"]
                axes = tuple(axes[place] for place in places)
            case "squeeze" | "reshape" if (places := _kept_axes(value)) is not None:
                axes = tuple(-1 if place is None else axes[place] for place in places)
            case "transpose":
                order = value.step.params["permutation"]
                axes = tuple(axes[order.index(i)] for i in range(len(order)))
            case _:
                return value, axes
        value = value.step.inputs[0]


def axes_of_dot(step: Step, place: int) -> Axes:
    """For each axis of an input of a matrix product, its axis in the product; -1 if contracted."""
    contracted, batch = (each[place] for each in step.params["dimension_numbers"])
    axes = range(len(step.inputs[place].shape))
    free = [i for i in axes if i not in contracted and i not in batch]
    # A product has first the axes of the batch, then axes of the first and of the second input.
    first_free = len(step.output.shape) - len(free) if place else len(batch)
    kept = {axis: i for i, axis in enumerate(batch)}
    kept |= {axis: first_free + i for i, axis in enumerate(free)}
    return tuple(kept.get(i, -1) for i in axes)


def _kept_axes(value: Value) -> list[int | None] | None:
    """For each axis before a reshape, the corresponding axis after it.

    The entry of an axis of length one is None. Returns None instead of a list if the reshape does
    more than add or remove axes of length one.
    """
    before, after = value.step.inputs[0].shape, value.shape
    long = [i for i, size in enumerate(after) if size != 1]
    if [size for size in before if size != 1] != [after[i] for i in long]:
        return None
    places = iter(long)
    return [None if size == 1 else next(places) for size in before]


def all_axes(value: Value) -> Axes:
    return tuple(range(len(value.shape)))


def broadcast(array: jax.Array, axes: Axes, shape: tuple[int, ...]) -> jax.Array:
    """The inverse of `unbroadcast`: axis `i` of `array` becomes axis `axes[i]` of `shape`."""
    if axes == tuple(range(len(shape))) and array.shape == shape:
        return array
    # Axes of length one are dropped here if they have no corresponding axis.
    kept = [i for i, axis in enumerate(axes) if axis >= 0 and array.shape[i] == shape[axis]]
    order = sorted(kept, key=lambda i: axes[i])
    array = jax.lax.squeeze(array, [i for i in range(array.ndim) if i not in kept])
    array = jax.lax.transpose(array, [sorted(kept).index(i) for i in order])
    return jax.lax.broadcast_in_dim(array, shape, [axes[i] for i in order])


def once(function: Callable[[Value], Found]) -> Callable[[Value], Found]:
    """Caches the result of `function` in its argument, because formulas may share values."""

    @functools.wraps(function)
    def remembered(value: Value) -> Found:
        if function not in value.memo:
            value.memo[function] = function(value)
        return value.memo[function]

    return remembered


@once
def constant_of(value: Value) -> float | None:
    """The constant number to which all elements of a value are equal.

    **Arguments:**

    - `value`: a value of the program. Calls, broadcasts and arithmetic on constants are evaluated.

    **Returns:** the number, or None if the elements differ or depend on an input.
    """
    value, _ = unbroadcast(value)
    if value.constant is not None:
        return _uniform_number(value.constant, value.dtype)
    step = value.step
    if step.kind not in ARITHMETIC and step.kind != "convert_element_type":
        return None
    numbers = [constant_of(each) for each in step.inputs]
    if None in numbers:
        return None
    if step.kind == "convert_element_type":
        return numbers[0] if jnp.issubdtype(value.dtype, jnp.floating) else None
    exponents = (step.params["y"],) if step.kind == "integer_pow" else ()
    try:
        return float(ARITHMETIC[step.kind](*numbers, *exponents))
    except (ArithmeticError, ValueError):
        return None


def _uniform_number(constant: Any, dtype: Any) -> float | None:
    kinds = (jnp.floating, jnp.integer, jnp.bool_)
    is_real = any(jnp.issubdtype(dtype, kind) for kind in kinds)
    if isinstance(constant, Tracer) or not is_real or not 0 < np.size(constant) <= 2**16:
        return None
    flat = np.asarray(constant).reshape(-1)
    return float(flat[0]) if bool((flat == flat[0]).all()) else None


_SAME_IN_PYTHON = ("add", "sub", "mul", "neg", "pow", "abs", "gt", "ge", "lt", "le", "eq", "ne")

ARITHMETIC: dict[str, Callable[..., Any]] = {
    **{kind: getattr(operator, kind) for kind in _SAME_IN_PYTHON},
    "div": operator.truediv,
    "integer_pow": operator.pow,
    "square": lambda x: x * x,
    "sqrt": math.sqrt,
    "rsqrt": lambda x: 1 / math.sqrt(x),
    "log": math.log,
    "max": max,
    "min": min,
}


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """A factor `value ** number` of a product, or a term `number * value` of a sum.

    - `axes`: for each axis of `value`, the corresponding axis of the product or sum. An axis of
      length one may have no corresponding axis; then the entry is -1.
    """

    number: float
    value: Value
    axes: Axes


@dataclasses.dataclass(frozen=True, slots=True)
class Parts:
    """A product `constant * factors`, or a sum `constant + terms`.

    - `parts`: the factors or terms.
    """

    constant: float
    parts: tuple[Part, ...]


MAX_PARTS = 100
"""Products and sums with more parts are not expanded.

Expanding may take exponential time: if `x = x + x` is repeated forty times, the sum has 2⁴⁰ terms.
"""


@once
def factors_of(value: Value) -> Parts:
    """Expands products, quotients, powers and roots to one product of powers.

    **Arguments:**

    - `value`: a value of the program. The function looks through calls and broadcasts.

    **Returns:** the constant and the factors. Equal factors are merged. If the value is not a
    product, the value itself is the only factor.
    """
    return _collected(value, 1.0, _open_factor)


Pending = tuple[Value, float, Axes]
"""A value to expand, its power or coefficient, and its `Axes` in the whole product or sum."""


def _collected(whole: Value, neutral: float, opened: Callable[..., Any]) -> Parts:
    """Expands a product or sum to its parts.

    `opened` expands one operation. `neutral` is the constant of a product or sum without parts.
    """
    constant, parts, num_seen = neutral, [], 0
    rest: list[Pending] = [(whole, 1.0, all_axes(whole))]
    while rest:
        value, number, outer = rest.pop()
        num_seen += 1
        value, axes = unbroadcast(value)
        axes = tuple(outer[axis] if axis >= 0 else -1 for axis in axes)
        found = opened(constant, value, number, axes)
        if found is None or num_seen > MAX_PARTS:
            whole = seen_through(whole)
            return Parts(neutral, (Part(1.0, whole, all_axes(whole)),))
        constant, inner, own = found
        rest += reversed(inner)
        parts += own
    return Parts(constant, tuple(merged(parts)))


Opened = tuple[float, Sequence[Pending], Sequence[Part]]
"""The constant so far, values that are still to be expanded, and parts that are final."""


def _open_factor(constant: float, value: Value, power: float, axes: Axes) -> Opened | None:
    kind, inputs, is_whole = value.step.kind, value.step.inputs, power == int(power)
    if (number := constant_of(value)) is not None and (number > 0 or is_whole):
        try:
            constant *= number**power
        except ArithmeticError:  # The power overflows.
            return None
        return (constant, (), ()) if constant else None
    if kind == "mul":
        return constant, [(each, power, axes) for each in inputs], ()
    if kind == "div":
        return constant, [(inputs[0], power, axes), (inputs[1], -power, axes)], ()
    if is_whole and kind in ("neg", "square", "integer_pow"):
        constant *= (-1.0) ** power if kind == "neg" else 1.0
        own = {"neg": 1, "square": 2}.get(kind) or value.step.params["y"]
        return constant, [(inputs[0], own * power, axes)], ()
    if kind in ("sqrt", "rsqrt", "pow") and (found := _root_of(value)) is not None:
        factor, part = found
        # Do not expand (√x)² to x, because (√x)² is NaN for x < 0.
        if _is_whole(part.number) or not _is_whole(power * part.number):
            own = dataclasses.replace(part, number=power * part.number)
            return constant * factor**power, (), placed((own,), axes)
    return constant, (), [Part(power, value, axes)]


def _root_of(value: Value) -> tuple[float, Part] | None:
    """Rewrites a root or power, such as (4 x) ** 0.5, as a number times a power of one factor.

    Returns None if that is not possible, for example because (x²) ** 0.5 is |x| and not x.
    """
    kind, inputs = value.step.kind, value.step.inputs
    power = {"sqrt": 0.5, "rsqrt": -0.5}.get(kind) or constant_of(inputs[-1])
    inner = factors_of(inputs[0])
    if power is None or len(inner.parts) != 1 or not inner.constant > 0:
        return None
    (part,) = inner.parts
    if not _is_whole(power) and (part.number % 2 == 0 or _is_whole(power * part.number)):
        return None  # The result is |x|, or is NaN where x is negative.
    return inner.constant**power, dataclasses.replace(part, number=power * part.number)


def _is_whole(number: float) -> bool:
    return math.isclose(number, round(number), rel_tol=1e-6)


@once
def terms_of(value: Value) -> Parts:
    """Expands sums, differences and products with constants to one sum.

    **Arguments:**

    - `value`: a value of the program. The function looks through calls and broadcasts.

    **Returns:** the constant and the terms. Equal terms are merged. If the value is not a sum, the
    value itself is the only term.
    """
    return _collected(value, 0.0, _open_term)


def _open_term(constant: float, value: Value, sign: float, axes: Axes) -> Opened:
    kind, inputs = value.step.kind, value.step.inputs
    if (number := constant_of(value)) is not None:
        return constant + sign * number, (), ()
    if kind in ("add", "add_any"):
        return constant, [(each, sign, axes) for each in inputs], ()
    if kind == "sub":
        return constant, [(inputs[0], sign, axes), (inputs[1], -sign, axes)], ()
    if kind == "neg":
        return constant, [(inputs[0], -sign, axes)], ()
    if kind == "mul":
        for factor, other in (inputs, inputs[::-1]):
            if (number := constant_of(factor)) is not None:
                return constant, [(other, sign * number, axes)], ()
    if kind == "div" and (number := constant_of(inputs[1])):
        return constant, [(inputs[0], sign / number, axes)], ()
    return constant, (), [Part(sign, value, axes)]


def placed(parts: Iterable[Part], axes: Axes) -> tuple[Part, ...]:
    """Converts the axes of the parts of a value to axes of a larger expression.

    `axes` are the `Axes` of the value in the larger expression.
    """
    return tuple(
        dataclasses.replace(part, axes=tuple(axes[i] if i >= 0 else -1 for i in part.axes))
        for part in parts
    )


def factors_in(part: Part) -> Parts:
    """The product `number * value` of a term of a larger sum, with the axes of the sum."""
    product = factors_of(part.value)
    return Parts(part.number * product.constant, placed(product.parts, part.axes))


def terms_in(part: Part) -> Parts:
    """The sum `number * value` of a term of a larger sum, with the axes of the sum."""
    total = terms_of(part.value)
    terms = (Part(part.number * each.number, each.value, each.axes) for each in total.parts)
    return Parts(part.number * total.constant, placed(terms, part.axes))


def merged(parts: Sequence[Part]) -> Iterator[Part]:
    """Merges parts with equal values by adding their numbers. Drops parts whose number is zero."""
    if len(parts) == 1:
        return (part for part in parts if part.number)
    found = {}
    for part in parts:
        at = key_of(part.value), part.axes
        before = found.get(at)
        found[at] = Part(part.number + (before.number if before else 0.0), part.value, part.axes)
    return (part for part in found.values() if part.number)


def key_of(value: Value, depth: int = 5) -> Any:
    """A hashable key of a value.

    Two values have equal keys if the same operations compute them from the same values. Operations
    more than `depth` steps back are not compared.
    """
    value = seen_through(value)
    step = value.step
    is_wide = len(step.inputs) > 8
    if step is INPUT or depth == 0 or is_wide or step.inner or step.eqn.effects:
        number = constant_of(value) if value.constant is not None else None
        return id(value) if number is None else (number, value.shape, str(value.dtype))
    inputs = tuple(key_of(each, depth - 1) for each in step.inputs)
    params = str(sorted(step.params.items(), key=lambda item: item[0]))
    return step.kind, params, value.index, inputs


def keys_of(parts: Iterable[Part]) -> set[Any]:
    """A key of several parts. It does not depend on their order."""
    return {(key_of(part.value), part.number, part.axes) for part in parts}


def is_same(first: Value, second: Value) -> bool:
    """Returns True if the same operations compute both values from the same inputs.

    For example, two separate calls `exp(x)` give the same value.

    **Arguments:**

    - `first`, `second`: values of the program. The function looks through calls and copies.
    """
    return key_of(first) == key_of(second)


def called_function(eqn: JaxprEqn) -> tuple[str, bool]:
    """The name of the function from which JAX traced a called program, and whether JAX defines it.

    The name is empty for loops and branches.
    """
    is_loop = eqn.primitive.name in ("scan", "while", "cond")
    program = None if is_loop else eqn.params.get("call_jaxpr") or eqn.params.get("jaxpr")
    about = getattr(getattr(program, "jaxpr", program), "debug_info", None)
    path = getattr(about, "func_filename", None) or ""
    return getattr(about, "func_name", ""), os.sep + "jax" + os.sep in path
