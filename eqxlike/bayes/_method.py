"""The interface of a method of inference, the problem it solves, and the state of a run."""

import abc
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray, Shaped

from .. import Module, field, filter_jit
from ..ad import Mode, differentiate_with
from ._posterior import Data, Posterior, Unknowns, Vector

# --- The unknowns of a posterior as one vector in linked space ---


class Problem(Module):
    """A posterior over a vector of `d` unknowns in linked space.

    - `target`: the posterior to infer.
    - `mode`: differentiation mode of its density; `None` for reverse mode.
    - `kept`: for each array of the model, True if the initial unknowns are sure to contain the
      array itself. Otherwise they may contain a draw from its prior.
    """

    target: Posterior
    mode: Mode | None
    _structs: tuple[jax.ShapeDtypeStruct, ...] = field(static=True)
    _treedef: Any = field(static=True)
    kept: tuple[bool, ...] = field(static=True)

    def __init__(self, target: Posterior, mode: Mode | None = None):
        self.target = target
        self.mode = mode
        self.kept = target.kept_arrays()
        linked = jax.eval_shape(self._initial, jr.key(0))
        structs, self._treedef = jtu.tree_flatten(linked)
        self._structs = tuple(jax.ShapeDtypeStruct(each.shape, each.dtype) for each in structs)

    @property
    def size(self) -> int:
        """The number of unknowns, `d`."""
        return sum(math.prod(each.shape) for each in self._structs)

    @property
    def dtype(self) -> Any:
        """The dtype of the vector."""
        with jax.numpy_dtype_promotion("standard"):
            return jnp.result_type(*(each.dtype for each in self._structs))

    # --- vectors and trees ---

    def flatten(self, linked: Unknowns) -> Vector:
        """Converts unknowns in linked space to a vector."""
        return jnp.concatenate(
            [leaf.reshape(-1).astype(self.dtype) for leaf in jtu.tree_leaves(linked)]
        )

    def unflatten(self, vector: Vector) -> Unknowns:
        """Converts a vector to unknowns in linked space."""
        sizes = [math.prod(struct.shape) for struct in self._structs]
        # Split the vector instead of slicing it. The gradient of a split is one concatenation, but
        # the gradient of slices is a sum of one vector for each slice.
        parts = jnp.split(vector, np.cumsum(sizes)[:-1])
        leaves = [
            part.reshape(struct.shape).astype(struct.dtype)
            for part, struct in zip(parts, self._structs, strict=True)
        ]
        return jtu.tree_unflatten(self._treedef, leaves)

    def unknowns(self, vector: Vector) -> Unknowns:
        """Converts a vector to unknowns in standard space."""
        return self.target.constrain(self.unflatten(vector))[0]

    # --- densities ---

    def log_density(self, vector: Vector) -> Float[Array, ""]:
        """The log density of the posterior, in nats, up to a constant."""
        return self.batch_log_density(vector, None)

    def batch_log_density(self, vector: Vector, batch: Data | None) -> Float[Array, ""]:
        """An estimate of `log_density` from a batch. If `batch` is `None`, the exact value."""
        target, data = self.target, self.target.data if batch is None else batch
        return self.differentiable(
            lambda vector: target.minibatch_log_density(self.unflatten(vector), data, linked=True)
        )(vector)

    def differentiable(self, function: Any) -> Any:
        """Returns `function` unchanged, except that JAX differentiates it in the problem's mode."""
        return function if self.mode is None else differentiate_with(function, self.mode)

    def batch(self, key: PRNGKeyArray, size: int | None) -> Data | None:
        """Draws `size` examples with replacement. Returns `None` for all examples if `size` is
        `None`.
        """
        if size is None:
            return None
        chosen = jr.randint(key, (size,), 0, self.target.num_data)
        return jtu.tree_map(lambda array: array[chosen], self.target.data)

    # --- initial values ---

    def initial(self, key: PRNGKeyArray) -> Vector:
        """The parameters of the model, and draws from the priors of the other unknowns."""
        return self.flatten(self._initial(key))

    def _initial(self, key: PRNGKeyArray) -> Unknowns:
        return self.target.unconstrain(self.target.initial_keeping(self.kept, key))

    def redrawn(self, key: PRNGKeyArray) -> Vector:
        """Other initial parameters, made by shuffling each array of the model.

        This works for any initialisation that draws all entries of an array from one distribution.
        """
        initial_key, key = jr.split(key)
        linked = self._initial(initial_key)

        def shuffled(key: PRNGKeyArray, leaf: Array) -> Array:
            return jr.permutation(key, leaf.reshape(-1)).reshape(leaf.shape)

        model = with_keys(shuffled, key, linked.model)
        return self.flatten(Unknowns(model, linked.likelihood, linked.prior))

    def spread(self, vector: Vector) -> Vector:
        """For each entry, the standard deviation of the entry's array; 0 is replaced by 1."""
        linked = self.unflatten(vector)
        return self.flatten(
            jtu.tree_map(lambda leaf: jnp.broadcast_to(_spread(leaf), leaf.shape), linked)
        )

    def dispersed(self, key: PRNGKeyArray) -> Vector:
        """Initial values for chains, more dispersed than the posterior should be.

        Parameters of the model are shuffled, and moved by up to two standard deviations of their
        array. Other unknowns are uniform between -2 and 2 in linked space, as in Stan.
        """
        shuffle_key, key = jr.split(key)
        linked = self.unflatten(self.redrawn(shuffle_key))
        model, others = linked.model, (linked.likelihood, linked.prior)
        model_key, others_key = jr.split(key)

        def moved(key: PRNGKeyArray, leaf: Array) -> Array:
            return leaf + _spread(leaf) * jr.uniform(key, leaf.shape, leaf.dtype, -2, 2)

        def drawn(key: PRNGKeyArray, leaf: Array) -> Array:
            return jr.uniform(key, leaf.shape, leaf.dtype, -2, 2)

        likelihood, prior = with_keys(drawn, others_key, others)
        return self.flatten(Unknowns(with_keys(moved, model_key, model), likelihood, prior))


