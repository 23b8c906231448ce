"""Custom primitives: with rules of pytrees, and identity functions that refuse transformations."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.core import AbstractValue
from jax.extend.core import Primitive, mapped_aval, unmapped_aval
from jax.interpreters import ad, mlir
from jaxtyping import PyTree

from .. import error_if, filter_jit, is_array
from .._compat import Tracer, set_batching_rule
from .._partition import UNTRACED
from .._transforms._derivatives._linear_call import fill, select
from ..extend import Rest, has_tangent, split

# JAX binds only the arrays in the arguments. The static rest of the arguments is the parameter
# `inputs`.
#
# A primitive also returns only arrays. `filter_primitive_bind` creates an `_Output` and passes it
# as the parameter `output`. The rule stores the static rest of its output there, and
# `filter_primitive_bind` reads it after binding.


class _Output:
    """Holds the static part of a primitive's output. JAX compares these objects by identity."""

    __slots__ = ("rest",)

    def __init__(self) -> None:
        self.rest: Rest = UNTRACED

    def take(self, tree: PyTree) -> list[Any]:
        """Stores the static part of `tree`, and returns its arrays or abstract values."""
        arrays, self.rest = split(tree, lambda x: is_array(x) or isinstance(x, AbstractValue))
        return arrays


def _as_array(value: Any) -> Any:
    """Converts a Python number to an array: JAX may pass numbers to rules instead of arrays."""
    return jnp.asarray(value) if isinstance(value, bool | int | float | complex) else value


def filter_primitive_bind(prim: Primitive, *args: PyTree) -> PyTree:
    """Calls a primitive whose rules are made by `filter_primitive_def` and similar functions.

    **Arguments:**

    - `prim`: a primitive whose attribute `multiple_results` is `True`.
    - `*args`: any pytrees. Leaves that are not arrays, including Python numbers, are static.

    **Returns:** the output of the rule, which may be any pytree.
    """
    arrays, inputs = split(args)
    output = _Output()
    arrays = prim.bind(*arrays, inputs=inputs, output=output)
    return output.rest.merge(arrays)


def filter_primitive_def(rule: Callable[..., PyTree]) -> Callable[..., list[Any]]:
    """Converts a function of pytrees to a rule for `def_impl` or `def_abstract_eval`.

    For `def_abstract_eval`, the function takes and returns a `jax.core.ShapedArray` instead of each
    array.
    """

    @functools.wraps(rule)
    def of_arrays(*arrays: Any, inputs: Rest, output: _Output) -> list[Any]:
        return output.take(rule(*inputs.merge(map(_as_array, arrays))))

    return of_arrays


def filter_primitive_jvp(rule: Callable[[Any, Any], tuple[PyTree, PyTree]]) -> Callable[..., Any]:
    """Converts a function of pytrees to a forward-mode rule.

    The function takes the primals and their tangents, and returns the output and its tangents. The
    tangents have the structure of the primals or of the output. A tangent is `None` if it is zero
    or if the leaf is not an array.
    """

    @functools.wraps(rule)
    def of_arrays(primals: Any, tangents: Any, *, inputs: Rest, output: _Output) -> Any:
        along = [each if has_tangent(each) else None for each in map(_as_array, tangents)]
        value, tangent = rule(inputs.merge(map(_as_array, primals)), inputs.merge_into(None, along))
        values = output.take(value)
        found = _leaves_at_arrays(output.rest, tangent, "tangent", "output")
        pairs = zip(values, found, strict=True)
        return values, [_zero(value) if along is None else along for value, along in pairs]

    return of_arrays


def filter_primitive_transpose(
    rule: Any = None, *, materialise_zeros: bool = False
) -> Callable[..., Any]:
    """Converts a function of pytrees to a transpose rule.

    The function takes the inputs and the cotangents of the output, and returns the cotangents of
    the inputs. In the inputs, a `jax.interpreters.ad.UndefinedPrimal` replaces each linear array.
    The cotangents of the output have the structure of the output. A cotangent is `None` if it is
    zero or if the leaf is not an array. The returned cotangents must have the structure of the
    inputs, with `None` for leaves that are not linear.

    **Arguments:**

    - `rule`: the function, called as `rule(inputs, cotangents)`. If it is not given, a decorator is
      returned.
    - `materialise_zeros`: if `True`, a cotangent that is zero is an array of zeros, not `None`.
    """
    if rule is None:
        return functools.partial(filter_primitive_transpose, materialise_zeros=materialise_zeros)

    @functools.wraps(rule)
    def of_arrays(cotangents: Any, *arrays: Any, inputs: Rest, output: _Output) -> list[Any]:
        if materialise_zeros:
            cotangents = map(ad.instantiate_zeros, cotangents)
        along = [None if type(each) is ad.Zero else each for each in cotangents]
        found = rule(inputs.merge(map(_as_array, arrays)), output.rest.merge_into(None, along))
        found = _leaves_at_arrays(inputs, found, "cotangents", "inputs")
        return [
            each if ad.is_undefined_primal(array) else None
            for each, array in zip(found, arrays, strict=True)
        ]

    return of_arrays


