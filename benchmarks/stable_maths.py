"""The precision of formulas before and after `graph.stabilise`, compared with 200-bit arithmetic.

    python -m benchmarks.stable_maths [--inputs 10000] [--dtypes float32,float64,...]
    python -m benchmarks.stable_maths --cost [--rounds 15]
    python -m benchmarks.stable_maths --plot

A row shows the largest errors of a formula's value and gradient over inputs from the whole range of
a dtype, in units in the last place. `--cost` prints the times of stabilised programs relative to
the original programs, for compiled calls and for the first call.
"""

import argparse
import math
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import mpmath as mp
import numpy as np
from jax import Array

import eqxlike
from benchmarks import layer_models
from benchmarks.stable_formulas import FORMULAS, Formula
from docs.site.chart import THEMES
from eqxlike import graph


def inputs(formula: Formula, dtype: Any, count: int) -> np.ndarray:
    """Random inputs: a third near zero, a third of ordinary size, and a third of any size."""
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


def ulps(found: np.ndarray, exact: list[Any], dtype: Any) -> np.ndarray:
    """The errors in units in the last place. Infinite for a NaN or a wrong infinity."""
    limits, errors = jnp.finfo(dtype), []
    largest = mp.mpf(float(limits.max))
    for value, right in zip(found.astype(np.float64), exact, strict=True):
        if abs(right) < 2 * limits.tiny and abs(value) < 3 * limits.tiny:
            error = 0.0  # XLA flushes subnormal numbers to zero
        elif abs(right) > largest:
            error = 0.0 if np.isinf(value) and (value > 0) == (right > 0) else np.inf
        elif not np.isfinite(value):
            error = np.inf
        else:
            size = max(abs(right), mp.mpf(float(limits.tiny)))
            unit = mp.mpf(2) ** (mp.floor(mp.log(size, 2)) - limits.nmant)
            error = float(abs(mp.mpf(float(value)) - right) / unit)
        errors.append(error)
    return np.array(errors)


class Error(NamedTuple):
    """The largest error of a formula, before and after it is stabilised.

    - `of`: `"value"` or `"gradient"`.
    - `ratio`: the largest ratio of the error after to the error before. Errors before of less than
      4 ulp count as 4 ulp.
    """

    name: str
    of: str
    before: float
    after: float
    ratio: float


def errors(formulas: Sequence[Formula], dtype: Any, count: int) -> Iterator[Error]:
    """The errors of the formulas that JAX supports in this dtype, computed by one program."""
    known = [each for each in formulas if _is_known(each, dtype)]
    xs = [inputs(formula, dtype, count) for formula in known]
    for formula, x, pair in zip(known, xs, _results(known, xs), strict=True):
        numbers = [mp.mpf(float(each)) for each in x]
        for place, (of, exact) in enumerate(
            (("value", formula.exact), ("gradient", formula.derivative))
        ):
            right = [exact(each) for each in numbers]
            before, after = (ulps(np.asarray(found[place]), right, dtype) for found in pair)
            with np.errstate(invalid="ignore"):
                ratio = np.nan_to_num(after / np.maximum(before, 4), nan=1.0)
            yield Error(formula.name, of, before.max(), after.max(), ratio.max())


def _is_known(formula: Formula, dtype: Any) -> bool:
    try:
        jax.eval_shape(formula.naive, jax.ShapeDtypeStruct((1,), dtype))
    except (TypeError, ValueError):
        return False
    return True


def _results(formulas: Sequence[Formula], xs: Sequence[np.ndarray]) -> Any:
    """Value and gradient of each formula, before and after stabilisation."""

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
"""The formulas in the picture, and the ranges of x."""

IMAGES = pathlib.Path(__file__).parents[1] / "docs" / "images"
WIDTH, PANEL, LEFT, HEIGHT, MOST = 560, 158, 52, 92, 8


def plot() -> None:
    """Writes the picture of correct digits, in both colour schemes."""
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
    """The number of correct decimal digits, which is 0 for NaN and infinity."""

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


Program = tuple[str, Callable[..., Any], tuple[Any, ...]]
"""A name, a function that is differentiable in its first argument, and its arguments."""


def naive_loss(model: Any, x: Array, labels: Array) -> Array:
    p = jax.nn.softmax(jax.vmap(model)(x).reshape(len(x), -1))
    return -jnp.mean(jnp.log(p[jnp.arange(len(x)), labels]))


def whole_programs() -> Iterator[Program]:
    key = jax.random.key(0)
    labels = jnp.arange(16)
    mlp = layer_models.mlp(eqxlike, layer_models.MLPSizes(64, 256, 2, 10), key)
    yield "MLP 64-256-256-10", naive_loss, (mlp, jax.random.normal(key, (16, 64)), labels % 10)
    sizes = layer_models.TransformerSizes(width=64, heads=4, depth=12)
    transformer = layer_models.transformer(eqxlike, sizes, key)
    x = jax.random.normal(key, (16, 8, 64))
    yield "Transformer of 12, width 64", naive_loss, (transformer, x, labels)


def costs(programs: Sequence[Program], rounds: int) -> Iterator[str]:
    """The times of value and gradient after `stabilise`, relative to the original function.

    Calls alternate, and each time is the minimum over rounds. JAX's caches are cleared before first
    calls.
    """
    yield f"{'':32} {'compiled':>10} {'':>6} {'first call':>10} {'':>6}"
    for name, function, args in programs:
        pair = [
            eqxlike.filter_jit(eqxlike.filter_value_and_grad(each))
            for each in (function, graph.stabilise(function))
        ]
        first, compiled = [math.inf] * 2, [math.inf] * 2
        for _ in range(3):
            for i, each in enumerate(pair):
                jax.clear_caches()
                first[i] = min(first[i], _seconds(each, args))
        for each in pair:
            each(*args)
        for _ in range(rounds):
            for i, each in enumerate(pair):
                compiled[i] = min(compiled[i], _seconds(each, args))
        yield (
            f"{name:32} {compiled[0] * 1e6:7.0f} us {compiled[1] / compiled[0]:6.2f} "
            f"{first[0] * 1e3:7.0f} ms {first[1] / first[0]:6.2f}"
        )


def _seconds(function: Callable[..., Any], args: tuple[Any, ...]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(function(*args))
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--dtypes", default="float32,float64,bfloat16,float16")
    parser.add_argument("--only", default="", help="only formulas whose names contain this")
    parser.add_argument(
        "--cost", action="store_true", help="measure the time of stabilised programs"
    )
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--plot", action="store_true", help="write the picture in docs/images")
    options = parser.parse_args()
    if options.plot:
        return plot()
    formulas = [each for each in FORMULAS if options.only in each.name]
    if options.cost:
        x = 2 * jax.random.normal(jax.random.key(0), (200_000,))
        alone: list[Program] = [
            (each.name, lambda x, f=each.naive: jnp.sum(f(x)), (x,)) for each in formulas
        ]
        print(*costs([*whole_programs(), *alone], options.rounds), sep="\n", flush=True)
        return None
    jax.config.update("jax_enable_x64", True)
    print(f"{'formula':30} {'dtype':9} {'of':9} {'before':>10} {'after':>10} {'ratio':>10}")
    for dtype in options.dtypes.split(","):
        for name, of, before, after, ratio in errors(formulas, dtype, options.inputs):
            mark = "" if after <= max(before, 4) else "  worse"
            print(
                f"{name:30} {dtype:9} {of:9} {before:10.3g} {after:10.3g} {ratio:10.3g}{mark}",
                flush=True,
            )


if __name__ == "__main__":
    main()
