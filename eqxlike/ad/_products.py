"""Products with Jacobians and Hessians, without the matrices."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from .._module import Module, field
from .._partition import UNTRACED, Rest, split
from .._pytree import is_array_or_traced_reference, is_inexact_array
from .._transforms import filter_grad
from .._transforms._derivatives._grad import advised
from .._transforms._derivatives._products import Pullback
from .._transforms._derivatives._tangents import full_tangents
from .._transforms._signatures import check_callable, value_and_aux
from ._modes import Reverse

Arrays = list[Array]


def hvp(fun: Callable[..., Any], *, has_aux: bool = False) -> Callable[..., PyTree]:
    """The product of the Hessian of a function with a vector, by forward over reverse mode.

    It costs about two gradients, whatever the number of inputs.

    **Arguments:**

    - `fun`: a function from any arguments to a real floating-point scalar.
    - `has_aux`: whether `fun` returns `(value, aux)`, with `aux` any pytree.

    **Returns:** a function `product(x, vector, *args, **kwargs)`. The second derivatives are those
    of `fun(x, *args, **kwargs)` in the floating-point arrays of `x`. `vector` has the structure of
    `x`: beside each of these arrays an array of that shape and dtype, or `None` for a zero; beside
    everything else `None`. The product has the structure of `x`, with `None` beside everything
    else; with `has_aux` it is `(product, aux)`.

    **Raises:** when called, naming the path: `ValueError` if the structure or a shape of `vector`
    differs, `TypeError` for another dtype; `TypeError` if the value is no real scalar.

    !!! example

        >>> import jax.numpy as jnp
        >>> from eqxlike import ad
        >>> product = ad.hvp(lambda x: x[0] ** 2 * x[1])
        >>> print(product(jnp.array([3.0, 5.0]), jnp.array([1.0, 0.0])))
        [10.  6.]
    """
    check_callable(fun, "ad.hvp")
    # By name, since a mode says more of a value that is no scalar.
    gradient = filter_grad(fun, has_aux=has_aux, mode=Reverse())

    def product(x: PyTree, vector: PyTree, *args: Any, **kwargs: Any) -> PyTree:
        arrays, rest = split(x, is_inexact_array)
        aux_rest: Rest = UNTRACED

        def of_arrays(arrays: Arrays) -> tuple[Arrays, Arrays]:
            nonlocal aux_rest
            output = gradient(rest.merge(arrays), *args, **kwargs)
            found, aux = output if has_aux else (output, None)
            aux_arrays, aux_rest = split(aux, is_array_or_traced_reference)
            return split(found, is_inexact_array)[0], aux_arrays

        found = full_tangents(arrays, rest, vector, "vector", "x")
        if arrays:
            _, products, aux_arrays = jax.jvp(of_arrays, (arrays,), (found,), has_aux=True)
        else:
            products, aux_arrays = of_arrays([])
        result = rest.merge_into(None, products)
        return (result, aux_rest.merge(aux_arrays)) if has_aux else result

    return product


class Pushforward(Module):
    """A function from tangents of the arguments to that of the value, from `ad.jvp_and_vjp`.

    It is a pytree, whose leaves are what the linearisation left.
    """

    _linear: Callable[[Arrays], Arrays]
    _primals: Rest = field(static=True)
    _output: Rest = field(static=True)
    _types: tuple[jax.ShapeDtypeStruct, ...] = field(static=True)

    def __call__(self, *tangents: PyTree) -> PyTree:
        found = full_tangents(self._types, self._primals, tangents, "tangents", "primals")
        return self._output.merge_into(None, self._linear(found))


class _Transposed(Module):
    """The transpose of a linear function of a list, as a tuple, like the pullback of `jax.vjp`."""

    _linear: Callable[[Arrays], Arrays]
    _inputs: tuple[jax.ShapeDtypeStruct, ...] = field(static=True)

    def __call__(self, cotangents: Arrays) -> tuple[Arrays]:
        return jax.linear_transpose(self._linear, list(self._inputs))(cotangents)


def jvp_and_vjp(fun: Callable[..., Any], *primals: PyTree, has_aux: bool = False) -> Any:
    """The value of a function, its Jacobian-vector and its vector-Jacobian product.

    Both come from one linearisation, so the function is evaluated once for both. That is what a
    product with a Gauss-Newton matrix, `J^T J v`, or a Lanczos bidiagonalisation needs.

    **Arguments:**

    - `fun`: a function of any arguments that returns any pytree.
    - `*primals`: its arguments; their floating-point and complex arrays are differentiated.
    - `has_aux`: whether `fun` returns `(value, aux)`, with `aux` any pytree that is not
      differentiated.

    **Returns:** `(value, jvp, vjp)`, or `(value, jvp, vjp, aux)`. `jvp` takes a tangent for each of
    `primals` and returns the tangent of the value. `vjp` takes a cotangent of the value and returns
    the tuple of the gradients. In all of them an array stands beside each floating-point or complex
    array, and `None` for a zero and beside everything else. Both are pytrees, and may be passed
    into and out of transformations.

    **Raises:** `TypeError` if `has_aux` is true and `fun` returns no pair. `jvp` and `vjp` raise,
    naming the path: `ValueError` if the structure or a shape differs, `TypeError` for another
    dtype.

    !!! example

        >>> import jax.numpy as jnp
        >>> from eqxlike import ad
        >>> value, jvp, vjp = ad.jvp_and_vjp(jnp.sin, jnp.zeros(2))
        >>> print(*vjp(jvp(jnp.array([1.0, 2.0]))))
        [1. 2.]
    """
    check_callable(fun, "ad.jvp_and_vjp")
    arrays, rest = split(primals, is_inexact_array)
    arrays = list(map(jnp.asarray, arrays))
    value_rest: Rest = UNTRACED
    aux_rest: Rest = UNTRACED
    aux_arrays: Arrays = []

    def of_arrays(arrays: Arrays) -> tuple[Arrays, Arrays]:
        nonlocal value_rest, aux_rest
        value, aux = value_and_aux(fun(*rest.merge(arrays)), has_aux, fun)
        outputs, value_rest = split(value, is_inexact_array)
        aux_arrays, aux_rest = split(aux, is_array_or_traced_reference)
        return outputs, aux_arrays

    name = getattr(fun, "__name__", "the function")
    with advised(None, name):
        outputs, linear, aux_arrays = jax.linearize(of_arrays, arrays, has_aux=True)
    input_types, output_types = _structs(arrays), _structs(outputs)
    jvp = Pushforward(linear, rest, value_rest, input_types)
    vjp = Pullback(_Transposed(linear, input_types), rest, value_rest, output_types)
    value = value_rest.merge(outputs)
    return (value, jvp, vjp, aux_rest.merge(aux_arrays)) if has_aux else (value, jvp, vjp)


def _structs(arrays: Sequence[Array]) -> tuple[jax.ShapeDtypeStruct, ...]:
    return tuple(jax.ShapeDtypeStruct(each.shape, each.dtype) for each in arrays)
