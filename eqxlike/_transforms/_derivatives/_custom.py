"""Custom derivative rules, and `filter_closure_convert`, which gives them closed-over arrays."""

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any, Generic

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun
from jaxtyping import Array, PyTree

from ..._compat import vary, varying_axes
from ..._module import Module, bind, field
from ..._partition import UNTRACED, Rest, split
from ..._pytree import (
    is_array,
    is_array_or_struct,
    is_array_or_traced_reference,
    is_inexact_array,
    is_inexact_array_like,
    tree_pformat,
)
from .._flat_call import path_of, refuse_references
from .._signatures import Call, Function, Output, Params, check_callable, pair
from ._linear_call import batch_first
from ._products import check_structure, checked_tangents, match_leaves, tangents_of, varying_like

# --- The common base of functions with custom derivatives ---


class CustomFunction:
    """Base class of functions with a custom derivative.

    This is not a Module, because the derivative is set after construction. Copying and pickling
    store only the name of the function, as for Python functions.
    """

    __name__: str
    __wrapped__: Callable[..., Any]
    _wants_zeros: bool = False

    def __init__(self, fn: Callable[..., Any]):
        check_callable(fn, type(self).__name__)
        functools.update_wrapper(self, fn, updated=())  # pyright: ignore

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else bind(self, instance)  # pyright: ignore

    def __reduce__(self) -> str:
        return getattr(self, "__qualname__", repr(self))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.__wrapped__!r})"

    @property
    def _label(self) -> str:
        """The name of the function in messages."""
        return getattr(self, "__name__", repr(self.__wrapped__))

    def _call(self, of_arrays: Callable[..., Any], *arrays: list[Any]) -> Any:
        """Calls `of_arrays`; adds a note to JAX's error about an unexpected tracer."""
        try:
            return of_arrays(*arrays)
        except jax.errors.UnexpectedTracerError as error:
            error.add_note(
                f"This was while {self._label} was called. {self._label} has a custom derivative. "
                "This function, or a function among its arguments, may close over an array that is "
                "being differentiated. A custom derivative does not see such an array: pass the "
                "array as an argument, or convert the closure with "
                "`eqxlike.filter_closure_convert`."
            )
            raise


# --- Functions with a custom forward-mode derivative ---


class filter_custom_jvp(CustomFunction):
    """Gives a function of any arguments a custom forward-mode derivative.

    This is `jax.custom_jvp` without `nondiff_argnums`: only floating-point and complex arrays are
    differentiated, and keyword arguments never are.

    **Arguments:**

    - `fn`: a function of any arguments that returns any pytree.

    **Returns:** a function of the same arguments. Its method `def_jvp` sets the rule, a function
    `rule(primals, tangents, **kwargs)` that returns `(value, tangent)`. `primals` is the tuple of
    positional arguments. `tangents` has the structure of `primals`, with `None` for leaves that are
    not differentiable or not being differentiated. The returned tangent has the structure of the
    value, with `None` for zeros and for leaves that are not differentiable.

    **Raises:**

    - `AttributeError`, when the function is called, if there is no rule.
    - `ValueError`, when the function is differentiated, if a keyword argument is differentiated, or
      if the output of the rule has a wrong structure or shape. The message names the path.
    - `TypeError`, when the function is differentiated, if the output of the rule has a wrong dtype.
      The message names the path.

    !!! example

        >>> import eqxlike as eqx, jax.numpy as jnp
        >>> @eqx.filter_custom_jvp
        ... def clip(x, limit, *, name):
        ...     return jnp.minimum(x, limit)
        >>> @clip.def_jvp
        ... def clip_jvp(primals, tangents, *, name):
        ...     return clip(*primals, name=name), tangents[0]  # Straight through.
        >>> print(eqx.filter_grad(clip)(jnp.array(3.0), 2.0, name="straight"))
        1.0
    """

    _rule: Any = None

    def def_jvp(self, fn_jvp: Function) -> Function:
        """Sets the rule, and returns it."""
        check_callable(fn_jvp, "filter_custom_jvp.def_jvp")
        self._rule, self._wants_zeros = fn_jvp, False
        return fn_jvp

    def defjvp(self, fn_jvp: Function) -> Function:
        """Sets a rule that gets zeros instead of `None` as tangents. Deprecated: use `def_jvp`.

        The zeros are the tangents of arrays that are differentiable, but not being differentiated.
        """
        warnings.warn(
            "`filter_custom_jvp.defjvp` is deprecated: use `def_jvp`. Its rule gets `None`, "
            "not zeros, as the tangent of an array that is not being differentiated.",
            DeprecationWarning,
            stacklevel=2,
        )
        check_callable(fn_jvp, "filter_custom_jvp.defjvp")
        self._rule, self._wants_zeros = fn_jvp, True
        return fn_jvp

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if self._rule is None:
            raise AttributeError(
                f"{self._label} has no custom derivative yet: decorate its rule with "
                f"`@{self._label}.def_jvp`."
            )
        arrays, rest = split(Call(args, kwargs))
        call = _FlatJvp(self.__wrapped__, self._rule, self._wants_zeros, self._label, rest)
        of_arrays = jax.custom_jvp(batch_first(call.value))
        of_arrays.defjvp(batch_first(call.value_and_tangent), symbolic_zeros=True)
        numbers = self._call(of_arrays, arrays)
        return call.value_rest.merge(numbers)


