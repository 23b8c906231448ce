"""A traced program run operation by operation, on values, with NaN and infinity followed.

Each value that is not finite has an origin: the operation that made it of finite ones. An operation
that is given such a value and returns one passes its origin on. So a NaN that a `jnp.where` leaves
out is forgotten, and the origin of one in the result is where to look.

Infinities that are constants, or came with the arguments, are no mistake yet, as those of a mask.
Constants have no origin, an argument is its own; what makes a NaN of them has one, and names it.
An operation that makes an infinity of finite numbers, beside those that it was given, has one too.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal, jaxpr_as_fun

from ..._compat import scan_counts
from ._places import source_of
from ._report import Values, has_numbers, is_finite, values_of, what_is_wrong


@dataclasses.dataclass(frozen=True, eq=False)
class Origin:
    """The operation that made a value which is not finite.

    - `number`: its place in the order of origins.
    - `cause`: the origin of the infinity that it made a NaN of.
    - `is_given`: whether this is no operation but an infinite argument, by its path.
    - `came_with`: the path of the argument that brought the infinity that it made a NaN of.
    """

    number: int
    kind: str
    operation: str
    scopes: str = ""
    source: str = ""
    turns: tuple[int, ...] = ()
    inputs: tuple[Values, ...] = ()
    outputs: tuple[Values, ...] = ()
    cause: "Origin | None" = None
    is_given: bool = False
    came_with: str = ""


@dataclasses.dataclass(frozen=True)
class Place:
    """Where in the program a jaxpr is run: the scopes, line and loops around it."""

    scopes: str = ""
    source: str = ""
    turns: tuple[int, ...] = ()

    def inside(self, equation: Any) -> "Place":
        scopes = f"{self.scopes}/{equation.source_info.name_stack}"
        return Place(scopes, source_of(equation) or self.source, self.turns)

    def in_turn(self, turn: int) -> "Place":
        return dataclasses.replace(self, turns=(*self.turns, turn))


Traced = tuple[Any, Origin | None]
"""A value, and its origin if it is not finite and has one."""


class Walk:
    """One run of a program."""

    def __init__(self):
        self._num_origins = 0
        self._compiled: dict[int, Callable[..., Any]] = {}

    def origin(self, **fields: Any) -> Origin:
        self._num_origins += 1
        return Origin(self._num_origins, **fields)

    def run(self, jaxpr: Any, inputs: Sequence[Traced], place: Place = Place()) -> list[Traced]:
        """The outputs of a jaxpr, open or closed."""
        consts, jaxpr = getattr(jaxpr, "consts", ()), getattr(jaxpr, "jaxpr", jaxpr)
        known = [*((const, None) for const in consts), *inputs]
        values = dict(zip([*jaxpr.constvars, *jaxpr.invars], known, strict=True))

        def read(atom: Any) -> Traced:
            return (atom.val, None) if isinstance(atom, Literal) else values[atom]

        for equation in jaxpr.eqns:
            outputs = self._equation(equation, list(map(read, equation.invars)), place)
            values.update(zip(equation.outvars, outputs, strict=True))
        return list(map(read, jaxpr.outvars))

    def _equation(self, equation: Any, inputs: list[Traced], place: Place) -> list[Traced]:
        here = place.inside(equation)
        name = equation.primitive.name
        if name in _CALLS:
            called = next(equation.params[each] for each in _CALLED if each in equation.params)
            return self.run(called, inputs, here)
        if name == "cond":
            branches = equation.params["branches"]
            which = min(max(int(inputs[0][0]), 0), len(branches) - 1)
            return self.run(branches[which], inputs[1:], here)
        if name not in _LOOPS:
            return self._give_origins(equation, inputs, _bind(equation, inputs), here)
        if equation.effects:
            # Each is to happen once.
            return _LOOPS[name](self, equation, inputs, here)
        # Most loops are sound, and a compiled one is soon over.
        outputs = _bind(equation, inputs)
        if not any(map(what_is_wrong, outputs)):
            return [(output, None) for output in outputs]
        by_turns = _LOOPS[name](self, equation, inputs, here)
        if any(what_is_wrong(output) for output, _ in by_turns):
            return by_turns
        # Compiled as one it rounds otherwise than turn by turn.
        return self._give_origins(equation, inputs, outputs, here)

    def _scan(self, equation: Any, inputs: list[Traced], place: Place) -> list[Traced]:
        params = equation.params
        num_consts, num_carry = scan_counts(params)
        consts, carry = inputs[:num_consts], inputs[num_consts:][:num_carry]
        xs = inputs[num_consts + num_carry :]
        turn = self._turn(params["jaxpr"], bool(equation.effects))
        length = params["length"]
        rows: list[list[Traced]] = [[] for _ in equation.outvars[num_carry:]]
        for count in range(length):
            index = length - 1 - count if params["reverse"] else count
            row = _rows_at([x for x, _ in xs], index)
            row = list(zip(row, [origin for _, origin in xs], strict=True))
            outputs = turn([*consts, *carry, *row], place.in_turn(index))
            carry = outputs[:num_carry]
            for each, output in zip(rows, outputs[num_carry:], strict=True):
                each.append(output)
        if not length:
            return [*carry, *((each, None) for each in _bind(equation, inputs)[num_carry:])]
        if params["reverse"]:
            rows = [each[::-1] for each in rows]
        return [*carry, *map(_stacked, rows)]

    def _while(self, equation: Any, inputs: list[Traced], place: Place) -> list[Traced]:
        params = equation.params
        num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
        cond_consts, body_consts = inputs[:num_cond], inputs[num_cond:][:num_body]
        carry = inputs[num_cond + num_body :]
        has_effects = bool(equation.effects)
        goes_on = self._turn(params["cond_jaxpr"], has_effects)
        turn = self._turn(params["body_jaxpr"], has_effects)
        for count in itertools.count():
            here = place.in_turn(count)
            if not goes_on([*cond_consts, *carry], here)[0][0]:
                break
            carry = turn([*body_consts, *carry], here)
        return carry

    def _turn(
        self, jaxpr: Any, has_effects: bool
    ) -> Callable[[Sequence[Traced], Place], list[Traced]]:
        """The function that runs one turn of a loop: operation by operation if that tells more."""
        # A loop inside of a loop is run often. The programs inside live as long as the whole one.
        if id(jaxpr) not in self._compiled:
            self._compiled[id(jaxpr)] = jax.jit(jaxpr_as_fun(jaxpr))
        compiled = self._compiled[id(jaxpr)]

        def run(inputs: Sequence[Traced], place: Place) -> list[Traced]:
            if not has_effects:
                outputs = compiled(*(value for value, _ in inputs))
                if not any(map(what_is_wrong, outputs)):
                    return [(output, None) for output in outputs]
            return self.run(jaxpr, inputs, place)

        return run

    def _give_origins(
        self, equation: Any, inputs: list[Traced], outputs: list[Any], place: Place
    ) -> list[Traced]:
        """The outputs of an operation, with the origin of those that are not finite."""
        wrong = [what_is_wrong(output) for output in outputs]
        kind = "NaN" if "NaN" in wrong else "infinity"
        taken = [what_is_wrong(value) for value, _ in inputs]
        origin = None
        if any(wrong):
            # An array of a loop has its origin in each turn, also where a row of it is finite.
            origins = [
                each
                for (_, each), what in zip(inputs, taken, strict=True)
                if what and each is not None
            ]
            causes = [each for each in origins if not each.is_given]
            given = _first([each for each in origins if each.is_given])
            makes_its_own = not causes and _makes_infinity(equation, inputs, outputs)
            if kind == "NaN" and "NaN" in taken:
                origin = _first([each for each in causes if each.kind == "NaN"])
            elif kind == "infinity" and any(taken) and not makes_its_own:
                origin = _first(origins)
            else:
                origin = self.origin(
                    kind=kind,
                    operation=equation.primitive.name,
                    scopes=place.scopes,
                    source=place.source,
                    turns=place.turns,
                    inputs=tuple(
                        values_of(value, variable.aval.dtype)
                        for (value, _), variable in zip(inputs, equation.invars, strict=True)
                        if _has_values(value)
                    ),
                    outputs=tuple(values_of(each) for each in outputs if what_is_wrong(each)),
                    cause=_first(causes),
                    came_with="" if given is None or kind != "NaN" else given.operation,
                )
        return [
            (output, origin if each else None) for output, each in zip(outputs, wrong, strict=True)
        ]


_LOOPS = {"scan": Walk._scan, "while": Walk._while}

_CALLS = {
    *("closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "custom_vmap_call"),
    *("jit", "pjit", "remat", "remat2", "checkpoint"),
}
"""The names of operations that run one program on what they are given."""

_ELEMENTWISE = {
    *("acosh", "add", "add_any", "atanh", "convert_element_type", "cosh", "digamma", "div"),
    *("erf_inv", "exp", "exp2", "expm1", "integer_pow", "lgamma", "log", "log1p", "mul", "pow"),
    *("reduce_precision", "rsqrt", "sinh", "square", "sub", "tan"),
}
"""The names of operations on each element by itself that may make an infinity of finite numbers."""

_CALLED = ("jaxpr", "call_jaxpr", "call")
"""The parameters that hold that program."""


def _bind(equation: Any, inputs: Sequence[Traced]) -> list[Any]:
    primitive = equation.primitive
    with equation.ctx.manager:
        outputs = primitive.bind(
            *(value for value, _ in inputs), **primitive.get_bind_params(equation.params)
        )
    return list(outputs) if primitive.multiple_results else [outputs]


def _makes_infinity(equation: Any, inputs: Sequence[Traced], outputs: Sequence[Any]) -> bool:
    """Whether an element of the output is infinite where all that was given is finite."""
    if equation.primitive.name not in _ELEMENTWISE:
        return False
    given = np.logical_or.reduce(
        np.broadcast_arrays(*(~is_finite(value) for value, _ in inputs)), axis=0
    )
    return bool((~is_finite(outputs[0]) & ~given).any())


@jax.jit
def _rows_at(arrays: list[Any], index: Any) -> list[Any]:
    return [jax.lax.dynamic_index_in_dim(each, index, keepdims=False) for each in arrays]


def _stacked(rows: list[Traced]) -> Traced:
    origins = [origin for _, origin in rows if origin is not None]
    return jnp.stack([row for row, _ in rows]), _first(origins)


def _first(origins: Sequence[Origin]) -> Origin | None:
    return min(origins, key=lambda origin: (origin.is_given, origin.number), default=None)


def _has_values(value: Any) -> bool:
    return isinstance(value, float | complex) or has_numbers(value)
