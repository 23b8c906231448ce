"""Lineax: every solver and every operator, with derivatives in both modes and in batches."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from jax.flatten_util import ravel_pytree

from tests.downstream.registry import Programs

programs = Programs()

SIZE = 4
GENERATOR = np.random.default_rng(0)
SQUARE = GENERATOR.normal(size=(SIZE, SIZE)) + 4 * np.eye(SIZE)
POSITIVE = SQUARE @ SQUARE.T
TALL = GENERATOR.normal(size=(6, SIZE))
WIDE = TALL.T
DEFICIENT = TALL @ np.diag([1.0, 1.0, 1.0, 0.0])
ONE_DIAGONAL = GENERATOR.normal(size=SIZE) + 3
BANDS = {
    "diagonal": ONE_DIAGONAL,
    "lower": GENERATOR.normal(size=SIZE - 1),
    "upper": GENERATOR.normal(size=SIZE - 1),
}
RIGHT = GENERATOR.normal(size=6)


@eqx.filter_jit
def solved(make, solver, parameters, vector, options=None):
    """The solution of a linear system and its derivatives, also for batches of right-hand sides
    and of operators.

    `make(parameters)` returns the operator.
    """

    def solution(parameters, vector):
        return lx.linear_solve(make(parameters), vector, solver, options=options).value

    def loss(parameters, vector):
        return jnp.sum(jnp.sin(ravel_pytree(solution(parameters, vector))[0]))

    tangents = jax.tree_util.tree_map(jnp.cos, (parameters, vector))
    value, tangent = jax.jvp(solution, (parameters, vector), tangents)
    gradients = jax.grad(loss, (0, 1))(parameters, vector)
    many = lambda tree: jax.tree_util.tree_map(lambda x: jnp.stack([x, 1.1 * x, x + 0.1]), tree)
    return {
        "value": value,
        "jvp": tangent,
        "gradients": gradients,
        "vectors": jax.vmap(solution, (None, 0))(parameters, many(vector)),
        "gradients of a batch": jax.vmap(jax.grad(loss, (0, 1)))(many(parameters), many(vector)),
    }


def matrix(parameters, tags=()):
    return lx.MatrixLinearOperator(parameters, tags)


def positive(parameters):
    return lx.MatrixLinearOperator(parameters @ parameters.T, lx.positive_semidefinite_tag)


def negative(parameters):
    return lx.MatrixLinearOperator(-parameters @ parameters.T, lx.negative_semidefinite_tag)


def lower_triangle(parameters):
    return lx.MatrixLinearOperator(jnp.tril(parameters), lx.lower_triangular_tag)


def unit_upper_triangle(parameters):
    triangle = jnp.triu(parameters, 1) + jnp.eye(SIZE)
    return lx.MatrixLinearOperator(triangle, (lx.upper_triangular_tag, lx.unit_diagonal_tag))


def three_bands(parameters):
    return lx.TridiagonalLinearOperator(
        parameters["diagonal"], parameters["lower"], parameters["upper"]
    )


def add_solver(name, solver, make, parameters, vector, sampled=False, **options):
    def run():
        return solved(make, solver, jnp.asarray(parameters), jnp.asarray(vector), **options)

    programs.add(run, f"solver {name}", sampled)


add_solver("LU", lx.LU(), matrix, SQUARE, RIGHT[:SIZE], sampled=True)
add_solver("QR", lx.QR(), matrix, TALL, RIGHT, sampled=True)
add_solver("QR of a wide matrix", lx.QR(), matrix, WIDE, RIGHT[:SIZE])
add_solver("SVD", lx.SVD(), matrix, DEFICIENT, RIGHT)
add_solver("Cholesky", lx.Cholesky(), positive, SQUARE, RIGHT[:SIZE], sampled=True)
add_solver("Cholesky, negative", lx.Cholesky(), negative, SQUARE, RIGHT[:SIZE])
add_solver("Triangular", lx.Triangular(), lower_triangle, SQUARE, RIGHT[:SIZE])
add_solver("Triangular, unit", lx.Triangular(), unit_upper_triangle, SQUARE, RIGHT[:SIZE])
add_solver("Diagonal", lx.Diagonal(), lx.DiagonalLinearOperator, ONE_DIAGONAL, RIGHT[:SIZE])
add_solver("Normal of Cholesky", lx.Normal(lx.Cholesky()), matrix, TALL, RIGHT)
add_solver("Normal of CG", lx.Normal(lx.CG(1e-12, 1e-12)), matrix, TALL, RIGHT)
add_solver("CG", lx.CG(1e-12, 1e-12), positive, SQUARE, RIGHT[:SIZE], sampled=True)
add_solver("CG, never anew", lx.CG(1e-12, 1e-12, stabilise_every=None), positive, SQUARE, RIGHT[:4])
add_solver("BiCGStab", lx.BiCGStab(1e-12, 1e-12), matrix, SQUARE, RIGHT[:SIZE])
add_solver("GMRES", lx.GMRES(1e-12, 1e-12), matrix, SQUARE, RIGHT[:SIZE], sampled=True)
add_solver("GMRES, restarted", lx.GMRES(1e-10, 1e-10, restart=3), matrix, SQUARE, RIGHT[:SIZE])
add_solver("LSMR", lx.LSMR(1e-12, 1e-12), matrix, TALL, RIGHT, sampled=True)
for well_posed in (True, False, None):
    chosen = lx.AutoLinearSolver(well_posed=well_posed)
    add_solver(f"Auto, square, {well_posed}", chosen, matrix, SQUARE, RIGHT[:SIZE])
add_solver("Auto, tall", lx.AutoLinearSolver(well_posed=None), matrix, TALL, RIGHT)
add_solver("Auto, positive", lx.AutoLinearSolver(well_posed=True), positive, SQUARE, RIGHT[:SIZE])


@programs.sample
def solver_tridiagonal():
    bands = jax.tree_util.tree_map(jnp.asarray, BANDS)
    return solved(three_bands, lx.Tridiagonal(), bands, jnp.asarray(RIGHT[:SIZE]))


def nonlinear(x, args):
    return jnp.tanh(args @ x) + 3 * x


def jacobian(parameters, jac=None):
    return lx.JacobianLinearOperator(nonlinear, jnp.ones(SIZE) / 3, parameters, jac=jac)


def function(parameters):
    struct = jax.ShapeDtypeStruct((SIZE,), parameters.dtype)
    return lx.FunctionLinearOperator(lambda x: parameters @ x + 2 * x, struct)


def trees(parameters):
    tree = {
        "a": {"x": parameters[:3, :1], "y": parameters[:3, 1:]},
        "b": {"x": parameters[3, 0], "y": parameters[3, 1:]},
    }
    tree["b"]["x"] = tree["b"]["x"].reshape(1)
    struct = {
        "a": jax.ShapeDtypeStruct((3,), parameters.dtype),
        "b": jax.ShapeDtypeStruct((), parameters.dtype),
    }
    return lx.PyTreeLinearOperator(tree, struct)


def composed(parameters):
    return lx.MatrixLinearOperator(parameters) @ lx.DiagonalLinearOperator(jnp.diag(parameters))


def arithmetic(parameters):
    first = lx.MatrixLinearOperator(parameters)
    second = lx.DiagonalLinearOperator(jnp.diag(parameters))
    return -(2 * first + second) / 3


def tagged(parameters):
    operator = lx.MatrixLinearOperator(parameters @ parameters.T)
    return lx.TaggedLinearOperator(operator, lx.positive_semidefinite_tag)


def transposed(parameters):
    return lx.linearise(jacobian(parameters)).T


def materialised(parameters):
    return lx.materialise(
        function(parameters)
        + lx.IdentityLinearOperator(jax.ShapeDtypeStruct((SIZE,), parameters.dtype))
    )


OPERATORS = {
    "Jacobian": jacobian,
    "Jacobian, reverse": functools.partial(jacobian, jac="bwd"),
    "Function": function,
    "Composed": composed,
    "arithmetic": arithmetic,
    "Tagged": tagged,
    "transposed": transposed,
    "materialised": materialised,
}
for name, make in OPERATORS.items():

    def run(make=make):
        return solved(make, lx.LU(), jnp.asarray(SQUARE), jnp.asarray(RIGHT[:SIZE]))

    programs.add(run, f"operator {name}", sampled=name in ("Jacobian", "arithmetic"))


@programs.add
def operator_function_iterative():
    """The operator is a function: its matrix is never materialised."""
    vector = jnp.asarray(RIGHT[:SIZE])
    return solved(function, lx.GMRES(1e-12, 1e-12), jnp.asarray(SQUARE), vector)


@eqx.filter_jit
def solved_trees(parameters, vector):
    def loss(parameters, vector):
        solution = lx.linear_solve(trees(parameters), vector, lx.LU()).value
        return jnp.sum(jnp.sin(solution["x"])) + jnp.sum(solution["y"] ** 2), solution

    return jax.value_and_grad(loss, (0, 1), has_aux=True)(parameters, vector)


@programs.sample
def operator_of_trees():
    return {"all": solved_trees(jnp.asarray(SQUARE), {"a": jnp.arange(3.0), "b": jnp.array(1.5)})}


@eqx.filter_jit
def facts(operator, vector):
    return {
        "mv": operator.mv(vector),
        "matrix": operator.as_matrix(),
        "diagonal": lx.diagonal(operator),
        "transposed": operator.T.as_matrix(),
        "conjugated": lx.conj(operator).as_matrix(),
        "structure": [
            question(operator)
            for question in (
                lx.is_symmetric,
                lx.is_diagonal,
                lx.is_tridiagonal,
                lx.has_unit_diagonal,
                lx.is_lower_triangular,
                lx.is_upper_triangular,
                lx.is_positive_semidefinite,
                lx.is_negative_semidefinite,
            )
        ],
    }


@programs.sample
def what_operators_say():
    vector = jnp.asarray(RIGHT[:SIZE])
    square = jnp.asarray(SQUARE)
    bands = jax.tree_util.tree_map(jnp.asarray, BANDS)
    operators = {
        "matrix": matrix(square),
        "complex": matrix(square + 1j * square.T),
        "bands": three_bands(bands),
        "diagonal": lx.DiagonalLinearOperator(jnp.asarray(ONE_DIAGONAL)),
        "identity": lx.IdentityLinearOperator(jax.ShapeDtypeStruct((SIZE,), square.dtype)),
        "tagged": tagged(square),
        "composed": composed(square),
        "arithmetic": arithmetic(square),
    }
    return {name: facts(operator, vector) for name, operator in operators.items()}


@eqx.filter_jit
def complex_solutions(parameters, vector):
    hermitian = parameters @ parameters.conj().T
    operator = lx.MatrixLinearOperator(hermitian, lx.positive_semidefinite_tag)
    loss = lambda p: jnp.sum(jnp.abs(lx.linear_solve(matrix(p), vector, lx.LU()).value) ** 2)
    return {
        "LU": lx.linear_solve(matrix(parameters), vector, lx.LU()).value,
        "QR": lx.linear_solve(matrix(parameters), vector, lx.QR()).value,
        "SVD": lx.linear_solve(matrix(parameters), vector, lx.SVD()).value,
        "CG": lx.linear_solve(operator, vector, lx.CG(1e-12, 1e-12)).value,
        "Cholesky": lx.linear_solve(operator, vector, lx.Cholesky()).value,
        "gradient": jax.grad(loss)(parameters),
    }


@programs.add
def complex_numbers():
    square = jnp.asarray(SQUARE)
    return complex_solutions(square + 1j * square[::-1], jnp.asarray(RIGHT[:SIZE]) * (1 - 2j))


@eqx.filter_jit
def solved_by_state(parameters, vectors):
    operator, solver = matrix(parameters), lx.LU()
    state = solver.init(operator, {})
    one = lambda vector: lx.linear_solve(operator, vector, solver, state=state)
    solutions = jax.vmap(one)(vectors)
    return solutions.value, lx.invert(operator).as_matrix()


@programs.add
def factors_used_again():
    vectors = jnp.asarray(RIGHT[:SIZE]) * jnp.arange(1.0, 4)[:, None]
    return {"all": solved_by_state(jnp.asarray(SQUARE), vectors)}


@eqx.filter_jit
def result_of(parameters, vector, solver):
    solution = lx.linear_solve(matrix(parameters), vector, solver, throw=False)
    return solution.result == lx.RESULTS.successful, solution.stats


@programs.sample
def failures():
    """Error messages for systems without a solution and for too few steps."""
    found = {}
    singular = jnp.asarray(SQUARE).at[0].set(0)
    vector = jnp.asarray(RIGHT[:SIZE])
    found["singular, returned"] = result_of(singular, vector, lx.LU())[0]
    found["too few steps, returned"] = result_of(
        jnp.asarray(SQUARE), vector, lx.GMRES(1e-12, 1e-12, max_steps=1, restart=1)
    )[0]
    try:
        jax.block_until_ready(solved(matrix, lx.LU(), singular, vector))
    except Exception as error:
        found["message"] = "linear solver" in str(error)
    return found
