"""The gradient that others are compared with, in double precision."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, Float

from ..._module import field
from ..._programs import equations_in
from ..._pytree import is_inexact_array
from ..._transforms import filter_jit, filter_make_jaxpr
from .._measuring import Pace, freshly_compiled, largest_epsilon
from .._modes import FiniteDifference, Mode
from .._modes._mode import Arrays
from ._subject import Subject, as_written, checked_subject, described


@dataclasses.dataclass(frozen=True)
class Reference:
    """The right gradient, as far as it is known.

    - `name`: the name of the mode that found it.
    - `gradients`: for each array that the subject is differentiated by, in double precision.
    - `_find`: finds those at other arguments, by the program that found these.
    """

    name: str
    gradients: list[np.ndarray]
    _wide: Subject
    _epsilons: list[float]
    _mode: Mode
    _find: Callable[..., list[np.ndarray]]

    @functools.cached_property
    def doubts(self) -> list[np.ndarray]:
        """How far each derivative is uncertain; computed on first use.

        It is so for two reasons. Where the arguments are rounded otherwise, in the precision that
        they were given in, the right gradient is another one; near a minimum that is all of it. And
        differences give no derivative where the function has a kink, or computes in less than
        double precision: there those to the one side differ from those to the other.
        """
        doubts = []
        for apart in self._apart(lambda: self._find(*self._rounded())):
            # Each operation rounds, not the arguments alone.
            doubts.append(np.full(apart.shape, 16 * largest_of(apart)))
        if not getattr(self._mode, "only_evaluates", False):
            return doubts
        of_sides = functools.cache(self._one_sided)
        for place in range(2):
            one_sided = self._apart(lambda place=place: [each[place] for each in of_sides()])
            for doubt, apart in zip(doubts, one_sided, strict=True):
                # Rounding is random: what it does to one derivative it may do to all.
                doubt += 3 * (apart + np.median(apart)) if apart.size else 0
        return doubts

    def _apart(self, find: Callable[[], list[np.ndarray]]) -> list[np.ndarray]:
        """How far another gradient is from this one; infinitely, where it is not known."""
        try:
            others = find()
        except Exception:
            # No mode is to blame for that.
            others = [np.full(right.shape, np.inf) for right in self.gradients]
        return [
            np.where(np.isfinite(other), np.abs(other - right), np.inf)
            for other, right in zip(others, self.gradients, strict=True)
        ]

    def _rounded(self) -> tuple[Any, ...]:
        """The arguments, off by a rounding error."""
        generator = np.random.default_rng(0)
        arrays = [
            np.asarray(array) * (1 + epsilon * generator.choice([-1.0, 1.0], array.shape))
            for array, epsilon in zip(self._wide.arrays, self._epsilons, strict=True)
        ]
        with jax.enable_x64(True):
            return self._wide.rest.merge(map(jnp.asarray, arrays)), *self._wide.args[1:]

    def _one_sided(self) -> list[np.ndarray]:
        """The gradients by differences to the one side and to the other, in rows."""
        wide, step = self._wide, self._step()

        def find(*args: Any) -> Any:
            def of_side(side: Array) -> list[Array]:
                _, gradient = wide.value_and_grad(OneSided(side=side, step=step))(*args)
                return wide.gradients_in(gradient)

            return jax.lax.map(of_side, jnp.array([1.0, -1.0]))

        with jax.enable_x64(True):
            return list(map(np.asarray, filter_jit(find)(*wide.args)))

    def _step(self) -> float | None:
        """A step that is seen in a function that computes in less than double precision."""
        with jax.enable_x64(True):
            program, _, _ = filter_make_jaxpr(self._wide.function)(*self._wide.args)
        epsilon = largest_epsilon(program.jaxpr)
        return math.cbrt(epsilon) if epsilon > np.finfo(np.float64).eps else None


class NoReference(Exception):
    """Raised with the reason, a sentence or more, why there is no reference, and the way out."""

    def __init__(
        self,
        reason: str,
        way_out: str = "another `reference`, such as `ad.Reverse()`, or none, `reference=None`.",
    ) -> None:
        super().__init__(reason)
        self.way_out = way_out


def reference_gradient(subject: Subject, mode: Mode, pace: Pace) -> Reference:
    """The gradient by `mode` in double precision.

    **Raises:** `NoReference` if it is not finite, or there is none, or it would take too long; or
    if the function draws random numbers, which are others in double precision.
    """
    name = as_written(mode)
    try:
        wide = _in_float64(subject)
        find = _compiled(wide, mode, pace)
        gradients = find(*wide.args)
    except NoReference as error:
        raise NoReference(f"The reference, {name}, would take too long: {error}.") from None
    except Exception as error:
        raise NoReference(
            f"The reference, {name}, has no gradient in float64: {described(error)}\n"
            "(The arguments are cast to float64, and what a plain function closes over is not.)"
        ) from error
    with jax.enable_x64(True):
        bits = _bits_drawn(wide)
    if bits != _bits_drawn(subject):
        raise NoReference(
            f"The reference, {name}, is taken in float64, where the function draws other random "
            "numbers: `jax.random` makes them of more bits there.",
            "draw them outside of the function; or name their dtype, as in `jax.random.normal(key, "
            "shape, jnp.float32)`; or take no reference, `reference=None`.",
        )
    for place, gradient in enumerate(gradients):
        if num_bad := int(np.sum(~np.isfinite(gradient))):
            raise NoReference(
                f"The reference, {name}, is not finite in float64: {num_bad} of the "
                f"{gradient.size} derivatives by {subject.path_of(place)}. Is the function smooth "
                "at these arguments, and defined near by?"
            )
    epsilons = [float(jnp.finfo(array.dtype).eps) for array in subject.arrays]
    return Reference(name, gradients, wide, epsilons, mode, find)


def _compiled(wide: Subject, mode: Mode, pace: Pace) -> Callable[..., list[np.ndarray]]:
    """The gradients as a function of arguments of the form of those of `wide`."""
    with jax.enable_x64(True):
        program = freshly_compiled(wide.value_and_grad(mode), wide.args)
    if complaint := pace.complaint(program):
        raise NoReference(complaint)

    def find(*args: Any) -> list[np.ndarray]:
        with jax.enable_x64(True):
            _, gradient = program.run(*args)
            return [np.asarray(each) for each in wide.gradients_in(gradient)]

    return find


def _bits_drawn(subject: Subject) -> list[int]:
    """Of how many bits the random numbers are that the function draws, one draw after another."""
    program, _, _ = filter_make_jaxpr(subject.function)(*subject.args)
    found = equations_in(program.jaxpr)
    return [each.params["bit_width"] for each in found if each.primitive.name == "random_bits"]


def _in_float64(subject: Subject) -> Subject:
    """The subject with all floating-point arrays in double precision."""

    def cast(leaf: Any) -> Any:
        if not is_inexact_array(leaf):
            return leaf
        return jnp.asarray(leaf, jnp.complex128 if jnp.iscomplexobj(leaf) else jnp.float64)

    with jax.enable_x64(True):
        function, args = jtu.tree_map(cast, (subject.function, subject.args))
        return checked_subject(function, args, subject.has_aux, "ad.compare")


# --- One-sided finite differences, which find a kink ---


class OneSided(FiniteDifference):
    """Differences of second order: `(4 f(x + h) - 3 f(x) - f(x + 2h)) / 2h`.

    - `side`: 1 or -1, the sign of `h`.
    """

    side: Float[Array, ""] = field(kw_only=True)

    def _difference(
        self, function: Any, arrays: Arrays, tangents: Arrays, h: Float[Array, ""]
    ) -> Arrays:
        h = self.side * h

        def moved(by: Float[Array, ""]) -> Arrays:
            pairs = zip(arrays, tangents, strict=True)
            return function([a + t * by.astype(jnp.finfo(a.dtype).dtype) for a, t in pairs])

        values = zip(function(arrays), moved(h), moved(2 * h), strict=True)
        return [(4 * b - 3 * a - c) / (2 * h).astype(a.dtype) for a, b, c in values]


# --- How far a gradient is from the reference ---


def default_tolerance(*dtypes: Any) -> float:
    """The cube root of the machine epsilon of the least precise dtype: 5e-3 in float32.

    That is a third of the digits. A right gradient loses some where terms cancel, and differences
    in that precision lose about as many. A wrong one has seldom a digit right.
    """
    return math.cbrt(_epsilon(*dtypes))


@dataclasses.dataclass(frozen=True)
class LeafError:
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

    @property
    def is_ok(self) -> bool:
        return self.beyond_doubt <= self.tolerance


def leaf_errors(
    gradients: Sequence[np.ndarray],
    expected: Sequence[np.ndarray],
    doubts: Sequence[np.ndarray | float],
    dtypes: Sequence[tuple[Any, Any]],
    tolerance: float | None,
) -> list[LeafError]:
    """The errors of a gradient, an item for each array.

    An array whose derivatives are all tiny next to those by other arrays may have nothing but what
    rounding leaves of terms that cancel. So its error is relative to at least the largest of all,
    times the root of the machine epsilon.

    **Arguments:**

    - `gradients`, `expected`: of the mode and of the reference, in double precision.
    - `doubts`: how far each derivative of the reference is uncertain.
    - `dtypes`: of the array and of the value.
    - `tolerance`: the largest error that is right; `None` for that of the dtypes.
    """
    largest = max(map(largest_of, expected))
    found = []
    for place, (own, right, doubt) in enumerate(zip(gradients, expected, doubts, strict=True)):
        floor = math.sqrt(_epsilon(*dtypes[place])) * largest
        # Where all is zero, the error is the difference itself.
        scale = max(largest_of(right), floor) or 1.0
        difference = np.abs(own - right)
        difference = np.where(difference <= _lost(*dtypes[place]), 0.0, difference)
        beyond_doubt = largest_of(np.maximum(difference - doubt, 0)) / scale
        allowed = tolerance or default_tolerance(*dtypes[place])
        found.append(LeafError(place, largest_of(difference) / scale, beyond_doubt, allowed))
    return found


def largest_of(array: np.ndarray) -> float:
    """The largest absolute value; zero if there is none."""
    return float(np.max(np.abs(array), initial=0.0))


def _lost(*dtypes: Any) -> float:
    """What underflows in the least precise dtype: it is rounded to zero, and nothing is wrong."""
    # XLA keeps no subnormal numbers of float32, and those of float16 it does.
    flushed = float(jnp.finfo(jnp.float32).tiny)
    finfos = map(jnp.finfo, dtypes)
    return max(min(float(x.tiny), max(float(x.smallest_subnormal), flushed)) for x in finfos)


def _epsilon(*dtypes: Any) -> float:
    return max(float(jnp.finfo(dtype).eps) for dtype in dtypes)
