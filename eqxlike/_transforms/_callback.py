"""`filter_pure_callback`: compiled code calls a Python function with any pytrees as arguments."""

from collections.abc import Callable
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np
from jax.dtypes import canonicalize_dtype
from jaxtyping import PyTree

from .._compat import Tracer
from .._dtypes import without_key_dtype
from .._partition import split
from .._pytree import is_array, tree_pformat
from ._flat_call import is_array_or_struct
from ._signatures import check_callable


def filter_pure_callback(
    callback: Callable[..., Any],
    *args: Any,
    result_shape_dtypes: PyTree[jax.ShapeDtypeStruct | Any],
    sharding: jax.sharding.Sharding | None = None,
    vmap_method: str | None = None,
    vectorized: bool | None = None,
    **kwargs: Any,
) -> PyTree:
    """Calls a Python function from compiled code. This is `jax.pure_callback` for any arguments.

    **Arguments:**

    - `callback`: a pure function. It is called with `*args` and `**kwargs`, any number of times. It
      receives arrays as JAX arrays, and typed PRNG keys as arrays of integers (their key data).
      Everything else is passed unchanged.
    - `*args`, `**kwargs`: any pytrees.
    - `result_shape_dtypes`: the expected result, as a pytree. In it, a `jax.ShapeDtypeStruct`, or
      an array of the same shape and dtype, represents each array of the result. For all other
      leaves, the callback must return equal values.
    - `sharding`: the device on which the callback is called, as in `jax.pure_callback`.
    - `vmap_method`: the behaviour under `jax.vmap`, as in `jax.pure_callback`: `"sequential"` calls
      the callback once for each index; `"expand_dims"` and `"broadcast_all"` call it with batches,
      and it must return batches.
    - `vectorized`: the older form of `vmap_method`: `True` for `"legacy_vectorized"`, `False` for
      `"sequential"`.

    **Returns:** the result of the callback, a pytree with the structure of `result_shape_dtypes`.

    **Raises:**

    - `ValueError` if both `vmap_method` and `vectorized` are passed, or if `vmap_method` is
      unknown.
    - `ValueError` if the call is differentiated. To give it a derivative, wrap it in
      `jax.custom_jvp` or `filter_custom_vjp`.
    - `jax.errors.JaxRuntimeError` at run time if the callback raises an exception. The error
      contains the traceback of the callback.
    - `jax.errors.JaxRuntimeError` at run time if the result has an unexpected structure, shape,
      dtype or static value. The error names the path in the result.

    !!! example

        >>> import eqxlike as eqx, jax, jax.numpy as jnp, numpy as np
        >>> @eqx.filter_jit
        ... def sort(x, order):
        ...     return eqx.filter_pure_callback(
        ...         lambda x, order: np.sort(x)[:: 1 if order == "up" else -1], x, order,
        ...         result_shape_dtypes=jax.ShapeDtypeStruct(x.shape, x.dtype),
        ...     )
        >>> print(sort(jnp.array([2, 3, 1]), "down"))
        [3 2 1]
    """
    check_callable(callback, "filter_pure_callback")
    if vectorized is not None:
        if vmap_method is not None:
            raise ValueError(
                "`filter_pure_callback` takes `vmap_method` or its older form `vectorized`, not "
                f"both; it got {vmap_method!r} and {vectorized!r}."
            )
        vmap_method = "legacy_vectorized" if vectorized else "sequential"
    arrays, call_rest = split((args, kwargs))
    # `jax.vmap` may add axes to all operands. The callback must see its own arrays without such
    # axes. So only its tracers become operands.
    traced, callback_rest = split(callback, lambda leaf: isinstance(leaf, Tracer))
    operands = [without_key_dtype(array) for array in (*traced, *arrays)]
    ranks = [operand.ndim for operand in operands]
    # The compiled function keeps `expected` alive, so `expected` must not contain a tracer.
    expected = jtu.tree_map(_as_struct, result_shape_dtypes)
    structs, result_rest = split(expected, is_array_or_struct)

    def of_arrays(*operands: Any) -> list[np.ndarray]:
        args, kwargs = call_rest.merge(operands[len(traced) :])
        returned = callback_rest.merge(operands[: len(traced)])(*args, **kwargs)
        mapped = (
            operand.shape[: operand.ndim - rank]
            for operand, rank in zip(operands, ranks, strict=True)
        )
        return _checked(returned, expected, np.broadcast_shapes(*mapped))

    options = {} if sharding is None else {"sharding": sharding}
    results = jax.pure_callback(of_arrays, structs, *operands, vmap_method=vmap_method, **options)
    return result_rest.merge(results)


def _as_struct(leaf: Any) -> Any:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if is_array(leaf) else leaf


def _checked(returned: PyTree, expected: PyTree, mapped: tuple[int, ...]) -> list[np.ndarray]:
    """Checks the result of a callback, and returns the arrays in the result.

    **Arguments:**

    - `mapped`: the sizes of the axes that `jax.vmap` adds in front of each array.

    **Raises:** `ValueError` if the result is not as expected.
    """
    if jtu.tree_structure(returned) != jtu.tree_structure(expected):
        raise ValueError(_describe_structures(returned, expected))
    arrays: list[np.ndarray] = []
    leaves = jtu.tree_leaves(returned)
    for leaf, (path, wanted) in zip(leaves, jtu.tree_leaves_with_path(expected), strict=True):
        if isinstance(wanted, jax.ShapeDtypeStruct):
            wanted = jax.ShapeDtypeStruct((*mapped, *wanted.shape), wanted.dtype)
            is_as_expected = _is_like(leaf, wanted)
            arrays.append(np.asarray(leaf))
        else:
            is_as_expected = leaf is wanted or (type(leaf) is type(wanted) and leaf == wanted)
        if not is_as_expected:
            raise ValueError(
                f"The callback returned {tree_pformat(leaf)} as result{jtu.keystr(path)}; expected "
                f"{tree_pformat(wanted, struct_as_array=True)} (see `result_shape_dtypes`)."
            )
    return arrays


def _is_like(leaf: Any, struct: jax.ShapeDtypeStruct) -> bool:
    """Returns `True` if `leaf`, converted to a JAX array, has the shape and dtype of `struct`."""
    if not is_array(leaf) and not isinstance(leaf, bool | int | float | complex):
        return False
    array = np.asarray(leaf)
    return array.shape == struct.shape and canonicalize_dtype(array.dtype) == struct.dtype


def _describe_structures(returned: PyTree, expected: PyTree) -> str:
    came, wanted = (
        {jtu.keystr(path) for path, _ in jtu.tree_leaves_with_path(tree)}
        for tree in (returned, expected)
    )
    message = (
        "The structure of the callback's result differs from `result_shape_dtypes`. Expected "
        f"{tree_pformat(expected, struct_as_array=True)}; it returned {tree_pformat(returned)}."
    )
    for what, paths in (("Missing", wanted - came), ("Unexpected", came - wanted)):
        if paths:
            message += f" {what}: {', '.join(f'result{path}' for path in sorted(paths))}."
    return message
