"""Identity functions that raise an error if they are transformed; helpers for compiled functions.

The identity functions are primitives, because `jax.custom_jvp` and
`jax.custom_batching.custom_vmap` would trace the identity at each use. Tracing would take long,
since libraries apply an identity to most values that they compute.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir

from .. import error_if, filter_jit, is_array
from .._compat import Tracer, set_batching_rule

Tree = TypeVar("Tree")


def _identity_primitive(
    name: str, jvp: Callable[..., Any] | None = None, batch: Callable[..., Any] | None = None
) -> Primitive:
    """Creates a primitive that returns its array.

    **Arguments:**

    - `jvp`: the forward-mode rule of the primitive, or `None`.
    - `batch`: the batching rule. The default rule applies the primitive to the whole batch.
    """

    def batch_as_one(_: Any, arrays: Any, axes: Any, **params: Any) -> tuple[Any, Any]:
        return primitive.bind(*arrays, **params), axes[0]

    primitive = Primitive(name)
    primitive.def_impl(lambda x, **params: x)
    primitive.def_abstract_eval(lambda x, **params: x)
    mlir.register_lowering(primitive, lambda ctx, x, **params: [x])
    if jvp is not None:
        ad.primitive_jvps[primitive] = jvp
    set_batching_rule(primitive, batch_as_one if batch is None else batch)
    return primitive


def _map_arrays(primitive: Primitive, x: Tree, **params: Any) -> Tree:
    def bind(leaf: Any) -> Any:
        return primitive.bind(leaf, **params) if is_array(leaf) else leaf

    return jtu.tree_map(bind, x)


def _refuse(error: type[Exception], explain: Callable[..., str]) -> Callable[..., Any]:
    def rule(*args: Any, **params: Any) -> Any:
        raise error(explain(**params))

    return rule


nontraceable_p = _identity_primitive(
    "nontraceable",
    _refuse(RuntimeError, lambda name: f"Detected differentiation of {name}"),
    _refuse(RuntimeError, lambda name: f"Detected batching of {name}"),
)


def nontraceable(x: Tree, *, name: str = "nontraceable operation") -> Tree:
    """Returns `x`, and raises an error if it is differentiated or batched.

    **Arguments:**

    - `x`: any pytree. Leaves that are not arrays are passed through.
    - `name`: name of the operation in the message.

    **Raises:** `RuntimeError` when `x` is differentiated or batched.

    >>> jax.vmap(nontraceable)(jnp.ones(2))
    Traceback (most recent call last):
    RuntimeError: Detected batching of nontraceable operation
    ...
    """
    return _map_arrays(nontraceable_p, x, name=name)


nondifferentiable_p = _identity_primitive(
    "nondifferentiable", _refuse(RuntimeError, lambda msg: msg)
)


def nondifferentiable(x: Tree, *, name: str | None = None, msg: str | None = None) -> Tree:
    """Returns `x`, and raises an error if it is differentiated in forward or reverse mode.

    **Arguments:**

    - `x`: any pytree. Leaves that are not arrays are passed through.
    - `name`: name of the operation in the message.
    - `msg`: replaces the message.

    **Raises:** `RuntimeError` when `x` is differentiated.

    >>> jax.grad(lambda x: nondifferentiable(x, name="x"))(1.0)
    Traceback (most recent call last):
    RuntimeError: Unexpected tangent. x cannot be autodifferentiated.
    ...
    """
    if msg is None:
        msg = f"Unexpected tangent. {name or 'This operation'} cannot be autodifferentiated."
    return _map_arrays(nondifferentiable_p, x, msg=msg)


def _push_forward(primals: Any, tangents: Any, **params: Any) -> tuple[Any, Any]:
    # JAX calls this rule only if the tangent is not a symbolic zero.
    primal, tangent = *primals, *map(ad.instantiate_zeros, tangents)
    bind = nondifferentiable_backward_p.bind
    return bind(primal, **params), bind(tangent, **params)


def _pull_back(cotangent: Any, _: Any, *, msg: str, symbolic: bool) -> list[Any]:
    if type(cotangent) is ad.Zero:
        return [None]
    if symbolic:
        raise RuntimeError(msg)
    return [error_if(cotangent, jnp.any(cotangent != 0), msg)]


nondifferentiable_backward_p = _identity_primitive("nondifferentiable_backward", _push_forward)
ad.primitive_transposes[nondifferentiable_backward_p] = _pull_back


def nondifferentiable_backward(
    x: Tree, name: str | None = None, msg: str | None = None, symbolic: bool = True
) -> Tree:
    """Returns `x`, and raises an error if it is differentiated in reverse mode.

    **Arguments:**

    - `x`: any pytree. Leaves that are not arrays are passed through.
    - `name`: name of the operation in the message.
    - `msg`: replaces the message.
    - `symbolic`: if `True`, any cotangent raises an error during tracing. If `False`, the compiled
      program raises an error at run time if the cotangent is not zero.

    **Raises:** `RuntimeError` when `x` is differentiated. If `symbolic` is `False`, the error is an
    `EqxlikeRuntimeError` when the program runs.

    >>> jax.grad(lambda x: nondifferentiable_backward(x, name="x"))(1.0)
    Traceback (most recent call last):
    RuntimeError: Unexpected cotangent. x cannot be reverse-mode autodifferentiated.
    ...
    """
    if msg is None:
        name = name or "This operation"
        msg = f"Unexpected cotangent. {name} cannot be reverse-mode autodifferentiated."
    return _map_arrays(nondifferentiable_backward_p, x, msg=msg, symbolic=symbolic)


def _batch_constants(
    _: Any, arrays: Any, axes: Any, *, msg: str, allow_constant_across_batch: bool
) -> tuple[Any, Any]:
    if not allow_constant_across_batch:
        raise ValueError(msg)
    (array,), (axis,) = arrays, axes
    is_constant = jnp.min(array, axis) == jnp.max(array, axis)
    array = error_if(
        array,
        ~is_constant,
        "Nonconstant batch. This operation has received a batch of values that were expected to be "
        "constant. This is probably an internal error in the library you are using.",
    )
    return jax.lax.index_in_dim(array, 0, axis, keepdims=False), None


nonbatchable_p = _identity_primitive("nonbatchable", batch=_batch_constants)


def nonbatchable(
    x: Tree,
    *,
    name: str | None = None,
    msg: str | None = None,
    allow_constant_across_batch: bool = False,
) -> Tree:
    """Returns `x`, and raises an error if it is batched. `x` cannot be differentiated either.

    **Arguments:**

    - `x`: any pytree. Leaves that are not arrays are passed through.
    - `name`: name of the operation in the message.
    - `msg`: replaces the message.
    - `allow_constant_across_batch`: if `True`, a batch whose members are all equal is accepted. The
      result is then a single member, without a batch axis.

    **Raises:** `ValueError` when `x` is batched. If `allow_constant_across_batch` is `True`, the
    program raises an `EqxlikeRuntimeError` instead when it runs with members that differ.

    >>> jax.vmap(lambda x: nonbatchable(x, name="x"))(jnp.ones(2))
    Traceback (most recent call last):
    ValueError: Unexpected batch tracer. x cannot be vmap'd. ...
    """
    if msg is None:
        msg = (
            f"Unexpected batch tracer. {name or 'This operation'} cannot be vmap'd. This is "
            "probably an internal error in the library you are using."
        )
    return _map_arrays(
        nonbatchable_p, x, msg=msg, allow_constant_across_batch=allow_constant_across_batch
    )


# --- A check that a program does not use an array ---


def assert_dce(
    x: Tree,
    msg: str,
    *,
    on_error: Literal["default", "raise", "breakpoint", "nan", "off"] = "default",
) -> Tree:
    """Returns `x`, and asserts that dead code elimination removes the result.

    A compiled program that uses the result raises an error when it runs. Outside `jit`, nothing is
    checked, because no code is eliminated there.

    **Arguments:**

    - `x`: any pytree.
    - `msg`: the error message.
    - `on_error`: see `error_if`.

    **Raises:** `EqxlikeRuntimeError` when a compiled program that uses the result runs.
    """
    # Inside `jit`, `is_used` is a tracer, because JAX traces operations on constants too. Outside
    # `jit`, `is_used` is an array.
    is_used: Any = jnp.ones((), bool)
    return error_if(x, is_used, msg, on_error=on_error) if isinstance(is_used, Tracer) else x


# --- Functions that are traced and lowered once ---


def noinline(
    fn: Callable[..., Any], abstract_fn: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """Traces and lowers a function once for all calls with the same shapes inside a program.

    This saves tracing time if a program calls `fn` many times.

    **Arguments:**

    - `fn`: any callable. If it is a pytree, its arrays are inputs of the call.
    - `abstract_fn`: has no effect. In Equinox, functions with the same `abstract_fn` can replace
      each other in a compiled program. In eqxlike, a program with another function is compiled
      again.

    !!! example

        >>> import jax
        >>> @noinline
        ... def double(x):
        ...     print("traced")
        ...     return 2 * x
        >>> print(jax.jit(lambda x: double(x) + double(x + 1))(1.0))
        traced
        6.0
    """
    return filter_jit(fn)


# --- `scan_trick` ---


Carry = TypeVar("Carry")


def scan_trick(
    fn: Callable[[Carry], Carry], intermediates: Sequence[Callable[[Carry], Carry]], init: Carry
) -> Carry:
    """Calls `fn` several times with other functions in between, and compiles `fn` only once.

    With two `intermediates` it computes `fn(second(fn(first(fn(init)))))`. `fn` becomes the body of
    a scan. Use it if `fn` takes long to compile and the other functions do not.

    **Arguments:**

    - `fn`, `intermediates`: functions that take a carry and return a carry of the same structure,
      shapes and dtypes.
    - `init`: the initial carry, a pytree of arrays.

    !!! example

        >>> print(scan_trick(lambda x: 2 * x, [lambda x: x + 1], jnp.array(1)))
        6
    """
    branches = [*intermediates, lambda carry: carry]

    def step(carry: Carry, place: Any) -> tuple[Carry, None]:
        # The index is `nonbatchable`, because `switch` runs all branches for a batched index.
        return jax.lax.switch(nonbatchable(place), branches, fn(carry)), None

    init = jtu.tree_map(jnp.asarray, init)
    return jax.lax.scan(step, init, jnp.arange(len(branches)))[0]