def filter_primitive_batching(
    rule: Callable[[Any, Any], tuple[PyTree, PyTree]],
) -> Callable[..., Any]:
    """Converts a function of pytrees to a batching rule.

    The function takes the inputs and their batch axes, and returns the output and its batch axes.
    Batch axes have the structure of the inputs or of the output. A batch axis is `None` if the leaf
    is not batched or not an array.
    """

    @functools.wraps(rule)
    def of_arrays(arrays: Any, axes: Any, *, inputs: Rest, output: _Output) -> Any:
        value, out_axes = rule(inputs.merge(map(_as_array, arrays)), inputs.merge_into(None, axes))
        values = output.take(value)
        return values, _leaves_at_arrays(output.rest, out_axes, "batch axes", "output")

    return of_arrays


def _leaves_at_arrays(rest: Rest, tree: PyTree, what: str, of: str) -> list[Any]:
    """The leaves of `tree` at the positions of the arrays of `rest`. `None` counts as a leaf."""
    try:
        return rest.take(rest.treedef.flatten_up_to(tree))
    except ValueError as error:
        raise ValueError(
            f"The rule of a primitive returned {what} whose structure differs from the {of}: "
            f"{error}"
        ) from None


def _zero(value: Any) -> ad.Zero:
    return ad.Zero(jax.typeof(value).to_tangent_aval())


# --- Primitives with a derived batching rule ---


Rule = Callable[..., Any]


def create_vprim(
    name: str, impl: Rule, abstract_eval: Rule, jvp: Rule | None, transpose: Rule | None
) -> Primitive:
    """Creates a primitive whose batching rule applies `jax.vmap` to its other rules.

    **Arguments:**

    - `name`: name of the primitive.
    - `impl`: a function that takes arrays and returns a list of arrays. It must be traceable, since
      it is also used for lowering.
    - `abstract_eval`: a function that takes `jax.core.ShapedArray`s and returns a list of them.
    - `jvp`: a rule for `jax.interpreters.ad.primitive_jvps`.
    - `transpose`: a rule for `jax.interpreters.ad.primitive_transposes`.

    `jvp` and `transpose` may be `None`. The primitive then has no such derivative.

    All rules receive the parameters of the primitive as keyword arguments. `filter_primitive_def`,
    `filter_primitive_jvp` and `filter_primitive_transpose` make rules from functions of pytrees.
    """
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(impl)
    primitive.def_abstract_eval(abstract_eval)
    mlir.register_lowering(primitive, mlir.lower_fun(impl, multiple_results=True))
    if jvp is not None:
        ad.primitive_jvps[primitive] = jvp
    if transpose is not None:
        ad.primitive_transposes[primitive] = transpose

    def rules(**params: Any) -> _Rules:
        every = (impl, abstract_eval, jvp or missing, transpose or missing)
        return _Rules(*(functools.partial(rule, **params) for rule in every))

    def missing(*_: Any, **params: Any) -> Any:
        raise NotImplementedError(f"The primitive {name!r} has no rule for this derivative.")

    set_batching_rule(primitive, functools.partial(_batch, rules))
    return primitive


@dataclasses.dataclass(frozen=True, eq=False)
class _Rules:
    """The rules of a primitive for given parameters."""

    impl: Rule
    abstract_eval: Rule
    jvp: Rule
    transpose: Rule


# This primitive replaces a primitive of `create_vprim` inside at least one `vmap`. The parameter
# `rules` has the rules for the batch.
vmapped_p = Primitive("vprim")
vmapped_p.multiple_results = True


def _batch(
    make_rules: Callable[..., Any], axis: Any, arrays: Any, axes: Any, /, **params: Any
) -> tuple[list[Any], list[int]]:
    """The batching rule of all primitives of this file. Binds `vmapped_p` with batched rules."""
    outputs = vmapped_p.bind(*arrays, rules=_Mapped(make_rules(**params), axis, tuple(axes)))
    return outputs, [0] * len(outputs)


