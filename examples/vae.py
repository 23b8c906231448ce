"""A variational autoencoder: one network encodes a digit in a few numbers, another decodes them.

The encoder maps an image to a normal distribution over codes; the decoder maps a code to the
brightness of each pixel. Both are trained together by the evidence lower bound. scikit-learn's
digits have pixels from 0 to 16, which are binomial counts, so the script prints the log-likelihood
of whole images, in nats.

There are two baselines without a network: independent pixels, and independent pixels for each of
the ten digits, with labels that the autoencoder never sees. A logistic regression on codes shows
whether a code determines the digit. At the end the autoencoder draws new digits.
"""

import argparse
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.scipy import special
from sklearn import datasets, linear_model

import eqxlike as eqx
from eqxlike import nn, train

LEVELS = 16
SHADES = " .:-=+*#%@"


class Autoencoder(eqx.Module):
    encoder: nn.MLP
    decoder: nn.MLP
    code_size: int = eqx.field(static=True)

    def __init__(self, code_size: int, width: int, key: jax.Array):
        key1, key2 = jax.random.split(key)
        self.encoder = nn.MLP(64, 2 * code_size, width, depth=2, key=key1)
        self.decoder = nn.MLP(code_size, 64, width, depth=2, key=key2)
        self.code_size = code_size

    def encode(self, pixels: Any) -> tuple[jax.Array, jax.Array]:
        """Means and scales of the code, each of shape (code_size,)."""
        mean, scale = jnp.split(self.encoder(pixels / LEVELS), 2)
        return mean, jax.nn.softplus(scale)

    def bound(self, pixels: Any, key: jax.Array) -> jax.Array:
        """The evidence lower bound of one image, from one draw of its code, in nats."""
        mean, scale = self.encode(pixels)
        code = mean + scale * jax.random.normal(key, mean.shape)
        kl = 0.5 * jnp.sum(mean**2 + scale**2 - 1) - jnp.sum(jnp.log(scale))
        return log_binomial(pixels, self.decoder(code)) - kl

    def log_likelihood(self, pixels: Any, key: jax.Array, draws: int = 200) -> jax.Array:
        """The log-likelihood of one image, by importance sampling of codes near it.

        Burda, Grosse and Salakhutdinov (2016), "Importance Weighted Autoencoders".
        """
        mean, scale = self.encode(pixels)

        def log_weight(noise: jax.Array) -> jax.Array:
            code = mean + scale * noise
            log_prior = -0.5 * jnp.sum(code**2)
            log_drawn = -0.5 * jnp.sum(noise**2) - jnp.sum(jnp.log(scale))
            return log_binomial(pixels, self.decoder(code)) + log_prior - log_drawn

        noise = jax.random.normal(key, (draws, self.code_size))
        return special.logsumexp(jax.vmap(log_weight)(noise)) - jnp.log(draws)


def log_binomial(pixels: Any, logits: jax.Array) -> jax.Array:
    """The log probability of an image, shape (). Each pixel is binomial with `LEVELS` trials."""
    ways = special.gammaln(LEVELS + 1.0) - special.gammaln(pixels + 1)
    ways -= special.gammaln(LEVELS - pixels + 1)
    bright = pixels * jax.nn.log_sigmoid(logits)
    return jnp.sum(ways + bright + (LEVELS - pixels) * jax.nn.log_sigmoid(-logits))


def loss(model: Autoencoder, pixels: Any, key: jax.Array) -> jax.Array:
    keys = jax.random.split(key, len(pixels))
    return -jnp.mean(jax.vmap(model.bound)(pixels, keys))


log_binomials = jax.jit(jax.vmap(log_binomial, in_axes=(0, None)))


def independent_pixels(learned: np.ndarray, pixels: np.ndarray) -> jax.Array:
    """The log-likelihood of each image, shape (N,), if each pixel has its own brightness."""
    part = (learned.sum(axis=0) + 0.5) / (LEVELS * len(learned) + 1)
    return log_binomials(pixels, np.log(part) - np.log1p(-part))


