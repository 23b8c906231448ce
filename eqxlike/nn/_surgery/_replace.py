"""Replacing layers of a model: by others, by fresh ones, by Bayesian ones."""

import hashlib
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from ..._module import Module
from ..._pytree import is_frozen, is_inexact_array, listed, path_matches, tree_at, walk
from ..._transforms import is_array_or_struct
from .._bayesian import BayesianConv, BayesianLayer, BayesianLinear, Estimator, linear_or_conv
from .._conv import Conv, ConvTranspose
from .._inputs import check_instance
from .._linear import FusedLinear, Linear
from .._parameters import Initializer, Parameter, draw
from .._rnn import GRUCell, LSTMCell
from ._freeze import unfreeze
from ._lora import LoRALinear

# --- New values for the arrays of a model ---


def reinitialise(
    model: PyTree, rule: Callable[[str, Array], Initializer | None], *, key: PRNGKeyArray
) -> PyTree:
    """A copy of a model with new values for those of its arrays that a rule chooses.

    **Arguments:**

    - `model`: a Module, or any pytree.
    - `rule`: called as `rule(path, array)` for each floating or complex array, with a path like
      `".layers[0].weight"`. It returns one of `jax.nn.initializers` or a function of your own,
      `init(key, shape, dtype)`; or `None`, and the array stays.
    - `key`: each array is drawn from its own part, which depends on its path alone: another layer
      in the model changes nothing in this one.

    Arrays of two axes or more are taken for weights `(outputs, inputs, *window)`: their
    initializer is called with the shape `(*window, inputs, outputs)`, on which those of JAX count
    their fan-in. For stacked layers, as of `nn.ScanStack` or an ensemble, call this function
    under `filter_vmap`, so that it sees the arrays of one.

    **Returns:** the model with the new arrays, of the shapes and dtypes of the old. An array that
    stands at two places gets two values, one for each path.

    **Raises:** `TypeError` if `rule` returns what is not a function, or `model` is a class;
    `ValueError` if an initializer returns another shape or dtype than it was asked for.

    !!! example

        >>> import jax
        >>> from eqxlike import nn
        >>> model = nn.Linear(3, 4, key=jax.random.key(0))
        >>> def rule(path, array):
        ...     if path.endswith(".weight"):
        ...         return jax.nn.initializers.orthogonal()
        ...     return jax.nn.initializers.zeros
        >>> nn.reinitialise(model, rule, key=jax.random.key(1)).bias
        Array([0., 0., 0., 0.], dtype=float32)
    """
    check_instance(model, "reinitialise")

    def renew(path: tuple[Any, ...], leaf: Any) -> Any:
        if not is_inexact_array(leaf):
            return leaf
        name = jtu.keystr(path)
        initializer = rule(name, leaf)
        if initializer is None:
            return leaf
        if not callable(initializer):
            raise TypeError(
                "`rule` must return an initializer, called as `init(key, shape, dtype)`, or None; "
                f"for the array at model{name} it returned {initializer!r}."
            )
        parameter = Parameter(
            leaf.shape, leaf.dtype, initializer=initializer, inputs_last=leaf.ndim >= 2
        )
        try:
            return draw(key_at(key, name), parameter)[0]
        except Exception as error:
            error.add_note(f"The array is that at model{name}.")
            raise

    return jtu.tree_map_with_path(renew, model)


# --- From a model to a Bayesian one ---


