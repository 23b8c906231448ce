"""The modes of differentiation, except gradient checkpointing."""

import abc
import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jaxtyping import Array, Float, Int

from .._check_numbers import positive_number, whole_number
from .._compat import Tracer
from .._dtypes import wider
from .._module import Module, field
from .._names import import_extra
from .._programs import equations_in
from .._transforms import error_if
from .._transforms._derivatives._grad import CannotDifferentiate

Arrays = list[Array]
Pullback = Callable[[Arrays], Arrays]
OfArrays = Callable[[Arrays], tuple[Any, Arrays]]
"""A function that a mode differentiates: takes a list of arrays, returns `(value, aux)`.

In `value_and_grad`, `value` is a real scalar. In all other methods, it is a list of arrays. `aux`
is a list of arrays that are not differentiated.
"""

ValueAndGrad = tuple[tuple[Float[Array, ""], Arrays], Arrays]
"""`((value, aux), gradient)`."""


class Mode(Module):
    """Abstract base class of the modes of differentiation.

    To write a mode, implement `value_and_grad`. The other methods have default implementations that
    call `value_and_grad`. Override a method if the mode has a faster implementation. All methods
    get lists of arrays, because `filter_grad` and other transformations handle pytrees and static
    leaves.

    !!! example

        >>> import eqxlike as eqx, jax.numpy as jnp
        >>> from eqxlike import ad
        >>> class Clipped(ad.Mode):
        ...     limit: float = eqx.field(static=True)
        ...     def value_and_grad(self, function, arrays):
        ...         value_and_aux, gradient = ad.Reverse().value_and_grad(function, arrays)
        ...         return value_and_aux, [each.clip(-self.limit, self.limit) for each in gradient]
        >>> print(eqx.filter_grad(lambda x: x**2, mode=Clipped(1.0))(jnp.array(3.0)))
        1.0
    """

    has_batching: ClassVar[bool] = True
    """Whether the derivatives of the mode can be batched with `jax.vmap`."""

    only_evaluates: ClassVar[bool] = False
    """Whether the mode only evaluates the function, and never differentiates it with JAX."""

    @abc.abstractmethod
    def value_and_grad(
        self, function: OfArrays, arrays: Arrays
    ) -> tuple[tuple[Float[Array, ""], Arrays], Arrays]:
        """Computes the value and gradient of a function, like `jax.value_and_grad(has_aux=True)`.

        **Arguments:**

        - `function`: function that takes a list of arrays and returns `(value, aux)`. `value` is a
          real scalar.
        - `arrays`: floating-point or complex arrays.

        **Returns:** `((value, aux), gradient)`. `gradient` is a list with one array for each of
        `arrays`, of the same shape and dtype. The gradient with respect to a complex array `x + iy`
        is `df/dx - i df/dy`, as in JAX.
        """

    def vjp(self, function: OfArrays, arrays: Arrays) -> tuple[Arrays, Pullback, Arrays]:
        """Computes the outputs of a function and its pullback, like `jax.vjp(has_aux=True)`.

        **Arguments:**

        - `function`: takes a list of arrays and returns `(outputs, aux)`. `outputs` is a list of
          floating-point or complex arrays.
        - `arrays`: floating-point or complex arrays.

        **Returns:** `(outputs, pullback, aux)`. `pullback` takes a list with a cotangent of each
        output, and returns a list with a cotangent of each of `arrays`.
        """
        outputs, aux = function(arrays)

        def pull_back(cotangents: Arrays) -> Arrays:
            def dotted(arrays: Arrays) -> tuple[Array, Arrays]:
                outputs, _ = function(arrays)
                return real_dot(outputs, cotangents), []

            return self.value_and_grad(dotted, arrays)[1]

        return outputs, pull_back, aux

    def jvp(self, function: OfArrays, arrays: Arrays, tangents: Arrays) -> Arrays:
        """Computes the tangents of the outputs of a function, like `jax.jvp`.

        **Arguments:**

        - `function`: takes a list of arrays and returns `(outputs, aux)`. `outputs` is a list of
          floating-point or complex arrays.
        - `arrays`: floating-point or complex arrays.
        - `tangents`: arrays with the shapes and dtypes of `arrays`.
        """
        outputs, pullback, _ = self.vjp(function, arrays)
        # The transpose of the pullback is the JVP.
        structs = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in outputs]
        (directions,) = jax.linear_transpose(pullback, structs)(list(tangents))
        return directions

    def jacobian(self, function: OfArrays, arrays: Arrays) -> tuple[Arrays, Arrays, list[Arrays]]:
        """Computes the outputs of a function and its Jacobian.

        **Arguments:**

        - `function`: takes a list of arrays and returns `(outputs, aux)`. `outputs` is a list of
          real floating-point arrays.
        - `arrays`: floating-point or complex arrays.

        **Returns:** `(outputs, aux, jacobian)`. `jacobian[i][j]` is the derivative of `outputs[i]`
        with respect to `arrays[j]`, of shape `(*outputs[i].shape, *arrays[j].shape)`.
        """
        outputs, pullback, aux = self.vjp(function, arrays)
        if not outputs:
            return outputs, aux, []
        *starts, size = itertools.accumulate(math.prod(each.shape) for each in outputs)
        # Make a one-hot cotangent for each number in the outputs.
        columns = jnp.split(jnp.eye(size, dtype=bool), starts, axis=1)
        cotangents = [
            column.reshape(size, *output.shape).astype(output.dtype)
            for column, output in zip(columns, outputs, strict=True)
        ]
        if size == 1:
            found = [each[None] for each in pullback([each[0] for each in cotangents])]
        elif self.has_batching:
            found = jax.vmap(pullback)(cotangents)
        else:
            found = jax.lax.map(pullback, cotangents)
        jacobian: list[Arrays] = [[] for _ in outputs]
        for gradient in found:
            parts = jnp.split(gradient, starts)
            for row, output, part in zip(jacobian, outputs, parts, strict=True):
                row.append(part.reshape(*output.shape, *gradient.shape[1:]))
        return outputs, aux, jacobian


