"""A traced program run operation by operation, on values, with NaN and infinity followed.

Each value that is not finite has an origin: the operation that made it of finite ones. An operation
that is given such a value and returns one passes its origin on. So a NaN that a `jnp.where` leaves
out is forgotten, and the origin of one in the result is where to look.

Infinities that are constants, or came with the arguments, are no mistake yet, as those of a mask.
Constants have no origin, an argument is its own; what makes a NaN of them has one, and names it.
An operation that makes an infinity of finite numbers, beside those that it was given, has one too.
"""

import contextlib
import dataclasses
import inspect
import itertools
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.extend.core import Literal, jaxpr_as_fun

from ..._compat import scan_counts
from ..._module import Module, Wrapper, observe_calls

# --- Where an operation stands: the layer that was being called, and the line of source ---


_SCOPE = "eqxlike-layer-"
_IN_SCOPE = re.compile(rf"{_SCOPE}(\d+)")

_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_MACHINERY = (
    "<eqxlike ",
    os.path.join(os.path.dirname(os.path.abspath(jax.__file__)), ""),
    *(
        os.path.join(_PACKAGE, name, "")
        for name in ("_module", "_partition", "_transforms", "ad", "debug", "loops")
    ),
)
"""What stands between an operation and the line of a user, or of a layer, that asked for it."""


class _Scope:
    """Names what a layer makes.

    All of one call of `find_nonfinite` are equal: a program that maps one tree onto another, as a
    step of a training does with the model and what its optimiser keeps, is to find them of one
    structure, as they were. Those of different calls are not, since JAX keeps what it has traced.
    """

    def __init__(self, layers: "Layers", name: str):
        self._layers = layers
        self._name = name

    def __eq__(self, other: object) -> bool:
        return type(other) is _Scope and other._layers is self._layers

    def __hash__(self) -> int:
        return hash(self._layers)

    @contextlib.contextmanager
    def __call__(self, *_: Any) -> Iterator[Callable[[Any], None]]:
        with jax.named_scope(self._name):
            yield lambda output: None


class Layers:
    """The Modules of a call. Each puts its number in the scope of the operations that it makes."""

    def __init__(self, function: Callable[..., Any], arguments: dict[str, Any]):
        self._found: list[tuple[str, str]] = []
        self._inside = _path_inside(function)
        self.function, self.arguments = observe_calls((function, arguments), self._add)

    def _add(self, path: tuple[Any, ...], layer: Module) -> Callable[..., Any]:
        self._found.append((name_of(path), type(layer).__name__))
        return _Scope(self, f"{_SCOPE}{len(self._found) - 1}")

    def name_of(self, path: tuple[Any, ...]) -> str:
        """The name of a leaf: like a layer, it stands under the path of the wrapper around it."""
        whose, *inner = path
        if whose.idx == 0 and tuple(inner[: len(self._inside)]) == self._inside:
            inner = inner[len(self._inside) :]
        return name_of((whose, *inner))

    def at(self, scopes: str) -> tuple[str, str]:
        """The path and the type of the innermost layer in the scopes of an operation."""
        numbers = _IN_SCOPE.findall(scopes)
        return self._found[int(numbers[-1])] if numbers else ("", "")


def _path_inside(function: Any) -> tuple[Any, ...]:
    """The path from a function that was transformed, or bound, to the Module inside."""
    path: tuple[Any, ...] = ()
    while isinstance(function, Wrapper):
        wrapped = (function.__wrapped__, getattr(function, "__self__", None))
        parts = jtu.tree_leaves_with_path(
            function, is_leaf=lambda part, whole=function: part is not whole and _is_module(part)
        )
        inside = [
            (key, part)
            for key, part in parts
            if _is_module(part) and any(part is w for w in wrapped)
        ]
        if not inside:
            break
        path, function = path + inside[0][0], inside[0][1]
    return path


def _is_module(node: Any) -> bool:
    return isinstance(node, Module)


def name_of(path: tuple[Any, ...]) -> str:
    """The name of a place in the pair of a function and its arguments by name."""
    whose, *inner = path
    if whose.idx == 0:
        return f"model{jtu.keystr(tuple(inner))}"
    return f"{inner[0].key}{jtu.keystr(tuple(inner[1:]))}"


def arguments_by_name(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[dict[str, Any], Callable[[dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]]:
    """The arguments under the names of their parameters, and the way back."""
    try:
        bound = inspect.signature(function).bind(*args, **kwargs)
    except (TypeError, ValueError):
        # No signature, or a call that does not fit it, of which Python will say so.
        return {"args": args, "kwargs": kwargs}, lambda named: (named["args"], named["kwargs"])

    def back(named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        # In the order of the parameters: a tree of a dict comes back in that of the names.
        ordered = {name: named[name] for name in bound.arguments}
        again = inspect.BoundArguments(bound.signature, ordered)  # pyright: ignore
        return again.args, again.kwargs

    return dict(bound.arguments), back


def source_of(equation: Any) -> str:
    """The line in the user's program, or in a layer of ours, that made an operation; or `""`.

    In a function that JAX keeps traced, as those of `jax.numpy`, there may be none.
    """
    traceback = equation.source_info.traceback
    for frame in () if traceback is None else traceback.frames:
        if not frame.file_name.startswith(_MACHINERY):
            return f"{frame.file_name}:{frame.line_num} in {frame.function_name}"
    return ""


# --- What was found: an operation, its place, and the ranges of what it took and gave ---


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
    inputs: tuple[Values, ...]
    outputs: tuple[Values, ...]
    reaches: str
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


def has_numbers(value: Any) -> bool:
    """Whether `value` is an array that may hold a NaN or an infinity."""
    dtype = getattr(value, "dtype", None)
    is_array = isinstance(value, jax.Array | np.ndarray | np.generic)
    return is_array and dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def what_is_wrong(value: Any) -> str | None:
    """`"NaN"` if there is one in `value`, `"infinity"` if there is one alone, or `None`."""
    if isinstance(value, float | complex):
        value = np.asarray(value)
    if not has_numbers(value):
        return None
    numbers = jax.device_get(value)
    if is_finite(numbers).all():
        return None
    return "NaN" if np.isnan(numbers).any() else "infinity"


def is_finite(value: Any) -> np.ndarray:
    """Where `value`, an array or a number of Python, is neither NaN nor infinite."""
    return np.isfinite(jax.device_get(value))


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
