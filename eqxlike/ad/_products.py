"""Jacobians, Hessians, products with them, Taylor series, and gradients in reused memory."""

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.experimental.jet import jet
from jax.extend.core import JaxprEqn, jaxpr_as_fun
from jaxtyping import Array, PyTree

from .._check_numbers import whole_number
from .._module import Module, field
from .._partition import UNTRACED, Rest, split
from .._programs import equations_in
from .._pytree import (
    describe_node,
    find_difference,
    is_array_or_traced_reference,
    is_inexact_array,
    same_shape_and_dtype,
)
from .._transforms import filter_grad, filter_jit, filter_value_and_grad
from .._transforms._derivatives._grad import JacobianFunction, advised, check_mode
from .._transforms._derivatives._products import Pullback, full_tangents
from .._transforms._signatures import Params, check_callable, value_and_aux
from ._modes import Auto, Forward, Mode, Reverse

Arrays = list[Array]

_AUTO: Mode = Auto()
_FORWARD_OVER_REVERSE: tuple[Mode, Mode] = (Forward(), Reverse())


def jacobian(
    fun: Callable[Params, Any],
    mode: Mode = _AUTO,
    *,
    has_aux: bool = False,
    holomorphic: bool = False,
) -> Callable[Params, PyTree]:
    """Makes a function that computes the Jacobian of `fun` for its first argument.

    **Arguments:**

    - `fun`: a function of any arguments that returns any pytree. All arrays in this pytree must be
      floating-point or complex. The Jacobian is taken with respect to the floating-point and
      complex arrays of the first argument.
    - `mode`: the mode of differentiation. `Auto()` chooses a mode from the numbers of inputs and
      outputs.
    - `has_aux`: whether `fun` returns `(value, aux)`, with `aux` any pytree that is not
      differentiated.
    - `holomorphic`: whether `fun` is a holomorphic function of complex arrays. If `False`, the
      value must be real, and the derivative with respect to a complex array `x + iy` is
      `d/dx - i d/dy`, as in `filter_grad`.

    **Returns:** a function of the same arguments that returns the Jacobian, or `(jacobian, aux)`.
    The Jacobian has the structure of the value of `fun`. In place of each array of the value, the
    Jacobian has a tree with the structure of the first argument. In this tree, each floating-point
    or complex array of the argument is replaced by an array of derivatives. For an output of shape
    `(*out)` and an input of shape `(*in)`, the derivatives have shape `(*out, *in)`. All other
    leaves of the value and of the argument are replaced by `None`.

    **Raises:**

    - `TypeError` if `mode` is not a mode.
    - `TypeError`, when called, if the first argument is passed by keyword.
    - `TypeError`, when called, if an array of the value cannot be differentiated.

    !!! example

        >>> import eqxlike as eqx, jax.numpy as jnp
        >>> from eqxlike import ad
        >>> def scale(parameters, x):
        ...     return parameters["scale"] ** parameters["power"] * x
        >>> parameters = {"scale": jnp.array(3.0), "power": 2}
        >>> print(ad.jacobian(scale, ad.Forward())(parameters, jnp.ones(2))["scale"])
        [6. 6.]
    """
    check_callable(fun, "ad.jacobian")
    check_mode(mode, "ad.jacobian")
    by_mode = _JacobianBy(mode, holomorphic, getattr(fun, "__name__", "the function"))
    return JacobianFunction(fun, has_aux, "ad.jacobian", (by_mode,))


def hessian(
    fun: Callable[Params, Any],
    mode: Mode | tuple[Mode, Mode] = _FORWARD_OVER_REVERSE,
    *,
    has_aux: bool = False,
) -> Callable[Params, PyTree]:
    """Makes a function that computes the Hessian of `fun` for its first argument.

    **Arguments:**

    - `fun`, `has_aux`: as for `ad.jacobian`.
    - `mode`: a pair `(outer, inner)`, or one mode for both. `(Forward(), Reverse())` applies
      forward mode to reverse mode, and is usually the fastest pair. Use another pair if the
      function does not support this pair.

    **Returns:** a function of the same arguments that returns the Hessian, or `(hessian, aux)`. The
    Hessian is the Jacobian of the Jacobian: in place of each array of the Jacobian, it has a tree
    with the structure of the first argument. The arrays of this tree have shape `(*out, *in, *in)`.

    **Raises:** the errors of `ad.jacobian`, and `ValueError` if `mode` is a tuple that is not a
    pair.

    !!! example

        >>> import jax, jax.numpy as jnp
        >>> from eqxlike import ad
        >>> hessian = ad.hessian(lambda x: x[0] ** 2 * x[1], (ad.Reverse(), ad.Forward()))
        >>> print(jax.jit(hessian)(jnp.array([3.0, 5.0])))
        [[10.  6.]
         [ 6.  0.]]
    """
    check_callable(fun, "ad.hessian")
    modes = mode if isinstance(mode, tuple) else (mode, mode)
    if len(modes) != 2:
        raise ValueError(
            "`ad.hessian` expects one mode or a pair of modes, (outer, inner); got a tuple of "
            f"length {len(modes)}."
        )
    for each in modes:
        check_mode(each, "ad.hessian")
    name = getattr(fun, "__name__", "the function")
    outer, inner = (_JacobianBy(each, False, name) for each in modes)
    return JacobianFunction(fun, has_aux, "ad.hessian", (inner, outer))


