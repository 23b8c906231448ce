"""`linear_call`: a linear function with a custom transpose, for all transformations.

A function with a `jax.custom_vjp` has no forward mode. A `jax.custom_jvp` whose rule computes the
tangents by `linear_call` has both modes: forward mode runs `forward`, and reverse mode runs
`transpose`.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array

T = TypeVar("T")
Linear = Callable[[list[Array], list[Array]], list[Array]]
Transpose = Callable[[list[Array], list[Array], tuple[bool, ...]], list[Array]]


def linear_call(
    forward: Linear,
    transpose: Transpose,
    residuals: Sequence[Array],
    tangents: Sequence[Array],
    like: Sequence[Array],
    num_summed: int = 0,
    *,
    transpose_beside_tangents: Transpose | None = None,
    is_of_members: bool = False,
) -> list[Array]:
    """Returns `forward(residuals, tangents)`. Reverse mode transposes the call by `transpose`.

    **Arguments:**

    - `forward`: function of two lists of arrays that returns a list of arrays. It must be linear in
      the second argument, and differentiable in both.
    - `transpose`: function called as `transpose(residuals, cotangents, is_shared)`. It takes the
      cotangents of the output of `forward`, and returns the cotangents of `tangents`.
    - `like`: arrays with the shapes and dtypes of the output of `forward`.
    - `num_summed`: for the first `num_summed` tangents, `transpose` can sum the cotangents over a
      batch. For each of these tangents, `is_shared` has `True` if all members of the batch share
      the tangent. Then `transpose` returns a single cotangent, the sum over the batch. For example,
      if a network is mapped over a batch of inputs, the members share its weights.
    - `transpose_beside_tangents`: a JVP of this call makes two calls: one for the primal output,
      and one for the tangents. In the call for the primal output, this function replaces
      `transpose`. This function is required if `transpose` does not return the exact cotangents.
    - `is_of_members`: whether `transpose` returns different cotangents for the members of a batch
      even if `forward` returns the same output for all of them.
    """
    call = _Call(
        forward=forward,
        transpose=transpose,
        num_residuals=len(residuals),
        num_summed=num_summed,
        transpose_beside_tangents=transpose_beside_tangents,
        is_of_members=is_of_members,
        # Inside `jax.shard_map`, these types contain the mesh axes along which arrays vary.
        avals=tuple(jax.typeof(each).to_tangent_aval() for each in like),
    )
    return _linear.bind(*residuals, *tangents, call=call)


class _Call(NamedTuple):
    """One call of `linear_call`. The operands of the primitive are the residuals and tangents."""

    forward: Linear
    transpose: Transpose
    num_residuals: int
    num_summed: int
    transpose_beside_tangents: Transpose | None
    is_of_members: bool
    avals: tuple[Any, ...]

    def split(self, args: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        return list(args[: self.num_residuals]), list(args[self.num_residuals :])


def _run(*args: Array, call: _Call) -> list[Array]:
    return call.forward(*call.split(args))


_linear = Primitive("linear_call_with_transpose")
_linear.multiple_results = True
_linear.def_impl(lambda *args, call: jax.jit(functools.partial(_run, call=call))(*args))
_linear.def_abstract_eval(lambda *args, call: call.avals)
mlir.register_lowering(_linear, mlir.lower_fun(_run, multiple_results=True))


def _jvp(primals: Any, dots: Any, *, call: _Call) -> tuple[Any, Any]:
    residual_dots, tangent_dots = call.split(dots)
    if all(type(dot) is ad.Zero for dot in residual_dots):
        directions = map(ad.instantiate_zeros, tangent_dots)
        beside = call._replace(transpose=call.transpose_beside_tangents or call.transpose)
        return (
            _linear.bind(*primals, call=beside),
            _linear.bind(*primals[: call.num_residuals], *directions, call=call),
        )
    return jvp_of_moving(lambda args: _run(*args, call=call), primals, dots)


def _transpose(cotangents: Any, *args: Any, call: _Call) -> list[Any]:
    residuals, tangents = call.split(args)
    cotangents = list(map(ad.instantiate_zeros, cotangents))
    found = call.transpose(residuals, cotangents, (False,) * call.num_summed)
    of_tangents = [
        each if ad.is_undefined_primal(tangent) else None
        for each, tangent in zip(found, tangents, strict=True)
    ]
    return [None] * call.num_residuals + of_tangents


def _batch(axis: Any, args: Any, dims: Any, *, call: _Call) -> tuple[Any, Any]:
    args = [arg if dim is None else to_front(arg, dim) for arg, dim in zip(args, dims, strict=True)]
    of_residuals, of_tangents = call.split([None if dim is None else 0 for dim in dims])
    is_shared = tuple(axis is None for axis in of_tangents)
    none_shared = (False,) * call.num_summed
    name = axis.name if isinstance(axis.name, str) else None

    def mapped(function: Linear, in_axes: Any, out_axes: Any) -> Linear:
        return jax.vmap(function, in_axes, out_axes, axis_name=name, axis_size=axis.size)

    is_batched = [True] * len(call.avals)
    if None in of_tangents and not (call.is_of_members and 0 in of_residuals):
        is_batched = flag_batched(call.forward, mapped, (of_residuals, of_tangents), args)
    of_output = [0 if is_one else None for is_one in is_batched]

    def batched(transpose: Transpose) -> Transpose:
        def batched_transpose(
            residuals: list[Array], cotangents: list[Array], _: tuple[bool, ...]
        ) -> list[Array]:
            # If the members share an output, the cotangent of this output must count once. So the
            # first member gets the cotangent, and all other members get zero.
            cotangents = [
                each
                if is_one
                else jnp.zeros_like(each, shape=(axis.size, *each.shape)).at[0].set(each)
                for each, is_one in zip(cotangents, is_batched, strict=True)
            ]

            def by_members(is_summed: tuple[bool, ...]) -> Linear:
                """Maps `transpose` over the batch.

                `is_summed` flags the cotangents that `transpose` itself sums over the batch.
                """
                out_axes = [None if summed else 0 for summed in is_summed]
                out_axes += [0] * (len(of_tangents) - call.num_summed)

                def run(residuals: list[Array], cotangents: list[Array]) -> list[Array]:
                    found = mapped(
                        lambda residuals, cotangents: transpose(residuals, cotangents, is_summed),
                        (of_residuals, 0),
                        out_axes,
                    )(residuals, cotangents)
                    return [
                        each.sum(0) if shared and axis == 0 else each
                        for each, shared, axis in zip(found, is_shared, out_axes, strict=True)
                    ]

                return run

            # If the batch axis has a name, `transpose` may contain a collective operation over it,
            # such as `psum`. Such an operation needs the cotangent of each batch member, not the
            # sum. So `transpose` must not sum over a named axis.
            is_summed = none_shared if name else is_shared[: call.num_summed]
            summed_inside = jax.custom_jvp(batch_first(by_members(is_summed)))

            @functools.partial(summed_inside.defjvp, symbolic_zeros=True)
            @batch_first
            def _differentiate(primals: Any, tangents: Any) -> Any:
                residuals, cotangents = primals

                def run(flat: list[Array]) -> list[Array]:
                    return by_members(none_shared)(flat[: len(residuals)], flat[len(residuals) :])

                return jvp_of_moving(run, [*residuals, *cotangents], [*tangents[0], *tangents[1]])

            return summed_inside(residuals, cotangents)

        return batched_transpose

    beside = call.transpose_beside_tangents
    batch_call = call._replace(
        forward=mapped(call.forward, (of_residuals, of_tangents), of_output),
        transpose=batched(call.transpose),
        transpose_beside_tangents=beside and batched(beside),
        # If this batch is mapped again, `_batch` sums over the outer batch, and `transpose` does
        # not.
        num_summed=0,
        avals=tuple(
            _with_batch(axis, each, args) if is_one else each
            for each, is_one in zip(call.avals, is_batched, strict=True)
        ),
    )
    return _linear.bind(*args, call=batch_call), of_output


def _with_batch(axis: Any, aval: Any, args: Sequence[Any]) -> Any:
    """The type of a batch of arrays of type `aval`, on the mesh of `args` if they have a mesh."""
    meshes = [jax.typeof(each).sharding.mesh for each in args]
    mesh = next((each for each in meshes if not each.empty), aval.sharding.mesh)
    spec = jax.sharding.PartitionSpec(axis.explicit_mesh_axis, *aval.sharding.spec)
    sharding = jax.sharding.NamedSharding(mesh, spec)
    return aval.update(shape=(axis.size, *aval.shape), sharding=sharding)


def flag_batched(forward: Linear, mapped: Any, axes: Any, args: Sequence[Array]) -> list[bool]:
    """Flags the output arrays of `forward` that differ among the members of the batch."""
    found = []

    @custom_vmap
    def noted(output: list[Array]) -> list[Array]:
        return output

    @noted.def_vmap
    def _note(size: int, is_batched: list[list[bool]], output: list[Array]) -> Any:
        found[:] = is_batched[0]
        return output, is_batched[0]

    def run(residuals: list[Array], tangents: list[Array]) -> list[Array]:
        output = forward(residuals, tangents)
        # JAX does not call `_note` if no output is batched.
        found[:] = [False] * len(output)
        return noted(output)

    num_residuals = len(axes[0])
    jax.eval_shape(mapped(run, axes, 0), list(args[:num_residuals]), list(args[num_residuals:]))
    return found


ad.primitive_jvps[_linear] = _jvp
ad.primitive_transposes[_linear] = _transpose
batching.fancy_primitive_batchers[_linear] = _batch


# --- The position of batch axes ---


def to_front(array: Any, axis: int) -> Any:
    """Moves `axis` to the front. If it is in front already, nothing is traced."""
    return array if axis == 0 else jnp.moveaxis(array, axis, 0)


def batch_first(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes `jax.vmap` of `function` return arrays with the batch axis in front.

    Apply this to a function with a `jax.custom_jvp` or `jax.custom_vjp`, and to its rule. To
    differentiate `jax.jit(jax.vmap(function))`, JAX calls the rule. JAX assumes that the batch axes
    are at the same positions in the outputs of the rule and the function (jax 0.10.2 to 0.12.0.1).
    If the positions differ, the derivative is wrong.
    """

    @functools.wraps(function)
    def with_batch_first(*args: Any) -> Any:
        return jax.tree_util.tree_map(
            lambda leaf: _batch_first.bind(leaf) if isinstance(leaf, jax.Array) else leaf,
            function(*args),
        )

    return with_batch_first


