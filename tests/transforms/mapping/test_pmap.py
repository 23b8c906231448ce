"""`filter_pmap` on two devices."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxlike
from eqxlike import filter_pmap

MATRIX = jnp.arange(6.0).reshape(2, 3)


# --- signatures and what is wrapped -------------------------------------------------------------


def test_methods_are_mapped_and_decorators_take_arguments():
    class Model(eqxlike.Module):
        weight: Any

        @filter_pmap
        def each(self, x):
            return self.weight * x

        @filter_pmap(in_axes=(None, 0), axis_name="i")
        def shared(self, x):
            return self.weight.sum() * jax.lax.pmean(x, "i")

    model, x = Model(jnp.arange(2.0)), jnp.arange(2.0)
    assert [model.each(x).tolist(), model.shared(x).tolist()] == [[0, 1], [0.5, 0.5]]


def test_the_arrays_of_the_function_itself_are_no_constants():
    class Model(eqxlike.Module):
        weight: Any

        def __call__(self, x):
            traces.append(self.weight)
            return self.weight.sum() * x

    traces = []
    for factor in (2.0, 3.0):
        scaled = filter_pmap(Model(jnp.full(5, factor)))(jnp.ones(2))
        assert scaled.tolist() == [5 * factor] * 2
    assert len(traces) == 1


# --- arguments and outputs ---------------------------------------------------------------------


def test_each_device_has_one_index_and_what_is_no_array_is_passed_on():
    factors = jnp.ones(5)
    mapped = filter_pmap(lambda x, s, n, y=factors: (n * x + y.sum(), s, n), in_axes=0)
    output, text, number = mapped(MATRIX, "s", 2.0)
    assert (output.tolist(), text, number) == ((2 * MATRIX + 5).tolist(), "s", 2.0)
    assert [shard.data.shape for shard in output.addressable_shards] == [(1, 3)] * 2


def test_axes_may_be_counted_from_the_end():
    swapped = filter_pmap(lambda x: x, in_axes=-1, out_axes=-1)(MATRIX.T)
    assert swapped.tolist() == MATRIX.T.tolist()


def test_out_axes_say_where_the_axis_goes():
    mapped = filter_pmap(
        lambda x: (x, x, 3, "s", jax.lax.psum(x, "i"), x),
        axis_name="i",
        out_axes=(1, 0, 0, eqxlike.if_array(0), None, None),
    )
    output = mapped(MATRIX)
    assert ([np.shape(leaf) for leaf in output[:3]], output[3]) == ([(3, 2), (2, 3), (2,)], "s")
    # Without an axis, the output of the first device.
    assert [leaf.tolist() for leaf in output[4:]] == [[3, 5, 7], [0, 1, 2]]


def test_axis_size_serves_where_nothing_is_mapped():
    constant = filter_pmap(lambda x: x, in_axes=None, axis_size=2)(jnp.array(2.0))
    assert constant.tolist() == [2, 2]


def test_devices_are_those_given():
    device = jax.devices()[1]
    assert filter_pmap(lambda x: x, devices=[device])(MATRIX[:1]).devices() == {device}


# --- compiling ----------------------------------------------------------------------------------


def test_traces_once_for_each_structure_and_static():
    traces = []

    def function(x, s):
        traces.append(s)
        return x

    for static in ("a", "b", "a"):
        filter_pmap(function)(MATRIX, static)
    assert traces == ["a", "b"]


def test_lowered_is_compiled_and_called():
    mapped = filter_pmap(lambda x, s: (2 * x, s))
    doubled, text = mapped.lower(MATRIX, "s").compile()(MATRIX, "s")
    assert (doubled.tolist(), text) == ((2 * MATRIX).tolist(), "s")
    for call in (mapped, mapped.lower):
        with pytest.raises(RuntimeError, match="keyword arguments cannot be used"):
            call(MATRIX, s="s")


def test_donates_all():
    increment = filter_pmap(lambda x: x + 1, donate="all")
    once = increment(MATRIX)
    twice = increment(once)
    assert (once.is_deleted(), twice.tolist()) == (True, (MATRIX + 2).tolist())
    # A buffer that cannot be used for the output is no error.
    for word in ("all", "warn", "none"):
        assert filter_pmap(lambda x: x.sum(), donate=word)(MATRIX).tolist() == [3, 12]


def test_leaves_no_tracer_under_filter_jit():
    mapped = filter_pmap(lambda x, s: (2 * x, s))
    with jax.checking_leaks():
        doubled, text = eqxlike.filter_jit(lambda x: mapped(x, "s"))(MATRIX)
    assert (doubled.tolist(), text) == ((2 * MATRIX).tolist(), "s")
