"""A training step made from a loss and an optimiser."""

from collections.abc import Callable
from typing import Any, Literal, TypeVar, overload

import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from .._partition import find_static_difference
from .._pytree import apply_updates, filter, is_array, is_inexact_array, tree_at, tree_pformat
from .._transforms import filter_jit, filter_value_and_grad
from ._checks import check_optimiser, check_optimiser_state, check_state
from ._finite import all_finite, tree_where
from ._state import TrainState

Model = TypeVar("Model", bound=Any)
ModelState = TypeVar("ModelState", bound=Any)
Batch = TypeVar("Batch", bound=Any)
Aux = TypeVar("Aux")


def keep_if_finite(
    old: TrainState[Model], new: TrainState[Model], loss: Float[Array, ""]
) -> TrainState[Model]:
    """`new`, or `old` marked as halted if the loss, or an array of `new`, is NaN or infinite.

    It runs inside the jitted step, so that the last good state is exact however late the host
    looks. Call it in a step of your own for `fit` to find that state.

    What counts are the arrays of the model that are not frozen, those of its state, and those of
    the optimiser's state; single numbers of the last only in the place of a parameter: others are
    infinite on purpose, such as the best loss before there was one.

    **Arguments:**

    - `old`: the state that the step got. If it is halted it is returned.
    - `new`: the state after the update.
    - `loss`: shape `()`.
    """
    parameters = filter(new.model, is_inexact_array)
    kept = parameters, new.model_state, _statistics(new.optimiser_state, parameters)
    is_good = ~old.is_halted & jnp.isfinite(loss) & all_finite(kept)
    chosen = tree_where(is_good, new, old)
    return tree_at(lambda state: state.is_halted, chosen, ~is_good)


def _statistics(optimiser_state: optax.OptState, parameters: PyTree) -> list[Any]:
    """What an optimiser keeps of each parameter, such as its moments, and other arrays."""
    structure = jtu.tree_structure(parameters)

    def is_of_parameters(node: Any) -> bool:
        return jtu.tree_structure(node) == structure

    parts = jtu.tree_leaves(optimiser_state, is_leaf=is_of_parameters)
    return [part for part in parts if not is_array(part) or part.ndim > 0]


