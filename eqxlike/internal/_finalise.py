"""Finalisation: replaces primitives of this package in a program by their implementations."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.tree_util as jtu
from jax.custom_derivatives import custom_jvp_call_p
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Primitive, jaxprs_in_params

from .._programs import bind, interpret
from .._transforms import _checks
from .._transforms._derivatives import _linear_call
from ..debug import _watch, backward_nan
from ..debug._watch import announce_jaxpr_p
from ..loops import _primitives as _loop_primitives
from ..loops._primitives import select_if_vmap_p, unvmap_all_p, unvmap_any_p, unvmap_max_p
from ..nn import _conv_cpu
from . import _primitives

debug_backward_nan = backward_nan
"""Equinox's name of `backward_nan`."""

primitive_finalisations: dict[Primitive, Callable[..., Any]] = {}
"""Maps each primitive to its replacement: a function of the arrays and the parameters."""


def register_impl_finalisation(prim: Primitive) -> None:
    """Makes finalised programs call the implementation of `prim` instead of binding `prim`."""
    primitive_finalisations[prim] = lambda *arrays, **params: prim.impl(*arrays, **params)


def _run_finalised(prim: Primitive, *arrays: Any, **params: Any) -> Any:
    return finalise_fn(functools.partial(prim.impl, **params))(*arrays)


def _call(*arrays: Any, call_jaxpr: ClosedJaxpr, **_: Any) -> list[Any]:
    return finalise_eval_jaxpr(call_jaxpr.jaxpr, call_jaxpr.consts, *arrays)


for _primitive in (
    _primitives.nontraceable_p,
    _primitives.nonbatchable_p,
    _primitives.nondifferentiable_p,
    _primitives.nondifferentiable_backward_p,
    announce_jaxpr_p,
    select_if_vmap_p,
    unvmap_all_p,
    unvmap_any_p,
    unvmap_max_p,
    _checks.needing_p,
    _watch._watch_p,
    _linear_call._batch_first,
    _loop_primitives._untransposed,
):
    register_impl_finalisation(_primitive)
# The implementations of these primitives call functions of the user, which are finalised too.
for _primitive in (_primitives.vmapped_p, _linear_call._linear, _loop_primitives._transposed):
    primitive_finalisations[_primitive] = functools.partial(_run_finalised, _primitive)
primitive_finalisations[_conv_cpu.conv_p] = jax.lax.conv_general_dilated_p.bind
primitive_finalisations[_checks.check_p] = _checks.stage
primitive_finalisations[custom_jvp_call_p] = _call

_BY_NAME: dict[str, Callable[..., Any]] = {
    "custom_vmap_call": lambda *arrays, call, **_: _call(*arrays, call_jaxpr=call),
    "stop_gradient": lambda x: x,
}
"""Maps names of JAX primitives to their replacements. JAX does not export these primitives."""


def _finalisation_of(primitive: Primitive) -> Callable[..., Any] | None:
    return primitive_finalisations.get(primitive) or _BY_NAME.get(primitive.name)


def finalise_eval_jaxpr(jaxpr: Jaxpr, consts: Sequence[Any], *args: Any) -> list[Any]:
    """Does the same as `jax.core.eval_jaxpr`, with finalised primitives."""
    return interpret(jaxpr, consts, args, _finalise_equation)


def _finalise_equation(equation: JaxprEqn, inputs: list[Any]) -> Sequence[Any]:
    finalisation = _finalisation_of(equation.primitive)
    if finalisation is None:
        params = {name: _finalise_param(each) for name, each in equation.params.items()}
        return bind(equation, inputs, params)
    outputs = finalisation(*inputs, **equation.params)
    return outputs if equation.primitive.multiple_results else [outputs]


def _finalise_param(param: Any) -> Any:
    """Finalises the programs in a parameter of an equation, such as the body of a loop."""
    if not any(map(_has_any, jaxprs_in_params({"": param}))):
        return param
    if isinstance(param, ClosedJaxpr):
        return finalise_jaxpr(param)
    if isinstance(param, Jaxpr):
        return finalise_jaxpr(ClosedJaxpr(param, ())).jaxpr
    return type(param)(map(_finalise_param, param))


def _has_any(jaxpr: Jaxpr) -> bool:
    """Whether `jaxpr` contains a primitive to finalise."""
    return any(
        _finalisation_of(equation.primitive) is not None
        or any(map(_has_any, jaxprs_in_params(equation.params)))
        for equation in jaxpr.eqns
    )


def finalise_jaxpr(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """Returns the jaxpr with finalised primitives."""
    return jax.make_jaxpr(finalise_jaxpr_as_fn(jaxpr))(*jaxpr.in_avals)


def finalise_jaxpr_as_fn(jaxpr: ClosedJaxpr) -> Callable[..., list[Any]]:
    """Does the same as `jax.extend.core.jaxpr_as_fun`, with finalised primitives."""
    return functools.partial(finalise_eval_jaxpr, jaxpr.jaxpr, jaxpr.consts)


def finalise_fn(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function so that its primitives are finalised.

    **Arguments:**

    - `fn`: a function that takes pytrees of arrays and returns a pytree of arrays.
    """

    @functools.wraps(fn)
    def finalised(*args: Any) -> Any:
        jaxpr, structs = jax.make_jaxpr(fn, return_shape=True)(*args)
        outputs = finalise_eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, *jtu.tree_leaves(args))
        return jtu.tree_unflatten(jtu.tree_structure(structs), outputs)

    return finalised


def finalise_make_jaxpr(
    fn: Callable[..., Any], *, return_shape: bool = False
) -> Callable[..., Any]:
    """Does the same as `jax.make_jaxpr`, with finalised primitives."""
    return jax.make_jaxpr(finalise_fn(fn), return_shape=return_shape)
