"""Digits of formulas before and after `graph.stabilise`, compared with 200 bits.

    python -m benchmarks.stable_maths [--inputs 10000] [--dtypes float32,float64,...]

A row is the largest error of a formula over inputs from the whole range of a dtype, of the value
and of the gradient, in units in the last place.
"""

import argparse
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import mpmath as mp
import numpy as np
from jax import Array

from eqxlike import graph

mp.mp.prec = 200  # pyright: ignore[reportAttributeAccessIssue]


class Formula(NamedTuple):
    """A formula of one number, as people write it; the function and its derivative in mpmath."""

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
        lambda x: mp.log(-mp.expm1(x)) if x > -1 else mp.log1p(-mp.exp(x)),
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
    Formula("log(1 + x)", lambda x: jnp.log(1 + x), mp.log1p, lambda x: 1 / (1 + x), low=-0.99),
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
        lambda x: -sigmoid(x) * sigmoid(-x),
    ),
    Formula(
        "1 - tanh(x)**2",
        lambda x: 1 - jnp.tanh(x) ** 2,
        lambda x: 4 * sigmoid(2 * x) * sigmoid(-2 * x),
        lambda x: -8 * sigmoid(2 * x) * sigmoid(-2 * x) * mp.tanh(x),
    ),
    Formula(
        "1 - tanh(x)",
        lambda x: 1 - jnp.tanh(x),
        lambda x: 2 * sigmoid(-2 * x),
        lambda x: -4 * sigmoid(2 * x) * sigmoid(-2 * x),
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
    Formula(
        "1 / (1 + exp(-x))",
        lambda x: 1 / (1 + jnp.exp(-x)),
        sigmoid,
        lambda x: sigmoid(x) * sigmoid(-x),
    ),
    Formula(
        "exp(x) / (1 + exp(x))",
        lambda x: jnp.exp(x) / (1 + jnp.exp(x)),
        sigmoid,
        lambda x: sigmoid(x) * sigmoid(-x),
    ),
    Formula(
        "tanh(x) by exponentials",
        lambda x: (jnp.exp(x) - jnp.exp(-x)) / (jnp.exp(x) + jnp.exp(-x)),
        mp.tanh,
        lambda x: 4 * sigmoid(2 * x) * sigmoid(-2 * x),
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
)


def inputs(formula: Formula, dtype: Any, count: int) -> np.ndarray:
    """A third of the inputs near zero, a third of ordinary size, a third of all sizes."""
    chance = np.random.default_rng(0)
    limits = jnp.finfo(dtype)
    third = count // 3
    smallest, largest = np.log10(float(limits.tiny)), np.log10(float(limits.max)) - 0.1
    sizes = np.concatenate(
        (
            10 ** chance.uniform(-8, 0, third),
            chance.uniform(0, 120, third),
            10 ** chance.uniform(smallest, largest, count - 2 * third),
        )
    )
    x = np.append(sizes * chance.choice((-1, 1), count), (0.0, 1.0, -1.0))
    x = np.asarray(jnp.asarray(x, dtype))
    return x[(x.astype(float) >= formula.low) & (x.astype(float) <= formula.high)]


def ulps(found: np.ndarray, exact: list[Any], dtype: Any) -> float:
    """The largest error in units in the last place; infinite for a NaN, or a wrong infinity."""
    limits = jnp.finfo(dtype)
    largest, worst = mp.mpf(float(limits.max)), 0.0
    for value, right in zip(found.astype(np.float64), exact, strict=True):
        if abs(right) < 2 * limits.tiny and abs(value) < 3 * limits.tiny:
            error = 0.0  # XLA returns zero for the smallest numbers.
        elif abs(right) > largest:
            error = 0.0 if np.isinf(value) and (value > 0) == (right > 0) else np.inf
        elif not np.isfinite(value):
            error = np.inf
        else:
            size = max(abs(right), mp.mpf(float(limits.tiny)))
            unit = mp.mpf(2) ** (mp.floor(mp.log(size, 2)) - limits.nmant)
            error = float(abs(mp.mpf(float(value)) - right) / unit)
        worst = max(worst, error)
    return worst


def errors(formula: Formula, dtype: Any, count: int) -> Iterator[tuple[str, float, float]]:
    """The errors of value and gradient, before and after; none in a dtype that JAX refuses."""
    x = inputs(formula, dtype, count)
    try:
        jax.eval_shape(formula.naive, x)
    except (TypeError, ValueError):
        return
    numbers = [mp.mpf(float(each)) for each in x]
    for what, exact in (("value", formula.exact), ("gradient", formula.derivative)):
        right = [exact(each) for each in numbers]
        found = []
        for function in (formula.naive, graph.stabilise(formula.naive)):
            if what == "gradient":
                function = jax.vmap(jax.grad(function))
            found.append(ulps(np.asarray(jax.jit(function)(x)), right, dtype))
        yield (what, *found)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--dtypes", default="float32,float64,bfloat16,float16")
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    print(f"{'formula':30} {'dtype':9} {'of':9} {'before':>10} {'after':>10}")
    for formula in FORMULAS:
        if options.only not in formula.name:
            continue
        for dtype in options.dtypes.split(","):
            for what, before, after in errors(formula, dtype, options.inputs):
                mark = "" if after <= max(before, 4) else "  worse"
                print(
                    f"{formula.name:30} {dtype:9} {what:9} {before:10.3g} {after:10.3g}{mark}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
