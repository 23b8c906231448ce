"""Diffrax: step size controllers, saved values, dense output, interpolation."""

import diffrax as dfx
import equinox as eqx
import jax
import jax.numpy as jnp
import optimistix as optx

from tests.downstream.registry import Programs

programs = Programs()

START = (1.0, -0.3)


def field(t, y, args):
    return jnp.stack([y[1], -jnp.sin(y[0]) - args * y[1] + jnp.where(t > 0.55, 0.5, 0.0)])


@eqx.filter_jit
def solved(controller, dt0, saveat, start, args, what):
    """The value of `what(solution)`, and the gradient of its sum of squares."""

    def parts(args):
        found = dfx.diffeqsolve(
            dfx.ODETerm(field),
            dfx.Tsit5(),
            0.0,
            2.0,
            dt0,
            start,
            args,
            saveat=saveat,
            stepsize_controller=controller,
            max_steps=256,
        )
        return what(found), found.stats

    def loss(args):
        leaves = jax.tree_util.tree_leaves(parts(args)[0])
        return sum(jnp.sum(jnp.where(jnp.isfinite(leaf), leaf, 0) ** 2) for leaf in leaves)

    return parts(args), jax.grad(loss)(args)


def values(found):
    return found.ys


def add(name, controller, dt0=0.1, saveat=None, what=values, sampled=False):
    def run():
        chosen = saveat() if saveat else dfx.SaveAt(t1=True)
        chosen_controller = controller() if callable(controller) else controller
        start, args = jnp.asarray(START), jnp.array(0.2)
        return {"all": solved(chosen_controller, dt0, chosen, start, args, what)}

    programs.add(run, name, sampled)


PID = {"rtol": 1e-6, "atol": 1e-8}
CONTROLLERS = {
    "ConstantStepSize": (dfx.ConstantStepSize, 0.1),
    "StepTo": (lambda: dfx.StepTo(ts=jnp.linspace(0, 2, 21)), None),
    "I": (lambda: dfx.PIDController(**PID), 0.1),
    "PID": (lambda: dfx.PIDController(**PID, pcoeff=0.3, icoeff=0.3, dcoeff=0.1), None),
    "PID, bounded": (lambda: dfx.PIDController(**PID, dtmin=0.01, dtmax=0.05), 0.02),
    "PID, another norm": (lambda: dfx.PIDController(**PID, norm=optx.max_norm), None),
    "PID, factors": (
        lambda: dfx.PIDController(**PID, factormin=0.5, factormax=2.0, safety=0.8),
        None,
    ),
    "clipped": (
        lambda: dfx.ClipStepSizeController(
            dfx.PIDController(**PID), step_ts=jnp.array([0.3, 1.1]), jump_ts=jnp.array([0.55])
        ),
        None,
    ),
    "clipped, rejections kept": (
        lambda: dfx.ClipStepSizeController(
            dfx.PIDController(**PID), jump_ts=jnp.array([0.55]), store_rejected_steps=16
        ),
        None,
    ),
}
for name, (controller, dt0) in CONTROLLERS.items():
    is_sampled = name in ("StepTo", "PID", "clipped, rejections kept")
    add(f"controller {name}", controller, dt0, sampled=is_sampled)


def adaptive():
    return dfx.PIDController(**PID)


def square(t, y, args):
    return {"t": t, "y": y**2 * args}


SAVED = {
    "t0 and t1": lambda: dfx.SaveAt(t0=True, t1=True),
    "times": lambda: dfx.SaveAt(ts=jnp.linspace(0, 2, 17)),
    "steps": lambda: dfx.SaveAt(steps=True),
    "every third step": lambda: dfx.SaveAt(steps=3),
    "a function": lambda: dfx.SaveAt(ts=jnp.linspace(0, 2, 5), fn=square),
    "parts": lambda: dfx.SaveAt(
        subs={
            "last": dfx.SubSaveAt(t1=True),
            "some": [dfx.SubSaveAt(ts=jnp.linspace(0.1, 1.9, 4), fn=square)],
        }
    ),
    "everything": lambda: dfx.SaveAt(t0=True, t1=True, ts=jnp.array([0.5, 1.5]), steps=True),
}
for name, saveat in SAVED.items():
    add(f"save {name}", adaptive, None, saveat, sampled=name in ("steps", "times", "parts"))


