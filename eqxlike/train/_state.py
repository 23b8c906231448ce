"""`TrainState`, the input and output of a step, and the output of a loss."""

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
    """A model in training and everything else that a step needs. A step takes and returns a
    `TrainState`.

    - `model`: the model.
    - `optimiser_state`: the Optax state for the model's floating-point and complex arrays.
    - `step`: number of updates, including updates that were skipped because of the loss scale.
    - `key`: the source of randomness. Steps do not change it. Each step computes its own key from
      `key` and `step`; XLA removes this computation if the loss does not use the key.
    - `is_halted`: whether the last update was refused because it was not finite. Steps leave a
      halted state unchanged, so that it stays the last good state until the host reads it. Only
      steps of `make_step(..., check_finite="skip")` continue from a halted state.
    - `loss_scale`: the scale of the loss, for gradients in float16; `None` if the loss is not
      scaled.
    - `model_state`: the state that the model updates in each call, such as a `nn.State`; `None`
      for a model without state.

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
        """Creates the state before the first step.

        All arrays are copied. So the arguments stay usable when a step donates the state.

        **Arguments:**

        - `model`: any pytree. If an array is at two places, it becomes two arrays, and there is a
          warning; see `nn.Shared`.
        - `optimiser`: the optimiser. It is initialised with the model's floating-point and complex
          arrays.
        - `key`: the source of all randomness in training.
        - `loss_scale`: the loss scale of a model that computes in float16.
        - `model_state`: the initial state of a model with state, from `nn.make_with_state`.

        **Raises:** `TypeError` if `model` is a class, or if another argument has the wrong type.
        `ValueError` if `key` is an array of several keys. `RuntimeError` if an array of the model
        was donated.
        """
        check_model(model)
        check_optimiser(optimiser, "TrainState.create")
        check_key(key, "TrainState.create")
        if not isinstance(loss_scale, DynamicLossScale | None):
            raise TypeError(
                "TrainState.create expected loss_scale to be a train.DynamicLossScale or None, got "
                f"{loss_scale!r}."
            )
        check_not_deleted(model, "model", "TrainState.create")
        warn_of_ties(model)
        model = copy_arrays(model)
        optimiser_state = copy_arrays(initial_state(optimiser, filter(model, is_inexact_array)))
        step, is_halted = map(jax.device_put, (np.zeros((), np.int32), np.zeros((), bool)))
        key, loss_scale, model_state = copy_arrays((key, loss_scale, model_state))
        # Typed as `Any`, because a type checker takes `cls` for a TrainState of another model type.
        of_model: Any = cls
        return of_model(model, optimiser_state, step, key, is_halted, loss_scale, model_state)


MAX_SIZE_BY_NUMPY = 2**16


def copy_arrays(pytree: Tree, *, donate: bool = False) -> Tree:
    """Copies every array of a tree to a buffer of its own.

    This is needed before donation, because donation deletes buffers, and rejects a buffer that is
    passed twice. The copies have no weak types. Otherwise the second step would be traced again,
    because a step returns arrays without weak types. Keys are cloned, so that `jax.debug_key_reuse`
    accepts them.

    - `donate`: whether to delete each JAX array after it is copied, so that memory never has two
      trees.
    """
    donated: dict[int, Any] = {}

    def copy(leaf: Any) -> Any:
        if not donate or not isinstance(leaf, jax.Array):
            return copy_one(leaf)
        # The array may be at two places. At the second place it is already deleted, so copy the
        # copy.
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
            # Copy small arrays with NumPy, because `jnp.array` compiles a program for each shape.
            # Do not copy large arrays this way: `device_put` may share NumPy's memory, which
            # donation cannot reuse.
            return jax.device_put(np.array(leaf), leaf.sharding if leaf.committed else None)
        return jnp.array(leaf, dtype=leaf.dtype, copy=True)

    return jax.tree_util.tree_map(copy, pytree)


def check_state(state: Any, taker: str) -> None:
    """Raises `TypeError` if `state` is not a `TrainState`, for example a model."""
    if not isinstance(state, TrainState):
        got = f"the class {state.__name__}" if isinstance(state, type) else type(state).__name__
        raise TypeError(
            f"{taker} expected a TrainState, got {got}. Create one with "
            "`TrainState.create(model, optimiser, key=key)`, or pass the state that the last step "
            "returned, or the `.state` of the result of `fit`."
        )


# --- The four signatures of a loss, converted to one ---


class Evaluation(NamedTuple):
    """The output of a loss with any of the four signatures.

    - `loss`: shape `()`.
    - `model_state`: the new state of the model; `None` for a model without state.
    - `aux`: the auxiliary output; `None` without `has_aux`.
    """

    loss: Any
    model_state: Any
    aux: Any


Evaluate = Callable[[Any, Any, Any, PRNGKeyArray], Evaluation]
"""A loss with a single signature: `evaluate(model, model_state, batch, key)`."""


_HINT = (
    " If the loss also takes the model's state, pass that state to "
    "`TrainState.create(..., model_state=state)`."
)


def evaluator(loss: Callable[..., Any], has_aux: bool) -> Evaluate:
    """Converts a loss with any of the four signatures of `make_step` to an `Evaluate`."""

    def evaluate(model: Any, model_state: Any, batch: Any, key: PRNGKeyArray) -> Evaluation:
        if model_state is not None:
            check_takes(loss, "loss(model, model_state, batch, key)", "make_step")
            # Pass a copy, because setting an entry of a `nn.State` invalidates the `nn.State`, and
            # the old state may be needed again.
            copied = jtu.tree_map(lambda leaf: leaf, model_state)
            returned = loss(model, copied, batch, key)
            return _with_model_state(returned, model_state, has_aux)
        check_takes(loss, "loss(model, batch, key)", "make_step", _HINT)
        returned = loss(model, batch, key)
        if not has_aux:
            hint = "if it returns an auxiliary output too, pass has_aux=True to make_step"
            return Evaluation(_number(returned, hint), None, None)
        _check_pair(returned, "make_step(has_aux=True): the loss must return (loss, aux)")
        return Evaluation(_number(returned[0]), None, returned[1])

    return evaluate


def _with_model_state(returned: Any, old: Any, has_aux: bool) -> Evaluation:
    """Reads the output of a loss for a model with a state.

    **Raises:** `TypeError` if the output is not a tuple with the expected entries, or if the new
    state differs from the old state in structure, shapes or dtypes.
    """
    signature = "(loss, (model_state, aux))" if has_aux else "(loss, model_state)"
    expected = f"The TrainState has a model_state: the loss must return {signature}"
    _check_pair(returned, expected)
    value, rest = returned
    if has_aux:
        _check_pair(rest, expected, returned)
    new, aux = rest if has_aux else (rest, None)
    difference = find_static_difference(old, new) or find_difference(old, new, same_shape_and_dtype)
    if difference:
        raise TypeError(
            f"{expected}, with a model_state like the one it got, {tree_pformat(old)}; got "
            f"{tree_pformat(new)}: "
            f"{difference.explain('the old model_state', 'the new model_state')}."
        )
    return Evaluation(_number(value), new, aux)


def _number(loss: Any, hint: str | None = None) -> Any:
    """Returns the loss. Raises `TypeError` if it is not a number."""
    is_known = is_array_like(loss) or isinstance(loss, np.ndarray | np.generic)
    if is_known and getattr(loss, "shape", ()) == ():
        return loss
    remedies = "take the mean over the batch" + ("" if hint is None else f"; {hint}")
    raise TypeError(
        "make_step expected the loss to be a number, of shape (); got "
        f"{tree_pformat(loss)}: {remedies}."
    )


def _check_pair(pair: Any, expected: str, returned: Any = None) -> None:
    """Raises `TypeError` if `pair` is not a tuple of length 2. The error shows `returned`, if
    given.
    """
    if not isinstance(pair, tuple) or len(pair) != 2:
        raise TypeError(f"{expected}, got {tree_pformat(pair if returned is None else returned)}.")
