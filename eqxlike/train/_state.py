"""What a step takes and returns: the state of a training, and the output of a loss."""

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax
from jaxtyping import Array, Bool, Int32, PRNGKeyArray, PyTree

from .. import Module, filter, is_array, is_array_like, is_inexact_array, tree_pformat
from .._dtypes import is_key
from ..extend import find_difference, find_static_difference, is_on_cpu, same_shape_and_dtype
from ._checks import (
    check_key,
    check_model,
    check_not_deleted,
    check_optimiser,
    check_takes,
    initial_state,
    warn_of_ties,
)
from ._loss_scale import DynamicLossScale

Tree = TypeVar("Tree")
Model = TypeVar("Model")


class TrainState(Module, Generic[Model]):
    """A model in training: one pytree that a step takes, and returns changed.

    - `model`: the model.
    - `optimiser_state`: the Optax state for the model's floating-point and complex arrays.
    - `step`: how many updates were made, including those that a loss scale skipped.
    - `key`: the source of randomness, which steps leave as it is. A step's own key is this one with
      `step` folded in, so that it costs nothing where the loss does not use it.
    - `is_halted`: whether the last update was refused because it was not finite. Steps leave a
      halted state unchanged, so that it stays the last good state until the host reads it. Only
      steps of `make_step(..., check_finite="skip")` continue from it.
    - `loss_scale`: for gradients in float16; `None` where the loss is not scaled.
    - `model_state`: what the model changes as it is called, such as a `nn.State`; `None` where it
      changes nothing.

    >>> import jax, optax
    >>> from eqxlike import nn
    >>> model = nn.Linear(2, 1, key=jax.random.key(0))
    >>> state = TrainState.create(model, optax.adam(1e-3), key=jax.random.key(1))
    >>> int(state.step), bool(state.is_halted)
    (0, False)
    """

    model: Model
    optimiser_state: PyTree
    step: Int32[Array, ""]
    key: PRNGKeyArray
    is_halted: Bool[Array, ""]
    loss_scale: DynamicLossScale | None = None
    model_state: Any = None

    @classmethod
    def create(
        cls,
        model: Tree,
        optimiser: optax.GradientTransformation,
        *,
        key: PRNGKeyArray,
        loss_scale: DynamicLossScale | None = None,
        model_state: PyTree = None,
    ) -> "TrainState[Tree]":
        """The state before the first step.

        **Arguments:**

        - `model`: any pytree. Its arrays are copied: a step donates those of its state, and `model`
          stays usable. An array at two places becomes two arrays, with a warning: see `nn.Shared`.
        - `optimiser`: initialised with the model's floating-point and complex arrays.
        - `key`: the source of all randomness in training; copied too.
        - `loss_scale`: for a model that computes in float16; copied too.
        - `model_state`: for a model with state, what `nn.make_with_state` made with it; copied too.

        **Raises:** `TypeError` if `model` is a class, `optimiser` no optimiser, `key` no key, or
        `loss_scale` something else; `ValueError` for several keys; `RuntimeError` if an array of
        the model was donated.
        """
        check_model(model)
        check_optimiser(optimiser, "TrainState.create")
        check_key(key, "TrainState.create")
        if not isinstance(loss_scale, DynamicLossScale | None):
            raise TypeError(
                "TrainState.create expected a train.DynamicLossScale as loss_scale, or None; got "
                f"{loss_scale!r}."
            )
        check_not_deleted(model, "model", "TrainState.create")
        warn_of_ties(model)
        model = copy_arrays(model)
        optimiser_state = copy_arrays(initial_state(optimiser, filter(model, is_inexact_array)))
        step, is_halted = map(jax.device_put, (np.zeros((), np.int32), np.zeros((), bool)))
        # To a type checker `cls` is a TrainState of some other model.
        of_model: Any = cls
        return of_model(
            model,
            optimiser_state,
            step,
            copy_arrays(key),
            is_halted,
            copy_arrays(loss_scale),
            copy_arrays(model_state),
        )


MAX_SIZE_BY_NUMPY = 2**16


def copy_arrays(pytree: Tree, *, donate: bool = False) -> Tree:
    """The same tree with every array in a new buffer of its own.

    Donation deletes buffers and refuses one that is passed twice; neither may happen to arrays that
    the caller holds. The copies have no weak types: a step would return strong ones, and be traced
    a second time for them. Keys are cloned, so that `jax.debug_key_reuse` accepts them.

    - `donate`: delete each array of JAX once it is copied, so that no two trees are there at once.
    """
    donated: dict[int, Any] = {}

    def copy(leaf: Any) -> Any:
        if not donate or not isinstance(leaf, jax.Array):
            return copy_one(leaf)
        # An array may be at two places.
        copied = copy_one(donated.get(id(leaf), leaf))
        donated[id(leaf)] = copied
        leaf.delete()
        return copied

    def copy_one(leaf: Any) -> Any:
        if not is_array(leaf):
            return leaf
        if is_key(leaf):
            leaf = jax.random.clone(leaf)
        elif isinstance(leaf, jax.Array) and leaf.size <= MAX_SIZE_BY_NUMPY and is_on_cpu(leaf):
            # JAX would compile a program for each shape. The copy may share NumPy's memory, which
            # donation cannot reuse; so only small arrays are copied this way.
            return jax.device_put(np.array(leaf), leaf.sharding if leaf.committed else None)
        return jnp.array(leaf, dtype=leaf.dtype, copy=True)

    return jax.tree_util.tree_map(copy, pytree)


def check_state(state: Any, taker: str) -> None:
    """Raises `TypeError` for what is not a `TrainState`, such as a model."""
    if not isinstance(state, TrainState):
        got = f"the class {state.__name__}" if isinstance(state, type) else type(state).__name__
        raise TypeError(
            f"{taker} expected a TrainState, and got {got}. Make one of a model with "
            "`TrainState.create(model, optimiser, key=key)`, and take the newest that a step, or "
            "`fit`, returned."
        )


# --- A loss, in whichever of its four forms, as one function ---


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
    """A loss in any of the four forms of `make_step`, as a function of one form."""

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
