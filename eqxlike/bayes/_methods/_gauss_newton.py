"""Second derivatives of a log density at its mode, by likelihood and by prior.

The generalised Gauss-Newton matrix of the likelihood is `sum_n J_n^T L_n J_n`, with `J_n` the
Jacobian of the outputs for an example and `L_n` the Hessian of minus its log density in the
outputs: the Hessian but for the curvature of the network (Schraudolph, 2002, "Fast Curvature
Matrix-Vector Products for Second-Order Gradient Descent").
"""

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, Float

from ... import ad
from ..._module import Module, field
from .._inference._method import Problem
from .._posterior import output_of, struct_of_example

# --- Where each array of unknowns stands in their vector ---


class Part(NamedTuple):
    """One array of unknowns: its numbers stand together in the vector, from `start`.

    - `layer`: the path of what holds it.
    """

    kind: Literal["model", "likelihood", "prior"]
    path: str
    layer: str
    shape: tuple[int, ...]
    start: int

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        return self.start + self.size


def parts_of(problem: Problem) -> tuple[Part, ...]:
    """The arrays of a problem in the order of the vector: first those of the model."""
    vector = jax.ShapeDtypeStruct((problem.size,), jnp.dtype(problem.dtype))
    linked = jax.eval_shape(problem.unflatten, vector)
    parts, start = [], 0
    for kind in ("model", "likelihood", "prior"):
        for path, leaf in jtu.tree_leaves_with_path(getattr(linked, kind)):
            name, layer = (jtu.keystr(each).removeprefix(".") for each in (path, path[:-1]))
            parts.append(Part(kind, name, layer, leaf.shape, start))
            start = parts[-1].stop
    return tuple(parts)


# --- A posterior around its mode, as a function of those unknowns that are uncertain ---


# Bytes that a pass over the data may hold at once.
_BLOCK_BYTES = 64 * 2**20


class AroundMode(Module):
    """A posterior near its mode. `k` of its `d` unknowns vary, the others stay at the mode.

    - `mode`: where the density is greatest.
    - `parts`: the arrays that vary, in the order of the vector: some of the model, and all others.
    """

    problem: Problem
    mode: Float[Array, " d"]
    parts: tuple[Part, ...] = field(static=True)

    @property
    def indices(self) -> np.ndarray:
        """The places in the vector of the `k` unknowns."""
        return np.concatenate([np.arange(part.start, part.stop) for part in self.parts])

    @property
    def centre(self) -> Float[Array, " k"]:
        """Their values at the mode."""
        return self.mode[self.indices]

    def place(self, kind: str) -> slice:
        """Where the unknowns of the model, the likelihood or the prior stand among the `k`."""
        places = [self.place_of(part) for part in self.parts if part.kind == kind]
        return slice(places[0].start, places[-1].stop) if places else slice(0, 0)

    def place_of(self, part: Part) -> slice:
        """Where those of one array stand among the `k`."""
        start = sum(each.size for each in self.parts[: self.parts.index(part)])
        return slice(start, start + part.size)

    def vector(self, varying: Float[Array, " k"]) -> Float[Array, " d"]:
        """The vector of all unknowns."""
        return self.mode.at[self.indices].set(varying)

    @property
    def output(self) -> jax.ShapeDtypeStruct:
        """The shape and dtype of what the network returns for one input."""
        target = self.problem.target
        return output_of(target.network, struct_of_example(target.data[0]))

    # --- functions of what varies ---

    def jacobian(self, x: Any) -> tuple[Float[Array, "C k"], Float[Array, " C"]]:
        """The derivatives of the `C` outputs for one input, and the outputs, at the mode."""
        target, differentiation = self.problem.target, self.problem.mode

        def outputs(varying: Float[Array, " k"]) -> tuple[Array, Array]:
            network = target.model(self.problem.unknowns(self.vector(varying)))
            output = network(x).reshape(-1).astype(self.mode.dtype)
            return output, output

        differentiation = ad.Auto() if differentiation is None else differentiation
        return ad.jacobian(outputs, differentiation, has_aux=True)(self.centre)

    def negative_log_prior(self, varying: Float[Array, " k"]) -> Float[Array, ""]:
        """Minus the log prior of the unknowns, a density in linked space."""
        target = self.problem.target
        unknowns, log_det = target.constrain(self.problem.unflatten(self.vector(varying)))
        return -(target.log_prior(unknowns) + log_det)

    def log_likelihood(self) -> Float[Array, ""]:
        """The log density of the data at the mode."""
        target = self.problem.target
        unknowns = self.problem.unknowns(self.mode)

        def of_example(data: Any) -> Array:
            one = jtu.tree_map(lambda leaf: leaf[None], data)
            return target.log_likelihood(unknowns, one)[0]

        size = min(256, target.num_data)
        return jnp.sum(jax.lax.map(of_example, target.data, batch_size=size))


