"""A loss, in whichever of its four forms, as one function."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import PRNGKeyArray

from .._partition import find_static_difference
from .._pytree import is_array, tree_pformat


class Evaluation(NamedTuple):
    """What a loss comes to.

    - `loss`: shape `()`.
    - `model_state`: the new state of the model; `None` for a model that has none.
    - `aux`: what else the loss returns.
    """

    loss: Any
    model_state: Any
    aux: Any


Evaluate = Callable[[Any, Any, Any, PRNGKeyArray], Evaluation]
"""`evaluate(model, model_state, batch, key)`."""


def evaluator(loss: Callable[..., Any], has_aux: bool) -> Evaluate:
    """`loss`, taken and answered as `make_step` says, in one form."""

    def evaluate(model: Any, model_state: Any, batch: Any, key: PRNGKeyArray) -> Evaluation:
        if model_state is not None:
            # A copy: a `nn.State` that is set is used up, and the old one may be needed again.
            copied = jtu.tree_map(lambda leaf: leaf, model_state)
            returned = loss(model, copied, batch, key)
            return _with_model_state(returned, model_state, has_aux)
        value, aux = loss(model, batch, key) if has_aux else (loss(model, batch, key), None)
        return Evaluation(value, None, aux)

    return evaluate


def _with_model_state(returned: Any, old: Any, has_aux: bool) -> Evaluation:
    """What a loss returned for a model with a state. Raises `TypeError` for anything else, and for
    a state of another form than the model had before.
    """
    form = "(loss, (model_state, aux))" if has_aux else "(loss, model_state)"
    expected = f"The TrainState has a model_state: the loss is to return {form}"
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise TypeError(f"{expected}, got {tree_pformat(returned)}.")
    value, beside = returned
    if has_aux and (not isinstance(beside, tuple) or len(beside) != 2):
        raise TypeError(f"{expected}, got {tree_pformat(returned)}.")
    new, aux = beside if has_aux else (beside, None)
    if difference := _difference(old, new):
        path, *differing = difference
        shown = [tree_pformat(each) for each in differing]
        before, after = shown if shown[0] != shown[1] else map(repr, differing)
        raise TypeError(
            f"{expected}, of the form that it got, {tree_pformat(old)}; got {tree_pformat(new)}: "
            f"at model_state{jtu.keystr(path)} {before} became {after}."
        )
    return Evaluation(value, new, aux)


def _difference(old: Any, new: Any) -> tuple[Any, Any, Any] | None:
    """Where two states of a model differ in more than the numbers in their arrays."""
    if found := find_static_difference(old, new):
        return found
    for (path, before), after in zip(
        jtu.tree_leaves_with_path(old), jtu.tree_leaves(new), strict=True
    ):
        if is_array(before) and _type(before) != _type(after):
            return path, before, after
    return None


def _type(array: Any) -> tuple[Any, Any]:
    return array.shape, jnp.result_type(array)
