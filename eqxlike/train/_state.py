"""`TrainState`, the input and output of a step; its loss scale; and the signatures of a loss."""

import math
import traceback
import warnings
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Float32, Int32, PRNGKeyArray, PyTree

from .. import (
    Module,
    field,
    filter,
    is_array,
    is_array_like,
    is_inexact_array,
    tree_at,
    tree_pformat,
)
from .._check_numbers import hint_to_call, whole_number
from .._dtypes import at_least_float32, is_key
from ..extend import (
    find_difference,
    find_static_difference,
    is_on_cpu,
    listed,
    paths_without_numbers,
    same_shape_and_dtype,
)
from ._checks import check_not_deleted, check_takes

_LARGEST = float(jnp.finfo(jnp.float32).max)


class DynamicLossScale(Module):
    """An adaptive factor for the loss that keeps gradients in the range of float16.

    Gradients below 6e-8 are 0 in float16. Therefore the loss is multiplied by `scale`, and the
    gradients are divided by `scale` in float32. If a gradient overflows, the update is skipped and
    the scale is divided by `factor`. After `period` steps without an overflow, the scale is
    multiplied by `factor`. So the scale stays as large as possible (Micikevicius et al., 2018,
    "Mixed Precision Training").

    - `scale`: shape `()`, float32. Scaling is exact for powers of two.
    - `counter`: shape `()`, int32. Number of steps since the scale last changed, or would have
      changed if it were not at a bound.

    With `make_step`, use `TrainState.create(..., loss_scale=DynamicLossScale())`. bfloat16 has the
    range of float32 and does not need a loss scale.

    !!! example

        In a step of your own:

        >>> import eqxlike as eqx, jax, jax.numpy as jnp, optax
        >>> from eqxlike import nn, train
        >>> optimiser = optax.sgd(1e-3)
        >>> @eqx.filter_jit
        ... def step(model, optimiser_state, loss_scale, x):
        ...     def scaled_loss(model):
        ...         return loss_scale.scale_loss(jnp.mean(jax.vmap(model)(x) ** 2))
        ...     gradients = loss_scale.unscale(eqx.filter_grad(scaled_loss)(model))
        ...     is_finite = train.all_finite(gradients)
        ...     updates, new_state = optimiser.update(gradients, optimiser_state)
        ...     new = eqx.apply_updates(model, updates), new_state
        ...     model, optimiser_state = train.tree_where(is_finite, new, (model, optimiser_state))
        ...     return model, optimiser_state, loss_scale.adjust(is_finite)
        >>> linear = nn.Linear(2, 1, key=jax.random.key(0))
        >>> model = nn.MixedPrecision(linear, "params=float32,compute=float16,output=float32")
        >>> optimiser_state = optimiser.init(eqx.filter(model, eqx.is_inexact_array))
        >>> loss_scale = train.DynamicLossScale()
        >>> model, _, loss_scale = step(model, optimiser_state, loss_scale, jnp.ones((4, 2)))
        >>> float(loss_scale.scale), int(loss_scale.counter)
        (32768.0, 1)
    """

    scale: Float32[Array, ""]
    counter: Int32[Array, ""]
    period: int = field(static=True)
    factor: float = field(static=True)
    minimum: float = field(static=True)
    maximum: float = field(static=True)

    def __init__(
        self,
        scale: float = 2.0**15,
        *,
        period: int = 2000,
        factor: float = 2.0,
        minimum: float = 1.0,
        maximum: float = 2.0**24,
    ):
        """**Arguments:**

        - `scale`: initial scale. If it is too large, the first steps are skipped until the scale is
          small enough.
        - `period`: number of steps with finite gradients after which the scale grows.
        - `factor`: factor by which the scale grows and shrinks.
        - `minimum`, `maximum`: bounds of the scale. The scale reaches `maximum` if no gradient ever
          overflows, as in float32.

        **Raises:** `ValueError` unless `0 < minimum <= scale <= maximum`, all in the range of
        float32. `ValueError` if `factor` is not above 1, or `period` is not an integer of at least
        1.
        """
        if not 0 < minimum <= scale <= maximum <= _LARGEST:
            raise ValueError(
                "DynamicLossScale expects 0 < minimum <= scale <= maximum, all in the range of "
                f"float32; got minimum={minimum}, scale={scale} and maximum={maximum}."
            )
        if not 1 < factor < math.inf:
            raise ValueError(f"DynamicLossScale expects a factor above 1, got {factor}.")
        self.scale = jax.device_put(np.float32(scale))
        self.counter = jax.device_put(np.int32(0))
        self.period = whole_number(period, "period")
        self.factor = float(factor)
        self.minimum = float(minimum)
        self.maximum = float(maximum)

    @property
    def is_smallest(self) -> Bool[Array, ""]:
        """True if the scale is at its minimum."""
        return self.scale <= self.minimum

    def scale_loss(self, loss: Float[Array, ""]) -> Float[Array, ""]:
        """**Arguments:**

        - `loss`: shape `()`.

        **Returns:** the loss times the scale. A loss of a 16-bit dtype is converted to float32,
        because the product would overflow in float16.
        """
        is_floating = is_array(loss) and jnp.issubdtype(loss.dtype, jnp.floating)
        if not (is_floating or isinstance(loss, float)):
            # A loss that is not a floating-point number has no gradient. Differentiation raises an
            # error for it.
            return loss
        loss = jnp.asarray(loss)
        dtype = at_least_float32(loss.dtype)
        return loss.astype(dtype) * self.scale.astype(dtype)

    def unscale(self, gradients: PyTree) -> PyTree:
        """**Arguments:**

        - `gradients`: gradients of the scaled loss.

        **Returns:** gradients of the loss, with the same dtypes. Store parameters in float32, so
        that the gradients are in float32 too. In float16, unscaled gradients may underflow.
        """

        def unscale(leaf: Any) -> Any:
            if not is_inexact_array(leaf):
                return leaf
            dtype = at_least_float32(leaf.dtype)
            return (leaf.astype(dtype) / self.scale.astype(dtype)).astype(leaf.dtype)

        return jtu.tree_map(unscale, gradients)

    def adjust(self, is_finite: Bool[Array, ""]) -> "DynamicLossScale":
        """**Arguments:**

        - `is_finite`: whether all gradients were finite; see `all_finite`.

        **Returns:** the scale for the next step.
        """
        counter = jnp.where(is_finite, self.counter + 1, 0)
        is_due = counter >= self.period
        larger = jnp.minimum(self.scale * self.factor, self.maximum)
        smaller = jnp.maximum(self.scale / self.factor, self.minimum)
        scale = jnp.where(is_finite, jnp.where(is_due, larger, self.scale), smaller)
        return tree_at(
            lambda loss_scale: (loss_scale.scale, loss_scale.counter),
            self,
            (scale, jnp.where(is_due, 0, counter)),
        )