def _spread(leaf: Array) -> Array:
    """The standard deviation of an array; 0 is replaced by 1."""
    spread = jnp.std(leaf)
    return jnp.where(spread > 0, spread, 1)


def with_keys(function: Any, key: PRNGKeyArray, tree: Any, *others: Any) -> Any:
    """`jax.tree.map` over trees, with a key for each leaf as the first argument of `function`."""
    treedef = jtu.tree_structure(tree)
    if not treedef.num_leaves:
        return tree
    keys = treedef.unflatten(list(jr.split(key, treedef.num_leaves)))
    return jtu.tree_map(function, keys, tree, *others)


State = Any
"""The state of a chain: a pytree of arrays."""

Record = Mapping[str, Shaped[Array, "..."]]
"""The record of a step: arrays by name."""

Step = tuple[State, Record]
"""The result of a step: the new state and the record."""

Draws = Float[Array, "S d"]


class Method(Module):
    """A method of inference: pure functions over a state.

    For each of `num_chains` independent chains, `bayes.infer` calls `init` once, and then `step`
    `num_steps` times. Then it calls `finish` once for all chains. `sample` draws from the result of
    `finish`. All four functions are traced. They work on the vector of `d` unknowns of a `Problem`,
    in linked space.

    A step may record any arrays. `bayes.FittedPosterior` uses the records with the following names.
    `draw` is the position of a Markov chain; R-hat, effective sample sizes and the draws of
    `to_arviz` are computed from `draw`. `log_density`, `acceptance`, `is_divergent` and `energy`
    are used in diagnostics. `loss` is the loss of an optimiser.

    A custom method subclasses `Method` and defines `num_steps`, `init`, `step` and `sample`. Define
    `finish` if draws need more than the last states. The state is the carry of a loop, so `step`
    must keep its shapes and dtypes.

    To add a method to eqxlike, write a class in `bayes/_methods`: a subclass of `MarkovChain` if
    its draws are the positions of chains, or of `Descent` if an optimiser makes its steps. Export
    it in `bayes/__init__.py`, and add it to `METHODS` in `tests/bayes/methods/cases.py`. The tests
    then run all laws on it.
    """

    is_descent: ClassVar[bool] = False
    """Whether an optimiser makes the steps; `init` then only chooses initial parameters."""
    makes_draws_in_turn: ClassVar[bool] = True
    """Whether the chains of a batch make each draw at the same time. If not, fast chains wait for
    slow ones at the end of a compiled call.
    """
    remedy: ClassVar[str] = "Another method may help."
    """Advice for draws that predict worse than the point estimate."""

    @property
    def num_chains(self) -> int:
        """Number of independent chains, each with its own state."""
        return 1

    @property
    @abc.abstractmethod
    def num_steps(self) -> int:
        """Number of steps of a run."""

    @property
    def num_dropped(self) -> int:
        """Number of initial steps whose records are discarded."""
        return 0

    @property
    def thinning(self) -> int:
        """The number n: after the dropped steps, every n-th record is kept."""
        return 1

    def runs_apart(self, problem: Problem) -> bool:
        """Whether chains run one after another by default."""
        return False

    def check(self, problem: Problem) -> None:
        """Raises `ValueError` or `TypeError` if the method does not support the target."""

    def doubts(self, problem: Problem) -> tuple[str, ...]:
        """Warnings about this target, issued before the run."""
        return ()

    @abc.abstractmethod
    def init(self, problem: Problem, key: PRNGKeyArray) -> State:
        """The state of a chain before its first step."""

    @abc.abstractmethod
    def step(self, problem: Problem, state: State, index: Array, key: PRNGKeyArray) -> Step:
        """One step of one chain.

        **Arguments:**

        - `index`: the number of the step, from 0.
        - `key`: a key for this step only.
        """

    def advance(
        self,
        problem: Problem,
        states: State,
        keys: PRNGKeyArray,
        first: Array | np.ndarray,
        count: Array | np.ndarray,
        buffers: dict[str, Array],
    ) -> tuple[State, dict[str, Array]]:
        """Makes several steps of all chains: by default a loop over `step`, with chains batched.

        A method that overrides `advance` must still define `step`, because the shapes of the
        records are taken from `step`.

        **Arguments:**

        - `states`: states with a leading axis of chains.
        - `keys`: one key per chain. Step `i` uses `jax.random.fold_in(key, i)`.
        - `first`, `count`: the number of the first step, and the number of steps.
        - `buffers`: arrays for the records, with leading axes of chains and of at least `count`
          steps.

        **Returns:** the last states, and the buffers. The first `count` entries along the buffers'
        axis of steps are the records.
        """

        def of_chain(
            state: State, key: PRNGKeyArray, buffers: dict[str, Array]
        ) -> tuple[State, dict[str, Array]]:
            def one(place: Array, carry: Any) -> Any:
                state, buffers = carry
                index = place + first
                state, record = one_step(self, problem, state, index, jr.fold_in(key, index))
                return state, {name: buffers[name].at[place].set(record[name]) for name in buffers}

            return jax.lax.fori_loop(0, count, one, (state, buffers))

        if len(keys) > 1:
            return jax.vmap(of_chain)(states, keys, buffers)
        # A single chain runs without vmap, because under vmap `lax.cond` computes both branches.
        one = jtu.tree_map(lambda each: each[0], (states, keys, buffers))
        return jtu.tree_map(lambda each: each[None], of_chain(*one))

    def finish(self, problem: Problem, states: State, records: Record, key: PRNGKeyArray) -> Any:
        """The result of a run, from which `sample` draws. By default the last states.

        **Arguments:**

        - `states`: the last states, with a leading axis of chains.
        - `records`: the kept records, with leading axes of chains and records.
        """
        return states

    @abc.abstractmethod
    def sample(self, problem: Problem, found: Any, num: int, key: PRNGKeyArray) -> Draws:
        """`S = num` draws from the posterior.

        **Arguments:**

        - `found`: the result of `finish`.
        """

    def num_found(self, found: Any) -> int | None:
        """Number of draws in the result of `finish`; `None` if the method can make any number of
        draws.
        """
        return None

    # --- The networks of the draws, and diagnostics ---

    def noise(self, num: int, key: PRNGKeyArray) -> Any:
        """Random values that `num` networks use besides their unknowns, such as dropout masks.

        Returns `None` if the networks use no random values.
        """
        return None

    def network(self, problem: Problem, unknowns: Unknowns) -> Any:
        """The network with the unknowns of one draw, as a function of one input."""
        return problem.target.model(unknowns)

    def outputs(
        self, problem: Problem, found: Any, draws: Unknowns, x: Any, key: PRNGKeyArray
    ) -> Shaped[Array, "S B ..."]:
        """The outputs of the networks for `B` inputs.

        **Arguments:**

        - `draws`: unknowns with a leading axis of `S` draws.
        - `x`: inputs with a leading axis of `B` examples.
        """

        def of_one(unknowns: Unknowns) -> Any:
            return jax.vmap(self.network(problem, unknowns))(x)

        return jax.vmap(of_one)(draws)

    def log_evidence(self, problem: Problem, found: Any) -> Float[Array, ""] | None:
        """The log density of the data, in nats; `None` if the method does not estimate it."""
        return None

    def point_estimate(self, problem: Problem, found: Any) -> Vector | None:
        """The unknowns of one network, such as the mode. Diagnostics compare it with the draws.

        Returns `None` if there is no such network.
        """
        return None

    @property
    def leaves_out(self) -> bool:
        """Whether the method has already evaluated its draws on examples that it left out.

        If so, `infer` does not compare the draws with the mode on the training data. Even an exact
        posterior predicts the training data worse than the mode does.
        """
        return False

    def diagnosed(self, problem: Problem, found: Any) -> dict[str, Any]:
        """Fields of `bayes.Diagnostics`, by name, that the method computes from its result."""
        return {}


