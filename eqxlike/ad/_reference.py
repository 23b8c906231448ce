"""The reference gradient of `ad.compare` in double precision, and errors relative to it."""

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
from .._transforms._derivatives._grad import checked_value, path_of_taken
from .._transforms._jit._arguments import unbind
from .._transforms._signatures import check_callable, value_and_aux
from ._modes import FiniteDifference, Forward, Mode


@dataclasses.dataclass(frozen=True)
class GradientProblem:
    """A function and its arguments, for gradients with respect to the first argument.

    - `arrays`: the arrays of the first argument with respect to which the function is
      differentiated.
    - `rest`: the first argument without these arrays.
    - `value_dtype`: the dtype of the value.
    - `max_evaluations`: the largest number of times that one gradient may evaluate the function.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    arrays: list[Array]
    rest: Rest
    value_dtype: Any
    max_evaluations: float = math.inf

    def value_and_grad(self, mode: Mode) -> Callable[..., tuple[Array, PyTree]]:
        """Returns `filter_value_and_grad` of the function, with this mode.

        **Raises:** `TimeoutError` if `mode` needs more than `max_evaluations` evaluations. The
        error is raised before the call, because a running program cannot be interrupted.
        """
        size = sum(each.size for each in self.arrays)
        order = mode.order if isinstance(mode, FiniteDifference) else isinstance(mode, Forward)
        if order * size > self.max_evaluations:
            raise TimeoutError(
                f"{order * size:,} evaluations of the function would take too long. Pass a larger "
                "`budget_s` to allow them."
            )
        return filter_value_and_grad(self.function, mode=mode)

    def gradients_in(self, gradient: PyTree) -> list[Any]:
        """The nodes of `gradient` at the positions of `arrays`."""
        return self.rest.take(self.rest.treedef.flatten_up_to(gradient))

    def path_of(self, index: int) -> str:
        """The path of `arrays[index]`."""
        return path_of_taken(self.rest, index)

    def equations(self) -> list[Any]:
        """All equations of the function's jaxpr, including nested jaxprs."""
        return list(equations_in(filter_make_jaxpr(self.function)(*self.args)[0].jaxpr))


def checked_problem(function: Any, args: tuple[Any, ...], has_aux: bool = False) -> GradientProblem:
    """Checks that a function has a gradient at these arguments.

    **Raises:** `TypeError` or `ValueError` if the function has no gradient in any mode, and any
    exception that the function raises when it is traced.
    """
    check_callable(function, "ad.compare")
    if isinstance(function, functools.partial | types.MethodType):
        # As in `filter_jit`, bound arrays become arguments of the compiled program, not constants.
        unbound = unbind(function)
        function = jtu.Partial(unbound.function, *unbound.args, **unbound.kwargs)
    if has_aux:
        function = jtu.Partial(_without_aux, function)
    arrays, rest = split(args[0] if args else None, is_inexact_array)
    if not arrays:
        raise ValueError(
            "`ad.compare` has nothing to differentiate: args[0] has no floating-point or "
            "complex array that is not frozen. (A Python number is static: convert it with "
            "`jnp.asarray`.)"
        )
    name = getattr(function, "__name__", "the function")
    value = filter_eval_shape(lambda *args: checked_value(function(*args), False, name), *args)
    return GradientProblem(function, args, list(map(jnp.asarray, arrays)), rest, value.dtype)


def _without_aux(function: Callable[..., Any], *args: Any) -> Any:
    return value_and_aux(function(*args), True, function)[0]


# --- The reference ---


class LeafError(NamedTuple):
    """The error of the derivatives with respect to one array, relative to the reference.

    - `index`: the index of the array in `GradientProblem.arrays`.
    - `error`: the largest difference from the reference, divided by the reference's largest
      derivative.
    - `certain_error`: `error` after the uncertainty of the reference is subtracted from each
      difference.
    - `tolerance`: the largest `certain_error` of a right gradient.
    """

    index: int
    error: float
    certain_error: float
    tolerance: float