# --- TrainState ---


Node = TypeVar("Node")
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
        taker = "TrainState.create"
        if isinstance(model, type):
            raise TypeError(f"{taker} expected a model, got {model!r}{hint_to_call(model)}.")
        if paths := paths_without_numbers(model, "model"):
            raise TypeError(
                f"{taker} expected the model's arrays to hold numbers; got {listed(paths)}. Keep "
                "these values as a tuple in a static field."
            )
        check_optimiser(optimiser, taker)
        is_typed = is_array(key) and is_key(key)
        if not is_typed and not (is_array(key) and key.dtype == jnp.uint32):
            raise TypeError(f"{taker} expected a key, such as `jax.random.key(0)`; got {key!r}.")
        if is_typed and key.shape != ():
            raise ValueError(
                f"{taker} expected one key, of shape (); got keys of shape {key.shape}. Pass one "
                "of them, such as `keys[0]`."
            )
        if not isinstance(loss_scale, DynamicLossScale | None):
            raise TypeError(
                f"{taker} expected loss_scale to be a train.DynamicLossScale or None, got "
                f"{loss_scale!r}."
            )
        check_not_deleted(model, "model", taker)
        _warn_of_ties(model)
        model = copy_arrays(model)
        optimiser_state = copy_arrays(initial_state(optimiser, filter(model, is_inexact_array)))
        step, is_halted = map(jax.device_put, (np.zeros((), np.int32), np.zeros((), bool)))
        key, loss_scale, model_state = copy_arrays((key, loss_scale, model_state))
        # Typed as `Any`, because a type checker takes `cls` for a TrainState of another model type.
        of_model: Any = cls
        return of_model(model, optimiser_state, step, key, is_halted, loss_scale, model_state)