def to_bayesian(
    model: PyTree,
    where: Callable[[Any], Any | Sequence[Any]] | None = None,
    *,
    prior_scale: float | Float[Array, ""] = 1.0,
    posterior_scale: float = 0.1,
    estimator: Estimator = "local",
) -> PyTree:
    """Gives the layers of a model a posterior around the weights that they have.

    Each `Linear` becomes a `BayesianLinear` and each `Conv` a `BayesianConv`, with the weights of
    the layer as posterior means: so in inference mode the result computes what the model did.
    `kl_divergence`, `sample_posterior` and `bayes.negative_elbo` take it from there.

    Outside inference mode a Bayesian layer needs a key. `Sequential`, `MLP` and
    `MultiheadAttention` pass the one that they are called with on to their layers; a model which
    does not is called with weights drawn: `sample_posterior(model, key)(x)`.

    **Arguments:**

    - `model`: a Module, or any pytree.
    - `where`: a function from the model to a node of it, or to a tuple or list of nodes, as in
      `tree_at`: the layers to turn, or subtrees in which all are. All of `model` if left out.
    - `prior_scale`: of every layer, relative to its fan-in: see `BayesianLinear`. An array is
      learnt, by each layer for itself: also by those that are stored stacked, as in `ScanStack`.
    - `posterior_scale`: the initial spread around the weights, in the same unit.
    - `estimator`: what a layer draws when it is called: `"local"`, its output; `"flipout"` or
      `"weights"`, its weights, for which see `BayesianLinear` and `with_perturbation`.

    **Returns:** the model with Bayesian layers in it. Subclasses of `Linear` and `Conv` that are
    called in their own way stay as they are, as do transposed convolutions.

    **Raises:** `ValueError` if there is no layer to turn, a scale is not positive or the estimator
    unknown; `TypeError` if a layer is not of a real floating dtype, or `model` is a class.

    !!! example

        >>> import eqxlike as eqx, jax, jax.numpy as jnp
        >>> from eqxlike import nn
        >>> model = nn.MLP(2, 1, width_size=8, depth=1, key=jax.random.key(0))
        >>> bayesian = nn.to_bayesian(model, lambda model: model.layers[-1])
        >>> [type(layer).__name__ for layer in bayesian.layers]
        ['Linear', 'BayesianLinear']
        >>> bool(jnp.allclose(nn.inference_mode(bayesian)(jnp.ones(2)), model(jnp.ones(2))))
        True
        >>> eqx.filter_jit(bayesian)(jnp.ones(2), key=jax.random.key(1)).shape
        (1,)
    """
    check_instance(model, "to_bayesian")
    options: Any = {
        "prior_scale": prior_scale,
        "posterior_scale": posterior_scale,
        "estimator": estimator,
    }

    def make(layer: Any) -> BayesianLayer:
        if isinstance(layer, Linear):
            return BayesianLinear.around(layer, **options)
        # The means are trained, also those of a layer that was not.
        return BayesianConv(unfreeze(layer), **options)

    def turn(node: PyTree) -> PyTree:
        return replace_layers(node, linear_or_conv, make)

    return turn(model) if where is None else tree_at(where, model, replace_fn=turn)


# --- Parts of a key for the places in a model ---


def key_at(key: PRNGKeyArray, path: str) -> PRNGKeyArray:
    """The part of `key` that belongs to the place `path` in a model.

    It depends on nothing but the two, so that a layer which is added takes nothing from the others;
    and is the same in each process, which Python's `hash` of a string is not.
    """
    # 64 bits: among the 32 that one `fold_in` takes, two of ten thousand arrays would share theirs
    # in one model of a hundred.
    digest = hashlib.blake2b(path.encode(), digest_size=8).digest()
    return _fold_in(key, np.frombuffer(digest, "<u4"))


@jax.jit
def _fold_in(key: PRNGKeyArray, words: Array) -> PRNGKeyArray:
    high, low = jnp.asarray(words)
    return jr.fold_in(jr.fold_in(key, high), low)


# --- Nodes of a model chosen by their type, or by a function ---


Match = type | types.UnionType | tuple[type, ...] | Callable[[Any], Any]
"""A type, several, or a function from a node of the tree to `bool`."""


def node_predicate(match: Match, name: str) -> Callable[[Any], bool]:
    """The function that says whether `match`, the argument `name`, chooses a node.

    The mark around a frozen array is not a node of the user's tree, and never chosen.

    **Raises:** `TypeError` if `match` is neither type nor function.
    """
    node_types: Any = match if isinstance(match, tuple) else (match,)
    if all(isinstance(each, type | types.UnionType) for each in node_types):
        return lambda node: not is_frozen(node) and isinstance(node, node_types)
    if callable(match):
        return lambda node: not is_frozen(node) and bool(match(node))
    raise TypeError(
        f"`{name}` must be a type, a tuple of types, or a function from a node of the tree to a "
        f"bool; got {match!r}."
    )