def real_dot(outputs: Arrays, cotangents: Arrays) -> Float[Array, ""]:
    """The real part of the dot product, without conjugation. Its gradient is the pullback."""
    products = to_widest(
        jnp.sum(jnp.real(output * cotangent))
        for output, cotangent in zip(outputs, cotangents, strict=True)
    )
    return sum(products[1:], products[0])


def to_widest(arrays: Iterable[Array]) -> Arrays:
    """Casts the arrays to the widest of their dtypes."""
    arrays = list(arrays)
    dtype = functools.reduce(wider, (each.dtype for each in arrays))
    return [each.astype(dtype) for each in arrays]


# --- Forward and reverse mode of JAX and of Enzyme ---


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


class _OfDirections(Mode):
    """Base class of the modes that compute a derivative along each direction of the inputs."""

    def value_and_grad(self, function: OfArrays, arrays: Arrays) -> ValueAndGrad:
        def as_list(arrays: Arrays) -> tuple[Arrays, Arrays]:
            value, aux = function(arrays)
            return [value], aux

        (value,), aux, (gradient,) = self.jacobian(as_list, arrays)
        return (value, aux), gradient


class Forward(_OfDirections):
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
    enzyme = import_extra(
        "enzyme_ad.jax",
        "ad.Enzyme() needs the package `enzyme_ad`: `pip install 'eqxlike[enzyme]'`. It exists "
        "for Python 3.11 on Linux and macOS; elsewhere use `ad.Reverse()`.",
    )
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
    return sum(math.prod(each.shape) * (2 if jnp.iscomplexobj(each) else 1) for each in arrays)


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
        part = derivatives[start : start + num_directions([array])]
        start += len(part)
        if jnp.iscomplexobj(array):
            real, imag = jnp.split(part, 2)
            part = jax.lax.complex(real, -imag)
        gradient = jnp.moveaxis(part, 0, -1).reshape(*derivatives.shape[1:], *array.shape)
        gradients.append(gradient.astype(array.dtype))
    return gradients


def _unit_tangents(arrays: Arrays, index: Int[Array, ""]) -> Arrays:
    tangents, start = [], 0
    for array in arrays:
        size = num_directions([array])
        tangent = (jnp.arange(size) == index - start).astype(array.dtype)
        start += size
        if jnp.iscomplexobj(array):
            real, imag = jnp.split(tangent, 2)
            tangent = real + imag * 1j
        tangents.append(tangent.reshape(array.shape))
    return tangents


# --- Central finite differences ---


# `_WEIGHTS[order][k]` is the weight of `(f(x + k h) - f(x - k h)) / h` in the formula for f'(x).
_WEIGHTS = {2: {1: 1 / 2}, 4: {1: 2 / 3, 2: -1 / 12}}