def check_optimiser(optimiser: Any, taker: str) -> None:
    """Raises `TypeError` if `optimiser` is not an optimiser but, for example, `optax.adam`."""
    if not (callable(getattr(optimiser, "init", None)) and hasattr(optimiser, "update")):
        raise TypeError(
            f"{taker} expected the optimiser to be an optax.GradientTransformation, such as "
            f"`optax.adam(1e-3)`; got {optimiser!r}{hint_to_call(optimiser)}."
        )


def _warn_of_ties(model: PyTree) -> None:
    """Warns if one trainable array is at several places of a model.

    Each place has its own copy of the array, and training changes each copy differently. There is
    no warning for scalars, because one scalar may be the initial value of several parameters.
    """
    model = model.fast if isinstance(model, optax.LookaheadParams) else model
    paths: dict[int, list[str]] = {}
    for path, leaf in jtu.tree_leaves_with_path(filter(model, is_inexact_array)):
        if leaf.ndim > 0:
            paths.setdefault(id(leaf), []).append(f"model{jtu.keystr(path)}")
    if tied := [" = ".join(places) for places in paths.values() if len(places) > 1]:
        warnings.warn(
            f"TrainState.create got one array at several places: {listed(tied)}. Each place is "
            "trained separately, so the arrays diverge. Tie them with `nn.Shared`, or copy the "
            "array for each place.",
            stacklevel=3,
        )


class WithSlow(NamedTuple):
    """The state of an optimiser that contains an `optax.lookahead`, and the slow parameters."""

    optimiser_state: optax.OptState
    slow: PyTree


def initial_state(optimiser: optax.GradientTransformation, parameters: PyTree) -> optax.OptState:
    """The initial state of `optimiser`."""
    # Optax relies on dtype promotion: for example, schedules compare their count with floats. So
    # allow promotion here, even if the user has set it to strict for the model.
    with jax.numpy_dtype_promotion("standard"):
        try:
            state = optimiser.init(parameters)
        except Exception as error:
            for frame, _ in traceback.walk_tb(error.__traceback__):
                module = frame.f_locals.get("self")
                if isinstance(module, Module) and "call" in frame.f_code.co_name:
                    raise TypeError(
                        f"The optimiser called a {type(module).__name__}. Optax calls the labels "
                        "of `optax.partition` if they are callable, like this Module: pass "
                        "`lambda _: labels` instead."
                    ) from error
            raise

    is_shown = isinstance(parameters, optax.LookaheadParams)
    has_slow = not is_shown and nodes_of(optax.LookaheadState, state)
    return WithSlow(state, parameters) if has_slow else state


def nodes_of(kind: type[Node], tree: PyTree) -> list[Node]:
    """The outermost nodes of a class in a tree."""
    nodes = jtu.tree_leaves(tree, is_leaf=lambda node: isinstance(node, kind))
    return [node for node in nodes if isinstance(node, kind)]


def check_state(state: Any, taker: str) -> None:
    """Raises `TypeError` if `state` is not a `TrainState`, for example a model."""
    if not isinstance(state, TrainState):
        got = f"the class {state.__name__}" if isinstance(state, type) else type(state).__name__
        raise TypeError(
            f"{taker} expected a TrainState, got {got}. Create one with "
            "`TrainState.create(model, optimiser, key=key)`, or pass the state that the last step "
            "returned, or the `.state` of the result of `fit`."
        )


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

    return jtu.tree_map(copy, pytree)


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
    if is_array_like(loss) and getattr(loss, "shape", ()) == ():
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
