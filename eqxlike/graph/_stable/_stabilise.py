"""`unstable` finds formulas that lose digits, and `stabilise` rewrites them.

`RULES` lists the formulas that lose digits, for which inputs, and their replacements. The
first functions are two short rules about dtypes; the other rules are in `_arithmetic`,
`_logarithms` and `_zeros`.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from ... import combine, filter, filter_make_jaxpr, is_array
from ..._compat import scan_counts
from ...extend import fresh_trace
from .._operations import path_of, type_of
from . import _arithmetic, _logarithms, _zeros
from ._expressions import Step, constant_of, seen_through
from ._rewrite import Rewrite, Rule, StableProgram


def low_precision_sum(step: Step) -> Rewrite | None:
    """Matches a sum of at least 256 terms of a 16-bit dtype, in one operation or in a scan."""
    if step.kind == "scan":
        return Rewrite() if step.params["length"] >= 256 and _adds_to_a_carry(step) else None
    (x,) = step.inputs
    axes = step.params["axes"] if step.kind == "reduce_sum" else (step.params["axis"],)
    return Rewrite() if _is_low(x) and math.prod(x.shape[axis] for axis in axes) >= 256 else None


def _is_low(value: Any) -> bool:
    return jnp.issubdtype(value.aval.dtype, jnp.floating) and value.aval.dtype.itemsize < 4


def _adds_to_a_carry(step: Step) -> bool:
    jaxpr, (skipped, num_carry) = step.params["jaxpr"].jaxpr, scan_counts(step.params)
    carried = jaxpr.invars[skipped : skipped + num_carry]
    sums = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "add"]
    return any(
        _is_low(before) and any(after is eqn.outvars[0] and before in eqn.invars for eqn in sums)
        for before, after in zip(carried, jaxpr.outvars, strict=False)
    )


def overflowing_cast(step: Step) -> Rewrite | None:
    """Matches a cast to float16 of a value that probably exceeds 65504, the maximum of float16."""
    (x,) = step.inputs
    is_wide = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize >= 4
    if step.output.dtype != jnp.float16 or not is_wide:
        return None
    number = constant_of(x)
    if number is not None:
        return Rewrite() if 65504 < abs(number) < math.inf else None
    large = ("exp", "exp2", "expm1", "sinh", "cosh", "square", "integer_pow")
    return Rewrite() if seen_through(x).step.kind in large else None


RULES = (
    Rule(
        "logarithm of exponentials or probabilities",
        ("log", "log2", "log1p"),
        _logarithms.log_rule,
        "where an exponential overflows or underflows (88 in float32, 709 in float64)",
        "jax.nn.log_softmax, log_sigmoid, softplus or logsumexp, jnp.log1p, jnp.linalg.slogdet",
    ),
    Rule(
        "logarithm of a probability kept from zero",
        ("log", "log2", "log1p"),
        _logarithms.guarded_probability,
        "where the probability is less than the constant: its gradient is lost",
        "jax.nn.log_softmax or jax.nn.log_sigmoid, without the probability",
    ),
    Rule(
        "difference from one",
        ("sub", "add"),
        _arithmetic.difference_from_one,
        "where the function is near one: all digits cancel",
        "jnp.expm1, jax.nn.sigmoid(-x), jax.scipy.special.erfc",
    ),
    Rule(
        "difference of squares",
        ("sub", "add"),
        _arithmetic.difference_of_squares,
        "where the squares are nearly equal: all digits cancel; or where they overflow",
        "(a - b) * (a + b), (a - b) ** 2, jnp.var",
    ),
    Rule(
        "divergence near zero",
        ("sub", "add"),
        _arithmetic.excess_of_exponential,
        "where t - 1 - log(t) is near zero: t is near one, and all digits cancel",
        "jnp.expm1(y) - y, with y = log(t), and its Taylor series near zero",
    ),
    Rule(
        "quotient of two zeros",
        ("div", "mul"),
        _zeros.quotient_at_zero,
        "at zero: 0 / 0, and in the gradient near zero: all digits cancel",
        "a Taylor series near zero",
    ),
    Rule(
        "quotient of exponentials",
        ("div", "integer_pow", "mul", "pow", "rsqrt"),
        _arithmetic.quotient_of_exponentials,
        "above 88 in float32: inf / inf, in the value or in the gradient",
        "jax.nn.sigmoid, jax.nn.softmax, jnp.tanh",
    ),
    Rule(
        "norm at zero",
        ("sqrt", "pow"),
        _zeros.norm_at_zero,
        "in the gradient at zero: 0 * inf",
        "jnp.where around the square root and also inside it",
        is_of_jax=True,
        is_of_gradient=True,
    ),
    Rule(
        "hypotenuse",
        ("sqrt", "pow"),
        _zeros.hypotenuse,
        "above 1e19 and below 1e-19 in float32: squares overflow",
        "jnp.hypot",
    ),
    Rule(
        "direction of zero",
        ("div",),
        _zeros.direction_of_zero,
        "at zero: 0 / 0",
        "x / jnp.where(norm == 0, 1, norm)",
        is_of_jax=True,
    ),
    Rule(
        "branch that is not taken",
        ("select_n",),
        _zeros.branch_not_taken,
        "in the gradient, where the branch that is not taken has an infinite derivative: 0 * inf",
        "jnp.where inside the function too: jnp.where(c, f(jnp.where(c, x, 1)), 0)",
        is_of_gradient=True,
    ),
    Rule("quotient of itself", ("div",), _zeros.quotient_of_itself, "at zero: 0 / 0", "1"),
    Rule(
        "sum in low precision",
        ("reduce_sum", "cumsum", "scan"),
        low_precision_sum,
        "where the sum is at least 256 times a term: the term is lost",
        "jnp.sum(x, dtype=jnp.float32)",
    ),
    Rule(
        "cast to float16",
        ("convert_element_type",),
        overflowing_cast,
        "above 65504",
        "jnp.bfloat16",
    ),
    Rule(
        "x log(x)",
        ("mul",),
        _zeros.product_with_own_log,
        "at zero: 0 * inf",
        "jax.scipy.special.xlogy(x, x)",
    ),
    Rule(
        "power by a logarithm",
        ("exp",),
        _zeros.power_by_logarithm,
        "at zero: 0 * inf; in large powers: digits of the exponent are lost",
        "x ** y",
    ),
)
"""The rules of `stabilise` and `unstable`, in order of priority.

