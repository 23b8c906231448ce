"""Custom derivative rules: `filter_custom_jvp` and `filter_custom_vjp`."""

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero
from jaxtyping import PyTree

from ..._compat import vary, varying_axes
from ..._module import Module, bind, field
from ..._partition import UNTRACED, Rest, split
from ..._pytree import (
    is_array,
    is_array_or_traced_reference,
    is_inexact_array,
    is_inexact_array_like,
)
from .._signatures import Call, check_callable, pair
from ._linear_call import batch_first
from ._tangents import (
    check_structure,
    checked_tangents,
    match_leaves,
    tangents_of,
    varying_like,
)

# --- The common base of functions with custom derivatives ---


class CustomFunction:
    """Base class of functions with a custom derivative.

    This is not a Module, because the derivative is set after construction. Copying and pickling
    store only the name of the function, as for Python functions.
    """

    __name__: str
    __wrapped__: Callable[..., Any]

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


_Rule = Callable[..., tuple[Any, Any]]


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

    def __init__(self, fn: Callable[..., Any]):
        super().__init__(fn)
        self._rule: _Rule | None = None
        self._wants_zeros = False

    def def_jvp(self, fn_jvp: _Rule) -> _Rule:
        """Sets the rule, and returns it."""
        check_callable(fn_jvp, "filter_custom_jvp.def_jvp")
        self._rule, self._wants_zeros = fn_jvp, False
        return fn_jvp

    def defjvp(self, fn_jvp: _Rule) -> _Rule:
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
        call = _FlatJvp(self.__wrapped__, self._rule, self._wants_zeros, self._label)
        arrays, call.rest = split(Call(args, kwargs))
        of_arrays = jax.custom_jvp(batch_first(call.value))
        of_arrays.defjvp(batch_first(call.value_and_tangent), symbolic_zeros=True)
        numbers = self._call(of_arrays, arrays)
        return call.value_rest.merge(numbers)


@dataclasses.dataclass
class _FlatJvp:
    """One call. The methods are the function and its derivative, as functions of arrays only."""

    function: Callable[..., Any]
    rule: _Rule
    wants_zeros: bool
    label: str
    rest: Rest = UNTRACED
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
        self._check_kwargs(self.rest.merge_into(None, directions).kwargs)
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

    def _check_kwargs(self, tangents: dict[str, Any]) -> None:
        paths = [f"kwargs{jtu.keystr(path)}" for path, _ in jtu.tree_leaves_with_path(tangents)]
        if paths:
            raise ValueError(
                f"{self.label} was differentiated with respect to {', '.join(paths)}. A rule of "
                "`filter_custom_jvp` gets no tangents of keyword arguments: pass the argument by "
                "position, or pass `jax.lax.stop_gradient` of it."
            )


def _is_array_or_number(leaf: Any) -> bool:
    # An `int` or a `bool` has no tangent, so the function gets it unchanged, not as an array.
    return is_array_or_traced_reference(leaf) or isinstance(leaf, float | complex)


# --- Functions with a custom reverse-mode derivative ---


_Forward = Callable[..., tuple[Any, Any]]
_Backward = Callable[..., Any]


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

    def __init__(self, fn: Callable[..., Any]):
        super().__init__(fn)
        self._forward: _Forward | None = None
        self._backward: _Backward | None = None
        self._wants_zeros = False

    def def_fwd(self, fn_fwd: _Forward) -> _Forward:
        """Sets the forward pass, and returns it."""
        check_callable(fn_fwd, "filter_custom_vjp.def_fwd")
        self._forward, self._wants_zeros = fn_fwd, False
        return fn_fwd

    def def_bwd(self, fn_bwd: _Backward) -> _Backward:
        """Sets the backward pass, and returns it."""
        check_callable(fn_bwd, "filter_custom_vjp.def_bwd")
        self._backward, self._wants_zeros = fn_bwd, False
        return fn_bwd

    def defvjp(self, fn_fwd: _Forward, fn_bwd: _Backward) -> None:
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
    """One call. The methods are the function and its derivative, as functions of arrays only."""

    function: Callable[..., Any]
    user_forward: _Forward
    user_backward: _Backward
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
        self._check_not_perturbed(others)
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
        types = [
            leaf if is_wanted else None
            for leaf, is_wanted in zip(jtu.tree_leaves(vjp_arg), wanted, strict=True)
        ]
        # Gradients at leaves that are not perturbed are ignored, so they are not checked.
        found = [leaf if is_wanted else None for leaf, is_wanted in zip(found, wanted, strict=True)]
        gradients = checked_tangents(found, types, treedef, "gradient", "vjp_arg")
        gradients = [
            leaf if leaf is None else varying_like(leaf, like)
            for leaf, like in zip(gradients, types, strict=True)
        ]
        return self.vjp_arg_rest.take(gradients), None

    def _check_not_perturbed(self, others: list[CustomVJPPrimal]) -> None:
        perturbed = self.others_rest.merge_into(
            None, (_is_perturbed(each) or None for each in others)
        )
        paths = [jtu.keystr(path)[1:] for path, _ in jtu.tree_leaves_with_path(perturbed)]
        if paths:
            raise RuntimeError(
                f"{self.label} was differentiated with respect to {', '.join(paths)}. "
                "`filter_custom_vjp` differentiates only the first argument: collect all "
                "differentiated arguments in a tuple and pass it first, or pass "
                "`jax.lax.stop_gradient` of these."
            )

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
