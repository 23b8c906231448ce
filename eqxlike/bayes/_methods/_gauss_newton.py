"""Second derivatives of a log density at its mode: Gauss-Newton matrix and prior Hessian.

The generalised Gauss-Newton matrix of the likelihood is `sum_n J_n^T L_n J_n`. `J_n` is the
Jacobian of the outputs for example `n`. `L_n` is the Hessian of the example's negative log
likelihood with respect to the outputs. The Gauss-Newton matrix is the Hessian without the curvature
of the network (Schraudolph, 2002, "Fast Curvature Matrix-Vector Products for Second-Order Gradient
Descent").
"""

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, Bool, Float

from ... import Module, ad, field
from .._method import Problem
from .._posterior import output_of, struct_of_example

# --- Positions of arrays in the vector of unknowns ---


class Part(NamedTuple):
    """One array of unknowns, a contiguous part of the vector from `start` to `stop`.

    - `path`: the path of the array.
    - `layer`: the path of the layer that contains the array.
    """

    kind: Literal["model", "likelihood", "prior"]
    path: str
    layer: str
    struct: jax.ShapeDtypeStruct
    start: int

    @property
    def size(self) -> int:
        return self.struct.size

    @property
    def stop(self) -> int:
        return self.start + self.size


def parts_of(problem: Problem) -> tuple[Part, ...]:
    """The arrays of a problem in the order of the vector: model, likelihood, prior."""
    vector = jax.ShapeDtypeStruct((problem.size,), jnp.dtype(problem.dtype))
    linked = jax.eval_shape(problem.unflatten, vector)
    parts, start = [], 0
    for kind in ("model", "likelihood", "prior"):
        for path, leaf in jtu.tree_leaves_with_path(getattr(linked, kind)):
            name, layer = (jtu.keystr(each).removeprefix(".") for each in (path, path[:-1]))
            parts.append(Part(kind, name, layer, leaf, start))
            start = parts[-1].stop
    return tuple(parts)


# --- A posterior around its mode, as a function of the varying unknowns ---


# Memory limit for one block of a pass over the data.
_BLOCK_BYTES = 64 * 2**20


