"""One part of a model differentiated in one way, and the rest in another."""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jaxtyping import Array

from .._transforms._derivatives._by_mode import check_mode
from .._transforms._derivatives._flat_call import FlatCall
from .._transforms._signatures import Output, Params
from .._transforms._wrapping import TransformedFunction, check_callable
from ._modes import Mode
from ._modes._rules import differentiated_by


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

    **Raises:** `TypeError` if `function` cannot be called, or `mode` is no mode.

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
