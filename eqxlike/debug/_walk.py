"""A traced program run operation by operation, on values, with NaN and infinity followed.

Each value that is not finite has an origin: the operation that made it of finite ones. An operation
that is given such a value and returns one passes its origin on. So a NaN that a `jnp.where` leaves
out is forgotten, and the origin of one in the result is where to look.

Infinities that are constants, or came with the arguments, are no mistake yet, as those of a mask.
Constants have no origin, an argument is its own; what makes a NaN of them has one, and names it.
An operation that makes an infinity of finite numbers, next to those that it was given, has one too.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal, jaxpr_as_fun

from .._compat import scan_counts
from .._traceback import frame_of_user, is_of_user_or_layer


@dataclasses.dataclass(frozen=True)
class Values:
    """The values of an array.

    - `shape`, `dtype`: of the array.
    - `lowest`, `highest`: of its finite numbers, the parts of complex ones among them; `None` if it
      has none.
    - `num_nan`, `num_infinite`: how many of its elements are NaN, and how many infinite.
    - `first`: the index of the first element that is either; `None` if none is.
    """

    shape: tuple[int, ...]
    dtype: str
    lowest: float | None
    highest: float | None
    num_nan: int
    num_infinite: int
    first: tuple[int, ...] | None

    def __str__(self) -> str:
        sizes = ", ".join(map(str, self.shape))
        parts = []
        if self.lowest is not None:
            is_one = self.lowest == self.highest
            parts.append(
                f"{self.lowest:.4g}" if is_one else f"{self.lowest:.4g} to {self.highest:.4g}"
            )
        found = [(self.num_nan, "NaN"), (self.num_infinite, "infinite")]
        parts += [f"{number} {what}" for number, what in found if number]
        if self.first:
            parts.append(f"the first at {list(self.first)}")
        return f"{self.dtype}[{sizes}]: {', '.join(parts) or 'empty'}"


@dataclasses.dataclass(frozen=True)
class NonFinite:
    """The operation that made the first NaN or infinity; `str` shows all of it.

    - `kind`: `"NaN"` or `"infinity"`.
    - `during`: `"forward pass"` or `"gradient"`.
    - `layer`: the path of the layer that was being called, such as `"model.layers[1]"`; `""` if
      the operation stands in none.
    - `layer_type`: the name of its class; `""` if there is none.
    - `operation`: the name of the primitive; that of an argument, if it came with that one.
    - `source`: the line of source, `"file:line in function"`; `""` if JAX does not know.
    - `turns`: the turns of the loops around it, from 0, outer ones first.
    - `inputs`, `outputs`: the values that the operation took and gave.
    - `came_with`: the path of the argument that brought the infinity which the operation made a NaN
      of; `""` if none did.
    - `reaches`: the path of the first part of the result that it spoils.
    - `then`: the operation that made a NaN of the infinity, if that is another.
    """

    kind: str
    during: str
    layer: str
    layer_type: str
    operation: str
    source: str
    turns: tuple[int, ...]
    inputs: tuple[Values, ...] = ()
    outputs: tuple[Values, ...] = ()
    reaches: str = ""
    then: "NonFinite | None" = None
    came_with: str = ""

    def __str__(self) -> str:
        lines = [f"The first {self.kind} of the {self.during} {self._made()}", *self._place()]
        lines += [f"  took {each}" for each in self.inputs]
        lines += [f"  gave {each}" for each in self.outputs]
        lines += [f"  The infinity that it took came with {self.came_with}."] * bool(self.came_with)
        if self.then is not None:
            lines += [f"  and {self.then._made('became NaN')}"]
            lines += [f"  {line}" for line in self.then._place()]
        return "\n".join([*lines, f"  It reaches {self.reaches}."])

    def _made(self, made: str = "was made") -> str:
        if not self.inputs and not self.source:
            return f"came with {self.operation}."
        layer = f" in {self.layer} ({self.layer_type})" if self.layer else ""
        turns = f", turn {', '.join(map(str, self.turns))} of the loop" if self.turns else ""
        return f"{made} by `{self.operation}`{layer}{turns}:"

    def _place(self) -> list[str]:
        return [f"  at {self.source}"] if self.source else []


@dataclasses.dataclass(frozen=True, eq=False)
class Origin:
    """The operation that made a value which is not finite.

    - `number`: its place in the order of origins.
    - `found`: what is known of it; `reaches` and `then` are not known yet.
    - `cause`: the origin of the infinity that it made a NaN of.
    - `is_given`: whether this is not an operation but an infinite argument, by its path.
    """

    number: int
    found: NonFinite
    cause: "Origin | None"
    is_given: bool


class Place(NamedTuple):
    """Where in the program a jaxpr is run: the scopes, line and loops around it."""

    scopes: str = ""
    source: str = ""
    turns: tuple[int, ...] = ()

    def inside(self, equation: Any) -> "Place":
        scopes = f"{self.scopes}/{equation.source_info.name_stack}"
        return Place(scopes, _source_of(equation) or self.source, self.turns)

    def in_turn(self, turn: int) -> "Place":
        return self._replace(turns=(*self.turns, turn))


_NOWHERE = Place()

Traced = tuple[Any, Origin | None]
"""A value, and its origin if it is not finite and has one."""


class Walk:
    """One run of a program.

    **Arguments:**

    - `during`: see `NonFinite`.
    - `layer_at`: the path and the type of the layer in the scopes of an operation.
    """

    def __init__(self, during: str, layer_at: Callable[[str], tuple[str, str]]):
        self._during = during
        self._layer_at = layer_at
        self._num_origins = 0
        # A loop inside of a loop is run often.
        self._compiled = jax.jit(
            lambda jaxpr, *values: jaxpr_as_fun(jaxpr)(*values), static_argnums=0
        )

    def run(self, jaxpr: Any, inputs: Sequence[Traced], place: Place = _NOWHERE) -> list[Traced]:
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
        name, params = equation.primitive.name, equation.params
        if name in _CALLS:
            parts = ("jaxpr", "call_jaxpr", "call")
            return self.run(next(params[each] for each in parts if each in params), inputs, here)
        if name == "cond":
            branches = params["branches"]
            which = min(max(int(inputs[0][0]), 0), len(branches) - 1)
            return self.run(branches[which], inputs[1:], here)
        by_turns = {"scan": self._scan, "while": self._while}.get(name)
        if by_turns is not None and equation.effects:
            # Each is to happen once.
            return by_turns(equation, inputs, here)
        # Most loops are sound, and a compiled one is soon over.
        outputs = _bind(equation, inputs)
        if by_turns is not None and any(map(what_is_wrong, outputs)):
            found = by_turns(equation, inputs, here)
            # Compiled as one it may round otherwise than turn by turn.
            if any(what_is_wrong(output) for output, _ in found):
                return found
        return self._with_origins(equation, inputs, outputs, here)

    def _scan(self, equation: Any, inputs: list[Traced], place: Place) -> list[Traced]:
        params = equation.params
        num_consts, num_carry = scan_counts(params)
        consts, carry = inputs[:num_consts], inputs[num_consts:][:num_carry]
        xs = inputs[num_consts + num_carry :]
        if not params["length"]:
            return [*carry, *((each, None) for each in _bind(equation, inputs)[num_carry:])]
        step = -1 if params["reverse"] else 1
        rows = []
        for index in range(params["length"])[::step]:
            row = zip(_rows_at([x for x, _ in xs], index), [each for _, each in xs], strict=True)
            here, given = place.in_turn(index), [*consts, *carry, *row]
            outputs = self._turn(params["jaxpr"], equation, given, here)
            carry = outputs[:num_carry]
            rows.append(outputs[num_carry:])
        return [*carry, *map(_stacked, zip(*rows[::step], strict=True))]

    def _while(self, equation: Any, inputs: list[Traced], place: Place) -> list[Traced]:
        params = equation.params
        num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
        cond_consts, body_consts = inputs[:num_cond], inputs[num_cond:][:num_body]
        carry = inputs[num_cond + num_body :]
        count = 0
        while True:
            here = place.in_turn(count)
            given = [*cond_consts, *carry]
            ((goes_on, _),) = self._turn(params["cond_jaxpr"], equation, given, here)
            if not goes_on:
                return carry
            carry = self._turn(params["body_jaxpr"], equation, [*body_consts, *carry], here)
            count += 1

    def _turn(
        self, jaxpr: Any, equation: Any, inputs: Sequence[Traced], place: Place
    ) -> list[Traced]:
        """One turn of a loop: operation by operation if that tells more."""
        if not equation.effects:
            outputs = self._compiled(jaxpr, *(value for value, _ in inputs))
            if not any(map(what_is_wrong, outputs)):
                return [(output, None) for output in outputs]
        return self.run(jaxpr, inputs, place)

    def _with_origins(
        self, equation: Any, inputs: list[Traced], outputs: list[Any], place: Place
    ) -> list[Traced]:
        """The outputs of an operation, with the origin of those that are not finite."""
        wrong = list(map(what_is_wrong, outputs))
        if not any(wrong):
            return [(output, None) for output in outputs]
        kind = "NaN" if "NaN" in wrong else "infinity"
        origin = self._origin_of(kind, equation, inputs, outputs, place)
        return [
            (output, origin if each else None) for output, each in zip(outputs, wrong, strict=True)
        ]

    def _origin_of(
        self, kind: str, equation: Any, inputs: list[Traced], outputs: list[Any], place: Place
    ) -> Origin | None:
        taken = [what_is_wrong(value) for value, _ in inputs]
        # An array of a loop has its origin in each turn, also where a row of it is finite.
        pairs = zip(inputs, taken, strict=True)
        origins = [each for (_, each), what in pairs if what and each is not None]
        causes = [each for each in origins if not each.is_given]
        if kind == "NaN" and "NaN" in taken:
            return _first([each for each in causes if each.found.kind == "NaN"])
        makes_its_own = not causes and _makes_infinity(equation, inputs, outputs)
        if kind == "infinity" and any(taken) and not makes_its_own:
            return _first(origins)
        given = _first([each for each in origins if each.is_given])
        return self.origin(
            kind,
            equation.primitive.name,
            place,
            inputs=tuple(
                values_of(value, variable.aval.dtype)
                for (value, _), variable in zip(inputs, equation.invars, strict=True)
                if _has_numbers(value)
            ),
            outputs=tuple(values_of(each) for each in outputs if what_is_wrong(each)),
            cause=_first(causes),
            came_with="" if given is None or kind != "NaN" else given.found.operation,
        )

    def origin(
        self,
        kind: str,
        operation: str,
        place: Place = _NOWHERE,
        *,
        cause: Origin | None = None,
        is_given: bool = False,
        **known: Any,
    ) -> Origin:
        """The next origin, with what else is `known` of it."""
        self._num_origins += 1
        where = *self._layer_at(place.scopes), operation, place.source, place.turns
        found = NonFinite(kind, self._during, *where, **known)
        return Origin(self._num_origins, found, cause, is_given)


_CALLS = {
    *("closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "custom_vmap_call"),
    "while_with_transpose",
    *("jit", "pjit", "remat", "remat2", "checkpoint"),
}
"""The names of operations that run one program on what they are given."""

_ELEMENTWISE = {
    *("acosh", "add", "add_any", "atanh", "convert_element_type", "cosh", "digamma", "div"),
    *("erf_inv", "exp", "exp2", "expm1", "integer_pow", "lgamma", "log", "log1p", "mul", "pow"),
    *("reduce_precision", "rsqrt", "sinh", "square", "sub", "tan"),
}
"""The names of operations on each element by itself that may make an infinity of finite numbers."""


def _bind(equation: Any, inputs: Sequence[Traced]) -> list[Any]:
    primitive = equation.primitive
    with equation.ctx.manager:
        outputs = primitive.bind(
            *(value for value, _ in inputs), **primitive.get_bind_params(equation.params)
        )
    return list(outputs) if primitive.multiple_results else [outputs]


@jax.jit
def _rows_at(arrays: list[Any], index: Any) -> list[Any]:
    return [jax.lax.dynamic_index_in_dim(each, index, keepdims=False) for each in arrays]


def _stacked(rows: Sequence[Traced]) -> Traced:
    origins = [origin for _, origin in rows if origin is not None]
    return jnp.stack([row for row, _ in rows]), _first(origins)


def _first(origins: Sequence[Origin]) -> Origin | None:
    return min(origins, key=lambda origin: (origin.is_given, origin.number), default=None)


# --- The line of source of an operation, and the numbers that it took and gave ---


def _source_of(equation: Any) -> str:
    """The line in the user's program, or in a layer of ours, that made an operation; or `""`."""
    frame = frame_of_user(equation.source_info, is_of_user_or_layer)
    return f"{frame.file_name}:{frame.line_num} in {frame.function_name}" if frame else ""


