"""Identities that raise where one transformation meets them.

They are primitives, and not `jax.custom_jvp` and `jax.custom_batching.custom_vmap`: libraries put
one around most that they compute, and each of those traces its function anew.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir

from .._compat import set_batching_rule
from .._pytree import is_array
from .._transforms import error_if

Tree = TypeVar("Tree")


def _identity_primitive(name: str) -> Primitive:
    """The identity of one array, without rules for any transformation but `jit`."""
    primitive = Primitive(name)
    primitive.def_impl(lambda x, **params: x)
    primitive.def_abstract_eval(lambda x, **params: x)
    mlir.register_lowering(primitive, lambda ctx, x, **params: [x])
    return primitive


def _map_arrays(primitive: Primitive, x: Tree, **params: Any) -> Tree:
    def bind(leaf: Any) -> Any:
        return primitive.bind(leaf, **params) if is_array(leaf) else leaf

    return jtu.tree_map(bind, x)


def _refuse(error: type[Exception], explain: Callable[..., str]) -> Callable[..., Any]:
    def rule(*args: Any, **params: Any) -> Any:
        raise error(explain(**params))

    return rule


def _batch(primitive: Primitive) -> Callable[..., Any]:
    def rule(_: Any, arrays: Any, axes: Any, **params: Any) -> tuple[Any, Any]:
        return primitive.bind(*arrays, **params), axes[0]

    return rule


nontraceable_p = _identity_primitive("nontraceable")
ad.primitive_jvps[nontraceable_p] = _refuse(
    RuntimeError, lambda name: f"Detected differentiation of {name}"
)
set_batching_rule(
    nontraceable_p, _refuse(RuntimeError, lambda name: f"Detected batching of {name}")
)


def nontraceable(x: Tree, *, name: str = "nontraceable operation") -> Tree:
    """The identity, which raises if it is differentiated or batched.

    **Arguments:**

    - `x`: any pytree. Leaves that are no arrays are passed through.
    - `name`: what the message calls it.

    **Raises:** `RuntimeError` while it is transformed.

    >>> jax.vmap(nontraceable)(jnp.ones(2))
    Traceback (most recent call last):
    RuntimeError: Detected batching of nontraceable operation
    ...
    """
    return _map_arrays(nontraceable_p, x, name=name)


nondifferentiable_p = _identity_primitive("nondifferentiable")
ad.primitive_jvps[nondifferentiable_p] = _refuse(RuntimeError, lambda msg: msg)


set_batching_rule(nondifferentiable_p, _batch(nondifferentiable_p))


def nondifferentiable(x: Tree, *, name: str | None = None, msg: str | None = None) -> Tree:
    """The identity, which raises if it is differentiated, in whichever mode.

    **Arguments:**

    - `x`: any pytree. Leaves that are no arrays are passed through.
    - `name`: what the message calls it.
    - `msg`: the message, if it is to be another.

    **Raises:** `RuntimeError` while it is differentiated.

    >>> jax.grad(lambda x: nondifferentiable(x, name="x"))(1.0)
    Traceback (most recent call last):
    RuntimeError: Unexpected tangent. x cannot be autodifferentiated.
    ...
    """
    if msg is None:
        msg = f"Unexpected tangent. {name or 'This operation'} cannot be autodifferentiated."
    return _map_arrays(nondifferentiable_p, x, msg=msg)


nondifferentiable_backward_p = _identity_primitive("nondifferentiable_backward")


def _push_forward(primals: Any, tangents: Any, **params: Any) -> tuple[Any, Any]:
    # Zeros without a value do not come here.
    primal, tangent = *primals, *map(ad.instantiate_zeros, tangents)
    bind = nondifferentiable_backward_p.bind
    return bind(primal, **params), bind(tangent, **params)


def _pull_back(cotangent: Any, _: Any, *, msg: str, symbolic: bool) -> list[Any]:
    if type(cotangent) is ad.Zero:
        return [None]
    if symbolic:
        raise RuntimeError(msg)
    return [error_if(cotangent, jnp.any(cotangent != 0), msg)]


ad.primitive_jvps[nondifferentiable_backward_p] = _push_forward
ad.primitive_transposes[nondifferentiable_backward_p] = _pull_back
set_batching_rule(nondifferentiable_backward_p, _batch(nondifferentiable_backward_p))


def nondifferentiable_backward(
    x: Tree, name: str | None = None, msg: str | None = None, symbolic: bool = True
) -> Tree:
    """The identity, which raises if it is differentiated in reverse mode.

    **Arguments:**

    - `x`: any pytree. Leaves that are no arrays are passed through.
    - `name`: what the message calls it.
    - `msg`: the message, if it is to be another.
    - `symbolic`: whether any cotangent is refused, at once. If not, those are that are not zero,
      when the program runs.

    **Raises:** `RuntimeError` while it is differentiated, or `EqxlikeRuntimeError` when the program
    runs.

    >>> jax.grad(lambda x: nondifferentiable_backward(x, name="x"))(1.0)
    Traceback (most recent call last):
    RuntimeError: Unexpected cotangent. x cannot be reverse-mode autodifferentiated.
    ...
    """
    if msg is None:
        name = name or "This operation"
        msg = f"Unexpected cotangent. {name} cannot be reverse-mode autodifferentiated."
    return _map_arrays(nondifferentiable_backward_p, x, msg=msg, symbolic=symbolic)


nonbatchable_p = _identity_primitive("nonbatchable")


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


set_batching_rule(nonbatchable_p, _batch_constants)


def nonbatchable(
    x: Tree,
    *,
    name: str | None = None,
    msg: str | None = None,
    allow_constant_across_batch: bool = False,
) -> Tree:
    """The identity, which raises if it is batched. It has no derivative.

    **Arguments:**

    - `x`: any pytree. Leaves that are no arrays are passed through.
    - `name`: what the message calls it.
    - `msg`: the message, if it is to be another.
    - `allow_constant_across_batch`: whether a batch is accepted of which all members are equal. The
      outcome then is that one value, not batched.

    **Raises:** `ValueError` while it is batched, or `EqxlikeRuntimeError` when the program runs and
    members of a batch differ.

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
