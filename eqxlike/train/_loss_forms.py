"""A loss, in whichever of its four forms, as one function."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.tree_util as jtu
import numpy as np
from jaxtyping import PRNGKeyArray

from .._partition import find_static_difference
from .._pytree import find_difference, is_array_like, same_shape_and_dtype, tree_pformat
from ._checks import check_takes


class Evaluation(NamedTuple):
    """The output of a loss, in one form.

    - `loss`: shape `()`.
    - `model_state`: the new state of the model; `None` for a model that has none.
    - `aux`: what else the loss returns.
    """

    loss: Any
    model_state: Any
    aux: Any


Evaluate = Callable[[Any, Any, Any, PRNGKeyArray], Evaluation]
"""`evaluate(model, model_state, batch, key)`."""


_HINT = (
    " Where the loss takes the state of its model too, give that to "
    "`TrainState.create(..., model_state=state)`."
)


def evaluator(loss: Callable[..., Any], has_aux: bool) -> Evaluate:
    """The function of a loss in one form, whichever of the four forms of `make_step` it has."""

    def evaluate(model: Any, model_state: Any, batch: Any, key: PRNGKeyArray) -> Evaluation:
        if model_state is not None:
            check_takes(loss, "loss(model, model_state, batch, key)", "make_step")
            # A copy: a `nn.State` that is set is used up, and the old one may be needed again.
            copied = jtu.tree_map(lambda leaf: leaf, model_state)
            returned = loss(model, copied, batch, key)
            return _with_model_state(returned, model_state, has_aux)
        check_takes(loss, "loss(model, batch, key)", "make_step", _HINT)
        returned = loss(model, batch, key)
        if not has_aux:
            way_out = "if it returns something beside, give make_step has_aux=True"
            return Evaluation(_number(returned, way_out), None, None)
        _check_pair(returned, "make_step(has_aux=True): the loss is to return (loss, aux)")
        return Evaluation(_number(returned[0]), None, returned[1])

    return evaluate


def _with_model_state(returned: Any, old: Any, has_aux: bool) -> Evaluation:
    """The output of a loss for a model with a state. Raises `TypeError` for anything else, and for
    a state of another form than the model had before.
    """
    form = "(loss, (model_state, aux))" if has_aux else "(loss, model_state)"
    expected = f"The TrainState has a model_state: the loss is to return {form}"
    _check_pair(returned, expected)
    value, beside = returned
    if has_aux:
        _check_pair(beside, expected, returned)
    new, aux = beside if has_aux else (beside, None)
    difference = find_static_difference(old, new) or find_difference(old, new, same_shape_and_dtype)
    if difference:
        raise TypeError(
            f"{expected}, of the form that it got, {tree_pformat(old)}; got {tree_pformat(new)}: "
            f"{difference.explain('the old model_state', 'the new model_state')}."
        )
    return Evaluation(_number(value), new, aux)


def _number(loss: Any, way_out: str | None = None) -> Any:
    """The loss. Raises `TypeError` if it is not a number."""
    is_known = is_array_like(loss) or isinstance(loss, np.ndarray | np.generic)
    if is_known and getattr(loss, "shape", ()) == ():
        return loss
    ways = "take the mean over the batch" + ("" if way_out is None else f"; {way_out}")
    raise TypeError(
        f"make_step expected a loss of shape (), a number, and got {tree_pformat(loss)}: {ways}."
    )


def _check_pair(pair: Any, expected: str, returned: Any = None) -> None:
    """Raises `TypeError` unless `pair`, a part of what was `returned` or all of it, is a pair."""
    if not isinstance(pair, tuple) or len(pair) != 2:
        raise TypeError(f"{expected}, got {tree_pformat(pair if returned is None else returned)}.")
