"""Diffrax: solves that end at an event, with gradients through its time."""

import diffrax as dfx
import equinox as eqx
import jax
import jax.numpy as jnp
import optimistix as optx

from tests.downstream.registry import Programs

programs = Programs()


def fall(t, y, args):
    return jnp.stack([y[1], -args])


def height(t, y, args, **kwargs):
    return y[0]


def is_below(t, y, args, **kwargs):
    return y[0] < 0


def is_slow(t, y, args, **kwargs):
    return y[1] + 3.0


ROOT_FINDER = optx.Newton(1e-8, 1e-8, optx.rms_norm)


@eqx.filter_jit
def solved(event, controller, adjoint, saveat, start, args):
    def parts(start, args):
        found = dfx.diffeqsolve(
            dfx.ODETerm(fall),
            dfx.Tsit5(),
            0.0,
            jnp.inf if saveat.subs.ts is None else 3.0,
            0.1,
            start,
            args,
            event=event,
            saveat=saveat,
            stepsize_controller=controller,
            adjoint=adjoint,
        )
        return found.ts, found.ys, found.stats, found.event_mask, dfx.is_event(found.result)

    def loss(start, args):
        times, ys, *_ = parts(start, args)
        finite = lambda x: jnp.where(jnp.isfinite(x), x, 0)
        return jnp.sum(finite(times)) + jnp.sum(finite(ys) ** 2)

    many = lambda x: jnp.stack([x, 1.3 * x, 0.6 * x])
    return {
        "one": parts(start, args),
        "batch": jax.vmap(parts)(many(start), many(args)),
        "gradients": jax.grad(loss, (0, 1))(start, args),
    }


STEPS = dfx.ConstantStepSize()
ADAPTIVE = dfx.PIDController(rtol=1e-6, atol=1e-8)
LAST = dfx.SaveAt(t1=True)
CHECKPOINTS = dfx.RecursiveCheckpointAdjoint()

EVENTS = {
    "a condition": dfx.Event(is_below),
    "a crossing": dfx.Event(height, ROOT_FINDER),
    "a crossing, step's end": dfx.Event(height),
    "a crossing downwards": dfx.Event(height, ROOT_FINDER, direction=False),
    "the first of several": dfx.Event({"ground": height, "speed": is_slow}, ROOT_FINDER),
    "conditions and crossings": dfx.Event(
        [is_below, is_slow], ROOT_FINDER, direction=[None, False]
    ),
}
for name, event in EVENTS.items():

    def run(event=event, saveat=LAST):
        args = jnp.array([2.0, 0.5]), jnp.array(8.0)
        return solved(event, STEPS, CHECKPOINTS, saveat, *args)

    programs.add(run, name, sampled=name in ("a condition", "a crossing", "the first of several"))


@programs.add
def adaptive_crossing():
    args = jnp.array([2.0, 0.5]), jnp.array(8.0)
    return solved(EVENTS["a crossing"], ADAPTIVE, CHECKPOINTS, LAST, *args)


@programs.sample
def crossing_saved_on_the_way():
    saveat = dfx.SaveAt(ts=jnp.array([0.1, 0.4, 0.9, 2.0]))
    args = jnp.array([2.0, 0.5]), jnp.array(8.0)
    return solved(EVENTS["a crossing"], STEPS, CHECKPOINTS, saveat, *args)


@programs.add
def crossing_differentiated_directly():
    args = jnp.array([2.0, 0.5]), jnp.array(8.0)
    return solved(EVENTS["a crossing"], STEPS, dfx.DirectAdjoint(), LAST, *args)


@eqx.filter_jit
def bounces(start, args):
    """A ball that loses a fifth of its speed at each of three bounces."""

    def bounce(carry, _):
        t, y = carry
        found = dfx.diffeqsolve(
            dfx.ODETerm(fall),
            dfx.Dopri5(),
            t,
            t + 10,
            0.05,
            y,
            args,
            event=dfx.Event(height, ROOT_FINDER, direction=False),
            stepsize_controller=ADAPTIVE,
        )
        y = jnp.stack([1e-6, -0.8 * found.ys[0, 1]])
        return (found.ts[0], y), (found.ts[0], y[1])

    return jax.lax.scan(bounce, (0.0, start), None, 3)[1]


@programs.add
def bouncing_ball():
    return {"all": bounces(jnp.array([1.0, 0.0]), jnp.array(9.81))}