@dataclasses.dataclass(frozen=True)
class Reference:
    """The reference gradient.

    - `gradients`: the gradient with respect to each array of the problem, in double precision.
    - `_problem`: the function and its arguments in their own precision.
    - `_wide`: the function and its arguments in double precision.
    """

    gradients: list[np.ndarray]
    _mode: Mode
    _problem: GradientProblem
    _wide: GradientProblem

    @functools.cached_property
    def uncertainties(self) -> list[np.ndarray]:
        """The uncertainty of each derivative of the reference. It is computed on first use.

        There are two sources of uncertainty. First, rounding the arguments to their own precision
        changes the gradient. Near a minimum, this change is as large as the gradient itself.
        Second, finite differences are invalid at a kink, or where the function computes in less
        than double precision. There, the differences on the two sides of a point disagree.
        """
        generator, arrays = np.random.default_rng(0), list(map(np.asarray, self._wide.arrays))
        rounded = [
            array * (1 + jnp.finfo(given.dtype).eps * generator.choice([-1.0, 1.0], array.shape))
            for array, given in zip(arrays, self._problem.arrays, strict=True)
        ]
        # Each operation of the function rounds too, so the errors are larger than for rounded
        # arguments. The factor of 16 allows for this.
        rounding = self._differences(self._mode, rounded)
        uncertainties = [np.full(each.shape, 16 * _largest(each)) for each in rounding]
        if not getattr(self._mode, "only_evaluates", False):
            return uncertainties
        with jax.enable_x64(True):
            outputs = [each.aval for found in self._wide.equations() for each in found.outvars]
        epsilon = max(map(_epsilon_of, outputs), default=0.0)
        is_double = epsilon <= np.finfo(np.float64).eps
        step = math.cbrt(max(epsilon, np.finfo(np.float64).eps))
        mode = FiniteDifference(step=None if is_double else step)
        for side in (-2, 2):
            shifted = [each + side * step * np.maximum(1, np.abs(each)) for each in arrays]
            others = self._differences(mode, shifted)
            for total, each in zip(uncertainties, others, strict=True):
                # Rounding errors are random, so each derivative may have an error as large as the
                # median error.
                total += 3 * (each + np.median(each)) if each.size else 0
        return uncertainties

    def errors(
        self,
        gradients: Sequence[np.ndarray],
        tolerance: float | None = None,
        uncertainties: Sequence[np.ndarray] | None = None,
    ) -> list[LeafError]:
        """The errors of a gradient in double precision, one for each array.

        The derivatives with respect to one array may be tiny compared with all other derivatives.
        Such tiny derivatives may be rounding errors of terms that cancel. So the divisor of an
        error is at least `sqrt(eps)` times the largest derivative with respect to any array.

        **Arguments:**

        - `tolerance`: the largest error of a right gradient. `None` chooses it from the dtypes.
        - `uncertainties`: the uncertainty of each derivative of the reference. `None` means zero.
        """
        largest, found = max(map(_largest, self.gradients)), []
        for index, (own, right) in enumerate(zip(gradients, self.gradients, strict=True)):
            dtypes = self._problem.arrays[index].dtype, self._problem.value_dtype
            infos = list(map(jnp.finfo, dtypes))
            floor = math.sqrt(max(float(each.eps) for each in infos)) * largest
            # If the reference is zero, the error is absolute.
            scale = max(_largest(right), floor) or 1.0
            difference = np.abs(own - right)
            # XLA flushes subnormal float32 numbers to zero, but keeps subnormal float16 numbers.
            flushed = float(jnp.finfo(jnp.float32).tiny)
            lost = max(min(float(x.tiny), max(float(x.smallest_subnormal), flushed)) for x in infos)
            difference = np.where(difference <= lost, 0.0, difference)
            certain = difference
            if uncertainties is not None:
                certain = np.maximum(difference - uncertainties[index], 0)
            errors = _largest(difference) / scale, _largest(certain) / scale
            found.append(LeafError(index, *errors, tolerance or default_tolerance(*dtypes)))
        return found

    def _differences(self, mode: Mode, arrays: list[np.ndarray]) -> list[np.ndarray]:
        """The differences between the reference gradient and the gradient at `arrays`.

        The gradient at `arrays` is computed by `mode`. A difference is infinite if this gradient is
        not finite or cannot be computed.
        """
        try:
            others = _gradients_by(mode, self._wide, arrays)
        except Exception:
            # A failure here does not concern the modes that are compared, so do not raise.
            others = [np.full(right.shape, np.inf) for right in self.gradients]
        return [
            np.where(np.isfinite(other), np.abs(other - right), np.inf)
            for other, right in zip(others, self.gradients, strict=True)
        ]


