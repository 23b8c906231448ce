"""Diffrax: stochastic differential equations, Brownian paths and controlled equations."""

import diffrax as dfx
import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx

from tests.downstream.registry import Programs

programs = Programs()

AREAS = {
    "increment": dfx.BrownianIncrement,
    "space-time": dfx.SpaceTimeLevyArea,
    "space-time-time": dfx.SpaceTimeTimeLevyArea,
}


def drift(t, y, args):
    return -args[0] * y + jnp.sin(t)


def diagonal_diffusion(t, y, args):
    return args[1] * jnp.cos(y)


def matrix_diffusion(t, y, args):
    return args[1] * jnp.stack([jnp.cos(y), 0.1 * y, y**0], axis=1)


def additive_diffusion(t, y, args):
    return args[1] * jnp.array([1.0, 0.5])


def diagonal(diffusion):
    return lambda t, y, args: lx.DiagonalLinearOperator(diffusion(t, y, args))


@eqx.filter_jit
def solved(solver, diffusion, shape, area, controller, tree, adjoint, start, args, keys):
    """The solutions of a batch of paths, and the gradient of a mean over them."""

    def one(args, key):
        if tree:
            path = dfx.VirtualBrownianTree(0.0, 1.0, 1e-3, shape, key, area)
        else:
            path = dfx.UnsafeBrownianPath(shape, key, area)
        terms = dfx.MultiTerm(dfx.ODETerm(drift), dfx.ControlTerm(diffusion, path))
        found = dfx.diffeqsolve(
            terms,
            solver,
            0.0,
            1.0,
            0.05,
            start,
            args,
            saveat=dfx.SaveAt(ts=jnp.array([0.25, 0.5, 1.0])) if tree else dfx.SaveAt(t1=True),
            stepsize_controller=controller,
            adjoint=adjoint,
        )
        return found.ys, found.stats

    def loss(args):
        return jnp.mean(jax.vmap(lambda key: one(args, key)[0])(keys) ** 2)

    return {
        "paths": jax.vmap(lambda key: one(args, key))(keys),
        # `UnsafeBrownianPath` does not support reverse mode.
        "gradient": (jax.grad if tree else jax.jacfwd)(loss)(args),
    }


STEPS = dfx.ConstantStepSize()
SPARSE = {"dw": diagonal(diagonal_diffusion), "additive": diagonal(additive_diffusion)}
KINDS = {
    "diagonal": (SPARSE["dw"], (2,)),
    "matrix": (matrix_diffusion, (3,)),
    "additive": (SPARSE["additive"], (2,)),
}


def add(name, solver, kind, area, sampled=False, tree=True, controller=STEPS, adjoint=None):
    diffusion, shape = KINDS[kind]
    adjoint = adjoint or dfx.RecursiveCheckpointAdjoint()

    def run():
        inputs = (
            jnp.array([1.0, -0.5]),
            jnp.array([0.7, 0.3]),
            jax.random.split(jax.random.key(5), 3),
        )
        return solved(solver, diffusion, shape, AREAS[area], controller, tree, adjoint, *inputs)

    programs.add(run, name, sampled)


SOLVERS = {
    "Euler": (dfx.Euler(), "matrix", "increment"),
    "EulerHeun": (dfx.EulerHeun(), "matrix", "increment"),
    "Heun": (dfx.Heun(), "matrix", "increment"),
    "Midpoint": (dfx.Midpoint(), "matrix", "increment"),
    "Ralston": (dfx.Ralston(), "matrix", "increment"),
    "ReversibleHeun": (dfx.ReversibleHeun(), "matrix", "increment"),
    "ItoMilstein": (dfx.ItoMilstein(), "diagonal", "increment"),
    "StratonovichMilstein": (dfx.StratonovichMilstein(), "diagonal", "increment"),
    "SEA": (dfx.SEA(), "additive", "space-time"),
    "SRA1": (dfx.SRA1(), "additive", "space-time"),
    "ShARK": (dfx.ShARK(), "additive", "space-time"),
    "GeneralShARK": (dfx.GeneralShARK(), "matrix", "space-time"),
    "SlowRK": (dfx.SlowRK(), "matrix", "space-time"),
    "SPaRK": (dfx.SPaRK(), "matrix", "space-time"),
}
for name, (solver, kind, area) in SOLVERS.items():
    add(name, solver, kind, area, sampled=name in ("EulerHeun", "ItoMilstein", "SPaRK"))
