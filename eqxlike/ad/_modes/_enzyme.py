"""Reverse and forward mode by Enzyme."""

import importlib
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jaxtyping import Array

from ._forward_reverse import Forward, Reverse
from ._mode import Arrays, Mode, OfArrays, ValueAndGrad


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
