"""The state of a training, its arithmetic in half precision, and what keeps it finite."""

import dataclasses
import math
import types
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import optax
from jaxtyping import Array, Bool, Float, Float32, Int32, PRNGKeyArray, PyTree

from .._check_numbers import whole_number
from .._dtypes import at_least_float32, is_key
from .._module import Module, field
from .._pytree import filter, is_array, is_inexact_array, tree_at
from ._checks import check_key, check_model, check_not_deleted, check_optimiser, initial_state

# --- Loss scaling: small gradients in float16 without underflow ---


_LARGEST = float(jnp.finfo(jnp.float32).max)


class DynamicLossScale(Module):
    """A factor that keeps gradients in the range of float16, and adapts to them.

    Gradients below 6e-8 are 0 in float16. A loss times `scale` has gradients that much larger; they
    are divided by it once they are in float32 again. Micikevicius et al. (2018), "Mixed Precision
    Training": the scale is as large as it can be. Whenever a gradient overflows, the update is
    skipped and the scale divided by `factor`; after `period` steps without that it is multiplied.

    - `scale`: shape `()`, float32. Exact in scaling and unscaling if it is a power of two.
    - `counter`: shape `()`, int32: steps since the scale changed, or could not.

    `TrainState.create(..., loss_scale=DynamicLossScale())` is all that `make_step` needs. For
    bfloat16, which has the range of float32, there is no use for it.

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

        - `scale`: to start with. Too large a one costs a skipped step for each halving.
        - `period`: steps with finite gradients after which the scale grows.
        - `factor`: by which it grows and shrinks.
        - `minimum`, `maximum`: between which it stays. Where nothing overflows, as in float32, it
          comes to the largest.

        **Raises:** `ValueError` unless `0 < minimum <= scale <= maximum` within the range of
        float32, `factor > 1` and `period` is an integer of at least 1.
        """
        if not 0 < minimum <= scale <= maximum <= _LARGEST:
            raise ValueError(
                "DynamicLossScale expects 0 < minimum <= scale <= maximum, all in the range of "
                f"float32; got minimum={minimum}, scale={scale} and maximum={maximum}."
            )
        if not 1 < factor < math.inf:
            raise ValueError(f"DynamicLossScale expects a factor above 1, got {factor}.")
        self.scale = jnp.array(scale, jnp.float32)
        self.counter = jnp.zeros((), jnp.int32)
        self.period = whole_number(period, "period")
        self.factor = float(factor)
        self.minimum = float(minimum)
        self.maximum = float(maximum)

    @property
    def is_smallest(self) -> Bool[Array, ""]:
        """Whether the scale cannot shrink any more."""
        return self.scale <= self.minimum

    def scale_loss(self, loss: Float[Array, ""]) -> Float[Array, ""]:
        """**Arguments:**

        - `loss`: shape `()`.

        **Returns:** the loss times the scale, in at least float32: in float16 that overflows.
        """
        if not isinstance(loss, float) and not _is_floating(loss):
            # Not to be differentiated, which is for the gradient to say.
            return loss
        loss = jnp.asarray(loss)
        dtype = at_least_float32(loss.dtype)
        return loss.astype(dtype) * self.scale.astype(dtype)

    def unscale(self, gradients: PyTree) -> PyTree:
        """**Arguments:**

        - `gradients`: of a scaled loss.

        **Returns:** those of the loss, in the dtypes that they had. Store parameters in float32: in
        float16 the unscaled gradients underflow after all.
        """

        def unscale(leaf: Any) -> Any:
            if not is_inexact_array(leaf):
                return leaf
            dtype = at_least_float32(leaf.dtype)
            return (leaf.astype(dtype) / self.scale.astype(dtype)).astype(leaf.dtype)

        return jax.tree_util.tree_map(unscale, gradients)

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


def _is_floating(leaf: Any) -> bool:
    return is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.floating)


Tree = TypeVar("Tree")
Model = TypeVar("Model")


def copy_arrays(pytree: Tree) -> Tree:
    """The same tree with every array in a new buffer of its own.

    Donation deletes buffers and refuses one that is passed twice; neither may happen to arrays that
    the caller holds. The copies have no weak types: a step would return strong ones, and be traced
    a second time for them. Keys are cloned, so that `jax.debug_key_reuse` accepts them.
    """

    def copy(leaf: Any) -> Any:
        if not is_array(leaf):
            return leaf
        if is_key(leaf):
            leaf = jax.random.clone(leaf)
        return jnp.array(leaf, dtype=leaf.dtype, copy=True)

    return jax.tree_util.tree_map(copy, pytree)


