"""The primitives of a check: `check_p`, and `needing_p` for the arrays that depend on the check.

Tracing a primitive is faster than tracing its implementation. The implementation is traced only at
lowering.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array

from ..._compat import set_batching_rule

# Operands: the predicate and, if there are several messages, the index of the message. Output:
# whether the check passes. The parameter `check` is a `Check`.
check_p = Primitive("check")
check_p.def_impl(lambda *operands, check: jnp.asarray(check.evaluate(*operands)))
check_p.def_abstract_eval(lambda *operands, check: ShapedArray((), np.dtype(bool)))


def stage(*operands: Any, check: Any) -> Array:
    """The lowering rule: replaces the primitive by operations of JAX."""
    return check.staged(*operands)


def _differentiate_check(primals: Any, tangents: Any, *, check: Any) -> tuple[Any, ad.Zero]:
    output = check_p.bind(*primals, check=check)
    return output, ad.Zero(jax.typeof(output).to_tangent_aval())


def _batch_check(axis: Any, operands: Any, axes: Any, *, check: Any) -> tuple[Any, None]:
    """The batching rule: inserts the same check with one more batch axis."""
    spread = (
        batching.bdim_at_front(operand, at, axis.size)
        for operand, at in zip(operands, axes, strict=True)
    )
    failed, *index = spread
    return check.passes(failed, *index or [None]), None


mlir.register_lowering(check_p, mlir.lower_fun(stage, multiple_results=False))
ad.primitive_jvps[check_p] = _differentiate_check
set_batching_rule(check_p, _batch_check)


def needing(passes: Any, arrays: list[Array]) -> list[Array]:
    """Adds a data dependency on the check to the arrays and their derivatives."""
    return needing_p.bind(passes, *arrays) if arrays else []


# Operands: the output of a check, and any number of arrays. Output: the arrays.
needing_p = Primitive("needing_check")
needing_p.multiple_results = True


@needing_p.def_impl
def _select(passes: Any, *arrays: Any) -> list[Array]:
    # The zeros are never used: if the check fails, the program raises. The compiler fuses `select`
    # with the operation that computes or uses the array.
    return [jax.lax.select(passes, array, jnp.zeros_like(array)) for array in arrays]


needing_p.def_abstract_eval(lambda passes, *arrays: list(arrays))


def _differentiate(primals: Any, tangents: Any) -> tuple[list[Any], list[Any]]:
    return needing_p.bind(*primals), _select_nonzero(primals[0], tangents[1:])


def _transpose(cotangents: Any, passes: Any, *arrays: Any) -> list[Any]:
    return [None, *_select_nonzero(passes, cotangents)]


def _select_nonzero(passes: Any, tangents: Any) -> list[Any]:
    nonzero = [each for each in tangents if type(each) is not ad.Zero]
    selected = iter(needing(passes, nonzero))
    return [each if type(each) is ad.Zero else next(selected) for each in tangents]


def _batch(axis: Any, operands: Any, axes: Any) -> tuple[list[Any], list[Any]]:
    if axes[0] is None:
        return needing_p.bind(*operands), list(axes[1:])
    # The output of a check has no batch axis. But if a check is in a branch of a `cond`, the output
    # of the branch may have a batch axis.
    return jax.vmap(_select, axes)(*operands), [0] * len(axes[1:])


mlir.register_lowering(needing_p, mlir.lower_fun(_select, multiple_results=True))
ad.primitive_jvps[needing_p] = _differentiate
ad.primitive_transposes[needing_p] = _transpose
set_batching_rule(needing_p, _batch)
