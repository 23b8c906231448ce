"""Calls of exported programs share compiled programs and refuse wrong arguments."""

import collections
import concurrent.futures
import copy
import functools
import pickle
import weakref

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import eqxlike as eqx
from eqxlike import nn
from eqxlike._export._exported import _MAX_PROGRAMS

X, Y = jnp.ones((3, 2)), jnp.ones(3)


def _linear(x):
    return 2 * x + 1


def test_warm_call_compares_nothing_again(monkeypatch):
    model, x = nn.MLP(2, 3, width_size=4, depth=1, key=jax.random.key(0)), jnp.ones((5, 2))
    exported = eqx.export(lambda model, x: jax.vmap(model)(x), model, x)
    expected = exported.call(model, x)
    for name in ("as_given", "arrays_in", "build"):
        monkeypatch.delattr(f"eqxlike._export._exported.{name}")
    other = jax.tree.map(lambda leaf: 1 * leaf if eqx.is_array(leaf) else leaf, model)
    np.testing.assert_array_equal(exported.call(other, x), expected)


@pytest.mark.parametrize("vjp_order", [0, 1])
@pytest.mark.parametrize("is_called", [False, True])
def test_program_is_freed_without_garbage_collection(vjp_order, is_called):
    exported = eqx.export(_linear, X, vjp_order=vjp_order)
    if is_called:
        exported.call(X)
    reference = weakref.ref(exported)
    del exported
    assert reference() is None


def test_copied_and_pickled_programs_compute_the_same():
    model = nn.Linear(2, 2, key=jax.random.key(0))
    exported = eqx.export(lambda model, tree: (model, tree), model, {1: X, -2: (0.5, None)})
    exported.call(model, {1: X, -2: (0.5, None)})
    for copied in (copy.deepcopy(exported), pickle.loads(pickle.dumps(exported))):
        output, tree = copied.call(model, {-2: (0.5, None), 1: X})
        np.testing.assert_array_equal(output["weight"], model.weight)
        assert tree[-2] == (0.5, None)


def _scaled(model, scale, x):
    return scale * model(x)


def test_wrong_arguments_are_refused_after_right_ones():
    def linear(out, **options):
        return nn.Linear(2, out, key=jax.random.key(0), **options)

    model = linear(3)
    exported = eqx.export(_scaled, model, 1.0, jnp.ones(2), dynamic=())
    calls = [(model, 1.0, X[0])] * 2
    assert [exported.call(*each).shape for each in calls] == [(3,)] * 2
    for wrong, message in [
        ((model, 1, X[0]), "scale must be 1.0"),
        ((model, -1.0, X[0]), "scale must be 1.0"),
        ((model, 1.0, Y), r"x must be float32\[2\]; it is float32\[3\]"),
        ((linear(3, use_bias=False), 1.0, X[0]), "model.use_bias must be"),
        ((linear(4), 1.0, X[0]), "model.out_features must be 3"),
    ]:
        for _ in range(2):
            with pytest.raises((TypeError, ValueError), match=message):
                exported.call(*wrong)
    np.testing.assert_allclose(exported.call(*calls[0]), model(X[0]), rtol=1e-6)


def test_negative_zero_and_equal_numbers_are_distinguished():
    exported = eqx.export(lambda x: jnp.array([jnp.sign(1 / x), x]), jnp.ones(()), dynamic=())
    for number in (0.0, -0.0, 0, 2.5, np.float32(3), -0.0, 0.0):
        expected = [np.copysign(1, number), number]
        np.testing.assert_array_equal(exported.call(number), expected)


def test_arguments_may_be_passed_by_name():
    exported = eqx.export(lambda x, y: x - y, jnp.ones(2), jnp.ones(2))
    for found in (exported.call(x=X[0], y=3 * X[0]), exported.call(X[0], y=3 * X[0])):
        np.testing.assert_array_equal(found, [-2, -2])
    for args, kwargs, came in [
        ((), {"x": X[0]}, "x"),
        ((X[0], X[0]), {"x": X[0]}, "x, y, x"),
        ((X[0],), {"z": X[0]}, "x, z"),
        ((X[0],), {"x": X[0]}, "x, x"),
    ]:
        with pytest.raises(TypeError, match=rf"takes \(x: .*\); it got \({came}\)\."):
            exported.call(*args, **kwargs)


def test_error_of_a_mapped_program_names_the_function_to_export():
    exported = eqx.export(lambda x: 2 * x, jnp.ones(2))
    with pytest.raises(NotImplementedError) as caught:
        jax.vmap(exported.call)(X)
    assert "export a function of batches" in "".join(caught.value.__notes__)
    exported = eqx.export(_linear, Y, vjp_order=1)
    with pytest.raises(TypeError, match="forward-mode") as caught:
        jax.jvp(exported.call, (Y,), (Y,))
    notes = "".join(caught.value.__notes__)
    assert "`vjp_order=1`. For forward mode, export the derivative" in notes


