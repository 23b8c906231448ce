"""`unstable` finds formulas that lose digits, and `stabilise` rewrites them."""

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import jax.tree_util as jtu

from ... import combine, filter, filter_make_jaxpr, is_array
from ...extend import fresh_trace
from .._operations import path_of, type_of
from ._rewrite import Match, Rule, StableProgram
from ._rules import RULES

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
    if not callable(function):
        raise TypeError(f"graph.stabilise expects a function; it got {_described_type(function)}.")
    _check_rules(rules, "graph.stabilise")

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
    if not callable(function):
        raise TypeError(
            "graph.unstable expects a function, followed by its arguments; it got "
            f"{_described_type(function)}."
        )
    _check_rules(rules, "graph.unstable")
    found = fresh_trace(function, args, kwargs, is_lowered=False)
    return unstable_in(found.traced.jaxpr, rules)


def _check_rules(rules: Any, name: str) -> None:
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
    return tuple(dict.fromkeys(map(_described, StableProgram(closed, rules).matches)))


def _described(match: Match) -> Unstable:
    step, rule = match.step, match.rule
    return Unstable(
        rule.name,
        path_of(step.scopes),
        step.source,
        type_of(step.output.aval),
        rule.fails,
        rule.instead,
        match.rewrite.build is not None,
    )
