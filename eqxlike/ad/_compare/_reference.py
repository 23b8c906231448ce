"""The gradient that others are compared with, in double precision."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from ..._pytree import is_inexact_array
from ..._transforms import filter_jit
from .._modes import Mode
from ._named_modes import as_written
from ._subject import Subject, subject


@dataclasses.dataclass(frozen=True)
class Reference:
    """The right gradient, as far as it is known.

    - `name`: the name of the mode that it was found by.
    - `gradients`: for each array that the subject is differentiated by, in double precision.
    """

    name: str
    gradients: list[np.ndarray]


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
        if not np.all(np.isfinite(gradient)):
            bad = np.sum(~np.isfinite(gradient))
            raise ValueError(
                f"`ad.compare`: the reference, {name}, is not finite in float64: {bad} of the "
                f"{gradient.size} derivatives by {subject.path_of(place)}. Way out: arguments "
                "where the function is smooth, another `reference`, or `reference=None`, which "
                "compares with none."
            )
    return Reference(name, gradients)


def gradients_in_float64(given: Subject, mode: Mode) -> list[np.ndarray]:
    """The gradient by `mode`, with all floating-point arrays in double precision."""
    with jax.enable_x64(True):
        function, args = _in_float64((given.function, given.args))
        wide = subject(function, args, given.has_aux, "ad.compare")
        _, gradient = filter_jit(wide.value_and_grad(mode))(*args)
        return [np.asarray(each) for each in wide.rest.take(jtu.tree_leaves(gradient, is_leaf=_is_none))]


def _is_none(leaf: Any) -> bool:
    return leaf is None


def _in_float64(tree: PyTree) -> PyTree:
    def cast(leaf: Any) -> Any:
        if not is_inexact_array(leaf):
            return leaf
        return jnp.asarray(leaf, jnp.complex128 if jnp.iscomplexobj(leaf) else jnp.float64)

    return jtu.tree_map(cast, tree)
