"""An ensemble of twenty networks, trained at once. Their disagreement shows their uncertainty.

`filter_vmap` makes a stack of networks, each from its own key, and trains them in one program. The
targets are a sine with noise, seen for x in [-3, -1] and [1, 3]. Each network returns a mean and
the logarithm of a standard deviation. The ensemble is an equal mixture of their normal
distributions (Lakshminarayanan et al. 2017, "Simple and scalable predictive uncertainty estimation
using deep ensembles"). `bayes.infer` with `bayes.DeepEnsemble` does this for any posterior.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

import eqxlike as eqx
from eqxlike import loops, nn

NUM_NETWORKS = 20


def make_network(key: jax.Array) -> nn.MLP:
    return nn.MLP(1, 2, 32, depth=2, activation=jnp.tanh, key=key)


def log_prob(network: nn.MLP, x: jax.Array, y: jax.Array) -> jax.Array:
    """The log density of each target, shape (N,)."""
    mean, log_scale = jax.vmap(network)(x[:, None]).T
    return jax.scipy.stats.norm.logpdf(y, mean, jnp.exp(log_scale))


@eqx.filter_jit
def train(networks: nn.MLP, x: jax.Array, y: jax.Array, num_steps: int) -> nn.MLP:
    """Trains each network of a stack on all data."""
    optimiser = optax.adam(optax.cosine_decay_schedule(1e-2, num_steps))

    def train_one(network: nn.MLP) -> nn.MLP:
        def step(index: jax.Array, carry: Any) -> Any:
            network, opt_state = carry
            gradient = eqx.filter_grad(lambda network: -jnp.mean(log_prob(network, x, y)))(network)
            updates, opt_state = optimiser.update(gradient, opt_state)
            return eqx.apply_updates(network, updates), opt_state

        opt_state = optimiser.init(eqx.filter(network, eqx.is_inexact_array))
        return loops.fori_loop(0, num_steps, step, (network, opt_state))[0]

    return eqx.filter_vmap(train_one)(networks)


def wave(x: jax.Array, seed: int) -> jax.Array:
    noise = jax.random.normal(jax.random.key(seed), x.shape)
    return jnp.sin(2 * x) + 0.2 * noise


def disagreement(networks: nn.MLP, x: jax.Array) -> jax.Array:
    """The standard deviation of the means of all networks, shape (N,)."""
    outputs = eqx.filter_vmap(lambda network: jax.vmap(network)(x[:, None]))(networks)
    return jnp.std(outputs[..., 0], axis=0)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1000)
    options = parser.parse_args(arguments)
    half = jnp.linspace(1, 3, 40)
    x = jnp.concatenate([-half, half])
    keys = jax.random.split(jax.random.key(0), NUM_NETWORKS)
    networks = eqx.filter_vmap(make_network)(keys)
    networks = train(networks, x, wave(x, 1), options.steps)

    each = eqx.filter_vmap(lambda network: log_prob(network, x, wave(x, 2)))(networks)
    mixture = jax.nn.logsumexp(each, axis=0) - jnp.log(NUM_NETWORKS)
    print("log-likelihood of a new target, in nats:")
    print(f"  one network, on average {jnp.mean(each):6.2f}")
    print(f"  the ensemble            {jnp.mean(mixture):6.2f}")
    print("standard deviation of the means of the networks:")
    for place, low, high in (("seen", 1, 3), ("between", -1, 1), ("beyond", 3, 5)):
        inside = jnp.linspace(low, high, 50)
        print(f"  {place:8} {jnp.mean(disagreement(networks, inside)):6.3f}")


if __name__ == "__main__":
    main()
