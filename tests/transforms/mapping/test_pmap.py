"""Where a test takes `eqx`, the same program holds on Equinox, whose behaviour is the measure."""

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


@both
def test_shows_what_it_wraps(eqx):
    def function(x, y: int = 3):
        """Does."""

    mapped = eqx.filter_pmap(function)
    assert (mapped.__name__, mapped.__doc__) == ("function", "Does.")
    assert inspect.signature(mapped) == inspect.signature(function)
    assert mapped.__wrapped__ is function


def test_repr_names_the_function():
    assert repr(filter_pmap(max)) == f"filter_pmap({max!r})"


@both
def test_is_a_decorator_with_arguments(eqx):
    @eqx.filter_pmap(axis_name="i")
    def mean(x):
        return jax.lax.pmean(x, "i")

    assert mean(MATRIX).tolist() == [[1.5, 2.5, 3.5]] * 2


@both
def test_methods_are_mapped(eqx):
    class Model(eqx.Module):
        weight: Any

        @eqx.filter_pmap
        def each(self, x):
            return self.weight * x

        @eqx.filter_pmap(in_axes=(None, 0))
        def shared(self, x):
            return self.weight.sum() * x

    model, x = Model(jnp.arange(2.0)), jnp.ones(2)
    assert [model.each(x).tolist(), model.shared(x).tolist()] == [[0, 1], [1, 1]]


@both
def test_the_arrays_of_the_function_itself_go_to_all_devices(eqx):
    class Model(eqx.Module):
        weight: Any

        def __call__(self, x):
            return self.weight.sum() * x

    assert eqx.filter_pmap(Model(jnp.ones(5)))(jnp.arange(2.0)).tolist() == [0, 5]


def test_the_arrays_of_the_function_itself_are_no_constants():
    class Model(eqxlike.Module):
        weight: Any

        def __call__(self, x):
            traces.append(self.weight)
            return self.weight * x

    traces = []
    for factor in (2.0, 3.0):
        scaled = filter_pmap(Model(jnp.array(factor)))(jnp.ones(2))
        assert scaled.tolist() == [factor] * 2
    assert len(traces) == 1


# --- arguments and outputs ---------------------------------------------------------------------


@both
def test_each_device_has_one_index(eqx):
    doubled, text, number = eqx.filter_pmap(lambda x, s, n: (n * x, s, n))(MATRIX, "s", 2.0)
    assert (doubled.tolist(), text, number) == ((2 * MATRIX).tolist(), "s", 2.0)
    assert [shard.data.shape for shard in doubled.addressable_shards] == [(1, 3)] * 2


@both
def test_axes_may_be_a_prefix_with_functions(eqx):
    function = eqx.filter_pmap(
        lambda tree, y: tree["a"] * tree["b"] + y,
        in_axes=({"a": 1, "b": None}, lambda leaf: 0 if leaf.ndim else None),
    )
    scaled = function({"a": MATRIX.T, "b": jnp.ones(3)}, jnp.ones(()))
    assert scaled.shape == (2, 3)


@both
def test_axes_may_be_given_by_name(eqx):
    scaled = eqx.filter_pmap(lambda x, y: x.sum() * y.sum(), in_axes={"y": None})
    assert scaled(MATRIX, jnp.ones(3)).tolist() == [9, 36]


@both
def test_what_is_no_array_is_passed_on_whatever_its_axis(eqx):
    text, number = eqx.filter_pmap(lambda x, s, n: (s, n), in_axes=0)(MATRIX, "s", 2.0)
    assert (text, number) == ("s", 2.0)


def test_axes_may_be_counted_from_the_end():
    swapped = filter_pmap(lambda x: x, in_axes=-1, out_axes=-1)(MATRIX.T)
    assert swapped.tolist() == MATRIX.T.tolist()


@both
def test_out_axes_say_where_the_axis_goes(eqx):
    output = eqx.filter_pmap(lambda x: (x, x, 3, "s"), out_axes=(1, 0, 0, eqx.if_array(0)))(MATRIX)
    shapes = [np.shape(leaf) for leaf in output[:3]]
    assert (shapes, output[3]) == ([(3, 2), (2, 3), (2,)], "s")


