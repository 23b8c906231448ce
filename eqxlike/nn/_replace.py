"""Replacement of layers and arrays of a model, and masks for weight decay."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from .._module import Module
from .._pytree import is_array_or_struct, is_inexact_array, listed, path_matches, tree_at, walk
from ._bayesian import BayesianConv, BayesianLayer, BayesianLinear, Estimator, linear_or_conv
from ._conv import Conv, ConvTranspose
from ._inputs import check_instance
from ._linear import FusedLinear, Linear
from ._lora import LoRALinear
from ._modes import Match, node_predicate, unfreeze
from ._parameters import Initializer, Parameter, draw
from ._rnn import GRUCell, LSTMCell

# --- New values for the arrays of a model ---


def reinitialise(
    model: PyTree, rule: Callable[[str, Array], Initializer | None], *, key: PRNGKeyArray
) -> PyTree:
    """Draws new values for arrays of a model.

    Arrays with two or more axes are treated as weights of shape `(outputs, inputs, *window)`. The
    initializer of a weight is called with the shape `(*window, inputs, outputs)`, because JAX's
    initializers compute the fan-in from this shape. For stacked layers, such as `nn.ScanStack` or
    an ensemble, call `reinitialise` under `filter_vmap`, so that `rule` gets the arrays of one
    layer.

    **Arguments:**

    - `model`: a Module, or any pytree.
    - `rule`: function that is called as `rule(path, array)` for each floating-point or complex
      array, with a path such as `".layers[0].weight"`. The function returns an initializer
      `init(key, shape, dtype)`, for example from `jax.nn.initializers`, or `None` to keep the
      array.
    - `key`: random key. The key of each array depends only on `key` and the path of the array, so
      adding or removing other layers does not change the new values.

    **Returns:** a copy of the model with new arrays of the same shapes and dtypes. An array that
    occurs in two places gets different values in each place.

    **Raises:**

    - `TypeError` if `rule` returns neither a function nor `None`.
    - `TypeError` if `model` is a class.
    - `ValueError` if an initializer returns the wrong shape or dtype.

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
                "`rule` must return an initializer `init(key, shape, dtype)` or None; for the "
                f"array at model{name} it returned {initializer!r}."
            )
        parameter = Parameter(
            leaf.shape, leaf.dtype, initializer=initializer, is_outputs_first=leaf.ndim >= 2
        )
        try:
            return draw(key_at(key, name), parameter)[0]
        except Exception as error:
            error.add_note(f"This happened for the array at model{name}.")
            raise

    return jtu.tree_map_with_path(renew, model)


# --- Bayesian layers ---


