"""The rewriting engine: matches rules in a traced program, and runs the rewritten program.

A program is a graph of values. A rule inspects the value that an equation computes, and looks
through calls and broadcasts. The rule may return a `Rewrite`, which computes the value from other
values. The rewritten program runs only the steps on which outputs and effects depend, in the order
of the original program. The bodies of loops, branches and custom derivatives are rewritten as
separate programs.
"""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import ClosedJaxpr, Jaxpr

from ..._programs import bind
from ._expressions import (
    INPUT,
    Part,
    Step,
    Value,
    all_steps,
    broadcast,
    called_function,
    steps_of,
    wider,
)
from ._replacements import power_of, scaled

SCOPE = "stable"
"""The `jax.named_scope` of rewritten operations. Rules skip the operations in this scope."""


@dataclasses.dataclass(frozen=True, eq=False)
class Rewrite:
    """A replacement for a value of a program. The new value is `build(*operands)`.

    - `operands`: values of the program. `build` receives them as arrays.
    - `build`: function that computes the new value. If None, the formula is only reported.
    - `within`: values inside the matched formula that `build` computes again. Rewrites of these
      values are applied when `build` computes them.
    """

    operands: tuple[Value, ...] = ()
    build: Callable[..., Array] | None = None
    within: tuple[Value, ...] = ()

    def __post_init__(self) -> None:
        is_tuple = isinstance(self.operands, tuple)
        if not is_tuple or not all(isinstance(each, Value) for each in self.operands):
            raise TypeError(
                "graph.rules.Rewrite expects `operands` to be a tuple of values of the program, "
                f"such as (step.inputs[0],); it got {self.operands!r:.100}"
            )

    def computed(self, arrays: Sequence[Any], output: Value) -> Array:
        """Calls `build`, and casts its result to the type of `output`.

        `build` receives floating-point arrays in the widest dtype among `arrays` and `output`.
        """
        assert self.build is not None
        arrays = [jnp.asarray(each) for each in arrays]
        floats = [each.dtype for each in arrays if jnp.issubdtype(each.dtype, jnp.floating)]
        wide = functools.reduce(wider, floats, output.dtype)
        widened = (each.astype(wide) if each.dtype in floats else each for each in arrays)
        return _like(self.build(*widened), output.aval)


def _like(array: Array, aval: Any) -> Array:
    """Converts an array to the shape, dtype and weak type of `aval`."""
    if jnp.shape(array) != aval.shape:
        array = jnp.broadcast_to(array, aval.shape)
    if aval.weak_type:
        return lax.convert_element_type_p.bind(
            array, new_dtype=aval.dtype, weak_type=True, sharding=None
        )
    return lax.convert_element_type(array, aval.dtype)


def applied(function: Callable[..., Any], *inputs: Value | Rewrite) -> Rewrite:
    """A rewrite that calls `function` with one argument for each of `inputs`.

    For a `Value`, the argument is its array. For a `Rewrite`, the argument is its result.
    """
    counts = [1 if isinstance(each, Value) else len(each.operands) for each in inputs]

    def build(*arrays: Array) -> Any:
        rest, found = iter(arrays), []
        for each, count in zip(inputs, counts, strict=True):
            own = itertools.islice(rest, count)
            build = getattr(each, "build", None)
            found.append(build(*own) if build is not None else next(own))
        return function(*found)

    operands = ((each,) if isinstance(each, Value) else each.operands for each in inputs)
    return Rewrite(tuple(itertools.chain(*operands)), build)


def lifted(part: Part, shape: tuple[int, ...]) -> Rewrite:
    """A rewrite that broadcasts the value of a part to `shape`."""
    return applied(lambda x: broadcast(x, part.axes, shape), part.value)


def product_of(parts: Sequence[Part], shape: tuple[int, ...]) -> Rewrite:
    """A rewrite that computes the product of factors. Without factors its result is None."""

    def product(*arrays: Array) -> Array | None:
        powers = map(power_of, arrays, (part.number for part in parts))
        return functools.reduce(jnp.multiply, powers) if parts else None

    return applied(product, *(lifted(part, shape) for part in parts))


def sum_of(parts: Sequence[Part], shape: tuple[int, ...]) -> Rewrite:
    """A rewrite that computes the sum of terms. Without terms its result is None."""

    def total(*arrays: Array) -> Array | None:
        terms = map(scaled, (part.number for part in parts), arrays)
        return functools.reduce(jnp.add, terms) if parts else None

    return applied(total, *(lifted(part, shape) for part in parts))


