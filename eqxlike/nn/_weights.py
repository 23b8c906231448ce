"""Weight normalisation, spectral normalisation, and weight sharing."""

import enum
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Generic, TypeVar

import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
from jaxtyping import Array, Float, PRNGKeyArray, PyTree, Shaped

from .._check_numbers import integer, real_number, whole_number
from .._dtypes import at_least_float32
from .._module import Module, field
from .._pytree import find_difference, is_array, same_shape_and_dtype, tree_at
from .._transforms import filter_eval_shape
from ._inputs import check_instance
from ._stateful import State, StatefulLayer, StateIndex

Layer = TypeVar("Layer", bound=Callable[..., Any])


class WeightNorm(Module, Generic[Layer]):
    """Weight normalisation: replaces a weight `v` of a layer by `g v / |v|`.

    For each output, the length `g` and the direction `v` of its weights are trained separately.
    Initially `g = |v|`, so the outputs of the layer do not change. Norms are computed in at least
    float32. Salimans & Kingma (2016), "Weight Normalization: A Simple Reparameterization to
    Accelerate Training of Deep Neural Networks".

    >>> import jax, jax.numpy as jnp
    >>> from eqxlike import nn
    >>> linear = nn.Linear(3, 4, key=jax.random.key(0))
    >>> layer = WeightNorm(linear)
    >>> layer.g.shape
    (4, 1)
    >>> bool(jnp.allclose(layer(jnp.ones(3)), linear(jnp.ones(3))))
    True
    """

    layer: Layer
    g: Shaped[Array, "..."]
    weight_name: str = field(static=True)
    axis: int | None = field(static=True)

    def __init__(self, layer: Layer, weight_name: str = "weight", axis: int | None = 0):
        """**Arguments:**

        - `layer`: the layer to wrap, called as `layer(x)`.
        - `weight_name`: the name of the attribute of `layer` to normalise, an array.
        - `axis`: norms are computed over all axes except this axis; over all axes if `None`.

        **Raises:**

        - `AttributeError` if `layer` has no attribute `weight_name`.
        - `ValueError` if the attribute is not an array, or has no such axis.
        """
        weight = _weight_of(layer, weight_name, "WeightNorm")
        number = integer(axis)
        if axis is not None and (number is None or not -weight.ndim <= number < weight.ndim):
            raise ValueError(
                f"axis must be None or an axis of {type(layer).__name__}.{weight_name}, which has "
                f"shape {weight.shape}; got {axis!r}."
            )
        self.layer = layer
        self.weight_name = weight_name
        self.axis = number
        self.g = _norm(weight, axis).astype(weight.dtype)

    def __call__(self, x: Array, *, key: PRNGKeyArray | None = None) -> Array:
        """**Arguments:**

        - `x`: the input of the layer.
        - `key`: ignored; accepted so that all layers have the same signature.

        **Returns:** the output of the layer with the weight normalised.
        """
        weight = getattr(self.layer, self.weight_name)
        norm = _norm(weight, self.axis)
        normalised = weight.astype(norm.dtype) * (self.g.astype(norm.dtype) / norm)
        normalised = normalised.astype(weight.dtype)
        return tree_at(lambda layer: getattr(layer, self.weight_name), self.layer, normalised)(x)


def _weight_of(layer: Any, name: str, caller: str, axes: str = "", least: int = 0) -> Array:
    """The attribute `name` of a layer, checked to be an array of at least `least` axes."""
    check_instance(layer, caller)
    weight = getattr(layer, name)
    if not is_array(weight) or weight.ndim < least:
        got = f"shape {weight.shape}" if is_array(weight) else type(weight).__name__
        raise ValueError(
            f"{caller} expected {type(layer).__name__}.{name} to be an array{axes}, got {got}."
        )
    return weight


def _norm(weight: Array, axis: int | None) -> Array:
    kept = None if axis is None else axis % weight.ndim
    over = tuple(each for each in range(weight.ndim) if each != kept)
    wide = weight.astype(at_least_float32(weight.dtype))
    return jnp.sqrt(jnp.sum(jnp.abs(wide) ** 2, over, keepdims=True))


