"""Checks of a step for NaN and infinity.

A step of `make_step` checks the gradients, the loss and the model's state before it updates
anything. If one of these is not finite, `update_if_finite` keeps the old state and sets its
`is_halted`. `fit` sees `is_halted` when it reads the losses. `fit` then returns
`stopped="diverged"` and the last good state, in which `is_halted` is false again.
"""

import collections
import dataclasses
import functools
import operator
import types
import weakref
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import optax
from jax import lax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.extend.core import Literal as Constant
from jaxtyping import Array, Bool, Float, PyTree

from .. import filter, is_array, is_inexact_array, tree_at
from .._dtypes import is_key
from ._state import Evaluation, Model, TrainState, Tree

CheckFinite = bool | Literal["skip", "state"]


def update_if_finite(
    old: TrainState[Model],
    update: Callable[[], TrainState[Model]],
    gradients: PyTree,
    evaluation: Evaluation,
    check_finite: CheckFinite,
    is_sharded: bool,
) -> TrainState[Model]:
    """The next state: `update()`, or `old` with `is_halted` if the update is refused.

    With a loss scale, gradients may overflow. After an overflow, the arrays are kept and the scale
    is lowered. An overflow counts as a step and not as a refusal, unless the scale is already at
    its minimum.

    **Arguments:**

    - `update`: returns the updated state.
    - `gradients`: the unscaled gradients.
    - `check_finite`: see `make_step`. If the optimiser itself may skip updates, the new arrays are
      checked, as with `"state"`.
    - `is_sharded`: whether arrays may be split over devices.
    """
    scale = old.loss_scale
    if not check_finite and scale is None:
        return update()
    leaves = [leaf for leaf in jtu.tree_leaves(gradients) if is_inexact_array(leaf)]
    is_sharded = is_sharded or any(any(jax.typeof(leaf).sharding.spec) for leaf in leaves)
    is_finite, is_good = _squares_are_finite(leaves, is_sharded), jnp.ones((), bool)
    if check_finite:
        if check_finite == "state" or has_skipped(old.optimiser_state) is not None:
            new = update()
            update = lambda: new  # noqa: E731
            is_good, is_loss_good = is_finite_state(new), _may_be_loss(evaluation.loss, new)
        else:
            is_good = is_finite & all_finite(evaluation.model_state)
            is_loss_good = jnp.isfinite(evaluation.loss)
        if scale is not None:
            is_good = jnp.where(is_finite, is_good, ~scale.is_smallest)
        is_good &= is_loss_good
        if check_finite != "skip":
            is_good &= ~old.is_halted
    is_applied = is_good if scale is None else is_good & is_finite

    def trained(state: TrainState) -> dict[str, Any]:
        return {name: getattr(state, name) for name in ("model", "optimiser_state", "model_state")}

    return dataclasses.replace(
        old,
        **_update_if(is_applied, trained(old), lambda: trained(update()), is_sharded),
        step=old.step + (1 if check_finite == "skip" else is_good.astype(old.step.dtype)),
        is_halted=~is_good if check_finite else old.is_halted,
        loss_scale=None if scale is None else tree_where(is_good, scale.adjust(is_finite), scale),
    )


def _update_if(
    condition: Bool[Array, ""], old: Tree, update: Callable[[], Tree], is_sharded: bool
) -> Tree:
    """Computes `tree_where(condition, update(), old)`, in place if `old` is donated.

    On a CPU this function uses a branch, `lax.cond`. With selects instead, the updates of all
    arrays would wait for the condition, and would then wake other threads all at once. With
    selects, a step of an MLP of 122 parameters took 1.2 times as long.

    On a GPU this function uses selects, because a branch waits until the host has read the
    condition.
    """
    found: list[Any] = []

    def traced() -> list[Any]:
        leaves, treedef = jtu.tree_flatten(update())
        pairs = enumerate(zip(leaves, treedef.flatten_up_to(old), strict=True))
        befores = {at: pair[1] for at, pair in pairs if any(map(is_array, pair))}
        found[:] = leaves, treedef, befores
        return [leaves[at] for at in befores]

    program = jax.make_jaxpr(traced)()
    leaves, treedef, befores = found
    olds = [*befores.values()]
    chosen = functools.partial(_select_early, condition, program, olds)
    are_alike = all(
        is_array(old) and (old.shape, old.dtype) == (aval.shape, aval.dtype)
        for old, aval in zip(olds, program.out_avals, strict=True)
    )
    if are_alike and not is_sharded:
        branch = functools.partial(lax.cond, condition, jaxpr_as_fun(program), lambda: olds)
        chosen = functools.partial(lax.platform_dependent, cpu=branch, default=chosen)
    for at, leaf in zip(befores, chosen(), strict=True):
        leaves[at] = leaf
    return treedef.unflatten(leaves)