A rule matches a step of a program if its `kinds` contain the step's primitive and its `match`
returns a `Rewrite` (see `_rewrite`). If several rules match a step, the first rule is used.
"""

Params = ParamSpec("Params")
Result = TypeVar("Result")


def stabilise(
    function: Callable[Params, Result], *, rules: Sequence[Rule] = RULES
) -> Callable[Params, Result]:
    """Replaces formulas that lose digits by stable formulas.

    For example, `log(1 + exp(x))` becomes a softplus, and `log(softmax(x))` becomes a log-softmax.
    Each rule in `graph.rules.RULES` replaces one kind of formula. Theano's optimiser replaces
    formulas in the same way (Bergstra et al. 2010, "Theano: A CPU and GPU Math Compiler in
    Python"). Rules match the traced program, so a formula may be written in different ways.
    Formulas inside `jax.jit`, `vmap`, loops and branches are found too.

    To get a stable gradient, write `jax.grad(graph.stabilise(function))`. The reverse order,
    `graph.stabilise(jax.grad(function))`, may leave the gradient unstable.

    Operations that no rule matches run unchanged and in the same order. Effects, random numbers and
    custom derivatives are kept.

    **Arguments:**

    - `function`: any callable that JAX can trace. Each call traces `function` again, so wrap the
      result in `filter_jit`. Arguments that are not arrays are static, as in `filter_jit`.
    - `rules`: the rules to apply. If several rules match a formula, the first of them is applied.
      To add a rule, pass `(*graph.rules.RULES, rule)`.

    **Returns:** a function with the same arguments. `graph.unstable(function, ...)` lists the
    formulas that are rewritten.

    **Raises:** `TypeError` if `function` is not callable. A call raises the errors of `filter_jit`
    if `function` cannot be traced for the arguments of the call.

    !!! example

        >>> import jax, jax.numpy as jnp
        >>> from eqxlike import graph
        >>> def loss(logit):
        ...     return -jnp.log(1 / (1 + jnp.exp(-logit)))
        >>> x = jnp.array(-100.0)
        >>> print(loss(x), graph.stabilise(loss)(x))
        inf 100.0
        >>> print(jax.grad(loss)(x), jax.grad(graph.stabilise(loss))(x))
        nan -1.0
    """
    _check(function, rules, "graph.stabilise", "a function")

    def call(*args: Params.args, **kwargs: Params.kwargs) -> Result:
        return function(*args, **kwargs)

    @functools.wraps(function)
    def stable(*args: Params.args, **kwargs: Params.kwargs) -> Result:
        try:
            closed, structs, static = filter_make_jaxpr(call)(*args, **kwargs)
        except jax.errors.ConcretizationTypeError as error:
            _name_arguments(error, function, args, kwargs)
            raise
        program = StableProgram(closed, rules)
        if not program.is_rewritten:
            return function(*args, **kwargs)
        arrays = program(*jtu.tree_leaves(filter((args, kwargs), is_array)))
        return combine(jtu.tree_unflatten(jtu.tree_structure(structs), arrays), static)

    return stable


def _name_arguments(error: Exception, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """Adds a note to JAX's error. The note maps names such as `arrays[3]` to the arguments."""
    paths = [
        ("kwargs" if path[0].idx else "args") + jtu.keystr(path[1:])
        for path, _ in jtu.tree_leaves_with_path(filter((args, kwargs), is_array))
    ]
    counted = dict.fromkeys(map(int, re.findall(r"\barrays\[(\d+)\]", str(error))))
    known = [f"arrays[{each}] is {paths[each]}" for each in counted if each < len(paths)]
    if known:
        name = getattr(function, "__name__", type(function).__name__)
        error.add_note(f"In the arguments of {name}, {', '.join(known)}.")


@dataclasses.dataclass(frozen=True)
class Unstable:
    """A formula that loses digits.

    - `name`: name of the `Rule`.
    - `layer`: path of the layer, `""` outside all layers.
    - `source`: line of the user's code, such as `file.py:3:4 (function)`.
    - `output`: type of the result, such as `f32[5,3]`.
    - `fails`: the inputs for which the formula fails, and how it fails.
    - `instead`: the stable formula to write.
    - `is_rewritten`: True if `stabilise` rewrites the formula, False if it leaves it unchanged.
    """

    name: str
    layer: str
    source: str
    output: str
    fails: str
    instead: str
    is_rewritten: bool

    def __str__(self) -> str:
        layer = f" in {self.layer}" if self.layer else ""
        return f"{self.source}{layer}: {self.name}, fails {self.fails}. Write {self.instead}."


def unstable(
    function: Callable[..., Any], /, *args: Any, rules: Sequence[Rule] = RULES, **kwargs: Any
) -> tuple[Unstable, ...]:
    """Finds formulas that lose digits in `function(*args, **kwargs)`.

    The function is traced but not executed. Formulas inside JAX's own functions, and formulas whose
    results are not used, are ignored. A test may assert `not graph.unstable(loss, model, batch)`.

    **Arguments:**

    - `function`: any callable, as for `graph.report`.
    - `*args`, `**kwargs`: the arguments of `function`. A `jax.ShapeDtypeStruct` may replace an
      array.
    - `rules`: the rules to apply.

    **Returns:** a tuple with one `Unstable` per formula.

    **Raises:** `TypeError` if `function` is not callable; the errors of `filter_jit` if `function`
    cannot be traced for these arguments.

    !!! example

        >>> import jax, jax.numpy as jnp
        >>> from eqxlike import graph
        >>> def loss(logits):
        ...     return -jnp.log(jax.nn.softmax(logits)[0])
        >>> (found,) = graph.unstable(loss, jnp.ones(3))
        >>> print(found.name, "->", found.instead.partition(",")[0])
        logarithm of exponentials or probabilities -> jax.nn.log_softmax
    """
    _check(function, rules, "graph.unstable", "a function, followed by its arguments")
    found = fresh_trace(function, args, kwargs, is_lowered=False)
    return unstable_in(found.traced.jaxpr, rules)


def _check(function: Any, rules: Any, name: str, expected: str) -> None:
    if not callable(function):
        raise TypeError(f"{name} expects {expected}; it got {_described_type(function)}.")
    is_sequence = isinstance(rules, Sequence)
    if not is_sequence or not all(isinstance(rule, Rule) for rule in rules):
        raise TypeError(
            f"{name} expects `rules` to be a sequence of graph.rules.Rule, such as "
            f"(*graph.rules.RULES, rule); it got {_described_type(rules)}."
        )


def _described_type(value: Any) -> str:
    return f"{value!r:.60}, of type {type(value).__name__}"


def unstable_in(closed: Any, rules: Sequence[Rule] = RULES) -> tuple[Unstable, ...]:
    """The formulas in a traced program that lose digits, without repetitions."""
    found = (
        Unstable(
            name=rule.name,
            layer=path_of(step.scopes),
            source=step.source,
            output=type_of(step.output.aval),
            fails=rule.fails,
            instead=rule.instead,
            is_rewritten=rewrite.build is not None,
        )
        for rule, step, rewrite in StableProgram(closed, rules).matches
    )
    return tuple(dict.fromkeys(found))