@both
def test_an_output_without_axis_is_that_of_the_first_device(eqx):
    total, first = eqx.filter_pmap(
        lambda x: (jax.lax.psum(x, "i"), x), axis_name="i", out_axes=None
    )(MATRIX)
    assert (total.tolist(), first.tolist()) == ([3, 5, 7], [0, 1, 2])


def test_axis_size_serves_where_nothing_is_mapped():
    constant = filter_pmap(lambda x: x, in_axes=None, axis_size=2)(jnp.array(2.0))
    assert constant.tolist() == [2, 2]


@both
def test_arrays_and_keys_of_numpy_and_jax_are_mapped(eqx):
    keys = jax.random.split(jax.random.key(0), 2)
    function = eqx.filter_pmap(lambda key, x: (jax.random.key_data(key), x + 1))
    data, x = function(keys, np.zeros(2, np.float32))
    assert (data.tolist(), x.tolist()) == (jax.random.key_data(keys).tolist(), [1, 1])


@both
def test_making_modules_gives_an_ensemble(eqx):
    class Model(eqx.Module):
        weight: Any
        name: str = eqx.field(static=True)

        def __call__(self, x):
            return self.weight * x

    models = eqx.filter_pmap(lambda x: Model(x, "n"))(jnp.arange(2.0))
    scaled = eqx.filter_pmap(lambda model, x: model(x), in_axes=(eqx.if_array(0), None))
    assert (models.name, scaled(models, jnp.array(3.0)).tolist()) == ("n", [0, 3])


@both
def test_a_default_argument_is_not_mapped(eqx):
    factors = jnp.ones(5)
    scaled = eqx.filter_pmap(lambda x, y=factors: x * y.sum())(jnp.arange(2.0))
    assert scaled.tolist() == [0, 5]


@both
def test_devices_are_those_given(eqx):
    device = jax.devices()[1]
    assert eqx.filter_pmap(lambda x: x, devices=[device])(MATRIX[:1]).devices() == {device}


# --- compiling ----------------------------------------------------------------------------------


def test_traces_once_for_each_structure_and_static():
    traces = []

    def function(x, s):
        traces.append(s)
        return x

    for static in ("a", "b", "a"):
        filter_pmap(function)(MATRIX, static)
    assert traces == ["a", "b"]


@both
def test_lowered_is_compiled_and_called(eqx):
    compiled = eqx.filter_pmap(lambda x, s: (2 * x, s)).lower(MATRIX, "s").compile()
    doubled, text = compiled(MATRIX, "s")
    assert (doubled.tolist(), text) == ((2 * MATRIX).tolist(), "s")


@both
def test_donates_all(eqx):
    increment = eqx.filter_pmap(lambda x: x + 1, donate="all")
    once = increment(MATRIX)
    twice = increment(once)
    assert (once.is_deleted(), twice.tolist()) == (True, (MATRIX + 2).tolist())


@pytest.mark.parametrize("word", ["all", "warn", "none"])
def test_a_buffer_that_was_not_usable_is_no_error(word):
    assert filter_pmap(lambda x: x.sum(), donate=word)(MATRIX).tolist() == [3, 12]


# --- composition --------------------------------------------------------------------------------


@both
def test_gradients_inside_and_outside(eqx):
    def gradient(weight, x):
        return jax.lax.psum(eqx.filter_grad(lambda w: (w * x).sum())(weight), "i")

    inside = eqx.filter_pmap(gradient, axis_name="i", in_axes=(None, 0), out_axes=None)
    scaled = eqx.filter_pmap(lambda w, x: w * x, in_axes=(None, 0))
    outside = eqx.filter_grad(lambda weight: scaled(weight, MATRIX).sum())
    weight = jnp.ones(3)
    assert inside(weight, MATRIX).tolist() == outside(weight).tolist() == [3, 5, 7]


@both
def test_under_filter_jit_and_filter_vmap(eqx):
    mapped = eqx.filter_pmap(lambda x, s: (2 * x, s))
    doubled, text = eqx.filter_jit(lambda x: mapped(x, "s"))(MATRIX)
    assert (doubled.tolist(), text) == ((2 * MATRIX).tolist(), "s")
    over_columns = eqx.filter_vmap(lambda x: mapped(x, "s")[0], in_axes=1, out_axes=1)
    assert over_columns(MATRIX).tolist() == (2 * MATRIX).tolist()


