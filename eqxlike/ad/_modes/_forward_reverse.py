"""Reverse and forward mode, by JAX and by Enzyme, and the mode that goes by the sizes."""

import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jaxtyping import Array, Bool, Int

from ..._check_numbers import whole_number
from ..._module import field
from ..._programs import equations_in
from ._mode import Arrays, Mode, OfArrays, Pullback, ValueAndGrad


class Reverse(Mode):
    """Reverse mode: one pass forward that keeps intermediate values, and one back.

    It costs a few times the function, however many inputs there are, and as much memory as the
    values that it keeps. It is JAX's own, and what `filter_grad` does where no mode is named.

    !!! example

        >>> import eqxlike as eqx, jax.numpy as jnp
        >>> from eqxlike import ad
        >>> print(eqx.filter_grad(lambda x: jnp.sum(x**2), mode=ad.Reverse())(jnp.arange(3.0)))
        [0. 2. 4.]
    """

    def value_and_grad(self, function: OfArrays, arrays: Arrays) -> ValueAndGrad:
        return jax.value_and_grad(function, has_aux=True)(arrays)

    def vjp(self, function: OfArrays, arrays: Arrays) -> tuple[Arrays, Pullback, Arrays]:
        outputs, pullback, aux = jax.vjp(function, arrays, has_aux=True)
        return outputs, lambda cotangents: pullback(cotangents)[0], aux

    def jvp(self, function: OfArrays, arrays: Arrays, tangents: Arrays) -> Arrays:
        equations = equations_in(jax.make_jaxpr(function)(arrays).jaxpr)
        if any(each.primitive.name.startswith("custom_vjp_call") for each in equations):
            # Its one JVP is the transpose of its VJP.
            return super().jvp(function, arrays, tangents)
        return Forward().jvp(function, arrays, tangents)


class Forward(Mode):
    """Forward mode: Jacobian-vector products, one for each number among the inputs.

    It keeps no intermediate values. It costs as many passes as there are inputs, so it is for few
    inputs, or for many outputs, and for what has no reverse mode, such as `jax.lax.while_loop`.

    - `chunk`: how many products to take at once, as a batch; all where `None`. The memory needed
      grows with it, and the number of passes one after another falls.

    **Raises:** `ValueError` if `chunk` is not a positive integer.

    !!! example

        >>> import eqxlike as eqx, jax, jax.numpy as jnp
        >>> from eqxlike import ad
        >>> def halvings(x):
        ...     return jax.lax.while_loop(lambda x: x > 1, lambda x: x / 2, x)
        >>> print(eqx.filter_grad(halvings, mode=ad.Forward())(jnp.array(10.0)))
        0.0625
    """

    chunk: int | None = field(static=True, default=None)

    def __check_init__(self):
        if self.chunk is not None:
            whole_number(self.chunk, "Forward: chunk")

    def value_and_grad(self, function: OfArrays, arrays: Arrays) -> ValueAndGrad:
        def as_list(arrays: Arrays) -> tuple[Arrays, Arrays]:
            value, aux = function(arrays)
            return [value], aux

        (value,), aux, (gradient,) = self.jacobian(as_list, arrays)
        return (value, aux), gradient

    def jvp(self, function: OfArrays, arrays: Arrays, tangents: Arrays) -> Arrays:
        _, directions, _ = jax.jvp(function, (arrays,), (tangents,), has_aux=True)
        return directions

    def jacobian(self, function: OfArrays, arrays: Arrays) -> tuple[Arrays, Arrays, list[Arrays]]:
        def along(tangents: Arrays) -> tuple[Arrays, tuple[Arrays, Arrays]]:
            outputs, directions, aux = jax.jvp(function, (arrays,), (tangents,), has_aux=True)
            return directions, (outputs, aux)

        if is_one_block(arrays, self.chunk):
            derivatives, (outputs, aux) = along_directions(along, arrays, None, (0, None))
        else:
            outputs, aux = function(arrays)
            derivatives = along_directions(lambda each: along(each)[0], arrays, self.chunk)
        return outputs, aux, [gradients_of(each, arrays) for each in derivatives]


