"""Diffrax: each way to differentiate a solve."""

import diffrax as dfx
import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx

from tests.downstream.registry import Programs

programs = Programs()

ADAPTIVE = dfx.PIDController(rtol=1e-6, atol=1e-8)


class Field(eqx.Module):
    """A vector field with parameters of its own."""

    network: eqx.nn.MLP
    scale: jax.Array

    def __init__(self):
        key = jax.random.key(2)
        self.network = eqx.nn.MLP(2, 2, 8, 1, activation=jnp.tanh, key=key)
        self.scale = jnp.array(0.5)

    def __call__(self, t, y, args):
        return self.scale * self.network(y) - args * y + jnp.sin(t)


@eqx.filter_jit
def gradients(adjoint, controller, saveat, field, start, args):
    @eqx.filter_value_and_grad
    def loss(inputs):
        field, start, args = inputs
        found = dfx.diffeqsolve(
            dfx.ODETerm(field),
            dfx.Tsit5(),
            0.0,
            1.0,
            0.1,
            start,
            args,
            saveat=saveat,
            stepsize_controller=controller,
            adjoint=adjoint,
        )
        return jnp.sum(jnp.where(jnp.isfinite(found.ys), found.ys, 0) ** 2)

    value, gradient = loss((field, start, args))
    return value, eqx.filter(gradient, eqx.is_array)


LAST = dfx.SaveAt(t1=True)
TIMES = (0.2, 0.5, 1.0)


def add(name, adjoint, controller=ADAPTIVE, saveat=LAST, sampled=False):
    def run():
        chosen = dfx.SaveAt(ts=jnp.asarray(saveat)) if isinstance(saveat, tuple) else saveat
        inputs = Field(), jnp.array([0.3, -0.7]), jnp.array(0.8)
        return {"all": gradients(adjoint, controller, chosen, *inputs)}

    programs.add(run, name, sampled)


ADJOINTS = {
    "RecursiveCheckpoint": dfx.RecursiveCheckpointAdjoint(),
    "RecursiveCheckpoint, 5 of them": dfx.RecursiveCheckpointAdjoint(checkpoints=5),
    "Direct": dfx.DirectAdjoint(),
    "Backsolve": dfx.BacksolveAdjoint(),
    "Backsolve, of its own": dfx.BacksolveAdjoint(
        solver=dfx.Dopri5(),
        stepsize_controller=dfx.PIDController(rtol=1e-5, atol=1e-7, norm=dfx.adjoint_rms_seminorm),
    ),
}
for name, adjoint in ADJOINTS.items():
    add(name, adjoint, sampled=True)
    add(f"{name}, at times", adjoint, saveat=TIMES)
    add(f"{name}, steps of a size", adjoint, dfx.ConstantStepSize())
add(
    "RecursiveCheckpoint, every step",
    ADJOINTS["RecursiveCheckpoint"],
    saveat=dfx.SaveAt(steps=True),
)
add("Direct, every step", ADJOINTS["Direct"], saveat=dfx.SaveAt(steps=True))


@eqx.filter_jit
def forwards(field, start, args):
    def solution(start, args):
        return dfx.diffeqsolve(
            dfx.ODETerm(field),
            dfx.Tsit5(),
            0.0,
            1.0,
            None,
            start,
            args,
            stepsize_controller=ADAPTIVE,
            adjoint=dfx.ForwardMode(),
        ).ys

    return jax.jvp(solution, (start, args), (jnp.ones(2), jnp.array(0.5))), jax.jacfwd(
        solution, (0, 1)
    )(start, args)


@programs.sample
def forward_mode():
    return {"all": forwards(Field(), jnp.array([0.3, -0.7]), jnp.array(0.8))}


@eqx.filter_jit
def second_derivatives(adjoint, field, start, args):
    def loss(args):
        found = dfx.diffeqsolve(
            dfx.ODETerm(field),
            dfx.Heun(),
            0.0,
            1.0,
            0.1,
            start,
            args,
            adjoint=adjoint,
            max_steps=16,
        )
        return jnp.sum(found.ys**2)

    return jax.grad(jax.grad(loss))(args), jax.jvp(jax.grad(loss), (args,), (jnp.ones(()),))


@programs.add
def direct_differentiated_twice():
    inputs = Field(), jnp.array([0.3, -0.7]), jnp.array(0.8)
    return {"all": second_derivatives(dfx.DirectAdjoint(), *inputs)}


@eqx.filter_jit
def steady_state(adjoint, start, args):
    def loss(args):
        found = dfx.diffeqsolve(
            dfx.ODETerm(lambda t, y, args: jnp.cos(args) - y - 0.1 * y**3),
            dfx.Tsit5(),
            0.0,
            jnp.inf,
            None,
            start,
            args,
            stepsize_controller=dfx.PIDController(rtol=1e-6, atol=1e-9),
            event=dfx.Event(dfx.steady_state_event()),
            adjoint=adjoint,
            max_steps=None,
        )
        return jnp.sum(found.ys**2), (found.ys, found.stats)

    return jax.value_and_grad(loss, has_aux=True)(args)


@programs.sample
def implicit_adjoint_of_a_steady_state():
    arrays = jnp.array([0.0, 1.0]), jnp.array([0.4, 1.1])
    return {"all": steady_state(dfx.ImplicitAdjoint(), *arrays)}


@programs.add
def implicit_adjoint_by_conjugate_gradients():
    arrays = jnp.array([0.0, 1.0]), jnp.array([0.4, 1.1])
    adjoint = dfx.ImplicitAdjoint(linear_solver=lx.Normal(lx.CG(1e-10, 1e-10)))
    return {"all": steady_state(adjoint, *arrays)}


@eqx.filter_jit
def of_a_batch(adjoint, field, starts, args):
    def loss(field):
        one = lambda start: dfx.diffeqsolve(
            dfx.ODETerm(field),
            dfx.Tsit5(),
            0.0,
            1.0,
            None,
            start,
            args,
            stepsize_controller=ADAPTIVE,
            adjoint=adjoint,
        )
        found = jax.vmap(one)(starts)
        return jnp.mean(found.ys**2), found.stats

    (value, stats), gradient = eqx.filter_value_and_grad(loss, has_aux=True)(field)
    return value, stats, eqx.filter(gradient, eqx.is_array)


for name in ("RecursiveCheckpoint", "Direct", "Backsolve"):

    def run(adjoint=ADJOINTS[name]):
        starts = jnp.linspace(-1, 1, 8).reshape(4, 2)
        return {"all": of_a_batch(adjoint, Field(), starts, jnp.array(0.8))}

    programs.add(run, f"{name}, of a batch", sampled=name == "RecursiveCheckpoint")