@dataclasses.dataclass(frozen=True, repr=False)
class Rule:
    """A formula that loses digits, and its replacement.

    - `name`: name of the formula in reports.
    - `kinds`: names of the primitives that may compute the formula's result.
    - `match`: function that takes a step whose primitive is one of `kinds`. It returns a `Rewrite`
      if the step computes the formula, otherwise None.
    - `fails`: the inputs for which the formula fails, and how it fails.
    - `instead`: the stable formula to write.
    - `is_of_jax`: whether the rule also applies inside JAX's own functions.
    - `is_of_gradient`: whether the value is correct and only the derivative fails. If True, the
      rule does not apply inside functions with custom derivatives.

    !!! example

        A difference of two roots, such as sqrt(x + 1) - sqrt(x), cancels for large x:

        >>> import jax.numpy as jnp
        >>> from eqxlike import graph
        >>> def match(step):
        ...     x, y = (graph.rules.argument_of(each, "sqrt") for each in step.inputs)
        ...     if x is None or y is None:
        ...         return None
        ...     first, second = graph.rules.terms_of(x), graph.rules.terms_of(y)
        ...     if first.parts != second.parts:
        ...         return None
        ...     c = first.constant - second.constant
        ...     return graph.rules.Rewrite((x, y), lambda x, y: c / (jnp.sqrt(x) + jnp.sqrt(y)))
        >>> rule = graph.rules.Rule(
        ...     name="difference of roots",
        ...     kinds=("sub",),
        ...     match=match,
        ...     fails="for large x: all digits cancel",
        ...     instead="1 / (jnp.sqrt(x + 1) + jnp.sqrt(x))",
        ... )
        >>> def function(x):
        ...     return jnp.sqrt(x + 1) - jnp.sqrt(x)
        >>> stable = graph.stabilise(function, rules=(*graph.rules.RULES, rule))
        >>> print(function(1e8), stable(1e8))
        0.0 5e-05
    """

    name: str
    kinds: tuple[str, ...]
    match: Callable[[Step], Rewrite | None]
    fails: str
    instead: str
    is_of_jax: bool = False
    is_of_gradient: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.kinds, str) or not callable(self.match):
            raise TypeError(
                "graph.rules.Rule expects `kinds` to be a tuple of names of primitives, such as "
                f"('div',), and `match` to be a function; it got kinds={self.kinds!r} and "
                f"match={self.match!r}."
            )

    def __repr__(self) -> str:
        return f"Rule({self.name!r})"


class Match(NamedTuple):
    """A step, the rule that matches it, and the rewrite that the rule returned."""

    rule: Rule
    step: Step
    rewrite: Rewrite


class StableProgram:
    """A program and the rules that match in it. Calling it runs the rewritten program.

    - `matches`: the matches on which outputs or effects depend, including matches in inner
      programs.
    """

    def __init__(self, closed: ClosedJaxpr, rules: Sequence[Rule], scopes: tuple[str, ...] = ()):
        self._closed = closed
        self._inputs = [Value(each, INPUT) for each in closed.in_avals]
        self._steps, self._outputs = steps_of(closed, self._inputs, scopes)
        every = [step for step in all_steps(self._steps) if SCOPE not in step.scopes]
        found = list(_matches_in(every, rules))
        # The inner programs of each step. Each is a triple: the name of the parameter with the
        # program, the index in the parameter if the parameter is a tuple (otherwise None), and the
        # program.
        self._inner: Mapping[Step, list[tuple[str, int | None, StableProgram]]] = {
            step: programs for step in every if (programs := list(_inner_programs(step, rules)))
        }
        # Transparent calls that are inlined, because a step inside them is rewritten.
        self._opened = {
            step
            for step in every
            if any(each in self._inner or _rewrite_of(each) for each in all_steps(step.inner))
        }
        self._effects = set(self._steps_with_effects(self._steps))
        self._needed = self._values_behind(self._effects, self._sources)
        with_effects = [step for step in every if step.eqn.effects]
        seen = self._values_behind(with_effects, _sources_in_calls)
        self.matches = [match for match in found if not seen.isdisjoint(match.step.outputs)]
        for step, programs in self._inner.items():
            if step in self._effects or not seen.isdisjoint(step.outputs):
                self.matches += (match for *_, program in programs for match in program.matches)

    @property
    def is_rewritten(self) -> bool:
        return any(match.rewrite.build for match in self.matches)

    def __call__(self, *arrays: Array) -> list[Array]:
        """Runs the rewritten program."""
        known: dict[Value, Any] = dict(zip(self._inputs, arrays, strict=True))
        for step in all_steps(self._steps):
            if step not in self._effects and self._needed.isdisjoint(step.outputs):
                continue
            rewrite = _rewrite_of(step)
            if rewrite is not None:
                operands = [_array(each, known) for each in rewrite.operands]
                rule = next(match.rule for match in self.matches if match.rewrite is rewrite)
                with jax.named_scope(SCOPE), _noting_rule(rule, step):
                    known[step.output] = rewrite.computed(operands, step.output)
            elif step in self._opened:
                for output in self._needed.intersection(step.outputs):
                    known[output] = _array(output.inside, known)
            else:
                inputs = [_array(each, known) for each in step.inputs]
                known |= zip(step.outputs, self._bind(step, inputs), strict=True)
        return [_array(output, known) for output in self._outputs]

    def rewritten(self) -> ClosedJaxpr:
        """The rewritten program as a jaxpr with the same inputs and outputs."""
        return jax.make_jaxpr(self)(*self._closed.in_avals)

    def _steps_with_effects(self, steps: Iterable[Step]) -> Iterator[Step]:
        for step in steps:
            if step in self._opened:
                yield from self._steps_with_effects(step.inner)
            elif step.eqn.effects:
                yield step

    def _values_behind(
        self, steps: Iterable[Step], sources: Callable[[Value], Iterable[Value]]
    ) -> set[Value]:
        """The values on which the outputs of the program or the inputs of `steps` depend.

        `sources` returns the values that a value is computed from.
        """
        found: set[Value] = set()
        waiting = [*self._outputs, *(each for step in steps for each in step.inputs)]
        while waiting:
            value = waiting.pop()
            if value not in found:
                found.add(value)
                waiting += sources(value)
        return found

    def _sources(self, value: Value) -> Sequence[Any]:
        """The values from which the rewritten program directly computes a value."""
        if value.rewrite is not None:
            return value.rewrite.operands
        return (value.inside,) if value.step in self._opened else value.step.inputs

    def _bind(self, step: Step, arrays: Sequence[Array]) -> Sequence[Array]:
        params = dict(step.params)
        for name, place, program in self._inner.get(step, ()):
            if not program.is_rewritten:
                continue
            new = program.rewritten()
            if isinstance(params[name], Jaxpr) and new.consts:
                continue  # An open Jaxpr cannot hold constants.
            if place is not None:
                params[name] = (*params[name][:place], new, *params[name][place + 1 :])
            else:
                params[name] = new if isinstance(params[name], ClosedJaxpr) else new.jaxpr
        with jax.named_scope("/".join(step.scopes[-1:])):
            return bind(step.eqn, arrays, params)


