"""Custom primitives whose rules take and return pytrees."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import AbstractValue
from jax.extend.core import Primitive, mapped_aval, unmapped_aval
from jax.interpreters import ad, mlir
from jaxtyping import PyTree

from .. import is_array
from .._compat import set_batching_rule
from .._partition import UNTRACED
from ..extend import Rest, split

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
        along = [None if _is_zero(tangent) else tangent for tangent in tangents]
        value, tangent = rule(inputs.merge(map(_as_array, primals)), inputs.merge_into(None, along))
        values = output.take(value)
        found = _leaves_at_arrays(output.rest, tangent, "tangent", "output")
        return values, list(map(_filled_tangent, values, found))

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


def _is_zero(tangent: Any) -> bool:
    return type(tangent) is ad.Zero or getattr(tangent, "dtype", None) == jax.dtypes.float0


def _filled_tangent(value: Any, tangent: Any) -> Any:
    return ad.Zero(jax.typeof(value).to_tangent_aval()) if tangent is None else tangent


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
    make_rules: Callable[..., _Rules], axis: Any, arrays: Any, axes: Any, /, **params: Any
) -> tuple[list[Any], list[int]]:
    """The batching rule of all primitives of this file. Binds `vmapped_p` with batched rules."""
    mapped = _Mapped(make_rules(**params), axis, tuple(axes))
    of_batch = _Rules(mapped.impl, mapped.abstract_eval, mapped.jvp, mapped.transpose)
    outputs = vmapped_p.bind(*arrays, rules=of_batch)
    return outputs, [0] * len(outputs)


@dataclasses.dataclass(frozen=True, eq=False)
class _Mapped:
    """Makes the rules for a batch from the rules for one member. The batch axis of outputs is 0."""

    member: _Rules
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
            filled = _fill(is_moving, moving, [_zero(jax.typeof(each)) for each in primals])
            values, along = self.member.jvp(primals, filled)
            is_output_moving[:] = [type(each) is not ad.Zero for each in along]
            return list(values), _select(is_output_moving, along)

        in_axes = list(self.axes), _select(is_moving, self.axes)
        mapped = self._vmap(of_member, in_axes)
        values, moving = mapped(list(primals), _select(is_moving, tangents))
        zeros = [_zero(jax.typeof(each)) for each in values]
        return values, _fill(is_output_moving, moving, zeros)

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
            cotangents = _fill(is_moving, moving, zeros)
            found = self.member.transpose(cotangents, *_fill(is_known, known, undefined))
            is_found[:] = [each is not None and type(each) is not ad.Zero for each in found]
            return _select(is_found, found)

        mapped = self._vmap(of_member, (0, _select(is_known, self.axes)))
        found = mapped(_select(is_moving, cotangents), _select(is_known, arrays))
        found = [
            each.sum(0) if axis is None else jnp.moveaxis(each, 0, axis)
            for each, axis in zip(found, _select(is_found, self.axes), strict=True)
        ]
        return _fill(is_found, found, [None] * len(is_found))


def _select(flags: list[bool], values: Any) -> list[Any]:
    return [value for value, taken in zip(values, flags, strict=True) if taken]


def _fill(flags: list[bool], selected: Any, others: Any) -> list[Any]:
    """The inverse of `_select`. Where a flag is false, it takes the value from `others`."""
    selected = iter(selected)
    return [next(selected) if taken else other for taken, other in zip(flags, others, strict=True)]


def _zero(aval: Any) -> ad.Zero:
    return ad.Zero(aval.to_tangent_aval())


def _impl(*arrays: Any, rules: _Rules) -> list[Any]:
    return rules.impl(*arrays)


vmapped_p.def_impl(_impl)
vmapped_p.def_abstract_eval(lambda *avals, rules: rules.abstract_eval(*avals))
mlir.register_lowering(vmapped_p, mlir.lower_fun(_impl, multiple_results=True))
ad.primitive_jvps[vmapped_p] = lambda primals, tangents, *, rules: rules.jvp(primals, tangents)
ad.primitive_transposes[vmapped_p] = lambda cotangents, *arrays, rules: rules.transpose(
    cotangents, *arrays
)
set_batching_rule(vmapped_p, functools.partial(_batch, lambda rules: rules))
