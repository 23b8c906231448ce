"""The engine: finds what rules match in a traced program, and runs the program rewritten.

A program is a graph of values. A rule looks at the value that an equation computes, through calls
and broadcasts, and says of which other values it is computed instead. The program is then run from
its outputs backwards: what only the old formulas needed is not run. Programs in loops, branches and
custom derivatives are rewritten by themselves.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import ClosedJaxpr, Jaxpr

from ._expressions import INPUT, Rewrite, Step, Value, all_steps, called_function, steps_of

SCOPE = "stable"
"""The `jax.named_scope` of what a rule computes. Rules do not look inside."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """A formula that loses digits, and what is computed instead.

    - `name`: what is reported.
    - `kinds`: the primitives whose result may be such a formula.
    - `match`: given the step that computes the result, the rewrite; None for another formula.
    - `fails`: for which inputs the formula fails, and how.
    - `instead`: what to write.
    - `is_of_jax`: whether it matters inside JAX's own functions too.
    """

    name: str
    kinds: tuple[str, ...]
    match: Callable[[Step], Rewrite | None]
    fails: str
    instead: str
    is_of_jax: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Match:
    """A step whose result a rule matches."""

    rule: Rule
    step: Step
    rewrite: Rewrite


class StableProgram:
    """A program, and what rules match in it.

    - `matches`: the matches that the outputs depend on, those in inner programs too.
    """

    def __init__(self, closed: ClosedJaxpr, rules: Sequence[Rule], scopes: tuple[str, ...] = ()):
        self._closed = closed
        self._inputs = [Value(each, INPUT) for each in closed.in_avals]
        self._steps, self._outputs = steps_of(closed, self._inputs, scopes)
        every = [step for step in all_steps(self._steps) if SCOPE not in step.scopes]
        found = list(_matches_in(every, rules))
        # Of a step: the parameter, its place there, and the program.
        self._inner: Mapping[Step, list[tuple[str, int | None, StableProgram]]] = {
            step: programs for step in every if (programs := list(_inner_programs(step, rules)))
        }
        needed = {*self._order()}
        needed |= {each for value in needed if value.rewrite for each in value.rewrite.within}
        self.matches = [match for match in found if match.step.output in needed]
        for step, programs in self._inner.items():
            if any(output in needed for output in step.outputs) or step.eqn.effects:
                self.matches += (match for *_, program in programs for match in program.matches)

    @property
    def is_rewritten(self) -> bool:
        return any(match.rewrite.build for match in self.matches)

    def __call__(self, *arrays: Array) -> list[Array]:
        """The outputs."""
        known: dict[Value, Any] = dict(zip(self._inputs, arrays, strict=True))
        for value in self._order():
            if value in known:
                continue
            sources = [_array(each, known) for each in self._sources(value)]
            if value.rewrite is not None and value.rewrite.build is not None:
                with jax.named_scope(SCOPE):
                    known[value] = _like(value.rewrite.build(*sources), value.aval)
            elif self._is_opened(value):
                (known[value],) = sources
            else:
                known |= zip(value.step.outputs, self._bind(value.step, sources), strict=True)
        return [_array(output, known) for output in self._outputs]

    def rewritten(self) -> ClosedJaxpr:
        """The program as a jaxpr of the same inputs and outputs."""
        structs = [
            jax.ShapeDtypeStruct(each.shape, each.dtype, weak_type=each.weak_type)
            for each in self._closed.in_avals
        ]
        return jax.make_jaxpr(self)(*structs)

    def _order(self) -> list[Value]:
        """The values that are computed, each after those that it is computed of."""
        order: dict[Value, None] = {}
        waiting = [*reversed(self._outputs)]
        waiting += [
            output
            for step in reversed(list(all_steps(self._steps)))
            if step.eqn.effects and not step.inner
            for output in step.outputs
        ]
        while waiting:
            value = waiting[-1]
            missing = [each for each in self._sources(value) if each not in order]
            if value in order or not missing:
                order.setdefault(waiting.pop())
            else:
                waiting += reversed(missing)
        given = {*self._inputs}
        return [each for each in order if each not in given and each.constant is None]

    def _sources(self, value: Value) -> Sequence[Value]:
        """What a value is computed of."""
        if value.step is INPUT:
            return ()
        if (rewrite := value.rewrite) is not None:
            return rewrite.operands
        if value.inside is not None and self._is_opened(value):
            return (value.inside,)
        return value.step.inputs

    def _is_opened(self, value: Value) -> bool:
        """Whether the operations of the called program are run in place of the call."""
        return any(
            each in self._inner or (each.outputs and each.output.rewrite is not None)
            for each in all_steps(value.step.inner)
        )

    def _bind(self, step: Step, arrays: Sequence[Array]) -> Sequence[Array]:
        params = dict(step.params)
        for name, place, program in self._inner.get(step, ()):
            if not program.is_rewritten:
                continue
            new = program.rewritten()
            if place is not None:
                params[name] = (*params[name][:place], new, *params[name][place + 1 :])
            else:
                params[name] = new if isinstance(params[name], ClosedJaxpr) else new.jaxpr
        primitive = step.eqn.primitive
        with step.eqn.ctx.manager, jax.named_scope("/".join(step.scopes[-1:])):
            outputs = primitive.bind(*arrays, **primitive.get_bind_params(params))
        return outputs if primitive.multiple_results else [outputs]


def _matches_in(steps: Iterable[Step], rules: Sequence[Rule]) -> Iterator[Match]:
    """The first rule that matches each step."""
    for step in steps:
        for rule in rules:
            if step.kind not in rule.kinds or (rewrite := rule.match(step)) is None:
                continue
            if rule.is_of_jax or step.is_of_user:
                if rewrite.build is not None:
                    step.output.rewrite = rewrite
                yield Match(rule, step, rewrite)
                break


def _inner_programs(
    step: Step, rules: Sequence[Rule]
) -> Iterator[tuple[str, int | None, StableProgram]]:
    """The programs in the parameters of a step that is not seen through, if rules match there."""
    if step.inner or step.kind == "shard_map" or called_function(step.eqn).is_of_jax:
        return
    for name, param in step.params.items():
        for place, each in enumerate(param) if isinstance(param, tuple | list) else [(None, param)]:
            if isinstance(each, Jaxpr) and not each.constvars:
                each = ClosedJaxpr(each, ())
            if isinstance(each, ClosedJaxpr):
                program = StableProgram(each, rules, step.scopes)
                if program.matches:
                    yield name, place, program


def _array(value: Value, known: Mapping[Value, Any]) -> Any:
    return known[value] if value.constant is None else value.constant


def _like(array: Array, aval: Any) -> Array:
    """The array with the dtype and the weak type of what it replaces."""
    if jnp.shape(array) != aval.shape:
        array = jnp.broadcast_to(array, aval.shape)
    is_default = aval.weak_type and aval.dtype == jnp.result_type(float)
    return lax.convert_element_type(array, float if is_default else aval.dtype)