def _matches_in(steps: Iterable[Step], rules: Sequence[Rule]) -> Iterator[Match]:
    """For each step, finds the first rule that matches it, and stores the rewrite in its output."""
    for step in steps:
        for rule in rules if _has_float_output(step) else ():
            if step.kind not in rule.kinds or (rewrite := _match(rule, step)) is None:
                continue
            if rule.is_of_jax or step.is_of_user:
                if rewrite.build is not None:
                    step.output.rewrite = rewrite
                yield Match(rule, step, rewrite)
                break


def _match(rule: Rule, step: Step) -> Rewrite | None:
    with _noting_rule(rule, step):
        rewrite = rule.match(step)
        if rewrite is not None and not isinstance(rewrite, Rewrite):
            raise TypeError(
                f"match should return a graph.rules.Rewrite or None; it returned {rewrite!r}"
            )
    return rewrite


@contextlib.contextmanager
def _noting_rule(rule: Rule, step: Step) -> Iterator[None]:
    """Context manager that adds the rule's name and the source line to exceptions."""
    try:
        yield
    except Exception as error:
        error.add_note(f"From the rule {rule.name!r}, for {step.kind} at {step.source}.")
        raise


def _has_float_output(step: Step) -> bool:
    is_floating = [jnp.issubdtype(each.dtype, jnp.floating) for each in step.outputs]
    return is_floating == [True] or (step.kind == "scan" and any(is_floating))


def _inner_programs(
    step: Step, rules: Sequence[Rule]
) -> Iterator[tuple[str, int | None, StableProgram]]:
    """The programs among a step's parameters, if a rule matches in the program.

    Transparent calls are left out, because their steps are part of the outer program.
    """
    if step.inner or step.kind == "shard_map" or called_function(step.eqn)[1]:
        return
    if step.kind.startswith("custom_"):
        rules = [rule for rule in rules if not rule.is_of_gradient]
    for name, param in step.params.items():
        for place, each in enumerate(param) if isinstance(param, tuple | list) else [(None, param)]:
            if isinstance(each, Jaxpr) and not each.constvars:
                each = ClosedJaxpr(each, ())
            if isinstance(each, ClosedJaxpr):
                program = StableProgram(each, rules, step.scopes)
                if program.matches:
                    yield name, place, program


def _sources_in_calls(value: Value) -> Iterator[Value]:
    """The values from which a value is computed, including values inside a rewritten formula."""
    if value.rewrite is not None:
        yield from value.rewrite.operands
        yield from value.rewrite.within
    elif value.inside is not None:
        yield value.inside
    else:
        yield from value.step.inputs


def _rewrite_of(step: Step) -> Rewrite | None:
    return step.output.rewrite if step.outputs else None


def _array(value: Any, known: Mapping[Value, Any]) -> Any:
    return known[value] if value.constant is None else value.constant
