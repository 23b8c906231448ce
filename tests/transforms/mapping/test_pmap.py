"""`filter_pmap` on two devices. Where a test takes `eqx`, it holds on Equinox too."""

import inspect
from typing import Any

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxlike
from eqxlike import filter_pmap
from tests.beside_equinox import both

MATRIX = jnp.arange(6.0).reshape(2, 3)


# --- signatures and what is wrapped -------------------------------------------------------------


def test_has_the_parameters_of_equinox():
    def parameters(library):
        signature = inspect.signature(library.filter_pmap)
        return [
            (p.name, p.kind, repr(p.default))
            for p in signature.parameters.values()
            if p.name != "fun"
        ]

    assert parameters(eqxlike) == parameters(equinox)


def test_shows_what_it_wraps():
    def function(x, y: int = 3):
        """Does."""

    mapped = filter_pmap(function)
    assert (mapped.__name__, mapped.__doc__) == ("function", "Does.")
    assert inspect.signature(mapped) == inspect.signature(function)
    assert mapped.__wrapped__ is function
    assert repr(filter_pmap(max)) == f"filter_pmap({max!r})"


@both
def test_methods_are_mapped_and_decorators_take_arguments(eqx):
    class Model(eqx.Module):
        weight: Any

        @eqx.filter_pmap
        def each(self, x):
            return self.weight * x

        @eqx.filter_pmap(in_axes=(None, 0), axis_name="i")
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


@both
def test_each_device_has_one_index_and_what_is_no_array_is_passed_on(eqx):
    factors = jnp.ones(5)
    mapped = eqx.filter_pmap(lambda x, s, n, y=factors: (n * x + y.sum(), s, n), in_axes=0)
    output, text, number = mapped(MATRIX, "s", 2.0)
    assert (output.tolist(), text, number) == ((2 * MATRIX + 5).tolist(), "s", 2.0)
    assert [shard.data.shape for shard in output.addressable_shards] == [(1, 3)] * 2


@both
def test_axes_may_be_prefixes_with_functions_and_names(eqx):
    function = eqx.filter_pmap(
        lambda tree, y: tree["a"] * tree["b"] + y,
        in_axes=({"a": 1, "b": None}, lambda leaf: 0 if leaf.ndim else None),
    )
    scaled = function({"a": MATRIX.T, "b": jnp.ones(3)}, jnp.ones(()))
    assert scaled.tolist() == (MATRIX + 1).tolist()
    scaled = eqx.filter_pmap(lambda x, y: x.sum() * y.sum(), in_axes={"y": None})
    assert scaled(MATRIX, jnp.ones(3)).tolist() == [9, 36]


def test_axes_may_be_counted_from_the_end():
    swapped = filter_pmap(lambda x: x, in_axes=-1, out_axes=-1)(MATRIX.T)
    assert swapped.tolist() == MATRIX.T.tolist()


@both
def test_out_axes_say_where_the_axis_goes(eqx):
    mapped = eqx.filter_pmap(
        lambda x: (x, x, 3, "s", jax.lax.psum(x, "i"), x),
        axis_name="i",
        out_axes=(1, 0, 0, eqx.if_array(0), None, None),
    )
    output = mapped(MATRIX)
    assert ([np.shape(leaf) for leaf in output[:3]], output[3]) == ([(3, 2), (2, 3), (2,)], "s")
    # Without an axis, the output of the first device.
    assert [leaf.tolist() for leaf in output[4:]] == [[3, 5, 7], [0, 1, 2]]


def test_axis_size_serves_where_nothing_is_mapped():
    constant = filter_pmap(lambda x: x, in_axes=None, axis_size=2)(jnp.array(2.0))
    assert constant.tolist() == [2, 2]


def test_keys_and_arrays_of_numpy_are_mapped_and_modules_stacked():
    class Model(eqxlike.Module):
        weight: Any
        name: str = eqxlike.field(static=True)

    keys = jax.random.split(jax.random.key(0), 2)
    data, model = filter_pmap(lambda key, x: (jax.random.key_data(key), Model(x + 1, "n")))(
        keys, np.zeros(2, np.float32)
    )
    assert data.tolist() == jax.random.key_data(keys).tolist()
    assert (model.weight.tolist(), model.name) == ([1, 1], "n")