def to_bayesian(
    model: PyTree,
    where: Callable[[Any], Any | Sequence[Any]] | None = None,
    *,
    prior_scale: float | Float[Array, ""] = 1.0,
    posterior_scale: float = 0.1,
    estimator: Estimator = "local",
) -> PyTree:
    """Replaces layers of a model by Bayesian layers, with posteriors around their weights.

    Each `Linear` becomes a `BayesianLinear` and each `Conv` a `BayesianConv`. The posterior means
    are the weights of the layer, so in inference mode the outputs do not change. Use the result
    with `kl_divergence`, `sample_posterior` and `bayes.negative_elbo`.

    Outside of inference mode a Bayesian layer needs a key. `Sequential`, `MLP` and
    `MultiheadAttention` pass their `key` on to their layers. If a model does not pass keys on, draw
    the weights first: `sample_posterior(model, key)(x)`.

    **Arguments:**

    - `model`: a Module, or any pytree.
    - `where`: a function from the model to a node, or to a tuple or list of nodes, as in `tree_at`.
      All layers in these nodes are replaced; by default all layers of `model`.
    - `prior_scale`: the prior scale of every layer, relative to its fan-in; see `BayesianLinear`.
      If `prior_scale` is an array, it is a trained parameter, with a separate copy for each layer.
      Each of several stacked layers, as in `ScanStack`, also has its own copy.
    - `posterior_scale`: the initial posterior scale, also relative to the fan-in.
    - `estimator`: what a layer samples in a call: `"local"` samples the outputs, `"flipout"` and
      `"weights"` sample the weights; see `BayesianLinear` and `with_perturbation`.

    **Returns:** a copy of the model with Bayesian layers. Transposed convolutions, and subclasses
    of `Linear` and `Conv` with their own `__call__`, are not replaced.

    **Raises:**

    - `ValueError` if there is no layer to replace.
    - `ValueError` if a scale is not positive.
    - `ValueError` if the estimator is unknown.
    - `TypeError` if a layer does not have a real floating-point dtype.
    - `TypeError` if `model` is a class.

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
        # The means are trained, even if the layer was frozen.
        return BayesianConv(unfreeze(layer), **options)

    def turn(node: PyTree) -> PyTree:
        return replace_layers(node, linear_or_conv, make)

    return turn(model) if where is None else tree_at(where, model, replace_fn=turn)


# --- Random keys by path ---


def key_at(key: PRNGKeyArray, path: str) -> PRNGKeyArray:
    """A key that depends only on `key` and `path`.

    Adding a layer to a model does not change the keys of other layers. The key is the same in each
    process, unlike Python's `hash` of a string.
    """
    # Folds 64 bits into the key. With the 32 bits of one `fold_in`, one in a hundred models of ten
    # thousand arrays would have two arrays with the same key.
    digest = hashlib.blake2b(path.encode(), digest_size=8).digest()
    return _fold_in(key, np.frombuffer(digest, "<u4"))


@jax.jit
def _fold_in(key: PRNGKeyArray, words: Array) -> PRNGKeyArray:
    high, low = jnp.asarray(words)
    return jr.fold_in(jr.fold_in(key, high), low)


# --- Masks for weight decay ---


_WEIGHTED = (Linear, FusedLinear, Conv, ConvTranspose, GRUCell, LSTMCell, LoRALinear)
"""The types of layers whose weights decay by default in `decay_mask`."""


def decay_mask(
    params: PyTree,
    also: type | Iterable[type] = (),
    skip: type | str | Iterable[type | str] = (),
) -> PyTree[bool]:
    """A weight decay mask for Optax: weights of linear, convolutional and recurrent layers.

    Biases, norms, scales and embeddings do not decay. The mask depends on the type of the layer, so
    it is also right for stacked layers, such as `nn.ScanStack` or an ensemble. For stacked layers,
    the criterion `array.ndim >= 2` would also select biases and norms.

    **Arguments:**

    - `params`: a model, or its parameters, `eqxlike.filter(model, eqxlike.is_inexact_array)`. Optax
      calls a mask with the parameters or with gradients, which have the same structure.
    - `also`: a class of layers, such as `nn.Embedding`, or a tuple of classes. The arrays of these
      layers also decay, except for arrays whose name starts with `bias`. With Optax:
      `mask=functools.partial(nn.decay_mask, also=nn.Embedding)`.
    - `skip`: classes of layers and path patterns, such as `"**.head"`, whose arrays do not decay. A
      pattern selects arrays or subtrees; see `where` of `replace_layers`.

    **Returns:** a tree like `params` with `True` for each array that decays and `False` for all
    other leaves. Frozen arrays do not decay.

    **Raises:** `TypeError` if `skip` contains anything but classes and path patterns.

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
            f"decay_mask expected skip to contain layer classes and path patterns; got {skip!r}."
        )
    layers: set[tuple[Any, ...]] = set()
    skipped: set[tuple[Any, ...]] = set()
    for path, node in walk(params):
        matches_pattern = any(_matches_path(pattern, path) for pattern in patterns)
        if path[:-1] in skipped or matches_pattern or isinstance(node, skipped_types):
            skipped.add(path)
        if isinstance(node, types):
            layers.add(path)

    def decays(path: tuple[Any, ...], leaf: Any) -> bool:
        # The path of a frozen array ends with an additional key. `path[:-1]` is then the path of
        # the array and not of a layer, so frozen arrays do not decay.
        is_bias = jtu.keystr(path[-1:]).startswith(".bias")
        if path[:-1] not in layers or is_bias or path in skipped or not is_array_or_struct(leaf):
            return False
        return bool(jnp.issubdtype(leaf.dtype, jnp.inexact))

    return jtu.tree_map_with_path(decays, params)


# --- Replacement of layers by type or path ---


def _matches_path(pattern: str, path: tuple[Any, ...]) -> bool:
    """Whether a path pattern matches the path of a node."""
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
    """Replaces every layer of a type, or every node that a function selects.

    Stacked layers, as in `nn.ScanStack` or in an ensemble made by `filter_vmap`, are one node. The
    arrays of this node have a leading axis.

    **Arguments:**

    - `model`: a Module, or any pytree. Layers in lists, tuples and dicts are found. Layers in
      static fields are not found, because they are not nodes of the tree.
    - `match`: a type, a tuple of types, or a function from a node of the tree to `bool`. The
      function is called on outer nodes before inner nodes, and not on nodes inside a match.
    - `make`: a function that is called as `make(node)` and returns the replacement. If a node
      occurs several times, all occurrences are replaced by the same object, so the node stays
      shared.
    - `where`: a path pattern, such as `"**.query_proj"` or `"layers.*"`; only nodes at these paths
      are replaced. `*` stands for one name or index, `**` for any number of names and indices.
    - `key`: if given, `make` is called as `make(node, key=node_key)`. Each `node_key` depends only
      on `key` and the path of the node, so layers of equal size are initialised differently.

    **Returns:** a copy of the model. Nodes that are not replaced are shared with `model`.

    **Raises:**

    - `ValueError` if no node matches.
    - `TypeError` if `match` is neither a type, nor a tuple of types, nor a function.
    - `TypeError` if `where` is not a string.
    - `TypeError` if `model` is a class.

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
        raise TypeError(f"`where` must be a path pattern, such as '**.head'; got {where!r}.")
    is_chosen = node_predicate(match, "match")
    seen: dict[type, None] = {}
    chosen: set[tuple[Any, ...]] = set()
    elsewhere: list[str] = []

    def is_match(path: tuple[Any, ...], node: Any) -> bool:
        seen[type(node)] = None
        if not is_chosen(node):
            return False
        if where is not None and not _matches_path(where, path):
            elsewhere.append(jtu.keystr(path).removeprefix("."))
            return False
        chosen.add(path)
        return True

    nodes, treedef = jtu.tree_flatten_with_path(model, is_match, is_leaf_takes_path=True)
    if elsewhere and not chosen:
        raise ValueError(f"No node at {where!r} matches; matches elsewhere: {listed(elsewhere)}.")
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