_WEIGHTED = (Linear, FusedLinear, Conv, ConvTranspose, GRUCell, LSTMCell, LoRALinear)
"""The layers whose weights decay."""


def decay_mask(
    params: PyTree,
    also: type | Iterable[type] = (),
    skip: type | str | Iterable[type | str] = (),
) -> PyTree[bool]:
    """Chooses the arrays that weight decay applies to: the weights of affine maps, convolutions and
    recurrent cells, and no bias, norm, scale or embedding.

    It chooses by the type of the layer. So it is also right for the stacked arrays of
    `nn.ScanStack` or an ensemble, where `array.ndim >= 2` also holds for biases and norms.

    **Arguments:**

    - `params`: a model, or its parameters, `eqxlike.filter(model, eqxlike.is_inexact_array)`. Optax
      calls a mask with the parameters, or with gradients of the same structure.
    - `also`: a class of layers, or a tuple of classes, such as `nn.Embedding` or your own. All
      arrays of such a layer decay, except those whose name begins with `bias`. With Optax:
      `mask=functools.partial(nn.decay_mask, also=nn.Embedding)`.
    - `skip`: classes of layers, and patterns of paths such as `"**.head"`, of which nothing decays.
      A pattern chooses arrays, or subtrees: see `where` of `replace_layers`.

    **Returns:** a tree like `params` with `True` for each array that decays and `False` for all
    other leaves. Frozen arrays do not decay.

    **Raises:** `TypeError` if `skip` has something else.

    !!! example

        >>> import eqxlike as eqx, jax, optax
        >>> from eqxlike import nn
        >>> def make_layer(key):
        ...     return nn.Sequential([nn.LayerNorm(4), nn.Linear(4, 4, key=key)])
        >>> model = nn.ScanStack(make_layer, 2, key=jax.random.key(0))
        >>> mask = nn.decay_mask(eqx.filter(model, eqx.is_inexact_array))
        >>> mask.layers[0].weight, mask.layers[1].weight, mask.layers[1].bias
        (False, True, False)
        >>> optimiser = optax.adamw(1e-3, mask=nn.decay_mask)
    """
    types = (*_WEIGHTED, *((also,) if isinstance(also, type) else also))
    choices: Any = skip if isinstance(skip, Iterable) and not isinstance(skip, str) else (skip,)
    choices = tuple(choices)
    skipped_types = tuple(each for each in choices if isinstance(each, type))
    patterns = [each for each in choices if isinstance(each, str)]
    if len(skipped_types) + len(patterns) < len(choices):
        raise TypeError(
            f"decay_mask expected classes of layers, and patterns of paths, as skip; got {skip!r}."
        )
    layers: set[tuple[Any, ...]] = set()
    skipped: set[tuple[Any, ...]] = set()
    for path, node in walk(params):
        is_at = any(_is_at(pattern, path) for pattern in patterns)
        if path[:-1] in skipped or is_at or isinstance(node, skipped_types):
            skipped.add(path)
        if isinstance(node, types):
            layers.add(path)

    def decays(path: tuple[Any, ...], leaf: Any) -> bool:
        # The path of a frozen array has one more key.
        is_bias = jtu.keystr(path[-1:]).startswith(".bias")
        if path[:-1] not in layers or is_bias or path in skipped or not is_array_or_struct(leaf):
            return False
        return bool(jnp.issubdtype(leaf.dtype, jnp.inexact))

    return jtu.tree_map_with_path(decays, params)


def _is_at(pattern: str, path: tuple[Any, ...]) -> bool:
    """Whether a pattern matches the path of a node."""
    name = jtu.keystr(path).removeprefix(".")
    return path_matches(pattern, name, jax.ShapeDtypeStruct((), jnp.float32))