def test_devices_are_those_given():
    device = jax.devices()[1]
    assert filter_pmap(lambda x: x, devices=[device])(MATRIX[:1]).devices() == {device}
    message = "axes of size 2, one index to a device, and there are 1 devices"
    with pytest.raises(ValueError, match=message):
        filter_pmap(lambda x: x, devices=jax.devices()[:1])(MATRIX)


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


@pytest.mark.parametrize("word", ["all", "warn", "none"])
def test_a_buffer_that_was_not_usable_is_no_error(word):
    assert filter_pmap(lambda x: x.sum(), donate=word)(MATRIX).tolist() == [3, 12]


# --- composition --------------------------------------------------------------------------------


def test_gradients_inside_and_outside():
    def gradient(weight, x):
        return jax.lax.psum(eqxlike.filter_grad(lambda w: (w * x).sum())(weight), "i")

    inside = filter_pmap(gradient, axis_name="i", in_axes=(None, 0), out_axes=None)
    scaled = filter_pmap(lambda w, x: w * x, in_axes=(None, 0))
    outside = eqxlike.filter_grad(lambda weight: scaled(weight, MATRIX).sum())
    weight = jnp.ones(3)
    assert inside(weight, MATRIX).tolist() == outside(weight).tolist() == [3, 5, 7]


def test_under_other_transformations():
    mapped = filter_pmap(lambda x, s: (2 * x, s))
    with jax.checking_leaks():
        doubled, text = eqxlike.filter_jit(lambda x: mapped(x, "s"))(MATRIX)
    assert (doubled.tolist(), text) == ((2 * MATRIX).tolist(), "s")
    over_columns = eqxlike.filter_vmap(lambda x: mapped(x, "s")[0], in_axes=1, out_axes=1)
    assert over_columns(MATRIX).tolist() == (2 * MATRIX).tolist()
    struct = jax.ShapeDtypeStruct((2, 3), jnp.float32)
    output, text = eqxlike.filter_eval_shape(mapped, struct, "s")
    assert (output.shape, text) == ((2, 3), "s")


# --- errors -------------------------------------------------------------------------------------


@both
def test_sizes_that_do_not_fit_are_an_error(eqx):
    with pytest.raises(ValueError, match=r"(?s)inconsistent sizes.*size 2.*size 3"):
        eqx.filter_pmap(lambda x, y: x)(MATRIX, jnp.ones(3))
    with pytest.raises(ValueError, match=r"2 devices|partitioned 2 times"):
        eqx.filter_pmap(lambda x: x)(jnp.ones(3))
    for argument in (MATRIX, "text"):
        with pytest.raises(ValueError, match="axis_size"):
            eqx.filter_pmap(lambda x: x, in_axes=None)(argument)


def test_errors_of_the_output_name_the_path():
    with pytest.raises(ValueError, match=r"stacks output\['a'\] along axis 3: .* dimension 2"):
        filter_pmap(lambda x: {"a": x}, out_axes=3)(MATRIX)
    with pytest.raises(TypeError, match=r"output\['a'\] = 's' of type <class 'str'>"):
        filter_pmap(lambda x: {"a": "s"}, out_axes=0)(MATRIX)


@both
def test_options_that_are_refused(eqx):
    for word in ("some", "all-except-first", ("x",)):
        with pytest.raises(ValueError, match="must be one of 'all', 'warn'"):
            eqx.filter_pmap(lambda x: x, donate=word)(MATRIX)
    for name in ("static_broadcasted_argnums", "donate_argnums"):
        with pytest.raises(ValueError, match=name):
            eqx.filter_pmap(lambda x: x, **{name: 0})(MATRIX)
    with pytest.raises(TypeError, match="unexpected keyword argument 'foo'"):
        eqx.filter_pmap(lambda x: x, foo=True)(MATRIX)


def test_what_is_no_function_is_an_error_and_what_it_raises_passes_through():
    def function(x):
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        filter_pmap(function)(MATRIX)
    with pytest.raises(TypeError, match="3 is not a callable object"):
        filter_pmap(3)
