"""The base class of modes, and functions that are always differentiated with a given mode."""

import abc
import functools
import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jaxtyping import Array, Float

from ..._dtypes import wider
from ..._module import Module
from ..._transforms._derivatives._grad import advised
from ..._transforms._derivatives._linear_call import (
    batch_first,
    has_tangent,
    is_inexact,
    linear_call,
    zero_tangent,
)

Arrays = list[Array]
Pullback = Callable[[Arrays], Arrays]
OfArrays = Callable[[Arrays], tuple[Any, Arrays]]
"""A function that a mode differentiates: takes a list of arrays, returns `(value, aux)`.

In `value_and_grad`, `value` is a real scalar. In all other methods, it is a list of arrays. `aux`
is a list of arrays that are not differentiated.
"""

ValueAndGrad = tuple[tuple[Float[Array, ""], Arrays], Arrays]
"""`((value, aux), gradient)`."""


class Mode(Module):
    """Abstract base class of the modes of differentiation.

    To write a mode, implement `value_and_grad`. The other methods have default implementations that
    call `value_and_grad`. Override a method if the mode has a faster implementation. All methods
    get lists of arrays, because `filter_grad` and other transformations handle pytrees and static
    leaves.

    !!! example

        >>> import eqxlike as eqx, jax.numpy as jnp
        >>> from eqxlike import ad
        >>> class Clipped(ad.Mode):
        ...     limit: float = eqx.field(static=True)
        ...     def value_and_grad(self, function, arrays):
        ...         value_and_aux, gradient = ad.Reverse().value_and_grad(function, arrays)
        ...         return value_and_aux, [each.clip(-self.limit, self.limit) for each in gradient]
        >>> print(eqx.filter_grad(lambda x: x**2, mode=Clipped(1.0))(jnp.array(3.0)))
        1.0
    """

    has_batching: ClassVar[bool] = True
    """Whether the derivatives of the mode can be batched with `jax.vmap`."""

    only_evaluates: ClassVar[bool] = False
    """Whether the mode only evaluates the function, and never differentiates it with JAX."""

    @abc.abstractmethod
    def value_and_grad(
        self, function: OfArrays, arrays: Arrays
    ) -> tuple[tuple[Float[Array, ""], Arrays], Arrays]:
        """Computes the value and gradient of a function, like `jax.value_and_grad(has_aux=True)`.

        **Arguments:**

        - `function`: function that takes a list of arrays and returns `(value, aux)`. `value` is a
          real scalar.
        - `arrays`: floating-point or complex arrays.

        **Returns:** `((value, aux), gradient)`. `gradient` is a list with one array for each of
        `arrays`, of the same shape and dtype. The gradient with respect to a complex array `x + iy`
        is `df/dx - i df/dy`, as in JAX.
        """

    def vjp(self, function: OfArrays, arrays: Arrays) -> tuple[Arrays, Pullback, Arrays]:
        """Computes the outputs of a function and its pullback, like `jax.vjp(has_aux=True)`.

        **Arguments:**

        - `function`: takes a list of arrays and returns `(outputs, aux)`. `outputs` is a list of
          floating-point or complex arrays.
        - `arrays`: floating-point or complex arrays.

        **Returns:** `(outputs, pullback, aux)`. `pullback` takes a list with a cotangent of each
        output, and returns a list with a cotangent of each of `arrays`.
        """
        outputs, aux = function(arrays)

        def pull_back(cotangents: Arrays) -> Arrays:
            def dotted(arrays: Arrays) -> tuple[Array, Arrays]:
                outputs, _ = function(arrays)
                return real_dot(outputs, cotangents), []

            return self.value_and_grad(dotted, arrays)[1]

        return outputs, pull_back, aux

    def jvp(self, function: OfArrays, arrays: Arrays, tangents: Arrays) -> Arrays:
        """Computes the tangents of the outputs of a function, like `jax.jvp`.

        **Arguments:**

        - `function`: takes a list of arrays and returns `(outputs, aux)`. `outputs` is a list of
          floating-point or complex arrays.
        - `arrays`: floating-point or complex arrays.
        - `tangents`: arrays with the shapes and dtypes of `arrays`.
        """
        outputs, pullback, _ = self.vjp(function, arrays)
        # The transpose of the pullback is the JVP.
        structs = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in outputs]
        (directions,) = jax.linear_transpose(pullback, structs)(list(tangents))
        return directions

    def jacobian(self, function: OfArrays, arrays: Arrays) -> tuple[Arrays, Arrays, list[Arrays]]:
        """Computes the outputs of a function and its Jacobian.

        **Arguments:**

        - `function`: takes a list of arrays and returns `(outputs, aux)`. `outputs` is a list of
          real floating-point arrays.
        - `arrays`: floating-point or complex arrays.

        **Returns:** `(outputs, aux, jacobian)`. `jacobian[i][j]` is the derivative of `outputs[i]`
        with respect to `arrays[j]`, of shape `(*outputs[i].shape, *arrays[j].shape)`.
        """
        outputs, pullback, aux = self.vjp(function, arrays)
        if not outputs:
            return outputs, aux, []
        *starts, size = itertools.accumulate(math.prod(each.shape) for each in outputs)
        # Make a one-hot cotangent for each number in the outputs.
        columns = jnp.split(jnp.eye(size, dtype=bool), starts, axis=1)
        cotangents = [
            column.reshape(size, *output.shape).astype(output.dtype)
            for column, output in zip(columns, outputs, strict=True)
        ]
        if size == 1:
            found = [each[None] for each in pullback([each[0] for each in cotangents])]
        elif self.has_batching:
            found = jax.vmap(pullback)(cotangents)
        else:
            found = jax.lax.map(pullback, cotangents)
        jacobian: list[Arrays] = [[] for _ in outputs]
        for gradient in found:
            parts = jnp.split(gradient, starts)
            for row, output, part in zip(jacobian, outputs, parts, strict=True):
                row.append(part.reshape(*output.shape, *gradient.shape[1:]))
        return outputs, aux, jacobian


