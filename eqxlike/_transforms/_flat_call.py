"""`filter_eval_shape`, `filter_make_jaxpr`, `filter_checkpoint`, and `FlatCall`, which they use."""

import itertools
from collections.abc import Callable, Iterable
from typing import Any, overload

import jax
import jax.tree_util as jtu
from jax.extend.core import ClosedJaxpr
from jaxtyping import PyTree

from .._module import field
from .._partition import UNTRACED, Rest, split
from .._pytree import MISSING, is_array, is_traced_reference
from ._signatures import Output, Params, TransformedFunction, check_callable, optional_function


def filter_eval_shape(
    fun: Callable[..., Any], *args: Any, **kwargs: Any
) -> PyTree[jax.ShapeDtypeStruct | Any]:
    """The output of `fun(*args, **kwargs)`, with a `jax.ShapeDtypeStruct` for each array.

    The function is traced, but no array is computed. Arguments that are not arrays are passed
    unchanged.

    **Arguments:**

    - `fun`: any callable, such as a Module or a Module class.
    - `*args`, `**kwargs`: any pytrees; a `jax.ShapeDtypeStruct` may replace an array.

    **Returns:** the output of `fun`; leaves that are not arrays are unchanged.

    !!! example

        >>> import eqxlike as eqx, jax, jax.numpy as jnp
        >>> eqx.filter_eval_shape(lambda x, name: (x.sum(), name), jnp.ones((2, 3)), "total")
        (ShapeDtypeStruct(shape=(), dtype=float32), 'total')
    """
    call = FlatCall(fun, args, kwargs, "the function", is_array_or_struct)
    return call.output(jax.eval_shape(call.of_arrays, call.arrays))


class _JaxprFunction(TransformedFunction):
    """The function that `filter_make_jaxpr` returns."""

    def __call__(self, /, *args: Any, **kwargs: Any) -> tuple[Any, PyTree, PyTree]:
        def function(*args: Any, **kwargs: Any) -> Any:
            return self._function(*args, **kwargs)  # Arrays that `fun` holds become constants.

        call = FlatCall(function, args, kwargs, "the function", is_array_or_struct)
        jaxpr, structs = jax.make_jaxpr(call.of_arrays, return_shape=True)(call.arrays)
        static = call.output(itertools.repeat(None))
        return jaxpr, call.rest.merge_into(None, structs), static


