"""The gradient in double precision that others are compared with, and how far they are from it."""

import dataclasses
import functools
import math
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, PyTree

from .._partition import Rest, split
from .._programs import equations_in
from .._pytree import is_inexact_array
from .._transforms import filter_eval_shape, filter_jit, filter_make_jaxpr, filter_value_and_grad
from .._transforms._derivatives._by_mode import checked_value, path_of_taken
from .._transforms._jit._callables import unbind
from .._transforms._signatures import check_callable, value_and_aux
from ._modes import FiniteDifference, Forward, Mode


@dataclasses.dataclass(frozen=True)
class Subject:
    """A function and its arguments. It is differentiated by arrays of the first argument.

    - `arrays`: these arrays.
    - `rest`: the first argument without them.
    - `value_dtype`: the dtype of the value.
    - `max_evaluations`: a gradient may evaluate the function this many times.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    arrays: list[Array]
    rest: Rest
    value_dtype: Any
    max_evaluations: float = math.inf

    def value_and_grad(self, mode: Mode) -> Callable[..., tuple[Array, PyTree]]:
        """The function from the arguments to value and gradient.

        **Raises:** `TimeoutError` if it would take too long. Nobody can interrupt a call.
        """
        size = sum(each.size for each in self.arrays)
        order = mode.order if isinstance(mode, FiniteDifference) else isinstance(mode, Forward)
        if order * size > self.max_evaluations:
            raise TimeoutError(
                f"{order * size:,} evaluations of the function would take too long. Where that is "
                "wanted, give a larger `budget_s`."
            )
        return filter_value_and_grad(self.function, mode=mode)

    def gradients_in(self, gradient: PyTree) -> list[Any]:
        """What `gradient` has in the place of each of the arrays.

        **Raises:** `ValueError` or `TypeError` if it has another structure.
        """
        return self.rest.take(self.rest.treedef.flatten_up_to(gradient))

    def path_of(self, place: int) -> str:
        """The path of the array at `place`."""
        return path_of_taken(self.rest, place)

    def equations(self) -> list[Any]:
        """All equations of the function and of its inner programs."""
        return list(equations_in(filter_make_jaxpr(self.function)(*self.args)[0].jaxpr))


def checked_subject(function: Any, args: tuple[Any, ...], has_aux: bool = False) -> Subject:
    """The Subject, checked.

    **Raises:** `TypeError` or `ValueError` if it has no gradient in any mode; and what the function
    itself raises when it is traced.
    """
    check_callable(function, "ad.compare")
    if isinstance(function, functools.partial | types.MethodType):
        # So bound arrays are arguments of a program, as in `filter_jit`, and no constants.
        unbound = unbind(function)
        function = jtu.Partial(unbound.function, *unbound.args, **unbound.kwargs)
    if has_aux:
        function = jtu.Partial(_without_aux, function)
    arrays, rest = split(args[0] if args else None, is_inexact_array)
    if not arrays:
        raise ValueError(
            "`ad.compare` has nothing to differentiate by: args[0] holds no floating-point or "
            "complex array that is not frozen. (A Python number is static; `jnp.asarray` makes an "
            "array of it.)"
        )
    name = getattr(function, "__name__", "the function")
    value = filter_eval_shape(lambda *args: checked_value(function(*args), False, name), *args)
    return Subject(function, args, list(map(jnp.asarray, arrays)), rest, value.dtype)


def _without_aux(function: Callable[..., Any], *args: Any) -> Any:
    return value_and_aux(function(*args), True, function)[0]


# --- The reference ---


class LeafError(NamedTuple):
    """How far the derivatives by one array are from the reference.

    - `place`: the place of the array among those differentiated by.
    - `error`: the largest difference, relative to the largest derivative of the reference.
    - `beyond_doubt`: the same of the part of the differences for which the reference is certain.
    - `tolerance`: how large that may be.
    """

    place: int
    error: float
    beyond_doubt: float
    tolerance: float


@dataclasses.dataclass(frozen=True)
class Reference:
    """The right gradient, as far as it is known.

    - `gradients`: for each array that the subject is differentiated by, in double precision.
    - `_subject`: in the precision that it was given in; `_wide`: in double precision.
    """

    gradients: list[np.ndarray]
    _mode: Mode
    _subject: Subject
    _wide: Subject

    @functools.cached_property
    def doubts(self) -> list[np.ndarray]:
        """How far each derivative is uncertain; computed on first use.

        It is so for two reasons. Where the arguments are rounded otherwise, in the precision that
        they were given in, the right gradient is another one; near a minimum that is all of it. And
        differences give no derivative where the function has a kink, or computes in less than
        double precision: there those to the one side differ from those to the other.
        """
        generator, arrays = np.random.default_rng(0), list(map(np.asarray, self._wide.arrays))
        rounded = [
            array * (1 + jnp.finfo(given.dtype).eps * generator.choice([-1.0, 1.0], array.shape))
            for array, given in zip(arrays, self._subject.arrays, strict=True)
        ]
        # Each operation rounds, not the arguments alone.
        far = self._apart(self._mode, rounded)
        doubts = [np.full(each.shape, 16 * _largest(each)) for each in far]
        if not getattr(self._mode, "only_evaluates", False):
            return doubts
        with jax.enable_x64(True):
            outputs = [each.aval for found in self._wide.equations() for each in found.outvars]
        epsilon = max(map(_epsilon_of, outputs), default=0.0)
        is_double = epsilon <= np.finfo(np.float64).eps
        step = math.cbrt(max(epsilon, np.finfo(np.float64).eps))
        mode = FiniteDifference(step=None if is_double else step)
        for side in (-2, 2):
            beside = [each + side * step * np.maximum(1, np.abs(each)) for each in arrays]
            for doubt, apart in zip(doubts, self._apart(mode, beside), strict=True):
                # Rounding is random: an error of one derivative may occur in all of them.
                doubt += 3 * (apart + np.median(apart)) if apart.size else 0
        return doubts

    def errors(
        self,
        gradients: Sequence[np.ndarray],
        tolerance: float | None = None,
        doubts: Sequence[np.ndarray] | None = None,
    ) -> list[LeafError]:
        """The errors of a gradient in double precision, an item for each array.

        An array whose derivatives are all tiny next to those by other arrays may have nothing but
        what rounding leaves of terms that cancel. So its error is relative to at least the largest
        of all, times the root of the machine epsilon.

        **Arguments:**

        - `tolerance`: the largest error of a right gradient; `None` chooses it by the dtypes.
        - `doubts`: how far each derivative of the reference is uncertain; `None` for not at all.
        """
        largest, found = max(map(_largest, self.gradients)), []
        for place, (own, right) in enumerate(zip(gradients, self.gradients, strict=True)):
            dtypes = self._subject.arrays[place].dtype, self._subject.value_dtype
            infos = list(map(jnp.finfo, dtypes))
            floor = math.sqrt(max(float(each.eps) for each in infos)) * largest
            # Where all is zero, the error is the difference itself.
            scale = max(_largest(right), floor) or 1.0
            difference = np.abs(own - right)
            # XLA flushes subnormal numbers of float32 to zero; it keeps float16 ones.
            flushed = float(jnp.finfo(jnp.float32).tiny)
            lost = max(min(float(x.tiny), max(float(x.smallest_subnormal), flushed)) for x in infos)
            difference = np.where(difference <= lost, 0.0, difference)
            certain = difference if doubts is None else np.maximum(difference - doubts[place], 0)
            errors = _largest(difference) / scale, _largest(certain) / scale
            found.append(LeafError(place, *errors, tolerance or default_tolerance(*dtypes)))
        return found

    def _apart(self, mode: Mode, arrays: list[np.ndarray]) -> list[np.ndarray]:
        """How far the gradient is from another; infinitely, where that is not known."""
        try:
            others = _gradients_by(mode, self._wide, arrays)
        except Exception:
            # No mode is to blame for that.
            others = [np.full(right.shape, np.inf) for right in self.gradients]
        return [
            np.where(np.isfinite(other), np.abs(other - right), np.inf)
            for other, right in zip(others, self.gradients, strict=True)
        ]


def reference_gradient(subject: Subject, mode: Mode) -> Reference:
    """The gradient by `mode` in double precision.

    **Raises:** `ValueError` if it is not finite, or there is none; or if the function draws random
    numbers, which are others in double precision.
    """
    why, cause, gradients, wide = "", None, [], subject
    try:
        wide = _in_float64(subject)
        gradients = _gradients_by(mode, wide, wide.arrays)
        with jax.enable_x64(True):
            bits = _bits_drawn(wide)
        if bits != _bits_drawn(subject):
            why = (
                "is taken in float64, where the function draws other random numbers: `jax.random` "
                "makes them of more bits there. Draw them outside of the function, or name their "
                "dtype, as in `jax.random.normal(key, shape, jnp.float32)`."
            )
    except Exception as error:
        cause = error
        why = f"has no gradient in float64: {described(error)}\n"
        why += "(The arguments are cast to float64, and what a plain function closes over is not.)"
    for place, gradient in enumerate(gradients):
        if num_bad := int(np.sum(~np.isfinite(gradient))):
            why = why or (
                f"is not finite in float64: {num_bad} of the {gradient.size} derivatives by "
                f"{subject.path_of(place)}. Is the function smooth at these arguments, and defined "
                "near by?"
            )
    if why:
        raise ValueError(
            f"`ad.compare`: The reference, {as_written(mode)}, {why} Way out: another `reference`, "
            "such as `ad.Reverse()`, or none, `reference=None`."
        ) from cause
    return Reference(gradients, mode, subject, wide)


def _in_float64(subject: Subject) -> Subject:
    """The subject with all floating-point arrays in double precision."""

    def cast(leaf: Any) -> Any:
        if not is_inexact_array(leaf):
            return leaf
        return jnp.asarray(leaf, jnp.complex128 if jnp.iscomplexobj(leaf) else jnp.float64)

    with jax.enable_x64(True):
        wide = checked_subject(*jtu.tree_map(cast, (subject.function, subject.args)))
    return dataclasses.replace(wide, max_evaluations=subject.max_evaluations)


def _gradients_by(mode: Mode, wide: Subject, arrays: Sequence[Any]) -> list[np.ndarray]:
    """The gradients of `wide` with these arrays in place of its own."""
    with jax.enable_x64(True):
        x = wide.rest.merge(map(jnp.asarray, arrays))
        _, gradient = filter_jit(wide.value_and_grad(mode))(x, *wide.args[1:])
        return list(map(np.asarray, wide.gradients_in(gradient)))


def _bits_drawn(subject: Subject) -> list[int]:
    """Of how many bits the random numbers are that the function draws, one draw after another."""
    found = subject.equations()
    return [each.params["bit_width"] for each in found if each.primitive.name == "random_bits"]


def _epsilon_of(aval: Any) -> float:
    dtype = getattr(aval, "dtype", jnp.dtype(int))
    return float(jnp.finfo(dtype).eps) if jnp.issubdtype(dtype, jnp.inexact) else 0.0


# --- Modes and exceptions as text ---


def as_written(mode: Any) -> str:
    """A mode as one writes it, without the arguments that it has by default.

    >>> as_written(FiniteDifference(order=4)), as_written(FiniteDifference(order=2))
    ('FiniteDifference(order=4)', 'FiniteDifference()')
    """
    fields = dataclasses.fields(mode) if isinstance(mode, Mode) else ()
    pairs = [(each, getattr(mode, each.name)) for each in fields if each.repr]
    given = [(each.name, value) for each, value in pairs if value is not each.default]
    shown = (f"{name}={getattr(value, '__name__', repr(value))}" for name, value in given)
    return f"{type(mode).__name__}({', '.join(shown)})"


def described(error: Exception) -> str:
    """The type, the message and the notes of an exception."""
    name = type(error).__name__
    # JAX puts a line of dashes before a note on its traceback, which is not shown.
    notes = [note for note in getattr(error, "__notes__", ()) if not note.startswith("---")]
    return "\n".join([f"{name}: {error}" if str(error) else name, *notes])


# --- How far a gradient is from the reference ---


def default_tolerance(*dtypes: Any) -> float:
    """The cube root of the machine epsilon of the least precise dtype: 5e-3 in float32.

    That is a third of the digits. A right gradient loses some where terms cancel, and differences
    in that precision lose about as many. A wrong one has seldom a digit right.
    """
    return math.cbrt(max(float(jnp.finfo(dtype).eps) for dtype in dtypes))


def in_double(array: Any) -> np.ndarray:
    return np.asarray(array, np.complex128 if jnp.iscomplexobj(array) else np.float64)


def _largest(array: np.ndarray) -> float:
    """The largest absolute value; zero if there is none."""
    return float(np.max(np.abs(array), initial=0.0))
