"""Draws as ArviZ holds them."""

import importlib
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array

from ..._transforms import filter_jit
from .._unknowns import Unknowns
from ._method import Method
from ._problem import Problem

# What ArviZ calls what chains record.
_STATISTICS = {
    "log_density": "lp",
    "acceptance": "acceptance_rate",
    "is_divergent": "diverging",
    "energy": "energy",
    "num_gradients": "n_steps",
}


def to_arviz(
    problem: Problem,
    method: Method,
    unknowns: Unknowns,
    num_chains: int,
    records: dict[str, np.ndarray],
) -> Any:
    """A `DataTree` of ArviZ.

    **Arguments:**

    - `unknowns`: draws with one leading axis, those of each chain one after another.
    - `num_chains`: how many chains they are of.
    - `records`: what chains recorded.

    **Raises:** `ImportError` that says how to install ArviZ.
    """
    try:
        arviz = importlib.import_module("arviz_base")
    except ModuleNotFoundError as error:
        raise ImportError("to_arviz needs ArviZ: `pip install 'eqxlike[arviz]'`.") from error

    def by_chain(draws: Any) -> np.ndarray:
        return np.asarray(draws).reshape(num_chains, -1, *draws.shape[1:])

    groups = {
        "posterior": {name: by_chain(each) for name, each in _by_name(unknowns).items()},
        "log_likelihood": {"y": by_chain(_log_likelihoods(problem, method, unknowns))},
        "observed_data": {
            f"y{jtu.keystr(path)}": np.asarray(leaf)
            for path, leaf in jtu.tree_leaves_with_path(problem.target.data[1])
        },
    }
    statistics = {theirs: records[ours] for ours, theirs in _STATISTICS.items() if ours in records}
    return arviz.from_dict(groups | ({"sample_stats": statistics} if statistics else {}))


def _by_name(unknowns: Unknowns) -> dict[str, Array]:
    """Arrays by their paths, such as `layers[0].weight` and `likelihood.scale`."""
    parts = {"": unknowns.model, "likelihood": unknowns.likelihood, "prior": unknowns.prior}
    return {
        (part + "".join(map(_step, path))).removeprefix("."): leaf
        for part, tree in parts.items()
        for path, leaf in jtu.tree_leaves_with_path(tree)
    }


def _step(entry: Any) -> str:
    """One step of a path, that into a dict written as that to an attribute."""
    is_name = isinstance(entry, jtu.DictKey) and isinstance(entry.key, str)
    return f".{entry.key}" if is_name else jtu.keystr((entry,))


@filter_jit
def _log_likelihoods(problem: Problem, method: Method, unknowns: Unknowns) -> Array:
    (x, y), likelihood = problem.target.data, problem.target.likelihood

    def of_one(unknowns: Unknowns) -> Array:
        network, own = method.network(problem, unknowns), unknowns.likelihood
        return jax.vmap(lambda x, y: likelihood.log_prob(network(x), own, y))(x, y)

    return jax.lax.map(of_one, jtu.tree_map(jnp.asarray, unknowns))
