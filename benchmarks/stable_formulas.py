"""Formulas that lose digits, and their values and derivatives in mpmath, for `stable_maths`."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import mpmath as mp
import numpy as np
from jax import Array

mp.mp.prec = 200  # pyright: ignore[reportAttributeAccessIssue]


class Formula(NamedTuple):
    """A JAX function of one number, and the function and its derivative in mpmath."""

    name: str
    naive: Callable[[Array], Array]
    exact: Callable[[Any], Any]
    derivative: Callable[[Any], Any]
    low: float = -np.inf
    high: float = np.inf


def sigmoid(x):
    return 1 / (1 + mp.exp(-x)) if x > -1e6 else mp.exp(x)


def log_cosh(x):
    if abs(x) < 1:
        return mp.log1p(2 * mp.sinh(x / 2) ** 2)
    return abs(x) + mp.log1p(mp.exp(-2 * abs(x))) - mp.log(2)


def cdf(x):
    return mp.erfc(-x / mp.sqrt(2)) / 2


def log_cdf(x):
    return mp.log(cdf(x)) if x < 0 else mp.log1p(-cdf(-x))


def pdf(x):
    return mp.exp(-x * x / 2) / mp.sqrt(2 * mp.pi)


def log1mexp(x):
    return mp.log(-mp.expm1(x)) if x > -1 else mp.log1p(-mp.exp(x))


def excess_of_exp(x):
    return mp.expm1(x) - x if x < 1e6 else mp.exp(x)


def over(function, slope, power=1):
    """f(x) / x ** power and its derivative, computed with extra digits. 1 / power and 0 at 0."""

    def value(x):
        with mp.workprec(1500):
            return +(function(x) / x**power) if x else 1 / mp.mpf(power)

    def derivative(x):
        with mp.workprec(1500):
            return +((x * slope(x) - power * function(x)) / x ** (power + 1)) if x else mp.mpf(0)

    return value, derivative


def slope_of_sigmoid(x):
    return sigmoid(x) * sigmoid(-x)


def slope_of_log1p(x):
    return 1 / (1 + x)


def sech2(x):
    return mp.sech(x) ** 2


LOG_OTHERS = mp.log(1 + mp.exp(1.5))
WEIGHTED = 0.25 + 2 * mp.exp(1.5)


def with_others(x: Array) -> Array:
    return jnp.stack((x, 0 * x, jnp.full_like(x, 1.5)), axis=-1)


def with_other(x: Array) -> Array:
    return jnp.stack((x, jnp.full_like(x, 1.5)), axis=-1)


FORMULAS = (
    Formula(
        "log(1 + exp(x))", lambda x: jnp.log(1 + jnp.exp(x)), lambda x: mp.log1p(mp.exp(x)), sigmoid
    ),
    Formula(
        "log1p(exp(x))", lambda x: jnp.log1p(jnp.exp(x)), lambda x: mp.log1p(mp.exp(x)), sigmoid
    ),
    Formula(
        "log(sigmoid(x))",
        lambda x: jnp.log(jax.nn.sigmoid(x)),
        lambda x: -mp.log1p(mp.exp(-x)),
        lambda x: sigmoid(-x),
    ),
    Formula(
        "log(1 - sigmoid(x))",
        lambda x: jnp.log(1 - jax.nn.sigmoid(x)),
        lambda x: -mp.log1p(mp.exp(x)),
        lambda x: -sigmoid(x),
    ),
    Formula(
        "log(1 - exp(x))",
        lambda x: jnp.log(1 - jnp.exp(x)),
        log1mexp,
        lambda x: 1 / -mp.expm1(-x) if x > -1e6 else -mp.exp(x),
        high=-1e-30,
    ),
    Formula(
        "log(exp(x) - 1)",
        lambda x: jnp.log(jnp.exp(x) - 1),
        lambda x: mp.log(mp.expm1(x)) if x < 1e6 else x,
        lambda x: 1 / -mp.expm1(-x),
        low=1e-30,
    ),
    Formula("log(cosh(x))", lambda x: jnp.log(jnp.cosh(x)), log_cosh, mp.tanh),
    Formula(
        "log(1 - tanh(x)**2)",
        lambda x: jnp.log(1 - jnp.tanh(x) ** 2),
        lambda x: -2 * log_cosh(x),
        lambda x: -2 * mp.tanh(x),
    ),
    Formula("log(1 + x)", lambda x: jnp.log(1 + x), mp.log1p, slope_of_log1p, low=-0.99),
    Formula(
        "log(cdf(x))",
        lambda x: jnp.log(jax.scipy.stats.norm.cdf(x)),
        log_cdf,
        lambda x: pdf(x) / cdf(x),
        low=-1e4,
        high=1e4,
    ),
    Formula(
        "log(1 - cdf(x))",
        lambda x: jnp.log(1 - jax.scipy.stats.norm.cdf(x)),
        lambda x: log_cdf(-x),
        lambda x: -pdf(x) / cdf(-x),
        low=-1e4,
        high=1e4,
    ),
    Formula(
        "log(x**2)",
        lambda x: jnp.log(x**2),
        lambda x: 2 * mp.log(abs(x)) if x else -mp.inf,
        lambda x: 2 / x if x else mp.inf,
    ),
    Formula("exp(x) - 1", lambda x: jnp.exp(x) - 1, mp.expm1, mp.exp),
    Formula(
        "1 - sigmoid(x)",
        lambda x: 1 - jax.nn.sigmoid(x),
        lambda x: sigmoid(-x),
        lambda x: -slope_of_sigmoid(x),
    ),
    Formula(
        "1 - tanh(x)**2",
        lambda x: 1 - jnp.tanh(x) ** 2,
        lambda x: 4 * slope_of_sigmoid(2 * x),
        lambda x: -8 * slope_of_sigmoid(2 * x) * mp.tanh(x),
    ),
    Formula(
        "1 - tanh(x)",
        lambda x: 1 - jnp.tanh(x),
        lambda x: 2 * sigmoid(-2 * x),
        lambda x: -4 * slope_of_sigmoid(2 * x),
    ),
    Formula(
        "1 - erf(x)",
        lambda x: 1 - jax.lax.erf(x),
        mp.erfc,
        lambda x: -2 / mp.sqrt(mp.pi) * mp.exp(-x * x),
        low=-1e4,
        high=1e4,
    ),
    Formula(
        "0.5 (1 + erf(x / sqrt(2)))",
        lambda x: 0.5 * (1 + jax.lax.erf(x / 2**0.5)),
        cdf,
        pdf,
        low=-1e4,
        high=1e4,
    ),
    Formula(
        "1 - cos(x)",
        lambda x: 1 - jnp.cos(x),
        lambda x: 2 * mp.sin(x / 2) ** 2,
        mp.sin,
        low=-100,
        high=100,
    ),
    Formula("1 / (1 + exp(-x))", lambda x: 1 / (1 + jnp.exp(-x)), sigmoid, slope_of_sigmoid),
    Formula(
        "exp(x) / (1 + exp(x))", lambda x: jnp.exp(x) / (1 + jnp.exp(x)), sigmoid, slope_of_sigmoid
    ),
    Formula(
        "tanh(x) by exponentials",
        lambda x: (jnp.exp(x) - jnp.exp(-x)) / (jnp.exp(x) + jnp.exp(-x)),
        mp.tanh,
        lambda x: 4 * slope_of_sigmoid(2 * x),
    ),
    Formula(
        "x**2 - 1.5**2",
        lambda x: x**2 - jnp.full_like(x, 1.5) ** 2,
        lambda x: (x - 1.5) * (x + 1.5),
        lambda x: 2 * x,
    ),
    Formula(
        "sqrt(x**2 + 1.5**2)",
        lambda x: jnp.sqrt(x**2 + jnp.full_like(x, 1.5) ** 2),
        lambda x: mp.hypot(x, 1.5),
        lambda x: x / mp.hypot(x, 1.5),
    ),
    Formula(
        "x log(x)",
        lambda x: x * jnp.log(x),
        lambda x: x * mp.log(x) if x else x,
        lambda x: mp.log(x) + 1,
        low=1e-30,
    ),
    Formula(
        "where(x > 0, log(x), 0)",
        lambda x: jnp.where(x > 0, jnp.log(x), 0),
        lambda x: mp.log(x) if x > 0 else mp.mpf(0),
        lambda x: 1 / x if x > 0 else mp.mpf(0),
    ),
    Formula(
        "where(x > 0, x, exp(x) - 1)",
        lambda x: jnp.where(x > 0, x, jnp.exp(x) - 1),
        lambda x: x if x > 0 else mp.expm1(x),
        lambda x: mp.mpf(1) if x > 0 else mp.exp(x),
    ),
    Formula(
        "log(exp(x) - exp(x / 2))",
        lambda x: jnp.log(jnp.exp(x) - jnp.exp(x / 2)),
        lambda x: x + log1mexp(-x / 2),
        lambda x: 1 + 0.5 / mp.expm1(x / 2) if x < 1e6 else mp.mpf(1),
        low=1e-30,
    ),
    Formula(
        "log(sum(exp([x, 0, 1.5])))",
        lambda x: jnp.log(jnp.sum(jnp.exp(with_others(x)), axis=-1)),
        lambda x: mp.log(1 + mp.exp(1.5) + mp.exp(x)) if x < 1e3 else x,
        lambda x: sigmoid(x - LOG_OTHERS),
    ),
    Formula(
        "log(softmax([x, 0, 1.5])[0])",
        lambda x: jnp.log(jax.nn.softmax(with_others(x), axis=-1)[..., 0]),
        lambda x: -mp.log1p(mp.exp(LOG_OTHERS - x)) if x > -1e3 else x - LOG_OTHERS,
        lambda x: sigmoid(LOG_OTHERS - x),
    ),
    Formula(
        "log(w @ exp([x, 0, 1.5]))",
        lambda x: jnp.log(jnp.exp(with_others(x)) @ jnp.array([0.5, 0.25, 2.0], x.dtype)),
        lambda x: mp.log(0.5 * mp.exp(x) + WEIGHTED) if x < 1e3 else x - mp.log(2),
        lambda x: sigmoid(x - mp.log(2 * WEIGHTED)),
    ),
    Formula(
        "log(exp(x) / 2 + |x| / 4)",
        lambda x: jnp.log(0.5 * jnp.exp(x) + jax.lax.stop_gradient(0.25 * jnp.abs(x))),
        lambda x: mp.log(mp.exp(x) / 2 + abs(x) / 4) if x < 1e3 else x - mp.log(2),
        lambda x: mp.exp(x) / 2 / (mp.exp(x) / 2 + abs(x) / 4) if x < 1e3 else mp.mpf(1),
    ),
    Formula(
        "softmax([x, 0, 1.5])[0]",
        lambda x: (
            jnp.exp(with_others(x)) / jnp.sum(jnp.exp(with_others(x)), axis=-1, keepdims=True)
        )[..., 0],
        lambda x: sigmoid(x - LOG_OTHERS),
        lambda x: slope_of_sigmoid(x - LOG_OTHERS),
    ),
    Formula(
        "exp(x) / (exp(x) + exp(1.5))",
        lambda x: jnp.exp(x) / (jnp.exp(x) + jnp.exp(jnp.full_like(x, 1.5))),
        lambda x: sigmoid(x - 1.5),
        lambda x: slope_of_sigmoid(x - 1.5),
    ),
    Formula(
        "softmax([x, 0, 1.5]) @ [1, 0, 0]",
        lambda x: (
            (jnp.exp(with_others(x)) @ jnp.array([1.0, 0, 0], x.dtype))
            / jnp.sum(jnp.exp(with_others(x)), axis=-1)
        ),
        lambda x: sigmoid(x - LOG_OTHERS),
        lambda x: slope_of_sigmoid(x - LOG_OTHERS),
    ),
    Formula(
        "x / (1 + exp(-x))",
        lambda x: x / (1 + jnp.exp(-x)),
        lambda x: x * sigmoid(x),
        lambda x: sigmoid(x) * (1 + x * sigmoid(-x)),
    ),
    Formula(
        "1 / (exp(x) + exp(-x))",
        lambda x: 1 / (jnp.exp(x) + jnp.exp(-x)),
        lambda x: mp.sech(x) / 2,
        lambda x: -mp.sech(x) * mp.tanh(x) / 2,
    ),
    Formula("exp(x) - 1 - x", lambda x: jnp.exp(x) - 1 - x, excess_of_exp, mp.expm1),
    Formula(
        "x - 1 - log(x)",
        lambda x: x - 1 - jnp.log(x),
        lambda x: x - 1 - mp.log(x),
        lambda x: 1 - 1 / x,
        low=1e-30,
    ),
    Formula(
        "exp(2.5 log(x))",
        lambda x: jnp.exp(2.5 * jnp.log(x)),
        lambda x: x**2.5,
        lambda x: 2.5 * x**1.5,
        low=0.0,
    ),
    Formula(
        "variance of [x, 1.5]",
        lambda x: jnp.mean(with_other(x) ** 2, axis=-1) - jnp.mean(with_other(x), axis=-1) ** 2,
        lambda x: ((x - 1.5) / 2) ** 2,
        lambda x: (x - 1.5) / 2,
    ),
    Formula(
        "x**2 - 3 x + 1.5**2",
        lambda x: x**2 - 2 * x * jnp.full_like(x, 1.5) + jnp.full_like(x, 1.5) ** 2,
        lambda x: (x - 1.5) ** 2,
        lambda x: 2 * (x - 1.5),
    ),
    Formula(
        "norm of [x, 0]",
        lambda x: jnp.linalg.norm(jnp.stack((x, 0 * x), axis=-1), axis=-1),
        abs,
        mp.sign,
    ),
    Formula(
        "[x, 0] / norm",
        lambda x: x / jnp.sqrt(jnp.sum(jnp.stack((x, 0 * x), axis=-1) ** 2, axis=-1)),
        mp.sign,
        lambda x: mp.mpf(0),
    ),
    Formula("x / x", lambda x: x / x, lambda x: mp.mpf(1), lambda x: mp.mpf(0)),
    Formula(
        "(exp(x) - 1) / x", lambda x: (jnp.exp(x) - 1) / x, *over(mp.expm1, mp.exp), -80, -1e-12
    ),
    Formula(
        "(exp(x) - 1) / x > 0", lambda x: (jnp.exp(x) - 1) / x, *over(mp.expm1, mp.exp), 1e-12, 11
    ),
    Formula("sin(x) / x", lambda x: jnp.sin(x) / x, *over(mp.sin, mp.cos), -1, 1),
    Formula("tanh(x) / x", lambda x: jnp.tanh(x) / x, *over(mp.tanh, sech2), -8, 8),
    Formula("log(1 + x) / x", lambda x: jnp.log(1 + x) / x, *over(mp.log1p, slope_of_log1p), 1e-12),
    Formula(
        "(1 - cos(x)) / x**2",
        lambda x: (1 - jnp.cos(x)) / x**2,
        *over(lambda x: 1 - mp.cos(x), mp.sin, power=2),
        low=-1,
        high=1,
    ),
)
