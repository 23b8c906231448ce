"""Common formulas that lose digits, grouped by the rule that finds them.

Each formula is a function of a vector of logits. By default the logits are between -300 and 300.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax, nn

LOG = "logarithm of exponentials or probabilities"
ONE = "difference from one"
SQUARES = "difference of squares"
QUOTIENT = "quotient of exponentials"
GUARDED = "logarithm of a probability kept from zero"
DIVERGENCE = "divergence near zero"
POWER = "power by a logarithm"
ZEROS = "quotient of two zeros"

labels = jnp.array([0, 2, 1])
targets = jnp.array([0.0, 1.0, 0.3, 1.0, 0.0, 1.0, 0.0, 0.7])
weights = jnp.arange(12.0).reshape(4, 3)
one_hot = jnp.eye(4)[jnp.array([0, 2])]


def pairs(x):
    return x.reshape(2, 4)


def softmax(x, axis=-1):
    e = jnp.exp(x)
    return e / e.sum(axis, keepdims=True)


def softmax_shifted(x):
    z = x - jnp.max(x, axis=-1, keepdims=True)
    numerator = jnp.exp(z)
    return numerator / jnp.sum(numerator, axis=-1, keepdims=True)


def sigmoid(x):
    return 1.0 / (1.0 + jnp.exp(-x))


@jax.jit
def nll(p):
    return -jnp.log(p)


def bce(p, y):
    return -(y * jnp.log(p) + (1 - y) * jnp.log(1 - p))


def cross_entropy(p, y):
    return -jnp.sum(y * jnp.log(p), axis=-1)


def distances(a, b):
    squares = jnp.sum(a**2, axis=1)[:, None] + jnp.sum(b**2, axis=1)[None]
    return squares - 2 * a @ b.T


normal = jax.scipy.stats.norm.pdf


def mixture(x):
    components = jnp.exp(-0.5 * (x[:, None] - jnp.array([[0.0, 3.0]])) ** 2)
    return jnp.sum(jnp.array([[0.3, 0.7]]) * components, axis=-1)


LOGARITHMS = (
    lambda x: jnp.log(1 + jnp.exp(x)),
    lambda x: jnp.log1p(jnp.exp(x)),
    lambda x: lax.log(lax.exp(x) + jnp.ones_like(x)),
    lambda x: -jnp.log(1 + jnp.exp(-x)),
    lambda x: jnp.log(sigmoid(x)),
    lambda x: -jnp.log(nn.sigmoid(-x)),
    lambda x: jnp.log(jax.scipy.special.expit(x)),
    lambda x: jnp.log(jnp.exp(x) / (1 + jnp.exp(x))),
    lambda x: jnp.log(jnp.reciprocal(1 + jnp.exp(-x))),
    lambda x: jnp.log(0.5 * (1 + jnp.tanh(x / 2))),
    lambda x: jnp.log(0.5 + 0.5 * jnp.tanh(0.5 * x)),
    lambda x: jnp.log(1 - nn.sigmoid(x)),
    lambda x: jnp.log(1.0 - sigmoid(x)),
    lambda x: jnp.log1p(-nn.sigmoid(x)),
    lambda x: jnp.log(-nn.sigmoid(x) + 1),
    lambda x: jnp.log(nn.sigmoid(x)) - jnp.log(1 - nn.sigmoid(x)),
    lambda x: jnp.log(nn.sigmoid(x) / (1 - nn.sigmoid(x))),
    lambda x: bce(nn.sigmoid(x), targets),
    lambda x: bce(sigmoid(x), targets),
    lambda x: jnp.where(targets > 0.5, -jnp.log(nn.sigmoid(x)), -jnp.log(1 - nn.sigmoid(x))),
    lambda x: -jnp.log(jnp.where(targets > 0.5, nn.sigmoid(x), 1 - nn.sigmoid(x))),
    lambda x: jnp.log2(1 + jnp.exp(x)),
    lambda x: jnp.log10(1 + jnp.exp(x)),
    lambda x: jnp.log(2 + 3 * jnp.exp(x)),
    lambda x: jnp.log(jnp.exp(x) + jnp.exp(-x)),
    lambda x: jnp.log(jnp.exp(x) + jnp.exp(2 * x) + 1),
    lambda x: jnp.log(jnp.exp(x) + jnp.exp(x[0])),
    lambda x: jnp.log(jnp.cosh(x)),
    lambda x: jnp.mean(jnp.log(jnp.cosh(x - 1))),
    lambda x: jnp.log((jnp.exp(x) + jnp.exp(-x)) / 2),
    lambda x: jnp.log(1 - jnp.tanh(x) ** 2),
    lambda x: jnp.log(1 - jnp.tanh(x) * jnp.tanh(x)),
    lambda x: jnp.log1p(-(jnp.tanh(x) ** 2)),
    lambda x: jnp.log(1 - jnp.exp(-jnp.abs(x))),
    lambda x: jnp.log(jnp.exp(jnp.abs(x)) - 1),
    lambda x: jnp.log(1 + x * 1e-9),
    lambda x: jnp.log(1 - x * 1e-9),
    lambda x: 0.5 * jnp.log((1 + x / 400) / (1 - x / 400)),
    lambda x: jnp.log(jnp.sum(jnp.exp(x))),
    lambda x: jnp.log(jnp.exp(pairs(x)).sum(1)),
    lambda x: jnp.log(jnp.sum(jnp.exp(pairs(x)), axis=-1, keepdims=True)),
    lambda x: jnp.log(jnp.mean(jnp.exp(x))),
    lambda x: jnp.log(jnp.sum(jnp.exp(x) / 8)),
    lambda x: jnp.log(jnp.sum(jnp.exp(x - 1))) + 1,
    lambda x: jnp.log(jnp.sum(targets * jnp.exp(x))),
    lambda x: jnp.log(jnp.sum(jnp.exp(x) * jnp.exp(-0.5 * x))),
    lambda x: jnp.log(sum(jnp.exp(each) for each in x)),
    lambda x: x - jnp.log(jnp.sum(jnp.exp(x))),
    lambda x: jnp.log(nn.softmax(x)),
    lambda x: jnp.log(softmax(x)),
    lambda x: jnp.log(softmax(pairs(x), 0)),
    lambda x: jnp.log(softmax_shifted(pairs(x))),
    lambda x: jnp.log(nn.softmax(pairs(x), axis=0)),
    lambda x: jnp.log2(nn.softmax(x)),
    lambda x: jnp.log(jax.vmap(nn.softmax)(pairs(x))),
    lambda x: jax.vmap(lambda x: jnp.log(nn.softmax(x))[0])(pairs(x)),
    lambda x: nll(nn.softmax(x)),
    lambda x: nll(nn.softmax(x)[2]),
    lambda x: -jnp.log(nn.softmax(pairs(x))[jnp.arange(2), jnp.array([1, 3])]),
    lambda x: -jnp.log(jnp.take_along_axis(nn.softmax(pairs(x)), jnp.array([[1], [3]]), axis=1)),
    lambda x: -jnp.log(jnp.take(nn.softmax(x), 3)),
    lambda x: -jnp.log(lax.dynamic_index_in_dim(nn.softmax(x), 3)),
    lambda x: jax.vmap(lambda x, i: -jnp.log(nn.softmax(x)[i]))(pairs(x), jnp.array([0, 2])),
    lambda x: -jnp.log(jnp.sum(one_hot * nn.softmax(pairs(x)), -1)),
    lambda x: cross_entropy(nn.softmax(pairs(x)), one_hot),
    lambda x: cross_entropy(softmax(pairs(x)), one_hot).mean(),
    lambda x: -jnp.mean(one_hot * jnp.log(nn.softmax(pairs(x)))),
    lambda x: -jnp.einsum("bc,bc->b", one_hot, jnp.log(nn.softmax(pairs(x)))),
    lambda x: jnp.log(nn.softmax(x).reshape(2, 4).T),
    lambda x: jnp.log(jnp.max(nn.softmax(x))),
    lambda x: jnp.sum(nn.softmax(x) * jnp.log(nn.softmax(x))),
    lambda x: jnp.sum(nn.softmax(x) * jnp.log(nn.softmax(x) / nn.softmax(-x))),
    lambda x: jnp.sum(nn.softmax(x) * (jnp.log(nn.softmax(x)) - jnp.log(nn.softmax(2 * x)))),
    lambda x: jnp.log(nn.softmax(x / 0.7)),
    lambda x: jnp.log(jnp.exp(x) / jnp.exp(x).sum()),
    lambda x: jnp.log(jnp.exp(x[0]) / (jnp.exp(x[0]) + jnp.exp(x[1]))),
    lambda x: jnp.log(jnp.exp(-(x**2) / 2) / jnp.sqrt(2 * jnp.pi)),
    lambda x: jnp.log(jnp.exp(-0.5 * ((x - 1) / 2.0) ** 2) / (2.0 * math.sqrt(2 * math.pi))),
    lambda x: jnp.log(1 / jnp.sqrt(2 * jnp.pi * 4.0) * jnp.exp(-(x**2) / 8.0)),
    lambda x: jnp.log(0.5 * jnp.exp(-jnp.abs(x))),
    lambda x: jnp.log(jnp.prod(jnp.exp(-jnp.abs(x)))),
    lambda x: jnp.log(jnp.prod(nn.sigmoid(x))),
    lambda x: jnp.log(jnp.prod(jax.scipy.stats.norm.pdf(x))),
    lambda x: jnp.log(jax.scipy.stats.norm.pdf(x)),
    lambda x: jnp.log(jax.scipy.stats.norm.cdf(x / 10)),
    lambda x: jnp.log(1 - jax.scipy.stats.norm.cdf(x / 10)),
    lambda x: jnp.log(jax.scipy.stats.norm.sf(x / 10)),
    lambda x: jnp.log(0.5 * (1 + lax.erf(x / 10 / jnp.sqrt(2)))),
    lambda x: jnp.log(0.5 * lax.erfc(x / 10)),
    lambda x: jnp.log(0.5 - 0.5 * lax.erf(x / 10)),
    lambda x: jnp.log(jnp.exp(x) ** 2),
    lambda x: jnp.log((x * 1e30) ** 2),
    lambda x: jnp.log(jnp.exp(x) * jnp.exp(-2 * x)),
    lambda x: jnp.log(jnp.exp(x) / jnp.exp(2 * x)),
    lambda x: jnp.log(jnp.sqrt(jnp.exp(x))),
    lambda x: jnp.log(jnp.linalg.det(jnp.diag(jnp.exp(x)))),
    lambda x: jnp.log(jnp.linalg.det(jnp.exp(x[7]) * jnp.eye(3))),
    lambda x: jnp.log(0.3 * jnp.exp(-0.5 * x**2) + 0.7 * jnp.exp(-0.5 * (x - 3) ** 2)),
    lambda x: jnp.log(mixture(x)),
    lambda x: jnp.log(0.3 * normal(x, 0, 1) + 0.7 * normal(x, 2, 0.5)),
    lambda x: jnp.log(x[5] * normal(x, 0, 1) + (4 - x[5]) * normal(x, 2, x[4])),
    lambda x: jnp.log(1e-8 + jnp.sum(jnp.exp(x))),
    lambda x: jnp.log(jnp.exp(x + 1) - jnp.exp(x)),
    lambda x: jnp.log(targets @ jnp.exp(x)),
    lambda x: jnp.log(jnp.exp(pairs(x)) @ jnp.arange(1.0, 5)),
    lambda x: jnp.log(jnp.abs(jnp.linalg.det(jnp.diag(jnp.exp(x[:3]))))),
    lambda x: jnp.log(jnp.abs(1 - jnp.tanh(x) ** 2)),
    lambda x: lax.map(lambda x: jnp.log(1 + jnp.exp(x)), x),
    lambda x: lax.scan(lambda c, x: (c + jnp.log(1 + jnp.exp(x)), None), 0.0, x)[0],
    lambda x: lax.cond(x[0] > 0, lambda x: x, lambda x: jnp.log(1 + jnp.exp(x)), x),
    lambda x: lax.fori_loop(0, 3, lambda i, x: jnp.log(1 + jnp.exp(x)), x),
    lambda x: jax.checkpoint(lambda x: jnp.log(1 + jnp.exp(x)))(x),
    lambda x: jax.jit(lambda x: jax.jit(lambda x: jnp.log(1 + jnp.exp(x)))(x))(x),
    lambda x: functools.reduce(lambda a, b: jnp.log(jnp.exp(a) + jnp.exp(b)), list(x)),
)

ONES = (
    lambda x: jnp.exp(x / 1e9) - 1,
    lambda x: -1 + jnp.exp(x / 1e9),
    lambda x: 1 - jnp.exp(-jnp.abs(x) / 1e9),
    lambda x: 2 * (jnp.exp(x / 1e9) - 1.0),
    lambda x: (jnp.exp(x / 1e9) - 1) / x,
    lambda x: 2 * jnp.exp(x / 1e9) - 2,
    lambda x: 1 - nn.sigmoid(x),
    lambda x: 1.0 - sigmoid(x),
    lambda x: nn.sigmoid(x) - 1,
    lambda x: nn.sigmoid(x) * (1 - nn.sigmoid(x)),
    lambda x: 1 - jnp.tanh(x) ** 2,
    lambda x: 1 - jnp.square(jnp.tanh(x)),
    lambda x: 1 - jnp.tanh(x) * jnp.tanh(x),
    lambda x: 1 - jnp.tanh(x),
    lambda x: 1 + jnp.tanh(x),
    lambda x: 0.5 * (1 + jnp.tanh(x / 2)),
    lambda x: 1 - lax.erf(x / 30),
    lambda x: 1 + lax.erf(x / 30),
    lambda x: 0.5 * (1 + lax.erf(x / 30)),
    lambda x: 1 - jax.scipy.stats.norm.cdf(x / 30),
    lambda x: 1 - jnp.cos(x / 1e6),
    lambda x: (1 - jnp.cos(x / 1e6)) / x**2,
)

DIFFERENCES = (
    lambda x: jnp.mean(x**2) - jnp.mean(x) ** 2,
    lambda x: jnp.mean(jnp.square(x)) - jnp.square(jnp.mean(x)),
    lambda x: jnp.mean(x * x) - jnp.mean(x) * jnp.mean(x),
    lambda x: jnp.mean(pairs(x) ** 2, axis=1) - jnp.mean(pairs(x), axis=1) ** 2,
    lambda x: jnp.mean(pairs(x) ** 2, 0, keepdims=True) - jnp.mean(pairs(x), 0, keepdims=True) ** 2,
    lambda x: jnp.sum(x**2) / 8 - (jnp.sum(x) / 8) ** 2,
    lambda x: (jnp.sum(x**2) - jnp.sum(x) ** 2 / 8) / 7,
    lambda x: jax.vmap(lambda x: jnp.mean(x**2) - jnp.mean(x) ** 2)(pairs(x)),
    lambda x: x**2 - x[::-1] ** 2,
    lambda x: x**2 - 2 * x * x[::-1] + x[::-1] ** 2,
    lambda x: x * x + 2 * x * x[0] + x[0] * x[0],
    lambda x: 0.5 * x * x - x * x[::-1] + 0.5 * x[::-1] * x[::-1],
    lambda x: x**2.0 - 2 * x * x[::-1] + (-x[::-1]) ** 2,
    lambda x: x**2 - 3 * x + 2.25,
    lambda x: distances(pairs(x), pairs(x)[::-1]),
)

QUOTIENTS = (
    lambda x: sigmoid(x),
    lambda x: jnp.exp(x) / (1 + jnp.exp(x)),
    lambda x: 1 / (1 + jnp.exp(x)),
    lambda x: (1 + jnp.exp(-x)) ** -1,
    lambda x: x / (1 + jnp.exp(-x)),
    lambda x: softmax(x),
    lambda x: softmax(pairs(x), 0),
    lambda x: jnp.exp(x) / jnp.sum(jnp.exp(x)),
    lambda x: jax.vmap(softmax)(pairs(x)),
    lambda x: jnp.exp(x / 0.5) / jnp.exp(x / 0.5).sum(),
    lambda x: targets * jnp.exp(x) / jnp.sum(targets * jnp.exp(x)),
    lambda x: (jnp.exp(x) - jnp.exp(-x)) / (jnp.exp(x) + jnp.exp(-x)),
    lambda x: jnp.sinh(x) / jnp.cosh(x),
    lambda x: (1 - jnp.exp(-2 * x)) / (1 + jnp.exp(-2 * x)),
    lambda x: (jnp.exp(2 * x) - 1) / (jnp.exp(2 * x) + 1),
    lambda x: 2 / (1 + jnp.exp(-2 * x)) - 1,
    lambda x: jnp.exp(x) / (jnp.exp(x) + jnp.exp(x[0])),
    lambda x: jnp.exp(x) / (2 + 3 * jnp.exp(x)),
    lambda x: 1 / (jnp.exp(x) + jnp.exp(-x)),
    lambda x: x / (1 + jnp.exp(x) + jnp.exp(2 * x)),
    lambda x: jnp.exp(x[2]) / jnp.sum(jnp.exp(x)),
    lambda x: jnp.sum(targets * jnp.exp(x)) / jnp.sum(jnp.exp(x)),
    lambda x: jnp.exp(pairs(x)) @ weights / jnp.exp(pairs(x)).sum(-1, keepdims=True),
    lambda x: jnp.einsum("qk,kd->dq", jnp.exp(pairs(x)), weights) / jnp.exp(pairs(x)).sum(1)[None],
)
GUARDS = (
    lambda x: jnp.log(nn.softmax(x) + 1e-8),
    lambda x: -jnp.log(nn.softmax(x)[3] + 1e-8),
    lambda x: jnp.log(1 - nn.sigmoid(x) + 1e-7),
    lambda x: bce(jnp.clip(nn.sigmoid(x), 1e-7, 1 - 1e-7), targets),
    lambda x: jnp.log(jnp.maximum(softmax(x), 1e-8)),
    lambda x: jnp.log(1 - jnp.tanh(x) ** 2 + 1e-6),
)
DIVERGENCES = (
    lambda x: -0.5 * jnp.sum(1 + x - x[::-1] ** 2 - jnp.exp(x)),
    lambda x: 0.5 * (jnp.exp(x) + x[::-1] ** 2 - 1 - x),
    lambda x: 0.5 * (jnp.abs(x) + x[::-1] ** 2 - 1 - jnp.log(jnp.abs(x))),
    lambda x: jnp.log(2 / jnp.abs(x)) + (x**2 + x[::-1] ** 2) / (2 * 2**2) - 0.5,
    lambda x: jnp.log(x[4] / x) + (x**2 + (x - 1) ** 2) / (2 * x[4] ** 2) - 0.5,
    lambda x: 0.5 * (x[0] - x + (jnp.exp(x) + x[1] ** 2) / jnp.exp(x[0]) - 1),
    lambda x: 0.5 * (x[0] - x + jnp.exp(x - x[0]) - 1),
    lambda x: jnp.exp(x) - 1 - x,
    lambda x: jnp.abs(x) - jnp.log(jnp.abs(x)) - 1,
)

OTHERS = {
    "norm at zero": (
        lambda x: jnp.sqrt(jnp.sum(x**2)),
        lambda x: jnp.linalg.norm(x),
        lambda x: jnp.linalg.norm(pairs(x), axis=-1),
        lambda x: jnp.sqrt(jnp.sum((pairs(x)[0] - pairs(x)[1]) ** 2)),
        lambda x: jnp.sum(x**2) ** 0.5,
        lambda x: jnp.sqrt(jnp.dot(x, x)),
        lambda x: jnp.sqrt(jnp.mean(x**2)),
        lambda x: jnp.std(x),
    ),
    "hypotenuse": (
        lambda x: jnp.sqrt((x * 1e25) ** 2 + (x * 2e25) ** 2),
        lambda x: jnp.sqrt(jnp.square(x) + jnp.square(x[::-1])),
        lambda x: jnp.sqrt(x * x + x[::-1] * x[::-1] + 1),
        lambda x: (x**2 + x[::-1] ** 2) ** 0.5,
    ),
    "direction of zero": (
        lambda x: x / jnp.linalg.norm(x),
        lambda x: x / jnp.sqrt(jnp.sum(x**2)),
        lambda x: pairs(x) / jnp.linalg.norm(pairs(x), axis=-1, keepdims=True),
        lambda x: x / jnp.sqrt(jnp.sum(x * x, keepdims=True)),
        lambda x: x @ x[::-1] / (jnp.linalg.norm(x) * jnp.linalg.norm(x[::-1])),
        lambda x: jnp.sum(x * targets) / (jnp.sqrt(jnp.sum(x**2)) * jnp.sqrt(jnp.sum(targets**2))),
    ),
    "branch that is not taken": (
        lambda x: jnp.where(x > 0, jnp.log(x), 0),
        lambda x: jnp.where(x > 0, jnp.sqrt(x), 0.0),
        lambda x: jnp.where(x == 0, 0.0, 1 / x),
        lambda x: jnp.where(x != 0, jnp.sin(x) / x, 1),
        lambda x: jnp.where(jnp.abs(x) < 1e-6, 1.0, jnp.sin(x) / x),
        lambda x: jnp.where(x > 0, x, jnp.exp(x) - 1),
        lambda x: jnp.where(x > 0, x, 1.67 * (jnp.exp(x) - 1)),
        lambda x: jnp.where(x < 0, 0, x**0.5),
        lambda x: jnp.where(x > 20, x, jnp.log1p(jnp.exp(x))),
        lambda x: jnp.where(x > 0, 2 * jnp.log(x) + 1, x),
        lambda x: lax.select(x > 0, jnp.log(x), jnp.zeros_like(x)),
        lambda x: jnp.where(x > 1, jnp.arccosh(x), 0.0),
    ),
    "x log(x)": (
        lambda x: jnp.abs(x) * jnp.log(jnp.abs(x)),
        lambda x: -jnp.sum(x**2 * jnp.log(x**2)),
    ),
    "quotient of itself": (lambda x: x / x, lambda x: (x - 1) / (x - 1)),
    "sum in low precision": (
        lambda x: lax.reduce_sum(jnp.broadcast_to(x[0].astype(jnp.bfloat16), 512), axes=(0,)),
        lambda x: jnp.cumsum(jnp.outer(x, jnp.ones(512)).astype(jnp.float16), axis=1),
        lambda x: lax.fori_loop(0, 512, lambda _, y: y + x.astype(jnp.float16)[0], jnp.float16(0)),
        lambda x: lax.reduce_sum(jnp.outer(x, jnp.ones(512)).astype(jnp.float16), axes=(1,)),
    ),
    "cast to float16": (
        lambda x: jnp.exp(x).astype(jnp.float16),
        lambda x: jnp.square(x).astype(jnp.float16),
        lambda x: jnp.cosh(x).astype(jnp.float16),
    ),
}
QUOTIENTS_OF_ZEROS = (
    lambda x: (jnp.exp(x / 1e9) - 1) / x,
    lambda x: (1 - jnp.exp(-x)) / x,
    lambda x: x / jnp.expm1(x),
    lambda x: (1 / x) * jnp.sin(x),
    lambda x: jnp.log(1 + jnp.abs(x)) / jnp.abs(x),
    lambda x: jnp.tanh(3 * x) / (3 * x),
    lambda x: (1 - jnp.cos(x)) / x**2,
    lambda x: (jnp.exp(x) - 1 - x) / (x * x),
    lambda x: (jnp.sqrt(1 + x**2) - 1) / x**2,
    lambda x: jnp.log(1 + 2 * jnp.abs(x)) / jnp.abs(x),
    lambda x: (2 * x - 1 + jnp.exp(-2 * x)) / x**2,
)
SPELLINGS = [
    *((ZEROS, each) for each in QUOTIENTS_OF_ZEROS),
    *((LOG, each) for each in LOGARITHMS),
    *((ONE, each) for each in ONES),
    *((SQUARES, each) for each in DIFFERENCES),
    *((QUOTIENT, each) for each in QUOTIENTS),
    *((GUARDED, each) for each in GUARDS),
    *((DIVERGENCE, each) for each in DIVERGENCES),
    (POWER, lambda x: jnp.exp(2.5 * jnp.log(x))),
    (POWER, lambda x: jnp.exp(x[::-1] * jnp.log(jnp.abs(x)))),
    *((name, each) for name, those in OTHERS.items() for each in those),
]
