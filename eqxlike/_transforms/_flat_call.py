"""Transformations that keep nothing between calls: shapes, jaxprs, callbacks, placement.

`FlatCall` turns a call into a function of arrays only.
"""

import itertools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, overload

import jax
import jax.tree_util as jtu
import numpy as np
from jax.dtypes import canonicalize_dtype
from jax.extend.core import ClosedJaxpr
from jaxtyping import PyTree

from .._compat import Tracer
from .._dtypes import without_key_dtype
from .._module import field
from .._partition import UNTRACED, Rest, split
from .._pytree import (
    MISSING,
    is_array,
    is_array_or_struct,
    is_reference,
    is_traced_reference,
    tree_pformat,
)
from ._signatures import Output, Params, TransformedFunction, check_callable, optional_function

Tree = TypeVar("Tree")


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


# --- Callbacks: compiled code calls a Python function with any pytrees as arguments ---


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


# --- Placement of arrays on devices ---


def filter_shard(x: Tree, device_or_shardings: PyTree[Any]) -> Tree:
    """Places the arrays of a tree on devices.

    Inside a compiled program, `filter_shard` constrains the sharding that XLA chooses, as
    `jax.lax.with_sharding_constraint` does. Outside a compiled program, it moves the arrays, as
    `jax.device_put` does.

    **Arguments:**

    - `x`: any pytree. Leaves other than arrays are unchanged; a NumPy array becomes a JAX array.
    - `device_or_shardings`: a device or a sharding for all arrays, or a prefix of `x` with devices
      and shardings as leaves. `None` leaves arrays unchanged. A `jax.sharding.PartitionSpec` refers
      to the mesh of `jax.set_mesh`.

    **Returns:** a copy of `x` with its arrays on the given devices.

    **Raises:** `ValueError` if `device_or_shardings` is not a prefix of `x`. If a sharding does not
    fit its array, JAX's own error, with a note that names the path of the array.

    !!! example

        >>> import eqxlike as eqx, jax, jax.numpy as jnp
        >>> mesh = jax.sharding.Mesh(jax.devices(), "batch")
        >>> by_row = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("batch"))
        >>> data = {"x": jnp.ones((jax.device_count(), 3)), "name": "training"}
        >>> data = eqx.filter_shard(data, by_row)
        >>> print(data["x"].sharding.spec, data["name"])
        P('batch',) training
    """
    arrays, rest = split(x)
    placements = shardings_of_arrays("device_or_shardings", device_or_shardings, x, is_array)
    placed = []
    for array, placement in zip(arrays, placements, strict=True):
        try:
            placed.append(_place(array, placement))
        except (TypeError, ValueError) as error:
            paths = [path for path, leaf in jtu.tree_leaves_with_path(x) if is_array(leaf)]
            error.add_note(f"This is the array at x{jtu.keystr(paths[len(placed)])}.")
            raise
    return rest.merge(placed)


def _place(array: Any, placement: Any) -> Any:
    if placement is None:
        return array
    if isinstance(placement, jax.Device):
        placement = jax.sharding.SingleDeviceSharding(placement)
    is_concrete = isinstance(array, jax.Array) and not isinstance(array, Tracer)
    if is_concrete and isinstance(placement, jax.sharding.Sharding):
        # A constraint alone does not move an array that is committed to other devices.
        array = jax.device_put(array, placement)
    return jax.lax.with_sharding_constraint(array, placement)


def _is_traced(leaf: Any) -> bool:
    return is_array_or_struct(leaf) or is_reference(leaf)


def shardings_of_arrays(
    name: str, prefix: PyTree, tree: PyTree, is_placed: Callable[[Any], bool] = _is_traced
) -> list[Any]:
    """Broadcasts a prefix of shardings. Returns a sharding, or `None`, for each array in `tree`.

    **Arguments:**

    - `name`: the name of `prefix` in error messages.
    - `is_placed`: function that returns `True` for each leaf that counts as an array.

    **Raises:** `ValueError` if `prefix` is not a prefix of `tree`.
    """
    shardings: list[Any] = []

    def spread(sharding: Any, subtree: PyTree) -> None:
        shardings.extend(sharding for leaf in jtu.tree_leaves(subtree) if is_placed(leaf))

    try:
        jtu.tree_map(spread, prefix, tree, is_leaf=lambda node: node is None)
    except ValueError as error:
        raise ValueError(f"`{name}` is not a prefix of the tree that it shards: {error}") from None
    return shardings


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