@filter_jit
def one_step(
    method: Method, problem: Problem, state: State, index: Array, key: PRNGKeyArray
) -> tuple[State, dict[str, Array]]:
    """A jitted step of one chain. `filter_eval_shape` and the loop share its trace."""
    state, record = method.step(problem, state, index, key)
    return without_weak_types((state, dict(record)))


def without_weak_types(tree: Any) -> Any:
    """Removes weak types from arrays, because the carry of a loop must have none."""
    return jtu.tree_map(
        lambda leaf: jax.lax.convert_element_type(leaf, jnp.result_type(leaf)), tree
    )


class Chains(Module):
    """The state of a run.

    - `step`: number of completed steps.
    - `states`: the states of the chains, with a leading axis of chains.
    - `records`: the kept records, with leading axes of chains and records.
    """

    step: int
    states: State
    records: dict[str, np.ndarray]


def with_plain_numbers(method: Method) -> Method:
    """Converts NumPy scalars to Python numbers, which `jit` treats as static."""
    return jtu.tree_map(lambda leaf: leaf.item() if isinstance(leaf, np.generic) else leaf, method)


def chosen(draws: Float[Array, "n d"], num: int, key: PRNGKeyArray) -> Float[Array, "S d"]:
    """Chooses `S = num` of `n` draws.

    Each draw occurs equally often, except that a random subset occurs once more.
    """
    size = draws.shape[0]
    order = jr.permutation(key, size)
    indices = jnp.concatenate([jnp.tile(order, num // size), order[: num % size]])
    return draws[jnp.sort(indices)]