@both
def test_runs_where_jit_is_disabled(eqx):
    with jax.disable_jit():
        assert eqx.filter_pmap(lambda x: x + 1)(MATRIX).tolist() == (MATRIX + 1).tolist()


def test_leaks_no_tracers():
    class Model(eqxlike.Module):
        weight: Any

        def __call__(self, x, text):
            return self.weight * x, text

    with jax.checking_leaks():
        output = filter_pmap(Model(jnp.ones(2)))(jnp.arange(2.0), "s")
    assert (output[0].tolist(), output[1]) == ([[0, 0], [1, 1]], "s")


@both
def test_shape_is_evaluated(eqx):
    struct = jax.ShapeDtypeStruct((2, 3), jnp.float32)
    output, text = eqx.filter_eval_shape(eqx.filter_pmap(lambda x, s: (x, s)), struct, "s")
    assert (output.shape, text) == ((2, 3), "s")


# --- errors -------------------------------------------------------------------------------------


@both
def test_keyword_arguments_are_refused(eqx):
    with pytest.raises(RuntimeError, match="keyword arguments cannot be used"):
        eqx.filter_pmap(lambda x, y: x)(MATRIX, y=MATRIX)


def test_keyword_arguments_are_refused_where_it_is_lowered():
    with pytest.raises(RuntimeError, match="keyword arguments cannot be used"):
        filter_pmap(lambda x, y: x).lower(MATRIX, y=MATRIX)


@both
def test_different_sizes_are_an_error_that_names_both(eqx):
    with pytest.raises(ValueError, match=r"(?s)inconsistent sizes.*size 2.*size 3"):
        eqx.filter_pmap(lambda x, y: x)(MATRIX, jnp.ones(3))


@both
def test_more_indices_than_devices_are_an_error(eqx):
    with pytest.raises(ValueError, match=r"2 devices|partitioned 2 times"):
        eqx.filter_pmap(lambda x: x)(jnp.ones(3))


def test_more_indices_than_devices_given_are_an_error_that_names_both():
    message = "axes of size 2, one index to a device, and there are 1 devices"
    with pytest.raises(ValueError, match=message):
        filter_pmap(lambda x: x, devices=jax.devices()[:1])(MATRIX)


@both
@pytest.mark.parametrize("arguments", [(MATRIX,), ("text",)], ids=["array", "static"])
def test_mapping_nothing_is_an_error(eqx, arguments):
    with pytest.raises(ValueError, match="axis_size"):
        eqx.filter_pmap(lambda x: x, in_axes=None)(*arguments)


def test_an_out_axis_out_of_bounds_is_an_error_that_names_the_path():
    with pytest.raises(ValueError, match=r"stacks output\['a'\] along axis 3: .* dimension 2"):
        filter_pmap(lambda x: {"a": x}, out_axes=3)(MATRIX)


def test_stacking_what_is_no_array_is_an_error_that_names_the_path():
    with pytest.raises(TypeError, match=r"output\['a'\] = 's' of type <class 'str'>"):
        filter_pmap(lambda x: {"a": "s"}, out_axes=0)(MATRIX)


@both
@pytest.mark.parametrize("word", ["some", "all-except-first", ("x",)], ids=str)
def test_another_word_for_donation_is_an_error(eqx, word):
    with pytest.raises(ValueError, match="must be one of 'all', 'warn'"):
        eqx.filter_pmap(lambda x: x, donate=word)(MATRIX)


@both
@pytest.mark.parametrize("name", ["static_broadcasted_argnums", "donate_argnums"])
def test_numbers_of_arguments_are_refused(eqx, name):
    with pytest.raises(ValueError, match=name):
        eqx.filter_pmap(lambda x: x, **{name: 0})(MATRIX)


@both
def test_an_unknown_option_is_an_error_that_names_it(eqx):
    with pytest.raises(TypeError, match="unexpected keyword argument 'foo'"):
        eqx.filter_pmap(lambda x: x, foo=True)(MATRIX)


@both
def test_what_the_function_raises_passes_through(eqx):
    def function(x):
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        eqx.filter_pmap(function)(MATRIX)


def test_what_is_no_function_is_an_error():
    with pytest.raises(TypeError, match="3 is not a callable object"):
        filter_pmap(3)