def block_size(num_bytes: int, num: int) -> int:
    """How many of `num` things of `num_bytes` each are worked on at once."""
    return max(1, min(num, _BLOCK_BYTES // max(1, num_bytes)))


def sum_over_rows(
    around: AroundMode, of_rows: Callable[[Float[Array, "r k"]], Any]
) -> tuple[Any, Float[Array, "k m"]]:
    """Sums over the data, in blocks, so that memory does not grow with the number of examples.

    **Arguments:**

    - `of_rows`: what is to be summed: a function of some rows `R_n J_n`, where `R_n^T R_n = L_n`.
      The matrix is the sum of their outer products.

    **Returns:** the sum, and the `k x m` block of second derivatives of minus the log likelihood
    between all unknowns and those of the likelihood.
    """
    data, num = around.problem.target.data, around.problem.target.num_data
    place = around.place("likelihood")
    own = around.centre[place]

    @jax.jit  # Traced once, for the shapes below and for the loop.
    def of_example(x: Any, y: Any) -> tuple[Array, Array]:
        jacobian, output = around.jacobian(x)
        hessian = _hessian(around, jnp.concatenate([output, own]), y)
        size = output.shape[0]
        columns = jacobian.T @ hessian[:size, size:]
        columns = columns.at[place].add(hessian[size:, size:])
        return positive_root(hessian[:size, :size]).T @ jacobian, columns

    def of_block(first: Array) -> tuple[Any, Array]:
        index = first + jnp.arange(size)
        is_counted = (index < num).astype(around.mode.dtype)
        block = jtu.tree_map(lambda leaf: leaf[jnp.minimum(index, num - 1)], data)
        if around.output.size > SMALL:
            rows, columns = jax.lax.map(lambda pair: of_example(*pair), block)
        else:
            rows, columns = jax.vmap(of_example)(*block)
        rows = (rows * is_counted[:, None, None]).reshape(-1, rows.shape[-1])
        return of_rows(rows), jnp.einsum("b,bkm->km", is_counted, columns)

    one = jtu.tree_map(lambda leaf: leaf[0], data)
    rows, columns = jax.eval_shape(of_example, *one)
    size = block_size(rows.dtype.itemsize * (2 * rows.size + columns.size), num)
    zero = jtu.tree_map(
        lambda struct: jnp.zeros(struct.shape, struct.dtype),
        jax.eval_shape(of_block, jnp.asarray(0)),
    )

    def add(total: Any, first: Array) -> tuple[Any, None]:
        return jtu.tree_map(jnp.add, total, of_block(first)), None

    return jax.lax.scan(add, zero, size * jnp.arange(math.ceil(num / size)))[0]


def _hessian(around: AroundMode, outputs_and_own: Array, y: Any) -> Float[Array, "c c"]:
    """That of minus the log density of one example in outputs and unknowns of the likelihood."""
    target, place = around.problem.target, around.place("likelihood")
    struct = around.output

    def negative_log_prob(values: Array) -> Array:
        output = values[: struct.size].reshape(struct.shape).astype(struct.dtype)
        varying = around.centre.at[place].set(values[struct.size :])
        own = around.problem.unknowns(around.vector(varying)).likelihood
        return -target.likelihood.log_prob(output, own, y).astype(values.dtype)

    return jax.hessian(negative_log_prob)(outputs_and_own)


SMALL = 16
"""Up to so many outputs, roots of matrices are taken by eigenvalues, for a batch of examples."""


def positive_root(matrix: Float[Array, "C C"]) -> Float[Array, "C C"]:
    """`A` with `A A^T` a symmetric matrix without its negative eigenvalues.

    Large matrices have Cholesky factors, up to rounding errors of their greatest eigenvalue:
    eigenvalues of 500 x 500 take thirty times as long. Do not batch them, which would compute both.
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


# --- Second derivatives of minus the log prior, that of the link included ---


def prior_hessian(around: AroundMode, place: slice) -> Float[Array, "n n"]:
    """The Hessian by the unknowns of one place among those that vary."""
    size = around.centre.shape[0]

    def column(index: Array) -> Array:
        return _product(around, jax.nn.one_hot(index, size, dtype=around.mode.dtype))[place]

    batch_size = block_size(4 * around.mode.nbytes, place.stop - place.start)
    return jax.lax.map(column, jnp.arange(place.start, place.stop), batch_size=batch_size)


def prior_diagonal(around: AroundMode, part: Part) -> Float[Array, " n"]:
    """The diagonal of the Hessian by the unknowns of one array."""
    place = around.place_of(part)
    if not _is_elementwise(around, part):
        return jnp.diagonal(prior_hessian(around, place))
    return _product(around, jnp.zeros_like(around.centre).at[place].set(1))[place]


def _product(around: AroundMode, vector: Float[Array, " k"]) -> Float[Array, " k"]:
    gradient = jax.grad(around.negative_log_prior)
    return jax.jvp(gradient, (around.centre,), (vector,))[1]


def _is_elementwise(around: AroundMode, part: Part) -> bool:
    """Whether the prior takes the numbers of an array as independent: its block is diagonal."""
    if part.kind != "model":
        return part.size == 1
    priors = around.problem.target.parameter_priors(around.problem.unknowns(around.mode))
    return priors[part.path].event_shape == ()