UNSAFE = {"tree": False, "adjoint": dfx.ForwardMode()}
add("Heun, unsafe path", dfx.Heun(), "matrix", "increment", True, **UNSAFE)
add("SPaRK, unsafe path", dfx.SPaRK(), "matrix", "space-time", **UNSAFE)
ADAPTIVE = dfx.ClipStepSizeController(
    dfx.PIDController(rtol=1e-2, atol=1e-3, dtmin=2**-9), store_rejected_steps=64
)
add("Heun, adaptive", dfx.Heun(), "matrix", "increment", controller=ADAPTIVE)
add("SPaRK, adaptive", dfx.SPaRK(), "matrix", "space-time", True, controller=ADAPTIVE)
add("Heun, Direct", dfx.Heun(), "matrix", "increment", adjoint=dfx.DirectAdjoint())
add("Heun, Backsolve", dfx.Heun(), "matrix", "increment", adjoint=dfx.BacksolveAdjoint())


@eqx.filter_jit
def langevin(solver, start, args, keys):
    def one(args, key):
        path = dfx.VirtualBrownianTree(0.0, 2.0, 1e-2, (2,), key, dfx.SpaceTimeTimeLevyArea)
        terms = dfx.MultiTerm(
            dfx.UnderdampedLangevinDriftTerm(args[0], args[1], lambda x, _: 2 * x + x**3),
            dfx.UnderdampedLangevinDiffusionTerm(args[0], args[1], path),
        )
        return dfx.diffeqsolve(
            terms, solver, 0.0, 2.0, 0.1, start, saveat=dfx.SaveAt(ts=jnp.array([1.0, 2.0]))
        ).ys

    loss = lambda args: jnp.mean(jax.vmap(lambda key: one(args, key)[0])(keys) ** 2)
    return jax.vmap(lambda key: one(args, key))(keys), jax.grad(loss)(args)


for kind in (dfx.ALIGN, dfx.ShOULD, dfx.QUICSORT):

    def run(kind=kind):
        start = jnp.array([1.0, -1.0]), jnp.zeros(2)
        keys = jax.random.split(jax.random.key(7), 2)
        return {"all": langevin(kind(0.1), start, jnp.array([1.0, 0.5]), keys)}

    programs.add(run, f"{kind.__name__}, of Langevin", sampled=kind is dfx.ALIGN)


@eqx.filter_jit
def paths(area, key):
    trees = {
        spline: dfx.VirtualBrownianTree(
            0.0, 1.0, 1e-2, {"a": jax.ShapeDtypeStruct((2,), float)}, key, area, _spline=spline
        )
        for spline in ("sqrt", "quad", "zero")
        if area is dfx.BrownianIncrement or spline == "sqrt"
    }
    times = jnp.array([0.0, 0.123, 0.5, 0.77, 1.0])
    unsafe = dfx.UnsafeBrownianPath((2,), key, area)
    return {
        "trees": {
            name: jax.vmap(lambda t, tree=tree: tree.evaluate(0.0, t, use_levy=True))(times[1:])
            for name, tree in trees.items()
        },
        "unsafe": jax.vmap(lambda t: unsafe.evaluate(t, t + 0.1, use_levy=True))(times),
    }


for name, area in AREAS.items():

    def run(area=area):
        return {"all": paths(area, jax.random.key(9))}

    programs.add(run, f"Brownian path, {name}", sampled=name == "space-time")


class ControlledField(eqx.Module):
    network: eqx.nn.MLP

    def __call__(self, t, y, args):
        return self.network(y).reshape(3, 2)


@eqx.filter_jit
def controlled(field, adjoint, times, values):
    def loss(field):
        coefficients = dfx.backward_hermite_coefficients(times, values)
        control = dfx.CubicInterpolation(times, coefficients)
        found = dfx.diffeqsolve(
            dfx.ControlTerm(field, control).to_ode(),
            dfx.Tsit5(),
            times[0],
            times[-1],
            None,
            jnp.array([0.1, 0.2, 0.3]),
            stepsize_controller=dfx.PIDController(1e-4, 1e-6),
            adjoint=adjoint,
        )
        return jnp.sum(found.ys**2), found.stats

    (value, stats), gradient = eqx.filter_value_and_grad(loss, has_aux=True)(field)
    return value, stats, eqx.filter(gradient, eqx.is_array)


def controlled_program(adjoint):
    key = jax.random.key(3)
    field = ControlledField(eqx.nn.MLP(3, 6, 8, 1, final_activation=jnp.tanh, key=key))
    times = jnp.linspace(0, 1, 6)
    values = jnp.stack([times, jnp.sin(4 * times)], axis=1)
    return {"all": controlled(field, adjoint, times, values)}


@programs.sample
def neural_controlled_equation():
    return controlled_program(dfx.RecursiveCheckpointAdjoint())


@programs.add
def neural_controlled_equation_solved_back():
    return controlled_program(dfx.BacksolveAdjoint())