@dataclasses.dataclass(frozen=True, eq=False)
class _Mapped:
    """The rules for a batch, from the rules for one member. The batch axis of outputs is 0."""

    member: "_Rules | _Mapped"
    axis: Any
    axes: tuple[int | None, ...]

    def _vmap(self, function: Rule, in_axes: Any) -> Rule:
        options = {}
        if isinstance(self.axis.name, str):
            options["axis_name"] = self.axis.name
        if self.axis.spmd_name:
            options["spmd_axis_name"] = self.axis.spmd_name
        return jax.vmap(function, in_axes=in_axes, axis_size=self.axis.size, **options)

    def _member_aval(self, aval: Any, axis: int | None) -> Any:
        return aval if axis is None else mapped_aval(self.axis.size, axis, aval)

    def impl(self, *arrays: Any) -> list[Any]:
        return self._vmap(lambda arrays: self.member.impl(*arrays), (list(self.axes),))(
            list(arrays)
        )

    def abstract_eval(self, *avals: Any) -> list[Any]:
        of_member = map(self._member_aval, avals, self.axes)
        return [
            unmapped_aval(self.axis.size, 0, each) for each in self.member.abstract_eval(*of_member)
        ]

    def jvp(self, primals: Any, tangents: Any) -> tuple[list[Any], list[Any]]:
        is_moving = [type(tangent) is not ad.Zero for tangent in tangents]
        is_output_moving = []

        def of_member(primals: list[Any], moving: list[Any]) -> tuple[list[Any], list[Any]]:
            filled = fill(moving, map(_zero, primals), is_moving)
            values, along = self.member.jvp(primals, filled)
            is_output_moving[:] = [type(each) is not ad.Zero for each in along]
            return list(values), select(along, is_output_moving)

        in_axes = list(self.axes), select(self.axes, is_moving)
        mapped = self._vmap(of_member, in_axes)
        values, moving = mapped(list(primals), select(tangents, is_moving))
        return values, fill(moving, map(_zero, values), is_output_moving)

    def transpose(self, cotangents: Any, *arrays: Any) -> list[Any]:
        is_known = [not ad.is_undefined_primal(array) for array in arrays]
        is_moving = [type(cotangent) is not ad.Zero for cotangent in cotangents]
        is_found = []
        undefined = [
            None if known else ad.UndefinedPrimal(self._member_aval(array.aval, axis))
            for known, array, axis in zip(is_known, arrays, self.axes, strict=True)
        ]
        zeros = [
            None if moving else ad.Zero(self._member_aval(cotangent.aval, 0))
            for moving, cotangent in zip(is_moving, cotangents, strict=True)
        ]

        def of_member(moving: list[Any], known: list[Any]) -> list[Any]:
            cotangents = fill(moving, zeros, is_moving)
            found = self.member.transpose(cotangents, *fill(known, undefined, is_known))
            is_found[:] = [each is not None and type(each) is not ad.Zero for each in found]
            return select(found, is_found)

        mapped = self._vmap(of_member, (0, select(self.axes, is_known)))
        found = mapped(select(cotangents, is_moving), select(arrays, is_known))
        found = [
            each.sum(0) if axis is None else jnp.moveaxis(each, 0, axis)
            for each, axis in zip(found, select(self.axes, is_found), strict=True)
        ]
        return fill(found, [None] * len(is_found), is_found)


def _impl(*arrays: Any, rules: _Mapped) -> list[Any]:
    return rules.impl(*arrays)


vmapped_p.def_impl(_impl)
vmapped_p.def_abstract_eval(lambda *avals, rules: rules.abstract_eval(*avals))
mlir.register_lowering(vmapped_p, mlir.lower_fun(_impl, multiple_results=True))
ad.primitive_jvps[vmapped_p] = lambda primals, tangents, *, rules: rules.jvp(primals, tangents)
ad.primitive_transposes[vmapped_p] = lambda cotangents, *arrays, rules: rules.transpose(
    cotangents, *arrays
)
set_batching_rule(vmapped_p, functools.partial(_batch, lambda rules: rules))


# --- Identity functions that raise an error if they are transformed ---


# The identity functions are primitives, because `jax.custom_jvp` and
# `jax.custom_batching.custom_vmap` would trace the identity at each use. Tracing would take long,
# since libraries apply an identity to most values that they compute.


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


def _refuse(explain: Callable[..., str]) -> Callable[..., Any]:
    def rule(*args: Any, **params: Any) -> Any:
        raise RuntimeError(explain(**params))

    return rule


nontraceable_p = _identity_primitive(
    "nontraceable",
    _refuse(lambda name: f"Detected differentiation of {name}"),
    _refuse(lambda name: f"Detected batching of {name}"),
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


nondifferentiable_p = _identity_primitive("nondifferentiable", _refuse(lambda msg: msg))


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