def filter_make_jaxpr(
    fun: Callable[Params, Any],
) -> Callable[Params, tuple[ClosedJaxpr, PyTree, PyTree]]:
    """`jax.make_jaxpr` for functions of any arguments.

    **Arguments:**

    - `fun`: any callable. Arrays that it holds are constants of the jaxpr.

    **Returns:** a function of the same arguments that returns `(jaxpr, structs, static)`. A
    `jax.ShapeDtypeStruct` may replace an array among the arguments. The inputs of `jaxpr` are the
    arrays among the arguments, in tree order, and its outputs are the arrays in the output.
    `structs` is the output of `fun` with a `jax.ShapeDtypeStruct` for each array and `None` for
    everything else; `static` is the output with `None` for each array.

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


class _CheckpointFunction(TransformedFunction):
    """The function that `filter_checkpoint` returns."""

    _prevent_cse: bool = field(static=True)
    _policy: Callable[..., bool] | None = field(static=True)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        call = FlatCall(self._function, args, kwargs, "a checkpointed function")
        checkpointed = jax.checkpoint(
            call.of_arrays, prevent_cse=self._prevent_cse, policy=self._policy
        )
        return call.output(checkpointed(call.arrays))


@overload
def filter_checkpoint(
    *, prevent_cse: bool = True, policy: Callable[..., bool] | None = None
) -> Callable[[Callable[Params, Output]], Callable[Params, Output]]: ...
@overload
def filter_checkpoint(
    fun: Callable[Params, Output],
    *,
    prevent_cse: bool = True,
    policy: Callable[..., bool] | None = None,
) -> Callable[Params, Output]: ...
@optional_function
def filter_checkpoint(
    fun: Callable[..., Any] = MISSING,
    *,
    prevent_cse: bool = True,
    policy: Callable[..., bool] | None = None,
) -> Any:
    """Makes the backward pass of a function recompute its intermediate values.

    Recomputing saves memory and costs time. This is `jax.checkpoint` for functions of any
    arguments: arrays are traced, and everything else is passed unchanged.

    **Arguments:**

    - `fun`: a function of any arguments that returns any pytree. Without it, a decorator is
      returned.
    - `prevent_cse`: whether to prevent the compiler from merging the recomputation with the
      original computation. If the compiler merged them, no memory would be saved. Not needed inside
      `jax.lax.scan`.
    - `policy`: one of `jax.checkpoint_policies`. It selects values to save instead of recompute.

    **Returns:** a function of the same arguments with the same output.

    !!! example

        >>> import eqxlike as eqx, jax, jax.numpy as jnp
        >>> @eqx.filter_checkpoint
        ... def layer(x, activation):
        ...     return activation(activation(x))
        >>> print(eqx.filter_grad(layer)(jnp.array(0.0), jnp.sin))
        1.0
    """
    return _CheckpointFunction(fun, prevent_cse, policy)


# --- One call of a function of any arguments, as a function of arrays only ---


class FlatCall:
    """One call, as a function of arrays only, so that JAX's transformations apply to it.

    - `arrays`: the arrays of the arguments, and of the function if it is a pytree.
    - `rest`: the output without its arrays. It is set when the function is called.
    """

    def __init__(
        self,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        what: str,
        is_dynamic: Callable[[Any], bool] = is_array,
    ) -> None:
        """**Arguments:**

        - `what`: the name of the function in the error that is raised if it returns a reference.
        - `is_dynamic`: function that returns `True` for each leaf that counts as an array.
        """
        self.arrays, self._call = split((function, args, kwargs), is_dynamic)
        self.rest: Rest = UNTRACED
        self._what = what

    def of_arrays(self, arrays: list[Any]) -> list[Any]:
        """Calls the function. Returns the arrays of the output, and stores the rest."""
        function, args, kwargs = self._call.merge(arrays)
        returned = refuse_references(function(*args, **kwargs), self._what)
        output_arrays, self.rest = split(returned)
        return output_arrays

    def output(self, arrays: Iterable[Any]) -> Any:
        """The output of the function, with `arrays` as its arrays."""
        return self.rest.merge(arrays)


def is_array_or_struct(leaf: Any) -> bool:
    """Whether `leaf` is an array (see `is_array`) or a `jax.ShapeDtypeStruct`.

    >>> is_array_or_struct(jax.ShapeDtypeStruct((2,), "float32")), is_array_or_struct(1.0)
    (True, False)
    """
    return is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)


def path_of(place: int, treedef: Any) -> str:
    """The path of the leaf with index `place`, as text."""
    places = treedef.unflatten(range(treedef.num_leaves))
    return jtu.keystr(jtu.tree_leaves_with_path(places)[place][0])


# --- Mutable arrays (`jax.Ref`), which a traced function may take but not return ---


def refuse_references(
    output: PyTree, returned_by: str, is_refused: Callable[[Any], bool] = is_traced_reference
) -> PyTree:
    """Returns `output`. Raises `ValueError` if it contains a mutable array reference."""
    for path, leaf in jtu.tree_leaves_with_path(output):
        if is_refused(leaf):
            raise ValueError(
                f"output{jtu.keystr(path)}, which {returned_by} returns, is a mutable array "
                f"reference of type {jax.typeof(leaf)}. A traced function cannot return a "
                "reference, as in `jax.jit`: return its value, `reference[...]`, or write to a "
                "reference that is passed as an argument."
            )
    return output
