"""What a method of inference is, what it works on, and where its chains stand."""

import abc
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray, Shaped

from ... import Module, field, filter_jit
from ...ad import Mode, differentiate_with
from .._posterior import Data, Posterior, Unknowns

# --- What a method works on: the unknowns of a posterior as one vector in linked space ---


Vector = Float[Array, " d"]


class Problem(Module):
    """A posterior over a vector of `d` numbers in linked space.

    - `target`: the posterior that is to be found.
    - `mode`: how its density is differentiated; `None` for reverse mode.
    - `kept`: for each array of the model, whether `initial` surely keeps it.
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
        """`d`."""
        return sum(math.prod(each.shape) for each in self._structs)

    @property
    def dtype(self) -> Any:
        """That of the vector."""
        with jax.numpy_dtype_promotion("standard"):
            return jnp.result_type(*(each.dtype for each in self._structs))

    # --- vectors and trees ---

    def flatten(self, linked: Unknowns) -> Vector:
        """Unknowns in linked space as a vector."""
        return jnp.concatenate(
            [leaf.reshape(-1).astype(self.dtype) for leaf in jtu.tree_leaves(linked)]
        )

    def unflatten(self, vector: Vector) -> Unknowns:
        """A vector as unknowns in linked space."""
        sizes = [math.prod(struct.shape) for struct in self._structs]
        # The gradient of a split is a concatenation; that of slices adds up a vector for each.
        parts = jnp.split(vector, np.cumsum(sizes)[:-1])
        leaves = [
            part.reshape(struct.shape).astype(struct.dtype)
            for part, struct in zip(parts, self._structs, strict=True)
        ]
        return jtu.tree_unflatten(self._treedef, leaves)

    def unknowns(self, vector: Vector) -> Unknowns:
        """A vector as unknowns in standard space."""
        return self.target.constrain(self.unflatten(vector))[0]

    # --- densities ---

    def log_density(self, vector: Vector) -> Float[Array, ""]:
        """The log density of the posterior, in nats, up to a constant."""
        return self.batch_log_density(vector, None)

    def batch_log_density(self, vector: Vector, batch: Data | None) -> Float[Array, ""]:
        """Its estimate from a batch, or its value where there is none."""
        target, data = self.target, self.target.data if batch is None else batch
        return self.differentiable(
            lambda vector: target.minibatch_log_density(self.unflatten(vector), data, linked=True)
        )(vector)

    def differentiable(self, function: Any) -> Any:
        """A function of a vector, that is differentiated by the mode."""
        return function if self.mode is None else differentiate_with(function, self.mode)

    def batch(self, key: PRNGKeyArray, size: int | None) -> Data | None:
        """Examples drawn with replacement; `None` represents all of them."""
        if size is None:
            return None
        chosen = jr.randint(key, (size,), 0, self.target.num_data)
        return jtu.tree_map(lambda array: array[chosen], self.target.data)

    # --- where to begin ---

    def initial(self, key: PRNGKeyArray) -> Vector:
        """The parameters of the model as they are, and draws from the priors of the rest."""
        return self.flatten(self._initial(key))

    def _initial(self, key: PRNGKeyArray) -> Unknowns:
        return self.target.unconstrain(self.target.initial_keeping(self.kept, key))

    def redrawn(self, key: PRNGKeyArray) -> Vector:
        """Other parameters that are as likely at the start of training: each array is shuffled.

        The numbers of one array mostly come from one distribution, whichever it was.
        """
        initial_key, key = jr.split(key)
        linked = self._initial(initial_key)

        def shuffled(key: PRNGKeyArray, leaf: Array) -> Array:
            return jr.permutation(key, leaf.reshape(-1)).reshape(leaf.shape)

        model = with_keys(shuffled, key, linked.model)
        return self.flatten(Unknowns(model, linked.likelihood, linked.prior))

    def spread(self, vector: Vector) -> Vector:
        """For each number the standard deviation of the array that it is in; 1 where that is 0."""
        linked = self.unflatten(vector)
        return self.flatten(
            jtu.tree_map(lambda leaf: jnp.broadcast_to(_spread(leaf), leaf.shape), linked)
        )

    def dispersed(self, key: PRNGKeyArray) -> Vector:
        """Unknowns further apart than those of the posterior should be, for chains to begin with.

        Parameters of the model are shuffled and moved by as much as they differ among themselves;
        the others lie between -2 and 2 in linked space, as Stan has them.
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
    """How far the numbers of an array differ; 1 where they do not."""
    spread = jnp.std(leaf)
    return jnp.where(spread > 0, spread, 1)