class _JacobianBy(Module):
    """Like `jax.jacfwd`, but with a given mode, for functions of lists of arrays."""

    mode: Mode
    is_holomorphic: bool = field(static=True)
    name: str = field(static=True)

    def __call__(self, function: Callable[[Arrays], Any], has_aux: bool) -> Callable[[Arrays], Any]:
        assert has_aux

        def jacobian_of_arrays(arrays: Arrays) -> tuple[PyTree, Arrays]:
            arrays = list(map(jnp.asarray, arrays))
            kinds: list[bool] = []
            treedef: Any = None

            def of_real_outputs(arrays: Arrays) -> tuple[Arrays, Arrays]:
                nonlocal kinds, treedef
                outputs, aux = function(arrays)
                leaves, treedef = jtu.tree_flatten(outputs)
                kinds = [self._is_complex(leaf, arrays) for leaf in leaves]
                parts = []
                for leaf, is_complex in zip(leaves, kinds, strict=True):
                    parts.append(jnp.real(leaf))
                    if is_complex and not self.is_holomorphic:
                        parts.append(jnp.imag(leaf))
                return parts, aux

            with advised(self.mode, self.name):
                _, aux, rows = self.mode.jacobian(of_real_outputs, arrays)
            next_row = iter(rows)
            found = []
            for is_complex in kinds:
                row = next(next_row)
                if is_complex and not self.is_holomorphic:
                    pairs = zip(row, next(next_row), strict=True)
                    row = [jax.lax.complex(real, imag) for real, imag in pairs]
                found.append(row)
            return jtu.tree_unflatten(treedef, found), aux

        return jacobian_of_arrays

    def _is_complex(self, output: Any, arrays: Arrays) -> bool:
        """Returns True if `output` is complex. Raises `TypeError` if it has no derivative."""
        dtype = jnp.result_type(output)
        is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
        if not jnp.issubdtype(dtype, jnp.inexact):
            why = (
                "an integer or boolean has no derivative: make it part of `aux` with `has_aux=True`"
            )
        elif self.is_holomorphic and not (is_complex and all(map(jnp.iscomplexobj, arrays))):
            why = "with `holomorphic=True` all differentiated arrays and the value must be complex"
        elif is_complex and not self.is_holomorphic and any(map(jnp.iscomplexobj, arrays)):
            why = (
                "the derivative of a complex value with respect to a complex array exists only for "
                "holomorphic functions: pass `holomorphic=True`, or return the real and the "
                "imaginary part"
            )
        else:
            return is_complex
        raise TypeError(
            f"{self.name} returns {describe_node(jnp.asarray(output))}, which cannot be "
            f"differentiated: {why}."
        )


# --- Products with Hessians and Jacobians ---


def hvp(fun: Callable[..., Any], *, has_aux: bool = False) -> Callable[..., PyTree]:
    """Makes a function that multiplies the Hessian of `fun` by a vector.

    The product applies forward mode to reverse mode. It costs about as much as two gradients, for
    any number of inputs.

    **Arguments:**

    - `fun`: a function of any arguments that returns a real floating-point scalar.
    - `has_aux`: whether `fun` returns `(value, aux)`, with `aux` any pytree.

    **Returns:** a function `product(x, vector, *args, **kwargs)`. It multiplies the Hessian of
    `fun(x, *args, **kwargs)`, with respect to the floating-point and complex arrays of `x`, by
    `vector`. `vector` has the structure of `x`. In place of each floating-point or complex array,
    `vector` has an array of the same shape and dtype, or `None` for zeros. All other leaves are
    `None`. The product has the same structure. With `has_aux=True`, the function returns
    `(product, aux)`.

    **Raises:** when called:

    - `ValueError`, with the path, if `vector` differs from `x` in structure or shape.
    - `TypeError`, with the path, if `vector` differs from `x` in dtype.
    - `TypeError` if the value of `fun` is not a real scalar.

    !!! example

        >>> import jax.numpy as jnp
        >>> from eqxlike import ad
        >>> product = ad.hvp(lambda x: x[0] ** 2 * x[1])
        >>> print(product(jnp.array([3.0, 5.0]), jnp.array([1.0, 0.0])))
        [10.  6.]
    """
    check_callable(fun, "ad.hvp")
    # With an explicit mode, a value that is not a scalar gives a clearer error.
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
        _, products, aux_arrays = jax.jvp(of_arrays, (arrays,), (found,), has_aux=True)
        result = rest.merge_into(None, products)
        return (result, aux_rest.merge(aux_arrays)) if has_aux else result

    return product