class Auto(Mode):
    """Forward mode for few inputs, reverse mode for many.

    Forward mode takes a pass for each number among the inputs, and reverse mode one for each among
    the outputs, which costs more. `ad.compare` measures instead.

    !!! example

        >>> import eqxlike as eqx, jax.numpy as jnp
        >>> from eqxlike import ad
        >>> print(eqx.filter_grad(lambda x: jnp.sum(x**2), mode=ad.Auto())(jnp.arange(3.0)))
        [0. 2. 4.]
    """

    def value_and_grad(self, function: OfArrays, arrays: Arrays) -> ValueAndGrad:
        return self._mode(arrays, num_outputs=1).value_and_grad(function, arrays)

    def vjp(self, function: OfArrays, arrays: Arrays) -> tuple[Arrays, Pullback, Arrays]:
        return Reverse().vjp(function, arrays)

    def jvp(self, function: OfArrays, arrays: Arrays, tangents: Arrays) -> Arrays:
        return Forward().jvp(function, arrays, tangents)

    def jacobian(self, function: OfArrays, arrays: Arrays) -> tuple[Arrays, Arrays, list[Arrays]]:
        outputs, _ = jax.eval_shape(function, arrays)
        num_outputs = sum(math.prod(each.shape) for each in outputs)
        return self._mode(arrays, num_outputs).jacobian(function, arrays)

    def _mode(self, arrays: Arrays, num_outputs: int) -> Mode:
        # `python -m benchmarks.ad_modes` shows where the one becomes slower than the other.
        return Forward() if num_directions(arrays) <= num_outputs else Reverse()


class Enzyme(Mode):
    """Reverse and forward mode by Enzyme, which differentiates what the compiler has optimised.

    It needs the package `enzyme_ad`: `pip install 'eqxlike[enzyme]'`, for Linux and macOS with
    Python 3.11. Enzyme differentiates StableHLO, so it has no rules of JAX's for what it meets, and
    ignores a `jax.custom_vjp`. It does a reverse mode of `jax.lax.while_loop` whose number of steps
    the compiler can find. It has no rule for batches, so it cannot be called under `jax.vmap`, and
    most Hessians are beyond it (enzyme_ad 0.0.16). Paper: Moses and Churavy, 2020,
    arXiv:2010.01709.

    **Raises:** `ImportError` if Enzyme is not installed.

    !!! example

        >>> import eqxlike as eqx, jax.numpy as jnp
        >>> from eqxlike import ad
        >>> gradient = eqx.filter_grad(lambda x: jnp.sum(x**2), mode=ad.Enzyme())
        >>> # gradient(jnp.arange(3.0)) is [0. 2. 4.]
    """

    has_batching: ClassVar[bool] = False

    def value_and_grad(self, function: OfArrays, arrays: Arrays) -> ValueAndGrad:
        # Enzyme's operations run in a compiled program alone.
        by_enzyme = _by_enzyme(function, arrays)
        return jax.jit(lambda arrays: Reverse().value_and_grad(by_enzyme, arrays))(arrays)

    def jvp(self, function: OfArrays, arrays: Arrays, tangents: Arrays) -> Arrays:
        by_enzyme = _by_enzyme(function, arrays)
        return jax.jit(lambda *args: Forward().jvp(by_enzyme, *args))(arrays, tangents)


def _by_enzyme(function: OfArrays, arrays: Arrays) -> Callable[[Arrays], Any]:
    """`function` as one operation, which Enzyme differentiates."""
    try:
        enzyme = importlib.import_module("enzyme_ad.jax")
    except ImportError as error:
        raise ImportError(
            "ad.Enzyme() needs the package `enzyme_ad`: `pip install 'eqxlike[enzyme]'`. There are "
            "builds for Python 3.11 on Linux and macOS; elsewhere use `ad.Reverse()`."
        ) from error
    closed, output = jax.make_jaxpr(function, return_shape=True)(arrays)
    treedef = jax.tree.structure(output)
    num_consts, num_inputs = len(closed.consts), len(closed.consts) + len(arrays)
    # The reverse mode of enzyme_ad 0.0.16 fails where there are more outputs than inputs.
    spare = [jnp.zeros(()) for _ in range(treedef.num_leaves - num_inputs)]

    # Enzyme traces this again when the program is compiled: what it closes over must be explicit.
    def of_all(*args: Array) -> list[Array]:
        consts, arrays = args[:num_consts], args[num_consts:num_inputs]
        return jaxpr_as_fun(ClosedJaxpr(closed.jaxpr, consts))(*arrays)

    operation = enzyme.enzyme_jax_ir()(of_all)

    def run(arrays: Arrays) -> Any:
        return jax.tree.unflatten(treedef, operation(*closed.consts, *arrays, *spare))

    return run