def dense(found):
    times = jnp.linspace(0, 2, 9)
    return {
        "values": jax.vmap(found.evaluate)(times),
        "derivatives": jax.vmap(found.derivative)(times),
        "increment": found.evaluate(0.3, 1.7),
        "from the left": jax.vmap(lambda t: found.evaluate(t, left=True))(times[1:]),
    }


add("dense output", adaptive, None, lambda: dfx.SaveAt(dense=True), dense, sampled=True)
add("dense output and times", adaptive, None, lambda: dfx.SaveAt(t1=True, dense=True), dense)
add(
    "dense output, steps of a size",
    dfx.ConstantStepSize,
    0.1,
    lambda: dfx.SaveAt(dense=True),
    dense,
)


@eqx.filter_jit
def dense_by(solver, start, args):
    found = dfx.diffeqsolve(
        dfx.ODETerm(field),
        solver,
        0.0,
        2.0,
        None,
        start,
        args,
        saveat=dfx.SaveAt(dense=True),
        stepsize_controller=dfx.PIDController(1e-4, 1e-6),
        max_steps=256,
    )
    return dense(found)


for kind in (dfx.Heun, dfx.Bosh3, dfx.Dopri5, dfx.Dopri8, dfx.Kvaerno4):

    def run(kind=kind):
        return dense_by(kind(), jnp.asarray(START), jnp.array(0.2))

    programs.add(run, f"dense output of {kind.__name__}")


@eqx.filter_jit
def in_two_halves(start, args):
    solve = lambda t0, t1, y, **states: dfx.diffeqsolve(
        dfx.ODETerm(field),
        dfx.Tsit5(),
        t0,
        t1,
        0.1,
        y,
        args,
        saveat=dfx.SaveAt(t1=True, solver_state=True, controller_state=True, made_jump=True),
        stepsize_controller=dfx.PIDController(**PID),
        **states,
    )
    first = solve(0.0, 1.0, start)
    second = solve(
        1.0,
        2.0,
        first.ys[-1],
        solver_state=first.solver_state,
        controller_state=first.controller_state,
        made_jump=first.made_jump,
    )
    return first.ys, second.ys, second.stats


@programs.sample
def solved_on_from_a_state():
    return {"all": in_two_halves(jnp.asarray(START), jnp.array(0.2))}


@eqx.filter_jit
def step_by_step(start, args):
    """Steps of a Diffrax solver, called in a `jax.lax` loop."""
    term, solver = dfx.ODETerm(field), dfx.Tsit5()
    state = solver.init(term, 0.0, 0.1, start, args)

    def body(carry, t):
        y, state = carry
        y, error, _, state, _ = solver.step(term, t, t + 0.1, y, args, state, made_jump=False)
        return (y, state), (y, error)

    return jax.lax.scan(body, (start, state), jnp.linspace(0, 1, 11)[:-1])[1]


@programs.add
def steps_by_hand():
    return {"all": step_by_step(jnp.asarray(START), jnp.array(0.2))}


@eqx.filter_jit
def interpolated(times, values):
    holes = values.at[2, 0].set(jnp.nan).at[4].set(jnp.nan)
    filled = dfx.linear_interpolation(times, holes)
    linear = dfx.LinearInterpolation(times, filled)
    coefficients = dfx.backward_hermite_coefficients(times, holes)
    cubic = dfx.CubicInterpolation(times, coefficients)
    steps_at, steps = dfx.rectilinear_interpolation(times, filled)
    points = jnp.linspace(times[0], times[-1], 7)
    slope = lambda values: jnp.sum(
        dfx.CubicInterpolation(times, dfx.backward_hermite_coefficients(times, values)).evaluate(
            0.37
        )
    )
    return {
        "linear": jax.vmap(linear.evaluate)(points),
        "cubic": jax.vmap(cubic.evaluate)(points),
        "cubic derivative": jax.vmap(cubic.derivative)(points),
        "increments": jax.vmap(lambda t: cubic.evaluate(times[0], t))(points),
        "rectilinear": (steps_at, steps),
        "gradient": jax.grad(slope)(values),
    }


@programs.sample
def interpolation_of_data():
    times = jnp.array([0.0, 0.2, 0.3, 0.7, 0.8, 1.0])
    return interpolated(times, jnp.stack([jnp.sin(3 * times), times**2], axis=1))
