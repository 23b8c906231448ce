"""Guards of a step against numbers that are not finite.

A step of `make_step` judges its gradients, its loss and the state of the model before it updates
anything: `update_if_finite` keeps the old state, and marks it as halted, unless all are finite.
Each array is selected where it is computed, so that an update in place needs no copy of the old
array. `fit` finds the mark when it reads the losses, and returns `stopped="diverged"` and the last
good state, which is not halted.
"""

import collections
import dataclasses
import functools
import math
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
from jax.extend.core import Literal as Constant
from jaxtyping import Array, Bool, Float, PyTree

from .._dtypes import is_key
from .._pytree import filter, is_array, is_inexact_array, tree_at
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
    """The next state: `update()`, or `old` and what is to be told of the update that was refused.

    With a loss scale, gradients that overflow leave the arrays as they are and lower the scale; the
    step counts, and the next one has another key. This is no refusal, except at the smallest scale.

    **Arguments:**

    - `update`: makes the state after the update, from `gradients` that are unscaled.
    - `check_finite`: see `make_step`. An optimiser that skips updates by itself makes its choice
      in `update`: the new arrays are judged then, as with `"state"`.
    - `is_sharded`: whether devices may have parts of the arrays.
    """
    scale, loss = old.loss_scale, evaluation.loss
    if not check_finite and scale is None:
        return update()
    is_finite = _squares_are_finite(gradients, is_sharded)
    is_skipping = has_skipped(old.optimiser_state) is not None
    new = update() if check_finite == "state" or (check_finite and is_skipping) else None
    if new is None:
        are_good, is_loss_good = is_finite & all_finite(evaluation.model_state), jnp.isfinite(loss)
    else:
        are_good, is_loss_good = is_finite_state(new), _may_be_loss(loss, new)
    if scale is not None:
        are_good = jnp.where(is_finite, are_good, ~scale.is_smallest)
    is_good = are_good & is_loss_good
    if check_finite != "skip":
        is_good &= ~old.is_halted
    if not check_finite:
        is_good = jnp.ones((), bool)
    is_applied = is_good if scale is None else is_good & is_finite

    def trained(state: TrainState) -> tuple[Any, ...]:
        return state.model, state.optimiser_state, state.model_state

    if new is None:
        chosen = _select_early(is_applied, trained(old), lambda: trained(update()))
    else:
        chosen = tree_where(is_applied, trained(new), trained(old))
    return dataclasses.replace(
        old,
        model=chosen[0],
        optimiser_state=chosen[1],
        model_state=chosen[2],
        step=old.step + (1 if check_finite == "skip" else is_good.astype(old.step.dtype)),
        is_halted=~is_good if check_finite else old.is_halted,
        loss_scale=None if scale is None else tree_where(is_good, scale.adjust(is_finite), scale),
    )


def _select_early(condition: Bool[Array, ""], old: Tree, update: Callable[[], Tree]) -> Tree:
    """`tree_where(condition, update(), old)`, with each array selected by the operation that ends
    its computation.

    Later operations of `update` use the selected array, which makes no difference to what is
    returned. `tree_where` would have the moments of Adam both selected and used for the parameters:
    XLA then computes them twice and copies the old ones (JAX 0.10.2 to 0.12.0.1, on a CPU twice the
    time of the update).
    """
    found: list[Any] = []

    def traced() -> list[Any]:
        leaves, treedef = jtu.tree_flatten(update())
        found[:] = leaves, treedef, treedef.flatten_up_to(old)
        pairs = zip(leaves, found[2], strict=True)
        return [leaf for leaf, before in pairs if is_array(leaf) or is_array(before)]

    closed = jax.make_jaxpr(traced)()
    jaxpr, (leaves, treedef, olds) = closed.jaxpr, found
    places = [at for at in range(len(olds)) if is_array(olds[at]) or is_array(leaves[at])]
    outputs = dict(zip(places, jaxpr.outvars, strict=True))
    # Neither an input, nor a constant, nor twice among the outputs. By id: a constant has no hash.
    counts = collections.Counter(map(id, [*jaxpr.outvars, *jaxpr.constvars]))
    early = {
        id(var): olds[at]
        for at, var in outputs.items()
        if counts[id(var)] == 1 and not isinstance(var, Constant)
    }
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, closed.consts, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Constant) else values[atom]

    for equation in jaxpr.eqns:
        bind, params = equation.primitive.bind, equation.primitive.get_bind_params(equation.params)
        with equation.ctx.manager:
            made = bind(*map(read, equation.invars), **params)
        made = made if equation.primitive.multiple_results else [made]
        for var, value in zip(equation.outvars, made, strict=True):
            is_early = id(var) in early
            values[var] = _choose(condition, value, early[id(var)]) if is_early else value
    for at, var in outputs.items():
        value = read(var)
        leaves[at] = value if id(var) in early else _choose(condition, value, olds[at])
    return treedef.unflatten(leaves)