def real_dot(outputs: Arrays, cotangents: Arrays) -> Float[Array, ""]:
    """The real part of the dot product, without conjugation. Its gradient is the pullback."""
    products = to_widest(
        jnp.sum(jnp.real(output * cotangent))
        for output, cotangent in zip(outputs, cotangents, strict=True)
    )
    return sum(products[1:], products[0])


def to_widest(arrays: Iterable[Array]) -> Arrays:
    """Casts the arrays to the widest of their dtypes."""
    arrays = list(arrays)
    dtype = functools.reduce(wider, (each.dtype for each in arrays))
    return [each.astype(dtype) for each in arrays]


# --- Functions of arrays that are always differentiated with a given mode ---


OfList = Callable[[Arrays], Arrays]


def differentiated_by(mode: Mode, function: OfList, name: str | None) -> OfList:
    """Gives `function` a custom derivative: `mode.jvp` as its JVP, and `mode.vjp` as its VJP.

    Both methods get only the arrays with respect to which the caller differentiates.

    **Arguments:**

    - `function`: takes a list of arrays and returns a list of arrays. It must not close over a
      tracer.
    - `name`: the name of the function in error messages. `None` if a caller adds the name.
    """

    @jax.custom_jvp
    @batch_first
    def run(arrays: Arrays) -> Arrays:
        return function(arrays)

    @functools.partial(run.defjvp, symbolic_zeros=True)
    @batch_first
    def _differentiate(primals: Any, tangents: Any) -> tuple[Arrays, list[Any]]:
        arrays, dots = (list(map(_as_array, each)) for (each,) in (primals, tangents))
        is_differentiated = list(map(has_tangent, dots))
        # `run` has this derivative rule, and `function` does not. A mode that only evaluates the
        # function gets `run`. Then the rule also applies when the derivative is differentiated.
        within = run if mode.only_evaluates else function
        inexact_flags: list[bool] = []

        def restrict(arrays: Arrays) -> Callable[[Arrays], tuple[Arrays, Arrays]]:
            def restricted(values: Arrays) -> tuple[Arrays, Arrays]:
                left, pairs = iter(values), zip(arrays, is_differentiated, strict=True)
                inputs = [next(left) if moves else array for array, moves in pairs]
                outputs = list(map(_as_array, within(inputs)))
                inexact_flags[:] = map(is_inexact, outputs)
                inexact_outputs = [each for each in outputs if is_inexact(each)]
                return inexact_outputs, [each for each in outputs if not is_inexact(each)]

            return restricted

        selected = list(itertools.compress(arrays, is_differentiated))
        with advised(mode, name):
            inexact_outputs, pullback, others = mode.vjp(restrict(arrays), selected)
            if not inexact_outputs:
                return others, list(map(zero_tangent, others))
            # Trace the pullback, so that all arrays that it closes over become residuals.
            closed = jax.make_jaxpr(pullback)(inexact_outputs)

        def forward(residuals: Arrays, directions: Arrays) -> Arrays:
            arrays = residuals[: len(is_differentiated)]
            selected = list(itertools.compress(arrays, is_differentiated))
            with advised(mode, name):
                return mode.jvp(restrict(arrays), selected, directions)

        def transpose(residuals: Arrays, cotangents: Arrays, _: Any) -> Arrays:
            consts = residuals[len(is_differentiated) :]
            return jaxpr_as_fun(ClosedJaxpr(closed.jaxpr, consts))(*cotangents)

        found = linear_call(
            forward,
            transpose,
            [*arrays, *closed.consts],
            list(itertools.compress(dots, is_differentiated)),
            like=inexact_outputs,
            # With this flag, reverse mode of a batch does not call `forward`. The mode may not
            # support `forward`.
            is_of_members=True,
        )
        values, directions, rest = iter(inexact_outputs), iter(found), iter(others)
        outputs = [next(values if each else rest) for each in inexact_flags]
        return outputs, [
            next(directions) if each else zero_tangent(output)
            for each, output in zip(inexact_flags, outputs, strict=True)
        ]

    return run


def _as_array(value: Any) -> Any:
    """Returns `value` as an array. A user may differentiate with respect to a Python number."""
    is_array = hasattr(value, "shape") or isinstance(value, SymbolicZero)
    return value if is_array else jnp.asarray(value)
