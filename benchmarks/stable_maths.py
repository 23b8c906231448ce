"""Digits of formulas before and after `graph.stabilise`, compared with 200 bits.

    python -m benchmarks.stable_maths [--inputs 10000] [--dtypes float32,float64,...] [--plot]

A row is the largest error of a formula over inputs from the whole range of a dtype, of the value
and of the gradient, in units in the last place.
"""

import argparse
import math
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import mpmath as mp
import numpy as np
from jax import Array

from docs.site.chart import THEMES
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


def log1mexp(x):
    return mp.log(-mp.expm1(x)) if x > -1 else mp.log1p(-mp.exp(x))


def excess_of_exp(x):
    return mp.expm1(x) - x if x < 1e6 else mp.exp(x)


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
        lambda x: sigmoid(x - LOG_OTHERS) * sigmoid(LOG_OTHERS - x),
    ),
    Formula(
        "exp(x) / (exp(x) + exp(1.5))",
        lambda x: jnp.exp(x) / (jnp.exp(x) + jnp.exp(jnp.full_like(x, 1.5))),
        lambda x: sigmoid(x - 1.5),
        lambda x: sigmoid(x - 1.5) * sigmoid(1.5 - x),
    ),
    Formula(
        "softmax([x, 0, 1.5]) @ [1, 0, 0]",
        lambda x: (
            (jnp.exp(with_others(x)) @ jnp.array([1.0, 0, 0], x.dtype))
            / jnp.sum(jnp.exp(with_others(x)), axis=-1)
        ),
        lambda x: sigmoid(x - LOG_OTHERS),
        lambda x: sigmoid(x - LOG_OTHERS) * sigmoid(LOG_OTHERS - x),
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


class Error(NamedTuple):
    """The largest error of a formula, before and after it is stabilised.

    - `of`: `"value"` or `"gradient"`.
    """

    name: str
    of: str
    before: float
    after: float


def errors(formulas: Sequence[Formula], dtype: Any, count: int) -> Iterator[Error]:
    """The errors of formulas, as one program; not of those that JAX refuses in this dtype."""
    known = [each for each in formulas if _is_known(each, dtype)]
    xs = [inputs(formula, dtype, count) for formula in known]
    for formula, x, pair in zip(known, xs, _results(known, xs), strict=True):
        numbers = [mp.mpf(float(each)) for each in x]
        for place, (of, exact) in enumerate(
            (("value", formula.exact), ("gradient", formula.derivative))
        ):
            right = [exact(each) for each in numbers]
            before, after = (ulps(np.asarray(found[place]), right, dtype) for found in pair)
            yield Error(formula.name, of, before, after)


def _is_known(formula: Formula, dtype: Any) -> bool:
    try:
        jax.eval_shape(formula.naive, jax.ShapeDtypeStruct((1,), dtype))
    except (TypeError, ValueError):
        return False
    return True


def _results(formulas: Sequence[Formula], xs: Sequence[np.ndarray]) -> Any:
    """Value and gradient of each formula, before and after."""

    def run(xs: Sequence[Array]) -> Any:
        return [
            [
                (function(x), jax.vmap(jax.grad(function))(x))
                for function in (formula.naive, graph.stabilise(formula.naive))
            ]
            for formula, x in zip(formulas, xs, strict=True)
        ]

    return jax.jit(run)(xs)


PICTURES = {"log(1 + exp(x))": (-40, 120), "1 - tanh(x)**2": (-20, 20), "log(1 - exp(x))": (-40, 0)}
"""The formulas of the picture, and the range of x."""

IMAGES = pathlib.Path(__file__).parents[1] / "docs" / "images"
WIDTH, PANEL, LEFT, HEIGHT, MOST = 560, 158, 52, 92, 8


def plot() -> None:
    """Writes the picture of the digits that are right, in both colour schemes."""
    panels = []
    for formula in (each for name in PICTURES for each in FORMULAS if each.name == name):
        x = np.linspace(*PICTURES[formula.name], 161, dtype=np.float32)
        x = x[x < formula.high]
        right = [formula.exact(mp.mpf(float(each))) for each in x]
        (pair,) = _results([formula], [x])
        panels.append((formula.name, x, [_digits(np.asarray(found[0]), right) for found in pair]))
    for theme in THEMES:
        (IMAGES / f"stable-maths-{theme}.svg").write_text(_drawn(panels, theme))


def _digits(found: np.ndarray, exact: Sequence[Any]) -> list[float]:
    """The decimal digits that are right; none of a NaN or an infinity."""

    def digits(value: float, right: Any) -> float:
        if not np.isfinite(value):
            return 0.0
        relative = float(abs(mp.mpf(value) - right) / abs(right))
        return min(max(-math.log10(max(relative, 10.0**-MOST)), 0), MOST)

    return [digits(float(value), right) for value, right in zip(found, exact, strict=True)]


def _drawn(panels: Sequence[tuple[str, np.ndarray, list[list[float]]]], theme: str) -> str:
    ink, soft, line, (after, before, _) = THEMES[theme]
    height = PANEL * len(panels) + 62
    label = "Decimal digits that are right in float32: " + ", ".join(name for name, *_ in panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{label}; before and after graph.stabilise" '
        'font-family="system-ui, -apple-system, Segoe UI, Roboto, Noto Sans, sans-serif">'
    ]
    for x, colour, text in ((16, before, "as written"), (126, after, "after graph.stabilise")):
        parts.append(f'<circle cx="{x}" cy="20" r="5" fill="{colour}"/>')
        parts.append(_text(x + 12, 25, text, ink, 14))
    for index, (name, x, both) in enumerate(panels):
        top = PANEL * index + 68
        scale = (WIDTH - LEFT - 24) / float(x[-1] - x[0])
        parts.append(_text(LEFT, top - 10, name, ink, 15))
        for digits in (0, 2, 4, 6, 8):
            y = top + HEIGHT * (1 - digits / MOST)
            parts.append(
                f'<line x1="{LEFT}" x2="{WIDTH - 24}" y1="{y:.1f}" y2="{y:.1f}" stroke="{line}"/>'
            )
            parts.append(_text(LEFT - 8, y + 4, str(digits), soft, 12, "end"))
        for tick in np.linspace(float(x[0]), math.ceil(x[-1]), 5):
            at = LEFT + (tick - float(x[0])) * scale
            parts.append(_text(at, top + HEIGHT + 20, f"{tick:g}", soft, 12, "middle"))
        for colour, digits in zip((before, after), both, strict=True):
            parts += (
                f'<circle cx="{LEFT + float(place - x[0]) * scale:.1f}" '
                f'cy="{top + HEIGHT * (1 - each / MOST):.1f}" r="2" fill="{colour}"/>'
                for place, each in zip(x, digits, strict=True)
            )
    note = "Decimal digits of the value that are right, in float32; none is a NaN or an infinity."
    parts.append(_text(16, height - 10, note, soft, 12))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _text(x: float, y: float, text: str, colour: str, size: int, anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" font-size="{size}" '
        f'text-anchor="{anchor}">{text}</text>'
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--dtypes", default="float32,float64,bfloat16,float16")
    parser.add_argument("--only", default="", help="formulas whose names contain this")
    parser.add_argument("--plot", action="store_true", help="write the picture in docs/images")
    options = parser.parse_args()
    if options.plot:
        return plot()
    jax.config.update("jax_enable_x64", True)
    print(f"{'formula':30} {'dtype':9} {'of':9} {'before':>10} {'after':>10}")
    formulas = [each for each in FORMULAS if options.only in each.name]
    for dtype in options.dtypes.split(","):
        for name, of, before, after in errors(formulas, dtype, options.inputs):
            mark = "" if after <= max(before, 4) else "  worse"
            print(f"{name:30} {dtype:9} {of:9} {before:10.3g} {after:10.3g}{mark}", flush=True)


if __name__ == "__main__":
    main()
