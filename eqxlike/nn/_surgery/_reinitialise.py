"""New values for the arrays of a model."""

from collections.abc import Callable
from typing import Any

import jax.tree_util as jtu
from jaxtyping import Array, PRNGKeyArray, PyTree

from ..._pytree import is_inexact_array
from .._common import Initializer, Parameter, check_instance, draw
from ._paths import key_at


def reinitialise(
    model: PyTree,
    rule: Callable[[str, Array], Initializer | None],
    *,
    key: PRNGKeyArray,
) -> PyTree:
    """A copy of a model with new values for those of its arrays that a rule chooses.

    **Arguments:**

    - `model`: a Module, or any pytree.
    - `rule`: called as `rule(path, array)` for each floating or complex array, with a path like
      `".layers[0].weight"`. It returns one of `jax.nn.initializers` or a function of your own,
      `init(key, shape, dtype)`; or `None`, and the array stays.
    - `key`: each array is drawn from its own part, which depends on its path alone: another layer
      in the model changes nothing in this one.

    Arrays of two axes or more are taken for weights `(outputs, inputs, *window)`: their
    initializer is called with the shape `(*window, inputs, outputs)`, on which those of JAX count
    their fan-in. For stacked layers, as of `nn.ScanStack`, `nn.Parallel` or an ensemble, call this
    function under `filter_vmap`, so that it sees the arrays of one.

    **Returns:** the model with the new arrays, of the shapes and dtypes of the old. An array that
    stands at two places gets two values, one for each path.

    **Raises:** `TypeError` if `rule` returns what is no function, or `model` is a class;
    `ValueError` if an initializer returns another shape or dtype than it was asked for.

    !!! example

        >>> import jax
        >>> from eqxlike import nn
        >>> model = nn.Linear(3, 4, key=jax.random.key(0))
        >>> def rule(path, array):
        ...     if path.endswith(".weight"):
        ...         return jax.nn.initializers.orthogonal()
        ...     return jax.nn.initializers.zeros
        >>> nn.reinitialise(model, rule, key=jax.random.key(1)).bias
        Array([0., 0., 0., 0.], dtype=float32)
    """
    check_instance(model, "reinitialise")

    def renew(path: tuple[Any, ...], leaf: Any) -> Any:
        if not is_inexact_array(leaf):
            return leaf
        name = jtu.keystr(path)
        initializer = rule(name, leaf)
        if initializer is None:
            return leaf
        if not callable(initializer):
            raise TypeError(
                "`rule` must return an initializer, called as `init(key, shape, dtype)`, or None; "
                f"for the array at model{name} it returned {initializer!r}."
            )
        parameter = Parameter(
            leaf.shape, leaf.dtype, initializer=initializer, inputs_last=leaf.ndim >= 2
        )
        try:
            return draw(key_at(key, name), parameter)[0]
        except Exception as error:
            error.add_note(f"The array is that at model{name}.")
            raise

    return jtu.tree_map_with_path(renew, model)