def _select_early(condition: Bool[Array, ""], program: ClosedJaxpr, olds: list[Any]) -> list[Any]:
    """The outputs of a program if `condition` is true, otherwise `olds`.

    Each output is selected right after the operation that computes it, and later operations use the
    selected array. If the selects were at the end, Adam's moments would be used twice: by their
    select and by the update of the parameters. XLA would then compute the moments twice and copy
    the old moments.
    """
    jaxpr = program.jaxpr
    outputs = [*zip(jaxpr.outvars, olds, strict=True)]
    # The keys are the `id`s of outputs, because an output that is a constant is not hashable. An
    # output that occurs twice is selected at the end.
    counts = collections.Counter(map(id, jaxpr.outvars))
    old_of = {id(var): old for var, old in outputs if counts[id(var)] == 1}
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, program.consts, strict=True))
    selected: dict[int, Any] = {}

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Constant) else values[atom]

    for equation in jaxpr.eqns:
        bind, params = equation.primitive.bind, equation.primitive.get_bind_params(equation.params)
        with equation.ctx.manager:
            made = bind(*map(read, equation.invars), **params)
        made = made if equation.primitive.multiple_results else [made]
        for var, value in zip(equation.outvars, made, strict=True):
            if id(var) in old_of:
                value = selected[id(var)] = _choose(condition, value, old_of[id(var)])
            values[var] = value
    return [
        selected[id(var)] if id(var) in selected else _choose(condition, read(var), old)
        for var, old in outputs
    ]


def keep_if_finite(
    old: TrainState[Model], new: TrainState[Model], loss: Float[Array, ""]
) -> TrainState[Model]:
    """Returns `new` if the loss and the arrays of `new` are finite. Otherwise returns `old` with
    `is_halted` set.

    Call this function in a step of your own. Then `fit` returns the last good state, no matter how
    late it reads the losses. Memory must hold both states.

    The function checks the model's arrays that are not frozen, the model's state and the
    optimiser's state. It does not check scalars of the optimiser that belong to no parameter,
    because some of these scalars start as infinity, such as the best loss so far.

    **Arguments:**

    - `old`: the state that the step got. If `old` is already halted, the function returns `old`.
    - `new`: the state after the update.
    - `loss`: shape `()`. It is ignored if the optimiser skipped the update.
    """
    is_good = ~old.is_halted & _may_be_loss(loss, new) & is_finite_state(new)
    chosen = tree_where(is_good, new, old)
    return tree_at(lambda state: state.is_halted, chosen, ~is_good)


def all_finite(tree: PyTree) -> Bool[Array, ""]:
    """Tests whether all floating-point and complex arrays of a pytree are finite.

    **Arguments:**

    - `tree`: any pytree, such as a model or its gradients.

    **Returns:** a boolean array of shape `()`. It is true if the pytree has no floating-point or
    complex array.

    >>> import jax.numpy as jnp
    >>> bool(all_finite({"weight": jnp.ones(3), "bias": jnp.array([0.0, jnp.inf])}))
    False
    """
    # A number times 0 is 0 if the number is finite, otherwise NaN. The alternatives are worse:
    # `isfinite(leaf).all()` takes three times as long on a CPU, and XLA's maximum of a large array
    # skips NaN on a CPU (JAX 0.10.2 to 0.12.0.1).
    return _are_finite([0 * leaf for leaf in jtu.tree_leaves(tree) if is_inexact_array(leaf)])


def _squares_are_finite(gradients: list[Array], is_sharded: bool) -> Bool[Array, ""]:
    """Tests whether gradients and the sums of their squares are finite.

    Squares are checked because optimisers such as Adam store them. Squares of float16 gradients are
    not checked, because the square of 256 already overflows in float16.
    """
    squares: list[Array] = []
    small: dict[Any, list[Array]] = {}
    for leaf in gradients:
        each = leaf * (leaf if jnp.finfo(leaf.dtype).max > 1e30 else 0)
        if is_sharded or leaf.size > 2**12:
            squares.append(each)
        else:
            # Small arrays are concatenated, because starting an operation on a small array takes
            # longer than running it.
            small.setdefault(leaf.dtype, []).append(jnp.ravel(each))
    return _are_finite([*squares, *map(jnp.concatenate, small.values())])


def _are_finite(arrays: list[Array]) -> Bool[Array, ""]:
    """Tests whether the sums of all arrays are finite."""
    sums = [jnp.isfinite(jnp.sum(array)) for array in arrays]
    return functools.reduce(operator.and_, sums, jnp.ones((), bool))