class TrainState(Module, Generic[Model]):
    """A model in training: one pytree that a step takes, and returns changed.

    - `model`: the model.
    - `optimiser_state`: the Optax state for the model's floating-point and complex arrays.
    - `step`: how many updates were made, with those that a loss scale skipped.
    - `key`: the source of randomness, which steps leave as it is. A step's own key is this one with
      `step` folded in, so that it costs nothing where the loss does not use it.
    - `is_halted`: whether an update was refused because it was not finite. Steps leave a halted
      state unchanged, so that it stays the last good one until the host reads it.
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
          stays usable.
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
        model = copy_arrays(model)
        optimiser_state = copy_arrays(initial_state(optimiser, filter(model, is_inexact_array)))
        step = jnp.zeros((), jnp.int32)
        # To a type checker `cls` is a TrainState of some other model.
        of_model: Any = cls
        return of_model(
            model,
            optimiser_state,
            step,
            copy_arrays(key),
            jnp.zeros((), bool),
            copy_arrays(loss_scale),
            copy_arrays(model_state),
        )


# --- Guards of a step against numbers that are not finite ---


def skip_overflow(
    old: TrainState[Model], new: TrainState[Model], gradients: PyTree, loss: Float[Array, ""]
) -> tuple[TrainState[Model], Float[Array, ""]]:
    """`new` with its loss scale adjusted; model and optimiser of `old` if gradients overflowed.

    The step counts in either case, and the next one has another key. A state without a loss scale
    is left as it is.

    **Arguments:**

    - `old`: the state that the step got.
    - `new`: the state after the update.
    - `gradients`: unscaled.
    - `loss`: shape `()`.

    **Returns:** the state, and the loss by which to judge it: NaN where no scale makes the
    gradients finite.
    """
    loss_scale = old.loss_scale
    if loss_scale is None:
        return new, loss
    is_finite = all_finite(gradients)
    model, optimiser_state, model_state = tree_where(
        is_finite,
        (new.model, new.optimiser_state, new.model_state),
        (old.model, old.optimiser_state, old.model_state),
    )
    skipped = dataclasses.replace(
        new,
        model=model,
        optimiser_state=optimiser_state,
        model_state=model_state,
        loss_scale=loss_scale.adjust(is_finite),
    )
    return skipped, jnp.where(is_finite | ~loss_scale.is_smallest, loss, jnp.nan)


def keep_if_finite(
    old: TrainState[Model], new: TrainState[Model], loss: Float[Array, ""]
) -> TrainState[Model]:
    """`new`, or `old` marked as halted if the loss, or an array of `new`, is NaN or infinite.

    It runs inside the jitted step, so that the last good state is exact however late the host reads
    the losses. Call it in a step of your own for `fit` to find that state.

    It checks the arrays of the model that are not frozen, those of its state, and those of the
    optimiser's state. A single number of the optimiser's counts only in the place of a parameter:
    others are infinite on purpose, such as the best loss before there was one.

    **Arguments:**

    - `old`: the state that the step got. If it is halted it is returned.
    - `new`: the state after the update.
    - `loss`: shape `()`.
    """
    is_good = ~old.is_halted & jnp.isfinite(loss) & all_finite(_kept(new))
    chosen = tree_where(is_good, new, old)
    return tree_at(lambda state: state.is_halted, chosen, ~is_good)


def halt_if_not_finite(
    old: TrainState[Model], new: TrainState[Model], loss: Float[Array, ""]
) -> TrainState[Model]:
    """`new`, marked as halted where `keep_if_finite` would return `old`.

    It checks only a few numbers of a large parameter or a large array of the optimiser. The caller
    keeps a copy of `old` and checks all numbers later. An array that is not finite stays so until
    then, as a sum or a running mean does.

    **Arguments:** those of `keep_if_finite`.
    """
    looked_at = [each if each.size <= SMALL else jnp.ravel(each)[:128] for each in _kept(new)]
    is_good = ~old.is_halted & jnp.isfinite(loss) & _are_finite(looked_at)
    is_good &= all_finite(new.model_state)
    return tree_at(lambda state: state.is_halted, new, ~is_good)


def is_kept_finite(state: TrainState) -> Bool[Array, ""]:
    """Whether the arrays that `keep_if_finite` checks are finite, for a state on one device."""
    return _are_finite(_kept(state))


SMALL = 2**12
"""Numbers of an array that a CPU copies in less time than it takes to begin an operation."""


def _are_finite(arrays: Sequence[Array]) -> Bool[Array, ""]:
    """`all_finite` of arrays on one device, with one operation for all small ones of a dtype."""
    is_finite = all_finite([each for each in arrays if each.size > SMALL])
    for joined in ravel_by_dtype(each for each in arrays if each.size <= SMALL).values():
        is_finite &= jnp.isfinite(joined).all()
    return is_finite


def ravel_by_dtype(arrays: Iterable[Array]) -> dict[str, Array]:
    """All numbers of the arrays of each dtype in one array, in their order."""
    found: dict[str, list[Array]] = {}
    for each in arrays:
        found.setdefault(each.dtype.name, []).append(jnp.ravel(each))
    return {name: jnp.concatenate(those) for name, those in found.items()}


def _kept(state: TrainState) -> list[Array]:
    parameters = filter(state.model, is_inexact_array)
    kept = parameters, state.model_state, _statistics(state.optimiser_state, parameters)
    return [leaf for leaf in jtu.tree_leaves(kept) if is_inexact_array(leaf)]


def _statistics(optimiser_state: optax.OptState, parameters: PyTree) -> list[Any]:
    """The parts of an optimiser's state for each parameter, such as moments, and other arrays."""
    structure = jtu.tree_structure(parameters)

    def is_of_parameters(node: Any) -> bool:
        return jtu.tree_structure(node) == structure

    parts = jtu.tree_leaves(optimiser_state, is_leaf=is_of_parameters)
    return [part for part in parts if not is_array(part) or part.ndim > 0]


