"""Diffrax: an ODE by each solver, with its gradient and in a batch."""

import diffrax as dfx
import equinox as eqx
import jax
import jax.numpy as jnp
import optimistix as optx

from tests.downstream.registry import Programs

programs = Programs()

STEPS = dfx.ConstantStepSize()
ADAPTIVE = dfx.PIDController(rtol=1e-6, atol=1e-8)
START = {"x": [1.0, 0.5], "y": 0.3}
PARAMETERS = [1.2, 0.4]
TIMES = [0.0, 0.3, 0.7, 1.0]


def field(t, y, args):
    rate, coupling = args
    x = y["x"]
    return {
        "x": jnp.stack([rate * x[1], -jnp.sin(x[0]) - coupling * x[1] + 0.1 * y["y"]]),
        "y": jnp.cos(t) - rate * y["y"] * x[0] ** 2,
    }


@eqx.filter_jit
def solved(solver, controller, dt0, start, args, times):
    """The solution at `times` with its statistics and gradient, and the solutions of a batch."""

    def parts(start, args):
        found = dfx.diffeqsolve(
            dfx.ODETerm(field),
            solver,
            0.0,
            1.0,
            dt0,
            start,
            args,
            saveat=dfx.SaveAt(ts=times),
            stepsize_controller=controller,
        )
        return found.ys, found.ts, found.stats

    def loss(args):
        ys, _, _ = parts(start, args)
        return jnp.sum(jnp.sin(ys["x"])) + jnp.sum(ys["y"] ** 2)

    many = lambda tree: jax.tree_util.tree_map(lambda x: jnp.stack([x, 1.1 * x, 0.7 * x]), tree)
    return {
        "one": parts(start, args),
        "batch": jax.vmap(parts)(many(start), many(args)),
        "gradient": jax.grad(loss)(args),
    }


def add(name, solver, controller, dt0, sampled=False):
    def run():
        arrays = jax.tree_util.tree_map(jnp.asarray, (START, PARAMETERS))
        arrays[0]["x"] = jnp.stack(arrays[0]["x"])
        return solved(solver, controller, dt0, *arrays, jnp.asarray(TIMES))

    programs.add(run, name, sampled)


EXPLICIT = {
    "Euler": dfx.Euler(),
    "Heun": dfx.Heun(),
    "Midpoint": dfx.Midpoint(),
    "Ralston": dfx.Ralston(),
    "Bosh3": dfx.Bosh3(),
    "Tsit5": dfx.Tsit5(),
    "Dopri5": dfx.Dopri5(),
    "Dopri8": dfx.Dopri8(),
    "LeapfrogMidpoint": dfx.LeapfrogMidpoint(),
    "ReversibleHeun": dfx.ReversibleHeun(),
    "HalfSolver": dfx.HalfSolver(dfx.Euler()),
}
for name, solver in EXPLICIT.items():
    add(f"{name}, steps of a size", solver, STEPS, 0.1, sampled=name in ("Euler", "Tsit5"))
for name in ("Heun", "Bosh3", "Tsit5", "Dopri5", "Dopri8", "ReversibleHeun", "HalfSolver"):
    add(f"{name}, adaptive", EXPLICIT[name], ADAPTIVE, None, sampled=name in ("Tsit5", "Dopri8"))

IMPLICIT = {
    "ImplicitEuler": dfx.ImplicitEuler(),
    "Kvaerno3": dfx.Kvaerno3(),
    "Kvaerno4": dfx.Kvaerno4(),
    "Kvaerno5": dfx.Kvaerno5(),
}
for name, solver in IMPLICIT.items():
    rough = dfx.PIDController(rtol=1e-3, atol=1e-5)
    add(f"{name}, adaptive", solver, rough, None, sampled=name in ("Kvaerno3", "Kvaerno5"))
add(
    "Kvaerno3, steps of a size",
    dfx.Kvaerno3(root_finder=optx.Newton(rtol=1e-6, atol=1e-6)),
    STEPS,
    0.1,
)
add(
    "ImplicitEuler by Newton",
    dfx.ImplicitEuler(root_finder=optx.Newton(rtol=1e-8, atol=1e-8)),
    STEPS,
    0.2,
)


def stiff(t, y, args):
    return jnp.stack(
        [
            -args[0] * y[0] + args[1] * y[1] * y[2],
            args[0] * y[0] - args[1] * y[1] * y[2] - args[2] * y[1] ** 2,
            args[2] * y[1] ** 2,
        ]
    )


