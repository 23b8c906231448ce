"""Diffrax: the output of progress meters."""

import contextlib
import io
import re

import diffrax as dfx
import equinox as eqx
import jax
import jax.numpy as jnp

from tests.downstream.registry import Programs

programs = Programs()


@eqx.filter_jit
def solved(meter, starts):
    def one(start):
        return dfx.diffeqsolve(
            dfx.ODETerm(lambda t, y, args: -y * jnp.cos(t)),
            dfx.Dopri5(),
            0.0,
            2.0,
            0.01,
            start,
            progress_meter=meter,
        ).ys

    return one(starts) if starts.ndim == 1 else jax.vmap(one)(starts)


def percentages(text):
    """The percentages in the output of a meter."""
    return [float(found) for found in re.findall(r"([\d.]+)%", text)]


def shown(meter, starts):
    """The solution, and the percentages that the meter printed to stdout and stderr."""
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        found = jax.block_until_ready(solved(meter, starts))
        jax.effects_barrier()
    return found, percentages(output.getvalue()), percentages(errors.getvalue())


@programs.sample
def text():
    found, figures, _ = shown(dfx.TextProgressMeter(), jnp.array([1.0, 2.0]))
    assert figures[0] == 0
    assert figures[-1] == 100
    return {"solution": found, "shown": figures}


@programs.add
def text_of_a_batch():
    starts = jnp.array([[1.0, 2.0], [0.3, 0.1]])
    found, figures, _ = shown(dfx.TextProgressMeter(minimum_increase=0.1), starts)
    return {"solution": found, "shown": figures}


@programs.sample
def tqdm():
    """tqdm skips updates that follow each other quickly, so the number of percentages varies."""
    found, _, figures = shown(dfx.TqdmProgressMeter(), jnp.array([1.0, 2.0]))
    return {"solution": found, "first": figures[0], "is growing": figures == sorted(figures)}


@programs.add
def none():
    found, output, errors = shown(dfx.NoProgressMeter(), jnp.array([1.0, 2.0]))
    return {"solution": found, "shown": output + errors}