# --- Spectral normalisation ---


_NUM_INITIAL_ITERATIONS = 15


class SpectralNorm(StatefulLayer, Generic[Layer]):
    """Spectral normalisation: divides a weight `W` of a layer by its largest singular value.

    The weight becomes `W / (u^T W v)`, with `W` reshaped to a matrix of shape `(W.shape[0], -1)`.
    The state holds `u` and `v`, which approximate the singular vectors. Each call in training
    updates `u` and `v` by power iterations, `u <- W v / |W v|` and `v <- W^T u / |W^T u|`.
    Gradients treat `u` and `v` as constants. The layer computes `u`, `v` and the weight in at least
    float32. Miyato, Kataoka, Koyama & Yoshida (2018), "Spectral Normalization for Generative
    Adversarial Networks".

    >>> import jax, jax.numpy as jnp
    >>> from eqxlike import nn
    >>> key1, key2 = jax.random.split(jax.random.key(0))
    >>> layer, state = nn.make_with_state(nn.SpectralNorm)(
    ...     nn.Linear(3, 4, use_bias=False, key=key1), "weight", key=key2
    ... )
    >>> y, state = layer(jnp.ones(3), state)
    >>> bool(jnp.linalg.norm(y) <= 1.01 * jnp.linalg.norm(jnp.ones(3)))
    True
    """

    # The names of the arrays in files for other libraries.
    _state_names: ClassVar[dict[str, tuple[str, ...]]] = {"uv_index": ("u", "v")}
    layer: Layer
    weight_name: str = field(static=True)
    uv_index: StateIndex[tuple[Float[Array, " rows"], Float[Array, " columns"]]]
    num_power_iterations: int = field(static=True)
    eps: float = field(static=True)
    inference: bool

    def __init__(
        self,
        layer: Layer,
        weight_name: str,
        num_power_iterations: int = 1,
        eps: float = 1e-12,
        inference: bool = False,
        *,
        key: PRNGKeyArray,
    ):
        """**Arguments:**

        - `layer`: the layer to wrap, called as `layer(x)`.
        - `weight_name`: the name of the attribute of `layer` to normalise, an array of at least two
          axes.
        - `num_power_iterations`: number of power iterations in each call in training.
        - `eps`: lower bound on the norms that vectors are divided by.
        - `inference`: whether to skip the update of the state.
        - `key`: random key for the initial vectors.

        **Raises:**

        - `AttributeError` if `layer` has no attribute `weight_name`.
        - `ValueError` if the attribute is not an array of at least two axes.
        - `ValueError` if `num_power_iterations` is negative.
        """
        weight = _weight_of(layer, weight_name, "SpectralNorm", " of at least two axes", least=2)
        self.layer = layer
        self.weight_name = weight_name
        self.num_power_iterations = whole_number(num_power_iterations, "num_power_iterations", 0)
        self.eps = real_number(eps, "eps")
        self.inference = inference
        matrix = _as_matrix(weight)
        u_key, v_key = jr.split(key)
        u = self._unit(jr.normal(u_key, matrix.shape[:1], weight.dtype).astype(matrix.dtype))
        v = self._unit(jr.normal(v_key, matrix.shape[1:], weight.dtype).astype(matrix.dtype))
        u, v = self._iterate(matrix, u, v, _NUM_INITIAL_ITERATIONS)
        self.uv_index = StateIndex((u.astype(weight.dtype), v.astype(weight.dtype)))

    def __call__(
        self,
        x: Array,
        state: State,
        *,
        key: PRNGKeyArray | None = None,
        inference: bool | None = None,
    ) -> tuple[Array, State]:
        """**Arguments:**

        - `x`: the input of the layer.
        - `state`: holds the vectors of the power iteration.
        - `key`: ignored; accepted so that all layers have the same signature.
        - `inference`: overrides `self.inference` for this call.

        **Returns:** the output of the layer with the weight normalised, and the new state.
        """
        inference = self.inference if inference is None else inference
        weight = getattr(self.layer, self.weight_name)
        matrix = _as_matrix(weight)
        stored = state.get(self.uv_index)
        u, v = (each.astype(matrix.dtype) for each in stored)
        if not inference:
            u, v = self._iterate(jax.lax.stop_gradient(matrix), u, v, self.num_power_iterations)
            state = state.set(self.uv_index, (u.astype(stored[0].dtype), v.astype(stored[1].dtype)))
        u, v = jax.lax.stop_gradient((u, v))
        normalised = (weight.astype(matrix.dtype) / (u @ matrix @ v)).astype(weight.dtype)
        layer = tree_at(lambda layer: getattr(layer, self.weight_name), self.layer, normalised)
        return layer(x), state

    def _iterate(self, matrix: Array, u: Array, v: Array, num: int) -> tuple[Array, Array]:
        for _ in range(num):
            u = self._unit(matrix @ v)
            v = self._unit(matrix.T @ u)
        return u, v

    def _unit(self, vector: Array) -> Array:
        vector = jax.lax.stop_gradient(vector)
        return vector / jnp.maximum(jnp.linalg.norm(vector), self.eps)


