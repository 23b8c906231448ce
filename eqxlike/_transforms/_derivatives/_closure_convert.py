"""`filter_closure_convert`: a closure as a pytree of the arrays that it closes over."""

from collections.abc import Callable
from typing import Any, Generic

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun
from jaxtyping import Array

from ..._module import Module, field
from ..._partition import UNTRACED, Rest, split
from ..._pytree import is_array, tree_pformat
from .._flat_call import is_array_or_struct, refuse_references
from .._signatures import Call, Output, Params, check_callable
from ._tangents import match_leaves, path_of


class ClosureConverted(Module, Generic[Params, Output]):
    """The function that `filter_closure_convert` returns.

    - `jaxpr`: the program of the function. As in Equinox, `jaxpr` is a leaf of the pytree. Some
      libraries rely on this: they compare converted functions, and replace a `jaxpr` by an equal
      `jaxpr`. `filter_jit` and similar transformations treat this leaf as static. Before you pass
      the function to raw `jax.jit`, separate `consts` from the rest of it.
    - `consts`: the arrays that the function closes over.
    """

    jaxpr: Jaxpr
    consts: list[Array]
    _example: Rest = field(static=True)
    _types: tuple[jax.ShapeDtypeStruct, ...] = field(static=True)
    _output: Rest = field(static=True)

    @property
    def in_struct(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The `(args, kwargs)` of the example, with a `jax.ShapeDtypeStruct` for each array."""
        args, kwargs = self._example.merge(self._types)
        return args, kwargs

    @property
    def out_struct(self) -> Any:
        """The output of the function, with a `jax.ShapeDtypeStruct` for each array."""
        avals: Any = (var.aval for var in self.jaxpr.outvars)
        return self._output.merge(jax.ShapeDtypeStruct(each.shape, each.dtype) for each in avals)

    def __call__(self, /, *args: Params.args, **kwargs: Params.kwargs) -> Output:
        treedef = self._example.treedef
        leaves = match_leaves(treedef, Call(args, kwargs), "call", "example")
        for place, (leaf, expected) in enumerate(
            zip(leaves, self._example.leaves(self._types), strict=True)
        ):
            if not _matches(leaf, expected):
                path = jtu.keystr(path_of(place, treedef))
                raise ValueError(
                    "A closure-converted function must be called with arguments like the example: "
                    "arrays of the same shapes and dtypes, and equal values otherwise. "
                    f"example{path} is {tree_pformat(expected, struct_as_array=True)}, but "
                    f"call{path} is {tree_pformat(leaf)}."
                )
        arrays = self._example.take(leaves)
        output_arrays = jaxpr_as_fun(ClosedJaxpr(self.jaxpr, self.consts))(*arrays)
        return self._output.merge(output_arrays)


def _matches(leaf: Any, expected: Any) -> bool:
    if isinstance(expected, jax.ShapeDtypeStruct):
        is_match = is_array(leaf) and leaf.shape == expected.shape
        return is_match and jnp.result_type(leaf) == jnp.result_type(expected)
    return leaf is expected or (type(leaf) is type(expected) and bool(leaf == expected))


def filter_closure_convert(
    fn: Callable[Params, Output], *args: Any, **kwargs: Any
) -> ClosureConverted[Params, Output]:
    """Converts a function to a pytree. The closed-over arrays become its array leaves.

    Use the pytree to pass closed-over tracers explicitly to a custom derivative or a
    transformation. `filter_closure_convert` is `jax.closure_convert` for functions of any
    arguments, and converts all closed-over arrays.

    **Arguments:**

    - `fn`: a function of any arguments that returns any pytree. `filter_closure_convert` traces it
      once.
    - `*args`, `**kwargs`: example arguments; a `jax.ShapeDtypeStruct` may replace an array. The
      values of arrays do not matter.

    **Returns:** a Module to be called with arguments like the example: arrays must have the same
    shapes and dtypes, and everything else must be equal. Its field `consts` is the list of arrays
    that `fn` closes over, and its field `jaxpr` is the program of `fn`. Its property `in_struct` is
    the `(args, kwargs)` of the example, and `out_struct` is the output of `fn`; both have a
    `jax.ShapeDtypeStruct` for each array.

    **Raises:** when called, `ValueError` if an argument is not like the example; the message names
    the path.

    !!! example

        >>> import eqxlike as eqx, jax.numpy as jnp
        >>> def scaling_by(factor):
        ...     return lambda x: factor * x
        >>> converted = eqx.filter_closure_convert(scaling_by(jnp.array(3.0)), jnp.array(1.0))
        >>> print(converted.consts, converted(jnp.array(2.0)))
        [Array(3., dtype=float32, weak_type=True)] 6.0
    """
    check_callable(fn, "filter_closure_convert")
    arrays, example = split(Call(args, kwargs), is_array_or_struct)
    output: Rest = UNTRACED

    def of_arrays(arrays: list[Any]) -> list[Any]:
        nonlocal output
        args, kwargs = example.merge(arrays)
        returned: Any = fn(*args, **kwargs)  # pyright: ignore[reportCallIssue]
        output_arrays, output = split(refuse_references(returned, "a closure-converted function"))
        return output_arrays

    closed = jax.make_jaxpr(of_arrays)(arrays)
    types = tuple(jax.ShapeDtypeStruct(each.shape, each.dtype) for each in arrays)
    return ClosureConverted(closed.jaxpr, list(closed.consts), example, types, output)