def _num_by_way(exported):
    """How many programs are compiled for calls with trees, and for calls with flat arrays."""
    return len(exported._runner._call_trees.traces), len(exported._runner._call_arrays.traces)


def test_numbers_and_arrays_share_one_program():
    exported = eqx.export(lambda x, rates: x * rates["a"], jnp.ones(()), {"a": jnp.ones(())})
    for x in range(1, 5):
        for rate in (x / 2, jnp.float32(2)):
            assert float(exported.call(x, {"a": rate})) == x * rate
    assert sum(_num_by_way(exported)) == 1
    for number in (2.0, np.float64(2)):
        exported = eqx.export(lambda x, n: x * n, Y, jnp.ones(()))
        for factor in (number, 2 * number, np.float32(6)):
            np.testing.assert_array_equal(exported.call(Y, factor), factor * Y)
        assert sum(_num_by_way(exported)) == 1


def test_float64_of_numpy_is_a_number_if_x64_is_enabled():
    exported = eqx.export(lambda x, n: x * n, Y, jnp.ones(()))
    with jax.enable_x64(True):
        for factor in (np.float64(2), np.float64(4)):
            assert float(exported.call(Y, factor)[0]) == factor
    # No call flattens its arguments, which would cause a second trace.
    assert _num_by_way(exported) == (1, 0)


def test_number_in_a_tree_slows_only_a_few_later_calls(monkeypatch):
    exported = eqx.export(lambda x, rates: x * rates["a"], jnp.ones(()), {"a": jnp.ones(())})
    monkeypatch.setattr("eqxlike._export._exported._NUM_FLAT_CALLS", 3)
    exported.call(Y[0], {"a": 2.0})
    for _ in range(5):
        exported.call(Y[0], {"a": Y[0]})
    monkeypatch.delattr("eqxlike._export._exported.arrays_in")
    assert exported.call(Y[0], {"a": Y[0]}) == 1


def test_functions_with_one_name_share_a_bounded_number_of_programs():
    def twin():
        return lambda x: x

    exported = eqx.export(lambda function, x: function(2 * x), twin(), Y)
    for _ in range(10):
        np.testing.assert_array_equal(exported.call(twin(), Y), 2 * Y)
    # Deleting a function deletes its trace.
    assert _num_by_way(exported)[1] == 1
    assert list(exported._runner._num_programs.values()) == [_MAX_PROGRAMS]


def test_retraces_are_reported_and_may_be_refused(capsys):
    def refuse(trace):
        raise LookupError(trace.number)

    exported = eqx.export(_linear, _floats("n"))
    with eqx.debug.explain_retraces() as retraces:
        for size in (2, 3):
            exported.call(jnp.ones(size))
    assert [each.differences[0].path for each in retraces] == ["x"]
    assert capsys.readouterr().out.startswith("`_linear` is traced and compiled again (trace 2).")
    before = _num_by_way(exported)
    for on_retrace, error in [("error", eqx.debug.RetraceError), (refuse, LookupError)]:
        with eqx.debug.explain_retraces(on_retrace), pytest.raises(error):
            exported.call(jnp.ones(4))
    assert _num_by_way(exported) == before == (2, 0)


def test_first_call_of_a_program_with_a_number_is_no_retrace():
    with eqx.debug.explain_retraces("error"):
        for _ in range(2):
            exported = eqx.export(lambda x, n: x * n, Y, jnp.ones(()))
            np.testing.assert_array_equal(exported.call(Y, 2.0), 2 * Y)


def test_wrong_size_of_an_expression_is_named_by_path():
    def summed(x, tree):
        return x + tree["b"][: x.shape[0]]

    exported = eqx.export(summed, _floats("n"), {"b": _floats("2*n")})
    assert exported.call(Y, {"b": jnp.ones(6)}).shape == (3,)
    for size in (0, 7):
        words = rf"tree\['b'\] must be float32\[2\*n\] and is float32\[{size}\]. A named axis may"
        with pytest.raises(ValueError, match=words):
            exported.call(Y, {"b": jnp.ones(size)})


