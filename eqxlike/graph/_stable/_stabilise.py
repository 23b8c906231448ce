"""`unstable`, which finds formulas that lose digits, and `stabilise`, which rewrites them."""

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import jax.tree_util as jtu

from ..._pytree import combine, filter, is_array
from ..._transforms import filter_make_jaxpr, fresh_trace
from .._operations import path_of, type_of
from ._rewrite import Match, Rule, StableProgram
from ._rules import RULES

Params = ParamSpec("Params")
Result = TypeVar("Result")


def stabilise(
    function: Callable[Params, Result], *, rules: Sequence[Rule] = RULES
) -> Callable[Params, Result]:
    """The function with formulas that lose digits replaced by stable ones.

    `log(1 + exp(x))` becomes a softplus, `log(softmax(x))` a log-softmax, and so on for each rule
    in `RULES`, as in Theano's optimiser (Bergstra et al. 2010, "Theano: A CPU and GPU Math
    Compiler in Python"). Rules match the traced program, so that the spelling of a
    formula does not matter, nor whether `jax.jit`, `vmap`, a loop or a branch contains it.
    Differentiate the stabilised function, and not the other way round: then its gradient is stable
    too.

    Where no rule matches, the same operations are run in the same order. Effects, random numbers
    and custom derivatives stay.

    **Arguments:**

    - `function`: any callable that JAX can trace. It is traced at each call, so put `filter_jit`
      around the result. Arguments that are no arrays stay what they are, as in `filter_jit`.
    - `rules`: the rules to apply, the first that matches first. To add your own, pass
      `(*graph.rules.RULES, rule)`.

    **Returns:** a function of the same arguments. `graph.unstable(function, ...)` says what it
    rewrites.

    **Raises:** `TypeError` if `function` is not callable; if it cannot be traced for these
    arguments, what `filter_jit` raises.

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
    """JAX counts the arrays of all arguments together; the note says which they are."""
    paths = [
        ("kwargs" if path[0].idx else "args") + jtu.keystr(path[1:])
        for path, _ in jtu.tree_leaves_with_path(filter((args, kwargs), is_array))
    ]
    counted = dict.fromkeys(map(int, re.findall(r"\barrays\[(\d+)\]", str(error))))
    known = [f"arrays[{each}] is {paths[each]}" for each in counted if each < len(paths)]
    if known:
        name = getattr(function, "__name__", type(function).__name__)
        error.add_note(f"Of {name}, {', '.join(known)}.")


@dataclasses.dataclass(frozen=True)
class Unstable:
    """A formula that loses digits.

    - `name`: that of the `Rule`.
    - `layer`: the path of the layer, `""` outside all layers.
    - `source`: the line of the user's code, as `file.py:3:4 (function)`.
    - `output`: the type of its result, as `f32[5,3]`.
    - `fails`: for which inputs it fails.
    - `instead`: what to write.
    - `is_rewritten`: whether `stabilise` computes it in another way.
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
    """The formulas in `function(*args, **kwargs)` that lose digits: nothing is run.

    A test may say `assert not graph.unstable(loss, model, batch)`. What JAX's own functions compute
    inside is ignored, and so is what nothing depends on.

    **Arguments:**

    - `function`: any callable, as for `graph.report`.
    - `*args`, `**kwargs`: what to call it with. A `jax.ShapeDtypeStruct` may stand for an array.
    - `rules`: the rules to apply.

    **Returns:** a tuple with an `Unstable` for each, empty if there is none.

    **Raises:** `TypeError` if `function` is not callable; if it cannot be traced for these
    arguments, what `filter_jit` raises.

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
            "graph.unstable expects a function, and then its arguments; it got "
            f"{_described_type(function)}."
        )
    _check_rules(rules, "graph.unstable")
    found = fresh_trace(function, args, kwargs, is_lowered=False)
    return unstable_in(found.traced.jaxpr, rules)


def _check_rules(rules: Any, name: str) -> None:
    is_sequence = isinstance(rules, Sequence)
    if not is_sequence or not all(isinstance(rule, Rule) for rule in rules):
        raise TypeError(
            f"{name} expects rules, a sequence of graph.rules.Rule, as (*graph.rules.RULES, rule); "
            f"it got {_described_type(rules)}."
        )


def _described_type(value: Any) -> str:
    return f"{value!r:.60}, of type {type(value).__name__}"


def unstable_in(closed: Any, rules: Sequence[Rule] = RULES) -> tuple[Unstable, ...]:
    """The formulas of a traced program that lose digits, each once."""
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