@dataclasses.dataclass
class _FlatJvp:
    """One call. The methods are the function and its derivative, as functions of arrays only.

    A call keeps the rule that was set when it was made.
    """

    function: Callable[..., Any]
    rule: Callable[..., Any]
    wants_zeros: bool
    label: str
    rest: Rest
    value_rest: Rest = UNTRACED

    def value(self, arrays: list[Any]) -> list[Any]:
        args, kwargs = self.rest.merge(arrays)
        numbers, self.value_rest = split(self.function(*args, **kwargs), _is_array_or_number)
        return numbers

    def value_and_tangent(
        self, primals: tuple[list[Any]], tangents: tuple[list[Any]]
    ) -> tuple[list[Any], list[Any]]:
        args, kwargs = self.rest.merge(*primals)
        directions = [
            None
            if isinstance(tangent, SymbolicZero) or not is_inexact_array_like(leaf)
            else tangent
            for leaf, tangent in zip(*primals, *tangents, strict=True)
        ]
        of_kwargs = self.rest.merge_into(None, directions).kwargs
        paths = [f"kwargs{jtu.keystr(path)}" for path, _ in jtu.tree_leaves_with_path(of_kwargs)]
        if paths:
            raise ValueError(
                f"{self.label} was differentiated with respect to {', '.join(paths)}. A rule of "
                "`filter_custom_jvp` gets no tangents of keyword arguments: pass the argument by "
                "position, or pass `jax.lax.stop_gradient` of it."
            )
        if self.wants_zeros:
            directions = [
                jnp.zeros_like(leaf) if tangent is None and is_inexact_array_like(leaf) else tangent
                for leaf, tangent in zip(*primals, directions, strict=True)
            ]
        value, tangent = pair(
            self.rule(args, self.rest.merge_into(None, directions).args, **kwargs),
            f"The rule of {self.label} must return a pair (value, tangent)",
        )
        if self.value_rest is not UNTRACED:
            # JAX already has the output of the function, so the value must have the same structure.
            check_structure(self.value_rest.treedef, value, "value of the rule", "value")
        numbers, self.value_rest = split(value, _is_array_or_number)
        differentiable = (leaf if is_inexact_array_like(leaf) else None for leaf in numbers)
        types = self.value_rest.leaves_into(None, differentiable)
        found = tangents_of(types, self.value_rest.treedef, tangent, "tangent", "value")
        found = self.value_rest.take(found)
        # Inside `jax.shard_map`, JAX raises an error if a value varies along a mesh axis and its
        # tangent does not, or the reverse.
        axes = [
            varying_axes(leaf) | varying_axes(each)
            for leaf, each in zip(numbers, found, strict=True)
        ]
        numbers = list(map(vary, numbers, axes))
        return numbers, [
            SymbolicZero.from_primal_value(leaf) if each is None else vary(each, axes_of)
            for leaf, each, axes_of in zip(numbers, found, axes, strict=True)
        ]


def _is_array_or_number(leaf: Any) -> bool:
    # An `int` or a `bool` has no tangent, so the function gets it unchanged, not as an array.
    return is_array_or_traced_reference(leaf) or isinstance(leaf, float | complex)


# --- Functions with a custom reverse-mode derivative ---