def with_keys(function: Any, key: PRNGKeyArray, tree: Any, *others: Any) -> Any:
    """Maps over the leaves of trees of one structure, with a key for each."""
    treedef = jtu.tree_structure(tree)
    if not treedef.num_leaves:
        return tree
    keys = treedef.unflatten(list(jr.split(key, treedef.num_leaves)))
    return jtu.tree_map(function, keys, tree, *others)


State = Any
"""What a step changes: a pytree of arrays."""

Record = Mapping[str, Shaped[Array, "..."]]
"""What is kept of a step, by name."""

Step = tuple[State, Record]
"""What a step returns."""

Draws = Float[Array, "S d"]


class Method(Module):
    """How a posterior is found: pure functions over a state.

    `bayes.infer` runs `init`, `num_steps` times `step`, and `finish`, for `num_chains` chains side
    by side; `sample` then draws from what `finish` returned. All of them are traced, and work on
    the vector of unknowns in linked space that a `Problem` has. `S` draws have `d` numbers each.

    A step may record whatever helps. Some names mean something to `bayes.FittedPosterior`: `draw`,
    the place of a chain, gives R-hat, effective sample sizes and the draws of `to_arviz`;
    `log_density`, `acceptance`, `is_divergent` and `energy` go into its diagnostics; `loss` is what
    an optimiser makes smaller.

    A method of your own derives from `Method` and has `num_steps`, `init`, `step` and `sample`,
    and `finish` where the last state is not yet what was found. A state is the carry of a loop, so
    no step may change its shapes or dtypes.

    One of eqxlike's is a class in `bayes/_methods`. It derives from `MarkovChain`, and has `init`
    and `step`, if its draws are the places that chains visit; from `Descent` if an optimiser makes
    its steps. Export it in `bayes/__init__.py`, and add it to `METHODS` of
    `tests/bayes/methods/cases.py`: every law runs.
    """

    @property
    def num_chains(self) -> int:
        """How many independent runs there are, each with a state of its own."""
        return 1

    @property
    @abc.abstractmethod
    def num_steps(self) -> int:
        """The number of steps of a run."""

    @property
    def num_dropped(self) -> int:
        """The number of steps at the beginning of which no record is kept."""
        return 0

    @property
    def thinning(self) -> int:
        """Of how many steps after those one record is kept."""
        return 1

    @property
    def is_descent(self) -> bool:
        """Whether `init` only chooses a place, and an optimiser makes the steps of each chain."""
        return False

    def runs_apart(self, problem: Problem) -> bool:
        """Whether chains run one after another, unless `chain_method` is given."""
        return False

    def check(self, problem: Problem) -> None:
        """Raises `ValueError` or `TypeError` if the method cannot serve the target."""

    def doubts(self, problem: Problem) -> tuple[str, ...]:
        """What may make a poor posterior of this target, in words: warnings before the run."""
        return ()

    @abc.abstractmethod
    def init(self, problem: Problem, key: PRNGKeyArray) -> State:
        """The state of a chain before its first step."""

    @abc.abstractmethod
    def step(self, problem: Problem, state: State, index: Array, key: PRNGKeyArray) -> Step:
        """One step of one chain.

        **Arguments:**

        - `index`: the number of the step, from 0.
        - `key`: that of this step alone.
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
        """Several steps of several chains; by default `step` in a loop, the chains in one batch.

        A method that overrides it also has `step`, which says what its records are.

        **Arguments:**

        - `states`: with a leading axis of chains.
        - `keys`: of the chains. Step `i` has the key `jax.random.fold_in(key, i)`.
        - `first`, `count`: the number of the first step, and how many steps there are.
        - `buffers`: records, with leading axes of chains and of at least `count` steps.

        **Returns:** the last states, and the buffers, whose first `count` records are of the steps.
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
        # A batch of one would take both branches of each condition.
        one = jtu.tree_map(lambda each: each[0], (states, keys, buffers))
        return jtu.tree_map(lambda each: each[None], of_chain(*one))

    def finish(self, problem: Problem, states: State, records: Record, key: PRNGKeyArray) -> Any:
        """What draws are made from; by default the last states.

        **Arguments:**

        - `states`: the last ones, with a leading axis of chains.
        - `records`: what was kept, with leading axes of chains and of records.
        """
        return states

    @abc.abstractmethod
    def sample(self, problem: Problem, found: Any, num: int, key: PRNGKeyArray) -> Draws:
        """Draws from the posterior, `S = num` of them.

        **Arguments:**

        - `found`: what `finish` returned.
        """

    def num_found(self, found: Any) -> int | None:
        """How many draws there are; `None` where new ones can be made without end."""
        return None

    # --- what some methods have of their own ---

    def noise(self, num: int, key: PRNGKeyArray) -> Any:
        """What each of `num` networks draws by itself, such as masks; `None` for nothing."""
        return None

    def network(self, problem: Problem, unknowns: Unknowns) -> Any:
        """The network with these unknowns, a function of one input."""
        return problem.target.model(unknowns)

    def outputs(
        self, problem: Problem, found: Any, draws: Unknowns, x: Any, key: PRNGKeyArray
    ) -> Shaped[Array, "S B ..."]:
        """What the networks return for `B` inputs.

        **Arguments:**

        - `draws`: unknowns with a leading axis of `S` draws.
        - `x`: inputs with a leading axis of `B` examples.
        """

        def of_one(unknowns: Unknowns) -> Any:
            return jax.vmap(self.network(problem, unknowns))(x)

        return jax.vmap(of_one)(draws)

    def log_evidence(self, problem: Problem, found: Any) -> Float[Array, ""] | None:
        """The log of the density of the data, in nats; `None` where the method has none."""
        return None

    def point_estimate(self, problem: Problem, found: Any) -> Vector | None:
        """The unknowns of one network, such as the mode, with whose predictions those of draws are
        compared; `None` for no comparison.
        """
        return None

    @property
    def remedy(self) -> str:
        """What to try where draws predict worse than it, in words."""
        return "Another method may help."

    @property
    def leaves_out(self) -> bool:
        """Whether the method judged its draws by examples that it left out.

        `infer` then does not compare the draws with the mode on the training data: there, an exact
        posterior predicts worse too.
        """
        return False

    def diagnosed(self, problem: Problem, found: Any) -> dict[str, Any]:
        """Fields of `bayes.Diagnostics` that what was found says itself, by name."""
        return {}


