"""The gradient that others are compared with, in double precision."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from ..._pytree import is_inexact_array
from ..._transforms import filter_jit
from .._modes import Mode
from ._accuracy import largest_of
from ._named_modes import as_written
from ._one_sided import OneSided
from ._subject import Subject, checked_subject


@dataclasses.dataclass(frozen=True)
class Reference:
    """The right gradient, as far as it is known.

    - `name`: the name of the mode that found it.
    - `gradients`: for each array that the subject is differentiated by, in double precision.
    """

    name: str
    gradients: list[np.ndarray]
    _subject: Subject
    _mode: Mode

    @functools.cached_property
    def doubts(self) -> list[np.ndarray]:
        """How far each derivative is uncertain; computed on first use.

        It may be so for two reasons. Where the arguments are rounded differently, in the precision
        that they have, the right gradient is another one; at a minimum nothing else is left of it.
        And differences tell no derivative where the function has a kink, or is rounded itself:
        there those to the one side differ from those to the other.
        """
        moved = gradients_in_float64(_moved(self._subject), self._mode)
        doubts = [
            # Each operation rounds, not the arguments alone.
            np.full(right.shape, 16 * largest_of(other - right))
            for other, right in zip(moved, self.gradients, strict=True)
        ]
        if not getattr(self._mode, "only_evaluates", False):
            return doubts
        for side in (1, -1):
            others = gradients_in_float64(self._subject, OneSided(side=side))
            for doubt, other, right in zip(doubts, others, self.gradients, strict=True):
                apart = np.abs(other - right)
                # Outside of the domain of the function nobody knows.
                apart = np.where(np.isfinite(apart), apart, np.inf)
                # Rounding is random: what it does to one derivative it may do to all.
                doubt += 3 * (apart + np.median(apart)) if apart.size else 0
        return doubts


def reference_gradient(subject: Subject, mode: Mode) -> Reference:
    """The gradient by `mode` in double precision.

    **Raises:** `ValueError` if it is not finite, or there is none.
    """
    name = as_written(mode)
    try:
        gradients = gradients_in_float64(subject, mode)
    except Exception as error:
        raise ValueError(
            f"`ad.compare`: the reference, {name}, has no gradient in float64: "
            f"{type(error).__name__}: {error} The arguments are cast to float64, and what the "
            "function closes over is not. Way out: a function that computes in the precision of "
            "its arguments, another `reference`, or `reference=None`, which compares with none."
        ) from error
    for place, gradient in enumerate(gradients):
        if num_bad := int(np.sum(~np.isfinite(gradient))):
            raise ValueError(
                f"`ad.compare`: the reference, {name}, is not finite in float64: {num_bad} of the "
                f"{gradient.size} derivatives by {subject.path_of(place)}. Way out: arguments "
                "where the function is smooth, another `reference`, or `reference=None`, which "
                "compares with none."
            )
    return Reference(name, gradients, subject, mode)


def gradients_in_float64(subject: Subject, mode: Mode) -> list[np.ndarray]:
    """The gradient by `mode`, with all floating-point arrays in double precision."""
    with jax.enable_x64(True):
        function, args = _in_float64((subject.function, subject.args))
        wide = checked_subject(function, args, subject.has_aux, "ad.compare")
        _, gradient = filter_jit(wide.value_and_grad(mode))(*args)
        return [np.asarray(each) for each in wide.gradients_in(gradient)]


def _in_float64(tree: PyTree) -> PyTree:
    def cast(leaf: Any) -> Any:
        if not is_inexact_array(leaf):
            return leaf
        return jnp.asarray(leaf, jnp.complex128 if jnp.iscomplexobj(leaf) else jnp.float64)

    return jtu.tree_map(cast, tree)


def _moved(subject: Subject) -> Subject:
    """The subject in double precision, with arguments that are off by a rounding error."""
    generator = np.random.default_rng(0)
    with jax.enable_x64(True):
        arrays = []
        for array in subject.arrays:
            signs = generator.choice([-1.0, 1.0], array.shape)
            arrays.append(_in_float64(array) * (1 + signs * float(jnp.finfo(array.dtype).eps)))
    args = (subject.rest.merge(arrays), *subject.args[1:])
    return dataclasses.replace(subject, args=args)