def _as_matrix(weight: Array) -> Array:
    return weight.reshape(weight.shape[0], -1).astype(at_least_float32(weight.dtype))


# --- Weight sharing ---


class _Placeholder(enum.Enum):
    """Placeholder for a shared node; an enum, so that all copies are the same object."""

    SHARED = enum.auto()

    def __repr__(self) -> str:
        return "<shared>"


class Shared(Module):
    """Shares nodes of a pytree, such as tied weights.

    A Module is a tree. A layer in two places of the tree is two layers: they are equal at first,
    but are trained separately. `Shared` keeps one node, and inserts this node in the other places
    at each call. The gradients of all uses are then summed.

    Press & Wolf (2017), "Using the Output Embedding to Improve Language Models", share the weights
    of the first layer with the last:

    >>> import jax
    >>> from eqxlike import nn
    >>> key1, key2 = jax.random.split(jax.random.key(0))
    >>> pair = (nn.Embedding(5, 3, key=key1), nn.Linear(3, 5, key=key2))
    >>> shared = Shared(pair, where=lambda pair: pair[1].weight, get=lambda pair: pair[0].weight)
    >>> embedding, linear = shared()
    >>> embedding.weight is linear.weight
    True
    """

    pytree: PyTree
    where: Callable[[PyTree], Any | Sequence[Any]]
    get: Callable[[PyTree], Any | Sequence[Any]]

    def __init__(
        self,
        pytree: PyTree,
        where: Callable[[PyTree], Any | Sequence[Any]],
        get: Callable[[PyTree], Any | Sequence[Any]],
    ):
        """**Arguments:**

        - `pytree`: the tree with the nodes to share.
        - `where`: a function from the tree to a node, or to a sequence of nodes, as in `tree_at`.
          These nodes are removed from the tree.
        - `get`: a function that takes the tree and returns the value for each removed node. The
          value is another node, or is computed from another node, such as a transpose. `get`
          returns a sequence if `where` returns a sequence.

        **Raises:**

        - `ValueError` if the results of `get` and `where` differ in structure, shape or dtype.
        - `ValueError` if `get` returns a removed node.
        - Any exception of `tree_at` for `where`.
        """
        check_instance(pytree, "Shared")
        self.pytree = tree_at(where, pytree, replace_fn=lambda _: _Placeholder.SHARED)
        self.where = where
        self.get = get
        taken = filter_eval_shape(where, pytree)
        given = filter_eval_shape(get, self.pytree)
        if _Placeholder.SHARED in jtu.tree_leaves(given):
            raise ValueError(
                "`get` returns a node that `where` removes from the tree. It must return a node "
                "that stays in the tree."
            )
        if difference := find_difference(taken, given, same_shape_and_dtype):
            raise ValueError(
                "Shared nodes must have the same structure, shapes and dtypes: "
                f"{difference.explain('where(pytree)', 'get(pytree)')}."
            )

    def __call__(self) -> PyTree:
        """**Returns:** the tree, with the result of `get` in place of the removed nodes."""
        return tree_at(self.where, self.pytree, self.get(self.pytree))