class FiniteDifference(_OfDirections):
    """Central finite differences.

    Finite differences only evaluate the function. So they can check derivative rules, and
    differentiate functions without derivative rules, such as `jax.pure_callback`. They evaluate the
    function `order` times for each number in the inputs, one evaluation after another. At most half
    of the digits of the result are right, so use float64.

    - `order`: 2 or 4, the order of the truncation error. Order 2 is `(f(x + h) - f(x - h)) / 2h`;
      order 4 is `(8 f(x + h) - 8 f(x - h) - f(x + 2h) + f(x - 2h)) / 12h`.
    - `step`: the step `h`. `None` chooses a step for each number `x` of the input, about
      `max(1, |x|)` times the cube root of the machine epsilon. For order 2, this step balances
      rounding and truncation errors (Numerical Recipes, section 5.7). Order 4 uses the same step,
      because a larger step would cross more kinks, such as the kink of a `relu`.

    **Raises:**

    - `ValueError` if `order` is not 2 or 4.
    - `ValueError` if `step` is not positive.
    - `ValueError`, when called, if `step` is too small for a number `x` of the input, that is, if
      `x + step == x`.

    !!! example

        >>> import eqxlike as eqx, jax, jax.numpy as jnp
        >>> from eqxlike import ad
        >>> gradient = eqx.filter_grad(jnp.sin, mode=ad.FiniteDifference(order=4))
        >>> print(bool(jnp.allclose(gradient(jnp.array(0.5)), jnp.cos(0.5), atol=1e-4)))
        True
    """

    only_evaluates: ClassVar[bool] = True

    order: int = field(static=True, default=2)
    step: float | None = field(static=True, default=None)

    def __check_init__(self):
        if self.order not in _WEIGHTS:
            raise ValueError(f"FiniteDifference: order must be 2 or 4, got {self.order!r}.")
        if self.step is not None:
            positive_number(self.step, "FiniteDifference: step")

    def vjp(self, function: OfArrays, arrays: Arrays) -> tuple[Arrays, Pullback, Arrays]:
        outputs, aux = function(arrays)

        def pull_back(cotangents: Arrays) -> Arrays:
            # Take the differences before the dot product. In the dot product, rounding of a large
            # output would hide the difference of a small output.
            derivatives = self._derivatives(
                function, arrays, outputs, lambda found: [real_dot(found, cotangents)]
            )
            return gradients_of(derivatives[0], arrays)

        return outputs, pull_back, aux

    def jvp(self, function: OfArrays, arrays: Arrays, tangents: Arrays) -> Arrays:
        outputs, _ = function(arrays)
        steps = self._steps(arrays, outputs)
        # `steps` has a step for each number. `h` is the largest step along the tangent for which no
        # number moves further than its own step.
        reach = [
            jnp.where(size == 0, jnp.inf, step / size).min(initial=jnp.inf)
            for size, step in zip(map(jnp.abs, jax.lax.stop_gradient(tangents)), steps, strict=True)
        ]
        h = jnp.stack(to_widest(reach)).min()
        h = jnp.where(jnp.isfinite(h), h, 1)
        return self._difference(function, arrays, tangents, h)

    def jacobian(self, function: OfArrays, arrays: Arrays) -> tuple[Arrays, Arrays, list[Arrays]]:
        outputs, aux = function(arrays)
        derivatives = self._derivatives(function, arrays, outputs)
        return outputs, aux, [gradients_of(each, arrays) for each in derivatives]

    def _derivatives(
        self,
        function: OfArrays,
        arrays: Arrays,
        outputs: Arrays,
        weigh: Callable[[Arrays], Arrays] = list,
    ) -> Arrays:
        """The derivatives along all `n` directions, of shape `(n, *output.shape)` for each output.

        **Arguments:**

        - `weigh`: a linear function that is applied to the derivatives along each direction.
        """
        steps = self._steps(arrays, outputs)

        def along(tangents: Arrays) -> Arrays:
            h = to_widest(
                jnp.sum(jnp.where(tangent != 0, step, 0))
                for step, tangent in zip(steps, tangents, strict=True)
            )
            return weigh(self._difference(function, arrays, tangents, sum(h[1:], h[0])))

        return along_directions(along, arrays, 1)

    def _difference(
        self, function: OfArrays, arrays: Arrays, tangents: Arrays, h: Float[Array, ""]
    ) -> Arrays:
        def moved(by: Float[Array, ""]) -> Arrays:
            pairs = zip(arrays, tangents, strict=True)
            return function([array + along * by.astype(array.dtype) for array, along in pairs])[0]

        terms = [
            [(above - below) * w for above, below in zip(moved(k * h), moved(-k * h), strict=True)]
            for k, w in _WEIGHTS[self.order].items()
        ]
        sums = [functools.reduce(operator.add, each) for each in zip(*terms, strict=True)]
        return [each / h.astype(each.dtype) for each in sums]

    def _steps(self, arrays: Arrays, outputs: Arrays) -> list[Float[Array, "..."]]:
        """The step for each number of each array. The steps are not differentiated."""
        arrays = jax.lax.stop_gradient(arrays)
        epsilon = max((float(jnp.finfo(each.dtype).eps) for each in outputs), default=0.0)
        steps = []
        for place, array in enumerate(arrays):
            finfo = jnp.finfo(array.dtype)
            size = jnp.abs(array).astype(finfo.dtype)
            if self.step is None:
                relative = max(float(finfo.eps), epsilon) ** (1 / 3)
                wanted = relative * jnp.maximum(size, 1)
                # The difference of the rounded numbers is exact, so use it as the step.
                steps.append((size + wanted) - size)
            else:
                wanted = jnp.full(size.shape, self.step, finfo.dtype)
                lost = ((array.real + wanted) == array.real) & jnp.isfinite(size)
                if jnp.iscomplexobj(array):
                    lost |= (array.imag + wanted) == array.imag
                what = (
                    f"has a number that is too large for the step {self.step}: x + step == x in "
                    f"{array.dtype}. Use a larger step, float64, or FiniteDifference(step=None), "
                    "which chooses a step for each number."
                )
                if isinstance(lost, Tracer):
                    which = f"the differentiated array {place}, of shape {array.shape},"
                    wanted = error_if(wanted, lost, f"FiniteDifference: {which} {what}")
                elif np.any(lost):
                    raise CannotDifferentiate(place, what)
                steps.append(wanted)
        return steps
