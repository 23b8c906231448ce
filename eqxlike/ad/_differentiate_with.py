"""Functions with a fixed mode of differentiation, and gradients that reuse buffers."""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jaxtyping import Array, PyTree

from .._partition import split
from .._pytree import find_difference, is_inexact_array, same_shape_and_dtype
from .._transforms import filter_jit, filter_value_and_grad
from .._transforms._derivatives._grad import advised, check_mode
from .._transforms._derivatives._linear_call import (
    batch_first,
    fill,
    has_tangent,
    is_inexact,
    linear_call,
    select,
    zero_tangent,
)
from .._transforms._flat_call import FlatCall
from .._transforms._signatures import Output, Params, TransformedFunction, check_callable
from ._modes import Arrays, Mode, Reverse

OfList = Callable[[Arrays], Arrays]


class Differentiated(TransformedFunction):
    """The function that `ad.differentiate_with` returns."""

    _mode: Mode

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        call = FlatCall(self._function, args, kwargs, "a function with a mode")
        closed = jax.make_jaxpr(call.of_arrays)(call.arrays)
        num_consts = len(closed.consts)

        # Closed-over arrays become arguments, because the caller may differentiate with respect to
        # closed-over arrays.
        def of_all(arrays: list[Array]) -> list[Array]:
            consts, arrays = arrays[:num_consts], arrays[num_consts:]
            return jaxpr_as_fun(ClosedJaxpr(closed.jaxpr, consts))(*arrays)

        name = getattr(self, "__name__", type(self._function).__name__)
        run = differentiated_by(self._mode, of_all, name)
        return call.output(run([*closed.consts, *call.arrays]))


def differentiate_with(function: Callable[Params, Output], mode: Mode) -> Callable[Params, Output]:
    """Wraps a function or Module so that it is always differentiated with `mode`.

    Callers may use any mode. If a caller uses reverse mode, `mode` computes the vector-Jacobian
    products of the function. If a caller uses forward mode, `mode` computes the Jacobian-vector
    products of the function. For example, one layer of a model can recompute its intermediate
    values, or contain a callback that JAX cannot differentiate.

    **Arguments:**

    - `function`: a callable Module, or a function of any arguments that returns any pytree. It is
      differentiated with respect to the floating-point and complex arrays in its arguments, in its
      own leaves, and in its closure.
    - `mode`: the mode of differentiation.

    **Returns:** a Module with the signature of `function`. Its attribute `__wrapped__` is
    `function`. If `function` is a pytree, its arrays are leaves of the Module.

    **Raises:** `TypeError` if `function` is not callable, or `mode` is not a mode.

    !!! example

        >>> import eqxlike as eqx, jax, jax.numpy as jnp, numpy as np
        >>> from eqxlike import ad
        >>> def sine(x):  # computed by NumPy, which JAX cannot differentiate
        ...     return jax.pure_callback(np.sin, jax.ShapeDtypeStruct((), x.dtype), x)
        >>> sine = ad.differentiate_with(sine, ad.FiniteDifference(order=4))
        >>> gradient = eqx.filter_grad(lambda x: sine(x) ** 2)(jnp.array(0.5))
        >>> print(bool(jnp.allclose(gradient, jnp.sin(1.0), atol=1e-3)))
        True
    """
    check_callable(function, "ad.differentiate_with")
    check_mode(mode, "ad.differentiate_with")
    return Differentiated(function, mode)


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
                inputs = fill(values, arrays, is_differentiated)
                outputs = list(map(_as_array, within(inputs)))
                inexact_flags[:] = map(is_inexact, outputs)
                others = [each for each in outputs if not is_inexact(each)]
                return select(outputs, inexact_flags), others

            return restricted

        with advised(mode, name):
            inexact_outputs, pullback, others = mode.vjp(
                restrict(arrays), select(arrays, is_differentiated)
            )
            if not inexact_outputs:
                return others, list(map(zero_tangent, others))
            # Trace the pullback, so that all arrays that it closes over become residuals.
            closed = jax.make_jaxpr(pullback)(inexact_outputs)

        def forward(residuals: Arrays, directions: Arrays) -> Arrays:
            arrays = residuals[: len(is_differentiated)]
            selected = select(arrays, is_differentiated)
            with advised(mode, name):
                return mode.jvp(restrict(arrays), selected, directions)

        def transpose(residuals: Arrays, cotangents: Arrays, _: Any) -> Arrays:
            consts = residuals[len(is_differentiated) :]
            return jaxpr_as_fun(ClosedJaxpr(closed.jaxpr, consts))(*cotangents)

        found = linear_call(
            forward,
            transpose,
            [*arrays, *closed.consts],
            select(dots, is_differentiated),
            like=inexact_outputs,
            # With this flag, reverse mode of a batch does not call `forward`. The mode may not
            # support `forward`.
            is_of_members=True,
        )
        values, rest = iter(inexact_outputs), iter(others)
        outputs = [next(values if each else rest) for each in inexact_flags]
        return outputs, fill(found, map(zero_tangent, outputs), inexact_flags)

    return run


def _as_array(value: Any) -> Any:
    """Returns `value` as an array. A user may differentiate with respect to a Python number."""
    is_array = hasattr(value, "shape") or isinstance(value, SymbolicZero)
    return value if is_array else jnp.asarray(value)


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
