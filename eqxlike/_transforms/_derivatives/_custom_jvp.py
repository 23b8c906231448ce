"""Functions with a forward-mode derivative of their own."""

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.custom_derivatives import SymbolicZero

from ..._partition import UNTRACED, Rest, split
from ..._pytree import is_array_or_traced_reference, is_inexact_array_like
from .._wrapping import Call, check_callable, pair
from ._custom_function import CustomFunction
from ._tangents import check_structure, is_symbolic_zero, tangents_of

_Rule = Callable[..., tuple[Any, Any]]


class filter_custom_jvp(CustomFunction):
    """Gives a function a forward-mode derivative of its own, whatever its arguments are.

    It is `jax.custom_jvp` without `nondiff_argnums`: only floating-point and complex arrays are
    differentiated, and keyword arguments never are.

    **Arguments:**

    - `fn`: a function of any arguments that returns any pytree.

    **Returns:** a function of the same arguments, with a method `def_jvp` that takes the rule:
    `rule(primals, tangents, **kwargs)` returns `(value, tangent)`. `primals` is the tuple of
    positional arguments; `tangents` has their structure, with `None` beside what is not
    differentiable, or not differentiated. The tangent returned has the structure of the value,
    with `None` for a zero, and beside what is not differentiable.

    **Raises:** when called, `AttributeError` if there is no rule. When differentiated, `ValueError`
    if a keyword argument is differentiated; naming the path, `ValueError` if the output of the rule
    has another structure or shape, and `TypeError` for another dtype.

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
        """Sets a rule that gets zeros in place of `None`. Deprecated: use `def_jvp`.

        The zeros stand beside arrays that are differentiable, but not differentiated.
        """
        warnings.warn(
            "`filter_custom_jvp.defjvp` is deprecated: use `def_jvp`, to whose rule `None` is "
            "passed, not zeros, as the tangent of an array that is not differentiated.",
            DeprecationWarning,
            stacklevel=2,
        )
        check_callable(fn_jvp, "filter_custom_jvp.defjvp")
        self._rule, self._wants_zeros = fn_jvp, True
        return fn_jvp

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if self._rule is None:
            raise AttributeError(
                f"{self._label} has no derivative of its own yet: decorate the rule for it with "
                f"`@{self._label}.def_jvp`."
            )
        call = _FlatCall(self.__wrapped__, self._rule, self._wants_zeros, self._label)
        arrays, call.rest = split(Call(args, kwargs))
        of_arrays = jax.custom_jvp(call.value)
        of_arrays.defjvp(call.value_and_tangent, symbolic_zeros=True)
        try:
            numbers = of_arrays(arrays)
        except jax.errors.UnexpectedTracerError as error:
            self._explain(error)
            raise
        return call.value_rest.merge(numbers)


@dataclasses.dataclass
class _FlatCall:
    """One call: the function and its derivative as functions of arrays alone."""

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
        along = [
            tangent if is_inexact_array_like(leaf) and not is_symbolic_zero(tangent) else None
            for leaf, tangent in zip(*primals, *tangents, strict=True)
        ]
        self._check_kwargs(self.rest.merge_into(None, along).kwargs)
        if self.wants_zeros:
            along = [
                jnp.zeros_like(leaf) if tangent is None and is_inexact_array_like(leaf) else tangent
                for leaf, tangent in zip(*primals, along, strict=True)
            ]
        value, tangent = pair(
            self.rule(args, self.rest.merge_into(None, along).args, **kwargs),
            f"The rule of {self.label} must return a pair (value, tangent)",
        )
        if self.value_rest is not UNTRACED:
            # The function was traced before, and its output is in use.
            check_structure(self.value_rest.treedef, value, "value of the rule", "value")
        numbers, self.value_rest = split(value, _is_array_or_number)
        differentiable = (leaf if is_inexact_array_like(leaf) else None for leaf in numbers)
        types = self.value_rest.leaves_into(None, differentiable)
        found = tangents_of(types, self.value_rest.treedef, tangent, "tangent", "value")
        return numbers, [
            SymbolicZero.from_primal_value(leaf) if tangent is None else tangent
            for leaf, tangent in zip(numbers, self.value_rest.take(found), strict=True)
        ]

    def _check_kwargs(self, tangents: dict[str, Any]) -> None:
        paths = [f"kwargs{jtu.keystr(path)}" for path, _ in jtu.tree_leaves_with_path(tangents)]
        if paths:
            raise ValueError(
                f"{self.label} was differentiated in {', '.join(paths)}. The rule given to "
                "`filter_custom_jvp` knows no tangents of keyword arguments: pass it by position, "
                "or `jax.lax.stop_gradient` of it."
            )


def _is_array_or_number(leaf: Any) -> bool:
    # An `int` or a `bool` has no tangent, and is of more use as it is.
    return is_array_or_traced_reference(leaf) or isinstance(leaf, float | complex)
