"""`filter_pmap` on two devices."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxlike
from eqxlike import filter_pmap

MATRIX = jnp.arange(6.0).reshape(2, 3)


def test_methods_are_mapped():
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


def test_arrays_of_the_function_are_not_constants():
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


def test_each_device_has_one_index_and_other_leaves_pass():
    factors = jnp.ones(5)
    mapped = filter_pmap(lambda x, s, n, y=factors: (n * x + y.sum(), s, n), in_axes=0)
    output, text, number = mapped(MATRIX, "s", 2.0)
    assert (output.tolist(), text, number) == ((2 * MATRIX + 5).tolist(), "s", 2.0)
    assert [shard.data.shape for shard in output.addressable_shards] == [(1, 3)] * 2


def test_axes_may_be_counted_from_the_end():
    swapped = filter_pmap(lambda x: x, in_axes=-1, out_axes=-1)(MATRIX.T)
    assert swapped.tolist() == MATRIX.T.tolist()


def test_axis_size_and_devices():
    constant = filter_pmap(lambda x: x, in_axes=None, axis_size=2)(jnp.array(2.0))
    assert constant.tolist() == [2, 2]
    device = jax.devices()[1]
    assert filter_pmap(lambda x: x, devices=[device])(MATRIX[:1]).devices() == {device}


def test_out_axes_place_the_mapped_axis():
    mapped = filter_pmap(
        lambda x: (x, x, 3, "s", jax.lax.psum(x, "i"), x),
        axis_name="i",
        out_axes=(1, 0, 0, eqxlike.if_array(0), None, None),
    )
    output = mapped(MATRIX)
    assert ([np.shape(leaf) for leaf in output[:3]], output[3]) == ([(3, 2), (2, 3), (2,)], "s")
    # Without an out axis, the output is the first device's output.
    assert [leaf.tolist() for leaf in output[4:]] == [[3, 5, 7], [0, 1, 2]]


# --- compiling ----------------------------------------------------------------------------------


def test_traces_once_for_each_structure_and_static():
    traces = []

    def function(x, s):
        traces.append(s)
        return x

    for static in ("a", "b", "a"):
        filter_pmap(function)(MATRIX, static)
    assert traces == ["a", "b"]


def test_mapped_function_is_lowered_and_called_in_filter_jit():
    mapped = filter_pmap(lambda x, s: (2 * x, s))
    with jax.checking_leaks():
        jitted = eqxlike.filter_jit(lambda x: mapped(x, "s"))(MATRIX)
    for doubled, text in (mapped.lower(MATRIX, "s").compile()(MATRIX, "s"), jitted):
        assert (doubled.tolist(), text) == ((2 * MATRIX).tolist(), "s")
    for call in (mapped, mapped.lower):
        with pytest.raises(RuntimeError, match="keyword arguments cannot be used"):
            call(MATRIX, s="s")


def test_donates_all():
    increment = filter_pmap(lambda x: x + 1, donate="all")
    once = increment(MATRIX)
    twice = increment(once)
    assert (once.is_deleted(), twice.tolist()) == (True, (MATRIX + 2).tolist())
    # A donated buffer that the output cannot use is no error.
    for word in ("all", "warn", "none"):
        assert filter_pmap(lambda x: x.sum(), donate=word)(MATRIX).tolist() == [3, 12]