def keep_if_finite(
    old: TrainState[Model], new: TrainState[Model], loss: Float[Array, ""]
) -> TrainState[Model]:
    """`new`, or `old` marked as halted if the loss, or an array of `new`, is NaN or infinite.

    It runs inside the jitted step, so that the last good state is exact however late the host reads
    the losses. Call it in a step of your own for `fit` to find that state. It holds both states for
    a moment.

    It checks the arrays of the model that are not frozen, those of its state, and those of the
    optimiser's state. Scalars in the optimiser's state are skipped unless they belong to a
    parameter: some are infinite on purpose, such as the best loss before there was one.

    **Arguments:**

    - `old`: the state that the step got. If it is halted it is returned.
    - `new`: the state after the update.
    - `loss`: shape `()`. It is ignored if the optimiser skipped the update.
    """
    is_good = ~old.is_halted & _may_be_loss(loss, new) & is_finite_state(new)
    chosen = tree_where(is_good, new, old)
    return tree_at(lambda state: state.is_halted, chosen, ~is_good)


def all_finite(tree: PyTree) -> Bool[Array, ""]:
    """Whether all floating-point and complex arrays of a pytree are finite.

    **Arguments:**

    - `tree`: any pytree, such as a model or its gradients.

    **Returns:** shape `()`; true if there is no such array.

    >>> import jax.numpy as jnp
    >>> bool(all_finite({"weight": jnp.ones(3), "bias": jnp.array([0.0, jnp.inf])}))
    False
    """
    return _sums_are_finite(tree, lambda dtype: 0.0)


def _sums_are_finite(tree: PyTree, factor: Callable[[Any], float]) -> Bool[Array, ""]:
    """Whether the sums of all arrays, times the factor of their dtype, are finite."""
    # A number times 0 is 0 or NaN. A maximum will not do: on a CPU, XLA's maximum of a large array
    # skips NaN (JAX 0.10.2 to 0.12.0.1). `isfinite(leaf).all()` takes twice as long.
    sums: dict[Any, list[Array]] = {}
    for leaf in jtu.tree_leaves(tree):
        if is_inexact_array(leaf):
            sums.setdefault(leaf.dtype, []).append(jnp.sum(factor(leaf.dtype) * leaf))
    is_finite = jnp.ones((), bool)
    for stacked in map(jnp.stack, sums.values()):
        is_finite = is_finite & jnp.isfinite(stacked).all()
    return is_finite


def _squares_are_finite(gradients: PyTree, is_sharded: bool) -> Bool[Array, ""]:
    """Whether gradients are finite, and so small that their squares are, as optimisers keep them.

    In float16, whose squares overflow from 256 on, the squares need not be.
    """

    def factor(dtype: Any) -> float:
        largest = float(jnp.finfo(dtype).max)
        return math.sqrt(largest) if largest > 1e30 else 0.0

    def on_cpu(leaves: list[Array]) -> Bool[Array, ""]:
        # An operation on a small array costs more to start than to run.
        small: dict[Any, list[Array]] = {}
        for leaf in leaves:
            if leaf.size <= 2**12:
                small.setdefault(leaf.dtype, []).append(jnp.ravel(leaf))
        rows, others = [], []
        for leaf in [*map(jnp.concatenate, small.values()), *(x for x in leaves if x.size > 2**12)]:
            # A product with a vector uses all cores, and a sum one.
            if leaf.shape[-1] >= 64:
                rows.append(leaf @ jnp.full(leaf.shape[-1], factor(leaf.dtype), leaf.dtype))
            else:
                others.append(leaf)
        return by_sums(others) & all_finite(rows)

    leaves = [leaf for leaf in jtu.tree_leaves(gradients) if is_inexact_array(leaf)]
    by_sums = functools.partial(_sums_are_finite, factor=factor)
    is_split = is_sharded or any(any(jax.typeof(leaf).sharding.spec) for leaf in leaves)
    if is_split or not leaves:
        return by_sums(leaves)
    return lax.platform_dependent(leaves, cpu=on_cpu, default=by_sums)