@filter_jit
def one_step(
    method: Method, problem: Problem, state: State, index: Array, key: PRNGKeyArray
) -> tuple[State, dict[str, Array]]:
    """A step of one chain. Traced once: for its shapes, and in the loop."""
    state, record = method.step(problem, state, index, key)
    return without_weak_types((state, dict(record)))


def without_weak_types(tree: Any) -> Any:
    """Arrays whose types a loop can carry: without the weakness of numbers of Python."""
    return jtu.tree_map(
        lambda leaf: jax.lax.convert_element_type(leaf, jnp.result_type(leaf)), tree
    )


class Chains(Module):
    """Where a run stands.

    - `step`: how many steps were made.
    - `states`: of the chains, with a leading axis.
    - `records`: what was kept, each with leading axes of chains and of records.
    """

    step: int
    states: State
    records: dict[str, np.ndarray]


def with_plain_numbers(method: Method) -> Method:
    """The method with Python numbers in place of NumPy's, which `jax.jit` would trace."""
    return jtu.tree_map(lambda leaf: leaf.item() if isinstance(leaf, np.generic) else leaf, method)


def chosen(draws: Float[Array, "n d"], num: int, key: PRNGKeyArray) -> Float[Array, "S d"]:
    """`S = num` of `n` draws, each as often as the others, or once more.

    Those that come once more are picked at random.
    """
    size = draws.shape[0]
    order = jr.permutation(key, size)
    indices = jnp.concatenate([jnp.tile(order, num // size), order[: num % size]])
    return draws[jnp.sort(indices)]