def what_is_wrong(value: Any) -> str | None:
    """`"NaN"` if there is one in `value`, `"infinity"` if there is one alone, or `None`."""
    if not _has_numbers(value):
        return None
    numbers = np.asarray(jax.device_get(value))
    if np.isfinite(numbers).all():
        return None
    return "NaN" if np.isnan(numbers).any() else "infinity"


def _has_numbers(value: Any) -> bool:
    """Whether `value` is an array, or a number of Python, that may hold a NaN or an infinity."""
    is_array = isinstance(value, jax.Array | np.ndarray | np.generic)
    is_inexact = is_array and jnp.issubdtype(value.dtype, jnp.inexact)
    return is_inexact or isinstance(value, float | complex)


def _makes_infinity(equation: Any, inputs: Sequence[Traced], outputs: Sequence[Any]) -> bool:
    """Whether an element of the output is infinite where all that was given is finite."""
    if equation.primitive.name not in _ELEMENTWISE:
        return False
    finite = np.logical_and.reduce(
        np.broadcast_arrays(*(np.isfinite(jax.device_get(value)) for value, _ in inputs)), axis=0
    )
    return bool((~np.isfinite(jax.device_get(outputs[0])) & finite).any())


def values_of(value: Any, dtype: Any = None) -> Values:
    """The `Values` of an array, or of a number of Python, which has the `dtype` of a program."""
    numbers = np.asarray(jax.device_get(value), dtype)
    parts = np.ravel(numbers)
    if np.iscomplexobj(parts):
        parts = np.concatenate([np.real(parts), np.imag(parts)])
    # `float64` holds all that the small floats do, which NumPy does not take the minimum of.
    finite = parts[np.isfinite(parts)].astype(np.float64)
    is_bad = ~np.isfinite(numbers)
    is_nan = np.isnan(numbers)
    return Values(
        shape=numbers.shape,
        dtype=str(numbers.dtype),
        lowest=float(finite.min()) if finite.size else None,
        highest=float(finite.max()) if finite.size else None,
        num_nan=int(is_nan.sum()),
        num_infinite=int((is_bad & ~is_nan).sum()),
        first=tuple(map(int, np.argwhere(is_bad)[0])) if is_bad.any() else None,
    )
