"""Keyword arguments of `jax.jit`."""

import jax
import pytest

from eqxlike import filter_jit
from tests.transforms.jit.models import X, double, equal


@pytest.mark.parametrize(
    "name",
    ["static_argnums", "static_argnames", "donate_argnums", "donate_argnames", "abstracted_axes"],
)
def test_keyword_that_makes_no_sense_is_refused_by_name(name):
    with pytest.raises(ValueError, match=name):
        filter_jit(double, **{name: 0})


@pytest.mark.parametrize(
    "name",
    ["static_argnums", "static_argnames", "donate_argnums", "donate_argnames", "abstracted_axes"],
)
def test_keyword_that_makes_no_sense_is_refused_whatever_its_value(name):
    with pytest.raises(ValueError, match=name):
        filter_jit(double, **{name: None})


def test_keyword_unknown_to_jax_is_an_error_at_decoration():
    with pytest.raises(TypeError, match="no_such_keyword"):
        filter_jit(double, no_such_keyword=1)


def test_keep_unused_reaches_jax():
    function = lambda x, y: x
    num_inputs = [
        filter_jit(function, keep_unused=keep).lower(X, X).as_text().count("%arg")
        for keep in (False, True)
    ]
    assert num_inputs[0] < num_inputs[1]


def test_inline_reaches_jax():
    def parameters(jit, inline):
        # JAX either writes what is inlined into the outer function, or says so in a parameter.
        jaxpr = jax.make_jaxpr(jit(lambda x: x + 1, inline=inline))(X)
        return [(each.primitive.name, each.params.get("inline")) for each in jaxpr.eqns]

    assert parameters(filter_jit, True) == parameters(jax.jit, True)
    assert parameters(filter_jit, True) != parameters(filter_jit, False)


def test_compiler_options_may_be_a_dict():
    jitted = filter_jit(double, compiler_options={"xla_cpu_enable_fast_math": True})
    assert equal(jitted(X), 2 * X)
