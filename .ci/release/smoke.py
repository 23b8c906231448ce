"""Tests the features of an extra, in an environment with only eqxlike and that extra.

`python smoke.py EXTRA` exits 0 if the features work. `EXTRA` may be "core": eqxlike without extras.
check.py copies this file to an empty folder, so that it imports the installed package.
"""

import contextlib
import importlib
import pathlib
import sys
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import optax

import eqxlike as eqx
from eqxlike import ad, bayes, nn, train

optimiser = optax.adam(1e-2)


@contextlib.contextmanager
def refused(words: str) -> Iterator[None]:
    """Asserts that the block raises an `ImportError` whose message contains `words`."""
    said = "nothing"
    try:
        yield
    except ImportError as error:
        said = str(error)
    assert words in said, said


def loss_of(model, x, key=None):
    return jnp.mean((jax.vmap(model)(x) - x) ** 2)


def core() -> None:
    """Trains and saves a small model. A feature of an extra raises an error naming the extra."""
    folder = pathlib.Path(eqx.__file__).parent
    assert "site-packages" in folder.parts, folder
    assert (folder / "py.typed").is_file(), "the types are not shipped"

    @eqx.filter_jit
    def step(model, state, x):
        loss, gradient = eqx.filter_value_and_grad(loss_of)(model, x)
        updates, state = optimiser.update(gradient, state)
        return eqx.apply_updates(model, updates), state, loss

    model = nn.MLP(2, 2, 8, 1, key=jax.random.key(0))
    state = optimiser.init(eqx.filter(model, eqx.is_inexact_array))
    loss = jnp.inf
    for _ in range(100):
        model, state, loss = step(model, state, jnp.eye(2))
    assert loss < 0.1, loss
    eqx.tree_serialise_leaves("model.eqx", model)
    assert eqx.tree_equal(eqx.tree_deserialise_leaves("model.eqx", model), model)
    with refused("eqxlike[bayes]"):
        bayes.Posterior(
            model,
            prior=bayes.normal(0.0, 1.0),
            likelihood=bayes.Gaussian(0.1),
            data=(jnp.eye(2), jnp.eye(2)),
        )
    train.export_safetensors(model, "model.safetensors")
    with refused("eqxlike[train]"):
        train.import_safetensors(model, "model.safetensors")
    with refused("eqxlike[plot]"):
        bayes.plot.reliability(jnp.array([[0.9, 0.1]]), jnp.array([0]))


X = jnp.linspace(-1.0, 1.0, 8)[:, None]


def inferred(method: bayes.Method) -> bayes.FittedPosterior:
    model = nn.MLP(1, "scalar", 4, 1, key=jax.random.key(0))
    target = bayes.Posterior(
        model, prior=bayes.normal(0.0, 1.0), likelihood=bayes.Gaussian(0.1), data=(X, X[:, 0])
    )
    return bayes.infer(target, method, key=jax.random.key(1), progress=False)


def with_bayes() -> None:
    found = inferred(bayes.MAP(steps=20))
    assert bayes.predict(found, X, key=jax.random.key(2)).mean.shape == (8,)
    chains = bayes.NUTS(num_samples=2, num_warmup=2, chains=1)
    assert callable(chains.init)


def with_train() -> None:
    model = nn.Linear(2, 2, key=jax.random.key(0))
    train.export_safetensors(model, "model.safetensors")
    assert eqx.tree_equal(train.import_safetensors(model, "model.safetensors"), model)
    fit(callbacks=[train.Checkpoint("run", every=2)])
    assert any(pathlib.Path("run").iterdir())


def with_tensorboard() -> None:
    fit(callbacks=[train.TensorBoard("curves")])
    assert any(pathlib.Path("curves").iterdir())


def fit(callbacks) -> None:
    model = nn.Linear(2, 2, key=jax.random.key(0))
    train.fit(
        train.TrainState.create(model, optimiser, key=jax.random.key(1)),
        train.make_step(lambda model, batch, key: loss_of(model, batch[0]), optimiser),
        train.minibatches((jnp.ones((8, 2)),), 4, seed=0),
        num_steps=4,
        callbacks=callbacks,
    )


def with_plot() -> None:
    axes = bayes.plot.reliability(jnp.array([[0.9, 0.1], [0.2, 0.8]]), jnp.array([0, 1]))
    axes.figure.savefig("reliability.png")


def with_arviz() -> None:
    draws = inferred(bayes.NUTS(num_samples=200, num_warmup=200, chains=2)).to_arviz()
    assert jnp.isfinite(importlib.import_module("arviz_stats").loo(draws).elpd)


def with_profile() -> None:
    with eqx.profile(sample=True) as found:
        eqx.filter_jit(lambda x: 2 * x)(jnp.ones(3)).block_until_ready()
    assert "<html" in found.page


def with_export() -> None:
    model = nn.Linear(2, 2, key=jax.random.key(0))
    x = jnp.ones((3, 2))
    eqx.export(jax.vmap(model), x).save("model.eqxport")
    assert jnp.allclose(eqx.load_exported("model.eqxport").call(x), jax.vmap(model)(x))


def with_enzyme() -> None:
    """Enzyme only has wheels for Python 3.11. On other versions `ad.Enzyme` raises an error."""
    gradient = eqx.filter_grad(lambda x: jnp.sum(x**2), mode=ad.Enzyme())
    if sys.version_info >= (3, 12):
        with refused("eqxlike[enzyme]"):
            gradient(jnp.arange(3.0))
    else:
        assert jnp.allclose(gradient(jnp.arange(3.0)), jnp.array([0.0, 2.0, 4.0]))


TRIED = {
    "core": core,
    "arviz": with_arviz,
    "bayes": with_bayes,
    "enzyme": with_enzyme,
    "export": with_export,
    "plot": with_plot,
    "profile": with_profile,
    "tensorboard": with_tensorboard,
    "train": with_train,
}

if __name__ == "__main__":
    TRIED[sys.argv[1]]()