class filter_custom_vjp(CustomFunction):
    """Gives a function of any arguments a custom reverse-mode derivative.

    This is `jax.custom_vjp` with a simpler interface. Only the first argument is differentiated.
    The backward pass gets the residuals and all arguments.

    **Arguments:**

    - `fn`: a function `fn(vjp_arg, *args, **kwargs)` of any arguments that returns any pytree.

    **Returns:** a function of the same arguments, with two methods that set its derivative:

    - `def_fwd` takes `forward(perturbed, vjp_arg, *args, **kwargs)`, which returns
      `(value, residuals)`. `perturbed` has the structure of `vjp_arg`, with `True` for each leaf
      that is differentiated and `False` for all others. `residuals` may be any pytree.
    - `def_bwd` takes `backward(residuals, cotangent, perturbed, vjp_arg, *args, **kwargs)`, which
      returns the gradient with respect to `vjp_arg`. `cotangent` has the structure of the value,
      with `None` for zeros and for leaves that are not differentiable. The gradient has the
      structure of `vjp_arg`, with `None` for zeros. At leaves that are not perturbed, the gradient
      is ignored.

    **Raises:**

    - `RuntimeError`, when the function is called, if its derivative was not set.
    - `RuntimeError`, when the function is differentiated, if an argument other than the first is
      differentiated. The message names the path.
    - `ValueError` if the gradient has a wrong structure or shape. The message names the path.
    - `TypeError` if the gradient has a wrong dtype. The message names the path.

    !!! example

        >>> import eqxlike as eqx, jax.numpy as jnp
        >>> @eqx.filter_custom_vjp
        ... def identity(x, bound):
        ...     return x
        >>> @identity.def_fwd
        ... def identity_forward(perturbed, x, bound):
        ...     return x, None
        >>> @identity.def_bwd
        ... def identity_backward(residuals, cotangent, perturbed, x, bound):
        ...     return jnp.clip(cotangent, -bound, bound)  # Gradients are clipped.
        >>> print(eqx.filter_grad(lambda x: identity(x, 0.5) ** 2)(jnp.array(3.0)))
        0.5
    """

    _forward: Any = None
    _backward: Any = None

    def def_fwd(self, fn_fwd: Function) -> Function:
        """Sets the forward pass, and returns it."""
        check_callable(fn_fwd, "filter_custom_vjp.def_fwd")
        self._forward, self._wants_zeros = fn_fwd, False
        return fn_fwd

    def def_bwd(self, fn_bwd: Function) -> Function:
        """Sets the backward pass, and returns it."""
        check_callable(fn_bwd, "filter_custom_vjp.def_bwd")
        self._backward, self._wants_zeros = fn_bwd, False
        return fn_bwd

    def defvjp(self, fn_fwd: Function, fn_bwd: Function) -> None:
        """Sets both passes, which get no `perturbed`. Deprecated: use `def_fwd` and `def_bwd`.

        The backward pass gets zeros instead of `None` as the cotangents of differentiable arrays.
        """
        warnings.warn(
            "`filter_custom_vjp.defvjp` is deprecated: use `def_fwd` and `def_bwd`. Their "
            "functions get `perturbed`, which marks the leaves that are being differentiated, and "
            "`None` instead of zeros as cotangents.",
            DeprecationWarning,
            stacklevel=2,
        )
        check_callable(fn_fwd, "filter_custom_vjp.defvjp")
        check_callable(fn_bwd, "filter_custom_vjp.defvjp")

        def forward(perturbed: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
            return fn_fwd(*args, **kwargs)

        def backward(residuals: Any, cotangent: Any, perturbed: Any, *args: Any, **kwargs: Any):
            return fn_bwd(residuals, cotangent, *args, **kwargs)

        self._forward, self._backward, self._wants_zeros = forward, backward, True

    def __call__(self, vjp_arg: PyTree, /, *args: Any, **kwargs: Any) -> Any:
        if self._forward is None or self._backward is None:
            raise RuntimeError(
                f"{self._label} has no custom derivative yet: decorate its forward pass with "
                f"`@{self._label}.def_fwd` and its backward pass with `@{self._label}.def_bwd`."
            )
        arrays, vjp_arg_rest = split(vjp_arg)
        others, others_rest = split(Call(args, kwargs))
        call = _FlatVjp(
            self.__wrapped__,
            self._forward,
            self._backward,
            self._wants_zeros,
            self._label,
            vjp_arg_rest,
            others_rest,
        )
        of_arrays = jax.custom_vjp(batch_first(call.value))
        of_arrays.defvjp(batch_first(call.forward), call.backward, symbolic_zeros=True)
        if jax.sharding.get_abstract_mesh().manual_axes:
            # `jax.shard_map` outside `jax.jit` rejects `symbolic_zeros` (jax 0.10.2 to 0.12.0.1).
            of_arrays = jax.jit(of_arrays)
        value_arrays = self._call(of_arrays, arrays, others)
        return call.value_rest.merge(value_arrays)


class _Residuals(Module):
    """The residuals that the forward pass leaves for the backward pass.

    - `arrays`, `rest`: the tree `(residuals, vjp_arg, args, kwargs)`, split into its arrays and the
      rest.
    """

    arrays: list[Any]
    rest: Rest = field(static=True)
    value_rest: Rest = field(static=True)
    is_perturbed: tuple[bool, ...] = field(static=True)


@dataclasses.dataclass
class _FlatVjp:
    """One call. The methods are the function and its derivative, as functions of arrays only.

    A call keeps the passes that were set when it was made.
    """

    function: Callable[..., Any]
    user_forward: Callable[..., Any]
    user_backward: Callable[..., Any]
    wants_zeros: bool
    label: str
    vjp_arg_rest: Rest
    others_rest: Rest
    value_rest: Rest = UNTRACED

    def value(self, arrays: list[Any], others: list[Any]) -> list[Any]:
        args, kwargs = self.others_rest.merge(others)
        value = self.function(self.vjp_arg_rest.merge(arrays), *args, **kwargs)
        value_arrays, self.value_rest = split(value, is_array_or_traced_reference)
        return value_arrays

    def forward(
        self, arrays: list[CustomVJPPrimal], others: list[CustomVJPPrimal]
    ) -> tuple[list[Any], _Residuals]:
        of_others = (_is_perturbed(each) or None for each in others)
        perturbed = self.others_rest.merge_into(None, of_others)
        paths = [jtu.keystr(path)[1:] for path, _ in jtu.tree_leaves_with_path(perturbed)]
        if paths:
            raise RuntimeError(
                f"{self.label} was differentiated with respect to {', '.join(paths)}. "
                "`filter_custom_vjp` differentiates only the first argument: collect all "
                "differentiated arguments in a tuple and pass it first, or pass "
                "`jax.lax.stop_gradient` of these."
            )
        vjp_arg = self.vjp_arg_rest.merge(map(_value, arrays))
        args, kwargs = self.others_rest.merge(map(_value, others))
        is_perturbed = tuple(map(_is_perturbed, arrays))
        perturbed = self.vjp_arg_rest.merge_into(False, is_perturbed)
        value, residuals = pair(
            self.user_forward(perturbed, vjp_arg, *args, **kwargs),
            f"The forward pass of {self.label} must return a pair (value, residuals)",
        )
        if self.value_rest is not UNTRACED:
            # JAX already has the output of the function, so the value must have the same structure.
            check_structure(self.value_rest.treedef, value, "value of the forward pass", "value")
        value_arrays, self.value_rest = split(value, is_array_or_traced_reference)
        kept, rest = split((residuals, vjp_arg, args, kwargs))
        return value_arrays, _Residuals(kept, rest, self.value_rest, is_perturbed)

    def backward(self, kept: _Residuals, cotangents: list[Any]) -> tuple[list[Any], None]:
        residuals, vjp_arg, args, kwargs = kept.rest.merge(kept.arrays)
        cotangent = kept.value_rest.merge_into(None, map(self._as_passed, cotangents))
        perturbed = self.vjp_arg_rest.merge_into(False, kept.is_perturbed)
        gradient = self.user_backward(residuals, cotangent, perturbed, vjp_arg, *args, **kwargs)
        treedef = self.vjp_arg_rest.treedef
        found = match_leaves(treedef, gradient, "gradient", "vjp_arg")
        wanted = self.vjp_arg_rest.leaves_into(False, kept.is_perturbed)
        leaves = jtu.tree_leaves(vjp_arg)
        types = [leaf if flag else None for leaf, flag in zip(leaves, wanted, strict=True)]
        # Gradients at leaves that are not perturbed are ignored, so they are not checked.
        found = [leaf if flag else None for leaf, flag in zip(found, wanted, strict=True)]
        gradients = checked_tangents(found, types, treedef, "gradient", "vjp_arg")
        gradients = [
            leaf if leaf is None else varying_like(leaf, like)
            for leaf, like in zip(gradients, types, strict=True)
        ]
        return self.vjp_arg_rest.take(gradients), None

    def _as_passed(self, cotangent: Any) -> Any:
        """Converts JAX's cotangent to the cotangent that the backward pass expects."""
        dtype = cotangent.dtype
        if isinstance(cotangent, SymbolicZero):
            is_wanted = self.wants_zeros and dtype != jax.dtypes.float0
            return jnp.zeros(cotangent.shape, dtype) if is_wanted else None
        return None if dtype == jax.dtypes.float0 else cotangent


def _value(primal: CustomVJPPrimal) -> Any:
    """The value as an array: JAX may pass the Python number from which an array was made."""
    return primal.value if is_array(primal.value) else jnp.asarray(primal.value)


def _is_perturbed(primal: CustomVJPPrimal) -> bool:
    return primal.perturbed and is_inexact_array(_value(primal))


# --- Closures as pytrees of the arrays that they close over ---


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
                path = path_of(place, treedef)
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
