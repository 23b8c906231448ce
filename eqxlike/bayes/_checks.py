"""Checks of whether a model, a likelihood and targets fit each other, by shapes alone."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
from jaxtyping import Array, PyTree

from .._transforms import filter_eval_shape
from ..nn import StateIndex
from ._library_rules import as_libraries_compute
from ._likelihoods import Likelihood
from ._unknowns import Unknowns


def output_of(network: Any, x: PyTree[jax.ShapeDtypeStruct]) -> Any:
    """The shapes and dtypes of what a network returns for one example.

    **Raises:** `TypeError` for one that keeps a state.
    """
    try:
        return filter_eval_shape(lambda model, x: model(x), network, x)
    except TypeError as error:
        nodes = jtu.tree_leaves(network, is_leaf=_is_state_index)
        if not any(map(_is_state_index, nodes)):
            raise
        raise TypeError(
            "Posterior calls the model by `model(x)`, and this one has layers that keep a state, "
            "such as `nn.BatchNorm`, which has no likelihood of single examples. Take "
            "`nn.LayerNorm` or `nn.GroupNorm` in their place; or, where the state stays as it is, "
            "a Module of your own that has `nn.freeze(state)`, and whose `__call__(self, x)` "
            "returns `self.model(x, self.state)[0]`."
        ) from error


def _is_state_index(node: Any) -> bool:
    return isinstance(node, StateIndex)


def check_real(parameters: Mapping[str, jax.ShapeDtypeStruct]) -> None:
    """Raises `TypeError` if one of the parameters, by their paths, is complex."""
    for path, struct in parameters.items():
        if jnp.issubdtype(struct.dtype, jnp.complexfloating):
            raise TypeError(
                f"Posterior: {path} is complex, dtype {struct.dtype}, and priors are over real "
                "numbers. Freeze it by `nn.freeze`, or keep its two parts as arrays."
            )


def check_one_draw(unknowns: Unknowns, wanted: Unknowns, is_linked: bool) -> None:
    """Raises `ValueError` if unknowns have other shapes than one draw has, such as a leading axis.

    **Arguments:**

    - `wanted`: shapes and dtypes in standard space, in place of arrays.
    - `is_linked`: whether the unknowns are in linked space, where arrays may be smaller.
    """
    structs = dict(jtu.tree_leaves_with_path(wanted))
    for path, leaf in jtu.tree_leaves_with_path(unknowns):
        ours, theirs = jnp.shape(leaf), structs[path].shape if path in structs else jnp.shape(leaf)
        if len(ours) > len(theirs) if is_linked else ours != theirs:
            raise ValueError(
                f"Posterior: the unknowns have shape {ours} at "
                f"{jtu.keystr(path).removeprefix('.')}, where one draw has {theirs}. Of draws with "
                "a leading axis take one, `jax.tree.map(lambda each: each[0], samples)`, or all "
                "with `jax.vmap`."
            )


def check_target_shape(
    likelihood: Likelihood, output: Any, own: Any, y: PyTree[jax.ShapeDtypeStruct]
) -> None:
    """Raises `ValueError` if a likelihood is one of another shape than the targets.

    **Arguments:**

    - `output`: the shapes and dtypes of what the network returns for one example.
    - `own`: values for the unknowns of the likelihood.
    - `y`: the shape and dtype of the target of one example.
    """
    if not isinstance(y, jax.ShapeDtypeStruct):
        return

    def draw(output: Any, own: Any) -> Array:
        with as_libraries_compute():
            return likelihood.distribution(output, own).sample(jr.key(0))

    shape = filter_eval_shape(draw, output, own).shape
    if shape != y.shape:
        raise ValueError(
            f"Posterior: a target has shape {y.shape}, and the distribution of "
            f"{type(likelihood).__name__} for it has shape {shape}."
        )