@overload
def make_step(
    loss: Callable[[Model, Batch, PRNGKeyArray], ArrayLike],
    optimiser: optax.GradientTransformation,
    *,
    has_aux: Literal[False] = False,
    check_finite: bool = True,
) -> Callable[[TrainState[Model], Batch], tuple[TrainState[Model], Float[Array, ""]]]: ...
@overload
def make_step(
    loss: Callable[[Model, ModelState, Batch, PRNGKeyArray], tuple[ArrayLike, ModelState]],
    optimiser: optax.GradientTransformation,
    *,
    has_aux: Literal[False] = False,
    check_finite: bool = True,
) -> Callable[[TrainState[Model], Batch], tuple[TrainState[Model], Float[Array, ""]]]: ...
@overload
def make_step(
    loss: Callable[[Model, Batch, PRNGKeyArray], tuple[ArrayLike, Aux]],
    optimiser: optax.GradientTransformation,
    *,
    has_aux: Literal[True],
    check_finite: bool = True,
) -> Callable[[TrainState[Model], Batch], tuple[TrainState[Model], Float[Array, ""], Aux]]: ...
@overload
def make_step(
    loss: Callable[
        [Model, ModelState, Batch, PRNGKeyArray], tuple[ArrayLike, tuple[ModelState, Aux]]
    ],
    optimiser: optax.GradientTransformation,
    *,
    has_aux: Literal[True],
    check_finite: bool = True,
) -> Callable[[TrainState[Model], Batch], tuple[TrainState[Model], Float[Array, ""], Aux]]: ...
def make_step(
    loss: Callable[..., Any],
    optimiser: optax.GradientTransformation,
    *,
    has_aux: bool = False,
    check_finite: bool = True,
) -> Any:
    """A jitted training step.

    **Arguments:**

    - `loss`: `loss(model, batch, key)` of shape `()`, or `(loss, aux)` if `has_aux`. The key is
      fresh in each step. For a `TrainState` with a `model_state` it is `loss(model, model_state,
      batch, key)`, and returns `(loss, model_state)`, or `(loss, (model_state, aux))`.
    - `optimiser`: the one that `TrainState.create` got. It sees the model's floating-point and
      complex arrays, and the loss as the extra argument `value`.
    - `has_aux`: whether the loss returns something beside.
    - `check_finite`: refuse an update that would make the loss, a parameter, or what the model and
      the optimiser keep NaN or infinite; see `keep_if_finite` and `TrainState.is_halted`. It goes
      over the state once more, which shows where a step does little else. Without it `fit` still
      stops at a loss that is not finite, but has no good state left.

    If the state has a loss scale, the loss is scaled for its gradients, which the optimiser sees
    unscaled. Where one of them is not finite the step leaves model and optimiser state exactly as
    they are and lowers the scale, but counts, and the next one has another key. What no scale can
    help halts as it does without: a loss that is not finite itself, and gradients that are not at
    the smallest scale.

    **Returns:** `step(state, batch)` which gives `(state, loss)`, or `(state, loss, aux)`. The
    state that it gets is donated: use the one it returns.

    **Raises:** `TypeError` if `optimiser` is none. When called, `TypeError` for what is no
    `TrainState`, and for a loss that returns something else; `ValueError` if the state was made
    with another optimiser.

    >>> import jax, jax.numpy as jnp, optax
    >>> from eqxlike import nn
    >>> optimiser = optax.sgd(0.1)
    >>> state = TrainState.create(
    ...     nn.Linear(2, 1, key=jax.random.key(0)), optimiser, key=jax.random.key(1)
    ... )
    >>> step = make_step(lambda model, x, key: jnp.mean(jax.vmap(model)(x) ** 2), optimiser)
    >>> for _ in range(3):
    ...     state, loss = step(state, jnp.ones((4, 2)))
    >>> int(state.step), loss.shape
    (3, ())
    """
    check_optimiser(optimiser, "make_step")
    extended = optax.with_extra_args_support(optimiser)

    def evaluate(model: Any, model_state: Any, batch: Any, key: Array) -> tuple[Any, Any]:
        """The loss, and beside it the new state of the model and what else it returns."""
        if model_state is None:
            value, aux = loss(model, batch, key) if has_aux else (loss(model, batch, key), None)
            return value, (None, aux)
        # A copy: a `nn.State` that is set is used up, and the old one may be needed again.
        copied = jtu.tree_map(lambda leaf: leaf, model_state)
        return _with_model_state(loss(model, copied, batch, key), model_state, has_aux)

    def differentiate(state: TrainState, batch: Any, key: PRNGKeyArray) -> tuple[Any, Any, Any]:
        """The loss, what comes beside it, and its gradients."""
        arguments = state.model, state.model_state, batch, key
        loss_scale = state.loss_scale
        if loss_scale is None:
            (value, beside), gradients = filter_value_and_grad(evaluate, has_aux=True)(*arguments)
            return value, beside, gradients

        def scaled_loss(*arguments: Any) -> tuple[Any, Any]:
            value, beside = evaluate(*arguments)
            return loss_scale.scale_loss(value), (value, beside)

        (_, (value, beside)), gradients = filter_value_and_grad(scaled_loss, has_aux=True)(
            *arguments
        )
        return value, beside, loss_scale.unscale(gradients)

    def step(state: TrainState, batch: Any) -> tuple:
        check_state(state, TrainState, "The step")
        parameters = filter(state.model, is_inexact_array)
        check_optimiser_state(optimiser, parameters, state.optimiser_state)
        next_key, loss_key = jr.split(state.key)
        value, (model_state, aux), gradients = differentiate(state, batch, loss_key)
        # Optax counts on promotion (Adam raises a float to an integer count), also where the user
        # wants the model's own arithmetic strict.
        with jax.numpy_dtype_promotion("standard"):
            updates, optimiser_state = extended.update(
                gradients, state.optimiser_state, parameters, value=value
            )
        model, loss_scale = apply_updates(state.model, updates), state.loss_scale
        checked = value
        if loss_scale is not None:
            is_finite = all_finite(gradients)
            model, optimiser_state, model_state = tree_where(
                is_finite,
                (model, optimiser_state, model_state),
                (state.model, state.optimiser_state, state.model_state),
            )
            # What no scale makes finite is as bad as a loss that is not.
            checked = jnp.where(is_finite | ~loss_scale.is_smallest, value, jnp.nan)
            loss_scale = loss_scale.adjust(is_finite)
        updated = TrainState(
            model,
            optimiser_state,
            state.step + 1,
            next_key,
            state.is_halted,
            loss_scale,
            model_state,
        )
        if check_finite:
            updated = keep_if_finite(state, updated, checked)
        return (updated, value, aux) if has_aux else (updated, value)

    return filter_jit(step, donate=("state",))


def _with_model_state(returned: Any, old: Any, has_aux: bool) -> tuple[Any, tuple[Any, Any]]:
    """What a loss returned, as `(loss, (model_state, aux))`. Raises `TypeError` for anything else,
    and for a state of another form than the model had before.
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
    return value, (new, aux)


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