def replace_layers(
    model: PyTree,
    match: Match,
    make: Callable[..., Any],
    *,
    where: str | None = None,
    key: PRNGKeyArray | None = None,
) -> PyTree:
    """A copy of a model in which every layer of some type is replaced.

    **Arguments:**

    - `model`: a Module, or any pytree. Layers in containers are found, in static fields not: those
      are part of the structure of the tree, not of what stands in it.
    - `match`: a type, several, or a function from a node of the tree to `bool`. It is asked from
      the root down, of every node outside those that it chose.
    - `make`: called as `make(node)`, returns what takes its place. A node that stands at several
      places is replaced by one and the same: it stays shared.
    - `where`: a pattern of paths, such as `"**.query_proj"` or `"layers.*"`: only nodes there are
      replaced. `*` stands for one name or index, `**` for any number of them.
    - `key`: if given, `make` is called as `make(node, key=part)`, each time with another part of
      it, which depends on the path of the node alone: with one key for all, layers of the same
      size would be initialised alike.

    A layer that is stored stacked, as in `nn.ScanStack` or an ensemble made by `filter_vmap`, is
    one node, whose arrays have a leading axis.

    **Returns:** the new model. What was not replaced is shared with `model`.

    **Raises:** `ValueError` if nothing matches, `TypeError` if `match` is neither type nor
    function, `where` is not a string, or `model` is a class.

    !!! example

        >>> import jax
        >>> from eqxlike import nn
        >>> model = nn.MLP(2, 1, width_size=8, depth=1, key=jax.random.key(0))
        >>> def adapt(layer, *, key):
        ...     return nn.LoRALinear(layer, rank=4, key=key)
        >>> adapted = nn.replace_layers(model, nn.Linear, adapt, key=jax.random.key(1))
        >>> [type(layer).__name__ for layer in adapted.layers]
        ['LoRALinear', 'LoRALinear']
        >>> key = jax.random.key(2)
        >>> adapted = nn.replace_layers(model, nn.Linear, adapt, where="layers.1", key=key)
        >>> [type(layer).__name__ for layer in adapted.layers]
        ['Linear', 'LoRALinear']
    """
    check_instance(model, "replace_layers")
    if not isinstance(where, str | None):
        raise TypeError(f"`where` must be a pattern of paths, such as '**.head'; got {where!r}.")
    is_chosen = node_predicate(match, "match")
    seen: dict[type, None] = {}
    chosen: set[tuple[Any, ...]] = set()
    elsewhere: list[str] = []

    def is_match(path: tuple[Any, ...], node: Any) -> bool:
        seen[type(node)] = None
        if not is_chosen(node):
            return False
        if where is not None and not _is_at(where, path):
            elsewhere.append(jtu.keystr(path).removeprefix("."))
            return False
        chosen.add(path)
        return True

    nodes, treedef = jtu.tree_flatten_with_path(model, is_match, is_leaf_takes_path=True)
    if elsewhere and not chosen:
        raise ValueError(f"No node at {where!r} matches; nodes elsewhere do: {listed(elsewhere)}.")
    if not chosen:
        raise ValueError(_nothing_matches(match, seen))
    made: dict[int, Any] = {}
    for path, node in nodes:
        if path in chosen and id(node) not in made:
            options = {} if key is None else {"key": key_at(key, jtu.keystr(path))}
            made[id(node)] = make(node, **options)
    return treedef.unflatten([made[id(node)] if path in chosen else node for path, node in nodes])


def _nothing_matches(match: Match, seen: dict[type, None]) -> str:
    names = [cls.__name__ for cls in seen if issubclass(cls, Module)]
    what = "Modules of type" if names else "no Module, but nodes of type"
    names = names or [cls.__name__ for cls in seen]
    return (
        f"No node of the model matches {getattr(match, '__name__', repr(match))}. It has "
        f"{what} {', '.join(dict.fromkeys(names))}. Static fields are not searched."
    )