class AroundMode(Module):
    """A posterior near its mode. `k` of its `d` unknowns vary; the others stay at the mode.

    - `mode`: the mode, a vector of all unknowns.
    - `parts`: the varying arrays in the order of the vector: some or all arrays of the model, and
      all arrays of the likelihood and the prior.
    """

    problem: Problem
    mode: Float[Array, " d"]
    parts: tuple[Part, ...] = field(static=True)

    @property
    def indices(self) -> np.ndarray:
        """The indices of the varying unknowns in the vector."""
        return np.concatenate([np.arange(part.start, part.stop) for part in self.parts])

    @property
    def centre(self) -> Float[Array, " k"]:
        """The varying unknowns at the mode."""
        return self.mode[self.indices]

    def place(self, kind: str) -> slice:
        """The slice of the varying unknowns that belong to `kind`: model, likelihood or prior."""
        places = [self.place_of(part) for part in self.parts if part.kind == kind]
        return slice(places[0].start, places[-1].stop) if places else slice(0, 0)

    def place_of(self, part: Part) -> slice:
        """The slice of the varying unknowns that belong to one array."""
        start = sum(each.size for each in self.parts[: self.parts.index(part)])
        return slice(start, start + part.size)

    def vector(self, varying: Float[Array, " k"]) -> Float[Array, " d"]:
        """The vector of all unknowns, given the varying unknowns."""
        return self.mode.at[self.indices].set(varying)

    @property
    def output(self) -> jax.ShapeDtypeStruct:
        """The shape and dtype of the network's output for one input."""
        target = self.problem.target
        return output_of(target.network, struct_of_example(target.data[0]))

    def batch_size(self, num_bytes: int, num: int) -> int | None:
        """Batch size for `num` examples.

        Returns `None` if there are many outputs, because `positive_root` must not be batched then.
        """
        return None if self.output.size > SMALL else block_size(num_bytes, num)

    # --- functions of the varying unknowns ---

    def outputs(self, varying: Float[Array, " k"], x: Any) -> Float[Array, " C"]:
        """The `C` outputs for one input."""
        network = self.problem.target.model(self.problem.unknowns(self.vector(varying)))
        return network(x).reshape(-1).astype(self.mode.dtype)

    def jacobian(self, x: Any) -> tuple[Float[Array, "C k"], Float[Array, " C"]]:
        """The Jacobian of the outputs for one input, and the outputs, at the mode."""

        def outputs(varying: Float[Array, " k"]) -> tuple[Array, Array]:
            output = self.outputs(varying, x)
            return output, output

        mode = ad.Auto() if self.problem.mode is None else self.problem.mode
        return ad.jacobian(outputs, mode, has_aux=True)(self.centre)

    @property
    def may_have_features(self) -> bool:
        """Whether the varying arrays may be a last layer with many outputs, and a row for each
        output.
        """
        num = self.output.size
        kinds = {(part.kind, *part.struct.shape[:1]) for part in self.parts}
        return num > SMALL and kinds == {("model", num)} and self.problem.mode is None

    @property
    def places_by_output(self) -> np.ndarray:
        """For each of `C` outputs, the indices of its own `f` numbers in the varying unknowns."""
        places = [np.arange(self.centre.size)[self.place_of(part)] for part in self.parts]
        return np.concatenate([each.reshape(self.output.size, -1) for each in places], axis=1)

    def features(self, x: Any) -> tuple[Float[Array, " f"], Float[Array, " C"], Bool[Array, ""]]:
        """The derivatives of each output with respect to the `f = k / C` numbers of its own rows.

        **Returns:** the features, which are these derivatives for the first output; the outputs;
        and True if the features determine the whole Jacobian. This is true if all outputs have the
        same features, and no output depends on the rows of another output. One product with random
        numbers tests this. The test misses a dependence with probability zero (Freivalds, 1977,
        "Probabilistic Machines Can Use Less Running Time").
        """
        outputs, pull = jax.vjp(lambda varying: self.outputs(varying, x), self.centre)
        numbers = jnp.asarray(np.random.default_rng(0).uniform(1, 2, outputs.shape), outputs.dtype)
        rows = pull(numbers)[0][self.places_by_output] / numbers[:, None]
        tolerance = 8 * jnp.finfo(rows.dtype).eps * jnp.abs(rows[:1])
        return rows[0], outputs, jnp.all(jnp.abs(rows - rows[:1]) <= tolerance)

    def negative_log_prior(self, varying: Float[Array, " k"]) -> Float[Array, ""]:
        """The negative log prior, as a density in linked space."""
        target = self.problem.target
        unknowns, log_det = target.constrain(self.problem.unflatten(self.vector(varying)))
        return -(target.log_prior(unknowns) + log_det)

    def log_likelihood(self) -> Float[Array, ""]:
        """The log likelihood of the data at the mode."""
        target = self.problem.target
        unknowns = self.problem.unknowns(self.mode)

        def of_example(data: Any) -> Array:
            one = jtu.tree_map(lambda leaf: leaf[None], data)
            return target.log_likelihood(unknowns, one)[0]

        size = min(256, target.num_data)
        return jnp.sum(jax.lax.map(of_example, target.data, batch_size=size))