def tree_where(condition: Bool[Array, ""], tree: Tree, other: Tree) -> Tree:
    """`tree` if `condition` holds, else `other`: `jnp.where` for each of their arrays.

    **Arguments:**

    - `condition`: shape `()`.
    - `tree`, `other`: of the same structure, shapes and dtypes, as a model before and after a step.

    **Returns:** one of the two. Leaves that are not arrays are those of `tree`. Typed PRNG keys may
    be chosen from `other` though they were used, as those of the state before a step are.

    **Raises:** `ValueError` for two structures.

    >>> import jax.numpy as jnp
    >>> print(tree_where(jnp.array(False), {"weight": jnp.ones(2)}, {"weight": jnp.zeros(2)}))
    {'weight': Array([0., 0.], dtype=float32)}
    """
    return jtu.tree_map(functools.partial(_choose, condition), tree, other)


def _choose(condition: Bool[Array, ""], leaf: Any, other_leaf: Any) -> Any:
    if not is_array(other_leaf):
        return leaf
    if is_key(other_leaf):
        # `jax.debug_key_reuse` counts a choice as a use. The other key may have been used before,
        # and the chosen one is to be used again: both are cloned.
        chosen = jnp.where(condition, leaf, jax.random.clone(other_leaf))
        return jax.random.clone(chosen)
    return leaf if leaf is other_leaf else jnp.where(condition, leaf, other_leaf)


def has_skipped(optimiser_state: optax.OptState) -> Bool[Array, ""] | None:
    """Whether an optimiser skipped its last update because it was not finite; `None` if it never
    skips.
    """
    flags: list[Any] = []
    for node in jtu.tree_leaves(optimiser_state, is_leaf=_may_skip):
        if isinstance(node, optax.ApplyIfFiniteState):
            flags.append(~node.last_finite)
        elif _may_skip(node):
            flags.append(node.skip_state["should_skip"])
    return functools.reduce(operator.or_, flags) if flags else None


def _may_skip(node: Any) -> bool:
    if isinstance(node, optax.MultiStepsState):
        # The state of `optax.skip_not_finite` has no class of its own.
        skip_state: Any = node.skip_state
        return isinstance(skip_state, dict) and "num_not_finite" in skip_state
    return isinstance(node, optax.ApplyIfFiniteState)


def _may_be_loss(loss: Float[Array, ""], new: TrainState) -> Bool[Array, ""]:
    is_skipped = has_skipped(new.optimiser_state)
    return jnp.isfinite(loss) if is_skipped is None else jnp.isfinite(loss) | is_skipped


def was_refused(state: TrainState) -> Bool[Array, ""]:
    """Whether the last update was refused or skipped, in a new buffer."""
    is_skipped = has_skipped(state.optimiser_state)
    if is_skipped is None:
        return jnp.copy(state.is_halted)
    # After too many skips in a row `apply_if_finite` applies the update.
    return state.is_halted | (is_skipped & is_finite_state(state))


def is_finite_state(state: TrainState) -> Bool[Array, ""]:
    """Whether the arrays that `keep_if_finite` checks are finite."""
    parameters = filter(state.model, is_inexact_array)
    return all_finite(
        (parameters, state.model_state, _statistics(state.optimiser_state, parameters))
    )


def _statistics(optimiser_state: optax.OptState, parameters: PyTree) -> list[Any]:
    """The parts of an optimiser's state for each parameter, such as moments, and other arrays."""
    structure = jtu.tree_structure(parameters)

    def is_of_parameters(node: Any) -> bool:
        return jtu.tree_structure(node) == structure

    parts = jtu.tree_leaves(optimiser_state, is_leaf=is_of_parameters)
    return [part for part in parts if not is_array(part) or part.ndim > 0]


_CHECKS: weakref.WeakKeyDictionary[Any, CheckFinite] = weakref.WeakKeyDictionary()


def register_step(function: Any, check_finite: CheckFinite) -> None:
    """Registers the function of a step of `make_step`, and what the step checks."""
    _CHECKS[function] = check_finite


def may_skip(state: TrainState) -> bool:
    """Whether a step may skip updates of `state`, even a step inside another function."""
    return "skip" in _CHECKS.values() or has_skipped(state.optimiser_state) is not None


def judges_gradients(step: Any) -> bool:
    """Whether `step` is one of `make_step` that halts, and judges its gradients."""
    # The key is the function itself: `functools.wraps` would copy an attribute to a function that
    # does more.
    function = getattr(step, "__wrapped__", None)
    return isinstance(function, types.FunctionType) and _CHECKS.get(function) is True
