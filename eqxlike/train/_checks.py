"""Checks of the arguments of training functions, with errors that name a remedy."""

import contextlib
import inspect
import os
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import optax
from jaxtyping import PyTree

from .. import Module, filter, is_array, is_inexact_array, tree_pformat
from .._check_numbers import hint_to_call
from .._dtypes import is_key
from .._traceback import stacklevel_of_user
from ..extend import deleted_paths, find_difference, flag_frozen, listed, paths_without_numbers


def check_model(model: Any) -> None:
    """Raises `TypeError` if a model is a class, or has an array that does not contain numbers."""
    if isinstance(model, type):
        raise TypeError(f"TrainState.create expected a model, got {model!r}{hint_to_call(model)}.")
    if paths := paths_without_numbers(model, "model"):
        raise TypeError(
            f"TrainState.create expected the model's arrays to hold numbers; got {listed(paths)}. "
            "Keep these values as a tuple in a static field."
        )


def check_trainable(model: PyTree, *, is_state_kept: bool) -> None:
    """Checks that a model has an array to train.

    With `is_state_kept=True` this function only warns, because steps still change `model_state`.

    **Raises:** `ValueError` if the model has no array to train. `TypeError` for
    `optax.LookaheadParams`.
    """
    if isinstance(model, optax.LookaheadParams):
        raise TypeError(
            "make_step expected the state of a model, got the state of optax.LookaheadParams. Pass "
            "the model to TrainState.create: `state.optimiser_state.slow` has the slow parameters."
        )
    if jtu.tree_leaves(filter(model, is_inexact_array)):
        return
    leaves = zip(jtu.tree_leaves_with_path(model), flag_frozen(model), strict=True)
    reasons = [
        f"model{jtu.keystr(path)} is "
        + ("frozen" if is_frozen else str(getattr(leaf, "dtype", f"the number {leaf!r}")))
        for (path, leaf), is_frozen in leaves
        if is_array(leaf) or type(leaf) in (int, float, complex)
    ]
    found = listed(reasons) or f"the model, {tree_pformat(model)}, has no arrays"
    message = (
        f"make_step has nothing to train: {found}. It trains the floating-point and complex arrays "
        "that are not frozen."
    )
    if not is_state_kept:
        raise ValueError(message)
    warnings.warn(f"{message} It changes only the model_state.", stacklevel=stacklevel_of_user())


def warn_of_ties(model: PyTree) -> None:
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


def check_key(key: Any, taker: str) -> None:
    """Raises `TypeError` if `key` is not a key of `jax.random`, `ValueError` for several keys."""
    is_typed = is_array(key) and is_key(key)
    if not is_typed and not (is_array(key) and key.dtype == jnp.uint32):
        raise TypeError(f"{taker} expected a key, such as `jax.random.key(0)`; got {key!r}.")
    if is_typed and key.shape != ():
        raise ValueError(
            f"{taker} expected one key, of shape (); got keys of shape {key.shape}. Pass one of "
            "them, such as `keys[0]`."
        )


def check_callable(value: Any, call: str, taker: str = "fit") -> None:
    """Raises `TypeError` if `value` is not callable."""
    if not callable(value):
        name = call.partition("(")[0]
        raise TypeError(
            f"{taker} expected `{name}` to be a function, `{call}`; got {tree_pformat(value)}."
        )


def check_takes(function: Callable[..., Any], call: str, taker: str, hint: str = "") -> None:
    """Raises `TypeError` if `function` does not take the positional arguments that `call` shows."""
    names = call.partition("(")[2].rstrip(")").split(", ")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # Some callables have no signature.
    try:
        signature.bind(*names)
    except TypeError as error:
        name = getattr(function, "__name__", type(function).__name__)
        raise TypeError(
            f"{taker} calls `{call}`, but {name} does not accept these arguments: {error}.{hint}"
        ) from None


@contextlib.contextmanager
def importing(purpose: str, extra: str) -> Iterator[None]:
    """Context manager for imports that need an extra. Its `ImportError` tells how to install the
    extra.
    """
    try:
        yield
    except ImportError as error:
        raise ImportError(f"{purpose}: `pip install 'eqxlike[{extra}]'`.") from error


def check_folder(folder: Any, name: str) -> None:
    """Raises `TypeError` if `folder` is not a path, `NotADirectoryError` if it is a file."""
    expected = f"{name} must be the path of a folder of checkpoints"
    if not isinstance(folder, str | os.PathLike):
        got = repr(folder) if jtu.all_leaves([folder]) else f"a {type(folder).__name__}"
        raise TypeError(f"{expected}, got {got}.")
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise NotADirectoryError(f"{expected}, but {os.fspath(folder)!r} is a file.")


def check_optimiser(optimiser: Any, taker: str) -> None:
    """Raises `TypeError` if `optimiser` is not an optimiser but, for example, `optax.adam`."""
    if not (callable(getattr(optimiser, "init", None)) and hasattr(optimiser, "update")):
        raise TypeError(
            f"{taker} expected the optimiser to be an optax.GradientTransformation, such as "
            f"`optax.adam(1e-3)`; got {optimiser!r}{hint_to_call(optimiser)}."
        )


def check_not_deleted(tree: PyTree, name: str, taker: str) -> None:
    """Raises `RuntimeError` if arrays of `tree` were donated. JAX would notice the donation only
    later.
    """
    paths = deleted_paths(tree, name)
    if paths:
        raise RuntimeError(
            f"{taker} got a {name} with arrays that were donated to a call and are deleted: "
            f"{listed(paths)}. A training step donates its state: use the state that it returned, "
            "or pass it a copy, "
            "`jax.tree.map(lambda leaf: leaf.copy() if eqx.is_array(leaf) else leaf, state)`."
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

    def has_slow(node: Any) -> bool:
        return isinstance(node, optax.LookaheadState)

    nodes = jtu.tree_leaves(state, is_leaf=has_slow)
    is_without = any(map(has_slow, nodes)) and not isinstance(parameters, optax.LookaheadParams)
    return WithSlow(state, parameters) if is_without else state


def check_optimiser_state(
    optimiser: optax.GradientTransformation, parameters: PyTree, state: optax.OptState
) -> None:
    """Raises `ValueError` if `state` and `optimiser.init(parameters)` differ in structure or
    shapes.
    """
    try:
        expected = jax.eval_shape(lambda tree: initial_state(optimiser, tree), parameters)
    except TypeError:
        # `init` cannot be traced, because it reads numbers, or because its state has leaves that
        # are not arrays. If the state does not fit, the update will raise an error.
        return
    if difference := find_difference(state, expected, _have_one_shape):
        explained = difference.explain("state.optimiser_state", "optimiser.init(model)")
        raise ValueError(
            f"make_step expected the state of its optimiser, {type_names(expected)}, but the "
            f"TrainState has {type_names(state)}: {explained}. Pass the same optimiser to "
            "make_step and TrainState.create. If the model was changed since, for example by "
            "`nn.freeze`, create the state again."
        )


def _have_one_shape(leaf: Any, other: Any) -> bool | None:
    return jnp.shape(leaf) == jnp.shape(other) if jtu.all_leaves([leaf, other]) else None


def type_names(state: optax.OptState) -> str:
    """The class names in the state of an optimiser, such as `(ScaleByAdamState, EmptyState)`."""
    if type(state) is tuple:
        return f"({', '.join(map(type_names, state))})"
    return type(state).__name__
