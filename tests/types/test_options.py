"""The options of which type checkers are told are those that JAX takes."""

import inspect

import jax
import pytest

import eqxlike as eqx
from eqxlike._transforms._signatures import GradOptions, JitOptions, PmapOptions, VmapOptions


@pytest.mark.parametrize(
    ("options", "ours", "theirs"),
    [
        (JitOptions, eqx.filter_jit, jax.jit),
        (VmapOptions, eqx.filter_vmap, jax.vmap),
        (PmapOptions, eqx.filter_pmap, jax.pmap),
        (GradOptions, eqx.filter_grad, jax.value_and_grad),
    ],
)
def test_each_option_is_taken(options, ours, theirs):
    taken = {*inspect.signature(ours).parameters, *inspect.signature(theirs).parameters}
    assert set(options.__annotations__) <= taken
