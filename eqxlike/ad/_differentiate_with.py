"""One part of a model differentiated in one way, and the rest in another."""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jaxtyping import Array, PyTree

from .._partition import split
from .._pytree import find_difference, is_inexact_array, same_shape_and_dtype
from .._transforms import filter_jit, filter_value_and_grad
from .._transforms._derivatives._by_mode import check_mode
from .._transforms._flat_call import FlatCall
from .._transforms._signatures import Output, Params, TransformedFunction, check_callable
from ._modes import Mode, Reverse
from ._modes._mode import differentiated_by


class Differentiated(TransformedFunction):
    """The function that `ad.differentiate_with` returns."""

    _mode: Mode

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        call = FlatCall(self._function, args, kwargs, "a function with a mode")
        closed = jax.make_jaxpr(call.of_arrays)(call.arrays)
        num_consts = len(closed.consts)

        # What the function closes over may be differentiated too, and so is an argument.
        def of_all(arrays: list[Array]) -> list[Array]:
            consts, arrays = arrays[:num_consts], arrays[num_consts:]
            return jaxpr_as_fun(ClosedJaxpr(closed.jaxpr, consts))(*arrays)

        name = getattr(self, "__name__", type(self._function).__name__)
        run = differentiated_by(self._mode, of_all, name)
        return call.output(run([*closed.consts, *call.arrays]))


def differentiate_with(function: Callable[Params, Output], mode: Mode) -> Callable[Params, Output]:
    """A function or Module that is differentiated by a mode, whatever mode its caller is in.

    The caller's mode goes as far as this function and on from there. Where the caller is in reverse
    mode, it gets the vector-Jacobian products that `mode` finds, and where it is in forward mode
    the Jacobian-vector products. So a model may have one layer that keeps no intermediate values,
    or one with a callback inside, which JAX cannot differentiate at all.

    **Arguments:**

    - `function`: a function of any arguments that returns any pytree, or a Module that is called.
      It is differentiated by all its floating-point and complex arrays that the caller
      differentiates by: in its arguments, its own, and those that it closes over.
    - `mode`: how to differentiate it.

    **Returns:** a Module that is called as `function` is. `function` is a part of it, so if that is
    a pytree, its arrays are leaves of the whole model; it is there as `__wrapped__`.

    **Raises:** `TypeError` if `function` cannot be called, or `mode` is not a mode.

    !!! example

        >>> import eqxlike as eqx, jax, jax.numpy as jnp, numpy as np
        >>> from eqxlike import ad
        >>> def sine(x):  # of NumPy, which JAX does not see into
        ...     return jax.pure_callback(np.sin, jax.ShapeDtypeStruct((), x.dtype), x)
        >>> sine = ad.differentiate_with(sine, ad.FiniteDifference(order=4))
        >>> gradient = eqx.filter_grad(lambda x: sine(x) ** 2)(jnp.array(0.5))
        >>> print(bool(jnp.allclose(gradient, jnp.sin(1.0), atol=1e-3)))
        True
    """
    check_callable(function, "ad.differentiate_with")
    check_mode(mode, "ad.differentiate_with")
    return Differentiated(function, mode)


# --- Gradients that are written over those of the step before ---


def gradient_buffers(x: PyTree) -> PyTree:
    """Zeros in the structure of a gradient by `x`, for the first call of `value_and_grad_into`.

    **Returns:** a tree of the structure of `x`, with an array of zeros for each floating-point or
    complex array, and `None` for everything else and for what is frozen.

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
    """A compiled gradient that is written over the buffers of an earlier one.

    A loop that asks for a gradient again and again then allocates none. `filter_jit` of a whole
    training step, with the model and the optimiser's state donated, does as much for a step; this
    is for gradients that leave the compiled function: those of an optimiser in NumPy, of a sampler,
    or of one that sums the gradients of several batches.

    **Arguments:**

    - `fun`: a function from any arguments to a real floating-point scalar.
    - `has_aux`: whether `fun` returns `(value, aux)`, with `aux` any pytree.
    - `mode`: how to differentiate, one of those in `eqxlike.ad`; `None` is JAX's reverse mode.
    - `donate`: names of parameters of `fun`, whose buffers may be overwritten too.

    **Returns:** a function `into(buffers, *args, **kwargs)` that returns what
    `filter_value_and_grad(fun)(*args, **kwargs)` does. `buffers` is the gradient that an earlier
    call returned, or `ad.gradient_buffers` of the first argument. It is gone after the call. What
    XLA has reused is `into.lower(...).compile().memory_analysis().alias_size_in_bytes`.

    **Raises:** `ValueError` if `donate` names no parameter of `fun`; when called, `ValueError` that
    names the path if `buffers` has not the structure, shapes and dtypes of the gradient.

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
    # By name, since a mode says more of a value that is not a scalar.
    mode = Reverse() if mode is None else mode
    value_and_grad = filter_value_and_grad(fun, has_aux=has_aux, mode=mode)

    @functools.wraps(fun, updated=())
    def into(buffers: PyTree, /, *args: Any, **kwargs: Any) -> Any:
        value, gradient = value_and_grad(*args, **kwargs)
        if difference := find_difference(gradient, buffers, same_shape_and_dtype):
            raise ValueError(
                "The buffers must have the structure, shapes and dtypes of the gradient, as "
                "`ad.gradient_buffers` of the first argument has: "
                f"{difference.explain('gradient', 'buffers')}."
            )
        return value, gradient

    first = inspect.Parameter("buffers", inspect.Parameter.POSITIONAL_ONLY)
    # A `buffers` of the function's own is a duplicate, which `Signature` refuses.
    parameters = [first, *inspect.signature(fun).parameters.values()]
    into.__signature__ = inspect.Signature(parameters)  # pyright: ignore
    names = (donate,) if isinstance(donate, str) else tuple(donate)
    # JAX leaves out an argument that is not used, and with it its buffers.
    return filter_jit(into, donate=("buffers", *names), keep_unused=True)
