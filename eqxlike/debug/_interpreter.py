"""A jaxpr interpreter that tracks the origins of NaN and infinity.

Each non-finite value has an origin: the operation that made it from finite values. If an operation
has non-finite inputs and outputs, its output has the origin of its input. If `jnp.where` removes a
NaN, the origin of the NaN is forgotten. In the end, the origin of a NaN in the result is the
operation to report.

Infinite constants and arguments, such as masks, are not mistakes by themselves. A constant has no
origin. The origin of an infinite argument is the path of the argument. If an operation makes a NaN
from infinite constants or arguments, the operation is a new origin, which names the argument. If an
operation makes an infinity from finite elements, the operation is a new origin too, even if other
elements of its input are infinite.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

from .._compat import scan_counts
from .._programs import bind, interpret
from .._traceback import frame_of_user, is_of_user_or_layer

# --- The report ---


@dataclasses.dataclass(frozen=True)
class Values:
    """Statistics of the values of an array.

    - `shape`, `dtype`: shape and dtype of the array.
    - `lowest`, `highest`: the range of the finite numbers in the array. The real and the imaginary
      part of a complex number count as two numbers. `None` if there are no finite numbers.
    - `num_nan`, `num_infinite`: the numbers of NaN and infinite elements.
    - `first`: the index of the first non-finite element. `None` if all elements are finite.
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
    """The operation that made the first NaN or infinity. Print it to see a report.

    - `kind`: `"NaN"` or `"infinity"`.
    - `during`: `"forward pass"` or `"gradient"`.
    - `layer`: the path of the layer that contains the operation, such as `"model.layers[1]"`. `""`
      if the operation is outside of layers.
    - `layer_type`: the class name of the layer. `""` if the operation is outside of layers.
    - `operation`: the name of the primitive. If the value came from an argument, the path of the
      argument.
    - `source`: the source line, as `"file:line in function"`. `""` if it is unknown.
    - `turns`: the iteration number of each surrounding loop, counted from 0. The outermost loop
      comes first.
    - `inputs`: the input values of the operation.
    - `outputs`: the non-finite output values of the operation.
    - `reaches`: the path of the first non-finite array in the result.
    - `then`: if the value is an infinity, and another operation made a NaN from it, the `NonFinite`
      of that other operation. Otherwise `None`.
    - `came_with`: if the operation made a NaN from an infinite argument, the path of the argument.
      Otherwise `""`.
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
        lines = [
            f"The first {self.kind} of the {self.during} {self._headline()}",
            *self._source_lines(),
        ]
        lines += [f"  input {each}" for each in self.inputs]
        lines += [f"  output {each}" for each in self.outputs]
        lines += [f"  The infinite input comes from {self.came_with}."] * bool(self.came_with)
        if self.then is not None:
            lines += [f"  and {self.then._headline('was turned into NaN')}"]
            lines += [f"  {line}" for line in self.then._source_lines()]
        return "\n".join([*lines, f"  It reaches {self.reaches}."])

    def _headline(self, made: str = "was made") -> str:
        if not self.inputs and not self.source:
            return f"comes from {self.operation}."
        layer = f" in {self.layer} ({self.layer_type})" if self.layer else ""
        turns = f", turn {', '.join(map(str, self.turns))} of the loop" if self.turns else ""
        return f"{made} by `{self.operation}`{layer}{turns}:"

    def _source_lines(self) -> list[str]:
        return [f"  at {self.source}"] if self.source else []


# --- The interpreter ---


@dataclasses.dataclass(frozen=True, eq=False)
class Origin:
    """The operation that made a non-finite value.

    - `number`: the position of the operation in the order of origins.
    - `found`: the description of the operation. Its fields `reaches` and `then` are set later.
    - `cause`: if the operation made a NaN from an infinity, the origin of this infinity.
    - `is_given`: whether the origin is an infinite argument instead of an operation.
    """

    number: int
    found: NonFinite
    cause: "Origin | None"
    is_given: bool

    @property
    def root(self) -> "Origin":
        """The origin of the first cause."""
        return self if self.cause is None else self.cause.root


class Context(NamedTuple):
    """The context of a jaxpr: the surrounding name scopes, source line and loop iterations."""

    scopes: str = ""
    source: str = ""
    turns: tuple[int, ...] = ()

    def inside(self, equation: Any) -> "Context":
        scopes = f"{self.scopes}/{equation.source_info.name_stack}"
        # `frame` is in the user's program or in a layer.
        frame = frame_of_user(equation.source_info, is_of_user_or_layer)
        source = f"{frame.file_name}:{frame.line_num} in {frame.function_name}" if frame else ""
        return Context(scopes, source or self.source, self.turns)

    def in_iteration(self, turn: int) -> "Context":
        return self._replace(turns=(*self.turns, turn))


_TOP_LEVEL = Context()

Traced = tuple[Any, Origin | None]
"""A value and its origin. The origin is `None` if the value is finite or a constant."""


class Interpreter:
    """Interprets one program.

    **Arguments:**

    - `during`: see `NonFinite`.
    - `layer_at`: function that takes name scopes, and returns the path and the type name of the
      layer.
    """

    def __init__(self, during: str, layer_at: Callable[[str], tuple[str, str]]):
        self._during = during
        self._layer_at = layer_at
        self._num_origins = 0
        # Calls a jaxpr as a compiled function, because the body of a nested loop runs often.
        self._compiled = jax.jit(
            lambda jaxpr, *values: jaxpr_as_fun(jaxpr)(*values), static_argnums=0
        )

    def run(
        self, jaxpr: Any, inputs: Sequence[Traced], context: Context = _TOP_LEVEL
    ) -> list[Traced]:
        """Interprets a jaxpr or closed jaxpr, and returns its outputs."""
        consts, jaxpr = getattr(jaxpr, "consts", ()), getattr(jaxpr, "jaxpr", jaxpr)
        run = functools.partial(self._equation, context)
        of_consts = [(const, None) for const in consts]
        return interpret(jaxpr, of_consts, inputs, run, lambda literal: (literal.val, None))

    def _equation(self, context: Context, equation: Any, inputs: list[Traced]) -> list[Traced]:
        here = context.inside(equation)
        name, params = equation.primitive.name, equation.params
        if name in _CALLS:
            parts = ("jaxpr", "call_jaxpr", "call")
            return self.run(next(params[each] for each in parts if each in params), inputs, here)
        if name == "cond":
            branches = params["branches"]
            which = min(max(int(inputs[0][0]), 0), len(branches) - 1)
            return self.run(branches[which], inputs[1:], here)
        interpret_loop = {"scan": self._scan, "while": self._while}.get(name)
        if interpret_loop is not None and equation.effects:
            # Effects must happen only once, so do not run the compiled loop first.
            return interpret_loop(equation, inputs, here)
        # Run a whole loop compiled first, because most loops are finite.
        outputs = _bind(equation, inputs)
        if interpret_loop is not None and any(map(nonfinite_kind, outputs)):
            found = interpret_loop(equation, inputs, here)
            # Iterations that run one by one may round differently, so that all values are finite.
            if any(nonfinite_kind(output) for output, _ in found):
                return found
        return self._with_origins(equation, inputs, outputs, here)

    def _scan(self, equation: Any, inputs: list[Traced], context: Context) -> list[Traced]:
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
            here, given = context.in_iteration(index), [*consts, *carry, *row]
            outputs = self._iteration(params["jaxpr"], equation, given, here)
            carry = outputs[:num_carry]
            rows.append(outputs[num_carry:])
        return [*carry, *map(_stacked, zip(*rows[::step], strict=True))]

    def _while(self, equation: Any, inputs: list[Traced], context: Context) -> list[Traced]:
        params = equation.params
        num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
        cond_consts, body_consts = inputs[:num_cond], inputs[num_cond:][:num_body]
        carry = inputs[num_cond + num_body :]
        count = 0
        while True:
            here = context.in_iteration(count)
            given = [*cond_consts, *carry]
            ((goes_on, _),) = self._iteration(params["cond_jaxpr"], equation, given, here)
            if not goes_on:
                return carry
            carry = self._iteration(params["body_jaxpr"], equation, [*body_consts, *carry], here)
            count += 1

    def _iteration(
        self, jaxpr: Any, equation: Any, inputs: Sequence[Traced], context: Context
    ) -> list[Traced]:
        """Runs one iteration of a loop. If an output is not finite, interprets the iteration."""
        if not equation.effects:
            outputs = self._compiled(jaxpr, *(value for value, _ in inputs))
            if not any(map(nonfinite_kind, outputs)):
                return [(output, None) for output in outputs]
        return self.run(jaxpr, inputs, context)

    def _with_origins(
        self, equation: Any, inputs: list[Traced], outputs: list[Any], context: Context
    ) -> list[Traced]:
        """The outputs of an operation, with the origin of the non-finite outputs."""
        kinds = list(map(nonfinite_kind, outputs))
        if not any(kinds):
            return [(output, None) for output in outputs]
        kind = "NaN" if "NaN" in kinds else "infinity"
        origin = self._origin_of(kind, equation, inputs, outputs, context)
        return [
            (output, origin if each else None) for output, each in zip(outputs, kinds, strict=True)
        ]

    def _origin_of(
        self, kind: str, equation: Any, inputs: list[Traced], outputs: list[Any], context: Context
    ) -> Origin | None:
        taken = [nonfinite_kind(value) for value, _ in inputs]
        # In a `scan`, each row of an input has the origin of the whole input. If the row itself is
        # finite, ignore this origin.
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
            context,
            inputs=tuple(
                values_of(value, variable.aval.dtype)
                for (value, _), variable in zip(inputs, equation.invars, strict=True)
                if _has_numbers(value)
            ),
            outputs=tuple(values_of(each) for each in outputs if nonfinite_kind(each)),
            cause=_first(causes),
            came_with="" if given is None or kind != "NaN" else given.found.operation,
        )

    def origin(
        self,
        kind: str,
        operation: str,
        context: Context = _TOP_LEVEL,
        *,
        cause: Origin | None = None,
        is_given: bool = False,
        **known: Any,
    ) -> Origin:
        """Makes a new origin. `known` has further fields for the `NonFinite` in the origin."""
        self._num_origins += 1
        where = *self._layer_at(context.scopes), operation, context.source, context.turns
        found = NonFinite(kind, self._during, *where, **known)
        return Origin(self._num_origins, found, cause, is_given)


_CALLS = {
    *("closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "custom_vmap_call"),
    "while_with_transpose",
    *("jit", "pjit", "remat", "remat2", "checkpoint"),
}
"""The names of operations that pass their inputs to one inner program."""

_ELEMENTWISE = {
    *("acosh", "add", "add_any", "atanh", "convert_element_type", "cosh", "digamma", "div"),
    *("erf_inv", "exp", "exp2", "expm1", "integer_pow", "lgamma", "log", "log1p", "mul", "pow"),
    *("reduce_precision", "rsqrt", "sinh", "square", "sub", "tan"),
}
"""The names of elementwise operations that can make an infinity from finite numbers."""


def _bind(equation: Any, inputs: Sequence[Traced]) -> list[Any]:
    return list(bind(equation, [value for value, _ in inputs]))


@jax.jit
def _rows_at(arrays: list[Any], index: Any) -> list[Any]:
    return [jax.lax.dynamic_index_in_dim(each, index, keepdims=False) for each in arrays]


def _stacked(rows: Sequence[Traced]) -> Traced:
    origins = [origin for _, origin in rows if origin is not None]
    return jnp.stack([row for row, _ in rows]), _first(origins)


def _first(origins: Sequence[Origin]) -> Origin | None:
    return min(origins, key=lambda origin: (origin.is_given, origin.number), default=None)


# --- The values of arrays ---


def nonfinite_kind(value: Any) -> str | None:
    """`"NaN"` if `value` has NaN, else `"infinity"` if it has an infinity, else `None`."""
    if not _has_numbers(value):
        return None
    numbers = np.asarray(jax.device_get(value))
    if np.isfinite(numbers).all():
        return None
    return "NaN" if np.isnan(numbers).any() else "infinity"


def _has_numbers(value: Any) -> bool:
    """Whether `value` is an array or Python number of an inexact type."""
    is_array = isinstance(value, jax.Array | np.ndarray | np.generic)
    is_inexact = is_array and jnp.issubdtype(value.dtype, jnp.inexact)
    return is_inexact or isinstance(value, float | complex)


def _makes_infinity(equation: Any, inputs: Sequence[Traced], outputs: Sequence[Any]) -> bool:
    """Whether the output has a non-finite element at an index where all inputs are finite."""
    if equation.primitive.name not in _ELEMENTWISE:
        return False
    finite = np.logical_and.reduce(
        np.broadcast_arrays(*(np.isfinite(jax.device_get(value)) for value, _ in inputs)), axis=0
    )
    return bool((~np.isfinite(jax.device_get(outputs[0])) & finite).any())


def values_of(value: Any, dtype: Any = None) -> Values:
    """The `Values` of an array or a Python number. A Python number is converted to `dtype`."""
    numbers = np.asarray(jax.device_get(value), dtype)
    parts = np.ravel(numbers)
    if np.iscomplexobj(parts):
        parts = np.concatenate([np.real(parts), np.imag(parts)])
    # NumPy has no minimum for small floating-point types, such as bfloat16. So convert the numbers
    # to float64, which is exact.
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