@eqx.filter_jit
def robertson(args):
    def loss(args):
        found = dfx.diffeqsolve(
            dfx.ODETerm(stiff),
            dfx.Kvaerno5(),
            0.0,
            100.0,
            2e-4,
            jnp.array([1.0, 0, 0]),
            args,
            saveat=dfx.SaveAt(ts=jnp.array([0.0, 1e-2, 1.0, 50.0, 100.0])),
            stepsize_controller=dfx.PIDController(rtol=1e-6, atol=1e-9),
        )
        return jnp.sum(found.ys[-1] ** 2), (found.ys, found.stats)

    return jax.value_and_grad(loss, has_aux=True)(args)


@programs.sample
def stiff_reaction():
    """Robertson's reaction, a stiff system: its rates differ by nine orders of magnitude."""
    return {"all": robertson(jnp.array([0.04, 1e4, 3e7]))}


@eqx.filter_jit
def split(solver, start, args):
    fast = dfx.ODETerm(lambda t, y, args: -args * y)
    slow = dfx.ODETerm(lambda t, y, args: jnp.sin(y) + t)

    def loss(args):
        found = dfx.diffeqsolve(
            dfx.MultiTerm(slow, fast),
            solver,
            0.0,
            1.0,
            0.1,
            start,
            args,
            stepsize_controller=dfx.PIDController(rtol=1e-5, atol=1e-6),
        )
        return jnp.sum(found.ys**2), found.stats

    return jax.value_and_grad(loss, has_aux=True)(args)


for kind in (dfx.KenCarp3, dfx.KenCarp4, dfx.KenCarp5, dfx.Sil3):

    def run(kind=kind):
        return {"all": split(kind(), jnp.array([1.0, 2.0]), jnp.array([20.0, 3.0]))}

    programs.add(run, f"{kind.__name__}, implicit and explicit", sampled=kind is dfx.KenCarp4)


@eqx.filter_jit
def symplectic(start, args):
    def loss(args):
        terms = (
            dfx.ODETerm(lambda t, p, args: p / args),
            dfx.ODETerm(lambda t, q, args: -jnp.sin(q)),
        )
        saveat = dfx.SaveAt(steps=True)
        found = dfx.diffeqsolve(
            terms, dfx.SemiImplicitEuler(), 0.0, 2.0, 0.05, start, args, saveat=saveat, max_steps=64
        )
        positions, momenta = found.ys
        last = jnp.isfinite(positions)
        return jnp.sum(jnp.where(last, positions, 0)), (positions, momenta, found.ts)

    return jax.value_and_grad(loss, has_aux=True)(args)


@programs.sample
def semi_implicit_euler():
    return {"all": symplectic((jnp.array(1.0), jnp.array(0.0)), jnp.array(1.3))}


@eqx.filter_jit
def other_direction(start, args):
    found = dfx.diffeqsolve(
        dfx.ODETerm(field),
        dfx.Tsit5(),
        1.0,
        -0.5,
        -0.1,
        start,
        args,
        saveat=dfx.SaveAt(ts=jnp.array([1.0, 0.2, -0.5]), dense=True),
        stepsize_controller=ADAPTIVE,
    )
    return found.ys, found.evaluate(0.6), found.derivative(0.6), found.stats


@programs.add
def backwards_in_time():
    start = {"x": jnp.array([1.0, 0.5]), "y": jnp.array(0.3)}
    return {"all": other_direction(start, [jnp.array(1.2), jnp.array(0.4)])}


@eqx.filter_jit
def in_complex_numbers(start, args):
    loss = lambda args: jnp.sum(jnp.real(solution(args).ys) ** 2)

    def solution(args):
        term = dfx.ODETerm(lambda t, y, args: 1j * args * y)
        return dfx.diffeqsolve(term, dfx.Dopri5(), 0.0, 1.0, 0.05, start, args)

    return solution(args).ys, jax.grad(loss)(args)


@programs.add
def complex_numbers():
    return {"all": in_complex_numbers(jnp.array([1.0 + 0j, 2.0 - 1j]), jnp.array(2.0))}


@eqx.filter_jit
def result_of(start, args):
    found = dfx.diffeqsolve(
        dfx.ODETerm(field),
        dfx.Tsit5(),
        0.0,
        1.0,
        None,
        start,
        args,
        stepsize_controller=ADAPTIVE,
        max_steps=3,
        throw=False,
    )
    return found.ys, found.stats, found.result == dfx.RESULTS.max_steps_reached


@programs.sample
def failures():
    """Error messages for too few steps."""
    start = {"x": jnp.array([1.0, 0.5]), "y": jnp.array(0.3)}
    args = [jnp.array(1.2), jnp.array(0.4)]
    found = {"returned": result_of(start, args)}
    try:
        dfx.diffeqsolve(dfx.ODETerm(field), dfx.Tsit5(), 0.0, 1.0, 0.01, start, args, max_steps=3)
    except Exception as error:
        found["message"] = "maximum number of solver steps" in str(error)
    return found
