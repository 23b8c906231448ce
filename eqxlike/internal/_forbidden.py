"""Identities that raise where one transformation meets them.

They are primitives, and not `jax.custom_jvp` and `jax.custom_batching.custom_vmap`: libraries put
one around most that they compute, and each of those traces its function again.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir

from .._compat import Tracer, set_batching_rule
from .._module import Module, module_update_wrapper
from .._pytree import is_array
from .._transforms import error_if, filter_jit

Tree = TypeVar("Tree")


def _identity_primitive(
    name: str, jvp: Callable[..., Any] | None = None, batch: Callable[..., Any] | None = None
) -> Primitive:
    """The identity of one array, with a rule for `jit`, for batches, and perhaps for tangents.

    **Arguments:**

    - `batch`: the rule for batches, where that is not the identity of the batch.
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
    """The identity, which raises if it is differentiated or batched.

    **Arguments:**

    - `x`: any pytree. Leaves that are not arrays are passed through.
    - `name`: what the message calls it.

    **Raises:** `RuntimeError` while it is transformed.

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
    """The identity, which raises if it is differentiated, in whichever mode.

    **Arguments:**

    - `x`: any pytree. Leaves that are not arrays are passed through.
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


nondifferentiable_backward_p = _identity_primitive("nondifferentiable_backward", _push_forward)
ad.primitive_transposes[nondifferentiable_backward_p] = _pull_back


def nondifferentiable_backward(
    x: Tree, name: str | None = None, msg: str | None = None, symbolic: bool = True
) -> Tree:
    """The identity, which raises if it is differentiated in reverse mode.

    **Arguments:**

    - `x`: any pytree. Leaves that are not arrays are passed through.
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
    """The identity, which raises if it is batched. It has no derivative.

    **Arguments:**

    - `x`: any pytree. Leaves that are not arrays are passed through.
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


# --- A check that nothing depends on an array ---


def assert_dce(
    x: Tree,
    msg: str,
    *,
    on_error: Literal["default", "raise", "breakpoint", "nan", "off"] = "default",
) -> Tree:
    """The identity, whose outcome must be of no use: a compiled program that uses it fails.

    Outside of a jit nothing is removed, and nothing is checked.

    **Arguments:**

    - `x`: any pytree.
    - `msg`: the message of the error.
    - `on_error`: as of `error_if`.

    **Raises:** `EqxlikeRuntimeError` when the compiled program runs.
    """
    # Whatever is calculated from constants alone is a tracer only where a jit records it all.
    is_used: Any = jnp.ones((), bool)
    return error_if(x, is_used, msg, on_error=on_error) if isinstance(is_used, Tracer) else x


# --- Functions that stay functions in a compiled program ---


class _Noinline(Module):
    """The function that `noinline` returns."""

    fn: Callable[..., Any]

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return _call(self.fn, args, kwargs)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self.fn


@filter_jit
def _call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return fn(*args, **kwargs)


def noinline(
    fn: Callable[..., Any], abstract_fn: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """A function that is traced and lowered once for all calls with arguments of the same shapes.

    Where a program that is traced calls `fn` many times, that saves the time of the others.

    **Arguments:**

    - `fn`: any callable. Arrays in it, if it is a pytree, are inputs of the call.
    - `abstract_fn`: has no effect. In Equinox functions with the same may be exchanged for one
      another in a program that is compiled; here it is compiled again.

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
    return module_update_wrapper(_Noinline(fn))


# --- Several calls of one function, compiled once ---


Carry = TypeVar("Carry")


def scan_trick(
    fn: Callable[[Carry], Carry], intermediates: Sequence[Callable[[Carry], Carry]], init: Carry
) -> Carry:
    """`fn`, then each of `intermediates` with `fn` after it, in turn.

    With two of them that is `fn(second(fn(first(fn(init)))))`, with `fn` traced and compiled once,
    as the body of a scan. It is worth while where `fn` takes long to compile, and the others do
    not.

    **Arguments:**

    - `fn`, `intermediates`: from a carry to one of the same structure, shapes and dtypes.
    - `init`: a pytree of arrays.

    !!! example

        >>> print(scan_trick(lambda x: 2 * x, [lambda x: x + 1], jnp.array(1)))
        6
    """
    branches = [*intermediates, lambda carry: carry]

    def step(carry: Carry, place: Any) -> tuple[Carry, None]:
        # A batched place would turn the choice into running all branches.
        return jax.lax.switch(nonbatchable(place), branches, fn(carry)), None

    init = jtu.tree_map(jnp.asarray, init)
    return jax.lax.scan(step, init, jnp.arange(len(branches)))[0]