def reference_gradient(problem: GradientProblem, mode: Mode) -> Reference:
    """Computes the reference gradient with `mode`, in double precision.

    **Raises:**

    - `ValueError` if the gradient cannot be computed or is not finite.
    - `ValueError` if the function draws other random numbers in double precision.
    """

    def error(why: str) -> ValueError:
        return ValueError(
            f"`ad.compare`: The reference, {format_mode(mode)}, {why} Pass another `reference`, "
            "such as `ad.Reverse()`, or `reference=None`."
        )

    try:
        wide = _in_float64(problem)
        gradients = _gradients_by(mode, wide, wide.arrays)
        with jax.enable_x64(True):
            bits = _bits_drawn(wide)
    except Exception as cause:
        raise error(
            f"has no gradient in float64: {format_exception(cause)}\n(The arguments are cast to "
            "float64; arrays that a plain function closes over are not.)"
        ) from cause
    if bits != _bits_drawn(problem):
        raise error(
            "is computed in float64, where the function draws other random numbers, because "
            "`jax.random` uses more bits. Draw them outside of the function, or pass their "
            "dtype, such as `jax.random.normal(key, shape, jnp.float32)`."
        )
    for index, gradient in enumerate(gradients):
        if num_bad := int(np.sum(~np.isfinite(gradient))):
            raise error(
                f"is not finite in float64: {num_bad} of the {gradient.size} derivatives with "
                f"respect to {problem.path_of(index)}. Check that the function is smooth and "
                "defined near these arguments."
            )
    return Reference(gradients, mode, problem, wide)


def _in_float64(problem: GradientProblem) -> GradientProblem:
    """A copy of the problem with all floating-point and complex arrays in double precision."""

    def cast(leaf: Any) -> Any:
        if not is_inexact_array(leaf):
            return leaf
        return jnp.asarray(leaf, jnp.complex128 if jnp.iscomplexobj(leaf) else jnp.float64)

    with jax.enable_x64(True):
        wide = checked_problem(*jtu.tree_map(cast, (problem.function, problem.args)))
    return dataclasses.replace(wide, max_evaluations=problem.max_evaluations)


def _gradients_by(mode: Mode, wide: GradientProblem, arrays: Sequence[Any]) -> list[np.ndarray]:
    """Computes the gradients of the function of `wide` at `arrays` with `mode`."""
    with jax.enable_x64(True):
        x = wide.rest.merge(map(jnp.asarray, arrays))
        _, gradient = filter_jit(wide.value_and_grad(mode))(x, *wide.args[1:])
        return list(map(np.asarray, wide.gradients_in(gradient)))


def _bits_drawn(problem: GradientProblem) -> list[int]:
    """The number of bits of each draw of random numbers in the function."""
    found = problem.equations()
    return [each.params["bit_width"] for each in found if each.primitive.name == "random_bits"]


def _epsilon_of(aval: Any) -> float:
    dtype = getattr(aval, "dtype", jnp.dtype(int))
    return float(jnp.finfo(dtype).eps) if jnp.issubdtype(dtype, jnp.inexact) else 0.0


# --- Modes and exceptions as text ---


def format_mode(mode: Any) -> str:
    """A mode as source code, without default arguments.

    >>> format_mode(FiniteDifference(order=4)), format_mode(FiniteDifference(order=2))
    ('FiniteDifference(order=4)', 'FiniteDifference()')
    """
    fields = dataclasses.fields(mode) if isinstance(mode, Mode) else ()
    pairs = [(each, getattr(mode, each.name)) for each in fields if each.repr]
    given = [(each.name, value) for each, value in pairs if value is not each.default]
    shown = (f"{name}={getattr(value, '__name__', repr(value))}" for name, value in given)
    return f"{type(mode).__name__}({', '.join(shown)})"


def format_exception(error: Exception) -> str:
    """The type, the message and the notes of an exception."""
    name = type(error).__name__
    # JAX adds a note about its traceback. This note starts with a line of dashes, and is left out.
    notes = [note for note in getattr(error, "__notes__", ()) if not note.startswith("---")]
    return "\n".join([f"{name}: {error}" if str(error) else name, *notes])


# --- Tolerances and precision ---


def default_tolerance(*dtypes: Any) -> float:
    """The cube root of the machine epsilon, for the least precise dtype: 5e-3 for float32.

    With this tolerance, a third of the digits must be right. A right gradient loses digits where
    terms cancel, and finite differences with this dtype have about this error. A wrong gradient
    rarely has even one right digit.
    """
    return math.cbrt(max(float(jnp.finfo(dtype).eps) for dtype in dtypes))


def to_double(array: Any) -> np.ndarray:
    return np.asarray(array, np.complex128 if jnp.iscomplexobj(array) else np.float64)


def _largest(array: np.ndarray) -> float:
    """The largest absolute value. 0 for an empty array."""
    return float(np.max(np.abs(array), initial=0.0))
