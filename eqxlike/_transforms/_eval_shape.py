"""Running a function on shapes only."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.tree_util as jtu
from jax.extend.core import ClosedJaxpr
from jaxtyping import PyTree

from .._partition import Rest, split
from .._pytree import is_array, is_traced_reference
from ._signatures import Params, TransformedFunction, check_callable


def filter_eval_shape(
    fun: Callable[..., Any], *args: Any, **kwargs: Any
) -> PyTree[jax.ShapeDtypeStruct | Any]:
    """The output of `fun(*args, **kwargs)`, with a `jax.ShapeDtypeStruct` for each array.

    Nothing is computed. Arguments that are not arrays are passed unchanged.

    **Arguments:**

    - `fun`: any callable, such as a Module or a Module class.
    - `*args`, `**kwargs`: any pytrees; a `jax.ShapeDtypeStruct` may replace an array.

    **Returns:** the output; leaves that are not arrays are as `fun` returned them.

    !!! example

        >>> import eqxlike as eqx, jax, jax.numpy as jnp
        >>> eqx.filter_eval_shape(lambda x, name: (x.sum(), name), jnp.ones((2, 3)), "total")
        (ShapeDtypeStruct(shape=(), dtype=float32), 'total')
    """
    arrays, rest = split((fun, args, kwargs), is_array_or_struct)

    def of_arrays(arrays: list[Any]) -> Any:
        fun, args, kwargs = rest.merge(arrays)
        return fun(*args, **kwargs)

    flat = _FlatOutput(of_arrays)
    structs = jax.eval_shape(flat, arrays)
    return flat.rest.merge(structs)


class _JaxprFunction(TransformedFunction):
    """The function that `filter_make_jaxpr` returns."""

    def __call__(self, /, *args: Any, **kwargs: Any) -> tuple[Any, PyTree, PyTree]:
        arrays, rest = split((args, kwargs), is_array_or_struct)

        def of_arrays(arrays: list[Any]) -> Any:
            args, kwargs = rest.merge(arrays)
            return self._function(*args, **kwargs)

        flat = _FlatOutput(of_arrays)
        jaxpr, structs = jax.make_jaxpr(flat, return_shape=True)(arrays)
        return jaxpr, flat.rest.merge_into(None, structs), flat.rest.merge(itertools.repeat(None))


def filter_make_jaxpr(
    fun: Callable[Params, Any],
) -> Callable[Params, tuple[ClosedJaxpr, PyTree, PyTree]]:
    """The jaxpr of a function of any arguments, as `jax.make_jaxpr` returns it.

    **Arguments:**

    - `fun`: any callable. Arrays that it holds are constants of the jaxpr.

    **Returns:** a function of the same arguments that returns `(jaxpr, structs, static)`. A
    `jax.ShapeDtypeStruct` may replace an array. The inputs and outputs of `jaxpr` are only the
    arrays, in tree order. `structs` is the output of `fun` with a `jax.ShapeDtypeStruct` for each
    array and `None` for everything else; `static` is the output with `None` for each array.

    **Raises:** `TypeError` if `fun` is not callable.

    !!! example

        >>> import eqxlike as eqx, jax.numpy as jnp
        >>> make_jaxpr = eqx.filter_make_jaxpr(lambda x, n: (n * x, n))
        >>> jaxpr, structs, static = make_jaxpr(jnp.ones(2), 3.0)
        >>> jaxpr
        { lambda ; a:f32[2]. let b:f32[2] = mul 3.0:f32[] a in (b,) }
        >>> structs, static
        ((ShapeDtypeStruct(shape=(2,), dtype=float32), None), (None, 3.0))
    """
    check_callable(fun, "filter_make_jaxpr")
    return _JaxprFunction(fun)


class _FlatOutput:
    """A function that returns only the arrays of its output, as JAX requires.

    - `rest`: the rest of the output, after the function has been called.
    """

    rest: Rest

    def __init__(self, function: Callable[[list[Any]], Any]):
        self._function = function

    def __call__(self, arrays: list[Any]) -> list[Any]:
        returned = refuse_references(self._function(arrays), "the function")
        output, self.rest = split(returned)
        return output


def is_array_or_struct(leaf: Any) -> bool:
    """Whether `leaf` is an array (see `is_array`), or a `jax.ShapeDtypeStruct` instead of one.

    >>> is_array_or_struct(jax.ShapeDtypeStruct((2,), "float32")), is_array_or_struct(1.0)
    (True, False)
    """
    return is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)


# --- Mutable arrays, `jax.Ref`, which a traced function may take but not return ---


def refuse_references(
    output: PyTree, returned_by: str, is_refused: Callable[[Any], bool] = is_traced_reference
) -> PyTree:
    """The `output` of a traced function; raises `ValueError` if it contains a reference."""
    for path, leaf in jtu.tree_leaves_with_path(output):
        if is_refused(leaf):
            raise ValueError(
                f"output{jtu.keystr(path)}, which {returned_by} returns, is a mutable array "
                f"reference of type {jax.typeof(leaf)}. As from `jax.jit`, it cannot be returned "
                "from a function that is traced: return what it holds, `reference[...]`, or write "
                "to one that is passed as an argument."
            )
    return output
