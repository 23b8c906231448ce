"""Forward-mode derivatives of functions of any arguments."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.extend.core import Primitive
from jax.interpreters import ad
from jaxtyping import PyTree

from ..._compat import Tracer
from ..._partition import UNTRACED, Rest, split, split_leaves
from ..._pytree import is_inexact_array, is_inexact_array_like
from .._signatures import Output
from .._wrapping import check_callable
from ._tangents import tangents_of


def filter_jvp(
    fn: Callable[..., Output],
    primals: Sequence[PyTree],
    tangents: Sequence[PyTree],
    **kwargs: Any,
) -> tuple[Output, PyTree]:
    """The value of a function and its Jacobian-vector product, for arguments of any type.

    **Arguments:**

    - `fn`: a function of any arguments that returns any pytree.
    - `primals`: a tuple or list of the positional arguments.
    - `tangents`: a tuple or list with the structure of `primals`. Beside a floating-point or
      complex array, or Python number, it has an array of that shape and dtype, or `None` for a
      zero; beside everything else `None`. `None` may also stand for a whole subtree of zeros.
    - `**kwargs`: passed to `fn`, and not differentiated.

    **Returns:** `(fn(*primals, **kwargs), tangent)`. The tangent has the structure of the value,
    with `None` for what is not differentiable, and for what does not depend on anything that was
    given a tangent.

    **Raises:** naming the path: `ValueError` if a structure or shape differs; `TypeError` for
    another dtype, or a tangent beside what is not differentiable.

    !!! example

        >>> import eqxlike as eqx, jax.numpy as jnp
        >>> def scale(x, factor, label):
        ...     return {"scaled": factor * x, "factor": factor, "label": label}
        >>> primals = (jnp.array(3.0), jnp.array(2.0), "doubled")
        >>> value, tangent = eqx.filter_jvp(scale, primals, (jnp.array(1.0), None, None))
        >>> print(value["scaled"], tangent["scaled"], tangent["factor"], tangent["label"])
        6.0 2.0 None None
    """
    check_callable(fn, "filter_jvp")
    for name, given in (("primals", primals), ("tangents", tangents)):
        if not isinstance(given, tuple | list):
            raise TypeError(
                f"`{name}` must be a tuple or list with an element for each positional argument; "
                f"it is of type {type(given).__name__}."
            )
    leaves, treedef = jtu.tree_flatten(tuple(primals))
    types = [leaf if is_inexact_array_like(leaf) else None for leaf in leaves]
    found = tangents_of(types, treedef, tuple(tangents), "tangents", "primals")
    moving, rest = split_leaves(leaves, treedef, [tangent is not None for tangent in found])
    directions = rest.take(found)
    if not moving:
        output = fn(*primals, **kwargs)
        return output, jtu.tree_map(lambda _: None, output)
    output_rest: Rest = UNTRACED
    is_zero: list[bool] = []

    def of_moving(moving: list[Any]) -> tuple[list[Any], list[Any]]:
        nonlocal output_rest, is_zero
        # A leaf that is no tracer depends on nothing.
        traced, output_rest = split(fn(*rest.merge(moving), **kwargs), _is_tracer)
        is_zero = _find_zeros(moving, traced)
        zero, not_zero = (
            [leaf for leaf, each in zip(traced, is_zero, strict=True) if each is side]
            for side in (True, False)
        )
        return not_zero, zero

    not_zero, derivatives, zero = jax.jvp(
        of_moving, (list(map(_as_array, moving)),), (directions,), has_aux=True
    )
    of_zero, of_not_zero, next_derivative = iter(zero), iter(not_zero), iter(derivatives)
    output = output_rest.merge(next(of_zero if each else of_not_zero) for each in is_zero)
    tangent = output_rest.merge_into(
        None, (None if each else next(next_derivative) for each in is_zero)
    )
    return output, tangent


def _is_tracer(leaf: Any) -> bool:
    return isinstance(leaf, Tracer)


def _as_array(leaf: Any) -> Any:
    # A Python number that JAX converts by itself stays a subclass of `float` on its way through.
    return leaf if is_inexact_array(leaf) else jnp.asarray(leaf)


def _find_zeros(moving: list[Any], traced: list[Any]) -> list[bool]:
    """Whether the tangent of each of `traced` is zero because it does not depend on `moving`.

    JAX tells this to the rules of primitives alone, and asks a rule only if some argument of the
    primitive has a tangent: `moving` has one. The rule of a `jax.custom_jvp` is told too, but costs
    90 us a call, where this takes 7.
    """
    tangents: list[Any] = []
    _look.bind(moving[0], *traced, report=tangents.extend)
    return [
        isinstance(tangent, ad.Zero) or not is_inexact_array(leaf)
        for tangent, leaf in zip(tangents[1:], traced, strict=True)
    ]


def _report_tangents(
    primals: Any, tangents: Any, *, report: Callable[[Any], None]
) -> tuple[list[Any], list[Any]]:
    report(tangents)
    return [], []


_look = Primitive("look_at_tangents")
_look.multiple_results = True
ad.primitive_jvps[_look] = _report_tangents