# --- Derivatives along one number of the input after another, in blocks ---


def num_directions(arrays: Sequence[Array]) -> int:
    """How many real numbers there are in `arrays`; a complex number is two."""
    return sum(math.prod(each.shape) * _parts(each) for each in arrays)


def is_one_block(arrays: Sequence[Array], chunk: int | None) -> bool:
    """Whether `along_directions` takes all directions at once."""
    return chunk is None or 1 < chunk >= num_directions(arrays)


def along_directions(
    derivative: Callable[[Arrays], Any], arrays: Arrays, chunk: int | None, out_axes: Any = 0
) -> Any:
    """`derivative` along each direction in which one number of `arrays` moves alone.

    **Arguments:**

    - `derivative`: from tangents of `arrays` to a pytree of arrays.
    - `arrays`: `n` numbers in all. The real parts of an array come first, then its imaginary parts.
    - `chunk`: how many directions to take at once, at most; all where `None`. One at a time is
      taken without `jax.vmap`.
    - `out_axes`: if they are taken as one block, `None` for what all directions share, as for
      `jax.vmap`.

    **Returns:** what `derivative` returns, with a leading axis of length `n`.

    **Raises:** `ValueError` if `derivative` writes to a `jax.Ref`, which it would do `n` times.
    """
    total = num_directions(arrays)

    def along(index: Int[Array, ""]) -> Any:
        return derivative(_unit_tangents(arrays, index))

    if is_one_block(arrays, chunk):
        return jax.vmap(along, out_axes=out_axes)(jnp.arange(total))
    if chunk == 1:
        return jax.lax.map(_without_writes(along), jnp.arange(total))
    assert chunk is not None
    num_blocks = math.ceil(total / chunk)
    chunk = math.ceil(total / num_blocks)  # so that all are about as full
    # Past the last direction there are tangents of zeros.
    blocks = jnp.arange(num_blocks * chunk).reshape(num_blocks, chunk)
    found = jax.lax.map(jax.vmap(along), blocks)
    return jax.tree.map(lambda each: each.reshape(-1, *each.shape[2:])[:total], found)


def _without_writes(along: Callable[[Int[Array, ""]], Any]) -> Callable[[Int[Array, ""]], Any]:
    """`along`, traced once; `ValueError` if it writes to a reference."""
    closed, output = jax.make_jaxpr(along, return_shape=True)(jnp.zeros((), int))
    if any(type(each).__name__ in ("WriteEffect", "AccumEffect") for each in closed.effects):
        raise ValueError(
            "The function writes to a `jax.Ref`, and a mode that evaluates it for one direction "
            "after another would write each time. Use `ad.Reverse()` or `ad.Checkpointed()`, which "
            "evaluate it once."
        )
    treedef = jax.tree.structure(output)
    return lambda index: jax.tree.unflatten(treedef, jaxpr_as_fun(closed)(index))


def gradients_of(derivatives: Array, arrays: Arrays) -> list[Array]:
    """Derivatives of shape `(n, *out)` as arrays of shape `(*out, *in)`, one for each of `arrays`.

    That of a complex array `x + iy` is `d/dx - i d/dy`, as in JAX.
    """
    gradients, start = [], 0
    for array in arrays:
        parts = []
        for _ in range(_parts(array)):
            end = start + math.prod(array.shape)
            part = jnp.moveaxis(derivatives[start:end], 0, -1)
            parts.append(part.reshape(*derivatives.shape[1:], *array.shape))
            start = end
        gradient = parts[0] if len(parts) == 1 else jax.lax.complex(parts[0], -parts[1])
        gradients.append(gradient.astype(array.dtype))
    return gradients


def _parts(array: Array) -> int:
    return 2 if jnp.iscomplexobj(array) else 1


def _unit_tangents(arrays: Arrays, index: Int[Array, ""]) -> Arrays:
    tangents, start = [], 0
    for array in arrays:
        parts = []
        for _ in range(_parts(array)):
            parts.append(_is_at(index - start, array.shape))
            start += math.prod(array.shape)
        tangent = parts[0].astype(array.dtype)
        if len(parts) == 2:
            tangent = tangent + parts[1].astype(array.dtype) * 1j
        tangents.append(tangent)
    return tangents


def _is_at(place: Int[Array, ""], shape: tuple[int, ...]) -> Bool[Array, "..."]:
    return (jnp.arange(math.prod(shape)) == place).reshape(shape)