def block_size(num_bytes: int, num: int) -> int:
    """Batch size for `num` items that need `num_bytes` each."""
    return max(1, min(num, _BLOCK_BYTES // max(1, num_bytes)))


def sum_over_rows(
    around: AroundMode, of_rows: Callable[[Float[Array, "r k"]], Any]
) -> tuple[Any, Float[Array, "k m"]]:
    """Sums a function of the Gauss-Newton rows over the data.

    **Arguments:**

    - `of_rows`: function that takes the rows `R_n J_n` of several examples, where `R_n^T R_n =
      L_n`. The Gauss-Newton matrix is the sum of the outer products of these rows.

    **Returns:** the sum, and a `k x m` block of the Hessian of the negative log likelihood. The
    block has a row for each varying unknown, and a column for each unknown of the likelihood.
    """
    place = around.place("likelihood")
    own = around.centre[place]

    def of_example(x: Any, y: Any) -> tuple[Array, Array]:
        jacobian, output = around.jacobian(x)
        hessian = _hessian(around, jnp.concatenate([output, own]), y)
        size = output.shape[0]
        columns = jacobian.T @ hessian[:size, size:]
        columns = columns.at[place].add(hessian[size:, size:])
        return positive_root(hessian[:size, :size]).T @ jacobian, columns

    def of_block(block: tuple[Array, Array], is_counted: Float[Array, " b"]) -> tuple[Any, Array]:
        rows, columns = block
        rows = (rows * is_counted[:, None, None]).reshape(-1, rows.shape[-1])
        return of_rows(rows), jnp.einsum("b,bkm->km", is_counted, columns)

    return _sum_over_data(around, of_example, of_block)


def sum_over_features(around: AroundMode) -> tuple[Float[Array, "f f C C"], Float[Array, ""]]:
    """Sums over the data for a last layer.

    The Gauss-Newton matrix of a last layer is a sum of Kronecker products.

    **Returns:** two values. The first is the sum over examples of `outer(features, features)` times
    the Hessian of the loss with respect to the outputs, for each pair of features and each pair of
    outputs. The second is the number of examples whose features do not determine the whole
    Jacobian.
    """

    def of_example(x: Any, y: Any) -> tuple[Array, Array, Array]:
        features, output, is_whole = around.features(x)
        return features, _positive_part(_hessian(around, output, y)), is_whole

    def of_block(block: tuple[Array, Array, Array], is_counted: Array) -> tuple[Array, Array]:
        features, hessians, is_whole = block
        squares = is_counted[:, None, None] * features[:, :, None] * features[:, None]
        products = jnp.tensordot(squares, hessians, (0, 0))
        return products, jnp.sum(jnp.where(is_whole, 0, is_counted))

    return _sum_over_data(around, of_example, of_block)


def _sum_over_data(around: AroundMode, of_example: Callable, of_block: Callable) -> Any:
    """Sums over the data in blocks, so that memory does not grow with the number of examples.

    **Arguments:**

    - `of_example`: a function of `x` and `y`.
    - `of_block`: function that returns the sum over a block. Its arguments are the results of
      `of_example` for the `b` examples of the block, and a weight for each example, 0 for padding.
    """
    data, num = around.problem.target.data, around.problem.target.num_data
    of_example = jax.jit(of_example)  # Traced once, for the shapes below and for the loop.

    def from_first(first: Array) -> Any:
        index = first + jnp.arange(size)
        is_counted = (index < num).astype(around.mode.dtype)
        block = jtu.tree_map(lambda leaf: leaf[jnp.minimum(index, num - 1)], data)
        if around.output.size > SMALL:
            return of_block(jax.lax.map(lambda pair: of_example(*pair), block), is_counted)
        return of_block(jax.vmap(of_example)(*block), is_counted)

    structs = jax.eval_shape(of_example, *jtu.tree_map(lambda leaf: leaf[0], data))
    size = block_size(2 * sum(each.dtype.itemsize * each.size for each in structs), num)
    zero = jtu.tree_map(jnp.zeros_like, jax.eval_shape(from_first, jnp.asarray(0)))

    def add(total: Any, first: Array) -> tuple[Any, None]:
        return jtu.tree_map(jnp.add, total, from_first(first)), None

    return jax.lax.scan(add, zero, size * jnp.arange(math.ceil(num / size)))[0]


def _hessian(around: AroundMode, outputs_and_own: Array, y: Any) -> Float[Array, "c c"]:
    """Hessian of an example's NLL with respect to its outputs and the likelihood's unknowns."""
    target, place = around.problem.target, around.place("likelihood")
    struct = around.output

    def negative_log_prob(values: Array) -> Array:
        output = values[: struct.size].reshape(struct.shape).astype(struct.dtype)
        varying = around.centre.at[place].set(values[struct.size :])
        own = around.problem.unknowns(around.vector(varying)).likelihood
        return -target.likelihood.log_prob(output, own, y).astype(values.dtype)

    return jax.hessian(negative_log_prob)(outputs_and_own)


SMALL = 16
"""Up to this many outputs, examples are batched, and matrix roots are computed from eigenvalues."""


def positive_root(matrix: Float[Array, "C C"]) -> Float[Array, "C C"]:
    """A root `A` such that `A A^T` is `matrix` with its negative eigenvalues set to 0.

    For large matrices, `A` is a Cholesky factor, because eigenvalues of a 500 x 500 matrix take
    thirty times as long. The error of the factor is about the machine epsilon times the
    greatest eigenvalue. If the factorisation fails, eigenvalues are used. Do not use `vmap` for
    large matrices, because it would compute both the factor and the eigenvalues.
    """
    size = matrix.shape[0]
    if size == 1:
        return jnp.sqrt(jnp.maximum(matrix, 0))

    def by_eigenvalues() -> Array:
        values, vectors = jnp.linalg.eigh(matrix)
        return (vectors * jnp.sqrt(jnp.maximum(values, 0))[None]) @ vectors.T

    if size <= SMALL:
        return by_eigenvalues()
    rounding = 10 * jnp.finfo(matrix.dtype).eps * jnp.trace(matrix)
    factor = jnp.linalg.cholesky(matrix + rounding * jnp.eye(size, dtype=matrix.dtype))
    return jax.lax.cond(jnp.all(jnp.isfinite(factor)), lambda: factor, by_eigenvalues)


def _positive_part(matrix: Float[Array, "C C"]) -> Float[Array, "C C"]:
    """The symmetric matrix with negative eigenvalues set to 0.

    A diagonally dominant matrix, such as the Hessian of a softmax, has no negative eigenvalues, and
    is returned unchanged.
    """

    def by_root() -> Array:
        root = positive_root(matrix)
        return root @ root.T

    diagonal = jnp.diagonal(matrix)
    rounding = 10 * jnp.finfo(matrix.dtype).eps * jnp.sum(diagonal)
    is_dominant = jnp.all(2 * diagonal - jnp.sum(jnp.abs(matrix), axis=1) >= -rounding)
    return jax.lax.cond(is_dominant, lambda: matrix, by_root)


# --- Second derivatives of the negative log prior in linked space ---


def prior_hessian(around: AroundMode, place: slice) -> Float[Array, "n n"]:
    """The Hessian of the negative log prior for a slice of the varying unknowns."""
    size = around.centre.shape[0]

    def column(index: Array) -> Array:
        return _product(around, jax.nn.one_hot(index, size, dtype=around.mode.dtype))[place]

    batch_size = block_size(4 * around.mode.nbytes, place.stop - place.start)
    return jax.lax.map(column, jnp.arange(place.start, place.stop), batch_size=batch_size)


def prior_diagonal(around: AroundMode, part: Part) -> Float[Array, " n"]:
    """The diagonal of the Hessian of the negative log prior for one array."""
    place = around.place_of(part)
    if part.kind == "model":
        priors = around.problem.target.parameter_priors(around.problem.unknowns(around.mode))
        is_diagonal = priors[part.path].event_shape == ()
    else:
        is_diagonal = part.size == 1
    if not is_diagonal:
        return jnp.diagonal(prior_hessian(around, place))
    return _product(around, jnp.zeros_like(around.centre).at[place].set(1))[place]


def _product(around: AroundMode, vector: Float[Array, " k"]) -> Float[Array, " k"]:
    gradient = jax.grad(around.negative_log_prior)
    return jax.jvp(gradient, (around.centre,), (vector,))[1]