def tree_where(condition: Bool[Array, ""], tree: Tree, other: Tree) -> Tree:
    """Selects `tree` if `condition` is true, otherwise `other`. It applies `jnp.where` to each
    array.

    **Arguments:**

    - `condition`: a boolean array of shape `()`.
    - `tree`, `other`: pytrees of the same structure, shapes and dtypes, such as the model after a
      step and the model before it. PRNG keys of `other` may already have been used.

    **Returns:** a pytree of the selected arrays. Leaves that are not arrays come from `tree`.

    **Raises:** `ValueError` if the structures differ.

    >>> import jax.numpy as jnp
    >>> print(tree_where(jnp.array(False), {"weight": jnp.ones(2)}, {"weight": jnp.zeros(2)}))
    {'weight': Array([0., 0.], dtype=float32)}
    """
    return jtu.tree_map(functools.partial(_choose, condition), tree, other)


def _choose(condition: Bool[Array, ""], leaf: Any, other_leaf: Any) -> Any:
    if not is_array(other_leaf):
        return leaf
    if is_key(other_leaf):
        # Clone the keys, because `jax.debug_key_reuse` counts `where` as a use of a key.
        return jax.random.clone(jnp.where(condition, leaf, jax.random.clone(other_leaf)))
    return leaf if leaf is other_leaf else jnp.where(condition, leaf, other_leaf)


def has_skipped(optimiser_state: optax.OptState) -> Bool[Array, ""] | None:
    """Tests whether an optimiser skipped its last update because the update was not finite.

    Returns `None` if this optimiser never skips updates.
    """
    flags = [
        ~node.last_finite
        if isinstance(node, optax.ApplyIfFiniteState)
        else node.skip_state["should_skip"]
        for node in jtu.tree_leaves(optimiser_state, is_leaf=_may_skip)
        if _may_skip(node)
    ]
    return functools.reduce(operator.or_, flags) if flags else None


def _may_skip(node: Any) -> bool:
    # The state of `optax.skip_not_finite` has no class of its own.
    skip_state: Any = node.skip_state if isinstance(node, optax.MultiStepsState) else None
    is_not_finite = isinstance(skip_state, dict) and "num_not_finite" in skip_state
    return is_not_finite or isinstance(node, optax.ApplyIfFiniteState)


def _may_be_loss(loss: Float[Array, ""], new: TrainState) -> Bool[Array, ""]:
    is_skipped = has_skipped(new.optimiser_state)
    return jnp.isfinite(loss) if is_skipped is None else jnp.isfinite(loss) | is_skipped


def was_refused(state: TrainState) -> Bool[Array, ""]:
    """Tests whether the last update was refused or skipped. The result is always a new buffer."""
    is_skipped = has_skipped(state.optimiser_state)
    if is_skipped is None:
        return jnp.copy(state.is_halted)
    # After too many skips in a row, `apply_if_finite` applies an update that is not finite, but
    # still reports a skip. The state is then not finite. So check the state too.
    return state.is_halted | (is_skipped & is_finite_state(state))


def is_finite_state(state: TrainState) -> Bool[Array, ""]:
    """Tests whether the arrays that `keep_if_finite` checks are finite."""
    parameters = filter(state.model, is_inexact_array)
    structure = jtu.tree_structure(parameters)
    # `parts` has the subtrees with one array per parameter, such as moments, and all other leaves.
    parts = jtu.tree_leaves(
        state.optimiser_state, is_leaf=lambda node: jtu.tree_structure(node) == structure
    )
    kept = [part for part in parts if not is_array(part) or part.ndim > 0]
    return all_finite((parameters, state.model_state, kept))


_CHECKS: weakref.WeakKeyDictionary[Any, CheckFinite] = weakref.WeakKeyDictionary()


def register_step(function: Any, check_finite: CheckFinite) -> None:
    """Stores the `check_finite` of a step of `make_step`. The key is the step's function."""
    _CHECKS[function] = check_finite


def may_skip(state: TrainState) -> bool:
    """Returns True if updates of `state` may be skipped.

    The step may be called inside another function, where it cannot be found. So this returns True
    if any step was made with `check_finite="skip"`.
    """
    return "skip" in _CHECKS.values() or has_skipped(state.optimiser_state) is not None


def checks_gradients(step: Any) -> bool:
    """Returns True if `step` was made by `make_step` with `check_finite=True`."""
    # An attribute of the step would not do: `functools.wraps` would copy the attribute to functions
    # that do more than the step. So look up the function of the step.
    function = getattr(step, "__wrapped__", None)
    return isinstance(function, types.FunctionType) and _CHECKS.get(function) is True
