"""What is no state to save, and what a whole checkpoint is not restored into."""

import os

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest

from eqxlike import nn, train


@pytest.fixture
def path(tmp_path):
    return tmp_path / "checkpoint"


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


MISMATCHES = {
    "shape": ({"w": zeros(2)}, {"w": zeros(3)}, r"like\['w'\] is an array of shape \(3,\) and"),
    "dtype": ({"w": zeros(2)}, {"w": zeros(2, dtype=np.int32)}, r"like\['w'\] .* dtype int32, and"),
    "width of dtype": (zeros(2), zeros(2, dtype=np.float16), "dtype float16, and was .* float32"),
    "missing": ({"w": zeros(2)}, {"w": zeros(2), "b": zeros(2)}, r"like\['b'\] is missing in the"),
    "additional": ({"w": zeros(2), "b": zeros(2)}, {"w": zeros(2)}, r"checkpoint has state\['b'\]"),
    "list for tuple": ([zeros(2)], (zeros(2),), "like is tuple, and was list"),
    "None for nothing": ([zeros(2), None], [zeros(2)], r"like\[1\] is no node, and was NoneType"),
    "key for array": (zeros(2, dtype=np.uint32), jr.key(0), "is a PRNG key of threefry2x32 and"),
    "array for key": (jr.key(0), zeros(2, dtype=np.uint32), "was a PRNG key of threefry2x32 and"),
    "key": (jr.split(jr.key(0, impl="rbg"), 1), jr.split(jr.key(0, impl="unsafe_rbg"), 1), "was a"),
    "number": ({"rate": 0.1}, {"rate": 0.2}, r"like\['rate'\] is 0.2, and was 0.1"),
    "bool for number": ([1], [True], r"like\[0\] is True, and was 1"),
    "string": (["a"], ["b"], r"like\[0\] is 'b', and was 'a'"),
    "array for number": ([1.0], [zeros()], r"like\[0\] is an array of shape \(\) .* was 1.0"),
    "function for array": ([zeros()], [jnp.sin], r"like\[0\] is no array, and was an array of"),
    "zero-size": (zeros(0, 3), zeros(3, 0), r"shape \(3, 0\) .* was .* \(0, 3\)"),
    "number for None": ([1], [None], r"state\[0\], which `like` has not"),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_mismatch_is_named_with_its_path(path, name):
    state, like, message = MISMATCHES[name]
    train.save(path, state)
    with pytest.raises(ValueError, match=message) as caught:
        train.restore(path, like)
    assert not isinstance(caught.value, train.CheckpointError)
    assert "is whole, and does not fit `like`" in str(caught.value)
    assert "Build `like` as the state was built" in str(caught.value)


def linear(out=1, optimiser=None, **options):
    model = nn.Linear(2, out, key=jr.key(0), **options)
    return train.TrainState.create(model, optimiser or optax.adam(1), key=jr.key(1))


MODELS = {
    "size": (linear(3), r"like.model.weight is .*\(3, 2\).* and was .*\(1, 2\)"),
    "no bias": (linear(use_bias=False), r"has state.model.bias, which"),
    "optimiser": (linear(optimiser=optax.sgd(1)), r"has state.optimiser_state\[0\].count"),
    "optimiser of other type": (linear(optimiser=optax.amsgrad(1)), "ScaleByAmsgradState|nu_max"),
}


@pytest.mark.parametrize("name", MODELS)
def test_other_model_or_optimiser_is_refused(path, name):
    like, message = MODELS[name]
    train.save(path, linear())
    with pytest.raises(ValueError, match=message):
        train.restore(path, like)


def test_static_field_of_a_module_is_compared(path):
    make = lambda size: nn.LayerNorm(2, eps=size)
    train.save(path, make(1e-5))
    with pytest.raises(ValueError, match=r"like is LayerNorm\(.*eps=0.1.* was .*eps=1e-05"):
        train.restore(path, make(0.1))


def test_all_mismatches_are_named_at_once(path):
    train.save(path, [zeros(2)] * 12)
    with pytest.raises(ValueError, match=r"like\[0\] .*like\[7\] .*; and 4 more\."):
        train.restore(path, [zeros(3)] * 12)


def test_mismatch_is_found_before_a_byte_of_the_arrays_is_read(path):
    train.save(path, zeros(2))
    for file in path.glob("arrays-*/*/*"):
        file.unlink()
    with pytest.raises(ValueError, match="does not fit") as caught:
        train.restore(path, zeros(3))
    assert not isinstance(caught.value, train.CheckpointError)


def test_number_of_64_bits_for_jax_needs_its_flag(path):
    train.save(path, zeros(2, dtype=np.float64))
    with pytest.raises(ValueError, match="jax_enable_x64"):
        train.restore(path, jax.ShapeDtypeStruct((2,), np.float64))


NO_STATES = {
    "objects": (np.array([None]), TypeError, r"state\['x'\] is an array of dtype object"),
    "strings": (np.array(["a"]), TypeError, "dtype <U1"),
    "dates": (np.array(["2020"], "M8[Y]"), TypeError, "dtype datetime64"),
    "records": (np.zeros(1, [("a", int)]), TypeError, "numbers and bools alone"),
    "widest float": (np.zeros(1, np.longdouble), TypeError, "numbers and bools alone"),
    "mask": (np.ma.zeros(2), TypeError, r"no masks, and state\['x'\] is a masked array"),
    "reference": (jax.new_ref(jnp.ones(2)), TypeError, r"state\['x'\] is a jax.Ref"),
}


@pytest.mark.parametrize("name", NO_STATES)
def test_what_cannot_be_written_is_named(path, name):
    leaf, error, message = NO_STATES[name]
    with pytest.raises(error, match=message):
        train.save(path, {"x": leaf})
    assert not path.exists()


def test_traced_array_is_refused(path):
    with pytest.raises(TypeError, match=r"state\['x'\], and got one that is being traced"):
        jax.jit(lambda x: train.save(path, {"x": x}))(jnp.ones(2))


def test_donated_array_is_refused(path):
    x = jnp.ones(2)
    x.delete()
    with pytest.raises(RuntimeError, match=r"deleted: state\['x'\]"):
        train.save(path, {"x": x})


NO_DATA = {
    "tuple": ({"a": [(1,)]}, r"got tuple at data\['a'\]\[0\]: make it a list"),
    "key": ({1: 2}, "strings as keys of `data`, and got 1"),
    "array": ([np.zeros(1)], r"got ndarray at data\[0\]. Arrays belong in `state`"),
    "set": (set(), "got set at data"),
}


@pytest.mark.parametrize("name", NO_DATA)
def test_data_that_json_would_change_is_refused(path, name):
    data, message = NO_DATA[name]
    with pytest.raises(TypeError, match=message):
        train.save(path, (), data)


def test_what_is_no_checkpoint_is_not_overwritten(path):
    path.mkdir()
    (path / "thesis.tex").write_text("years")
    with pytest.raises(FileExistsError, match=r"something else than a checkpoint .*checkpoint'"):
        train.save(path, zeros(1))
    assert os.listdir(path) == ["thesis.tex"]
    assert os.listdir(path.parent) == ["checkpoint"]


def test_file_is_not_overwritten(path):
    path.write_text("years")
    with pytest.raises(FileExistsError, match="something else"):
        train.save(path, zeros(1))


def test_no_checkpoint_is_said(path):
    with pytest.raises(FileNotFoundError, match=f"There is no checkpoint at {path}"):
        train.restore(path, ())