_batch_first = Primitive("batch_first")
_batch_first.def_impl(lambda array: array)
_batch_first.def_abstract_eval(lambda array: array)
mlir.register_lowering(_batch_first, lambda context, array: [array])
ad.deflinear2(_batch_first, lambda cotangent, array: [_batch_first.bind(cotangent)])
batching.primitive_batchers[_batch_first] = lambda arrays, dims: (
    _batch_first.bind(to_front(arrays[0], dims[0])),
    0,
)


# --- Tangents and symbolic zeros ---


def is_inexact(array: Any) -> bool:
    return jnp.issubdtype(array.dtype, jnp.inexact)


def has_tangent(tangent: Any) -> bool:
    """Returns `True` unless the tangent is a symbolic zero or has dtype `float0`."""
    is_zero = isinstance(tangent, SymbolicZero | ad.Zero)
    return not is_zero and tangent.dtype != jax.dtypes.float0


def instantiate(tangent: Any) -> Array:
    """Returns the tangent; a `SymbolicZero` becomes an array of zeros."""
    if type(tangent) is not SymbolicZero:
        return tangent
    return ad.instantiate_zeros(ad.Zero(tangent.aval))


def zero_tangent(array: Array) -> Any:
    """The symbolic zero tangent of an array."""
    return SymbolicZero(jax.typeof(array).to_tangent_aval())


def jvp_of_moving(
    function: Callable[[list[Array]], Any], primals: Sequence[Array], tangents: Sequence[Any]
) -> Any:
    """Calls `jax.jvp` for a function of a list of arrays. Arrays without a tangent are constant."""
    flags = list(map(has_tangent, tangents))

    def of_moving(*values: Array) -> Any:
        return function(fill(values, primals, flags))

    return jax.jvp(of_moving, tuple(select(primals, flags)), tuple(select(tangents, flags)))


def select(values: Iterable[T], flags: Sequence[bool]) -> list[T]:
    """The values whose flag is true."""
    return [value for value, flag in zip(values, flags, strict=True) if flag]


def fill(selected: Iterable[Any], values: Iterable[Any], flags: Sequence[bool]) -> list[Any]:
    """The inverse of `select`: replaces the values whose flag is true by items of `selected`."""
    rest = iter(selected)
    return [next(rest) if flag else value for value, flag in zip(values, flags, strict=True)]