def _floats(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def test_order_of_keys_in_a_dict_does_not_matter():
    exported = eqx.export(lambda tree: {"z": tree["b"], "a": tree["a"]}, {"b": X, "a": Y})
    for given in ({"b": X, "a": 2 * Y}, {"a": 2 * Y, "b": X}):
        found = exported.call(given)
        np.testing.assert_array_equal(found["z"], X)
        np.testing.assert_array_equal(found["a"], 2 * Y)


def test_plain_tuple_stands_for_a_named_tuple():
    pair = collections.namedtuple("pair", "b a")
    exported = eqx.export(lambda pair: pair.b - pair.a, pair(X, 2 * X))
    for given in (pair(X, 2 * X), (X, 2 * X)):
        np.testing.assert_array_equal(exported.call(given), -X)
    with pytest.raises(TypeError, match="pair"):
        exported.call((X, X, X))


class _Labelled(eqx.Module):
    x: jax.Array
    labels: list = eqx.field(static=True)


def test_change_of_a_static_list_in_place_is_refused():
    labelled = _Labelled(Y, ["a"])
    exported = eqx.export(lambda labelled: labelled.x, labelled)
    for _ in range(2):
        exported.call(labelled)
    labelled.labels.append("b")
    with pytest.raises(ValueError, match=r"labelled.labels must be \['a'\], the static value"):
        exported.call(labelled)


class Scale:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, x):
        return x * self.factor


def test_function_with_other_attributes_is_refused():
    long = np.zeros(3000)
    interpolate, clip = functools.partial(jnp.interp, xp=long), functools.partial(jnp.clip)
    for given, changed in [
        (Scale(2.0), Scale(3.0)),
        (Scale(2.0).__call__, Scale(3.0).__call__),
        (functools.partial(interpolate, fp=long), functools.partial(interpolate, fp=long + 1e-12)),
        (functools.partial(clip, min=1), functools.partial(clip, min=2)),
    ]:
        exported = eqx.export(lambda function, x: function(x), given, X)
        np.testing.assert_array_equal(exported.call(given, X), given(X))
        with pytest.raises(ValueError, match=r"function must be .*, the static value"):
            exported.call(changed, X)
    with pytest.raises(ValueError, match=r"\(None, 3\)"):
        eqx.export(lambda x: x, jax.ShapeDtypeStruct((None, 3), float))


def test_threads_may_call_one_program():
    exported = eqx.export(lambda x, n: x + n, jnp.ones(2), jnp.ones(()))
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda n: exported.call(X[0], float(n)), range(200)))
    np.testing.assert_array_equal(found, [[n + 1, n + 1] for n in range(200)])


GOOD = {"a": X, "b": (Y, "mean")}


def test_error_names_the_wrong_argument():
    taking = eqx.export(lambda tree, function, x: x, GOOD, jnp.tanh, Y)
    for args, error, message in [
        ((GOOD,), TypeError, r"takes 3 arguments, \(tree: .*; it got 1"),
        ((GOOD, jnp.tanh, [1.0]), TypeError, r"x must be float32\[batch\]; it is of type list"),
        ((GOOD, jnp.tanh, X), ValueError, r"x must be float32\[batch\]; it is float32\[3, 2\]"),
        ((GOOD, jnp.tanh, jnp.ones(3, int)), TypeError, r"x must be .*; it is int32\[3\]"),
        ((GOOD, jnp.sin, Y), ValueError, "function must be <tanh>, the static value"),
        ((Y, jnp.tanh, Y), TypeError, r"tree must be {'a': .*}; it is float32\[3\]"),
        (({"a": X}, jnp.tanh, Y), TypeError, r"tree\['b'\] is missing"),
        (({**GOOD, "c": 1}, jnp.tanh, Y), TypeError, r"tree\['c'\] is unexpected"),
        (({"a": X, "b": (Y, 1)}, jnp.tanh, Y), ValueError, r"tree\['b'\]\[1\] must be 'mean'"),
        (({**GOOD, "a": X[:2]}, jnp.tanh, Y), ValueError, "but batch is 2 in an earlier array"),
        (({**GOOD, "a": X[:0]}, jnp.tanh, Y), ValueError, r"at least 1; it is float32\[0, 2\]"),
    ]:
        with pytest.raises(error, match=message):
            taking.call(*args)
    exported = eqx.export(lambda x, n: x * n, jnp.ones(2), 1)
    with pytest.raises(ValueError, match=r"n must be 1, the static value .*; it is True"):
        exported.call(jnp.ones(2), True)


def test_number_that_is_too_large_is_refused():
    bounds = [("int4", 100), ("uint8", 300), ("int32", 2**40), ("uint8", -1), ("float32", 10**400)]
    for dtype, number in bounds:
        exported = eqx.export(lambda x: x, jnp.zeros((), dtype))
        assert exported.call(3) == 3
        with pytest.raises(TypeError, match=rf"x must be {dtype}\[\]; it is {number}"):
            exported.call(number)
