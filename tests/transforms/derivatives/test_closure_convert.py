"""`filter_closure_convert` and `filter_checkpoint`."""

import jax
import jax.numpy as jnp
import numpy as np

import eqxlike
from eqxlike import filter_checkpoint, filter_closure_convert, filter_grad, filter_jit
from tests.transforms.models import Scale

TWO, THREE = jnp.float32(2), jnp.float32(3)


def scaling_by(factor):
    return lambda x: factor * x


# --- filter_closure_convert ---


def test_closed_over_tracers_are_consts():
    def function(z):
        converted = filter_closure_convert(scaling_by(z), TWO)
        assert [each is z for each in converted.consts] == [True]
        return converted(TWO)

    assert jax.grad(function)(THREE) == 2


def test_closed_over_arrays_are_consts_and_leaves():
    for factor in (THREE, jnp.int32(3)):
        converted = filter_closure_convert(scaling_by(factor), factor)
        assert (converted.consts, converted(factor)) == ([factor], 9)
        assert jax.tree.leaves(converted) == [converted.jaxpr, factor]
    assert filter_closure_convert(Scale(THREE), TWO).consts == [THREE]
    doubled = jax.tree.map(lambda leaf: leaf * 2 if eqxlike.is_array(leaf) else leaf, converted)
    assert doubled(factor) == 18


def test_converted_closure_passes_into_and_out_of_transformations():
    converted = filter_jit(lambda factor: filter_closure_convert(scaling_by(factor), TWO))(THREE)
    assert converted(TWO) == 6
    assert filter_jit(lambda function, x: function(x))(converted, TWO) == 6
    assert filter_grad(lambda function: function(TWO))(converted).consts == [2]
    square = filter_closure_convert(lambda x: THREE * x**2, TWO)
    assert jax.vmap(jax.grad(square))(jnp.arange(3.0)).tolist() == [0, 6, 12]


def test_function_is_traced_once_and_never_run():
    seen = []
    converted = filter_closure_convert(lambda x: seen.append(x) or x, TWO)
    assert (converted(TWO), converted(THREE)) == (2, 3)
    assert [isinstance(each, jax.core.Tracer) for each in seen] == [True]


def test_example_and_call_may_have_structs_numpy_arrays_and_equal_static_values():
    struct = jax.ShapeDtypeStruct((2,), jnp.float32)
    assert filter_closure_convert(scaling_by(THREE), struct)(jnp.ones(2)).tolist() == [3, 3]
    converted = filter_closure_convert(lambda x, text: (THREE * x, text), TWO, "long text")
    for x in (np.float32(2), np.array(2, np.float32)):
        assert converted(x, "".join(["long ", "text"])) == (6, "long text")


def labelled(factor, label="label"):
    return lambda x, y: ({"sum": factor * x + y}, label)


def test_treedefs_are_equal_if_only_jaxpr_and_consts_differ():
    first = jax.tree.structure(filter_closure_convert(labelled(THREE), TWO, y=2.0))
    for factor, label, y, is_same in [
        (TWO, "label", 2.0, True),
        (TWO, "other", 2.0, False),
        (TWO, "label", TWO, False),
    ]:
        second = jax.tree.structure(filter_closure_convert(labelled(factor, label), TWO, y=y))
        assert (first == second) is is_same
        assert not is_same or hash(first) == hash(second)


def test_converted_closure_has_the_structs_of_example_and_output():
    converted = filter_closure_convert(labelled(jnp.ones(2)), TWO, y=2.0)
    (x,), kwargs = converted.in_struct
    total, label = converted.out_struct
    assert ((x.shape, x.dtype), kwargs, label) == (((), jnp.float32), {"y": 2.0}, "label")
    assert (total["sum"].shape, total["sum"].dtype) == ((2,), jnp.float32)


# --- filter_checkpoint ---


def sine(x, label="s"):
    return jnp.sin(jnp.sin(x)), label


def test_checkpointed_function_takes_and_returns_any_leaves():
    def function(x, activation, *, power, names):
        return activation(x) ** power, {"names": names, "x": x, "function": activation}

    args, kwargs = (TWO, jnp.abs), {"power": 2, "names": ("a", None)}
    checkpointed = filter_checkpoint(function)
    with jax.checking_leaks():
        assert checkpointed(*args, **kwargs) == function(*args, **kwargs)
    seen = []
    leaves = [2.5, 2, True, "s", None, len, TWO, np.float32(2), jnp.int32(2)]
    filter_checkpoint(seen.extend)(leaves)
    assert all(leaf is each for leaf, each in zip(leaves[:6], seen[:6], strict=True))
    assert all(isinstance(each, jax.core.Tracer) for each in seen[6:])


def test_checkpoint_passes_its_options_to_jax():
    policy = jax.checkpoint_policies.dots_saveable
    for prevent_cse in (True, False):
        options = {"prevent_cse": prevent_cse, "policy": policy}
        for function in (filter_checkpoint(sine, **options), filter_checkpoint(**options)(sine)):
            (equation,) = jax.make_jaxpr(lambda x: function(x)[0])(TWO).eqns  # noqa: B023
            assert {name: equation.params[name] for name in options} == options
    (equation,) = jax.make_jaxpr(lambda x: filter_checkpoint(sine)(x)[0])(TWO).eqns
    assert (equation.params["prevent_cse"], equation.params["policy"]) == (True, None)