class Pushforward(Module):
    """The Jacobian-vector product that `ad.jvp_and_vjp` returns.

    It is a pytree. Its leaves are the residuals of the linearisation.
    """

    _linear: Callable[[Arrays], Arrays]
    _primals: Rest = field(static=True)
    _output: Rest = field(static=True)
    _types: tuple[jax.ShapeDtypeStruct, ...] = field(static=True)

    def __call__(self, *tangents: PyTree) -> PyTree:
        found = full_tangents(self._types, self._primals, tangents, "tangents", "primals")
        return self._output.merge_into(None, self._linear(found))


class _Transposed(Module):
    """The transpose of a linear function of a list. It returns a tuple, like a JAX pullback."""

    _linear: Callable[[Arrays], Arrays]
    _inputs: tuple[jax.ShapeDtypeStruct, ...] = field(static=True)

    def __call__(self, cotangents: Arrays) -> tuple[Arrays]:
        return jax.linear_transpose(self._linear, list(self._inputs))(cotangents)


def jvp_and_vjp(fun: Callable[..., Any], *primals: PyTree, has_aux: bool = False) -> Any:
    """Computes a value, and makes functions for Jacobian-vector and vector-Jacobian products.

    Both products use one linearisation, so `fun` is evaluated only once. Use them for products with
    a Gauss-Newton matrix, `J^T J v`, or for a Lanczos bidiagonalisation.

    **Arguments:**

    - `fun`: a function of any arguments that returns any pytree.
    - `*primals`: the arguments of `fun`. `fun` is differentiated with respect to the floating-point
      and complex arrays in `primals`.
    - `has_aux`: whether `fun` returns `(value, aux)`, with `aux` any pytree that is not
      differentiated.

    **Returns:** `(value, jvp, vjp)`, or `(value, jvp, vjp, aux)`. `jvp` takes one tangent for each
    of `primals`, and returns the tangent of the value. `vjp` takes a cotangent of the value, and
    returns a tuple with one cotangent for each of `primals`. In place of each floating-point or
    complex array, a tangent or cotangent has an array, or `None` for zeros. All other leaves are
    `None`. `jvp` and `vjp` are pytrees, so they can be arguments or outputs of transformed
    functions.

    **Raises:**

    - `TypeError` if `has_aux` is true and `fun` does not return a pair.
    - `ValueError`, with the path, when `jvp` or `vjp` gets an argument of the wrong structure or
      shape.
    - `TypeError`, with the path, when `jvp` or `vjp` gets an argument of the wrong dtype.

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


# --- Derivatives of higher order along one direction ---


def taylor(fun: Callable[..., Any], order: int, *, has_aux: bool = False) -> Callable[..., Any]:
    """Makes a function for the directional derivatives of `fun` up to a given order.

    Let `x(t) = x + t v`. The directional derivatives along `v` are the derivatives of `fun(x(t))`
    with respect to `t`, at `t = 0`. If the derivative of order `k` is divided by `k!`, it is a
    coefficient of the Taylor series of `fun(x(t))`. `jax.experimental.jet` computes all derivatives
    in one pass. The cost grows with the square of the order (Bettencourt et al., 2019). If `jet`
    has no rule for an operation, nested Jacobian-vector products are used instead. Their cost
    doubles with each order.

    **Arguments:**

    - `fun`: a function of any arguments that returns any pytree.
    - `order`: the highest order, at least 1.
    - `has_aux`: whether `fun` returns `(value, aux)`, with `aux` any pytree that is not
      differentiated.

    **Returns:** a function `derivatives(x, direction, *args, **kwargs)`. `direction` has the
    structure of `x`. In place of each floating-point or complex array, `direction` has an array of
    the same shape and dtype, or `None` for zeros. All other leaves are `None`. The function returns
    a list of length `order + 1`: the value, and the derivatives of order 1, 2, and so on. A
    derivative has the structure of the value, with `None` in place of leaves that are not
    floating-point or complex arrays. With `has_aux=True`, the function returns a pair: this list,
    and `aux`.

    **Raises:**

    - `ValueError` if `order` is not a positive integer.
    - `ValueError`, with the path, when called, if `direction` differs from `x` in structure or
      shape.
    - `TypeError`, with the path, when called, if `direction` differs from `x` in dtype.

    !!! example

        >>> import jax.numpy as jnp
        >>> from eqxlike import ad
        >>> value, *derivatives = ad.taylor(lambda x: x**3, 3)(jnp.array(1.0), jnp.array(2.0))
        >>> print([round(float(each)) for each in derivatives])
        [6, 24, 48]
    """
    check_callable(fun, "ad.taylor")
    order = whole_number(order, "ad.taylor: order")

    def derivatives(x: PyTree, direction: PyTree, *args: Any, **kwargs: Any) -> Any:
        arrays, rest = split(x, is_inexact_array)
        arrays = list(map(jnp.asarray, arrays))
        tangents = full_tangents(arrays, rest, direction, "direction", "x")
        value, aux = value_and_aux(fun(x, *args, **kwargs), has_aux, fun)
        value_rest: Rest = UNTRACED

        def of_arrays(*arrays: Array) -> Arrays:
            nonlocal value_rest
            output = fun(rest.merge(arrays), *args, **kwargs)
            outputs, value_rest = split(value_and_aux(output, has_aux, fun)[0], is_inexact_array)
            return list(map(jnp.asarray, outputs))

        series = _by_jet(of_arrays, arrays, tangents, order)
        if series is None:
            series = _by_nesting(of_arrays, arrays, tangents, order)
        found = [value, *(value_rest.merge_into(None, each) for each in series)]
        return (found, aux) if has_aux else found

    return derivatives


Series = list[Arrays]  # the value, and the derivatives of order 1, 2, and so on

# The operations whose derivatives `jet` silently computes wrongly (jax 0.10.2 to 0.12.0.1).
_WRONG_BY_JET = {
    "asinh": "infinite for large negative numbers",
    "atan2": "NaN where the second argument is zero",
    "atanh": "NaN outside of (-1, 1)",
    "acosh": "NaN at 1",
    "clamp": "half the derivative at a bound, where JAX has zero",
    "custom_jvp_call": "differentiates the function, not by the rule",
    "custom_vjp_call": "differentiates the function, not by the rule",
    "pow": "NaN where the base is not positive",
    "rem": "rounds down where the operation rounds to zero",
}


def _by_jet(
    function: Callable[..., Arrays], arrays: Arrays, tangents: Arrays, order: int
) -> Series | None:
    """Computes the derivatives with `jet`. Returns `None` if `jet` fails or would be wrong."""
    of_path = [[each] + [jnp.zeros_like(each)] * (order - 1) for each in tangents]
    try:
        closed = jax.make_jaxpr(function)(*arrays)
        if any(map(_is_wrong_by_jet, equations_in(closed.jaxpr))):
            return None
        _, found = jet(jaxpr_as_fun(closed), tuple(arrays), of_path)
    except Exception:
        # `jet` fails with many types of exceptions (jax 0.10.2 to 0.12.0.1): `KeyError` without a
        # rule, `UnexpectedTracerError` at a `jax.custom_jvp`, `TypeError` for complex numbers.
        # An error of the function itself is raised again by the nested products.
        return None
    return [[each[number] for each in found] for number in range(order)]


def _is_wrong_by_jet(equation: JaxprEqn) -> bool:
    if equation.primitive.name == "convert_element_type":
        # The derivative of a cast to integers is zero, but `jet` would cast the derivative too.
        return any(map(_is_inexact, equation.invars)) > any(map(_is_inexact, equation.outvars))
    if equation.primitive.name == "gather":
        # With `jet`, the derivative of an out-of-bounds entry would be the fill value, not zero.
        return equation.params["fill_value"] is not None
    return equation.primitive.name in _WRONG_BY_JET


def _is_inexact(var: Any) -> bool:
    return jnp.issubdtype(var.aval.dtype, jnp.inexact)


def _by_nesting(
    function: Callable[..., Arrays], arrays: Arrays, tangents: Arrays, order: int
) -> Series:
    def along(function: Callable[..., Arrays]) -> Callable[..., Arrays]:
        return lambda *arrays: jax.jvp(function, arrays, tuple(tangents))[1]

    series = []
    for _ in range(order):
        function = along(function)
        series.append(function(*arrays))
    return series


# --- Gradients that are written to the buffers of an earlier gradient ---


def gradient_buffers(x: PyTree) -> PyTree:
    """Makes the buffers for the first call of `value_and_grad_into`: zeros like the gradient.

    **Returns:** a tree with the structure of `x`. It has zeros in place of each floating-point or
    complex array, and `None` in place of frozen arrays and all other leaves.

    !!! example

        >>> import jax.numpy as jnp
        >>> from eqxlike import ad
        >>> print(ad.gradient_buffers({"scale": jnp.array([3.0]), "power": 2}))
        {'power': None, 'scale': Array([0.], dtype=float32)}
    """
    arrays, rest = split(x, is_inexact_array)
    return rest.merge_into(None, [jnp.zeros(each.shape, each.dtype) for each in arrays])


def value_and_grad_into(
    fun: Callable[..., Any],
    *,
    has_aux: bool = False,
    mode: Mode | None = None,
    donate: str | Iterable[str] = (),
) -> Callable[..., Any]:
    """A compiled `filter_value_and_grad` that reuses the memory of an earlier gradient.

    Use this function if a Python loop calls a compiled gradient function, and reads the gradient
    after each call. Examples are an optimiser in NumPy, a sampler, or a sum of the gradients of
    several batches. If a whole training step is compiled, use `filter_jit` instead, and donate the
    model and the optimiser state.

    **Arguments:**

    - `fun`: a function of any arguments that returns a real floating-point scalar.
    - `has_aux`: whether `fun` returns `(value, aux)`, with `aux` any pytree.
    - `mode`: the mode of differentiation, from `eqxlike.ad`. `None` selects JAX's reverse mode.
    - `donate`: names of parameters of `fun` whose buffers are donated too.

    **Returns:** a function `into(buffers, *args, **kwargs)` that returns
    `filter_value_and_grad(fun)(*args, **kwargs)`. `buffers` is the gradient that an earlier call
    returned, or `ad.gradient_buffers` of the first argument. The call donates `buffers`, so do not
    use it afterwards. The number of reused bytes is
    `into.lower(...).compile().memory_analysis().alias_size_in_bytes`.

    **Raises:** `ValueError` if `donate` names a parameter that `fun` does not have. When called,
    `ValueError` if `buffers` differs from the gradient in structure, shape or dtype; the message
    names the path.

    !!! example

        >>> import jax.numpy as jnp
        >>> from eqxlike import ad
        >>> into = ad.value_and_grad_into(lambda x: jnp.sum(x**2))
        >>> x = jnp.arange(3.0)
        >>> gradient = ad.gradient_buffers(x)
        >>> for _ in range(10):
        ...     value, gradient = into(gradient, x)
        ...     x = x - 0.1 * gradient
        >>> print(bool(jnp.allclose(gradient, 2 * 0.8**9 * jnp.arange(3.0))))
        True
    """
    check_callable(fun, "ad.value_and_grad_into")
    if mode is not None:
        check_mode(mode, "ad.value_and_grad_into")
    # With an explicit mode, a value that is not a scalar gives a clearer error.
    mode = Reverse() if mode is None else mode
    value_and_grad = filter_value_and_grad(fun, has_aux=has_aux, mode=mode)

    @functools.wraps(fun, updated=())
    def into(buffers: PyTree, /, *args: Any, **kwargs: Any) -> Any:
        value, gradient = value_and_grad(*args, **kwargs)
        if difference := find_difference(gradient, buffers, same_shape_and_dtype):
            raise ValueError(
                "The buffers must have the structure, shapes and dtypes of the gradient, such as "
                "`ad.gradient_buffers` of the first argument: "
                f"{difference.explain('gradient', 'buffers')}."
            )
        return value, gradient

    first = inspect.Parameter("buffers", inspect.Parameter.POSITIONAL_ONLY)
    # `Signature` raises an error if the function has its own parameter `buffers`.
    parameters = [first, *inspect.signature(fun).parameters.values()]
    into.__signature__ = inspect.Signature(parameters)  # pyright: ignore
    names = (donate,) if isinstance(donate, str) else tuple(donate)
    # By default, JAX drops unused arguments, so their buffers would not be reused.
    return filter_jit(into, donate=("buffers", *names), keep_unused=True)