_UNGUARDED: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def register_unguarded(function: Any, step: Any) -> None:
    """Registers `step` as `function`, which `keep_if_finite` guards, without the guard."""
    _UNGUARDED[function] = step


def unguarded(step: Any) -> Any:
    """The registered step that only marks a state as halted; `None` where there is none.

    The key is the function itself: `functools.wraps` would copy an attribute to a function that
    does more.
    """
    function = getattr(step, "__wrapped__", None)
    return _UNGUARDED.get(function) if isinstance(function, types.FunctionType) else None


# --- Tests of whether numbers are finite, and the choice of a tree by them ---


def all_finite(tree: PyTree) -> Bool[Array, ""]:
    """Whether all floating-point and complex arrays of a pytree are finite.

    **Arguments:**

    - `tree`: any pytree, such as a model or its gradients.

    **Returns:** shape `()`; true if there is no such array.

    >>> import jax.numpy as jnp
    >>> bool(all_finite({"weight": jnp.ones(3), "bias": jnp.array([0.0, jnp.inf])}))
    False
    """
    # A number times 0 is 0 or NaN. A maximum will not do: XLA's of a large array on a CPU passes
    # over NaN (JAX 0.10.2 to 0.12.0.1). `isfinite(leaf).all()` takes twice as long.
    sums: dict[Any, list[Array]] = {}
    for leaf in jax.tree_util.tree_leaves(tree):
        if is_inexact_array(leaf):
            sums.setdefault(leaf.dtype, []).append(jnp.sum(0 * leaf))
    is_finite = jnp.ones((), bool)
    for stacked in map(jnp.stack, sums.values()):
        is_finite = is_finite & jnp.isfinite(stacked).all()
    return is_finite


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

    def choose(leaf: Any, other_leaf: Any) -> Any:
        if not is_array(other_leaf):
            return leaf
        if is_key(other_leaf):
            # `jax.debug_key_reuse` takes a choice for use, and the other key may have been used
            # already: it is kept to be used once more.
            chosen = jnp.where(condition, leaf, jax.random.clone(other_leaf))
            return jax.random.clone(chosen)
        return jnp.where(condition, leaf, other_leaf)

    return jax.tree_util.tree_map(choose, tree, other)