def pixels_of_digits(learned: np.ndarray, labels: np.ndarray, pixels: np.ndarray) -> jax.Array:
    """Like `independent_pixels`, for a mixture of ten models, one for each digit."""
    each = [independent_pixels(learned[labels == digit], pixels) for digit in range(10)]
    return special.logsumexp(jnp.stack(each), axis=0) - jnp.log(10)


def drawn(images: np.ndarray) -> str:
    """Images side by side, as text."""
    shades = np.round(images.reshape(-1, 8, 8) * (len(SHADES) - 1)).astype(int)
    return "\n".join(
        "   ".join("".join(SHADES[shade] * 2 for shade in row) for row in rows).rstrip()
        for rows in shades.transpose(1, 0, 2)
    )


def draw(held_out: np.ndarray, new: np.ndarray, path: pathlib.Path) -> None:
    """Draws a row of held-out digits, and below it a row of new digits."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 2.3), layout="constrained")
    panels = figure.subplots(2, len(new))
    for axes, image in zip(panels.ravel(), [*held_out, *new], strict=True):
        axes.imshow(image.reshape(8, 8), cmap="gray_r", vmin=0, vmax=1)
        axes.set_xticks([])
        axes.set_yticks([])
    panels[0, 0].set_ylabel("held out")
    panels[1, 0].set_ylabel("new")
    figure.savefig(path, dpi=100)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=6000, metavar="N", help="(6000)")
    parser.add_argument("--code", type=int, default=8, metavar="N", help="size of a code (8)")
    parser.add_argument("--width", type=int, default=128, metavar="N", help="layer width (128)")
    parser.add_argument("--out", type=pathlib.Path, metavar="FILE.png", help="save a picture")
    options = parser.parse_args(arguments)
    pixels, labels = datasets.load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    pixels, labels = np.asarray(pixels, np.float32)[order], np.asarray(labels)[order]
    learned, held_out = pixels[500:], pixels[:500]

    model_key, key, bound_key, test_key, draw_key = jax.random.split(jax.random.key(0), 5)
    optimiser = optax.adam(optax.cosine_decay_schedule(2e-3, options.steps))
    model = Autoencoder(options.code, options.width, model_key)
    result = train.fit(
        train.TrainState.create(model, optimiser, key=key),
        train.make_step(loss, optimiser),
        train.minibatches(learned, 100, seed=0),
        num_steps=options.steps,
        on_log=lambda step, loss: print(f"step {step:4}: lower bound {-loss:.1f} nats per image"),
        log_every=max(1, options.steps // 4),
    )
    model = result.state.model
    bound_keys, test_keys = (jax.random.split(each, 500) for each in (bound_key, test_key))
    found = {
        "independent pixels": independent_pixels(learned, held_out),
        "independent pixels of each digit": pixels_of_digits(learned, labels[500:], held_out),
        "autoencoder, lower bound": eqx.filter_jit(eqx.filter_vmap(model.bound))(
            held_out, bound_keys
        ),
        "autoencoder": eqx.filter_jit(eqx.filter_vmap(model.log_likelihood))(held_out, test_keys),
    }
    print("\nLog-likelihood of held-out images, in nats per image:")
    for name, values in found.items():
        print(f"  {name:33} {values.mean():7.1f}")

    codes, _ = jax.vmap(model.encode)(pixels)
    linear = linear_model.LogisticRegression(max_iter=1000).fit(codes[500:], labels[500:])
    right = linear.score(codes[:500], labels[:500])
    print(f"\nA linear classifier reads digits from codes of {options.code} numbers: {right:.1%}")

    prior = jax.random.normal(draw_key, (10, options.code))
    new = np.asarray(jax.nn.sigmoid(jax.vmap(model.decoder)(prior)))
    print("\nNew digits:\n")
    print(drawn(new[:5]))
    if options.out is not None:
        draw(held_out[: len(new)] / LEVELS, new, options.out)


if __name__ == "__main__":
    main()
