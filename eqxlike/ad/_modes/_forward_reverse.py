"""Forward and reverse mode of JAX and of Enzyme, and a mode that chooses between JAX's modes."""

import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jaxtyping import Array, Int

from ..._check_numbers import whole_number
from ..._module import field
from ..._programs import equations_in
from ._mode import Arrays, Mode, OfArrays, Pullback, ValueAndGrad


class Reverse(Mode):
    """Reverse mode of JAX: a forward pass that saves intermediate values, and a backward pass.

    Reverse mode costs as much time as a few evaluations of the function, for any number of inputs.
    The intermediate values need memory. This is the mode of `jax.grad`, and the default of
    `filter_grad`.

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
            # The function has no JVP rule, so transpose its VJP.
            return super().jvp(function, arrays, tangents)
        return Forward().jvp(function, arrays, tangents)


class Forward(Mode):
    """Forward mode of JAX: one Jacobian-vector product for each number in the inputs.

    Forward mode saves no intermediate values, and makes one pass for each number in the inputs. Use
    forward mode for functions with few inputs or many outputs, and for operations without reverse
    mode, such as `jax.lax.while_loop`.

    - `chunk`: the number of products that are computed as one batch. `None` computes all products
      as one batch. A larger chunk needs more memory and fewer sequential passes.

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
    """Forward mode if there are at most as many inputs as outputs, and otherwise reverse mode.

    Forward mode needs one pass for each number in the inputs. Reverse mode needs one pass for each
    number in the outputs, and each pass costs more. `ad.compare` measures which mode is faster.

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
        # `python -m benchmarks.ad_modes` measures where reverse mode becomes faster.
        return Forward() if num_directions(arrays) <= num_outputs else Reverse()


class Enzyme(Mode):
    """Forward and reverse mode by Enzyme, which differentiates the program after optimisation.

    This mode needs the package `enzyme_ad`, which exists for Python 3.11 on Linux and macOS:
    `pip install 'eqxlike[enzyme]'`. Enzyme differentiates StableHLO, so it ignores JAX's derivative
    rules, including `jax.custom_vjp`. Enzyme supports reverse mode of a `jax.lax.while_loop` if the
    compiler can infer the number of steps. Enzyme has no batching rule, so it fails under
    `jax.vmap` and for most Hessians (enzyme_ad 0.0.16). Source: Moses and Churavy, 2020,
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
        # Enzyme's operations run only in a compiled program.
        by_enzyme = _by_enzyme(function, arrays)
        return jax.jit(lambda arrays: Reverse().value_and_grad(by_enzyme, arrays))(arrays)

    def jvp(self, function: OfArrays, arrays: Arrays, tangents: Arrays) -> Arrays:
        by_enzyme = _by_enzyme(function, arrays)
        return jax.jit(lambda *args: Forward().jvp(by_enzyme, *args))(arrays, tangents)


def _by_enzyme(function: OfArrays, arrays: Arrays) -> Callable[[Arrays], Any]:
    """Makes one operation of `function`, which Enzyme differentiates."""
    try:
        enzyme = importlib.import_module("enzyme_ad.jax")
    except ImportError as error:
        raise ImportError(
            "ad.Enzyme() needs the package `enzyme_ad`: `pip install 'eqxlike[enzyme]'`. It exists "
            "for Python 3.11 on Linux and macOS; elsewhere use `ad.Reverse()`."
        ) from error
    closed, output = jax.make_jaxpr(function, return_shape=True)(arrays)
    treedef = jax.tree.structure(output)
    num_consts, num_inputs = len(closed.consts), len(closed.consts) + len(arrays)
    # The reverse mode of enzyme_ad 0.0.16 fails if there are more outputs than inputs.
    spare = [jnp.zeros(()) for _ in range(treedef.num_leaves - num_inputs)]

    # Enzyme traces this function again at compile time, when tracers in its closure would be
    # invalid. So closed-over arrays become arguments.
    def of_all(*args: Array) -> list[Array]:
        consts, arrays = args[:num_consts], args[num_consts:num_inputs]
        return jaxpr_as_fun(ClosedJaxpr(closed.jaxpr, consts))(*arrays)

    operation = enzyme.enzyme_jax_ir()(of_all)

    def run(arrays: Arrays) -> Any:
        return jax.tree.unflatten(treedef, operation(*closed.consts, *arrays, *spare))

    return run


# --- Derivatives along each number of the input, in blocks ---


def num_directions(arrays: Sequence[Array]) -> int:
    """The number of real numbers in `arrays`. A complex number counts as two."""
    return sum(math.prod(each.shape) * _parts(each) for each in arrays)


def is_one_block(arrays: Sequence[Array], chunk: int | None) -> bool:
    """Whether `along_directions` computes all directions in one batch."""
    return chunk is None or 1 < chunk >= num_directions(arrays)


def along_directions(
    derivative: Callable[[Arrays], Any], arrays: Arrays, chunk: int | None, out_axes: Any = 0
) -> Any:
    """Calls `derivative` on each unit tangent of `arrays`.

    **Arguments:**

    - `derivative`: function that takes a list of tangents of `arrays` and returns a pytree of
      arrays.
    - `arrays`: arrays with `n` real numbers in total. For a complex array, the directions along the
      real parts come first, and then the directions along the imaginary parts.
    - `chunk`: the largest number of directions in one batch. `None` takes all directions as one
      batch; 1 does not use `jax.vmap`.
    - `out_axes`: as for `jax.vmap`. Used only if all directions are one batch.

    **Returns:** the outputs of `derivative`, with a leading axis of length `n`.

    **Raises:** `ValueError` if `chunk` is 1 and `derivative` writes to a `jax.Ref`, because
    `derivative` would write `n` times.
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
    # Blocks have equal sizes. Indices past the last direction, in the last block, give zeros.
    chunk = math.ceil(total / num_blocks)
    blocks = jnp.arange(num_blocks * chunk).reshape(num_blocks, chunk)
    found = jax.lax.map(jax.vmap(along), blocks)
    return jax.tree.map(lambda each: each.reshape(-1, *each.shape[2:])[:total], found)


def _without_writes(along: Callable[[Int[Array, ""]], Any]) -> Callable[[Int[Array, ""]], Any]:
    """Traces `along` once. Raises `ValueError` if `along` writes to a `jax.Ref`."""
    closed, output = jax.make_jaxpr(along, return_shape=True)(jnp.zeros((), int))
    if any(type(each).__name__ in ("WriteEffect", "AccumEffect") for each in closed.effects):
        raise ValueError(
            "The function writes to a `jax.Ref`, but this mode evaluates the function once for "
            "each direction, and would write each time. Use `ad.Reverse()` or `ad.Checkpointed()`, "
            "which evaluate the function once."
        )
    treedef = jax.tree.structure(output)
    return lambda index: jax.tree.unflatten(treedef, jaxpr_as_fun(closed)(index))


def gradients_of(derivatives: Array, arrays: Arrays) -> list[Array]:
    """Splits derivatives of shape `(n, *out)` into one array of shape `(*out, *in)` for each input.

    The derivative with respect to a complex array `x + iy` is `d/dx - i d/dy`, as in JAX.
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
        parts, size = [], math.prod(array.shape)
        for _ in range(_parts(array)):
            parts.append((jnp.arange(size) == index - start).reshape(array.shape))
            start += size
        tangent = parts[0].astype(array.dtype)
        if len(parts) == 2:
            tangent = tangent + parts[1].astype(array.dtype) * 1j
        tangents.append(tangent)
    return tangents
