"""What a mode of differentiation is, and gradients as rules of JAX."""

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
"""What modes differentiate: from a list of floating-point or complex arrays to `(value, aux)`.

`value` is a real scalar, or where it is said so a list of real arrays. `aux` is a list of arrays
that are not differentiated.
"""

ValueAndGrad = tuple[tuple[Float[Array, ""], Arrays], Arrays]
"""`((value, aux), gradient)`."""


class Mode(Module):
    """A way to differentiate a function. The modes are the classes that inherit from this one.

    A mode of your own needs one method, `value_and_grad`. The others follow from it, and are there
    to be overridden by a mode that has a better way. None of them meets anything but lists of
    arrays: `filter_grad` and the rest take care of what else is in a tree.

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
    """Whether what the mode computes can be mapped with `jax.vmap`."""

    only_evaluates: ClassVar[bool] = False
    """Whether the mode calls the function alone, and asks JAX for no derivative of it."""

    @abc.abstractmethod
    def value_and_grad(
        self, function: OfArrays, arrays: Arrays
    ) -> tuple[tuple[Float[Array, ""], Arrays], Arrays]:
        """The value of a function and its gradient, as of `jax.value_and_grad(has_aux=True)`.

        **Arguments:**

        - `function`: from a list of arrays to `(value, aux)`, with `value` a real scalar.
        - `arrays`: floating-point or complex arrays.

        **Returns:** `((value, aux), gradient)`. `gradient` has an array for each of `arrays`, of
        its shape and dtype; for a complex one `x + iy` that is `df/dx - i df/dy`, as in JAX.
        """

    def vjp(self, function: OfArrays, arrays: Arrays) -> tuple[Arrays, Pullback, Arrays]:
        """As `jax.vjp(has_aux=True)`.

        **Arguments:**

        - `function`: from a list of arrays to `(outputs, aux)`. `outputs` is a list of
          floating-point or complex arrays.
        - `arrays`: floating-point or complex arrays.

        **Returns:** `(outputs, pullback, aux)`. `pullback` takes a cotangent for each of the
        outputs and returns one for each of `arrays`.
        """
        outputs, aux = function(arrays)

        def pull_back(cotangents: Arrays) -> Arrays:
            def dotted(arrays: Arrays) -> tuple[Array, Arrays]:
                outputs, _ = function(arrays)
                return real_dot(outputs, cotangents), []

            return self.value_and_grad(dotted, arrays)[1]

        return outputs, pull_back, aux

    def jvp(self, function: OfArrays, arrays: Arrays, tangents: Arrays) -> Arrays:
        """As the second of `jax.jvp`: the tangents of the outputs.

        **Arguments:**

        - `function`: from a list of arrays to `(outputs, aux)`. `outputs` is a list of
          floating-point or complex arrays.
        - `arrays`: floating-point or complex arrays.
        - `tangents`: arrays of their shapes and dtypes.
        """
        outputs, pullback, _ = self.vjp(function, arrays)
        # A pullback is linear, and its transpose is the JVP.
        structs = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in outputs]
        (directions,) = jax.linear_transpose(pullback, structs)(list(tangents))
        return directions

    def jacobian(self, function: OfArrays, arrays: Arrays) -> tuple[Arrays, Arrays, list[Arrays]]:
        """The outputs of a function and its Jacobian.

        **Arguments:**

        - `function`: from a list of arrays to `(outputs, aux)`. `outputs` is a list of real
          floating-point arrays.
        - `arrays`: floating-point or complex arrays.

        **Returns:** `(outputs, aux, jacobian)`. `jacobian[i][j]` is the derivative of `outputs[i]`
        by `arrays[j]`, of shape `(*outputs[i].shape, *arrays[j].shape)`.
        """
        outputs, pullback, aux = self.vjp(function, arrays)
        if not outputs:
            return outputs, aux, []
        *starts, size = itertools.accumulate(math.prod(each.shape) for each in outputs)
        # A cotangent for each number among the outputs: 1 there, and 0 elsewhere.
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
    """The real part of the product, without a conjugate: what a pullback differentiates."""
    products = to_widest(
        jnp.sum(jnp.real(output * cotangent))
        for output, cotangent in zip(outputs, cotangents, strict=True)
    )
    return sum(products[1:], products[0])


def to_widest(arrays: Iterable[Array]) -> Arrays:
    """The arrays in the widest of their dtypes."""
    arrays = list(arrays)
    dtype = functools.reduce(wider, (each.dtype for each in arrays))
    return [each.astype(dtype) for each in arrays]


# --- Functions of arrays that are differentiated by a mode, whatever mode the caller is in ---


OfList = Callable[[Arrays], Arrays]


def differentiated_by(mode: Mode, function: OfList, name: str | None) -> OfList:
    """`function`, with the derivatives that `mode` finds for it.

    In a pass forward they are those of `mode.jvp`, and in one backward those of `mode.vjp`, in the
    arrays alone that the caller differentiates by.

    **Arguments:**

    - `function`: from a list of arrays to a list of arrays. It closes over no tracer.
    - `name`: its name in messages; `None` if a caller names it.
    """

    @jax.custom_jvp
    @batch_first
    def run(arrays: Arrays) -> Arrays:
        return function(arrays)

    @functools.partial(run.defjvp, symbolic_zeros=True)
    @batch_first
    def _differentiate(primals: Any, tangents: Any) -> tuple[Arrays, list[Any]]:
        arrays, dots = (list(map(_as_array, each)) for (each,) in (primals, tangents))
        is_moving = list(map(has_tangent, dots))
        # A mode that only evaluates may be differentiated in turn by the rule.
        within = run if mode.only_evaluates else function
        is_smooth: list[bool] = []

        def of_moving(arrays: Arrays) -> Callable[[Arrays], tuple[Arrays, Arrays]]:
            def moved(values: Arrays) -> tuple[Arrays, Arrays]:
                left, pairs = iter(values), zip(arrays, is_moving, strict=True)
                inputs = [next(left) if moves else array for array, moves in pairs]
                outputs = list(map(_as_array, within(inputs)))
                is_smooth[:] = map(is_inexact, outputs)
                smooth = [each for each in outputs if is_inexact(each)]
                return smooth, [each for each in outputs if not is_inexact(each)]

            return moved

        moving = list(itertools.compress(arrays, is_moving))
        with advised(mode, name):
            smooth, pullback, others = mode.vjp(of_moving(arrays), moving)
            if not smooth:
                return others, list(map(zero_tangent, others))
            # Whatever the pullback needs becomes a residual, what it closes over too.
            closed = jax.make_jaxpr(pullback)(smooth)

        def forward(residuals: Arrays, directions: Arrays) -> Arrays:
            arrays = residuals[: len(is_moving)]
            moving = list(itertools.compress(arrays, is_moving))
            with advised(mode, name):
                return mode.jvp(of_moving(arrays), moving, directions)

        def transpose(residuals: Arrays, cotangents: Arrays, _: Any) -> Arrays:
            consts = residuals[len(is_moving) :]
            return jaxpr_as_fun(ClosedJaxpr(closed.jaxpr, consts))(*cotangents)

        found = linear_call(
            forward,
            transpose,
            [*arrays, *closed.consts],
            list(itertools.compress(dots, is_moving)),
            like=smooth,
            # So a batch in reverse mode does without `forward`, which a mode may not have.
            is_of_members=True,
        )
        values, directions, rest = iter(smooth), iter(found), iter(others)
        outputs = [next(values if each else rest) for each in is_smooth]
        return outputs, [
            next(directions) if each else zero_tangent(output)
            for each, output in zip(is_smooth, outputs, strict=True)
        ]

    return run


def _as_array(value: Any) -> Any:
    """`value`, which may be a Python number where a user differentiates by one."""
    is_array = hasattr(value, "shape") or isinstance(value, SymbolicZero)
    return value if is_array else jnp.asarray(value)
