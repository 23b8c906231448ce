"""Jacobians and Hessians with a given mode."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, PyTree

from .._module import Module, field
from .._pytree import describe_node
from .._transforms._derivatives._grad import JacobianFunction, advised, check_mode
from .._transforms._signatures import Params, check_callable
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
